# BooksCorpus (Zhu et al. 2015), a mirror: 74M single sentences, every 256 in a row joined to a document
# $ python prepare_data.py config/data_books.py
# Expect 290,000 documents, 4.9 GB of lower-cased text, about 2.5 GB on disk; each file of the hub is a unit
corpus = 'books'
tokenizer = 'wordpiece'
