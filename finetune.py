"""Fine-tuning on GLUE, SQuAD, SuperGLUE, CLUE and two offline tasks, over seeds and checkpoints.

    $ python finetune.py config/finetune_quickstart.py
    $ python finetune.py config/glue_courtois.py --init_from=out/base_pairwise --compare=out/base_original
    $ torchrun --standalone --nproc_per_node=8 finetune.py config/glue_courtois.py

A trial is one task fine-tuned with one seed from one set of weights, by one process; those of torchrun share
the trials. It leaves a folder in out_dir with its log, result, predictions and weights. A repeated
command skips finished trials and starts one that was cut off again. A step is a pure function of (weights,
data, seed, step).
"""
import collections
import contextlib
import csv
import difflib
import functools
import glob
import hashlib
import itertools
import json
import math
import operator
import os
import re
import signal
import string
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import prepare_data
import train
from configurator import UserError, configure, parse, run, say
from configurator import show as show_knob
from configurator import table as knob_table
from model import (
    POOLING,
    EncoderConfig,
    MultipleChoice,
    SequenceClassifier,
    SpanClassifier,
    choose,
    count_parameters,
    pretrained_encoder,
)
from prepare_data import text_hash

# the run
out_dir = 'out/finetune'        # results.json, results.md and a folder for each trial go here
init_from = 'out/quickstart'    # a run of train.py, a checkpoint, a glob of them or a Hugging Face BERT
compare = ''                    # another of these: fine-tuned too, and the difference reported seed by seed
tasks = 'glue'                  # rows of TASKS and GROUPS with commas: glue, sst2,rte, squad, superglue, clue
trials = 5                      # seeds of each task
seed = 1                        # the first of them: of the new head, the order of examples and dropout
paper = ''                      # of results/papers.json: its columns order the table, its rows stand in it
predict = ''                    # test: predict each task's unlabelled test file; or such a file of one task
noise = ''                      # first:last:step, as in 0:0.4:0.05: evaluate with noise on the embeddings too
cross = False                   # evaluate each trial on the other tasks that have a `positive` label too
report = False                  # train nothing: write the report of the finished trials in out_dir again
keep_models = True              # keep each trial's weights: predict, noise and cross need them later
# data
data_dir = ''                   # folder of files as published, glue/CoLA/train.tsv ...; empty: from the hub
extra_train = ''                # file in SQuAD's format with more training questions, such as TriviaQA
tokenizer = ''                  # prepared folder with the tokenizer; empty: where the checkpoint had it
lower_case = True               # of a Hugging Face BERT without a prepared folder: is its vocabulary uncased?
block_size = 0                  # tokens a row at most, may exceed the pretrained length; 0: that length
stride = 128                    # span: tokens from one window of a long text to the next
pad_to_block = False            # pad rows to block_size, for TPUs; else to the longest row of each batch
train_samples = 0               # training examples at most, the same for every seed; 0: all
eval_samples = 0                # of each evaluation set; 0: all
# model
pooling = 'cls'                 # cls or layerwise
dropout = 0.1                   # after embeddings and sublayers and before the classifier
attention_dropout = 0.1         # of attention weights
# optimization
epochs = 3                      # passes over the training examples
total_batch = 16                # examples per optimizer step
batch_size = 16                 # examples per micro-step at most; halve it if out of memory
learning_rate = 2e-5            # peak
min_lr = 0.0                    # where linear and cosine end
warmup_fraction = 0.1           # of all steps
schedule = 'linear'             # linear, cosine, constant or thirds, after the warmup
beta1 = 0.9                     # of Adam
beta2 = 0.999                   # of Adam
adam_eps = 1e-8                 # of Adam
weight_decay = 0.01             # on matrices; never on biases, norms and diagonals
grad_clip = 1.0                 # largest gradient norm; 0: no clipping
overrides = ''                  # TASK.KNOB=VALUE with spaces between: cola.learning_rate=5e-6 rte.epochs=10
# evaluation and log
metric = ''                     # of METRICS: it enters averages and picks the best; empty: the task's first
keep_best = False               # report the weights that scored best on dev, not the last ones
eval_interval = 0               # steps between evaluations; 0: after every epoch
max_answer = 30                 # span: tokens of an answer at most
null_threshold = 0.0            # span: no answer where its score leads by more, if questions may have none
log_interval = 100              # steps between log lines
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, cuda:1 (without torchrun), mps or xla
dtype = 'auto'                  # auto (bfloat16 on GPUs that compute in it), float32, bfloat16 or float16
compile = 'auto'                # auto (on for CUDA), true or false

LIMITS = {                      # knob: lowest, highest (None: none); of the others train.LIMITS
    'trials': (1, None), 'seed': (0, 2 ** 62), 'block_size': (0, None), 'stride': (1, None),
    'train_samples': (0, None), 'epochs': (1, None), 'warmup_fraction': (0, 0.999), 'max_answer': (1, None),
}
FREE = {                        # knobs that do not decide a trial's result
    'out_dir', 'init_from', 'compare', 'tasks', 'trials', 'seed', 'paper', 'predict', 'noise', 'cross',
    'report', 'keep_models', 'data_dir', 'batch_size', 'overrides', 'log_interval', 'wandb_project', 'device',
    'compile',
}
EVAL_ROWS = 64                  # rows of a model that are evaluated together: noise depends on it
QUESTION = 64                   # tokens of a question at most.  Devlin et al. 2018's code


# ---- labelled files: a row of TASKS, and how its records become Examples ----

BLANK = re.compile(r'#idiom\d+#')       # of CHID
BLANK_AROUND = 56                       # characters kept on each side of it; CLUE's baseline keeps 28
DISPUTED = "no gold label ('-')"        # expected in the NLI sets: the annotators did not agree
MOVED, ABSENT = 'answer offset repaired', 'answer not in the text'     # of answers; their questions stay


class Example(NamedTuple):
    """A text with its label.

    id      what a submission calls it: int, str or, of MultiRC, (paragraph, question, answer)
    texts   (a,) or (a, b), strings; extraction: (question, context); choice tasks: such pairs, one a choice
    label   class index | float | index of the right choice | None: unlabelled
            extraction: tuple of (answer text, first character), empty if unanswerable.  An answer that the
            context does not have is at -1 and comes last; a training example has one that is there
    """
    id: object
    texts: tuple
    label: object = None


class Bad(Exception):
    """Why a record cannot become an example: its kind, under which it is counted, and the details."""

    def __init__(self, kind, details=''):
        super().__init__(f'{kind}: {details}' if details else kind)
        self.kind = kind


@dataclass(frozen=True)
class Task:
    """A row of TASKS.  Column names are those of the files, then |, then the hub's where they differ."""
    head: str                   # classify, regress, span or choose
    metrics: tuple              # rows of METRICS; the first enters an average if the recipe names none
    labels: tuple = ()          # names in the order of the class indices, as on the hub
    written: tuple = ()         # the same in files and submissions, where they have other names there
    folder: str = ''            # below data_dir; any case, also with _public behind it
    files: dict | None = None   # {split: name}; a|b: the first that is there, a+b: both
    hub: str = ''               # id:configuration
    splits: dict | None = None  # {split: the hub's name}, where it is not HUB_SPLITS
    texts: tuple = ()           # columns of text a and b; columns in a tuple are joined
    label: str = 'label'        # its column
    header: str = ''            # columns of a table that has no header line
    read: Callable | None = None    # path -> (where, record) pairs, records as on the hub
    make: Callable | None = None    # (task, record, number, counts) -> Examples
    unanswerable: bool = False  # extraction: questions without an answer occur
    write: Callable | None = None   # (ids, answers) -> text
    submission: str = ''        # file name; of MNLI matched|mismatched
    positive: str = ''          # label that means yes in the cross-task matrix; empty: not in it
    source: Callable | None = None  # (name, split, data_dir) -> Examples, in place of reading files


# ---- readers: file -> (where, record) pairs; a record is a dict, or a Bad ----

def read_lines(path):
    """(file:line, text) of each line that is not blank; pick_text refuses what is not UTF-8."""
    with open(path, encoding='utf-8-sig', errors='surrogateescape', newline='\n') as file:
        for number, line in enumerate(file, 1):
            if line := line.rstrip('\r\n'):
                yield f'{path}:{number}', line


def read_table(path, header=()):
    """Tab-separated without quoting, as GLUE is; .csv with it.  `header` is of files without that line."""
    columns = None
    for where, line in read_lines(path):
        cells = next(csv.reader([line])) if path.endswith('.csv') else line.split('\t')
        if columns is None:
            columns = header if header and len(cells) == len(header) else cells
            if columns is cells:
                continue
        expected = f"{len(cells)} cells, expected {len(columns)}: {', '.join(columns)}"
        fits = len(cells) == len(columns)
        yield where, dict(zip(columns, cells, strict=True)) if fits else Bad('missing columns', expected)


def read_records(path):
    """JSON lines."""
    for where, line in read_lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            record = Bad('broken JSON', str(error))
        yield where, record if isinstance(record, dict | Bad) else Bad('not an object')


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
        for question in record['passage']['questions'] if isinstance(record, dict) else ():
            for answer in question['answers']:
                idx = {'paragraph': record['idx'], 'question': question['idx'], 'answer': answer['idx']}
                yield where, {'paragraph': record['passage']['text'], 'question': question['question'],
                              'answer': answer['text'], 'label': answer.get('label'), 'idx': idx}
        if isinstance(record, Bad):
            yield where, record


def read_c3(path):
    for number, (context, questions, *_) in enumerate(load_json(path), 1):
        for question in questions:
            yield f'{path}: passage {number}', {'context': context, **question}


def read_chid(path):
    """train.json has its answers, {blank: candidate}, in train_answer.json; without it it is unlabelled."""
    answer_file = '_answer'.join(os.path.splitext(path))
    answers = load_json(answer_file) if os.path.isfile(answer_file) else {}
    for where, record in read_records(path):
        if answers and isinstance(record, dict):
            blanks = BLANK.findall(' '.join(record['content']))
            record['answers'] = {'candidate_id': [answers.get(blank, -1) for blank in blanks]}
        yield where, record


def read_path(task, path):
    """(where, record) pairs of a file in the task's format."""
    try:
        table = path.endswith(('.tsv', '.csv'))
        yield from read_table(path, task.header.split()) if table else task.read(path)
    except json.JSONDecodeError as error:
        raise UserError(f'{path}:{error.lineno}: broken JSON: {error.msg}') from None
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f'{path}: not in the published format of {task.folder}: '
                        f'{type(error).__name__}: {error}') from None


