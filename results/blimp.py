"""BLiMP: does a run of train.py prefer grammatical sentences?  Warstadt et al. 2020, arXiv 1912.00582

    $ python results/blimp.py --runs=out/quickstart --data_dir=FOLDER

The model is right about a pair of sentences if the grammatical one has the larger pseudo log-likelihood: the
sum over its tokens of ln p(token | the sentence with this token masked).  Salazar et al. 2020, arXiv
1910.14659. If a word has several tokens, those after the scored token are masked too, because the rest of a
rare word would give it away. This is PLL-word-l2r of Kauf and Ivanova 2023, arXiv 2305.10588. A word is a
run of letters and digits, or a single other character, so punctuation is separate from the word before it. A
token belongs to the word in which it begins. [CLS] and [SEP] surround the sentence and are not scored. Equal
sums count as wrong; they occur if two sentences differ only in [UNK]. minicons scores WordPiece in the same
way (PLL_metric='within_word_l2r'), but its words of sentencepiece end only at spaces, so that it masks
punctuation together with the word before it.

The accuracy of a phenomenon is the mean over its sets, and the overall accuracy is the mean over all sets.
Each run adds a row to the file `out` as soon as it is scored. A run that has a row there is not scored again.
"""
import glob
import json
import os
import re
import sys
from collections import defaultdict

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train
from configurator import UserError, configure, run, notice
from finetune import find_paths, read_file
from model import MaskedLM

runs = 'out/quickstart'         # folders of train.py, checkpoints or globs, comma-separated
data_dir = ''                   # folder of .jsonl files, one a set; empty: nyu-mll/blimp from the hub
pairs = 0                       # first pairs of each set, which are in random order; 0: all
out = 'out/blimp.jsonl'         # gets a row for each run
batch_size = 256                # rows per forward pass; a sentence of n tokens needs n rows
device = 'auto'                 # auto, cpu, cuda or mps; in float32

MINIMUM = {'batch_size': 1}
HUB = 'nyu-mll/blimp'           # each configuration is a set of 1,000 pairs
SENTENCES = 'sentence_good', 'sentence_bad'
PHENOMENA = {'s-selection': 'argument_structure'}       # linguistics_term -> one of the paper's twelve
WORD = re.compile(r'\s*(\w+|[^\w\s])')                  # with the space before it, as tokens may include it


# ---- 1. sets of pairs ----

def read_sets(folder, n):
    """{set: its first n records, or all if n is 0}.  Raises UserError unless all records are pairs."""
    if folder:
        paths = sorted(glob.glob(os.path.join(glob.escape(folder), '*.jsonl')))
        sets = {os.path.basename(path).removesuffix('.jsonl'): read_file(path) for path in paths}
    else:
        sets = read_hub()
    if not sets:
        raise UserError(f'data_dir={folder}: no .jsonl file there')
    sets = {name: records[:n] if n else records for name, records in sets.items()}
    for name, records in sets.items():
        check_pairs(name, records)
    return sets


def check_pairs(name, records):
    """Refuse a set without pairs, or with half a pair, before hours of scoring begin."""
    if not records:
        raise UserError(f'{name}.jsonl: no pair of sentences in it')
    for number, record in enumerate(records, 1):
        for key in SENTENCES:
            text = record.get(key)
            if not isinstance(text, str):
                raise UserError(f'{name}.jsonl, row {number}: {key} is {text!r}, '
                                'it must be a text')


def read_hub():
    """{set: its records}, read from the hub."""
    from datasets import get_dataset_config_names, load_dataset
    try:
        return {name: load_dataset(HUB, name, split='train').to_list()
                for name in get_dataset_config_names(HUB)}
    except Exception as error:                          # the hub's errors have dozens of classes
        raise UserError(f'{HUB}: {error}; --data_dir=D reads the folder data of '
                        'github.com/alexwarstadt/blimp') from None


# ---- 2. scores of sentences ----

def encode(tokenizer, texts, most):
    """[(ids, words)] of sentences, two tuples of n numbers: each token's id and the number of its word.

    Raises UserError if a sentence has no token or more than `most`.
    """
    encoded = []
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        if len(ids) == 0:
            raise UserError(f'no token in {text!r}: each sentence needs one')
        if len(ids) > most:
            raise UserError(f'{len(ids)} tokens in {text!r}: the run has '
                            f'block_size={most + 2}')
        ends = [match.end() for match in WORD.finditer(text)]
        words = np.searchsorted(ends, offsets[:, 0], side='right')      # number of words that end before
        encoded.append((tuple(ids.tolist()), tuple(words.tolist())))
    return encoded


def masked_rows(ids, words, special_ids):
    """Rows (b n, n + 2) of b sentences of n tokens each; row t of a sentence scores its token t.

    ids, words  (b, n), see encode()
    """
    b, n = ids.shape
    same_word = words[:, :, None] == words[:, None, :]                  # (b, n, n)
    rows = np.empty((b, n, n + 2), np.int64)
    rows[:, :, 0] = special_ids['cls']
    rows[:, :, 1:-1] = np.where(np.triu(same_word), special_ids['mask'], ids[:, None, :])
    rows[:, :, -1] = special_ids['sep']
    return rows.reshape(b * n, n + 2)


