"""What the tests share: stages run in this process, a small corpus of real text, processes of their own."""
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
sys.path.append(os.path.join(ROOT, 'results'))         # for its scripts
os.environ.update(
    HF_HUB_OFFLINE='1',                                 # Hugging Face's names: local files only
    HF_DATASETS_CACHE=tempfile.mkdtemp(), HF_DATASETS_DISABLE_PROGRESS_BARS='1',
    OMP_NUM_THREADS='1')                                # else two pytest workers get in each other's way
TINY = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'block_size': 32, 'total_batch': 8,
        'max_iters': 8, 'learning_rate': 1e-3, 'warmup_iters': 2, 'eval_interval': 0, 'eval_samples': 32,
        'log_interval': 1, 'checkpoint_interval': 0, 'fill_samples': 0, 'dropout': 0.1,
        'attention_dropout': 0.1, 'device': 'cpu', 'dtype': 'float32'}


class Done(NamedTuple):
    """A stage that has ended: exit status and what it printed."""
    code: int
    out: str
    err: str


def flip(path, place=None, bit=0):
    """Flip a bit of a byte of a file, by default of its middle one."""
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1 << bit
    Path(path).write_bytes(data)


def words(**knobs):
    """Knobs as words of a command line."""
    return [f'--{name}={value}' for name, value in knobs.items()]


def tiny(corpus, out_dir, **knobs):
    """Words of a tiny run of train.py on the `corpus` fixture."""
    data_dir, dataset = os.path.split(corpus)
    return words(**{**TINY, 'data_dir': data_dir, 'dataset': dataset, 'out_dir': out_dir, **knobs})


def knobs_of(module):
    is_knob = importlib.import_module('configurator').is_knob
    return {name: value for name, value in vars(module).items() if is_knob(name, value)}


def ignore_no_signal():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_signal_is_ignored():
    """As SIGINT is if the tests were started by `nohup ... &`; processes that a test starts inherit that."""
    ignore_no_signal()


@pytest.fixture
def stage(monkeypatch, capsys):
    """stage('train', '--seed=2', ...) runs train.py's main() in this process -> Done.

    Every call starts from the knobs of the file. matplotlib counts as missing, unless `pictures` is set.
    """
    defaults = {}                                       # stage -> its knobs before the first call

    def call(name, *arguments, pictures=False):
        module = importlib.import_module(name)
        vars(module).update(defaults.setdefault(name, knobs_of(module)))
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *map(str, arguments)])
        if not pictures:
            monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
        capsys.readouterr()                             # what was printed before
        code = 0
        try:
            importlib.import_module('configurator').run(module.main)
        except SystemExit as end:
            code = end.code or 0
        finally:
            ignore_no_signal()                          # train.py has handlers of its own
        return Done(code, *capsys.readouterr())
    yield call
    for name, knobs in defaults.items():
        vars(sys.modules[name]).update(knobs)


@pytest.fixture
def run(stage, corpus, tmp_path, monkeypatch):
    """run('name', knob=...) trains in the folder `name` of tmp_path -> Done; code: its exit status

    A test that uses it has tmp_path as its current folder.
    """
    monkeypatch.chdir(tmp_path)

    def start(name, code=0, **knobs):
        done = stage('train', *tiny(corpus, name, **knobs))
        assert done.code == code, done
        return done
    return start


def refused(done):
    """The one line on stderr of a stage that refused its user's input."""
    assert done.code == 2, done
    line, = done.err.splitlines()
    return line


def launch(*command, env=(), cwd=ROOT):
    """Start `python command...` in the repository, in its own session; returns the subprocess.Popen."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, **dict(env)}, cwd=cwd)


def process(*command, timeout=180, **keywords):
    """Run `python command...` as a process of its own, and kill what it left -> Done."""
    started = launch(*command, **keywords)
    try:
        out, err = started.communicate(timeout=timeout)
    finally:
        kill(started)
    return Done(started.returncode, out, err)


def kill(started, number=signal.SIGKILL):
    """Send a signal to all processes of a launch()."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, number)


def torchrun(*command, n=2, **keywords):
    return process('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', *command,
                   **keywords)


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Folder of the prepared docstrings of four packages of the standard library, in several shards."""
    data_dir = tmp_path_factory.mktemp('data')
    done = process('prepare_data.py', *words(
        path='email unittest asyncio logging', name='tiny', data_dir=data_dir, vocab_size=400,
        val_fraction=0.1, unit_bytes=40000, num_proc=1))
    assert done.code == 0, done.err
    return str(data_dir / 'tiny')
