# FineWeb's sample of ten billion tokens (Penedo et al. 2024) with a sentencepiece of 32,000 pieces
# $ python prepare_data.py config/data_fineweb.py
# Expect 15M documents, 10,000 of them held out, about 45 GB of text streamed, 21 GB on disk
corpus = 'fineweb'
vocab_size = 32_000
tokenizer_sample = 20_000_000
val_fraction = 0.00067
