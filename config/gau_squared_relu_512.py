# GAU with `squared_relu` on rows of 512 tokens (Liu 2022, table 2): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_squared_relu_512.py
# Expect: masked accuracy 25.23 %, CLUE 42.37.
from config.base_gau import *

out_dir = 'out/gau_squared_relu_512'
normaliser = 'squared_relu'
max_iters = 10_000
warmup_iters = 1000
