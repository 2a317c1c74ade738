# English OSCAR 23.01 (huggingface.co/datasets/oscar-corpus/OSCAR-2301), filtered as in Courtois et al. 2024:
# 30M documents. 22.01 has neither harmful_pp nor categories: two of the three rules would leave out nothing.
# $ python prepare_data.py config/data/oscar.py --path=FOLDER
# FOLDER has en_meta_*.jsonl.zst; access is granted on the hub. Their code makes a set of 40M with 1,000 for
# validation (data/oscar_split.sh) and trains on one of 30M (preprocess.sh); it also drops those without
# harmful_pp, which stay here. Ours: which 30M, the first of each file; 10,000 held out.
# Expect the count of documents left out. The paper's 10,000 for test are rows of 512 tokens:
# train.py's eval_samples draws as many from the 10,000 held-out documents
corpus = 'oscar'
tokenizer = 'wordpiece'
max_documents = 30_000_000
val_fraction = 10_000 / max_documents
