# GAU with `scaled_squared_relu`, pretraining strategy "diff" of Liu 2022, table 2: 96,517,632 parameters, 10k
# steps. "512" and "diff" differ in masked padding alone, so this is config/gau_scaled_squared_relu_512.py
# with another seed.
# $ python train.py config/gau_scaled_squared_relu_diff.py
# Expect: masked accuracy 30.18 %, CLUE 58.94.
from config.gau_scaled_squared_relu_512 import *

out_dir = 'out/gau_scaled_squared_relu_diff'
seed = 2
