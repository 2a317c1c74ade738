# The search of dose.py: four rates sqrt(2) apart, two seeds that are not used again.
# $ python results/experiment.py results/plans/dose_search.py run
# Expect 64 runs, four minutes on an H200 that makes sixteen at once.
from results.plans.dose import *
rates_from = ''
contrasts = {}
seeds = 101, 102
rates = 4e-3, 5.66e-3, 2.83e-3, 8e-3
blimp = ''
