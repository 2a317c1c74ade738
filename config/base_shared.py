# BERT-base with `shared` attention, 95,367,738 parameters, and Courtois et al.'s recipe, to compare with
# base_original.py, base_symmetric.py and base_pairwise.py. Kowsher et al.'s own recipe: kowsher_shared.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_shared.py
# Expect: no printed result to compare with; none of the papers trains it on OSCAR.
from config.base import *

out_dir = 'out/base_shared'
attention = 'shared'
