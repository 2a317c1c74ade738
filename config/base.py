# BERT-base, 200k steps of 256 x 512 tokens: the recipe of Courtois et al. 2024, on FineWeb because it needs
# no account.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py --attention=symmetric \
#       --out_dir=out/base_symmetric
# Expect no printed result, since theirs is on OSCAR (config/courtois/base.py). results/reproduce.md lists our
# own choices.
# Cost (results/costs.py): 109,514,298 parameters, 26,214 million tokens of 0.554 GFLOP, 10.1 GPU hours
out_dir = 'out/base'
dataset = 'fineweb'
dropout = 0.1
attention_dropout = 0.1
milestones = (6000, 8000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 22_000, 24_000, 30_000, 35_000,
              40_000, 50_000, 75_000, 125_000, 150_000, 200_000)
