# CLUECorpusSmall (14 GB) for Liu 2022 (arXiv 2205.05842), tokenized into Chinese characters. FOLDER has the
# unpacked .zip files of github.com/CLUEbenchmark/CLUECorpus2020: .txt files with a sentence on each line and
# blank lines between documents
# $ python prepare_data.py config/data/clue.py --path=FOLDER
# Expect 15.7M documents (counted by PaddleNLP), 10,000 of them held out; estimates: 5 billion tokens, 15 GB
# on disk, 10 core-hours of jieba. results/reproduce.md lists our own choices
corpus = 'cluecorpussmall'
name = 'clue'
tokenizer = 'character'
vocab_size = 12_000
tokenizer_sample = 100_000_000  # rare characters need a large sample
segmenter = 'jieba'
val_fraction = 0.00064
