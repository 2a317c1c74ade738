# Ten million documents of English C4 (Raffel et al. 2019), taken from the beginning of each of its 1,024
# files
# $ python prepare_data.py config/data/c4.py
# Expect 10,000 documents held out, 9 GB to download (12 minutes at 100 Mbit/s), 9 GB on disk and 5 hours on
# one core, 0.6 on eight (estimates, see results/running.md). All 365 million (--max_documents=0) take 36
# times as much. To begin with less, take config/data/wikitext.py (0.3 GB, minutes)
corpus = 'c4'
max_documents = 10_000_000
tokenizer = 'wordpiece'
val_fraction = 0.001
