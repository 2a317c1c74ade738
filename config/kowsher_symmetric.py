# BERT-base with `symmetric` attention, 102,427,194 parameters, pretrained like Kowsher et al.'s `shared`
# (2024, 2.5).
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher_symmetric.py
# Expect: GLUE 74.28 (their table 1), but all of its values except CoLA are those that Courtois et al. print
# for their own model, trained on OSCAR (config/base_symmetric.py).
from config.kowsher_base import *

out_dir = 'out/kowsher_symmetric'
attention = 'symmetric'
