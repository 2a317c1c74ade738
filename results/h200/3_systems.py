"""All systems beside transformers at BERT-base: time and memory of a training step, interleaved, by bench.py.

    $ PYTHONPATH=. python results/h200/3_systems.py                    # all systems, 512 and 128 tokens
    $ PYTHONPATH=. python results/h200/3_systems.py --match=Liu         # GAU and RoFormer, 256 to 2048 tokens

Rows go to systems.jsonl after each length, with every repeat in `seconds`. The compiled systems of a case are
first compiled in parallel processes, whose results PyTorch keeps on disk.
Those that are not compiled in time are left out.
"""
from configurator import configure, run, show

import gc
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from multiprocessing import active_children, get_context

import torch
from tables import add
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench
import train

with suppress(ImportError):     # else transformers' compiled attention has a mask of ones, which costs time
    from transformers import masking_utils
    masking_utils.is_tracing = lambda *x: False

out_dir = 'results/h200'        # for systems.jsonl
workers = 4                     # processes that compile at once; the memory of the device limits them
seconds = 500                   # a case that would end later is left out
match = 'all|small'             # regular expression: cases to run; empty: every case
toy = False                     # tiny models, to try the script

LENGTHS = ((512, 64), (1024, 32), (2048, 16), (256, 128))       # (tokens, rows): 32,768 tokens a step
LIU = {'peers': 'none', 'variants': 'gau,roformer_v2,original'}
SMALL = {'n_layer': 4, 'n_head': 8, 'n_embd': 512, 'n_inner': 2048, 'vocab_size': 8192, 'peers': 'none',
         'variants': 'original,shatter,rpe,rab,gau,roformer_v2'}
TABLE_4 = {**LIU, 'compile': False, 'dropout': 0.1, 'full_logits': True, 'vocab_size': 12000}
CASES = {                       # name -> (knobs of bench.py, [(tokens, rows)], fused attention?)
    'all systems': ({}, LENGTHS[:1], True),
    'small, of 4_study.py': (SMALL, [(128, 256)], True),
    'all, eager': ({'compile': False, 'variants': 'original,shatter,gau'}, LENGTHS[:1], True),
    'all systems, short': ({}, [(128, 256)], True),
    'Liu, fused, compiled': (LIU, LENGTHS, True),
    "Liu's setting, heads not fused": (TABLE_4, [(length, 8) for length, _ in LENGTHS], False),
    'Liu, fused, eager': ({**LIU, 'compile': False}, LENGTHS, True),
}
TOY = {'n_layer': 1, 'n_head': 4, 'n_embd': 32, 'n_inner': 64, 'vocab_size': 64, 'rounds': 2, 'warmup': 1,
       'device': 'auto', 'variants': 'original,gau', 'peers': 'none'}


def bench_config(knobs, length, rows):
    """The knobs of bench.py for a case; those that it does not have are left out."""
    scope = dict(vars(bench))
    knobs = {**knobs, 'lengths': (length,), 'batches': (rows,)}
    words = [f'--{key}={show(value)}' for key, value in knobs.items() if key in scope]
    return bench.checked(configure(scope, ['config/bench_h200.py', *words])[0])


def compile_one(name, config):
    """Compile a system's training step, so that the next process finds it in PyTorch's cache."""
    runtime, start = train.join(config['device'], config['dtype']), time.monotonic()
    bench.make_step(name, 'train', config['batches'][0], config['lengths'][0], config, runtime)()
    free_memory()
    return time.monotonic() - start


def free_memory():
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compile_all(config, end):
    """Compile the systems of a case in parallel; returns {system: seconds, or the error} until `end`."""
    done, pool = {}, ProcessPoolExecutor(workers, get_context('spawn'))
    waiting = {pool.submit(compile_one, name, config): name for name in config['variants'] + config['peers']}
    try:
        for future in as_completed(waiting, max(0, end - time.monotonic())):
            error = future.exception()
            done[waiting[future]] = str(error)[:300] if error else future.result()
    except TimeoutError:
        print(f'no time to compile {set(waiting.values()) - set(done)}', flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    for process in active_children():
        process.kill()
    return done


def case_rows(config, runtime, fused, end):
    """Rows of a case: bench.py's speed, then the memory of each system in an eager step."""
    compilation, (length,), (rows,) = {}, config['lengths'], config['batches']
    if config['compile']:
        systems = config['variants'] + config['peers']
        compilation = compile_all(config, end - 12 * len(systems) - 6 * len(config['variants']))
        ready = [name for name in systems if isinstance(compilation.get(name), float)]
        again = compile_one(ready[0], config) if ready else 1       # seconds, from the cache
        ready = ready[:int((end - time.monotonic()) / again)]
        for name in compilation.keys() - set(ready):
            yield {'kind': 'failed', 'system': name, 'compilation': compilation[name]}
        config = {**config, **{key: [name for name in config[key] if name in ready]
                               for key in ('variants', 'peers')}}
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not fused)       # else it computes in float32
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        for row in bench.speed(config, runtime):
            yield {'kind': 'speed', 'compilation': compilation.get(row['system']), **row}
        free_memory()
        for name in config['variants']:
            if time.monotonic() > end:
                return
            try:
                mib = bench.step_memory(name, rows, length, config)
            except torch.OutOfMemoryError:
                mib = None
            yield {'kind': 'memory', 'system': name, 'rows': rows, 'length': length, 'MiB': mib}


def main():
    configure(globals())
    os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '4')             # in each of the workers
    end = time.monotonic() + seconds
    cases = [(case, knobs, *sizes, fused) for case, (knobs, lengths, fused) in CASES.items()
             for sizes in lengths if re.search(match, case)]
    for case, knobs, length, rows, fused in cases:
        length, rows, more = (16, 2, TOY) if toy else (length, rows, {})
        config = bench_config({**knobs, **more}, length, rows)
        if time.monotonic() + len(config['variants']) * (20 if config['compile'] else 6) > end:
            print(f'no time for {case}, {length} tokens', flush=True)
            continue
        runtime = train.join(config['device'], config['dtype'])
        for row in case_rows(config, runtime, fused, end):
            add(out_dir, 'systems', case=case, device=train.device_name(runtime.device),
                torch=torch.__version__, **row)
        free_memory()


if __name__ == '__main__':
    run(main)
