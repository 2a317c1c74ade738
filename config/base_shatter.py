# BERT-base with `shatter` attention (Tian et al. 2021): 103,281,152 parameters, 77,967,360 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_shatter.py
# Appendix A.1 also tried one partition for all layers, without numbers. That it is the last layer's is ours:
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_shatter.py --same_partition=true \
#       --out_dir=out/base_same_partition
# Not in the paper, so ours: the values of the partition at distance 0, half a part on each side (model.py).
# Expect, on BooksCorpus and Wikipedia: tian_original.py's loss (their figure 1); MNLI 84.8/84.9 (table 2);
# 45 hours on their TPUv3 4x4.
from config.tian_base import *

out_dir = 'out/base_shatter'
attention = 'shatter'
position = 'none'
