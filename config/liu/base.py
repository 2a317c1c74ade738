# Liu's recipe (2022, arXiv 2205.05842, appendix B), which GAU and both RoFormers share: CLUECorpusSmall,
# whole words masked, 30k steps of 256 x 512 tokens (one device: 4 micro-steps of 64), rate 3e-4 after a
# warmup of 10 %, linear decay, Adam's epsilon 1e-6, weight decay 0.01, dropout 0.1. The paper also trains 5k,
# 10k and 100k steps, for tables 1, 2 and 5: --max_iters and --warmup_iters, in the commands of
# results/reproduce.md. GAU: config/liu/gau.py; RoFormerV2: config/liu/roformer_v2.py.
# RoFormerV1 (Su et al. 2021) is BERT-base with rotary positions: 94,877,664 parameters; 124,099,664
# parameters with 50,000 words, 124,147,970 in the classifier of table 4, with its 1536 x 64 rotary angles.
# $ python train.py config/liu/base.py --position=rope --out_dir=out/base_roformer_v1
# Expect 1.45 times the time of GAU (table 4). The model of table 5 (CLUE 74.01) is not this one: the README
# of his code links published weights, junnyu/roformer_chinese_base, which config/liu/clue.py reads. The
# 50,000 words follow from the count in table 4; here it has the corpus's 12,000.
# Not in the paper, but in its code (github.com/HJHGJGHHG/GAU-PyTorch): clipping at 1 (pretrain/pretrain.sh),
# 15 % predicted (pretrain/run_mlm_wwm.py), 12,000 characters (utils/modeling.py), and a padded text a row:
# documents are cut at line ends after 512 characters and not joined (data/run_chinese_ref.py). Padding is
# masked for GAU alone: run_mlm_wwm.py passes no mask, and RoFormerV2 then attends to padding. Here neither
# does. A document is cut here every 510 tokens (packing); there what exceeds 512 tokens is dropped, and texts
# without a word of several characters too. pretrain.sh has rate 2e-4; the paper's 3e-4 is kept. Older
# versions of it have 128 x 8 rows and 1e-3 (a2359ed), or warmup 2,000 of 10,000 (4ac943b): which one made a
# printed row is not known. The masked accuracy that he prints is of training batches, with dropout
# (mlm_trainer.py); ours is of held-out documents. Ours: words by jieba (rjieba there); dtype auto (float16
# there); seed 1 (1234 there); a vocabulary made from the corpus (RoFormer's there); weights from N(0, 0.02),
# which is RoFormerV1's there too, while GAU's have a deviation of 0.004 to 0.008 and RoFormerV2's of 0.006 to
# 0.012; no decay of the gains of q and k.
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
