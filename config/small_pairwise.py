# BERT-small with `pairwise` attention, 27,875,642 parameters (Courtois et al. 2024): 200k steps, 26B tokens.
# S starts from N(0, 1) as in their code: see config/base_pairwise.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small_pairwise.py
# Expect, on OSCAR: GLUE 73.38 (their table 3).
from config.small import *

out_dir = 'out/small_pairwise'
attention = 'pairwise'
pair_init = 'unit'
