# BERT-base whose heads see one part of the row each, 110,257,664 parameters (Tian et al. 2021, section 3.1).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_part_mask.py
# Expect, on BooksCorpus and Wikipedia: a loss much nearer tian_original.py's than base_no_position.py's
# (their figure 1); MNLI 80.4/81.0 (table 6).
from config.tian_base import *

out_dir = 'out/base_part_mask'
attention = 'part_mask'
position = 'none'
