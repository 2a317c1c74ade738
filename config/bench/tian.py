# Time and memory of a training step of Tian et al.'s base models (2021, table 1 and abstract) on one GPU. We
# have not run this.
# $ python bench.py config/bench/tian.py
# $ python results/report.py --out_dir=out/bench_tian
# Expect their ratios to BERT in the report, beside ours: Shatter takes 0.95 times its time at 256 tokens on
# V100s and 0.85 at 512 on TPUs; memory at 256 tokens is below half of that at 512. results/reproduce.md lists
# our own choices.
what = 'speed,memory'
variants = 'original,shatter,rpe,rab,xlnet_plm'
out_dir = 'out/bench_tian'
device = 'cuda'
dtype = 'bfloat16'
compile = True
n_layer = 12
n_head = 12
n_embd = 768
n_inner = 3072
vocab_size = 32_000
dropout = 0.1
lengths = 256, 512
batches = 16,
rounds = 10
