# The doses of results/grid4.md: how much can be saved in the blocks, and where?
# $ python results/experiment.py results/plans/dose_search.py run
# $ python results/experiment.py results/plans/dose.py run
# $ python results/experiment.py results/plans/dose.py
# Expect 80 runs, five minutes on an H200 that makes sixteen at once. Dry run on a CPU: the cells' flags with
# --max_iters=20.
base = 'config/results/grid.py config/modern.py --compile=False'
cells = {                               # share of the parameters of the blocks that a cell saves
    'original': '',
    'narrow_4': '--attention=narrow --narrow_by=4',                             # 12.4 %
    'mlp_13_16': '--n_inner=416',                                               # 12.4 %
    'mlp_5_8': '--n_inner=320',                                                 # 24.8 %
    'narrow_4_mlp_13_16': '--attention=narrow --narrow_by=4 --n_inner=416',     # 24.8 %
    'width_112': '--n_embd=112 --n_inner=444',                                  # 24.3 %
    'symmetric': '--attention=symmetric',                                       # 8.3 %
    'pairwise_mlp_7_8': '--attention=pairwise --n_inner=448',                   # 14.0 %
}
reference = 'original'
seeds = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
rates_from = 'results/plans/dose_search.py'
target = 5.15
all_rows = True
blimp = 'blimp'
blimp_pairs = 200
contrasts = {
    'narrow_4 less original': {'narrow_4': 1, 'original': -1},
    'mlp_13_16 less original': {'mlp_13_16': 1, 'original': -1},
    'mlp_5_8 less original': {'mlp_5_8': 1, 'original': -1},
    'narrow_4_mlp_13_16 less original': {'narrow_4_mlp_13_16': 1, 'original': -1},
    'width_112 less original': {'width_112': 1, 'original': -1},
    'pairwise_mlp_7_8 less original': {'pairwise_mlp_7_8': 1, 'original': -1},
}
