# English Wikipedia of November 2023 with BERT's own vocabulary
# $ python prepare_data.py config/data/wikipedia.py
# Expect 6.4M documents, 10,000 of them held out, 12 GB to download (16 minutes at 100 Mbit/s), 9 GB on disk
# and 5 hours on one core, 0.6 on eight (estimates, see results/running.md). To begin with less, add
# --max_documents=1000000, or take config/data/wikitext.py (0.3 GB, minutes)
corpus = 'wikipedia'
tokenizer = 'wordpiece'
val_fraction = 0.0016
