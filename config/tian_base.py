# BERT-base with Tian et al.'s TPU recipe (2021, table 1 and appendix A.2), which their other models share: 1M
# steps of 256 x 512 tokens, rate 1e-4 after 10k steps, linear decay, weight decay 0.01 (the default).
# Not in the paper, so ours: dropout 0.1, weights from N(0, 0.02), clipping at 1, Adam's betas 0.9 and 0.999
# and epsilon 1e-6 (Devlin et al. 2018 and their code), joined documents, dtype auto, and which steps are
# milestones (tables 2 and 5 name 400,000).
# Their losses (figures 1, 4 and 5) are on the Penn Treebank: prepare it with config/data_ptb.py and train
# with --validation=ptb, as for all configs that import this one; the losses on held-out documents, which are
# always logged, are not comparable.
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian_base.py
# Expect: see config/tian_original.py.
out_dir = 'out/tian_base'
dataset = 'books_wikipedia_sp'
dropout = 0.1
attention_dropout = 0.1
adam_eps = 1e-6
max_iters = 1_000_000
milestones = (100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000)
