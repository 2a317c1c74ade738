# BERT-base with `symmetric` attention, 102,427,194 parameters (Courtois et al. 2024): 200k steps, 26B tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_symmetric.py
# Expect, on OSCAR: the loss leaves its plateau at step 13,500 and ends 0.1 above the others; GLUE 74.82.
from config.base import *

out_dir = 'out/base_symmetric'
attention = 'symmetric'
