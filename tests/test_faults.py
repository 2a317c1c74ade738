"""Faults of train.py's processes: killed, stopped, lost.  The end equals that of an undisturbed run.

    $ for i in {1..50}; do python -m pytest -m slow tests/test_faults.py; done     # other moments each time
"""
import os
import random
import signal
import socket
import subprocess
import time

import pytest
from conftest import ROOT, kill, launch, process, tiny, torchrun
from test_train import metrics, same_run

import train

pytestmark = pytest.mark.slow
KNOBS = {'max_iters': 24, 'checkpoint_interval': 1, 'eval_interval': 1}     # always saving, validating
TWO = '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2'
LONG = {'max_iters': 8, 'eval_interval': 4, 'eval_samples': 10 ** 4, 'batch_size': 1, 'n_layer': 8}


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """(folder of an undisturbed run, the seconds from its first step to its end)"""
    folder = tmp_path_factory.mktemp('whole') / 'run'
    started = launch('train.py', *tiny(corpus, folder, **KNOBS))
    wait_for(lambda: metrics(folder))
    start = time.monotonic()
    assert started.wait(120) == 0
    return folder, time.monotonic() - start


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.02)


def reached(folder):
    """The step of the newest checkpoint, 0 if there is none."""
    return max(train.checkpoints(str(folder)), default=0)


# ---- one process ----

@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_at_any_moment_again_and_again(number, whole, corpus, tmp_path):
    """Four times, at random moments of its steps, saves and validations."""
    folder, seconds = whole
    command = ['train.py', *tiny(corpus, tmp_path, **KNOBS)]
    for _ in range(4):
        lines = len(metrics(tmp_path))
        started = launch(*command)
        wait_for(lambda: len(metrics(tmp_path)) != lines or started.poll() is not None)     # noqa: B023
        time.sleep(random.uniform(0, seconds / 4))
        kill(started, number)
        _, err = started.communicate(timeout=60)
        assert 'Traceback' not in err, err
    done = process(*command)
    assert done.code == 0, done
    same_run(folder, tmp_path)


# ---- two processes ----

@pytest.fixture(scope='module')
def pair(corpus, tmp_path_factory):
    """Folder of an undisturbed run of two processes."""
    folder = tmp_path_factory.mktemp('pair') / 'run'
    assert torchrun('train.py', *tiny(corpus, folder, **LONG)).code == 0
    return folder


@pytest.mark.parametrize('place', ['step', 'validation'])
def test_sigterm_to_torchrun_saves(place, pair, corpus, tmp_path):
    """It passes the signal on to both; in the validation at step 4 they give it up, and it is repeated."""
    words = tiny(corpus, tmp_path / 'run', **LONG)
    started = launch(*TWO, 'train.py', *words)
    wanted = 4 if place == 'validation' else 1
    wait_for(lambda: len(metrics(tmp_path / 'run', 'train')) >= wanted)
    started.terminate()
    _, err = started.communicate(timeout=60)
    step = reached(tmp_path / 'run')
    assert f'stopped by a signal; repeat the command to go on from step {step}' in err, err
    if place == 'validation':
        assert step == 4
        assert [line['step'] for line in metrics(tmp_path / 'run', 'val')] == [0]
    done = torchrun('train.py', *words)
    assert done.code == 0, done.err
    same_run(pair, tmp_path / 'run')


def test_a_killed_worker_is_started_again(pair, corpus, tmp_path):
    """torchrun --max_restarts: both go on from the newest checkpoint."""
    words = tiny(corpus, tmp_path / 'run', **LONG, checkpoint_interval=1)
    started = launch(*TWO, '--max_restarts=2', 'train.py', *words)
    wait_for(lambda: reached(tmp_path / 'run') >= 2)
    workers = subprocess.check_output(['pgrep', '-P', str(started.pid)])
    os.kill(int(workers.split()[-1]), signal.SIGKILL)
    _, err = started.communicate(timeout=180)
    assert started.returncode == 0, err
    same_run(pair, tmp_path / 'run')
    assert (tmp_path / 'run' / 'launches.jsonl').read_text().count('argv') == 2


@pytest.mark.parametrize('number', [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize('victim', [0, 1])
def test_a_lost_rank_ends_the_group_within_its_timeout(victim, number, corpus, tmp_path):
    """Without torchrun, which would end what is left of one."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        places = {'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(server.getsockname()[1])}
    words = tiny(corpus, tmp_path / 'run', max_iters=100_000, timeout=5)
    ranks = [launch('train.py', *words, env={**places, 'RANK': rank, 'LOCAL_RANK': rank}) for rank in '01']
    try:
        wait_for(lambda: len(metrics(tmp_path / 'run')) > 3)
        kill(ranks[victim], number)
        start = time.monotonic()
        assert ranks[1 - victim].wait(60) != 0
        assert time.monotonic() - start < 30
    finally:
        for one in ranks:
            kill(one)


LINGERS = """
import atexit, sys, threading, torch, train
class Stuck:
    def __del__(self, wait=threading.Event().wait):
        wait()
stuck = Stuck()
runtime = train.make_runtime('cpu', 'float32', 1)
atexit.register(sys.stdout.write, f'a hook of rank {runtime.rank}' + chr(10))
train.exit_processes(runtime, 3)
"""


def test_what_hangs_at_interpreter_shutdown_holds_no_process(tmp_path):
    (tmp_path / 'lingers.py').write_text(LINGERS)
    done = torchrun(tmp_path / 'lingers.py', timeout=60, env={'PYTHONPATH': ROOT})
    assert done.code != 0
    assert 'exitcode  : 3' in done.err
    assert sorted(done.out.splitlines()) == ['a hook of rank 0', 'a hook of rank 1']
