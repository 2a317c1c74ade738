# XLNet-base without memory, trained on permutations (XLNet Base of Tian et al. 2021):
# 117,317,888 parameters, 92,012,544 in matrices.
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_xlnet.py
# Not in the paper, so ours: the last 15 % of an order are predicted, single tokens; the rest as in
# config/tian_base.py. Unlike XLNet: no dropout after the MLP's activation and at the output; a norm of the
# embeddings, segments as vectors added to them, and BERT's head in place of the tied matrix alone.
# Expect, on BooksCorpus and Wikipedia: MNLI 84.1/84.6 (their table 2); 123 hours on their TPUv3 4x4. Its
# loss is not that of a masked LM.
from config.tian_base import *

out_dir = 'out/base_xlnet'
objective = 'plm'
attention = 'xlnet'
position = 'none'
