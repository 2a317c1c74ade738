# A dose of results/grid4.md on CPUs: may an MLP be narrower by three eighths?
# $ python results/experiment.py results/plans/mlp_5_8.py run any_code       after the search
# $ python results/experiment.py results/plans/mlp_5_8.py
# Expect 5 runs of 17 to 30 minutes on a core of a CPU. The rows of the other cells are copies of those in
# grid3_cpu.jsonl, which an older model.py made, hence any_code.
base = 'config/results/grid.py config/modern.py --compile=False'
cells = {
    'original': '--attention=original --learning_rate=4e-3',
    'symmetric': '--attention=symmetric --learning_rate=5.66e-3',
    'thin': '--n_inner=448 --learning_rate=5.66e-3',
    'mlp_5_8': '--n_inner=320',
}
reference = 'original'
seeds = 1, 2, 3, 4, 5
rates_from = 'results/plans/mlp_5_8_search.py'
target = 5.15
all_rows = True
contrasts = {
    'mlp_5_8 less original': {'mlp_5_8': 1, 'original': -1},
    'mlp_5_8 less symmetric': {'mlp_5_8': 1, 'symmetric': -1},
}
