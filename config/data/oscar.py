# English OSCAR 23.01 (huggingface.co/datasets/oscar-corpus/OSCAR-2301), filtered as in Courtois et al. 2024:
# 30M documents. FOLDER has en_meta_*.jsonl.zst; access is granted on the hub
# $ python prepare_data.py config/data/oscar.py --path=FOLDER
# Expect the count of documents left out, and 10,000 held out. What is ours: results/reproduce.md
corpus = 'oscar'
tokenizer = 'wordpiece'
max_documents = 30_000_000
val_fraction = 10_000 / max_documents
