"""Fine-tuning on GLUE, SQuAD, SuperGLUE, CLUE and three offline tasks, over seeds and checkpoints.

    $ python finetune.py config/finetune_quickstart.py
    $ python finetune.py config/glue_courtois.py --init_from=out/base_pairwise --compare=out/base_original

A trial is one task fine-tuned with one seed from one set of weights. It has a folder of its own in out_dir,
with its log, result, predictions, weights and, while it runs, checkpoints: a repeated command goes on where
the last one stopped. As in train.py, a step is a pure function of (weights, data, seed, step).
"""
import collections
import copy
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
import string
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from configurator import UserError, configure, parse, run, say
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
from prepare_data import (
    CORPORA,
    WordPieceTokenizer,
    hub_error,
    load_meta,
    load_tokenizer,
    need,
    ordered_map,
    package_root,
    parse_docstrings,
    python_files,
    read_bytes,
    read_lines,
    text_hash,
    write_bytes,
)
from train import (
    SCHEDULE,
    Log,
    Ranks,
    autocast,
    catch_signals,
    check_knobs,
    checkpoint_name,
    checkpoints,
    choose_dtype,
    clock,
    compilations,
    compiled_or_eager,
    data_identity,
    device_name,
    hold,
    in_memory,
    join_ranks,
    leave,
    load_bert,
    load_optimizer,
    make_optimizer,
    micro_batches,
    newest_checkpoint,
    optimizer_step,
    place,
    prefetch,
    progress_bar,
    prune_checkpoints,
    queued,
    rate_at,
    read_checkpoint,
    reads_at,
    refuse_difference,
    seed_device,
    seed_step,
    shuffled,
    step_of,
    to_host,
    watch,
    wrap,
    write_checkpoint,
    write_manifest,
    write_whole,
)

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
parallel = 'trials'             # trials: each process takes whole ones; ddp: all processes share each trial
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
total_batch = 16                # examples per optimizer step over all devices that share a trial
batch_size = 16                 # examples per device and micro-step at most; halve it if out of memory
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
# evaluation, log and checkpoints
metric = ''                     # of METRICS: it enters averages and picks the best; empty: the task's first
keep_best = False               # report the weights that scored best on dev, not the last ones
eval_interval = 0               # steps between evaluations; 0: after every epoch
max_answer = 30                 # span: tokens of an answer at most
null_threshold = 0.0            # span: no answer where its score leads by more, if questions may have none
log_interval = 100              # steps between log lines
checkpoint_interval = 1000      # steps between checkpoints of a running trial; 0: only on a signal
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, cuda:1 (without torchrun), mps, xla or tpu
dtype = 'auto'                  # auto (bfloat16 on GPUs that compute in it), float32, bfloat16 or float16
compile = 'auto'                # auto (on for CUDA), true or false
timeout = 300                   # ddp: seconds without a sign of life from a process that end all; 0: for ever

AT_LEAST = {
    'trials': 1, 'seed': 0, 'epochs': 1, 'total_batch': 1, 'batch_size': 1, 'log_interval': 1, 'stride': 1,
    'block_size': 0, 'train_samples': 0, 'eval_samples': 0, 'eval_interval': 0, 'checkpoint_interval': 0,
    'max_answer': 1, 'warmup_fraction': 0, 'min_lr': 0, 'weight_decay': 0, 'grad_clip': 0, 'beta1': 0,
    'beta2': 0, 'timeout': 0,
}
BELOW = {'beta1': 1, 'beta2': 1, 'seed': 2 ** 62, 'warmup_fraction': 1}
AT_MOST = {'min_lr': 'learning_rate'}
FREE = {                        # knobs that may differ between trials of one out_dir
    'out_dir', 'init_from', 'compare', 'tasks', 'trials', 'seed', 'paper', 'predict', 'noise', 'cross',
    'parallel', 'keep_models', 'batch_size', 'overrides', 'log_interval', 'checkpoint_interval',
    'wandb_project', 'device', 'compile',
}
EVAL_ROWS = 64                  # rows of a model that are evaluated together: noise depends on it
QUESTION = 64                   # tokens of a question at most.  Devlin et al. 2018's code


# ---- labelled files: a row of TASKS, and how its records become Examples ----

LONGEST = 10_000_000                    # bytes of a line
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
    """Why a record cannot become an example."""


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
    source: Callable | None = None  # (name, split) -> Examples, in place of all of the above


# ---- readers: file -> (where, record) pairs; a record is a dict, or a str that says what is wrong ----

def read_table(path, header=()):
    """Tab-separated without quoting, as GLUE is; .csv with it.  `header` is of files without that line."""
    columns = None
    for number, line, bad in read_lines(path, LONGEST):
        line = line.rstrip('\r\n')
        if not line and not bad:
            continue
        cells = next(csv.reader([line])) if path.endswith('.csv') else line.split('\t')
        if columns is None:
            columns = header if header and len(cells) == len(header) else cells
            if columns is cells:
                continue
        fits = dict(zip(columns, cells, strict=False)) if len(cells) == len(columns) else 'missing columns'
        yield f'{path}:{number}', bad or fits


def read_records(path):
    """JSON lines."""
    for number, line, bad in read_lines(path, LONGEST):
        if line.strip() or bad:
            try:
                record = bad or json.loads(line)
            except (ValueError, RecursionError):
                record = bad = 'broken JSON'
            yield f'{path}:{number}', record if bad or isinstance(record, dict) else 'not an object'


def load_json(path):
    try:
        return json.loads(read_bytes(path).decode('utf-8-sig'))
    except json.JSONDecodeError as error:
        raise UserError(f'{path}:{error.lineno}: broken JSON: {error.msg}') from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f'{path}: broken JSON: {error}') from None


def read_squad(path):
    for article in load_json(path)['data']:
        for paragraph in article['paragraphs']:
            for question in paragraph['qas']:
                yield f"{path}: question {question['id']}", {'context': paragraph['context'], **question}


def read_multirc(path):
    for where, record in read_records(path):
        if isinstance(record, str):
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
    """train.json has its answers, {blank: candidate}, in train_answer.json; without it it is unlabelled."""
    answer_file = '_answer'.join(os.path.splitext(path))
    answers = load_json(answer_file) if os.path.isfile(answer_file) else None
    for where, record in read_records(path):
        if answers is not None and isinstance(record, dict):
            blanks = BLANK.findall(' '.join(record['content']))
            record['answers'] = {'candidate_id': [answers.get(blank, -1) for blank in blanks]}
        yield where, record


def read_path(task, path):
    """(where, record) pairs of a file in the task's format."""
    try:
        table = path.endswith(('.tsv', '.csv'))
        yield from read_table(path, task.header.split()) if table else task.read(path)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f'{path}: not in the published format of {task.folder}: '
                        f'{type(error).__name__}: {error}') from None


def read_hub(task, split):
    """(where, record) pairs of a dataset of the Hugging Face hub; a class label becomes its name, -1 None."""
    datasets = need('datasets', 'reading from the Hugging Face hub')
    source, _, configuration = task.hub.partition(':')
    try:
        data = datasets.load_dataset(source, configuration or None, split=(task.splits or HUB_SPLITS)[split])
    except Exception as error:                                  # the hub's libraries raise dozens of classes
        raise UserError(hub_error(source, error)) from None
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
        raise Bad('missing columns')
    return value


def pick_id(record, number):
    """What a submission calls the record; `number` (from 0) where it has no name."""
    value = pick(record, 'index|id|idx')
    if isinstance(value, dict):
        return value['paragraph'], value['question'], value['answer']
    return number if value is None else value


def pick_label(task, record):
    """Class index or, of a task without classes, a score; None if the record is unlabelled."""
    value = pick(record, task.label)
    if value is None:
        return None
    if value == '-':
        raise Bad(DISPUTED)
    for names in (task.labels, task.written):
        if str(value) in names:
            return names.index(str(value))
    if isinstance(value, int) and 0 <= value < len(task.labels):        # of a hub column without names
        return value
    try:
        score = math.nan if task.labels else float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise Bad('unknown label')
    return score


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
            raise Bad('span not in the text')
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
        raise Bad('unknown label')
    yield Example(pick_id(record, number), tuple((passage, f'{question} {choice}') for choice in choices),
                  choices.index(answer) if answer else None)


