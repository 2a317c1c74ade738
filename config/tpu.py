# A TPU through torch_xla, not run on one yet: name this file after any other of train.py, finetune.py or
# bench.py. It changes the device and the dtype alone. Several machines and installation: results/running.md.
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tian/base.py config/tpu.py
# Expect what the other file expects. The hours of Tian et al. 2021 on TPUs: results/reproduce.md.
device = 'xla'
dtype = 'bfloat16'
