# BERT-base at length 256 (Tian et al. 2021, BERT GPU): 110,454,272 parameters, 84,934,656 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/gpu_original.py
# Expect, on BooksCorpus and Wikipedia: MNLI 83.5/84.2 at length 256, 82.9/83.2 extended to 512 (their table
# 2); 170 hours on their 8 V100.
from config.tian_gpu import *

out_dir = 'out/gpu_original'
attention = 'original'
