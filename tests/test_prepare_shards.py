"""prepare_data.py in parts, on several processes and under faults: the same bytes, or one line.

FAULTS=50 runs each random fault so often; by default it is quick.
"""
import collections
import contextlib
import functools
import glob
import gzip
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
import time
import types

import pytest
from conftest import seen, terminal, torchrun
from test_prepare_data import NEEDS, SPECS, contents, knobs, make_chinese, make_texts, prepare, write_jsonl

import prepare_data
from configurator import UserError, configure

FAULTS = int(os.environ.get('FAULTS', '1'))
SETTINGS = ('--name=x', '--vocab_size=60', '--tokenizer_sample=100000', '--num_proc=2', '--val_fraction=0.1',
            '--unit_bytes=30000')
SCRIPT = prepare_data.__file__


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(os, 'fsync', lambda file: None)
    monkeypatch.setattr(prepare_data, 'BATCH', 2000)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'):
        monkeypatch.delenv(name, raising=False)


# ---- parts and processes ----

def in_parts(folder, n, order=None, **changes):
    """The corpus prepared in n parts, one after the other in any order."""
    order = list(order or range(n))
    for i in order:
        assert not os.path.exists(folder / 'data' / 'x' / 'meta.json')
        made = prepare_data.prepare(knobs(folder, part=f'{i}/{n}', **changes))
    assert os.listdir(folder / 'data') == ['x']
    return contents(made)


def jsonl_files(folder):
    """Files of several sizes, bad rows among them; one is empty, one of bad rows alone."""
    folder = folder / 'files'
    folder.mkdir()
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
        parquet.write_table(arrow.table({'text': [*make_texts(90, seed=k), None]}), folder / f'{k}.parquet',
                            row_group_size=20)
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
    usual = KINDS[kind](tmp_path / 'source') | {'unit_bytes': 4000, 'val_fraction': 0.2}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    assert 'unit_00002.json' in reference
    assert in_parts(tmp_path / '3', 3, order=[2, 0, 1], **usual) == reference


def test_any_number_of_parts_and_processes(tmp_path):
    usual = jsonl_files(tmp_path) | {'unit_bytes': 4000}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    for n in (2, 30):
        assert in_parts(tmp_path / f'{n} parts', n, **usual) == reference
    assert contents(prepare(tmp_path / 'processes', num_proc=2, **usual)[0]) == reference


def test_launchers_number_the_parts(tmp_path, monkeypatch):
    share = {}
    for names, values in (((), ''), (('RANK', 'WORLD_SIZE'), '13'), (('RANK', 'WORLD_SIZE'), '01'),
                          (('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'), '250'),
                          (('SLURM_PROCID', 'SLURM_NTASKS'), '04'),       # the script of sbatch itself
                          (('RANK', 'WORLD_SIZE', 'SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_STEP_ID'), '12450')):
        with monkeypatch.context() as patch:
            for key, value in zip(names, values, strict=True):
                patch.setenv(key, value)
            share[values] = prepare_data.find_part(knobs(tmp_path))
            assert prepare_data.find_part(knobs(tmp_path, part='3/9')) == (3, 9)
    assert list(share.values()) == [(0, 1), (1, 3), (0, 1), (2, 5), (0, 1), (1, 2)]


@pytest.mark.slow
def test_torchrun_and_srun_prepare_parts(tmp_path):
    """Both processes start at once and make the tokenizer; one of them counts."""
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300))
    arguments = ['prepare_data.py', f'--corpus={source}', *SETTINGS]
    finish(command(tmp_path / 'ref', f'--corpus={source}'))
    done = torchrun(*arguments, f'--data_dir={tmp_path}/torchrun')
    assert done.returncode == 0, done.stderr
    srun = [subprocess.Popen([sys.executable, *arguments, f'--data_dir={tmp_path}/srun'],
                             cwd=os.path.dirname(SCRIPT),
                             env=dict(os.environ, SLURM_PROCID=rank, SLURM_NTASKS='2', SLURM_STEP_ID='0'))
            for rank in '10']
    assert [process.wait(100) for process in srun] == [0, 0]
    for launcher in ('torchrun', 'srun'):
        assert contents(tmp_path / launcher / 'x') == contents(tmp_path / 'ref' / 'data' / 'x')
        assert os.listdir(tmp_path / launcher) == ['x']


