# Memory and time of a training step as in Liu 2022 (arXiv 2205.05842), table 4.
# $ python bench.py config/bench/liu.py
# $ python bench.py config/bench/liu.py --device=cpu --n_layer=2 --batches=1 --rounds=3
# $ python results/report.py --out_dir=out/bench_liu
# Expect his ratios to GAU in its column "printed": at 512 tokens the others take 1.45 and 1.224 times
# its time, and 124.6 and 118.7 % of its memory. results/reproduce.md lists our own choices.
what = 'params,memory,speed'
variants = 'gau_12k,roformer_v1_50k,roformer_v2_12k'
out_dir = 'out/bench_liu'
device = 'cuda'
dtype = 'float32'
n_layer = 12
n_head = 12
n_embd = 768
n_inner = 3072
batches = 8,
lengths = 256, 512, 1024, 2048
rounds = 10
dropout = 0.1
full_logits = True
