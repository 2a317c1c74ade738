# A small pairwise BERT on the docstrings of the installed Python packages: minutes on two cores, no network.
# $ python train.py config/quickstart.py
# Expect 4.1 nats a predicted token at the end, unigram entropy 6.56; results/quickstart.md has ten seeds.
# Rotary positions: with learned ones the same run needs more steps (see results/systems.md).
from config.tiny import *

out_dir = 'out/quickstart'
attention = 'pairwise'
position = 'rope'
max_iters = 1200
learning_rate = 2e-3
eval_interval = 200
checkpoint_interval = 400
fill_samples = 5
