# GLUE as in Courtois et al. 2024, section 3.4: 8 tasks x 5 seeds, 5 epochs, batch 16, rate 1e-5, linear decay
# $ python finetune.py config/glue_courtois.py --init_from=out/base_pairwise --compare=out/base_original
# Expect (their table 3): 79.36 (0.37) for base `pairwise`, 78.74 (0.63) `original`, 74.82 (0.36) `symmetric`.
# The paper does not give warmup (none here), weight decay (BERT's 0.01) and dropout (BERT's 0.1).
out_dir = 'out/glue_courtois'
init_from = 'out/base_pairwise'
tasks = 'mrpc,cola,mnli,qqp,rte,stsb,qnli,sst2'
paper = 'courtois'
epochs = 5
learning_rate = 1e-5
warmup_fraction = 0.0
overrides = 'mrpc.metric=f1_accuracy qqp.metric=accuracy stsb.metric=pearson_spearman'
