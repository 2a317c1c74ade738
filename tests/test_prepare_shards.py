"""prepare_data.py on several machines and under faults: the same bytes as one undisturbed run, or one line.

FAULTS=50 runs each random fault so often; by default it is quick.
"""
import collections
import contextlib
import functools
import gzip
import hashlib
import json
import os
import pathlib
import pickle
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import types

import numpy as np
import pytest
from conftest import stage, tiny, torchrun
from test_prepare_data import NEEDS, SPECS, contents, knobs, make_chinese, make_texts, prepare, write_jsonl

import prepare_data
from configurator import UserError

FAULTS = int(os.environ.get('FAULTS', '1'))
SETTINGS = ('--name=x', '--vocab_size=60', '--tokenizer_sample=100000', '--num_proc=2')


@pytest.fixture(autouse=True)
def small(monkeypatch):
    changes = {'BATCH_BYTES': 2000, 'FLUSH_BYTES': 20_000, 'WRITE_BYTES': 5000, 'PATIENCE': 2}
    for name, value in changes.items():
        monkeypatch.setattr(prepare_data, name, value)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'):
        monkeypatch.delenv(name, raising=False)


def in_parts(folder, n, order=None, **changes):
    """The corpus prepared in n parts, one after the other in any order that begins with part 0."""
    for i in order or range(n):
        prepare_data.prepare(knobs(folder, shard=f'{i}/{n}', **changes))
    assert not os.path.exists(folder / 'data' / 'x')
    made = prepare_data.prepare(knobs(folder, merge=n, **changes))
    assert os.listdir(folder / 'data') == ['x']
    return contents(made)


def jsonl_files(folder):
    """Files of several sizes, bad rows among them; one is empty, one of bad rows alone."""
    for k in range(5):
        write_jsonl(folder / f'{k}.jsonl', [*make_texts(70 * k, seed=k), None, '', 3])
    (folder / '5.jsonl').write_bytes(b'')
    (folder / 'deep').mkdir()
    write_jsonl(folder / 'deep' / '0.jsonl.gz', make_texts(80, seed=9), opener=gzip.open)
    return {'corpus': str(folder)}


def one_jsonl(folder):
    return {'corpus': write_jsonl(folder / 'a.jsonl', [*make_texts(150), None, *make_texts(150)])}


def text_files(folder):
    for k, text in enumerate(make_texts(60)):
        (folder / f'{k}.txt').write_text('\n\n'.join([text] * (40 if k == 7 else 1)))
    (folder / 'a.txt').write_bytes(b'good\n\xff\n\0\nmore')
    return {'corpus': str(folder / '*.txt'), 'max_bytes': 3000}


def parquet_files(folder):
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    for k in range(3):
        parquet.write_table(arrow.table({'text': [*make_texts(90, seed=k), None]}), folder / f'{k}.parquet')
    return {'corpus': str(folder)}


def docstrings(folder):
    texts = make_texts(90)
    for k in range(9):
        body = '\n'.join(f'def f{i}():\n    """{texts[k * i]} and enough words to be kept"""'
                         for i in range(9))
        (folder / f'm{k}.py').write_text(body if k else 'def broken(:')
    (folder / '__init__.py').write_text('')
    return {'corpus': 'docstrings', 'path': folder.name}


def chinese(folder):
    pytest.importorskip('tokenizers')
    return {'corpus': write_jsonl(folder / 'a.jsonl', make_chinese(200)), 'tokenizer': 'character',
            'segmenter': 'sentencepiece', 'segmenter_vocab': 90}


def oscar(folder):
    records = [{'content': text, 'metadata': {'identification': {'label': 'en' if i % 3 else 'fr'}}}
               for i, text in enumerate(make_texts(300))]
    for k in range(3):
        with open(folder / f'{k}.jsonl', 'w') as file:
            file.writelines(json.dumps(record) + '\n' for record in records[100 * k:100 * k + 100])
    return {'corpus': 'oscar', 'path': str(folder)}


KINDS = {'jsonl files': jsonl_files, 'one jsonl': one_jsonl, 'txt': text_files, 'parquet': parquet_files,
         'docstrings': docstrings, 'chinese': chinese, 'oscar': oscar,
         'so many documents': lambda folder: dict(jsonl_files(folder), max_documents=333)}


@pytest.mark.parametrize('kind', KINDS)
def test_parts_make_the_same_bytes_as_one_machine(tmp_path, monkeypatch, kind):
    (tmp_path / 'source').mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    usual = KINDS[kind](tmp_path / 'source') | {'shard_bytes': 4000, 'val_fraction': 0.1}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    assert len(reference) > 8
    assert in_parts(tmp_path / '3', 3, order=[0, 2, 1], **usual) == reference


