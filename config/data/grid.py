# Wikipedia articles and novels, the corpus of the grid in results/findings.md. To write its texts, run
# `python results/grid.py texts ARTICLES NOVELS` at commit 4529cb8.
# $ python prepare_data.py config/data/grid.py
# Expect 16,531 documents, 44M tokens, 90 MB on disk, half a minute on two cores
corpus = 'data/texts_grid'
name = 'grid'
vocab_size = 8192
