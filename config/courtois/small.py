# BERT-small as Courtois et al. train it (2024, section 3.3): config/small.py on OSCAR.
# $ torchrun --standalone --nproc_per_node=8 train.py config/courtois/small.py --out_dir=out/small_original
# Expect (figure 2a) that the loss leaves its first plateau at step 12,000 with `original`.
# results/reproduce.md has all commands and lists our own choices.
# Cost (results/costs.py): 28,795,194 parameters, 26,214 million tokens of 0.0864 GFLOP, 1.6 GPU hours
from config.small import *

out_dir = 'out/courtois_small'
dataset = 'oscar'
eval_interval = 250
