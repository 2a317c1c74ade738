"""prepare_data.py: byte-equal results, every bad row counted, nothing lost, nothing held out that trains."""
import base64
import collections
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
import types

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import prepare_data  # noqa: E402
from configurator import UserError, is_knob  # noqa: E402

pytest.importorskip('sentencepiece')
WORDS = ['red', 'green', 'blue', 'small', 'large', 'quick', 'slow', 'river', 'mountain', 'house', 'walks',
         'sings', 'reads', 'under', 'over', 'the', 'of', 'and', '[MASK]']
VOCAB = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[', ']', 'mask', 'the', 'of', 'and', 'red', 'ri',
         '##ver', 'walks']
DEFAULTS = {name: value for name, value in vars(prepare_data).items() if is_knob(name, value)}


def knobs(folder, **changes):
    usual = {'data_dir': str(folder / 'data'), 'name': 'x', 'vocab_size': 60, 'num_proc': 1}
    return DEFAULTS | usual | changes


def prepare(folder, **changes):
    """Returns (folder, meta) of a prepared corpus."""
    made = prepare_data.prepare(knobs(folder, **changes))
    return made, prepare_data.load_meta(made)


def make_texts(count, seed=0):
    """Texts of 3 to 60 words, all different."""
    pick = random.Random(seed)
    return [f'{i} ' + ' '.join(pick.choices(WORDS, k=pick.randint(3, 60))) for i in range(count)]


def write_jsonl(file_name, texts, field='text', opener=open):
    with opener(file_name, 'wb') as file:
        for text in texts:
            file.write(json.dumps({'id': 1, field: text}).encode() + b'\n')
    return str(file_name)


def read_split(folder, meta, split):
    """The documents of a split as tuples of ids without [SEP]; checks the offsets on the way."""
    documents = []
    for shard in meta['splits'][split]['shards']:
        ids = np.fromfile(os.path.join(folder, shard['tokens']), np.dtype(meta['dtype']).newbyteorder('<'))
        starts = np.fromfile(os.path.join(folder, shard['documents']), '<i8')
        assert starts[0] == 0 and starts[-1] == len(ids) == shard['n_tokens']
        assert len(starts) - 1 == shard['n_documents']
        assert np.array_equal(starts[1:] - 1, np.flatnonzero(ids == meta['special']['sep']))
        documents += [tuple(ids[a:b - 1].tolist()) for a, b in zip(starts, starts[1:], strict=False)]
    assert len(documents) == meta['splits'][split]['documents']
    return documents


def contents(folder):
    return {name: open(os.path.join(folder, name), 'rb').read() for name in sorted(os.listdir(folder))}


def tiktoken_file(folder):
    """The 256 bytes and one merge in tiktoken's format."""
    tokens = [bytes([i]) for i in range(256)] + [b' t', b'he']
    lines = [base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(tokens)]
    (folder / 'tiny.tiktoken').write_bytes(b''.join(lines))
    return f'tiktoken:{folder}/tiny.tiktoken'


def wordpiece_file(folder):
    (folder / 'vocab.txt').write_text('\n'.join(VOCAB) + '\n')
    return f'wordpiece:{folder}/vocab.txt'


SPECS = {'sentencepiece': lambda folder: 'sentencepiece', 'wordpiece': wordpiece_file,
         'tiktoken': tiktoken_file}
NEEDS = {'sentencepiece': 'sentencepiece', 'wordpiece': 'tokenizers', 'tiktoken': 'tiktoken'}


def test_same_bytes_for_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'BATCH_BYTES', 2000)
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300))
    made = [contents(prepare(tmp_path / str(n), corpus=source, num_proc=n)[0]) for n in (1, 2, 3, 1)]
    assert made[0] == made[1] == made[2] == made[3]


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_every_document_once_and_literal_mask_is_text(tmp_path, kind):
    pytest.importorskip(NEEDS[kind])
    texts = make_texts(300) + ['the red [MASK] walks']
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path))
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    train, val = read_split(folder, meta, 'train'), read_split(folder, meta, 'val')
    direct = [tuple(tokenizer.encode(text)) for text in texts]
    assert collections.Counter(train + val) == collections.Counter(direct)
    assert train != sorted(train, key=direct.index)                             # shuffled
    assert tokenizer.encode_batch(texts[:5]) == [tokenizer.encode(text) for text in texts[:5]]
    ids = tokenizer.encode('the red [MASK] walks')
    assert not set(ids) & set(tokenizer.special.values())
    assert 'mask' in tokenizer.decode(ids).lower() and tokenizer.piece(tokenizer.special['mask']) == '[MASK]'
    assert tokenizer.vocab_size == meta['vocab_size'] > max(tokenizer.special.values())
    assert set(tokenizer.special) - {'unk'} == {'pad', 'cls', 'sep', 'mask'}
    assert ('unk' in tokenizer.special) == (kind != 'tiktoken')


