# BERT-small (4 layers, 512 wide) with Courtois et al.'s recipe (2024, section 3.3). What the paper does not
# say: see config/base.py; their bert_small.sh has the same values.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small.py
# Expect (their figure 2a, on OSCAR): the loss leaves its first plateau at step 12,000 with `original`.
from config.base import *

out_dir = 'out/small'
n_layer = 4
n_head = 8
n_embd = 512
n_inner = 2048
