# Scales and normalisers of GAU (Liu 2022, tables 1 and 2) on a small run with his proportion n = 4 s, with
# rows of joined documents ("512" there) and of one document each ("diff"): 14 systems, three seeds.
# $ python bench.py config/bench_liu_scales.py
# Expect half an hour on two cores; the outcome is in results/bench.md. Liu's masked accuracy: ns 23.11 %, n2
# 20.16, n 19.34, s2 diverges; softmax_plus, softmax, scaled_squared_relu, squared_relu in this order
# ("diff": softmax first). Ours: sizes, steps, corpus, no dropout, no whole words. At full size:
# config/gau_*.py.
what = 'convergence'
variants = ('gau_n2,gau_n,gau_squared_relu,gau_s2,gau_scaled_squared_relu,gau_softmax,gau,'
            'gau_n2_diff,gau_n_diff,gau_squared_relu_diff,gau_s2_diff,gau_scaled_squared_relu_diff,'
            'gau_softmax_diff,gau_diff')
out_dir = 'out/bench_liu_scales'
recipe = 'config/compare_gau.py'
steps = 600
seeds = 3
eval_interval = 100
