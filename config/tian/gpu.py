# BERT-base with Tian et al.'s GPU recipe (2021, table 1): 1.6M steps of 128 x 256 tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian/gpu.py --validation=ptb \
#       --out_dir=out/gpu_original
# Expect (table 2): MNLI 83.5/84.2 at length 256 for BERT, 84.5/84.8 extended to 512 for Shatter; 170 and 161
# hours on their 8 V100.
# Cost (results/costs.py): 110,454,272 parameters, 52,429 million tokens of 0.529 GFLOP, 19.3 GPU hours
from config.tian.base import *

out_dir = 'out/tian_gpu'
block_size = 256
total_batch = 128
max_iters = 1_600_000
milestones = (*milestones, 1_200_000, 1_400_000, 1_600_000)
