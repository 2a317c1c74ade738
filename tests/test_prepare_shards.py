"""prepare_data.py on several machines and under faults: the same bytes as one undisturbed run, or one line.

FAULTS=50 runs each random fault so often; by default it is quick.
"""
import contextlib
import gzip
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

import prepare_data
from configurator import UserError
from conftest import refused, stage, tiny
from test_prepare_data import contents, knobs, make_chinese, make_texts, prepare, write_jsonl

FAULTS = int(os.environ.get('FAULTS', '2'))
SETTINGS = ('--name=x', '--vocab_size=60', '--tokenizer_sample=100000', '--num_proc=2')


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in (('BATCH_BYTES', 2000), ('FLUSH_BYTES', 20_000), ('WRITE_BYTES', 5000), ('PATIENCE', 2)):
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
        body = '\n'.join(f'def f{i}():\n    """{texts[k * i]} with enough words to be kept"""' for i in range(9))
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


@pytest.mark.parametrize('name, files', [('fineweb', 3), ('fineweb', 1), ('wikitext', 3), ('books+fineweb', 3)])
def test_parts_of_the_hub(tmp_path, monkeypatch, name, files):
    datasets, hub = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    sources = [write_jsonl(tmp_path / f'{k}.jsonl', [*make_texts(80, k), None, ' = A = ']) for k in range(files)]
    local, heads, asked = datasets.load_dataset, iter(('new', 'newer', 'newest')), []

    def load_dataset(name, subset, split, streaming, revision):
        asked.append(revision)
        return local('json', data_files=sources, split=split, streaming=streaming, cache_dir=str(tmp_path / 'c'))

    def dataset_info(self, name, revision):
        return types.SimpleNamespace(sha=revision or next(heads))

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(hub.HfApi, 'dataset_info', dataset_info)
    reference = contents(prepare(tmp_path / 'ref', corpus=name, revision='' if '+' not in name else 'r')[0])
    heads = iter(('new', 'newer', 'newest'))                        # the dataset grows while the parts are read
    made = in_parts(tmp_path / 'parts', 3, corpus=name, revision='' if '+' not in name else 'r')
    assert made == reference and set(asked) == ({'new'} if '+' not in name else {'r'})


def test_launchers_number_the_parts(tmp_path, monkeypatch):
    share = {}
    for names, values in (((), ()), (('RANK', 'WORLD_SIZE'), '13'), (('RANK', 'WORLD_SIZE'), '01'),
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
    for changes in ({'corpus': f'{tmp_path}/bad.jsonl'}, {'corpus': f'{tmp_path}/good.jsonl', 'text_field': 'x'},
                    {'corpus': f'{tmp_path}/good.jsonl', 'vocab_size': 9000}):
        said = []
        for shard in ('', '0/2'):
            with pytest.raises(UserError) as error:
                prepare_data.prepare(knobs(tmp_path, shard=shard, **changes))
            said.append(str(error.value))
        assert said[0] == said[1] and not [item for item in tree(tmp_path / 'data')]


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
    with pytest.raises(UserError, match=r'another source than part 0 has: .*"files": 8, .* here, .*"files": 7'):
        prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    os.remove(tmp_path / '9.jsonl')
    plan = tmp_path / 'data' / 'x.parts' / 'plan' / 'plan.json'
    changed = json.loads(plan.read_text())
    changed['versions']['numpy'] = '1.0'
    plan.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=rf'begun with numpy 1.0, here is {np.__version__}: pip install numpy==1'):
        prepare_data.prepare(knobs(tmp_path, shard='1/2', **usual))
    assert sorted(os.listdir(plan.parent.parent)) == ['0_of_2', 'plan']
