# BERT-base as Courtois et al. train it (2024, section 3.3): 200k steps, 26B tokens of OSCAR. This is
# config/base.py, whose header has what the paper does not say and where its code says it, with 250 steps
# between validations, as in the code.
# $ python prepare_data.py config/data/oscar.py --path=FOLDER
# $ torchrun --standalone --nproc_per_node=8 train.py config/courtois/base.py --out_dir=out/base_original
# The paper does not say how S of `pairwise` starts; its code draws it from N(0, 1)
# (plpi/src/plpi/models/bert/modeling_bert.py), which takes a second flag here. How S starts decides when the
# plateau ends (results/systems.md).
# $ torchrun --standalone --nproc_per_node=8 train.py config/courtois/base.py --attention=pairwise \
#       --pair_init=unit --out_dir=out/base_pairwise
# Expect (their 4.1 and figure 2b): the loss leaves its first plateau at step 25,000 with `original`, 13,500
# with `symmetric`, 12,000 with `pairwise`. The commands of all three, and their scores: results/reproduce.md.
from config.base import *

out_dir = 'out/courtois_base'
dataset = 'oscar'
eval_interval = 250
