# The counted runs of results/grid4.md: does q = k cost less if no token attends to itself?
# $ python results/experiment.py results/plans/grid4.py run any_code      after the search
# $ python results/experiment.py results/plans/grid4.py
# Expect 15 runs of 17 to 30 minutes on a core of a CPU. The rows of the cells with attention to oneself are
# copies of those in grid3_cpu.jsonl and, of `phase`, in grid2.jsonl; an older model.py made them, hence
# any_code.
base = 'config/results/grid.py config/modern.py --compile=False'
cells = {
    'original': '--attention=original --learning_rate=4e-3',
    'symmetric': '--attention=symmetric --learning_rate=5.66e-3',
    'phase': '--attention=phase --learning_rate=5.66e-3',
    'symmetric_no_self': '--attention=symmetric --attend_self=False',
    'original_no_self': '--attention=original --attend_self=False',
    'phase_no_self': '--attention=phase --attend_self=False',
}
reference = 'original'
seeds = 1, 2, 3, 4, 5
rates_from = ('results/plans/grid4_search.py,results/plans/grid4_search_symmetric.py,'
              'results/plans/grid4_search_original.py')
target = 5.15
all_rows = True
blimp = 'blimp'
blimp_pairs = 200
contrasts = {
    'q = k: without less with': {'symmetric_no_self': 1, 'symmetric': -1},
    'original: without less with': {'original_no_self': 1, 'original': -1},
    'the first less the second': {
        'symmetric_no_self': 1, 'symmetric': -1, 'original_no_self': -1, 'original': 1},
    'phase without less original with': {'phase_no_self': 1, 'original': -1},
}
