"""Compare systems, papers and transformers: parameters, speed, memory, convergence, rank.

    $ python bench.py
    $ python bench.py --what=speed --variants=original,shared --modes=train --compile=true
    $ python bench.py --what=convergence --runs=out/quickstart,out/shatter
    $ python bench.py --what=rank --checkpoint=out/quickstart

Each section (an entry of WHAT) is a generator of flat dicts, here called rows. out_dir gets rows.jsonl with
all rows, tables.md with a table per section (without lists), and plots; sections not rerun are kept.
"""
from configurator import UserError, configure, run, say, show  # first: no traceback on Ctrl-C
import contextlib
import glob
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import train
from finetune import read_papers
from model import (SHATTER, Context, EncoderConfig, Partition, SequenceClassifier, choose, count_parameters,
                   masked_sigmoid, masked_softmax, model_config, token_losses, transformers)
from prepare_data import load_meta, load_tokenizer, write_bytes

# the run
what = 'params,speed,memory,convergence,rank,partition'         # keys of WHAT
variants = 'original,pairwise,shared,shatter,gau'       # keys of VARIANTS, or all
out_dir = 'out/bench'           # for rows.jsonl, tables.md, plots and the runs of convergence
device = 'auto'                 # auto, cpu, cuda, cuda:1 or xla
dtype = 'auto'                  # auto (bfloat16 where it is faster), float32, bfloat16 or float16
threads = 1                     # CPU threads, for speed and memory; 0: one per core
# model size for speed and memory; gau has twice the layers
n_layer = 4                     # blocks
n_head = 4                      # heads; must divide n_embd
n_embd = 256                    # width
n_inner = 1024                  # width of the MLP
vocab_size = 30522              # BERT's, for variants without their own; convergence has its corpus's
position = 'absolute'           # for variants that do not set it; rope ...
dropout = 0.0                   # for speed and memory, of attention weights too; 0.1 in the papers
full_logits = False             # run the masked-LM head on all positions, not only on the predicted ones
# speed
modes = 'forward,train,finetune'        # keys of MODES
lengths = (128,)                # tokens per sequence
batches = (8,)                  # sequences per step, for memory too
rounds = 5                      # timed steps per system
warmup = 2                      # untimed steps before them
compile = False                 # use torch.compile
peers = 'all'                   # keys of PEERS (these need transformers), all or none
# memory
memory_lengths = (128, 256)     # tokens per sequence
# convergence
runs = ''                       # finished runs of train.py, folders or globs; empty: train the variants
recipe = 'config/compare.py'    # config file of train.py for all runs
steps = 300                     # per run, a tenth of them warmup
seeds = 2                       # runs per variant, with seeds from 1
eval_interval = 20              # steps between validations: the resolution of the curves
plateau = 0.1                   # the plateau ends this many nats below the unigram entropy
target_loss = 0.0               # count the steps to this validation loss, in nats; 0: do not
# rank, and pictures of attention
checkpoint = ''                 # checkpoints, run folders or globs; empty: the runs of convergence
rank_rows = 4                   # validation sequences whose attention is analysed
sentence = 'Return the sum of the elements along the given axis of an array.'   # to plot
# data
dataset = 'docstrings'          # folder below data_dir; if missing, config/data_DATASET.py prepares it
data_dir = 'data'               # parent folder of prepared corpora

LISTS = 'lengths', 'batches', 'memory_lengths'
LIMITS = {                      # knob: minimum, maximum
    **dict.fromkeys((*LISTS, 'rounds', 'warmup', 'steps', 'seeds', 'eval_interval', 'rank_rows'), (1, None)),
    **dict.fromkeys(('threads', 'plateau', 'target_loss'), (0, None)),
}
SIZES = ('n_layer', 'n_head', 'n_embd', 'n_inner')
SHAPES = {name: dict(zip(SIZES, sizes, strict=True)) for name, sizes in {       # of the papers
    'small': (4, 8, 512, 2048), 'base': (12, 12, 768, 3072), 'large': (24, 16, 1024, 4096)}.items()}
