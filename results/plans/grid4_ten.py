# Seeds 6 to 10 of results/grid4.md, for a GPU: all six cells, so that no difference is one of machines.
# $ python results/experiment.py results/plans/grid4_ten.py run
# $ python results/experiment.py results/plans/grid4_ten.py
# Expect 30 runs, two minutes on an H200 that makes sixteen at once.
from results.plans.grid4 import *
seeds = 6, 7, 8, 9, 10
