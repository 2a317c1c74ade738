# 24 gated attention units with `softmax_plus` (Hua et al. 2022; Liu 2022): 96,517,632 parameters;
# 96,519,170 in the classifier of Liu's table 4, without pooler.
# $ python train.py config/base_gau.py
# Expect: CLUE 67.61 after 30k steps, 75.02 at best (table 5).
from config.base_roformer_v2 import *

out_dir = 'out/base_gau'
attention = 'gau'
n_layer = 24
