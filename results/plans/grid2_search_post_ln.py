# The search of results/grid2.md in the post-LN recipe: learning rates sqrt(2) apart, for the three systems
# that are compared, with two seeds that are not used again.
# $ python results/experiment.py results/plans/grid2_search_post_ln.py run
# Expect 30 runs of half an hour on a core of a CPU, or a minute on a GPU that makes sixteen at once.
base = 'config/results/grid.py --compile=False --eval_interval=250'
cells = {
    'post-LN/symmetric': '--attention=symmetric',
    'post-LN/thin': '--n_inner=448',
    'post-LN/phase': '--attention=phase',
}
reference = 'symmetric'
seeds = 101, 102
rates = 1.41e-3, 2e-3, 2.83e-3, 4e-3, 5.66e-3
all_rows = True