@pytest.mark.parametrize('n', [2, 7, 30])
def test_any_number_of_parts(tmp_path, n):
    usual = jsonl_files(tmp_path)
    assert in_parts(tmp_path / 'parts', n, **usual) == contents(prepare(tmp_path / 'ref', **usual)[0])


@pytest.mark.parametrize('name, files', [('fineweb', 3), ('fineweb', 1), ('wikitext', 3),
                                         ('books+fineweb', 3)])
def test_parts_of_the_hub(tmp_path, monkeypatch, name, files):
    datasets, hub = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    sources = [write_jsonl(tmp_path / f'{k}.jsonl', [*make_texts(80, k), None, ' = A = '])
               for k in range(files)]
    local, heads, asked = datasets.load_dataset, iter(('new', 'newer', 'newest')), []

    def load_dataset(name, subset, split, streaming, revision):
        asked.append(revision)
        cache = str(tmp_path / 'cache')
        return local('json', data_files=sources, split=split, streaming=streaming, cache_dir=cache)

    def dataset_info(self, name, revision):
        return types.SimpleNamespace(sha=revision or next(heads))

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(hub.HfApi, 'dataset_info', dataset_info)
    usual = {'corpus': name, 'revision': 'r' if '+' in name else ''}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    heads = iter(('new', 'newer', 'newest'))                        # it grows while the parts are read
    assert in_parts(tmp_path / 'parts', 3, **usual) == reference
    assert set(asked) == {'r' if '+' in name else 'new'}