GAU = {'attention': 'gau', 'position': 'rope', 'norm': 'rms', 'bias': False, 'lm_head': 'decoder'}
GAUS = {                        # Liu 2022, tables 1 and 2
    'gau': GAU, **{f'gau_{name}': {**GAU, 'normaliser': name}
                   for name in ('softmax', 'squared_relu', 'scaled_squared_relu')},
    **{f'gau_{scale}': {**GAU, 'normaliser': 'squared_relu', 'relu_scale': scale}
       for scale in ('n2', 'n', 's2')},
}
XLNET = {'attention': 'xlnet', 'position': 'none'}
VARIANTS = {                    # the systems of the README -> knobs of train.py, or a vocabulary of their own
    'original': {}, 'symmetric': {'attention': 'symmetric'}, 'pairwise': {'attention': 'pairwise'},
    **{f'pairwise_rank_{r}': {'attention': 'pairwise', 'pair_rank': r} for r in (1, 2, 4, 8, 16, 32)},
    'shared': {'attention': 'shared'}, 'no_position': {'position': 'none'}, 'rpe': {'position': 'rpe'},
    'rab': {'position': 'rab'}, 'roformer_v1': {'position': 'rope'},
    'roformer_v2': {**GAU, 'attention': 'original'},
    **{name: {'attention': name, 'position': 'none'} for name in SHATTER},
    'shatter_recompute': {'attention': 'shatter', 'position': 'none', 'recompute': True},
    **GAUS, **{f'{name}_diff': {**knobs, 'packing': 'documents'} for name, knobs in GAUS.items()},
    'roformer_v1_50k': {'position': 'rope', 'vocab_size': 50_000},                  # Liu 2022, table 4
    'roformer_v2_12k': {**GAU, 'attention': 'original', 'vocab_size': 12_000},
    'gau_12k': {**GAU, 'vocab_size': 12_000},
    'xlnet': XLNET, 'xlnet_plm': {**XLNET, 'objective': 'plm'},
}
DEFAULTS = {key: vars(train)[key] for row in VARIANTS.values() for key in row if key != 'vocab_size'}
GROUPS = {                      # of parameters -> regex of names; first match wins
    'head': r'(head|pooler|classifier)\.|query_embedding$', 'norms': r'.*norm\.',
    'embedding': r'encoder\.(token|segment)\.',
    'position': r'encoder\.position\.|.*\.attention\.(part_embedding|distance|distance_bias)\b',
    'MLP': r'.*\.(expand|contract)\.', 'attention': r'.*\.attention\.',
}


# ---- systems and their training steps ----

def knobs_of(name, config):
    """Knobs of train.py for a variant at the sizes of `config`."""
    given = {**DEFAULTS, **{key: config[key] for key in ('position', *SIZES)}, **VARIANTS[name]}
    knobs = {key: given[key] for key in (*DEFAULTS, *SIZES)}            # without a vocabulary
    return {**knobs, 'n_layer': knobs['n_layer'] * (2 if knobs['attention'] == 'gau' else 1)}


def vocabulary(name, config):
    return VARIANTS.get(name, {}).get('vocab_size', config['vocab_size'])


class Peer(nn.Module):
    """A masked LM of transformers; `masked`: logits of predicted positions only, as in ours, else of all."""

    def __init__(self, kind, attention, masked, config, length):
        super().__init__()
        shape = getattr(transformers(), f'{kind}Config')(
            vocab_size=config['vocab_size'], max_position_embeddings=length, hidden_size=config['n_embd'],
            num_hidden_layers=config['n_layer'], num_attention_heads=config['n_head'],
            intermediate_size=config['n_inner'], hidden_dropout_prob=config['dropout'],
            attention_probs_dropout_prob=config['dropout'], attn_implementation=attention)
        self.model, self.masked = getattr(transformers(), f'{kind}ForMaskedLM')(shape), masked

    def forward(self, ids, positions, targets):
        if not self.masked:
            labels = torch.full_like(ids, -100).scatter(1, positions, targets)
            return self.model(input_ids=ids, labels=labels).loss
        x = self.model.base_model(ids).last_hidden_state
        x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return token_losses(self.model.cls(x), targets)


PEERS = {                       # name -> (model of transformers, its attention, masked)
    'hf_bert': ('Bert', 'sdpa', False), 'hf_bert_eager': ('Bert', 'eager', False),
    'hf_bert_masked': ('Bert', 'sdpa', True), 'hf_roformer': ('RoFormer', 'eager', False),
}


