# The search of results/grid3.md in the modern recipe: learning rates sqrt(2) apart, with a seed that is not
# used again.
# $ python results/experiment.py results/plans/grid3_search_modern.py run
# Expect 6 runs of 17 minutes on a core of a CPU, or a minute on a GPU that makes sixteen at once.
base = 'config/results/grid.py config/modern.py --compile=False --eval_interval=250'
cells = {
    'narrow': '--attention=narrow',
    'identity_query': '--attention=identity_query',
}
reference = 'narrow'
seeds = (101,)
rates = 5.66e-3, 4e-3, 8e-3
all_rows = True