def test_launchers_number_the_parts(tmp_path, monkeypatch):
    share = {}
    for names, values in (((), ''), (('RANK', 'WORLD_SIZE'), '13'), (('RANK', 'WORLD_SIZE'), '01'),
                          (('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'), '250'),
                          (('SLURM_PROCID', 'SLURM_NTASKS'), '04'),       # the script of sbatch itself
                          (('RANK', 'WORLD_SIZE', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'), '12450')):
        with monkeypatch.context() as patch:
            for key, value in zip(names, values, strict=True):
                patch.setenv(key, value)
            share[values] = prepare_data.find_share(knobs(tmp_path))
            assert prepare_data.find_share(knobs(tmp_path, shard='3/9')) == (3, 9)
            assert prepare_data.find_share(knobs(tmp_path, merge=3)) == (0, 1)
    assert list(share.values()) == [(0, 1), (1, 3), (0, 1), (2, 5), (0, 1), (1, 2)]


def test_torchrun_and_srun_prepare_parts(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300))
    command = ['prepare_data.py', f'--corpus={source}', '--vocab_size=60', '--num_proc=1', '--name=x']
    reference = prepare(tmp_path / 'ref', corpus=source)[0]
    run = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    done = stage(*run, *command, f'--data_dir={tmp_path}/torchrun')
    assert done.returncode == 0, done.stderr
    srun = [subprocess.Popen([sys.executable, *command, f'--data_dir={tmp_path}/srun'], cwd=prepare_root(),
                             env=dict(os.environ, SLURM_PROCID=rank, SLURM_NTASKS='2', SLURM_STEP_ID='0'))
            for rank in '10']                                       # part 1 starts first, and waits
    assert [process.wait(100) for process in srun] == [0, 0]
    for launcher in ('torchrun', 'srun'):
        merged = stage(*command, f'--data_dir={tmp_path}/{launcher}', '--merge=2')
        assert merged.returncode == 0, merged.stderr
        assert contents(tmp_path / launcher / 'x') == contents(reference)


def prepare_root():
    return os.path.dirname(prepare_data.__file__)


@pytest.mark.parametrize('changes, said', [
    ({'shard': '4/4'}, "shard='4/4': must be i/n with i from 0 to n - 1, as in 0/4"),
    ({'shard': 'x/2'}, "shard='x/2': must be i/n"), ({'shard': '1/0'}, "shard='1/0': must be i/n"),
    ({'shard': '-1/2'}, "shard='-1/2': must be i/n"), ({'shard': '1'}, "shard='1': must be i/n"),
    ({'shard': '0/999999'}, "shard='0/999999': must be i/n"), ({'merge': -1}, 'merge=-1: must lie between 0'),
    ({'shard': '0/2', 'merge': 2}, "shard='0/2', merge=2: give one"),
    ({'merge': 3}, 'x.parts: not finished: --shard=1/3, --shard=2/3: run them first'),
    ({'merge': 4}, 'x.parts: begun as 3 parts, now 4: go on with 3 or remove the folder'),
    ({'shard': '0/2'}, 'x.parts: begun as 3 parts, now 2'),
    ({'shard': '1/3', 'vocab_size': 50}, 'x.parts: prepared with vocab_size=60, now vocab_size=50'),
    ({'merge': 3, 'seed': 2}, 'x.parts: prepared with seed=1, now seed=2'),
    ({'merge': 2, 'name': 'y'}, 'y.parts: no parts are there: first run --shard=0/2 and so on'),
    ({'shard': '1/2', 'name': 'y'}, 'part 0/2 makes the tokenizer and shows no sign of life: start the same '
     'command with --shard=0/2 first, then --shard=1/2 again')])
def test_malformed_parts(tmp_path, changes, said):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    prepare_data.prepare(knobs(tmp_path, corpus=source, shard='0/3'))
    before = tree(tmp_path)
    with pytest.raises(UserError) as error:
        prepare_data.prepare(knobs(tmp_path, corpus=source, **changes))
    assert said in str(error.value) and tree(tmp_path) == before


def tree(folder):
    """All files below a folder with their contents."""
    return {str(item): item.read_bytes() for item in pathlib.Path(folder).rglob('*') if item.is_file()}


def test_error_of_a_part_is_that_of_one_machine(tmp_path):
    """What is wrong with the corpus is found by part 0 before anything is read to its end."""
    write_jsonl(tmp_path / 'bad.jsonl', [None, ''])
    write_jsonl(tmp_path / 'good.jsonl', make_texts(30))
    for changes in ({'corpus': f'{tmp_path}/bad.jsonl'},
                    {'corpus': f'{tmp_path}/good.jsonl', 'text_field': 'x'},
                    {'corpus': f'{tmp_path}/good.jsonl', 'vocab_size': 9000}):
        said = []
        for shard in ('', '0/2'):
            with pytest.raises(UserError) as error:
                prepare_data.prepare(knobs(tmp_path, shard=shard, **changes))
            said.append(str(error.value))
        assert said[0] == said[1] and not tree(tmp_path / 'data')


def test_finished_parts_are_not_repeated_and_others_are(tmp_path, capfd):
    usual = jsonl_files(tmp_path) | {'num_proc': 1}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    prepare_data.prepare(knobs(tmp_path, shard='0/2', **usual))
    prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    part = tmp_path / 'data' / 'x.parts' / '1_of_2'
    before = part.stat().st_mtime_ns
    capfd.readouterr()
    prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    assert part.stat().st_mtime_ns == before and 'x, part 1/2: done already' in capfd.readouterr().err
    bucket = max((part / 'buckets').glob('*.ids'), key=lambda item: item.stat().st_size)
    data = bytearray(bucket.read_bytes())
    data[0] ^= 1
    bucket.write_bytes(data)
    with pytest.raises(UserError, match=r'ids: damaged: remove .*x.parts/1_of_2 and repeat --shard=1/2$'):
        prepare_data.prepare(knobs(tmp_path, merge=2, **usual))
    assert sorted(os.listdir(tmp_path / 'data')) == ['x.parts']
    shutil.rmtree(part)
    prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    assert contents(prepare_data.prepare(knobs(tmp_path, merge=2, **usual))) == reference
    for again in ({'merge': 2}, {'shard': '1/2'}, {}):
        prepare_data.prepare(knobs(tmp_path, **again, **usual))
        assert 'already prepared' in capfd.readouterr().err and os.listdir(tmp_path / 'data') == ['x']


def test_parts_of_another_source_or_package_are_refused(tmp_path, monkeypatch):
    usual = jsonl_files(tmp_path)
    prepare_data.prepare(knobs(tmp_path, shard='0/2', **usual))
    write_jsonl(tmp_path / '9.jsonl', make_texts(10))
    with pytest.raises(UserError, match=r'another source than part 0 has: .*"files": 8,.* here, .*: 7'):
        prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    os.remove(tmp_path / '9.jsonl')
    plan = tmp_path / 'data' / 'x.parts' / 'plan' / 'plan.json'
    changed = json.loads(plan.read_text())
    changed['versions']['numpy'] = '1.0'
    plan.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=rf'with numpy 1.0, here is {np.__version__}: pip install numpy==1'):
        prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    assert sorted(os.listdir(plan.parent.parent)) == ['0_of_2', 'plan']


# faults: what is damaged is found at the start of training, what is hostile does no harm

@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """Two corpora with one tokenizer, whose shards have the same sizes."""
    home = tmp_path_factory.mktemp('two')
    folder, meta = prepare(home, corpus=write_jsonl(home / 'a.jsonl', make_texts(100)), name='a')
    other = shutil.copytree(folder, home / 'data' / 'b')
    for split in ('train', 'val'):
        ids = np.fromfile(other / f'{split}_00000.bin', '<u2')
        rewrite(other, f'{split}_00000.bin', np.where(ids > 5, 65 - ids, ids).astype('<u2').tobytes())
    return home / 'data'


def rewrite(folder, item, data, **changes):
    """A file of a prepared folder and its entry in meta.json, as if prepare_data.py had written it."""
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / item).write_bytes(data)
    meta['files'][item] = {'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}
    (folder / 'meta.json').write_text(json.dumps(meta | changes))


def truncate(folder):
    os.truncate(folder / 'train_00000.bin', 100)


def lose(folder):
    os.remove(folder / 'val_00000.idx')


def another_dtype(folder):
    """uint32 in a file of the same size."""
    ids = np.fromfile(folder / 'train_00000.bin', '<u2')
    data = ids[:len(ids) // 2].astype('<u4').tobytes() + b'\0' * (len(ids) % 2 * 2)
    (folder / 'train_00000.bin').write_bytes(data)


def dtype_in_meta(folder):
    meta = json.loads((folder / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps(meta | {'dtype': 'uint32'}))


def flip_a_bit(folder):
    data = bytearray((folder / 'train_00000.bin').read_bytes())
    data[len(data) // 2] ^= 4
    (folder / 'train_00000.bin').write_bytes(data)


def swap(folder):
    """One shard of the other corpus, in the same size."""
    other = folder.parent / 'b' / 'train_00000.bin'
    assert other.stat().st_size == (folder / 'train_00000.bin').stat().st_size
    shutil.copy(other, folder / 'train_00000.bin')


def beyond(folder):
    ids = np.fromfile(folder / 'train_00000.bin', '<u2')
    ids[7] = 60
    rewrite(folder, 'train_00000.bin', ids.tobytes())


DAMAGE = {
    truncate: 'train_00000.bin: 100 bytes, should have', lose: 'val_00000.idx: missing, should have',
    another_dtype: 'train_00000.bin: damaged, or of another corpus',
    dtype_in_meta: 'meta.json: broken (dtype)',
    flip_a_bit: 'train_00000.bin: damaged, or of another corpus',
    swap: 'train_00000.bin: damaged, or of another corpus',
    beyond: 'train_00000.bin: holds the id 60, but the vocabulary has 60'}


@pytest.mark.parametrize('used', [False, True])
@pytest.mark.parametrize('damage', DAMAGE)
def test_damage_is_found_at_the_start(two, tmp_path, damage, used):
    """used: the folder was sound when it was checked before."""
    for name in 'ab':
        shutil.copytree(two / name, tmp_path / name)
    train = pytest.importorskip('train')
    if used:
        train.prepared('a', str(tmp_path), '', train.Ranks())
    damage(tmp_path / 'a')
    for _ in range(2):                                              # a failed check is not remembered
        with pytest.raises(UserError) as error:
            train.prepared('a', str(tmp_path), '', train.Ranks())
        assert DAMAGE[damage] in str(error.value) and '\n' not in str(error.value)
        assert str(tmp_path / 'a') in str(error.value)


def test_what_was_checked_is_read_again_only_when_it_changed(two, tmp_path, monkeypatch, capfd):
    folder, read = str(shutil.copytree(two / 'a', tmp_path / 'a')), []
    plain, meta = prepare_data.check_file, prepare_data.load_meta(folder)
    monkeypatch.setattr(prepare_data, 'check_file', lambda *given: read.append(given[1]) or plain(*given))
    monkeypatch.setattr(prepare_data, 'TOLD_BYTES', 1)
    for change, expected in ((lambda: None, sorted(meta['files'])), (lambda: None, []),
                             (lambda: os.utime(tmp_path / 'a' / 'val_00000.bin'), ['val_00000.bin']),
                             (lambda: (tmp_path / 'a' / 'verified.json').write_text('{"a": [' * 9000),
                              sorted(meta['files'])), (lambda: None, [])):
        change()
        read.clear()
        prepare_data.check_files(folder, meta)
        assert sorted(read) == expected
        said = capfd.readouterr().err
        assert (f': {len(expected)} files checked' in said and 'MB/s' in said) == bool(expected)
    again = {'name': 'a', 'data_dir': str(tmp_path), **meta['settings']}
    assert prepare_data.prepare(knobs(tmp_path) | again) == folder      # verified.json does not disturb it


def test_a_check_needs_little_memory_and_no_link_is_followed(tmp_path):
    folder = pathlib.Path(prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(50)))[0])
    meta = prepare_data.load_meta(str(folder))
    size = 2 * 30_000_000
    meta['splits']['train']['shards'][0]['n_tokens'] = meta['splits']['train']['tokens'] = size // 2
    rewrite(folder, 'train_00000.bin', b'\7\0' * (size // 2), splits=meta['splits'])
    meta = prepare_data.load_meta(str(folder))
    (tmp_path / 'outside').write_text('not yours')
    os.symlink(tmp_path / 'outside', folder / 'verified.json')
    tracemalloc.start()
    prepare_data.check_files(str(folder), meta)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 3 and (tmp_path / 'outside').read_text() == 'not yours'
    assert not (folder / 'verified.json').is_symlink()


def change_meta(*keys, value):
    """meta.json with another value at a place."""
    def change(folder):
        meta = place = json.loads((folder / 'meta.json').read_text())
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (folder / 'meta.json').write_text(json.dumps(meta))
    return change


def text_meta(text):
    return lambda folder: (folder / 'meta.json').write_text(text)


def many_shards(folder):
    shards = json.loads((folder / 'meta.json').read_text())['splits']['train']['shards']
    change_meta(*SHARDS, value=shards * 9999)(folder)


def infinite(folder):
    text = (folder / 'meta.json').read_text()
    (folder / 'meta.json').write_text(re.sub('"unigram_entropy": [0-9.]+', '"unigram_entropy": 1e999', text))


SHARDS = ('splits', 'train', 'shards')
HOSTILE = {
    'vocab_size': change_meta('vocab_size', value=10**15),
    'text vocab_size': change_meta('vocab_size', value='9'), 'infinite': infinite, 'many shards': many_shards,
    'negative vocab_size': change_meta('vocab_size', value=-1),
    'no vocab_size': change_meta('vocab_size', value={}),
    'true vocab_size': change_meta('vocab_size', value=True),
    'nan': change_meta('unigram_entropy', value=float('nan')),
    'special': change_meta('special', 'mask', value=60),
    'special text': change_meta('special', 'sep', value='3'), 'splits': change_meta('splits', value=[1]),
    'tokens': change_meta('splits', 'train', 'tokens', value=10**30),
    'n_tokens': change_meta(*SHARDS, 0, 'n_tokens', value=1e300),
    'shard': change_meta(*SHARDS, value=[[]] * 999),
    'n_documents': change_meta(*SHARDS, 0, 'n_documents', value=-1), 'binary': text_meta('\0\1\2'),
    'huge': lambda folder: os.truncate(folder / 'meta.json', 2**40), 'null': text_meta('null'),
    'nested': text_meta('[' * 100_000), 'nested objects': text_meta('{"format":' * 100_000),
    'digits': text_meta('{"format": 1, "files": ' + '9' * 10**6 + '}'),
    'up': change_meta('files', '../../outside', value={'bytes': 9, 'sha256': ''}),
    'absolute': change_meta(*SHARDS, 0, 'tokens', value='/etc/passwd'),
    'windows': change_meta('files', '..\\outside', value={'bytes': 9, 'sha256': ''}),
    'numbers': change_meta(*SHARDS, 0, 'tokens', value=7), 'dtype': change_meta('dtype', value='object'),
    'tokenizer': change_meta('tokenizer', 'kind', value='os'),
    'tokenizers': change_meta('tokenizer', value=[]),
    'sizes': change_meta('files', 'word_start.bin', 'bytes', value=10**18),
    'digest': change_meta('files', 'word_start.bin', 'sha256', value=[]),
    'settings': change_meta('settings', value=3)}


@pytest.mark.parametrize('attack', HOSTILE)
def test_a_hostile_meta_is_refused_without_side_effects(two, tmp_path, attack):
    folder = shutil.copytree(two / 'a', tmp_path / 'a')
    (tmp_path / 'outside').write_text('not yours')
    HOSTILE[attack](folder)
    before = {str(item): item.stat().st_mtime_ns for item in tmp_path.rglob('*')}
    tracemalloc.start()
    with pytest.raises(UserError) as error:
        prepare_data.check_files(str(folder), prepare_data.load_meta(str(folder)))
    assert tracemalloc.get_traced_memory()[1] < 10**8
    tracemalloc.stop()
    assert '\n' not in str(error.value) and len(str(error.value)) < 500 and str(folder) in str(error.value)
    assert before == {str(item): item.stat().st_mtime_ns for item in tmp_path.rglob('*')}


class Trap:
    """A pickle that would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def spoiled(kind, data, tmp_path):
    """Tokenizer files that are none: (name, bytes)."""
    trap = pickle.dumps(Trap(str(tmp_path / 'trapped')))
    return {'pickle': trap, 'empty': b'', 'half': data[:len(data) // 2],
            'noise': random.Random(0).randbytes(5000), 'text': b'no tokenizer\n' * 99,
            # field 1, a piece, which claims 2^63 bytes; and a rank, or a line, far beyond
            'claims': b'\n' + b'\xff' * 8 + b'\x7f' + data, 'rank': data + b'QUJDREU= 99999999999999999999\n',
            'far': data + b'QUJDREU= 4000000000\n', 'null': data.replace(b'\n', b'\0')}


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_without_side_effects(tmp_path, kind):
    """In a process of its own with little address space: a tokenizer's library may allocate, or end it."""
    pytest.importorskip(NEEDS[kind])
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(60))
    folder = pathlib.Path(prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path))[0])
    name = prepare_data.TOKENIZERS[kind].file_name
    good, meta = (folder / name).read_bytes(), (folder / 'meta.json').read_bytes()
    for fault, data in spoiled(kind, good, tmp_path).items():
        (folder / 'meta.json').write_bytes(meta)
        rewrite(folder, name, data)                                     # its digest is right
        shutil.copytree(folder, tmp_path / fault)
    (folder / 'meta.json').write_bytes(meta)
    os.truncate(folder / name, 2**40)                                   # as sparse as it is large
    shutil.move(folder, tmp_path / 'large')
    code = """if True:
        import os, resource, sys
        import prepare_data
        from configurator import UserError
        for package in ('sentencepiece', 'tokenizers', 'tiktoken'):
            prepare_data.need(package, '')
        used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 10**8,) * 2)
        for fault in sys.argv[2:]:
            folder = os.path.join(sys.argv[1], fault)
            meta = prepare_data.json.loads(prepare_data.read_bytes(folder + '/meta.json'))
            try:
                tokenizer = prepare_data.load_tokenizer(folder, meta)
                print(fault, 'loads', tokenizer.vocab_size, meta['vocab_size'])
            except UserError as error:
                print(fault, 'refused', error)
        """
    faults = [*spoiled(kind, good, tmp_path), 'large']
    done = stage('-c', code, str(tmp_path), *faults)
    lines = [line.split(' ', 2) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [line[0] for line in lines] == faults, (done.stdout, done.stderr)
    assert all(line[1] == 'refused' for line in lines), done.stdout
    assert not done.stderr and not (tmp_path / 'trapped').exists()


# faults: processes that are killed, and disks that take no more

def command(folder, *arguments, **keywords):
    script = os.path.join(prepare_root(), 'prepare_data.py')
    line = [sys.executable, script, f'--data_dir={folder}/data', *SETTINGS, *arguments]
    return subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            **keywords)


def finish(process):
    """stderr of a process that must succeed."""
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 0, said
    return said


def group_is_gone(group, seconds=10):
    """Whether no process of the group is left, workers included."""
    for _ in range(20 * seconds):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """(source, contents of the prepared folder, seconds that it took)."""
    home = tmp_path_factory.mktemp('undisturbed')
    (home / 'source').mkdir()
    for k in range(4):
        write_jsonl(home / 'source' / f'{k}.jsonl', [*make_texts(1500, seed=k), None])
    started = time.monotonic()
    finish(command(home, f'--corpus={home}/source'))
    seconds = time.monotonic() - started
    return f'{home}/source', contents(home / 'data' / 'x'), seconds


def moment(folder, process):
    """What a process is doing that is about to be killed, for the table of the faults."""
    if process.poll() is not None:
        return 'had ended'
    left = [item.name for item in (folder / 'data').glob('**/*')] if (folder / 'data').exists() else []
    signs = {'meta.json': 'meta.json', 'train_00000.bin': 'shards', 'buckets': 'buckets', 'head': 'sample'}
    busy = [work for work in (folder / 'data').glob('**/*.tmp') if work.is_dir()]
    inside = [item.name for work in busy for item in work.glob('*')]
    return next((what for sign, what in signs.items() if sign in inside), 'lock' if left else 'start')


STAGES = {'whole': [[]], 'parts': [['--shard=0/2'], ['--shard=1/2'], ['--merge=2']]}


@pytest.mark.parametrize('name', ['SIGKILL', 'SIGTERM', 'SIGINT'])
@pytest.mark.parametrize('stages', STAGES)
def test_killed_at_random_moments(tmp_path, undisturbed, name, stages):
    """FAULTS kills of the parent, or as Ctrl-C does of all; then the same commands make the same bytes."""
    source, reference, seconds = undisturbed
    pick = random.Random(name + stages)
    done, moments = tmp_path / 'data' / 'x', collections.Counter()
    for trial in range(FAULTS):
        doomed = pick.choice(STAGES[stages])
        for arguments in STAGES[stages]:
            if arguments is doomed:
                process = command(tmp_path, f'--corpus={source}', *arguments)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(pick.uniform(0, seconds))
                moments[moment(tmp_path, process)] += 1
                whole_group = name == 'SIGINT' and pick.random() < 0.5
                if process.poll() is None:                          # else the number may be another's by now
                    (os.killpg if whole_group else os.kill)(process.pid, getattr(signal, name))
                process.communicate(timeout=60)
                assert group_is_gone(process.pid)
                assert not done.exists() or contents(done) == reference
            finish(command(tmp_path, f'--corpus={source}', *arguments))
            if arguments is doomed and stages == 'parts' and '--merge' not in arguments[0]:
                assert not done.exists()
        assert contents(done) == reference and os.listdir(tmp_path / 'data') == ['x'], trial
        shutil.rmtree(done)
    print(f'{FAULTS} x {name}, {stages}: {dict(moments)}')


def is_worker(cmdline, group):
    with contextlib.suppress(OSError):                              # it has just ended
        return b'spawn_main' in cmdline.read_bytes() and os.getpgid(int(cmdline.parent.name)) == group
    return False


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='finds the workers in /proc')
def test_killed_worker_is_named(tmp_path, undisturbed):
    source, reference, _ = undisturbed
    process = command(tmp_path, f'--corpus={source}')
    workers = []
    while process.poll() is None and not workers:
        workers = [int(item.parent.name) for item in pathlib.Path('/proc').glob('[0-9]*/cmdline')
                   if is_worker(item, process.pid)]
    os.kill(workers[0], signal.SIGKILL)
    assert one_line(process).startswith('error: a worker process was killed; out of memory?')
    assert not os.listdir(tmp_path / 'data') and group_is_gone(process.pid)
    finish(command(tmp_path, f'--corpus={source}'))
    assert contents(tmp_path / 'data' / 'x') == reference


