# The scale study of results/grid3.md: the ways to save a matrix at nine times the parameters, over one epoch
# of the grid's corpus.
# $ python results/experiment.py results/plans/scale.py run any_code
# $ python results/experiment.py results/plans/scale.py
# Expect 24 runs, of 7 minutes on an H200 that makes twelve at once. Dry run on a CPU: the cells' flags with
# --max_iters=20. The last two cells are those of results/grid4.md; rows of the others are older than their
# option, hence the word any_code.
base = ('config/results/grid.py config/modern.py --compile=False --n_layer=8 --n_head=6 --n_embd=384 '
        '--n_inner=1536 --block_size=128 --max_iters=5400 --warmup_iters=540 --eval_interval=100 '
        '--dtype=bfloat16')
cells = {
    'original': '--attention=original --learning_rate=1.9e-3',
    'symmetric': '--attention=symmetric --learning_rate=1.9e-3',
    'thin': '--n_inner=1344 --learning_rate=1.9e-3',
    'narrow': '--attention=narrow --learning_rate=1.9e-3',
    'identity_query': '--attention=identity_query --learning_rate=1.9e-3',
    'pairwise': '--attention=pairwise --learning_rate=1.9e-3',
    'symmetric_no_self': '--attention=symmetric --attend_self=False --learning_rate=1.9e-3',
    'phase_no_self': '--attention=phase --attend_self=False --learning_rate=1.9e-3',
}
reference = 'original'
seeds = 1, 2, 3
target = 4.5
all_rows = True
contrasts = {
    'symmetric less thin': {'symmetric': 1, 'thin': -1},
    'symmetric less narrow': {'symmetric': 1, 'narrow': -1},
    'symmetric less identity_query': {'symmetric': 1, 'identity_query': -1},
}
