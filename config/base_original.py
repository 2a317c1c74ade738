# BERT-base with `original` attention, 109,514,298 parameters (Courtois et al. 2024): 200k steps, 26B tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_original.py
# Expect, on OSCAR: the loss leaves the first plateau at step 25,000; GLUE 78.74 (their figure 2b, table 3).
from config.base import *

out_dir = 'out/base_original'
attention = 'original'
