# BooksCorpus (Zhu et al. 2015), a mirror: 74M single sentences, every 256 in a row joined to a document
# $ python prepare_data.py config/data/books.py
# Expect 290,000 documents, 5 GB of lower-cased text to download (7 minutes at 100 Mbit/s), 2.4 GB on disk and
# 1.3 hours on one core, as the hub has one file, which is one unit (estimates, see results/running.md).
# To begin with less, add --max_documents=100000, or take config/data/wikitext.py (0.3 GB, minutes)
corpus = 'books'
tokenizer = 'wordpiece'
