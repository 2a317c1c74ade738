# BERT-base with `pairwise` attention, 103,017,018 parameters, pretrained like Kowsher et al.'s `shared`
# (2024, 2.5).
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher_pairwise.py
# Expect: GLUE 79.03 (their table 1), but all of its values except CoLA are those that Courtois et al. print
# for their own model, trained on OSCAR (config/base_pairwise.py).
from config.kowsher_base import *

out_dir = 'out/kowsher_pairwise'
attention = 'pairwise'
