# GAU with `scaled_squared_relu`, one document per row (Liu 2022, table 2, "diff"): 96,517,632 parameters,
# 10k steps.
# $ python train.py config/gau_scaled_squared_relu_diff.py
# Expect: masked accuracy 30.18 %, CLUE 58.94.
from config.gau_scaled_squared_relu_512 import *

out_dir = 'out/gau_scaled_squared_relu_diff'
packing = 'documents'