def test_meta_counts_entropy_and_digests(tmp_path):
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(500)))
    train = np.concatenate([np.array(ids) for ids in read_split(folder, meta, 'train')])
    share = np.unique(train, return_counts=True)[1] / len(train)
    assert meta['unigram_entropy'] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    assert meta['splits']['train']['tokens'] == len(train) + meta['splits']['train']['documents']
    for name, data in contents(folder).items():
        if name != 'meta.json':
            assert meta['files'][name] == {'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}
    assert sorted(os.listdir(folder)) == sorted([*meta['files'], 'meta.json'])
    assert meta['special'] == {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}


def test_validation_is_never_in_train(tmp_path):
    texts = make_texts(200) * 3
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', texts), val_fraction=0.2)
    train, val = read_split(folder, meta, 'train'), read_split(folder, meta, 'val')
    assert not set(train) & set(val) and len(train) + len(val) == 600
    assert 60 < len(val) < 180 and all(count == 3 for count in collections.Counter(val).values())
    source = str(tmp_path / 'a.jsonl')
    _, few = prepare(tmp_path, corpus=source, val_fraction=0.2, val_documents=10, name='few')
    assert few['splits']['val']['documents'] == 9                       # three texts, each three times
    _, one = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'), val_fraction=1e-9, name='one')
    assert one['splits']['val']['documents'] == 3


def test_shards_end_at_the_limit(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300) + ['red ' * 2000])
    folder, meta = prepare(tmp_path, corpus=source, shard_bytes=1000)
    shards = meta['splits']['train']['shards']
    assert len(shards) > 10
    assert all(shard['n_tokens'] * 2 <= 1000 or shard['n_documents'] == 1 for shard in shards)
    whole = prepare(tmp_path, corpus=source, name='whole')
    assert read_split(folder, meta, 'train') == read_split(*whole, 'train')


def test_large_vocabulary_is_uint32(tmp_path):
    pytest.importorskip('tokenizers')
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB + [f'w{i}' for i in range(66000)]))
    source = write_jsonl(tmp_path / 'a.jsonl', [f'the w{i} w{65990 + i % 10}' for i in range(50)])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=f'wordpiece:{tmp_path}/vocab.txt')
    assert meta['dtype'] == 'uint32'
    assert max(max(ids) for ids in read_split(folder, meta, 'train')) > 65536


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_word_starts(tmp_path, kind):
    pytest.importorskip(NEEDS[kind])
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path))
    starts = np.fromfile(os.path.join(folder, 'word_start.bin'), np.uint8)
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    pieces = [tokenizer.piece(item) for item in range(tokenizer.vocab_size)]
    rule = {'sentencepiece': lambda piece: piece[:1] == '\u2581',
            'wordpiece': lambda piece: piece[:2] != '##',
            'tiktoken': lambda piece: not piece[:1].isalnum() and piece[:1] != '\ufffd'}[kind]
    specials = set(tokenizer.special.values())
    assert starts.tolist() == [int(item in specials or rule(piece)) for item, piece in enumerate(pieces)]
    assert 0 < starts.sum() < len(starts)


BAD = {                                                         # line of a .jsonl: kind it is counted as
    b'{"text": null}': 'null', b'{"text": 3}': 'not a string', b'{"text": " \\n"}': 'empty',
    b'{"text": "a\\ud800b"}': 'lone surrogate', b'{"text": "a\\u0000b"}': 'NUL',
    b'{"text": "\xff"}': 'invalid UTF-8',
    b'{"text": "' + b'a' * 10**7 + b'"}': 'too long', b'{"text": "cut': 'broken JSON',
    b'[1, 2]': 'not an object',
    b'{"title": "x"}': 'missing field', b'[' * 100_000: 'broken JSON'}


