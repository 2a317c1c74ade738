# BERT-large (24 layers, 1024 wide) with Tian et al.'s recipe (2021, table 1): 1M steps of 1024 x 512 tokens,
# on 8 devices in 8 micro-steps of 16 rows each; the other knobs: config/tian_base.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian_large.py
# Expect: see config/large_original.py and config/large_shatter.py.
from config.tian_base import *

out_dir = 'out/tian_large'
n_layer = 24
n_head = 16
n_embd = 1024
n_inner = 4096
total_batch = 1024
batch_size = 16
