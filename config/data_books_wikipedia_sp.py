# BooksCorpus and Wikipedia, lower-cased, with 32,000 pieces of sentencepiece: the corpus of Tian et al. 2021
# $ python prepare_data.py config/data_books_wikipedia_sp.py
# Expect what config/data_books_wikipedia.py takes, 6.7M documents and 25 GB of text streamed, and at first
# another 25 GB on disk: the books come first, so that only all of the text gives the pieces a fair sample
corpus = 'books+wikipedia'
name = 'books_wikipedia_sp'
vocab_size = 32_000
tokenizer_sample = 20_000_000
sample_from = 100_000_000_000
