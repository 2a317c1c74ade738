# BERT-base with `pairwise` attention and the recipe of config/base.py. S starts from N(0, 1), as in the code
# of Courtois et al. 2024; the default of train.py is the identity plus noise.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
# Expect, if trained on OSCAR, that the loss leaves its plateau at step 12,000 and ends level with `original`,
# and 79.36 on GLUE.
# Cost (results/costs.py): 103,017,018 parameters, 26,214 million tokens of 0.518 GFLOP, 9.4 GPU hours
from config.base import *

out_dir = 'out/base_pairwise'
attention = 'pairwise'
pair_init = 'unit'
