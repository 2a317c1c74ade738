"""The corpus of this folder: articles and docstrings, below 50 MB, so that it can be copied to a GPU machine.

    $ PYTHONPATH=. python results/h200/data.py --articles=FOLDER     # plain-text articles, one a file

Writes data/h200, which git ignores. Of an article it keeps the lines of prose: those that have 60 characters
and end as a sentence does; titles, lists and the remains of tables are left out.
"""
from configurator import configure, run

import json
import os
import subprocess
import sys

articles = ''                   # folder of articles, searched to any depth; empty: docstrings alone
most_tokens = 24_000_000        # at 2 bytes each
tokens_per_character = 0.245   # of articles with this vocabulary, to stop before most_tokens
vocab_size = 8192               # of the sentencepiece tokenizer
name = 'h200'                   # folder below data_dir
data_dir = 'data'               # of all prepared corpora; docstrings are prepared there too


def prepare(*words):
    subprocess.run([sys.executable, 'prepare_data.py', *words, f'--data_dir={data_dir}'], check=True)


def prose(path):
    """The lines of prose of a file, as one text."""
    with open(path, encoding='utf-8', errors='replace') as file:
        lines = (line.strip() for line in file)
        return '\n'.join(line for line in lines if len(line) >= 60 and line[0] != '*' and line[-1] in '.!?"')


def main():
    configure(globals())
    if not os.path.exists(f'{data_dir}/docstrings/meta.json'):
        prepare('config/data_docstrings.py')
    with open(f'{data_dir}/docstrings/docstrings.jsonl') as file:
        texts = [json.loads(line)['text'] for line in file]
    room = most_tokens / tokens_per_character - sum(map(len, texts))
    paths = sorted(os.path.join(folder, item) for folder, _, items in os.walk(articles) for item in items)
    for path in paths:
        texts.append(prose(path))
        room -= len(texts[-1])
        if room < 0:
            break
    os.makedirs(f'{data_dir}/{name}_text', exist_ok=True)
    with open(f'{data_dir}/{name}_text/texts.jsonl', 'w') as file:
        file.writelines(json.dumps({'text': text}) + '\n' for text in texts if text)
    prepare(f'--corpus={data_dir}/{name}_text', f'--name={name}', f'--vocab_size={vocab_size}',
            '--val_fraction=0.02')


if __name__ == '__main__':
    run(main)
