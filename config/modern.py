# An encoder's recipe of today, to be named after another config file: norms before the sublayers, SwiGLU,
# rotary positions, no biases, 30 % of the tokens predicted at first and 15 % at the end, validated at 15 %.
# Sources: Geiping and Goldstein 2022 (cramming, arXiv 2212.14034: pre-norm, gated MLP, no biases); Portes et
# al. 2023 (MosaicBERT, arXiv 2312.17482: gated MLP, 30 %); Warner et al. 2024 (ModernBERT, arXiv 2412.13663:
# pre-norm, gated MLP, rotary positions, no biases, 30 %); Ankner et al. 2024 (arXiv 2305.15096: 30 to 15 %).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base.py config/modern.py --out_dir=out/modern
# Expect no printed result at this size; results/grid.md has a small one.
position = 'rope'
norm_place = 'pre'
mlp = 'swiglu'
bias = False
mask_fraction = 0.30
mask_fraction_end = 0.15
eval_mask_fraction = 0.15
