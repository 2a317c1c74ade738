# FineWeb's sample of ten billion tokens (Penedo et al. 2024) with BERT's own vocabulary: the open corpus of
# config/base.py and the configs that import it, which make it on the way
# $ python prepare_data.py config/data_fineweb.py
# Expect 15M documents, 10,000 of them held out, 28 GB to download, 21 GB on disk, 11 core-hours: estimates
corpus = 'fineweb'
tokenizer = 'wordpiece'
val_fraction = 0.00067
