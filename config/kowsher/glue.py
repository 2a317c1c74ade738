# GLUE as in Kowsher et al. 2024, appendix A.4: 10 epochs, rates 1e-4, 2e-5, 2e-6 for a third each, decay 0.1.
# $ python finetune.py config/kowsher/glue.py --compare=out/kowsher_original \
#       --init_from=out/kowsher_shared,out/kowsher_symmetric,out/kowsher_pairwise
# Expect (table 1): 80.09 on average for base `shared`, 79.71 for `original`, without deviations.
# results/reproduce.md has the commands for tables 5 and 6 and figure 3, and lists our own choices.
out_dir = 'out/glue_kowsher'
init_from = 'out/kowsher_shared'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
epochs = 10
learning_rate = 1e-4
warmup_fraction = 0.0
schedule = 'thirds'
weight_decay = 0.1
overrides = 'mrpc.metric=accuracy qqp.metric=accuracy stsb.metric=pearson_spearman'