@contextlib.contextmanager
def mounted(folder, *options):
    """A small file system of its own, or the reason why there is none."""
    os.makedirs(folder, exist_ok=True)
    try:
        done = subprocess.run(['mount', *options, str(folder)], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f'no mount command: {error}')
    if done.returncode:
        pytest.skip(f'mounting is not allowed here: {done.stderr.strip()}')
    try:
        yield
    finally:
        subprocess.run(['umount', str(folder)], check=True)


def one_line(process):
    """What a refusing process says, but for notices of progress."""
    lines = process.communicate(timeout=100)[1].splitlines()
    lines = [line for line in lines if not line.startswith(('preparing', 'skipped', 'merging'))]
    assert process.returncode == 2 and len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize('stage', ['whole', 'part', 'merge'])
def test_disk_full(tmp_path, undisturbed, stage):
    """A tmpfs of random sizes, from too small for the tokenizer to nearly enough."""
    source, reference, _ = undisturbed
    pick = random.Random(stage)
    sizes = sum(map(len, reference.values()))
    for _ in range(FAULTS):
        with mounted(tmp_path / 'data', '-t', 'tmpfs', '-o', f'size={4 * sizes + 2**24}', 'tmpfs'):
            other = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(50)), 'name': 'y'}
            before = contents(prepare(tmp_path, **other)[0])
            if stage == 'merge':
                for i in range(2):
                    finish(command(tmp_path, f'--corpus={source}', f'--shard={i}/2'))
            arguments = {'whole': [], 'part': ['--shard=0/2'], 'merge': ['--merge=2']}[stage]
            used = os.statvfs(tmp_path / 'data')
            room = pick.uniform(0.02, 0.9) * sizes * (0.5 if stage == 'part' else 1)
            ballast = max(used.f_bavail * used.f_bsize - int(room), 0)
            (tmp_path / 'data' / 'ballast').write_bytes(bytes(ballast))
            said = one_line(command(tmp_path, f'--corpus={source}', *arguments))
            assert said.startswith('error: ') and said.endswith('the disk is full'), said
            assert contents(tmp_path / 'data' / 'y') == before and not os.path.exists(tmp_path / 'data' / 'x')
            os.remove(tmp_path / 'data' / 'ballast')
            for arguments in STAGES['whole' if stage == 'whole' else 'parts']:
                finish(command(tmp_path, f'--corpus={source}', *arguments))
            assert contents(tmp_path / 'data' / 'x') == reference
            assert sorted(os.listdir(tmp_path / 'data')) == ['x', 'y']


