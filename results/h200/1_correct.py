"""Every system on this GPU against float64 on the CPU, and what only a GPU can show.

    $ PYTHONPATH=. python results/h200/1_correct.py

Rows go to correct.jsonl as each job ends; `ok` is False where a number is beyond its limit. Jobs:
    numbers     first gradients, then loss and gradient norm along 200 steps of the same batches, against
                float64 and unfused AdamW; matrices start 6 times larger, else attention is nearly uniform
    watch       at BERT-base's width, compiled: attention kernels, graph breaks, recompilations
    syncs       host synchronisations of train.py by line: only those of log, validation and end are expected
    resume      train.py killed by SIGKILL and started again, against an undisturbed run and its repeat
    stages      train, fill, export, fine-tune on labelled texts, predict with noise, bench
    ddp         DistributedDataParallel with one process, against none
    tests       the test files; nearly all of their runs are on the CPU, with this machine's versions
"""
from configurator import configure, run

import collections
import copy
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import active_children, get_context

import numpy as np
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
runs = 'out/h200_correct'       # folder for the runs of train.py, emptied first
device = 'auto'                 # auto, cuda or cpu
workers = 14                    # processes at once; most of their time is compilation
seconds = 500                   # jobs that have not ended by then are given up
match = ''                      # regular expression: jobs to run; empty: all
toy = False                     # tiny models of a few systems, to try the script

RATE = 1e-3                     # peak learning rate of `numbers`
SMALL = {'n_layer': 2, 'n_head': 4, 'n_embd': 64, 'n_inner': 256, 'block_size': 64, 'rows': 8, 'steps': 200}
WIDE = {'n_layer': 2, 'n_head': 12, 'n_embd': 768, 'n_inner': 3072, 'block_size': 512, 'rows': 16, 'steps': 4}
TOY = {'n_head': 4, 'n_embd': 32, 'n_inner': 64, 'block_size': 32, 'rows': 2, 'steps': 4}
LIMITS = {'first loss': 1e-3, 'first norm': 0.02, 'loss, mean': 0.05}       # relative, relative, nats
GRADIENT = {torch.float32: 0.02, torch.float16: 0.02, torch.bfloat16: 0.1}  # relative; scores * 0.9 give 0.13
WARN = ('import sys, torch, train; add, save = train.Health.add, train.write_checkpoint; '
        'warn = torch.cuda.set_sync_debug_mode; '       # of host syncs, from the first step to the checkpoint
        'train.Health.add = lambda *x: (warn("warn"), add(*x)); '
        'train.write_checkpoint = lambda *x: (warn("default"), save(*x)); ')
FILES = ['test_model.py', *(f'tests/test_{name}.py' for name in ('train', 'finetune', 'bench'))]


def systems():
    """(attention, position, objective) of everything that model.py allows."""
    for attention in ATTENTION:
        for position in ALLOWED_POSITIONS.get(attention, POSITION):
            yield attention, position, 'mlm'
    yield 'xlnet', 'none', 'plm'


def make(system, sizes, packing, config):
    """(model, batches) of a system; the same weights and batches in every call."""
    knobs = {**dict(zip(('attention', 'position', 'objective'), system, strict=True)), **sizes,
             'dropout': 0.0, 'attention_dropout': 0.0, **(TOY if config['toy'] else {})}
    meta, length, rows = load_meta(config['data']), knobs['block_size'], knobs['rows']
    model_class, masker_class = train.OBJECTIVE[knobs['objective']]
    torch.manual_seed(1)
    model = model_class(model_config(knobs, meta['vocab_size']))
    texts = train.PACKING[packing](config['data'], meta, 'train', length)
    loader = train.Loader(texts, masker_class(meta, length, 0.15), 1, rows, slice(0, rows))
    return model, [loader.batch(step) for step in range(knobs['steps'])]


def placed(model, batch, runtime, compiled):
    """(copy of the model on the device, the same compiled or wrapped)"""
    model = train.to_device(copy.deepcopy(model), runtime)
    torch.compiler.reset()
    used = train.compiled(model, str(compiled), batch, len(batch['ids']), runtime)
    assert (used is not model) == compiled, 'torch.compile failed'
    return model, runtime.wrap(used)


