# Liu's recipe (2022, appendix B), which GAU and both RoFormers share: CLUECorpusSmall, whole words masked,
# 30k steps of 256 x 512 tokens (one device: 4 micro-steps of 64), rate 3e-4 after a warmup of 10 %, linear
# decay. The paper also trains 5k (config/gau_scales.py), 10k (gau_*_512, gau_*_diff) and 100k steps
# (base_gau_100k).
# $ python train.py config/liu_base.py
# Expect: see config/base_gau.py, config/base_roformer_v1.py and config/base_roformer_v2.py.
# Not in the paper, so ours: clipping at 1 (BERT's), how words are found (jieba, config/data_clue.py).
out_dir = 'out/liu_base'
dataset = 'clue'
whole_word = True
dropout = 0.1
attention_dropout = 0.1
batch_size = 64
max_iters = 30_000
learning_rate = 3e-4
warmup_iters = 3000
adam_eps = 1e-6