def make_chid(task, record, number, counts):
    """An example a blank: candidate | passage, as in CLUE's baseline; ____ is this blank, **** another."""
    candidates, answers = record['candidates'], (record.get('answers') or {}).get('candidate_id')
    blanks = [(passage, blank) for passage in record['content'] for blank in BLANK.finditer(passage)]
    for (passage, blank), answer in itertools.zip_longest(blanks, answers or ()):
        if answers and not 0 <= answer < len(candidates):
            raise Bad('unknown label')
        before = BLANK.sub('****', passage[:blank.start()])[-BLANK_AROUND:]
        text = before + '____' + BLANK.sub('****', passage[blank.end():])[:BLANK_AROUND]
        yield Example(blank[0], tuple((candidate, text) for candidate in candidates), answer)


# ---- examples of a split or of a file ----

def load_examples(name, split, data_dir):
    """One split of a task.  Returns (list of Example, {kind: count} of what was skipped or repaired).

    data_dir    holds the row's folder, is its parent or is it; empty: the task comes from the hub
    A row with missing columns, an unknown label or no usable answer is skipped and counted.  More than 1 % of
    bad rows, though one may always be, any in a test split, as a submission needs every row, or no good row:
    UserError with the file and line of the first.  Labels '-' and what find_nearest counts are no bad rows.
    """
    task = TASKS[name]
    if task.source:
        return list(task.source(name, split)), {}
    if split not in task.files:
        raise UserError(f"{name}: no split '{split}': choose one of {', '.join(task.files)}")
    if not data_dir:
        return collect(task, read_hub(task, split), split, f'{task.hub} {split}')
    paths = find_split(task, split, data_dir)
    return collect(task, itertools.chain(*(read_path(task, path) for path in paths)), split, paths[0])


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
            if isinstance(record, str):
                raise Bad(record)
            made = list(task.make(task, record, rows - 1, counts))
            check_labels(task, made, split)
            examples += made
        except (Bad, LookupError, TypeError, ValueError, AttributeError) as error:
            kind = str(error) if isinstance(error, Bad) else 'not as published'
            firsts.setdefault(kind == DISPUTED, f'{where}: {kind}')
            bad += kind != DISPUTED
            counts[kind] += 1
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
            raise Bad('no label')
        if split == 'train' and task.head == 'span' and example.label and example.label[0][1] < 0:
            raise Bad('question without a usable answer')


def find_split(task, split, data_dir):
    """The files of a split below data_dir."""
    group, _, name = task.folder.rpartition('/')
    found = [deeper for root in (*subfolders(data_dir, group), data_dir) for deeper in subfolders(root, name)]
    found += [data_dir] if is_called(os.path.basename(os.path.abspath(data_dir)), name) else []
    for folder in [inner for outer in found for inner in (outer, *subfolders(outer, name))]:
        for names in task.files[split].split('|'):
            paths = [os.path.join(folder, item) for item in names.split('+')]
            if all(map(os.path.isfile, paths)):
                return paths
    wanted = ' or '.join(task.files[split].replace('+', ' and ').split('|'))
    where, hub = os.path.join(data_dir, task.folder), task.hub.replace(':', ', ')
    raise UserError(f'{where}: no {wanted}: --data_dir should hold {task.folder}/; if it is empty '
                    f'{hub} comes from the Hugging Face hub')


def subfolders(folder, name):
    found = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, item) for item in found if is_called(item, name)]
    return list(filter(os.path.isdir, paths))


def is_called(item, name):
    return item.lower().removesuffix('_public') == name.lower()


# ---- submissions: predictions are class indices, scores, answer texts or choice indices ----

ANSWERS = {     # head: prediction -> what a submission says
    'classify': lambda task, prediction: (task.written or task.labels)[int(prediction)],
    'regress': lambda task, prediction: f'{min(max(float(prediction), 0), 5):.3f}',
    'span': lambda task, prediction: prediction,
    'choose': lambda task, prediction: int(prediction),
}


def write_submission(name, column, folder, examples, predictions):
    """Writes what the benchmark's site takes.  `column` is the task's name, or mnli_mm.  Returns the path."""
    task = TASKS[name]
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, task.submission.split('|')[-1 if column.endswith('_mm') else 0])
    answers = [ANSWERS[task.head](task, prediction) for prediction in predictions]
    write_bytes(path, task.write([example.id for example in examples], answers).encode())
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


# ---- three labelled tasks made of the docstrings of installed packages, offline ----

PACKAGES = CORPORA['docstrings'][1]
DOCSTRING_SIZES = {'train': 6000, 'dev': 1000}      # examples at most
DOCSTRING_DEV = 1 / 7                               # of the docstrings, by hash
CONTEXT = 400                                       # characters; about 120 tokens of a vocabulary of 4096
PROSE = re.compile(r'(?!\w+:)[A-Z](?!.*(---|===|>>>|::|Args:|Returns:)).{18,298}\.')       # up to a full stop
SECTION = re.compile(r'^(?:Other )?Parameters\n[-=]{3,}\n(.*?)(?=\n\S[^\n]*\n[-=]{3,}$|\Z)', re.M | re.S)
PARAMETER = re.compile(r'(\*{0,2}\w[\w*, ]{0,40}?) ?: ?([\w({\[`:].{0,58}[\w)}\]`])')         # name : type


@functools.cache
def read_packages(packages, num_proc):
    """(hash, package, where, text) of every docstring, sorted: an order that depends on the texts alone."""
    files = [(package, (package_root(package), item)) for package in packages.split()
             for item in python_files(package_root(package))]
    found = ordered_map(parse_docstrings, [item for _, item in files], num_proc)
    return sorted((text_hash(text, 1), package, where, text) for (package, _), rows in
                  zip(files, found, strict=True) for where, text, bad in rows if not bad)


def docstring_examples(name, split, packages=PACKAGES, num_proc=0):
    """List of Examples of a row of DOCSTRINGS; the packages are parsed once a process, in 20 s on two cores.

    A docstring is of one split.  A text that two of them share, but for digits and punctuation, is left out:
    none is in both splits, and none has two labels.
    """
    cut, label = DOCSTRINGS[name]
    rows = read_packages(packages, num_proc or os.cpu_count())
    pieces = [(key, package, where, *piece) for key, package, where, text in rows for piece in cut(text)]
    times = collections.Counter(letters(text) for *_, texts, _ in pieces for text in texts)
    pieces = [piece for key, *piece in pieces if (key < DOCSTRING_DEV * 2**64) == (split == 'dev')
              and all(times[letters(text)] == 1 for text in piece[2])]
    examples = label(pieces, packages.split(), DOCSTRING_SIZES[split])
    return sorted(examples, key=lambda example: text_hash(' '.join(example.texts), 1))


def letters(text):
    return re.sub(r'[\W\d_]+', ' ', text.lower())


def cut_summary(text):
    """Docstring -> [((first paragraph,), None)], if it is prose."""
    summary = ' '.join(re.split(r'\n\s*\n', text, maxsplit=1)[0].split())
    return [((summary,), None)] if PROSE.fullmatch(summary) else []


def cut_paragraphs(text):
    """Docstring -> [((first, second paragraph), None)], if both are prose."""
    pair = tuple(' '.join(part.split()) for part in re.split(r'\n\s*\n', text, maxsplit=2)[:2])
    return [(pair, None)] if len(pair) == 2 and all(map(PROSE.fullmatch, pair)) else []


def cut_parameters(text):
    """Docstring -> [((context,), [(name, type, first character of the type in the context), ...]), ...].

    The parameter section in numpy's style, on one line, cut between parameters where CONTEXT ends.
    """
    section, pieces = SECTION.search(text), []
    for part in re.split(r'\n(?=\S)', section[1].strip()) if section else ():
        head, item = (' '.join(lines.split()) for lines in (part.partition('\n')[0], part))
        if not pieces or len(pieces[-1][0]) + 1 + len(item) > CONTEXT:
            pieces.append((item, []))
        else:
            pieces[-1] = (f'{pieces[-1][0]} {item}', pieces[-1][1])
        if found := PARAMETER.fullmatch(head):
            pieces[-1][1].append((found[1], found[2], len(pieces[-1][0]) - len(item) + found.start(2)))
    return [((context,), types) for context, types in pieces
            if len(context) <= CONTEXT and len({name for name, *_ in types}) == len(types) > 1]


