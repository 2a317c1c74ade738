# The small run that compares operators: 2 layers, 128 wide, learned positions; see results/systems.md.
# $ python train.py config/results/tiny.py --attention=shared --seed=2
# Expect minutes on one core; 5.4 to 5.8 nats at the end, unigram entropy 6.56.
out_dir = 'out/tiny'
dataset = 'docstrings'
block_size = 64
n_layer = 2
n_head = 4
n_embd = 128
n_inner = 512
total_batch = 32
batch_size = 32
max_iters = 2000
learning_rate = 1e-3
warmup_iters = 100
eval_interval = 100
eval_samples = 512
checkpoint_interval = 0
fill_samples = 0
