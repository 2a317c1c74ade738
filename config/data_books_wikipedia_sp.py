# BooksCorpus and Wikipedia, lower-cased, with 32,000 pieces of sentencepiece: the corpus of Tian et al. 2021
# $ python prepare_data.py config/data_books_wikipedia_sp.py
# Expect sizes as for config/data_books_wikipedia.py; the pieces are trained on text from both corpora
corpus = 'books+wikipedia'
name = 'books_wikipedia_sp'
vocab_size = 32_000
tokenizer_sample = 20_000_000
val_fraction = 0.0015
