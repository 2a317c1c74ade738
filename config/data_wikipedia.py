# English Wikipedia of November 2023 with BERT's own vocabulary
# $ python prepare_data.py config/data_wikipedia.py
# Expect 6.4M documents, 10,000 of them held out, 20 GB of text streamed, about 10 GB on disk
corpus = 'wikipedia'
tokenizer = 'wordpiece'
val_fraction = 0.0016
