"""Pretraining on one device or many: masked or permuted language model.

    $ python train.py config/quickstart.py
    $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
    $ python train.py config/quickstart.py --fill="the [MASK] of a matrix"

A training step depends only on (weights, data, seed, step, samples drawn before it); they determine its
sequences, masks and dropout. So a resumed run repeats an uninterrupted one, bit for bit on the CPU.
"""
from configurator import ROOT, UserError, check_limits, configure, run, say, table  # first: quiet Ctrl-C
import atexit
import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map
from tqdm import tqdm

import prepare_data
from model import (EncoderConfig, MaskedLM, MultipleChoice, PermutationLM, SequenceClassifier, SpanClassifier,
                   choose, count_parameters, model_config, to_transformers, token_losses, training_flops)
from prepare_data import check_sizes, load_meta, load_tokenizer, need, progress, write_bytes

# the run
out_dir = 'out/run'             # checkpoints, metrics.jsonl, run.json and loss.png go here
init_from = 'auto'              # scratch, resume, auto (newest checkpoint or scratch), a checkpoint or a BERT
seed = 1                        # for weights, sample order, masks and dropout; below 2^63
fill = ''                       # a text with [MASK]: print the checkpoint's predictions and stop
export = ''                     # a folder: export the run, or init_from, there for transformers and stop
# data
dataset = 'docstrings'          # folder below data_dir; if missing, config/data_DATASET.py prepares it
data_dir = 'data'               # parent folder of prepared corpora
validation = ''                 # more folders below data_dir to validate on, comma-separated; e.g. ptb
block_size = 512                # tokens per sequence, including [CLS] and [SEP]
packing = 'stream'              # stream: joined documents cut to length; documents: one per sequence, padded
objective = 'mlm'               # mlm: masked; plm: permuted, needs attention = 'xlnet'
mask_fraction = 0.15            # fraction of the tokens that is predicted
whole_word = False              # predict all pieces of a word together
# model
attention = 'original'          # a key of model.py's ATTENTION: symmetric, pairwise, shared, shatter, gau ...
position = 'absolute'           # absolute, none, rope, rpe or rab; Shatter and xlnet require none
norm = 'layer'                  # layer, or rms without weights
lm_head = 'bert'                # bert, or decoder: the tied matrix alone
bias = True                     # biases of Linears and norms
pair_rank = 0                   # pairwise: rank of S, 0 for full
pair_init = 'identity'          # pairwise: initial S: identity, fan_in or normal
normaliser = 'softmax_plus'     # gau: softmax, softmax_plus, squared_relu or scaled_squared_relu
relu_scale = 'ns'               # squared_relu: n2, n, ns or s2
key_size = 128                  # gau: width of queries and keys
clip_distance = 128             # rpe: relative distances are clipped at +-(clip_distance - 1)
recompute = False               # Shatter: recompute weights in the backward pass to save memory
same_partition = False          # Shatter: all layers have the partition of the last layer
one_value_matrix = False        # Shatter but part_mask: no parts in the values, y = A v
n_layer = 12                    # blocks
n_head = 12                     # heads; must divide n_embd
n_embd = 768                    # width
n_inner = 3072                  # width of the MLP, usually 4 n_embd
dropout = 0.0                   # after embeddings and sublayers; 0.1 in the papers, 0 is faster
attention_dropout = 0.0         # of attention weights; 0.1 in the papers
# optimization
total_batch = 256               # sequences per optimizer step over all devices, split into micro-steps
batch_size = 32                 # sequences per device and micro-step at most; halve it if out of memory
max_iters = 200_000             # optimizer steps
learning_rate = 1e-4            # peak
min_lr = 0.0                    # final value of linear and cosine
warmup_iters = 10_000           # steps of linear warmup, at most max_iters
schedule = 'linear'             # linear, cosine, constant or thirds, after the warmup
beta1 = 0.9                     # of Adam
beta2 = 0.999                   # of Adam
adam_eps = 1e-12                # of Adam
weight_decay = 0.01             # on matrices; never on biases, norms and diagonals
grad_clip = 1.0                 # largest gradient norm; 0: no clipping
# evaluation, log and checkpoints
eval_interval = 1000            # steps between evaluations; 0: only at the end
eval_samples = 10_000           # validation sequences, a fixed random subset; 0: all
log_interval = 100              # steps between log lines
checkpoint_interval = 1000      # steps between checkpoints; 0: only at the end
keep_checkpoints = 2            # how many of the newest are kept
milestones = ()                 # steps whose checkpoints are never deleted, e.g. 1000,10000
fill_samples = 3                # held-out sentences to fill in at the end
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, cuda:1 (without torchrun), mps or xla
dtype = 'auto'                  # auto (bfloat16 where it is faster), float32, bfloat16 or float16
compile = 'auto'                # auto (on for CUDA), true or false
timeout = 600                   # seconds a process waits for another before all exit; 0: no limit

SCHEDULE = {                    # progress after the warmup, 0 to 1 -> fraction of (learning_rate - min_lr)
    'linear': lambda progress: 1 - progress,
    'cosine': lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    'constant': lambda progress: 1.0,
    'thirds': lambda progress: (1.0, 0.2, 0.02)[min(2, int(3 * progress))],    # 1e-4, 2e-5, 2e-6: Kowsher A.4
}
PEAK_FLOPS = {                  # device -> dense 16-bit FLOP/s, from the vendor's data sheets
    'NVIDIA H200': 989e12, 'NVIDIA H200 NVL': 835e12, 'NVIDIA H100 80GB HBM3': 989e12,
    'NVIDIA H100 NVL': 835e12, 'NVIDIA H100 PCIe': 756e12, 'NVIDIA A100': 312e12,
    'NVIDIA A100 80GB PCIe': 312e12, 'NVIDIA L40S': 362e12, 'NVIDIA L4': 121e12, 'NVIDIA A10': 125e12,
    'NVIDIA GeForce RTX 4090': 165e12,
}
LIMITS = {                      # knob: minimum, maximum (None: unlimited)
    'total_batch': (1, None), 'batch_size': (1, None), 'max_iters': (1, None), 'log_interval': (1, None),
    'keep_checkpoints': (1, None), 'seed': (0, 2 ** 63 - 1), 'warmup_iters': (0, None),
    'eval_interval': (0, None), 'eval_samples': (0, None), 'checkpoint_interval': (0, None),
    'fill_samples': (0, None), 'timeout': (0, None), 'learning_rate': (1e-12, None), 'min_lr': (0, None),
    'weight_decay': (0, None), 'grad_clip': (0, None), 'beta1': (0, 0.9999), 'beta2': (0, 0.999999),
    'adam_eps': (1e-30, None), 'block_size': (8, None), 'mask_fraction': (0.001, 0.999),
}
STYLE = {                       # of every plot; Paul Tol's high-contrast colours differ in grey too
    'axes.prop_cycle': "cycler(linestyle=['-', '--', ':', '-.']) * "
                       "cycler(marker=['o', 's', '^', 'D'], color=['k', '#bb5566', '#004488', '#ddaa33'])",
    'lines.markersize': 4, 'axes.grid': True, 'grid.alpha': 0.3, 'image.cmap': 'gray_r', 'font.size': 9,
    'legend.handlelength': 3, 'figure.constrained_layout.use': True, 'savefig.dpi': 120,
}
EVAL_ROWS = 256                 # rows whose validation masks are drawn together; the masks depend on it
CLOSED_CLASS = {'a', 'an', 'and', 'are', 'as', 'at', 'be', 'by', 'for', 'from', 'if', 'in', 'is', 'it', 'not',
                'of', 'on', 'or', 'that', 'the', 'this', 'to', 'with'}     # masked by show_sentences
