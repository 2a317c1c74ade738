# BERT-base with Courtois et al.'s recipe (2024, section 3.3), the defaults of train.py: 12 layers, 768 wide,
# 200k steps of 256 x 512 tokens, rate 1e-4 after 10k steps, linear decay, Adam's epsilon 1e-12. The corpus is
# FineWeb, which needs no account; the paper's is OSCAR: prepare it with config/data_oscar.py, then add
# --dataset=oscar. All results expected below and in the configs that import this file are for OSCAR.
# Not in the paper, so ours: the value of weight decay, 0.01, clipping of gradients at 1 and dropout 0.1, all
# BERT's; the milestones (of the steps of its figure 3 the paper names only 30,000 and 65,000).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py
# Expect (their figure 2b, on OSCAR): the loss leaves its first plateau at step 25,000 with `original`.
out_dir = 'out/base'
dataset = 'fineweb'
dropout = 0.1
attention_dropout = 0.1
milestones = (1000, 5000, 10_000, 15_000, 20_000, 25_000, 30_000, 40_000, 50_000, 65_000, 80_000, 100_000,
              125_000, 150_000, 175_000, 200_000)
