# A run of the study of eleven systems: 4 layers x 256, 11 million tokens; see results/study.md.
# $ python train.py config/results/study.py --attention=shared --seed=2 --out_dir=out/study/shared-2
# Expect 14 to 24 minutes on one core with AMX or AVX512_BF16 (results/study.md); bfloat16 is slow on others.
out_dir = 'out/study'
dataset = 'study'
block_size = 128
n_layer = 4
n_head = 4
n_embd = 256
n_inner = 1024
total_batch = 32
batch_size = 32
max_iters = 2700
learning_rate = 1e-3
warmup_iters = 270
eval_interval = 150
eval_samples = 1024
log_interval = 50
checkpoint_interval = 150
fill_samples = 0
dtype = 'bfloat16'
