# BERT-base on OSCAR with Courtois et al.'s recipe (2024, section 3.3): 200k steps of 256 x 512 tokens.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py
# Expect (their figure 2b): the loss leaves its first plateau at step 25,000 with `original`.
out_dir = 'out/base'
dataset = 'oscar'
block_size = 512
n_layer = 12
n_head = 12
n_embd = 768
n_inner = 3072
dropout = 0.1
attention_dropout = 0.1
total_batch = 256
batch_size = 32
max_iters = 200_000
learning_rate = 1e-4
warmup_iters = 10_000
schedule = 'linear'
beta1 = 0.9
beta2 = 0.999
adam_eps = 1e-12
weight_decay = 0.01
eval_interval = 1000
eval_samples = 10_000
checkpoint_interval = 1000
milestones = (1000, 5000, 10_000, 15_000, 20_000, 25_000, 30_000, 40_000, 50_000, 65_000, 80_000, 100_000,
              125_000, 150_000, 175_000, 200_000)
