# BERT-base as Kowsher et al. pretrain it (2024, section 2.5), with the same recipe for four attentions:
# BooksCorpus and Wikipedia, 200k steps of 528 x 512 tokens (4 devices x 132, here in two micro-steps of 66).
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher/base.py --attention=shared \
#       --out_dir=out/kowsher_shared
# Expect, with `shared`, a loss that falls from 7.0 to 1.9 (figure 2), and 80.09 on GLUE (table 1).
# results/reproduce.md lists our own choices.
# Cost (results/costs.py): 95,367,738 parameters, 54,067 million tokens of 0.472 GFLOP, 17.7 GPU hours
from config.base import *

out_dir = 'out/kowsher_base'
dataset = 'books_wikipedia'
total_batch = 528
batch_size = 66
