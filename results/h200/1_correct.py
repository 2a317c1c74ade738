"""Every system on this GPU against float64 on the CPU, and what only a GPU can show.

    $ PYTHONPATH=. python results/h200/1_correct.py

Rows go to correct.jsonl as each job ends; `ok` is False where a number is beyond its limit. Jobs:
    numbers     loss and gradient norm along 200 steps of the same batches, against float64
    watch       at BERT-base's width, compiled: attention kernels, graph breaks, recompilations, host syncs
    syncs       host synchronisations of train.py by line: only those of log, validation and end are expected
    resume      train.py killed by SIGKILL and started again, against an undisturbed run
    ddp, adamw  DistributedDataParallel with one process; fused AdamW against float64
    tests       the test files of the stages that use the device
"""
from configurator import configure, run

# isort: split
import collections
import copy
import os
import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context

import torch
import torch.distributed as dist
from tables import add
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import train
from model import ALLOWED_POSITIONS, ATTENTION, POSITION, model_config
from prepare_data import load_meta

out_dir = 'results/h200'        # for correct.jsonl
data = 'data/h200'              # prepared by data.py
runs = 'out/h200_correct'       # folder for the runs of train.py
device = 'auto'                 # auto, cuda or cpu
workers = 14                    # processes at once; most of their time is compilation
seconds = 500                   # jobs that have not ended by then are given up
steps = 200                     # of `numbers`
only = ''                       # regular expression: jobs to run; empty: all
toy = False                     # 3 steps of a few systems, to try the script

RATE = 1e-3                     # peak learning rate of `numbers`
SMALL = {'n_layer': 2, 'n_head': 4, 'n_embd': 64, 'n_inner': 256, 'block_size': 64, 'rows': 8}
WIDE = {'n_layer': 2, 'n_head': 12, 'n_embd': 768, 'n_inner': 3072, 'block_size': 512, 'rows': 16}
LIMITS = {'first loss': 2e-3, 'first norm': 0.03, 'loss, mean': 0.05}       # relative, relative, nats
FILES = ['test_model.py', *(f'tests/test_{name}.py' for name in ('train', 'finetune', 'bench'))]


def systems():
    """(attention, position, objective) of everything that model.py allows."""
    for attention in ATTENTION:
        for position in ALLOWED_POSITIONS.get(attention, POSITION):
            yield attention, position, 'mlm'
    yield 'xlnet', 'none', 'plm'


def make(system, sizes, packing, n, config):
    """(model, the batches of n steps) of a system; the same weights and batches in every call."""
    attention, position, objective = system
    meta = load_meta(config['data'])
    knobs = {**sizes, 'attention': attention, 'position': position, 'dropout': 0.0, 'attention_dropout': 0.0}
    model_class, masker_class = train.OBJECTIVE[objective]
    torch.manual_seed(1)
    model = model_class(model_config(knobs, meta['vocab_size']))
    rows = train.PACKING[packing](config['data'], meta, 'train', sizes['block_size'])
    masker = masker_class(meta, sizes['block_size'], 0.15)
    loader = train.Loader(rows, masker, 1, sizes['rows'], slice(0, sizes['rows']))
    return model, [loader.batch(step) for step in range(n)]


def follow(model, batches, runtime, compiled):
    """Train as train.py does; yields (loss, gradient norm) of each step, on the device."""
    model = train.to_device(copy.deepcopy(model), runtime)
    optimizer = train.make_optimizer(model, RATE, (0.9, 0.999), 1e-12, 0.01, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, 1024.0, enabled=runtime.dtype == torch.float16)
    used = train.compiled(model, str(compiled), batches[0], len(batches[0]['ids']), runtime)
    assert (used is not model) == compiled, 'torch.compile failed'
    used = runtime.wrap(used)
    for step, batch in enumerate(batches):
        train.set_lr(optimizer, train.get_lr(step, RATE, 0, 20, 10 ** 4, 'linear'), runtime)
        parts = train.micro_batches(batch, len(batch['ids']), runtime.device)
        count = float(batch['weights'].sum())
        yield torch.stack(train.update(used, optimizer, scaler, parts, count, 1.0, runtime))


def table_of(*arguments):
    """All steps of follow(...), (steps, 2) float64 on the CPU."""
    return torch.stack(list(follow(*arguments))).double().cpu()


