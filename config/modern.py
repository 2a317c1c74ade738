# A modern recipe for encoders. Name this file after another config file. It follows Geiping and Goldstein
# 2022 (2212.14034), Portes et al. 2023 (2312.17482), Warner et al. 2024 (2412.13663: norms before the
# sublayers, gated MLP, rotary positions, no biases, 30 % predicted), Ankner et al. 2024 (2305.15096: from 30
# to 15 %).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py config/modern.py --out_dir=out/modern
# Expect no printed result at this size; results/findings.md has results of small models.
# Cost (results/costs.py): 108,987,648 parameters, 26,214 million tokens of 0.582 GFLOP, 10.6 GPU hours
position = 'rope'
norm_place = 'pre'
mlp = 'swiglu'
bias = False
mask_fraction = 0.30
mask_fraction_end = 0.15
eval_mask_fraction = 0.15