def test_limit_on_the_size_of_files(tmp_path, undisturbed):
    resource = pytest.importorskip('resource')
    source, reference, _ = undisturbed
    pick = random.Random(0)
    for _ in range(FAULTS):
        limit = int(pick.uniform(0.01, 0.95) * len(reference['train_00000.bin']))
        set_limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        process = command(tmp_path, f'--corpus={source}', preexec_fn=set_limit)
        assert one_line(process).endswith('the limit on the size of a file is reached (ulimit -f)')
        assert not os.listdir(tmp_path / 'data')
    finish(command(tmp_path, f'--corpus={source}'))
    assert contents(tmp_path / 'data' / 'x') == reference


def test_read_only_data_dir(tmp_path, two, undisturbed):
    """Nothing can be prepared there, what is there can be used and is checked each time."""
    train = pytest.importorskip('train')
    with mounted(tmp_path / 'data', '-o', 'bind,ro', str(two)):
        for arguments in ([], ['--shard=0/2'], ['--shard=1/2']):
            said = one_line(command(tmp_path, f'--corpus={undisturbed[0]}', *arguments))
            assert said.startswith(f'error: {tmp_path}/data/x') and said.endswith(': Read-only file system')
        before = sorted(os.listdir(tmp_path / 'data' / 'a'))
        for _ in range(2):
            train.prepared('a', str(tmp_path / 'data'), '', train.Ranks())
        assert sorted(os.listdir(tmp_path / 'data' / 'a')) == before
        settings = prepare_data.load_meta(str(tmp_path / 'data' / 'a'))['settings']
        assert prepare_data.prepare(knobs(tmp_path, **settings) | {'name': 'a'}) == f'{tmp_path}/data/a'