def test_the_list_of_units_is_pinned(tmp_path, monkeypatch):
    """A later process lists nothing again, and refuses another size, other knobs and other packages."""
    usual = jsonl_files(tmp_path) | {'unit_bytes': 4000}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    prepare_data.prepare(knobs(tmp_path, part='0/2', **usual))
    write_jsonl(tmp_path / 'files' / '9.jsonl', make_texts(10))     # is not among them
    with pytest.raises(UserError, match='begun with val_fraction=0.1, now val_fraction=0.2'):
        prepare(tmp_path, **usual, val_fraction=0.2)
    file = tmp_path / 'files' / '4.jsonl'
    before = file.read_bytes()
    for changed, said in ((before + b'\n', f'had {len(before)} bytes when'), (None, 'cannot be read: ')):
        file.unlink() if changed is None else file.write_bytes(changed)
        with pytest.raises(UserError, match=f'4.jsonl: {said}'):
            prepare(tmp_path, **usual)
    file.write_bytes(before)
    with monkeypatch.context() as patch:
        patch.setattr('importlib.metadata.version', lambda package: '0.0.1')
        with pytest.raises(UserError, match='was begun with sentencepiece .* is installed: pip install sent'):
            prepare(tmp_path, **usual)
    assert contents(prepare(tmp_path, **usual)[0]) == reference


def test_a_part_that_is_done_is_not_repeated(tmp_path, capfd):
    usual = jsonl_files(tmp_path) | {'unit_bytes': 4000}
    folder = prepare_data.prepare(knobs(tmp_path, part='1/2', **usual))
    before = {item: os.stat(item).st_mtime_ns for item in glob.glob(f'{folder}/*')}
    prepare_data.prepare(knobs(tmp_path, part='1/2', **usual))
    assert before == {item: os.stat(item).st_mtime_ns for item in glob.glob(f'{folder}/*')}
    said = capfd.readouterr().err.splitlines()[-2:]
    assert all('part 1/2 is done; other parts have 20 units to do, then it is ready' in line for line in said)
    with pytest.raises(UserError, match='not prepared'):
        prepare_data.load_meta(folder)


# ---- damage ----

@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    """(settings, folder) of a prepared corpus of several units."""
    home = tmp_path_factory.mktemp('sound')
    usual = {'corpus': write_jsonl(home / 'a.jsonl', make_chinese(100)), 'tokenizer': 'character',
             'segmenter': 'sentencepiece', 'segmenter_vocab': 90, 'unit_bytes': 3000, 'val_fraction': 0.3}
    pytest.importorskip('tokenizers')
    return usual, prepare(home, **usual)[0]


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize('name', ['train_00000.bin', 'val_00001.idx', 'train_00002.words'])
def test_damage_is_found_and_mended(sound, tmp_path, name):
    """Sizes at the start of a run, every byte by check_folder; the line says what to remove."""
    usual, folder = sound
    reference = contents(folder)
    (tmp_path / 'data').mkdir()
    home = pathlib.Path(shutil.copytree(folder, tmp_path / 'data' / 'x'))
    meta = prepare_data.load_meta(str(home))
    prepare_data.check_folder(str(home))
    flip(home / name)
    prepare_data.check_sizes(str(home), meta)
    with pytest.raises(UserError, match=f'{name}: damaged, its sha256 is not the rec.*: remove .*/unit_'):
        prepare_data.check_folder(str(home))
    os.truncate(home / name, 1)
    with pytest.raises(UserError, match=f'{name}: 1 bytes, should have {len(reference[name])} bytes'):
        prepare_data.check_sizes(str(home), meta)
    (home / name).unlink()
    with pytest.raises(UserError, match=f'{name}: missing, should have .* remove (.*) and repeat') as error:
        prepare_data.check_sizes(str(home), meta)
    os.remove(str(error.value).split(' remove ')[1].split(' and ')[0])
    assert contents(prepare(tmp_path, **usual)[0]) == reference


@pytest.mark.parametrize('name, use', [
    ('meta.json', prepare_data.load_meta), ('tokenizer/settings.json', prepare_data.load_tokenizer),
    ('tokenizer/vocab.txt', prepare_data.load_tokenizer), ('unit_00001.json', prepare_data.check_folder),
    ('units.json', None)])
def test_what_is_damaged_or_foreign_is_one_line(sound, tmp_path, name, use):
    usual, folder = sound
    (tmp_path / 'data').mkdir()
    home = pathlib.Path(shutil.copytree(folder, tmp_path / 'data' / 'x'))
    use = use or (lambda folder: prepare(tmp_path, **usual))
    whole = (home / name).read_bytes()
    use(str(home))
    digits = b'{"format": ' + b'9' * 10**5
    for data in (whole[:-20], b'', b'{}', b'[]', b'null', b'\0\1', b'[' * 10**5, digits):
        (home / name).write_bytes(data)
        with pytest.raises(UserError) as error:
            use(str(home))
        said = str(error.value)
        assert name in said and '\n' not in said and len(said) < 500
        assert 'remove' in said or 'damaged' in said
    (home / name).write_bytes(whole)
    use(str(home))


