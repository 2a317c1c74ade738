# GAU with `softmax`, pretraining strategy "diff" of Liu 2022, table 2: 96,517,632 parameters, 10k steps.
# "512" and "diff" differ in masked padding alone, so this is config/gau_softmax_512.py with another seed.
# $ python train.py config/gau_softmax_diff.py
# Expect: masked accuracy 41.2 %, CLUE 65.49.
from config.gau_softmax_512 import *

out_dir = 'out/gau_softmax_diff'
seed = 2
