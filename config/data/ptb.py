# Penn Treebank (LDC99T42), the validation text of Tian et al. 2021. Of a file in FOLDER without blank lines,
# such as ptb.valid.txt, each line is a document. You can use any other local text, with another --name
# $ python prepare_data.py config/data/ptb.py --corpus=FOLDER
# $ python train.py config/tian/base.py --validation=ptb
# Expect seconds. Run config/data/books_wikipedia_sp.py first, since this uses its tokenizer; all is held out
corpus = 'ptb'                  # a folder of that name here, or --corpus=FILE, FOLDER or GLOB
name = 'ptb'
tokenizer = 'data/books_wikipedia_sp'
val_fraction = 1
