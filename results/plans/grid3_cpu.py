# All cells of results/grid3.md in modern on the CPU that made its counted runs: what the machine moves, and
# the differences with all cells on one machine.
# $ python results/experiment.py results/plans/grid3_cpu.py run
# $ python results/experiment.py results/plans/grid3_cpu.py
# Expect 15 runs of 17 minutes on a core; the rows of narrow and identity_query are copies of those in
# grid3_modern.jsonl.
base = 'config/results/grid.py config/modern.py --compile=False'
cells = {
    'original': '--attention=original --learning_rate=4e-3',
    'symmetric': '--attention=symmetric --learning_rate=5.66e-3',
    'thin': '--n_inner=448 --learning_rate=5.66e-3',
    'narrow': '--attention=narrow --learning_rate=4e-3',
    'identity_query': '--attention=identity_query --learning_rate=4e-3',
}
reference = 'original'
seeds = 1, 2, 3, 4, 5
target = 5.15
all_rows = True
contrasts = {
    'narrow less symmetric': {'narrow': 1, 'symmetric': -1},
    'identity_query less symmetric': {'identity_query': 1, 'symmetric': -1},
    'narrow less thin': {'narrow': 1, 'thin': -1},
    'identity_query less thin': {'identity_query': 1, 'thin': -1},
}
