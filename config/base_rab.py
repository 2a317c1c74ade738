# BERT-base with T5's relative bias beside absolute positions (BERT-RAB of Tian et al. 2021):
# 110,651,264 parameters, 84,934,656 in matrices.
# Not in the paper: distances beyond 128 share a bucket, the default of T5, whose code they copied.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_rab.py
# Expect, on BooksCorpus and Wikipedia: MNLI 85.1/85.0, but CoLA 76.2 where tian_original.py has 83.6 (their
# table 2); 64 hours on their TPUv3 4x4.
from config.tian_base import *

out_dir = 'out/base_rab'
position = 'rab'
