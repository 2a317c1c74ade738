# BERT-base with `shared` attention, 95,367,738 parameters, and Kowsher et al.'s recipe (2024, section 2.5):
# BooksCorpus and Wikipedia, 4 devices x 132 rows. They give no rate or warmup: Courtois et al.'s are used.
# $ torchrun --standalone --nproc_per_node=4 train.py config/base_shared.py
# Expect: the loss falls from 7.0 to 1.9 in 200k steps (their figure 2).
from config.base import *

out_dir = 'out/base_shared'
dataset = 'books_wikipedia'
attention = 'shared'
total_batch = 528
batch_size = 66
