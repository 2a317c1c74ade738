"""Text to tokens: read a corpus, tokenize it, hold out validation documents, shuffle, write data/<name>/.

    $ python prepare_data.py config/data_wikitext.py
    $ python prepare_data.py --corpus='texts/*.jsonl.zst' --tokenizer=wordpiece:vocab.txt --name=mine

Readers yield rows (where, text, bad): a usable row has bad = '', a bad one its kind, and a detail as text.
Every document gets a 64-bit hash of its text, keyed by the seed. Tokenized documents are scattered over
BUCKETS files by the top bits of the hash, then gathered bucket by bucket: the smallest hashes are held out
for validation, so equal texts are on one side, and no more than the index of one bucket is ever in memory.

On n machines that share data_dir, each scatters a part and one gathers all; the result is the same bytes:
    $ python prepare_data.py config/data_c4.py --shard=i/n      i = 0 .. n - 1; torchrun and srun number them
    $ python prepare_data.py config/data_c4.py --merge=n        when all have ended
data/<name>.parts/ holds till then plan/, the tokenizer that part 0 made for all, and <i>_of_<n>/, the parts.

data/<name>/ holds, for split in train, val and shard 00000 on:
    <split>_00000.bin   little-endian uint16 (uint32 if vocab_size > 65536): each document's ids, then [SEP]
    <split>_00000.idx   int64, the first token of each document in that shard, and the shard's length
    word_start.bin      (vocab_size,) uint8, 1 where an id can start a word, for whole-word masking
    <split>_00000.words with a segmenter: uint8, 1 where a token of the .bin starts a word; [SEP] does
    the tokenizer       sentencepiece.model | vocab.txt | vocab.tiktoken
    segmenter.model     with segmenter='sentencepiece'
    meta.json           what all of it is; see write_meta
"""
import array
import ast
import base64
import collections
import concurrent.futures
import contextlib
import errno
import functools
import glob
import gzip
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import re
import shutil
import signal
import struct
import sys
import sysconfig
import threading
import time
import warnings
import zlib

import numpy as np

from configurator import UserError, configure, run, say

corpus = 'docstrings'           # rows of CORPORA, as in books+wikipedia; a path, a glob, a hub id owner/name
path = ''                       # in place of the row's source: files for oscar, packages for docstrings
name = ''                       # folder under data_dir; empty: from the corpus
data_dir = 'data'               # where prepared corpora live
subset = ''                     # configuration of a hub dataset; empty: the row's own
split = 'train'                 # split of a hub dataset
revision = ''                   # git revision of a hub dataset; empty: the newest, which is recorded
text_field = 'text'             # field or column that holds the text
tokenizer = 'sentencepiece'     # sentencepiece, wordpiece or character, each [:file], or tiktoken:NAME
vocab_size = 4096               # of a vocabulary made here; 4096 for small models, 32000 base, 12000 Chinese
lower_case = True               # vocabularies made here and wordpiece; True for uncased vocabularies
segmenter = ''                  # words of Chinese, for whole-word masking: jieba, sentencepiece[:file.model]
segmenter_vocab = 16_000        # pieces of a sentencepiece segmenter trained here; more make longer words
tokenizer_sample = 10_000_000   # characters to make these of; sentencepiece takes 25 bytes of memory for each
sample_from = 1_000_000_000     # characters at the head of the corpus that the sample is drawn from
val_fraction = 0.01             # share of the documents held out, by hash
val_documents = 10_000          # documents held out at most
shard_bytes = 200_000_000       # size of a token file at most, unless one document is longer
max_documents = 0               # stop after so many documents; 0: all
max_bytes = 10_000_000          # longer rows are skipped, longer .txt files cut at blank lines
num_proc = 0                    # worker processes; 0: one per core; the result does not depend on it
shard = ''                      # prepare part i/n, as in 0/4; empty: torchrun's or srun's numbers, else all
merge = 0                       # join so many parts once all are done; 0: do not
seed = 1                        # of the held-out choice and of the document order

FORMAT = 1                      # of the folder; train.py refuses any other
BUCKETS = 256
META_BYTES = 10**7              # of a meta.json at most: 15,000 shards
TOKENIZER_BYTES = 10**8         # of a tokenizer's file at most
TOLD_BYTES = 10**8              # checking so much is worth a line
PATIENCE = 600                  # seconds without a sign of life of part 0 after which the others give up
BATCH_BYTES = 500_000           # of text per task of a worker
FLUSH_BYTES = 64_000_000        # of tokens held before the buckets are written
WRITE_BYTES = 1_000_000         # of tokens held before a shard is written
GOLDEN = np.uint64(0x9E3779B97F4A7C15)      # 2^64 / golden ratio: spreads successive numbers
INDEX = np.dtype([('hash', '<u8'), ('tokens', '<u8'), ('unit', '<u8')])    # unit: place in the corpus
COLUMNS = {'ids': 'bin', 'words': 'words'}  # what is kept of each token: the ending of its shards
CJK = np.array([                # first, last + 1 of what BERT calls Chinese and `tokenizers` sets apart
    (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x2A6E0), (0x2A700, 0x2B740),
    (0x2B740, 0x2B820), (0x2B920, 0x2CEB0), (0x2F800, 0x2FA20)]).ravel()        # BERT has 2B820, not 2B920
LAUNCHERS = (                   # rank, world size, and what tells srun from sbatch, whose script has two
    ('RANK', 'WORLD_SIZE', 'RANK'), ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'))
SINCE = {'segmenter': '', 'segmenter_vocab': 16_000}    # settings that folders of before do not have
LIMITS = {                      # knob: lowest, highest, advice
    'vocab_size': (16, 10**6, '4096 to 32000 is usual'),
    'segmenter_vocab': (16, 10**6, '16000 is usual'),
    'tokenizer_sample': (1000, 10**9, '10000000 is usual'),
    'sample_from': (1000, 10**12, '1000000000 is usual'),
    'val_fraction': (0, 1, '0.01 is usual'),
    'val_documents': (1, 10**9, '10000 is usual'),
    'shard_bytes': (1000, 10**10, '200000000 is usual'),
    'max_documents': (0, 10**12, '0 reads all'),
    'max_bytes': (1000, 10**8, '10000000 is usual'),
    'num_proc': (0, 1024, '0 is one per core'),
    'merge': (0, 10**5, 'the n of --shard=i/n'),
    'seed': (0, 2**63 - 1, '1 is usual'),
}


# rows and their faults

def check_text(value, most):
    """Any value -> (text, bad): (the text, '') or ('', why it cannot be a document)."""
    if not isinstance(value, str):
        return '', 'null' if value is None else 'not a string'
    if not value or value.isspace():
        return '', 'empty'
    if '\0' in value:
        return '', 'NUL'
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        return '', 'lone surrogate'
    return (value, '') if size <= most else ('', 'too long')


def pick_field(row, config):
    """The text of one record, a dict; a missing field is reported with the fields that are there."""
    if not isinstance(row, dict):
        return '', 'not an object'
    if config['text_field'] not in row:
        return ', '.join(map(str, row)), 'missing field'
    return check_text(row[config['text_field']], config['max_bytes'])


OSCAR_BLOCKED = {'agressif', 'adult', 'cryptojacking', 'dangerous_material', 'phishing', 'warez', 'ddos',
                 'hacking', 'malware', 'mixed_adult', 'sect'}


def pick_oscar(row, config):
    """The text of an OSCAR record that passes the filter of Courtois et al. 2024, appendix A.

    22.01 has metadata.annotation and neither perplexity nor categories; 23.01 has metadata.quality_warnings,
    harmful_pp and categories. An absent field drops nothing, except the language. The first reason counts.
    """
    text, bad = pick_field(row, dict(config, text_field='content'))
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


def join_rows(rows, joined, most):
    """Rows of one line each -> documents of at most `most` bytes.

    joined  how many rows make a document, or the regular expression of the row that starts one
    Blank rows belong to the layout and are not counted as empty.
    """
    first, lines, size = '', [], 0
    for where, text, bad in rows:
        if bad and bad != 'empty':
            yield where, text, bad
        if bad:
            continue
        full = re.search(joined, text) if isinstance(joined, str) else len(lines) >= joined
        size += 4 * len(text)                                   # UTF-8 has at most 4 bytes a character
        if lines and (full or size > most):
            yield first, '\n'.join(lines), ''
            lines, size = [], 4 * len(text)
        first = first if lines else where
        lines.append(text.strip('\n'))
    if lines:
        yield first, '\n'.join(lines), ''


# readers: (source, config, progress) -> (count, rows, what to record about the source); rows(k) yields the
# rows of the k-th of count units, which depend on nothing before them

def open_bytes(file_name):
    """A buffered binary stream over a plain, .gz or .zst file."""
    if file_name.endswith('.gz'):
        return gzip.open(file_name)
    if file_name.endswith('.zst'):
        zstandard = need('zstandard', 'reading .zst files')
        reader = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader
        return io.BufferedReader(reader(open(file_name, 'rb'), read_across_frames=True))
    return open(file_name, 'rb')


def read_lines(file_name, most):
    """Yields (line number, line as str, bad); no line longer than `most` bytes is ever in memory."""
    number = 0
    try:
        with open_bytes(file_name) as file:
            while line := file.readline(most + 1):
                number += 1
                if len(line) > most and not line.endswith(b'\n'):
                    while line and not line.endswith(b'\n'):
                        line = file.readline(most)
                    yield number, '', 'too long'
                    continue
                try:
                    yield number, line.decode('utf-8-sig' if number == 1 else 'utf-8'), ''
                except UnicodeDecodeError:
                    yield number, '', 'invalid UTF-8'
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield number + 1, '', 'broken archive'
    except Exception as error:                              # zstandard is optional, so its error class is too
        if type(error).__name__ != 'ZstdError':
            raise
        yield number + 1, '', 'broken archive'


def read_txt(file_name, config, pick):
    """One document a file; a file longer than max_bytes is cut at blank lines."""
    if not file_name.endswith(('.gz', '.zst')) and os.path.getsize(file_name) <= config['max_bytes']:
        with contextlib.suppress(UnicodeDecodeError):           # else line by line, to name the line
            text = read_bytes(file_name).decode('utf-8-sig')
            if '\0' not in text:
                yield 1, *check_text(text, config['max_bytes'])
                return
    first, lines, size, cut = 1, [], 0, 0                       # cut: lines up to the last blank one
    for number, line, bad in read_lines(file_name, config['max_bytes']):
        bad = bad or ('NUL' if '\0' in line else '')
        if bad:
            yield number, '', bad
            continue
        lines.append(line)
        size += len(line.encode())
        if size > config['max_bytes']:
            cut = cut or len(lines) - 1
            yield first, *check_text(''.join(lines[:cut]), config['max_bytes'])
            lines, first, cut = lines[cut:], number + 1 + cut - len(lines), 0
            size = len(''.join(lines).encode())
        if line.isspace():
            cut = len(lines)
    yield first, *check_text(''.join(lines), config['max_bytes'])


def read_jsonl(file_name, config, pick):
    """One record a line; blank lines are no records."""
    for number, line, bad in read_lines(file_name, config['max_bytes']):
        if bad:
            yield number, '', bad
        elif not line.isspace():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                yield number, '', 'broken JSON'
                continue
            yield number, *pick(row, config)


def read_parquet(file_name, config, pick):
    """One record a row; strings are decoded here, because pyarrow raises for a whole batch."""
    arrow = need('pyarrow', 'reading .parquet files')
    parquet = importlib.import_module('pyarrow.parquet')
    number = 0
    try:
        with parquet.ParquetFile(file_name) as file:
            field = config['text_field']
            names = file.schema_arrow.names
            present = field if field in names else names[0]
            for batch in file.iter_batches(256, columns=[present], use_threads=False):
                column = batch.column(0)
                if arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type):
                    column = column.cast(arrow.large_binary())
                for value in column.to_pylist():
                    number += 1
                    try:
                        value = value.decode() if isinstance(value, bytes) else value
                    except UnicodeDecodeError:
                        yield number, '', 'invalid UTF-8'
                        continue
                    yield number, *pick({field: value} if field in names else dict.fromkeys(names), config)
    except arrow.ArrowException as error:
        yield number + 1, str(error).partition('\n')[0], 'broken parquet'


