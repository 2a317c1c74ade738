# GAU with `scaled_squared_relu`, pretraining strategy "512" of Liu 2022, table 2: 96,517,632 parameters, 10k
# steps. The printed formula, with the key size s for d_h as in his code: rows sum to 1 / (n s). In float16
# the weights fall below the smallest number, in his code too; bfloat16 holds them.
# In his code "512" pads each text to 512 tokens, "diff" to the longest of its batch; padding is masked in
# both. So the two are equal here but for the seed (config/gau_scaled_squared_relu_diff.py). See
# results/errata.md.
# $ python train.py config/gau_scaled_squared_relu_512.py
# Expect: masked accuracy 31.97 %, CLUE 55.41.
from config.base_gau import *

out_dir = 'out/gau_scaled_squared_relu_512'
normaliser = 'scaled_squared_relu'
max_iters = 10_000
warmup_iters = 1000
