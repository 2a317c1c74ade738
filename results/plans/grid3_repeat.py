# Two cells of grid2.py again, for two seeds in each recipe, on the same kind of machine: what the
# code of today moves, see results/grid3.md.
# $ python results/experiment.py results/plans/grid3_repeat.py run
# Expect 8 runs, a minute on a GPU that makes them at once.
base = 'config/results/grid.py --compile=False'
cells = {
    'modern/symmetric': 'config/modern.py --attention=symmetric --learning_rate=5.66e-3',
    'modern/thin': 'config/modern.py --n_inner=448 --learning_rate=5.66e-3',
    'post-LN/symmetric': '--attention=symmetric --learning_rate=2e-3',
    'post-LN/thin': '--n_inner=448 --learning_rate=2e-3',
}
reference = 'symmetric'
seeds = 1, 2
target = 5.15
all_rows = True