FORMATS = {'.txt': read_txt, '.jsonl': read_jsonl, '.parquet': read_parquet, '': read_txt}


def file_format(file_name):
    """The reader of a file by its ending, or None."""
    return FORMATS.get(os.path.splitext(re.sub(r'\.(gz|zst)$', '', file_name))[1])


def find_files(source):
    """A file, a directory (searched to any depth) or a glob -> file names in sorted order."""
    if os.path.isdir(source):
        found = [os.path.join(folder, item) for folder, _, items in os.walk(source) for item in items]
    else:
        found = [source] if os.path.isfile(source) else [item for item in glob.glob(source, recursive=True)
                                                         if os.path.isfile(item)]
    return sorted(item for item in found if file_format(item))


def read_files(source, config, progress, pick=pick_field):
    """Local files; each is a unit."""
    files = find_files(source)
    if not files:
        raise UserError(f'{source}: no .txt, .jsonl or .parquet file (.gz, .zst too) is there')
    sizes = [os.path.getsize(item) for item in files]
    progress.total = sum(sizes)

    def rows(unit):
        for number, text, bad in file_format(files[unit])(files[unit], config, pick):
            yield f'{files[unit]}:{number}', text, bad
        progress.done += sizes[unit]

    return len(files), rows, {'path': source, 'files': len(files), 'bytes': sum(sizes)}


def read_oscar(source, config, progress):
    """OSCAR 22.01 or 23.01 record files, filtered."""
    if not source:
        raise UserError("corpus='oscar' needs --path=<.jsonl.gz or .jsonl.zst files, a directory or a glob>")
    return read_files(source, config, progress, pick_oscar)


def read_hub(source, config, progress):
    """A Hugging Face dataset, streamed at a pinned revision; for --shard its files are units."""
    datasets = need('datasets', 'reading from the Hugging Face hub')
    hub = importlib.import_module('huggingface_hub')
    try:
        pinned = hub.HfApi().dataset_info(source, revision=config['revision'] or None).sha
        data = datasets.load_dataset(source, config['subset'] or None, split=config['split'], streaming=True,
                                     revision=pinned)
        splits = data.info.splits or {}
        progress.total = getattr(splits.get(config['split']), 'num_examples', 0) or 0
        count = data.num_shards if config['share'][1] > 1 else 1
    except Exception as error:                                  # the hub's libraries raise dozens of classes
        raise UserError(hub_error(source, error)) from None

    def rows(unit):
        where, part = (f'{source}:{unit}', data.shard(count, unit)) if count > 1 else (source, data)
        try:
            for number, row in enumerate(part, 1):
                progress.done += 1
                yield f'{where}:{number}', *pick_field(row, config)
        except UserError:
            raise
        except Exception as error:
            raise UserError(hub_error(source, error)) from None

    origin = {'hub': source, 'subset': config['subset'], 'split': config['split'], 'revision': pinned}
    return count, rows, origin


def hub_error(source, error):
    text = ' '.join(str(error).split())[:300]
    return f'{source}: the Hugging Face hub did not give it: {type(error).__name__}: {text}'


def read_docstrings(source, config, progress):
    """The docstrings of installed packages, each text once, none below 40 characters; nothing is imported."""
    roots = {package: package_root(package) for package in source.split()}
    files = [(root, item) for root in roots.values() for item in python_files(root)]
    progress.total = len(files)

    def rows(unit):
        seen = set()
        for found in ordered_map(parse_docstrings, files, config['num_proc']):
            progress.done += 1
            for where, text, bad in found:
                key = text_hash(text, 0) if not bad else 0
                if bad or key not in seen:
                    yield where, text, bad
                seen.add(key)

    packages = {package: package_version(package) for package in roots}
    return 1, rows, {'packages': packages, 'files': len(files)}


def package_root(package):
    """The folder of a package, found without importing it."""
    if package == 'stdlib':
        return sysconfig.get_path('stdlib')
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise UserError(f"docstrings: no package '{package}' is installed; pip install {package}, "
                        "or choose packages with --path='stdlib numpy'")
    return found.submodule_search_locations[0]


def package_version(package):
    try:
        return platform.python_version() if package == 'stdlib' else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ''


def python_files(root):
    """Python files under `root` in sorted order; site-packages lies inside the standard library's folder."""
    for folder, folders, items in os.walk(root):
        folders[:] = sorted(set(folders) - {'site-packages', 'dist-packages', '__pycache__'})
        for item in sorted(items):
            if item.endswith('.py'):
                yield os.path.join(folder, item)


def parse_docstrings(root_and_file):
    """One Python file -> rows of its docstrings and of the texts in add_docstr calls."""
    root, file_name = root_and_file
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
            children = getattr(node, part, None)                # a lambda's body is no list
            nodes.extend(children if isinstance(children, list) else ())
        for text, line in docstrings_of(node):
            text = inspect.cleandoc(text)
            text, bad = check_text(text, 10**7)
            if bad or len(text) >= 40:
                rows.append((f'{where}:{line}', text, bad))
    return rows


