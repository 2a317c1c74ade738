# The run on which all systems are compared: 2 layers, 128 wide, 1M tokens; see results/systems.md.
# $ python train.py config/results/systems.py --attention=shatter --position=none --seed=2
# Expect a minute on one core; at the end 4.8 nats for `shatter`, 6.1 for BERT, unigram entropy 6.56.
from config.results.tiny import *

out_dir = 'out/systems'
total_batch = 16
batch_size = 16
max_iters = 1000
learning_rate = 2e-3
eval_interval = 200
eval_samples = 256
