# GAU with `squared_relu`, pretraining strategy "diff" of Liu 2022, table 2: 96,517,632 parameters, 10k steps.
# "512" and "diff" differ in masked padding alone, so this is config/gau_squared_relu_512.py with another
# seed.
# $ python train.py config/gau_squared_relu_diff.py
# Expect: masked accuracy 24.01 %, CLUE 50.88.
from config.gau_squared_relu_512 import *

out_dir = 'out/gau_squared_relu_diff'
seed = 2