def masked_loss(model, ids, positions, targets):
    return model(ids, positions, targets).mean()


def full_loss(model, ids, positions, targets):
    """The same loss, from the logits of all positions."""
    logits = model(ids, torch.arange(ids.size(1), device=ids.device).expand_as(ids))
    labels = torch.full_like(ids, -100).scatter(1, positions, targets)          # the mean leaves -100 out
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def classify_loss(model, ids, positions, targets):
    return F.cross_entropy(model(ids).float(), torch.arange(len(ids), device=ids.device) % 2)


MODES = {                       # name -> (loss, model; None: the objective's, backward pass?)
    'forward': (masked_loss, None, False), 'train': (masked_loss, None, True),
    'finetune': (classify_loss, SequenceClassifier, True),              # Kowsher et al. 2024, figure 3
}


def build(name, config, length, mode='train'):
    """Model of a variant or peer at the sizes of `config`."""
    if name in PEERS:
        return Peer(*PEERS[name], config, length)
    knobs = {**knobs_of(name, config), 'block_size': length,
             **dict.fromkeys(('dropout', 'attention_dropout'), config['dropout'])}
    kind = MODES[mode][1] or train.OBJECTIVE[knobs['objective']][0]
    return kind(model_config(knobs, vocabulary(name, config)))


def make_rows(n, length, vocab_size, device):
    """(ids (n, length), positions (n, k), targets (n, k)) of random tokens."""
    generator, k = torch.Generator().manual_seed(1), math.ceil(0.15 * length - 1e-9)
    ids = torch.randint(vocab_size, (n, length), generator=generator)
    positions = torch.rand(n, length, generator=generator).argsort(1)[:, :k]
    return [x.to(device) for x in (ids, positions, ids.gather(1, positions))]


def make_step(name, mode, n, length, config, runtime):
    """A function that runs one step of a system in a mode on n random rows, and waits for the device."""
    loss, _, backward = MODES[mode]
    if config['full_logits'] and loss is masked_loss and name not in PEERS:
        loss = full_loss
    model = train.to_device(build(name, config, length, mode), runtime).train(backward)
    rows = make_rows(n, length, vocabulary(name, config), runtime.device)
    optimizer = train.make_optimizer(model, 1e-4, (0.9, 0.999), 1e-12, 0.01, runtime)
    if config['compile']:
        model.compile(dynamic=False)

    def step():
        with torch.set_grad_enabled(backward), runtime.autocast():
            value = loss(model, *rows)
        if backward:
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        runtime.sync(wait=True)                         # keep `value` alive: XLA drops unreferenced results
    return step


def is_out_of_memory(error):
    words = ('out of memory', "can't allocate memory", 'not enough memory')
    kinds = torch.OutOfMemoryError, MemoryError, BrokenProcessPool
    return isinstance(error, kinds) or any(word in str(error) for word in words)


def paper_rows(kind):
    """[(paper, words, value, source)] from results/papers.json; words: system and qualifiers."""
    return [(paper, *(part.strip() for part in row.split(';'))) for paper, book in read_papers().items()
            for row in book.get('bench', {}).get(kind, ())]


def printed(kind, system, *words, length=None):
    """Table cell of the papers' values for a system, from their rows that have all `words`, at this length.

    Rows without a length, a number, are for all. A system with its own vocabulary, as gau_12k, is gau.
    """
    cells, system = [], re.sub(r'_\d+k$', '', system)
    for paper, theirs, value, source in paper_rows(kind):
        name, *rest = theirs.split()
        lengths = [word for word in rest if word.isdigit()]
        if name == system and set(words) <= set(rest) and str(length) in (lengths or [str(length)]):
            cells.append(f"{value} ({' '.join([paper, *rest])}: {source})")
    return '; '.join(cells) or None


# ---- params ----

