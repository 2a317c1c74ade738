"""What the tests share: a small corpus of real text, prepared once, and ways to run a stage as users do."""
import contextlib
import fcntl
import functools
import glob
import os
import signal
import struct
import subprocess
import sys
import termios

import forkserver
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ['OMP_NUM_THREADS'] = '1'                     # of the processes that tests start; two run at a time
os.environ['PYTHONFAULTHANDLER'] = '1'                  # see stage()
os.environ['PYTHONPATH'] = os.path.join(ROOT, 'tests', 'plotless')
os.environ.setdefault('HF_HUB_OFFLINE', '1')            # Hugging Face's names: local files only
signal.signal(signal.SIGINT, signal.default_int_handler)        # a shell's background job ignores it
TINY = ['--n_layer=2', '--n_head=4', '--n_embd=16', '--n_inner=32', '--block_size=32', '--total_batch=8',
        '--learning_rate=1e-3', '--warmup_iters=2', '--eval_interval=0', '--eval_samples=32',
        '--log_interval=1', '--checkpoint_interval=0', '--fill_samples=0', '--dropout=0.1',
        '--attention_dropout=0.1', '--device=cpu', '--dtype=float32']
SLOW = ('test_model', 'test_train', 'test_prepare_data', 'test_finetune', 'test_readme', 'test_bench')


def pytest_configure(config):
    config.option.loadscopereorder = False              # xdist's own order would end with a slow file


def pytest_collection_modifyitems(items):
    """Slow files first, so that two workers end together."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@contextlib.contextmanager
def terminal():
    """stdout and stderr on a pseudo-terminal 100 characters wide; yields a list that then gets their text."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('4H', 24, 100, 0, 0))
    texts = []
    with (os.fdopen(theirs, 'w') as stream, contextlib.redirect_stdout(stream),
          contextlib.redirect_stderr(stream)):
        yield texts
        stream.flush()
        os.set_blocking(ours, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                texts.append(os.read(ours, 65536).decode())
    os.close(ours)


def seen(texts):
    """The lines that stay on a terminal; the last is where the cursor stands."""
    return [line.removesuffix('\r').rpartition('\r')[2].replace('\033[K', '')
            for line in ''.join(texts).split('\n')]


def descendants(pid):
    """Process ids of `pid` and of all that it started, from Linux's /proc."""
    yield pid
    for path in glob.glob(f'/proc/{pid}/task/*/children'):
        with contextlib.suppress(OSError), open(path) as file:
            for child in file.read().split():
                yield from descendants(int(child))


@functools.cache
def server():
    """The fork server of this pytest worker, started when first needed."""
    return forkserver.Server(ROOT)


def pytest_unconfigure():
    if server.cache_info().currsize:
        server().close()


def launch(*command, cwd=ROOT, env=None, **keywords):
    """Start `python command...` in the repository; returns what subprocess.Popen would, in its own session.

    A stage is forked from the server, which has imported the libraries: a tenth of a second instead of three.
    `python -...`, keywords of Popen, and variables that are read when Python starts need a real process.
    """
    env = dict(os.environ if env is None else env)
    forks = not command[0].startswith('-') and not keywords and hasattr(os, 'pidfd_open')
    if forks and server().can(env):
        return server().start(command, str(cwd), env)
    return real_launch(*command, cwd=cwd, env=env, **keywords)


def real_launch(*command, **keywords):
    """Start `python command...` as a process of its own, for tests of the process itself."""
    return subprocess.Popen([sys.executable, *command], **{
        'cwd': ROOT, 'text': True, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE,
        'start_new_session': True, **keywords})


def stage(*command, timeout=120, start=launch, **keywords):
    """Run `python command...` in the repository; returns the finished process with its text.

    Processes that still run after `timeout` seconds print their stacks and are killed.
    """
    process = start(*command, **keywords)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process, signal.SIGABRT)                   # faulthandler writes the stacks of all threads
        raise AssertionError((f'hung for {timeout} s', command, *process.communicate(timeout=60))) from None
    finally:
        kill(process, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill(process, number):
    """Send a signal to a process, if it still runs, and to all that it started."""
    for pid in list(descendants(process.pid)) if process.poll() is None else ():
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def real_stage(*command, **keywords):
    """stage() without the fork server."""
    return stage(*command, start=real_launch, **keywords)


def torchrun(*command, n=2, timeout=180, **keywords):
    return real_stage('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}', *command,
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
