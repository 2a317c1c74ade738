# RoFormerV2 (Su et al. 2022): no biases, norms without weights, lm_head = decoder.
# $ python train.py config/liu/roformer_v2.py
# Expect 67.39 on CLUE after 30k steps (table 5), and 1.224 times the time of GAU (table 4).
# results/reproduce.md lists our own choices.
# Cost (results/costs.py): 94,152,192 parameters, 3,932 million tokens of 0.54 GFLOP, 1.5 GPU hours
from config.liu.base import *

out_dir = 'out/base_roformer_v2'
position = 'rope'
norm = 'rms'
bias = False
lm_head = 'decoder'
