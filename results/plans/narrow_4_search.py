# The search of narrow_4.py: learning rates sqrt(2) apart, with a seed that is not used again.
# $ python results/experiment.py results/plans/narrow_4_search.py run
# Expect 4 runs of 17 to 30 minutes on a core of a CPU.
base = 'config/results/grid.py config/modern.py --compile=False --eval_interval=250'
cells = {'narrow_4': '--attention=narrow --narrow_by=4'}
reference = 'narrow_4'
seeds = (101,)
rates = 4e-3, 5.66e-3, 2.83e-3, 8e-3
all_rows = True
