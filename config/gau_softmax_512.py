# GAU with `softmax`, pretraining strategy "512" of Liu 2022, table 2: 96,517,632 parameters, 10k steps.
# In his code "512" pads each text to 512 tokens, "diff" to the longest of its batch; padding is masked in
# both. So the two are equal here but for the seed (config/gau_softmax_diff.py). See results/errata.md.
# $ python train.py config/gau_softmax_512.py
# Expect: masked accuracy 40.86 %, CLUE 62.8.
from config.base_gau import *

out_dir = 'out/gau_softmax_512'
normaliser = 'softmax'
max_iters = 10_000
warmup_iters = 1000
