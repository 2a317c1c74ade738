# CLUE as in Liu 2022, table 6, for RoFormerV1 and V2: config/clue_liu.py with BERT's pooler, as many
# parameters as their counts of table 4 include. His code (utils/roformer/modeling_roformer.py) has GELU in
# it, not tanh, and dropout before it.
# $ python finetune.py config/clue_liu_roformer.py --init_from=out/base_roformer_v2
# Expect (his table 5, average): 67.39 for RoFormerV2 after 30k steps. The other two rows are published
# weights, which are not read here: 76.45 RoFormerV2, pretrained on a larger corpus and several labelled
# tasks; 74.01 RoFormerV1, by the README of his code junnyu/roformer_chinese_base.
from config.clue_liu import *

out_dir = 'out/clue_liu_roformer'
init_from = 'out/base_roformer_v2'
pooling = 'cls'
