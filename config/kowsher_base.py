# BERT-base with Kowsher et al.'s recipe (2024, section 2.5), the same for four attentions: BooksCorpus and
# Wikipedia, 528 rows of 512 tokens a step (4 devices x 132, here in two micro-steps of 66), dropout 0.1, 15 %
# predicted.
# $ torchrun --standalone --nproc_per_node=4 train.py config/kowsher_base.py
# The paper says 20 epochs of 3.2 billion tokens, 236,742 steps, but its figure 2 has 200k steps, 16.9 epochs:
# here 200k; --max_iters=236742 for 20 epochs. Not in the paper, so ours: rate 1e-4 after 10k steps, linear
# decay and Adam's epsilon 1e-12 (Courtois et al.'s), weight decay 0.01 and clipping at 1 (BERT's), joined
# documents, weights from N(0, 0.02), dtype auto, a masked LM alone (the paper does not say whether BERT's
# next sentences were predicted too), and the 10,000 held-out documents of the loss. Weights with their code
# are at huggingface.co/Kowsher/shared-weight-bert-based; the code was not read for this.
# Expect: see config/kowsher_shared.py, the only one of the four whose loss the paper shows.
from config.base import *

out_dir = 'out/kowsher_base'
dataset = 'books_wikipedia'
total_batch = 528
batch_size = 66
