# The search of results/grid3.md goes on for `narrow` in the modern recipe, whose best rate was the lowest
# one. The row of 0.004 is a copy of that in grid3_search_modern.jsonl.
# $ python results/experiment.py results/plans/grid3_search_narrow.py run
# Expect 1 run of 17 minutes on a core of a CPU.
base = 'config/results/grid.py config/modern.py --compile=False --eval_interval=250'
cells = {'narrow': '--attention=narrow'}
reference = 'narrow'
seeds = (101,)
rates = 4e-3, 2.83e-3
all_rows = True
