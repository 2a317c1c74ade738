# BERT-base: 12 layers, 768 wide, 200k steps of 256 x 512 tokens, rate 1e-4 after 10k steps, linear decay,
# Adam's epsilon 1e-12, 15 % predicted; what is not set below is a default of train.py. small.py and large.py
# are the same recipe, so that runs of one size can be compared for any --attention and --position.
# It is the recipe of Courtois et al. 2024 (section 3.3) but for the corpus: FineWeb, which needs no account.
# With their corpus, OSCAR: config/courtois/base.py. The recipes of the other papers (config/kowsher, tian and
# liu) have other corpora, batches and steps: their runs cannot be compared with these.
# Not in the paper, but in its code (github.com/mcrts/ACL2024-SymmetricAttentionBert,
# experiments/acl2024/bert_base.sh): weight decay 0.01, clipping at 1, dropout 0.1, weights from N(0, 0.02);
# the milestones are the points of figure 3.
# Ours: dtype auto (float16 there); rows start with [CLS] and end with [SEP] (there they are cut from joined
# documents); exactly 15 % of each row (there on average); validation every 1,000 steps (250 there).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py --attention=shared \
#       --out_dir=out/base_shared
# Expect no printed result on FineWeb. On OSCAR (their figure 2b) the loss leaves its first plateau at step
# 25,000 with `original`; no paper trains `shared` with this recipe.
out_dir = 'out/base'
dataset = 'fineweb'
dropout = 0.1
attention_dropout = 0.1
milestones = (6000, 8000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 22_000, 24_000, 30_000, 35_000,
              40_000, 50_000, 75_000, 125_000, 150_000, 200_000)
