# A small pairwise BERT on the docstrings of the installed Python packages. It needs minutes on two cores and
# no network.
# $ python train.py config/quickstart.py
# Expect 3.85 nats per predicted token at the end, where the unigram entropy is 6.56; results/findings.md has
# five seeds. With learned positions instead of rotary ones the run needs more steps.
# Cost (results/costs.py): 785,792 parameters, 3 million tokens of 0.00163 GFLOP
out_dir = 'out/quickstart'
dataset = 'docstrings'
attention = 'pairwise'
position = 'rope'
block_size = 64
n_layer = 2
n_head = 4
n_embd = 128
n_inner = 256
dropout = 0.0
attention_dropout = 0.0
total_batch = 16
max_iters = 2800
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 700
eval_samples = 512
checkpoint_interval = 700
fill_samples = 5
