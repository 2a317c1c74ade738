"""Fine-tuning on GLUE, SQuAD, SuperGLUE, CLUE and two offline tasks, over seeds and checkpoints.

    $ python finetune.py config/finetune_quickstart.py
    $ python finetune.py config/glue_courtois.py --init_from=out/base_pairwise --compare=out/base_original
    $ python finetune.py config/glue_courtois.py --init_from='out/base_pairwise-*,out/base_shared-*'
    $ torchrun --standalone --nproc_per_node=8 finetune.py config/glue_courtois.py
    $ python finetune.py --tasks=custom --train_file=a.csv --dev_file=b.csv --texts=title,body --label=class
    $ python train.py --init_from=out/finetune/quickstart@2800/docstring_package_1_0a1b2c --export=out/package

A trial fine-tunes one set of weights on one task with one seed, in one process; torchrun's processes divide
the trials among themselves. Its folder in out_dir holds its log, result, predictions and weights. The same
command again skips finished trials and restarts interrupted ones. A training step depends only on (weights,
data, seed, step).
"""
from configurator import ROOT, UserError, configure, parse, run, say, show, table  # first: quiet Ctrl-C
import contextlib
import difflib
import glob
import hashlib
import itertools
import json
import math
import operator
import os
import re
import string
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import prepare_data
import train
from model import (POOLING, EncoderConfig, MultipleChoice, SequenceClassifier, SpanClassifier, choose,
                   pretrained_encoder, transformers)
from prepare_data import text_hash, write_bytes

# the run
out_dir = 'out/finetune'        # results.json, results.md and a folder for each trial go here
init_from = 'out/quickstart'    # runs of train.py, checkpoints, BERTs, or globs of them: see below
compare = ''                    # baseline, one system in init_from's form; differences are paired by seed
tasks = 'glue'                  # keys of TASKS and GROUPS: glue, sst2,rte, squad, superglue, clue, custom
trials = 5                      # number of seeds per task
seed = 1                        # first seed; for the new head, the order of examples and dropout
paper = ''                      # key of results/papers.json: use its column order and show its results
predict = ''                    # test: predict each task's unlabelled test file; or a file of one task
noise = ''                      # first:last:step, as in 0:0.4:0.05: evaluate with noise on the embeddings too
cross = False                   # also evaluate each trial on the other tasks with a `positive` label
report = False                  # no training: rewrite the report of the finished trials in out_dir
keep_models = True              # keep each trial's weights: predict, noise and cross need them later
# data
data_dir = ''                   # folder of the published files, glue/CoLA/train.tsv ...; empty: from the hub
extra_train = ''                # span tasks: file in SQuAD's format to train on first, e.g. from TriviaQA
train_file = ''                 # custom: .csv, .tsv without quoting, or .jsonl; its labels are the classes
dev_file = ''                   # custom: labelled file to evaluate on
test_file = ''                  # custom: file to predict; TRIAL/predicted.csv is a copy with a column more
texts = ''                      # custom: column of the text, or two columns, as in a,b; a+b joins columns
label = ''                      # custom: column of classes, or of decimals (4.0); for spans ANSWER,START
tokenizer = ''                  # prepared folder with the tokenizer; empty: that of the checkpoint
lower_case = True               # for a Hugging Face BERT without `tokenizer`: is its vocabulary uncased?
block_size = 0                  # maximum sequence length, may exceed the pretrained one; 0: that one
stride = 128                    # span: tokens between the starts of windows of a long text
pad_to_block = False            # pad to block_size, for TPUs; else to the longest sequence of the batch
train_samples = 0               # maximum of training examples, the same for every seed; 0: all
eval_samples = 0                # maximum of each evaluation set; 0: all
# model
pooling = 'cls'                 # cls, first (cls without its dense layer) or layerwise
dropout = 0.1                   # after embeddings and sublayers and before the classifier
attention_dropout = 0.1         # of attention weights
# optimization
epochs = 3                      # passes over the training examples
total_batch = 16                # examples per optimizer step
batch_size = 16                 # examples per micro-step at most; halve it if out of memory
learning_rate = 2e-5            # peak
min_lr = 0.0                    # final value of linear and cosine
warmup_fraction = 0.1           # fraction of all steps
schedule = 'linear'             # linear, cosine, constant or thirds, after the warmup
beta1 = 0.9                     # of Adam
beta2 = 0.999                   # of Adam
adam_eps = 1e-8                 # of Adam
weight_decay = 0.01             # on matrices; never on biases, norms and diagonals
grad_clip = 1.0                 # largest gradient norm; 0: no clipping
overrides = ''                  # TASK.KNOB=VALUE, space-separated: cola.learning_rate=5e-6 rte.epochs=10
# evaluation and log
metric = ''                     # in METRICS; used in averages and by keep_best; empty: the task's first
keep_best = False               # report the weights that scored best on dev, not the last ones
eval_interval = 0               # steps between evaluations; 0: after every epoch
max_answer = 30                 # span: maximum length of an answer in tokens
null_threshold = 0.0            # unanswerable: predict none if its score exceeds the best span's by more
log_interval = 100              # steps between log lines
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, cuda:1 (without torchrun), mps or xla
dtype = 'auto'                  # auto (bfloat16 where it is faster), float32, bfloat16 or float16
compile = 'auto'                # auto (on for CUDA), true or false

LIMITS = {                      # knob: minimum, maximum (None: unlimited)
    **train.LIMITS, 'trials': (1, None), 'seed': (0, 2 ** 62), 'stride': (1, None), 'epochs': (1, None),
    'train_samples': (0, None), 'warmup_fraction': (0, 0.999), 'max_answer': (1, None),
}
FREE = {                        # knobs that do not affect a trial's result
    'out_dir', 'init_from', 'compare', 'tasks', 'trials', 'seed', 'paper', 'predict', 'noise', 'cross',
    'report', 'keep_models', 'data_dir', 'train_file', 'dev_file', 'test_file', 'texts', 'label',
    'batch_size', 'overrides', 'log_interval', 'wandb_project', 'device', 'compile',
}
SOURCES = """\
init_from takes one or more of these, with commas between them: a run, a checkpoint, the name of a BERT,
  a glob of runs, out/base-*: pretraining seeds of one system, called base in the report,
  a glob of checkpoints, out/base/ckpt_*.pt: the score by pretraining step. It takes the run's milestones
    and leaves out checkpoints kept for resuming; of a run without milestones it takes all.
compare takes one. Differences are between equal seeds of pretraining (the run's `seed`) and of fine-tuning.
"""
EVAL_ROWS = 64                  # sequences per evaluation batch; the noise depends on it
QUESTION = 64                   # maximum tokens of a question.  Devlin et al. 2018's code


# ---- labelled files: entries of TASKS, and how records become Examples ----

LABELLED = ('train', 'extra_train', 'dev', 'dev_mm')    # splits with labels
BLANK = re.compile(r'#idiom\d+#')       # blank in CHID
BLANK_AROUND = 56                       # characters kept on each side of a blank; CLUE's baseline keeps 28
DISPUTED = "no gold label ('-')"        # normal in NLI data: annotators disagreed
NO_ANSWER = 'no answer in the text'     # normal in converted TriviaQA, whose texts are cut
MOVED, ABSENT = 'answer offset repaired', 'answer not in the text'     # answers; the questions are kept


class Example(NamedTuple):
    """A text with its label.

    id      its name in a submission: int, str or, in MultiRC, (paragraph, question, answer)
    texts   (a,) or (a, b), strings; span: (question, context); choose: one such tuple per choice
    label   class index | float | index of the right choice | None: unlabelled
            span: tuple of (answer text, start character), empty if unanswerable.  Answers missing from the
            context have start -1 and come last; a training example has at least one in the context
    """
    id: object
    texts: tuple
    label: object = None


class Bad(Exception):
    """A record that cannot become an example; args: (reason, by which it is counted, details)."""


@dataclass(frozen=True)
class Task:
    """An entry of TASKS.  Column names are written FILE|HUB where those of the files and the hub differ."""
    head: str                   # classify, regress, span or choose
    metrics: tuple              # names in METRICS; the first is the default of the knob `metric`
    labels: tuple = ()          # class names in files and submissions, by class index
    folder: str = ''            # below data_dir; in any case, optionally with the suffix _public
    files: dict | None = None   # {split: name}; a|b: the first that exists, a+b: both
    hub: str = ''               # id:configuration
    texts: tuple = ()           # columns of text a and b; a+b: joined
    label: str = 'label'        # column of the label
    read: Callable | None = None    # path -> (location, record) pairs, records as on the hub; None: READERS
    make: Callable | None = None    # (task, record, number, counts) -> Examples
    unanswerable: bool = False  # span: some questions have no answer
    write: str = 'id'           # key of SUBMISSIONS
    submission: str = ''        # file name; for MNLI matched|mismatched
    positive: str = ''          # label counted as yes by `cross`; empty: not in `cross`
    source: Callable | None = None  # (name, split, data_dir) -> Examples, in place of reading files
    scale: tuple = (0, 1, 0, 5)     # regress: mean and deviation of the labels; bounds of a prediction


# ---- readers: file -> (where: its location, record: a dict or a Bad) pairs ----

def read_lines(path):
    """(file:line, text) of each non-empty line; pick_text rejects invalid UTF-8."""
    with open(path, encoding='utf-8-sig', errors='surrogateescape', newline='\n') as file:
        for number, line in enumerate(file, 1):
            if line := line.rstrip('\r\n'):
                yield f'{path}:{number}', line


def read_table(path, header=()):
    """Tab-separated without quoting, as in GLUE.  header: for files without one"""
    columns = None
    for where, line in read_lines(path):
        cells = line.split('\t')
        if columns is None:
            columns = header if header and len(cells) == len(header) else cells
            if columns is cells:
                continue
        expected = f"{len(cells)} cells, expected {len(columns)}: {', '.join(columns)}"
        fits = len(cells) == len(columns)
        yield where, dict(zip(columns, cells, strict=True)) if fits else Bad('missing columns', expected)


def read_csv(path):
    """Comma-separated with quoting.  ValueError: a row has too many cells, or the text is not UTF-8"""
    table = pd.read_csv(path, header=None, dtype=str, na_filter=False)
    columns, *rows = table.values.tolist()
    for number, cells in enumerate(rows, 1):
        yield f'{path}: row {number}', dict(zip(columns, cells, strict=True))


def read_records(path):
    """JSON lines."""
    for where, line in read_lines(path):
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield where, Bad('broken JSON', error)


def load_json(path):
    with open(path, encoding='utf-8-sig') as file:
        return json.load(file)


def read_squad(path):
    for article in load_json(path)['data']:
        for paragraph in article['paragraphs']:
            for question in paragraph['qas']:
                yield f"{path}: question {question['id']}", {'context': paragraph['context'], **question}


def read_multirc(path):
    for where, record in read_records(path):
        if isinstance(record, Bad):
            yield where, record
            continue
        for question in record['passage']['questions']:
            for answer in question['answers']:
                idx = {'paragraph': record['idx'], 'question': question['idx'], 'answer': answer['idx']}
                yield where, {'paragraph': record['passage']['text'], 'question': question['question'],
                              'answer': answer['text'], 'label': answer.get('label'), 'idx': idx}


def read_c3(path):
    for number, (context, questions, *_) in enumerate(load_json(path), 1):
        for question in questions:
            yield f'{path}: passage {number}', {'context': context, **question}


def read_chid(path):
    """Answers to train.json are in train_answer.json, {blank: candidate}; without it: unlabelled."""
    answer_file = '_answer'.join(os.path.splitext(path))
    answers = load_json(answer_file) if os.path.isfile(answer_file) else {}
    for where, record in read_records(path):
        if answers and isinstance(record, dict):
            blanks = BLANK.findall(' '.join(record['content']))
            record['answers'] = {'candidate_id': [answers.get(blank, -1) for blank in blanks]}
        yield where, record


