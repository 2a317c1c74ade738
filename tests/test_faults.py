"""Faults of train.py: killed, stopped, out of disk, hung.  The end equals an undisturbed one's to the bit.

    $ FAULTS=50 python -m pytest -m slow -rP tests/test_faults.py       # more often than once

Those that need no process of their own are in test_train.py.
"""
import contextlib
import glob
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers want it: once, in the fork server
from conftest import ROOT, tiny
from test_train import free_port, metrics, same_checkpoint

import train as source
from configurator import run

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(sys.platform != 'linux', reason='signals and limits of Linux')]
TIMES = int(os.environ.get('FAULTS', 1))                # runs that are disturbed, of each kind
LAST = 'ckpt_0000024.pt'
KNOBS = ['--max_iters=24', '--checkpoint_interval=1', '--eval_interval=1']      # saves and validations
CONTEXT = get_context('forkserver')                     # processes that have imported torch already
CONTEXT.set_forkserver_preload(['test_faults'])


def enter(words, errors, before, environment):
    """What a started process does: train.py's main with these words."""
    sys.stderr = os.fdopen(os.open(errors, os.O_WRONLY), 'w', buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ['train.py', *words]
    if before:
        before()
    run(lambda: source.in_memory(source.main, vars(source)))


class Run:
    """train.py in a process of its own, which can be killed."""

    def __init__(self, words, errors, before=None, **environment):
        self.errors = str(errors)
        open(errors, 'w').close()
        self.process = CONTEXT.Process(target=enter, args=(words, self.errors, before, environment))
        self.process.start()

    def ends(self, timeout=120):
        """(exit status, stderr), once it has ended"""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f'still there after {timeout} s'
        with open(self.errors) as file:
            return self.process.exitcode, file.read()

    def send(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)


def fine(words, folder, *knobs, **environment):
    status, text = Run([*words, *knobs], folder.parent / 'errors', **environment).ends()
    assert status == 0, text


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.02)


def same_run(one, other):
    same_checkpoint(one / LAST, other / LAST)
    for kind in ('train', 'val'):
        assert metrics(one, kind) == metrics(other, kind)


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """(folder of an undisturbed run, its seconds)"""
    folder = tmp_path_factory.mktemp('whole') / 'run'
    fine([*tiny(corpus, folder.parent / 'first'), *KNOBS], folder)              # the fork server starts
    start = time.monotonic()
    fine([*tiny(corpus, folder), *KNOBS], folder)
    return folder, time.monotonic() - start


