# 24 gated attention units with `softmax_plus` (Hua et al. 2022; Liu 2022), 30k steps: 96,517,632 parameters;
# 96,519,170 in the classifier of Liu's table 4 (config/clue_liu.py), which has no pooler. The paper prints
# offsets of q and k, which neither its count nor its code (use_bias=False) has; key_size 128 and a width of 2
# x 768 as in Hua et al. What else the paper does not say: config/liu_base.py.
# $ python train.py config/base_gau.py
# Expect: CLUE 67.61 (his table 5, starred row). Table 5's other GAU row, 75.02: config/base_gau_100k.py.
from config.base_roformer_v2 import *

out_dir = 'out/base_gau'
attention = 'gau'
n_layer = 24