def gradients(model, used, batch, runtime, scale=1024.0):
    """{name: gradient, float64 on the CPU} of each matrix; those of key biases are 0 but for rounding."""
    part, = train.micro_batches(batch, len(batch['ids']), runtime.device)
    weights = part.pop('weights')
    with runtime.autocast():
        losses = used(**part)
    (scale * (losses * weights).sum() / weights.sum()).backward()
    found = {name: p.grad.double().cpu() / scale for name, p in model.named_parameters()
             if p.dim() >= 2 and p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def follow(model, used, batches, runtime):
    """Train as train.py does; yields (loss, gradient norm) of each step, on the device."""
    optimizer = train.make_optimizer(model, RATE, (0.9, 0.999), 1e-12, 0.01, runtime)
    for group in optimizer.param_groups:                # plain AdamW for the reference
        group['fused'] = next(model.parameters()).dtype != torch.float64
    scaler = torch.amp.GradScaler(runtime.device.type, 1024.0, enabled=runtime.dtype == torch.float16)
    for step, batch in enumerate(batches):
        train.set_lr(optimizer, train.get_lr(step, RATE, 0, 20, 10 ** 4, 'linear'), runtime)
        parts = train.micro_batches(batch, len(batch['ids']), runtime.device)
        count = float(batch['weights'].sum())
        yield torch.stack(train.update(used, optimizer, scaler, parts, count, 1.0, runtime))


def table_of(pair, batches, runtime):
    """All steps of follow(...), (steps, 2) float64 on the CPU.  pair: what placed() returned"""
    return torch.stack(list(follow(*pair, batches, runtime))).double().cpu()


def both(model, batches, runtime, compiled):
    """(gradients of the first batch, table of all steps)"""
    pair = placed(model, batches[0], runtime, compiled)
    return gradients(*pair, batches[0], runtime), table_of(pair, batches, runtime)


def numbers(system, config):
    here = train.find_device(config['device'], 1, 0)
    cases = [('stream', torch.float32, False)]          # the control; TF32 on a GPU
    cases += [(packing, dtype, compiled) for dtype in (torch.bfloat16, torch.float16)
              for packing, compiled in (('stream', True), ('stream', False), ('documents', False))]
    wanted = {}
    for packing, dtype, compiled in cases:
        model, batches = make(system, SMALL, packing, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6 if parameter.dim() >= 2 else 1)
        if packing not in wanted:
            cpu = train.Runtime(torch.device('cpu'))
            wanted[packing] = both(copy.deepcopy(model).double(), batches, cpu, False)
        exact, table = wanted[packing]
        found, ours = both(model, batches, train.Runtime(here, dtype), compiled)
        least = 1e-3 * max(gradient.norm() for gradient in exact.values())
        away = (ours - table).abs()
        relative = away / table.abs()
        wrong = torch.stack([(found[key] - gradient).norm() / max(gradient.norm(), least)
                             for key, gradient in exact.items()])
        row = {'worst gradient': wrong.max().item(),    # NaN if one is
               'first loss': relative[0, 0].item(), 'first norm': relative[0, 1].item(),
               'loss, mean': away[:, 0].mean().item(), 'loss, most': away[:, 0].max().item(),
               'norm, median': relative[:, 1].median().item()}
        yield {'packing': packing, 'dtype': str(dtype)[6:], 'compiled': compiled, **row,
               'ok': row['worst gradient'] <= GRADIENT[dtype]
               and all(row[key] <= limit for key, limit in LIMITS.items())}


def watch(system, config):
    runtime = train.Runtime(train.find_device(config['device'], 1, 0), torch.bfloat16)
    for packing in ('stream', 'documents') if system[0] == 'original' else ('stream',):
        model, batches = make(system, WIDE, packing, config)
        counters.clear()
        ends = follow(*placed(model, batches[0], runtime, True), batches, runtime)
        next(ends), next(ends)
        graphs = counters['stats']['unique_graphs']
        cuda = [ProfilerActivity.CUDA] if runtime.device.type == 'cuda' else []
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as trace:
            next(ends), next(ends)
        names = sorted({event.key[:80] for event in trace.key_averages()
                        if re.search('scaled_dot_product|flash|fmha|cudnn', event.key, re.I)})
        breaks, more = sum(counters['graph_break'].values()), counters['stats']['unique_graphs'] - graphs
        yield {'packing': packing,
               'attention': ' '.join(name[6:] for name in names if name.startswith('aten::_scaled')),
               'graph breaks': breaks, 'recompilations': more, 'ok': not breaks and not more,
               'kernels': names, 'why': list(counters['graph_break'])}


def train_words(config, name, *more):
    """Words after `train.py` for a run of a small model."""
    data_dir, dataset = os.path.split(config['data'])
    sizes = ('--n_embd=32', '--total_batch=4') if config['toy'] else ('--n_embd=256', '--total_batch=64')
    return ['config/small.py', f'--out_dir={config["runs"]}/{name}', f'--data_dir={data_dir}', *sizes,
            f'--dataset={dataset}', f'--device={config["device"]}', '--n_layer=2', '--n_head=4',
            '--n_inner=64', '--block_size=128', '--learning_rate=1e-3', '--milestones=', '--fill_samples=0',
            '--eval_interval=0', '--eval_samples=64', *more]


def syncs(_, config):
    for dtype, compiled in (('bfloat16', 'true'), ('float16', 'false')):
        words = train_words(config, dtype, '--max_iters=60', '--log_interval=20', '--checkpoint_interval=0',
                            f'--dtype={dtype}', f'--compile={compiled}')
        code = WARN if torch.cuda.is_available() else 'import sys, train; '
        code += f'sys.argv = {["train.py", *words]}; train.main()'
        done = subprocess.run([sys.executable, '-W', 'always', '-c', code], capture_output=True, text=True)
        found = collections.Counter(re.findall(r'([\w.]+\.py:\d+): UserWarning: called a synch', done.stderr))
        most = max(found.values(), default=0)           # a line of each step would have 60
        yield {'dtype': dtype, 'status': done.returncode, 'most': most, 'where': dict(found),
               'end': done.stderr[-300:], 'ok': done.returncode == 0 and most < 20}


def resume(_, config):
    n = 20 if config['toy'] else 600
    log = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    names = 'whole', 'again', 'cut'
    whole, again, cut = ([sys.executable, 'train.py', *train_words(
        config, name, f'--max_iters={n}', f'--checkpoint_interval={n // 6}', '--log_interval=1')]
        for name in names)
    folder = f'{config["runs"]}/cut'
    with subprocess.Popen(cut, **log) as process:
        limit = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < limit and not train.checkpoints(folder):
            time.sleep(0.05)
        process.kill()
    last = max(train.checkpoints(folder), default=0)
    for words in (cut, whole, again):
        subprocess.run(words, check=True, **log)
    losses = np.array([[line['loss'] for line in train.read_metrics(f'{config["runs"]}/{name}')]
                       for name in names])
    _, noise, away = abs(losses - losses[0]).max(1).tolist()        # kernels that add atomically have noise
    yield {'killed': process.returncode, 'resumed from': last, 'steps': n, 'loss, most': away,
           'same run twice, most': noise, 'last': losses[0, -1],
           'ok': process.returncode == -9 and 0 < last < n and away < 0.02 + 2 * noise}


def stages(_, config):
    folder, here = f'{config["runs"]}/stages', f'--device={config["device"]}'
    data_dir, dataset = os.path.split(config['data'])
    files = {split: f'{folder}/{split}.csv' for split in ('train', 'dev')}
    os.makedirs(folder, exist_ok=True)
    for path in files.values():                         # labelled texts that are easy to tell apart
        with open(path, 'w') as file:
            file.write('text,label\n' + ''.join(f'the {word} value is returned,{word}\n' for _ in range(64)
                                                for word in ('first', 'last')))
    tune = ['finetune.py', f'--init_from={folder}', '--tasks=custom', '--texts=text', '--label=label',
            *(f'--{split}_file={path}' for split, path in files.items()), '--trials=1', '--epochs=10',
            '--learning_rate=1e-3', f'--out_dir={folder}/custom', here]
    for words in (
            ['train.py', *train_words(config, 'stages', '--max_iters=20')],
            ['train.py', f'--out_dir={folder}', '--fill=the [MASK] of a list', f'--export={folder}/hf'],
            tune, [*tune, '--noise=0:0.2:0.1', f'--predict={files["dev"]}'],
            ['bench.py', '--what=memory,rank,partition', f'--checkpoint={folder}', '--memory_lengths=64',
             f'--data_dir={data_dir}', f'--dataset={dataset}', '--variants=original,shatter,gau',
             f'--out_dir={folder}/bench', here]):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        yield {'command': ' '.join(words), 'status': done.returncode, 'ok': done.returncode == 0,
               'end': (done.stdout + done.stderr)[-500:]}


def ddp(_, config):
    here = train.find_device(config['device'], 1, 0)
    model, batches = make(('pairwise', 'rope', 'mlm'), SMALL, 'stream', config)
    backend = 'nccl' if here.type == 'cuda' else 'gloo'
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    host = dist.new_group(backend='gloo')
    for compiled in (False, True):
        runtimes = (train.Runtime(here, torch.bfloat16, host=group) for group in (None, host))
        alone, wrapped = (table_of(placed(model, batches[0], runtime, compiled), batches, runtime)
                          for runtime in runtimes)
        away = (alone - wrapped).abs().max().item()
        yield {'backend': backend, 'compiled': compiled, 'most': away, 'ok': away < 0.05}
    dist.destroy_process_group()


def tests(_, config):
    files = ['tests/test_configurator.py'] if config['toy'] else ['-n', '4', '--dist', 'loadfile', *FILES]
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', *files], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    yield {'last': lines[-1], 'failed': [line for line in lines if line.startswith(('FAILED', 'ERROR'))],
           'ok': done.returncode == 0}


