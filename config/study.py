# The study on which the README's answer rests: 4 layers x 256, 11 million tokens; see results/study.md.
# $ python train.py config/study.py --attention=shared --seed=2
# Expect 20 to 30 minutes on one core with AMX; bfloat16 is slow on other CPUs.
out_dir = 'out/study'
dataset = 'study'
block_size = 128
n_layer = 4
n_head = 4
n_embd = 256
n_inner = 1024
total_batch = 16
batch_size = 16
max_iters = 5400
learning_rate = 1e-3
warmup_iters = 540
eval_interval = 300
eval_samples = 1024
log_interval = 50
checkpoint_interval = 300
fill_samples = 0
dtype = 'bfloat16'
