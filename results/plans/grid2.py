# The counted runs of results/grid2.md: what a shared projection is worth beside a thinner MLP, and whether
# direction is what q = k loses.
# $ python results/experiment.py results/plans/grid2.py run        after both grid2_search_*.py
# $ python results/experiment.py results/plans/grid2.py
# Expect 60 runs. original, shared_kv and pairwise have the rates of the first grid, the others those of the
# search.
base = 'config/results/grid.py --compile=False'
cells = {
    'post-LN/original': '--attention=original --learning_rate=2e-3',
    'post-LN/symmetric': '--attention=symmetric',
    'post-LN/thin': '--n_inner=448',
    'post-LN/phase': '--attention=phase',
    'post-LN/shared_kv': '--attention=shared_kv --learning_rate=2e-3',
    'post-LN/pairwise': '--attention=pairwise --learning_rate=2e-3',
    'modern/original': 'config/modern.py --attention=original --learning_rate=4e-3',
    'modern/symmetric': 'config/modern.py --attention=symmetric',
    'modern/thin': 'config/modern.py --n_inner=448',
    'modern/phase': 'config/modern.py --attention=phase',
    'modern/shared_kv': 'config/modern.py --attention=shared_kv --learning_rate=4e-3',
    'modern/pairwise': 'config/modern.py --attention=pairwise --learning_rate=4e-3',
}
reference = 'original'
seeds = 1, 2, 3, 4, 5
rates_from = 'results/plans/grid2_search_post_ln.py,results/plans/grid2_search_modern.py'
target = 5.15
all_rows = True
blimp = 'blimp'
blimp_pairs = 200
contrasts = {
    'thin less symmetric': {
        'post-LN/thin': 0.5, 'modern/thin': 0.5, 'post-LN/symmetric': -0.5, 'modern/symmetric': -0.5},
    'phase less symmetric': {
        'post-LN/phase': 0.5, 'modern/phase': 0.5, 'post-LN/symmetric': -0.5, 'modern/symmetric': -0.5},
    'phase less thin': {
        'post-LN/phase': 0.5, 'modern/phase': 0.5, 'post-LN/thin': -0.5, 'modern/thin': -0.5},
}
