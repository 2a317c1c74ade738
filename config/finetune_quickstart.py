# Three labelled tasks made of the same docstrings as the quickstart's corpus, fine-tuned with three seeds each.
# $ python finetune.py config/finetune_quickstart.py
# Of one text: which package is it from? Of two: are they of one docstring? In a text: what type has parameter x?
# Expect minutes on two cores; run config/quickstart.py first.
out_dir = 'out/finetune_quickstart'
init_from = 'out/quickstart'
tasks = 'docstrings'
trials = 3
block_size = 128                # the quickstart was pretrained on rows of 64
epochs = 4
total_batch = 32
batch_size = 32
learning_rate = 1e-3
