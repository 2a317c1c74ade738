"""BERT-base on one GPU: tokens/s, share of the peak, time by kernel, and what single changes would gain.

    $ PYTHONPATH=. python results/h200/2_base.py

Masked head at 15 %, no dropout, bfloat16, compiled, steps of train.py. Rows go to base.jsonl, case by case;
cases that there was no time for are named at the end, for --match.
"""
from configurator import configure, run

import gc
import re
import time
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from tables import add
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import train
from model import Block, MaskedLM, OriginalAttention, attend, model_config, split_heads, training_flops
from prepare_data import load_meta

out_dir = 'results/h200'        # for base.jsonl
data = 'data/h200'              # prepared by data.py; of its vocabulary, ids are used alone
device = 'auto'                 # auto, cuda or cpu
seconds = 480                   # no case is begun in the last minute before this
match = ''                      # regular expression: cases to run; empty: all
toy = False                     # a tiny model, to try the script

SHAPE = {'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'n_inner': 3072}
CASE = {'length': 512, 'rows': 256, 'vocabulary': 30522, 'parts': 1, 'dropout': 0.0, 'mode': 'default',
        'fraction': 0.15, 'half': False, 'loader': False, 'cudnn': True, 'changes': ()}
SHORT = {'length': 128, 'rows': 1024}
BOTH = {'changes': ('residual', 'product')}
CASES = {                       # the first two are the goals; the others change what their names say
    '512 tokens': {'loader': True}, '128 tokens': {**SHORT, 'loader': True},
    'residual stream in bfloat16': {'changes': ('residual',)},
    'one product for queries, keys, values': {'changes': ('product',)},
    'both changes, 128 tokens': {**SHORT, **BOTH}, 'both changes': BOTH,
    'flash attention in place of cuDNN': {'cudnn': False},
    'vocabulary a multiple of 64': {'vocabulary': 30528}, 'hardly a head': {'fraction': 0.002},
    'all in bfloat16': {'half': True}, 'dropout 0.1': {'dropout': 0.1},
    '64 rows': {'rows': 64}, '4 micro-batches': {'parts': 4}, 'CUDA graphs': {'mode': 'reduce-overhead'},
}
GROUPS = {                      # of kernels -> regular expression; the first match wins
    'fused by the compiler': '^triton', 'attention': 'flash|fmha|attention|sdpa|dot_do_o|convert_dq',
    'optimizer and clipping': 'multi_tensor|adam', 'copies': 'memcpy|memset|copy',
    'matrix products': 'gemm|nvjet|cutlass|xmma|splitk|cublas|mm', 'others': '',
}


def bfloat16_residual(self, x, source, context):
    """Block.forward, but autocast's norms no longer make the residual stream float32."""
    y = self.attention(x, source, context)
    x = self.attention_norm(x + self.dropout(y)).to(y.dtype)
    y = self.contract(F.gelu(self.expand(x)))
    return self.mlp_norm(x + self.dropout(y)).to(y.dtype)


def one_product(self, x, source, context):
    """OriginalAttention.forward of a source that is x, with the three matrices joined for the product."""
    parts = self.query, self.key, self.value
    weight, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ('weight', 'bias'))
    q, k, v = (split_heads(y, self.n_head) for y in F.linear(x, weight, bias).chunk(3, -1))
    return self.out(attend(self, q, k, v, context))


CHANGES = {'residual': (Block, bfloat16_residual), 'product': (OriginalAttention, one_product)}


def clock(function, n, runtime):
    """Seconds of a call: the mean of n calls, after waiting for the device."""
    runtime.sync(wait=True)
    start = time.perf_counter()
    for _ in range(n):
        function()
    runtime.sync(wait=True)
    return (time.perf_counter() - start) / n


