# The search of results/grid4.md goes on for `original_no_self`, which was best at 0.004, the lowest of the
# three rates. The row of 0.004 is a copy of that in grid4_search.jsonl.
# $ python results/experiment.py results/plans/grid4_search_original.py run
# Expect 1 run of half an hour on a core of a CPU.
base = 'config/results/grid.py config/modern.py --compile=False --eval_interval=250 --attend_self=False'
cells = {'original_no_self': '--attention=original'}
reference = 'original_no_self'
seeds = (101,)
rates = 4e-3, 2.83e-3
all_rows = True
