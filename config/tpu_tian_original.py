# BERT-base with Tian et al.'s TPU recipe (2021, table 1, BERT Base) through torch_xla: 110,650,880
# parameters, 84,934,656 in matrices; 1M steps of 256 x 512 tokens, 32 rows a step on each of 8 devices.
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tpu_tian_original.py
# Expect: as for config/tian_original.py; 53 hours on their TPUv3 4x4. Not run on a TPU: .ci/xla trains a
# small model with torch_xla on a CPU.
from config.tian_original import *

out_dir = 'out/tpu_tian_original'
device = 'xla'
dtype = 'bfloat16'
