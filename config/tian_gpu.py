# BERT-base with Tian et al.'s GPU recipe (2021, table 1): 1.6M steps of 128 x 256 tokens, 16 rows a device;
# as many tokens as 400k steps of config/tian_base.py, from which the other knobs come.
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian_gpu.py
# Expect: see config/gpu_original.py and config/gpu_shatter.py.
from config.tian_base import *

out_dir = 'out/tian_gpu'
block_size = 256
total_batch = 128
max_iters = 1_600_000
milestones = (*milestones, 1_200_000, 1_400_000, 1_600_000)
