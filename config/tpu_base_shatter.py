# BERT-base with `shatter` and Tian et al.'s TPU recipe (2021, table 1) through torch_xla: 103,281,152
# parameters, 77,967,360 in matrices; 1M steps of 256 x 512 tokens, 32 rows a step on each of 8 devices.
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tpu_base_shatter.py
# Expect: as for config/base_shatter.py; 45 hours on their TPUv3 4x4. Not run on a TPU: .ci/xla trains a small
# model with torch_xla on a CPU.
from config.base_shatter import *

out_dir = 'out/tpu_base_shatter'
device = 'xla'
dtype = 'bfloat16'