def test_bad_rows_are_counted_and_named(tmp_path, capfd):
    good = [json.dumps({'text': text}).encode() for text in make_texts(100)]
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join([*good[:50], *BAD, b'', *good[50:]]))
    _, meta = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'))
    assert meta['skipped'] == collections.Counter(BAD.values())
    assert meta['splits']['train']['documents'] + meta['splits']['val']['documents'] == 100
    said = capfd.readouterr().err
    for line, kind in enumerate(list(BAD.values())[:5], 51):
        assert f'a.jsonl:{line}: {kind}\n' in said
    assert said.count('skipped ') == 6


def test_bad_rows_of_the_other_formats(tmp_path):
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    texts, corpus = make_texts(60), tmp_path / 'corpus'
    corpus.mkdir()
    column = arrow.array([text.encode() for text in texts] + [b'\xff', None, b''], arrow.binary())
    column = arrow.StringArray.from_buffers(len(column), *column.buffers()[1:], column.buffers()[0])
    parquet.write_table(arrow.table({'text': column, 'n': range(len(column))}), corpus / 'a.parquet')
    (corpus / 'b.txt').write_bytes('\ufeffred house\n'.encode() + b'\xff\nmore\n\0\n')
    write_jsonl(corpus / 'c.jsonl.gz', texts, opener=gzip.open)
    cut = (corpus / 'c.jsonl.gz').read_bytes()
    (corpus / 'c.jsonl.gz').write_bytes(cut[:-9])
    (corpus / 'd.parquet').write_bytes(b'no parquet')
    (corpus / 'e').write_text('a file without an ending is text')
    _, meta = prepare(tmp_path, corpus=str(corpus))
    assert meta['skipped'] == {'NUL': 1, 'broken archive': 1, 'broken parquet': 1, 'empty': 1,
                               'invalid UTF-8': 2, 'null': 1}


def test_readers_agree(tmp_path):
    texts = make_texts(40)
    for name in ('jsonl', 'gz', 'txt'):
        (tmp_path / name / 'deep').mkdir(parents=True)
    write_jsonl(tmp_path / 'jsonl' / 'a.jsonl', texts)
    write_jsonl(tmp_path / 'gz' / 'deep' / 'a.jsonl.gz', texts, opener=gzip.open)
    for i, text in enumerate(texts):
        (tmp_path / 'txt' / 'deep' / f'{i}.txt').write_text(text)
    sources = {'plain': 'jsonl/a.jsonl', 'gz': 'gz', 'txt': 'txt', 'glob': '*sonl/*.jsonl',
               'deep': 'gz/**/*.gz'}
    made = {name: prepare(tmp_path, corpus=str(tmp_path / source), name=name, tokenizer='sentencepiece')
            for name, source in sources.items()}
    documents = {name: sorted(read_split(*pair, 'train')) for name, pair in made.items()}
    assert all(found == documents['plain'] for found in documents.values()) and len(documents['plain']) >= 38