def numbers(system, config):
    here, rows = train.find_device(config['device'], 1, 0), []
    cases = [('stream', torch.float32, False)]                  # the control; TF32 on a GPU
    cases += [(packing, dtype, compiled) for dtype in (torch.bfloat16, torch.float16)
              for packing, compiled in (('stream', True), ('stream', False), ('documents', False))]
    for packing in ('stream', 'documents'):
        model, batches = make(system, SMALL, packing, config['steps'], config)
        wanted = table_of(copy.deepcopy(model).double(), batches, train.Runtime(torch.device('cpu')), False)
        for case, dtype, compiled in cases:
            if case != packing:
                continue
            torch.compiler.reset()
            got = table_of(model, batches, train.Runtime(here, dtype), compiled)
            away = (got - wanted).abs()
            relative = away / wanted.abs()
            row = {'first loss': relative[0, 0].item(), 'first norm': relative[0, 1].item(),
                   'loss, mean': away[:, 0].mean().item(), 'loss, most': away[:, 0].max().item(),
                   'norm, median': relative[:, 1].median().item()}
            rows.append({'packing': packing, 'dtype': str(dtype)[6:], 'compiled': compiled, **row,
                         'ok': all(row[key] <= limit for key, limit in LIMITS.items())})
    return rows


def watch(system, config):
    here = train.find_device(config['device'], 1, 0)
    on_cuda = here.type == 'cuda'
    sizes = {**WIDE, **({'n_embd': 96, 'block_size': 64, 'rows': 2} if config['toy'] else {})}
    model, batches = make(system, sizes, 'stream', 8, config)
    torch.compiler.reset()
    counters.clear()
    ends = follow(model, batches, train.Runtime(here, torch.bfloat16), True)
    next(ends), next(ends)
    graphs = counters['stats']['unique_graphs']
    next(ends)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as trace:
        next(ends), next(ends)
    if on_cuda:
        torch.cuda.set_sync_debug_mode('warn')
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        next(ends), next(ends)
    if on_cuda:
        torch.cuda.set_sync_debug_mode('default')
    next(ends)
    names = sorted({event.key[:80] for event in trace.key_averages()
                    if re.search('scaled_dot_product|flash|fmha|cudnn', event.key, re.I)})
    syncs = collections.Counter(f'{os.path.basename(warning.filename)}:{warning.lineno}' for warning in seen
                                if 'synchronizing' in str(warning.message))
    breaks, more = sum(counters['graph_break'].values()), counters['stats']['unique_graphs'] - graphs
    fused = ' '.join(name[6:] for name in names if name.startswith('aten::_scaled'))
    return [{'attention': fused, 'graphs': graphs, 'graph breaks': breaks, 'recompilations': more,
             'host syncs': sum(syncs.values()), 'ok': not (breaks or more or syncs), 'kernels': names,
             'why': list(counters['graph_break']), 'where': dict(syncs)}]


def train_words(config, folder, *more):
    """Words after `train.py` of a run of a small model."""
    data_dir, dataset = os.path.split(config['data'])
    model = ['--n_layer=2', '--n_head=4', '--n_embd=256', '--n_inner=1024', '--block_size=128']
    model += ['--total_batch=64', '--batch_size=64', '--learning_rate=1e-3', '--warmup_iters=20',
              '--dropout=0.1', '--fill_samples=0', '--eval_interval=0', '--eval_samples=256']
    model += ['--n_embd=32', '--n_inner=64', '--total_batch=4', '--eval_samples=8'] if config['toy'] else []
    where = [f'--out_dir={config["runs"]}/{folder}', f'--data_dir={data_dir}', f'--dataset={dataset}',
             f'--device={config["device"]}']
    return [*where, *model, *more]


def syncs(_, config):
    rows = []
    for dtype, compiled in (('bfloat16', 'true'), ('float16', 'false')):
        words = train_words(config, f'syncs_{dtype}', '--max_iters=60', '--log_interval=20',
                            '--checkpoint_interval=0', f'--dtype={dtype}', f'--compile={compiled}')
        debug = 'torch.cuda.set_sync_debug_mode("warn"); ' if torch.cuda.is_available() else ''
        code = f'import runpy, sys, torch; {debug}sys.argv = {["train.py", *words]}; ' \
               'runpy.run_path("train.py", run_name="__main__")'
        done = subprocess.run([sys.executable, '-W', 'always', '-c', code], capture_output=True, text=True,
                              timeout=config['seconds'])
        found = collections.Counter(re.findall(r'([\w.]+\.py:\d+): UserWarning: called a synch', done.stderr))
        rows.append({'dtype': dtype, 'status': done.returncode, 'syncs': sum(found.values()),
                     'where': dict(found), 'end': done.stderr[-500:] if done.returncode else '',
                     'ok': done.returncode == 0 and max(found.values(), default=0) < 20})
    return rows


