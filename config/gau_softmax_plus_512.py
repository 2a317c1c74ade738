# GAU with `softmax_plus` on rows of 512 tokens (Liu 2022, table 2): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_softmax_plus_512.py
# Expect: masked accuracy 41.07 %, CLUE 64.23.
from config.base_gau import *

out_dir = 'out/gau_softmax_plus_512'
normaliser = 'softmax_plus'
max_iters = 10_000
warmup_iters = 1000
