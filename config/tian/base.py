# BERT-base with Tian et al.'s TPU recipe (2021, table 1 and appendix A.2), which their other models share: 1M
# steps of 256 x 512 tokens, rate 1e-4 after 10k steps, linear decay, weight decay 0.01 (the default).
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian/base.py --validation=ptb \
#       --out_dir=out/tian_original
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian/base.py --validation=ptb \
#       --attention=shatter --position=none --out_dir=out/base_shatter
# Expect: see results/reproduce.md, which has the command of each of their models and what they print for it.
# Their losses (figures 1, 4 and 5) are on the Penn Treebank: prepare it with config/data/ptb.py and train
# with --validation=ptb, as for config/tian/large.py and gpu.py; the losses on held-out documents, which are
# always logged, are not comparable.
# Not in the paper, so ours: dropout 0.1, weights from N(0, 0.02), clipping at 1, Adam's betas 0.9 and 0.999
# and epsilon 1e-6 (Devlin et al. 2018 and their code), joined documents, dtype auto, and which steps are
# milestones (tables 2 and 5 name 400,000).
# Of `shatter`: the values of the partition at distance 0, half a part on each side (model.py). Appendix A.1
# also tried one partition for all layers, without numbers; that it is the last layer's
# (--same_partition=true) is ours.
# Of `one_head_sigmoid`: section 3.2 says, without numbers, that one value matrix for all parts has a higher
# loss. That it means y = A v, without the partition (--one_value_matrix=true), is our reading.
# Of `rab`: distances beyond 128 share a bucket, the default of T5, whose code they copied.
# Of `xlnet`: the last 15 % of an order are predicted, single tokens. Unlike XLNet: no dropout after the MLP's
# activation and at the output; a norm of the embeddings, segments as vectors added to them, and BERT's head
# in place of the tied matrix alone.
out_dir = 'out/tian_base'
dataset = 'books_wikipedia_sp'
dropout = 0.1
attention_dropout = 0.1
adam_eps = 1e-6
max_iters = 1_000_000
milestones = (100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000)
