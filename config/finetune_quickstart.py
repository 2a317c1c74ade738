# From which package is a docstring? The quickstart's texts with their packages as labels, three seeds.
# $ python finetune.py config/finetune_quickstart.py
# A seventh of the texts, chosen by a hash, is held out. Run config/quickstart.py first.
# Expect minutes on two cores; results/finetune.md has the scores.
out_dir = 'out/finetune_quickstart'
init_from = 'out/quickstart'
tasks = 'custom'
train_file = 'data/docstrings/docstrings.jsonl'
texts = 'text'
label = 'package'
trials = 3
block_size = 128                # the quickstart was pretrained on rows of 64
epochs = 3
total_batch = 32
batch_size = 32
learning_rate = 1e-3
