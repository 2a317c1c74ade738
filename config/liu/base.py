# Liu's recipe (2022, arXiv 2205.05842, appendix B) on CLUECorpusSmall, 30k steps of 256 x 512 tokens, which
# gau.py and roformer_v2.py share. This is RoFormerV1, BERT-base with rotary positions.
# $ python train.py config/liu/base.py --position=rope --out_dir=out/base_roformer_v1
# Expect 1.45 times the time of GAU (table 4). The RoFormerV1 of table 5 uses published weights instead.
# results/reproduce.md lists our own choices.
# Cost (results/costs.py): 94,877,664 parameters, 3,932 million tokens of 0.541 GFLOP, 1.5 GPU hours
out_dir = 'out/liu_base'
dataset = 'clue'
packing = 'documents'
whole_word = True
dropout = 0.1
attention_dropout = 0.1
batch_size = 64
max_iters = 30_000
learning_rate = 3e-4
warmup_iters = 3000
adam_eps = 1e-6
