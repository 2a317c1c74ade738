"""What the tests share: a small corpus of real text, prepared once, and ways to run a stage as users do."""
import contextlib
import glob
import os
import signal
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ['OMP_NUM_THREADS'] = '1'                     # of the processes that tests start; two run at a time
os.environ['PYTHONFAULTHANDLER'] = '1'                  # see stage()
os.environ['PYTHONPATH'] = os.path.join(ROOT, 'tests', 'plotless')
os.environ.setdefault('HF_HUB_OFFLINE', '1')            # names are looked up on this machine alone
TINY = ['--n_layer=2', '--n_head=4', '--n_embd=16', '--n_inner=32', '--block_size=32', '--total_batch=8',
        '--learning_rate=1e-3', '--warmup_iters=2', '--eval_interval=0', '--eval_samples=32',
        '--log_interval=1', '--checkpoint_interval=0', '--fill_samples=0', '--dropout=0.1',
        '--attention_dropout=0.1', '--device=cpu']
SLOW = ('test_readme', 'test_train', 'test_faults', 'test_bench', 'test_finetune', 'test_prepare_data')


def pytest_configure(config):
    config.option.loadscopereorder = False              # xdist's own order would end with a slow file


def pytest_collection_modifyitems(items):
    """Slow files first, so that two workers end together."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


def descendants(pid):
    """Numbers of a process and of all that it started, as Linux knows them."""
    yield pid
    for path in glob.glob(f'/proc/{pid}/task/*/children'):
        with contextlib.suppress(OSError), open(path) as file:
            for child in file.read().split():
                yield from descendants(int(child))


def stage(*command, timeout=120, **keywords):
    """Run `python command...` in the repository; returns the finished process with its text.

    Processes that are still there after `timeout` seconds say where they hang.
    """
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, **keywords)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in list(descendants(process.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGABRT)            # faulthandler writes the stacks of all threads
        raise AssertionError((f'hung for {timeout} s', command, *process.communicate(timeout=60))) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(*command, n=2, timeout=180, **keywords):
    return stage('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', *command,
                 timeout=timeout, **keywords)


def tiny(corpus, out_dir):
    """Knobs of a tiny run on the `corpus` fixture."""
    data_dir, dataset = os.path.split(corpus)
    return [f'--data_dir={data_dir}', f'--dataset={dataset}', f'--out_dir={out_dir}', *TINY]


def train(corpus, out_dir, *knobs, run=stage):
    """A tiny training run on the `corpus` fixture that must succeed."""
    done = run('train.py', *tiny(corpus, out_dir), *knobs)
    assert done.returncode == 0, done.stderr
    return done


def refused(done):
    """The one line of stderr of a process that refused its user's input."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and 'Traceback' not in done.stderr, done.stderr
    return lines[0]


@pytest.fixture(scope='session')
def corpus(tmp_path_factory):
    """Folder of the prepared docstrings of four packages of the standard library, in several shards."""
    data_dir = tmp_path_factory.mktemp('data')
    done = stage('prepare_data.py', '--path=email unittest asyncio logging', '--name=tiny',
                 f'--data_dir={data_dir}', '--vocab_size=400', '--val_fraction=0.1', '--unit_bytes=40000',
                 '--num_proc=1')
    assert done.returncode == 0, done.stderr
    return str(data_dir / 'tiny')
