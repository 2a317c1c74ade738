# GLUE as in Kowsher et al. 2024, appendix A.4: 10 epochs, rates 1e-4, 2e-5, 2e-6 for a third each, decay 0.1.
# $ python finetune.py config/kowsher/glue.py --compare=out/kowsher_original \
#       --init_from=out/kowsher_shared,out/kowsher_symmetric,out/kowsher_pairwise
# $ python results/report.py --out_dir=out/glue_kowsher --paper=kowsher --compare=kowsher_original
# Table 5 (noise on the embeddings), table 6 (each model on the other tasks) and figure 3 (seconds an epoch),
# a command each; the first two evaluate the trials of the first command again:
# $ python results/kowsher.py --tasks=mnli,qqp,sst2 --noise=0,0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4
# $ python results/kowsher.py --tasks=mnli,qnli,qqp,mrpc --cross=true
# $ python finetune.py config/kowsher/glue.py --tasks=cola,mnli,mrpc,qnli,rte,qqp --epochs=1 --trials=1 \
#       --compile=false --compare=out/kowsher_original --out_dir=out/glue_seconds
# $ python results/report.py --out_dir=out/glue_seconds --paper=kowsher
# Expect (their table 1): 80.09 on average for base `shared`, 79.71 for `original`, without deviations.
# Not in the paper, so ours: when the rate falls; batch 16, which it gives for figure 3 alone; dropout 0.1 of
# everything but the attention; Adam's betas 0.9 and 0.999 and epsilon 1e-8, clipping at 1, no warmup; BERT's
# pooler; 5 seeds, 512 tokens, the weights of the last step; STS-B as the mean of its two correlations (the
# paper prints one number for both); dtype auto. The noise is added to each token's input of the first
# block, after the embeddings' norm, in a random direction, with 5 to 40 % of the mean norm there (the paper
# also gives it a deviation of 1, and does not say which embeddings). Which of table 6 are the
# training tasks it does not say: the report has both readings (results/errata.md).
out_dir = 'out/glue_kowsher'
init_from = 'out/kowsher_shared'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
epochs = 10
learning_rate = 1e-4
warmup_fraction = 0.0
schedule = 'thirds'
weight_decay = 0.1
overrides = 'mrpc.metric=accuracy qqp.metric=accuracy stsb.metric=pearson_spearman'
