# Speed and memory of the README's systems at BERT-base on one GPU, beside transformers' BERT.
# $ python bench.py config/bench/gpu.py
# Expect the numbers of results/bench.md in about ten minutes, most of which is compilation.
what = 'memory,speed'
variants = 'original,rpe,rab,shatter,gau,pairwise,symmetric,shared,roformer_v1,roformer_v2,hf_bert'
out_dir = 'out/bench_gpu'
device = 'cuda'
dtype = 'bfloat16'
n_layer = 12
n_head = 12
n_embd = 768
n_inner = 3072
lengths = 512,
batches = 64,
rounds = 10
compile = True
