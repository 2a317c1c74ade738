"""Which system to use?  Parameters, speed, memory, rank and convergence, beside the papers and transformers.

    $ python bench.py
    $ python bench.py --what=speed --variants=original,shared --modes=train --threads=1
    $ python bench.py --what=rank,attention --checkpoint=out/quickstart

A number is measured in the run that prints it, or is a paper's own, out of results/papers.json. out_dir gets
bench.json (every repeat), bench.md (the tables as printed) and plots; what is not run again stays in them.
"""
import contextlib
import functools
import gc
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import train
from configurator import UserError, configure, run, say, show
from finetune import read_papers, t_interval
from model import (
    SHATTER,
    Context,
    EncoderConfig,
    Partition,
    SequenceClassifier,
    choose,
    count_parameters,
    masked_softmax,
    model_config,
    sigmoid_weights,
    token_losses,
    transformers,
)
from prepare_data import load_tokenizer

# the run
what = 'params,speed,memory,convergence,rank,partition,attention'       # rows of WHAT; they run in its order
variants = 'original,pairwise,shared,shatter,gau'                       # rows of VARIANTS, or all
out_dir = 'out/bench'           # bench.json, bench.md, plots, and the runs of convergence
device = 'auto'                 # auto, cpu, cuda, cuda:1 or xla
dtype = 'auto'                  # auto (bfloat16 on GPUs that compute in it), float32, bfloat16 or float16
threads = 1                     # of the CPU, for speed and memory; 0: all
# the shape of parameters, speed and memory; a gau has twice the layers
shape = 'auto'                  # a row of SHAPES; auto: middle on the CPU, base on a GPU; params: the papers'
n_layer = 0                     # in place of the shape's, as the next three; 0: the shape's
n_head = 0
n_embd = 0
n_inner = 0
vocab_size = 30522              # BERT's
position = ''                   # of the variants that leave it open: rope ...; empty: absolute
mask_fraction = 0.15            # of the tokens of a row that reach the head
# speed
modes = 'forward,train,finetune'                # rows of MODES
lengths = ()                    # tokens a row, as in 128,512; empty: by device, see AUTO
batches = ()                    # rows a step; empty: step_tokens / length
step_tokens = 0                 # tokens a step; 0: by device
rounds = 0                      # timed steps of each case; 0: by device
warmup = 0                      # steps of each case that are dropped; 0: by device
compile = 'auto'                # false, true or both; auto: false on the CPU, else both
peers = 'all'                   # rows of PEERS, which need transformers; all or none
# memory
memory_lengths = ()             # tokens a row; empty: by device
memory_batch = 8                # rows; Liu's
memory_limit = 0.0              # GiB for the largest batch that fits; 0: all of a GPU, no search on the CPU
# convergence
recipe = 'config/compare.py'    # config file of train.py that all runs share
steps = 300                     # of a run, a tenth of them warmup; 0: the recipe's
seeds = 2                       # runs of a variant
seed = 1                        # the first seed
eval_interval = 20              # steps between validations: the resolution of what is read off the curves
plateau = 0.1                   # nats below the unigram entropy that end the plateau
target_loss = 0.0               # nats; 0: half a nat below the unigram entropy
# rank and attention
checkpoint = ''                 # files or folders of train.py, with commas; empty: the runs of convergence
rank_rows = 4                   # validation rows whose matrices are decomposed
rank_length = 0                 # tokens a row; 0: as trained
zero = 1e-6                     # of a matrix's largest entry: what is at most this counts as 0
sentence = 'Return the sum of the elements along the given axis of an array.'      # for attention
# data
dataset = 'docstrings'          # folder below data_dir; empty: none, so no loader and no runs
data_dir = 'data'               # parent folder of prepared corpora
prepare = 'config/data_docstrings.py'           # config file for prepare_data.py, if dataset is missing

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = {                      # n_layer, n_head, n_embd, n_inner
    'middle': (4, 4, 256, 1024), 'small': (4, 8, 512, 2048), 'base': (12, 12, 768, 3072),
    'large': (24, 16, 1024, 4096),
}
AUTO = {                        # of knobs that are 'auto', 0 or ()
    'cpu': {'shape': 'middle', 'lengths': (128,), 'step_tokens': 1024, 'rounds': 5, 'warmup': 1,
            'compile': 'false', 'memory_lengths': (128, 256)},
    'cuda': {'shape': 'base', 'lengths': (128, 512, 1024, 2048), 'step_tokens': 131_072, 'rounds': 10,
             'warmup': 3, 'compile': 'both', 'memory_lengths': (128, 256, 512, 1024, 2048)},
}
GAU = {'attention': 'gau', 'position': 'rope', 'norm': 'rms', 'bias': False, 'lm_head': 'decoder'}
GAUS = {                        # normalisers of Liu 2022, table 2
    'gau': GAU, **{f'gau_{name}': {**GAU, 'normaliser': name}
                   for name in ('softmax', 'squared_relu', 'scaled_squared_relu')},
}
XLNET = {'attention': 'xlnet', 'position': 'none'}
VARIANTS = {                    # the systems of the README -> knobs of train.py
    'original': {}, 'symmetric': {'attention': 'symmetric'}, 'pairwise': {'attention': 'pairwise'},
    'shared': {'attention': 'shared'}, 'no_position': {'position': 'none'}, 'rpe': {'position': 'rpe'},
    'rab': {'position': 'rab'}, 'roformer_v1': {'position': 'rope'},
    'roformer_v2': {**GAU, 'attention': 'original'},
    **{name: {'attention': name, 'position': 'none'} for name in SHATTER},
    'shatter_recompute': {'attention': 'shatter', 'position': 'none', 'recompute': True},
    **GAUS, **{f'{name}_diff': {**knobs, 'packing': 'documents'} for name, knobs in GAUS.items()},
    **{f'gau_{scale}': {**GAUS['gau_squared_relu'], 'relu_scale': scale} for scale in ('n2', 'n', 's2')},
    'xlnet': XLNET, 'xlnet_plm': {**XLNET, 'objective': 'plm'},
}
GROUPS = {                      # of parameters; the first that fits
    'head': r'(head|pooler|classifier)\.|start$', 'norms': r'.*norm\.',
    'embedding': r'encoder\.(token|segment)\.',
    'position': r'encoder\.position\.|.*\.attention\.(part|distance|distance_bias)\b',
    'MLP': r'.*\.(expand|contract)\.', 'attention': r'.*\.attention\.',
}
SIZES = ('n_layer', 'n_head', 'n_embd', 'n_inner')
AXES = ('objective', 'packing', 'attention', 'position', 'norm', 'lm_head', 'bias', 'pair_rank', 'pair_init',
        'normaliser', 'relu_scale', 'key_size', 'clip_distance', 'recompute')   # train.py's unless a row says
OPEN_ORDER = ('original', 'symmetric', 'pairwise', 'shared')
FAILED = 'out of memory'


