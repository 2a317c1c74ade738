# Settings for a TPU through torch_xla, on which we have not run them. Name this file after any other of
# train.py, finetune.py or bench.py; it only changes the device and the dtype. results/running.md explains the
# installation and several machines.
# $ PJRT_DEVICE=TPU torchrun --standalone --nproc_per_node=8 train.py config/tian/base.py config/tpu.py
# Expect what the other file expects. results/reproduce.md has the hours of Tian et al. 2021 on TPUs.
device = 'xla'
dtype = 'bfloat16'