def params(config, runtime):
    """Parameters by group, of models with 512 positions, and what the papers print

    A paper's models have its shape and vocabulary; total includes what else it counts. counted: all of a
    masked LM, a classifier, or only the matrices of its blocks (Tian et al. 2021, table 1).
    """
    shapes = {**SHAPES, 'this run': {}}
    cases = [(name, shape, 'all', config['vocab_size'], 0, None, None)
             for shape in shapes for name in config['variants']]
    cases += [(*words.split(), value, f'{paper}: {source}') for paper, words, value, source
              in paper_rows('parameters')]
    for name, shape, counted, n_words, besides, value, source in cases:
        knobs = {**config, **shapes[shape], 'vocab_size': int(n_words)}
        knobs['position'] = 'absolute' if value else knobs['position']
        with torch.device('meta'):
            model = build(name, knobs, 512, 'finetune' if counted == 'classifier' else 'train')
        groups = dict.fromkeys(GROUPS, 0)
        for key, parameter in model.named_parameters():
            matrix = parameter.dim() > 1 and re.match(r'encoder\.(blocks\.|position\.table$)', key)
            if matrix or counted != 'matrices':
                groups[next(group for group in GROUPS if re.match(GROUPS[group], key))] += parameter.numel()
        yield {'shape': shape, 'system': name, 'counted': counted, **groups,
               'total': sum(groups.values()) + int(besides), 'printed': value, 'where, or why not': source}


# ---- speed ----

