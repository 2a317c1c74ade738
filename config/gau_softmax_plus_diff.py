# GAU with `softmax_plus`, pretraining strategy "diff" of Liu 2022, table 2: 96,517,632 parameters, 10k steps.
# "512" and "diff" differ in masked padding alone, so this is config/gau_softmax_plus_512.py with another
# seed.
# $ python train.py config/gau_softmax_plus_diff.py
# Expect: masked accuracy 40.62 %, CLUE 66.52.
from config.gau_softmax_plus_512 import *

out_dir = 'out/gau_softmax_plus_diff'
seed = 2
