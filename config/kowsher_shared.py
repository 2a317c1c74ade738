# BERT-base with `shared` attention, 95,367,738 parameters, as Kowsher et al. pretrain it (2024, section 2.5).
# Not in the paper, so ours: the diagonals start at 1 and are not decayed; the shared Linear has a bias,
# before the diagonals (95,337,218 of table 4 implies it); the rest as in config/kowsher_base.py.
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher_shared.py
# Expect, on BooksCorpus and Wikipedia: the loss falls from 7.0 to 1.9 in 200k steps (their figure 2); GLUE
# 80.09 (table 1).
from config.kowsher_base import *

out_dir = 'out/kowsher_shared'
attention = 'shared'