def test_folders_that_are_none(tmp_path):
    with pytest.raises(UserError, match='not prepared .*: run python prepare_data.py --name=none --corp'):
        prepare_data.load_meta(str(tmp_path / 'none'))
    for folder, words in (('data/wikipedia', 'config/data_wikipedia.py'),
                          ('deep/c4', 'config/data_c4.py --data_dir=deep')):
        with pytest.raises(UserError, match=f'{folder}: not prepared .*: run .* prepare_data.py {words}$'):
            prepare_data.load_meta(folder)
    for file in glob.glob(f'{prepare_data.ROOT}/config/data_*.py'):     # named as the folder they prepare
        config = configure(dict(vars(prepare_data)), [file])[0]
        name = config['name'] or prepare_data.find_corpus({**config, 'path': 'x'})[0]
        assert os.path.basename(file) == f'data_{name}.py'
    (tmp_path / 'meta.json').write_text('{\n "format": 1,\n "name": "old"}')
    with pytest.raises(UserError, match='meta.json: .* or of another version of prepare_data.py: remove'):
        prepare_data.load_meta(str(tmp_path))
    with pytest.raises(UserError, match='units.json: missing, .* of another version of prepare_data.py'):
        prepare(tmp_path.parent, name=tmp_path.name, data_dir=str(tmp_path.parent),
                corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(9)))


