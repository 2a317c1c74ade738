# CLUECorpusSmall (14 GB) for Liu 2022 (arXiv 2205.05842): Chinese characters, and words for masking of
# whole words
# The .zip files of github.com/CLUEbenchmark/CLUECorpus2020 (news2016zh, webText2019zh, wiki2019zh and
# comment2019zh), unpacked: by its README 4,000 files, a sentence a line, blank lines between documents.
# Not checked: whether all these names end in .txt. Others are not read; documents not in UTF-8 are left out
# Not in the paper: 12,000 characters, from its count of 96,519,170 and its code (utils/modeling.py). Ours:
# which characters (RoFormer's vocabulary there), words by jieba (rjieba there), texts below 20 characters too
# $ python prepare_data.py config/data/clue.py --path=FOLDER
# Expect 15.7M documents (PaddleNLP's count of those of more than 10 characters), 10,000 of them held out;
# estimates: 5 billion tokens, 15 GB on disk, 10 core-hours of jieba
corpus = 'cluecorpussmall'
name = 'clue'
tokenizer = 'character'
vocab_size = 12_000
tokenizer_sample = 100_000_000  # rare characters need a large sample
segmenter = 'jieba'
val_fraction = 0.00064