# faults: two at once

def test_two_at_once(tmp_path, undisturbed):
    """The second of one name is refused and told who is first, whichever stage; afterwards all is well."""
    source, reference, _ = undisturbed
    for arguments in STAGES['whole'] + STAGES['parts']:
        shutil.rmtree(tmp_path / 'data' / 'x', ignore_errors=True)
        first = command(tmp_path, f'--corpus={source}', *arguments)
        while first.poll() is None and not any(
                item.stat().st_size for item in (tmp_path / 'data').glob('**/*.lock')):
            time.sleep(0.001)
        first.send_signal(signal.SIGSTOP)
        try:
            said = one_line(command(tmp_path, f'--corpus={source}', *arguments))
            assert f'process {first.pid} on {platform.node()} is preparing it: wait' in said
        finally:
            first.send_signal(signal.SIGCONT)
        finish(first)
    assert contents(tmp_path / 'data' / 'x') == reference and os.listdir(tmp_path / 'data') == ['x']


def test_many_at_once(tmp_path, undisturbed):
    """Of several that start together one prepares; each other is refused or finds it prepared."""
    source, reference, _ = undisturbed
    for _ in range(FAULTS):
        together = [command(tmp_path, f'--corpus={source}') for _ in range(3)]
        said = [process.communicate(timeout=300)[1] for process in together]
        assert 0 in [process.returncode for process in together], said
        for process, text in zip(together, said, strict=True):
            assert process.returncode == 0 or (process.returncode == 2 and len(text.splitlines()) == 1 and (
                'is preparing it' in text or 'has just prepared it' in text)), text
        assert contents(tmp_path / 'data' / 'x') == reference and os.listdir(tmp_path / 'data') == ['x']
        shutil.rmtree(tmp_path / 'data' / 'x')


