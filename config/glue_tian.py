# GLUE as in Tian et al. 2021, section 5.2: batch 16, rate 1e-5 (CoLA, SST-2 5e-6); of
# evaluations every 1,000 steps the best.
# $ python finetune.py config/glue_tian.py --init_from=out/base_shatter
# Twice the pretrained length ("ext."), and BERT's pooling (their table 7):
# $ python finetune.py config/glue_tian.py --init_from=out/gpu_shatter --block_size=512 --out_dir=out/tian_512
# $ python finetune.py config/glue_tian.py --init_from=out/base_shatter --pooling=cls --out_dir=out/tian_cls
# Expect (their table 2, dev): MNLI 84.8/84.9, QNLI 90.7, SST-2 93.6 for Shatter base. They print a run better
# than average; here it is one run, its best evaluation chosen on the same dev set. They give neither epochs
# (10 here) nor a schedule (BERT's warmup and linear decay here).
out_dir = 'out/glue_tian'
init_from = 'out/base_shatter'
tasks = 'glue'
paper = 'tian'
trials = 1
pooling = 'layerwise'
epochs = 10
learning_rate = 1e-5
keep_best = True
eval_interval = 1000
overrides = '''
    cola.learning_rate=5e-6  cola.metric=accuracy  sst2.learning_rate=5e-6
    mrpc.metric=f1  qqp.metric=f1  stsb.metric=spearman
'''
