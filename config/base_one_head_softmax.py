# BERT-base with one score matrix for all parts, 103,170,560 parameters (Tian et al. 2021, section 3.2).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_one_head_softmax.py
# Expect, on BooksCorpus and Wikipedia: a loss slightly above that of base_part_mask.py (their figure 1,
# "1H_Softmax").
from config.tian_base import *

out_dir = 'out/base_one_head_softmax'
attention = 'one_head_softmax'
position = 'none'
