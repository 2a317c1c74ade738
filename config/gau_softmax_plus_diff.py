# GAU with `softmax_plus`, one document per row (Liu 2022, table 2, "diff"): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_softmax_plus_diff.py
# Expect: masked accuracy 40.62 %, CLUE 66.52.
from config.gau_softmax_plus_512 import *

out_dir = 'out/gau_softmax_plus_diff'
packing = 'documents'
