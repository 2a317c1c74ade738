# BERT-base with `original` attention, 109,514,298 parameters, pretrained like Kowsher et al.'s `shared`
# (2024, 2.5).
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher_original.py
# Expect: GLUE 79.71 (their table 1), but all of its values except MRPC, CoLA and STS-B are those that
# Courtois et al. print for their own model, trained on OSCAR (config/base_original.py).
from config.kowsher_base import *

out_dir = 'out/kowsher_original'
attention = 'original'
