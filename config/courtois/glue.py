# GLUE as in Courtois et al. 2024, section 3.4: 8 tasks x 5 seeds, 5 epochs, batch 16, rate 1e-5, linear
# decay.
# $ python finetune.py config/courtois/glue.py --init_from=out/base_pairwise --compare=out/base_original
# $ python results/report.py --out_dir=out/glue_courtois --paper=courtois --compare=base_original
# Their figure 3, the score by pretraining step, of one seed in their code: a glob of .pt files takes the
# milestones of config/base.py. The report names the first step with 95 % of the last score.
# $ python finetune.py config/courtois/glue.py --init_from='out/base_pairwise/ckpt_*.pt' --trials=1 \
#       --out_dir=out/glue_curve
# $ python results/report.py --out_dir=out/glue_curve --paper=courtois
# Five pretraining runs of each system in place of the paper's one: train with --seed=N
# --out_dir=out/base_pairwise-N for N from 1 to 5, and `original` likewise:
# $ python finetune.py config/courtois/glue.py --init_from='out/base_pairwise-*' \
#       --compare='out/base_original-*' --out_dir=out/glue_seeds
# $ python results/report.py --out_dir=out/glue_seeds --paper=courtois --compare=base_original \
#       --pool=base_original,base_pairwise
# Expect (their table 3): 79.36 (0.37) for base `pairwise`, 78.74 (0.63) `original`, 74.82 (0.36) `symmetric`;
# 95 % of it after 30,000 steps of `pairwise`, 65,000 of `original` (figure 3; see results/errata.md).
# Not in the paper, but in its code (github.com/mcrts/ACL2024-SymmetricAttentionBert, experiments/acl2024/
# run_glue.sh and scripts/run_glue.py): 128 tokens, warmup of 10 %, no weight decay, Adam's epsilon 1e-8,
# clipping at 1, dropout 0.1, BERT's pooler, seeds 1 to 5, the weights of the last step. QQP: the paper says
# accuracy, its numbers are the mean of accuracy and F1. Ours: dtype auto (float16 there).
out_dir = 'out/glue_courtois'
init_from = 'out/base_pairwise'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
block_size = 128
epochs = 5
learning_rate = 1e-5
warmup_fraction = 0.1
weight_decay = 0.0
overrides = 'mrpc.metric=f1_accuracy qqp.metric=f1_accuracy stsb.metric=pearson_spearman'
