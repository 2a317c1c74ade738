# GAU with `scaled_squared_relu` on rows of 512 tokens (Liu 2022, table 2): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_scaled_squared_relu_512.py
# Expect: masked accuracy 31.97 %, CLUE 55.41.
from config.base_gau import *

out_dir = 'out/gau_scaled_squared_relu_512'
normaliser = 'scaled_squared_relu'
max_iters = 10_000
warmup_iters = 1000
