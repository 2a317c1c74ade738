# `shatter` at length 256 (Tian et al. 2021, Shatter GPU): 103,281,152 parameters, 77,967,360 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/gpu_shatter.py
# Expect, on BooksCorpus and Wikipedia, extended to 512 tokens: MNLI 84.5/84.8 and SQuAD v1.1 EM 81.8, F1
# 88.7 (their tables 2 and 3); 161 hours on their 8 V100.
from config.tian_gpu import *

out_dir = 'out/gpu_shatter'
attention = 'shatter'
position = 'none'
