# BoolQ and MultiRC as in Tian et al. 2021, tables 4 and 5: BERT large and Shatter large, batch 16, the best
# step.
# $ python finetune.py config/tian/superglue.py --init_from=out/large_shatter --compare=out/large_original
# Expect (dev accuracy, Shatter and BERT): MultiRC 79.4 and 81.0 at 512 tokens, 81.7 and 79.6 at 1024; BoolQ
# 84.3 and 84.5, after 400k steps 82.8 and 81.8. results/reproduce.md has the other rows, and lists our own
# choices.
from config.tian.glue import *

out_dir = 'out/superglue_tian'
init_from = 'out/large_shatter'
tasks = 'superglue'
overrides = ''