def test_stale_lock_is_recovered(tmp_path):
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(60))}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    (tmp_path / 'data' / 'x.tmp' / 'buckets').mkdir(parents=True)
    (tmp_path / 'data' / 'x.tmp' / 'meta.json').write_text('{}')
    (tmp_path / 'data' / 'x.lock').write_text('process 1 on elsewhere')
    assert contents(prepare(tmp_path, **usual)[0]) == reference and os.listdir(tmp_path / 'data') == ['x']


def test_parts_wait_as_long_as_part_0_lives(tmp_path, monkeypatch, capfd):
    """Part 0 takes longer over the tokenizer than the others' patience, but shows that it lives."""
    monkeypatch.setattr(prepare_data, 'PATIENCE', 1)
    usual, save = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(60))}, prepare_data.save_tools
    monkeypatch.setattr(prepare_data, 'save_tools', lambda *given: time.sleep(3) or save(*given))
    first = threading.Thread(target=prepare_data.prepare, args=(knobs(tmp_path, shard='0/2', **usual),))
    first.start()
    prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    first.join()
    assert 'part 1/2 waits for the tokenizer, which --shard=0/2 makes' in capfd.readouterr().err
    assert prepare_data.prepare(knobs(tmp_path, merge=2, **usual))


def test_damage_under_torchrun_is_one_line(corpus, tmp_path):
    """The first process of a machine reads it all; the others have waited, and end with it."""
    shutil.copytree(corpus, tmp_path / 'tiny')
    flip_a_bit(tmp_path / 'tiny')
    done = torchrun('train.py', *tiny(str(tmp_path / 'tiny'), tmp_path / 'out'), '--max_iters=2')
    said = [line for line in done.stderr.splitlines() if line.startswith('error')]
    assert done.returncode and len(said) == 1, done.stderr
    assert 'train_00000.bin: damaged, or of another corpus' in said[0] and not (tmp_path / 'out').exists()
