# BERT-base with relative positions in place of absolute ones (BERT-RPE of Tian et al. 2021, clipped at 128):
# 112,607,744 parameters, 87,284,736 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_rpe.py
# Expect, on BooksCorpus and Wikipedia: a loss below all others of base size (their figure 4); MNLI 86.2/86.1
# (table 2); 206 hours on their TPUv3 4x4.
from config.tian_base import *

out_dir = 'out/base_rpe'
position = 'rpe'
