# SQuAD v1.1 and v2.0 as in Kowsher et al. 2024, A.4: 5 epochs, dropout 0.2 (attention 0.05), decay 0.1. Their
# "SQuAD v1.2" is v2.0.
# $ python finetune.py config/kowsher/squad.py --init_from=out/kowsher_shared --compare=out/kowsher_original
# Their rows with TriviaQA: 5 epochs on a file that TriviaQA's convert_to_squad_format.py makes, then 5 on
# SQuAD, each with its own schedule. They do not say in which order; here it is that of Devlin et al. 2018
# (section 4.2), whose names of these rows they use. Trials of the second command go on from the first's:
# $ python finetune.py config/kowsher/squad.py --compare=out/kowsher_original --tasks=squad1 \
#       --train_file=triviaqa.json --out_dir=out/triviaqa
# $ python finetune.py config/kowsher/squad.py --out_dir=out/squad_after_triviaqa \
#       --init_from='out/triviaqa/kowsher_original/*,out/triviaqa/kowsher_shared/*'
# Expect (their table 2, EM/F1): v1.1 83.53/92.32, v2.0 79.87/83.59 for `shared`; 82.18/90.01 and 79.35/83.65
# for `original`; with TriviaQA 83.94/92.97, 81.16/86.78 and 83.46/92.43, 81.06/86.79.
# Not in the paper, so ours: 384 tokens, windows 128 tokens apart, answers of at most 30 tokens (BERT's code),
# no answer where it scores higher than the best span (null_threshold 0), no question of TriviaQA whose cut
# text lacks the answer, and what config/kowsher/glue.py names.
from config.kowsher.glue import *

out_dir = 'out/squad_kowsher'
tasks = 'squad'
block_size = 384                # BERT's
epochs = 5
dropout = 0.2
attention_dropout = 0.05
overrides = ''
