# BERT-small (4 layers, 512 wide) with the recipe of config/base.py, whose header has what the paper (Courtois
# et al. 2024, section 3.3) does not say; their bert_small.sh has the same values. With their corpus:
# config/courtois/small.py.
# $ torchrun --standalone --nproc_per_node=8 train.py config/small.py
# $ torchrun --standalone --nproc_per_node=8 train.py config/small.py --attention=shared \
#       --out_dir=out/small_shared
# Expect no printed result on FineWeb. On OSCAR (their figure 2a) the loss leaves its first plateau at step
# 12,000 with `original`; Kowsher et al. train `shared` only at base size.
from config.base import *

out_dir = 'out/small'
n_layer = 4
n_head = 8
n_embd = 512
n_inner = 2048
