# 24 gated attention units with `softmax_plus` (Hua et al. 2022; Liu 2022, arXiv 2205.05842), 30k steps.
# $ python train.py config/liu/gau.py
# Expect 67.61 on CLUE (table 5, starred row). results/reproduce.md has tables 1 and 2 and the run of 100k
# steps, and lists our own choices.
# Cost (results/costs.py): 96,517,632 parameters, 3,932 million tokens of 0.638 GFLOP, 1.7 GPU hours
from config.liu.roformer_v2 import *

out_dir = 'out/base_gau'
attention = 'gau'
n_layer = 24
