# The tasks of the study for one pretrained run, two seeds each: GLUE's CoLA, SST-2 (8,000 examples) and MRPC,
# and the package of a docstring; see results/study.md
# $ python finetune.py config/results/study_finetune.py --init_from=out/study/shatter-1 \
#       --out_dir=out/finetune_study/shatter-1
# Expect ten minutes on one core with AMX or AVX512_BF16, and the scores of results/study.md.
out_dir = 'out/finetune_study'
init_from = 'out/study'
tasks = 'cola,sst2,mrpc,custom'
train_file = 'data/docstrings/docstrings.jsonl'
texts = 'text'
label = 'package'
trials = 2
epochs = 2
total_batch = 32
batch_size = 32
learning_rate = 3e-4
attention_dropout = 0.0
overrides = ('cola.epochs=3 mrpc.learning_rate=1e-4 sst2.train_samples=8000 custom.train_samples=3000 '
             'custom.eval_samples=1000')
keep_models = False
dtype = 'bfloat16'
