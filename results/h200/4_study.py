"""The papers' claims at BERT-small on one GPU: runs of train.py, several at once, paper by paper.

    $ PYTHONPATH=. python results/h200/4_study.py            # again: goes on with the next runs
    $ PYTHONPATH=. python results/h200/4_study.py --dry      # only names the runs that come next

Each system runs with seed 1 at three rates, and at more until the best has a neighbour on both sides; then
with seeds 2 and 3 at the best. Runs at equal time have more or fewer steps, by the times of 3_systems.py. A
finished run is a line of study.jsonl; others are stopped in time, and go on in the next call if out/ is kept.
"""
from configurator import configure, run, show

import math
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from tables import add, best_rates, read

import bench
import train

out_dir = 'results/h200'        # for study.jsonl
raw = 'results/h200'            # study.jsonl and systems.jsonl of earlier calls
data = 'data/h200'              # prepared by data.py
runs = 'out/h200_study'         # folder of the runs; a finished one is deleted
device = 'auto'                 # auto, cuda or cpu
workers = 4                     # runs at once
seconds = 490                   # runs that have not ended by then are stopped
expected = 150.0                # seconds of a run, until one has ended; none is begun that would end too late
steps = 3000                    # of 256 x 128 tokens: 98 million tokens
match = ''                      # regular expression: parts of STUDY to run; empty: all
dry = False                     # name the next runs and stop
toy = False                     # tiny runs, to try the script

RATE = 1e-3                     # the middle of the first three rates
SEEDS = 1, 2, 3
PLATEAU = 0.1                   # nats: the plateau ends this much below the unigram entropy
RELU = bench.VARIANTS['gau_squared_relu']
SYSTEMS = {                     # name -> knobs of train.py
    **bench.VARIANTS,
    **{f'pairwise_rank_{rank}': {'attention': 'pairwise', 'pair_rank': rank} for rank in (1, 16)},
    **{f'pairwise_{start}': {'attention': 'pairwise', 'pair_init': start} for start in ('fan_in', 'normal')},
    **{f'gau_4s_{scale}': {**RELU, 'relu_scale': scale, 'key_size': 32} for scale in ('ns', 'n2', 'n', 's2')},
}
STUDY = {                       # part -> systems; {system: whose best rate it takes}; {system: whose time}
    'Courtois': (['original', 'pairwise'], {}, {}),
    'Courtois, S': (['symmetric'], dict.fromkeys(
        ('pairwise_rank_1', 'pairwise_rank_16', 'pairwise_fan_in', 'pairwise_normal'), 'pairwise'), {}),
    'Kowsher': (['shared'], {}, {}),
    'Tian, steps': (['shatter', 'part_bias', 'one_head_sigmoid', 'one_head_softmax', 'part_mask',
                     'no_position'], {}, {}),
    'Tian, time': (['rpe', 'rab'], {}, dict.fromkeys(('shatter', 'rpe', 'rab'), 'original')),
    'Liu, normalisers': (['gau', 'gau_softmax', 'gau_squared_relu', 'gau_scaled_squared_relu'], {}, {}),
    'Liu, scales': ([], dict.fromkeys(
        ('gau_4s_ns', 'gau_4s_n2', 'gau_4s_n', 'gau_4s_s2'), 'gau_squared_relu'), {}),
    'Liu, time': (['roformer_v2'], {}, {'gau': 'roformer_v2'}),
}
COMMON = {
    'block_size': 128, 'total_batch': 256, 'batch_size': 256, 'dropout': 0.0, 'attention_dropout': 0.0,
    'eval_interval': 50, 'eval_samples': 1024, 'log_interval': 50, 'checkpoint_interval': 0,
    'keep_checkpoints': 1, 'milestones': (), 'fill_samples': 0,
}
TOY = {'n_layer': 1, 'n_head': 4, 'n_embd': 32, 'n_inner': 64, 'block_size': 32, 'total_batch': 4,
       'eval_interval': 2, 'eval_samples': 8, 'log_interval': 2}


class Job(NamedTuple):
    """A run of train.py."""
    system: str                 # a key of SYSTEMS, with ', equal time' if its number of steps is another
    rate: float
    seed: int
    steps: int


def next_rates(rows, system):
    """Rates of a system to run with seed 1: three, then one beyond the best while that is at an edge."""
    tried = {row['rate']: math.inf if row['loss'] is None else row['loss'] for row in rows
             if row['system'] == system and row['seed'] == 1}
    first = [rate for rate in (RATE, RATE / 2, RATE * 2) if rate not in tried]
    if first:
        return first
    best = min(tried, key=tried.get)
    beyond = {min(tried): best / 2, max(tried): best * 2}.get(best)
    return [beyond] if beyond and RATE / 8 <= beyond <= RATE * 8 else []


