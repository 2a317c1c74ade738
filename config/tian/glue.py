# GLUE as in Tian et al. 2021, section 5.2: batch 16, rate 1e-5 (CoLA, SST-2 5e-6), the best step on dev.
# $ python finetune.py config/tian/glue.py --init_from=out/base_shatter
# $ python results/report.py --out_dir=out/glue_tian --paper=tian
# Expect (table 2, dev): MNLI 84.8/84.9, QNLI 90.7, SST-2 93.6 for Shatter base. results/reproduce.md has the
# other rows and tables, and lists our own choices.
out_dir = 'out/glue_tian'
init_from = 'out/base_shatter'
tasks = 'glue'
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