def ceilings(runtime, toy):
    """Measured FLOP/s of a bfloat16 matrix product, and bytes/s of a copy, read and written."""
    n = 256 if toy else 8192
    a, b = (torch.randn(n, n, device=runtime.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(n * n * (1 if toy else 16), device=runtime.device)
    target = torch.empty_like(source)
    results = []
    for function, work in ((lambda: a @ b, 2 * n ** 3), (lambda: target.copy_(source), 8 * source.numel())):
        clock(function, 3, runtime)
        results.append(work / float(np.median([clock(function, 5, runtime) for _ in range(5)])))
    return results


def groups_of(trace, n):
    """({group: ms a step}, [[kernel, ms a step, calls a step]] of the 25 that take longest)"""
    on_device, kernels = torch.cuda.is_available(), []
    for event in trace.key_averages():
        there = event.device_type != torch.autograd.DeviceType.CPU
        if on_device == there and not event.is_user_annotation:         # these are ranges around kernels
            ms = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1000 / n
            kernels.append([event.key[:150], ms, event.count / n])
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, ms, _ in kernels:
        groups[next(group for group in GROUPS if re.search(GROUPS[group], name, re.I))] += ms
    return groups, sorted(kernels, key=lambda kernel: -kernel[1])[:25]


def measure(case, config, runtime, ceiling):
    """Yield the rows of a case: its speed, with one batch and with the loader, and its profile."""
    meta = {**load_meta(config['data']), 'vocab_size': case['vocabulary']}
    texts = train.StreamRows(config['data'], meta, 'train', case['length'])
    masker = train.Masker(meta, case['length'], case['fraction'])
    loader = train.Loader(texts, masker, 1, case['rows'], slice(0, case['rows']))
    knobs = {**config['shape'], 'block_size': case['length'], 'attention_dropout': case['dropout'], **case}
    raw = MaskedLM(model_config(knobs, meta['vocab_size'])).to(runtime.device)
    if case['half']:
        raw, runtime = raw.bfloat16(), train.Runtime(runtime.device)        # without autocast
    optimizer = train.make_optimizer(raw, 1e-4, (0.9, 0.999), 1e-12, 0.01, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=False)
    used = torch.compile(raw, mode=case['mode'])
    size, batch = -(-case['rows'] // case['parts']), loader.batch(0)
    parts, count = train.micro_batches(batch, size, runtime.device), float(batch['weights'].sum())

    def step(parts=parts):                                  # update() takes the weights out of each part
        train.update(used, optimizer, scaler, [dict(part) for part in parts], count, 1.0, runtime)

    def loaded(n):
        for batch in train.prefetch(loader.batch, range(n)):
            step(train.micro_batches(batch, size, runtime.device))

    def speed(seconds, **more):
        middle = float(np.median(seconds))
        flops = training_flops(raw.config, case['length'], masker.k, MaskedLM, case['rows'])
        memory = torch.cuda.max_memory_allocated() / 2 ** 30 if runtime.device.type == 'cuda' else None
        return {'ms': 1000 * middle, 'tokens/s': case['rows'] * case['length'] / middle,
                'mfu': flops / middle / train.PEAK_FLOPS['NVIDIA H200'],
                'of the product': flops / middle / ceiling, 'GiB': memory, **more, 'seconds': seconds}

    n = 1 if config['toy'] else 8
    start = time.perf_counter()
    clock(step, 3, runtime)
    first = time.perf_counter() - start                     # compilation
    yield speed([clock(step, n, runtime) for _ in range(3)], kind='one batch', compilation=first)
    if case['loader']:
        times = [clock(lambda: loaded(3 * n), 1, runtime) / (3 * n) for _ in range(2)]
        yield speed(times, kind='with the loader')
    activities = [ProfilerActivity.CUDA if runtime.device.type == 'cuda' else ProfilerActivity.CPU]
    with profile(activities=activities) as trace:
        clock(step, 3, runtime)
    groups, kernels = groups_of(trace, 3)
    yield {'kind': 'profile', **groups, 'kernels': kernels,
           'graphs not captured': counters['inductor']['cudagraph_skips']}
    for name, ms, calls in kernels if case['loader'] else ():
        print(f'    {ms:8.3f} ms  {calls:6.1f} calls  {name}', flush=True)


def main():
    config, _ = configure(globals())
    end = time.monotonic() + seconds - 60
    here = train.find_device(device, 1, 0)
    runtime = train.Runtime(here, torch.bfloat16)
    config['shape'] = SHAPE if not toy else {'n_layer': 1, 'n_head': 2, 'n_embd': 32, 'n_inner': 64}
    product, copy = ceilings(runtime, toy)
    add(out_dir, 'base', case='ceilings', kind=train.device_name(here), torch=torch.__version__,
        **{'product, TFLOP/s': product / 1e12, 'copy, TB/s': copy / 1e12})
    for name, changes in CASES.items():
        if not re.search(match, name):
            continue
        if time.monotonic() > end:
            print('no time for', name, flush=True)
            continue
        case = {**CASE, **changes, **({'rows': 8, 'length': 16} if toy else {})}
        torch.compiler.reset()
        counters.clear()
        gc.collect()
        if here.type == 'cuda':
            torch.backends.cuda.enable_cudnn_sdp(case['cudnn'])
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            with ExitStack() as changed:
                for kind, forward in map(CHANGES.get, case['changes']):
                    changed.enter_context(patch.object(kind, 'forward', forward))
                for row in measure(case, config, runtime, product):
                    add(out_dir, 'base', case=name, **row)
        except Exception as error:                          # so that the other cases go on
            add(out_dir, 'base', case=name, kind='failed', error=f'{type(error).__name__}: {error}'[:1000])


if __name__ == '__main__':
    run(main)