def resume(_, config):
    n = 20 if config['toy'] else 600
    whole, cut = (train_words(config, name, f'--max_iters={n}', f'--checkpoint_interval={n // 6}',
                              '--log_interval=1') for name in ('whole', 'cut'))
    log = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    folder, last, end = f'{config["runs"]}/cut', None, time.monotonic() + config['seconds']
    with subprocess.Popen([sys.executable, 'train.py', *cut], **log) as process:
        while process.poll() is None and time.monotonic() < end:
            if train.checkpoints(folder) and time.sleep(0.3) is None:
                process.kill()
        killed = process.wait()
    steps_then = [line['step'] for line in train.read_metrics(folder)]
    last = train.step_of(train.checkpoints(folder)[-1])
    for words in (cut, whole):
        subprocess.run([sys.executable, 'train.py', *words], check=True, timeout=config['seconds'], **log)
    losses = [[line['loss'] for line in train.read_metrics(f'{config["runs"]}/{name}')]
              for name in ('whole', 'cut')]
    away = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return [{'status': killed, 'killed at': max(steps_then), 'resumed from': last, 'steps': n,
             'loss, most': away, 'last': losses[0][-1], 'resumed, last': losses[1][-1],
             'ok': killed == -9 and last < n and away < 0.02}]


def ddp(_, config):
    here = train.find_device(config['device'], 1, 0)
    model, batches = make(('pairwise', 'rope', 'mlm'), SMALL, 'stream', config['steps'] // 4 or 2, config)
    backend = 'nccl' if here.type == 'cuda' else 'gloo'
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    host, rows = dist.new_group(backend='gloo'), []
    for compiled in (False, True):
        alone, wrapped = (table_of(model, batches, train.Runtime(here, torch.bfloat16, host=group), compiled)
                          for group in (None, host))
        away = (alone - wrapped).abs().max().item()
        rows.append({'backend': backend, 'compiled': compiled, 'most': away, 'ok': away < 0.05})
    dist.destroy_process_group()
    return rows


def adamw(_, config):
    here = train.find_device(config['device'], 1, 0)
    torch.manual_seed(1)
    start, gradients = torch.nn.Linear(300, 500), torch.randn(50, 500, 301)
    models, betas = [copy.deepcopy(start).to(here), copy.deepcopy(start).double()], (0.9, 0.999)
    optimizers = [train.make_optimizer(models[0], 1e-3, betas, 1e-12, 0.01, train.Runtime(here)),
                  torch.optim.AdamW([{'params': [models[1].weight], 'weight_decay': 0.01},
                                     {'params': [models[1].bias], 'weight_decay': 0.0}], 1e-3, eps=1e-12)]
    for gradient in gradients:
        for model, optimizer in zip(models, optimizers, strict=True):
            for parameter, part in ((model.weight, gradient[:, 1:]), (model.bias, gradient[:, 0])):
                parameter.grad = part.to(parameter).clone(memory_format=torch.contiguous_format)
            optimizer.step()
    ours, theirs, old = (model.weight.detach().double().cpu() for model in (*models, start))
    away = ((ours - theirs).norm() / (theirs - old).norm()).item()
    return [{'fused': optimizers[0].defaults['fused'], 'relative': away, 'ok': away < 1e-4}]


def tests(_, config):
    files = ['tests/test_configurator.py'] if config['toy'] else ['-n', '4', '--dist', 'loadfile', *FILES]
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *files],
                          capture_output=True, text=True, timeout=config['seconds'])
    lines = done.stdout.strip().splitlines()
    return [{'last': lines[-1], 'failed': [line for line in lines if line.startswith(('FAILED', 'ERROR'))],
             'ok': done.returncode == 0}]


def job(name, system, config):
    """(seconds, rows) of a job; an exception becomes a row."""
    start = time.monotonic()
    try:
        rows = globals()[name](system, config)
    except Exception as error:                          # so that the other jobs go on
        rows = [{'error': f'{type(error).__name__}: {error}'[-1500:], 'ok': False}]
    return time.monotonic() - start, rows


def main():
    config, _ = configure(globals())
    end = time.monotonic() + seconds
    os.environ.update(OMP_NUM_THREADS='1', TORCHINDUCTOR_COMPILE_THREADS='1')
    every = list(systems())[::7] if toy else list(systems())
    config['steps'] = 3 if toy else steps
    jobs = [(name, None) for name in ('tests', 'resume', 'syncs', 'ddp', 'adamw')]
    jobs += [(name, system) for system in every for name in ('numbers', 'watch')]
    jobs = [item for item in jobs if re.search(only, f'{item[0]} {item[1]}')]
    pool = ProcessPoolExecutor(workers, get_context('spawn'))
    waiting = {pool.submit(job, *item, config): item for item in jobs}
    try:
        for future in as_completed(list(waiting), max(0, end - time.monotonic())):
            name, system = waiting.pop(future)
            took, rows = future.result()
            for row in rows:
                add(out_dir, 'correct', job=name, system=' '.join(system or ()), job_seconds=took, **row)
    except TimeoutError:
        add(out_dir, 'correct', job='given up', missing=[str(item) for item in waiting.values()], ok=False)
    for process in active_children():                   # does not wait for jobs that were given up
        process.kill()


if __name__ == '__main__':
    run(main)
