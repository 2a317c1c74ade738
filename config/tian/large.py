# BERT-large (24 layers, 1024 wide) with Tian et al.'s recipe (2021, table 1): 1M steps of 1024 x 512 tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian/large.py --validation=ptb \
#       --out_dir=out/large_original
# Expect (table 2): MNLI 88.9/88.8 for BERT, 88.7/88.6 for Shatter; 180 and 151 hours on their TPUv3 8x8.
# results/reproduce.md has more.
# Cost (results/costs.py): 336,689,408 parameters, 524,288 million tokens of 1.93 GFLOP, 704.4 GPU hours
from config.tian.base import *

out_dir = 'out/tian_large'
n_layer = 24
n_head = 16
n_embd = 1024
n_inner = 4096
total_batch = 1024
batch_size = 16