def job(name, system, config):
    """(seconds, rows) of a job; an exception becomes a row."""
    start, rows = time.monotonic(), []
    try:
        for row in globals()[name](system, config):
            rows.append(row)
    except Exception as error:                          # so that the other jobs go on
        rows += [{'error': f'{type(error).__name__}: {error}'[-1500:], 'ok': False}]
    return time.monotonic() - start, rows


def apart(*item):
    """job() in a process of its own, which may crash or leave its device unusable."""
    try:
        with ProcessPoolExecutor(1, get_context('spawn')) as pool:
            return pool.submit(job, *item).result()
    except Exception as error:
        return 0.0, [{'error': repr(error), 'ok': False}]


def main():
    config, _ = configure(globals())
    end = time.monotonic() + seconds
    os.environ.update(OMP_NUM_THREADS='1', TORCHINDUCTOR_COMPILE_THREADS='1', GLOO_SOCKET_IFNAME='lo',
                      NCCL_SOCKET_IFNAME='lo')
    shutil.rmtree(runs, ignore_errors=True)             # of an earlier call
    every = list(systems())[::7 if toy and not match else 1]
    jobs = [(name, None) for name in ('resume', 'stages', 'syncs', 'ddp')]
    jobs += [(name, system) for system in every for name in ('numbers', 'watch')] + [('tests', None)]
    jobs = [item for item in jobs if re.search(match, ' '.join([item[0], *(item[1] or ())]))]
    pool = ThreadPoolExecutor(workers)
    waiting = {pool.submit(apart, *item, config): item for item in jobs}
    try:
        for future in as_completed(list(waiting), max(0, end - time.monotonic())):
            name, system = waiting.pop(future)
            took, rows = future.result()
            for row in rows:
                add(out_dir, 'correct', job=name, system=' '.join(system or ()), job_seconds=took, **row)
    except TimeoutError:
        add(out_dir, 'correct', job='given up', missing=[str(item) for item in waiting.values()], ok=False)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in active_children():                   # does not wait for jobs that were given up
        process.kill()


if __name__ == '__main__':
    run(main)
