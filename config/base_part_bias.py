# BERT-base with `one_head_sigmoid` and part biases, 103,281,152 parameters (Tian et al. 2021, section 3.3).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_part_bias.py
# Expect, on BooksCorpus and Wikipedia: MNLI 84.5/84.7, RTE 62.8, where base_shatter.py has 84.8/84.9 and
# 67.9 (their table 6).
from config.tian_base import *

out_dir = 'out/base_part_bias'
attention = 'part_bias'
position = 'none'
