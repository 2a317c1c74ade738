# GAU with `squared_relu`, pretraining strategy "512" of Liu 2022, table 2: 96,517,632 parameters, 10k steps.
# relu(q k^T / sqrt(s))^2 / (n s), with the key size s for the printed d_h as in his code: scale ns2.
# In his code "512" pads each text to 512 tokens, "diff" to the longest of its batch; padding is masked in
# both. So the two are equal here but for the seed (config/gau_squared_relu_diff.py). See results/errata.md.
# $ python train.py config/gau_squared_relu_512.py
# Expect: masked accuracy 25.23 %, CLUE 42.37.
from config.base_gau import *

out_dir = 'out/gau_squared_relu_512'
normaliser = 'squared_relu'
relu_scale = 'ns2'
max_iters = 10_000
warmup_iters = 1000