class Machine(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    threads: int                # 0: all


# ---- systems ----

def settings(name, plan, sizes, length):
    """Knobs of train.py for a variant at a shape (n_layer, n_head, n_embd, n_inner), without dropout."""
    return {**{key: vars(train)[key] for key in AXES}, **dict(zip(SIZES, sizes, strict=True)),
            'block_size': length, 'dropout': 0.0, 'attention_dropout': 0.0, **variant(name, plan['position']),
            'n_layer': sizes[0] * (2 if name.startswith('gau') else 1)}


def distinct(plan):
    """The variants without those that differ by the packing of their rows alone."""
    return [name for name in plan['variants'] if 'packing' not in VARIANTS[name]]


def variant(name, position):
    """The row of VARIANTS, at `position` if it leaves that open."""
    return {**VARIANTS[name], **({'position': position} if position and name in OPEN_ORDER else {})}


def sizes_of(plan, fallback):
    """(n_layer, n_head, n_embd, n_inner) of the knobs."""
    given = SHAPES[fallback if plan['shape'] == 'auto' else plan['shape']]
    return tuple(plan[key] or size for key, size in zip(SIZES, given, strict=True))


class PeerMasked(nn.Module):
    """A masked LM of transformers whose head runs on the predicted positions alone, as ours does."""

    def __init__(self, peer):
        super().__init__()
        self.body, self.head = peer.base_model, peer.cls

    def forward(self, ids, positions, targets):
        x = self.body(ids).last_hidden_state
        x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return token_losses(self.head(x), targets)


class PeerFull(nn.Module):
    """The same as its Trainer calls it: logits of all positions, labels -100 where nothing is predicted."""

    def __init__(self, peer):
        super().__init__()
        self.peer = peer

    def forward(self, ids, positions, targets):
        return self.peer(input_ids=ids, labels=torch.full_like(ids, -100).scatter(1, positions, targets)).loss


PEERS = {                       # name -> (model of transformers, its attention, head)
    'hf_bert': ('Bert', 'sdpa', PeerFull), 'hf_bert_eager': ('Bert', 'eager', PeerFull),
    'hf_bert_masked': ('Bert', 'sdpa', PeerMasked), 'hf_roformer': ('RoFormer', 'eager', PeerFull),
}


def build(name, plan, sizes, length, mode, recompute=True):
    """A variant or a peer for a row of MODES.  `recompute` False: without it, for counting."""
    if name in PEERS:
        kind, attention, head = PEERS[name]
        layers, heads, width, inner = sizes
        config = getattr(transformers(), f'{kind}Config')(
            vocab_size=plan['vocab_size'], hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=heads, intermediate_size=inner, max_position_embeddings=length,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation=attention)
        return head(getattr(transformers(), f'{kind}ForMaskedLM')(config))
    knobs = settings(name, plan, sizes, length)
    if not recompute:
        knobs['recompute'] = False
    kind = SequenceClassifier if mode == 'finetune' else train.OBJECTIVE[knobs['objective']][0]
    return kind(model_config(knobs, plan['vocab_size']))


def make_rows(batch, length, plan, device):
    """Random tokens, the positions to predict, an order for `plm` and classes."""
    generator = torch.Generator().manual_seed(1)
    k = max(1, math.ceil(plan['mask_fraction'] * length - 1e-9))
    ids = torch.randint(plan['vocab_size'], (batch, length), generator=generator)
    positions = torch.rand(batch, length, generator=generator).argsort(1)[:, :k]
    order = torch.rand(batch, length, generator=generator).argsort(1)
    rows = {'ids': ids, 'positions': positions, 'targets': ids.gather(1, positions), 'order': order,
            'classes': torch.arange(batch) % 2}
    return {key: value.to(device) for key, value in rows.items()}


def masked_loss(model, rows, name):
    order = {'order': rows['order']} if name == 'xlnet_plm' else {}
    return model(rows['ids'], rows['positions'], rows['targets'], **order).mean()


def full_loss(model, rows, name):
    """As Hugging Face's Trainer: logits of every position, most of them for nothing."""
    labels = torch.full_like(rows['ids'], -100).scatter(1, rows['positions'], rows['targets'])
    return F.cross_entropy(model(rows['ids']).float().flatten(0, 1), labels.flatten())


def classify_loss(model, rows, name):
    return F.cross_entropy(model(rows['ids']).float(), rows['classes'])


MODES = {                       # name -> (loss, backward pass?, rows a step or 0: as given)
    'forward': (masked_loss, False, 0),
    'train': (masked_loss, True, 0),
    'full': (full_loss, True, 0),
    'finetune': (classify_loss, True, 16),          # Kowsher et al. 2024, figure 3
}


def make_step(model, run, name, mode, rows, machine):
    """A function that takes one step of a row of MODES, with AdamW.  run: the model, or its compiled form."""
    loss, backward, _ = MODES[mode]
    if backward:
        optimizer = train.make_optimizer(model, 1e-4, (0.9, 0.999), 1e-12, 0.01, machine.device)

    def step():
        with torch.set_grad_enabled(backward), train.autocast(machine.device, machine.dtype):
            value = loss(run, rows, name)
        if backward:
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        train.sync(machine.device)                      # while `value` is there: XLA computes what is wanted
    return step


def count_flops(name, plan, sizes, length, mode, batch=1):
    """Matrix products of a step on `batch` rows, by torch's counter, as in model.training_flops.

    One row and two are counted; the rest follows, with what a step does once for all rows, as in `rpe`.
    """
    def count(rows):
        with torch.device(place), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            value = loss(model, make_rows(rows, length, plan, place), name)
            if backward:
                value.backward()
        return counter.get_total_flops()

    loss, backward, _ = MODES[mode]
    place = 'cpu' if name in PEERS else 'meta'          # RoFormer looks at its mask
    with torch.device(place):
        model = build(name, plan, sizes, length, mode, recompute=False)
    one, two = count(1), count(2)
    return one + (batch - 1) * (two - one)


def is_out_of_memory(error):
    words = ('out of memory', "can't allocate memory", 'not enough memory')
    return isinstance(error, (torch.OutOfMemoryError, MemoryError, BrokenProcessPool)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words))


# ---- params ----

def group_of(name):
    return next(group for group, pattern in GROUPS.items() if re.match(pattern, name))


def count_groups(model):
    """{group: parameters}; they sum to count_parameters."""
    counts = dict.fromkeys(('embedding', 'attention', 'position', 'MLP', 'norms', 'head'), 0)
    for name, parameter in model.named_parameters():
        counts[group_of(name)] += parameter.numel()
    assert sum(counts.values()) == count_parameters(model)
    return counts


def count_matrices(model):
    """Entries of the layers' matrices, without embeddings and vectors.  Tian et al. 2021, table 1"""
    return sum(p.numel() for name, p in model.encoder.named_parameters()
               if p.dim() > 1 and not re.match(r'token|segment|position\.(?!table$)', name))


def count_printed(words, plan):
    """Our count of 'variant shape all|matrices|classifier vocabulary besides', besides what a paper adds."""
    name, sizes, counted, words, besides = words.split()
    mode = 'finetune' if counted == 'classifier' else 'train'
    with torch.device('meta'):
        model = build(name, {**plan, 'vocab_size': int(words), 'position': ''}, SHAPES[sizes], 512, mode)
    return (count_matrices if counted == 'matrices' else count_parameters)(model) + int(besides)