READERS = {'.csv': read_csv, '.tsv': read_table, '.jsonl': read_records}       # by suffix, of a user's files


def read_path(task, path):
    """(where, record) pairs of a file in the task's format."""
    suffix = Path(path).suffix
    read = task.read if task.read and suffix != '.csv' else choose(f'{path}: suffix', suffix, READERS)
    try:
        yield from read(path)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f'{path}: not in the expected format of {task.folder}: {error!r:.300}') from None


def read_hub(task, split):
    """(where, record) pairs of a Hugging Face dataset; labels become names, as class order may differ."""
    datasets = prepare_data.need('datasets', 'reading from the Hugging Face hub')
    source, _, configuration = task.hub.partition(':')
    matched = '_matched' * ('dev_mm' in task.files and split in ('dev', 'test'))
    with prepare_data.named(source):                            # datasets raises dozens of classes
        data = datasets.load_dataset(source, configuration or None, split=HUB_SPLITS[split] + matched)
    names = getattr(data.features.get('label'), 'names', None) or ()
    by_name = names and {name.lower() for name in names} == set(task.labels)
    for number, record in enumerate(data, 1):
        label = record.get('label')
        record['label'] = None if label == -1 else names[label] if by_name and label is not None else label
        yield f'{task.hub}:{number}', record


# ---- makers: a record -> Examples ----

def pick(record, names):
    """Value of the first column of a|b that exists, or None."""
    return next((record[name] for name in names.split('|') if name in record), None)