def docstrings_of(node):
    """Yields (text, line) of the docstrings that a statement carries itself."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, 'value', None), str):
            yield first.value.value, first.lineno
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if re.search('add_(newdoc|docstr)', getattr(function, 'attr', getattr(function, 'id', ''))):
            for item in ast.walk(node):                     # numpy and torch document compiled functions so
                if isinstance(item, ast.Constant) and isinstance(item.value, str) and len(item.value) >= 80:
                    yield item.value, item.lineno


CORPORA = {
    # name         reader           source                                 subset                 rows joined
    'docstrings': (read_docstrings, 'stdlib torch numpy sympy networkx datasets', '',             None),
    'wikitext':   (read_hub,        'Salesforce/wikitext',                 'wikitext-103-raw-v1', '^ = [^=]'),
    'wikipedia':  (read_hub,        'wikimedia/wikipedia',                 '20231101.en',         None),
    'books':      (read_hub,        'SamuelYang/bookcorpus',               '',                    256),
    'c4':         (read_hub,        'allenai/c4',                          'en',                  None),
    'fineweb':    (read_hub,        'HuggingFaceFW/fineweb',               'sample-10BT',         None),
    'oscar':      (read_oscar,      '',                                    '',                    None),
}


def find_corpus(config):
    """The corpus knob -> (default name, parts); a part is (reader, source, subset, rows joined)."""
    wanted = config['corpus']
    names = wanted.split('+')
    if all(item in CORPORA for item in names):
        return '_'.join(names), [(reader, config['path'] or source, config['subset'] or subset, joined)
                                 for reader, source, subset, joined in (CORPORA[item] for item in names)]
    if os.path.exists(wanted) or glob.glob(wanted, recursive=True):
        stem = os.path.basename(os.path.abspath(wanted)).partition('.')[0]
        return re.sub(r'\W+', '_', stem).strip('_') or 'files', [(read_files, wanted, '', None)]
    if re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*', wanted) and '.' not in os.path.splitext(wanted)[1]:
        return wanted.partition('/')[2], [(read_hub, wanted, config['subset'], None)]
    raise UserError(f"corpus='{wanted}': no such file; choose one of {', '.join(CORPORA)}, a path, a glob or "
                    'a hub id owner/name')


# tokenizers

class SentencePieceTokenizer:
    """Unigram sentencepiece, Kudo 2018, arXiv 1804.10959: trained on a sample, or a given .model.

    Unigram, because bpe encodes 3.5 times slower and has 1 % more tokens on docstrings.  Trained here:
    [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4 as control symbols, which no text can produce.  What a
    given model lacks of them comes after its pieces.
    """
    file_name = 'sentencepiece.model'
    packages = ('sentencepiece',)
    from_sample = True                                          # unless a file is given
    names = {'pad': ('[PAD]', '<pad>'), 'cls': ('[CLS]', '<s>'), 'sep': ('[SEP]', '</s>'),
             'mask': ('[MASK]', '<mask>')}

    @staticmethod
    def save(folder, argument, config, sample):
        library = need('sentencepiece', 'this tokenizer')
        model = (read_bytes(argument) if argument else
                 train_sentencepiece(library, 'vocab_size', config, sample))
        write_bytes(os.path.join(folder, SentencePieceTokenizer.file_name), model)
        return {'kind': 'sentencepiece', 'trained': not argument}

    def __init__(self, folder, information):
        self.model = load_sentencepiece(folder, self.file_name)
        self.vocab_size = self.model.get_piece_size()
        self.special = {'unk': self.model.unk_id()}
        for key, names in self.names.items():
            found = [self.model.piece_to_id(item) for item in names]
            found = [item for item in found if self.model.is_control(item)]
            self.special[key] = found[0] if found else self.vocab_size
            self.vocab_size += not found
        self.specials = set(self.special.values())

    def encode(self, text):
        return self.model.encode(text)

    def encode_batch(self, texts):
        return self.model.encode(texts, num_threads=1)

    def encode_offsets(self, texts):
        """Of each text: (ids, their (N, 2) first and last + 1 character in it; a space before may count)."""
        found = [self.model.encode(text, return_type='offset_mapping') for text in texts]
        return [(item['ids'], np.array(item['offsets'], np.int64).reshape(-1, 2)) for item in found]

    def decode(self, ids):
        return self.model.decode([int(item) for item in ids if item not in self.specials])

    def piece(self, item):
        known = item < self.model.get_piece_size()
        return self.model.id_to_piece(int(item)) if known else special_name(self, item)

    def word_starts(self):
        return [self.piece(item).startswith('\u2581') for item in range(self.vocab_size)]


def train_sentencepiece(library, knob, config, sample):
    """Bytes of a model of config[knob] pieces.  They depend on num_threads: one number for every machine."""
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=(line for text in sample for line in text.splitlines()), model_writer=model,
            vocab_size=config[knob], model_type='unigram', character_coverage=0.9995, num_threads=8,
            normalization_rule_name='nmt_nfkc_cf' if config['lower_case'] else 'nmt_nfkc', minloglevel=2,
            pad_id=0, unk_id=1, bos_id=2, eos_id=3, pad_piece='[PAD]', unk_piece='[UNK]', bos_piece='[CLS]',
            eos_piece='[SEP]', control_symbols='[MASK]')
    except RuntimeError as error:
        most = re.search(r'value <= (\d+)', str(error))
        reason = f'this corpus allows at most {most[1]}' if most else str(error).rpartition('] ')[2].strip()
        raise UserError(f'{knob}={config[knob]}: sentencepiece cannot train it: {reason}') from None
    return model.getvalue()


def load_sentencepiece(folder, file_name):
    library = need('sentencepiece', file_name)
    proto = read_bytes(os.path.join(folder, file_name))
    with contextlib.suppress(RuntimeError):
        if proto:                                               # it takes an empty one for none given
            return library.SentencePieceProcessor(model_proto=proto)
    raise UserError(f'{file_name}: not a sentencepiece model')


class WordPieceTokenizer:
    """BERT's WordPiece, Devlin et al. 2018, arXiv 1810.04805: ids are lines of vocab.txt."""
    file_name = 'vocab.txt'
    packages = ('tokenizers',)
    from_sample = False

    @staticmethod
    def save(folder, argument, config, sample):
        source = argument or 'google-bert/bert-base-uncased'
        if not os.path.isfile(source):
            if source.endswith('.txt'):
                raise UserError(f'tokenizer: {source}: no such file')
            hub = need('huggingface_hub', 'a vocabulary from the hub')
            try:
                source = hub.hf_hub_download(source, 'vocab.txt')
            except Exception as error:                          # as in read_hub
                raise UserError(hub_error(source, error)) from None
        write_bytes(os.path.join(folder, WordPieceTokenizer.file_name), read_bytes(source))
        return {'kind': 'wordpiece', 'lower_case': config['lower_case']}

    def __init__(self, folder, information):
        library = need('tokenizers', 'this tokenizer')
        text = read_bytes(os.path.join(folder, self.file_name)).decode('utf-8', 'replace')
        self.pieces = text.replace('\r\n', '\n').removesuffix('\n').split('\n')        # U+2028 may be a piece
        vocabulary = {piece: item for item, piece in enumerate(self.pieces)}
        missing = {'[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]'} - set(vocabulary)
        if missing or len(vocabulary) < len(self.pieces):
            fault = f'{min(missing)} is missing' if missing else 'a line is repeated'
            raise UserError(f'{self.file_name}: not a BERT vocabulary: {fault}')
        self.model = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token='[UNK]'))
        self.model.normalizer = library.normalizers.BertNormalizer(lowercase=information['lower_case'])
        self.model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()    # "[MASK]" -> "[", "mask", "]"
        self.model.decoder = library.decoders.WordPiece()
        self.vocab_size = len(self.pieces)
        self.special = {key: vocabulary[f'[{key.upper()}]'] for key in ('pad', 'unk', 'cls', 'sep', 'mask')}

    def encode(self, text):
        return self.model.encode(text).ids

    def encode_batch(self, texts):
        return [item.ids for item in self.model.encode_batch_fast(texts)]

    def encode_offsets(self, texts):
        """Of each text: (ids, their (N, 2) first and last + 1 character in it)."""
        return [(item.ids, np.array(item.offsets, np.int64).reshape(-1, 2))
                for item in self.model.encode_batch(texts)]

    def decode(self, ids):
        return self.model.decode([int(item) for item in ids if item not in self.special.values()])

    def piece(self, item):
        return self.pieces[item]

    def word_starts(self):
        return [not piece.startswith('##') for piece in self.pieces]


class CharacterTokenizer(WordPieceTokenizer):
    """BERT's tokens of Chinese: a token for each CJK character, WordPiece for the rest.

    Made here: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, then the characters by falling frequency.
    """
    from_sample = True

    @staticmethod
    def save(folder, argument, config, sample):
        if argument:
            WordPieceTokenizer.save(folder, argument, config, sample)
        else:
            pieces = character_vocabulary(need('tokenizers', 'this tokenizer'), config, sample)
            write_bytes(os.path.join(folder, WordPieceTokenizer.file_name), '\n'.join([*pieces, '']).encode())
        return {'kind': 'character', 'trained': not argument, 'lower_case': config['lower_case']}


def character_vocabulary(library, config, sample):
    """vocab_size pieces at most; characters of equal frequency go by code point.

    A character that grows together with its like into one word has a '##' piece after its own, so that every
    word of known characters can be spelled; CJK characters and punctuation always stand alone.
    """
    normalizer = library.normalizers.BertNormalizer(lowercase=config['lower_case'])
    split, counts = library.pre_tokenizers.BertPreTokenizer().pre_tokenize_str, collections.Counter()
    for text in sample:
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
    """Code point(s) -> bool(s)."""
    return np.searchsorted(CJK, points, side='right') % 2 == 1


