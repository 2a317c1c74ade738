# FineWeb's sample of ten billion tokens (Penedo et al. 2024) with BERT's own vocabulary
# $ python prepare_data.py config/data/fineweb.py
# Expect 15M documents, 10,000 of them held out, 31 GB to download (41 minutes at 100 Mbit/s), 21 GB on disk
# and 12 hours on one core, 1.5 on eight (estimates, see results/running.md). To begin with less, add
# --max_documents=1000000, or take config/data/wikitext.py (0.3 GB, minutes)
corpus = 'fineweb'
tokenizer = 'wordpiece'
val_fraction = 0.00067
