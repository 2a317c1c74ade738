"""Text to tokens: read a corpus, tokenize it, hold out validation documents, write data/<name>/.

    $ python prepare_data.py config/data_wikitext.py
    $ python prepare_data.py --corpus='texts/*.jsonl.zst' --tokenizer=wordpiece:vocab.txt --name=mine
    $ python prepare_data.py config/data_c4.py --part=i/n       # automatic under torchrun or srun
    $ python prepare_data.py --check=data/mine                  # verify checksums of a prepared corpus

A corpus is a list of units: some local files (about 50 MB), a range of a large file, or files of a hub
dataset. Each unit is processed independently into one shard per split; unit_00017.json marks it as done. So
a repeated command resumes where the last one stopped, each of n machines that share data_dir takes every
n-th unit, and the process that finds all units done writes meta.json. The output does not depend on the
number of processes or machines. Documents keep the order of the source: train.py shuffles sequences.

data/<name>/ holds, for split in train and val and each unit:
    <split>_00017.bin       token ids, [SEP] after each document: <u2, or <u4 if vocab_size > 65536
    <split>_00017.idx       int64, index of the first token of each document, then the number of tokens
    <split>_00017.words     with a segmenter: uint8 per token, 1 where a word starts and at [SEP]
    unit_00017.json         counts, checksums and skipped rows of the unit
    units.json              list of units, made once: files, sizes, hub revision, package versions
    tokenizer/              the tokenizer's file, segmenter.model, settings.json, and word_start.bin:
                            (vocab_size,) uint8, 1 where an id can start a word, for whole-word masking
    docstrings.jsonl        corpus='docstrings' only: texts with package, file and line
    meta.json               description of the corpus, see write_meta
"""
from configurator import ROOT, UserError, check_limits, configure, run, say  # first: no traceback on Ctrl-C
import ast
import base64
import collections
import concurrent.futures
import contextlib
import functools
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing
import operator
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

corpus = 'docstrings'           # keys of CORPORA, e.g. books+wikipedia; a path, a glob, a hub id owner/name
path = ''                       # files for oscar and cluecorpussmall; other packages for docstrings
name = ''                       # folder under data_dir; empty: derived from the corpus
data_dir = 'data'               # folder of all prepared corpora
subset = ''                     # configuration of a hub dataset; empty: that in CORPORA
split = 'train'                 # split of a hub dataset
revision = ''                   # git revision of a hub dataset; empty: the newest (recorded in units.json)
text_field = 'text'             # field or column that holds the text
tokenizer = 'sentencepiece'     # or wordpiece, character, KIND:FILE, tiktoken:NAME; data/NAME: its tokenizer
vocab_size = 4096               # if trained here: 4096 for small models, 32000 for base, 12000 for Chinese
lower_case = True               # for uncased vocabularies; no effect on tiktoken or a given .model file
segmenter = ''                  # Chinese whole-word masking: jieba or sentencepiece[:FILE]; empty: none
segmenter_vocab = 16_000        # pieces of a sentencepiece segmenter trained here; more pieces: longer words
tokenizer_sample = 10_000_000   # characters to train them on; sentencepiece needs 25 bytes of memory for each
val_fraction = 0.01             # share of documents held out, by a hash of the text; 1: all of them
max_documents = 0               # limit, split equally among units, which keep their first documents; 0: all
max_bytes = 10_000_000          # longer records are skipped, longer .txt files cut between lines
unit_bytes = 50_000_000         # file bytes per unit; at least a thousandth of the corpus
num_proc = 0                    # worker processes; 0: one per core; the result does not depend on it
part = ''                       # prepare part i/n, as in 0/4; empty: rank/size of torchrun or srun, else all
check = ''                      # verify this prepared folder instead of preparing one

SPLITS = 'train', 'val'
NO_INTERNET = ('no internet access? train.py --dataset=docstrings, with any config, and finetune.py '
               '--tasks=docstrings need none')
FORMAT = 2                      # version of the folder layout; train.py refuses others
HASH_SEED = 1                   # for choosing documents to hold out and to sample
MOST_UNITS = 1000
BATCH = 500_000                 # characters tokenized at once
WHERE_ONLY = ('num_proc', 'data_dir', 'name', 'part', 'check')          # knobs that do not change the result
CJK = np.array([                # [first, end) code points that `tokenizers` splits off as Chinese
    (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x2A6E0), (0x2A700, 0x2B740),
    (0x2B740, 0x2B820), (0x2B920, 0x2CEB0), (0x2F800, 0x2FA20)]).ravel()        # in BERT 2B820, not 2B920
LIMITS = {                      # knob: (min, max)
    'vocab_size': (16, 10**6), 'segmenter_vocab': (16, 10**6), 'tokenizer_sample': (1000, 10**9),
    'val_fraction': (1e-12, 1), 'max_documents': (0, 10**12), 'max_bytes': (1000, 10**8),
    'unit_bytes': (1000, 10**12), 'num_proc': (0, 1024)}


# ---- rows (where, text, bad): bad is '' for a document, else the fault, with details in `text` ----

def check_text(value, most):
    """Any value -> (text, ''), or ('', fault) if it cannot be a document."""
    try:
        if isinstance(value, bytes):                            # from parquet; pyarrow would stop at an error
            value = value.decode()
        if not isinstance(value, str):
            return '', 'null' if value is None else 'not a string'
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeError:                                        # a lone surrogate too
        return '', 'invalid UTF-8'
    if not value or value.isspace():
        return '', 'empty'
    if '\0' in value:
        return '', 'NUL'
    return (value, '') if size <= most else ('', 'too long')


def pick_field(row, field, most):
    """(text, bad) of one record, a dict."""
    if not isinstance(row, dict):
        return '', 'not an object'
    if field not in row:
        return f"text_field '{field}' is not among {', '.join(map(str, row))}", 'missing field'
    return check_text(row[field], most)


OSCAR_BLOCKED = {'agressif', 'adult', 'cryptojacking', 'dangerous_material', 'phishing', 'warez', 'ddos',
                 'hacking', 'malware', 'mixed_adult', 'sect'}


def pick_oscar(row, _, most):
    """(text, bad) of an OSCAR record after the filter of Courtois et al. 2024, appendix A.

    22.01 has metadata.annotation and neither perplexity nor categories; 23.01 has metadata.quality_warnings,
    harmful_pp and categories. A missing field passes, except the language. bad is the first test failed.
    """
    text, bad = pick_field(row, 'content', most)
    meta = row.get('metadata') if isinstance(row, dict) else None
    if bad or not isinstance(meta, dict):
        return text, bad or 'no metadata'
    label = (meta.get('identification') or {}).get('label')
    perplexity = meta.get('harmful_pp')
    if str(label).lower() != 'en':
        return '', 'filtered: not English'
    if meta.get('quality_warnings') or meta.get('annotation') or meta.get('annotations'):
        return '', 'filtered: quality warning'
    if perplexity is not None and not 5 <= perplexity <= 100_000:
        return '', 'filtered: harmful_pp'
    if OSCAR_BLOCKED.intersection(meta.get('categories') or ()):
        return '', 'filtered: blocked category'
    return text, ''


PICKS = {'field': pick_field, 'oscar': pick_oscar}


def join_rows(rows, joined, most):
    """Rows of one line each -> documents of at most `most` bytes.

    joined  rows per document, or a regular expression that matches the first row of each document
    Blank rows are dropped and not counted as skipped.
    """
    first, lines, size = None, [], 0
    for where, text, bad in rows:
        if bad:
            if bad != 'empty':
                yield where, text, bad
            continue
        full = re.search(joined, text) if isinstance(joined, str) else len(lines) >= joined
        size += 4 * len(text)                                   # UTF-8: at most 4 bytes per character
        if lines and (full or size > most):
            yield first, '\n'.join(lines), ''
            lines, size = [], 4 * len(text)
        first = first if lines else where
        lines.append(text.strip('\n'))
    if lines:
        yield first, '\n'.join(lines), ''


# ---- readers of local files: (open file, begin, end, unit, most) -> rows; where = (begin, row number) ----