@contextlib.contextmanager
def small_disk(folder, size):
    """`folder` as a file system of `size` bytes; skips where that is not allowed."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', folder], stderr=-1)
    if done.returncode:
        pytest.skip('mounting is not allowed here')
    try:
        yield
    finally:
        subprocess.run(['umount', folder], check=True)


# ---- signals ----

@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_moment_loses_nothing(number, whole, corpus, tmp_path):
    folder, seconds = whole
    rng, cut, saving, steps = random.Random(int(number)), 0, 0, []
    for i in range(TIMES):
        words = [*tiny(corpus, tmp_path / f'{i}'), *KNOBS]
        one = Run(words, tmp_path / 'errors')
        time.sleep(rng.uniform(0, seconds))
        one.send(number)
        status, text = one.ends()
        cut += status != 0
        saving += bool(glob.glob(f'{tmp_path}/{i}/*.tmp'))
        if number != signal.SIGKILL and status and 'stopped by signal' in text:
            step = int(re.search(r'after step (\d+)', text)[1])
            assert status == 128 + number and (tmp_path / f'{i}' / f'ckpt_{step:07d}.pt').exists()
        steps.append(max(source.checkpoints(tmp_path / f'{i}'), default=0))
        fine(words, tmp_path / f'{i}')
        same_run(folder, tmp_path / f'{i}')
        assert not glob.glob(f'{tmp_path}/{i}/*.tmp')
        shutil.rmtree(tmp_path / f'{i}')
    print(f'{signal.Signals(number).name}: {TIMES} runs, {cut} cut off, {saving} of them in a save, at steps '
          f'{min(steps)} to {max(steps)}; all end as an undisturbed one')


def test_two_processes_killed_together_go_on_together(corpus, tmp_path):
    """kill -9 of one rank ends the other with one line; both go on from the last checkpoint."""
    rng = random.Random(2)
    words = [*tiny(corpus, tmp_path / 'whole'), *KNOBS]
    for one in group(words, tmp_path):
        assert one.ends()[0] == 0
    for i in range(TIMES):
        words = [*tiny(corpus, tmp_path / f'{i}'), *KNOBS]
        ranks = group(words, tmp_path)
        wait_for(lambda: source.checkpoints(tmp_path / f'{i}'))         # noqa: B023
        time.sleep(rng.uniform(0, 0.5))
        victim = rng.randrange(2)
        ranks[victim].send(signal.SIGKILL)
        status, text = ranks[1 - victim].ends()
        assert status in (0, 2), text
        assert not status or 'lost another process' in text and 'Traceback' not in text, text
        for one in group(words, tmp_path):
            assert one.ends()[0] == 0
        same_run(tmp_path / 'whole', tmp_path / f'{i}')
    print(f'kill -9 of one of two ranks: {TIMES} runs; all end as an undisturbed pair')


def group(words, tmp_path, before=(None, None)):
    """Two processes of a group, without torchrun, which would end what is left of one."""
    port = str(free_port())
    return [Run(words, tmp_path / f'errors{rank}', before[rank], RANK=f'{rank}', WORLD_SIZE='2',
                LOCAL_RANK=f'{rank}', MASTER_ADDR='127.0.0.1', MASTER_PORT=port) for rank in range(2)]


@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.parametrize('number', [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_rank_ends_the_group_within_its_timeout(number, victim, corpus, tmp_path):
    words = [*tiny(corpus, tmp_path / 'run'), '--max_iters=100000', '--timeout=5']
    ranks = group(words, tmp_path)
    try:
        wait_for(lambda: len(source.read_metrics(tmp_path / 'run')) > 3)
        ranks[victim].send(number)
        start = time.monotonic()
        status, text = ranks[1 - victim].ends(30)
    finally:
        for one in ranks:
            one.send(signal.SIGKILL)
    assert status == 2 and time.monotonic() - start < 15
    assert text.startswith('error') and 'lost another process' in text and len(text.splitlines()) == 1


# ---- disks ----

class Crowd:
    """No file of the process may grow beyond a limit, in bytes."""

    def __init__(self, limit):
        self.limit = limit

    def __call__(self):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # as Python does at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, self.limit))


def test_a_file_that_may_not_grow_leaves_the_checkpoint_before(whole, corpus, tmp_path):
    folder, _ = whole
    size, rng = (folder / LAST).stat().st_size, random.Random(3)
    for i in range(TIMES):
        words, out_dir = tiny(corpus, tmp_path / f'{i}'), tmp_path / f'{i}'
        out_dir.mkdir()
        shutil.copy(folder / 'ckpt_0000023.pt', out_dir)
        shutil.copytree(folder / 'tokenizer', out_dir / 'tokenizer')  # larger than a checkpoint here
        before = (out_dir / 'ckpt_0000023.pt').read_bytes()
        limit = Crowd(rng.randrange((folder / 'run.json').stat().st_size + 2000, size))
        status, text = Run([*words, *KNOBS], tmp_path / 'errors', limit).ends()
        assert status == 2 and 'ckpt_0000024.pt: cannot be written: File too large' in text, text
        assert 'Traceback' not in text and not list(out_dir.glob('*.tmp'))
        assert (out_dir / 'ckpt_0000023.pt').read_bytes() == before
        fine([*words, *KNOBS], out_dir)
        same_checkpoint(folder / LAST, out_dir / LAST)
    print(f'ulimit -f: {TIMES} runs refused at a save, the checkpoint before intact, the end undisturbed')


def test_a_full_disk_leaves_the_checkpoint_before(whole, corpus, tmp_path):
    folder, _ = whole
    size = (folder / LAST).stat().st_size
    tokenizer = sum(path.stat().st_size for path in (folder / 'tokenizer').iterdir())
    for i in range(TIMES):                              # room for two checkpoints and a part of the third
        room = tokenizer + int((2.2 + 0.6 * i / TIMES) * size)
        with small_disk(tmp_path / 'disk', room):
            out_dir = tmp_path / 'disk' / 'run'
            words = [*tiny(corpus, out_dir), *KNOBS]
            status, text = Run(words, tmp_path / 'errors').ends()
            assert status == 2 and 'No space left on device' in text and 'Traceback' not in text, text
            assert not list(out_dir.glob('*.tmp'))
            there = source.checkpoints(out_dir)
            assert [source.read_checkpoint(path)['step'] for path in there.values()] == list(there) != []
            shutil.copytree(out_dir, tmp_path / f'{i}')
        fine([*tiny(corpus, tmp_path / f'{i}'), *KNOBS], tmp_path / f'{i}')
        same_checkpoint(folder / LAST, tmp_path / f'{i}' / LAST)
    print(f'full file system: {TIMES} runs refused at a save, both checkpoints intact, the end undisturbed')


def test_a_folder_that_cannot_be_written_is_one_line(corpus, tmp_path):
    with small_disk(tmp_path / 'disk', 10 ** 6):
        subprocess.run(['mount', '-o', 'remount,ro', tmp_path / 'disk'], check=True)
        for out_dir in ('disk', 'disk/run'):
            status, text = Run([*tiny(corpus, tmp_path / out_dir), *KNOBS], tmp_path / 'errors').ends()
            assert status == 2 and 'Read-only file system' in text and len(text.splitlines()) == 1, text


# ---- memory ----

def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def read_batches(folder, meta, n):
    """Bytes by which reading `n` batches makes this process grow; exits 1 from 20 MB on."""
    rows = source.StreamRows(folder, meta, 'train', 128)
    loader = source.Loader(rows, source.Masker(meta, 128, 0.15), 1, 64, slice(0, 64))
    batches = source.prefetch(loader.batch, range(n))
    for _ in range(20):
        next(batches)
    before = resident()
    assert sum(1 for _ in batches) == n - 20
    print(f'{n} batches: {(resident() - before) / 1e6:.1f} MB more')
    sys.exit(resident() - before >= 20e6)


def test_batches_of_a_large_corpus_do_not_grow_the_process(corpus, tmp_path):
    """2,000 batches of 64 x 128 tokens: 16 million of the 100 million tokens of 200 MB."""
    shutil.copytree(corpus, tmp_path / 'large')
    meta, rng = source.load_meta(corpus), np.random.default_rng(0)
    shard = meta['splits']['train'][0]
    ids = rng.integers(10, meta['vocab_size'], 10 ** 8).astype(meta['dtype'])
    ids.tofile(tmp_path / 'large' / f"{shard['stem']}.bin")
    meta['splits']['train'] = [{**shard, 'tokens': len(ids)}]
    assert ids.nbytes == 200_000_000
    reader = CONTEXT.Process(target=read_batches, args=(str(tmp_path / 'large'), meta, 2000))
    reader.start()
    reader.join(300)
    assert reader.exitcode == 0


# ---- several machines ----

@pytest.fixture
def machines():
    """(words before a command, address, interface) of two machines: network namespaces, or this one."""
    names = [f'thinbert{os.getpid()}{i}' for i in 'ab']
    places = [(['ip', 'netns', 'exec', name], f'10.77.0.{i}', f'eth{i}') for i, name in enumerate(names, 1)]
    lines = [f'netns add {name}' for name in names]
    lines += [f'link add eth1 netns {names[0]} type veth peer name eth2 netns {names[1]}']
    for name, (_, address, interface) in zip(names, places, strict=True):
        lines += [f'-n {name} addr add {address}/24 dev {interface}', f'-n {name} link set {interface} up',
                  f'-n {name} link set lo up']
    allowed = shutil.which('ip') and not any(
        subprocess.run(['ip', *line.split()], stderr=subprocess.DEVNULL).returncode for line in lines)
    if not allowed:
        places = [([], '127.0.0.1', 'lo')] * 2
    yield places
    for name in names if shutil.which('ip') else ():
        subprocess.run(['ip', 'netns', 'del', name], stderr=-1)


def agent(log, words, place, store, hosts):
    """A torchrun of one process, as on a machine of its own.  hosts: it keeps the `store`, an address"""
    before, address, interface = place
    command = [*before, sys.executable, '-m', 'torch.distributed.run', '--nnodes=1:2', '--nproc_per_node=1',
               '--max_restarts=9', '--rdzv_backend=c10d', '--rdzv_id=faults', f'--rdzv_endpoint={store}',
               f'--rdzv_conf=last_call_timeout=2,join_timeout=60,is_host={hosts}', f'--local_addr={address}',
               'train.py', *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env={
        **os.environ, 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1', 'GLOO_SOCKET_IFNAME': interface})


def family(pid):
    """A process and all that it started."""
    children = subprocess.run(['pgrep', '-P', str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(one for child in children for one in family(int(child)))]


def test_a_dead_node_is_survived_and_a_new_one_joins(machines, corpus, tmp_path):
    """Two torchrun agents; kill -9 of a worker, then of a whole node; then a new node joins."""
    first, second = machines
    store = f'{first[1]}:{free_port()}'
    words = [*tiny(corpus, tmp_path / 'run'), '--max_iters=100000', '--checkpoint_interval=20']

    def reached():
        return max(source.checkpoints(tmp_path / 'run'), default=0)

    def launches():
        return [one['world_size'] for one in json.loads((tmp_path / 'run' / 'run.json').read_text())]

    log = open(tmp_path / 'log', 'w')                   # noqa: SIM115
    nodes = [agent(log, words, first, store, 1)]
    time.sleep(0.5)
    nodes.append(agent(log, words, second, store, 0))
    try:
        wait_for(lambda: reached() > 20, 90)
        assert launches() == [2]
        os.kill(family(nodes[1].pid)[-1], signal.SIGKILL)               # a worker: both start again
        wait_for(lambda: len(launches()) > 1, 90)
        step = reached()
        wait_for(lambda: reached() > step, 90)
        assert launches() == [2, 2]
        for one in family(nodes[1].pid):                                # a node
            os.kill(one, signal.SIGKILL)
        wait_for(lambda: launches()[-1] == 1, 90)
        step = reached()
        wait_for(lambda: reached() > step, 90)
        nodes.append(agent(log, words, second, store, 0))                 # a new one
        wait_for(lambda: launches()[-1] == 2, 90)
        step = reached()
        wait_for(lambda: reached() > step, 90)
    finally:
        for node in nodes:
            for one in family(node.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            node.wait()
        log.close()
    lines = source.read_metrics(tmp_path / 'run')
    steps = [line['step'] for line in lines if line['kind'] == 'train']
    assert steps == list(range(1, len(steps) + 1))      # every step once, none left out
    starts = list(map(int, re.findall(r'continuing \S+ at step (\d+)', (tmp_path / 'log').read_text())))
    assert len(starts) == 3 and starts == sorted(starts) and starts[0] > 0
    print(f'elastic at {first[1]} and {second[1]}: world sizes {launches()}, went on at steps {starts}, '
          f'{len(steps)} steps without a gap')