def test_zst_and_parquet(tmp_path):
    zstandard, arrow = pytest.importorskip('zstandard'), pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    texts = make_texts(40)
    data = pathlib.Path(write_jsonl(tmp_path / 'a.jsonl', texts, 'body')).read_bytes()
    half = data.index(b'\n', len(data) // 2) + 1
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    (tmp_path / 'a.jsonl.zst').write_bytes(b''.join(frames))
    parquet.write_table(arrow.table({'n': range(40), 'body': texts}), tmp_path / 'a.parquet')
    made = [prepare(tmp_path, corpus=str(tmp_path / item), name=item, text_field='body')
            for item in ('a.jsonl', 'a.jsonl.zst', 'a.parquet')]
    documents = [read_split(*pair, 'train') for pair in made]
    assert documents[0] == documents[1] == documents[2]
    with pytest.raises(UserError, match="text_field='text': no row .* n, body"):
        prepare(tmp_path, corpus=str(tmp_path / 'a.parquet'), name='none')


def test_long_text_file_is_cut_at_blank_lines(tmp_path):
    parts = [f'part {i} ' + 'red house ' * 30 for i in range(20)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(parts))
    config = knobs(tmp_path, max_bytes=1000)
    rows = list(prepare_data.read_txt(str(tmp_path / 'a.txt'), config, None))
    assert [bad for _, _, bad in rows] == [''] * len(rows) and len(rows) == 7
    assert ''.join(text for _, text, _ in rows) == '\n\n'.join(parts)
    assert all(text.startswith('part') for _, text, _ in rows)
    assert rows[1][0] == 1 + 2 * rows[0][1].count('part')


def test_rows_are_joined():
    rows = [(f'f:{i}', text, bad) for i, (text, bad) in enumerate(
        [(' = A = \n', ''), ('', 'empty'), ('one\n', ''), (' = = s = = \n', ''), (' = B = \n', ''),
         ('', 'NUL'), ('two', '')])]
    assert list(prepare_data.join_rows(rows, '^ = [^=]', 10**6)) == [
        ('f:0', ' = A = \none\n = = s = = ', ''), ('f:5', '', 'NUL'), ('f:4', ' = B = \ntwo', '')]
    joined = [text for _, text, bad in prepare_data.join_rows(rows, 2, 10**6) if not bad]
    assert [text.count('\n') for text in joined] == [1, 1, 0]
    assert all(len(text) < 20 for _, text, bad in prepare_data.join_rows(rows, 9, 60))


def test_oscar_filter_on_both_schemas(tmp_path):
    english = {'identification': {'label': 'en', 'prob': 0.9}}
    cases = [(english, ''), (dict(english, annotation=None), ''),
             (dict(english, annotation=['tiny']), 'quality warning'),
             (dict(english, quality_warnings=['header']), 'quality warning'),
             (dict(english, harmful_pp=4.9), 'harmful_pp'),
             (dict(english, harmful_pp=100_001.0), 'harmful_pp'),
             (dict(english, harmful_pp=5.0, categories=['blog']), ''),
             (dict(english, quality_warnings=None, categories=['blog', 'sect']), 'blocked category'),
             ({'identification': {'label': 'fr'}}, 'not English')]
    with open(tmp_path / 'a.jsonl', 'w') as file:
        for copy in range(10):
            for i, (metadata, _) in enumerate(cases):
                print(json.dumps({'content': make_texts(90)[9 * copy + i], 'metadata': metadata}), file=file)
    folder, meta = prepare(tmp_path, corpus='oscar', path=str(tmp_path / 'a.jsonl'))
    expected = collections.Counter(f'filtered: {reason}' for _, reason in cases if reason)
    assert meta['skipped'] == {reason: 10 * count for reason, count in expected.items()}
    assert len(read_split(folder, meta, 'train') + read_split(folder, meta, 'val')) == 30


def test_docstrings_of_a_package(tmp_path, monkeypatch):
    text = 'A sentence that is long enough to be kept, number {}.'
    package = tmp_path / 'tinypackage'
    package.mkdir()
    (package / '__init__.py').write_text(
        f'"""{text.format(1)}"""\nclass A:\n    """{text.format(2)}\n\n    more\n    """\n'
        f'    async def f(self):\n        """{text.format(1)}"""\n        """{text.format(9)}"""\n')
    (package / 'b.py').write_text(
        f'raise OSError\nif x:\n    def f():\n        "{text.format(3)}"\n'
        f'add_newdoc("a", "b", """{text.format(4)}{text.format(5)}""")\n'
        f'f = lambda: 1\ndef g():\n    "short"\n')
    (package / 'c.py').write_text('def broken(:\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    config, progress = knobs(tmp_path), prepare_data.Progress()
    rows, origin = prepare_data.read_docstrings('tinypackage', config, progress)
    rows = list(rows)
    assert sorted(row[1] for row in rows if not row[2]) == sorted(
        [text.format(1), text.format(2) + '\n\nmore', text.format(3), text.format(4) + text.format(5)])
    assert [row for row in rows if row[2]] == [('tinypackage/c.py:1', '', 'does not parse')]
    assert origin == {'packages': {'tinypackage': ''}, 'files': 3} and 'tinypackage' not in sys.modules
    with pytest.raises(UserError, match='pip install nosuchpackage'):
        prepare_data.read_docstrings('nosuchpackage', config, progress)


def test_hub_rows_revision_and_errors(tmp_path, monkeypatch):
    datasets, hub = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    source = write_jsonl(tmp_path / 'a.jsonl', [*make_texts(50), None])
    local, asked = datasets.load_dataset, []

    def load_dataset(name, subset, split, streaming, revision):
        asked.append((name, subset, split, revision))
        cache = str(tmp_path / 'cache')
        return local('json', data_files=source, split=split, streaming=streaming, cache_dir=cache)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    facts = types.SimpleNamespace(sha='abc123')
    monkeypatch.setattr(hub.HfApi, 'dataset_info', lambda self, name, revision: facts)
    _, meta = prepare(tmp_path, corpus='wikipedia')
    assert asked == [('wikimedia/wikipedia', '20231101.en', 'train', 'abc123')]
    assert meta['source']['revision'] == 'abc123' and meta['skipped'] == {'null': 1}
    folder, meta = prepare(tmp_path, corpus='books+wikipedia', name='')
    books, wikipedia = meta['source']['parts']
    assert (books['hub'], wikipedia['hub']) == ('SamuelYang/bookcorpus', 'wikimedia/wikipedia')
    assert asked[1:] == [('SamuelYang/bookcorpus', None, 'train', 'abc123'), asked[0]]
    assert meta['name'] == 'books_wikipedia' and meta['skipped'] == {'null': 2}
    assert len(read_split(folder, meta, 'train') + read_split(folder, meta, 'val')) == 1 + 50
    monkeypatch.setattr(hub.HfApi, 'dataset_info', lambda self, name, revision: 1 / 0)
    with pytest.raises(UserError, match='owner/name: the Hugging Face hub .* ZeroDivisionError'):
        prepare(tmp_path, corpus='owner/name', name='other')


def command(folder, *arguments):
    line = [sys.executable, os.path.join(ROOT, 'prepare_data.py'), f'--data_dir={folder}/data', *arguments]
    return subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=dict(os.environ, HF_HUB_OFFLINE='1'))


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='kill -9 is a POSIX signal')
def test_killed_run_repeated_equals_an_undisturbed_one(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(20_000))
    (tmp_path / 'ref').mkdir()
    arguments = [f'--corpus={source}', '--name=x', '--vocab_size=60', '--num_proc=2',
                 '--tokenizer_sample=100000']
    process = command(tmp_path, *arguments)
    work = tmp_path / 'data' / 'x.tmp'
    while process.poll() is None and not (work / 'buckets').exists():
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert (work / 'buckets').exists() and not (tmp_path / 'data' / 'x').exists()
    again, reference = command(tmp_path, *arguments), command(tmp_path / 'ref', *arguments)
    assert again.communicate() and reference.communicate() and again.returncode == reference.returncode == 0
    assert contents(tmp_path / 'data' / 'x') == contents(tmp_path / 'ref' / 'data' / 'x')
    assert os.listdir(tmp_path / 'data') == ['x']


