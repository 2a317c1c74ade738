# BERT-small with `shared` attention, 26,700,090 parameters, and Kowsher et al.'s recipe (2024, section 2.5):
# BooksCorpus and Wikipedia, 4 devices x 132 rows. They give no rate or warmup: Courtois et al.'s are used.
# $ torchrun --standalone --nproc_per_node=4 train.py config/small_shared.py
# Expect: the paper prints nothing: it trains the base size alone.
from config.small import *

out_dir = 'out/small_shared'
dataset = 'books_wikipedia'
attention = 'shared'
total_batch = 528
batch_size = 66
