# BERT-base with `pairwise`, 104,153,600 parameters, and Tian et al.'s TPU recipe (2021, table 1) through
# torch_xla, to compare with config/tpu_base_shatter.py: 1M steps of 256 x 512 tokens.
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tpu_base_pairwise.py
# Expect: no printed result to compare with; none of the papers trains it. Not run on a TPU: .ci/xla trains a
# small model with torch_xla on a CPU.
from config.tian_base import *

out_dir = 'out/tpu_base_pairwise'
attention = 'pairwise'
device = 'xla'
dtype = 'bfloat16'
