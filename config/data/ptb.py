# Penn Treebank (Marcus et al. 1994), the validation text of Tian et al. 2021 (A.2, figures 1, 4 and 5)
# Text: raw/wsj of LDC99T42, or the widely used preprocessed ptb.valid.txt, ptb.test.txt (a sentence a line,
# lower case, <unk> and N); each file is a document. Any other local text will do, with another --name
# $ python prepare_data.py config/data/books_wikipedia_sp.py
# $ python prepare_data.py config/data/ptb.py --corpus=FOLDER
# $ python train.py config/tian/base.py --validation=ptb
# Expect seconds; all documents are held out, with the training corpus's tokenizer. The paper does not say
# which sections it took, or in which form: compare our losses with each other, not with its figures
corpus = 'ptb'                  # a folder of that name here, or --corpus=FILE, FOLDER or GLOB
name = 'ptb'
tokenizer = 'data/books_wikipedia_sp'
val_fraction = 1
