# GAU with `softmax`, one document per row (Liu 2022, table 2, "diff"): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_softmax_diff.py
# Expect: masked accuracy 41.2 %, CLUE 65.49.
from config.gau_softmax_512 import *

out_dir = 'out/gau_softmax_diff'
packing = 'documents'