HELD = []                       # keeps this process's lock file open
MAY_CHANGE = {'dropout', 'attention_dropout', 'n_label', 'pair_init', 'pooling', 'recompute'}   # model fields


# ---- rows are sequences [CLS] tokens [SEP], each read from its shard on demand, in constant memory ----

class StreamRows:
    """Sequences of block_size ids cut from a split's documents, which are joined by [SEP]."""
    padded = False

    def __init__(self, folder, meta, split, block_size):
        self.folder, self.special, self.dtype = folder, meta['special'], np.dtype(meta['dtype'])
        self.vocab_size, self.block_size, self.room = meta['vocab_size'], block_size, block_size - 2
        self.shards, self.segmented = meta['splits'][split], 'segmenter' in meta
        self.ends = np.cumsum([self.count(shard) for shard in self.shards])      # cumulative rows per shard
        if not len(self):
            raise UserError(f'{folder}: {split} holds less than one row of block_size={block_size}')

    def __len__(self):
        return int(self.ends.max(initial=0))

    def count(self, shard):
        """Number of rows in a shard; an incomplete last one is dropped."""
        return shard['tokens'] // self.room

    def span(self, number, index):
        """(first token, number of tokens) of row `index` of shard `number`."""
        return index * self.room, self.room

    def get(self, indices):
        """ids (len(indices), block_size) int64"""
        ids = np.full((len(indices), self.block_size), self.special['pad'], np.int64)
        lengths = self.read(indices, 'bin', self.dtype, ids)
        ids[:, 0] = self.special['cls']
        ids[np.arange(len(ids)), lengths + 1] = self.special['sep']
        return ids

    def word_starts(self, indices):
        """Word starts by the corpus's segmenter, (len(indices), block_size) bool; None without one."""
        starts = np.ones((len(indices), self.block_size), bool) if self.segmented else None
        if self.segmented:
            self.read(indices, 'words', np.dtype(np.uint8), starts)
        return starts

    def read(self, indices, ending, dtype, out):
        """Copy rows from the shards' .bin or .words files to out[:, 1:]; returns their lengths."""
        lengths = np.zeros(len(indices), int)
        for i, index in enumerate(indices):
            number = int(np.searchsorted(self.ends, index, side='right'))
            start, lengths[i] = self.span(number, int(index) - (int(self.ends[number - 1]) if number else 0))
            path = os.path.join(self.folder, f"{self.shards[number]['stem']}.{ending}")
            entries = np.fromfile(path, dtype, lengths[i], offset=start * dtype.itemsize)
            if len(entries) != lengths[i] or entries.max(initial=0) >= self.vocab_size:
                raise UserError(f'{path}: truncated, or ids beyond {self.vocab_size}')
            out[i, 1:lengths[i] + 1] = entries
        return lengths


