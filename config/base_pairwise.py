# BERT-base with `pairwise` attention, 103,017,018 parameters (Courtois et al. 2024): 200k steps, 26B tokens.
# How S starts decides when the plateau ends (results/systems.md). The paper does not say it; its code draws S
# from N(0, 1) (plpi/src/plpi/models/bert/modeling_bert.py). train.py's default is the identity plus noise.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
# Expect, on OSCAR: the loss leaves its plateau at step 12,000 and ends level with `original`; GLUE 79.36.
# With OSCAR, and for `original` and `symmetric`: config/courtois/base.py.
from config.base import *

out_dir = 'out/base_pairwise'
attention = 'pairwise'
pair_init = 'unit'
