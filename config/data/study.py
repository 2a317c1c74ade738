# The corpus of the study: Wikipedia articles and docstrings, which the commands of results/study.md write to
# data/texts
# $ python prepare_data.py config/data/study.py
# Expect 44,069 documents, 29M tokens, 60 MB on disk, a quarter of a minute on two cores
corpus = 'data/texts'
name = 'study'
vocab_size = 8192