class TiktokenTokenizer:
    """Byte-level BPE of tiktoken by name, or a local file of "base64 rank" lines with GPT-2's pattern.

    [PAD] [CLS] [SEP] [MASK] come after its ids; there is no [UNK].  A word can start with any token that
    does not begin with a letter, a digit or the middle of a character.
    """
    file_name = 'vocab.tiktoken'
    packages = ('tiktoken',)
    from_sample = False
    gpt2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    @staticmethod
    def save(folder, argument, config, sample):
        library = need('tiktoken', 'this tokenizer')
        target = os.path.join(folder, TiktokenTokenizer.file_name)
        if os.path.isfile(argument):
            write_bytes(target, read_bytes(argument))
            return {'kind': 'tiktoken', 'name': os.path.basename(argument), 'pattern': TiktokenTokenizer.gpt2}
        if argument not in library.list_encoding_names():
            raise UserError(f"tokenizer='tiktoken:{argument}': no such file; choose a file or one of "
                            f"{', '.join(library.list_encoding_names())}")
        try:
            encoding = library.get_encoding(argument)
        except Exception as error:                          # a download: requests' or the network's classes
            raise UserError(f'tiktoken:{argument}: cannot be downloaded: {type(error).__name__}') from None
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
        write_bytes(target, b''.join(b'%s %d\n' % (base64.b64encode(token), rank) for token, rank in ranks))
        return {'kind': 'tiktoken', 'name': argument, 'pattern': encoding._pat_str, 'ids': encoding.n_vocab}

    def __init__(self, folder, information):
        library = need('tiktoken', 'this tokenizer')
        lines = read_bytes(os.path.join(folder, self.file_name)).split(b'\n')
        try:
            pairs = [line.split() for line in lines if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except ValueError:
            raise UserError(f'{self.file_name}: not a tiktoken file of "base64 rank" lines') from None
        lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if lacking:
            raise UserError(f'{self.file_name}: not a tiktoken file: byte {lacking[0]} has no rank')
        self.model = library.Encoding(information['name'], pat_str=information['pattern'],
                                      mergeable_ranks=ranks, special_tokens={})
        self.tokens = {rank: token for token, rank in ranks.items()}
        first = max(information.get('ids', 0), max(self.tokens) + 1)
        self.special = {key: first + i for i, key in enumerate(('pad', 'cls', 'sep', 'mask'))}
        self.vocab_size = first + len(self.special)

    def encode(self, text):
        return self.model.encode_ordinary(text)

    def encode_batch(self, texts):
        return [self.model.encode_ordinary(text) for text in texts]

    def encode_offsets(self, texts):
        """Of each text: (ids, their (N, 2) first and last + 1 character in it; a space before may count)."""
        rows = []
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            starts = self.model.decode_with_offsets(ids)[1]
            rows.append((ids, np.array([starts, [*starts[1:], len(text)]], np.int64).T[:len(ids)]))
        return rows

    def decode(self, ids):
        return b''.join(self.tokens.get(int(item), b'') for item in ids).decode('utf-8', 'replace')

    def piece(self, item):
        known = item in self.tokens
        return self.tokens[item].decode('utf-8', 'replace') if known else special_name(self, item)

    def word_starts(self):
        heads = [self.tokens.get(item, b' ').decode('utf-8', 'replace')[0] for item in range(self.vocab_size)]
        return [not (head.isalnum() or head == '\ufffd') for head in heads]     # ufffd: part of a character


TOKENIZERS = {'sentencepiece': SentencePieceTokenizer, 'wordpiece': WordPieceTokenizer,
              'character': CharacterTokenizer, 'tiktoken': TiktokenTokenizer}


def special_name(tokenizer, item):
    """[PAD], [CLS] ... of a special id that the tokenizer's own files do not have; '' for an unused id."""
    return next((f'[{key.upper()}]' for key, value in tokenizer.special.items() if value == item), '')


def find_tokenizer(text):
    """'kind:argument' -> (kind, argument)."""
    kind, _, argument = text.partition(':')
    if kind not in TOKENIZERS or (kind == 'tiktoken' and not argument):
        raise UserError(f"tokenizer='{text}': choose one of sentencepiece, sentencepiece:<file.model>, "
                        'wordpiece, wordpiece:<vocab.txt or hub id>, character, '
                        'character:<vocab.txt or hub id>, tiktoken:<name or file>')
    return kind, argument


def load_tokenizer(folder, meta):
    """The tokenizer of a prepared folder: encode, encode_batch, encode_offsets, decode, piece, special ..."""
    kind = TOKENIZERS[meta['tokenizer']['kind']]
    file_name, told = os.path.join(folder, kind.file_name), meta.get('files', {}).get(kind.file_name)
    if os.path.getsize(file_name) > TOKENIZER_BYTES:
        raise UserError(f'{file_name}: more than {TOKENIZER_BYTES:,} bytes: not a tokenizer')
    if told and told != file_facts(file_name):
        raise UserError(f'{file_name}: damaged: its sha256 is not that of meta.json: prepare {folder} again')
    try:
        tokenizer = kind(folder, meta['tokenizer'])
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, MemoryError) as error:
        raise UserError(f'{file_name}: with what meta.json says of it, no tokenizer: {error!r}') from None
    if tokenizer.vocab_size != meta.get('vocab_size', tokenizer.vocab_size):
        raise UserError(f"{file_name}: {tokenizer.vocab_size} ids, but meta.json says {meta['vocab_size']}")
    return tokenizer


# segmenters: text -> the characters at which words of Chinese start, for whole-word masking, Cui et al. 2021,
# arXiv 1906.08101

class JiebaSegmenter:
    """jieba with the dictionary and the hidden Markov model of its defaults, on the text as it is."""
    packages = ('jieba',)
    from_sample = False

    @staticmethod
    def save(folder, argument, config, sample):
        return {'kind': 'jieba'}

    def __init__(self, folder, information):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')                     # invalid escapes in its patterns
            self.model = need('jieba', 'this segmenter').Tokenizer()
        self.model.FREQ, self.model.total = self.model.gen_pfdict(self.model.get_dict_file())
        self.model.initialized = True                           # else it trusts a cache file in /tmp

    def starts(self, text):
        return list(itertools.accumulate(map(len, self.model.cut(text)), initial=0))


class SentencePieceSegmenter:
    """The pieces of a unigram sentencepiece, Kudo 2018, arXiv 1804.10959, as words: no dictionary is needed.

    On four classical novels 16,000 pieces come closest to jieba's words; 8,000 cut more, 32,000 less.
    """
    file_name = 'segmenter.model'
    packages = ('sentencepiece',)
    from_sample = True

    @staticmethod
    def save(folder, argument, config, sample):
        library = need('sentencepiece', 'this segmenter')
        model = (read_bytes(argument) if argument else
                 train_sentencepiece(library, 'segmenter_vocab', config, sample))
        write_bytes(os.path.join(folder, SentencePieceSegmenter.file_name), model)
        return {'kind': 'sentencepiece', 'trained': not argument}

    def __init__(self, folder, information):
        self.model = load_sentencepiece(folder, self.file_name)

    def starts(self, text):
        found = self.model.encode(text, return_type='offset_mapping')       # in the text as it was given
        return [begin for begin, _ in found['offsets']]


SEGMENTERS = {'': None, 'jieba': JiebaSegmenter, 'sentencepiece': SentencePieceSegmenter}


def find_segmenter(config):
    """The segmenter knob -> (kind, argument); kind is '' without one."""
    kind, colon, argument = config['segmenter'].partition(':')
    if kind not in SEGMENTERS or (colon and (kind != 'sentencepiece' or not argument)):
        raise UserError(f"segmenter='{config['segmenter']}': choose one of '', jieba, sentencepiece, "
                        'sentencepiece:<file.model>')
    allowed = [item for item, row in TOKENIZERS.items() if issubclass(row, WordPieceTokenizer)]
    if kind and find_tokenizer(config['tokenizer'])[0] not in allowed:
        raise UserError(f"segmenter='{config['segmenter']}' needs tokens of one Chinese character, which "
                        f"tokenizer='{config['tokenizer']}' does not make: choose {' or '.join(allowed)}")
    return kind, argument


def load_segmenter(folder, meta):
    """The segmenter of a prepared folder, or None."""
    return SEGMENTERS[meta['segmenter']['kind']](folder, meta['segmenter']) if 'segmenter' in meta else None


def mark_words(text, ids, offsets, starts, word_start):
    """Which of N tokens start a word: (N,) bool.

    offsets     (N, 2), first and last + 1 character of each in the text
    starts      where the segmenter starts words; it decides on CJK characters
    word_start  (vocab_size,) bool, decides on all other tokens
    A start in text that became no token, as in white space, is one of the token that follows.
    """
    begin, end = offsets.T
    first = np.zeros(len(text) + 1, np.int64)
    first[starts] = first[0] = 1
    until = np.concatenate([[0], first.cumsum()])               # until[i]: starts in text[:i]
    cut = until[begin + 1] > until[np.concatenate([[0], end])[:-1]]
    points = np.frombuffer(text.encode('utf-32-le'), '<u4')
    return np.where(is_cjk(points[begin]), cut, word_start[ids])


# plumbing

def need(module, purpose):
    """An optional package, or an error that names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f'{purpose} needs the package {module}: pip install {module}') from None


def read_bytes(file_name):
    with open(file_name, 'rb') as file:
        return file.read()


def write_bytes(file_name, data):
    """Write a whole file and wait until it is on the disk."""
    with open(file_name, 'wb') as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def append_bytes(file_name, data):
    with open(file_name, 'ab') as file:
        file.write(data)


def text_hash(text, seed):
    """64 bits of BLAKE2b, RFC 7693, as an int."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=seed.to_bytes(8, 'little')).digest()
    return int.from_bytes(digest, 'little')


def die_with_parent():
    """Run in a worker: a killed main process must not leave workers behind."""
    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)                # Ctrl-C reaches all; the main one ends them
    threading.Thread(target=wait, daemon=True).start()


def ordered_map(function, items, num_proc):
    """Yields function(item) in order; at most four items a worker are under way, so memory is bounded."""
    if num_proc == 1:
        yield from map(function, items)
        return
    waiting = collections.deque()
    context = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(num_proc, context, die_with_parent) as pool:
        try:
            for item in items:
                waiting.append(submit(pool, function, item))
                if len(waiting) > 4 * num_proc:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except concurrent.futures.BrokenExecutor:
            for worker in multiprocessing.active_children():    # one that was just starting may wait forever
                worker.kill()
            raise UserError('a worker process was killed; out of memory? Then a smaller --num_proc') from None
        finally:
            pool.shutdown(cancel_futures=True)


def submit(pool, function, item):
    try:
        return pool.submit(function, item)
    except (OSError, ValueError):                               # a worker ended while another was starting
        raise concurrent.futures.BrokenExecutor from None


