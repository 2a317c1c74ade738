# BERT-small with `symmetric` attention, 27,744,570 parameters (Courtois et al. 2024): 200k steps, 26B tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small_symmetric.py
# Expect, on OSCAR: GLUE 69.61 (their table 3).
from config.small import *

out_dir = 'out/small_symmetric'
attention = 'symmetric'