def plan(rows, step_times, steps, match):
    """The runs still to be done, in order; what comes later may depend on `rows`, those that have ended."""
    done = {(row['system'], row['rate'], row['seed']) for row in rows}
    best = {name: rate for name, rate in best_rates(rows).items() if not next_rates(rows, name)}
    for part, (systems, others, timed) in STUDY.items():
        if not re.search(match, part):
            continue
        jobs = [Job(system, rate, 1, steps) for system in systems for rate in next_rates(rows, system)]
        pairs = [*zip(systems, systems, strict=True), *others.items()]
        jobs += [Job(system, best[other], seed, steps) for seed in SEEDS for system, other in pairs
                 if other in best]
        for system, other in timed.items():
            if system in best and {system, other} <= step_times.keys():
                n = round(steps * step_times[other] / step_times[system])
                jobs += [Job(f'{system}, equal time', best[system], seed, n) for seed in SEEDS]
        yield from (job for job in jobs if job[:3] not in done)


def folder_of(job, config):
    return os.path.join(config['runs'], re.sub('[, ]+', '_', f'{job.system} {job.rate:g} {job.seed}'))


def words_of(job, config):
    """The command line of a job, after `python`."""
    data_dir, dataset = os.path.split(config['data'])
    system = SYSTEMS[job.system.partition(',')[0]]
    knobs = {'n_layer': 4, **COMMON, **(TOY if config['toy'] else {}), **system}
    knobs['n_layer'] *= 2 if knobs.get('attention') == 'gau' else 1
    knobs |= {'data_dir': data_dir, 'dataset': dataset, 'device': config['device'], 'learning_rate': job.rate,
              'seed': job.seed, 'max_iters': job.steps, 'warmup_iters': job.steps // 10,
              'out_dir': folder_of(job, config)}
    return ['train.py', 'config/small.py', *(f'--{key}={show(value)}' for key, value in knobs.items())]


def start(job, config):
    print('begins:', *job, flush=True)
    os.makedirs(folder_of(job, config), exist_ok=True)
    with open(os.path.join(folder_of(job, config), 'stderr'), 'w') as errors:
        return subprocess.Popen([sys.executable, *words_of(job, config)], stderr=errors,
                                stdout=subprocess.DEVNULL)


def record(job, status, took, config):
    """Write the line of a run that ended; True unless it failed for another reason than divergence."""
    with open(os.path.join(folder_of(job, config), 'stderr')) as file:
        errors = file.read()
    if status and 'not finite' not in errors:
        print('failed:', *job, status, errors[-1000:], flush=True)
        return False
    result = bench.read_run(folder_of(job, config), PLATEAU, 0)
    add(config['out_dir'], 'study', **{
        **result, 'system': job.system, 'rate': job.rate, 'took': took, 'torch': torch.__version__,
        'device': train.device_name(train.find_device(config['device'], 1, 0)),
        'command': ' '.join(['python', *words_of(job, config)])})
    shutil.rmtree(folder_of(job, config))
    return True


def known(config, name):
    """Rows of earlier calls and of this one."""
    return [row for folder in dict.fromkeys((config['raw'], config['out_dir'])) for row in read(folder, name)]


def main():
    config, _ = configure(globals())
    os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '4')
    end, longest = time.monotonic() + seconds, expected
    times = {row['system']: float(np.median(row['seconds'])) for row in known(config, 'systems')
             if row['kind'] == 'speed' and row['case'].startswith('small') and 'seconds' in row}
    running, failed = {}, set()
    while True:
        for job in [job for job, (process, _) in running.items() if process.poll() is not None]:
            process, begun = running.pop(job)
            took = time.monotonic() - begun
            if record(job, process.returncode, took, config):
                longest = took if longest == expected else max(longest, took)
            else:
                failed.add(job)
        jobs = (job for job in plan(known(config, 'study'), times, steps, match)
                if job not in running and job not in failed)
        if dry:
            return print(*dict.fromkeys(jobs), sep='\n')
        if time.monotonic() + longest < end:
            for job in islice(dict.fromkeys(jobs), workers - len(running)):
                running[job] = start(job, config), time.monotonic()
        if not running or time.monotonic() > end:
            break
        time.sleep(0.2)
    for job, (process, _) in running.items():
        print('stopped:', *job, flush=True)
        process.terminate()                                 # train.py writes a checkpoint
    for process, _ in running.values():
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


if __name__ == '__main__':
    run(main)
