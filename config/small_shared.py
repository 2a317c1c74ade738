# BERT-small with `shared` attention, 26,700,090 parameters, and Courtois et al.'s recipe, to compare with
# small_original.py, small_symmetric.py and small_pairwise.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small_shared.py
# Expect: no printed result to compare with; Kowsher et al. train only the base size.
from config.small import *

out_dir = 'out/small_shared'
attention = 'shared'
