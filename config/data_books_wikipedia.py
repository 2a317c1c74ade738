# BooksCorpus and Wikipedia with BERT's own vocabulary: the corpus of Kowsher et al. 2024
# $ python prepare_data.py config/data_books_wikipedia.py
# Expect 6.7M documents, 10,000 of them held out, 25 GB of text streamed, about 13 GB on disk
corpus = 'books+wikipedia'
tokenizer = 'wordpiece'
val_fraction = 0.0015
