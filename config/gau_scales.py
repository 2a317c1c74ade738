# GAU with `squared_relu` and its scales (Liu 2022, section 3.2): 96,517,632 parameters, 5k steps.
# The small form: config/compare_gau.py.
# $ python train.py config/gau_scales.py --relu_scale=n2 --out_dir=out/gau_scales_n2
# Expect (table 1): masked accuracy 20.16 % with n2, 19.34 % with n, 23.11 % with ns; s2 does not converge.
# Which of the four had q k^T / sqrt(s) inside relu cannot be known: his code divides there (then "ns" is ns2
# here), but had no "s2". Here none has. 512 or diff: not in the paper, equal here
# (config/gau_softmax_512.py).
from config.base_gau import *

out_dir = 'out/gau_scales'
normaliser = 'squared_relu'
max_iters = 5000
warmup_iters = 500
