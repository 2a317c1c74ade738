# A mirror of BooksCorpus (Zhu et al. 2015). It has 74M single sentences, of which we join every 256 in a row
# to a document
# $ python prepare_data.py config/data/books.py
# Expect 290,000 documents, 5 GB of lower-cased text to download (7 minutes at 100 Mbit/s), 2.4 GB on disk and
# 1.3 hours on one core; the hub has a single file, so more cores do not help (estimates, see
# results/running.md). To begin with less, add --max_documents=100000, or take config/data/wikitext.py (0.3
# GB, minutes)
corpus = 'books'
tokenizer = 'wordpiece'