@torch.inference_mode()
def log_likelihoods(model, special_ids, sentences, batch_size, runtime):
    """{sentence: its pseudo log-likelihood in nats}; a sentence is (ids, words), see encode()

    Sentences of the same length share a batch, so that no row is padded. Equal sentences are scored only
    once, so that their scores are equal to the bit.
    """
    by_length = defaultdict(list)
    for sentence in dict.fromkeys(sentences):
        by_length[len(sentence[0])].append(sentence)

    scores = {}
    with tqdm(total=sum(map(len, by_length.values())), unit='sentence', leave=False, disable=None) as bar:
        for n, group in sorted(by_length.items()):
            size = max(1, batch_size // n)              # sentences in a batch, n rows each
            for begin in range(0, len(group), size):
                part = group[begin:begin + size]
                ids, words = np.array(part).transpose(1, 0, 2)          # (b, n) each
                batch = runtime.move({
                    'ids': torch.from_numpy(masked_rows(ids, words, special_ids)),
                    'positions': torch.arange(1, n + 1).repeat(len(part))[:, None],     # (b n, 1)
                    'targets': torch.from_numpy(ids.reshape(-1, 1))})
                losses = model(**batch).cpu().double()                  # (b n, 1), -ln p
                scores.update(zip(part, (-losses.view(len(part), n).sum(1)).tolist(), strict=True))
                bar.update(len(part))
    return scores


# ---- 3. accuracies ----

def set_accuracies(model, tokenizer, sets, batch_size, runtime):
    """{set: fraction of its pairs in which the good sentence scores higher}"""
    texts = [record[key] for records in sets.values() for record in records for key in SENTENCES]
    sentences = encode(tokenizer, texts, model.config.block_size - 2)
    scores = log_likelihoods(model, tokenizer.special_ids, sentences, batch_size, runtime)
    values = iter([scores[sentence] for sentence in sentences])
    accuracies = {}
    for name, records in sets.items():
        is_right = [next(values) > next(values) for _ in records]       # good, then bad
        accuracies[name] = float(np.mean(is_right))
    return accuracies


def phenomenon_accuracies(accuracies, sets):
    """{phenomenon: mean over its sets}.  A set that names none, as some of BabyLM's do, counts as one."""
    values = defaultdict(list)
    for name, accuracy in accuracies.items():
        term = sets[name][0].get('linguistics_term') or name
        values[PHENOMENA.get(term, term)].append(accuracy)
    return {phenomenon: float(np.mean(of_sets)) for phenomenon, of_sets in sorted(values.items())}


def score_run(path, sets, batch_size, runtime):
    """{step, n_pairs, accuracy, phenomena, sets} of a run of train.py.

    path  folder of the run or a checkpoint
    sets  what read_sets() returns
    In the result accuracy is a fraction; phenomena and sets are {name: fraction}. Raises UserError for a run
    with another objective.
    """
    model, tokenizer, content = train.load(path)
    if type(model) is not MaskedLM:
        raise UserError(f'{path}: a {type(model).__name__}; only runs of objective=mlm are scored')
    accuracies = set_accuracies(model.to(runtime.device), tokenizer, sets, batch_size, runtime)
    return {'step': content['step'], 'n_pairs': sum(map(len, sets.values())),
            'accuracy': float(np.mean([*accuracies.values()])),
            'phenomena': phenomenon_accuracies(accuracies, sets), 'sets': accuracies}


# ---- 4. main ----

def read_rows(path):
    """{(checkpoint, data, pairs): row} of a file like `out`."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding='utf-8') as file:
        rows = [json.loads(line) for line in file]
    return {(row['checkpoint'], row['data'], row['pairs']): row for row in rows}


def table(rows):
    """Table of percentages with a column for each run: the mean of all sets, then phenomena, then sets."""
    columns = []
    for row in rows:
        name = os.path.basename(os.path.dirname(row['checkpoint']))
        values = {f"mean of {len(row['sets'])} sets": row['accuracy'],
                  **{term.upper(): value for term, value in row['phenomena'].items()}, **row['sets']}
        columns.append(pd.Series(values, name=f"{name}@{row['step']}"))
    return (100 * pd.concat(columns, axis=1)).to_string(float_format='%.1f')


def main():
    configure(globals(), MINIMUM)
    runtime = train.make_runtime(device, 'float32', width=0, group=False)
    data = data_dir if data_dir else HUB
    scored = read_rows(out)
    sets = read_sets(data_dir, pairs)
    rows = []
    for folder in find_paths(runs):
        path = train.newest(folder) or folder           # if it has no checkpoint, load() says so
        key = path, data, pairs
        if key in scored:
            notice(f'{path}: has a row in {out}; if that is of an earlier run, remove the row')
        else:
            row = {'checkpoint': path, 'data': data, 'pairs': pairs,
                   **score_run(path, sets, batch_size, runtime)}
            os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
            with open(out, 'a', encoding='utf-8') as file:
                file.write(json.dumps(row) + '\n')
            scored[key] = row
        row = scored[key]
        print(f"{path}: {100 * row['accuracy']:.2f} % of {row['n_pairs']:,} pairs", flush=True)
        rows.append(row)
    print(f'\nBLiMP, {data}, accuracy in %\n{table(rows)}')


if __name__ == '__main__':
    run(main)
