# BERT-small as Courtois et al. train it (2024, section 3.3): config/small.py on OSCAR, with 250 steps between
# validations, as in their code. `pairwise` also takes --pair_init=unit, S from N(0, 1): see
# config/courtois/base.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/courtois/small.py --out_dir=out/small_original
# Expect (their figure 2a): the loss leaves its first plateau at step 12,000 with `original`. The commands of
# all three, and their scores: results/reproduce.md.
from config.small import *

out_dir = 'out/courtois_small'
dataset = 'oscar'
eval_interval = 250
