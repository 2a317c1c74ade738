# GAU with `softmax` on rows of 512 tokens (Liu 2022, table 2): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_softmax_512.py
# Expect: masked accuracy 40.86 %, CLUE 62.8.
from config.base_gau import *

out_dir = 'out/gau_softmax_512'
normaliser = 'softmax'
max_iters = 10_000
warmup_iters = 1000