@contextlib.contextmanager
def named(source, fault='cannot be read from the Hugging Face hub'):
    """Turns an error of any class, from the libraries that read files and the hub, into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if 'hub' in fault and re.search('onnect|ffline|name res|imed out', text):
            text = f'{NO_INTERNET} ({text})'
        raise UserError(f'{source}: {fault}: {text}') from None


def open_bytes(file_name):
    """A buffered binary stream over a plain, .gz or .zst file; pyarrow notices truncated and damaged ones."""
    if not file_name.endswith(('.gz', '.zst')):
        return open(file_name, 'rb')
    arrow = need('pyarrow', 'reading compressed files')
    return io.BufferedReader(arrow.input_stream(file_name, compression='detect'))


def read_lines(file, begin, end, most):
    """Yields (where, line, bad) of the lines that begin at the bytes [begin, end).

    where  (begin, line number counted from begin)
    Longer lines than `most` bytes are never held in memory.
    """
    if begin:
        file.seek(begin - 1)
    for number in itertools.count(0 if begin else 1):           # 0: end of the line before, not yielded
        line = rest = file.readline(most + 1) if end is None or file.tell() < end else b''
        if not line:
            return
        while rest and not rest.endswith(b'\n'):
            rest = file.readline(most)
        text, bad = '', 'too long'
        if line.endswith(b'\n') or len(line) <= most:
            try:
                text, bad = line.decode('utf-8-sig' if (begin, number) == (0, 1) else 'utf-8'), ''
            except UnicodeDecodeError:
                bad = 'invalid UTF-8'
        if number:
            yield (begin, number), text, bad


def read_txt(file, begin, end, unit, most):
    """A document per file, or between blank lines; more than `most` bytes are cut between lines."""
    first, lines, size = 1, [], 0
    for (_, number), line, bad in read_lines(file, begin, end, most):
        if bad or '\0' in line:
            yield (0, number), '', bad or 'NUL'
            continue
        blank = unit['joined'] == 'to a blank line' and line.isspace()
        size += len(line.encode())
        if lines and (blank or size > most):
            yield (0, first), *check_text(''.join(lines), most)
            first, lines, size = number, [], len(line.encode())
        if not blank:
            lines.append(line)
    if lines:
        yield (0, first), *check_text(''.join(lines), most)


def texts_of(archive):
    """Names of the .txt files in a zipfile.ZipFile."""
    return [name for name in archive.namelist() if name.endswith('.txt') and not name.startswith('__MACOSX/')]


def read_zip(file, begin, end, unit, most):
    """Documents of the .txt files [begin, end) of an archive, see read_txt."""
    archive = zipfile.ZipFile(file)
    for name in texts_of(archive)[begin:end]:
        with io.BufferedReader(archive.open(name)) as text_file:        # three times as fast by lines
            for (_, number), text, bad in read_txt(text_file, 0, None, unit, most):
                yield (0, f'{name}:{number}'), text, bad


def read_jsonl(file, begin, end, unit, most):
    """One record per line; blank lines are ignored."""
    for where, line, bad in read_lines(file, begin, end, most):
        if bad:
            yield where, '', bad
        elif not line.isspace():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                yield where, '', 'broken JSON'
                continue
            yield where, *PICKS[unit['pick']](row, unit['field'], most)


def read_parquet(file, begin, end, unit, most):
    """One record per row, from the row groups [begin, end); a missing column is one bad row."""
    table = need('pyarrow.parquet', 'reading .parquet files').ParquetFile(file)
    number = sum(table.metadata.row_group(i).num_rows for i in range(begin))
    if unit['field'] not in table.schema_arrow.names:
        yield (0, number + 1), *pick_field(dict.fromkeys(table.schema_arrow.names), unit['field'], most)
        return
    groups = range(begin, table.num_row_groups if end is None else end)
    for batch in table.iter_batches(256, groups, [unit['field']], use_threads=False):
        column = batch.column(0)
        if str(column.type) in ('string', 'large_string'):
            column = column.cast('large_binary')                # see check_text
        for value in column.to_pylist():
            number += 1
            yield (0, number), *check_text(value, most)


FORMATS = {'': read_txt, '.txt': read_txt, '.zip': read_zip, '.json': read_jsonl, '.jsonl': read_jsonl,
           '.parquet': read_parquet}


def file_format(file_name):
    """The reader for the file's extension, or None."""
    return FORMATS.get(os.path.splitext(re.sub(r'\.(gz|zst)$', '', file_name))[1])


def read_unit(unit, config):
    """Rows of a unit, with where = (file or dataset, begin, row number)."""
    if unit['hub']:
        rows = read_hub(unit['hub'], unit['field'], config['max_bytes'])
        yield from join_rows(rows, unit['joined'], config['max_bytes']) if unit['joined'] else rows
    for file_name, begin, end, size in unit['pieces']:
        file_name = os.path.join(config['folder'], file_name)   # relative only for docstrings.jsonl
        with named(file_name, 'cannot be read'), open_bytes(file_name) as file:
            if end is not None and os.path.getsize(file_name) != size:
                raise UserError(f'{file_name}: had {size} bytes when its units were listed: bring that file '
                                f"back, or remove {config['folder']} to begin again")
            for where, text, bad in file_format(file_name)(file, begin, end, unit, config['max_bytes']):
                yield (file_name, *where), text, bad


# ---- listers: (source, subset, joined, config) -> (units, facts about the source for meta.json) ----

def new_unit(pick, field, joined, hub=(), size=0):
    """A unit: all that is needed to read it, and its size, by which take_sample weights it.

    pieces  of local files: [file, begin, end or None, file size]; in bytes, row groups or files of a .zip
    hub     or part i of n of a hub dataset: [id, subset, split, revision, keep files whole?, shards, n, i]
    """
    return {'pick': pick, 'field': field, 'pieces': [], 'hub': hub, 'joined': joined, 'bytes': size}


def find_files(source):
    """A file, a directory (searched to any depth) or a glob -> file names in sorted order."""
    if os.path.isdir(source):
        found = [os.path.join(folder, item) for folder, _, items in os.walk(source) for item in items]
    else:
        found = [source] if os.path.isfile(source) else glob.glob(source, recursive=True)
    found = sorted(os.path.abspath(item) for item in found if os.path.isfile(item))
    others = collections.Counter(os.path.splitext(item)[1] for item in found if not file_format(item))
    if others.total() == len(found):
        raise UserError(f'{source}: no .txt, .json, .jsonl or .parquet file (.gz, .zst too) or .zip is there')
    if others:
        say(f'{source}: {others.total()} files of an unknown format are not read: {count_kinds(others)}')
    return [item for item in found if file_format(item)]


