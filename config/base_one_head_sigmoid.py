# BERT-base with one matrix of L2-normalised sigmoids, 103,170,560 parameters (Tian et al. 2021, section 3.2).
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_one_head_sigmoid.py
# Section 3.2 also says, without numbers, that one value matrix for all parts has a higher loss. That it means
# y = A v, without the partition, is our reading:
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_one_head_sigmoid.py \
#       --one_value_matrix=true \
#       --out_dir=out/base_one_value
# Expect, on BooksCorpus and Wikipedia: a loss significantly below base_one_head_softmax.py's (their figure
# 1); MNLI 84.5/84.7 (table 6).
from config.tian_base import *

out_dir = 'out/base_one_head_sigmoid'
attention = 'one_head_sigmoid'
position = 'none'
