# BERT-base without positions, 110,257,664 parameters (Tian et al. 2021, section 3, "No_Position").
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_no_position.py
# Expect, on BooksCorpus and Wikipedia: a loss above 6 with --validation=ptb, where tian_original.py comes to
# about 2 (their figure 1).
from config.tian_original import *

out_dir = 'out/base_no_position'
position = 'none'