class Progress:
    """What is done of what there is, in the reader's unit; on a terminal a line about it twice a second."""

    def __init__(self):
        self.total = self.done = self.read = 0              # total 0: unknown; read: characters of documents
        self.unit = 0                                       # of the corpus, that is being read
        self.parts = 1                                      # of the corpus; one of them is done here
        self.started = self.shown = time.monotonic()

    def show(self, text, fraction):
        now = time.monotonic()
        if now - self.shown < 0.5 or not sys.stderr.isatty():
            return
        self.shown = now
        bar = f"{'#' * round(20 * fraction):.<20} {fraction:4.0%}" if fraction else 'size unknown'
        left = f', {(now - self.started) * (1 / fraction - 1):,.0f} s left' if fraction else ''
        print(f'\r{bar} {text}{left}\033[K', end='', file=sys.stderr, flush=True)


# documents

def good_documents(rows, source, config, skipped, progress, whole=True):
    """Rows -> texts.  Bad rows are counted in `skipped` by kind; five are named when reading ends.

    whole  the rows are all of the corpus, in which there must be a document
    """
    documents, examples, fields = 0, [], ''
    for where, text, bad in rows:
        if bad:
            skipped[bad] += 1
            if len(examples) < 5 and not bad.startswith('filtered'):
                examples.append(f'{where}: {bad}' + (f' ({text})' if text else ''))
            fields = text if bad == 'missing field' else fields
            if whole and not documents and skipped['missing field'] == 10_000:
                break
            continue
        documents += 1
        progress.read += len(text)
        yield text
        if documents == config['max_documents']:
            break
    counts = ', '.join(f'{kind} {count}' for kind, count in sorted(skipped.items()))
    if whole and not documents and skipped['missing field']:
        wanted = config['text_field']
        raise UserError(f"text_field='{wanted}': no row of {source} has it; its fields are {fields}")
    if whole and not documents:
        raise UserError(f"{source}: no document in it{'; skipped: ' if counts else ''}{counts}"
                        f"{'; the first: ' if examples else ''}{''.join(examples[:1])}")
    for line in examples:
        say(f'skipped {line}')
    if counts:
        say(f'skipped in all: {counts}')


def take_sample(documents, folder, config, progress):
    """Spools the head of the corpus.  Returns (a sample of it by hash, all documents from the start)."""
    spool = os.path.join(folder, 'head')
    chosen, size, read = [], 0, 0
    with open(spool, 'wb') as file:
        for text in documents:
            pickle.dump(text, file)
            chosen.append((text_hash(text, config['seed']), text))
            size += len(text)
            read += len(text)
            share = progress.done / progress.total if progress.total else 0
            progress.show(f'{read:,} characters read', share)
            if size > 2 * config['tokenizer_sample']:
                chosen, size = smallest(chosen, config['tokenizer_sample'])
            if read >= config['sample_from']:
                break

    def everything():
        with open(spool, 'rb') as file, contextlib.suppress(EOFError):
            while True:
                yield pickle.load(file)
        os.remove(spool)
        yield from documents

    return [text for _, text in smallest(chosen, config['tokenizer_sample'])[0]], everything()


def smallest(chosen, most):
    """The (hash, text) pairs of smallest hash with about `most` characters, and how many these are."""
    kept, size = [], 0
    for pair in sorted(chosen):
        if size >= most:
            break
        kept.append(pair)
        size += len(pair[1])
    return kept, size


def batches(documents, progress):
    """Texts -> (unit that they are of, list of texts of about BATCH_BYTES characters)."""
    batch, size, unit = [], 0, 0
    for text in documents:
        if batch and (size >= BATCH_BYTES or progress.unit != unit):
            yield unit, batch
            batch, size = [], 0
        unit = progress.unit
        batch.append(text)
        size += len(text)
    if batch:
        yield unit, batch


@functools.lru_cache(maxsize=1)
def worker_tools(folder, tools):
    """(tokenizer, segmenter or None, (vocab_size,) bool where a word can start)."""
    os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')    # the worker processes are the parallelism
    tools = json.loads(tools)
    tokenizer = load_tokenizer(folder, tools)
    return tokenizer, load_segmenter(folder, tools), np.array(tokenizer.word_starts())


def encode_texts(folder, tools, seed, batch):
    """(unit, texts) -> (unit, hashes, numbers of tokens with the [SEP], columns one document after another,
    characters).

    A column holds bytes: the ids, and with a segmenter the starts of words.
    """
    tokenizer, segmenter, word_start = worker_tools(folder, tools)
    unit, texts = batch
    if segmenter:
        documents, offsets = zip(*tokenizer.encode_offsets(texts), strict=True)
        words = [mark_words(text, ids, where, segmenter.starts(text), word_start).tobytes() + b'\1'
                 for text, ids, where in zip(texts, documents, offsets, strict=True)]
    else:
        documents = tokenizer.encode_batch(texts)
    for document in documents:
        document.append(tokenizer.special['sep'])
    counts = [len(document) for document in documents]
    ids = np.fromiter(itertools.chain.from_iterable(documents), id_type(tokenizer.vocab_size), sum(counts))
    columns = {'ids': ids.tobytes()} | ({'words': b''.join(words)} if segmenter else {})
    return unit, [text_hash(text, seed) for text in texts], counts, columns, sum(map(len, texts))


def id_type(vocab_size):
    """Little-endian dtype of the ids on the disk."""
    return np.dtype('<u2' if vocab_size <= 65536 else '<u4')


# scatter and gather

def bucket_file(folder, bucket, kind):
    return os.path.join(folder, 'buckets', f'{bucket:03}.{kind}')


def scatter(batches, folder, home, tools, config, skipped, progress):
    """Tokenizes the documents and appends each to the bucket of its hash.  Returns (documents, tokens).

    home  folder that holds the tools
    """
    widths, progress.started = token_widths(load_tokenizer(home, tools), tools), time.monotonic()
    os.mkdir(os.path.join(folder, 'buckets'))
    buffers = {kind: [bytearray() for _ in range(BUCKETS)] for kind in (*widths, 'index')}
    encode = functools.partial(encode_texts, home, json.dumps(tools), config['seed'])
    documents_done = tokens_done = characters = held = 0
    for unit, hashes, counts, columns, size in ordered_map(encode, batches, config['num_proc']):
        fill_buckets(buffers, widths, unit, hashes, counts, columns)
        empty = counts.count(1)
        documents_done += len(counts) - empty
        tokens_done += sum(counts) - empty
        skipped.update({'no tokens': empty} if empty else {})
        characters += size
        held += sum(map(len, columns.values()))
        if held > FLUSH_BYTES:
            held = flush_buckets(folder, buffers)
        read = progress.parts * characters / progress.read
        read *= progress.done / progress.total if progress.total else 0
        rate = tokens_done / (time.monotonic() - progress.started)
        text = f'{documents_done:,} documents, {tokens_done:,} tokens, {rate:,.0f} tokens/s'
        progress.show(text, min(read, 1))
    flush_buckets(folder, buffers)
    return documents_done, tokens_done


def token_widths(tokenizer, tools):
    """Bytes of a token in each column."""
    return {'ids': id_type(tokenizer.vocab_size).itemsize} | ({'words': 1} if 'segmenter' in tools else {})


def fill_buckets(buffers, widths, unit, hashes, counts, columns):
    """Appends each document that has a token beside [SEP] to the buffers of its bucket."""
    start, views = 0, [(buffers[kind], memoryview(columns[kind]), width) for kind, width in widths.items()]
    for key, count in zip(hashes, counts, strict=True):
        if count > 1:
            for buffer, view, width in views:
                buffer[key >> 56] += view[width * start:width * (start + count)]
            buffers['index'][key >> 56] += struct.pack('<QQQ', key, count, unit)
        start += count


def flush_buckets(folder, buffers):
    """Empties the buffers into the bucket files.  Returns 0, the bytes now held."""
    for kind, buckets in buffers.items():
        for bucket in range(BUCKETS):
            append_bytes(bucket_file(folder, bucket, kind), buckets[bucket])
            buckets[bucket] = bytearray()
    return 0


def choose_validation(hashes, taken, config):
    """(N,) hashes of a bucket -> (N,) bool, True for the validation split.

    Buckets come in rising order of the hash; `taken` documents are held out already.  Held out are the
    smallest hashes below val_fraction, val_documents at most, equal hashes together, and one group at least.
    """
    values, group, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    held = values < np.uint64(config['val_fraction'] * 2**64)
    held &= taken + np.cumsum(counts) <= config['val_documents']
    held[0] |= taken == 0
    return held[group]