class Trap:
    """A pickle that would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def spoiled(data, tmp_path):
    """Tokenizer files that are none: {name: bytes}."""
    trap = pickle.dumps(Trap(str(tmp_path / 'trapped')))
    return {'pickle': trap, 'empty': b'', 'half': data[:len(data) // 2],
            'noise': random.Random(0).randbytes(5000), 'text': b'no tokenizer\n' * 99,
            # field 1, a piece, which claims 2^63 bytes; and a rank, or a line, far beyond
            'claims': b'\n' + b'\xff' * 8 + b'\x7f' + data, 'rank': data + b'QUJDREU= 99999999999999999999\n',
            'far': data + b'QUJDREU= 4000000000\n', 'null': data.replace(b'\n', b'\0')}


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_a_given_file_that_is_no_tokenizer_is_one_line(tmp_path, kind):
    pytest.importorskip(NEEDS[kind])
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(60))
    folder, _ = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path))
    file_name = prepare_data.TOKENIZERS[kind].file_name
    good = contents(folder)[f'tokenizer/{file_name}']
    for fault, data in spoiled(good, tmp_path).items():
        (tmp_path / file_name).write_bytes(data)
        with contextlib.suppress(UserError):                # vocab.txt may hold any lines
            prepare(tmp_path, corpus=source, tokenizer=f'{kind}:{tmp_path}/{file_name}', name=fault)
            assert kind in ('wordpiece', 'character')
    assert not (tmp_path / 'trapped').exists() and not glob.glob(f'{tmp_path}/data/*.tmp')


# ---- processes that are killed, disks that take no more, two at once ----

def command(folder, *arguments, **keywords):
    os.makedirs(folder, exist_ok=True)
    line = [sys.executable, SCRIPT, *SETTINGS, f'--data_dir={folder}/data', *arguments]
    return subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            **keywords)


def finish(process):
    """stderr of a process that must succeed."""
    said = process.communicate(timeout=300)[1]
    assert process.returncode == 0, said
    return said


def one_line(process):
    """What a refusing process says, but for notices of progress."""
    lines = [line for line in process.communicate(timeout=100)[1].splitlines() if ' units of ' not in line]
    assert process.returncode == 2 and len(lines) == 1, lines
    return lines[0]


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


def test_kill_9_and_repeat(tmp_path, undisturbed):
    """The units that were done stay as they are, temporary files go, workers end with their parent."""
    source, reference, _ = undisturbed
    process = command(tmp_path, f'--corpus={source}')
    while process.poll() is None and len(glob.glob(f'{tmp_path}/data/x/unit_0*.json')) < 5:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert group_is_gone(process.pid)
    done = {item: os.stat(item).st_mtime_ns for item in glob.glob(f'{tmp_path}/data/x/unit_0*.json')}
    assert 5 <= len(done) < len([item for item in reference if item.startswith('unit_')])
    (tmp_path / 'data' / f'x~{platform.node()}~{process.pid}~00.tmp').mkdir()
    (tmp_path / 'data' / 'x' / f'val_00001.idx~{platform.node()}~{process.pid}~00.tmp').write_bytes(b'')
    finish(command(tmp_path, f'--corpus={source}'))
    assert contents(tmp_path / 'data' / 'x') == reference and os.listdir(tmp_path / 'data') == ['x']
    assert done.items() <= {item: os.stat(item).st_mtime_ns for item in done}.items()


STAGES = {'whole': [[]], 'parts': [['--part=0/2'], ['--part=1/2']]}


@pytest.mark.slow
@pytest.mark.parametrize('name', ['SIGKILL', 'SIGTERM', 'SIGINT'])
@pytest.mark.parametrize('stages', STAGES)
def test_killed_at_random_moments(tmp_path, undisturbed, name, stages):
    """FAULTS kills of the parent, or as Ctrl-C does of all; then the same commands make the same bytes."""
    source, reference, seconds = undisturbed
    pick = random.Random(name + stages)
    done, moments = tmp_path / 'data' / 'x', collections.Counter()
    for trial in range(FAULTS):
        doomed = pick.choice(STAGES[stages])
        process = command(tmp_path, f'--corpus={source}', *doomed)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(pick.uniform(0, seconds))
        moments[len(glob.glob(f'{done}/unit_0*'))] += 1
        whole_group = name == 'SIGINT' and pick.random() < 0.5
        if process.poll() is None:                                  # else the number may be another's by now
            (os.killpg if whole_group else os.kill)(process.pid, getattr(signal, name))
        process.communicate(timeout=60)
        assert group_is_gone(process.pid)
        assert not (done / 'meta.json').exists() or contents(done) == reference
        for arguments in STAGES[stages]:
            finish(command(tmp_path, f'--corpus={source}', *arguments))
        assert contents(done) == reference and os.listdir(tmp_path / 'data') == ['x'], trial
        shutil.rmtree(done)
    print(f'{FAULTS} x {name}, {stages}: units done {dict(moments)}')


def is_worker(cmdline, group):
    with contextlib.suppress(OSError):                              # it has just ended
        return b'spawn_main' in cmdline.read_bytes() and os.getpgid(int(cmdline.parent.name)) == group
    return False


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='finds the workers in /proc')
@pytest.mark.slow
def test_killed_worker_is_named(tmp_path, undisturbed):
    source, reference, _ = undisturbed
    process = command(tmp_path, f'--corpus={source}')
    workers = []
    while process.poll() is None and not workers:
        workers = [int(item.parent.name) for item in pathlib.Path('/proc').glob('[0-9]*/cmdline')
                   if is_worker(item, process.pid)]
    os.kill(workers[0], signal.SIGKILL)
    assert one_line(process).startswith('error: a worker process was killed; out of memory?')
    assert not glob.glob(f'{tmp_path}/data/*.tmp') and group_is_gone(process.pid)
    finish(command(tmp_path, f'--corpus={source}'))
    assert contents(tmp_path / 'data' / 'x') == reference


def test_an_error_ends_the_others(tmp_path):
    """With workers too it is one line, and what the others had begun is removed."""
    write_jsonl(tmp_path / 'a.jsonl', make_texts(4000))
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(b'{"text": "x y"}\n' * 9)[:-9])
    said = one_line(command(tmp_path, f'--corpus={tmp_path}/*.jsonl*'))
    assert said.startswith(f'error: {tmp_path}/b.jsonl.gz: cannot be read: OSError')
    assert not glob.glob(f'{tmp_path}/data/x/*.tmp')


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


@pytest.mark.slow
@pytest.mark.parametrize('stage', ['whole', 'part'])
def test_disk_full(tmp_path, undisturbed, stage):
    """A tmpfs of random sizes, from too small for the tokenizer to nearly enough."""
    source, reference, _ = undisturbed
    pick = random.Random(stage)
    sizes = sum(map(len, reference.values()))
    for _ in range(FAULTS):
        with mounted(tmp_path / 'data', '-t', 'tmpfs', '-o', f'size={4 * sizes + 2**24}', 'tmpfs'):
            other = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(50)), 'name': 'y'}
            before = contents(prepare(tmp_path, **other)[0])
            used = os.statvfs(tmp_path / 'data')
            room = pick.uniform(0.02, 0.9) * sizes * (0.5 if stage == 'part' else 1)
            ballast = max(used.f_bavail * used.f_bsize - int(room), 0)
            (tmp_path / 'data' / 'ballast').write_bytes(bytes(ballast))
            arguments = STAGES['whole' if stage == 'whole' else 'parts']
            said = one_line(command(tmp_path, f'--corpus={source}', *arguments[0]))
            assert said.startswith('error: ') and said.endswith(': No space left on device'), said
            assert contents(tmp_path / 'data' / 'y') == before
            assert not glob.glob(f'{tmp_path}/data/**/*.tmp', recursive=True)
            os.remove(tmp_path / 'data' / 'ballast')
            for item in arguments:
                finish(command(tmp_path, f'--corpus={source}', *item))
            assert contents(tmp_path / 'data' / 'x') == reference
            assert sorted(os.listdir(tmp_path / 'data')) == ['x', 'y']


@pytest.mark.slow
def test_limit_on_the_size_of_files(tmp_path, undisturbed):
    resource = pytest.importorskip('resource')
    source, reference, _ = undisturbed
    pick = random.Random(0)
    for _ in range(FAULTS):
        limit = int(pick.uniform(0.01, 0.95) * len(reference['train_00000.bin']))
        set_limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        process = command(tmp_path, f'--corpus={source}', preexec_fn=set_limit)
        assert one_line(process).endswith(': File too large')
    finish(command(tmp_path, f'--corpus={source}'))
    assert contents(tmp_path / 'data' / 'x') == reference


@pytest.mark.slow
def test_read_only_data_dir(tmp_path, sound):
    """Nothing can be prepared there, what is there can be used."""
    usual, folder = sound
    with mounted(tmp_path / 'data', '-o', 'bind,ro', os.path.dirname(folder)):
        source = write_jsonl(tmp_path / 'a.jsonl', make_texts(50))
        said = one_line(command(tmp_path, f'--corpus={source}', '--name=y'))
        assert said.startswith(f'error: {tmp_path}/data/y') and said.endswith(': Read-only file system')
        prepare_data.check_folder(str(tmp_path / 'data' / 'x'))
        assert prepare_data.prepare(knobs(tmp_path, **usual)) == f'{tmp_path}/data/x'


def test_two_at_once(tmp_path, undisturbed):
    """They agree on units.json and tokenizer/, and both succeed."""
    source, reference, _ = undisturbed
    together = [command(tmp_path, f'--corpus={source}', '--num_proc=1') for _ in range(2)]
    for process in together:
        finish(process)
    assert contents(tmp_path / 'data' / 'x') == reference and os.listdir(tmp_path / 'data') == ['x']


# ---- what is said ----

def test_a_line_a_minute_without_a_terminal(tmp_path, monkeypatch, capfd):
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(300)), 'unit_bytes': 10_000}
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, 'monotonic', lambda: clock.now)
    encode = prepare_data.encode

    def slow(*arguments):
        clock.now += 60
        yield from encode(*arguments)

    monkeypatch.setattr(prepare_data, 'encode', slow)
    folder, meta = prepare(tmp_path, **usual)
    said = capfd.readouterr().err.splitlines()
    units = len(json.loads(contents(folder)['units.json'])['units'])
    assert [f'{done} of {units} units, ' in line for done, line in enumerate(said[1:-1], 1)] == [True] * units
    tokens = sum(shard['tokens'] for shards in meta['splits'].values() for shard in shards)
    assert said[-1].endswith(f' {tokens / clock.now:,.0f} tokens/s')        # of the whole run


def test_a_bar_on_a_terminal(tmp_path):
    with terminal() as texts:
        prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(300)), unit_bytes=10_000)
    assert re.search(r' 0/\d+ \[00:00<\?, \?unit/s\]', ''.join(texts))
    first, last, cursor = seen(texts)
    assert ' units of ' in first and last.endswith(' tokens/s') and not cursor.strip()


def test_a_closed_stderr_is_no_error(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    line = ' '.join([sys.executable, SCRIPT, *SETTINGS, '--num_proc=1', f'--corpus={source}',
                     f'--data_dir={tmp_path}'])
    assert subprocess.run(f'{line} --name=a 2>&-', shell=True).returncode == 0
    subprocess.run(f'({line} --name=b; echo $? > {tmp_path}/status) 2>&1 | true', shell=True, check=True)
    assert (tmp_path / 'status').read_text() == '0\n'
    made = [prepare_data.load_meta(f'{tmp_path}/{name}')['identity'] for name in 'ab']
    assert made[0] == made[1]
