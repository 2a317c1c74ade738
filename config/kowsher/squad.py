# SQuAD v1.1 and v2.0 ("v1.2") as in Kowsher et al. 2024, A.4: 5 epochs, dropout 0.2 (attention 0.05), decay
# 0.1.
# $ python finetune.py config/kowsher/squad.py --init_from=out/kowsher_shared --compare=out/kowsher_original
# Expect (table 2, EM/F1): v1.1 83.53/92.32, v2.0 79.87/83.59 for `shared`; 82.18/90.01 and 79.35/83.65 for
# `original`. results/reproduce.md has the commands for SQuAD after TriviaQA, and lists our own choices.
from config.kowsher.glue import *

out_dir = 'out/squad_kowsher'
tasks = 'squad'
block_size = 384                # BERT's
epochs = 5
dropout = 0.2
attention_dropout = 0.05
overrides = ''
