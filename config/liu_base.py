# Liu's recipe (2022, appendix B), which GAU and both RoFormers share: CLUECorpusSmall, whole words masked,
# 30k steps of 256 x 512 tokens (one device: 4 micro-steps of 64), rate 3e-4 after a warmup of 10 %, linear
# decay, Adam's epsilon 1e-6, weight decay 0.01, dropout 0.1. The paper also trains 5k (config/gau_scales.py),
# 10k (gau_*_512, gau_*_diff) and 100k steps (base_gau_100k).
# $ python train.py config/liu_base.py
# Expect: see config/base_gau.py, config/base_roformer_v1.py and config/base_roformer_v2.py.
# Not in the paper, but in its code (github.com/HJHGJGHHG/GAU-PyTorch): clipping at 1 (pretrain/pretrain.sh),
# 15 % predicted (pretrain/run_mlm_wwm.py), 12,000 characters (utils/modeling.py), and a text a row, padded
# and masked: documents are cut at line ends after 512 characters and not joined (data/run_chinese_ref.py).
# Here a document is cut every 510 tokens (packing). pretrain.sh has rate 2e-4; the paper's 3e-4 is kept.
# Ours: words by jieba (rjieba there); dtype auto (float16 there); a vocabulary made from the corpus
# (RoFormer's there); weights from N(0, 0.02), there from a truncated normal of deviation 0.004 to 0.008; no
# decay of the gains of q and k.
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