def as_printed(count, printed):
    """A count in the unit of a paper's: 84.9M, 94,777k or 109,514,298."""
    return {'M': f'{count / 1e6:.1f}M', 'k': f'{count / 1e3:,.0f}k'}.get(printed[-1], f'{count:,}')


def quoted(kind):
    """[(paper, words, printed, source)] of results/papers.json."""
    return [(paper, *(part.strip() for part in row.split(';'))) for paper, book in read_papers().items()
            for row in book.get('bench', {}).get(kind, ())]


def params(plan, machine):
    """Parameters by group, and the papers' counts beside ours."""
    raw, tables = [], []
    explicit = plan['shape'] != 'auto' or any(plan[key] for key in ('n_layer', 'n_head', 'n_embd', 'n_inner'))
    for name in [plan['shape']] if explicit else ['small', 'base', 'large']:
        sizes, rows = sizes_of({**plan, 'shape': 'auto'}, plan['fallback'] if name == 'auto' else name), []
        for system in plan['variants']:
            with torch.device('meta'):
                counts = count_groups(build(system, plan, sizes, 512, 'train'))
            raw.append({'system': system, 'sizes': sizes, **counts})
            rows.append([system, *(f'{count:,}' for count in (*counts.values(), sum(counts.values())))])
        tables.append([f"Parameters, {' x '.join(map(str, sizes))} (layers, heads, width, MLP), "
                       f"{plan['vocab_size']:,} words", ['', *counts, 'total'], rows, []])
    rows = []
    for paper, words, printed, source in quoted('parameters'):
        ours = count_printed(words, plan)
        rows.append([paper, *words.split()[:3], f'{ours:,}', printed,
                     'yes' if as_printed(ours, printed) == printed else 'no', source])
        raw.append({'paper': paper, 'row': words, 'ours': ours, 'printed': printed})
    return {'raw': raw, 'tables': [*tables, ['Parameters: ours and as printed', [
        'paper', 'system', 'shape', 'counted', 'ours', 'printed', 'equal', 'where, or why not'], rows, []]]}


# ---- speed ----

def timed(step, machine, clock=time.perf_counter):
    """Seconds that a step takes, the device's queue included."""
    train.sync(machine.device, wait=True)
    start = clock()
    step()
    train.sync(machine.device, wait=True)
    return clock() - start


def interleave(makers, rounds, warmup, time_of):
    """({case: seconds of each round}, {case: why it failed}): all in turn, so that load hits them alike.

    makers  {(name, compiled): function that returns a step}; a case that is out of memory, or that does not
            compile, takes no part from there on
    """
    def attempt(case, act):
        try:
            return act()
        except Exception as error:                      # compilers raise of many kinds
            if not case[1] and not is_out_of_memory(error):
                raise
            failed[case] = FAILED if is_out_of_memory(error) else f'{error}'.strip().partition('\n')[0][:60]
            taken.pop(case, None)

    def prepare(case, make):
        taken[case] = make()
        for _ in range(warmup + case[1]):               # what is compiled may be so twice
            taken[case]()

    taken, failed = {}, {}
    for case, make in makers.items():
        attempt(case, functools.partial(prepare, case, make))
    cases, seconds = list(taken), {case: [] for case in taken}
    for i in range(rounds):
        for j in range(len(cases)):
            case = cases[(i + j) % len(cases)]          # another one begins each round
            if case in taken:
                seconds[case].append(attempt(case, functools.partial(time_of, taken[case])))
    return {case: seconds[case] for case in taken}, failed


def ratio(base, seconds):
    """Median over the rounds of base / seconds: how many times as fast."""
    return statistics.median(b / s for b, s in zip(base, seconds, strict=True))


@contextlib.contextmanager
def quiet():
    """Nothing reaches stderr, where torch 2.13's profiler announces itself."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def kernel(step):
    """The attention kernel of a step, by the profiler."""
    with quiet(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    found = {match[1] for event in profile.key_averages()
             if (match := re.fullmatch(r'aten::_(?:scaled_dot_product_)?(\w*attention\w*)', event.key))}
    return ', '.join(sorted(name for name in found if 'backward' not in name)) or 'plain products'


def product_step(machine):
    """(step, operations): the largest matrix product of the machine, to compare with."""
    n = 8192 if machine.device.type == 'cuda' else 1024
    a, b = torch.randn(2, n, n, device=machine.device, dtype=machine.dtype)

    def step():
        product = a @ b
        train.sync(machine.device)
        return product
    return step, 2 * n ** 3


def measure(plan, machine, mode, batch, length):
    """Raw rows of all systems of one mode, batch and length, interleaved."""
    gc.collect()
    torch.cuda.empty_cache()
    if True in plan['compile']:
        torch.compiler.reset()
        torch._dynamo.config.recompile_limit = 100      # systems share the code of a forward pass
    sizes, rows = sizes_of(plan, plan['fallback']), make_rows(batch, length, plan, machine.device)
    built, steps, (product, product_flops) = {}, {}, product_step(machine)

    def make(name, compiled):
        if name not in built:
            torch.manual_seed(1)
            built[name] = train.place(build(name, plan, sizes, length, mode), machine.device)
        ready = torch.compile(built[name], dynamic=False) if compiled else built[name]
        steps[name, compiled] = make_step(built[name], ready, name, mode, rows, machine)
        return steps[name, compiled]

    names = [*distinct(plan), *(plan['peers'] if mode in ('forward', 'train') else ())]
    cases = {(name, compiled): functools.partial(make, name, compiled)
             for compiled in plan['compile'] for name in names}
    seconds, failed = interleave({('matrix product', False): lambda: product, **cases}, plan['rounds'],
                                 plan['warmup'], functools.partial(timed, machine=machine))
    common = {'mode': mode, 'batch': batch, 'length': length, 'sizes': list(sizes)}
    found = [{'system': 'matrix product', **common, 'compiled': False, 'failed': None, 'flops': product_flops,
              'seconds': seconds['matrix product', False]}]
    for name, compiled in cases:
        case = name, compiled
        found.append({'system': name, **common, 'compiled': compiled, 'failed': failed.get(case),
                      'flops': count_flops(name, plan, sizes, length, mode, batch),
                      'seconds': seconds.get(case),
                      'kernel': kernel(steps[case]) if case in seconds else None})
    return found


def measure_loader(plan, batch, length):
    """Raw row of train.py's loader, which reads and masks in one thread."""
    folder, meta = data(plan)
    rows = train.PACKING['stream'](folder, meta, 'train', length)
    masker = train.Masker(meta, length, plan['mask_fraction'])
    loader = train.Loader(rows, masker, 1, batch, slice(0, batch))
    seconds = [timed(functools.partial(loader.batch, step), Machine(torch.device('cpu'), None, 1))
               for step in range(plan['warmup'] + plan['rounds'])]
    return {'system': 'loader', 'batch': batch, 'length': length, 'seconds': seconds[plan['warmup']:]}