def list_files(source, subset, joined, config, pick='field'):
    """Local files in units of about unit_bytes: small ones grouped, large ones cut if possible."""
    sizes = {file: os.path.getsize(file) for file in find_files(source)}
    most, units, whole = max(config['unit_bytes'], sum(sizes.values()) // MOST_UNITS), [], []
    for file, size in sizes.items():
        edges = cut_file(file, -(-size // most))
        whole += [file] if len(edges) == 2 and size > 2 * most else []
        for begin, end in itertools.pairwise(edges):
            if not units or units[-1]['bytes'] + size // (len(edges) - 1) > most:
                units.append(new_unit(pick, config['text_field'], joined))
            units[-1]['pieces'].append([file, begin, end, size])
            units[-1]['bytes'] += size // (len(edges) - 1)
    if whole:
        say(f'{source}: {len(whole)} large files cannot be cut and are a unit each, as {whole[0]}')
    return units, {'path': source, 'files': len(sizes), 'bytes': sum(sizes.values())}


def cut_file(file_name, n):
    """Boundaries of at most n pieces of a file, see new_unit; [0, None] if it cannot be cut."""
    kind, total = file_format(file_name) if n > 1 else None, 0
    with named(file_name, 'cannot be read'):
        if kind is read_parquet:
            total = need('pyarrow.parquet', 'reading .parquet files').read_metadata(file_name).num_row_groups
        elif kind is read_zip:
            total = len(texts_of(zipfile.ZipFile(file_name)))
        elif kind is read_jsonl and not file_name.endswith(('.gz', '.zst')):
            total = os.path.getsize(file_name)
    n = min(n, total)
    return [total * i // n for i in range(n + 1)] if n > 1 else [0, None]


@functools.lru_cache(4)
def open_hub(source, subset, split, revision, whole_files):
    """A streamed dataset, sharded by file, or by row group if there are few files that may be cut."""
    data = need('datasets', 'reading from the Hugging Face hub').load_dataset(
        source, subset or None, split=split, streaming=True, revision=revision)
    cut = not whole_files and data.num_shards < 256 and hasattr(data, 'reshard')       # newer versions
    return data.reshard() if cut else data


def list_hub(source, subset, joined, config):
    """A Hugging Face dataset, streamed at a pinned revision; files are not cut if rows are joined."""
    hub = need('huggingface_hub', 'reading from the Hugging Face hub')
    with named(source):
        pinned = hub.HfApi().dataset_info(source, revision=config['revision'] or None).sha
        dataset = [source, subset, config['split'], pinned, joined is not None]
        data = open_hub(*dataset)
        facts = (data.info.splits or {}).get(config['split'])
    n = min(data.num_shards, MOST_UNITS)
    size = (getattr(facts, 'num_bytes', 0) or 0) // n
    units = [new_unit('field', config['text_field'], joined, [*dataset, data.num_shards, n, i], size)
             for i in range(n)]
    return units, {'hub': source, 'subset': subset, 'split': config['split'], 'revision': pinned}


def read_hub(hub, field, most):
    *dataset, shards, n, i = hub
    where = f'{dataset[0]}, unit {i} of {n}' if n > 1 else dataset[0]
    with named(dataset[0]):
        data = open_hub(*dataset)
        if data.num_shards != shards:
            raise UserError(f'{dataset[0]}: {data.num_shards} shards, but {shards} when its units were '
                            'listed: use the same version of datasets')
        for number, row in enumerate(data.shard(n, i), 1):
            yield (where, 0, number), *pick_field(row, field, most)


def list_docstrings(source, subset, joined, config):
    """Docstrings of at least 40 characters of installed packages, without duplicates, in one file."""
    found = {package: find_package(package) for package in source.split()}
    files = [(package, root, item) for package, (root, _) in found.items() for item in python_files(root)]
    tasks = [(files[i:i + 50],) for i in range(0, len(files), 50)]
    lines, faults = {}, []                                      # {text: its line}
    parsed = in_parallel(parse_files, tasks, config['num_proc'])
    for package, where, text, bad in itertools.chain.from_iterable(parsed):
        if bad:
            faults.append((where, bad))
        else:
            lines.setdefault(text, json.dumps({'package': package, 'where': where, 'text': text}) + '\n')
    for where, bad in faults[:5]:
        say(f'skipped {where}: {bad}')
    file_name = os.path.join(config['folder'], 'docstrings.jsonl')
    write_bytes(file_name, ''.join(lines.values()).encode())
    units, _ = list_files(file_name, subset, joined, {**config, 'text_field': 'text'})
    for unit in units:
        unit['pieces'] = [['docstrings.jsonl', *rest] for _, *rest in unit['pieces']]
    return units, {'packages': {package: version for package, (_, version) in found.items()},
                   'files': len(files), 'skipped': collections.Counter(bad for _, bad in faults)}


def parse_files(files):
    """[(package, root, Python file)] -> [(package, where, text, bad)], one per docstring."""
    return [(package, *row) for package, root, item in files for row in parse_docstrings(root, item)]


def find_package(package):
    """(folder, version or '') of a package, found without importing it."""
    if package == 'stdlib':
        return sysconfig.get_path('stdlib'), platform.python_version()
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(f"docstrings: no package '{package}' is installed; pip install {package}, "
                        "or choose packages with --path='stdlib numpy'")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return found.submodule_search_locations[0], importlib.metadata.version(package)
    return found.submodule_search_locations[0], ''


def python_files(root):
    """Python files under `root`, sorted; skips site-packages, which is inside the stdlib folder."""
    for folder, folders, items in os.walk(root):
        folders[:] = sorted(set(folders) - {'site-packages', 'dist-packages', '__pycache__'})
        for item in sorted(items):
            if item.endswith('.py'):
                yield os.path.join(folder, item)


def parse_docstrings(root, file_name):
    """One Python file -> rows of its docstrings and of the texts in add_docstr calls."""
    where = os.path.join(os.path.basename(root), os.path.relpath(file_name, root))
    try:
        with open(file_name, 'rb') as file, warnings.catch_warnings():
            warnings.simplefilter('ignore')                     # invalid escapes in other people's strings
            tree = ast.parse(file.read())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [(f'{where}:{getattr(error, "lineno", 1) or 1}', '', 'does not parse')]
    rows, nodes = [], collections.deque([tree])
    while nodes:
        node = nodes.popleft()
        for part in ('body', 'orelse', 'handlers', 'finalbody'):
            children = getattr(node, part, None)                # not a list in a lambda
            nodes.extend(children if isinstance(children, list) else ())
        for text, line in docstrings_of(node):
            text, bad = check_text(inspect.cleandoc(text), 10**7)
            if bad or len(text) >= 40:
                rows.append((f'{where}:{line}', text, bad))
    return rows


def docstrings_of(node):
    """Yields (text, line) of a node's own docstring, or of the texts in an add_docstr call."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, 'value', None), str):
            yield first.value.value, first.lineno
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if re.search('add_(newdoc|docstr)', getattr(function, 'attr', getattr(function, 'id', ''))):
            for item in ast.walk(node):                     # as numpy, torch document C functions
                if isinstance(item, ast.Constant) and isinstance(item.value, str) and len(item.value) >= 80:
                    yield item.value, item.lineno


list_oscar = functools.partial(list_files, pick='oscar')        # 22.01 or 23.01, filtered
CORPORA = {
    # name         lister           source                                 subset                 rows joined
    'docstrings': (list_docstrings, 'stdlib torch numpy sympy networkx datasets', '',             None),
    'wikitext':   (list_hub,        'Salesforce/wikitext',                 'wikitext-103-raw-v1', '^ = [^=]'),
    'wikipedia':  (list_hub,        'wikimedia/wikipedia',                 '20231101.en',         None),
    'books':      (list_hub,        'SamuelYang/bookcorpus',               '',                    256),
    'c4':         (list_hub,        'allenai/c4',                          'en',                  None),
    'fineweb':    (list_hub,        'HuggingFaceFW/fineweb',               'sample-10BT',         None),
    'oscar':      (list_oscar,      '',                                    '',                    None),
    'cluecorpussmall': (list_files, '',                                    '',        'to a blank line'),
}


def find_corpus(config):
    """The knob `corpus` -> (default folder name, [(lister, source, subset, rows joined)])."""
    wanted = config['corpus']
    names = wanted.split('+')
    if all(item in CORPORA for item in names):
        if not all(config['path'] or CORPORA[item][1] for item in names):
            raise UserError(f"corpus='{wanted}' needs --path=<its files, their directory or a glob>")
        return '_'.join(names), [(lister, config['path'] or source, config['subset'] or subset, joined)
                                 for lister, source, subset, joined in (CORPORA[item] for item in names)]
    if os.path.exists(wanted) or glob.glob(wanted, recursive=True):
        stem = os.path.basename(os.path.abspath(wanted)).partition('.')[0]
        return re.sub(r'\W+', '_', stem).strip('_') or 'files', [(list_files, wanted, '', None)]
    if re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', wanted) and '.' not in os.path.splitext(wanted)[1]:
        return wanted.partition('/')[2], [(list_hub, wanted, config['subset'], None)]
    raise UserError(f"corpus='{wanted}': no such file; choose one of {', '.join(CORPORA)}, a path, a glob or "
                    'a hub id owner/name')


# ---- tokenizers: save(folder, argument, config, sample) writes a file, returns `facts` for __init__ ----

def save_sentencepiece(kind, folder, argument, config, sample):
    """Copy a given model or train config[kind.knob] pieces.  num_threads, fixed, affects the result."""
    model, target, size = io.BytesIO(), os.path.join(folder, kind.file_name), config[kind.knob]
    if argument:
        write_bytes(target, Path(argument).read_bytes())
        return {'trained': False}
    try:
        need('sentencepiece', 'this tokenizer').SentencePieceTrainer.train(
            sentence_iterator=(line for text in sample() for line in text.splitlines()), model_writer=model,
            vocab_size=size, model_type='unigram', character_coverage=0.9995, num_threads=8,
            normalization_rule_name='nmt_nfkc_cf' if config['lower_case'] else 'nmt_nfkc', minloglevel=2,
            pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece='[PAD]', unk_piece='[UNK]', bos_piece='[CLS]',
            eos_piece='[SEP]', control_symbols='[MASK]')
    except RuntimeError as error:
        most = re.search(r'value <= (\d+)', str(error))
        reason = f'this corpus allows at most {most[1]}' if most else str(error).rpartition('] ')[2].strip()
        raise UserError(f'{kind.knob}={size}: sentencepiece cannot train it: {reason}') from None
    write_bytes(target, model.getvalue())
    return {'trained': True}


def load_sentencepiece(folder, file_name):
    library, proto = need('sentencepiece', file_name), Path(folder, file_name).read_bytes()
    with contextlib.suppress(RuntimeError):
        if proto:                                               # b'' would count as no model given
            return library.SentencePieceProcessor(model_proto=proto)
    raise UserError(f'{file_name}: not a sentencepiece model')


class SentencePieceTokenizer:
    """Unigram sentencepiece, Kudo 2018, arXiv 1804.10959: trained on a sample, or a given .model.

    Unigram, because BPE encodes 3.5 times slower and gives 1 % more tokens on docstrings. If trained here:
    [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4; all but [UNK] are control symbols, which no text can
    produce. Those that a given model lacks are added after its pieces.
    """
    file_name, package, knob = 'sentencepiece.model', 'sentencepiece', 'vocab_size'
    save = classmethod(save_sentencepiece)
    names = {'pad': ('[PAD]', '<pad>'), 'cls': ('[CLS]', '<s>'), 'sep': ('[SEP]', '</s>'),
             'mask': ('[MASK]', '<mask>')}

    def __init__(self, folder, facts):
        self.home, self.facts, self.model = folder, facts, load_sentencepiece(folder, self.file_name)
        self.pieces = [self.model.id_to_piece(i) for i in range(len(self.model))]
        self.special = {'unk': self.model.unk_id()}
        for key, names in self.names.items():
            found = [i for i in map(self.model.piece_to_id, names) if self.model.is_control(i)]
            self.special[key] = found[0] if found else len(self.pieces)
            self.pieces += [] if found else [f'[{key.upper()}]']
        self.vocab_size, self.specials = len(self.pieces), set(self.special.values())

    def encode(self, texts):
        return self.model.encode(texts, num_threads=1)

    def encode_arrays(self, texts):                             # 10 % less time than encode
        return self.model.encode(texts, num_threads=1, return_type='numpy')

    def encode_offsets(self, texts):
        """Of each text: (ids, their (N, 2) first and last + 1 character in it; a space before may count)."""
        found = [self.model.encode(text, return_type='offset_mapping') for text in texts]
        return [(item['ids'], np.array(item['offsets'], np.int64).reshape(-1, 2)) for item in found]

    def decode(self, ids):
        return self.model.decode([int(i) for i in ids if i not in self.specials])

    def word_starts(self):
        return [piece.startswith('\u2581') for piece in self.pieces]

    def as_library(self, library):
        """As a tokenizers.Tokenizer, which sums scores in float64 where sentencepiece does in float32."""
        proto, normalizers = self.model.serialized_model_proto(), library.normalizers
        spec = need('sentencepiece', self.file_name).SentencePieceNormalizer(model_proto=proto)
        spec = spec.serialized_normalizer_spec()                # fields: 1 name, 2 table of characters
        tag = re.match(rb'(\n.\w*)?\x12[\x80-\xff]*[\x01-\x7f]', spec, re.DOTALL)
        steps = [normalizers.Precompiled(spec[tag.end():])] if tag else []      # it ignores later fields
        steps += [normalizers.Strip(), normalizers.Replace(library.Regex(' {2,}'), ' ')]
        scores = [self.model.get_score(i) if i < len(self.model) else 0.0 for i in range(self.vocab_size)]
        vocabulary = list(zip(self.pieces, scores, strict=True))
        model = library.Tokenizer(library.models.Unigram(vocabulary, self.special['unk'], False))
        model.normalizer = normalizers.Sequence(steps)
        model.pre_tokenizer = library.pre_tokenizers.Metaspace()
        model.decoder = library.decoders.Metaspace()
        return model

    def same(self, ids, others):
        """Whether ids are equal, or equal in score: float32 rounding decides between ties, as in `*****`."""
        scores = (sum(map(self.model.get_score, one)) for one in (ids, others))
        return ids == others or math.isclose(*scores, rel_tol=1e-5)


class WordPieceTokenizer:
    """BERT's WordPiece, Devlin et al. 2018, arXiv 1810.04805: ids are lines of vocab.txt."""
    file_name, package, same = 'vocab.txt', 'tokenizers', staticmethod(operator.eq)

    @staticmethod
    def save(folder, argument, config, sample):
        source = argument or 'google-bert/bert-base-uncased'
        if not os.path.isfile(source):
            with named(source, 'no such file, nor a vocab.txt of this name from the Hugging Face hub'):
                source = need('huggingface_hub', 'this tokenizer').hf_hub_download(source, 'vocab.txt')
        write_bytes(os.path.join(folder, 'vocab.txt'), Path(source).read_bytes())
        return {'lower_case': config['lower_case']}

    def __init__(self, folder, facts):
        self.home, self.facts, library = folder, facts, need('tokenizers', 'this tokenizer')
        text = Path(folder, self.file_name).read_bytes().decode('utf-8', 'replace')
        self.pieces = text.replace('\r\n', '\n').removesuffix('\n').split('\n')        # U+2028 may be a piece
        vocabulary = {piece: i for i, piece in enumerate(self.pieces)}
        missing = {'[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'} - set(vocabulary)
        if missing or len(vocabulary) < len(self.pieces):
            fault = f'{min(missing)} is missing' if missing else 'a line is repeated'
            raise UserError(f'{self.file_name}: not a BERT vocabulary: {fault}')
        self.model = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token='[UNK]'))
        self.model.normalizer = library.normalizers.BertNormalizer(lowercase=facts['lower_case'])
        self.model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()    # "[MASK]" -> "[", "mask", "]"
        self.model.decoder = library.decoders.WordPiece()
        self.special = {key: vocabulary[f'[{key.upper()}]'] for key in ('pad', 'unk', 'cls', 'sep', 'mask')}
        self.vocab_size, self.specials = len(self.pieces), set(self.special.values())

    def encode(self, texts):
        return [item.ids for item in self.model.encode_batch_fast(texts)]

    encode_arrays = encode                                      # lists work as well as arrays

    def encode_offsets(self, texts):
        """Of each text: (ids, their (N, 2) first and last + 1 character in it)."""
        return [(item.ids, np.array(item.offsets, np.int64).reshape(-1, 2))
                for item in self.model.encode_batch(texts)]

    def decode(self, ids):
        return self.model.decode([int(i) for i in ids if i not in self.specials])

    def word_starts(self):
        return [not piece.startswith('##') for piece in self.pieces]

    def as_library(self, library):
        """As a tokenizers.Tokenizer."""
        return library.Tokenizer.from_str(self.model.to_str())


class CharacterTokenizer(WordPieceTokenizer):
    """As Chinese BERT: one token per CJK character, WordPiece for the rest.

    If made here: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, then characters by descending frequency.
    """

    @staticmethod
    def save(folder, argument, config, sample):
        if argument:
            return WordPieceTokenizer.save(folder, argument, config, sample) | {'trained': False}
        pieces = character_vocabulary(need('tokenizers', 'this tokenizer'), config, sample)
        write_bytes(os.path.join(folder, 'vocab.txt'), '\n'.join([*pieces, '']).encode())
        return {'lower_case': config['lower_case'], 'trained': True}


def character_vocabulary(library, config, sample):
    """At most vocab_size pieces: characters by frequency, ties by code point.

    Each character is followed by its '##' piece, so that every word of known characters can be spelled,
    except CJK characters and punctuation, which are always words of their own.
    """
    normalizer = library.normalizers.BertNormalizer(lowercase=config['lower_case'])
    split, counts = library.pre_tokenizers.BertPreTokenizer().pre_tokenize_str, collections.Counter()
    for text in sample():
        counts.update(normalizer.normalize_str(text))
    pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
    for character in sorted(counts, key=lambda item: (-counts[item], item)):
        found = len(split(2 * character))                       # 0: white space, 2: punctuation
        grows = found == 1 and not is_cjk(ord(character))
        more = [character, '##' + character] if grows else [character] if found else []
        if len(pieces) + len(more) > config['vocab_size']:
            break
        pieces += more
    return pieces


def is_cjk(points):
    """Whether code points lie in CJK; an int or an array."""
    return np.searchsorted(CJK, points, side='right') % 2 == 1


class TiktokenTokenizer:
    """Byte-level BPE of tiktoken by name, or a local file of "base64 rank" lines with GPT-2's pattern.

    [PAD] [CLS] [SEP] [MASK] come after its ids; there is no [UNK]. A token starts a word unless it begins
    with a letter, a digit or bytes that are not valid UTF-8.
    """
    file_name, package, same = 'vocab.tiktoken', 'tiktoken', staticmethod(operator.eq)
    gpt2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    @classmethod
    def save(cls, folder, argument, config, sample):
        target = os.path.join(folder, cls.file_name)
        if os.path.isfile(argument):
            write_bytes(target, Path(argument).read_bytes())
            return {'name': os.path.basename(argument), 'pattern': cls.gpt2, 'ids': 0}
        with named(f"tokenizer='tiktoken:{argument}'", 'no such file, and tiktoken did not give it'):
            encoding = need('tiktoken', 'this tokenizer').get_encoding(argument)
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
        write_bytes(target, b''.join(b'%s %d\n' % (base64.b64encode(token), rank) for token, rank in ranks))
        return {'name': argument, 'pattern': encoding._pat_str, 'ids': encoding.n_vocab}

    def __init__(self, folder, facts):
        self.home, self.facts, library = folder, facts, need('tiktoken', 'this tokenizer')
        data = Path(folder, self.file_name).read_bytes()
        try:
            rows = [line.split() for line in data.split(b'\n') if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
        except ValueError:
            raise UserError(f'{self.file_name}: not a tiktoken file of "base64 rank" lines') from None
        if not {bytes([byte]) for byte in range(256)} <= set(ranks) or max(ranks.values()) > 10**7:
            raise UserError(f'{self.file_name}: a byte without a rank, or a rank that is too large')
        self.model = library.Encoding(facts['name'], pat_str=facts['pattern'], mergeable_ranks=ranks,
                                      special_tokens={})
        self.tokens = {rank: token for token, rank in ranks.items()}
        first = max(facts['ids'], max(self.tokens) + 1)         # some ids may have no token
        self.special = {key: first + i for i, key in enumerate(('pad', 'cls', 'sep', 'mask'))}
        self.pieces = [self.tokens.get(i, b'').decode('utf-8', 'replace') for i in range(first)]
        self.pieces += [f'[{key.upper()}]' for key in self.special]
        self.vocab_size = len(self.pieces)

    def encode(self, texts):
        return [self.model.encode_ordinary(text) for text in texts]

    encode_arrays = encode

    def encode_offsets(self, texts):
        """Of each text: (ids, their (N, 2) first and last + 1 character in it; a space before may count)."""
        rows = []
        for text, ids in zip(texts, self.encode(texts), strict=True):
            starts = self.model.decode_with_offsets(ids)[1]
            rows.append((ids, np.array([starts, [*starts[1:], len(text)]], np.int64).T[:len(ids)]))
        return rows

    def decode(self, ids):
        return b''.join(self.tokens.get(int(i), b'') for i in ids).decode('utf-8', 'replace')

    def word_starts(self):
        return [not (piece[:1].isalnum() or piece[:1] == '\ufffd') for piece in self.pieces]

    def as_library(self, library):
        """As a tokenizers.Tokenizer: two tokens merge if their bytes joined are a token, by its rank."""
        convert = need('transformers.convert_slow_tokenizer', 'this export')
        characters = convert.bytes_to_unicode()                 # GPT-2's, one for each byte
        vocabulary = {''.join(map(characters.get, token)): rank for rank, token in self.tokens.items()}
        merges = convert.generate_merges(vocabulary, None)
        vocabulary |= {self.pieces[i]: i for i in self.special.values()}
        model = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
        split = library.pre_tokenizers.Split(library.Regex(self.model._pat_str), 'isolated')
        bytewise = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = library.pre_tokenizers.Sequence([split, bytewise])
        model.decoder = library.decoders.ByteLevel()
        return model


TOKENIZERS = {'sentencepiece': SentencePieceTokenizer, 'wordpiece': WordPieceTokenizer,
              'character': CharacterTokenizer, 'tiktoken': TiktokenTokenizer}


def fast_tokenizer(tokenizer, length):
    """(tokenizer as a transformers.PreTrainedTokenizerFast, first text with other ids of equal score or '').

    length  longest row of the model
    Raises UserError unless both give the same ids for Python's reference manual (700 KB) and for all pieces.
    """
    from pydoc_data.topics import topics
    library, special, size = need('tokenizers', 'this export'), tokenizer.special, tokenizer.vocab_size
    model, names = tokenizer.as_library(library), {key: tokenizer.pieces[i] for key, i in special.items()}
    model.add_special_tokens([library.AddedToken(name, lstrip=key == 'mask', normalized=False, special=True)
                              for key, name in names.items()])
    ends = [(names[key], special[key]) for key in ('sep', 'cls')]
    model.post_processor = library.processors.BertProcessing(*ends)
    texts = [line for topic in topics.values() for line in topic.splitlines()]
    texts += [tokenizer.decode(range(i, min(i + 50, size))) for i in range(0, size, 50)]
    tie, theirs = '', model.encode_batch_fast(texts, add_special_tokens=False)
    for text, ours, other in zip(texts, tokenizer.encode(texts), theirs, strict=True):
        if not tokenizer.same(ours, other.ids):
            raise UserError(f'no tokenizer is exported: in transformers it would give other ids for {text!r}')
        tie = tie or (text if ours != other.ids else '')
    fast = need('transformers', 'this export').PreTrainedTokenizerFast(
        tokenizer_object=model, model_max_length=length, clean_up_tokenization_spaces=False,
        model_input_names=['input_ids', 'token_type_ids', 'attention_mask'],
        **{f'{key}_token': name for key, name in names.items()})
    return fast, tie


# ---- segmenters: where Chinese words start, for whole-word masking, Cui et al. 2021, arXiv 1906.08101 ----

class JiebaSegmenter:
    """jieba with its default dictionary and hidden Markov model, on the unnormalised text."""
    file_name, package = '', 'jieba'

    def __init__(self, folder, facts):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')                     # invalid escapes in its patterns
            self.model = need('jieba', 'this segmenter').Tokenizer()
        self.model.FREQ, self.model.total = self.model.gen_pfdict(self.model.get_dict_file())
        self.model.initialized = True                           # else it loads a cache file from /tmp

    def starts(self, text):
        return list(itertools.accumulate(map(len, self.model.cut(text)), initial=0))


class SentencePieceSegmenter:
    """Pieces of a unigram sentencepiece model (Kudo 2018, arXiv 1804.10959) as words, without a dictionary.

    On four classical novels 16,000 pieces agree best with jieba; 8,000 split more, 32,000 less.
    """
    file_name, package, knob = 'segmenter.model', 'sentencepiece', 'segmenter_vocab'
    save = classmethod(save_sentencepiece)

    def __init__(self, folder, facts):
        self.model = load_sentencepiece(folder, self.file_name)

    def starts(self, text):
        return [begin for begin, _ in self.model.encode(text, return_type='offset_mapping')['offsets']]


SEGMENTERS = {'jieba': JiebaSegmenter, 'sentencepiece': SentencePieceSegmenter}


TOOLS = {'tokenizer': TOKENIZERS, 'segmenter': SEGMENTERS}


def find_tools(config):
    """Knobs tokenizer and segmenter -> {knob: (class, its key in the knob's table, argument)}."""
    tools = {}
    for knob in ('tokenizer', 'segmenter') if config['segmenter'] else ('tokenizer',):
        kind, _, argument = config[knob].partition(':')
        if knob == 'tokenizer' and os.path.dirname(kind):       # a prepared folder
            kind, argument = load_meta(kind)['tokenizer']['kind'], config[knob]
        if kind not in TOOLS[knob] or (argument and not TOOLS[knob][kind].file_name):
            raise UserError(f"{knob}='{config[knob]}': choose one of {', '.join(TOOLS[knob])}; python "
                            'prepare_data.py --help says what may follow a colon')
        tools[knob] = TOOLS[knob][kind], kind, argument
    if 'segmenter' in tools and not issubclass(tools['tokenizer'][0], WordPieceTokenizer):
        raise UserError(f"segmenter='{config['segmenter']}' needs tokens of one Chinese character, which "
                        f"tokenizer='{config['tokenizer']}' does not make: choose wordpiece or character")
    return tools


def mark_words(text, ids, offsets, starts, word_start):
    """Which of N tokens start a word: (N,) bool.

    offsets     (N, 2), character span [begin, end) of each token
    starts      characters where the segmenter starts a word; used for CJK characters
    word_start  (vocab_size,) bool, used for all other tokens
    A start in text without a token, such as white space, counts for the next token.
    """
    begin, end = offsets.T
    first = np.zeros(len(text) + 1, np.int64)
    first[starts] = first[0] = 1
    until = np.concatenate([[0], first.cumsum()])               # until[i]: starts in text[:i]
    cut = until[begin + 1] > until[np.concatenate([[0], end])[:-1]]
    points = np.frombuffer(text.encode('utf-32-le'), '<u4')
    return np.where(is_cjk(points[begin]), cut, word_start[ids])


# ---- files that are written atomically ----

def need(module, purpose):
    """Import an optional package or a module of it; the UserError says what to install."""
    package = module.partition('.')[0]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f'{purpose} needs the package {package}: pip install {package}') from None


def package_version(package):
    need(package, 'this preparation')
    return importlib.metadata.version(package)


def temporary_name(target):
    return f'{target}~{platform.node()}~{os.getpid()}~{os.urandom(4).hex()}.tmp'


def remove_leftovers(folder):
    """Remove temporary files of a folder left by this process or by dead processes of this host."""
    folder, end = glob.escape(folder), f'~{platform.node()}~*.tmp'
    for item in glob.glob(folder + end) + glob.glob(f'{folder}/*{end}'):
        pid = int(item.split('~')[-2])
        with contextlib.suppress(ProcessLookupError):           # from getpgid: it is dead
            if pid != os.getpid() and os.getpgid(pid):
                continue
        shutil.rmtree(item) if os.path.isdir(item) else os.remove(item)


class Output:
    """A file under a temporary name; renamed once it is complete and synced to disk."""

    def __init__(self, file_name):
        self.file_name, self.digest = file_name, hashlib.sha256()
        self.file = open(temporary_name(file_name), 'xb')      # noqa: SIM115

    def write(self, data):
        self.file.write(data)
        self.digest.update(data)

    def finish(self):
        """Returns the sha256."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.file.name, self.file_name)
        return self.digest.hexdigest()


def write_bytes(file_name, data):
    output = Output(file_name)
    output.write(data)
    return output.finish()


def write_json(file_name, value):
    write_bytes(file_name, json.dumps(value, indent=1).encode() + b'\n')


def read_json(folder, name, key):
    """A dict with `key` from a JSON file of a prepared folder."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(Path(folder, name).read_bytes())
        if isinstance(value, dict) and key in value and value.get('format', FORMAT) == FORMAT:
            return value
    raise damaged(folder, name, 'missing, damaged or of another version of prepare_data.py')


def damaged(folder, name, fault):
    """A UserError with the remedy: a unit whose unit_00017.json was removed is written again."""
    number = re.search('_([0-9]{5})', name)
    record = os.path.join(folder, f'unit_{number[1]}.json') if number else folder
    return UserError(f'{folder}/{name}: {fault}: remove {record} and repeat the command that prepared it')


def digest_of(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def text_hash(text, seed=0):
    """64 bits of BLAKE2b, RFC 7693, as an int."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, 'little')).digest()
    return int.from_bytes(digest, 'little')


# ---- worker processes ----

def die_with_parent():
    """Runs at the start of a worker, so that it ends if the main process is killed."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)                # on Ctrl-C the main process ends them
    threading.Thread(target=wait, daemon=True).start()


def in_parallel(function, tasks, num_proc):
    """Yields function(*task) of each task, in their order; an error or Ctrl-C ends all workers."""
    if num_proc == 1 or not tasks:
        yield from itertools.starmap(function, tasks)
        return
    context = multiprocessing.get_context('spawn')
    pool = concurrent.futures.ProcessPoolExecutor(min(num_proc, len(tasks)), context, die_with_parent)
    try:
        for future in [pool.submit(function, *task) for task in tasks]:     # as pool.map, which would cancel
            yield future.result()                                           # futures of workers killed below
    except concurrent.futures.BrokenExecutor:
        raise UserError('a worker process was killed; out of memory? Then a smaller --num_proc') from None
    finally:
        for worker in multiprocessing.active_children():        # idle by now, unless something failed
            worker.kill()
            worker.join()
        pool.shutdown(cancel_futures=True)


def progress(items, total, unit, name=None, done=0):
    """`items` with a tqdm bar, on terminals, in the first process of each machine.  done: where it begins"""
    tqdm.set_lock(threading.RLock())                    # tqdm's own is a semaphore, which os._exit leaks
    shown = sys.stderr and sys.stderr.isatty() and os.environ.get('LOCAL_RANK', '0') == '0'
    return tqdm(items, name, total, unit=unit, initial=done, disable=not shown, leave=False, miniters=1,
                smoothing=0, dynamic_ncols=True)        # smoothing=0: rate and ETA of the whole run


# ---- files shared by all units: docstrings.jsonl, tokenizer/ and units.json ----

def make_folder(folder, sources, config, settings):
    """Makes the folder under a temporary name, then renames it; of concurrent processes the first wins."""
    fresh, source = temporary_name(folder), ' + '.join(row[1] for row in sources)
    config = {**config, 'folder': fresh}
    os.makedirs(fresh)
    listed = [lister(*row, config) for lister, *row in sources]
    units = [unit for found, _ in listed for unit in found]
    say(f'{folder}: {len(units)} units of {source}')
    units = [{**unit, 'documents': -(-config['max_documents'] // len(units))} for unit in units]
    check_corpus(units, source, config)
    versions = save_tools(fresh, units, config)
    write_json(os.path.join(fresh, 'units.json'), {
        'settings': settings, 'corpus': source, 'source': [origin for _, origin in listed],
        'versions': versions, 'units': units})
    try:
        os.rename(fresh, folder)
    except OSError:
        if not os.path.exists(os.path.join(folder, 'units.json')):
            raise


def count_kinds(counts):
    return ', '.join(f'{kind} {count}' for kind, count in sorted(counts.items()))


def name_row(where, detail, bad):
    """'file:line: fault' of a bad row; if its piece begins inside a file, counts the lines before it."""
    file_name, begin, number = where
    if begin:
        with open(file_name, 'rb') as file:
            number += sum(file.read(min(2**20, begin - i)).count(b'\n') for i in range(0, begin, 2**20))
    return f'{file_name}:{number}: {bad}' + (f' ({detail})' if detail else '')


def check_corpus(units, source, config):
    """Raises UserError if there is no document; gives up after 10,000 rows without the text field."""
    skipped, first = collections.Counter(), ''
    for row in itertools.chain.from_iterable(read_unit(unit, config) for unit in units):
        if not row[-1]:
            return
        skipped[row[-1]] += 1
        first = first or f'; the first: {name_row(*row)}'
        if skipped['missing field'] == 10_000:
            break
    raise UserError(f'{source}: no document in it; skipped: {count_kinds(skipped) or 0}{first}')


def documents(unit, config, skipped, examples):
    """Texts of a unit, up to its limit; counts bad rows by fault, keeps five examples not filtered."""
    def good():
        for where, text, bad in read_unit(unit, config):
            if not bad:
                yield text
                continue
            skipped[bad] += 1
            if len(examples) < 5 and not bad.startswith('filtered'):
                examples.append([where, text, bad])
    return itertools.islice(good(), unit['documents'] or None)


def save_tools(folder, units, config):
    """Makes tokenizer/.  Returns {package: version} of the packages that determine the tokens."""
    home, tools, chosen = os.path.join(folder, 'tokenizer'), {}, find_tools(config)
    os.mkdir(home)
    versions = {kind.package: package_version(kind.package) for kind, *_ in chosen.values()}
    sample = functools.cache(lambda: take_sample(units, config))
    for knob, (kind, name, argument) in chosen.items():
        tools[knob], target = {'kind': name}, Path(home, kind.file_name)
        if argument == config[knob]:                            # a prepared folder
            tools[knob] = load_meta(argument)['tokenizer']
            write_bytes(target, Path(argument, 'tokenizer', kind.file_name).read_bytes())
        elif kind.file_name:
            tools[knob] |= kind.save(home, argument, config, sample)
            tools[knob]['sha256'] = hashlib.sha256(target.read_bytes()).hexdigest()
    write_json(os.path.join(home, 'settings.json'), tools)
    load_tool(folder, 'segmenter')                              # raises if a given file is no model
    write_bytes(os.path.join(home, 'word_start.bin'), word_starts(load_tokenizer(folder)).tobytes())
    return versions


def word_starts(tokenizer):
    """(vocab_size,) bool: where a word can start, and the special tokens."""
    specials = set(tokenizer.special.values())
    return np.array([start or i in specials for i, start in enumerate(tokenizer.word_starts())])


def take_sample(units, config):
    """Texts of about tokenizer_sample characters in all, from at most 16 evenly spaced units.

    Each unit gives a share proportional to its size: the texts of smallest hash among those at its
    beginning that have ten times as many characters.
    """
    n = min(len(units), 16)
    chosen = [units[len(units) * i // n] for i in range(n)]
    sizes, sample = [unit['bytes'] or 1 for unit in chosen], []
    for unit, size in zip(chosen, sizes, strict=True):
        share = config['tokenizer_sample'] * size / sum(sizes)
        texts = take_characters(documents(unit, config, collections.Counter(), []), 10 * share)
        sample += take_characters(sorted(texts, key=lambda text: text_hash(text, HASH_SEED)), share)
    return sample


def take_characters(texts, most):
    """The first texts, until they have at least `most` characters."""
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size >= most:
            return


def load_tool(folder, knob):
    """The tokenizer or segmenter of a prepared folder, or None."""
    facts, home = read_json(folder, 'tokenizer/settings.json', 'tokenizer').get(knob), f'{folder}/tokenizer'
    if facts is None:
        return None
    kind = TOOLS[knob][facts['kind']]
    if kind.file_name:
        check_file(folder, f'tokenizer/{kind.file_name}', facts['sha256'])
    return kind(home, facts)


def load_tokenizer(folder):
    """The tokenizer of a prepared folder, one of TOKENIZERS; pieces[id] is the text of an id."""
    return load_tool(folder, 'tokenizer')


def copy_tokenizer(tokenizer, folder):
    """Write folder/tokenizer/, unless load_tokenizer(folder) already gives the same tokenizer."""
    home, name = os.path.join(folder, 'tokenizer'), tokenizer.file_name
    with contextlib.suppress(UserError):
        if load_tokenizer(folder).facts == tokenizer.facts:
            return
    os.makedirs(home, exist_ok=True)
    sha256 = write_bytes(os.path.join(home, name), Path(tokenizer.home, name).read_bytes())
    write_json(os.path.join(home, 'settings.json'), {'tokenizer': {**tokenizer.facts, 'sha256': sha256}})


def tokenizer_identity(folder):
    """Digest of what determines the ids that the tokenizer of a prepared folder or a run gives."""
    facts = read_json(folder, 'tokenizer/settings.json', 'tokenizer')['tokenizer']
    return digest_of({key: value for key, value in facts.items() if key not in ('trained', 'name')})


# ---- a unit: train_00017.*, val_00017.*, then unit_00017.json ----

def id_type(vocab_size):
    """Little-endian dtype of the ids in .bin files."""
    return np.dtype('<u2' if vocab_size <= 65536 else '<u4')


@functools.lru_cache(1)
def unit_tools(folder):
    """(tokenizer, segmenter or None, (vocab_size,) bool where a word can start)."""
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')    # parallel by processes instead
    tokenizer = load_tokenizer(folder)
    return tokenizer, load_tool(folder, 'segmenter'), word_starts(tokenizer)


class Shard:
    """One split of a unit, written batch by batch; columns: {file extension: dtype}."""

    def __init__(self, stem, tokenizer, columns):
        self.stem, self.columns, self.last = stem, columns, ([tokenizer.special['sep']], [1])
        self.files = {ending: Output(f'{stem}.{ending}') for ending in (*columns, 'idx')}
        self.files['idx'].write(bytes(8))
        self.documents, self.tokens, self.counts = 0, 0, np.zeros(tokenizer.vocab_size, np.int64)

    def add(self, rows):
        """Write documents, each (ids (N,),) or, with a segmenter, (ids, word starts (N,))."""
        ends = self.tokens + np.cumsum([len(row[0]) + 1 for row in rows], dtype='<i8')
        self.files['idx'].write(ends.data)
        for i, (ending, dtype) in enumerate(self.columns.items()):
            parts = [part for row in rows for part in (row[i], self.last[i])]
            data = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
            self.files[ending].write(data.data)
            if ending == 'bin':
                self.counts += np.bincount(data, minlength=len(self.counts))
        self.documents, self.tokens = self.documents + len(rows), self.tokens + len(data)

    def finish(self):
        """Its entry in unit_00017.json."""
        return {'stem': os.path.basename(self.stem), 'documents': self.documents, 'tokens': self.tokens,
                'sha256': {ending: output.finish() for ending, output in self.files.items()}}


def write_unit(number, unit, config):
    """Write the shards of a unit, then unit_00017.json: it is done.  Returns the number of tokens."""
    folder, skipped, examples = config['folder'], collections.Counter(), []
    tokenizer, segmenter, word_start = unit_tools(folder)
    columns = {'bin': id_type(tokenizer.vocab_size)} | ({'words': np.dtype('u1')} if segmenter else {})
    train, val = [Shard(os.path.join(folder, f'{split}_{number:05}'), tokenizer, columns) for split in SPLITS]
    lowest, limit, texts = 2**64, config['val_fraction'] * 2**64, documents(unit, config, skipped, examples)
    while batch := list(take_characters(texts, BATCH)):
        rows = {train: [], val: []}
        for text, row in zip(batch, encode(batch, tokenizer, segmenter, word_start), strict=True):
            if not len(row[0]):
                skipped['no tokens'] += 1
                continue
            key = text_hash(text, HASH_SEED)
            lowest = min(lowest, key)
            rows[val if key < limit else train].append(row)
        train.add(rows[train])
        val.add(rows[val])
    counts = (train if config['val_fraction'] < 1 else val).counts.astype('<i8').tobytes()
    counts = base64.b85encode(zlib.compress(counts)).decode()
    write_json(os.path.join(folder, f'unit_{number:05}.json'), {
        'train': train.finish(), 'val': val.finish(), 'counts': counts, 'lowest_hash': lowest,
        'skipped': skipped, 'examples': examples})
    return train.tokens + val.tokens


def encode(texts, tokenizer, segmenter, word_start):
    """Yields (ids (N,),) for each text; with a segmenter (ids, word starts (N,))."""
    if segmenter is None:
        yield from zip(tokenizer.encode_arrays(texts))
        return
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        yield ids, mark_words(text, ids, offsets, segmenter.starts(text), word_start)


# ---- meta.json ----

def write_meta(folder, plan, config):
    """Write meta.json from the records of all units; it does not depend on time, processes or machine.

    unigram_entropy is that of the training tokens without [SEP]; with val_fraction=1, of the held-out ones.
    """
    records = [read_json(folder, f'unit_{number:05}.json', 'counts') for number in range(len(plan['units']))]
    splits = {split: [record[split] for record in records if record[split]['documents']] for split in SPLITS}
    if not splits['val'] or (not splits['train'] and config['val_fraction'] < 1):
        total = sum(shard['documents'] for shards in splits.values() for shard in shards)
        least = 1.001 * min(record['lowest_hash'] for record in records) / 2**64
        shutil.rmtree(folder)
        raise UserError(f"{plan['corpus']}: val_fraction={config['val_fraction']} holds out "
                        f"{'none' if splits['train'] else 'all'} of its {total} documents with tokens; the "
                        f'smallest that holds one out is {least:.4g}')
    skipped = collections.Counter()
    for item in [*plan['source'], *records]:
        skipped.update(item.get('skipped'))
    for example in list(itertools.chain.from_iterable(record['examples'] for record in records))[:5]:
        say(f'skipped {name_row(*example)}')
    if skipped:
        say(f'skipped in all: {count_kinds(skipped)}')
    tokenizer, tools = load_tokenizer(folder), read_json(folder, 'tokenizer/settings.json', 'tokenizer')
    counts = sum(np.frombuffer(zlib.decompress(base64.b85decode(record['counts'])), '<i8')
                 for record in records)                         # (vocab_size,)
    share = np.delete(counts, tokenizer.special['sep']) / (counts.sum() - counts[tokenizer.special['sep']])
    share = share[share > 0]
    meta = {
        'format': FORMAT, 'name': os.path.basename(folder), 'corpus': config['corpus'], **tools,
        'vocab_size': tokenizer.vocab_size, 'dtype': id_type(tokenizer.vocab_size).name,
        'special': tokenizer.special, 'unigram_entropy': -float((share * np.log(share)).sum()),
        'splits': {split: [{key: shard[key] for key in ('stem', 'documents', 'tokens')} for shard in shards]
                   for split, shards in splits.items()},
        'identity': {'tokenizer': tokenizer_identity(folder), **{       # stored in checkpoints
            split: digest_of([shard['sha256'] for shard in shards]) for split, shards in splits.items()}},
        'skipped': dict(sorted(skipped.items())),
        **{key: plan[key] for key in ('settings', 'source', 'versions')}}
    write_json(os.path.join(folder, 'meta.json'), meta)
    return meta


def load_meta(folder):
    """meta.json of a prepared folder as a dict; check_sizes and check_folder verify the files."""
    if not os.path.isfile(os.path.join(folder, 'meta.json')):
        data_dir, name = os.path.split(os.path.normpath(folder))
        found = os.path.isfile(f'{ROOT}/config/data_{name}.py')
        knobs = f'config/data_{name}.py' if found else f'--name={name} --corpus=...'
        place = '' if data_dir == 'data' else f' --data_dir={data_dir}'
        raise UserError(f'{folder}: not prepared (no meta.json): run python prepare_data.py {knobs}{place}')
    return read_json(folder, 'meta.json', 'format')


def shard_files(meta):
    """Yields (shard, extension, bytes) of each shard file."""
    width = np.dtype(meta['dtype']).itemsize
    for shard in itertools.chain(*meta['splits'].values()):
        yield shard, 'bin', width * shard['tokens']
        yield shard, 'idx', 8 * (shard['documents'] + 1)
        if 'segmenter' in meta:
            yield shard, 'words', shard['tokens']


def check_sizes(folder, meta):
    """Raises UserError if a file of a prepared folder is missing or has the wrong size."""
    files = [(f"{shard['stem']}.{ending}", size) for shard, ending, size in shard_files(meta)]
    for name, size in [('tokenizer/word_start.bin', meta['vocab_size']), *files]:
        file_name = os.path.join(folder, name)
        found = f'{os.path.getsize(file_name)} bytes' if os.path.isfile(file_name) else 'missing'
        if found != f'{size} bytes':
            raise damaged(folder, name, f'{found}, should have {size} bytes')


def check_file(folder, name, sha256):
    """Raises UserError if a file of a prepared folder is damaged."""
    if hashlib.sha256(Path(folder, name).read_bytes()).hexdigest() != sha256:
        raise damaged(folder, name, 'damaged, its sha256 is not the recorded one')


def check_folder(folder):
    """Verifies the sizes and sha256 of the shard files, and the files in tokenizer/."""
    meta = load_meta(folder)
    check_sizes(folder, meta)
    load_tool(folder, 'segmenter')
    if word_starts(load_tokenizer(folder)).tobytes() != Path(folder, 'tokenizer/word_start.bin').read_bytes():
        raise damaged(folder, 'tokenizer/word_start.bin', 'damaged, not what the tokenizer gives')
    for shard, ending, _ in shard_files(meta):
        split, number = shard['stem'].split('_')
        record = read_json(folder, f'unit_{number}.json', split)[split]
        check_file(folder, f"{shard['stem']}.{ending}", record['sha256'][ending])
    say(f'{folder}: checked, the shard files and tokenizer/ are as they were written')


# ---- one run ----

def check_config(config):
    """Validates the knobs; returns the config with num_proc filled in."""
    check_limits(config, LIMITS)
    if config['name'] != os.path.basename(config['name']).strip('.'):
        raise UserError(f"name='{config['name']}': must name a folder directly below data_dir")
    find_tools(config)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return dict(config, num_proc=config['num_proc'] or cores)


def find_part(config):
    """(i, n): this command prepares units i, i + n, ...; (0, 1): all."""
    source, text = 'part', config['part']
    for rank, world, mark in (('RANK', 'WORLD_SIZE', 'RANK'),   # no SLURM_STEP_ID in sbatch's own script
                              ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID')):
        if not text and {rank, world, mark} <= set(os.environ):
            source, text = f'{rank}/{world}', f'{os.environ[rank]}/{os.environ[world]}'
    found = re.fullmatch('([0-9]{1,5})/([0-9]{1,5})', text or '0/1')
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(f"{source}='{text}': must be i/n with i from 0 to n - 1, as in 0/4")
    return int(found[1]), int(found[2])


def load_plan(folder, settings):
    """units.json as a dict; UserError if it was made with other settings."""
    plan = read_json(folder, 'units.json', 'units')
    for knob, value in settings.items():
        before = plan['settings'].get(knob)
        if before != value:
            raise UserError(f'{folder}: begun with {knob}={before!r}, now {knob}={value!r}: repeat the first '
                            f'command, or remove {folder} to begin again, or give another --name')
    return plan


def prepare(config):
    """Prepare a corpus, or a part of it, from the knobs in `config`.  Returns the folder."""
    started, config, (i, n) = time.monotonic(), check_config(config), find_part(config)
    default_name, sources = find_corpus(config)
    settings = {knob: value for knob, value in config.items() if knob not in WHERE_ONLY}
    folder = os.path.join(config['data_dir'], config['name'] or default_name)
    try:
        if not os.path.isdir(folder) or not os.listdir(folder):
            make_folder(folder, sources, config, settings)
        plan = load_plan(folder, settings)
        records = [os.path.join(folder, f'unit_{k:05}.json') for k in range(len(plan['units']))]
        todo = {k: plan['units'][k] for k in range(i, len(records), n) if not os.path.exists(records[k])}
        tokens = write_units(folder, todo, plan['versions'], config)
        left = sum(not os.path.exists(record) for record in records)
        if left:
            say(f'{folder}: part {i}/{n} is done; other parts have {left} units to do, then it is ready')
        elif not todo and os.path.exists(os.path.join(folder, 'meta.json')):
            check_sizes(folder, load_meta(folder))
            say(f'{folder}: already prepared')
        else:
            meta, rate = write_meta(folder, plan, config), tokens / (time.monotonic() - started)
            documents, all_tokens = (
                ' + '.join(f'{sum(shard[key] for shard in shards):,}' for shards in meta['splits'].values())
                for key in ('documents', 'tokens'))
            say(f"{meta['name']}: {documents} documents, {all_tokens} tokens (train + val), vocabulary "
                f"{meta['vocab_size']:,}, {rate:,.0f} tokens/s")
    except OSError as error:
        raise UserError(f'{error.filename or folder}: {error.strerror or error}') from None
    finally:
        remove_leftovers(folder)
    return folder


def write_units(folder, units, versions, config):
    """Write {number: unit}, with a progress bar, or a line a minute.  Returns the number of tokens."""
    for package, version in versions.items() if units else ():
        if package_version(package) != version:
            raise UserError(f'{folder}: was begun with {package} {version}, of which another version is '
                            f'installed: pip install {package}=={version}')
    tokens, started, told = 0, time.monotonic(), time.monotonic()
    tasks = [(number, unit, {**config, 'folder': folder}) for number, unit in units.items()]
    with contextlib.closing(in_parallel(write_unit, tasks, config['num_proc'])) as results:
        bar = progress(results, len(units), 'unit')
        for done, found in enumerate(bar, 1):
            tokens += found
            rate = f'{tokens:,} tokens, {tokens / (time.monotonic() - started):,.0f} tokens/s'
            bar.set_postfix_str(rate, refresh=False)
            if bar.disable and time.monotonic() - told >= 60:
                told = time.monotonic()
                say(f'{folder}: {done} of {len(units)} units, {rate}')
    return tokens


def main():
    config, _ = configure(globals())
    if config['check']:
        check_folder(config['check'])
    else:
        prepare(config)


if __name__ == '__main__':
    run(main)
