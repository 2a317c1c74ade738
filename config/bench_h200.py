# Speed of the README's systems at BERT-base on one GPU, beside transformers. Liu's table 4: bench_liu.py.
# $ python bench.py config/bench_h200.py
# $ python bench.py config/bench_h200.py --lengths=128 --batches=1024 --modes=train,finetune \
#       --out_dir=results/h200_128
# Expect minutes, most of them compilation. Not run yet: 800,000 tokens/s of `original` is the aim on an H200.
what = 'params,speed'
variants = 'original,symmetric,pairwise,shared,shatter,rpe,rab,roformer_v2,gau'
out_dir = 'results/h200'
device = 'cuda'
dtype = 'bfloat16'
n_layer = 12
n_head = 12
n_embd = 768
n_inner = 3072
modes = 'train'
lengths = 512,
batches = 256,
rounds = 10
warmup = 3
compile = True
peers = 'hf_bert,hf_bert_masked,hf_roformer'
