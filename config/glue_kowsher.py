# GLUE as in Kowsher et al. 2024, appendix A.4: 10 epochs, batch 16, rates 1e-4, 2e-5, 2e-6 for a third each.
# $ python finetune.py config/glue_kowsher.py --init_from=out/base_shared --compare=out/base_original
# For their tables 5 and 6, noise on the embeddings and each task's model on the other tasks:
# $ python finetune.py config/glue_kowsher.py --init_from=out/base_shared --noise=0:0.4:0.05 --cross=true
# Expect (their table 1): 80.09 on average for base `shared`, 79.71 for `original`, without deviations.
# The paper does not say when the rate falls, nor the number of seeds (5 here).
out_dir = 'out/glue_kowsher'
init_from = 'out/base_shared'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
paper = 'kowsher'
epochs = 10
learning_rate = 1e-4
warmup_fraction = 0.0
schedule = 'thirds'
weight_decay = 0.1
overrides = 'mrpc.metric=accuracy qqp.metric=accuracy stsb.metric=pearson_spearman'
