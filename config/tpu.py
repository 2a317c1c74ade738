# A TPU through torch_xla: name this file after any other of train.py, finetune.py or bench.py. It changes the
# device and the dtype alone. How to install torch_xla: results/running.md. One machine with 8 devices, here
# with 32 rows a step on each:
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tian/base.py config/tpu.py
# Several machines, here BERT-large with 16 rows a step on each of 64 devices; on each of 8 machines with 8
# devices and PJRT_DEVICE=TPU, N from 0 to 7, H the address of the first:
# $ torchrun --nnodes=8 --nproc_per_node=8 --node_rank=N --master_addr=H train.py \
#       config/tian/large.py config/tpu.py --out_dir=out/tpu_large_original
# Expect what the other file expects. Not run on a TPU: .ci/xla trains a small model with torch_xla on a CPU.
# The models that Tian et al. (2021, table 1) trained on TPUs, with their hours: results/reproduce.md.
device = 'xla'
dtype = 'bfloat16'
