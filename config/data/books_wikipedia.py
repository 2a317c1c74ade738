# BooksCorpus and Wikipedia with BERT's own vocabulary: the corpus of Kowsher et al. 2024
# $ python prepare_data.py config/data/books_wikipedia.py
# Expect 6.7M documents, 10,000 of them held out, 16 GB to download (22 minutes at 100 Mbit/s), 12 GB on disk
# and 6.5 hours on one core, 1.3 on eight (estimates, see results/running.md). To begin with less, add
# --max_documents=1000000, or take config/data/wikitext.py (0.3 GB, minutes)
corpus = 'books+wikipedia'
tokenizer = 'wordpiece'
val_fraction = 0.0015
