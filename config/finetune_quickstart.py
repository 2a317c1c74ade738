# Which package is a docstring from? A task of your own files (--tasks=custom), three seeds; a seventh of the
# docstrings is held out.
# $ python finetune.py config/finetune_quickstart.py
# Expect minutes on two cores; results/findings.md has the scores. Run config/quickstart.py first.
out_dir = 'out/finetune_quickstart'
init_from = 'out/quickstart'
tasks = 'custom'
train_file = 'data/docstrings/docstrings.jsonl'
texts = 'text'
label = 'package'
trials = 3
train_samples = 6000
eval_samples = 1000
block_size = 128                # the quickstart was pretrained on rows of 64
epochs = 3
total_batch = 32
batch_size = 32
learning_rate = 1e-3
