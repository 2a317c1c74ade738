# The run on which GAU's scales and normalisers are compared: config/results/systems.py with n = 4 s as in Liu
# 2022, 64 tokens and key_size 16 (there 512 and 128), so that the divisors keep their order n^2 > n s > s^2 >
# n.
# $ python train.py config/results/systems_gau.py --normaliser=squared_relu --relu_scale=n2
# Expect: see results/systems.md, which has the loop over systems and seeds, and its outcome.
from config.results.systems import *

out_dir = 'out/systems_gau'
attention = 'gau'
position = 'rope'
norm = 'rms'
bias = False
lm_head = 'decoder'
key_size = 16
n_layer = 4
max_iters = 600
warmup_iters = 60
eval_interval = 100
