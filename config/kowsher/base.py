# BERT-base as Kowsher et al. pretrain it (2024, section 2.5), the same for four attentions: BooksCorpus and
# Wikipedia, 200k steps of 528 x 512 tokens (4 devices x 132, here in two micro-steps of 66).
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher/base.py --attention=shared \
#       --out_dir=out/kowsher_shared
# Expect, with `shared`: from 7.0 to 1.9 (figure 2); GLUE 80.09 (table 1). What is ours: results/reproduce.md.
from config.base import *

out_dir = 'out/kowsher_base'
dataset = 'books_wikipedia'
total_batch = 528
batch_size = 66
