# BERT-small (4 layers, 512 wide) with the recipe of config/base.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small.py
# $ torchrun --standalone --nproc_per_node=8 train.py config/small.py --attention=symmetric \
#       --out_dir=out/small_symmetric
# Expect no printed result, since that of Courtois et al. 2024 is on OSCAR (config/courtois/small.py).
# Cost (results/costs.py): 28,795,194 parameters, 26,214 million tokens of 0.0864 GFLOP, 1.6 GPU hours
from config.base import *

out_dir = 'out/small'
n_layer = 4
n_head = 8
n_embd = 512
n_inner = 2048
