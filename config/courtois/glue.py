# GLUE as in Courtois et al. 2024, section 3.4: 8 tasks x 5 seeds, 5 epochs, batch 16, rate 1e-5.
# $ python finetune.py config/courtois/glue.py --init_from=out/base_pairwise --compare=out/base_original
# $ python results/report.py --out_dir=out/glue_courtois --paper=courtois --compare=base_original
# Expect (table 3): 79.36 (0.37) for base `pairwise`, 78.74 (0.63) `original`, 74.82 (0.36) `symmetric`.
# results/reproduce.md has the commands for figure 3 and lists our own choices.
out_dir = 'out/glue_courtois'
init_from = 'out/base_pairwise'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
block_size = 128
epochs = 5
learning_rate = 1e-5
warmup_fraction = 0.1
weight_decay = 0.0
overrides = 'mrpc.metric=f1_accuracy qqp.metric=f1_accuracy stsb.metric=pearson_spearman'
