# BERT-large (24 layers, 1024 wide) with the recipe of config/base.py. None of the papers trains this model.
# $ torchrun --standalone --nproc_per_node=8 train.py config/large.py
# Expect no printed result to compare with. Tian et al.'s BERT-large is config/tian/large.py.
# Cost (results/costs.py): 335,174,458 parameters, 26,214 million tokens of 1.93 GFLOP, 35.2 GPU hours
from config.base import *

out_dir = 'out/large'
n_layer = 24
n_head = 16
n_embd = 1024
n_inner = 4096
batch_size = 16
