# GAU with `squared_relu`, one document per row (Liu 2022, table 2, "diff"): 96,517,632 parameters, 10k steps.
# $ python train.py config/gau_squared_relu_diff.py
# Expect: masked accuracy 24.01 %, CLUE 50.88.
from config.gau_squared_relu_512 import *

out_dir = 'out/gau_squared_relu_diff'
packing = 'documents'