class ShardWriter:
    """Appends documents to <split>_00000.bin and so on; a shard is closed before its .bin exceeds `most`."""

    def __init__(self, folder, split, dtype, kinds, vocab_size, most):
        self.folder, self.split, self.dtype, self.most = folder, split, np.dtype(dtype), most
        self.counts = np.zeros(vocab_size, np.int64)            # of each id, in all shards
        self.shards, self.documents, self.tokens = [], 0, 0
        self.starts, self.size, self.held = array.array('q'), 0, 0
        self.parts = {kind: [] for kind in kinds}

    def add(self, columns):
        size = len(columns['ids'])
        if self.size and self.size + size > self.most:
            self.close()
        self.starts.append(self.size // self.dtype.itemsize)
        for kind, data in columns.items():
            self.parts[kind].append(data)
        self.size += size
        self.held += size
        if self.held > WRITE_BYTES:
            self.flush()

    def stem(self):
        return f'{self.split}_{len(self.shards):05}'

    def flush(self):
        for kind, parts in self.parts.items():
            data = b''.join(parts)
            append_bytes(os.path.join(self.folder, f'{self.stem()}.{COLUMNS[kind]}'), data)
            if kind == 'ids':
                self.counts += np.bincount(np.frombuffer(data, self.dtype), minlength=len(self.counts))
            parts.clear()
        self.held = 0

    def close(self):
        if not self.size:
            return
        self.flush()
        stem, tokens = self.stem(), self.size // self.dtype.itemsize
        self.documents += len(self.starts)
        self.tokens += tokens
        words = {'words': f'{stem}.words'} if 'words' in self.parts else {}
        self.shards.append({'tokens': f'{stem}.bin', 'documents': f'{stem}.idx', **words, 'n_tokens': tokens,
                            'n_documents': len(self.starts)})
        self.starts.append(tokens)
        starts = np.asarray(self.starts).astype('<i8')
        append_bytes(os.path.join(self.folder, f'{stem}.idx'), starts.tobytes())
        self.starts, self.size = array.array('q'), 0


def gather(folder, tokenizer, tools, total, config, progress, parts=()):
    """Buckets -> shards.  Returns the writers (train, val).

    parts  (folder, files) of each part that the buckets are collected from
    Inside a bucket the order mixes the hash with the place, so that equal documents do not follow each other.
    """
    most, widths = config['shard_bytes'], token_widths(tokenizer, tools)
    train, val = (ShardWriter(folder, part, id_type(tokenizer.vocab_size), widths, tokenizer.vocab_size, most)
                  for part in ('train', 'val'))
    done = 0
    for bucket in range(BUCKETS):
        for (part, files), kind in itertools.product(parts, (*widths, 'index')):
            append_part(bucket_file(part, bucket, kind), bucket_file(folder, bucket, kind), files)
        index = np.fromfile(bucket_file(folder, bucket, 'index'), INDEX)
        if len(index):
            held = choose_validation(index['hash'], val.documents + len(val.starts), config)
            place = np.arange(len(index), dtype=np.uint64) * GOLDEN
            corpus = np.argsort(index['unit'], kind='stable')   # parts lie one after the other
            order = corpus[np.argsort(index['hash'][corpus] ^ place, kind='stable')]
            for i, columns in read_bucket(folder, bucket, widths, index['tokens'].astype(np.int64), order):
                (val if held[i] else train).add(columns)
        done += len(index)
        progress.show(f'{done:,} documents shuffled', done / total)
        for kind in (*widths, 'index'):
            os.remove(bucket_file(folder, bucket, kind))
    train.close()
    val.close()
    os.rmdir(os.path.join(folder, 'buckets'))
    return train, val


def read_bucket(folder, bucket, widths, tokens, order):
    """Yields (i, columns of document i) in the order wanted; tokens (N,) are the documents' lengths."""
    starts = np.cumsum(tokens) - tokens
    with contextlib.ExitStack() as stack:
        files = {kind: stack.enter_context(open(bucket_file(folder, bucket, kind), 'rb')) for kind in widths}
        for i in order:
            yield i, {kind: os.pread(file.fileno(), widths[kind] * tokens[i], widths[kind] * starts[i])
                      for kind, file in files.items()}


# meta.json

def entropy(counts, sep):
    """Unigram entropy in nats per token, of the training tokens without [SEP]."""
    counts = np.where(np.arange(len(counts)) == sep, 0, counts)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def read_blocks(file_name, digest):
    """Yields the blocks of a file, of 2^20 bytes but for the last, as they enter the digest."""
    with open(file_name, 'rb') as file:
        while block := file.read(2**20):
            digest.update(block)
            yield block


def file_facts(file_name):
    """{"bytes", "sha256"} of a file."""
    digest = hashlib.sha256()
    size = sum(map(len, read_blocks(file_name, digest)))
    return {'bytes': size, 'sha256': digest.hexdigest()}


def lasting_facts(file_name):
    """file_facts of a file that is on the disk afterwards."""
    with open(file_name, 'rb') as file:
        os.fsync(file.fileno())
    return file_facts(file_name)


def write_meta(folder, meta, splits, num_proc):
    """Completes and writes meta.json: nothing in it depends on the time, the machine's cores or the place."""
    names = sorted(os.listdir(folder))
    with concurrent.futures.ThreadPoolExecutor(num_proc) as pool:                   # hashlib releases the GIL
        facts = pool.map(lasting_facts, [os.path.join(folder, item) for item in names])
        meta['files'] = dict(zip(names, facts, strict=True))
    meta['splits'] = {writer.split: {'tokens': writer.tokens, 'documents': writer.documents,
                                     'shards': writer.shards} for writer in splits}
    write_bytes(os.path.join(folder, 'meta.json'), json.dumps(meta, indent=1).encode() + b'\n')


def load_meta(folder):
    """meta.json of a prepared folder as a dict, once it is sound and every file it names has its full size.

    What the files hold, check_files reads.
    """
    file_name = os.path.join(folder, 'meta.json')
    if not os.path.isfile(file_name):
        name = os.path.basename(os.path.abspath(folder))
        raise UserError(f'{folder}: not prepared (no meta.json): run python prepare_data.py --name={name} '
                        'with its config/data_*.py or --corpus=...')
    if os.path.getsize(file_name) > META_BYTES:
        raise UserError(f'{file_name}: more than {META_BYTES:,} bytes: not written by prepare_data.py')
    try:
        meta = json.loads(read_bytes(file_name), parse_constant=int)        # int('NaN') is a ValueError
        if meta['format'] != FORMAT:
            raise UserError(f"{file_name}: format {meta['format']}, expected {FORMAT}: prepare it again")
        files = {item: facts['bytes'] for item, facts in meta['files'].items()}
        keys = ('tokens', 'documents', *(['words'] if 'segmenter' in meta else []))
        shards = [shard[key] for part in meta['splits'].values() for shard in part['shards'] for key in keys]
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f'{file_name}: broken: remove {folder} and prepare it again') from None
    except OSError as error:
        raise UserError(f'{file_name}: {error.strerror}') from None
    for item in [*files, *shards]:
        plain = type(item) is str and item == os.path.basename(item) and item not in ('', '.', '..')
        if not plain or item not in files or '\\' in item:
            raise UserError(f'{file_name}: names {item!r}, which is not a file of this folder')
        path = os.path.join(folder, item)
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size != files[item]:
            found = 'missing' if size is None else f'{size} bytes'
            raise UserError(f'{path}: {found}, should have {files[item]} bytes: remove {folder} and '
                            'prepare it again')
    try:
        fault = meta_fault(meta, files, shards)
    except (KeyError, TypeError, AttributeError) as error:
        fault = f'{type(error).__name__}: {error}'
    if fault:
        raise UserError(f'{file_name}: broken ({fault}): remove {folder} and prepare it again')
    return meta


def meta_fault(meta, files, shards):
    """The entry of a meta.json that contradicts another, or ''; files: their sizes, shards: their files."""
    size, special, splits = meta['vocab_size'], meta['special'], meta['splits']
    rows = [shard for part in splits.values() for shard in part['shards']]
    counts = [part[key] for part in splits.values() for key in ('tokens', 'documents')]
    counts += [shard[key] for shard in rows for key in ('n_tokens', 'n_documents')]
    entropy = meta['unigram_entropy']
    good = {
        'vocab_size': type(size) is int and size == files['word_start.bin'],
        'dtype': meta['dtype'] == id_type(size).name,
        'special': set(special) | {'unk'} == {'pad', 'unk', 'cls', 'sep', 'mask'}
        and all(type(item) is int and 0 <= item < size for item in special.values()),
        'unigram_entropy': type(entropy) is float and 0 <= entropy < 100,
        'counts': all(type(item) is int and item >= 0 for item in counts),
        'shards': len(set(shards)) == len(shards) and all(
            files[row['tokens']] == id_type(size).itemsize * row['n_tokens']
            and files[row['documents']] == 8 * (row['n_documents'] + 1)
            and files.get(row.get('words'), row['n_tokens']) == row['n_tokens'] for row in rows),
        'splits': set(splits) == {'train', 'val'} and all(
            part[key] == sum(row[f'n_{key}'] for row in part['shards'])
            for part in splits.values() for key in ('tokens', 'documents')),
        'files': all(type(facts['sha256']) is str for facts in meta['files'].values()),
        'settings': type(meta['settings']) is dict,
        'tokenizer': TOKENIZERS[meta['tokenizer']['kind']].file_name in files}
    return next((key for key, right in good.items() if not right), '')


def check_files(folder, meta):
    """Reads every file of a prepared folder: it must be what meta.json describes, with ids of the vocabulary.

    verified.json remembers what each file was like on the disk, so what has not changed is not read again.
    """
    ids = {shard['tokens'] for part in meta['splits'].values() for shard in part['shards']}
    progress, remembered, marks = Progress(), remembered_files(folder), {}
    for item, facts in meta['files'].items():
        found = os.stat(os.path.join(folder, item))
        marks[item] = [facts['sha256'], meta['vocab_size'], found.st_size, found.st_mtime_ns, found.st_ino,
                       found.st_ctime_ns]
    changed = [item for item in marks if marks[item] != remembered.get(item)]
    progress.total = sum(meta['files'][item]['bytes'] for item in changed)

    def check(item):
        check_file(folder, item, meta, item in ids, progress)

    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count())) as pool:     # hashlib releases the GIL
        collections.deque(pool.map(check, changed), 0)
    seconds = time.monotonic() - progress.started
    if progress.total >= TOLD_BYTES:
        say(f'{folder}: {len(changed)} files checked, {progress.total / 1e6:,.0f} MB in {seconds:,.1f} s, '
            f'{progress.total / 1e6 / seconds:,.0f} MB/s')
    if changed:
        remember_files(folder, marks)


