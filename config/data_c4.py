# Ten million documents of English C4 (Raffel et al. 2019): the first ones of each of its 1,024 files
# $ python prepare_data.py config/data_c4.py
# Expect about 22 GB of text streamed, 10 GB on disk, 10,000 documents held out; max_documents = 0 reads all
# 365 million
corpus = 'c4'
max_documents = 10_000_000
tokenizer = 'wordpiece'
val_fraction = 0.001
