# Liu's recipe (2022, appendix B), which GAU and both RoFormers share: CLUECorpusSmall, whole words masked,
# 30k steps of 256 x 512 tokens (one device: 4 micro-steps of 64), rate 3e-4 after a warmup of 10 %, linear
# decay. The paper does not give clipping: train.py's default, BERT's. It also trains 5k, 10k, 100k steps:
# $ python train.py config/liu_base.py --max_iters=100000 --warmup_iters=10000
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
