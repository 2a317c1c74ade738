# GLUE as in Courtois et al. 2024, section 3.4: 8 tasks x 5 seeds, 5 epochs, batch 16, rate 1e-5, linear
# decay.
# $ python finetune.py config/glue_courtois.py --init_from=out/base_pairwise --compare=out/base_original
# Their figure 3, the score by pretraining step, of all checkpoints that are there: the milestones of
# config/base.py and the newest two. The report names the first step with 95 % of the last score.
# $ python finetune.py config/glue_courtois.py --init_from='out/base_pairwise/ckpt_*.pt' \
#       --out_dir=out/glue_curve
# Five pretraining runs of each system in place of the paper's one: train with --seed=N
# --out_dir=out/base_pairwise-N for N from 1 to 5, and base_original.py likewise:
# $ python finetune.py config/glue_courtois.py --init_from='out/base_pairwise-*' \
#       --compare='out/base_original-*' --out_dir=out/glue_seeds
# Expect (their table 3): 79.36 (0.37) for base `pairwise`, 78.74 (0.63) `original`, 74.82 (0.36) `symmetric`;
# 95 % of it after 30,000 steps of `pairwise`, 65,000 of `original` (figure 3).
# Not in the paper, so ours: no warmup, weight decay 0.01, clipping at 1 and dropout 0.1 (BERT's), 512 tokens,
# the weights of the last step.
out_dir = 'out/glue_courtois'
init_from = 'out/base_pairwise'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
paper = 'courtois'
epochs = 5
learning_rate = 1e-5
warmup_fraction = 0.0
overrides = 'mrpc.metric=f1_accuracy qqp.metric=accuracy stsb.metric=pearson_spearman'