def speed_row(row, group, machine):
    """Cells of a raw row; `group` holds the raw rows that ran in turn with it."""
    start = [row['system'], 'yes' if row['compiled'] else 'no']
    if row['failed']:
        return [*start, row['failed'], *['-'] * 8]
    median, spread = statistics.median(row['seconds']), (min(row['seconds']), max(row['seconds']))
    rate, sheet = row['flops'] / median, train.peak_flops(machine.device, machine.dtype)
    base = {name: next((other['seconds'] for other in group if other['system'] == name and other['seconds']
                        and other['compiled'] == row['compiled']), None) for name in ('original', 'hf_bert')}
    product = next(other for other in group if other['system'] == 'matrix product')
    return [*start, f'{1000 * median:.1f}', ' to '.join(f'{1000 * end:.1f}' for end in spread),
            f"{row['batch'] * row['length'] / median:,.0f}",
            *(f"{ratio(base[name], row['seconds']):.2f}" if base[name] else '-' for name in base),
            f'{rate / 1e12:.3f}', f'{rate / sheet:.1%}' if sheet else '-',
            f"{rate * statistics.median(product['seconds']) / product['flops']:.1%}", row['kernel']]


def time_ratios(raw, words):
    """'rows x tokens: our time of a system over another's' of each case, for the words of a paper's row."""
    name, against, mode = words.split()[:3]
    found = []
    for row, other in itertools.product(raw, raw):
        both = [each['system'] for each in (row, other)] == [name, against]
        if both and all(row.get(key) == other.get(key) for key in ('mode', 'batch', 'length', 'compiled')) \
                and row['mode'] == mode and row['seconds'] and other['seconds']:
            case = f"{row['batch']} x {row['length']}{' compiled' if row['compiled'] else ''}"
            found.append(f"{case}: {ratio(row['seconds'], other['seconds']):.2f}")
    return ', '.join(found) or '-'


