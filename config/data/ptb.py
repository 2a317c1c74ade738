# Penn Treebank (LDC99T42), the validation text of Tian et al. 2021: FOLDER has files, each a document, as
# ptb.valid.txt. Any other local text will do, with another --name
# $ python prepare_data.py config/data/ptb.py --corpus=FOLDER
# $ python train.py config/tian/base.py --validation=ptb
# Expect seconds, after config/data/books_wikipedia_sp.py, whose tokenizer it takes; all is held out
corpus = 'ptb'                  # a folder of that name here, or --corpus=FILE, FOLDER or GLOB
name = 'ptb'
tokenizer = 'data/books_wikipedia_sp'
val_fraction = 1
