# English OSCAR 23.01 (huggingface.co/datasets/oscar-corpus/OSCAR-2301), filtered as in Courtois et al. 2024:
# 30M documents. FOLDER has en_meta_*.jsonl.zst, for which you ask for access on the hub
# $ python prepare_data.py config/data/oscar.py --path=FOLDER
# Expect a count of the documents left out, and 10,000 documents held out. results/reproduce.md lists our own
# choices
corpus = 'oscar'
tokenizer = 'wordpiece'
max_documents = 30_000_000
val_fraction = 10_000 / max_documents