def speed(plan, machine):
    """Forward and training steps of all systems in turn, peers of transformers, and the loader."""
    raw, tables, loaders = [], [], []
    header = ['', 'compiled', 'ms', 'range', 'tokens/s', '/ original', '/ hf_bert', 'TFLOP/s',
              'MFU, data sheet', 'MFU, product', 'attention']
    shape_text = ' x '.join(map(str, sizes_of(plan, plan['fallback'])))
    for length, mode in itertools.product(plan['lengths'], plan['modes']):
        own = [MODES[mode][2]] if MODES[mode][2] else plan['batches']
        for batch in own or [max(1, plan['step_tokens'] // length)]:
            group = measure(plan, machine, mode, batch, length)
            raw += group
            product = group[0]['flops'] / statistics.median(group[0]['seconds']) / 1e12
            tables.append([f'Speed: {mode}, {batch} x {length} tokens, {shape_text}', header,
                           [speed_row(row, group, machine) for row in group[1:]], [
                f"Median of {plan['rounds']} rounds, all systems in turn; / original and / hf_bert: how many "
                f'times as fast. MFU, product: of a product in the same rounds, {product:.3f} TFLOP/s.']])
            if plan['dataset'] and mode == 'train':
                loaders.append(measure_loader(plan, batch, length))
    rows = [[f"{row['batch']} x {row['length']}",
             f"{row['batch'] * row['length'] / statistics.median(row['seconds']):,.0f}"] for row in loaders]
    printed = [[paper, *(words.split() + [''])[:4], value, time_ratios(raw, words), source]
               for paper, words, value, source in quoted('time')]
    return {'raw': raw + loaders, 'tables': [*tables, ['Loader', ['rows x tokens', 'tokens/s'], rows, []], [
        'Time of a step over that of another system: as printed, and ours by rows x tokens',
        ['paper', 'system', 'over', 'mode', 'length', 'printed', 'ours', 'where'], printed, []]]}


# ---- memory ----

def peak_bytes(machine):
    """Most bytes since the last forget_peak: of the CUDA allocator, else resident in this process."""
    if machine.device.type == 'cuda':
        return torch.cuda.max_memory_allocated(machine.device)
    if sys.platform == 'linux':                         # ru_maxrss would start at the parent's
        with open('/proc/self/status') as file:
            return 1024 * int(re.search(r'VmHWM:\s+(\d+) kB', file.read())[1])
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024)


def forget_peak(machine):
    """Count the peak from here on, where the system can."""
    gc.collect()
    if machine.device.type == 'cuda':
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(machine.device)
    elif sys.platform == 'linux':
        with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
            file.write('5')                             # man 5 proc: the peak is what is resident now


def step_memory(plan, machine, name, mode, batch, length):
    """(bytes before the model is there, peak bytes after two training steps)"""
    if machine.device.type != 'cuda':
        if machine.threads:
            torch.set_num_threads(machine.threads)
        take_steps({**plan, 'vocab_size': 64}, machine, name, mode, 1, 8, (1, 4, 64, 64))   # loads libraries
    forget_peak(machine)
    before = peak_bytes(machine)
    take_steps(plan, machine, name, mode, batch, length, sizes_of(plan, plan['fallback']))
    return before, peak_bytes(machine)


def take_steps(plan, machine, name, mode, batch, length, sizes):
    """Two training steps of a new model: the optimizer's tensors come with the first."""
    model = train.place(build(name, plan, sizes, length, mode), machine.device)
    step = make_step(model, model, name, mode, make_rows(batch, length, plan, machine.device), machine)
    for _ in range(2):
        timed(step, machine)


def in_fresh_process(*arguments):
    """step_memory(*arguments), of a process that has done nothing else."""
    with ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(step_memory, *arguments).result()


def memory_row(plan, machine, name, mode, batch, length, run=None):
    """Raw row of a training step: peak bytes above the empty process, or why there are none."""
    row = {'system': name, 'mode': mode, 'batch': batch, 'length': length, 'failed': None}
    run = run or (step_memory if machine.device.type == 'cuda' else in_fresh_process)
    try:
        row['before'], row['peak'] = run(plan, machine, name, mode, batch, length)
    except (RuntimeError, MemoryError) as error:        # BrokenProcessPool is a RuntimeError
        if not is_out_of_memory(error):
            raise
        row['failed'] = FAILED
    return row


def used(row):
    """MiB of a raw row, or None."""
    return None if row is None or row['failed'] else (row['peak'] - row['before']) / 2 ** 20


def largest_batch(fits, most=2 ** 16):
    """The largest batch below `most` for which fits(batch) holds, by doubling and bisection; 0 if none."""
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search_batch(plan, machine, name, length):
    """Raw row of the largest batch of a training step within memory_limit, or within the GPU's memory."""
    def fits(batch):
        mib = used(memory_row(plan, machine, name, 'train', batch, length))
        return mib is not None and (not plan['memory_limit'] or mib <= 1024 * plan['memory_limit'])
    return {'system': name, 'length': length, 'limit': plan['memory_limit'],
            'largest_batch': largest_batch(fits)}


def share(cell, key, other):
    """The memory of one case over that of another, in per cent, or '-'."""
    return f'{cell[key] / cell[other]:.1%}' if cell.get(key) and cell.get(other) else '-'


def memory_table(plan, machine, rows, largest):
    """For each length MiB, the share of GAU's and the time over GAU's; of the first system's without GAU."""
    base, lengths = 'gau' if 'gau' in plan['variants'] else plan['variants'][0], plan['memory_lengths']
    cell = {(row['system'], row['mode'], row['length']): used(row) for row in rows}
    sizes, lines = list(sizes_of(plan, plan['fallback'])), []
    speeds = [row for row in plan['sections'].get('speed', {}).get('raw', []) if row.get('sizes') == sizes
              and row['batch'] == plan['memory_batch'] and not row['compiled']]
    for name, mode in dict.fromkeys((row['system'], row['mode']) for row in rows):
        line = [name if mode == 'train' else f'{name}, {mode} logits']
        for length in lengths:
            own, same = (name, mode, length), [row for row in speeds if row['length'] == length]
            line += [FAILED if cell[own] is None else f'{cell[own]:,.0f}',
                     share(cell, own, (base, 'train', length)),
                     time_ratios(same, f'{name} {base} {mode}').partition(': ')[2] or '-']
            line += [next((row['largest_batch'] for row in largest if mode == 'train' and (
                row['system'], row['length']) == (name, length)), '-')] if largest else []
        lines.append(line)
    columns = 'MiB', f'/ {base}', 'time', 'batch'
    header = [f'{length}: {text}' for length in lengths for text in columns[:4 if largest else 3]]
    kind = 'CUDA allocator' if machine.device.type == 'cuda' else 'Resident size of a fresh process'
    limit = f"batch: the largest within {plan['memory_limit'] or 'all'} GiB." if largest else \
        'For the largest batch on a CPU give --memory_limit.'
    return [f"Memory of a training step, {plan['memory_batch']} rows (layout of Liu's table 4)",
            ['', *header], lines, [
        f'{kind} at its peak, not compiled, less what was there before the model. time: of a step over '
        f'{base}, by the speed run in this folder, where that had as many rows. {limit}']]


def memory(plan, machine):
    """Peak of a training step by system and length; full logits, recomputation, half the length as rows."""
    names, gpu = distinct(plan), machine.device.type == 'cuda'
    if 'shatter' in names and 'shatter_recompute' not in names:
        names.insert(names.index('shatter') + 1, 'shatter_recompute')
    modes = [*((name, 'train') for name in names), (names[0], 'full')]
    modes = [(name, mode) for name, mode in modes if mode == 'train' or name != 'xlnet_plm']
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'      # glibc gives tensors back at once: peaks repeat
    with ThreadPoolExecutor(1 if gpu else min(2, os.cpu_count())) as pool:
        rows = list(pool.map(lambda job: memory_row(plan, machine, *job), [
            (*mode, plan['memory_batch'], length) for length in plan['memory_lengths'] for mode in modes]))
        largest = list(pool.map(lambda job: search_batch(plan, machine, *job), [
            (name, length) for length in plan['memory_lengths'] for name in names
        ])) if plan['memory_limit'] or gpu else []
    del os.environ['MALLOC_MMAP_THRESHOLD_']
    cell = {(row['system'], row['length']): used(row) for row in rows if row['mode'] == 'train'}
    halves = {(name, length): share(cell, (name, length // 2), (name, length)) for name, length in cell
              if (name, length // 2) in cell}
    printed = []
    for paper, words, value, source in quoted('memory'):
        name, other, length = (words.split() + ['0'])[:3]
        ours = [f'{n}: {text}' for (system, n), text in halves.items() if (system, 'half') == (name, other)]
        ours = ours or [share(cell, (name, int(length)), (other, int(length)))]
        printed.append([paper, name, other, length, value, ', '.join(ours), source])
    return {'raw': rows + largest, 'tables': [
        memory_table(plan, machine, rows, largest),
        ['Memory at half the length', ['', 'tokens', 'over', 'share'],
         [[name, length // 2, length, text] for (name, length), text in halves.items()], []],
        ['Memory: as printed, and ours', ['paper', 'system', 'over', 'length', 'printed', 'ours', 'where'],
         printed, []]]}


# ---- convergence ----

def data(plan):
    """(folder, meta) of the corpus, prepared first if it is missing."""
    if not plan['dataset']:
        raise UserError("dataset='': name a corpus that prepare_data.py wrote, as in --dataset=docstrings")
    return train.prepared(plan['dataset'], plan['data_dir'], plan['prepare'], train.Ranks())


def run_knobs(plan, name, seed):
    """(recipe, the knobs that are not the recipe's, all knobs) of a run of train.py."""
    path = os.path.join(HERE, plan['recipe'])
    base = configure(dict(vars(train)), [path])[0]
    given = sizes_of(plan, 'base') if plan['shape'] != 'auto' else [plan[key] for key in SIZES]
    sizes = [size or base[key] for key, size in zip(SIZES, given, strict=True)]
    knobs, steps = settings(name, plan, sizes, base['block_size']), plan['steps'] or base['max_iters']
    for key in ('dropout', 'attention_dropout', 'block_size'):
        del knobs[key]                                  # the recipe's
    knobs |= {
        'seed': seed, 'max_iters': steps,
        'warmup_iters': steps // 10 if plan['steps'] else base['warmup_iters'],
        'eval_interval': plan['eval_interval'], 'log_interval': plan['eval_interval'], 'fill_samples': 0,
        **{key: plan[key] for key in ('dataset', 'data_dir', 'device', 'dtype')},
        'out_dir': run_folder(plan, name, seed)}
    return path, knobs, {**base, **knobs}


def run_folder(plan, name, seed):
    return os.path.join(plan['out_dir'], 'runs', f'{name}-{seed}')


def train_run(plan, workers, name, seed):
    """One run of train.py, unless it is finished; an interrupted one goes on."""
    path, knobs, whole = run_knobs(plan, name, seed)
    folder = knobs['out_dir']
    manifest = os.path.join(folder, 'run.json')
    if os.path.exists(manifest):
        with open(manifest) as file:
            stored = json.load(file)[-1]['config']
        train.refuse_difference(manifest, stored, json.loads(json.dumps(whole)), 'the run')
    ends = [line['step'] for line in train.read_metrics(folder) if line['kind'] == 'val']
    if knobs['max_iters'] not in ends:
        os.makedirs(folder, exist_ok=True)
        words = [f'--{key}={show(value)}' for key, value in knobs.items()]
        environment = {**os.environ, **({'OMP_NUM_THREADS': '1'} if workers > 1 else {})}
        done = subprocess.run([sys.executable, os.path.join(HERE, 'train.py'), path, *words], env=environment,
                              capture_output=True, text=True)
        reason = (done.stderr.strip().splitlines() or ['without a word'])[-1]
        if done.returncode and 'no update was made' not in reason:      # a divergence is a result
            raise UserError(f'{folder}: train.py ended with status {done.returncode}: {reason}')
    found = read_curve(folder)
    loss = found['loss'][-1]                            # None: not finite
    say(f"{name}, seed {seed}: {loss or math.nan:.4f} nats after {found['step'][-1]} steps")
    return {'system': name, 'seed': seed, **found,
            'diverged': loss is None or found['step'][-1] < knobs['max_iters']}


def read_curve(folder):
    """{'step', 'loss', 'accuracy', 'seconds'} of a run's validations; seconds of training alone."""
    with open(os.path.join(folder, 'run.json')) as file:
        config = json.load(file)[-1]['config']
    spent, before, curve = {0: 0.0}, 0, {'step': [], 'loss': [], 'accuracy': [], 'seconds': []}
    lines = train.read_metrics(folder)
    for line in (line for line in lines if line['kind'] == 'train'):
        tokens = (line['step'] - before) * config['total_batch'] * config['block_size']
        spent[line['step']] = spent[before] + tokens / line['tokens_per_second']
        before = line['step']
    for line in (line for line in lines if line['kind'] == 'val'):
        for key in ('step', 'loss', 'accuracy'):
            curve[key].append(line.get(key))
        curve['seconds'].append(spent.get(line['step']))
    return {**curve, 'parameters': count_run(config)}


def count_run(config):
    meta = train.load_meta(os.path.join(config['data_dir'], config['dataset']))
    kind = train.OBJECTIVE[config['objective']][0]
    with torch.device('meta'):
        return count_parameters(kind(model_config(config, meta['vocab_size'])))


def falls_below(losses, level):
    """Index of the first validation from which on all losses are below a level, or None."""
    above = [i for i, loss in enumerate(losses) if loss is None or loss >= level]
    first = above[-1] + 1 if above else 0
    return first if first < len(losses) else None


def spread(values, form='{:.0f}', total=None):
    """Mean (standard deviation) of the values that are not None, and how many of `total` they are."""
    values = [value for value in values if value is not None]
    if not values:
        return f'none of {total}' if total else '-'
    mean, deviation, _ = t_interval(values)
    text = form.format(mean) + ('' if deviation is None else f' ({form.format(deviation)})')
    return text if total in (None, len(values)) else f'{text}, {len(values)} of {total}'


def convergence(plan, machine):
    """Validation curves of train.py: the same data, order, masks and steps for every variant of a seed.

    But for packing = 'documents', which makes other rows of the same texts, to train and to validate on, and
    for objective = 'plm', which masks nothing: it predicts the same tokens.
    """
    unigram, numbers = data(plan)[1]['unigram_entropy'], range(plan['seed'], plan['seed'] + plan['seeds'])
    levels = {'plateau': unigram - plan['plateau'], 'target': plan['target_loss'] or unigram - 0.5}
    workers, rows = 1 if machine.device.type == 'cuda' else os.cpu_count(), []
    with ThreadPoolExecutor(workers) as pool:
        raw = list(pool.map(lambda job: train_run(plan, workers, *job),
                            [(name, number) for number in numbers for name in plan['variants']]))
    for name in plan['variants']:
        runs = [run for run in raw if run['system'] == name]
        ends = [run for run in runs if not run['diverged']]
        cells = [name, f"{runs[0]['parameters']:,}",
                 spread([run['loss'][-1] for run in ends], '{:.3f}') if ends else 'diverges',
                 spread([100 * run['accuracy'][-1] for run in ends], '{:.2f}')]
        for level in levels.values():
            reached = [(run, None if run['diverged'] else falls_below(run['loss'], level)) for run in runs]
            cells += [spread([i if i is None else run[key][i] for run, i in reached], '{:.0f}', len(runs))
                      for key in ('step', 'seconds')]
        rows.append(cells)
    plot_curves(plan, raw, levels, unigram)
    ours = {row[0]: [row[4], row[3]] for row in rows}
    texts = [[paper, *words.split(), value, *ours.get(words.split()[0], ['-', '-']), source]
             for paper, words, value, source in quoted('convergence')]
    header = ['', 'parameters', 'final loss', 'masked accuracy, %', 'steps on the plateau', 'seconds',
              f"steps to {levels['target']:.3f}", 'seconds']
    first = run_knobs(plan, plan['variants'][0], plan['seed'])[2]
    return {'raw': {'runs': raw, 'unigram_entropy': unigram, **levels}, 'tables': [
        [f"Convergence: {plan['recipe']}, {first['max_iters']} steps, {first['n_layer']} x {first['n_embd']}"
         f", {plan['seeds']} seed(s)", header, rows, [
            f'Mean (standard deviation) over seeds. The plateau ends at the first validation, one each '
            f"{plan['eval_interval']} steps, from which on the loss is below {levels['plateau']:.3f}, the "
            f"unigram entropy {unigram:.3f} less {plan['plateau']}. Seconds of training, {workers} run(s) at "
            'once. _diff: a document a row, to validate on too.']],
        ['Convergence: as printed, and ours at the shape above', [
            'paper', 'system', 'shape', 'printed', 'our plateau', 'our accuracy, %', 'where'], texts, []]]}


# ---- plots ----

@functools.cache
def figure_class():
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say('no plots without matplotlib: pip install matplotlib')
        return None
    return Figure


def plots(plan, name, shape, size):
    """Yield the axes (rows, columns) of a figure that is saved as `name`.png; nothing without matplotlib."""
    if figure_class():
        figure = figure_class()(figsize=size, layout='constrained')
        yield figure.subplots(*shape, squeeze=False)
        figure.savefig(os.path.join(plan['out_dir'], f'{name}.png'), dpi=120)


def plot_curves(plan, runs, levels, unigram):
    """Mean validation loss and its range over seeds.  Courtois et al. 2024, figure 2"""
    for axes in plots(plan, 'convergence', (1, 1), (7, 4)):
        axis, = axes.flat
        for name in plan['variants']:
            mine = [run for run in runs if run['system'] == name and not run['diverged']]
            if not mine:
                continue
            steps, losses = mine[0]['step'], np.array([run['loss'] for run in mine], float)
            line, = axis.plot(steps, losses.mean(0), label=name)
            axis.fill_between(steps, losses.min(0), losses.max(0), color=line.get_color(), alpha=0.2)
        axis.axhline(unigram, color='gray', linestyle='--', label='unigram entropy')
        axis.axhline(levels['target'], color='gray', linestyle=':', label='target')
        axis.set(xlabel='step', ylabel='validation loss, nats a masked token')
        axis.legend()


# ---- rank and attention of checkpoints ----

NORMALISERS = {torch.Tensor.softmax: 'softmax', F.logsigmoid: 'sigmoid', torch.Tensor.relu: 'relu'}
WEIGHTS = {                     # what an operator makes of its scores (..., T, T)
    'softmax': lambda scores: masked_softmax(scores, None),
    'sigmoid': lambda scores: math.prod(sigmoid_weights(scores, None)),
    'relu': lambda scores: F.normalize(scores.relu().square(), p=1, dim=-1),
}
MATRICES = {                    # Liu 2022, table 3; the last is Tian et al. 2021, eq. 6
    'QK^T': lambda scores: scores, 'softmax': WEIGHTS['softmax'],
    'relu^2': lambda scores: scores.relu().square(), 'l2 sigmoid': WEIGHTS['sigmoid'],
}


class Scores(TorchFunctionMode):
    """Keeps what each attention of a model hands to its normaliser: (row of WEIGHTS, scores (B, H, T, T)).

    Scores are of the model's own queries and keys, q k^T / sqrt(K), with the terms of its positions.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            q, k, _, bias = args[:4]
            scores = q @ k.mT * q.size(-1) ** -0.5
            self.found.append(('softmax', scores if bias is None else scores + bias))
        elif function in NORMALISERS:
            scores = args[0] if args[0].dim() == 4 else args[0].unsqueeze(1)
            self.found.append((NORMALISERS[function], scores))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def scores_of(model, ids):
    """[(row of WEIGHTS, scores (B, H, T, T))] of each layer, float64."""
    with Scores() as seen:
        model.eval().double().encoder(ids)
    size = model.config.query_size                      # squared_relu scales after its relu
    return [(kind, scores * size ** -0.5 if kind == 'relu' else scores) for kind, scores in seen.found]


@torch.no_grad()
def attention_maps(model, ids):
    """Weights (H, T, T) of each layer for ids (1, T); of Shatter's steps those of each part.

    Rows of squared_relu, whatever its scale, are made to sum to 1.
    """
    maps = []
    for block, (kind, scores) in zip(model.encoder.blocks, scores_of(model, ids), strict=True):
        a = WEIGHTS[kind](scores)[0]
        if model.config.attention in SHATTER:           # whose queries stand from last to first
            context = Context(model.encoder.position)
            a = (a * block.attention.partition(context, scores)).flip(1)
        maps.append(a)
    return maps


def checkpoint_models(plan, machine):
    """Yield (label, model) of the checkpoints that were asked for, or of the first seed of convergence."""
    sources = [part.strip() for part in plan['checkpoint'].split(',') if part.strip()] or [
        folder for name in plan['variants']
        if train.checkpoints(folder := run_folder(plan, name, plan['seed']))]
    if not sources:
        raise UserError('no checkpoint: name one with --checkpoint, or run --what=convergence before')
    tokenizer = train.data_identity(data(plan)[1])['tokenizer']
    for source in sources:
        path = train.find_checkpoint(source, source)
        if path is None:
            raise UserError(f'checkpoint={source!r}: no checkpoint there')
        content = train.read_checkpoint(path)
        train.refuse_difference(path, content['data'], {'tokenizer': tokenizer}, 'the data')
        model = train.OBJECTIVE[content['config']['objective']][0](EncoderConfig(**content['model_config']))
        model.load_state_dict(content['model'])
        yield os.path.basename(os.path.dirname(os.path.abspath(path))), train.place(model, machine.device)


def rank_and_zeros(matrix, zero):
    """(mean of numerical rank / T, share of zeros) of matrices (..., T, T).

    A singular value counts above T times float32's precision of the largest, as in numpy.linalg.matrix_rank.
    """
    length, size = matrix.size(-1), matrix.abs()
    rank = torch.linalg.matrix_rank(matrix, rtol=length * torch.finfo(torch.float32).eps)
    zeros = size <= zero * size.amax((-2, -1), keepdim=True)
    return rank.double().mean().item() / length, zeros.double().mean().item()


def key_share(config, length):
    """Key size / T, which bounds the rank of q k^T; '-' where terms of positions are added to it."""
    if config.position in ('rpe', 'rab') or config.attention in ('part_bias', 'shatter', 'xlnet'):
        return '-'
    one_head = config.attention in SHATTER and config.attention != 'part_mask'
    return f'{(config.n_embd if one_head else config.query_size) / length:.2f}'


def rank(plan, machine):
    """Rank and sparsity of attention matrices of checkpoints on real text.  Liu 2022, table 3"""
    (folder, meta), raw, rows = data(plan), [], []
    for label, model in checkpoint_models(plan, machine):
        length = plan['rank_length'] or model.config.block_size
        model.encoder.extend(max(length, model.config.block_size))
        texts = train.PACKING['stream'](folder, meta, 'val', length)
        ids = torch.from_numpy(texts.get(np.arange(min(plan['rank_rows'], len(texts))))).to(machine.device)
        scores = scores_of(model, ids)
        for name, make in MATRICES.items():
            layers = [rank_and_zeros(make(one), plan['zero']) for _, one in scores]
            raw.append({'checkpoint': label, 'matrix': name, 'length': length, 'layers': layers})
            ranks, zeros = (statistics.mean(column) for column in zip(*layers, strict=True))
            rows.append([label, length, key_share(model.config, length), name, f'{ranks:.4f}', f'{zeros:.2%}',
                         f'{min(layers)[0]:.4f} to {max(layers)[0]:.4f}'])
    rows += [[paper, 512, '0.25', name, *value.split(', '), source]
             for paper, name, value, source in quoted('rank')]
    return {'raw': raw, 'tables': [['Rank / T and sparsity of attention matrices', [
        '', 'T', 'key size / T', 'matrix', 'rank / T', 'zeros', 'layers, or source'], rows,
        [f"Mean over layers, heads and {plan['rank_rows']} validation rows. Rank: singular values above T "
         f"eps of float32 times the largest. Zeros: at most {plan['zero']:g} of a matrix's largest entry; "
         'the paper does not say how it counts. Each is made of the scores as the model computes them, with '
         'terms of positions.']]]}


def attention(plan, machine):
    """Attention maps of a sentence, for each layer and head or part of a checkpoint."""
    folder, meta = data(plan)
    tokenizer, special, raw, rows = load_tokenizer(folder, meta), meta['special'], [], []
    for label, model in checkpoint_models(plan, machine):
        ids = tokenizer.encode(plan['sentence'])[:model.config.block_size - 2]
        ids = [special['cls'], *ids, special['sep']]
        words = [tokenizer.piece(i) for i in ids]
        maps = attention_maps(model, torch.tensor([ids], device=machine.device))
        places = torch.arange(len(ids), device=machine.device)
        far = (places - places[:, None]).abs()
        for layer, a in enumerate(maps):
            mass = a.sum(-1)                            # (H, T)
            a = a / mass[..., None].clamp_min(1e-30)
            entropy, distance, ends = (float((value * mass).sum() / mass.sum()) for value in (
                -(a * a.clamp_min(1e-30).log()).sum(-1), (a * far).sum(-1), a[..., [0, -1]].sum(-1)))
            rows.append([label, layer, len(a), f'{entropy:.3f}', f'{distance:.2f}', f'{ends:.1%}'])
        raw.append({'checkpoint': label, 'tokens': words,
                    'maps': [a.cpu().numpy().round(5).tolist() for a in maps]})
        size = len(maps), max(map(len, maps))
        for axes in plots(plan, f'attention_{label}', size, (2.5 * size[1] + 1, 2.5 * size[0] + 1)):
            for (layer, head), axis in np.ndenumerate(axes):
                axis.imshow(maps[layer][head].cpu().numpy(), cmap='Blues', vmin=0)
                axis.set_title(f'layer {layer}, {head}', fontsize=8)
                axis.set_xticks(range(len(words)), words, fontsize=5, rotation=90)
                axis.set_yticks(range(len(words)), words, fontsize=5)
    return {'raw': raw, 'tables': [[f"Attention of {plan['sentence']!r}", [
        '', 'layer', 'heads', 'entropy, nats', 'mean distance', 'on [CLS] and [SEP]'], rows,
        ['Mean over heads and queries of weights made to sum to 1, each counted by its sum before.']]]}


def partition(plan, machine):
    """Shatter's partition of unity, layer by layer.  Tian et al. 2021, figure 2"""
    layers, heads, width, inner = sizes_of(plan, 'base')
    config = EncoderConfig(1, 512, layers, heads, width, inner, attention='shatter', position='none')
    rows, raw, columns = [], [], min(4, layers)
    tables = [Partition(config, layer).table for layer in range(layers)]                # (H, 1023)
    for layer, table in enumerate(tables):
        near = torch.where(table > 0.99 * table.amax(1, keepdim=True), torch.arange(-511, 512).abs(), 512)
        peaks, error = (near.argmin(1) - 511).tolist(), (table.sum(0) - 1).abs().max().item()
        raw.append({'layer': layer, 'peaks': peaks, 'largest_error': error})
        rows.append([layer, f'{error:.1e}', ' '.join(map(str, sorted(peaks)))])
    size = -(-layers // columns), columns
    for axes in plots(plan, 'partition', size, (3.5 * size[1], 2.2 * size[0])):
        for axis, (layer, table) in zip(axes.flat, enumerate(tables), strict=False):
            axis.plot(np.arange(-128, 129), table.T[383:640].numpy())
            axis.set_title(f'layer {layer}', fontsize=8)
    return {'raw': raw, 'tables': [[f'Partition of unity, {layers} layers, {heads} parts', [
        'layer', 'largest error of the sum', 'nearest distance at which each part weighs most (to 1 %)'],
        rows, []]]}


# ---- the report ----

def machine_name(machine):
    """GPU, or processor with its cores and the threads that were used."""
    if machine.device.type == 'cuda':
        return torch.cuda.get_device_name(machine.device)
    name = platform.processor() or platform.machine()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as file:
            name = dict(re.findall(r'(model name)\s*: (.+)', file.read())).get('model name', name)
    return f'{machine.device}, {os.cpu_count()} cores of {name}, {torch.get_num_threads()} thread(s)'


def made_by(machine):
    """Command, device, versions and date, as one line."""
    versions = [f'Python {platform.python_version()}', f'torch {torch.__version__}']
    with contextlib.suppress(UserError):
        versions.append(f'transformers {transformers().__version__}')
    command = ' '.join(['python', os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return (f"`{command}`; {machine_name(machine)}; {str(machine.dtype)[6:]}; {', '.join(versions)}; "
            f"{time.strftime('%Y-%m-%d')}")


def text_of(section):
    """What made a section and its tables, as Markdown with aligned columns."""
    lines = [section['made'], '']
    for title, *table, notes in section['tables']:
        cells = [[str(cell) for cell in row] for row in (table[0], *table[1])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        cells.insert(1, ['-' * width for width in widths])
        aligned = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
        lines += [f'## {title}', '', *(f"| {' | '.join(row)} |" for row in aligned), '',
                  *(f'{note}\n' for note in notes)] if table[1] else []
    return '\n'.join(lines)


WHAT = {                        # in the order in which they run: rank reads what convergence trains
    'params': params, 'speed': speed, 'memory': memory, 'convergence': convergence, 'rank': rank,
    'partition': partition, 'attention': attention,
}


def rows_of(key, text, rows):
    """The rows of a table that a knob names, in the table's order; all of them for 'all'."""
    names = [name.strip() for name in text.split(',') if name.strip()]
    for name in names if text != 'all' else ():
        choose(key, name, {**rows, 'all': None})
    if not names:
        raise UserError(f"{key}='': choose one or more of {', '.join(rows)}, or all")
    return list(rows) if text == 'all' else list(dict.fromkeys(names))


def make_plan(config, machine):
    """The knobs with lists in place of names and the device's values in place of 0, () and 'auto'."""
    auto = AUTO['cuda' if machine.device.type == 'cuda' else 'cpu']
    plan = {**config, **{key: config[key] if config[key] not in ('auto', 0, ()) else value
                         for key, value in auto.items() if key != 'shape'}, 'fallback': auto['shape']}
    for key in ('warmup', 'seeds', 'eval_interval', 'memory_batch', 'rank_rows', 'rounds', 'step_tokens'):
        if plan[key] < 1:
            raise UserError(f'{key}={plan[key]}: must be at least 1')
    for key in ('threads', 'steps', 'seed', 'rank_length', 'memory_limit', 'plateau', 'zero', *SIZES):
        if plan[key] < 0:
            raise UserError(f'{key}={plan[key]}: must be at least 0')
    for key in ('lengths', 'batches', 'memory_lengths'):
        if any(value < 1 for value in plan[key]):
            raise UserError(f'{key}={show(plan[key])}: must be at least 1 each')
    choose('shape', plan['shape'], {'auto': None, **SHAPES})
    plan['compile'] = choose('compile', plan['compile'], {'false': [False], 'true': [True],
                                                          'both': [False, True]})
    plan['variants'], plan['modes'] = rows_of('variants', variants, VARIANTS), rows_of('modes', modes, MODES)
    plan['peers'] = [] if peers == 'none' else rows_of('peers', peers, PEERS)
    for name in plan['variants']:
        model_config(settings(name, plan, sizes_of(plan, plan['fallback']), max(plan['lengths'])), vocab_size)
    try:
        plan['peers'] and transformers()
    except UserError:
        say('no peers without transformers: pip install transformers')
        plan['peers'] = []
    return plan


def main():
    config, _ = configure(globals())
    _, torch_device = train.join_ranks(device)
    machine = Machine(torch_device, train.choose_dtype(dtype, torch_device), threads)
    names, plan = rows_of('what', what, WHAT), make_plan(config, machine)
    if not out_dir:
        raise UserError("out_dir='': name a folder, as in --out_dir=out/bench")
    if threads:
        torch.set_num_threads(threads)
    train.hold(out_dir)
    path = os.path.join(out_dir, 'bench.json')
    sections = plan['sections'] = {}
    if os.path.exists(path):
        with open(path) as file:
            sections.update(json.load(file))
    for name in (name for name in WHAT if name in names):
        start = time.perf_counter()
        section = WHAT[name](plan, machine)
        sections[name] = {'made': made_by(machine), 'seconds': time.perf_counter() - start, 'knobs': config,
                          **section}
        print(f'{text_of(sections[name])}\n', flush=True)
        train.write_whole(path, json.dumps(sections))
        train.write_whole(os.path.join(out_dir, 'bench.md'), '\n\n'.join(
            text_of(sections[key]) for key in WHAT if key in sections) + '\n')
    train.let_go()


if __name__ == '__main__':
    run(lambda: train.in_memory(main, {'batch_size': step_tokens}))
