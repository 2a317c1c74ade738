# BERT-large with `shatter` (Tian et al. 2021, Shatter Large): 311,367,936 parameters, 277,217,280 in matrices
# (their table 1 prints 138.6M, half of it).
# $ torchrun --standalone --nproc_per_node=8 train.py config/large_shatter.py
# Expect, on BooksCorpus and Wikipedia: MNLI 87.6/87.7 after 400k steps, 88.7/88.6 at the end (their table
# 2); BoolQ 84.3 (table 5); 151 hours on their TPUv3 8x8.
from config.tian_large import *

out_dir = 'out/large_shatter'
attention = 'shatter'
position = 'none'
