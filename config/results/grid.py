# A run of the grids in results/findings.md and results/grid2.md, in the post-LN recipe: 4 layers, 128 wide,
# rows of 64.
# $ python train.py config/results/grid.py --attention=symmetric --seed=2
# $ python train.py config/results/grid.py config/modern.py --attention=symmetric --seed=2
# Expect 14 to 20 minutes on one core of an Intel Xeon. These pages have the learning rate of each cell.
# Cost (results/costs.py): 1,801,088 parameters, 10 million tokens of 0.0049 GFLOP
out_dir = 'out/grid/run'
dataset = 'grid'
position = 'rope'
block_size = 64
n_layer = 4
n_head = 4
n_embd = 128
n_inner = 512
dropout = 0.0
attention_dropout = 0.0
total_batch = 64
batch_size = 64
max_iters = 2500
learning_rate = 2e-3
warmup_iters = 250
eval_interval = 25
eval_samples = 512
log_interval = 100
checkpoint_interval = 500
fill_samples = 0
dtype = 'float32'
