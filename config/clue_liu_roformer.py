# CLUE as in Liu 2022, table 6, for RoFormerV1 and V2: config/clue_liu.py with BERT's pooler, which their
# counts of table 4 include.
# $ python finetune.py config/clue_liu_roformer.py --init_from=out/base_roformer_v2
# Expect (his table 5, average): 67.39 for RoFormerV2 after 30k steps. The other two rows cannot be run from
# the paper: 76.45 is the published RoFormerV2, pretrained on a larger corpus and several labelled tasks;
# 74.01 is RoFormerV1 with 50,000 words, whose pretraining the paper does not describe.
from config.clue_liu import *

out_dir = 'out/clue_liu_roformer'
init_from = 'out/base_roformer_v2'
pooling = 'cls'
