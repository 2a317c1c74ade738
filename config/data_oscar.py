# English OSCAR 22.01 or 23.01, filtered as in Courtois et al. 2024 (30M documents, 10,000 for test)
# $ python prepare_data.py config/data_oscar.py --path=<folder of en_meta_*.jsonl.gz or .jsonl.zst>
# Expect the count of documents left out, and the first; oscar-project.org grants access to the files
corpus = 'oscar'
tokenizer = 'wordpiece'
max_documents = 30_000_000
val_fraction = 10_000 / max_documents
