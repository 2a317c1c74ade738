# Two tasks with labels from the structure of the quickstart's docstrings, three seeds each.
# $ python finetune.py config/finetune_quickstart.py
# Which package is a text from? Are two paragraphs in the right order?
# Expect 73 and 95 points (majority 18 and 50) in 10 core minutes; run config/quickstart.py first.
out_dir = 'out/finetune_quickstart'
init_from = 'out/quickstart'
tasks = 'docstrings'
trials = 3
block_size = 128                # the quickstart was pretrained on rows of 64
epochs = 3
total_batch = 32
batch_size = 32
learning_rate = 1e-3