@pytest.mark.parametrize('arguments, said', [
    (['--corpus=nowhere.jsonl'], "corpus='nowhere.jsonl': no such file; choose one of docstrings,"),
    (['--corpus=.', '--val_fraction=2'], 'val_fraction=2.0: must lie between 0 and 1 (0.01 is usual)'),
    (['--corpus=.', '--tokenizer=wordpeice'], "tokenizer='wordpeice': choose one of sentencepiece"),
    (['--corpus=.', '--name=a/b'], "name='a/b': letters"),
    (['--corpus=good.jsonl', '--text_field=body'], 'no row of good.jsonl has it; its fields are id'),
    (['--corpus=empty.jsonl'], 'empty.jsonl: no document in it'),
    (['--corpus=good.jsonl', '--vocab_size=90000'], 'vocab_size=90000: sentencepiece cannot train it'),
    (['--corpus=good.jsonl', '--tokenizer=tiktoken:nosuch'], "'tiktoken:nosuch': no such file; choose"),
    (['--corpus=owner/name'], 'owner/name: the Hugging Face hub did not give it'),
    (['--corpus=oscar'], "corpus='oscar' needs --path="),
    (['--corpus=good.jsonl', '--data_dir=good.jsonl'], 'good.jsonl'),
    (['--corpus=one.jsonl', '--vocab_size=30'], 'none of them left for training'),
])
def test_malformed_command_lines(tmp_path, arguments, said):
    write_jsonl(tmp_path / 'good.jsonl', make_texts(30))
    write_jsonl(tmp_path / 'one.jsonl', [' '.join(WORDS)])
    (tmp_path / 'empty.jsonl').write_bytes(b'{"text": ""}\n')
    process = command(tmp_path, '--num_proc=1', *arguments)
    output, errors = process.communicate()
    lines = [line for line in errors.splitlines() if not line.startswith('preparing ')]
    assert process.returncode == 2 and len(lines) == 1 and said in lines[0] and not output


