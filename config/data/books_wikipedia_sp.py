# BooksCorpus and Wikipedia, lower-cased, with 32,000 pieces of sentencepiece: the corpus of Tian et al. 2021
# $ python prepare_data.py config/data/books_wikipedia_sp.py
# Expect 6.7M documents, 10,000 of them held out, 16 GB to download (22 minutes at 100 Mbit/s), 12 GB on disk
# and half an hour on one core (estimates, see results/running.md). To begin with less, add
# --max_documents=1000000, or take config/data/wikitext.py (0.3 GB, minutes)
corpus = 'books+wikipedia'
name = 'books_wikipedia_sp'
vocab_size = 32_000
tokenizer_sample = 20_000_000
val_fraction = 0.0015