def read_hub(task, split):
    """(where, record) pairs of a dataset of the Hugging Face hub; a class label becomes its name, -1 None."""
    datasets = prepare_data.need('datasets', 'reading from the Hugging Face hub')
    source, _, configuration = task.hub.partition(':')
    try:
        data = datasets.load_dataset(source, configuration or None, split=(task.splits or HUB_SPLITS)[split])
    except Exception as error:                                  # the hub's libraries raise dozens of classes
        raise UserError(prepare_data.hub_error(source, error)) from None
    names = getattr(data.features.get('label'), 'names', None)
    for number, record in enumerate(data, 1):
        label = record.get('label')
        record['label'] = None if label == -1 else names[label] if names and label is not None else label
        yield f'{task.hub}:{number}', record


# ---- makers: a record -> Examples ----

def pick(record, names):
    """The first of the columns a|b that is there, or None."""
    return next((record[name] for name in names.split('|') if name in record), None)


def pick_text(record, names):
    """Text of a column, or of several: the parts of a tuple or of a list are joined."""
    value = [pick_text(record, name) for name in names] if isinstance(names, tuple) else pick(record, names)
    value = ' '.join(value) if isinstance(value, list) else value
    if not isinstance(value, str):
        expected = names.replace('|', ' or ')
        raise Bad('missing columns', f"expected text in {expected}; the row has {', '.join(record)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Bad('invalid UTF-8', repr(value[:40])) from None
    return value


def pick_id(record, number):
    """What a submission calls the record; `number` (from 0) where it has no name."""
    value = pick(record, 'index|id|idx')
    if isinstance(value, dict):
        return value['paragraph'], value['question'], value['answer']
    return number if value is None else value


def pick_label(task, record):
    """Class index or, of a task without classes, a score; None if the record is unlabelled."""
    value, names = pick(record, task.label), task.written or task.labels
    if value is None:
        return None
    if value == '-':
        raise Bad(DISPUTED)
    for known in (task.labels, names):
        if str(value) in known:
            return known.index(str(value))
    try:                                                # a score, or an index from a hub column without names
        score = value if task.labels else float(value)
        if score in range(len(task.labels)) or not task.labels and math.isfinite(score):
            return score
    except (TypeError, ValueError):
        pass
    expected = ', '.join(names[:6]) + (f' ... {names[-1]}' if len(names) > 6 else '')
    raise Bad('unknown label', f"{value!r}, expected {expected or 'a number'}")


def make_texts(task, record, number, counts):
    yield Example(pick_id(record, number), tuple(pick_text(record, names) for names in task.texts),
                  pick_label(task, record))


def make_wsc(task, record, number, counts):
    """One text with _ around the noun and [ ] around the pronoun, as in CLUE's baseline."""
    text, target = pick_text(record, 'text'), record['target']
    marks = [(target['span1_index'], target['span1_text'], '_', '_'),
             (target['span2_index'], target['span2_text'], '[', ']')]
    for first, span, left, right in sorted(marks, reverse=True):        # from behind: the other index holds
        if first < 0 or not text.startswith(span, first):
            raise Bad('span not in the text', f'{span!r} at {first}')
        text = text[:first] + left + span + right + text[first + len(span):]
    yield Example(pick_id(record, number), (text,), pick_label(task, record))


def make_span(task, record, number, counts):
    """A wrong offset moves to the nearest place that has the answer.  CMRC's fake answers are all at -1."""
    context, label = pick_text(record, 'context'), None
    answers = [] if record.get('is_impossible') else record.get('answers')
    if isinstance(answers, list):                               # as in files; the hub has a dict of lists
        answers = {key: [answer[key] for answer in answers] for key in ('text', 'answer_start')}
    if answers is not None and set(answers['answer_start']) != {-1}:
        found = [(text, find_nearest(context, text, start, counts))
                 for text, start in zip(answers['text'], answers['answer_start'], strict=True) if text]
        label = tuple(sorted(found, key=lambda answer: answer[1] < 0))
        if not label and not task.unanswerable:
            raise Bad('no answer')
    yield Example(record.get('id', number), (pick_text(record, 'question'), context), label)


def find_nearest(context, text, start, counts):
    """First character of `text` in `context`, the nearest to `start`, or -1; what was wrong is counted."""
    if start >= 0 and context.startswith(text, start):
        return start
    places = [match.start() for match in re.finditer(f'(?={re.escape(text)})', context)]
    counts[MOVED if places else ABSENT] += 1
    return min(places, key=lambda place: abs(place - start), default=-1)


def make_c3(task, record, number, counts):
    """Passage | question and choice: the segments of CLUE's baseline; what is cut off is passage."""
    passage, question = pick_text(record, 'context'), pick_text(record, 'question')
    answer, choices = record.get('answer'), record['choice']
    if answer and answer not in choices:
        raise Bad('unknown label', f"{answer!r}: expected {', '.join(choices)}")
    yield Example(pick_id(record, number), tuple((passage, f'{question} {choice}') for choice in choices),
                  choices.index(answer) if answer else None)


def make_chid(task, record, number, counts):
    """An example a blank: candidate | passage, as in CLUE's baseline; ____ is this blank, **** another."""
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
    """One split of a task.  Returns (list of Example, {kind: count} of what was skipped or repaired).

    data_dir     holds the row's folder, is its parent or is it; empty: the task comes from the hub
    extra_train  a file with more training examples of an extraction task
    A row with missing columns, an unknown label or no usable answer is skipped and counted.  More than 1 % of
    bad rows, though one may always be, any in a test split, as a submission needs every row, or no good row:
    UserError with the file and line of the first.  Labels '-' and what find_nearest counts are no bad rows.
    """
    task = TASKS[name]
    if task.source:
        return list(task.source(name, split, data_dir)), {}
    if split not in task.files:
        raise UserError(f"{name}: no split '{split}': choose one of {', '.join(task.files)}")
    paths = find_split(task, split, data_dir) if data_dir else []
    more = [extra_train] if extra_train and split == 'train' and task.head == 'span' else []
    parts = [read_path(task, path) for path in (*paths, *more)]
    parts = parts if data_dir else [read_hub(task, split), *parts]
    return collect(task, itertools.chain(*parts), split, ', '.join(paths) or f'{task.hub} {split}')


def read_file(name, path, split='test'):
    """As load_examples, of one file in the task's format; split 'train' or 'dev' asks for labels."""
    if not os.path.isfile(path):
        raise UserError(f'{path}: no such file')
    return collect(TASKS[name], read_path(TASKS[name], path), split, path)


def collect(task, records, split, source):
    """(where, record) pairs -> what load_examples returns, by its rule; `source` is for the message."""
    examples, counts, rows, bad, firsts = [], collections.Counter(), 0, 0, {}
    for rows, (where, record) in enumerate(records, 1):
        try:
            if isinstance(record, Bad):
                raise record
            made = list(task.make(task, record, rows - 1, counts))
            check_labels(task, made, split)
            examples += made
        except (Bad, LookupError, TypeError, ValueError, AttributeError) as error:
            if not isinstance(error, Bad):
                error = Bad('not as published', f'{type(error).__name__}: {error}')
            firsts.setdefault(error.kind == DISPUTED, f'{where}: {error}')
            bad += error.kind != DISPUTED
            counts[error.kind] += 1
    most = 0 if split.startswith('test') else max(1, rows // 100)
    if not examples or bad > most:
        first = firsts.get(False) or firsts.get(True) or f'{source}: no rows'
        raise UserError(f'{first} ({bad} bad of {rows} rows)')
    return examples, dict(counts)


def check_labels(task, examples, split):
    if split.startswith('test'):
        return
    for example in examples:
        if example.label is None:
            raise Bad('no label', f"expected one in {task.label.replace('|', ' or ')}" if task.texts else '')
        if split == 'train' and task.head == 'span' and example.label and example.label[0][1] < 0:
            raise Bad('question without a usable answer')


def find_split(task, split, data_dir):
    """The files of a split below data_dir, in a folder with the name of the row's."""
    name, root = os.path.basename(task.folder).lower(), glob.escape(os.path.abspath(data_dir))
    folders = [found for depth in range(4) for found in sorted(glob.glob(os.path.join(root, *'*' * depth)))]
    for folder in [os.path.join(data_dir, task.folder), *folders]:
        for names in task.files[split].split('|'):
            paths = [os.path.join(folder, item) for item in names.split('+')]
            called = os.path.basename(folder).lower().removesuffix('_public')
            if called == name and all(map(os.path.isfile, paths)):
                return paths
    wanted = ' or '.join(task.files[split].replace('+', ' and ').split('|'))
    where, hub = os.path.join(data_dir, task.folder), task.hub.replace(':', ', ')
    raise UserError(f'{where}: no {wanted}: --data_dir should hold {task.folder}/; if it is empty '
                    f'{hub} comes from the Hugging Face hub')


# ---- submissions: predictions are class indices, scores, answer texts or choice indices ----

ANSWERS = {     # head: prediction -> what a submission says
    'classify': lambda task, prediction: (task.written or task.labels)[int(prediction)],
    'regress': lambda task, prediction: f'{min(max(float(prediction), 0), 5):.3f}',
    'span': lambda task, prediction: prediction,
    'choose': lambda task, prediction: int(prediction),
}


def write_submission(name, column, folder, examples, predictions, prefix=''):
    """Write what the benchmark's site takes.  `column` is the task's name, or mnli_mm.  Returns the path."""
    task = TASKS[name]
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, prefix + task.submission.split('|')[-1 if column.endswith('_mm') else 0])
    answers = [ANSWERS[task.head](task, prediction) for prediction in predictions]
    prepare_data.write_bytes(path, task.write([example.id for example in examples], answers).encode())
    return path


def write_table(ids, answers):
    rows = [('index', 'prediction'), *zip(ids, answers, strict=True)]
    return ''.join(f'{item}\t{answer}\n' for item, answer in rows)


def write_records(ids, answers, key='id'):
    return ''.join(json.dumps({key: item, 'label': answer}, ensure_ascii=False) + '\n'
                   for item, answer in zip(ids, answers, strict=True))


def write_map(ids, answers):
    return json.dumps(dict(zip(ids, answers, strict=True)), ensure_ascii=False, indent=1) + '\n'


def write_multirc(ids, answers):
    nested = collections.defaultdict(lambda: collections.defaultdict(list))
    for (paragraph, question, answer), label in zip(ids, answers, strict=True):
        nested[paragraph][question].append({'idx': answer, 'label': int(label)})
    return ''.join(json.dumps({'idx': paragraph, 'passage': {'questions': [
        {'idx': question, 'answers': labels} for question, labels in questions.items()]}}) + '\n'
        for paragraph, questions in nested.items())


# ---- two labelled tasks made of the docstrings of installed packages, offline ----

PACKAGES = prepare_data.CORPORA['docstrings'][1]
DOCSTRING_SIZES = {'train': 6000, 'dev': 1000}      # examples at most
DOCSTRING_DEV = 1 / 7                               # of the docstrings, by hash
PROSE = re.compile(r'(?!\w+:)[A-Z](?!.*(---|===|>>>|::|Args:|Returns:)).{18,298}\.')       # up to a full stop


def docstring_examples(name, split, data_dir, n, label):
    """Examples of the first n paragraphs of docstrings, which prepare_data.py leaves in docstrings.jsonl.

    A docstring is of one split.  A text that two of them share, but for digits and punctuation, is left out:
    none is in both splits, and none has two labels.
    """
    paths = [os.path.join(data_dir or 'data', folder, 'docstrings.jsonl') for folder in ('docstrings', '')]
    path = next(filter(os.path.isfile, paths), None)
    if not path:
        raise UserError(f'{paths[0]}: not there; python prepare_data.py config/data_docstrings.py makes it; '
                        '--data_dir names another prepared folder that has one')
    rows = [record for _, record in read_records(path)]
    pieces = sorted((text_hash(row['text'], 1), row['package'], row['where'], prose(row['text'], n))
                    for row in rows)
    times = collections.Counter(letters(text) for *_, texts in pieces for text in texts)
    pieces = [piece for key, *piece in pieces if (key < DOCSTRING_DEV * 2**64) == (split == 'dev')
              and piece[2] and all(times[letters(text)] == 1 for text in piece[2])]
    examples = label(pieces, TASKS[name].labels, DOCSTRING_SIZES[split])
    if not examples:
        raise UserError(f'{path}: no docstring makes an example of {name}, {split}')
    return sorted(examples, key=lambda example: text_hash(' '.join(example.texts), 1))


def letters(text):
    return re.sub(r'[\W\d_]+', ' ', text.lower())


def prose(text, n):
    """The first n paragraphs of a docstring, () if they are not all prose."""
    found = tuple(' '.join(part.split()) for part in re.split(r'\n\s*\n', text, maxsplit=n)[:n])
    return found if len(found) == n and all(map(PROSE.fullmatch, found)) else ()


def label_package(pieces, packages, size):
    """Which package is it from?  As many of each as there are, up to an equal share."""
    kept = [item for package in packages
            for item in [piece for piece in pieces if piece[0] == package][:size // len(packages)]]
    return [Example(where, texts, packages.index(package)) for package, where, texts in kept]


def label_order(pieces, labels, size):
    """Do the paragraphs stand in this order?  In every other example they are exchanged."""
    return [Example(where, texts[::1 - 2 * (i % 2)], 1 - i % 2)
            for i, (_, where, texts) in enumerate(pieces[:size // 2 * 2])]


# ---- metrics: (targets, predictions) -> a fraction; 0 for nothing to score or no variance ----


CHINESE = '\u4e00-\u9fa5'               # as in cmrc2018_evaluate.py, and so is the punctuation
CHINESE_PUNCTUATION = dict.fromkeys(map(ord, '-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』'))
CHINESE_TOKEN = re.compile(             # a character, or a word as nltk's: 1,000.5 and v1.0 stay whole
    rf"""[{CHINESE}]|'?(?:[^\s{CHINESE}!-.;<>?@\[\]{{}}–—]|\.(?!\s*[{CHINESE}]|\s*$)|,(?=\d))+|\S""")


def mean(values):
    return float(np.mean(values)) if len(values) else 0.0


def both(first, second):
    """The metric that is the mean of two."""
    return lambda targets, predictions: (first(targets, predictions) + second(targets, predictions)) / 2


def accuracy(targets, predictions):
    return mean(np.equal(targets, predictions))


def f1(targets, predictions):
    """Of class 1, 0 if nothing is and nothing is called so; MultiRC's F1a is this over all answer options."""
    targets, predictions = np.equal(targets, 1), np.equal(predictions, 1)
    claims = targets.sum() + predictions.sum()
    return float(2 * (targets & predictions).sum() / claims) if claims else 0.0


def pearson(targets, predictions):
    """Of two classes 0 and 1 this is Matthews' correlation."""
    x, y = np.asarray(targets, np.float64), np.asarray(predictions, np.float64)
    if not len(x) or np.ptp(x) == 0 or np.ptp(y) == 0:          # a mean's rounding must not count as variance
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x / np.linalg.norm(x) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(targets, predictions):
    return pearson(average_ranks(targets), average_ranks(predictions))


def average_ranks(values):
    """(N,) ranks from 1; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]


def words(text):
    """Words of an English answer as in SQuAD's evaluate-v2.0.py: Rajpurkar et al. 2018, 1806.03822."""
    text = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r'\b(a|an|the)\b', ' ', text).split()


def chinese_text(text):
    """Chinese answer as cmrc2018_evaluate.py of CMRC 2018 compares it: Cui et al. 2019, arXiv 1810.07366."""
    return text.lower().strip().translate(CHINESE_PUNCTUATION)


def chinese_tokens(text):
    """Characters, and words of other scripts.

    nltk, which the official file calls, makes another number of tokens of 2 of CMRC's 20,801 answers (a'can).
    """
    return CHINESE_TOKEN.findall(chinese_text(text))


def common_words(answer, prediction):
    return sum((collections.Counter(answer) & collections.Counter(prediction)).values())


def common_run(answer, prediction):
    """Length of the longest run of tokens in both: the F1 of CMRC counts no token outside it."""
    matcher = difflib.SequenceMatcher(None, answer, prediction, autojunk=False)
    return matcher.find_longest_match(0, len(answer), 0, len(prediction)).size


def overlap(common, answer, prediction):
    """F1 of two lists of tokens; if one is empty, whether both are."""
    if not answer or not prediction:
        return float(answer == prediction)
    return 2 * common(answer, prediction) / (len(answer) + len(prediction))


def score_spans(score, tokens, targets, predictions):
    """Mean over questions of the best score(tokens(answer), tokens(prediction)).

    targets      (N,) tuples of acceptable answers; one of which nothing is left does not count, as in SQuAD
    predictions  (N,) texts; '' is the right one of a question without answers
    """
    best = []
    for answers, prediction in zip(targets, predictions, strict=True):
        prediction = tokens(prediction)
        answers = [item for item in map(tokens, answers) if item] or [tokens('')]
        best.append(max(score(item, prediction) for item in answers))
    return mean(best)


def best_threshold(targets, texts, differences, metric):
    """Score and threshold at which no answer where difference > threshold is best, as in evaluate-v2.0.py.

    targets, texts  as of score_spans: the best span of each question, though it may get no answer
    differences     (N,) null score minus the score of that span
    metric          name of a row of METRICS
    As there, 0 if no answer at all is best, and of equal differences some may count as answered.
    """
    if not len(texts):
        return 0.0, 0.0
    gains = [METRICS[metric]([answers], [text]) if answers else -bool(text)
             for answers, text in zip(targets, texts, strict=True)]
    order = np.argsort(differences, kind='stable')
    scores = np.cumsum([sum(not answers for answers in targets), *np.asarray(gains, np.float64)[order]])
    best = int(np.argmax(scores))
    return float(scores[best] / len(texts)), float(differences[order[best - 1]]) if best else 0.0


METRICS = {
    'accuracy': accuracy,
    'f1': f1,
    'f1_accuracy': both(f1, accuracy),
    'matthews': pearson,
    'pearson': pearson,
    'spearman': spearman,
    'pearson_spearman': both(pearson, spearman),
    'exact': partial(score_spans, operator.eq, words),
    'f1_words': partial(score_spans, partial(overlap, common_words), words),
    'exact_chinese': partial(score_spans, operator.eq, chinese_text),
    'f1_characters': partial(score_spans, partial(overlap, common_run), chinese_tokens),
}
METRICS['exact_f1_chinese'] = both(METRICS['exact_chinese'], METRICS['f1_characters'])


# ---- the table of tasks ----

HUB_SPLITS = {'train': 'train', 'dev': 'validation', 'test': 'test'}
BINARY = ('0', '1')
TSV = {'train': 'train.tsv', 'dev': 'dev.tsv', 'test': 'test.tsv'}
JSONL = {'train': 'train.jsonl', 'dev': 'val.jsonl', 'test': 'test.jsonl'}
JSON = {'train': 'train.json', 'dev': 'dev.json', 'test': 'test1.1.json|test.json'}
MNLI = {'train': 'train.tsv', 'dev': 'dev_matched.tsv', 'dev_mm': 'dev_mismatched.tsv',
        'test': 'test_matched.tsv', 'test_mm': 'test_mismatched.tsv'}
MNLI_SPLITS = {'train': 'train', 'dev': 'validation_matched', 'dev_mm': 'validation_mismatched',
               'test': 'test_matched', 'test_mm': 'test_mismatched'}
C3 = {split: f'd-{split}.json+m-{split}.json|c3-d-{split}.json+c3-m-{split}.json' for split in JSON}
ENTAILMENT = ('entailment', 'neutral', 'contradiction')
TWO_WAY = ('entailment', 'not_entailment')
PAIR = ('sentence1', 'sentence2')


def glue(folder, hub, head='classify', metrics=('accuracy',), **columns):
    columns = {'files': TSV, 'submission': f'{folder}.tsv', **columns}
    return Task(head, metrics, folder=f'glue/{folder}', hub=f'nyu-mll/glue:{hub}', read=read_table,
                make=make_texts, write=write_table, **columns)


def clue(folder, head='classify', metrics=('accuracy',), **columns):
    columns = {'files': JSON, 'read': read_records, 'make': make_texts, 'write': write_records,
               'submission': f'{folder}_predict.json', **columns}
    return Task(head, metrics, folder=f'clue/{folder}', hub=f'clue/clue:{folder}', **columns)


SQUAD = partial(Task, 'span', ('f1_words', 'exact'), folder='squad', read=read_squad, make=make_span,
                write=write_map, submission='predictions.json')
SUPERGLUE = partial(Task, 'classify', ('accuracy', 'f1'), labels=('False', 'True'), files=JSONL,
                    make=make_texts)
DOCSTRINGS = partial(Task, 'classify', folder='docstrings',
                     files=dict.fromkeys(('train', 'dev'), 'docstrings.jsonl'))

TASKS = {
    'cola': glue('CoLA', 'cola', metrics=('matthews', 'accuracy'), labels=('unacceptable', 'acceptable'),
                 written=BINARY, texts=('sentence',), header='source label star sentence'),
    'sst2': glue('SST-2', 'sst2', labels=('negative', 'positive'), written=BINARY, texts=('sentence',)),
    'mrpc': glue('MRPC', 'mrpc', metrics=('f1_accuracy', 'f1', 'accuracy'), positive='equivalent',
                 labels=('not_equivalent', 'equivalent'), written=BINARY, label='Quality|label',
                 texts=('#1 String|sentence1', '#2 String|sentence2')),
    'stsb': glue('STS-B', 'stsb', 'regress', ('pearson_spearman', 'pearson', 'spearman'), texts=PAIR,
                 label='score|label'),
    'qqp': glue('QQP', 'qqp', metrics=('accuracy', 'f1', 'f1_accuracy'), positive='duplicate',
                labels=('not_duplicate', 'duplicate'), written=BINARY, label='is_duplicate|label',
                texts=('question1', 'question2')),
    'mnli': glue('MNLI', 'mnli', labels=ENTAILMENT, positive='entailment', files=MNLI, splits=MNLI_SPLITS,
                 label='gold_label|label', texts=('sentence1|premise', 'sentence2|hypothesis'),
                 submission='MNLI-m.tsv|MNLI-mm.tsv'),
    'qnli': glue('QNLI', 'qnli', labels=TWO_WAY, positive='entailment', texts=('question', 'sentence')),
    'rte': glue('RTE', 'rte', labels=TWO_WAY, positive='entailment', texts=PAIR),
    'wnli': glue('WNLI', 'wnli', labels=('not_entailment', 'entailment'), written=BINARY, texts=PAIR),
    'squad1': SQUAD(files={'train': 'train-v1.1.json', 'dev': 'dev-v1.1.json'}, hub='rajpurkar/squad'),
    'squad2': SQUAD(files={'train': 'train-v2.0.json', 'dev': 'dev-v2.0.json'}, hub='rajpurkar/squad_v2',
                    unanswerable=True),
    'boolq': SUPERGLUE(written=('false', 'true'), folder='superglue/BoolQ', hub='aps/super_glue:boolq',
                       read=read_records, texts=('passage', 'question'),
                       write=partial(write_records, key='idx'), submission='BoolQ.jsonl'),
    'multirc': SUPERGLUE(written=BINARY, folder='superglue/MultiRC', hub='aps/super_glue:multirc',
                         read=read_multirc, texts=('paragraph', ('question', 'answer')),
                         write=write_multirc, submission='MultiRC.jsonl'),
    'afqmc': clue('afqmc', labels=BINARY, texts=PAIR, files=JSON | {'train': 'train.json|train.csv'}),
    'csl': clue('csl', labels=BINARY, texts=('keyword', 'abst')),
    'iflytek': clue('iflytek', labels=tuple(map(str, range(119))), texts=('sentence',)),
    'tnews': clue('tnews', labels=tuple(str(100 + i) for i in range(17) if i not in (5, 11)),
                  texts=('sentence',), submission='tnews11_predict.json'),
    'wsc': clue('cluewsc2020', labels=('false', 'true'), make=make_wsc, submission='cluewsc11_predict.json'),
    'cmnli': clue('cmnli', labels=ENTAILMENT, texts=PAIR, label='label|gold_label'),
    'ocnli': clue('ocnli', labels=ENTAILMENT, texts=PAIR, submission='ocnli_50k_predict.json',
                  files=JSON | {'train': 'train.50k.json|train.json'}),
    'cmrc': clue('cmrc2018', 'span', ('exact_f1_chinese', 'exact_chinese', 'f1_characters'), read=read_squad,
                 make=make_span, write=write_map),
    'chid': clue('chid', 'choose', read=read_chid, make=make_chid, write=write_map,
                 submission='chid11_predict.json'),
    'c3': clue('c3', 'choose', files=C3 | {'test': f"{JSON['test']}|{C3['test']}"}, read=read_c3,
               make=make_c3, submission='c311_predict.json'),
    'docstring_package': DOCSTRINGS(('accuracy',), labels=tuple(PACKAGES.split()),
                                    source=partial(docstring_examples, n=1, label=label_package)),
    'docstring_order': DOCSTRINGS(('accuracy', 'f1'), labels=('exchanged', 'kept'),
                                  source=partial(docstring_examples, n=2, label=label_order)),
}
GROUPS = {
    'glue': ('cola', 'sst2', 'mrpc', 'stsb', 'qqp', 'mnli', 'qnli', 'rte'),     # the papers leave out wnli
    'squad': ('squad1', 'squad2'),
    'docstrings': ('docstring_package', 'docstring_order'),
    'superglue': ('boolq', 'multirc'),
    'clue': ('afqmc', 'csl', 'iflytek', 'tnews', 'wsc', 'cmnli', 'cmrc', 'chid', 'c3'),     # Liu's nine
}


# ---- rows of a model from texts ----

class Feature(NamedTuple):
    """What a model reads of one example; of a long context, of one window.

    example  its index in the list of examples
    rows     (ids (n,) int32, tokens of the first segment) for each choice; one if there is no choice
    target   what the head's losses() reads: a number, or a tuple of them
    first    span: index in the row of the first context token; offsets (m, 2) its characters and the others'
    """
    example: int
    rows: list
    target: object
    first: int = 0
    offsets: object = None


def join_texts(special, block_size, a, b=None):
    """(ids of [CLS] a [SEP] b [SEP], tokens of it up to the first [SEP]).

    The longer text loses its end until both fit, b at a tie.  Devlin et al. 2018's code
    """
    room = block_size - 2 - (b is not None)
    n = min(len(a), max(room - len(b or ()), (room + 1) // 2) if b is not None else room)
    ids = [special['cls'], *a[:n], special['sep']]
    if b is not None:
        ids += [*b[:room - n], special['sep']]
    return np.array(ids, np.int32), n + 2


def encode_all(tokenizer, texts):
    """Ids of many texts; each distinct text is encoded once."""
    distinct = list(dict.fromkeys(texts))
    return dict(zip(distinct, tokenizer.encode(distinct), strict=True))


def text_features(examples, tokenizer, block_size, stride, choices=False):
    """A row for each example, or for each of its choices; then the target has their number, too."""
    parts = [example.texts if choices else (example.texts,) for example in examples]
    ids = encode_all(tokenizer, [text for rows in parts for row in rows for text in row])
    join, labels = partial(join_texts, tokenizer.special, block_size), [one.label or 0 for one in examples]
    return [Feature(i, [join(*(ids[text] for text in row)) for row in rows],
                    (labels[i], len(rows)) if choices else labels[i]) for i, rows in enumerate(parts)]


def span_features(examples, tokenizer, block_size, stride):
    """Windows [CLS] question [SEP] part of the context [SEP]; an answer outside a window is at [CLS]."""
    questions = encode_all(tokenizer, [example.texts[0] for example in examples])
    contexts = list(dict.fromkeys(example.texts[1] for example in examples))
    found = dict(zip(contexts, tokenizer.encode_offsets(contexts), strict=True))
    features = []
    for i, example in enumerate(examples):
        question = questions[example.texts[0]][:min(QUESTION, block_size // 2)]
        ids, offsets = found[example.texts[1]]
        room = block_size - len(question) - 3
        step = min(stride, max(1, room // 2))
        for begin in range(0, max(1, len(ids) - room + step), step):
            row = join_texts(tokenizer.special, block_size, question, ids[begin:begin + room])
            part, first = offsets[begin:begin + room], len(question) + 2
            features.append(Feature(i, [row], span_target(example.label, part, first), first, part))
    return features


def span_target(answers, offsets, first):
    """(first, last token) of the first answer in a row; (0, 0) if it is not in this window.

    answers  as Example.label; offsets (m, 2) characters of the window's tokens, which start at `first`
    """
    if not answers or not len(offsets):
        return 0, 0
    text, begin = answers[0]
    start = int(np.searchsorted(offsets[:, 1], begin, side='right'))
    end = int(np.searchsorted(offsets[:, 0], begin + len(text), side='left')) - 1
    inside = offsets[0, 0] <= begin and begin + len(text) <= offsets[-1, 1]
    return (first + start, first + end) if inside and start <= end else (0, 0)


# ---- heads: how a kind of task becomes rows, a loss and predictions ----

class Classify:
    """A class: cross-entropy.  Devlin et al. 2018, section 4.1"""
    model, features, choices = SequenceClassifier, staticmethod(text_features), False

    @staticmethod
    def losses(logits, targets, attention_mask):
        """logits (b, n_label), targets (b,) int64 -> (b,) float32"""
        return F.cross_entropy(logits.float(), targets, reduction='none')

    @staticmethod
    def outputs(logits, features, settings):
        return logits.float().tolist()

    @staticmethod
    def predictions(examples, features, outputs, settings):
        """(a prediction for each example, a record of it for the file of predictions)."""
        best = [int(np.argmax(row)) for row in outputs]
        records = [{'prediction': i, 'logits': row} for i, row in zip(best, outputs, strict=True)]
        return np.array(best), records


class Regress(Classify):
    """A number: squared error of one logit."""

    @staticmethod
    def losses(logits, targets, attention_mask):
        return (logits[:, 0].float() - targets) ** 2

    @staticmethod
    def predictions(examples, features, outputs, settings):
        values = [row[0] for row in outputs]
        return np.array(values), [{'prediction': value} for value in values]


class Choose(Classify):
    """One of several texts: cross-entropy over the choices.  Devlin et al. 2018, section 4.4"""
    model, features, choices = MultipleChoice, partial(text_features, choices=True), True

    @staticmethod
    def losses(logits, targets, attention_mask):
        """logits (b, C), targets (b, 2) int64: the right choice and how many there are -> (b,) float32"""
        absent = torch.arange(logits.size(1), device=logits.device) >= targets[:, 1:]
        return Classify.losses(logits.float().masked_fill(absent, -math.inf), targets[:, 0], attention_mask)

    @staticmethod
    def outputs(logits, features, settings):
        rows = zip(logits.float().tolist(), features, strict=True)
        return [row[:len(feature.rows)] for row, feature in rows]


class Span:
    """An answer in a text: cross-entropy of its first and last token.  Devlin et al. 2018, section 4.2

    Their code leaves padding in the softmax; here it is out, so that a loss does not depend on its batch.
    """
    model, features, choices = SpanClassifier, staticmethod(span_features), False

    @staticmethod
    def losses(logits, targets, attention_mask):
        """logits (b, T) of start and end, targets (b, 2) int64, attention_mask (b, T) bool -> (b,) float32"""
        logits = [part.float().masked_fill(~attention_mask, -math.inf) for part in logits]
        losses = (F.cross_entropy(part, target, reduction='none')
                  for part, target in zip(logits, targets.unbind(1), strict=True))
        return sum(losses) / 2

    @staticmethod
    def outputs(logits, features, settings):
        """Of each window (score of no answer, score of the best span, its first and last token)."""
        start, end = (part.float() for part in logits)
        first = torch.tensor([feature.first for feature in features], device=start.device)[:, None]
        n = torch.tensor([len(feature.offsets) for feature in features], device=start.device)[:, None]
        place = torch.arange(start.size(1), device=start.device)
        outside = (place < first) | (place >= first + n)
        none = start[:, 0] + end[:, 0]
        start, end = (part.masked_fill(outside, -math.inf) for part in (start, end))
        best = best_spans(start, end, settings.max_answer)
        return list(zip(*(part.tolist() for part in (none, *best)), strict=True))

    @staticmethod
    def predictions(examples, features, outputs, settings):
        """The best span over an example's windows, or none where that leads by enough, by its least score."""
        null, best = [math.inf] * len(examples), [(-1e4, '')] * len(examples)
        for feature, (none, score, first, last) in zip(features, outputs, strict=True):
            i = feature.example
            null[i] = min(null[i], none)
            if score > best[i][0]:
                begin, end = feature.offsets[[first - feature.first, last - feature.first], [0, 1]]
                best[i] = score, examples[i].texts[1][begin:end].strip()
        gaps = [none - score for none, (score, _) in zip(null, best, strict=True)]
        chosen = ['' if settings.unanswerable and gap > settings.null_threshold else text
                  for gap, (_, text) in zip(gaps, best, strict=True)]
        return chosen, [{'prediction': text, 'best': span, 'null_difference': gap}
                        for text, (_, span), gap in zip(chosen, best, gaps, strict=True)]


def best_spans(start, end, longest):
    """(score, first, last token), (b,) each, of the best span of at most `longest` tokens.

    start, end  (b, T) logits, -inf where an answer cannot be
    """
    best = torch.full_like(start[:, 0], -math.inf)
    first, last = (torch.zeros_like(best, dtype=torch.long) for _ in range(2))
    for more in range(min(longest, start.size(1))):
        score, place = (start[:, :start.size(1) - more] + end[:, more:]).max(1)
        better = score > best
        best, first, last = (torch.where(better, new, old) for new, old in
                             ((score, best), (place, first), (place + more, last)))
    return best, first, last


HEADS = {'classify': Classify, 'regress': Regress, 'span': Span, 'choose': Choose}


class Learner(nn.Module):
    """A model with the losses of its head, in the form that train.py's steps call."""

    def __init__(self, model, losses):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, targets, attention_mask, **inputs):
        """Losses (b,), float32; arguments as the model's forward."""
        return self.losses(self.model(attention_mask=attention_mask, **inputs), targets, attention_mask)


# ---- batches ----

def collate(features, special, choices=False, length=0):
    """{'ids', 'segments', 'attention_mask' (b, T), or (b, C, T) for choices, 'targets'}, arrays.

    Rows are padded to `length`, or to the longest. With `choices`, an example that has fewer than another
    repeats its first; the target says how many are real.
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


class Batches:
    """Training batches by step: every feature once an epoch, in an order drawn from (seed, epoch).

    Each has total_batch rows; the last of an epoch repeats some, weight 0.  form: other arguments of collate
    """

    def __init__(self, features, seed, total_batch, form):
        self.features, self.seed, self.total_batch, self.form = features, seed, total_batch, form
        self.per_epoch = -(-len(features) // total_batch)

    def batch(self, step):
        """As collate, with 'weights' (b,) float32"""
        epoch, place = divmod(step, self.per_epoch)
        places = np.arange(place * self.total_batch, (place + 1) * self.total_batch)
        chosen = train.shuffled(places % len(self.features), len(self.features), self.seed, epoch)
        batch = collate([self.features[i] for i in chosen], *self.form)
        return {**batch, 'weights': (places < len(self.features)).astype(np.float32)}


# ---- where weights come from ----

class Start(NamedTuple):
    """Pretrained weights, and the tokenizer that they go with."""
    config: EncoderConfig
    weights: dict               # encoder.*, perhaps pooler.*, and what a classifier does not read
    tokenizer: object
    folder: str                 # where the tokenizer is; '' in a BERT
    data: dict                  # digests of the data it was trained on


def find_checkpoints(text):
    """The checkpoint files that init_from or compare means, by step; a Hugging Face BERT's name as it is."""
    if glob.has_magic(text):
        found = [path for part in glob.glob(text) for path in find_checkpoints(part)]
        if not found:
            raise UserError(f'{text}: no such file')
        return sorted(found, key=lambda path: (label(path)[0], label(path)[1] or 0))
    local = os.path.isdir(text) or text.startswith(('out/', '.', '/')) or text.endswith('.pt')
    if os.path.isfile(text) or os.path.exists(os.path.join(text, 'config.json')) or not local:
        return [text]
    path = train.newest_checkpoint(text)
    if path is None:
        config = os.path.join('config', f'{os.path.basename(os.path.abspath(text))}.py')
        known = os.path.exists(os.path.join(os.path.dirname(os.path.abspath(__file__)), config))
        raise UserError(f'{text}: no checkpoint there; python train.py '
                        f"{config if known else f'--out_dir={text}'} makes it")
    return [path]


def label(source):
    """(pretraining run, its step or None) of a source, for names of folders and rows of tables."""
    run, name = os.path.abspath(source).split(os.sep)[-2:]
    stem, suffix = os.path.splitext(name)
    if suffix != '.pt':
        return name, None
    if stem.startswith('ckpt_'):
        return run, int(stem[5:]) if stem[5:].isdigit() else None       # a glob has no step
    return f'{run}_{stem}', None


def find_sources(init_from, compare):
    """Sources of both knobs, those to compare with last.  Raises UserError where two have one name."""
    sources = find_checkpoints(init_from)
    others = [source for source in (find_checkpoints(compare) if compare else []) if source not in sources]
    if compare and (not others or {label(one)[0] for one in sources} & {label(other)[0] for other in others}):
        raise UserError(f'compare={compare!r}: has the name of what it is compared with; rename a folder, or '
                        'give both to init_from, as a glob, for a curve')
    for one, other in itertools.combinations(sources + others, 2):
        if label(one) == label(other):
            raise UserError(f'{one} and {other}: both are called {label(one)[0]}; rename a folder')
    return sources + others


@functools.lru_cache(1)
def read_start(source, folder, lower_case):
    """Start from a checkpoint or a Hugging Face BERT.  folder  of its tokenizer, '' for its own"""
    if not source.endswith('.pt'):
        (config, weights), data = train.load_bert(source, pretrained_encoder), {}
    else:
        content = train.read_checkpoint(source)
        knobs, data = content['config'], content['data']
        folder = folder or knobs.get('tokenizer') or os.path.join(knobs['data_dir'], knobs.get('dataset', ''))
        if not os.path.isdir(folder):
            raise UserError(f'{source}: its tokenizer is not in {folder}: name the prepared folder, as in '
                            '--tokenizer=data/wikipedia')
        ours = prepare_data.load_meta(folder)['identity']['tokenizer']
        train.refuse_difference(source, {'tokenizer': ours, **data}, {'tokenizer': ours}, 'the data')
        config, weights = EncoderConfig(**content['model_config']), content['model']
    tokenizer = prepare_data.load_tokenizer(folder) if folder else bert_tokenizer(source, lower_case)
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(f'{source}: {config.vocab_size} token embeddings, but the tokenizer has '
                        f'{tokenizer.vocab_size} pieces; name its own with --tokenizer=')
    return Start(config, weights, tokenizer, folder, data)


def bert_tokenizer(name, lower_case):
    """The WordPiece of a Hugging Face BERT: vocab.txt of its folder, or from the hub."""
    if not os.path.isdir(name):
        hub = prepare_data.need('huggingface_hub', 'a vocabulary of the Hugging Face hub')
        try:
            name = os.path.dirname(hub.hf_hub_download(name, 'vocab.txt'))
        except Exception as error:                              # the hub's libraries raise dozens of classes
            raise UserError(prepare_data.hub_error(name, error)) from None
    return prepare_data.WordPieceTokenizer(name, {'lower_case': lower_case})


def weights_of(source):
    """What tells the weights of two sources apart; of a BERT of the hub its name."""
    if source.endswith('.pt'):
        return train.checkpoint_identity(source)
    files = glob.glob(os.path.join(glob.escape(source), '*.safetensors'))
    return hashlib.sha256(prepare_data.read_bytes(files[0])).hexdigest()[:16] if files else source


def make_classifier(start, head, knobs, n_label):
    """A head's model with the pretrained encoder, and pooler where both have one; the rest is new."""
    if start.config.n_segment < 2:
        raise UserError(f'n_segment={start.config.n_segment}: two texts need 2 segment embeddings')
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
    skipped: dict               # {what was wrong with a row: how many}


def splits_of(name, kind):
    """Splits for evaluation ('dev') or submission ('test') of a task, as {column of the results: split}."""
    files = TASKS[name].files or {'dev': ''}
    return {name + split.removeprefix(kind): split for split in files if split.startswith(kind)}


def subsample(examples, most):
    """At most `most` of the examples, drawn without a seed of the run; 0: all."""
    n = len(examples)
    return [examples[i] for i in sorted(train.shuffled(np.arange(min(most or n, n)), n, 0, 0))]


@functools.lru_cache(8)
def load_split(name, split, tokenizer, block_size, stride, files, most):
    """Split of a task in a tokenizer's ids, kept for later trials.  files: (data_dir, extra_train)"""
    examples, skipped = load_examples(name, split, *files)
    examples = subsample(examples, most)
    return Split(examples, HEADS[TASKS[name].head].features(examples, tokenizer, block_size, stride), skipped)


def survey(name, config):
    """Read all of a task that a command needs, before its first trial starts.  Raises UserError.

    Returns ({split: hash of its examples} without the test splits, a line with their numbers).
    """
    predict, examples = config['predict'], {}
    if predict == 'test' and not splits_of(name, 'test'):
        raise UserError(f'{name}: no test file is published; name one, as in --predict=FILE')
    for split in TASKS[name].files or ('train', 'dev'):
        if predict == 'test' or not split.startswith('test'):
            examples[split] = load_examples(name, split, config['data_dir'], config['extra_train'])[0]
    hashes = {split: f'{text_hash(repr(found)):016x}' for split, found in examples.items()
              if not split.startswith('test')}
    if predict not in ('', 'test'):
        examples[predict] = read_file(name, predict)[0]
    counts = ', '.join(f'{split} {len(found):,}' for split, found in examples.items())
    return hashes, f'{name}: {counts} examples'


def majority_of(name, examples, n):
    """n predictions that know nothing: the most frequent training label, or the mean of numbers."""
    if TASKS[name].head == 'regress':
        return np.full(n, np.mean([example.label for example in examples]))
    span = TASKS[name].head == 'span'
    labels = [example.label[0][0] if span and example.label else example.label for example in examples]
    most = collections.Counter(labels).most_common(1)[0][0]
    return [most or ''] * n if span else np.full(n, most)


def score(name, examples, predictions, records=()):
    """{metric: value} of predictions, one for each example, as fractions.

    records  of the predictions: from them come SQuAD v2.0's best_exact and best_f1, at the threshold of no
             answer that is best for each, where questions may have none
    """
    task, targets = TASKS[name], [example.label for example in examples]
    if task.head == 'span':
        targets = [tuple(text for text, _ in answers) for answers in targets]
    scores = {metric: float(METRICS[metric](targets, predictions)) for metric in task.metrics}
    if records and task.unanswerable:
        texts, gaps = ([record[key] for record in records] for key in ('best', 'null_difference'))
        scores |= {f'best_{metric}': best_threshold(targets, texts, gaps, metric)[0]
                   for metric in task.metrics}
    return scores


# ---- trials ----

def recipe(config, name):
    """The knobs that decide a task's result, its overrides applied."""
    chosen = {key: value for key, value in config.items() if key not in FREE}
    for item in config['overrides'].split():
        place, equals, text = item.partition('=')
        task, dot, key = place.partition('.')
        if not (equals and dot) or task not in TASKS or key not in chosen:
            raise UserError(f'overrides: {item!r}: write TASK.KNOB=VALUE, as in cola.epochs=9, with one of '
                            f"{', '.join(chosen)}")
        if task == name:
            chosen[key] = parse(key, text, chosen[key])
    known, limits = {**config, **chosen}, {**train.LIMITS, **LIMITS}
    train.check_limits(known, {key: limits[key] for key in known if key in limits})
    if known['min_lr'] > known['learning_rate']:
        raise UserError(f"min_lr={known['min_lr']}: must be at most learning_rate={known['learning_rate']}")
    choose('schedule', chosen['schedule'], train.SCHEDULE)
    choose('pooling', chosen['pooling'], POOLING)
    if 0 < chosen['block_size'] < 8:
        raise UserError(f"block_size={chosen['block_size']}: must be at least 8, or 0: the pretrained length")
    choose(f'{name}: metric', chosen['metric'], {'': None, **dict.fromkeys(TASKS[name].metrics)})
    return chosen


@dataclass(frozen=True)
class Trial:
    """One task fine-tuned with one seed from one source of weights."""
    source: str
    name: str
    seed: int
    knobs: SimpleNamespace      # of the command, the task's overrides applied
    identity: dict              # {'recipe', 'weights', 'data'}: with the seed they decide the result

    task = property(lambda self: TASKS[self.name])
    head = property(lambda self: HEADS[self.task.head])
    metric = property(lambda self: self.knobs.metric or self.task.metrics[0])
    start = property(lambda self: read_start(self.source, self.knobs.tokenizer, self.knobs.lower_case))
    length = property(lambda self: self.knobs.block_size or self.start.config.block_size)

    @property
    def folder(self):
        """out_dir/RUN@STEP/TASK_SEED_HASH, another one for each identity."""
        run, step = label(self.source)
        code = f'{text_hash(json.dumps(self.identity, sort_keys=True)):016x}'[:6]
        place = run if step is None else f'{run}@{step}'
        return os.path.join(self.knobs.out_dir, place, f'{self.name}_{self.seed}_{code}')

    def split(self, split, name=''):
        """Split of this trial's task or of another, in this trial's tokens."""
        k = self.knobs
        most = k.train_samples if split == 'train' else k.eval_samples if split.startswith('dev') else 0
        return load_split(name or self.name, split, self.start.tokenizer, self.length, k.stride,
                          (k.data_dir, k.extra_train), most)

    def dev(self):
        """{column: Split} of the evaluation sets."""
        return {column: self.split(split) for column, split in splits_of(self.name, 'dev').items()}

    def form(self, runtime):
        """Arguments of collate; XLA compiles a graph for each length of rows, so there is one."""
        padded = self.knobs.pad_to_block or runtime.is_xla
        return self.start.tokenizer.special, self.head.choices, self.length if padded else 0


@torch.no_grad()
def run_head(model, features, trial, runtime, fraction=0.0):
    """Outputs of the head for each feature, in order.

    fraction  of the mean embedding norm that Gaussian noise has; batches draw it from their number alone
    """
    model.eval()
    form, outputs = trial.form(runtime), {}
    order = np.argsort([max(len(ids) for ids, _ in feature.rows) for feature in features], kind='stable')
    size = max(1, EVAL_ROWS // max(len(feature.rows) for feature in features))
    hook = add_noise(model, features, form, runtime, fraction) if fraction else None
    for number, begin in enumerate(range(0, len(order), size)):
        chosen = order[begin:begin + size]
        rows = [features[i] for i in chosen]
        batch = train.micro_batches(collate(rows, *form), size, runtime.device)[0]
        del batch['targets']
        train.seed_step(0, number, runtime)
        with runtime.autocast():
            logits = train.to_host(model(**batch), runtime)
        outputs.update(zip(chosen.tolist(), trial.head.outputs(logits, rows, trial.knobs), strict=True))
    if hook:
        hook.remove()
    model.train()
    return [outputs[i] for i in range(len(features))]


def predict_split(model, split, trial, runtime, fraction=0.0):
    """(a prediction for each example, records of them)"""
    outputs = run_head(model, split.features, trial, runtime, fraction)
    return trial.head.predictions(split.examples, split.features, outputs, trial.knobs)


def add_noise(model, features, form, runtime, fraction):
    """Add spherical Gaussian noise to what the first block reads; returns the hook.  Kowsher et al. 2024

    Its norm is `fraction` of the mean norm of the embeddings of the evaluated tokens, at every token.
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
    """Train and evaluate a trial.  Returns what result.json holds."""
    k, data, name = trial.knobs, trial.split('train'), f'{trial.name} seed {trial.seed}'
    os.makedirs(trial.folder, exist_ok=True)
    batches = Batches(data.features, trial.seed, k.total_batch, trial.form(runtime))
    steps, every = batches.per_epoch * k.epochs, k.eval_interval or batches.per_epoch
    betas, learner = (k.beta1, k.beta2), Learner(model, trial.head.losses)
    optimizer = train.make_optimizer(model, k.learning_rate, betas, k.adam_eps, k.weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    learner = train.compiled(learner, k.compile, batches.batch(0), k.batch_size, runtime)
    log, health = train.Log(trial.folder, 0, runtime, k.wandb_project, vars(k)), train.Health(runtime)
    best, seconds, since = {}, [0.0] * k.epochs, time.perf_counter()
    for step, batch in enumerate(train.prefetch(batches.batch, range(steps)), 1):
        warmup = round(k.warmup_fraction * steps)
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
        seconds[(step - 1) // batches.per_epoch] += time.perf_counter() - since
        if logs:
            speed, graphs = step * k.total_batch / sum(seconds), train.compilations(runtime)
            left = timedelta(seconds=int((steps - step) * k.total_batch / speed))
            text = (f'{name} step {step}/{steps}: loss {loss:.4f}, lr {lr:.2e}, norm {norm:.2f}, '
                    f'{speed:,.1f} examples/s, eta {left}')
            text += ''.join(f', {key} {n}' for key, n in graphs.items())
            log.write('train', step, text, loss=loss, lr=lr, norm=norm, examples_per_second=speed, **graphs)
        if validates:
            found = validate(trial, model, runtime, step, log)
            best = found if not k.keep_best or found['value'] > best.get('value', -math.inf) else best
        since = time.perf_counter()
    return finish(trial, model, runtime, best, {'steps': steps, 'seconds': seconds})


def validate(trial, model, runtime, step, log):
    """Score the evaluation sets, with what the recipe wants to be kept of this step."""
    scores, records = {}, []
    for column, split in trial.dev().items():
        predictions, found = predict_split(model, split, trial, runtime)
        scores[column] = score(trial.name, split.examples, predictions, found)
        records += [{'column': column, 'id': example.id, **record}
                    for example, record in zip(split.examples, found, strict=True)]
    text = '; '.join(f'{column} {100 * row[trial.metric]:.2f}' for column, row in scores.items())
    log.write('val', step, f'{trial.name} seed {trial.seed} step {step}: {trial.metric} of {text}',
              **scores[trial.name])
    weights = {key: x.cpu().clone() for key, x in model.state_dict().items() if trial.knobs.keep_best}
    return {'step': step, 'value': scores[trial.name][trial.metric], 'scores': scores, 'records': records,
            'weights': weights}


def finish(trial, model, runtime, best, spent):
    """Write predictions, weights and, last, result.json."""
    if best['weights']:
        model.load_state_dict(best['weights'])
    (run, step), data, dev = label(trial.source), trial.split('train'), trial.dev()
    lines = [json.dumps(record, ensure_ascii=False) + '\n' for record in best['records']]
    prepare_data.write_bytes(os.path.join(trial.folder, 'predictions.jsonl'), ''.join(lines).encode())
    if trial.knobs.keep_models:
        train.write_checkpoint(os.path.join(trial.folder, 'model.pt'), {
            'step': best['step'], 'model': train.to_host(model.state_dict(), runtime),
            'config': {**trial.identity['recipe'], 'tokenizer': trial.start.folder},
            'model_config': asdict(model.config), 'data': trial.start.data})
    result = {
        'init': run, 'step': step, 'model': asdict(model.config), 'task': trial.name, 'seed': trial.seed,
        'metric': trial.metric, 'scores': best['scores'], 'best_step': best['step'], **spent,
        'majority': {column: score(trial.name, split.examples, majority_of(
            trial.name, data.examples, len(split.examples))) for column, split in dev.items()},
        'n_train': len(data.examples), 'n_dev': {column: len(dev[column].examples) for column in dev},
        'skipped': {f'{split}: {kind}': n for split, found in {'train': data, **dev}.items()
                    for kind, n in found.skipped.items()},
        'epochs': trial.knobs.epochs, 'seconds_per_epoch': float(np.median(spent['seconds'])),
        'parameters': count_parameters(model), **trial.identity, 'device': train.device_name(runtime.device),
        'date': time.strftime('%Y-%m-%dT%H:%M:%S%z')}
    prepare_data.write_bytes(os.path.join(trial.folder, 'result.json'), json.dumps(result, indent=1).encode())
    return result


def read_result(folder):
    """What the finished trial of a folder left, or None."""
    path = os.path.join(folder, 'result.json')
    try:
        result = load_json(path)
        if {'scores', 'recipe', 'weights', 'data'} <= result.keys():
            return result
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        pass
    raise UserError(f'{path}: damaged, or of an earlier version; remove {folder}')


def cross_scores(trial, model, runtime, others):
    """{task: accuracy} of this model on other tasks, as "does one text hold of the other: yes or no".

    Kowsher et al. 2024, table 6. The label that means yes is `positive` of a row (entailment, duplicate,
    equivalent); neutral and contradiction are no, like the rest. On its own task a model has all labels.
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


def submit(trial, model, runtime, wanted):
    """Write predictions for test files, or for the file `wanted`; print the scores where they have labels."""
    if wanted == 'test':
        found = {column: trial.split(split) for column, split in splits_of(trial.name, 'test').items()}
    else:
        examples, skipped = read_file(trial.name, wanted)
        features = trial.head.features(examples, trial.start.tokenizer, trial.length, trial.knobs.stride)
        found = {trial.name: Split(examples, features, skipped)}
    prefix = '' if wanted == 'test' else os.path.splitext(os.path.basename(wanted))[0] + '.'
    for column, split in found.items():
        predictions, _ = predict_split(model, split, trial, runtime)
        path = write_submission(trial.name, column, trial.folder, split.examples, predictions, prefix)
        print(f'wrote {path}', flush=True)
        known = [i for i, example in enumerate(split.examples) if example.label is not None]
        if known:
            scores = score(trial.name, [split.examples[i] for i in known], [predictions[i] for i in known])
            text = ', '.join(f'{metric} {100 * value:.2f}' for metric, value in scores.items())
            print(f'{column} seed {trial.seed}, {len(known):,} labelled examples: {text}', flush=True)


def run_trial(trial, levels, others, wanted, runtime):
    """Fine-tune unless that is done, and add what else is asked for.  Was anything done?"""
    result = read_result(trial.folder)
    before = result or {}
    noise_due = [level for level in levels if str(level) not in before.get('noise', {}).get(trial.name, {})]
    cross_due = [name for name in others if name not in before.get('cross', {}) and trial.task.positive]
    if result and not (noise_due or cross_due or wanted):
        return False
    torch.manual_seed(trial.seed)
    model = make_classifier(trial.start, trial.head, trial.knobs, max(1, len(trial.task.labels)))
    path = os.path.join(trial.folder, 'model.pt')
    if result and not os.path.exists(path):
        raise UserError(f'{path}: not kept, but noise, cross and predict need it; remove its folder and '
                        'run again with --keep_models=true')
    if result:
        model.load_state_dict(train.read_checkpoint(path)['model'])
    model = train.to_device(model, runtime)
    if not result:
        result = fine_tune(trial, model, runtime)
    for column, split in trial.dev().items() if noise_due else ():
        found = result.setdefault('noise', {}).setdefault(column, {})
        for level in noise_due:
            predictions, _ = predict_split(model, split, trial, runtime, level)
            found[str(level)] = score(trial.name, split.examples, predictions)[trial.metric]
    result.setdefault('cross', {}).update(cross_scores(trial, model, runtime, cross_due))
    prepare_data.write_bytes(os.path.join(trial.folder, 'result.json'), json.dumps(result, indent=1).encode())
    if wanted:
        submit(trial, model, runtime, wanted)
    return True


# ---- the report: a DataFrame with a line a number, from which pandas makes the tables ----

SIZES = {(4, 512): 'small', (12, 768): 'base', (24, 1024): 'large'}         # (n_layer, n_embd)


@functools.cache
def read_papers():
    """What the papers print, in points, from results/papers.json: {paper: {'tables': [...], ...}}.

    A column is 'column.metric', of `averages` the places of their columns; a row is 'words, more; values,
    averages (sd)' and stands beside ours if our model has all of its words.
    """
    return load_json(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results', 'papers.json'))


def paper_rows(table, models):
    """DataFrame, as text, of the rows that fit `models`, sets of words; all if a model has no counterpart."""
    rows = {name: re.findall(r'[\d.]+(?: \([\d.]+\))?', numbers)
            for name, numbers in (row.split(';') for row in table['rows'])}
    fits = [{name for name in rows if set(name.split(',')[0].split()) <= model} for model in models]
    kept = [name for name in rows if not all(fits) or name in set().union(*fits)]
    return pd.DataFrame([rows[name] for name in kept], [f'paper: {name}' for name in kept],
                        [*table['columns'].split(), *table.get('averages', ())])


@functools.cache
def t_quantile(freedom, inside=0.95):
    """t with P(|T| <= t) = inside: t = sqrt(freedom) tan(angle), the angle's density is cos^(freedom - 1)."""
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])        # trapezia
    return math.sqrt(freedom) * math.tan(np.interp(inside, below / below[-1], angles))


def over_seeds(wide):
    """Of each column, whose rows are seeds: 'mean (sd)', half of the 95 % interval, number of seeds."""
    n, mean, sd = wide.count(), wide.mean(), wide.std()
    half = sd * [t_quantile(seeds - 1) / math.sqrt(seeds) if seeds > 1 else math.nan for seeds in n]
    text = mean.map(show).where(n < 2, mean.map(show) + ' (' + sd.map(show) + ')')
    found = {'mean': text, '± 95 %': half.map(show), 'seeds': n.where(n > 0).map(show, 'ignore')}
    return pd.DataFrame(found).T


def each_row(wide):
    """'mean (sd)' over the seeds of each row, a line a row."""
    return pd.DataFrame({row: over_seeds(seeds).loc['mean'] for row, seeds in wide.groupby('row')}).T


def show(value):
    """A cell of a table: points with two decimals, '-' if there is none."""
    if isinstance(value, dict):
        return ', '.join(f'{key} {n:,}' for key, n in value.items())
    if isinstance(value, int):
        return f'{value:,}'
    return '-' if pd.isna(value) else f'{value:.2f}' if isinstance(value, float) else str(value)


def markdown(title, frame, *notes):
    """A heading, a DataFrame as a Markdown table and notes; nothing of an empty one."""
    cells = frame.astype(object).map(show).reset_index().values.tolist()
    rows = [['', *frame.columns], ['---'] * (1 + len(frame.columns)), *cells]
    table = '\n'.join(f"| {' | '.join(map(str, row))} |" for row in rows)
    return '\n\n'.join([f'## {title}', table, *filter(None, notes)]) if cells else ''


def row_names(trials):
    """The row of the report for each trial: its init, and what else differs between trials of one task."""
    recipes = pd.DataFrame([trial['recipe'] for trial in trials])
    varies = recipes.groupby([trial['task'] for trial in trials]).nunique(dropna=False).gt(1).any()
    names = []
    for one in trials:
        twins = [other for other in trials if other['task'] == one['task']]
        words = [f'{key}={show_knob(one["recipe"].get(key))}' for key in varies.index[varies]]
        if any(other['data'] != one['data'] for other in twins):
            words.append(f"data={text_hash(str(one['data'])):016x}"[:11])
        if any(other['weights'] != one['weights'] for other in twins
               if (other['init'], other['step']) == (one['init'], one['step'])):
            words.append(f"weights={one['weights'][:6]}")
        names.append(' '.join([one['init'], *words]))
    return names


def tidy(trials, rows):
    """DataFrame with a line for each number of finished trials, in points; step -1: no pretraining step."""
    lines = []
    for trial, row in zip(trials, rows, strict=True):
        step = -1 if trial['step'] is None else trial['step']
        noise = {column: {f'{float(level):g}': value for level, value in values.items()}
                 for column, values in trial.get('noise', {}).items()}
        for kind, parts in (('scores', trial['scores']), ('majority', trial['majority']), ('noise', noise),
                            ('cross', {trial['task']: trial.get('cross', {})})):
            lines += [(kind, row, step, trial['seed'], column, name, 100 * value)
                      for column, values in parts.items() for name, value in values.items()]
    return pd.DataFrame(lines, columns=['kind', 'row', 'step', 'seed', 'column', 'name', 'points'])


def layouts(book, trials, models):
    """The paper's tables that share a column with the trials, then one of the columns in none of them.

    Yields (title, columns, {average: columns}, rows of the paper, note).
    """
    ran = {column: f"{column}.{trial['metric']}" for trial in trials for column in trial['scores']}
    left = dict(ran)
    for table in book.get('tables', ()):
        columns = table['columns'].split()
        own = {key.split('.')[0] for key in columns}
        if own & ran.keys():
            left = {column: key for column, key in left.items() if column not in own}
            averages = {name: [columns[i] for i in places]
                        for name, places in table.get('averages', {}).items()}
            yield table['title'], columns, averages, paper_rows(table, models), table.get('note', '')
    if left:
        kept = [key for column, key in left.items() if column != 'wnli']        # left out of GLUE's averages
        averages = {'average': kept} if left == ran and len(kept) > 1 else {}
        yield 'Scores' if left == ran else 'Other tasks', list(left.values()), averages, pd.DataFrame(), ''


def wide_scores(frame, tables):
    """Points by (kind, row, step, seed), a column for each metric and average; and the tables' columns."""
    scores = frame[frame.kind.isin(['scores', 'majority'])]
    wide = scores.assign(name=scores.column + '.' + scores.name).pivot(
        index=['kind', 'row', 'step', 'seed'], columns='name', values='points')
    labels = [name for _, columns, averages, *_ in tables for name in (*columns, *averages)]
    labels = list(dict.fromkeys(labels))
    wide = wide.reindex(columns=[*labels, *wide.columns.difference(labels)])
    for name, keys in (item for _, _, averages, *_ in tables for item in averages.items()):
        wide[name] = wide[keys].mean(axis=1, skipna=False)          # of the seeds that ran all of them
    return wide, labels


def score_table(table, last, majority):
    """Ours, the majority class and the paper's rows in a table's columns, and what its averages leave out."""
    title, columns, averages, book, note = table
    parts, notes = [], [note]
    for row, seeds in last.groupby('row'):
        parts.append(over_seeds(seeds[[*columns, *averages]]).rename({'mean': f'ours: {row}'}))
        for name, keys in averages.items():
            missing = [key for key in keys if not seeds[key].count()] or ['a seed with all']
            notes += [] if seeds[name].count() else [f"No {name} of {row}: missing {', '.join(missing)}."]
    for name, keys in averages.items():
        outside = [key for key in columns if key not in keys]
        notes += [f"{name} leaves out {', '.join(outside)}."] if outside else []
    return markdown(title, pd.concat([*parts, majority[[*columns, *averages]], book]), *notes)


def curve_table(row, seeds, note):
    """Score by pretraining step, and where 95 % of the last is reached.  Courtois et al. 2024, figure 3"""
    means = seeds.groupby('step').mean().dropna(axis=1, thresh=2)
    if means.empty:
        return ''
    aim = 0.95 * means.ffill().iloc[-1]
    good = (means >= aim) & (aim > 0)
    cells = pd.DataFrame({f'{step:,}': over_seeds(one[means.columns]).loc['mean']
                          for step, one in seeds.groupby('step')}).T
    cells.loc['95 % of the last'] = aim.map(show)
    cells.loc['reached at'] = [f'{found.idxmax():,}' if found.any() else '-' for _, found in good.items()]
    return markdown(f'{row} by pretraining step', cells, note)


def matrix(title, numbers, table, models):
    """Noise or cross-task table: ours by (row, column), and the paper's."""
    wide = numbers.assign(row=numbers.row + ', ' + numbers.column).pivot(
        index=['row', 'seed'], columns='name', values='points')
    if table:
        book = paper_rows(table, models).astype(float)
        book = book[[name.split(', ')[1] in set(numbers.column) for name in book.index]]
        book.index = pd.MultiIndex.from_product([book.index, [0]], names=['row', 'seed'])
        wide = pd.concat([wide, book.reindex(columns=wide.columns)])
    noise = 'noise' in set(numbers.kind)
    wide = wide[sorted(set(numbers.name), key=float) if noise else list(dict.fromkeys(numbers.name))]
    if noise:
        wide[f'drop at {wide.columns[-1]}'] = wide.iloc[:, 0] - wide.iloc[:, -1]
    return markdown(title, each_row(wide))


def cost_tables(trials, rows, compare, note):
    """Seconds an epoch, and the examples that were read and left out."""
    frame = pd.DataFrame(trials).assign(row=rows)
    times = frame.pivot_table(index='task', columns='row', values='seconds_per_epoch', sort=False)
    for row in times.columns.drop(compare) if compare in times else ():
        times[f'{row} / {compare}'] = times[row] / times[compare]
    read = frame[['task', 'epochs', 'n_train', 'n_dev', 'skipped']].map(show).drop_duplicates()
    read = read.set_index('task').rename(columns={'n_train': 'train', 'n_dev': 'dev'})
    return [markdown('Seconds an epoch', times, note), markdown('Examples', read)]


def model_table(inits):
    """Markdown of the models of {row: trial}, and the words that find their rows in the papers."""
    words, shape = ['attention', 'position', 'norm', 'pooling'], ['n_layer', 'n_head', 'n_embd']
    shapes = {row: {key: one['model'][key] for key in words + shape} for row, one in inits.items()}
    models = [{*map(one.get, words), SIZES.get((one['n_layer'], one['n_embd']))} for one in shapes.values()]
    head = pd.DataFrame([{'step': one['step'], **shapes[row], 'device': one['device'], 'date': one['date']}
                         for row, one in inits.items()], list(inits), dtype=object)
    note = 'Points: mean (standard deviation) over seeds; ± 95 %: half the confidence interval.'
    return markdown(f"Fine-tuning: {', '.join(inits)}", head, note), models


def make_report(trials, paper='', compare=''):
    """Markdown of finished trials, and scores by (row, step, seed).  A row is judged by its last step."""
    book = choose('paper', paper, read_papers()) if paper else {}
    rows = row_names(trials)
    frame = tidy(trials, rows)
    inits = dict(zip(rows, trials, strict=True))                    # {row: its last trial}
    head, models = model_table(inits)
    tables = list(layouts(book, trials, models))
    wide, labels = wide_scores(frame, tables)
    ends = frame.groupby('row').step.max()
    at, of = (wide.index.get_level_values(key).to_numpy() for key in ('step', 'row'))
    final = wide[at == ends[of].to_numpy()].droplevel('step')
    last, majority = final.loc['scores'], final.loc['majority'].groupby('row').mean()
    same = majority.nunique().max() <= 1                            # they differ where rows have other data
    majority = majority.max().to_frame('majority').T if same else majority.rename('majority: {}'.format)

    parts = [head, *(score_table(table, last, majority) for table in tables)]
    for row, one in inits.items():
        other = compare + row[len(one['init']):]                    # the same recipe of `compare`
        if compare and one['init'] != compare and other in inits:
            pairs = over_seeds((last.loc[row] - last.loc[other])[labels]).T
            parts.append(markdown(f'{row} - {other}, paired by seed', pairs.dropna()))
    parts += [curve_table(row, seeds.droplevel('row'), book.get('curve'))
              for row, seeds in wide.loc['scores', labels].groupby('row')]
    every = pd.concat([each_row(last), majority])[[name for name in wide.columns if '.' in name]].T
    parts.append(markdown('Every metric', every))
    for kind, title in (('noise', 'Noise on the embeddings, as a fraction of their mean norm'),
                        ('cross', 'Trained on (rows), evaluated on (columns)')):
        found = frame[(frame.kind == kind) & (frame.step == frame.row.map(ends))]
        parts += [matrix(title, found, book.get(kind), models)] if len(found) else []
    parts += cost_tables(trials, rows, compare, book.get('seconds'))
    return '\n\n'.join(filter(None, parts)), wide.loc['scores', labels]


def plot_curves(scores, path):
    """PNG of averages, or else columns, by pretraining step, where there are several."""
    means = scores.groupby(['row', 'step']).mean().unstack('row').dropna(axis=1, thresh=2)
    if means.empty:
        return
    averages = [key for key in means.columns if '.' not in key[0]]
    means = means[averages] if averages else means
    try:
        means.plot(style='o-', ylabel='points', xlabel='pretraining step').figure.savefig(path, dpi=120)
    except ImportError:
        print(f'{path} needs matplotlib, which is not installed')


# ---- main ----

def find_tasks(text):
    """Rows of TASKS that a list of names and groups means, in its order."""
    names = [name.strip() for name in text.split(',') if name.strip()]
    rows = {**{name: (name,) for name in TASKS}, **GROUPS}
    found = [name for part in names for name in choose('tasks', part, rows)]
    if not found:
        raise UserError(f"tasks={text!r}: choose some of {', '.join(rows)}, with commas")
    return list(dict.fromkeys(found))


def noise_levels(text):
    """'0:0.4:0.05' -> (0.0, 0.05, ..., 0.4)"""
    if not text:
        return ()
    try:
        first, last, step = (float(part) for part in text.split(':'))
        levels = tuple(round(first + i * step, 6) for i in range(int((last - first) / step + 1.000001)))
    except (ValueError, ZeroDivisionError, OverflowError):
        levels = ()
    if not levels or levels[0] < 0 or len(levels) > 1000:
        raise UserError(f'noise={text!r}: write first:last:step, parts of the embedding norm: 0:0.4:0.05')
    return levels


def task_table():
    """The rows of TASKS, for --help."""
    groups = {name: group for group, names in GROUPS.items() for name in names}
    lines = [f"  {name:18} {groups.get(name, '-'):11} {task.folder}/ {' '.join(task.files.values())}: "
             f"{', '.join(task.metrics)}" for name, task in TASKS.items()]
    title = 'tasks: group, folder below data_dir and its files (a|b: either, a+b: both), metrics:'
    return '\n'.join(['', title, *lines])


def write_report(config, show_it):
    """results.json and results.md of every finished trial in out_dir, on stdout too if `show_it`."""
    folder, order = config['out_dir'], list(TASKS)
    folders = map(os.path.dirname, glob.glob(os.path.join(glob.escape(folder), '*', '*', 'result.json')))
    against = label(config['compare'])[0] if config['compare'] else ''
    trials = sorted(map(read_result, folders), key=lambda one: (
        one['init'] == against, one['init'], one['step'] or 0, order.index(one['task']), one['seed']))
    if not trials:
        raise UserError(f'{folder}: no trial has finished there yet')
    text, scores = make_report(trials, config['paper'], against)
    command = ' '.join(['python', os.path.basename(sys.argv[0]), *sys.argv[1:]])
    head = f"`{command}`, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    prepare_data.write_bytes(os.path.join(folder, 'results.json'), json.dumps(
        {'command': command, 'config': config, 'trials': trials}, indent=1).encode())
    prepare_data.write_bytes(os.path.join(folder, 'results.md'), f'{head}\n\n{text}\n'.encode())
    if show_it:
        print(f'\n{text}', flush=True)
        plot_curves(scores, os.path.join(folder, 'curve.png'))


def main():
    if {'--help', '-h'} & set(sys.argv):
        with contextlib.suppress(SystemExit):
            configure(globals())
        print(task_table())
        return
    config, origins = configure(globals())
    names, levels = find_tasks(tasks), noise_levels(noise)
    others = [name for name in names if TASKS[name].positive] if cross else []
    if predict not in ('', 'test') and len(names) > 1:
        raise UserError(f'predict={predict!r}: a file is of one task: choose it with --tasks, or write test')
    if paper:
        choose('paper', paper, read_papers())
    if report:
        return write_report(config, True)
    if not out_dir:
        raise UserError("out_dir='': name a folder, as in --out_dir=out/finetune")
    runtime = train.join(device, dtype, group=False)
    recipes = {name: recipe(config, name) for name in names}
    knobs = {name: SimpleNamespace(**{**config, **recipes[name]}, unanswerable=TASKS[name].unanswerable)
             for name in names}
    for name in ('SIGTERM', 'SIGINT'):                  # nothing of a trial under way is kept: end at once
        signal.signal(getattr(signal, name), lambda number, frame: sys.exit(128 + number))

    # the plan: every trial, of which this process has a share
    sources = find_sources(init_from, compare)
    data = {name: survey(name, config) for name in names}
    plan = [Trial(source, name, number, knobs[name],
                  {'recipe': recipes[name], 'weights': weights, 'data': data[name][0]})
            for source, weights in zip(sources, map(weights_of, sources), strict=True)
            for name in names for number in range(seed, seed + trials)]
    mine = plan[runtime.rank::runtime.world]
    alone = replace(runtime, rank=0, world=1)           # a trial's result does not depend on who runs it
    if runtime.main:
        train.hold(out_dir)
        train.write_manifest(out_dir, config, {'init_from': sources}, runtime)
        done = sum(read_result(trial.folder) is not None for trial in plan)
        print(knob_table(config, origins), *(line for _, line in data.values()), sep='\n')
        print(f'{len(plan)} trials, {done} of them finished before; {runtime.device}, '
              f'{str(runtime.dtype)[6:]}, {runtime.world} process(es)', flush=True)

    worked = runtime.main
    try:
        for number, trial in enumerate(mine, 1):
            print(f'trial {number} of {len(mine)}: {trial.folder}', flush=True)
            worked = run_trial(trial, levels, others, predict, alone) or worked
    except SystemExit:
        say('stopped by a signal; the same command starts this trial again and keeps the finished ones')
        raise
    if worked:                                          # the process that finds all trials done shows them
        write_report(config, all(read_result(trial.folder) for trial in plan))
    train.leave(runtime)


if __name__ == '__main__':
    run(lambda: train.in_memory(main, globals()))
