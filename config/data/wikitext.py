# WikiText-103 (Merity et al. 2016): one document per article. The rows on the hub are lines, which we join
# $ python prepare_data.py config/data/wikitext.py
# Expect 28,000 documents, 0.3 GB to download, 540 MB of text, 0.3 GB on disk and a few minutes on one core.
# To begin with less, take config/data/docstrings.py, which needs no network
corpus = 'wikitext'
vocab_size = 8192
