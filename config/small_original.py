# BERT-small with `original` attention, 28,795,194 parameters (Courtois et al. 2024): 200k steps, 26B tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small_original.py
# Expect, on OSCAR: the loss leaves the first plateau at step 12,000; GLUE 72.72 (their figure 2a, table 3).
from config.small import *

out_dir = 'out/small_original'
attention = 'original'
