# The counted runs of results/grid3.md in the post-LN recipe, which repeat its planned tests: an encoder
# without Wq, and one with narrow queries and keys, beside q = k and a thinner MLP of as many parameters.
# $ python results/experiment.py results/plans/grid3_post_ln.py run        after grid3_search_post_ln.py
# $ python results/experiment.py results/plans/grid3_post_ln.py
# Expect 10 runs; the rows of original, symmetric and thin are copies of those in grid2.jsonl.
base = 'config/results/grid.py --compile=False'
cells = {
    'original': '--attention=original --learning_rate=2e-3',
    'symmetric': '--attention=symmetric --learning_rate=2e-3',
    'thin': '--n_inner=448 --learning_rate=2e-3',
    'narrow': '--attention=narrow',
    'identity_query': '--attention=identity_query',
}
reference = 'original'
seeds = 1, 2, 3, 4, 5
rates_from = 'results/plans/grid3_search_post_ln.py'
target = 5.15
all_rows = True
blimp = 'blimp'
blimp_pairs = 200
contrasts = {
    'narrow less symmetric': {'narrow': 1, 'symmetric': -1},
    'identity_query less symmetric': {'identity_query': 1, 'symmetric': -1},
    'narrow less thin': {'narrow': 1, 'thin': -1},
    'identity_query less thin': {'identity_query': 1, 'thin': -1},
}
