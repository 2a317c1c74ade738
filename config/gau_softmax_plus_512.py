# GAU with `softmax_plus`, pretraining strategy "512" of Liu 2022, table 2: 96,517,632 parameters, 10k steps.
# In his code "512" pads each text to 512 tokens, "diff" to the longest of its batch; padding is masked in
# both. So the two are equal here but for the seed (config/gau_softmax_plus_diff.py). See results/errata.md.
# $ python train.py config/gau_softmax_plus_512.py
# Expect: masked accuracy 41.07 %, CLUE 64.23.
from config.base_gau import *

out_dir = 'out/gau_softmax_plus_512'
normaliser = 'softmax_plus'
max_iters = 10_000
warmup_iters = 1000
