# The search of results/grid4.md: learning rates sqrt(2) apart for the cells without attention to oneself,
# with a seed that is not used again.
# $ python results/experiment.py results/plans/grid4_search.py run any_code
# Expect 9 runs of 17 to 30 minutes on a core of a CPU. An older model.py made the first rows, hence any_code.
base = 'config/results/grid.py config/modern.py --compile=False --eval_interval=250 --attend_self=False'
cells = {
    'symmetric_no_self': '--attention=symmetric',
    'original_no_self': '--attention=original',
    'phase_no_self': '--attention=phase',
}
reference = 'original_no_self'
seeds = (101,)
rates = 5.66e-3, 4e-3, 8e-3
all_rows = True
