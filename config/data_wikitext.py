# WikiText-103 (Merity et al. 2016): one document per article, joined from the hub's rows, which are lines
# $ python prepare_data.py config/data_wikitext.py
# Expect a download of 0.3 GB and about 28,000 documents, 540 MB of text
corpus = 'wikitext'
vocab_size = 8192
