# BERT-RPE with Tian et al.'s TPU recipe (2021, table 1) through torch_xla: 112,607,744 parameters, 87,284,736
# in matrices; 1M steps of 256 x 512 tokens, 32 rows a step on each of 8 devices.
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tpu_tian_rpe.py
# Expect: as for config/base_rpe.py; 206 hours on their TPUv3 4x4. Not run on a TPU: .ci/xla trains a small
# model with torch_xla on a CPU.
from config.base_rpe import *

out_dir = 'out/tpu_tian_rpe'
device = 'xla'
dtype = 'bfloat16'