def time_systems(config, runtime, mode, n, length):
    """{system: list of seconds per round, or an error message}, for n sequences of a length."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 100          # systems share forward()
    steps, seconds = {}, {}
    for name in config['variants'] + (config['peers'] if MODES[mode][0] is masked_loss else []):
        try:
            step, seconds[name] = make_step(name, mode, n, length, config, runtime), []
            for _ in range(config['warmup']):
                step()
            steps[name] = step
        except Exception as error:                      # compilers raise many classes
            if not (config['compile'] or name in PEERS or is_out_of_memory(error)):
                raise
            seconds[name] = ' '.join(str(error).split())[:100]
    order = list(steps)
    for _ in range(config['rounds']):                   # in turn, so that other load affects all alike
        for name in order:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
        order = order[1:] + order[:1]                   # rotate who goes first
    return seconds


def speed(config, runtime):
    """Time of a step, all systems in turn

    ms, least, most: median, minimum and maximum over rounds. time / X: median over rounds of the ratio to the
    time of X in the same round.
    """
    for length, n, mode in itertools.product(config['lengths'], config['batches'], config['modes']):
        timings = time_systems(config, runtime, mode, n, length)
        for name, seconds in timings.items():
            row = {'mode': mode, 'rows': n, 'length': length, 'shape': config['shape'], 'system': name,
                   'compiled': config['compile'], 'ms': seconds}
            if isinstance(seconds, list):
                middle = float(np.median(seconds))
                row |= {'ms': 1000 * middle, 'least': 1000 * min(seconds), 'most': 1000 * max(seconds),
                        'tokens/s': n * length / middle}
                row |= {f'time / {base}': float(np.median(np.divide(seconds, timings[base])))
                        for base in ('original', 'gau', 'gau_12k', 'hf_bert')
                        if isinstance(timings.get(base), list)}
                row |= {'printed': printed('time', name, mode, length=length), 'seconds': seconds}
            yield row


# ---- memory ----

def peak_bytes(device, forget=False):
    """Peak bytes of the CUDA allocator, else resident in this process.  forget: reset the peak first"""
    if device.type == 'cuda':
        if forget:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == 'darwin':
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if forget:
        with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as file:
            file.write('5')                             # resets the peak, see man 5 proc
    with open('/proc/self/status') as file:             # ru_maxrss includes the parent's
        return 1024 * int(re.search(r'VmHWM:\s+(\d+) kB', file.read())[1])


def step_memory(name, n, length, config):
    """Peak MiB of two training steps, minus the memory before the model was built."""
    runtime = train.join(config['device'], config['dtype'], width=config['n_embd'])
    config = {**config, 'compile': False}
    torch.set_num_threads(config['threads'] or os.cpu_count())
    tiny = {**config, 'n_layer': 1, 'n_head': 4, 'n_embd': 64, 'vocab_size': 64}
    make_step(name, 'train', 1, 8, tiny, runtime)()     # loads libraries
    before = peak_bytes(runtime.device, forget=True)
    step = make_step(name, 'train', n, length, config, runtime)
    for _ in range(2):                                  # the first allocates the optimizer state
        step()
    return (peak_bytes(runtime.device) - before) / 2 ** 20


def in_fresh_process(*arguments):
    """step_memory(*arguments) in a new process; None if it runs out of memory."""
    with ProcessPoolExecutor(1, get_context('spawn')) as pool:
        try:
            return pool.submit(step_memory, *arguments).result()
        except Exception as error:
            if not is_out_of_memory(error):
                raise


def memory(config, runtime):
    """Memory of a training step at its peak

    MiB: CUDA allocator, else resident memory, in a new process, minus the value before the model was built;
    / gau: ratio to gau, or gau_12k; half: memory at half the length / memory at this length.
    """
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'      # glibc frees tensors at once: reproducible peaks
    cases = list(itertools.product(config['variants'], config['batches'], config['memory_lengths']))
    with ThreadPoolExecutor(1 if runtime.device.type == 'cuda' else os.cpu_count()) as pool:
        cells = dict(zip(cases, pool.map(lambda case: in_fresh_process(*case, config), cases), strict=True))
    del os.environ['MALLOC_MMAP_THRESHOLD_']
    for (name, n, length), mib in cells.items():
        gau = cells.get(('gau', n, length)) or cells.get(('gau_12k', n, length))
        half = cells.get((name, n, length // 2))
        yield {'rows': n, 'length': length, 'shape': config['shape'], 'system': name,
               'MiB': mib or 'out of memory', '/ gau': mib / gau if mib and gau else None,
               'half': half / mib if mib and half else None,
               'printed': printed('memory', name, length=length)}


# ---- convergence ----

def train_run(config, name, seed):
    """Run train.py, or resume an interrupted run; returns its folder."""
    folder = os.path.join(config['out_dir'], 'runs', f'{name}-{seed}')
    base = configure(dict(vars(train)), [config['recipe']])[0]
    knobs = {**knobs_of(name, {**base, 'position': config['position']}), 'seed': seed, 'out_dir': folder,
             'max_iters': config['steps'], 'warmup_iters': config['steps'] // 10, 'fill_samples': 0,
             'log_interval': config['eval_interval'],
             **{key: config[key] for key in ('eval_interval', 'dataset', 'data_dir', 'device', 'dtype')}}
    if os.path.exists(os.path.join(folder, 'run.json')):
        wanted = json.loads(json.dumps({**base, **knobs}))
        train.refuse_difference(folder, last_launch(folder)['config'], wanted, 'the run')
    words = [config['recipe'], *(f'--{key}={show(value)}' for key, value in knobs.items())]
    done = subprocess.run([sys.executable, train.__file__, *words], text=True,
                          capture_output=True, env={'OMP_NUM_THREADS': '1', **os.environ})
    end = (done.stderr.strip().splitlines() or [''])[-1] if done.returncode else 'finished'
    if done.returncode and 'not finite' not in end:                     # diverged runs are reported
        raise UserError(f'{folder}: train.py ended with status {done.returncode}: {end}')
    say(f'{name}, seed {seed}: {end}')
    return folder


def last_launch(folder):
    """The last entry of a run's run.json; its 'config' has the knobs."""
    with open(os.path.join(folder, 'run.json')) as file:
        return json.load(file)[-1]


def plateau_end(curve, level):
    """First step from which all losses in [[step, loss, accuracy], ...] stay below `level`, or None."""
    last = max((step for step, loss, _ in curve if loss is None or loss >= level), default=-1)
    return next((step for step, *_ in curve if step > last), None)


def read_run(folder, plateau, target):
    """Results of a run as a flat dict, with its curve.  system: name of the folder without the seed"""
    launch, lines = last_launch(folder), train.read_metrics(folder)
    config = launch['config']
    curve = [list(map(line.get, ('step', 'loss', 'accuracy'))) for line in lines if line['kind'] == 'val']
    if not curve:
        raise UserError(f'{folder}: its metrics.jsonl holds no validation')
    meta = load_meta(os.path.join(config['data_dir'], config['dataset']))
    with torch.device('meta'):
        model = train.OBJECTIVE[config['objective']][0](model_config(config, meta['vocab_size']))
    (last, loss, accuracy), left = curve[-1], plateau_end(curve, meta['unigram_entropy'] - plateau)
    finished = last == config['max_iters'] and loss is not None
    name = re.sub(rf"[-_]{config['seed']}$", '', os.path.basename(os.path.abspath(folder)))
    size, _, rest = name.partition('_')                                 # base_pairwise: pairwise, base
    words = (rest, size) if size in SHAPES else (name,)
    return {'system': name, 'parameters': count_parameters(model), 'steps': config['max_iters'],
            'unigram': meta['unigram_entropy'], 'processes': launch['world_size'], 'seed': config['seed'],
            'end': 'finished' if finished else f'at step {last}', 'loss': loss if finished else None,
            'accuracy, %': 100 * accuracy if finished else None, 'plateau': left,
            f'steps to {target:g}': plateau_end(curve, target) if target else None,
            'printed': printed('convergence', *words), 'curve': curve}