def pick_text(record, names):
    """Text of a column; the columns a+b, or the parts of a list, are joined by spaces."""
    parts = [pick(record, name) for name in names.split('+')]
    parts = parts[0] if isinstance(parts[0], list) else parts
    if not all(isinstance(part, str) for part in parts):
        expected = names.replace('|', ' or ').replace('+', ' and ')
        raise Bad('no text', f"expected a string in {expected}; the row has {', '.join(record)}")
    text = ' '.join(parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Bad('invalid UTF-8', repr(text[:40])) from None
    return text


def pick_id(record, number):
    """Id of the record in a submission; `number` (from 0) if it has none."""
    value = pick(record, 'index|id|idx')
    if isinstance(value, dict):
        return tuple(value[key] for key in ('paragraph', 'question', 'answer'))
    return number if value is None else value


def pick_label(task, record):
    """Class index, or a score for a task without classes; None if the record is unlabelled."""
    value = pick(record, task.label)
    if value is None:
        return None
    for text in (str(value), str(value).lower()):
        if text in task.labels:
            return task.labels.index(text)
    if value == '-':
        raise Bad(DISPUTED)
    if task.hub and value in range(len(task.labels)):   # hub column without class names
        return value
    with contextlib.suppress(TypeError, ValueError):
        if not task.labels and math.isfinite(float(value)):
            return (float(value) - task.scale[0]) / task.scale[1]
    raise Bad('unknown label', f"{value!r}, expected {name_labels(task.labels) or 'a number'}")


def name_labels(labels):
    """The classes, or the first ones and the last, for messages."""
    return ', '.join(labels[:6]) + (f' ... {labels[-1]}' if len(labels) > 6 else '')


def make_texts(task, record, number, counts):
    yield Example(pick_id(record, number), tuple(pick_text(record, names) for names in task.texts),
                  pick_label(task, record))


def make_own(task, record, number, counts):
    """A row of a user's file, which is its own id, for SUBMISSIONS.  A label of '': none, or no answer"""
    texts = tuple(pick_text(record, names) for names in task.texts)
    value, *start = (record.get(column) for column in task.label.split(','))
    if value in (None, ''):
        label = () if task.unanswerable and value == '' else None
    elif start:
        label = ((value, find_nearest(texts[1], value, int(float(start[0])), counts)),)
    else:
        label = pick_label(task, record)
    yield Example(record, texts, label)


def make_wsc(task, record, number, counts):
    """One text with _ around the noun and [ ] around the pronoun, as in CLUE's baseline."""
    text, target = pick_text(record, 'text'), record['target']
    marks = [(target['span1_index'], target['span1_text'], '_', '_'),
             (target['span2_index'], target['span2_text'], '[', ']')]
    for first, span, left, right in sorted(marks, reverse=True):        # last first, keeps indices valid
        if first < 0 or not text.startswith(span, first):
            raise Bad('span not in the text', f'{span!r} at {first}')
        text = text[:first] + left + span + right + text[first + len(span):]
    yield Example(pick_id(record, number), (text,), pick_label(task, record))


def make_span(task, record, number, counts):
    """A wrong offset moves to the nearest occurrence of the answer.  CMRC's dummy answers start at -1."""
    context, label = pick_text(record, 'context'), None
    answers = [] if record.get('is_impossible') else record.get('answers')
    if isinstance(answers, list):                               # in files; on the hub: a dict of lists
        answers = {key: [answer[key] for answer in answers] for key in ('text', 'answer_start')}
    if answers is not None and set(answers['answer_start']) != {-1}:
        found = [(text, find_nearest(context, text, start, counts))
                 for text, start in zip(answers['text'], answers['answer_start'], strict=True) if text]
        label = tuple(sorted(found, key=lambda answer: answer[1] < 0))
    yield Example(record.get('id', number), (pick_text(record, 'question'), context), label)


def find_nearest(context, text, start, counts):
    """Start of the occurrence of `text` nearest to `start`, or -1; counts repaired and missing ones.

    At `start` the case is ignored: converted TriviaQA has answers in lower case.
    """
    if start >= 0 and context[start:start + len(text)].lower() == text.lower():
        return start
    places = [match.start() for match in re.finditer(f'(?={re.escape(text)})', context)]
    counts[MOVED if places else ABSENT] += 1
    return min(places, key=lambda place: abs(place - start), default=-1)


def make_c3(task, record, number, counts):
    """Segments passage | question choice, as in CLUE's baseline; the passage is truncated."""
    passage, question = pick_text(record, 'context'), pick_text(record, 'question')
    answer, choices = record.get('answer'), record['choice']
    if answer and answer not in choices:
        raise Bad('unknown label', f"{answer!r}: expected {', '.join(choices)}")
    yield Example(pick_id(record, number), tuple((passage, f'{question} {choice}') for choice in choices),
                  choices.index(answer) if answer else None)


def make_chid(task, record, number, counts):
    """An example per blank: candidate | passage, as in CLUE's baseline; ____: this blank, ****: others."""
    candidates, answers = record['candidates'], (record.get('answers') or {}).get('candidate_id')
    blanks = [(passage, blank) for passage in record['content'] for blank in BLANK.finditer(passage)]
    for (passage, blank), answer in itertools.zip_longest(blanks, answers or ()):
        if answers and not 0 <= answer < len(candidates):
            raise Bad('unknown label', f'{answer} of {blank[0]}: expected 0 to {len(candidates) - 1}')
        before = BLANK.sub('****', passage[:blank.start()])[-BLANK_AROUND:]
        text = before + '____' + BLANK.sub('****', passage[blank.end():])[:BLANK_AROUND]
        yield Example(blank[0], tuple((candidate, text) for candidate in candidates), answer)


# ---- examples of a split or of a file ----

def load_examples(name, split, data_dir, extra_train=''):
    """Examples of a task.  Returns (list of Example, {kind: count} of what was skipped or repaired).

    split        a split of the task, or the path of a file in its format, with or without labels
    data_dir     contains the task's folder, at any depth, or is it; empty: read from the hub
    extra_train  the file that the split `extra_train` of a span task reads
    Raises a UserError naming the first bad record if more than 1 % (and more than one) are bad, if none is
    good, or if any is bad in a file to predict.  Label '-', find_nearest's repairs and, in extra_train,
    questions without an answer do not count as bad.
    """
    task = TASKS[name]
    if task.source and split in task.files:
        return list(task.source(name, split, data_dir)), {}
    if task.source:
        raise UserError(f'{name}: made of docstrings, so it has no {split}')
    if task.hub and split in task.files:
        paths = find_split(task, split, data_dir) if data_dir else []
    else:                                                       # a file named in the command
        paths = [extra_train if split == 'extra_train' else task.files.get(split, split)]
    parts = [read_path(task, path) for path in paths] or [read_hub(task, split)]
    return collect(task, itertools.chain(*parts), split, ', '.join(paths) or f'{task.hub} {split}')


def collect(task, records, split, source):
    """(where, record) pairs -> load_examples's result, or its UserError, which names `source`."""
    examples, counts, rows, bad, normal = [], Counter(), 0, [], []
    for rows, (where, record) in enumerate(records, 1):
        try:
            if isinstance(record, Bad):
                raise record
            made = list(task.make(task, record, rows - 1, counts))
            for example in made if split in LABELLED else ():
                check_label(task, example, split)
            examples += made
        except (Bad, LookupError, TypeError, ValueError, AttributeError) as error:
            what = error.args if isinstance(error, Bad) else ('not in the expected format', repr(error))
            counts[what[0]] += 1
            expected = what[0] == DISPUTED or (what[0] == NO_ANSWER and split == 'extra_train')
            (normal if expected else bad).append(': '.join(map(str, (where, *what))))
    most = max(1, rows // 100) if split in LABELLED else 0
    if not examples or len(bad) > most:
        first = [*bad, *normal, f'{source}: no rows'][0]
        raise UserError(f'{first} ({len(bad)} bad of {rows} rows)')
    return examples, dict(counts)


def check_label(task, example, split):
    if example.label is None:
        raise Bad('no label', f"expected one in {task.label.replace('|', ' or ')}")
    if task.head == 'span' and not example.label and (not task.unanswerable or split == 'extra_train'):
        raise Bad(NO_ANSWER)
    if task.head == 'span' and example.label and example.label[0][1] < 0 and split.endswith('train'):
        raise Bad(NO_ANSWER)


def find_split(task, split, data_dir):
    """Files of a split, in the first folder in data_dir (or itself) with the task's folder name and files."""
    for folder in sorted(folder for folder, *_ in os.walk(os.path.abspath(data_dir))):
        called = os.path.basename(folder).lower().removesuffix('_public')
        for names in task.files[split].split('|') if called == os.path.basename(task.folder).lower() else ():
            paths = [os.path.join(folder, item) for item in names.split('+')]
            if all(map(os.path.isfile, paths)):
                return paths
    wanted = task.files[split].replace('+', ' and ').replace('|', ' or ')
    hub = task.hub.replace(':', ', ')
    raise UserError(f'{os.path.join(data_dir, task.folder)}: no {wanted}; --data_dir names the parent of '
                    f'{task.folder}/; without it {hub} is read from the Hugging Face hub')


# ---- submissions: predictions are class indices, scores, answer texts or choice indices ----

def nested(pairs):
    """MultiRC's format: a JSON line per passage, with nested questions and answers."""
    passages = defaultdict(lambda: defaultdict(list))
    for (passage, question, answer), label in pairs:
        passages[passage][question].append({'idx': answer, 'label': int(label)})
    text = ''
    for passage, questions in passages.items():
        found = [{'idx': question, 'answers': labels} for question, labels in questions.items()]
        text += json.dumps({'idx': passage, 'passage': {'questions': found}}) + '\n'
    return text


ANSWERS = {     # head: prediction -> value in a submission
    'classify': lambda task, prediction: task.labels[int(prediction)],
    'regress': lambda task, prediction: float(
        f'{np.clip(prediction * task.scale[1] + task.scale[0], *task.scale[2:]):.6g}'),
    'span': lambda task, prediction: prediction,
    'choose': lambda task, prediction: int(prediction),
}
SUBMISSIONS = {     # (id, answer) pairs -> text
    'table': lambda pairs: ''.join(f'{a}\t{b}\n' for a, b in [('index', 'prediction'), *pairs]),
    'id': lambda pairs: ''.join(json.dumps({'id': item, 'label': answer}) + '\n' for item, answer in pairs),
    'idx': lambda pairs: ''.join(json.dumps({'idx': item, 'label': answer}) + '\n' for item, answer in pairs),
    'map': lambda pairs: json.dumps(dict(pairs), ensure_ascii=False, indent=1) + '\n',
    'nested': nested,
    '.csv': lambda pairs: pd.DataFrame(
        [{**row, 'prediction': answer} for row, answer in pairs]).to_csv(index=False),
    '.tsv': lambda pairs: ''.join('\t'.join(map(str, cells)) + '\n' for cells in [
        [*pairs[0][0], 'prediction'], *([*row.values(), answer] for row, answer in pairs)]),
    '.jsonl': lambda pairs: ''.join(
        json.dumps({**row, 'prediction': answer}, ensure_ascii=False) + '\n' for row, answer in pairs),
}


def write_submission(name, column, folder, examples, predictions, prefix=''):
    """Write the file for the benchmark's site; returns its path.  column: the task's name, or mnli_mm"""
    task = TASKS[name]
    pairs = [(example.id, ANSWERS[task.head](task, prediction))
             for example, prediction in zip(examples, predictions, strict=True)]
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, prefix + task.submission.split('|')[-1 if column.endswith('_mm') else 0])
    write_bytes(path, SUBMISSIONS[task.write](pairs).encode(errors='surrogateescape'))
    return path


# ---- two offline tasks made from the docstrings of installed packages ----

PACKAGES = prepare_data.CORPORA['docstrings'][1]
DOCSTRING_SIZES = {'train': 6000, 'dev': 1000}      # maximum of examples
DOCSTRING_DEV = 1 / 7                               # fraction, by hash
PROSE = re.compile(r'(?!\w+:)[A-Z](?!.*(---|===|>>>|::|Args:|Returns:)).{18,298}\.')       # up to a full stop


def docstring_examples(name, split, data_dir, n, label):
    """Examples from the first n paragraphs of docstrings, which prepare_data.py writes to docstrings.jsonl.

    Each docstring is in one split.  Texts that occur twice, ignoring case, digits and punctuation, are
    dropped, so none is in both splits or has two labels.
    """
    paths = [os.path.join(data_dir or 'data', folder, 'docstrings.jsonl') for folder in ('docstrings', '')]
    path = next(filter(os.path.isfile, paths), None)
    if not path:
        raise UserError(f'{paths[0]}: no such file; python prepare_data.py config/data_docstrings.py makes '
                        'it, or name the prepared folder of another with --data_dir')
    rows = [record for _, record in read_records(path)]
    pieces = sorted((text_hash(row['text'], 1), row['package'], row['where'], prose(row['text'], n))
                    for row in rows)
    times = Counter(letters(text) for *_, texts in pieces for text in texts)
    pieces = [piece for key, *piece in pieces if (key < DOCSTRING_DEV * 2**64) == (split == 'dev')
              and piece[2] and all(times[letters(text)] == 1 for text in piece[2])]
    examples = label(pieces, TASKS[name].labels, DOCSTRING_SIZES[split])
    if not examples:
        raise UserError(f'{path}: no docstring makes an example of {name}, {split}')
    return sorted(examples, key=lambda example: text_hash(' '.join(example.texts), 1))


def letters(text):
    return re.sub(r'[\W\d_]+', ' ', text.lower())


def prose(text, n):
    """The first n paragraphs of a docstring; () if it has fewer or one is not prose."""
    found = tuple(' '.join(part.split()) for part in re.split(r'\n\s*\n', text, maxsplit=n)[:n])
    return found if len(found) == n and all(map(PROSE.fullmatch, found)) else ()


def label_package(pieces, packages, size):
    """Label: its package.  All docstrings of each package, up to size / number of packages."""
    kept = [item for package in packages
            for item in [piece for piece in pieces if piece[0] == package][:size // len(packages)]]
    return [Example(where, texts, packages.index(package)) for package, where, texts in kept]


def label_order(pieces, labels, size):
    """Label: are the paragraphs in their original order?  Every other example swaps them."""
    return [Example(where, texts[::1 - 2 * (i % 2)], 1 - i % 2)
            for i, (_, where, texts) in enumerate(pieces[:size // 2 * 2])]


# ---- metrics: (targets, predictions) -> a fraction; 0 for empty input or zero variance ----

CHINESE = '\u4e00-\u9fa5'               # this and the punctuation: from cmrc2018_evaluate.py
CHINESE_PUNCTUATION = dict.fromkeys(map(ord, '-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』'))
CHINESE_TOKEN = re.compile(             # a character, or a word as in nltk: 1,000.5 and v1.0 are one each
    rf"""[{CHINESE}]|'?(?:[^\s{CHINESE}!-.;<>?@\[\]{{}}–—]|\.(?!\s*[{CHINESE}]|\s*$)|,(?=\d))+|\S""")


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def both(first, second):
    """Metric: the mean of two metrics."""
    return lambda targets, predictions: (first(targets, predictions) + second(targets, predictions)) / 2


def accuracy(targets, predictions):
    return mean(np.equal(targets, predictions))


def f1(targets, predictions):
    """F1 of class 1; 0 if neither targets nor predictions have it.  Over all answers it is MultiRC's F1a."""
    targets, predictions = np.equal(targets, 1), np.equal(predictions, 1)
    claims = targets.sum() + predictions.sum()
    return float(2 * (targets & predictions).sum() / claims) if claims else 0.0


def exact_question(targets, predictions, ids=()):
    """Fraction of questions whose answers are all classified right.  MultiRC's EM; Khashabi et al. 2018

    ids  (paragraph, question, answer) of each answer; without them each answer is a question
    """
    questions = defaultdict(list)
    for item, right in zip(ids or enumerate(targets), np.equal(targets, predictions), strict=True):
        questions[item[:2]].append(right)
    return mean([all(answers) for answers in questions.values()])


def pearson(targets, predictions):
    """Pearson correlation; for classes 0 and 1 equal to Matthews' correlation."""
    if not len(targets) or np.ptp(targets) == 0 or np.ptp(predictions) == 0:
        return 0.0
    return float(pd.Series(targets, dtype=float).corr(pd.Series(predictions, dtype=float)))


def spearman(targets, predictions):
    return pearson(pd.Series(targets).rank(), pd.Series(predictions).rank())


def words(text):
    """Words of an English answer as in SQuAD's evaluate-v2.0.py: Rajpurkar et al. 2018, 1806.03822."""
    text = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r'\b(a|an|the)\b', ' ', text).split()


def chinese_text(text):
    """Chinese answer normalised as in CMRC's cmrc2018_evaluate.py: Cui et al. 2019, arXiv 1810.07366."""
    return text.lower().strip().translate(CHINESE_PUNCTUATION)


def chinese_tokens(text):
    """Chinese characters, and words of other scripts.

    nltk, used by the official script, gives other token counts for 2 of CMRC's 20,801 answers (a'can).
    """
    return CHINESE_TOKEN.findall(chinese_text(text))


def common_run(answer, prediction):
    """Length of the longest common contiguous run of tokens, the only overlap that CMRC's F1 counts."""
    matcher = difflib.SequenceMatcher(None, answer, prediction, autojunk=False)
    return matcher.find_longest_match(0, len(answer), 0, len(prediction)).size


def overlap(common, answer, prediction):
    """F1 of two token lists; if one is empty, 1.0 if both are, else 0.0."""
    if not answer or not prediction:
        return float(answer == prediction)
    return 2 * common(answer, prediction) / (len(answer) + len(prediction))


def score_spans(score, tokens, targets, predictions):
    """Mean over questions of the best score(tokens(answer), tokens(prediction)).

    targets      (N,) tuples of acceptable answers; those that `tokens` leaves empty are ignored, as in SQuAD
    predictions  (N,) texts; '' is correct for a question without answers
    """
    best = []
    for answers, prediction in zip(targets, predictions, strict=True):
        prediction = tokens(prediction)
        answers = [item for item in map(tokens, answers) if item] or [tokens('')]
        best.append(max(score(item, prediction) for item in answers))
    return mean(best)


METRICS = {
    'accuracy': accuracy,
    'f1': f1,
    'f1a': f1,
    'macro_f1': lambda targets, predictions: mean([             # over the classes that occur
        f1(np.equal(targets, i), np.equal(predictions, i)) for i in {*targets, *predictions}]),
    'exact_question': exact_question,
    'f1_accuracy': both(f1, accuracy),
    'matthews': pearson,
    'pearson': pearson,
    'spearman': spearman,
    'pearson_spearman': both(pearson, spearman),
    'exact': partial(score_spans, operator.eq, words),
    'f1_words': partial(score_spans, partial(overlap, lambda a, b: (Counter(a) & Counter(b)).total()), words),
    'exact_chinese': partial(score_spans, operator.eq, chinese_text),
    'f1_characters': partial(score_spans, partial(overlap, common_run), chinese_tokens),
}
METRICS['exact_f1_chinese'] = both(METRICS['exact_chinese'], METRICS['f1_characters'])


# ---- the table of tasks ----

HUB_SPLITS = {'train': 'train', 'dev': 'validation', 'dev_mm': 'validation_mismatched', 'test': 'test',
              'test_mm': 'test_mismatched'}
TSV = {'train': 'train.tsv', 'dev': 'dev.tsv', 'test': 'test.tsv'}
JSONL = {'train': 'train.jsonl', 'dev': 'val.jsonl', 'test': 'test.jsonl'}
JSON = {'train': 'train.json', 'dev': 'dev.json', 'test': 'test1.1.json|test.json'}
MNLI = {'train': 'train.tsv', 'dev': 'dev_matched.tsv', 'dev_mm': 'dev_mismatched.tsv',
        'test': 'test_matched.tsv', 'test_mm': 'test_mismatched.tsv'}
C3 = {split: f'd-{split}.json+m-{split}.json|c3-d-{split}.json+c3-m-{split}.json' for split in JSON}
ENTAILMENT, TWO_WAY = 'entailment neutral contradiction', 'entailment not_entailment'
PAIR = 'sentence1, sentence2'


def row(folder, metrics, labels='', texts='', **columns):
    """A Task.  Metrics and labels are separated by spaces, texts by commas."""
    columns = {'head': 'classify', 'make': make_texts, **columns}
    return Task(folder=folder, metrics=tuple(metrics.split()), labels=tuple(labels.split()),
                texts=tuple(filter(None, texts.split(', '))), **columns)


def glue(name, *words, **columns):
    return row(f'glue/{name}', *words, **{
        'hub': f"nyu-mll/glue:{name.lower().replace('-', '')}", 'files': TSV, 'read': read_table,
        'write': 'table', 'submission': f'{name}.tsv', **columns})


def clue(name, *words, **columns):
    return row(f'clue/{name}', *words, **{
        'hub': f'clue/clue:{name}', 'files': JSON, 'read': read_records,
        'submission': f'{name}_predict.json', **columns})


SQUAD = partial(row, 'squad', 'f1_words exact', head='span', read=read_squad, make=make_span, write='map',
                submission='predictions.json')
DOCSTRINGS = partial(row, 'docstrings', files=dict.fromkeys(('train', 'dev'), 'docstrings.jsonl'))

TASKS = {
    'cola': glue('CoLA', 'matthews accuracy', '0 1', 'sentence',
                 read=partial(read_table, header=('source', 'label', 'star', 'sentence'))),
    'sst2': glue('SST-2', 'accuracy', '0 1', 'sentence'),
    'mrpc': glue('MRPC', 'f1_accuracy f1 accuracy', '0 1', '#1 String|sentence1, #2 String|sentence2',
                 label='Quality|label', positive='1'),
    'stsb': glue('STS-B', 'pearson_spearman pearson spearman', '', PAIR, head='regress', label='score|label'),
    'qqp': glue('QQP', 'accuracy f1 f1_accuracy', '0 1', 'question1, question2', label='is_duplicate|label',
                positive='1'),
    'mnli': glue('MNLI', 'accuracy', ENTAILMENT, 'sentence1|premise, sentence2|hypothesis', files=MNLI,
                 label='gold_label|label', positive='entailment', submission='MNLI-m.tsv|MNLI-mm.tsv'),
    'qnli': glue('QNLI', 'accuracy', TWO_WAY, 'question, sentence', positive='entailment'),
    'rte': glue('RTE', 'accuracy', TWO_WAY, PAIR, positive='entailment'),
    'wnli': glue('WNLI', 'accuracy', '0 1', PAIR),
    'squad1': SQUAD(files={'train': 'train-v1.1.json', 'dev': 'dev-v1.1.json'}, hub='rajpurkar/squad'),
    'squad2': SQUAD(files={'train': 'train-v2.0.json', 'dev': 'dev-v2.0.json'}, hub='rajpurkar/squad_v2',
                    unanswerable=True),
    'boolq': row('superglue/BoolQ', 'accuracy f1', 'false true', 'passage, question', files=JSONL,
                 hub='aps/super_glue:boolq', read=read_records, write='idx', submission='BoolQ.jsonl'),
    'multirc': row('superglue/MultiRC', 'accuracy f1a exact_question', '0 1', 'paragraph, question+answer',
                   hub='aps/super_glue:multirc', read=read_multirc, files=JSONL, write='nested',
                   submission='MultiRC.jsonl'),
    'afqmc': clue('afqmc', 'accuracy', '0 1', PAIR, files=JSON | {'train': 'train.json|train.csv'}),
    'csl': clue('csl', 'accuracy', '0 1', 'keyword, abst'),
    'iflytek': clue('iflytek', 'accuracy', ' '.join(map(str, range(119))), 'sentence'),
    'tnews': clue('tnews', 'accuracy', '100 101 102 103 104 106 107 108 109 110 112 113 114 115 116',
                  'sentence', submission='tnews11_predict.json'),
    'wsc': clue('cluewsc2020', 'accuracy', 'false true', make=make_wsc, submission='cluewsc11_predict.json'),
    'cmnli': clue('cmnli', 'accuracy', ENTAILMENT, PAIR, label='label|gold_label'),
    'ocnli': clue('ocnli', 'accuracy', ENTAILMENT, PAIR, submission='ocnli_50k_predict.json',
                  files=JSON | {'train': 'train.50k.json|train.json'}),
    'cmrc': clue('cmrc2018', 'exact_f1_chinese exact_chinese f1_characters', head='span', read=read_squad,
                 make=make_span, write='map'),
    'chid': clue('chid', 'accuracy', head='choose', read=read_chid, make=make_chid, write='map',
                 submission='chid11_predict.json'),
    'c3': clue('c3', 'accuracy', head='choose', files=C3 | {'test': f"{JSON['test']}|{C3['test']}"},
               read=read_c3, make=make_c3, submission='c311_predict.json'),
    'docstring_package': DOCSTRINGS('accuracy', PACKAGES,
                                    source=partial(docstring_examples, n=1, label=label_package)),
    'docstring_order': DOCSTRINGS('accuracy f1', 'exchanged kept',
                                  source=partial(docstring_examples, n=2, label=label_order)),
    'custom': row('custom', 'accuracy', make=make_own, files={        # custom_task fills in the rest
        split: f'--{split}_file' for split in ('train', 'dev', 'test')}),
}
GROUPS = {
    'glue': ('cola', 'sst2', 'mrpc', 'stsb', 'qqp', 'mnli', 'qnli', 'rte'),     # the papers omit wnli
    'squad': ('squad1', 'squad2'),
    'docstrings': ('docstring_package', 'docstring_order'),
    'superglue': ('boolq', 'multirc'),
    'clue': ('afqmc', 'csl', 'iflytek', 'tnews', 'wsc', 'cmnli', 'cmrc', 'chid', 'c3'),     # Liu's nine
}


def custom_task(config):
    """The row `custom` of TASKS for the files and columns that the knobs name.  Raises UserError."""
    files = {split: config[f'{split}_file'] for split in ('train', 'dev', 'test') if config[f'{split}_file']}
    texts, label = (tuple(map(str.strip, config[key].split(','))) for key in ('texts', 'label'))
    if not {'train', 'dev'} <= set(files) or '' in texts + label or not len(label) <= len(texts) <= 2:
        raise UserError('tasks=custom: needs --train_file, --dev_file, --texts=COLUMN or two columns '
                        '(question,answer) and --label=COLUMN, or ANSWER,START for spans of the second text')
    suffix, values = Path(files.get('test', files['dev'])).suffix, {}
    task = replace(TASKS['custom'], files=files, texts=texts, label=','.join(label), write=suffix,
                   submission=f'predicted{suffix}')
    for split, path in files.items():
        rows = [row for _, row in read_path(task, path) if isinstance(row, dict)]
        with prepare_data.named(path, 'cannot be read'):
            table = pd.DataFrame(rows, dtype=object)
            values[split] = table[label[0]].dropna().map(str) if label[0] in table else ()
            ''.join([*map(str, table), *values[split]]).encode()        # raises unless all of it is UTF-8
        if table.empty:
            raise UserError(f'{path}: no rows')
        for column in [*'+'.join(texts).split('+'), *(label if split != 'test' else ())]:
            if column not in table:
                raise UserError(f"{path}: no column {column!r}, it has {', '.join(table)}")
    found, train = {*values['train']}, values['train'][values['train'] != '']
    if len(label) == 2:
        return replace(task, head='span', metrics=TASKS['squad1'].metrics, unanswerable='' in found)
    classes, numbers = tuple(sorted(found - {''})), pd.to_numeric(train, errors='coerce')
    if len(classes) < 2:
        raise UserError(f"{files['train']}: {label[0]} is {''.join(classes) or 'empty'} in all rows; two "
                        'classes or more are needed')
    if np.isfinite(numbers).all() and not train.str.fullmatch(r'-?\d+').all():
        return replace(task, head='regress', metrics=TASKS['stsb'].metrics,
                       scale=(float(numbers.mean()), float(numbers.std()), -math.inf, math.inf))
    for value in sorted({*values['dev']} - {'', *classes}):
        raise UserError(f"{files['dev']}: {label[0]} {value!r} is not in {files['train']}, which has "
                        f'{name_labels(classes)}')
    return replace(task, labels=classes, metrics=('accuracy', 'f1', 'matthews') if len(classes) == 2 else (
        'accuracy', 'macro_f1'))


# ---- input sequences ("rows") from texts ----

class Feature(NamedTuple):
    """Model input of one example, or of one window of a long context.

    example  its index in the list of examples
    rows     a sequence (ids (n,) int32, length of the first segment) per choice; one for other tasks
    target   target of the head's losses(): a number or a tuple of numbers
    first    span: index of the first context token; offsets: (m, 2) start and end characters of each one
    """
    example: int
    rows: list
    target: object
    first: int = 0
    offsets: object = None


def join_texts(special, block_size, a, b=None):
    """(ids of [CLS] a [SEP] b [SEP], length of its first segment, [CLS] a [SEP]).

    The end of the longer text is truncated until both fit, of b at a tie.  Devlin et al. 2018's code
    """
    room = block_size - 2 - (b is not None)
    n = min(len(a), max(room - len(b or ()), (room + 1) // 2) if b is not None else room)
    ids = [special['cls'], *a[:n], special['sep']]
    if b is not None:
        ids += [*b[:room - n], special['sep']]
    return np.array(ids, np.int32), n + 2


def text_features(examples, tokenizer, block_size, stride, choices=False):
    """A Feature per example, with one row or one per choice; then target is (label, number of choices)."""
    parts = [example.texts if choices else (example.texts,) for example in examples]
    distinct = list(dict.fromkeys(text for rows in parts for texts in rows for text in texts))
    ids, features = dict(zip(distinct, tokenizer.encode(distinct), strict=True)), []
    for i, (example, rows) in enumerate(zip(examples, parts, strict=True)):
        joined = [join_texts(tokenizer.special, block_size, *(ids[text] for text in texts)) for texts in rows]
        label = example.label or 0
        features.append(Feature(i, joined, (label, len(rows)) if choices else label))
    return features


def span_features(examples, tokenizer, block_size, stride):
    """Windows [CLS] question [SEP] part of the context [SEP]; target [CLS] if the answer is outside."""
    questions, contexts = zip(*(example.texts for example in examples), strict=True)
    distinct = list(dict.fromkeys(contexts))
    found = dict(zip(distinct, tokenizer.encode_offsets(distinct), strict=True))
    features = []
    for i, (example, question) in enumerate(zip(examples, tokenizer.encode(list(questions)), strict=True)):
        question, (ids, offsets) = question[:min(QUESTION, block_size // 2)], found[example.texts[1]]
        room, first = block_size - len(question) - 3, len(question) + 2
        step = min(stride, max(1, room // 2))
        for begin in range(0, max(1, len(ids) - room + step), step):
            row = join_texts(tokenizer.special, block_size, question, ids[begin:begin + room])
            part = offsets[begin:begin + room]
            features.append(Feature(i, [row], span_target(example.label, part, first), first, part))
    return features


def span_target(answers, offsets, first):
    """(first, last token) in the row of the first of `answers`; (0, 0) if it is not in this window.

    answers  as Example.label; offsets (m, 2) start and end characters of the context tokens, from `first`
    """
    if not answers or not len(offsets):
        return 0, 0
    text, begin = answers[0]
    start = int(np.searchsorted(offsets[:, 1], begin, side='right'))
    end = int(np.searchsorted(offsets[:, 0], begin + len(text), side='left')) - 1
    inside = offsets[0, 0] <= begin and begin + len(text) <= offsets[-1, 1]
    return (first + start, first + end) if inside and start <= end else (0, 0)


# ---- heads: features, loss and predictions of each kind of task ----

class Classify:
    """Classification: cross-entropy.  Devlin et al. 2018, section 4.1"""
    model, features, choices = SequenceClassifier, staticmethod(text_features), False

    @staticmethod
    def losses(logits, targets, attention_mask):
        """logits (b, n_label), targets (b,) int64 -> (b,) float32"""
        return F.cross_entropy(logits.float(), targets, reduction='none')

    @staticmethod
    def outputs(logits, features, knobs):
        return logits.float().tolist()

    @staticmethod
    def predictions(examples, features, outputs, knobs):
        """A prediction for each example."""
        return np.array([np.argmax(row) for row in outputs])


class Regress(Classify):
    """Regression: squared error of one logit."""

    @staticmethod
    def losses(logits, targets, attention_mask):
        return (logits[:, 0].float() - targets) ** 2

    @staticmethod
    def predictions(examples, features, outputs, knobs):
        return np.array(outputs)[:, 0]


class Choose(Classify):
    """Multiple choice: cross-entropy over the choices.  Devlin et al. 2018, section 4.4"""
    model, features, choices = MultipleChoice, partial(text_features, choices=True), True

    @staticmethod
    def losses(logits, targets, attention_mask):
        """logits (b, C), targets (b, 2) int64: right choice, number of choices -> (b,) float32"""
        absent = torch.arange(logits.size(1), device=logits.device) >= targets[:, 1:]
        return Classify.losses(logits.float().masked_fill(absent, -math.inf), targets[:, 0], attention_mask)

    @staticmethod
    def outputs(logits, features, knobs):
        logits = logits.float().tolist()
        return [row[:len(feature.rows)] for row, feature in zip(logits, features, strict=True)]


class Span:
    """Extractive QA: cross-entropy of the first and last token.  Devlin et al. 2018, section 4.2

    Unlike in their code, padding is masked in the softmax, so the loss does not depend on the batch.
    """
    model, features, choices = SpanClassifier, staticmethod(span_features), False

    @staticmethod
    def losses(logits, targets, attention_mask):
        """logits (b, T) of start and end, targets (b, 2) int64, attention_mask (b, T) bool -> (b,) float32"""
        start, end = (part.float().masked_fill(~attention_mask, -math.inf) for part in logits)
        return (F.cross_entropy(start, targets[:, 0], reduction='none')
                + F.cross_entropy(end, targets[:, 1], reduction='none')) / 2

    @staticmethod
    def outputs(logits, features, knobs):
        """For each window: (score of no answer, score of the best span, its first token, its last token)."""
        start, end = (part.float() for part in logits)
        outside = torch.ones_like(start, dtype=torch.bool)
        for row, feature in zip(outside, features, strict=True):
            row[feature.first:feature.first + len(feature.offsets)] = False
        best = best_spans(*(part.masked_fill(outside, -math.inf) for part in (start, end)), knobs.max_answer)
        return list(zip(*(part.tolist() for part in (start[:, 0] + end[:, 0], *best)), strict=True))

    @staticmethod
    def predictions(examples, features, outputs, knobs):
        """Best span over an example's windows; '' if its minimum no-answer score exceeds that by enough."""
        null, best = [math.inf] * len(examples), [(-1e4, '')] * len(examples)
        for feature, (none, score, first, last) in zip(features, outputs, strict=True):
            i = feature.example
            null[i] = min(null[i], none)
            if score > best[i][0]:
                begin, end = feature.offsets[[first - feature.first, last - feature.first], [0, 1]]
                best[i] = score, examples[i].texts[1][begin:end].strip()
        return ['' if knobs.unanswerable and none - score > knobs.null_threshold else text
                for none, (score, text) in zip(null, best, strict=True)]


def best_spans(start, end, longest):
    """(score, first, last token), (b,) each, of the best span of at most `longest` tokens.

    start, end  (b, T) logits, -inf outside the context
    """
    pairs = start[:, :, None] + end[:, None, :]                         # (b, T, T): start, end
    allowed = torch.ones_like(pairs[0], dtype=torch.bool).triu().tril(longest - 1)
    score, place = pairs.masked_fill(~allowed, -math.inf).flatten(1).max(1)
    return score, place // start.size(1), place % start.size(1)


HEADS = {'classify': Classify, 'regress': Regress, 'span': Span, 'choose': Choose}


class Learner(nn.Module):
    """A model and the loss of its head, as train.update() calls it."""

    def __init__(self, model, losses):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, targets, attention_mask, **inputs):
        """Losses (b,), float32; inputs: other arguments of the model's forward."""
        return self.losses(self.model(attention_mask=attention_mask, **inputs), targets, attention_mask)


# ---- batches ----

def collate(features, special, choices=False, length=0):
    """{'ids', 'segments', 'attention_mask' (b, T), or (b, C, T) for choices, 'targets'}, arrays.

    Rows are padded to `length`, or to the longest. With `choices`, examples with fewer choices than others
    repeat their first; the target has the real number.
    """
    width = length or max(len(ids) for feature in features for ids, _ in feature.rows)
    most = max(len(feature.rows) for feature in features)
    ids = np.full((len(features), most, width), special['pad'], np.int64)
    segments = np.zeros_like(ids)
    for i, feature in enumerate(features):
        for j, (row, n) in enumerate(feature.rows + feature.rows[:1] * (most - len(feature.rows))):
            ids[i, j, :len(row)] = row
            segments[i, j, n:len(row)] = 1
    batch = {'ids': ids, 'segments': segments, 'attention_mask': ids != special['pad']}
    batch = batch if choices else {key: value[:, 0] for key, value in batch.items()}
    targets = np.array([feature.target for feature in features])
    return {**batch, 'targets': targets.astype(np.float32 if targets.dtype.kind == 'f' else np.int64)}


def training_batch(step, features, seed, total_batch, form):
    """collate's dict plus 'weights' (b,) float32; every feature once per epoch, shuffled by (seed, epoch).

    The last batch of an epoch is filled with features of weight 0.  form: other arguments of collate
    """
    epoch, place = divmod(step, -(-len(features) // total_batch))
    places = np.arange(place * total_batch, (place + 1) * total_batch)
    chosen = train.shuffled(places % len(features), len(features), seed, epoch)
    batch = collate([features[i] for i in chosen], *form)
    return {**batch, 'weights': (places < len(features)).astype(np.float32)}


# ---- where weights come from ----

class Start(NamedTuple):
    """Pretrained weights and their tokenizer."""
    config: EncoderConfig
    weights: dict               # encoder.*, perhaps pooler.*, and others that are ignored
    tokenizer: object
    data: dict                  # digests of the data it was trained on


class Source(NamedTuple):
    """Pretrained weights that init_from or compare names."""
    path: str                   # checkpoint, or name of a Hugging Face BERT
    run: str                    # name of the run; with the step, of its trials' folder
    step: int | None            # of pretraining
    init: str                   # table row: name of the run, or common name of its pretraining seeds
    run_seed: int | None = None     # seed of pretraining; None: not one of several seeds


def find_checkpoint(text):
    """Newest checkpoint of a run; a file, or the name of a BERT, is returned unchanged."""
    if text.endswith('.pt') or os.path.exists(os.path.join(text, 'config.json')):
        return text
    path = train.newest_checkpoint(text)
    if not path and (os.path.isdir(text) or text.startswith(('out/', '.', '/'))):
        config = os.path.join('config', f'{os.path.basename(os.path.abspath(text))}.py')
        words = config if os.path.exists(os.path.join(ROOT, config)) else f'--out_dir={text}'
        raise UserError(f'{text}: no checkpoint there; python train.py {words} makes it')
    return path or text


def run_of(source):
    """(name of the run, step or None) of a source; for a glob of folders their common name."""
    run, name = os.path.abspath(source).split(os.sep)[-2:]
    stem, suffix = os.path.splitext(name)
    if stem.startswith('ckpt_'):
        return run, int(stem[5:]) if stem[5:].isdigit() else None       # a glob has no step
    if glob.has_magic(name):
        return re.sub(r'\[.*?\]|[*?]', '', name).strip('-_.') or source, None
    return f'{run}_{stem}' if suffix == '.pt' else name, None


def milestones_of(files):
    """Of each run the checkpoints at its milestones, not those kept for resuming; all if it has none."""
    kept = []
    for folder, found in pd.Series(files).groupby([os.path.dirname(path) for path in files]):
        found = sorted(found, key=lambda path: run_of(path)[1] or 0)
        steps = {*train.read_checkpoint(found[-1])['config'].get('milestones', ())}
        chosen = [path for path in found if run_of(path)[1] in steps] or found
        others = [os.path.basename(path) for path in found if path not in chosen]
        if others:
            say(f"{folder}: the curve leaves out {', '.join(others)}: not among its milestones; to add one, "
                f'write {folder}/ckpt_*.pt,{folder}/{others[-1]}')
        kept += chosen
    return kept


def seeds_of(text, folders):
    """Sources of a glob of folders: runs of one system that differ in the knob `seed` of train.py."""
    sources, first = [], {}
    for number, folder in enumerate(sorted(folders), 1):
        path = find_checkpoint(folder)
        content = train.read_checkpoint(path) if path.endswith('.pt') else {'config': {}}
        model = asdict(EncoderConfig(**content['model_config'])) if 'step' in content else {}
        ours = {**model, **content.get('data', {}), 'step': content.get('step')}
        first = first or ours
        train.refuse_difference(path, ours, first, f'{text} means seeds of one system; this run')
        seed = content['config'].get('seed', number)        # a BERT has none
        if seed in [source.run_seed for source in sources]:
            raise UserError(f'{path}: another run of {text} has the same seed={seed}: pretrain with --seed=N')
        sources.append(Source(path, *run_of(path), run_of(text)[0], seed))
    return sources


def sources_of(text):
    """Sources that a comma-separated list of runs, checkpoints, BERTs and globs names.  Raises UserError."""
    sources = []
    for part in re.split(r',(?![^[]*])', text):                 # not in [1,2] of a glob
        found = sorted(glob.glob(part))
        files, folders = [path for path in found if path.endswith('.pt')], [*filter(os.path.isdir, found)]
        if not glob.has_magic(part):
            files = [find_checkpoint(part)]
        elif not files + folders:
            raise UserError(f'{part}: no such file')
        elif files:
            files = milestones_of(files)
        sources += [Source(path, *run_of(path), run_of(path)[0]) for path in files] or seeds_of(part, folders)
    return sources


def find_sources(init_from, compare):
    """Sources of both knobs, those of `compare` last.  Raises UserError if two have the same name."""
    sources, others = sources_of(init_from), sources_of(compare) if compare else []
    called = Counter((source.run, source.step) for source in sources + others)
    both = {source.init for source in sources} & {other.init for other in others}
    for source in sources + others:
        if called[source.run, source.step] > 1 or source.init in both:
            raise UserError(f'{source.path}: another source is called {source.init} too; name it '
                            'once, rename a folder, or give both to init_from, as a glob, for a curve')
    if len({other.init for other in others}) > 1:
        raise UserError(f'compare={compare!r}: several systems; name the baseline alone, and the others in '
                        'init_from with commas between them')
    return sources + others


@lru_cache(1)
def read_start(source, folder, lower_case):
    """Start from a checkpoint or a Hugging Face BERT.  folder: tokenizer; '': its own"""
    if source.endswith('.pt'):
        model, tokenizer, content = train.load_pretrained(source, folder)
        config, weights, data = model.config, model.state_dict(), content['data']
    else:
        (config, weights), data = pretrained_encoder(source), {}
        words = '' if folder else transformers().utils.cached_file(source, 'vocab.txt')
        facts = {'kind': 'wordpiece', 'lower_case': lower_case}
        tokenizer = (prepare_data.load_tokenizer(folder) if folder
                     else prepare_data.WordPieceTokenizer(os.path.dirname(words), facts))
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(f'{source}: {config.vocab_size} token embeddings, but the tokenizer has '
                        f'{tokenizer.vocab_size} pieces; name the folder of its own with --tokenizer=')
    return Start(config, weights, tokenizer, data)


def weights_of(source):
    """Digest that identifies the weights of a source; the name of a BERT on the hub."""
    if source.endswith('.pt'):
        return train.checkpoint_identity(source)
    files = glob.glob(os.path.join(glob.escape(source), '*.safetensors'))
    return hashlib.sha256(Path(files[0]).read_bytes()).hexdigest()[:16] if files else source


def make_classifier(start, head, knobs, n_label):
    """A head's model with the pretrained encoder, and pooler if both have one; the rest is random."""
    if start.config.n_segment < 2:
        raise UserError(f'n_segment={start.config.n_segment}: fine-tuning needs 2 segment embeddings')
    model = head.model(replace(start.config, dropout=knobs.dropout, attention_dropout=knobs.attention_dropout,
                               pooling=knobs.pooling, n_label=n_label))
    known = {key: value for key, value in start.weights.items() if key.startswith(('encoder.', 'pooler.'))}
    missing = model.load_state_dict(known, strict=False).missing_keys
    assert not any(key.startswith('encoder.') for key in missing), missing
    if knobs.block_size not in (0, start.config.block_size):
        model.encoder.extend(knobs.block_size)
    return model


# ---- data of a task ----

class Split(NamedTuple):
    examples: list
    features: list
    skipped: dict               # {reason: number of records}


def splits_of(name, kind):
    """Splits for evaluation ('dev') or submission ('test') of a task, as {column of the results: split}."""
    return {name + split.removeprefix(kind): split for split in TASKS[name].files if split.startswith(kind)}


def to_predict(name, predict):
    """{column: split or file} that `predict` asks for."""
    if predict not in ('', 'test'):
        return {name: predict}
    found = splits_of(name, 'test') if predict or not TASKS[name].hub else {}       # custom's test_file
    if predict and not found:
        raise UserError(f'{name}: no test file is published; name one, as in --predict=FILE')
    return found


@lru_cache(8)
def load_split(name, split, tokenizer, block_size, stride, files, most):
    """Tokenized Split of a task, cached for later trials.  files: (data_dir, extra_train)

    most  maximum of examples, a random subset that is the same for all seeds; 0: all
    """
    examples, skipped = load_examples(name, split, *files)
    if 0 < most < len(examples):
        chosen = train.shuffled(np.arange(most), len(examples), 0, 0)
        examples = [examples[i] for i in sorted(chosen)]
    return Split(examples, HEADS[TASKS[name].head].features(examples, tokenizer, block_size, stride), skipped)


def survey(name, config):
    """Check all data that the command needs of a task before the first trial.  Raises UserError.

    Returns ({labelled split: hash of its examples}, a line with the size of every split).
    """
    counts, hashes = [], {}
    extra = ['extra_train'] if config['extra_train'] and TASKS[name].head == 'span' else []
    labelled = [*extra, 'train', *splits_of(name, 'dev').values()]
    for split in [*labelled, *to_predict(name, config['predict']).values()]:
        examples, skipped = load_examples(name, split, config['data_dir'], config['extra_train'])
        notes = ''.join(f' ({kind}: {n})' for kind, n in skipped.items())
        counts.append(f'{split} {len(examples):,}{notes}')
        hashes[split] = f'{text_hash(repr(examples)):016x}'
    kind = ': '.join(filter(None, (TASKS[name].head, name_labels(TASKS[name].labels))))
    return {split: hashes[split] for split in labelled}, f"{name}: {', '.join(counts)} examples; {kind}"


def majority_of(name, examples, n):
    """n predictions of a trivial baseline: the most frequent training label, or the mean for regression."""
    labels = [example.label for example in examples]
    if TASKS[name].head == 'regress':
        return [np.mean(labels)] * n
    if TASKS[name].head == 'span':
        labels = [answers[0][0] if answers else '' for answers in labels]
    return [Counter(labels).most_common(1)[0][0]] * n


def score(name, examples, predictions):
    """{metric: value} of predictions, one for each example, as fractions."""
    targets = [example.label for example in examples]
    if TASKS[name].head == 'span':
        targets = [tuple(text for text, _ in answers) for answers in targets]
    ids = {'exact_question': ([example.id for example in examples],)}
    return {metric: float(METRICS[metric](targets, predictions, *ids.get(metric, ())))
            for metric in TASKS[name].metrics}


# ---- trials ----

def recipe(config, name):
    """The knobs that affect a task's result, with its overrides applied."""
    chosen = {key: value for key, value in config.items() if key not in FREE}
    for item in config['overrides'].split():
        found = re.fullmatch(r'(\w+)\.(\w+)=(.*)', item)
        if not found or found[1] not in TASKS or found[2] not in chosen:
            raise UserError(f'overrides: {item!r}: write TASK.KNOB=VALUE, as in cola.epochs=9, with one of '
                            f"{', '.join(chosen)}")
        if found[1] == name:
            chosen[found[2]] = parse(found[2], found[3], chosen[found[2]])
    known = {**config, **chosen, 'block_size': chosen['block_size'] or 8}       # 0 is allowed
    limits = {**LIMITS, 'min_lr': (0, known['learning_rate'])}
    train.check_limits(known, {key: limits[key] for key in known if key in limits})
    choose('schedule', chosen['schedule'], train.SCHEDULE)
    choose('pooling', chosen['pooling'], POOLING)
    choose(f'{name}: metric', chosen['metric'], {'': None, **dict.fromkeys(TASKS[name].metrics)})
    return chosen


@dataclass(frozen=True)
class Trial:
    """One task fine-tuned with one seed from one source of weights."""
    source: Source
    name: str
    seed: int
    knobs: SimpleNamespace      # of the command, with the task's overrides
    identity: dict              # {'recipe', 'weights', 'data'}: determine the result, with the seed

    task = property(lambda self: TASKS[self.name])
    head = property(lambda self: HEADS[self.task.head])
    metric = property(lambda self: self.knobs.metric or self.task.metrics[0])
    start = property(lambda self: read_start(self.source.path, self.knobs.tokenizer, self.knobs.lower_case))
    phases = property(lambda self: [split for split in self.identity['data'] if split.endswith('train')])
    named = property(lambda self: {'init': self.source.init, 'step': self.source.step,
                                   'run_seed': self.source.run_seed})       # as this command names it
    length = property(lambda self: self.knobs.block_size or self.start.config.block_size)

    @property
    def folder(self):
        """out_dir/RUN@STEP/TASK_SEED_HASH, with a hash of the identity."""
        run, step = self.source.run, self.source.step
        code = f'{text_hash(json.dumps(self.identity, sort_keys=True)):016x}'[:6]
        place = run if step is None else f'{run}@{step}'
        return os.path.join(self.knobs.out_dir, place, f'{self.name}_{self.seed}_{code}')

    def split(self, split, name=''):
        """Split of this trial's task, or of task `name`, with this trial's tokenizer."""
        k = self.knobs
        most = k.train_samples if split in self.phases else k.eval_samples if split in LABELLED else 0
        return load_split(name or self.name, split, self.start.tokenizer, self.length, k.stride,
                          (k.data_dir, k.extra_train), most)

    def dev(self):
        """{column: Split} of the evaluation sets."""
        return {column: self.split(split) for column, split in splits_of(self.name, 'dev').items()}

    def form(self, runtime):
        """Arguments of collate; one fixed length on XLA, which compiles a graph per length."""
        padded = self.knobs.pad_to_block or runtime.is_xla
        return self.start.tokenizer.special, self.head.choices, self.length if padded else 0


@torch.no_grad()
def run_head(model, features, trial, runtime, fraction=0.0):
    """Outputs of the head for each feature, in order.

    fraction  norm of Gaussian noise over the mean embedding norm; seeded by the batch number alone
    """
    model.eval()
    form, outputs = trial.form(runtime), {}
    order = np.argsort([max(len(ids) for ids, _ in feature.rows) for feature in features], kind='stable')
    size = max(1, EVAL_ROWS // max(len(feature.rows) for feature in features))
    with add_noise(model, features, form, runtime, fraction) if fraction else contextlib.nullcontext():
        for number, begin in enumerate(range(0, len(order), size)):
            chosen = order[begin:begin + size]
            rows = [features[i] for i in chosen]
            batch = train.micro_batches(collate(rows, *form), size, runtime.device)[0]
            del batch['targets']
            train.seed_step(0, number, runtime)
            with runtime.autocast():
                logits = train.to_host(model(**batch), runtime)
            outputs.update(zip(chosen.tolist(), trial.head.outputs(logits, rows, trial.knobs), strict=True))
    model.train()
    return [outputs[i] for i in range(len(features))]


def predict_split(model, split, trial, runtime, fraction=0.0):
    """(a prediction for each example, outputs of the head for each feature)"""
    outputs = run_head(model, split.features, trial, runtime, fraction)
    return trial.head.predictions(split.examples, split.features, outputs, trial.knobs), outputs


def add_noise(model, features, form, runtime, fraction):
    """Add noise of random direction to the first block's input; returns the hook.  Kowsher et al. 2024

    Its norm at every token is `fraction` times the mean norm of the embeddings of all evaluated tokens.
    """
    norms = []
    for begin in range(0, len(features), EVAL_ROWS):
        rows = collate(features[begin:begin + EVAL_ROWS], *form)
        batch = train.micro_batches(rows, EVAL_ROWS, runtime.device)[0]
        ids, segments, mask = (batch[key].flatten(0, -2) for key in ('ids', 'segments', 'attention_mask'))
        found, mask = train.to_host((model.encoder.embed(ids, segments).norm(dim=-1), mask), runtime)
        norms.append(found[mask].cpu())
    norm = fraction * torch.cat(norms).mean().item()

    def add(module, inputs, x):
        direction = torch.randn_like(x)
        return x + norm * direction / direction.norm(dim=-1, keepdim=True)

    return model.encoder.dropout.register_forward_hook(add)


def fine_tune(trial, model, runtime):
    """Train a trial, on extra_train first as in Devlin et al. 2018, section 4.2, and evaluate it.

    Returns the content of result.json.
    """
    os.makedirs(trial.folder, exist_ok=True)
    log, done = train.Log(trial.folder, 0, runtime, trial.knobs.wandb_project, vars(trial.knobs)), 0
    for split in trial.phases:
        done, best, seconds = fit(trial, split, model, runtime, log, done)
    return finish(trial, model, runtime, best, seconds)


def fit(trial, split, model, runtime, log, done):
    """Train on a split with a schedule of its own; validate unless it is extra_train.

    done  steps on earlier splits.  Returns (steps so far, result of validate(), seconds of each epoch)
    """
    k, data, name = trial.knobs, trial.split(split), f'{trial.name} seed {trial.seed}'
    name += '' if split == 'train' else f' {split}'
    make = partial(training_batch, features=data.features, seed=trial.seed, total_batch=k.total_batch,
                   form=trial.form(runtime))
    per_epoch = -(-len(data.features) // k.total_batch)
    steps, every = per_epoch * k.epochs, k.eval_interval or per_epoch
    warmup, betas = round(k.warmup_fraction * steps), (k.beta1, k.beta2)
    learner = Learner(model, trial.head.losses)
    optimizer = train.make_optimizer(model, k.learning_rate, betas, k.adam_eps, k.weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    learner = train.compiled(learner, k.compile, make(0), k.batch_size, runtime)
    health, best, seconds, since = train.Health(runtime), {}, [0.0] * k.epochs, time.perf_counter()
    bar = prepare_data.progress(train.prefetch(make, range(steps)), steps, 'step', name)
    for step, batch in enumerate(bar, 1):
        lr = train.get_lr(step - 1, k.learning_rate, k.min_lr, warmup, steps, k.schedule)
        train.set_lr(optimizer, lr, runtime)
        train.seed_step(trial.seed, step - 1, runtime)
        parts = train.micro_batches(batch, k.batch_size, runtime.device)
        count = float(batch['weights'].sum())
        health.add(*train.update(learner, optimizer, scaler, parts, count, k.grad_clip, runtime), scaler)
        runtime.sync()
        logs, validates = (step % interval == 0 or step == steps for interval in (k.log_interval, every))
        if logs or validates:
            loss, norm = health.look(step, name)                # waits for the device
            bar.set_postfix({'loss': loss, trial.metric: best.get('value', '-')}, refresh=False)
        seconds[(step - 1) // per_epoch] += time.perf_counter() - since
        if logs:
            eta = timedelta(seconds=int((steps - step) * sum(seconds) / step))
            text = f'{name} step {step}/{steps}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.2f}, eta {eta}'
            log.write(split, done + step, text, loss=loss, lr=lr, norm=norm, **train.compilations(runtime))
        if validates and split == 'train':
            found = validate(trial, model, runtime, done + step, log)
            best = found if not k.keep_best or found['value'] > best.get('value', -math.inf) else best
        since = time.perf_counter()
    return done + steps, best, seconds


def validate(trial, model, runtime, step, log):
    """Score the evaluation sets; returns scores, predictions and, with keep_best, the weights."""
    scores, lines = {}, []
    for column, split in trial.dev().items():
        predictions, outputs = predict_split(model, split, trial, runtime)
        scores[column] = score(trial.name, split.examples, predictions)
        found = [{'column': column, 'id': example.id, 'prediction': prediction, 'outputs': []}
                 for example, prediction in zip(split.examples, predictions, strict=True)]
        for feature, output in zip(split.features, outputs, strict=True):
            found[feature.example]['outputs'].append(output)            # of each window
        lines += found
    text = '; '.join(f'{column} {100 * row[trial.metric]:.2f}' for column, row in scores.items())
    log.write('val', step, f'{trial.name} seed {trial.seed} step {step}: {trial.metric} of {text}',
              **scores[trial.name])
    weights = {key: x.cpu().clone() for key, x in model.state_dict().items() if trial.knobs.keep_best}
    return {'step': step, 'value': scores[trial.name][trial.metric], 'scores': scores, 'lines': lines,
            'weights': weights}


def finish(trial, model, runtime, best, seconds):
    """Write predictions, weights and, last, result.json."""
    if best['weights']:
        model.load_state_dict(best['weights'])
    data, dev = {split: trial.split(split) for split in trial.phases}, trial.dev()
    pd.DataFrame(best['lines']).to_json(os.path.join(trial.folder, 'predictions.jsonl'), orient='records',
                                        lines=True, force_ascii=False)
    if trial.knobs.keep_models:
        train.write_checkpoint(os.path.join(trial.folder, 'model.pt'), {
            'step': best['step'], 'model': train.to_host(model.state_dict(), runtime),
            'config': trial.identity['recipe'], 'model_config': asdict(model.config),
            'data': trial.start.data, 'task': trial.name, 'head': trial.task.head,
            'labels': trial.task.labels, 'scale': trial.task.scale, 'argv': sys.argv})
        prepare_data.copy_tokenizer(trial.start.tokenizer, trial.folder)        # for train.load()
    result = {
        **trial.named, 'model': asdict(model.config), 'task': trial.name, 'seed': trial.seed,
        'metric': trial.metric, 'scores': best['scores'], 'best_step': best['step'],
        'majority': {column: score(trial.name, split.examples, majority_of(
            trial.name, data['train'].examples, len(split.examples))) for column, split in dev.items()},
        **{f'n_{split}': len(found.examples) for split, found in data.items()},
        'n_dev': {column: len(split.examples) for column, split in dev.items()},
        'skipped': {split: found.skipped for split, found in {**data, **dev}.items()},
        'epochs': trial.knobs.epochs, 'seconds_per_epoch': float(np.median(seconds)), **trial.identity,
        'device': train.device_name(runtime.device), 'dtype': str(runtime.dtype)[6:],
        'date': time.strftime('%Y-%m-%dT%H:%M:%S%z')}
    write_result(trial, result)
    return result


def write_result(trial, result):
    write_bytes(os.path.join(trial.folder, 'result.json'), json.dumps(result, indent=1).encode())


def read_result(folder):
    """result.json of a trial's folder, or None if it has not finished."""
    path = os.path.join(folder, 'result.json')
    if not os.path.exists(path):
        return None
    with contextlib.suppress(ValueError, AttributeError):
        result = load_json(path)
        if {'scores', 'recipe', 'weights', 'data'} <= result.keys():
            return result
    raise UserError(f'{path}: damaged, or of an earlier version; remove {folder}')


def cross_scores(trial, model, runtime, others):
    """{task: accuracy} of this model on other tasks, reduced to two labels: `positive` or not.

    Kowsher et al. 2024, table 6. `positive` is entailment, duplicate or equivalent; all others, such as
    neutral and contradiction, are negative. On its own task a model is scored on all labels.
    """
    found = {}
    for other in others:
        split = trial.split('dev', other)
        says = predict_split(model, split, trial, runtime)[0]
        truth = np.array([example.label for example in split.examples])
        if other != trial.name:
            says = says == trial.task.labels.index(trial.task.positive)
            truth = truth == TASKS[other].labels.index(TASKS[other].positive)
        found[other] = accuracy(truth, says)
    return found


def submit(trial, model, runtime):
    """Write predictions for test files or a given file; print scores if it has labels."""
    for column, split in to_predict(trial.name, trial.knobs.predict).items():
        data = trial.split(split)
        predictions, _ = predict_split(model, data, trial, runtime)
        prefix = '' if split in trial.task.files else f'{Path(split).stem}.'
        path = write_submission(trial.name, column, trial.folder, data.examples, predictions, prefix)
        print(f'wrote {path}', flush=True)
        known = [i for i, example in enumerate(data.examples) if example.label is not None]
        if known:
            scores = score(trial.name, [data.examples[i] for i in known], [predictions[i] for i in known])
            text = ', '.join(f'{metric} {100 * value:.2f}' for metric, value in scores.items())
            print(f'{column} seed {trial.seed}, {len(known):,} labelled examples: {text}', flush=True)


def run_trial(trial, levels, others, runtime):
    """Fine-tune unless done before; then noise, cross and predict.  Returns whether anything was done."""
    before = read_result(trial.folder) or {}
    result = before and {**before, **trial.named}
    levels = [level for level in levels if f'{level:g}' not in before.get('noise', {}).get(trial.name, {})]
    others = [name for name in others if name not in before.get('cross', {}) and trial.task.positive]
    kept = os.path.exists(os.path.join(trial.folder, 'model.pt'))
    if result and not (levels or others or trial.knobs.predict or kept and to_predict(trial.name, '')):
        if result != before:                            # another command named it differently
            write_result(trial, result)
        return result != before
    torch.manual_seed(trial.seed)
    model = make_classifier(trial.start, trial.head, trial.knobs, max(1, len(trial.task.labels)))
    if result:
        model.load_state_dict(train.read_checkpoint(os.path.join(trial.folder, 'model.pt'))['model'])
    wanted = before.get('dtype', trial.knobs.dtype)     # a finished trial keeps its dtype
    runtime = replace(runtime, dtype=train.choose_dtype(wanted, runtime.device, model.config.n_embd))
    model = train.to_device(model, runtime)
    result = result or fine_tune(trial, model, runtime)
    for column, split in trial.dev().items() if levels else ():
        found = result.setdefault('noise', {}).setdefault(column, {})
        for level in levels:
            predictions, _ = predict_split(model, split, trial, runtime, level)
            found[f'{level:g}'] = score(trial.name, split.examples, predictions)[trial.metric]
    result.setdefault('cross', {}).update(cross_scores(trial, model, runtime, others))
    write_result(trial, result)
    submit(trial, model, runtime)
    return True


# ---- the report: tables made from a long-format DataFrame, one number per line ----

@cache
def read_papers():
    """Results printed in the papers, x 100, from results/papers.json: {paper: {'tables': [...], ...}}.

    Columns: 'COLUMN.METRIC ...'; averages: {name: indices of columns}; rows: 'name; values averages (sd)'.
    """
    return load_json(os.path.join(ROOT, 'results', 'papers.json'))


def averages_of(table):
    """{average: its columns} of a table in the form of papers.json."""
    columns = table['columns'].split()
    return {name: [columns[i] for i in places] for name, places in table.get('averages', {}).items()}


def paper_rows(table):
    """DataFrame of the rows of a table of a paper, as text."""
    rows = {f'paper: {name}': re.findall(r'[\d.]+(?: \([\d.]+\))?', numbers)
            for name, numbers in (row.split(';') for row in table['rows'])}
    return pd.DataFrame.from_dict(rows, 'index', columns=[*table['columns'].split(), *averages_of(table)])


@cache
def t_quantile(freedom, inside=0.95):
    """t with P(|T| <= t) = inside: t = sqrt(freedom) tan(angle), density of angle ~ cos^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])        # trapezoidal rule
    return math.sqrt(freedom) * math.tan(np.interp(inside, below / below[-1], angles))


def over_seeds(wide, counted='seeds'):
    """For each column, over its lines: 'mean (sd)', half of the 95 % interval, number of lines."""
    cells = {}
    for name, points in wide.items():
        n, mean, sd = points.count(), points.mean(), points.std()
        half = t_quantile(n - 1) * sd / math.sqrt(n) if n > 1 else math.nan
        cells[name] = [cell(mean) + (f' ({cell(sd)})' if n > 1 else ''), cell(half), cell(n or None)]
    return pd.DataFrame(cells, ['mean', '± 95 %', counted], dtype=object)


def by_run(row, wide):
    """Yields (name, lines, what a line is): of several runs their means over seeds, then each run.

    wide  lines of a table row, with index levels run (pretraining seed; -1: none) and seed
    """
    runs = wide.groupby('run')
    if runs.ngroups > 1:
        yield row, runs.mean(), 'pretraining seeds'
    for seed, lines in runs:
        yield row if runs.ngroups == 1 else f'{row}, pretraining seed {seed}', lines, 'seeds'


def each_row(wide, row='row'):
    """'mean (sd)' over pretraining runs or seeds, a line for each value of the index level `row`."""
    return pd.DataFrame({name: over_seeds(next(by_run(name, lines))[1]).loc['mean']
                         for name, lines in wide.groupby(row)}).T


def cell(value):
    """A value as a table cell: floats with two decimals, '-' if missing."""
    return '-' if pd.isna(value) else f'{value:.2f}' if isinstance(value, float) else str(value)


def markdown(title, frame, *notes):
    """A heading, a DataFrame as a Markdown table and notes; '' if the DataFrame is empty."""
    cells = frame.astype(object).map(cell).reset_index().values.tolist()
    rows = [['', *frame.columns], ['---'] * (1 + len(frame.columns)), *cells]
    table = '\n'.join(f"| {' | '.join(map(str, row))} |" for row in rows)
    return '\n\n'.join([f'## {title}', table, *filter(None, notes)]) if cells else ''


def row_names(trials):
    """Table row of each trial: its init, knobs that vary within a task, hashes of varying data or weights."""
    frame = pd.DataFrame([{'run_seed': None, **trial} for trial in trials])
    recipes, alone = pd.DataFrame(list(frame.recipe)), frame.run_seed.isna()
    words = pd.Series(' alone', frame.index).where(alone & (~alone).groupby(frame.init).transform('any'), '')
    for key in recipes:
        if recipes[key].groupby(frame.task).nunique(dropna=False).gt(1).any():
            words += f' {key}=' + recipes[key].map(show)
    hashes = frame[['data', 'weights']].map(lambda value: f' {text_hash(str(value)):016x}'[:7])
    for key, same in (('data', [frame.task, words]),
                      ('weights', [frame.task, frame.init, frame.step, frame.run_seed])):
        words += hashes[key].where(hashes[key].groupby(same, dropna=False).transform('nunique') > 1, '')
    return list(frame.init + words)


def tidy(trials):
    """Long-format DataFrame of finished trials, scores x 100; -1: no step, or no pretraining seed."""
    lines = []
    for trial, row in zip(trials, row_names(trials), strict=True):
        values = [(kind, column, name, value) for kind in ('scores', 'majority', 'noise')
                  for column, found in trial.get(kind, {}).items() for name, value in found.items()]
        values += [('cross', trial['task'], other, value) for other, value in trial.get('cross', {}).items()]
        values.append(('seconds', trial['task'], '', trial['seconds_per_epoch']))
        step, run = (-1 if trial.get(key) is None else trial[key] for key in ('step', 'run_seed'))
        lines += [(row, step, run, trial['seed'], *value) for value in values]
    frame = pd.DataFrame(lines, columns=['row', 'step', 'run', 'seed', 'kind', 'column', 'name', 'points'])
    frame.loc[frame.kind != 'seconds', 'points'] *= 100
    return frame


def model_table(inits):
    """Table of the model of each row.  inits: {row: its last trial}"""
    shown = ['step', 'attention', 'position', 'norm', 'pooling', 'n_layer', 'n_head', 'n_embd', 'device',
             'date']
    frame = pd.DataFrame([{**one['model'], **one} for one in inits.values()], list(inits), dtype=object)
    return markdown(f"Fine-tuning: {', '.join(inits)}", frame[shown],
                    'Points: mean (standard deviation) over seeds; over the means of pretraining seeds where '
                    'there are several. ± 95 %: half the confidence interval.')


def choose_tables(book, trials):
    """The paper's tables that share a column with the trials, then one like them for the other columns.

    Of a table's `normalisers`, notes on one of GAU's normalisers each, those that the trials have are shown.
    """
    own = {one['model'].get('normaliser') for one in trials if one['model']['attention'] == 'gau'}
    ran = {f"{column}.{trial['metric']}": column for trial in trials for column in trial['scores']}
    tables, shown = [], set()
    for one in book.get('tables', ()):
        columns = {key.split('.')[0] for key in one['columns'].split()}
        if columns & set(ran.values()):
            notes = [text for name, text in one.get('normalisers', {}).items() if name in own]
            tables.append({'note': ' '.join(notes), **one})
            shown |= columns
    left = [key for key, column in ran.items() if column not in shown]
    averages = {} if tables or len(left) < 2 else {'average': range(len(left))}
    other = {'title': 'Other tasks' if tables else 'Scores', 'columns': ' '.join(left), 'averages': averages}
    return tables + ([{**other, 'rows': ()}] if left else [])


def score_table(table, last, majority):
    """Rows of our models, the majority class and the paper; notes on what the averages leave out."""
    columns, averages = table['columns'].split(), averages_of(table)
    parts, notes = [], [table.get('note')]
    for row, seeds in last.groupby('row'):
        parts += [over_seeds(lines[[*columns, *averages]], counted).rename({'mean': f'ours: {name}'})
                  for name, lines, counted in by_run(row, seeds)]
        for name, keys in averages.items():
            missing = [key for key in keys if not seeds[key].count()] or ['a seed with all']
            notes += [] if seeds[name].count() else [f"No {name} of {row}: missing {', '.join(missing)}."]
    for name, keys in averages.items():
        outside = [key for key in columns if key not in keys]
        notes += [f"{name} leaves out {', '.join(outside)}."] if outside else []
    parts += [majority[[*columns, *averages]], paper_rows(table)]
    return markdown(table['title'], pd.concat(parts), *notes)


def curve_table(row, seeds, note):
    """Score by pretraining step; first step with 95 % of the last score.  Courtois et al. 2024, figure 3"""
    means = seeds.groupby(['step', 'run']).mean().groupby('step').mean().dropna(axis=1, thresh=2)
    if means.empty:
        return ''
    aim = 0.95 * means.ffill().iloc[-1]
    good = (means >= aim) & (aim > 0)
    cells = each_row(seeds[means.columns], 'step').rename('{:,}'.format)
    cells.loc['95 % of the last'] = aim.map(cell)
    cells.loc['reached at'] = [f'{found.idxmax():,}' if found.any() else '-' for _, found in good.items()]
    return markdown(f'{row} by pretraining step', cells, note)


def difference_tables(row, other, last):
    """row - other, of equal pretraining seeds and seeds."""
    pairs = (last.loc[row] - last.loc[other]).dropna(how='all').dropna(axis=1, how='all')      # pandas aligns
    return [markdown(f'{name} - {other}, paired by seed', over_seeds(lines, counted).T)
            for name, lines, counted in by_run(row, pairs)] or [
                f'No difference of {row} and {other}: they have no seed in common.']


def make_report(trials, paper='', compare=''):
    """Markdown report of finished trials.  Tables show the last pretraining step of each row."""
    book = choose('paper', paper, read_papers()) if paper else {}
    frame, tables = tidy(trials), choose_tables(book, trials)
    inits = dict(zip(row_names(trials), trials, strict=True))           # {row: its last trial}
    averages = {name: keys for table in tables for name, keys in averages_of(table).items()}
    labels = [*dict.fromkeys(' '.join(table['columns'] for table in tables).split()), *averages]
    scores = frame[frame.kind.isin(['scores', 'majority'])]
    wide = scores.assign(name=scores.column + '.' + scores.name).pivot(
        index=['kind', 'row', 'step', 'run', 'seed'], columns='name', values='points')
    wide = wide.reindex(columns=[*labels, *wide.columns.difference(labels)])
    for name, keys in averages.items():
        wide[name] = wide[keys].mean(axis=1, skipna=False)          # NaN unless the seed has them all
    ends = frame.groupby('row').step.max()
    frame = frame[frame.step == frame.row.map(ends)]
    steps, rows = (wide.index.get_level_values(key) for key in ('step', 'row'))
    final = wide[steps.to_numpy() == ends[rows].to_numpy()].droplevel('step')
    last, majority = final.loc['scores'], final.loc['majority'].groupby('row').mean()
    majority = majority.rename('majority: {}'.format)

    parts = [model_table(inits), *(score_table(table, last, majority) for table in tables)]
    same = {row: compare + row[len(one['init']):] for row, one in inits.items()}        # recipe, of `compare`
    rivals = {row: other for row, other in same.items() if row != other and other in inits}
    for row, other in rivals.items():
        parts += difference_tables(row, other, last[labels])
    parts += [curve_table(row, seeds.droplevel('row'), book.get('curve'))
              for row, seeds in wide.loc['scores', labels].groupby('row')]
    every = pd.concat([each_row(last), majority])[[name for name in wide.columns if '.' in name]].T
    parts.append(markdown('Every metric', every))
    for kind, title in (('noise', 'Noise on the embeddings, as a fraction of their mean norm'),
                        ('cross', 'Trained on (rows), evaluated on (columns)')):
        found = frame.assign(row=frame.row + ', ' + frame.column)[frame.kind == kind]
        ours = each_row(found.pivot_table(index=['row', 'run', 'seed'], columns='name', values='points'))
        theirs = paper_rows(book[kind]) if len(found) and kind in book else None
        parts.append(markdown(title, pd.concat([ours, theirs], sort=True)))
    times = frame[frame.kind == 'seconds'].pivot_table('points', 'column', 'row', sort=False)
    for row, other in rivals.items():
        times[f'{row} / {other}'] = times[row] / times[other]
    parts.append(markdown('Seconds an epoch', times, book.get('seconds')))
    return '\n\n'.join(filter(None, parts))


# ---- main ----

def find_tasks(text):
    """Task names of a comma-separated list of tasks and groups, in its order."""
    rows = {**{name: (name,) for name in TASKS}, **GROUPS}
    parts = [choose('tasks', part.strip(), rows) for part in text.split(',')]
    return list(dict.fromkeys(itertools.chain(*parts)))


def noise_levels(text):
    """'0:0.4:0.05' -> [0.0, 0.05, ..., 0.4]"""
    if not text:
        return []
    with contextlib.suppress(ValueError):
        first, last, step = map(float, text.split(':'))
        if 0 <= first <= last < first + 1000 * step:
            return [round(level, 6) for level in np.arange(first, last + step / 2, step).tolist()]
    raise UserError(f'noise={text!r}: write first:last:step in fractions of the norm, as in 0:0.4:0.05')


def help_end():
    """What --help says of init_from and of TASKS."""
    groups = {name: group for group, names in GROUPS.items() for name in names}
    lines = [f"  {name:18} {groups.get(name, '-'):11} {task.folder}/ {' '.join(task.files.values())}: "
             f"{', '.join(task.metrics)}" for name, task in TASKS.items()]
    title = 'tasks: group, folder below data_dir and its files (a|b: either, a+b: both), metrics:'
    return '\n'.join(['', SOURCES, title, *lines])


def write_report(config, show_it):
    """results.json, results.md and curve.png of the finished trials in out_dir; `show_it`: on stdout too"""
    folder, order = config['out_dir'], list(TASKS)
    folders = map(os.path.dirname, glob.glob(os.path.join(glob.escape(folder), '*', '*', 'result.json')))
    against = run_of(config['compare'])[0] if config['compare'] else ''
    trials = [one for one in map(read_result, folders) if one['task'] in TASKS]
    trials.sort(key=lambda one: (
        one['init'] == against, one['init'], one['step'] or 0, one.get('run_seed') or 0,
        order.index(one['task']), one['seed']))
    if not trials:
        raise UserError(f'{folder}: no trial has finished there yet')
    text, command = make_report(trials, config['paper'], against), ' '.join(['python', *sys.argv])
    head = f"`{command}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    write_bytes(os.path.join(folder, 'results.json'), json.dumps(
        {'command': command, 'config': config, 'trials': trials}, indent=1).encode())
    write_bytes(os.path.join(folder, 'results.md'), f'{head}\n\n{text}\n'.encode())
    scores = tidy(trials).query("kind == 'scores' and step >= 0")
    if scores.step.nunique() > 1:                       # Courtois et al. 2024, figure 3
        panels = {name: lines[['row', 'step', 'points']].to_numpy()
                  for name, lines in scores.groupby(scores.column + '.' + scores.name, sort=False)}
        train.plot(folder, 'curve', panels, ('pretraining step', 'score (x 100)'))
    if show_it:
        print(f'\n{text}', flush=True)


def main():
    try:
        config, origins = configure(globals())
    except SystemExit:                                  # --help
        print(help_end())
        raise
    if paper:
        choose('paper', paper, read_papers())
    if report:
        return write_report(config, True)
    names, levels = find_tasks(tasks), noise_levels(noise)
    others = [name for name in names if TASKS[name].positive] if cross else []
    if cross and others != names:
        say(f"cross=True leaves out {', '.join(sorted({*names} - {*others}))}: no positive label is defined")
    if predict not in ('', 'test') and len(names) > 1:
        raise UserError(f'predict={predict!r}: a file is of one task: choose it with --tasks, or write test')
    runtime = train.join(device, dtype, group=False)

    # the plan: all trials, divided among the processes
    if 'custom' in names:
        TASKS['custom'] = custom_task(config)
    recipes, sources = {name: recipe(config, name) for name in names}, find_sources(init_from, compare)
    data, plan = {name: survey(name, config) for name in names}, []
    for source, name in itertools.product(sources, names):
        knobs = SimpleNamespace(**{**config, **recipes[name]}, unanswerable=TASKS[name].unanswerable)
        identity = {'recipe': recipes[name], 'weights': weights_of(source.path), 'data': data[name][0]}
        plan += [Trial(source, name, number, knobs, identity) for number in range(seed, seed + trials)]
    mine = plan[runtime.rank::runtime.world]
    if runtime.main:
        train.hold(out_dir)
        train.write_manifest(out_dir, config, {'init_from': [source.path for source in sources]}, runtime)
        done = sum(read_result(trial.folder) is not None for trial in plan)
        print(table(config, origins), *(line for _, line in data.values()), sep='\n')
        print(f'{len(plan)} trials, {done} of them finished before; {runtime.device}, '
              f'{runtime.world} process(es)', flush=True)

    alone, worked = replace(runtime, rank=0, world=1), runtime.main     # the rank must not affect a trial
    for number, trial in enumerate(mine, 1):
        print(f'trial {number} of {len(mine)}: {trial.folder}', flush=True)
        worked = run_trial(trial, levels, others, alone) or worked
    if worked:                                          # the last process to finish prints it
        write_report(config, all(read_result(trial.folder) for trial in plan))
    train.leave(runtime)


if __name__ == '__main__':
    run(lambda: train.in_memory(main, globals()))
