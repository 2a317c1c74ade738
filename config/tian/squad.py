# SQuAD v1.1 as in Tian et al. 2021, section 5.2.2: batch 16, the best step on dev.
# $ python finetune.py config/tian/squad.py --init_from=out/base_shatter
# Expect (table 3, EM/F1): 82.6/89.6 at 512 and 82.8/89.6 at 1024 tokens for Shatter base, 81.8/88.7 at 512
# for Shatter GPU. results/reproduce.md has the command for twice the pretrained length, and lists our own
# choices.
from config.tian.glue import *

out_dir = 'out/squad_tian'
tasks = 'squad1'
overrides = ''