def check_file(folder, item, meta, has_ids, progress):
    file_name, size = os.path.join(folder, item), meta['vocab_size']
    digest, last = hashlib.sha256(), 0
    for block in read_blocks(file_name, digest):
        if has_ids:
            last = max(last, int(np.frombuffer(block, id_type(size)).max()))
        progress.done += len(block)
        progress.show('checking the corpus, which is new or changed', progress.done / progress.total)
    if digest.hexdigest() != meta['files'][item]['sha256']:
        raise UserError(f'{file_name}: damaged, or of another corpus (its sha256 is not that of meta.json): '
                        f'remove {folder} and prepare it again')
    if last >= size:
        raise UserError(f'{file_name}: holds the id {last}, but the vocabulary has {size}: remove {folder} '
                        'and prepare it again')


def remembered_files(folder):
    """verified.json as a dict, {} where it is not there or no use."""
    file_name = os.path.join(folder, 'verified.json')
    try:
        usable = os.path.isfile(file_name) and os.path.getsize(file_name) <= META_BYTES
        found = json.loads(read_bytes(file_name)) if usable else {}
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def remember_files(folder, marks):
    """Writes verified.json where that can be; a link in its place is replaced, not followed."""
    file_name = os.path.join(folder, 'verified.json')
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.remove(file_name + '.tmp')
        with open(file_name + '.tmp', 'xb') as file:
            file.write(json.dumps(marks).encode())
        os.replace(file_name + '.tmp', file_name)


# one run

def check_config(config):
    """Ranges and forms; returns the config with the number of processes filled in."""
    for knob, (low, high, advice) in LIMITS.items():
        value = config[knob]
        if not low <= value <= high or (isinstance(value, float) and value in (low, high)):
            raise UserError(f'{knob}={value}: must lie between {low} and {high} ({advice})')
    if config['name'] and not re.fullmatch(r'[\w-][\w.-]*', config['name']):
        raise UserError(f"name='{config['name']}': letters, digits, '.', '_' and '-' only: it names a folder")
    find_tokenizer(config['tokenizer'])
    find_segmenter(config)
    share = find_share(config)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    return dict(config, num_proc=config['num_proc'] or cores, share=share)


def find_share(config):
    """(i, n): the i-th of n parts is prepared here; (0, 1) is all."""
    source, text = 'shard', config['shard']
    for rank, world, mark in LAUNCHERS:
        if not text and not config['merge'] and {rank, world, mark} <= set(os.environ):
            source, text = f'{rank}/{world}', f'{os.environ[rank]}/{os.environ[world]}'
    if text and config['merge']:
        raise UserError(f"shard='{text}', merge={config['merge']}: give one; the merge comes when all "
                        'parts are done')
    found = re.fullmatch('([0-9]{1,5})/([0-9]{1,5})', text or '0/1')
    if not found or int(found[1]) >= int(found[2]):
        raise UserError(f"{source}='{text}': must be i/n with i from 0 to n - 1, as in 0/4")
    return int(found[1]), int(found[2])


def is_prepared(folder, settings):
    """Whether `folder` holds just this; an error if it holds something else."""
    if not os.path.exists(folder):
        return False
    refuse_difference(folder, SINCE | load_meta(folder)['settings'], settings)
    return True


def refuse_difference(folder, before, settings):
    for knob, value in settings.items():
        if before.get(knob) != value:
            raise UserError(f'{folder}: prepared with {knob}={before.get(knob)!r}, now {knob}={value!r}: '
                            'give another --name or remove the folder')


@contextlib.contextmanager
def work_folder(folder):
    """A fresh <folder>.tmp that becomes <folder> when the block ends well, and is removed when it fails."""
    temporary = folder + '.tmp'
    with locked(folder):
        if os.path.exists(temporary):                           # left by a killed run
            shutil.rmtree(temporary)
        os.mkdir(temporary)
        try:
            yield temporary
            os.rename(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextlib.contextmanager
def locked(folder):
    """One process at a time is in the block; <folder>.lock names it and is touched as a sign of life.

    The lock is the operating system's: a killed process has none.
    """
    file_name = folder + '.lock'
    os.makedirs(os.path.dirname(os.path.abspath(folder)), exist_ok=True)
    with open(file_name, 'a+') as file:
        try:
            import fcntl  # not on Windows: two runs at once go unnoticed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(200) or 'another process'
            raise UserError(f'{folder}: {owner} is preparing it: wait, or end that process first') from None
        except (ImportError, OSError):
            say(f'{file_name}: no locks here: see that no other run prepares {folder}')
        found = stat_of(file_name)                              # an owner that has ended has removed it
        if not found or not os.path.samestat(os.fstat(file.fileno()), found) or os.path.exists(folder):
            raise UserError(f'{folder}: another process has just prepared it: repeat the command')
        ended = threading.Event()
        try:
            file.truncate(0)
            print(f'process {os.getpid()} on {platform.node()}', end='', file=file, flush=True)
            threading.Thread(target=touch, args=(file_name, ended), daemon=True).start()
            yield
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                os.remove(file_name)


def stat_of(file_name):
    try:
        return os.stat(file_name)
    except FileNotFoundError:
        return None


def touch(file_name, ended):
    """A sign of life for processes on other machines; they look at its change, so clocks may differ."""
    while not ended.wait(PATIENCE / 60):
        with contextlib.suppress(OSError):
            os.utime(file_name)


def versions(packages):
    found = {item: importlib.metadata.version(item) for item in packages}
    return {'python': platform.python_version(), **found}


REASONS = {errno.ENOSPC: 'the disk is full', errno.EDQUOT: 'the disk quota is used up',
           errno.EFBIG: 'the limit on the size of a file is reached (ulimit -f)'}


def prepare(config):
    """Prepare one corpus as the knobs in `config` say, or a part of it.  Returns the folder."""
    config = check_config(config)
    default_name, parts = find_corpus(config)
    settings = {knob: value for knob, value in config.items()
                if knob not in ('num_proc', 'data_dir', 'name', 'shard', 'merge', 'share')}
    folder = os.path.join(config['data_dir'], config['name'] or default_name)
    try:
        if is_prepared(folder, settings):
            say(f'{folder}: already prepared')
        elif config['share'][1] > 1:
            write_part(folder, parts, config, settings)
        else:
            with work_folder(folder) as temporary:
                (merge_parts if config['merge'] else write_corpus)(temporary, folder, parts, config, settings)
        if config['merge'] and os.path.exists(folder + '.parts'):
            shutil.rmtree(folder + '.parts')
    except OSError as error:
        reason = REASONS.get(error.errno, error.strerror or error)
        raise UserError(f'{error.filename or folder}: {reason}') from None
    return folder


def read_parts(parts, config, progress, known=None):
    """The parts of a corpus, one after the other.  Returns (number of units, units, what to record of them).

    A unit is an iterable of rows that depend on nothing before it; rows that are joined are one.
    known  what was recorded before: its revisions are read again
    """
    counts, streams, origins = [], [], []
    known = known.get('parts', [known]) if known else [{}] * len(parts)
    for (reader, source, subset, joined), before in zip(parts, known, strict=True):
        revision = before.get('revision', config['revision'])
        count, rows, origin = reader(source, dict(config, subset=subset, revision=revision), progress)
        units = map(rows, range(count))
        if joined:
            units, count = [join_rows(itertools.chain.from_iterable(units), joined, config['max_bytes'])], 1
        counts.append(count)
        streams.append(units)
        origins.append(origin)
    progress.total *= len(parts) == 1                       # each part counts in its own unit
    origin = origins[0] if len(parts) == 1 else {'parts': origins}
    return sum(counts), itertools.chain(*streams), origin


def write_corpus(folder, target, parts, config, settings):
    """Everything that data/<name>/ holds, into `folder`."""
    progress, skipped, name = Progress(), collections.Counter(), os.path.basename(target)
    _, units, origin = read_parts(parts, config, progress)
    source = ' + '.join(part[1] for part in parts)
    say(f'preparing {name} from {source}')
    documents = good_documents(itertools.chain.from_iterable(units), source, config, skipped, progress)
    tools, packages, documents = save_tools(documents, folder, config, progress)
    done = scatter(batches(documents, progress), folder, folder, tools, config, skipped, progress)
    plan = {'settings': settings, 'source': origin, 'tools': tools,
            'versions': versions(('numpy', *packages))}
    write_shards(folder, name, source, plan, done, skipped, config, progress)


def write_shards(folder, name, source, plan, done, skipped, config, progress, parts=()):
    """What comes after the buckets: the shards and meta.json.  done: (documents, tokens)."""
    tools, tokenizer, (total, tokens) = plan['tools'], load_tokenizer(folder, plan['tools']), done
    if not total:
        raise UserError(f'{source}: the tokenizer makes no token of any document')
    train, val = gather(folder, tokenizer, tools, total, config, progress, parts)
    if not train.documents:
        raise UserError(f'{source}: {total} documents, none of them left for training: at least '
                        'two different ones are needed')
    write_bytes(os.path.join(folder, 'word_start.bin'), bytes(map(int, starts_with_specials(tokenizer))))
    meta = {'format': FORMAT, 'name': name, 'corpus': config['corpus'], 'source': plan['source'],
            'text_field': config['text_field'], **tools, 'vocab_size': tokenizer.vocab_size,
            'dtype': id_type(tokenizer.vocab_size).name, 'special': tokenizer.special,
            'unigram_entropy': entropy(train.counts, tokenizer.special['sep']), 'splits': {}, 'files': {},
            'skipped': dict(sorted(skipped.items())), 'settings': plan['settings'],
            'versions': plan['versions']}
    write_meta(folder, meta, (train, val), config['num_proc'])
    seconds = time.monotonic() - progress.started
    say(f'{name}: {train.documents:,} + {val.documents:,} documents, {train.tokens:,} + {val.tokens:,} '
        f'tokens (train + val), vocabulary {tokenizer.vocab_size:,}, {tokens / seconds:,.0f} tokens/s')


def save_tools(documents, folder, config, progress):
    """Makes the tokenizer and the segmenter.  Returns (what to record of them, packages, all documents)."""
    (kind, argument), (segmenter, model) = find_tokenizer(config['tokenizer']), find_segmenter(config)
    chosen = {'tokenizer': (TOKENIZERS[kind], argument)}
    chosen |= {'segmenter': (SEGMENTERS[segmenter], model)} if segmenter else {}
    packages = [package for row, _ in chosen.values() for package in row.packages]
    for package in packages:                                    # before the sample, which can take an hour
        need(package, 'this preparation')
    sample = ()
    if any(row.from_sample and not given for row, given in chosen.values()):
        sample, documents = take_sample(documents, folder, config, progress)
    tools = {knob: row.save(folder, given, config, sample) for knob, (row, given) in chosen.items()}
    return tools, packages, documents


# several machines: the plan, the parts, and their merge

def part_folder(folder, i, n):
    return os.path.join(folder + '.parts', f'{i}_of_{n}')


def write_part(folder, parts, config, settings):
    """This process's part of the corpus into <folder>.parts/; part 0 first makes the plan."""
    (i, n), target = config['share'], part_folder(folder, *config['share'])
    home, name = os.path.join(folder + '.parts', 'plan'), f'{os.path.basename(folder)}, part {i}/{n}'
    os.makedirs(folder + '.parts', exist_ok=True)
    if i == 0 and not os.path.exists(home):
        with work_folder(home) as temporary:
            write_plan(temporary, parts, config, settings)
    plan = wait_for_plan(home, i, n)
    check_plan(folder, plan, n, settings)
    if os.path.exists(target):
        say(f'{name}: done already')
        return
    with work_folder(target) as temporary:
        progress, skipped = Progress(), collections.Counter()
        say(f'preparing {name}')
        work = own_batches(parts, config, skipped, progress, plan)
        documents, tokens = scatter(work, temporary, home, plan['tools'], config, skipped, progress)
        buckets = os.path.join(temporary, 'buckets')
        facts = {item: file_facts(os.path.join(buckets, item)) for item in sorted(os.listdir(buckets))}
        record = {'documents': documents, 'tokens': tokens, 'skipped': skipped, 'files': facts}
        write_bytes(os.path.join(temporary, 'part.json'), json.dumps(record).encode())
    finished = sum(os.path.exists(part_folder(folder, item, n)) for item in range(n))
    say(f'{name}: {documents:,} documents, {tokens:,} tokens; {finished} of {n} parts are done'
        + f': now --merge={n}' * (finished == n))


def write_plan(folder, parts, config, settings):
    """What the parts have in common: the tokenizer of the whole corpus, settings, source, versions."""
    progress = Progress()
    count, units, origin = read_parts(parts, config, progress)
    source = ' + '.join(part[1] for part in parts)
    say(f'preparing the tokenizer of {source}')
    rows = itertools.chain.from_iterable(units)
    documents = good_documents(rows, source, config, collections.Counter(), progress)
    tools, packages, documents = save_tools(documents, folder, config, progress)
    next(documents)                                             # there is one, or the error of one machine
    documents.close()
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, 'head'))
    plan = {'parts': config['share'][1], 'settings': settings, 'source': origin, 'units': count,
            'tools': tools, 'versions': versions(('numpy', *packages))}
    write_bytes(os.path.join(folder, 'plan.json'), json.dumps(plan).encode())


