# The first ten million documents of English C4 (Raffel et al. 2019); max_documents = 0 reads all 365 million
# $ python prepare_data.py config/data_c4.py
# Expect about 22 GB of text streamed, 10 GB on disk and twice that while it runs
corpus = 'c4'
max_documents = 10_000_000
tokenizer = 'wordpiece'
