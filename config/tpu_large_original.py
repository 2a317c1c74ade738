# BERT-large with Tian et al.'s TPU recipe (2021, table 1, BERT Large) through torch_xla: 336,689,408
# parameters, 301,989,888 in matrices; 1M steps of 1024 x 512 tokens, 16 rows a step on each of 64 devices.
# On each of 8 machines with 8 devices and PJRT_DEVICE=TPU, N from 0 to 7, H the address of the first:
# $ torchrun --nnodes=8 --nproc_per_node=8 --node_rank=N --master_addr=H train.py config/tpu_large_original.py
# Expect: as for config/large_original.py; 180 hours on their TPUv3 8x8. Not run on a TPU: .ci/xla trains a
# small model with torch_xla on a CPU.
from config.large_original import *

out_dir = 'out/tpu_large_original'
device = 'xla'
dtype = 'bfloat16'
