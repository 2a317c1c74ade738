# The search of results/grid3.md in the post-LN recipe: learning rates sqrt(2) apart, with a seed that is not
# used again. The outermost two stand beside the planned three from the beginning, see that page.
# $ python results/experiment.py results/plans/grid3_search_post_ln.py run
# Expect 10 runs of 17 minutes on a core of a CPU, or a minute on a GPU that makes sixteen at once.
base = 'config/results/grid.py --compile=False --eval_interval=250'
cells = {
    'narrow': '--attention=narrow',
    'identity_query': '--attention=identity_query',
}
reference = 'narrow'
seeds = (101,)
rates = 1e-3, 1.41e-3, 2e-3, 2.83e-3, 4e-3
all_rows = True
