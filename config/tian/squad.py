# SQuAD v1.1 as in Tian et al. 2021, section 5.2.2: batch 16; of evaluations every 1,000 steps the best on
# dev.
# $ python finetune.py config/tian/squad.py --init_from=out/base_shatter
# Twice the pretrained length ("ext."), 1024 tokens for runs of base.py and large.py, 512 for those of gpu.py:
# $ python finetune.py config/tian/squad.py --init_from=out/base_shatter --block_size=1024 \
#       --out_dir=out/squad_tian_1024
# $ python finetune.py config/tian/squad.py --init_from=out/gpu_shatter --block_size=512 \
#       --out_dir=out/squad_tian_512
# Expect (their table 3, EM/F1): 82.6/89.6 at 512 and 82.8/89.6 at 1024 for Shatter base, 81.8/88.7 at 512 for
# Shatter GPU.
# The best step is chosen on the dev set that is reported. Not in the paper, so ours: F1 chooses it; rate
# 1e-5, which it gives for GLUE; the schedule and optimizer of config/tian/glue.py; windows 128 tokens apart
# and answers of at most 30 tokens (BERT's code); one run.
from config.tian.glue import *

out_dir = 'out/squad_tian'
tasks = 'squad1'
overrides = ''
