# The search of results/grid2.md in the modern recipe: learning rates sqrt(2) apart, for the three systems
# that are compared, with two seeds that are not used again.
# $ python results/experiment.py results/plans/grid2_search_modern.py run
# Expect 36 runs of half an hour on a core of a CPU, or a minute on a GPU that makes sixteen at once.
base = 'config/results/grid.py --compile=False --eval_interval=250'
cells = {
    'modern/symmetric': 'config/modern.py --attention=symmetric',
    'modern/thin': 'config/modern.py --n_inner=448',
    'modern/phase': 'config/modern.py --attention=phase',
}
reference = 'symmetric'
seeds = 101, 102
rates = 1.41e-3, 2e-3, 2.83e-3, 4e-3, 5.66e-3, 8e-3
all_rows = True