def convergence(config, runtime):
    """Validation losses of runs of train.py, over seeds

    Mean (standard deviation) of finished runs; "2 of 3": of the runs that have a value. plateau: first
    validation step from which the loss stays below the unigram entropy minus --plateau; steps to X: the same
    below --target_loss. Runs of one recipe and seed share data, order and masks, except _diff (one document
    per sequence) and plm (no masking).
    """
    folders = folders_of(config['runs'])
    if not folders:
        train.prepared(config['dataset'], config['data_dir'], runtime, make=True)
        jobs = itertools.product(range(1, config['seeds'] + 1), config['variants'])
        with ThreadPoolExecutor(1 if runtime.device.type == 'cuda' else os.cpu_count()) as pool:
            folders = list(pool.map(lambda job: train_run(config, job[1], job[0]), jobs))
    rows = [read_run(folder, config['plateau'], config['target_loss']) for folder in folders]
    points = [(row['system'], step, loss) for row in rows for step, loss, _ in row['curve']]
    labels, level = ('step', 'validation loss (nats per predicted token)'), rows[0]['unigram']
    train.plot(config['out_dir'], 'convergence', {'': points}, labels, level=('unigram entropy', level))
    yield from rows


# ---- attention of checkpoints ----

MATRICES = {                    # from scores (..., T, T).  Liu 2022, table 3; last: Tian et al. 2021, eq. 6
    'QK^T': lambda scores: scores, 'softmax': lambda scores: masked_softmax(scores, None),
    'relu^2': lambda scores: scores.relu().square(),
    'l2 sigmoid': lambda scores: masked_sigmoid(scores, None),
}
NORMALISERS = {torch.Tensor.softmax: 'softmax', torch.Tensor.relu: 'relu^2', F.logsigmoid: 'l2 sigmoid'}


class Scores(TorchFunctionMode):
    """Records the input of each layer's normaliser, position terms included: (key of MATRICES, scores)."""

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
    """[(key of MATRICES, scores (B, H, T, T) float64)] of the layers."""
    with Scores() as seen:
        model.eval().double().encoder(ids)
    size = model.config.query_size                      # squared_relu scales after relu
    return [(name, scores * size ** -0.5 if name == 'relu^2' else scores) for name, scores in seen.found]


@torch.no_grad()
def attention_maps(model, ids):
    """Attention weights (H, T, T) of each layer for ids (1, T); H counts parts in Shatter's variants."""
    maps = []
    for block, (name, scores) in zip(model.encoder.blocks, scores_of(model, ids), strict=True):
        a = MATRICES[name](scores)[0]
        if model.config.attention in SHATTER:           # whose query axis is reversed, see Partition
            a = (a * block.attention.partition(Context(model.encoder.position), scores)).flip(1)
        maps.append(a)
    return maps


def checkpoints_of(config, runtime):
    """Yield (label, model, corpus folder, meta) of --checkpoint, or of convergence's first seed."""
    folder, meta = train.prepared(config['dataset'], config['data_dir'], runtime, make=True)
    for source in folders_of(config['checkpoint'] or os.path.join(config['out_dir'], 'runs', '*-1')):
        path = source if source.endswith('.pt') else train.newest_checkpoint(source)
        if path is None:
            raise UserError(f'checkpoint={source!r}: no checkpoint there; --what=convergence makes some')
        model, *_ = train.load_pretrained(path, folder)
        label = os.path.basename(os.path.dirname(os.path.abspath(path)))
        yield label, train.to_device(model, runtime), folder, meta


