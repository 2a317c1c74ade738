# BoolQ and MultiRC as in Tian et al. 2021, tables 4 and 5: BERT large and Shatter large, batch 16; of
# evaluations every 1,000 steps the best on dev.
# $ python finetune.py config/tian/superglue.py --init_from=out/large_shatter --compare=out/large_original
# Their other rows: MultiRC at twice the pretrained length ("ext."); BoolQ by pretraining step, for figure 3
# and, at step 400,000, for table 5:
# $ python finetune.py config/tian/superglue.py --compare=out/large_original --tasks=multirc \
#       --block_size=1024 \
#       --out_dir=out/multirc_1024
# $ python finetune.py config/tian/superglue.py --init_from='out/large_shatter/ckpt_*.pt' --tasks=boolq \
#       --out_dir=out/boolq_curve
# Expect (dev accuracy, Shatter and BERT): MultiRC 79.4 and 81.0 at 512 tokens, 81.7 and 79.6 at 1024; BoolQ
# 84.3 and 84.5, after 400k steps 82.8 and 81.8. The test scores (MultiRC: F1a) come from
# super.gluebenchmark.com: --predict=test writes predictions (of MultiRC a line an answer).
# Not in the paper, so ours: rate 1e-5, which it gives for GLUE; the schedule and optimizer of
# config/tian/glue.py; accuracy on the reported dev set chooses the step; one run; BoolQ at 512 tokens; the
# segments, passage and question (BoolQ), passage and question with answer (MultiRC).
from config.tian.glue import *

out_dir = 'out/superglue_tian'
init_from = 'out/large_shatter'
tasks = 'superglue'
overrides = ''
