# BERT-base as Courtois et al. train it (2024, section 3.3): 200k steps, 26B tokens of OSCAR.
# $ torchrun --standalone --nproc_per_node=8 train.py config/courtois/base.py --attention=pairwise \
#       --pair_init=unit --out_dir=out/base_pairwise
# Expect (4.1, figure 2b) that the loss leaves its first plateau at step 25,000 with `original`, 13,500 with
# `symmetric` and 12,000 with `pairwise`. results/reproduce.md has all commands and lists our own choices.
# Cost (results/costs.py): 103,017,018 parameters, 26,214 million tokens of 0.518 GFLOP, 9.4 GPU hours
from config.base import *

out_dir = 'out/courtois_base'
dataset = 'oscar'
eval_interval = 250
