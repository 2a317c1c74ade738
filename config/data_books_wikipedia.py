# BooksCorpus and Wikipedia with BERT's own vocabulary: the corpus of Kowsher et al. 2024
# $ python prepare_data.py config/data_books_wikipedia.py
# Expect 6.7M documents, 25 GB of text streamed, about 13 GB on disk and twice that while it runs
corpus = 'books+wikipedia'
tokenizer = 'wordpiece'
