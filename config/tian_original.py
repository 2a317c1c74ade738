# BERT-base as Tian et al. train it (2021, their BERT Base): 110,650,880 parameters, 84,934,656 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian_original.py
# Expect, on BooksCorpus and Wikipedia: a loss of about 2 with --validation=ptb (their figure 1); MNLI
# 84.0/83.8 (table 2); 53 hours on their TPUv3 4x4.
from config.tian_base import *

out_dir = 'out/tian_original'
attention = 'original'