def label_package(pieces, packages, size):
    """Which package is it from?  As many of each as there are, up to an equal share."""
    kept = [item for package in packages
            for item in [piece for piece in pieces if piece[0] == package][:size // len(packages)]]
    return [Example(where, texts, packages.index(package)) for package, where, texts, _ in kept]


def label_order(pieces, packages, size):
    """Do the paragraphs stand in this order?  In every other example they are exchanged."""
    return [Example(where, texts[::1 - 2 * (i % 2)], 1 - i % 2)
            for i, (_, where, texts, _) in enumerate(pieces[:size // 2 * 2])]


def label_type(pieces, packages, size):
    """What is the type of this parameter?"""
    return [Example(f'{where}:{name}', (name, context), ((answer, start),))
            for _, where, (context,), types in pieces for name, answer, start in types][:size]


DOCSTRINGS = {
    # task               pieces of a docstring   examples of all pieces of a split
    'docstring_package': (cut_summary,           label_package),
    'docstring_order':   (cut_paragraphs,        label_order),
    'docstring_type':    (cut_parameters,        label_type),
}


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
GLUE = partial(Task, head='classify', metrics=('accuracy',), files=TSV, read=read_table, make=make_texts,
               write=write_table)
SQUAD = partial(Task, head='span', metrics=('f1_words', 'exact'), folder='squad', read=read_squad,
                make=make_span, write=write_map, submission='predictions.json')
SUPERGLUE = partial(Task, head='classify', labels=('False', 'True'), files=JSONL, make=make_texts)
CLUE = partial(Task, head='classify', metrics=('accuracy',), files=JSON, read=read_records, make=make_texts,
               write=write_records)

TASKS = {
    'cola': GLUE(metrics=('matthews', 'accuracy'), labels=('unacceptable', 'acceptable'), written=BINARY,
                 folder='glue/CoLA', hub='nyu-mll/glue:cola', texts=('sentence',), submission='CoLA.tsv',
                 header='source label star sentence'),
    'sst2': GLUE(labels=('negative', 'positive'), written=BINARY, folder='glue/SST-2',
                 hub='nyu-mll/glue:sst2', texts=('sentence',), submission='SST-2.tsv'),
    'mrpc': GLUE(metrics=('f1_accuracy', 'f1', 'accuracy'), labels=('not_equivalent', 'equivalent'),
                 written=BINARY, folder='glue/MRPC', hub='nyu-mll/glue:mrpc', label='Quality|label',
                 texts=('#1 String|sentence1', '#2 String|sentence2'), submission='MRPC.tsv',
                 positive='equivalent'),
    'stsb': GLUE(head='regress', metrics=('pearson_spearman', 'pearson', 'spearman'), folder='glue/STS-B',
                 hub='nyu-mll/glue:stsb', texts=PAIR, label='score|label', submission='STS-B.tsv'),
    'qqp': GLUE(metrics=('accuracy', 'f1', 'f1_accuracy'), labels=('not_duplicate', 'duplicate'),
                written=BINARY, folder='glue/QQP', hub='nyu-mll/glue:qqp', texts=('question1', 'question2'),
                label='is_duplicate|label', submission='QQP.tsv', positive='duplicate'),
    'mnli': GLUE(labels=ENTAILMENT, folder='glue/MNLI', files=MNLI, hub='nyu-mll/glue:mnli',
                 splits=MNLI_SPLITS, texts=('sentence1|premise', 'sentence2|hypothesis'),
                 label='gold_label|label', submission='MNLI-m.tsv|MNLI-mm.tsv', positive='entailment'),
    'qnli': GLUE(labels=TWO_WAY, folder='glue/QNLI', hub='nyu-mll/glue:qnli', texts=('question', 'sentence'),
                 submission='QNLI.tsv', positive='entailment'),
    'rte': GLUE(labels=TWO_WAY, folder='glue/RTE', hub='nyu-mll/glue:rte', texts=PAIR, submission='RTE.tsv',
                positive='entailment'),
    'wnli': GLUE(labels=('not_entailment', 'entailment'), written=BINARY, folder='glue/WNLI',
                 hub='nyu-mll/glue:wnli', texts=PAIR, submission='WNLI.tsv'),
    'squad1': SQUAD(files={'train': 'train-v1.1.json', 'dev': 'dev-v1.1.json'}, hub='rajpurkar/squad'),
    'squad2': SQUAD(files={'train': 'train-v2.0.json', 'dev': 'dev-v2.0.json'}, hub='rajpurkar/squad_v2',
                    unanswerable=True),
    'boolq': SUPERGLUE(metrics=('accuracy', 'f1'), written=('false', 'true'), folder='superglue/BoolQ',
                       hub='aps/super_glue:boolq', read=read_records, texts=('passage', 'question'),
                       write=partial(write_records, key='idx'), submission='BoolQ.jsonl'),
    'multirc': SUPERGLUE(metrics=('accuracy', 'f1'), written=BINARY, folder='superglue/MultiRC',
                         hub='aps/super_glue:multirc', read=read_multirc,
                         texts=('paragraph', ('question', 'answer')), write=write_multirc,
                         submission='MultiRC.jsonl'),
    'afqmc': CLUE(labels=BINARY, folder='clue/afqmc', files=JSON | {'train': 'train.json|train.csv'},
                  hub='clue/clue:afqmc', texts=PAIR, submission='afqmc_predict.json'),
    'csl': CLUE(labels=BINARY, folder='clue/csl', hub='clue/clue:csl', texts=('keyword', 'abst'),
                submission='csl_predict.json'),
    'iflytek': CLUE(labels=tuple(map(str, range(119))), folder='clue/iflytek', hub='clue/clue:iflytek',
                    texts=('sentence',), submission='iflytek_predict.json'),
    'tnews': CLUE(labels=tuple(str(100 + i) for i in range(17) if i not in (5, 11)), folder='clue/tnews',
                  hub='clue/clue:tnews', texts=('sentence',), submission='tnews11_predict.json'),
    'wsc': CLUE(labels=('false', 'true'), folder='clue/cluewsc2020', hub='clue/clue:cluewsc2020',
                make=make_wsc, submission='cluewsc11_predict.json'),
    'cmnli': CLUE(labels=ENTAILMENT, folder='clue/cmnli', hub='clue/clue:cmnli', texts=PAIR,
                  label='label|gold_label', submission='cmnli_predict.json'),
    'ocnli': CLUE(labels=ENTAILMENT, folder='clue/ocnli',
                  files=JSON | {'train': 'train.50k.json|train.json'}, hub='clue/clue:ocnli', texts=PAIR,
                  submission='ocnli_50k_predict.json'),
    'cmrc': CLUE(head='span', metrics=('exact_f1_chinese', 'exact_chinese', 'f1_characters'),
                 folder='clue/cmrc2018', hub='clue/clue:cmrc2018', read=read_squad, make=make_span,
                 write=write_map, submission='cmrc2018_predict.json'),
    'chid': CLUE(head='choose', folder='clue/chid', hub='clue/clue:chid', read=read_chid, make=make_chid,
                 write=write_map, submission='chid11_predict.json'),
    'c3': CLUE(head='choose', folder='clue/c3', files=C3 | {'test': f"{JSON['test']}|{C3['test']}"},
               hub='clue/clue:c3', read=read_c3, make=make_c3, submission='c311_predict.json'),
    'docstring_package': Task('classify', ('accuracy',), tuple(PACKAGES.split()), source=docstring_examples),
    'docstring_order': Task('classify', ('accuracy', 'f1'), ('exchanged', 'kept'), source=docstring_examples),
    'docstring_type': Task('span', ('exact', 'f1_words'), source=docstring_examples),
}
GROUPS = {
    'glue': ('cola', 'sst2', 'mrpc', 'stsb', 'qqp', 'mnli', 'qnli', 'rte'),     # the papers leave out wnli
    'squad': ('squad1', 'squad2'),
    'docstrings': tuple(DOCSTRINGS),
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
    return dict(zip(distinct, tokenizer.encode_batch(distinct), strict=True))


def text_features(examples, tokenizer, block_size, stride):
    """A row for each example of one text or two."""
    ids = encode_all(tokenizer, [text for example in examples for text in example.texts])
    rows = [join_texts(tokenizer.special, block_size, *(ids[text] for text in example.texts))
            for example in examples]
    return [Feature(i, [row], examples[i].label or 0) for i, row in enumerate(rows)]


def choice_features(examples, tokenizer, block_size, stride):
    """A row for each choice of each example; the target is the right one and how many there are."""
    ids = encode_all(tokenizer, [text for example in examples for pair in example.texts for text in pair])
    return [Feature(i, [join_texts(tokenizer.special, block_size, *(ids[text] for text in pair))
                        for pair in example.texts], (example.label or 0, len(example.texts)))
            for i, example in enumerate(examples)]


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
    model, features, choices = MultipleChoice, staticmethod(choice_features), True

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

    Each has total_batch rows, this process takes `share`; the last of an epoch repeats some, weight 0.
    """

    def __init__(self, features, seed, total_batch, share, form):
        self.features, self.seed, self.total_batch, self.share = features, seed, total_batch, share
        self.form = form                                # other arguments of collate
        self.per_epoch = -(-len(features) // total_batch)

    def batch(self, step):
        """As collate, with 'weights' (b,) float32"""
        epoch, place = divmod(step, self.per_epoch)
        places = np.arange(place * self.total_batch, (place + 1) * self.total_batch)[self.share]
        chosen = shuffled(places % len(self.features), len(self.features), self.seed, epoch)
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


def find_starts(init_from):
    """The checkpoint files that init_from means, by step; the name of a Hugging Face BERT as it stands."""
    if glob.has_magic(init_from):
        found = [start for path in glob.glob(init_from) for start in find_starts(path)]
        if not found:
            raise UserError(f'init_from={init_from!r}: no such file')
        return sorted(found, key=lambda path: (label(path)[0], label(path)[1] or 0))
    if os.path.isdir(init_from) and not os.path.exists(os.path.join(init_from, 'config.json')):
        path = newest_checkpoint(init_from)
        if path is None:
            raise UserError(f'init_from={init_from!r}: no checkpoint in this folder; train.py writes them')
        return [path]
    return [init_from]


@functools.lru_cache(1)
def read_start(source, folder, lower_case):
    """Start from a checkpoint or a Hugging Face BERT.  folder  of its tokenizer, '' for its own"""
    if not source.endswith('.pt'):
        config, weights = load_bert(source, pretrained_encoder)
        data = {}
    else:
        content = read_checkpoint(source)
        knobs, data = content['config'], content['data']
        folder = folder or knobs.get('tokenizer') or os.path.join(knobs['data_dir'], knobs.get('dataset', ''))
        if not os.path.isdir(folder):
            raise UserError(f'{source}: its tokenizer is not in {folder}: name the prepared folder, as in '
                            '--tokenizer=data/wikipedia')
        ours = data_identity(load_meta(folder))['tokenizer']
        refuse_difference(source, data or {'tokenizer': ours}, {'tokenizer': ours}, 'the data')
        config, weights = EncoderConfig(**content['model_config']), content['model']
    tokenizer = load_tokenizer(folder, load_meta(folder)) if folder else bert_tokenizer(source, lower_case)
    if tokenizer.vocab_size != config.vocab_size:
        raise UserError(f'{source}: {config.vocab_size} token embeddings, but the tokenizer has '
                        f'{tokenizer.vocab_size} pieces; name its own with --tokenizer=')
    return Start(config, weights, tokenizer, folder, data)


@functools.cache
def digest_of(source):
    """What tells the weights of two sources apart: a sha256, or the name of a BERT of the hub."""
    if not source.endswith('.pt'):
        files = glob.glob(os.path.join(glob.escape(source), '*.safetensors')) or [source]
        return hashlib.sha256(read_bytes(files[0])).hexdigest() if os.path.isfile(files[0]) else source
    with open(source, 'rb') as file:
        file.seek(-64, os.SEEK_END)                     # where write_checkpoint put it
        return file.read().decode()


def bert_tokenizer(name, lower_case):
    """The WordPiece of a Hugging Face BERT: vocab.txt of its folder, or from the hub."""
    file_name = os.path.join(name, 'vocab.txt') if os.path.isdir(name) else name
    with tempfile.TemporaryDirectory() as folder:
        information = WordPieceTokenizer.save(folder, file_name, {'lower_case': lower_case}, None)
        return WordPieceTokenizer(folder, information)


def make_classifier(start, head, settings, n_label):
    """A head's model with the pretrained encoder, and pooler where both have one; the rest is new."""
    if start.config.n_segment < 2:
        raise UserError(f'n_segment={start.config.n_segment}: two texts need 2 segment embeddings')
    shape = replace(start.config, dropout=settings.dropout, attention_dropout=settings.attention_dropout,
                    pooling=settings.pooling, n_label=n_label)
    model = head.model(shape)
    new = model.state_dict()
    known = {key: value for key, value in start.weights.items()
             if key in new and key.startswith(('encoder.', 'pooler.'))}
    assert all(key in known for key in new if key.startswith('encoder.'))
    model.load_state_dict({**new, **known})
    if settings.block_size != shape.block_size:
        model.encoder.extend(settings.block_size)
    return model


# ---- data of a task ----

def splits_of(name, kind):
    """Splits for evaluation ('dev') or submission ('test') of a task, as {column of the results: split}."""
    files = TASKS[name].files or {'dev': ''}
    return {name + split.removeprefix(kind): split for split in files if split.startswith(kind)}


class Split(NamedTuple):
    examples: list
    features: list
    skipped: dict               # {what was wrong with a row: how many}


def some(examples, most):
    """At most `most` of the examples, drawn without a seed of the run; 0: all."""
    if not most or most >= len(examples):
        return examples
    return [examples[i] for i in sorted(shuffled(np.arange(most), len(examples), 0, 0))]


@functools.lru_cache(8)
def load_split(name, split, tokenizer, block_size, stride, data_dir, extra_train, most):
    """Split of a task in a tokenizer's ids, kept for the trials that follow."""
    examples, skipped = load_examples(name, split, data_dir)
    if split == 'train' and extra_train and TASKS[name].head == 'span':
        more, bad = read_file(name, extra_train, split)
        examples, skipped = examples + more, dict(collections.Counter(skipped) + collections.Counter(bad))
    examples = some(examples, most)
    return Split(examples, HEADS[TASKS[name].head].features(examples, tokenizer, block_size, stride), skipped)


def majority_of(name, train, n):
    """n predictions that know nothing: the most frequent training label, or the mean of numbers."""
    if TASKS[name].head == 'regress':
        return np.full(n, np.mean([example.label for example in train]))
    span = TASKS[name].head == 'span'
    labels = [example.label[0][0] if span and example.label else example.label for example in train]
    most = collections.Counter(labels).most_common(1)[0][0]
    return [most or ''] * n if span else np.full(n, most)


def score(name, examples, predictions):
    """{metric: value} of predictions, one for each example, as fractions."""
    if TASKS[name].head == 'span':
        targets = [tuple(text for text, _ in example.label) for example in examples]
    else:
        targets = np.array([example.label for example in examples])
    return {metric: float(METRICS[metric](targets, predictions)) for metric in TASKS[name].metrics}


def best_scores(task, examples, records):
    """SQuAD v2.0's best_exact and best_f1: at the threshold of no answer that is best for each."""
    if not task.unanswerable:
        return {}
    targets = [tuple(text for text, _ in example.label) for example in examples]
    texts, gaps = ([record[key] for record in records] for key in ('best', 'null_difference'))
    return {f'best_{metric}': best_threshold(targets, texts, gaps, metric)[0] for metric in task.metrics}


# ---- evaluation ----

@torch.no_grad()
def evaluate(model, head, features, special, settings, ranks, device, dtype, fraction=0.0):
    """Outputs of the head for each feature, in order, of whole batches that the processes share.

    fraction  of the mean embedding norm that Gaussian noise has; batches draw it from their number alone
    """
    model.eval()
    lengths = [max(len(ids) for ids, _ in feature.rows) for feature in features]
    order, found = np.argsort(lengths, kind='stable'), []
    length = settings.block_size if settings.pad_to_block else 0
    size = max(1, EVAL_ROWS // max(len(feature.rows) for feature in features))
    hooks = [noisy(model, head, features, special, device, fraction)] if fraction else []
    for number, begin in enumerate(range(0, len(order), size)):
        if number % ranks.world == ranks.rank:
            chosen = order[begin:begin + size]
            rows = [features[i] for i in chosen]
            batch = micro_batches(collate(rows, special, head.choices, length), size, device)[0]
            del batch['targets']
            seed_step(0, number, 0)
            seed_device(device)
            with autocast(device, dtype):
                logits = model(**batch)
            found += zip(chosen.tolist(), head.outputs(to_host(logits, device), rows, settings), strict=True)
    for hook in hooks:
        hook.remove()
    model.train()
    outputs = dict(ranks.gather(found))
    assert len(outputs) == len(features)
    return [outputs[i] for i in range(len(features))]


def noisy(model, head, features, special, device, fraction):
    """Add spherical Gaussian noise to what the first block reads.  Kowsher et al. 2024, section 3

    Its norm is `fraction` of the mean norm of the embeddings of the evaluated tokens, at every token.
    """
    total, n = 0.0, 0
    for begin in range(0, len(features), 64):
        batch = micro_batches(collate(features[begin:begin + 64], special, head.choices), 64, device)[0]
        ids, segments, mask = (batch[key].flatten(0, -2) for key in ('ids', 'segments', 'attention_mask'))
        norms, mask = to_host((model.encoder.embed(ids, segments).norm(dim=-1), mask), device)
        norms = norms[mask]
        total, n = total + norms.sum().item(), n + norms.numel()

    def add(module, inputs, x):
        direction = torch.randn_like(x)
        return x + direction / direction.norm(dim=-1, keepdim=True) * (fraction * total / n)

    return model.encoder.dropout.register_forward_hook(add)


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
    check_knobs({**config, **chosen}, AT_LEAST, BELOW, AT_MOST)
    choose('schedule', chosen['schedule'], SCHEDULE)
    choose('pooling', chosen['pooling'], POOLING)
    if 0 < chosen['block_size'] < 8:
        raise UserError(f"block_size={chosen['block_size']}: must be at least 8, or 0: the pretrained length")
    choose(f'{name}: metric', chosen['metric'], {'': None, **dict.fromkeys(TASKS[name].metrics)})
    return chosen


class Trial:
    """One task fine-tuned with one seed from one start, in a folder of its own."""

    def __init__(self, source, name, seed, config):
        self.source, self.name, self.seed, self.config = source, name, seed, config
        self.task, self.head, self.recipe = TASKS[name], HEADS[TASKS[name].head], recipe(config, name)
        self.metric = self.recipe['metric'] or self.task.metrics[0]
        self.run, self.step = label(source)
        self.weights = digest_of(source)
        at = self.run if self.step is None else f'{self.run}@{self.step}'
        self.folder = os.path.join(config['out_dir'], at, f'{name}_{seed}')

    def result(self):
        """What the finished trial left, or None.  Raises UserError when it is of another recipe."""
        path = os.path.join(self.folder, 'result.json')
        if not os.path.exists(path):
            return None
        try:
            with open(path) as file:
                result = json.load(file)
            refuse_difference(path, result['recipe'], self.recipe, 'the recipe')
            refuse_difference(path, result, {'weights': self.weights}, 'the pretrained model')
        except (json.JSONDecodeError, KeyError):
            raise UserError(f'{path}: not a result of finetune.py; remove {self.folder}') from None
        return result

    def open(self, ranks, device, dtype, stop):
        """Make the model from its start; needed before the methods below."""
        self.ranks, self.device, self.dtype, self.stop = ranks, device, dtype, stop
        self.start = read_start(self.source, self.config['tokenizer'], self.config['lower_case'])
        self.settings = SimpleNamespace(**{**self.config, **self.recipe})
        self.settings.unanswerable = self.task.unanswerable
        self.settings.pad_to_block = self.settings.pad_to_block or queued(device)      # one length, one graph
        self.settings.block_size = self.settings.block_size or self.start.config.block_size
        torch.manual_seed(self.seed)
        model = make_classifier(self.start, self.head, self.settings, max(1, len(self.task.labels)))
        self.model = place(model, device)

    def split(self, split, name=''):
        """Split of this trial's task or of another, in this trial's tokens."""
        s = self.settings
        most = {'train': s.train_samples}.get(split, s.eval_samples if split.startswith('dev') else 0)
        return load_split(name or self.name, split, self.start.tokenizer, s.block_size, s.stride, s.data_dir,
                          s.extra_train, most)

    def dev(self):
        """{column: Split} of the evaluation sets."""
        return {column: self.split(split) for column, split in splits_of(self.name, 'dev').items()}

    def train(self):
        """Fine-tune, from the folder's newest checkpoint if it has one.  False: a signal stopped it."""
        s, ranks = self.settings, self.ranks
        os.makedirs(self.folder, exist_ok=True)
        form = self.start.tokenizer.special, self.head.choices, s.block_size if s.pad_to_block else 0
        batches = Batches(self.split('train').features, self.seed, s.total_batch,
                          ranks.share(s.total_batch), form)
        self.steps, every = batches.per_epoch * s.epochs, s.eval_interval or batches.per_epoch
        step, learner = self.resume(), Learner(self.model, self.head.losses)
        wrapped = compiled_or_eager(learner, s.compile, batches.batch(0), s.batch_size, self.device,
                                    self.dtype)
        wrapped = wrap(wrapped, ranks, self.device, unused=s.pooling == 'layerwise')   # in the last block
        log = Log(self.folder, step, ranks, s.wandb_project, self.config)
        logged, spent, since = step, 0.0, time.perf_counter()   # the last log line, steps since, this step
        for batch in prefetch(batches.batch, range(step, self.steps)):
            reading = reads_at(step + 1, self.device, (self.steps,), s.log_interval, every,
                               s.checkpoint_interval)
            rate, loss, norm, stopping = self.update(wrapped, batch, step, reading)
            seconds = time.perf_counter() - since
            self.seconds[step // batches.per_epoch] += seconds
            step, spent = step + 1, spent + seconds
            if step % s.log_interval == 0 or step == self.steps:
                speed = (step - logged) * s.total_batch / spent
                eta = clock((self.steps - step) * s.total_batch / speed)
                graphs = compilations(self.device)
                text = (f'{self.name} seed {self.seed} step {step}/{self.steps}: loss {loss:.4f}, '
                        f'lr {rate:.2e}, norm {norm:.2f}, {speed:,.1f} examples/s, eta {eta}'
                        f"{''.join(f', {key} {n}' for key, n in graphs.items())}")
                log.write('train', step, text, loss=loss, lr=rate, norm=norm, examples_per_second=speed,
                          **graphs)
                logged, spent = step, 0.0
            progress_bar(step, self.steps, ranks)
            if step % every == 0 or step == self.steps:
                self.validate(step, log)
            due = s.checkpoint_interval and step % s.checkpoint_interval == 0
            if step < self.steps and (due or stopping):
                self.save(step)
            since = time.perf_counter()
            if stopping and step < self.steps:
                return False
        return True

    def update(self, wrapped, batch, step, reading):
        """One step; returns (learning rate, loss, gradient norm, signals that ask for the end)."""
        s = self.settings
        warmup = round(s.warmup_fraction * self.steps)
        rate = rate_at(step, s.learning_rate, s.min_lr, warmup, self.steps, s.schedule)
        parts = micro_batches(batch, s.batch_size, self.device)
        seed_step(self.seed, step, self.ranks.rank)
        counts = torch.tensor([float(batch['weights'].sum()), len(self.stop)]).to(self.device)
        count, stopping = self.ranks.sum(counts)
        loss, norm = optimizer_step(wrapped, self.model, self.optimizer, self.scaler, parts, count, rate,
                                    s.grad_clip, self.ranks, self.device, self.dtype,
                                    f'{self.name} seed {self.seed}, step {step}', reading)
        return rate, loss, norm, stopping.item() if reading else 0

    def resume(self):
        """Make the optimizer; returns the step of the checkpoint that training goes on from, or 0."""
        s = self.settings
        self.optimizer = make_optimizer(self.model, s.learning_rate, (s.beta1, s.beta2), s.adam_eps,
                                        s.weight_decay, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.best, self.seconds = {}, [0.0] * s.epochs
        examples = repr(self.split('train').examples).encode()
        self.examples = hashlib.sha256(examples).hexdigest()
        path = self.ranks.agree(newest_checkpoint(self.folder) if self.ranks.main else None)
        if path is None:
            return 0
        content = read_checkpoint(path)
        refuse_difference(path, content['config'], self.recipe, 'the recipe')
        refuse_difference(path, content, {'weights': self.weights, 'examples': self.examples},
                          'what it was made from')
        self.model.load_state_dict(content['model'])
        load_optimizer(self.optimizer, content['optimizer'])
        if content['scaler'] and self.scaler.is_enabled():
            self.scaler.load_state_dict(content['scaler'])
        self.best, self.seconds = content['best'], content['seconds']
        return content['step']

    def save(self, step):
        if self.ranks.main:
            write_checkpoint(os.path.join(self.folder, checkpoint_name(step)), {
                'step': step, 'model': to_host(self.model.state_dict(), self.device),
                'optimizer': to_host(self.optimizer.state_dict(), self.device),
                'scaler': self.scaler.state_dict(), 'config': self.recipe,
                'model_config': asdict(self.model.config), 'weights': self.weights, 'examples': self.examples,
                'best': self.best, 'seconds': self.seconds})
            prune_checkpoints(self.folder, 1, ())

    def predict(self, examples, features, fraction=0.0):
        """(predictions, records) of this model; fraction: of noise, see noisy."""
        outputs = evaluate(self.model, self.head, features, self.start.tokenizer.special, self.settings,
                           self.ranks, self.device, self.dtype, fraction)
        return self.head.predictions(examples, features, outputs, self.settings)

    def validate(self, step, log):
        """Score the evaluation sets; keep what is best so far, or last, as the recipe has it."""
        scores, records = {}, []
        for column, (examples, features, _) in self.dev().items():
            predictions, found = self.predict(examples, features)
            scores[column] = score(self.name, examples, predictions) | best_scores(self.task, examples, found)
            records += [{'column': column, 'id': example.id, **record}
                        for example, record in zip(examples, found, strict=True)]
        value = scores[self.name][self.metric]
        keep = self.settings.keep_best
        if not keep or value > self.best.get('value', -math.inf):
            weights = {key: tensor.cpu().clone() for key, tensor in self.model.state_dict().items() if keep}
            self.best = {'step': step, 'value': value, 'scores': scores, 'records': records,
                         'weights': weights}
        text = '; '.join(f'{column} {100 * forms[self.metric]:.2f}' for column, forms in scores.items())
        log.write('val', step, f'{self.name} seed {self.seed} step {step}: {self.metric} of {text}',
                  **scores[self.name])

    def finish(self):
        """Write predictions, weights and result.json of a trained trial, remove its checkpoints."""
        if self.best['weights']:
            self.model.load_state_dict(self.best['weights'])
        train, dev = self.split('train'), self.dev()
        result = {
            'init': self.run, 'step': self.step, 'model': asdict(self.model.config), 'task': self.name,
            'seed': self.seed, 'metric': self.metric, 'scores': self.best['scores'],
            'majority': {column: score(self.name, found.examples, majority_of(
                self.name, train.examples, len(found.examples))) for column, found in dev.items()},
            'n_train': len(train.examples), 'n_dev': {column: len(dev[column].examples) for column in dev},
            'skipped': {'train': train.skipped, **{column: dev[column].skipped for column in dev}},
            'epochs': self.settings.epochs, 'steps': self.steps, 'best_step': self.best['step'],
            'seconds': self.seconds, 'seconds_per_epoch': float(np.median(self.seconds)),
            'parameters': count_parameters(self.model), 'weights': self.weights, 'examples': self.examples,
            'recipe': self.recipe, 'device': device_name(self.device),
            'date': time.strftime('%Y-%m-%dT%H:%M:%S%z')}
        if self.ranks.main:
            lines = [json.dumps(record, ensure_ascii=False) + '\n' for record in self.best['records']]
            write_whole(os.path.join(self.folder, 'predictions.jsonl'), ''.join(lines))
            if self.config['keep_models']:
                write_checkpoint(os.path.join(self.folder, 'model.pt'), {
                    'step': self.best['step'], 'model': to_host(self.model.state_dict(), self.device),
                    'config': {**self.recipe, 'tokenizer': self.start.folder},
                    'model_config': asdict(self.model.config), 'data': self.start.data})
            self.write(result)
            for path in checkpoints(self.folder):
                os.remove(path)
        return result

    def write(self, result):
        write_whole(os.path.join(self.folder, 'result.json'), json.dumps(result, indent=1))

    def load(self):
        """The weights of this trial when it finished."""
        path = os.path.join(self.folder, 'model.pt')
        if not os.path.exists(path):
            raise UserError(f'{path}: not kept, but noise, cross and predict need it; remove its folder and '
                            'run again with --keep_models=true')
        self.model.load_state_dict(read_checkpoint(path)['model'])

    def add_noise(self, result, levels):
        """Scores of the evaluation sets at each level of noise."""
        for column, (examples, features, _) in self.dev().items():
            found = result.setdefault('noise', {}).setdefault(column, {})
            for level in levels:
                predictions = self.predict(examples, features, level)[0]
                found[str(level)] = score(self.name, examples, predictions)[self.metric]

    def add_cross(self, result, others):
        """Accuracy of this model on other tasks, as "does one text hold of the other: yes or no".

        Kowsher et al. 2024, table 6. The label that means yes is `positive` of a row (entailment, duplicate,
        equivalent); neutral and contradiction are no, like the rest. On its own task a model has all labels.
        """
        found = result.setdefault('cross', {})
        found[self.name] = result['scores'][self.name]['accuracy']
        for other in others:
            if other != self.name:
                examples, features, _ = self.split('dev', other)
                says = self.predict(examples, features)[0] == self.task.labels.index(self.task.positive)
                truth = np.array([example.label for example in examples])
                truth = truth == TASKS[other].labels.index(TASKS[other].positive)
                found[other] = float((says == truth).mean())

    def submit(self, wanted):
        """Write predictions for unlabelled examples; returns the paths."""
        splits = splits_of(self.name, 'test')
        if wanted == 'test' and not splits:
            raise UserError(f'{self.name}: no test file is published; name one, as in --predict=FILE')
        if wanted == 'test':
            found = {column: self.split(split)[:2] for column, split in splits.items()}
        else:
            s, examples = self.settings, read_file(self.name, wanted)[0]
            features = self.head.features(examples, self.start.tokenizer, s.block_size, s.stride)
            found = {self.name: (examples, features)}
        paths = []
        for column, (examples, features) in found.items():
            predictions = self.predict(examples, features)[0]
            if self.ranks.main:
                paths.append(write_submission(self.name, column, self.folder, examples, predictions))
        return paths


# ---- the report: rows of the papers ----

@functools.cache
def read_papers():
    """What the papers print, in points, from results/papers.json: {paper: {'tables': [...], ...}}.

    A column is 'column.metric', of `averages` the places of their columns; a row is 'words, more; values,
    averages (sd)' and stands beside ours if our model has all of its words.
    """
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'results', 'papers.json')) as file:
        return json.load(file)


SIZES = {(4, 512): 'small', (12, 768): 'base', (24, 1024): 'large'}         # (n_layer, n_embd)


def printed(table, models):
    """{name: {label: points or {'mean', 'sd'}}} of the rows that fit `models`, sets of words.

    All rows if a model has no counterpart.
    """
    labels = [*table['columns'].split(), *table.get('averages', ())]
    found = {}
    for name, numbers in (row.split(';') for row in table['rows']):
        values = [{'mean': float(mean), 'sd': float(sd)} if sd else float(mean)
                  for mean, sd in re.findall(r'([\d.]+)(?: \(([\d.]+)\))?', numbers)]
        found[name] = dict(zip(labels, values, strict=True))
    fits = [{name for name in found if set(name.split(',')[0].split()) <= model} for model in models]
    return {name: row for name, row in found.items() if not all(fits) or name in set().union(*fits)}


# ---- the report: statistics ----

def t_quantile(freedom, inside=0.95):
    """t with P(|T| <= t) = inside, by bisection, for an int `freedom`.  Abramowitz and Stegun 26.7.3-4"""
    odd, low, high = freedom % 2, 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        term = total = math.cos(angle) ** odd * (freedom > 1)
        for i in range(2 + odd, freedom, 2):
            term *= (i - 1) / i * math.cos(angle) ** 2
            total += term
        total *= math.sin(angle)
        chance = 2 / math.pi * (angle + total) if odd else total
        low, high = (angle, high) if chance < inside else (low, angle)
    return math.tan(low) * math.sqrt(freedom)


def t_interval(values):
    """(mean, sample sd, half the width of the 95 % confidence interval); of one value (mean, None, None)."""
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, None, None
    sd = float(np.std(values, ddof=1))
    return mean, sd, t_quantile(len(values) - 1) * sd / math.sqrt(len(values))


def stat(seeds):
    """{seed: value} -> {'mean', 'sd', 'half', 'n'}, None if empty."""
    if not seeds:
        return None
    mean, sd, half = t_interval(list(seeds.values()))
    return {'mean': mean, 'sd': sd, 'half': half, 'n': len(seeds)}


def paired(ours, theirs):
    """The stat of ours - theirs over common seeds."""
    return stat({seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs})


def gather(trials, tables):
    """{init: {step: {label: {seed: points}}}}; an average has the seeds that ran all of its columns.

    The most frequent label is an init as well, ''.  Of a repeated trial the last counts.
    """
    runs = {}
    for trial in trials:
        for init, step, what in ((trial['init'], trial['step'], 'scores'), ('', None, 'majority')):
            run = runs.setdefault(init, {}).setdefault(step, {})
            for column, metrics in trial[what].items():
                for metric, value in metrics.items():
                    run.setdefault(f'{column}.{metric}', {})[trial['seed']] = 100 * value
    for run in (run for steps in runs.values() for run in steps.values()):
        for name, keys in (item for table in tables for item in table['averages'].items()):
            rows = [run.get(key, {}) for key in keys]
            run[name] = {seed: sum(row[seed] for row in rows) / len(rows)
                         for seed in rows[0] if all(seed in row for row in rows)}
    return runs


def layouts(book, trials, models):
    """The paper's tables that share a column with the trials, then one of the columns in none of them."""
    ran = {column: f"{column}.{trial['metric']}" for trial in trials for column in trial['scores']}
    tables, rest, found = [], dict(ran), []
    for table in book.get('tables', ()):
        columns = {key.split('.')[0] for key in table['columns'].split()}
        tables += [table] if columns & ran.keys() else []
        rest = {column: key for column, key in rest.items() if column not in columns}
    if rest:
        places = [i for i, column in enumerate(rest) if column != 'wnli']       # left out of GLUE's averages
        tables.append({'title': 'Other tasks' if tables else 'Scores', 'columns': ' '.join(rest.values()),
                       'averages': {} if tables or len(places) < 2 else {'average': places}, 'rows': ()})
    for table in tables:
        columns = table['columns'].split()
        averages = {name: [columns[i] for i in places] for name, places in table.get('averages', {}).items()}
        found.append({'title': table['title'], 'note': table.get('note', ''), 'labels': [*columns, *averages],
                      'averages': averages, 'paper': printed(table, models)})
    return found


def curve(steps, label):
    """Score by pretraining step, and the first step with 95 % of the last.  Courtois et al. 2024, figure 3"""
    points = [{'step': step, **stat(run[label])} for step, run in steps.items() if run.get(label)]
    if len(points) < 2:
        return None
    aim = 0.95 * points[-1]['mean']
    return {'points': points, 'aim': aim,
            'reached': next((point['step'] for point in points if point['mean'] >= aim > 0), None)}


def matrix(entries, table, models, finish=dict):
    """{name: {column: stat or points}}: ours from (trial, task, {column: score}), and the paper's."""
    found = {}
    for trial, task, scores in entries:
        for column, value in finish(scores).items():
            row = found.setdefault(f"{trial['init']}, {task}", {})
            row.setdefault(column, {})[trial['seed']] = 100 * value
    columns = dict.fromkeys(column for row in found.values() for column in row)
    rows = {name: {column: stat(row.get(column)) for column in columns} for name, row in found.items()}
    for name, row in printed(table, models).items() if table else ():
        if name.split(', ')[1] in {task for _, task, _ in entries}:
            rows[f'paper: {name}'] = {column: finish(row).get(column) for column in columns}
    return rows


def with_drop(levels):
    """{level: score} in order of the levels, and what is lost from the first to the last."""
    order = sorted(levels, key=float)
    return {**{f'{float(level):g}': levels[level] for level in order},
            f'drop at {float(order[-1]):g}': levels[order[0]] - levels[order[-1]]}


def seconds(trials, compare):
    """{task: {init: {'mean', 'ratio'}}}: seconds an epoch, and relative to compare's."""
    found = {}
    for trial in trials:
        row = found.setdefault(trial['task'], {})
        row.setdefault(trial['init'], []).append(trial['seconds_per_epoch'])
    for row in found.values():
        means = {init: float(np.mean(times)) for init, times in row.items()}
        row.update({init: {'mean': mean, 'ratio': mean / means[compare] if compare in means else None}
                    for init, mean in means.items()})
    return found


def summary(trials, paper='', compare=''):
    """What the report says, in points, as JSON can hold it.

    trials   finished trials of one or several inits and steps; an init is judged by its last step
    paper    of results/papers.json or '': its columns, metrics, averages and rows
    compare  an init or '': differences from it are paired by seed, once it has trials
    Raises UserError.
    """
    if not trials:
        raise UserError('nothing to report: no trial has finished yet')
    book = choose('paper', paper, read_papers()) if paper else {}
    trials = sorted(trials, key=lambda trial: trial['step'] or 0)
    inits = {trial['init']: {key: trial[key] for key in ('step', 'model', 'device', 'date')}
             for trial in trials}                                               # of the last step
    models = [{one['model'].get(key) for key in ('attention', 'position', 'norm', 'pooling')}
              | {SIZES.get((one['model']['n_layer'], one['model']['n_embd']))} for one in inits.values()]
    tables = layouts(book, trials, models)
    labels = [label for table in tables for label in table['labels']]
    runs = gather(trials, tables)
    last = {init: list(steps.values())[-1] for init, steps in runs.items()}
    final = [trial for trial in trials if trial['step'] == inits[trial['init']]['step']]
    noise = [(trial, *item) for trial in final for item in (trial.get('noise') or {}).items()]
    cross = [(trial, trial['task'], trial['cross']) for trial in final if trial.get('cross')]
    return {
        'unit': 'points', 'paper': paper, 'compare': compare, 'inits': inits,
        'tables': tables,
        'scores': {init: {label: stat(seeds) for label, seeds in run.items()} for init, run in last.items()},
        'differences': {init: {label: paired(last[init].get(label, {}), last[compare].get(label, {}))
                               for label in labels} for init in inits if compare in inits if init != compare},
        'curves': {init: {label: found for label in labels if (found := curve(runs[init], label))}
                   for init in inits if len(runs[init]) > 1},
        'noise': matrix(noise, book.get('noise'), models, with_drop),
        'cross': matrix(cross, book.get('cross'), models), 'seconds': seconds(trials, compare),
        'counts': {trial['task']: {key: trial[key] for key in ('n_train', 'n_dev', 'skipped', 'epochs')}
                   for trial in trials}}


# ---- the report: text and plot ----

def show(value):
    """Points with two decimals, a stat as mean (sd), '-' if there is none."""
    if isinstance(value, dict):
        return show(value['mean']) + (f" ({value['sd']:.2f})" if value.get('sd') is not None else '')
    return '-' if value is None else f'{value:.2f}'


def grid(title, header, rows, notes=()):
    """A heading, a Markdown table and notes under it; nothing without rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, ['---'] * len(header), *rows)]
    return [f'## {title}', '', *lines, '', *(f'{note}\n' for note in notes if note)] if len(lines) > 2 else []


def score_lines(table, found):
    """Ours, the majority class and the paper's rows in a table's columns, and why an average is absent."""
    labels, rows, notes = table['labels'], [], [table['note']]
    for init in found['inits']:
        stats = [found['scores'][init].get(label) for label in labels]
        rows += [[f'ours: {init}', *map(show, stats)],
                 ['± 95 %', *(show(cell and cell['half']) for cell in stats)],
                 ['seeds', *(cell['n'] if cell else '-' for cell in stats)]]
        for name, keys in table['averages'].items():
            missing = [key for key in keys if not found['scores'][init].get(key)]
            if not found['scores'][init][name]:
                notes.append(f"No {name} of {init}: missing {', '.join(missing) or 'a seed with all'}.")
    rows.append(['majority', *(show(cell and cell['mean']) for cell in map(found['scores'][''].get, labels))])
    rows += [[f'paper: {name}', *map(show, row.values())] for name, row in table['paper'].items()]
    return grid(table['title'], ['', *labels], rows, notes)


def curve_lines(init, curves, note):
    """Score by pretraining step, and where 95 % of the last score is reached."""
    steps = sorted({point['step'] for one in curves.values() for point in one['points']})
    cells = {(label, point['step']): point for label, one in curves.items() for point in one['points']}
    rows = [[f'{step:,}', *(show(cells.get((label, step))) for label in curves)] for step in steps]
    reached = [one['reached'] for one in curves.values()]
    rows += [['95 % of the last', *(show(one['aim']) for one in curves.values())],
             ['reached at', *('-' if step is None else f'{step:,}' for step in reached)]]
    return grid(f'{init} by pretraining step', ['step', *curves], rows, [note])


def cost_lines(found, note):
    """Seconds an epoch, and the examples that were read and left out."""
    inits, times, read = found['inits'], [], []
    others = list(found['differences'])
    for task, row in found['seconds'].items():
        times.append([task, *(show(row.get(init)) for init in inits),
                      *(show(row.get(init, {}).get('ratio')) for init in others)])
    for task, one in found['counts'].items():
        skipped = [f'{split} {number:,} {reason}' for split, reasons in one['skipped'].items()
                   for reason, number in reasons.items()]
        dev = ', '.join(f'{column} {number:,}' for column, number in one['n_dev'].items())
        read.append([task, one['epochs'], f"{one['n_train']:,}", dev, ', '.join(skipped) or 'none'])
    header = ['', *inits, *(f"{init} / {found['compare']}" for init in others)]
    return [*grid('Seconds an epoch', header, times, [note]),
            *grid('Examples', ['', 'epochs', 'train', 'dev', 'skipped'], read)]


def report(found):
    """A summary as Markdown; computes nothing."""
    inits, scores, book = found['inits'], found['scores'], read_papers().get(found['paper'], {})
    shape = ('attention', 'position', 'n_layer', 'n_head', 'n_embd')
    rows = [[init, '-' if one['step'] is None else f"{one['step']:,}", *(one['model'][key] for key in shape),
             one['device'], one['date']] for init, one in inits.items()]
    lines = grid(f"Fine-tuning: {', '.join(inits)}",
                 ['', 'step', *shape, 'device', 'date'], rows,
                 ['Points: mean (standard deviation) over seeds; ± 95 %: half the confidence interval.'])
    for table in found['tables']:
        lines += score_lines(table, found)
    for init, row in found['differences'].items():
        rows = [[label, show(cell), show(cell['half']), cell['n']] for label, cell in row.items() if cell]
        lines += grid(f"{init} - {found['compare']}, paired by seed", ['', 'mean', '± 95 %', 'seeds'], rows)
    for init, curves in found['curves'].items():
        lines += curve_lines(init, curves, book.get('curve'))
    every = dict.fromkeys(label for init in inits for label in scores[init] if '.' in label)
    lines += grid('Every metric', ['', *inits, 'majority'], [
        [label, *(show(scores[init].get(label)) for init in inits),
         show(scores[''].get(label, {}).get('mean'))]
        for label in every])
    for title, rows in (('Noise on the embeddings, as a fraction of their mean norm', found['noise']),
                        ('Trained on (rows), evaluated on (columns)', found['cross'])):
        lines += grid(title, ['', *next(iter(rows.values()), ())],
                      [[name, *map(show, row.values())] for name, row in rows.items()])
    return '\n'.join(lines + cost_lines(found, book.get('seconds')))


def trial_line(trial):
    """One line for a trial that ended: its metric (majority) by column; other metrics; time and best step."""
    task, metric = trial['task'], trial['metric']
    own = []
    for column, row in trial['scores'].items():
        name, word = (metric, 'majority ') if column == task else (column.removeprefix(f'{task}_'), '')
        own.append(f"{name} {100 * row[metric]:.2f} ({word}{100 * trial['majority'][column][metric]:.2f})")
    others = [f'{name} {100 * value:.2f}' for name, value in trial['scores'][task].items() if name != metric]
    return '; '.join([f"{task} seed {trial['seed']}: {', '.join(own)}", *filter(None, [', '.join(others)]),
                      f"{trial['seconds_per_epoch']:.0f} s an epoch, best at step {trial['best_step']}"])


def plot_curve(found, path):
    """PNG of a summary: averages, or else columns, by pretraining step; dashed: 95 % of the last."""
    lines = [(f'{init} {label}', label, one) for init, curves in found['curves'].items()
             for label, one in curves.items()]
    lines = [line for line in lines if '.' not in line[1]] or lines
    if not lines:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f'{path} needs matplotlib, which is not installed')
        return
    figure = Figure(figsize=(7, 4), layout='tight')
    axes = figure.subplots()
    for name, _, one in lines:
        steps, means = zip(*((point['step'], point['mean']) for point in one['points']), strict=True)
        drawn, = axes.plot(steps, means, 'o-', label=name)
        axes.axhline(one['aim'], color=drawn.get_color(), linestyle='--')
    axes.set(xlabel='pretraining step', ylabel='points')
    axes.legend()
    figure.savefig(path, dpi=120)


# ---- main ----

def label(source):
    """(pretraining run, its step or None) of a source, for names of folders and rows of tables."""
    if not source.endswith('.pt'):
        return os.path.basename(os.path.abspath(source)), None
    run, name = os.path.abspath(source).split(os.sep)[-2:]
    return (run, step_of(name)) if name.startswith('ckpt_') else (f'{run}_{name[:-3]}', None)


def find_sources(init_from, compare):
    """Sources of both knobs, those to compare with last.  Raises UserError where two have one name."""
    sources = find_starts(init_from)
    others = [source for source in (find_starts(compare) if compare else []) if source not in sources]
    names = [{label(source)[0] for source in group} for group in (sources, others)]
    if compare and (not others or names[0] & names[1]):
        raise UserError(f'compare={compare!r}: has the name of what it is compared with; rename a folder, or '
                        'give both to init_from, as a glob, for a curve')
    for i, source in enumerate(sources + others):
        twin = next((other for other in (sources + others)[:i] if label(other) == label(source)), None)
        if twin:
            raise UserError(f'{twin} and {source}: both are called {label(source)[0]}; rename a folder')
    return sources + others


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


def complete(trial, levels, others, predict, ranks, device, dtype, stop):
    """Train what is not finished and add what else is wanted.  Was anything done?  None: a signal stopped it.

    Works on a copy of the trial, so that its weights and optimizer are let go with it.
    """
    trial = copy.copy(trial)
    result = ranks.agree(trial.result() if ranks.main else None)
    before = result or {}
    noise_due = {str(level) for level in levels} - set(before.get('noise', {}).get(trial.name, {}))
    cross_due = set(others) - set(before.get('cross', {})) if trial.task.positive else ()
    if result and not (noise_due or cross_due or predict):
        return False
    trial.open(ranks, device, dtype, stop)
    if result:
        trial.load()
    elif trial.train():
        result = trial.finish()
        if ranks.main:
            print(trial_line(result), flush=True)
    else:
        return None
    if noise_due:
        trial.add_noise(result, levels)
    if cross_due:
        trial.add_cross(result, others)
    if (noise_due or cross_due) and ranks.main:
        trial.write(result)
    for path in trial.submit(predict) if predict else ():
        print(f'wrote {path}', flush=True)
    return True


def write_report(plan, config, show_it):
    """results.json and results.md of the trials of the plan that are finished, on stdout too if `show_it`."""
    results = [result for trial in plan if (result := trial.result())]
    if not results:
        return
    against = plan[-1].run if config['compare'] else ''         # what is compared with comes last
    found = summary(results, config['paper'], against)
    command = ' '.join(['python', os.path.basename(sys.argv[0]), *sys.argv[1:]])
    head = f"`{command}`, {results[-1]['device']}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    text = report(found)
    folder = config['out_dir']
    write_whole(os.path.join(folder, 'results.json'), json.dumps(
        {'command': command, 'config': config, 'summary': found, 'trials': results}, indent=1))
    write_whole(os.path.join(folder, 'results.md'), f'{head}\n\n{text}\n')
    if show_it:
        print(f'\n{text}', flush=True)
        plot_curve(found, os.path.join(folder, 'curve.png'))


def main():
    config, origins = configure(globals())
    ranks, torch_device = join_ranks(device)
    sharing = choose('parallel', parallel, {'trials': False, 'ddp': True})
    torch_dtype = choose_dtype(dtype, torch_device)
    check_knobs(config, {**AT_LEAST, 'total_batch': ranks.world if sharing else 1}, BELOW, AT_MOST)
    names, levels = find_tasks(tasks), noise_levels(noise)
    others = [name for name in names if TASKS[name].positive] if cross else []
    if predict not in ('', 'test') and len(names) > 1:
        raise UserError(f'predict={predict!r}: a file is of one task: choose it with --tasks, or write test')
    if paper:
        choose('paper', paper, read_papers())
    if ranks.main:
        hold(out_dir)

    # the plan: every trial, of which this process has a share
    sources = ranks.agree(find_sources(init_from, compare) if ranks.main else None)
    plan = [Trial(source, name, number, config) for source in sources for name in names
            for number in range(seed, seed + trials)]
    mine, turn = plan, ranks
    if ranks.world > 1 and not sharing:
        mine, turn = plan[ranks.rank::ranks.world], Ranks(local=ranks.local)
        dist.destroy_process_group()                    # they do not meet again, however long one takes
    else:
        watch(ranks, timeout)
    for trial in plan if sharing else ():
        check_knobs({**config, **trial.recipe}, {'total_batch': ranks.world}, {}, {})
    if ranks.main:
        write_manifest(out_dir, config, {'init_from': sources}, torch_device, ranks)
        done = sum(trial.result() is not None for trial in plan)
        print(knob_table(config, origins))
        print(f'{len(plan)} trials, {done} of them finished before; {torch_device}, {str(torch_dtype)[6:]}, '
              f'{ranks.world} process(es)', flush=True)

    stop, worked = catch_signals(), ranks.main
    for number, trial in enumerate(mine, 1):
        if turn.main:
            print(f'trial {number} of {len(mine)}: {trial.folder}', flush=True)
        outcome = complete(trial, levels, others, predict, turn, torch_device, torch_dtype, stop)
        if outcome and turn.main:
            write_report(plan, config, False)
        worked = worked or outcome
        if outcome is None or any(turn.gather(stop)):
            break
    if turn.main and worked and all(trial.result() for trial in plan):
        write_report(plan, config, True)                # by the process that finds all trials done
    stopped = turn.gather(stop)
    if stopped:
        say('stopped by a signal; the same command goes on from there')
    leave(turn, 128 + stopped[0] if stopped else 0)


if __name__ == '__main__':
    run(lambda: in_memory(main, globals()))
