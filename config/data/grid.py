# The corpus of results/grid.md: Wikipedia articles and novels, which `python results/grid.py texts` writes.
# $ python prepare_data.py config/data/grid.py
# Expect 16,531 documents, 44M tokens, 90 MB on disk, half a minute on two cores
corpus = 'data/texts_grid'
name = 'grid'
vocab_size = 8192