def rank_and_zeros(matrix):
    """(mean of numerical rank / T, fraction of zeros) of matrices (..., T, T)."""
    length, size = matrix.size(-1), matrix.abs()
    ranks = torch.linalg.matrix_rank(matrix, rtol=length * torch.finfo(torch.float32).eps)
    zeros = size <= 1e-6 * size.amax((-2, -1), keepdim=True)
    return ranks.double().mean().item() / length, zeros.double().mean().item()


def rank(config, runtime):
    """Rank / T and sparsity of attention matrices of checkpoints, on validation rows of T tokens

    Mean over layers, heads and --rank_rows sequences; least and most: over the layers' mean ranks. Matrices
    are computed from the model's scores, position terms included. Rank: number of singular values above T
    eps(float32) times the largest. Zeros: entries up to a millionth of the largest; the paper gives no
    threshold. The plots show the attention of a sentence, for each layer and head or part.
    """
    for label, model, folder, meta in checkpoints_of(config, runtime):
        texts = train.PACKING['stream'](folder, meta, 'val', model.config.block_size)
        ids = torch.from_numpy(texts.get(np.arange(min(config['rank_rows'], len(texts))))).to(runtime.device)
        scores = scores_of(model, ids)
        for name, make in MATRICES.items():
            layers = np.array([rank_and_zeros(make(one)) for _, one in scores])         # (L, 2)
            yield {'checkpoint': label, 'T': ids.size(1), 'matrix': name, 'rank / T': layers[:, 0].mean(),
                   'least': layers[:, 0].min(), 'most': layers[:, 0].max(), 'zeros': layers[:, 1].mean(),
                   'printed': printed('rank', name), 'layers': layers.tolist()}
        draw_sentence(config, label, model, load_tokenizer(folder), meta['special'])


def draw_sentence(config, label, model, tokenizer, special):
    """Plot the attention of --sentence, for each layer and head, or part in Shatter."""
    ids = tokenizer.encode([config['sentence']])[0][:model.config.block_size - 2]
    ids = [special['cls'], *ids, special['sep']]
    words = [tokenizer.pieces[i] for i in ids]
    maps = attention_maps(model, torch.tensor([ids], device=model.encoder.token.weight.device))

    def draw(axis, weights):
        axis.imshow(weights, vmin=0, zorder=2)          # hides the grid
        axis.set_xticks(range(len(words)), words, fontsize=5, rotation=90)
        axis.set_yticks(range(len(words)), words, fontsize=5)

    panels = {f'layer {layer}, {head}; black: {weights.max():.2f}': weights.cpu().numpy()
              for layer, heads in enumerate(maps) for head, weights in enumerate(heads)}
    train.plot(config['out_dir'], f'attention_{label}', panels, ('key (token)', 'query (token)'), draw,
               max(4, len(maps[0])))


def partition(config, runtime):
    """Shatter's partition of unity in BERT-base: largest |sum - 1| of a layer.  Tian et al. 2021, figure 2"""
    base = EncoderConfig(**SHAPES['base'], attention='shatter', position='none')
    tables = [Partition(base, layer).table for layer in range(base.n_layer)]            # (H, 1023) each
    for layer, table in enumerate(tables):
        yield {'layer': layer, 'error': (table.sum(0) - 1).abs().max().item()}
    panels = {f'layer {layer}': table.T[383:640].numpy() for layer, table in enumerate(tables)}
    train.plot(config['out_dir'], 'partition', panels, ('distance (tokens)', 'share of each part'),
               lambda axis, shares: axis.plot(range(-128, 129), shares, 'k-', linewidth=0.8), 4)


# ---- tables ----

def cell(value):
    """A value as a table cell."""
    if isinstance(value, float) and abs(value) < 1000:
        return f'{value:.4g}'
    return '-' if pd.isna(value) else f'{value:,.0f}' if type(value) in (int, float) else show(value)


def mean_cell(values):
    """Cell for several runs: mean (standard deviation) of known numbers, the distinct strings of texts."""
    known = values.dropna()
    if known.empty or isinstance(known.iloc[0], str):
        return ', '.join(dict.fromkeys(known)) or None
    count = f', {len(known)} of {len(values)}' if len(known) < len(values) else ''
    return cell(float(known.mean())) + (f' ({known.std():.2g})' if len(known) > 1 else '') + count