def test_prepared_folder_is_kept_or_refused(tmp_path, capfd):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    before = contents(prepare(tmp_path, corpus=source)[0])
    assert contents(prepare(tmp_path, corpus=source, num_proc=2)[0]) == before
    assert 'already prepared' in capfd.readouterr().err
    with pytest.raises(UserError, match='prepared with vocab_size=60, now vocab_size=50'):
        prepare(tmp_path, corpus=source, vocab_size=50)


def test_load_meta_names_what_is_wrong(tmp_path):
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(100)))
    file_name = os.path.join(folder, 'meta.json')
    cases = [(dict(meta, format=2), 'format 2'), (dict(meta, files={}), 'not a file of this folder'),
             ([], 'broken'),
             (dict(meta, files={**meta['files'], '../x': {'bytes': 1}}), "'../x', which is not a file"),
             (dict(meta, files={**meta['files'], 'gone': {'bytes': 1}}), 'gone: missing')]
    for content, said in cases:
        with open(file_name, 'w') as file:
            json.dump(content, file)
        with pytest.raises(UserError, match=said):
            prepare_data.load_meta(folder)
    with open(file_name, 'w') as file:
        file.write(json.dumps(meta)[:-20])
    with pytest.raises(UserError, match='broken'):
        prepare_data.load_meta(folder)
    with open(file_name, 'w') as file:
        json.dump(meta, file)
    with open(os.path.join(folder, 'train_00000.bin'), 'ab') as file:
        file.write(b'xx')
    with pytest.raises(UserError, match='train_00000.bin: .* bytes, should have'):
        prepare_data.load_meta(folder)
    with pytest.raises(UserError, match='not prepared .* prepare_data.py --name=none'):
        prepare_data.load_meta(str(tmp_path / 'none'))


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    for name, value in (('BATCH_BYTES', 50_000), ('FLUSH_BYTES', 200_000), ('WRITE_BYTES', 50_000)):
        monkeypatch.setattr(prepare_data, name, value)
    small, _ = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(300)))
    model = os.path.join(small, 'sentencepiece.model')
    peaks = []
    for size in (20_000, 60_000):
        source = write_jsonl(tmp_path / f'{size}.jsonl', make_texts(size))
        tracemalloc.start()
        prepare(tmp_path, corpus=source, tokenizer=f'sentencepiece:{model}', name=str(size),
                shard_bytes=300_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        os.remove(source)
    assert peaks[1] < 1.5 * peaks[0]


def test_real_novels(tmp_path):
    data = os.environ.get('THINBERT_DATA') or os.path.join(ROOT, '..', 'shared', 'data')
    archive = os.path.join(data, 'en_100_novels.tar.xz')
    if not os.path.isfile(archive):
        pytest.skip('the novels are not here; set THINBERT_DATA to their folder')
    with tarfile.open(archive) as file:
        novels = (member for member in file if member.isfile() and member.name.endswith('.txt'))
        for member in itertools.islice(novels, 20):
            (tmp_path / os.path.basename(member.name)).write_bytes(file.extractfile(member).read())
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / '*.txt'), vocab_size=2000,
                           tokenizer_sample=1_000_000, max_bytes=100_000)
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    train = read_split(folder, meta, 'train')
    assert meta['splits']['train']['tokens'] > 10**6 and 5 < meta['unigram_entropy'] < np.log(2000)
    assert ' the ' in tokenizer.decode(train[0])
