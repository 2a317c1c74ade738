# The search of results/grid3.md goes on for `identity_query` in the modern recipe, as for `narrow`. The row
# of 0.004 is a copy of that in grid3_search_modern.jsonl.
# $ python results/experiment.py results/plans/grid3_search_identity.py run
# Expect 1 run of 17 minutes on a core of a CPU.
base = 'config/results/grid.py config/modern.py --compile=False --eval_interval=250'
cells = {'identity_query': '--attention=identity_query'}
reference = 'identity_query'
seeds = (101,)
rates = 4e-3, 2.83e-3
all_rows = True
