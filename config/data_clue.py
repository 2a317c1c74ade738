# CLUECorpusSmall (14 GB) for Liu 2022: Chinese characters, and words for whole-word masking
# Four .zip files of github.com/CLUEbenchmark/CLUECorpus2020, unpacked below clue_corpus_small_14g: 4,000 .txt
# files in which blank lines end documents. PaddleNLP's model_zoo/ernie-1.0/preprocess/trans_to_json.py
# --input_path clue_corpus_small_14g --output_path clue_corpus_small_14g makes one shuffled .jsonl of them
# $ python prepare_data.py config/data_clue.py
# Expect 15.7M documents (PaddleNLP's count), 10,000 of them held out; estimates: 5 billion tokens, 15 GB on
# disk, 10 core-hours of jieba
corpus = 'clue_corpus_small_14g.jsonl'
name = 'clue'
tokenizer = 'character'
vocab_size = 12_000
tokenizer_sample = 100_000_000  # rare characters need a large sample
segmenter = 'jieba'
val_fraction = 0.00064
