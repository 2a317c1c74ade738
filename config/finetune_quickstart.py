# Which package does a docstring come from? The task is read from a labelled file (--tasks=custom), as you can
# do with your own. It has three seeds, and a seventh of the docstrings is held out.
# $ python finetune.py config/finetune_quickstart.py
# Expect minutes on two cores. Run config/quickstart.py first.
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
pooling = 'gelu'                # with the rope of the quickstart, only this one can be exported
epochs = 3
total_batch = 32
batch_size = 32
learning_rate = 1e-3
