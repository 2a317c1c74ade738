# Speed of the README's systems at BERT-base on one GPU, beside transformers.
# $ python bench.py config/bench_h200.py
# Expect ten minutes, most of them compilation, which results/h200/3_systems.py does in parallel. Not run yet.
# 64 rows of 512 tokens fill the device, and leave room for `rpe` and for the logits of all positions.
what = 'params,speed,memory'
variants = 'original,rpe,rab,shatter,gau,pairwise,symmetric,shared,roformer_v1,roformer_v2'
out_dir = 'out/bench_h200'
device = 'cuda'
dtype = 'bfloat16'
n_layer = 12
n_head = 12
n_embd = 768
n_inner = 3072
modes = 'train'
lengths = 512,
batches = 64,
rounds = 10
warmup = 3
compile = True
peers = 'hf_bert_masked,hf_bert,hf_roformer'
memory_lengths = 512,
