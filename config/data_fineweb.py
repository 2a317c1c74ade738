# FineWeb's sample of ten billion tokens (Penedo et al. 2024) with a sentencepiece of 32,000 pieces
# $ python prepare_data.py config/data_fineweb.py
# Expect 15M documents, about 45 GB of text streamed, 21 GB on disk and twice that while it runs
corpus = 'fineweb'
vocab_size = 32_000
tokenizer_sample = 20_000_000
