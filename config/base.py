# BERT-base with Courtois et al.'s recipe (2024, section 3.3), the defaults of train.py: 12 layers, 768 wide,
# 200k steps of 256 x 512 tokens, rate 1e-4 after 10k steps, linear decay, Adam's epsilon 1e-12, 15 %
# predicted.
# The corpus is FineWeb, which needs no account; the paper's is OSCAR: prepare it with config/data_oscar.py,
# then add --dataset=oscar. All results expected below and in the configs that import this file are for OSCAR.
# Not in the paper, but in its code (github.com/mcrts/ACL2024-SymmetricAttentionBert, experiments/acl2024/
# bert_base.sh): weight decay 0.01, clipping at 1, dropout 0.1, weights from N(0, 0.02); the milestones are
# the points of figure 3.
# Ours: dtype auto (float16 there); rows start with [CLS] and end with [SEP] (there they are cut from joined
# documents); exactly 15 % of each row (there on average); validation every 1,000 steps (250 there).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py
# Expect (their figure 2b, on OSCAR): the loss leaves its first plateau at step 25,000 with `original`.
out_dir = 'out/base'
dataset = 'fineweb'
dropout = 0.1
attention_dropout = 0.1
milestones = (6000, 8000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 22_000, 24_000, 30_000, 35_000,
              40_000, 50_000, 75_000, 125_000, 150_000, 200_000)
