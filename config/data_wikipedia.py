# English Wikipedia of November 2023 with BERT's own vocabulary
# $ python prepare_data.py config/data_wikipedia.py
# Expect 6.4M documents, 20 GB of text streamed, about 10 GB on disk and twice that while it runs
corpus = 'wikipedia'
tokenizer = 'wordpiece'
