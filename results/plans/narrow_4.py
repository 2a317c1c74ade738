# A dose of results/grid4.md on CPUs: may q and k have a quarter of the width?
# $ python results/experiment.py results/plans/narrow_4.py run any_code      after the search
# $ python results/experiment.py results/plans/narrow_4.py
# Expect 5 runs of 17 to 30 minutes on a core of a CPU. The rows of the other cells are copies of those in
# grid3_cpu.jsonl, which an older model.py made, hence any_code.
base = 'config/results/grid.py config/modern.py --compile=False'
cells = {
    'original': '--attention=original --learning_rate=4e-3',
    'symmetric': '--attention=symmetric --learning_rate=5.66e-3',
    'narrow': '--attention=narrow --learning_rate=4e-3',
    'narrow_4': '--attention=narrow --narrow_by=4',
}
reference = 'original'
seeds = 1, 2, 3, 4, 5
rates_from = 'results/plans/narrow_4_search.py'
target = 5.15
all_rows = True
contrasts = {
    'narrow_4 less original': {'narrow_4': 1, 'original': -1},
    'narrow_4 less symmetric': {'narrow_4': 1, 'symmetric': -1},
}
