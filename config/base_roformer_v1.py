# RoFormerV1 (Su et al. 2021), BERT-base with rotary positions: 94,877,664 parameters; 124,099,664 parameters
# with 50,000 words, 124,147,970 in the classifier of Liu 2022, table 4, with its 1536 x 64 rotary angles.
# $ python train.py config/base_roformer_v1.py
# Expect: 1.45 times the time of base_gau.py (table 4). The model of table 5 (CLUE 74.01) is not this one: the
# README of his code links published weights, junnyu/roformer_chinese_base. The 50,000 words follow from the
# count in table 4; here it has the corpus's 12,000.
from config.liu_base import *

out_dir = 'out/base_roformer_v1'
position = 'rope'
