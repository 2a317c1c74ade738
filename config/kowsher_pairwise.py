# BERT-base with `pairwise` attention, 103,017,018 parameters, pretrained like Kowsher et al.'s `shared`
# (2024, 2.5). S starts from N(0, 1) as in Courtois et al.'s code: our choice.
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher_pairwise.py
# Expect: GLUE 79.03 (their table 1), but all of its values except CoLA are those that Courtois et al. print
# for their own model, trained on OSCAR (config/base_pairwise.py).
from config.kowsher_base import *

out_dir = 'out/kowsher_pairwise'
attention = 'pairwise'
pair_init = 'unit'
