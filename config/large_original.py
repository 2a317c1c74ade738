# BERT-large as Tian et al. train it (2021, BERT Large): 336,689,408 parameters, 301,989,888 in matrices
# (their table 1 prints 151.0M, half of it).
# $ torchrun --standalone --nproc_per_node=8 train.py config/large_original.py
# Expect, on BooksCorpus and Wikipedia: MNLI 87.6/87.6 after 400k steps, 88.9/88.8 at the end (their table
# 2); BoolQ 84.5 (table 5); 180 hours on their TPUv3 8x8.
from config.tian_large import *

out_dir = 'out/large_original'
attention = 'original'
