# BERT-base with `shatter` attention (Tian et al. 2021): 103,281,152 parameters, 77,967,360 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_shatter.py
# Expect, on BooksCorpus and Wikipedia: tian_original.py's loss (their figure 1); MNLI 84.8/84.9 (table 2);
# 45 hours on their TPUv3 4x4.
from config.tian_base import *

out_dir = 'out/base_shatter'
attention = 'shatter'
position = 'none'