class DocumentRows(StreamRows):
    """One document per row, padded; a long one fills several.  Liu 2022, variable lengths ("diff")."""
    padded = True
    COARSE = 1024               # documents per entry of `before`, the index for finding a row

    def __init__(self, *arguments):
        self.tables = []        # per shard: (document starts, memory-mapped; rows before each block)
        super().__init__(*arguments)

    def count(self, shard):
        starts = np.memmap(os.path.join(self.folder, f"{shard['stem']}.idx"), np.int64, 'r')
        rows = -(-(np.diff(starts) - 1) // self.room)                   # without the final [SEP]
        sums = np.cumsum(np.add.reduceat(rows, np.arange(0, len(rows), self.COARSE)))
        self.tables.append((starts, np.append(0, sums)))
        return int(rows.sum())

    def span(self, number, index):
        starts, before = self.tables[number]
        block = int(np.searchsorted(before, index, side='right')) - 1
        starts = starts[block * self.COARSE:(block + 1) * self.COARSE + 1]
        rows = -(-(np.diff(starts) - 1) // self.room)
        ends = before[block] + np.cumsum(rows)
        document = int(np.searchsorted(ends, index, side='right'))
        start = int(starts[document]) + (index - int(ends[document] - rows[document])) * self.room
        return start, min(self.room, int(starts[document + 1]) - 1 - start)


PACKING = {'stream': StreamRows, 'documents': DocumentRows}


# ---- batches: functions of (data, seed, step, samples drawn before it) ----

def shuffled(positions, n, seed, epoch):
    """Images of `positions` (integers below n) under a permutation of range(n) drawn from (seed, epoch).

    A Feistel network on an even number of bits, reapplied while the result is n or more (cycle walking).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(8, np.uint64)
    x = np.array(positions, np.uint64)
    walking = np.ones(len(x), bool)
    while walking.any():
        left, right = x[walking] >> half, x[walking] & low
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)           # 2^64 / golden ratio, mod 2^64
            mixed = (mixed ^ (mixed >> np.uint64(29))) * (key | np.uint64(1))
            left, right = right, left ^ (mixed >> np.uint64(32)) & low
        x[walking] = left << half | right
        walking = x >= n
    return x.astype(np.int64)


class Masker:
    """BERT's masking with static shapes.  Devlin et al. 2018, section 3.1

    In a row of n tokens without padding, the ceil(fraction n) with the smallest random scores are predicted:
    80 % become [MASK], 10 % a random token, 10 % are unchanged. Special tokens are neither chosen nor used as
    replacements. Every row has k = ceil(fraction T) positions; surplus ones have weight 0. With `word_start`
    (V,), whole words are chosen in the order of one random score per word; a word with more tokens than are
    still wanted is skipped, as in BERT.
    """

    def __init__(self, meta, block_size, fraction, word_start=None):
        self.fraction, self.word_start, self.special = fraction, word_start, meta['special']
        self.block_size, self.k = block_size, max(1, int(self.ceiling(block_size)))
        self.is_special = np.zeros(meta['vocab_size'], bool)
        self.is_special[list(self.special.values())] = True
        self.ordinary = np.flatnonzero(~self.is_special)

    def ceiling(self, n):
        return np.ceil(self.fraction * n - 1e-9).astype(int)                # so that 0.15 * 20 gives 3

    def draw(self, seed, step, n_rows):
        """Random numbers for n_rows: scores (n_rows, T), actions (n_rows, k), replacements (n_rows, k)."""
        rng = np.random.default_rng([seed, step])
        return (rng.random((n_rows, self.block_size), np.float32), rng.random((n_rows, self.k), np.float32),
                self.ordinary[rng.integers(0, len(self.ordinary), (n_rows, self.k))])

    def choose(self, ids, scores, starts):
        """Positions to predict, (B, k), and which of them count, (B, k) bool.  starts (B, T) bool or None"""
        special = self.is_special[ids]
        wanted = np.minimum(self.ceiling((ids != self.special['pad']).sum(1)), (~special).sum(1))   # (B,)
        if self.word_start is None:
            positions = np.argsort(np.where(special, 2, scores), axis=1, kind='stable')[:, :self.k]
        else:
            starts = self.word_start[ids].astype(bool) if starts is None else starts
            positions = np.zeros((len(ids), self.k), int)
            for i in range(len(ids)):
                positions[i], wanted[i] = whole_words(starts[i], special[i], scores[i], wanted[i], self.k)
        return positions, np.arange(self.k) < wanted[:, None]

    def apply(self, ids, scores, actions, replacements, starts=None):
        """ids (B, T) -> {'ids' (B, T), 'positions', 'targets' (B, k) int64, 'weights' (B, k) float32}"""
        positions, chosen = self.choose(ids, scores, starts)
        targets = np.take_along_axis(ids, positions, axis=1)
        shown = np.where(actions < 0.8, self.special['mask'], np.where(actions < 0.9, replacements, targets))
        inputs = ids.copy()
        np.put_along_axis(inputs, positions, np.where(chosen, shown, targets), axis=1)
        return {'ids': inputs, 'positions': positions, 'targets': targets,
                'weights': chosen.astype(np.float32)}


class Permuter(Masker):
    """XLNet's permutation with static shapes.  Yang et al. 2019, sections 2.2 and 2.3

    Tokens are chosen as in Masker, but the input is not masked. 'order' (B, T) int64 is each token's place in
    the permutation: 0 for special tokens, then unchosen tokens by score, then chosen ones.
    """

    def apply(self, ids, *arguments):
        batch, special, last = super().apply(ids, *arguments), self.is_special[ids], np.zeros(ids.shape, bool)
        np.put_along_axis(last, batch['positions'], batch['weights'] > 0, axis=1)
        scores = np.where(special, -1, arguments[0] + 2 * last)
        rank = np.argsort(np.argsort(scores, axis=1, kind='stable'), axis=1)
        return {**batch, 'ids': ids, 'order': np.where(special, 0, rank + 1)}


OBJECTIVE = {'mlm': (MaskedLM, Masker), 'plm': (PermutationLM, Permuter)}
KINDS = {                       # objective of train.py or head of finetune.py -> class of the model
    'mlm': MaskedLM, 'plm': PermutationLM, 'classify': SequenceClassifier, 'regress': SequenceClassifier,
    'choose': MultipleChoice, 'span': SpanClassifier,
}


def whole_words(starts, special, scores, wanted, k):
    """(k positions of a row, number of them that count): tokens of whole words first, at most `wanted`.

    starts, special, scores  (T,); special tokens and the tokens after them start words
    """
    starts = starts | special
    starts[1:] |= special[:-1]
    firsts = np.append(np.flatnonzero(starts), len(starts))
    taken = []
    for word in np.argsort(np.where(special[firsts[:-1]], 2, scores[:len(firsts) - 1]), kind='stable'):
        if len(taken) == wanted or special[firsts[word]]:
            break
        if len(taken) + firsts[word + 1] - firsts[word] <= wanted:
            taken += range(firsts[word], firsts[word + 1])
    others = np.setdiff1d(np.arange(len(starts)), taken)
    return np.concatenate([np.array(taken, int), others])[:k], len(taken)


class Loader:
    """Batch of each step.  `share` is this rank's slice of the global batch; masks are drawn for all of it.

    total_batch  rows of the global batch
    limit        0: every row once per epoch, in an order drawn from (seed, epoch); n: only its first n rows
    offset       offset + s total_batch samples precede step s; nonzero if resumed with another total_batch
    """

    def __init__(self, rows, masker, seed, total_batch, share, limit=0, offset=0):
        self.rows, self.masker, self.seed, self.offset = rows, masker, seed, offset
        self.total_batch, self.share, self.limit = total_batch, share, min(limit, len(rows))

    def indices(self, step):
        """Indices in the corpus of this rank's rows of a step."""
        positions = self.offset + step * self.total_batch + np.arange(self.total_batch)[self.share]
        if self.limit:
            positions = positions[positions < self.limit]
        epochs, positions = np.divmod(positions, len(self.rows))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            positions[here] = shuffled(positions[here], len(self.rows), self.seed, int(epoch))
        return positions

    def batch(self, step):
        """{'ids', 'positions', 'targets', 'weights'[, 'order'][, 'attention_mask']} of this rank, arrays."""
        indices = self.indices(step)
        ids = self.rows.get(indices)
        draws = self.masker.draw(self.seed, step, self.total_batch)
        starts = None if self.masker.word_start is None else self.rows.word_starts(indices)
        batch = self.masker.apply(ids, *(draw[self.share][:len(ids)] for draw in draws), starts)
        if self.rows.padded:
            batch['attention_mask'] = ids != self.rows.special['pad']
        return batch


def prefetch(make, steps):
    """Yield make(step) for each step; a background thread is two steps ahead."""
    waiting = deque()
    with ThreadPoolExecutor(1) as pool:
        for step in steps:
            waiting.append(pool.submit(make, step))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def micro_batches(batch, size, device):
    """Split a rank's batch into parts of at most `size` rows, as tensors on `device`."""
    pinned = device.type == 'cuda'                      # copies from pinned memory are asynchronous
    tensors = {key: torch.from_numpy(value) for key, value in batch.items()}
    tensors = {key: (value.pin_memory() if pinned else value).to(device, non_blocking=pinned)
               for key, value in tensors.items()}
    n = len(batch['ids'])
    n_parts = -(-n // size)
    parts = [slice(n * i // n_parts, n * (i + 1) // n_parts) for i in range(n_parts)]
    return [{key: value[part] for key, value in tensors.items()} for part in parts]


# ---- Runtime: devices and processes ----
# XLA, for TPUs, traces lazily: sync() compiles the traced operations as one graph, caches and runs it. A
# Python scalar is a constant of the graph, so a new value recompiles it; a tensor is an input.

@dataclass
class Runtime:
    """Where this process runs: its device and precision, and its place among those that torchrun started."""
    device: torch.device
    dtype: torch.dtype = torch.float32
    rank: int = 0
    world: int = 1
    local: int = 0              # rank on its machine
    host: object = None         # gloo group for values on the CPU; None: no other process

    @property
    def main(self):
        return self.rank == 0

    @property
    def is_xla(self):
        return self.device.type == 'xla'

    def share(self, n):
        """This rank's slice of n rows; sizes differ by at most one, on XLA (one graph) not at all."""
        if self.is_xla and n % self.world:
            raise UserError(f"device='xla': {n} rows a step on {self.world} processes: choose a multiple")
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)

    def sum(self, *numbers):
        """Each number, on the CPU, summed over the ranks, as floats."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self.host is not None:
            dist.all_reduce(tensor, group=self.host)
        return tensor.tolist()

    def gather(self, value):
        """The values of all ranks, on every rank."""
        values = [value]
        if self.host is not None:
            values = [None] * self.world
            dist.all_gather_object(values, value, self.host)
        return values

    def autocast(self):
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype) if half else contextlib.nullcontext()

    def input(self, number):
        """A number that changes between steps; on XLA shape (1,), as equal scalars would share an input."""
        return torch.tensor([number], device=self.device) if self.is_xla else number

    def sync(self, wait=False):
        """On XLA, compile and run what was traced.  wait: block until the device has finished"""
        if self.is_xla:
            import torch_xla
            torch_xla.sync(wait)
        elif wait and self.device.type != 'cpu':
            torch.accelerator.synchronize()

    def wrap(self, model):
        """The model, wrapped in DistributedDataParallel if there are several ranks."""
        if self.host is None:
            return model
        return DistributedDataParallel(model, gradient_as_bucket_view=self.is_xla)


def join(device, dtype, timeout=0, group=True, width=0):
    """Runtime of this process; joins torchrun's process group if there is one.  Raises UserError.

    timeout  seconds to wait for other processes before giving up; 0: no limit
    group    False: take rank and world from torchrun, but join no group: processes work independently
    width    n_embd of the model; dtype = 'auto' depends on it
    """
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    found, host = find_device(device, world, local), None
    is_xla = found.type == 'xla'
    if group and world > 1:
        limit = timedelta(seconds=timeout or 10 ** 8)
        backend = {'cuda': 'nccl', 'xla': 'xla'}.get(found.type, 'gloo')
        dist.init_process_group(backend, 'xla://' if is_xla else None, limit)
        if dist.get_world_size() != world:              # XLA has its own count
            raise UserError(f"device='xla': torch_xla sees {dist.get_world_size()} process(es), torchrun "
                            f'started {world}; --nproc_per_node must be the TPU devices of a machine')
        rank, host = dist.get_rank(), dist.new_group(backend='gloo', timeout=limit)
    if is_xla:                                          # made after the group, before any backward pass
        found = torch.zeros(1, device=found).device
    return Runtime(found, choose_dtype(dtype, found, width), rank, world, local, host)


def find_device(device, world, local):
    """torch.device of a process; local is its number on this machine.  Raises UserError."""
    if device == 'auto':
        accelerator = 'mps' if torch.backends.mps.is_available() else 'cpu'
        device = 'cuda' if torch.cuda.is_available() else accelerator
    if world > 1 and ':' in device:
        raise UserError(f"device={device!r}: torchrun gives each process its own; say {device.split(':')[0]}")
    try:
        found = torch.device('cuda', local) if device == 'cuda' else torch.device(device)
        if found.type == 'xla':
            import torch_xla.distributed.xla_backend  # noqa: F401
        elif found.type in ('cpu', 'cuda', 'mps'):
            torch.zeros(1, device=found)
        else:
            raise RuntimeError('nothing here trains on it')
    except ImportError:
        command = "pip install torch==2.9.1 'torch_xla[tpu]==2.9.0'"
        raise UserError(f"device='xla' needs torch_xla: {command}") from None
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'device={device!r}: {reason}; choose auto, cpu, cuda, mps or xla') from None
    if found.type == 'cuda':
        torch.cuda.set_device(found)
        torch.set_float32_matmul_precision('high')      # TF32 for float32 matmuls
    return found


def choose_dtype(dtype, device, width):
    """torch dtype of a model's forward pass; 'auto' is bfloat16 where it is faster, else float32.

    Faster: on CUDA devices from Ampere on; on CPUs with bfloat16 matrix units (Intel's AMX) if a model is at
    least 256 wide, see results/dtype/README.md.
    """
    if dtype == 'auto':
        fast = device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (8, 0)
        if device.type == 'cpu' and width >= 256 and hasattr(torch.cpu, 'get_capabilities'):    # newer torch
            fast = torch.cpu.get_capabilities().get('amx_bf16')
        dtype = 'bfloat16' if fast else 'float32'
    if dtype == 'float16' and device.type == 'xla':
        raise UserError("dtype='float16': device='xla' computes in bfloat16 and float32")
    return choose('dtype', dtype, {name: getattr(torch, name) for name in ('float32', 'bfloat16', 'float16')})


def leave(runtime, status=0):
    """End a run; the processes of a group end together, skipping interpreter shutdown."""
    if runtime.host is not None:                        # PyTorch's threads may hang there: pytorch#190489
        dist.barrier(runtime.host)                      # no rank exits while another communicates
        dist.destroy_process_group()
        atexit._run_exitfuncs()                         # handlers of wandb, torch_xla
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


def to_device(model, runtime):
    """Move a model.  `recompute` is off on XLA, which does it itself; torch.utils.checkpoint fails there."""
    for module in model.modules() if runtime.is_xla else ():
        if hasattr(module, 'recompute'):
            module.recompute = False
    return model.to(runtime.device)


def to_host(tree, runtime):
    """Copy the tensors of a nested structure to the CPU if they are on XLA."""
    return tree_map(lambda x: x.cpu() if torch.is_tensor(x) else x, tree) if runtime.is_xla else tree


def compilations(runtime):
    """{'compiled': number of graphs so far} on XLA, else {}; should soon stop growing."""
    if not runtime.is_xla:
        return {}
    import torch_xla.debug.metrics
    return {'compiled': torch_xla.debug.metrics.counter_value('UncachedCompile') or 0}


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{device} {platform.machine()}'


def peak_flops(runtime):
    """Data-sheet FLOP/s of a CUDA device in 16 bits, or None."""
    name = device_name(runtime.device).partition('-')[0]            # NVIDIA A100-SXM4-80GB
    return None if runtime.dtype == torch.float32 else PEAK_FLOPS.get(name)


def compiled(model, wanted, batch, batch_size, runtime):
    """torch.compile(model), tested forward and backward on a micro-batch; the plain model if that fails."""
    on_cuda = runtime.device.type == 'cuda'
    if not choose('compile', wanted.lower(), {'auto': on_cuda, 'true': True, 'false': False}):
        return model
    part = micro_batches(batch, batch_size, runtime.device)[0]
    part.pop('weights', None)
    try:
        fast = torch.compile(model)
        with runtime.autocast():
            losses = fast(**part)
        losses.sum().backward()
        return fast
    except torch.OutOfMemoryError:
        raise
    except Exception as error:                          # of many kinds: no compiler, unknown device, ...
        say(f'torch.compile fails here, running without it: {str(error).strip().splitlines()[0]}')
        return model
    finally:
        model.zero_grad(set_to_none=True)


# ---- one step ----

def make_optimizer(model, lr, betas, eps, weight_decay, runtime):
    """AdamW, fused if possible; weight decay on parameters of two or more dimensions, also pairwise's S."""
    groups = [{'params': [p for p in model.parameters() if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}]
    fused = {'fused': runtime.device.type in ('cuda', 'cpu')}
    kernel = {'capturable': True, 'foreach': False} if runtime.is_xla else fused
    return torch.optim.AdamW(groups, runtime.input(lr), betas, eps, **kernel)


def get_lr(step, peak, low, warmup, total, schedule):
    """Learning rate of update `step`, from 0: linear warmup to the peak, then SCHEDULE towards `low`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    assert 0 <= progress <= 1, f'step {step} lies outside a schedule of {total} steps'
    return low + (peak - low) * SCHEDULE[schedule](progress)


def set_lr(optimizer, lr, runtime):
    for group in optimizer.param_groups:
        group['lr'] = runtime.input(lr)


def seed_step(seed, step, runtime):
    """Seed torch for a step: dropout depends only on (seed, step, rank), not on earlier steps."""
    number = int(np.random.SeedSequence([seed, step, runtime.rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    if runtime.is_xla:                                  # XLA has its own generator
        import torch_xla
        torch_xla.manual_seed(number)


def update(model, optimizer, scaler, parts, count, grad_clip, runtime):
    """One optimizer step on this rank's micro-batches; returns its part of the loss and the gradient norm.

    count  predicted tokens of the step over all ranks and micro-batches: the loss is their mean
    Both results are tensors: no host sync here. On XLA the step runs at the next runtime.sync().
    """
    total, count = torch.zeros(1, device=runtime.device), runtime.input(max(1.0, count))
    for i, part in enumerate(parts):
        weights = part.pop('weights')                               # (b, k)
        silent = runtime.host is not None and i < len(parts) - 1    # DDP all-reduces once per step
        with model.no_sync() if silent else contextlib.nullcontext():
            with runtime.autocast():
                losses = model(**part)
            loss = (losses * weights).sum() / count
            scaler.scale(loss * runtime.world).backward()           # DDP divides by the number of ranks
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return total[0], norm


class Health:
    """Tracks on the device whether losses and gradient norms are finite; look() copies it to the host.

    Only float16 may have non-finite norms: GradScaler skips such steps while it adapts the scale.
    """

    def __init__(self, runtime):
        self.runtime, self.scaler = runtime, None
        self.last = torch.zeros(3, device=runtime.device)       # loss, norm, steps since the first bad

    def add(self, loss, norm, scaler):
        """Record a step, without a host sync."""
        finite = loss.isfinite() if scaler.is_enabled() else loss.isfinite() & norm.isfinite()
        bad = self.last[2] + ((self.last[2] > 0) | ~finite)
        self.last, self.scaler = torch.stack([loss, norm, bad]), scaler

    def look(self, step, where):
        """(loss summed over the ranks, gradient norm) of the last step, which was `step`, as numbers.

        Raises the same UserError on all ranks if any had a non-finite step.  where: name of the run
        """
        losses, norms, bad = zip(*self.runtime.gather(self.last.tolist()), strict=True)
        if any(bad):
            first = step + 1 - int(max(bad))
            raise UserError(f'{where}: loss or gradient norm of step {first} is not finite; no checkpoint '
                            'has it; try a lower learning_rate')
        if self.scaler and self.scaler.is_enabled() and self.scaler.get_scale() <= 1:
            raise UserError(f'{where}: float16 found no scale with finite gradients up to step {step}; try a '
                            "lower learning_rate, or dtype='bfloat16'")
        return sum(losses), norms[0]


@torch.no_grad()
def evaluate(model, loader, batch_size, runtime, stop=()):
    """Loss (nats), accuracy and perplexity per masked token, over all ranks and a Loader with a limit.

    stop  list of caught signals, checked after each batch; returns None if any rank has one
    """
    model.eval()
    number = torch.float32 if runtime.device.type == 'mps' else torch.float64
    sums = torch.zeros(3, dtype=number, device=runtime.device)      # loss, hits, tokens
    for batch in prefetch(loader.batch, range(-(-loader.limit // loader.total_batch))):
        for part in micro_batches(batch, batch_size, runtime.device):
            weights, targets = part.pop('weights'), part.pop('targets')
            with runtime.autocast():
                logits = model(**part)                              # (b, k, V)
            losses = token_losses(logits, targets) * weights
            hits = (logits.argmax(-1) == targets) * weights
            sums += torch.stack([losses.sum(), hits.sum(), weights.sum()])
            runtime.sync()
        if any(runtime.sum(len(stop))):
            return None
    model.train()
    loss, hits, tokens = runtime.sum(*sums.tolist())
    loss, accuracy = loss / max(1, tokens), hits / max(1, tokens)
    return {'loss': loss, 'accuracy': accuracy, 'perplexity': math.exp(min(loss, 700))}


# ---- checkpoints: tensors and plain Python, in torch.save's zip archive ----

def checkpoint_name(step):
    return f'ckpt_{step:07d}.pt'


def checkpoints(folder):
    """{step: path} of a run's checkpoints, oldest first; other file names are ignored."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = [int(name[5:-3]) for name in names if re.fullmatch(r'ckpt_\d{7,}\.pt', name)]
    return {step: os.path.join(folder, checkpoint_name(step)) for step in sorted(steps)}


def write_checkpoint(path, content):
    """Write a checkpoint atomically.  Raises UserError on failure; an existing file is then unchanged."""
    temporary = path + '.tmp'
    try:
        with open(temporary, 'wb') as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        system = error if isinstance(error, OSError) else error.__context__     # torch.save hides it
        if not isinstance(system, OSError):
            raise
        raise UserError(f'{path}: cannot be written: {system.strerror}; those before it are intact') from None


def read_checkpoint(path):
    """Content of a checkpoint.  Raises UserError when it is missing, damaged or no checkpoint."""
    try:
        with open(path, 'rb') as file, zipfile.ZipFile(file) as archive:
            if archive.testzip():                       # name of a member with a wrong CRC-32
                raise zipfile.BadZipFile
        content = torch.load(path, map_location='cpu', weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(f'{path}: cannot be read: {error.strerror}') from None
    except Exception:                                   # a flipped bit may raise any exception
        raise UserError(f'{path}: damaged, or not a checkpoint: tensors and plain Python alone') from None
    if not isinstance(content, dict) or 'lm_head' not in content.get('model_config', {}):
        raise UserError(f'{path}: of an earlier version, with other names and order of parameters')
    return content


def load_pretrained(source, folder=''):
    """(model in eval mode, tokenizer, content of the checkpoint with its `path`).  Raises UserError.

    folder  parent of tokenizer/; '': the checkpoint's folder or, if that has none, the corpus of its run
    """
    trial = os.path.join(source, 'model.pt')
    path = source if source.endswith('.pt') else trial if os.path.exists(trial) else newest_checkpoint(source)
    if path is None:
        raise UserError(f'{source}: no checkpoint there')
    content = read_checkpoint(path)
    knobs = content['config']
    kind = content.get('head', knobs.get('objective'))
    if kind is None:
        raise UserError(f'{path}: fine-tuned by an earlier finetune.py, which did not store the task')
    own = os.path.dirname(path) or '.'
    corpus = os.path.join(knobs.get('data_dir', ''), knobs.get('dataset', ''))
    places = [*filter(None, [folder] if folder else [own, corpus])]
    folder = next((place for place in places if os.path.isdir(os.path.join(place, 'tokenizer'))), None)
    if folder is None:
        raise UserError(f"{path}: no tokenizer/ in {' or '.join(places)}; copy that of its corpus there")
    ours = {'tokenizer': prepare_data.tokenizer_identity(folder)}
    refuse_difference(path, {**ours, **content['data']}, ours, 'the data')
    with torch.random.fork_rng(()):                     # initial weights draw none of the caller's numbers
        model = KINDS[kind](EncoderConfig(**content['model_config']))
    model.load_state_dict(content['model'])
    return model.eval(), load_tokenizer(folder), {**content, 'path': path}


def load(path):
    """(model in eval mode, tokenizer) of a run or checkpoint of train.py, or of a trial of finetune.py.

    The tokenizer has encode(texts), decode(ids), pieces and special: see TOKENIZERS in prepare_data.py.
    """
    return load_pretrained(str(path))[:2]


def checkpoint_identity(path):
    """Short digest of a checkpoint, from the checksums in its archive's table of contents."""
    try:
        with zipfile.ZipFile(path) as archive:
            sums = [(part.file_size, part.CRC) for part in archive.infolist()]
    except (OSError, zipfile.BadZipFile):
        raise UserError(f'{path}: missing, damaged, or not a checkpoint') from None
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def newest_checkpoint(folder):
    """Path of the newest good checkpoint, or None; damaged ones are named on stderr."""
    paths = checkpoints(folder).values()
    for path in reversed(paths):
        try:
            read_checkpoint(path)
            return path
        except UserError as error:
            say(f'{error}; taking the one before')
    if paths:
        raise UserError(f'{folder}: every checkpoint is damaged; start again in another out_dir')
    return None


def start_from(init_from, out_dir, runtime):
    """(checkpoint or BERT to start from, its content); (None, {}) for random weights.  Raises UserError."""
    own, newest = init_from in ('auto', 'resume'), max(checkpoints(out_dir), default=-1)
    seen = {checkpoint_name(step) if step >= 0 else 'none' for step in runtime.gather(newest)}
    if len(seen) > 1:
        raise UserError(f"{out_dir}: the newest checkpoint is {' here and '.join(sorted(seen))} there; "
                        'out_dir must be a folder that all machines share')
    source = None if own or init_from == 'scratch' else init_from
    if runtime.main and init_from != 'scratch':
        source = newest_checkpoint(out_dir if own else init_from) or source
    source = runtime.gather(source)[0]
    if init_from == 'resume' and source is None:
        raise UserError(f"init_from='resume': no checkpoint in {out_dir}")
    content = read_checkpoint(source) if source and source.endswith('.pt') else {}
    if source and not content:                          # the keys of a checkpoint that a BERT has
        bert = MaskedLM.from_pretrained(source)
        content = {'model': bert.state_dict(), 'model_config': asdict(bert.config),
                   'config': {'objective': 'mlm'}}
    if not own and newest > content.get('step', -1):
        raise UserError(f'init_from={init_from!r}: {out_dir} holds {checkpoint_name(newest)}; go on from it '
                        'with --init_from=resume, or choose another --out_dir')
    return source, content


def hold(folder):
    """Lock `folder` against a second run; the operating system frees the lock when the process ends."""
    if not folder:
        raise UserError("out_dir='': name a folder, as in --out_dir=out/run")
    HELD.clear()                                        # a process has one run at a time
    os.makedirs(folder, exist_ok=True)
    HELD.append(open(os.path.join(folder, 'lock'), 'a'))                # noqa: SIM115, it stays open
    try:
        import fcntl
        fcntl.flock(HELD[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f'{folder}: in use by another run; end that, or choose another --out_dir') from None
    except (ImportError, OSError):                      # Windows, and file systems without locks
        say(f'{folder} cannot be locked here: start no second run in it')


def refuse_difference(where, stored, ours, what):
    """Raise a UserError naming the first key of `ours` whose value in `stored` differs."""
    for key, value in ours.items():
        if stored.get(key) != value:
            raise UserError(f'{where}: {what} differs: {key} is {stored.get(key)!r} there and {value!r} here')


# ---- log ----

def tell(text):
    """Print on stdout, above a progress bar.  A closed pipe (`| head`) ends the run as SIGTERM does."""
    try:
        with tqdm.external_write_mode(nolock=True):
            print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        signal.raise_signal(signal.SIGTERM)


class Log:
    """Logs to stdout, metrics.jsonl and optionally Weights & Biases; only on rank 0."""

    def __init__(self, folder, step, runtime, project, config):
        self.main, self.path, self.wandb = runtime.main, os.path.join(folder, 'metrics.jsonl'), None
        if self.main:
            kept = [line for line in read_metrics(folder) if step and line['step'] <= step]
            write_bytes(self.path, ''.join(json.dumps(line) + '\n' for line in kept).encode())
        if self.main and project:                       # finetune.py starts a wandb run per trial
            self.wandb = need('wandb', 'wandb_project').init(
                project=project, name=os.path.basename(folder), config=config, reinit='finish_previous')

    def write(self, kind, step, text, **values):
        if not self.main:
            return
        tell(text)
        finite = {key: value for key, value in values.items() if value is None or math.isfinite(value)}
        with open(self.path, 'a') as file:
            file.write(json.dumps({'kind': kind, 'step': step, **finite}) + '\n')
        if self.wandb:
            self.wandb.log({f'{kind}/{key}': value for key, value in values.items()}, step=step)


def read_metrics(folder):
    """Lines of a run's metrics.jsonl as dicts; truncated or damaged lines are skipped."""
    lines, path = [], os.path.join(folder, 'metrics.jsonl')
    with contextlib.suppress(FileNotFoundError), open(path, encoding='utf-8', errors='replace') as file:
        for text in file:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                line = json.loads(text)
                lines += [line] if line['kind'] in ('train', 'val') and line['step'] >= 0 else []
    return lines


def catch_signals():
    """From now on SIGTERM, SIGINT and SIGHUP only append their numbers to the returned list.

    A second Ctrl-C kills the process, except under torchrun, whose processes receive the first one twice.
    """
    caught = []

    def catch(number, frame):
        caught.append(number)
        if number == signal.SIGINT and 'RANK' not in os.environ:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, 'SIGHUP', signal.SIGTERM)):
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:       # nohup ignores SIGHUP
            signal.signal(number, catch)
    return caught


def log_line(step, total, seconds, values):
    """Text of a log line.  seconds: per step"""
    mfu = 'n/a' if values['mfu'] is None else f"{values['mfu']:.1%}"
    graphs = f", {values['compiled']} graphs" if 'compiled' in values else ''
    left = timedelta(seconds=int((total - step) * seconds))
    return (f"step {step}/{total}: loss {values['loss']:.4f}, lr {values['lr']:.2e}, "
            f"norm {values['norm']:.2f}, {values['tokens_per_second']:,.0f} tokens/s, mfu {mfu}, "
            f'eta {left}{graphs}')


def write_manifest(folder, config, data, runtime):
    """Append this launch to run.json: command, revision, versions, device, data and knobs."""
    path, launches, revision = os.path.join(folder, 'run.json'), [], None
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, RecursionError), open(path) as file:
        launches += [launch for launch in json.load(file) if 'config' in launch]
    with contextlib.suppress(OSError):                  # git may not be installed
        revision = subprocess.run(['git', '-C', ROOT, 'describe', '--always', '--dirty', '--abbrev=40'],
                                  capture_output=True, text=True).stdout.strip()
    launches.append({
        'argv': sys.argv, 'date': time.strftime('%Y-%m-%dT%H:%M:%S%z'), 'revision': revision,
        'world_size': runtime.world, 'device': device_name(runtime.device), 'data': data, 'config': config,
        'python': platform.python_version(), 'torch': torch.__version__, 'numpy': np.__version__})
    write_bytes(path, json.dumps(launches, indent=1).encode())


def draw_curves(axis, points):
    """A line for each label of the points (label, x, y): mean and standard deviation of y at each x."""
    import pandas as pd  # here: takes half a second
    frame = pd.DataFrame(points, columns=['label', 'x', 'y']).astype({'x': float, 'y': float})
    for label, line in frame.groupby('label', sort=False):
        found = line.groupby('x').y.agg(['mean', 'std'])
        axis.errorbar(found.index, found['mean'], found['std'], label=label, markevery=1 + len(found) // 20)
    axis.legend(loc='upper left', bbox_to_anchor=(1, 1))


def plot(folder, name, panels, labels, draw=draw_curves, columns=1, level=None):
    """Save `name`.png: draw(axis, panel) for each of {title: panel}.  level: (label, y) of a line"""
    try:
        import matplotlib.figure
    except ImportError:
        return say(f'no {name}.png without matplotlib: pip install matplotlib')
    lines, (width, height) = -(-len(panels) // columns), (7, 4) if columns == 1 else (2.4, 2.4)
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure((columns * width, lines * height))
        for number, (title, panel) in enumerate(panels.items(), 1):
            axis = figure.add_subplot(lines, columns, number, title=title, xlabel=labels[0], ylabel=labels[1])
            if level:
                axis.axhline(level[1], color='gray', label=level[0])
            draw(axis, panel)
            axis.label_outer()
        figure.savefig(os.path.join(folder, f'{name}.png'))


def plot_losses(folder, unigram):
    """loss.png: training and validation loss against the unigram entropy of the corpus."""
    points = [(f"{line['kind']} {key}", line['step'], line[key])
              for line in read_metrics(folder) for key in line if key.endswith('loss')]
    plot(folder, 'loss', {os.path.basename(folder): points}, ('step', 'loss (nats per predicted token)'),
         level=('unigram entropy', unigram))


# ---- fill and export ----

@torch.no_grad()
def fill_masks(model, tokenizer, parts):
    """Join parts (lists of ids) by [MASK], print the top five tokens of each; return probabilities (n, V)."""
    special = tokenizer.special
    ids = [special['cls'], *parts[0]]
    for part in parts[1:]:
        ids += [special['mask'], *part]
    if len(ids) >= model.config.block_size:
        raise UserError(f'fill: {len(ids) - 1} tokens; the model reads at most {model.config.block_size - 2}')
    row = torch.tensor([[*ids, special['sep']]], device=next(model.parameters()).device)
    masks = (row[0] == special['mask']).nonzero().T
    probabilities = model.eval()(row, positions=masks)[0].float().softmax(-1)
    best = probabilities.topk(5)
    for chances, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        pieces = (tokenizer.pieces[token] for token in tokens)
        words = (piece.strip('\u2581 ') or piece for piece in pieces)     # without the word-start marker
        tell('    ' + '   '.join(f'{word} {p:.3f}' for word, p in zip(words, chances, strict=True)))
    return probabilities


def show_sentences(model, documents, tokenizer, word_start, n):
    """Mask a word in the first sentences (8 to 30 tokens) of n documents; print predictions and its rank.

    The word is the middle one, from the third token on, of those of CLOSED_CLASS and those that occur twice.
    """
    tell('\nheld-out sentences with a masked word: a function word ("the") or one that the sentence repeats')
    for index in shuffled(np.arange(min(len(documents), 10_000)), len(documents), 0, 0):
        ids = documents.get([index])[0, 1:min(32, model.config.block_size)].tolist()
        ends = [i + 1 for i, token in enumerate(ids[:-1])
                if tokenizer.pieces[token].endswith(('.', '\u3002')) and word_start[ids[i + 1]]]
        ids = ids[:ends[0]] if ends else []
        words = {i: tokenizer.decode([ids[i]]).strip() for i in range(2, len(ids) - 1)
                 if word_start[ids[i]] and word_start[ids[i + 1]]}
        chosen = [i for i, word in words.items()
                  if word in CLOSED_CLASS or word.isalpha() and [*words.values()].count(word) > 1]
        if len(ids) < 8 or not chosen or not word_start[ids[0]]:
            continue
        i = chosen[len(chosen) // 2]
        before, after = tokenizer.decode(ids[:i]), tokenizer.decode(ids[i + 1:])
        tell(f'\n{before.strip()} [MASK] {after.strip()}')
        chances = fill_masks(model, tokenizer, [ids[:i], ids[i + 1:]])[0]
        rank = 1 + int((chances > chances[ids[i]]).sum())
        tell(f'    masked: {words[i]}, rank {rank} of {len(chances):,}')
        n -= 1
        if not n:
            return
    tell('no other document of the validation split begins with a sentence to fill in')


def use_checkpoint(fill, export, source):
    """Print the predictions for `fill` of a run, checkpoint or trial; export it for transformers."""
    model, tokenizer, content = load_pretrained(source)
    if fill:
        text = fill.encode('utf-8', 'surrogateescape').decode('utf-8', 'replace')   # argv in any locale
        if '[MASK]' not in text or not hasattr(model, 'head'):
            raise UserError(f'fill={text!r}: put a [MASK] where a word is to be filled in'
                            if hasattr(model, 'head') else f'fill: {source} is fine-tuned: it has no LM head')
        tell(text)
        fill_masks(model, tokenizer, tokenizer.encode(re.split(r'\s*\[MASK\]', text)))
    if export:
        export_model(model, tokenizer, content, export)


def export_model(model, tokenizer, content, folder):
    """Write a folder that transformers loads: weights, config, tokenizer and README.md.  Raises UserError."""
    labels = dict(enumerate(map(str, content.get('labels', ()))))
    settings = {'problem_type': 'regression'} if content.get('head') == 'regress' else {}
    if labels:
        settings = {'id2label': labels, 'label2id': {text: i for i, text in labels.items()}}
    twin = to_transformers(model, pad_token_id=tokenizer.special['pad'], **settings)
    twin.save_pretrained(folder)
    try:
        fast, tie = prepare_data.fast_tokenizer(tokenizer, model.config.block_size)
        fast.save_pretrained(folder)
        settings = Path(folder, 'tokenizer_config.json')        # the class name in all versions
        text = settings.read_text('utf-8').replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
        settings.write_text(text, 'utf-8')
        shutil.copy(os.path.join(tokenizer.home, tokenizer.file_name), folder)
        note = f'The ids of texts with segmentations of equal score may differ, as for {tie!r}' if tie else ''
    except UserError as error:
        Path(folder, 'tokenizer.json').unlink(missing_ok=True)          # of an earlier export
        note = str(error)
    if note:
        tell(note)
    Path(folder, 'README.md').write_text(model_card(model, twin, content, note), encoding='utf-8')
    tell(f'wrote {folder}: transformers.{type(twin).__name__}.from_pretrained({folder!r}) loads it')


def model_card(model, twin, content, note):
    """README.md of an exported model.  note: on its tokenizer"""
    home, config = os.path.dirname(os.path.abspath(content['path'])), model.config
    last = {line['kind']: line for line in read_metrics(home) if line['step'] <= content['step']}
    rows = [('command', f"`{shlex.join(['python', *content.get('argv', ['...'])])}`"),
            ('data', content.get('task') or content['config']['dataset'])]
    mean, deviation, *_ = content.get('scale', (0, 1))          # of a regression's labels
    rows += [('prediction', f'{mean:g} + {deviation:g} * logit')] if (mean, deviation) != (0, 1) else []
    for kind, line in last.items():
        scores = [f'{key} {value:.4f}' for key, value in line.items()
                  if isinstance(value, float) and (kind == 'val' or key == 'loss')]
        name = 'validation' if kind == 'val' else 'training'
        rows.append((f"{name} after step {line['step']:,}", ', '.join(scores)))
    rows += [('parameters as trained', f'{count_parameters(model):,}'),
             ('parameters of this export', f'{twin.num_parameters(only_trainable=True):,}')]
    table = '\n'.join(f'| {name} | {value} |' for name, value in rows)
    return f"""---
library_name: transformers
---
# {os.path.basename(home)}

A {type(twin).__name__} with the same logits as the trained model (attention `{config.attention}`, positions
`{config.position}`), whose weights are multiplied out to one matrix each for queries, keys and values.
{note}

| | |
|---|---|
{table}
"""


# ---- main ----

def check_knobs(config):
    check_limits(config, {**LIMITS, 'total_batch': (int(os.environ.get('WORLD_SIZE', 1)), None)})
    if config['min_lr'] > config['learning_rate']:
        raise UserError(f"min_lr={config['min_lr']}: must be at most learning_rate={config['learning_rate']}")
    for key, rows in (('schedule', SCHEDULE), ('objective', OBJECTIVE), ('packing', PACKING)):
        choose(key, config[key], rows)


def prepare_missing(dataset, data_dir, runtime):
    """Prepare a corpus with its config/data_*.py, if there is one that needs no local files."""
    file, folder = f'config/data_{dataset}.py', os.path.join(data_dir, dataset)
    try:
        prepare_data.find_corpus(configure(dict(vars(prepare_data)), [file])[0])
    except UserError:                                           # the error of load_meta says what to do
        return
    words = [file] + ([] if data_dir == 'data' else [f'--data_dir={data_dir}'])
    price = re.findall(r'(?ms)^# (Expect .*?)\n[^#]', Path(ROOT, file).read_text('utf-8'))      # its header
    command = f"python prepare_data.py {shlex.join(words)}  # {''.join(price)}".replace('\n#', '')
    if runtime.world > 1:
        raise UserError(f'{folder}: not prepared; run first: {command}')
    tell(f'{folder} is missing; preparing it first: {command}')
    code = subprocess.run([sys.executable, f'{ROOT}/prepare_data.py', *words, '--part=0/1']).returncode
    if code:                                                    # it has printed the error
        sys.exit(code if code > 0 else 128 - code)


def prepared(dataset, data_dir, runtime, make=False):
    """(folder, meta) of a prepared corpus.  make: prepare it first if it is missing"""
    folder = os.path.join(data_dir, dataset)
    if make and not os.path.exists(os.path.join(folder, 'meta.json')):
        prepare_missing(dataset, data_dir, runtime)
    meta = load_meta(folder)
    if runtime.local == 0:
        check_sizes(folder, meta)
    return folder, meta


def validation_rows(names, data_dir, packing, block_size, tokenizer, runtime):
    """{name: validation rows} of comma-separated corpora.  tokenizer: the identity that theirs must have"""
    rows = {}
    for name in filter(None, names.replace(' ', '').split(',')):
        folder, meta = prepared(name, data_dir, runtime)
        refuse_difference(folder, meta['identity'], {'tokenizer': tokenizer}, 'the data')
        rows[name] = PACKING[packing](folder, meta, 'val', block_size)
    return rows


def make_model(encoder_config, objective, source, content):
    """Model with the weights in `content`, or random ones.  Raises UserError if the configs differ."""
    model = OBJECTIVE[objective][0](encoder_config)
    if source:
        ours = {key: value for key, value in asdict(encoder_config).items() if key not in MAY_CHANGE}
        theirs = {**asdict(EncoderConfig(**content['model_config'])), **content['config']}
        refuse_difference(source, theirs, {**ours, 'objective': objective}, 'the model')
        model.load_state_dict(content['model'])
    return model


def main():
    config, origins = configure(globals())
    check_knobs(config)
    if fill or export:
        own = init_from in ('auto', 'resume', 'scratch')
        return use_checkpoint(fill, export, out_dir if own else init_from)
    runtime = join(device, dtype, timeout, width=n_embd)
    folder, meta = prepared(dataset, data_dir, runtime, make=True)
    if runtime.main:
        hold(out_dir)

    # data
    word_start = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), np.uint8)
    model_class, masker_class = OBJECTIVE[objective]
    masker = masker_class(meta, block_size, mask_fraction, word_start if whole_word else None)
    train_rows, val_rows = (PACKING[packing](folder, meta, split, block_size) for split in ('train', 'val'))
    identity, unigram = {'vocab_size': meta['vocab_size'], **meta['identity']}, meta['unigram_entropy']
    others = validation_rows(validation, data_dir, packing, block_size, identity['tokenizer'], runtime)
    val_loaders = {name: Loader(rows, masker, 0, EVAL_ROWS, runtime.share(EVAL_ROWS),
                                limit=eval_samples or len(rows))
                   for name, rows in {'': val_rows, **others}.items()}

    # model and optimizer: new, from a BERT or from a checkpoint
    source, content = start_from(init_from, out_dir, runtime)
    if dtype == 'auto' and 'dtype' in content:          # a resumed run keeps its dtype, on any machine
        runtime = replace(runtime, dtype=getattr(torch, content['dtype']))
    torch.manual_seed(seed)
    raw = make_model(model_config(config, meta['vocab_size']), objective, source, content)
    raw = to_device(raw, runtime)
    optimizer = make_optimizer(raw, learning_rate, (beta1, beta2), adam_eps, weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    step, samples, validated = 0, 0, False
    if 'step' in content:
        refuse_difference(source, content['data'], identity, 'the data')
        groups = optimizer.state_dict()['param_groups']         # keep this run's decay, betas, kernels
        optimizer.load_state_dict({**content['optimizer'], 'param_groups': groups})
        scaler.load_state_dict(content['scaler'] or scaler.state_dict())
        step, samples, validated = content['step'], content['samples'], content['validated']
        config['milestones'] = tuple(sorted({*milestones, *content['config']['milestones']}))
    content.clear()                                     # frees memory: all of it was copied
    loader = Loader(train_rows, masker, seed, total_batch, runtime.share(total_batch),
                    offset=samples - step * total_batch)
    model = runtime.wrap(compiled(raw, compile, loader.batch(step), batch_size, runtime))
    peak = peak_flops(runtime)
    flops = training_flops(raw.config, block_size, masker.k, model_class, total_batch) if peak else 0

    # log and signals
    stop = catch_signals()
    warmup = warmup_iters if warmup_iters <= max_iters else max_iters // 10
    if warmup < warmup_iters:
        say(f'warmup_iters={warmup_iters} is longer than the run: {warmup} of its {max_iters} steps warm up')
    if runtime.main:
        write_manifest(out_dir, config, identity, runtime)
        prepare_data.copy_tokenizer(load_tokenizer(folder), out_dir)            # for load()
        size = sum(parameter.numel() for parameter in raw.parameters())
        tell(f'{table(config, origins)}\n{size:,} parameters on {runtime.world} x {runtime.device} in '
             f'{str(runtime.dtype)[6:]}; {len(train_rows):,} training rows'
             + (f'\ncontinuing {source} at step {step}' if source else ''))
    log = Log(out_dir, step, runtime, wandb_project, config)

    def ends(interval):
        return step == max_iters or (interval and step % interval == 0)

    def validate():
        """Log the loss on each validation corpus; False if a signal interrupted it."""
        values, lines = {}, []
        for name, val_loader in val_loaders.items():
            scores = evaluate(raw, val_loader, batch_size, runtime, stop)
            if not scores:
                return False
            values |= {f'{name}_{key}' if name else key: value for key, value in scores.items()}
            known = f'on {name}' if name else f'(unigram {unigram:.4f})'
            lines.append(f"step {step}: validation loss {scores['loss']:.4f} {known}, masked accuracy "
                         f"{scores['accuracy']:.2%}, perplexity {scores['perplexity']:.1f}")
        log.write('val', step, '\n'.join(lines), **values)
        return True

    def save():
        content = {'step': step, 'samples': samples, 'model': raw.state_dict(), 'config': config,
                   'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict(),
                   'model_config': asdict(raw.config), 'data': identity, 'validated': validated,
                   'dtype': str(runtime.dtype)[6:], 'argv': sys.argv}
        write_checkpoint(os.path.join(out_dir, checkpoint_name(step)), to_host(content, runtime))
        others = [path for at, path in checkpoints(out_dir).items() if at not in config['milestones']]
        for path in others[:-keep_checkpoints]:
            os.remove(path)

    # the loop
    validated = validated or validate()
    health, looked, since = Health(runtime), step, time.perf_counter()
    bar = progress(prefetch(loader.batch, range(step, max_iters)), max_iters, 'step', done=step)
    for batch in bar:
        count, stopping = runtime.sum(batch['weights'].sum(), len(stop))
        if stopping:
            break
        lr = get_lr(step, learning_rate, min_lr, warmup, max_iters, schedule)
        set_lr(optimizer, lr, runtime)
        seed_step(seed, step, runtime)
        parts = micro_batches(batch, batch_size, runtime.device)
        loss, norm = update(model, optimizer, scaler, parts, count, grad_clip, runtime)
        health.add(loss, norm, scaler)
        runtime.sync()
        step, samples = step + 1, samples + total_batch
        due = ends(checkpoint_interval) or step in milestones
        if not (due or ends(log_interval) or ends(eval_interval)):
            continue                                    # the only host sync is below
        loss, norm = health.look(step, out_dir)
        if ends(log_interval):
            seconds = (time.perf_counter() - since) / (step - looked)
            mfu = flops / seconds / runtime.world / peak if peak else None
            values = {'loss': loss, 'lr': lr, 'norm': norm, 'mfu': mfu, **compilations(runtime),
                      'tokens_per_second': total_batch * block_size / seconds}
            bar.set_postfix(loss=loss, lr=lr, refresh=False)
            log.write('train', step, log_line(step, max_iters, seconds, values), **values)
        if ends(eval_interval):
            validated = validate()
        if due and runtime.main:
            save()
        looked, since = step, time.perf_counter()

    bar.close()
    stopping, = runtime.sum(len(stop))
    if stopping:
        health.look(step, out_dir)
        if runtime.main:
            save()
        say(f'stopped by signal after step {step}; {out_dir}/{checkpoint_name(step)} is written; '
            '--init_from=auto goes on from there')
    elif runtime.main:
        plot_losses(out_dir, unigram)
        if fill_samples:
            documents = DocumentRows(folder, meta, 'val', 1 << 16)      # whole documents
            show_sentences(raw.cpu(), documents, load_tokenizer(folder), word_start, fill_samples)
    leave(runtime, 128 + (stop[0] if stop else signal.SIGTERM) if stopping else 0)


def in_memory(main, scope):
    """Call main(); out of memory or a lost process becomes a UserError.  scope: the stage's globals"""
    try:
        main()
    except torch.OutOfMemoryError:
        advice = f"halve batch_size={scope['batch_size']}; the total batch stays"
        raise UserError(f'out of memory: {advice}') from None
    except RuntimeError as error:                       # messages of gloo and NCCL differ
        if not dist.is_initialized() or not re.search('gloo|NCCL|onnection|timed out', str(error)):
            raise
        raise UserError(f'lost another process ({str(error).splitlines()[0][:100]}); the same command goes '
                        'on from the last checkpoint') from None


if __name__ == '__main__':
    run(lambda: in_memory(main, globals()))
