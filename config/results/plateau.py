# A run of results/plateau.md, on the tokens until a model uses their order: 2 layers, 128 wide, rows of 32.
# $ python train.py config/results/plateau.py --attention=pairwise --seed=2
# Expect five minutes on one core. `python results/plateau.py train` in place of `python train.py` also logs
# permuted_loss, of rows without their order, every 51,200 tokens. Of 1,024 tokens a step, 64 are [CLS] and
# [SEP].
out_dir = 'out/plateau'
dataset = 'docstrings'
block_size = 32
n_layer = 2
n_head = 4
n_embd = 128
n_inner = 256
total_batch = 32
batch_size = 32
max_iters = 4900
learning_rate = 2e-3
warmup_iters = 100
schedule = 'constant'
eval_interval = 50
eval_samples = 512
checkpoint_interval = 500
fill_samples = 0
dtype = 'float32'