def wait_for_plan(folder, i, n):
    """plan.json as a dict, once part 0 has written it."""
    file_name, last, told, seen = os.path.join(folder, 'plan.json'), time.monotonic(), False, None
    while not os.path.isfile(file_name):
        sign = stat_of(folder + '.lock')
        if sign and sign.st_mtime_ns != seen:
            seen, last = sign.st_mtime_ns, time.monotonic()
        if time.monotonic() - last > PATIENCE:
            raise UserError(f'{folder}: part 0/{n} makes the tokenizer and shows no sign of life: start the '
                            f'same command with --shard=0/{n} first, then --shard={i}/{n} again')
        if not told:
            say(f'part {i}/{n} waits for the tokenizer, which --shard=0/{n} makes')
        told = True
        time.sleep(min(1, PATIENCE / 10))
    return json.loads(read_bytes(file_name))


def check_plan(folder, plan, n, settings):
    """Raises UserError where the plan is of other parts, of other settings or of other packages."""
    home = folder + '.parts'
    if plan['parts'] != n:
        raise UserError(f"{home}: begun as {plan['parts']} parts, now {n}: go on with {plan['parts']} or "
                        'remove the folder')
    refuse_difference(home, plan['settings'], settings)
    for package in set(plan['versions']) - {'python'}:
        need(package, 'this preparation')
        there, here = plan['versions'][package], importlib.metadata.version(package)
        if here != there:
            raise UserError(f'{home}: begun with {package} {there}, here is {here}: pip install '
                            f'{package}=={there}')


def own_batches(parts, config, skipped, progress, plan):
    """Yields (unit, texts) of this process's part: each n-th unit of the corpus.

    Where the units are too few, or documents are counted, all is read, and each n-th batch is the part.
    """
    i, n = config['share']
    count, units, origin = read_parts(parts, config, progress, plan['source'])
    if (count, origin) != (plan['units'], plan['source']):
        raise UserError(f"{config['corpus']}: another source than part 0 has: {json.dumps(origin)} here, "
                        f"{json.dumps(plan['source'])} there")
    source, progress.parts = ' + '.join(part[1] for part in parts), n
    if count >= n and not config['max_documents']:
        rows = numbered(itertools.islice(enumerate(units), i, None, n), progress)
        yield from batches(good_documents(rows, source, config, skipped, progress, whole=False), progress)
    else:
        counted = skipped if i == 0 else collections.Counter()
        documents = good_documents(itertools.chain.from_iterable(units), source, config, counted, progress)
        numbers = enumerate(texts for _, texts in batches(documents, progress))
        yield from itertools.islice(numbers, i, None, n)


def numbered(units, progress):
    """(number, rows) of units -> their rows; progress.unit is the number of the unit that is read."""
    for progress.unit, rows in units:
        yield from rows


def merge_parts(folder, target, parts, config, settings):
    """Everything that data/<name>/ holds, into `folder`, of the finished parts."""
    n, progress, skipped = config['merge'], Progress(), collections.Counter()
    home, name = os.path.join(target + '.parts', 'plan'), os.path.basename(target)
    folders = [part_folder(target, i, n) for i in range(n)]
    if not os.path.exists(home):
        raise UserError(f'{target}.parts: no parts are there: first run --shard=0/{n} and so on')
    plan = json.loads(read_bytes(os.path.join(home, 'plan.json')))
    check_plan(target, plan, n, settings)
    missing = [f'--shard={i}/{n}' for i in range(n) if not os.path.exists(folders[i])]
    if missing:
        more = f' and {len(missing) - 5} more' if len(missing) > 5 else ''
        raise UserError(f"{target}.parts: not finished: {', '.join(missing[:5])}{more}: run them first")
    say(f'merging {n} parts of {name}')
    records = [json.loads(read_bytes(os.path.join(item, 'part.json'))) for item in folders]
    for item in sorted(set(os.listdir(home)) - {'plan.json'}):
        write_bytes(os.path.join(folder, item), read_bytes(os.path.join(home, item)))
    for record in records:
        skipped.update(record['skipped'])
    os.mkdir(os.path.join(folder, 'buckets'))
    done = [sum(record[key] for record in records) for key in ('documents', 'tokens')]
    sources = [(item, record['files']) for item, record in zip(folders, records, strict=True)]
    source = ' + '.join(part[1] for part in parts)
    write_shards(folder, name, source, plan, done, skipped, config, progress, sources)


def append_part(source, target, files):
    """Appends a part's bucket file to a bucket file; it must be what the part wrote."""
    digest = hashlib.sha256()
    with open(target, 'ab') as joined:
        joined.writelines(read_blocks(source, digest))
    if digest.hexdigest() != files[os.path.basename(source)]['sha256']:
        part = os.path.dirname(os.path.dirname(source))
        again = os.path.basename(part).replace('_of_', '/')
        raise UserError(f'{source}: damaged: remove {part} and repeat --shard={again}')


def starts_with_specials(tokenizer):
    """(vocab_size,) bools: where a word can start; special tokens stand for themselves."""
    specials = set(tokenizer.special.values())
    return [start or item in specials for item, start in enumerate(tokenizer.word_starts())]


def main():
    config, _ = configure(globals())
    prepare(config)


if __name__ == '__main__':
    run(main)
