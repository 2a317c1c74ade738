# BERT-base with Tian et al.'s TPU recipe (2021, table 1 and appendix A.2), which their other models share: 1M
# steps of 256 x 512 tokens, rate 1e-4 after 10k steps, linear decay, weight decay 0.01 (the default).
# $ torchrun --standalone --nproc_per_node=8 train.py config/tian/base.py --validation=ptb \
#       --attention=shatter --position=none --out_dir=out/base_shatter
# Expect the results in results/reproduce.md, which has the command of each of their models and lists our own
# choices.
# Cost (results/costs.py): 103,281,152 parameters, 131,072 million tokens of 0.514 GFLOP, 46.8 GPU hours
out_dir = 'out/tian_base'
dataset = 'books_wikipedia_sp'
dropout = 0.1
attention_dropout = 0.1
adam_eps = 1e-6
max_iters = 1_000_000
milestones = (100_000, 200_000, 400_000, 600_000, 800_000, 1_000_000)
