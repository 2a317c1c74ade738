# SQuAD v1.1 as in Tian et al. 2021, section 5.2.2: batch 16, rate 1e-5, best of evaluations every 1,000
# steps.
# $ python finetune.py config/squad_tian.py --init_from=out/base_shatter
# Twice the pretrained length ("ext."):
# $ python finetune.py config/squad_tian.py --init_from=out/gpu_shatter --block_size=512 --out_dir=out/squad
# Expect (their table 3, EM/F1): 82.6/89.6 at 512 and 82.8/89.6 at 1024 for Shatter base.
from config.glue_tian import *

out_dir = 'out/squad_tian'
tasks = 'squad1'
overrides = ''