def markdown(head, *rows):
    """Markdown of a section: command, title, table and note."""
    title, _, note = WHAT[head['section']].__doc__.partition('\n')
    flat = [{key: value for key, value in row.items() if key != 'section' and not isinstance(value, list)}
            for row in rows]
    frame = pd.DataFrame(flat, dtype=object).dropna(axis=1, how='all')
    if 'seed' in frame:                                 # one line for runs that differ only in seed
        same = list(frame)[:list(frame).index('seed')]
        frame = frame.astype({'seed': str}).groupby(same, sort=False).agg(mean_cell).reset_index()
    lines = [list(frame), *([cell(value) for value in line] for line in frame.itertuples(index=False))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[-1] = 3                                      # the last column may be long
    lines.insert(1, ['-' * width for width in widths])
    table = [' | '.join(map(str.ljust, line, widths)) for line in lines]
    return '\n'.join([head['made'], '', f'## {title}', '', *(f'| {line} |' for line in table), '',
                      ' '.join(note.split()), ''])


def made_by(runtime):
    """Command, machine, versions and date, as one line."""
    machine = train.device_name(runtime.device)
    with contextlib.suppress(OSError, TypeError), open('/proc/cpuinfo') as file:
        machine += f", {os.cpu_count()} cores of {re.search(r'model name.*: (.+)', file.read())[1]}"
    command = ' '.join(['python bench.py', *sys.argv[1:]])
    return (f'`{command}`; {machine}, {torch.get_num_threads()} thread(s); {str(runtime.dtype)[6:]}; '
            f"torch {torch.__version__}; {time.strftime('%Y-%m-%d')}")


# ---- main ----

WHAT = {                        # in running order: rank reads the runs of convergence
    'params': params, 'speed': speed, 'memory': memory, 'convergence': convergence, 'rank': rank,
    'partition': partition,
}


def folders_of(text):
    """Folders of comma-separated names and globs; a glob without a match is kept as it is."""
    return [folder for part in text.split(',') if part for folder in sorted(glob.glob(part)) or [part]]


def names_of(key, text, rows):
    """The keys of a table that a knob lists; every key for 'all'."""
    names = list(rows) if text == 'all' else list(dict.fromkeys(text.replace(' ', '').split(',')))
    for name in names:
        choose(key, name, rows)
    return names


def checked(config):
    """The knobs, with names split into lists.  Raises UserError for those that nothing else checks."""
    train.check_limits({**config, **{key: min(config[key], default=0) for key in LISTS}}, LIMITS)
    config = {**config, 'shape': ' x '.join(str(config[key]) for key in SIZES),
              'peers': [] if config['peers'] == 'none' else names_of('peers', config['peers'], PEERS)}
    for key, rows in (('what', WHAT), ('variants', VARIANTS), ('modes', MODES)):
        config[key] = names_of(key, config[key], rows)
    return config


def main():
    config, _ = configure(globals())
    runtime = train.join(device, dtype, width=n_embd)
    config = checked(config)
    torch.set_num_threads(threads or os.cpu_count())
    train.hold(out_dir)
    path, sections = os.path.join(out_dir, 'rows.jsonl'), {}
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for row in map(json.loads, file):
            sections.setdefault(row.get('section'), []).append(row)
    for name in (name for name in WHAT if name in config['what']):
        start = time.perf_counter()
        try:
            rows = list(WHAT[name](config, runtime))
        except torch.OutOfMemoryError:
            raise UserError(f'out of memory in {name}: fewer --rank_rows, or --device=cpu') from None
        head = {'made': made_by(runtime), 'seconds': time.perf_counter() - start, 'knobs': config}
        sections[name] = [{'section': name, **row} for row in (head, *rows)]
        print(markdown(*sections[name]), flush=True)
        kept = [sections[key] for key in WHAT if key in sections]
        write_bytes(path, ''.join(json.dumps(row) + '\n' for rows in kept for row in rows).encode())
        write_bytes(os.path.join(out_dir, 'tables.md'), '\n'.join(markdown(*rows) for rows in kept).encode())


if __name__ == '__main__':
    run(main)
