# Two cells of results/grid2.py again, for two seeds in each recipe: what another machine and the code of
# today move, see results/grid3.md.
# $ python results/experiment.py results/grid3_repeat.py run
# Expect 8 runs of 17 minutes on a core of a CPU.
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
