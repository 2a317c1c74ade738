"""Pretraining on one device or many: masked or permuted language model.

    $ python train.py config/quickstart.py
    $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
    $ python train.py config/quickstart.py --fill="the [MASK] of a matrix"

A step is a pure function of (weights, data, seed, step): its samples, masks and dropout are drawn from
(seed, step), never from what ran before. So a resumed run repeats an undisturbed one, on the CPU to the bit.
"""
import atexit
import contextlib
import errno
import hashlib
import importlib
import itertools
import json
import math
import os
import pickle
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from configurator import UserError, configure, run, say, table, write_line
from model import (
    EncoderConfig,
    MaskedLM,
    PermutationLM,
    choose,
    count_parameters,
    model_config,
    token_losses,
    training_flops,
)
from prepare_data import check_files, load_meta, load_tokenizer

# the run
out_dir = 'out/run'             # checkpoints, metrics.jsonl, run.json and loss.png go here
init_from = 'auto'              # scratch, resume, auto (newest checkpoint or scratch), a checkpoint or a BERT
seed = 1                        # of weights, sample order, masks and dropout; below 2^63
fill = ''                       # a text with [MASK]: print the checkpoint's predictions and stop
export = ''                     # a folder: write the checkpoint there for transformers and stop
# data
dataset = 'docstrings'          # folder below data_dir that prepare_data.py wrote
data_dir = 'data'               # parent folder of prepared corpora
prepare = ''                    # config file of this repository for prepare_data.py, if dataset is missing
block_size = 512                # tokens a row, [CLS] and [SEP] included
packing = 'stream'              # stream: rows cut from joined documents; documents: one a row, padded
objective = 'mlm'               # mlm: masked; plm: permuted, needs attention = 'xlnet'
mask_fraction = 0.15            # of the tokens of a row that are predicted
whole_word = False              # predict all pieces of a word together
# model
attention = 'original'          # a row of model.py's ATTENTION: symmetric, pairwise, shared, shatter, gau ...
position = 'absolute'           # absolute, none, rope, rpe or rab; Shatter's steps and xlnet take none
norm = 'layer'                  # layer, or rms without weights
lm_head = 'bert'                # bert, or decoder: the tied matrix alone
bias = True                     # biases of Linears and norms
pair_rank = 0                   # pairwise: rank of S, 0 for full
pair_init = 'identity'          # pairwise: start of S; identity, fan_in or normal
normaliser = 'softmax_plus'     # gau: softmax, softmax_plus, squared_relu or scaled_squared_relu
relu_scale = 'ns'               # squared_relu: n2, n, ns or s2
key_size = 128                  # gau: width of queries and keys
clip_distance = 128             # rpe: distances are told apart up to one less
recompute = False               # Shatter: less memory for more time in the backward pass
n_layer = 12                    # blocks
n_head = 12                     # heads; must divide n_embd
n_embd = 768                    # width
n_inner = 3072                  # width of the MLP, usually 4 n_embd
dropout = 0.0                   # after embeddings and sublayers; 0.1 in the papers, 0 is faster
attention_dropout = 0.0         # of attention weights; 0.1 in the papers
# optimization
total_batch = 256               # sequences per optimizer step over all devices; micro-steps follow from it
batch_size = 32                 # sequences per device and micro-step at most; halve it if out of memory
max_iters = 200_000             # optimizer steps
learning_rate = 1e-4            # peak
min_lr = 0.0                    # where linear and cosine end
warmup_iters = 10_000           # steps of linear warmup, at most max_iters
schedule = 'linear'             # linear, cosine, constant or thirds, after the warmup
beta1 = 0.9                     # of Adam
beta2 = 0.999                   # of Adam
adam_eps = 1e-12                # of Adam
weight_decay = 0.01             # on matrices; never on biases, norms and diagonals
zero = False                    # ZeRO-1: each process keeps a share of Adam's moments; for large models
grad_clip = 1.0                 # largest gradient norm; 0: no clipping
# evaluation, log and checkpoints
eval_interval = 1000            # steps between evaluations; 0: only at the end
eval_samples = 10_000           # validation rows at most; 0: all
log_interval = 100              # steps between log lines
checkpoint_interval = 1000      # steps between checkpoints; 0: only at the end
keep_checkpoints = 2            # newest ones that stay
milestones = ()                 # steps whose checkpoints stay for ever, as in 1000,10000
fill_samples = 3                # held-out sentences to fill in at the end
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, cuda:1 (without torchrun), mps, xla or tpu
dtype = 'auto'                  # auto (bfloat16 on GPUs that compute in it), float32, bfloat16 or float16
compile = 'auto'                # auto (on for CUDA), true or false
timeout = 300                   # seconds without a sign of life from a process that end all; 0: for ever

SCHEDULE = {                    # progress after the warmup, 0 to 1 -> share of the way up from min_lr
    'linear': lambda progress: 1 - progress,
    'cosine': lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    'constant': lambda progress: 1.0,
    'thirds': lambda progress: (1.0, 0.2, 0.02)[min(2, int(3 * progress))],    # 1e-4, 2e-5, 2e-6: Kowsher A.4
}
PEAK_FLOPS = {                  # device -> dense 16-bit FLOP/s, from the vendor's data sheets
    'NVIDIA H200': 989e12, 'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA A100': 312e12, 'NVIDIA L40S': 362e12,
    'NVIDIA L4': 121e12, 'NVIDIA A10': 125e12, 'NVIDIA GeForce RTX 4090': 165e12,
}
AT_LEAST = {
    'total_batch': 1, 'batch_size': 1, 'max_iters': 1, 'log_interval': 1, 'keep_checkpoints': 1, 'seed': 0,
    'warmup_iters': 0, 'eval_interval': 0, 'eval_samples': 0, 'checkpoint_interval': 0, 'fill_samples': 0,
    'min_lr': 0, 'weight_decay': 0, 'grad_clip': 0, 'beta1': 0, 'beta2': 0, 'timeout': 0,
}
BELOW = {'beta1': 1, 'beta2': 1, 'seed': 2 ** 63}
AT_MOST = {'warmup_iters': 'max_iters', 'min_lr': 'learning_rate'}
COMMENT_LENGTH = 71             # bytes of 'sha256:' and 64 hexadecimal digits
EVAL_ROWS = 256                 # rows whose validation masks are drawn together: it is part of the masks
HELD = []                       # the open lock file of this process's run
MAY_CHANGE = {'dropout', 'attention_dropout', 'n_label', 'pair_init', 'pooling', 'recompute'}   # model fields


# ---- rows: [CLS] tokens [SEP], read from the shards one by one, so that memory never grows ----

class StreamRows:
    """Rows of block_size ids cut from the documents of a split, joined by [SEP]."""
    padded = False

    def __init__(self, folder, meta, split, block_size):
        if block_size < 8:
            raise UserError(f'block_size={block_size}: must be at least 8; 128 and 512 are usual')
        self.folder, self.special, self.dtype = folder, meta['special'], np.dtype(meta['dtype'])
        self.vocab_size, self.block_size, self.room = meta['vocab_size'], block_size, block_size - 2
        self.shards = meta['splits'][split]['shards']
        self.ends = np.cumsum([self.count(shard) for shard in self.shards])      # rows up to shard ends
        if not len(self):
            raise UserError(f'{folder}: {split} holds less than one row of block_size={block_size}')

    def __len__(self):
        return int(self.ends[-1]) if len(self.ends) else 0

    def count(self, shard):
        """Number of rows in a shard; its last, incomplete one is left out."""
        return shard['n_tokens'] // self.room

    def span(self, shard, index):
        """(first token, number of tokens) of row `index` of a shard."""
        return index * self.room, self.room

    def get(self, indices):
        """ids (len(indices), block_size) int64"""
        ids = np.full((len(indices), self.block_size), self.special['pad'], np.int64)
        ids[:, 0] = self.special['cls']
        for row, (name, tokens) in zip(ids, self.parts(indices, 'tokens', self.dtype), strict=True):
            if tokens.max(initial=0) >= self.vocab_size:
                raise UserError(f'{self.folder}/{name}: ids beyond {self.vocab_size}')
            row[1:len(tokens) + 1] = tokens
            row[len(tokens) + 1] = self.special['sep']
        return ids

    def word_starts(self, indices):
        """(len(indices), block_size) bool from the segmenter of the corpus, or None if it had none."""
        if not all('words' in shard for shard in self.shards):
            return None
        starts = np.ones((len(indices), self.block_size), bool)
        for row, (_, words) in zip(starts, self.parts(indices, 'words', np.dtype(np.uint8)), strict=True):
            row[1:len(words) + 1] = words
        return starts

    def parts(self, indices, key, dtype):
        """(file name, entries) of each row in the shards' `key` files."""
        for index in indices:
            i = int(np.searchsorted(self.ends, index, side='right'))
            start, length = self.span(self.shards[i], int(index) - (int(self.ends[i - 1]) if i else 0))
            name = self.shards[i][key]
            entries = read_array(self.folder, name, dtype, start, length)
            if len(entries) != length:
                raise UserError(f'{self.folder}/{name}: truncated')
            yield name, entries


class DocumentRows(StreamRows):
    """One document a row, padded; a long one gives several rows.  Liu 2022, lengths that differ ("diff")."""
    padded = True
    COARSE = 1024               # documents between two entries of `before`, the table that finds a row

    def __init__(self, *arguments):
        self.before = {}                                                # shard -> rows before its blocks
        super().__init__(*arguments)

    def count(self, shard):
        rows = self.documents(shard, 0, shard['n_documents'])[1]
        sums = np.cumsum(np.add.reduceat(rows, np.arange(0, len(rows), self.COARSE)))
        self.before[shard['tokens']] = np.concatenate([[0], sums])
        return int(sums[-1])

    def documents(self, shard, first, n):
        """First tokens of documents `first` to `first` + n of a shard, and the rows of each but the last."""
        starts = read_array(self.folder, shard['documents'], np.dtype(np.int64), first, n + 1)
        return starts, -(-(np.diff(starts) - 1) // self.room)           # less the [SEP] that ends each

    def span(self, shard, index):
        before = self.before[shard['tokens']]
        block = int(np.searchsorted(before, index, side='right')) - 1
        starts, rows = self.documents(shard, block * self.COARSE, self.COARSE)
        ends = before[block] + np.cumsum(rows)
        document = int(np.searchsorted(ends, index, side='right'))
        start = int(starts[document]) + (index - int(ends[document] - rows[document])) * self.room
        return start, min(self.room, int(starts[document + 1]) - 1 - start)


PACKING = {'stream': StreamRows, 'documents': DocumentRows}


def read_array(folder, name, dtype, start, count):
    return np.fromfile(os.path.join(folder, name), dtype, count, offset=start * dtype.itemsize)


# ---- batches: pure functions of (data, seed, step) ----

def shuffled(positions, n, seed, epoch):
    """Images of `positions` (integers below n) under a permutation of range(n) drawn from (seed, epoch).

    A Feistel network on an even number of bits, walked until it falls below n: a bijection without a table.
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

    Of each row the ceil(fraction n) tokens with the smallest random scores are predicted, n its real tokens;
    80 % of them become [MASK], 10 % a random ordinary token, 10 % stay. Special tokens are neither chosen nor
    put in. Every row gives k = ceil(fraction T) positions; a padded row fills the surplus with weight 0. With
    `word_start` (V,) words are taken whole in the order of one score each; one that exceeds what its row
    still wants is passed over, as in BERT.
    """

    def __init__(self, meta, block_size, fraction, word_start=None):
        if not 0 < fraction < 1:
            raise UserError(f'mask_fraction={fraction}: must lie between 0 and 1; 0.15 is usual')
        self.fraction, self.word_start, self.special = fraction, word_start, meta['special']
        self.block_size, self.k = block_size, max(1, int(self.share(block_size)))
        self.is_special = np.zeros(meta['vocab_size'], bool)
        self.is_special[list(self.special.values())] = True
        self.ordinary = np.flatnonzero(~self.is_special)

    def share(self, n):
        return np.ceil(self.fraction * n - 1e-9).astype(int)                # 0.15 * 20 is 3, rounding aside

    def draw(self, seed, step, n_rows):
        """Random numbers for n_rows: scores (n_rows, T), actions (n_rows, k), replacements (n_rows, k)."""
        rng = np.random.default_rng([seed, step])
        return (rng.random((n_rows, self.block_size), np.float32), rng.random((n_rows, self.k), np.float32),
                self.ordinary[rng.integers(0, len(self.ordinary), (n_rows, self.k))])

    def choose(self, ids, scores, starts):
        """Positions to predict, (B, k), and which of them count, (B, k) bool.  starts (B, T) bool or None"""
        special = self.is_special[ids]
        wanted = np.minimum(self.share((ids != self.special['pad']).sum(1)), (~special).sum(1))     # (B,)
        if self.word_start is None:
            positions = np.argsort(np.where(special, 2, scores), axis=1, kind='stable')[:, :self.k]
        else:
            starts = self.word_start[ids].astype(bool) if starts is None else starts
            rows = [whole_words(*row, self.k) for row in zip(starts, special, scores, wanted, strict=True)]
            positions, wanted = (np.array(column) for column in zip(*rows, strict=True))
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

    Tokens are chosen as by Masker, but stay in the input; 'order' (B, T) int64 has the special tokens at 0,
    then the others in the order of their scores, and last the chosen ones.
    """

    def apply(self, ids, scores, actions, replacements, starts=None):
        positions, chosen = self.choose(ids, scores, starts)
        last = np.zeros(ids.shape, bool)
        np.put_along_axis(last, positions, chosen, axis=1)
        special = self.is_special[ids]
        rank = np.argsort(np.argsort(np.where(special, -1, scores + 2 * last), axis=1, kind='stable'), axis=1)
        return {'ids': ids, 'positions': positions, 'targets': np.take_along_axis(ids, positions, axis=1),
                'weights': chosen.astype(np.float32), 'order': np.where(special, 0, rank + 1)}


OBJECTIVE = {'mlm': (MaskedLM, Masker), 'plm': (PermutationLM, Permuter)}


def whole_words(starts, special, scores, wanted, k):
    """(k positions of a row, number of them that count): tokens of whole words first, at most `wanted`.

    starts, special, scores  (T,); a special token and the one behind it start words
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
    """Batches by step.  `share` is this rank's slice of the global batch; masks are drawn for all of it.

    total_batch  rows of the global batch
    limit        0: every row once per epoch, in an order drawn from (seed, epoch); n: rows 0 to n, once
    """

    def __init__(self, rows, masker, seed, total_batch, share, limit=0):
        self.rows, self.masker, self.seed = rows, masker, seed
        self.total_batch, self.share, self.limit = total_batch, share, min(limit, len(rows))

    def indices(self, step):
        """Row numbers in the corpus of this rank's part of a step."""
        positions = np.arange(step * self.total_batch, (step + 1) * self.total_batch)[self.share]
        if self.limit:
            return positions[positions < self.limit]
        epochs, positions = np.divmod(positions, len(self.rows))
        return np.concatenate([shuffled(positions[epochs == epoch], len(self.rows), self.seed, int(epoch))
                               for epoch in np.unique(epochs)])

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


def prefetch(make, steps, depth=2):
    """Yield make(step) for each step, made by a background thread; at most `depth` wait in memory."""
    ready, closed = queue.Queue(depth), threading.Event()

    def hand_over(item):
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put(item, timeout=0.1)

    def work():
        try:
            for step in steps:
                hand_over((make(step), None))
                if closed.is_set():
                    return
        except Exception as error:                      # raised again where the batch is wanted
            hand_over((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        for _ in steps:
            batch, error = ready.get()
            if error:
                raise error
            yield batch
    finally:
        closed.set()


def micro_batches(batch, size, device):
    """Split a rank's batch into parts of at most `size` rows, as tensors on `device`."""
    n = len(batch['ids'])
    n_parts = -(-n // size)
    parts = []
    for i in range(n_parts):
        rows = slice(n * i // n_parts, n * (i + 1) // n_parts)
        part = {key: torch.from_numpy(value[rows]) for key, value in batch.items()}
        pinned = device.type == 'cuda'
        if pinned:
            part = {key: value.pin_memory() for key, value in part.items()}
        parts.append({key: value.to(device, non_blocking=pinned) for key, value in part.items()})
    return parts


# ---- the platform: all that a TPU wants ----
# torch_xla ('xla') only notes operations down; sync() compiles them as one graph, once, and queues it. A
# number of Python is part of a graph, a tensor its input; a host read waits for the queue. torch_tpu ('tpu')
# is eager: it wants its import, device and backend 'tpu_dist', says ray-project/ray#64796. That was not run.

PACKAGE = {                     # device -> (package, how to get it)
    'xla': ('torch_xla', "pip install torch==2.9.1 'torch_xla[tpu]==2.9.0'"),
    'tpu': ('torch_tpu', "see Google's TorchTPU"),
}


def import_package(kind):
    package, command = PACKAGE[kind]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(f'device={kind!r} needs {package}: {command} ({error})') from None


def join_xla(ranks):
    """(Ranks, device) on XLA: the group before the device, the device before any backward pass."""
    import torch_xla.distributed.xla_backend
    if 'RANK' in os.environ:
        dist.init_process_group('xla', init_method='xla://')
        seen = torch_xla.runtime.world_size()
        if seen != ranks.world:
            raise UserError(f"device='xla': torch_xla sees {seen} process(es), torchrun started "
                            f'{ranks.world}; --nproc_per_node must be the number of TPU devices of a machine')
        ranks = Ranks(torch_xla.runtime.global_ordinal(), seen, ranks.local, dist.new_group(backend='gloo'))
    for name, kernel in (('unfold_copy', windows), ('unfold_backward', windows_backward)):
        torch.library.impl(f'aten::{name}', 'XLA', kernel)
    return ranks, torch.zeros(1, device='xla').device


def windows(x, dimension, size, step):
    """x (H, P).unfold(1, size, 1) -> (H, n, size); torch_xla has none and would fetch x to the host.

    Rows of P + 1 out of many copies of x begin one place later each.
    """
    (H, P), n = x.shape, x.size(1) - size + 1
    return x.repeat(1, n + 1)[:, :n * (P + 1)].reshape(H, n, P + 1)[:, :, :size].clone()


def windows_backward(gradient, shape, dimension, size, step):
    (H, P), n = shape, gradient.size(1)
    rows = F.pad(gradient, (0, P + 1 - size)).reshape(H, n * (P + 1))
    return F.pad(rows, (0, P - n)).reshape(H, n + 1, P).sum(1)


def queued(device):
    """Does work wait for sync(), and a host read for all of it?"""
    return device.type == 'xla'


def reads_at(step, device, last, *intervals):
    """Does the host look at step `step`, from 1?  On XLA: is it in `last`, or does an interval end?"""
    return not queued(device) or step in last or any(every and step % every == 0 for every in intervals)


def place(model, device):
    """Move a model.  On XLA its parameters are new: those that have two names are tied again.

    `recompute` is off there: the compiler does it where memory is short, torch.utils.checkpoint knows no XLA.
    """
    names, n = {}, count_parameters(model)
    for module in model.modules() if queued(device) else ():
        if hasattr(module, 'recompute'):
            module.recompute = False
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to(device)
    for first, *others in names.values():
        for module, _, name in (other.rpartition('.') for other in others):
            setattr(model.get_submodule(module), name, model.get_parameter(first))
    assert count_parameters(model) == n
    return model


def wrap(model, ranks, device, unused=False):
    """DistributedDataParallel for several ranks.  unused: may parameters go without a gradient?"""
    return model if ranks.world == 1 else DistributedDataParallel(
        model, gradient_as_bucket_view=queued(device), find_unused_parameters=unused)


def autocast(device, dtype):
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def as_input(number, device):
    """A number that changes from step to step: on XLA a tensor, so that nothing is compiled again.

    A vector of one entry: scalars of equal values, rate and decay perhaps, are one input of another graph.
    """
    return torch.tensor([number], device=device) if queued(device) else number


def seed_device(device):
    """Torch's seed for XLA's generator, which torch.manual_seed does not reach."""
    if queued(device):
        import torch_xla
        torch_xla.manual_seed(torch.initial_seed())


def sync(device, wait=False):
    """Let the device begin what was noted down; with `wait`, until it has done all."""
    if queued(device):
        import torch_xla
        torch_xla.sync(wait)
    elif wait:
        {'cuda': torch.cuda.synchronize, 'mps': torch.mps.synchronize}.get(device.type, int)()


def to_host(tree, device):
    """Tensors and models, in dicts, lists and tuples too, on the CPU if they are XLA's."""
    held = (torch.Tensor, torch.nn.Module)
    return tree_map(lambda x: x.cpu() if isinstance(x, held) else x, tree) if queued(device) else tree


def compilations(device):
    """{'compiled': graphs so far} on XLA, else {}; a steady run adds none."""
    if not queued(device):
        return {}
    import torch_xla.debug.metrics
    return {'compiled': torch_xla.debug.metrics.counter_value('UncachedCompile') or 0}


# ---- devices and ranks ----

@dataclass
class Ranks:
    """Place of this process among those that torchrun started; a process alone is rank 0 of 1."""
    rank: int = 0
    world: int = 1
    local: int = 0
    host: object = None         # group for what is on the CPU, if the main one moves only a device's tensors

    @property
    def main(self):
        return self.rank == 0

    def share(self, n):
        """This rank's slice of n rows; sizes differ by one at most, and not on XLA, for all run one graph."""
        if self.host and n % self.world:
            raise UserError(f"device='xla': {n} rows a step on {self.world} processes: choose a multiple")
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)

    def sum(self, tensor):
        """Sum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.host if tensor.device.type == 'cpu' else None)
        return tensor

    def gather(self, items):
        """The lists of all ranks, joined, on every rank."""
        boxes = [items] * self.world
        if self.world > 1:
            dist.all_gather_object(boxes, items, self.host)
        return [item for box in boxes for item in box] if self.world > 1 else items

    def agree(self, value):
        """Rank 0's value, on every rank."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, group=self.host)
        return box[0]


def join_ranks(device):
    """(Ranks, torch.device) of this process, which joins torchrun's process group where there is one."""
    ranks = Ranks(*(int(os.environ.get(name, default)) for name, default in
                    (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0))))
    if device == 'auto':
        accelerator = 'mps' if torch.backends.mps.is_available() else 'cpu'
        device = 'cuda' if torch.cuda.is_available() else accelerator
    try:
        if device in PACKAGE:
            import_package(device)
        if device == 'xla':
            return join_xla(ranks)
        found = torch.device(device)
        if found.type not in ('cpu', 'cuda', 'mps', 'tpu'):
            raise UserError(f'device={device!r}: choose auto, cpu, cuda, mps, xla or tpu')
        if ranks.world > 1 and found.index is not None:
            raise UserError(f'device={device!r}: torchrun gives each process its own; choose {found.type}')
        if found.type == 'cuda' and found.index is None:
            found = torch.device('cuda', ranks.local)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'device={device!r}: {reason}; choose auto, cpu, cuda, mps, xla or tpu') from None
    if found.type == 'cuda':
        torch.cuda.set_device(found)
        torch.set_float32_matmul_precision('high')      # TF32 where float32 is left
    if 'RANK' in os.environ:
        dist.init_process_group({'cuda': 'nccl', 'tpu': 'tpu_dist'}.get(found.type, 'gloo'),
                                timeout=timedelta(hours=6),         # to prepare and check a corpus; see watch
                                device_id=found if found.type == 'cuda' else None)
    return ranks, found


def watch(ranks, seconds):
    """End this process once another one gives no sign of life for `seconds`, with its name; 0: never.

    A collective waits long for a process that is stopped, and does not say for whom. So a thread of each
    counts up in torchrun's store, whatever the main thread does; rank 0 looks at all, the others at rank 0.
    """
    if ranks.world == 1 or not seconds:
        return
    store = dist.PrefixStore(f"alive/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", dist.TCPStore(
        os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False))
    me, seen, tick = f'process {os.getpid()} on {platform.node()}', {}, min(5, seconds / 4)

    def end(rank):
        name = seen[rank][0].partition(' ')[2] if rank in seen else 'a process'
        write_line(f'error: rank {rank}, {name}, gave no sign of life for {seconds} s; the same command goes '
                   'on from the last checkpoint')
        os._exit(1)                                     # the main thread may hang in a collective

    def beat(count):
        store.set(f'{ranks.rank}', f'{count} {me}')
        for other in range(ranks.world) if ranks.main else [0]:
            line = store.get(f'{other}').decode() if store.check([f'{other}']) else '0 a process'
            if line != seen.get(other, (None,))[0]:
                seen[other] = line, time.monotonic()
            elif time.monotonic() - seen[other][1] > seconds and not line.startswith('left'):
                end(other)

    def work():
        for count in itertools.count(1):
            silence = threading.Timer(seconds, end, [0])            # without torchrun, rank 0 has the store
            silence.daemon = True
            silence.start()
            try:
                beat(count)
            except RuntimeError:
                return                                  # the store has gone, and rank 0 or torchrun with it
            finally:
                silence.cancel()
            if left.wait(tick):
                with contextlib.suppress(RuntimeError):
                    store.set(f'{ranks.rank}', f'left {me}')
                return

    left, thread = threading.Event(), threading.Thread(target=work, daemon=True)
    thread.start()
    atexit.register(lambda: (left.set(), thread.join(tick)))


def leave(ranks, status=0):
    """End a run: a process of torchrun's once all have come here, and without Python's taking itself apart.

    Threads of PyTorch that still run while Python does that may hang for ever, says pytorch/pytorch#190489.
    """
    together = dist.is_initialized()
    if together:
        dist.barrier(ranks.host)                        # nobody leaves while another still talks
        dist.destroy_process_group()
    let_go()
    if together:
        atexit._run_exitfuncs()                         # of watch, torch_xla and wandb
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)


def choose_dtype(dtype, device):
    """torch dtype of the forward pass; 'auto' is bfloat16 on CUDA devices from Ampere on, else float32."""
    if dtype == 'auto':
        native = device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = 'bfloat16' if native else 'float32'
    if dtype == 'float16' and device.type in PACKAGE:
        raise UserError(f"dtype='float16': device={device.type!r} computes in bfloat16 and float32")
    return choose('dtype', dtype, {name: getattr(torch, name) for name in ('float32', 'bfloat16', 'float16')})


def peak_flops(device, dtype):
    """Data-sheet FLOP/s of a CUDA device in 16 bits, or None."""
    name = torch.cuda.get_device_name(device) if device.type == 'cuda' and dtype != torch.float32 else ''
    return next((peak for known, peak in PEAK_FLOPS.items() if re.fullmatch(known + '(-.*)?', name)), None)


def compiled_or_eager(model, wanted, batch, batch_size, device, dtype):
    """torch.compile(model), tried in both directions on a micro-batch; the model itself where that fails."""
    if not choose('compile', wanted.lower(), {'auto': device.type == 'cuda', 'true': True, 'false': False}):
        return model
    part = micro_batches(batch, batch_size, device)[0]
    try:
        compiled = torch.compile(model)
        with autocast(device, dtype):
            losses = compiled(**{key: value for key, value in part.items() if key != 'weights'})
        losses.sum().backward()
        return compiled
    except torch.OutOfMemoryError:
        raise
    except Exception as error:                          # of many kinds: no compiler, unknown device, ...
        say(f'torch.compile fails here, running without it: {str(error).strip().splitlines()[0]}')
        return model
    finally:
        model.zero_grad(set_to_none=True)


# ---- one optimizer step ----

def make_optimizer(model, learning_rate, betas, eps, weight_decay, device, zero=False):
    """AdamW, fused where it can be, with decay on all of two or more dimensions, S of `pairwise` included.

    zero  each process of the group updates a share of the parameters and sends them to the others: ZeRO's
          first stage, Rajbhandari et al. 2020, arXiv 1910.02054
    """
    groups = [{'params': [p for p in model.parameters() if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}]
    knobs = {'lr': as_input(learning_rate, device), 'betas': betas, 'eps': eps, 'capturable': queued(device),
             'fused': device.type in ('cuda', 'cpu'), 'foreach': False if queued(device) else None}
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # a second of every start, at the top
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **knobs)
    return torch.optim.AdamW(groups, **knobs)


def load_optimizer(optimizer, state):
    """Take the tensors of a checkpoint's optimizer; decay, betas and kernels stay those of this run."""
    numbers, groups = itertools.count(), []
    for group in optimizer.param_groups:
        groups.append({**group, 'params': [next(numbers) for _ in group['params']]})
    optimizer.load_state_dict({**state, 'param_groups': groups})


def optimizer_state(optimizer, ranks):
    """Its state_dict on rank 0, None elsewhere: the same of one process, of many, and of ZeRO's."""
    if hasattr(optimizer, 'consolidate_state_dict'):
        optimizer.consolidate_state_dict()              # ZeRO's, a collective
    return optimizer.state_dict() if ranks.main else None


def rate_at(step, peak, low, warmup, total, schedule):
    """Learning rate of update `step`, from 0: linear warmup to the peak, then SCHEDULE towards `low`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    assert 0 <= progress <= 1, f'step {step} lies outside a schedule of {total} steps'
    return low + (peak - low) * SCHEDULE[schedule](progress)


def seed_step(seed, step, rank):
    """Seed torch for a step: dropout is a function of (seed, step, rank); no state is carried on."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]))


def forward_backward(model, parts, count, scaler, ranks, device, dtype):
    """Add the gradients of this rank's micro-batches; returns their part of the step's loss, a sum / count.

    count  () tensor, masked tokens of the whole step over all ranks and micro-steps
    """
    total = torch.zeros((), device=device)
    for i, part in enumerate(parts):
        weights = part.pop('weights')
        silent = ranks.world > 1 and i < len(parts) - 1             # gradients travel once a step
        with model.no_sync() if silent else contextlib.nullcontext():
            with autocast(device, dtype):
                losses = model(**part)                              # (b, k)
            loss = (losses * weights).sum() / count
            scaler.scale(loss * ranks.world).backward()             # DDP divides by the number of ranks
        total += loss.detach()
    return total


def optimizer_step(model, raw, optimizer, scaler, parts, count, rate, clip, ranks, device, dtype, where,
                   reading=True):
    """Forward, backward, update; returns (loss, gradient norm).  Raises UserError where one is not finite.

    model    what forward_backward calls; raw: the same without wrappers
    rate     learning rate; clip: largest gradient norm, 0 for no clipping
    where    names the step and its samples
    reading  see reads_at; without, nothing is refused, and nothing is left that the next graph would compute
    """
    for group in optimizer.param_groups:
        group['lr'] = as_input(rate, device)
    seed_device(device)
    loss = forward_backward(model, parts, count.clamp(min=1), scaler, ranks, device, dtype)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(raw.parameters(), clip or math.inf)
    found = torch.stack([ranks.sum(loss), norm])
    searching = scaler.is_enabled() and scaler.get_scale() > 1      # fp16 lowers its scale first
    if queued(device):                      # what is not finite makes the rate NaN, so all weights and what
        for group in optimizer.param_groups:                        # comes later: a look there misses nothing
            group['lr'] = torch.where(found.isfinite().all(), group['lr'], math.nan)
    else:
        found = finite(found, searching, where, 'no update was made')   # a step's first host read
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    sync(device)
    if queued(device):                      # every checkpoint comes after a look
        then = 'it may have begun since the last look; no checkpoint has it'
        found = finite(found, False, where, then) if reading else (None, None)
    return found


def finite(found, searching, where, then):
    """(loss, gradient norm) of a tensor.  Raises UserError unless they are finite; searching: the first."""
    loss, norm = found.tolist()
    if not math.isfinite(loss) or not (math.isfinite(norm) or searching):
        raise UserError(f'{where}: loss {loss}, gradient norm {norm}; {then}; try a lower learning_rate')
    return loss, norm


@torch.no_grad()
def evaluate(model, loader, batch_size, ranks, device, dtype):
    """Loss (nats), accuracy and perplexity a masked token, over a loader with a limit and all ranks."""
    model.eval()
    at = device if queued(device) else 'cpu'                        # one read at the end, or one a part
    sums = torch.zeros(3, dtype=torch.float64, device=at)           # loss, hits, tokens
    for step in range(-(-loader.limit // loader.total_batch)):
        for part in micro_batches(loader.batch(step), batch_size, device):
            weights, targets = part.pop('weights'), part.pop('targets')
            with autocast(device, dtype):
                logits = model(**part)                              # (b, k, V)
            losses = token_losses(logits, targets) * weights
            hits = (logits.argmax(-1) == targets) * weights
            sums += torch.stack([losses.sum(), hits.sum(), weights.sum()]).to(at)
            sync(device)
    model.train()
    sums = to_host(sums, device) if ranks.world == 1 or ranks.host else sums.to(device)
    loss, hits, tokens = ranks.sum(sums).tolist()
    loss, accuracy = loss / max(1, tokens), hits / max(1, tokens)
    return {'loss': loss, 'accuracy': accuracy, 'perplexity': math.exp(min(loss, 700))}


# ---- checkpoints: tensors and plain Python in one file that carries its own digest ----

def checkpoint_name(step):
    return f'ckpt_{step:07d}.pt'


def checkpoints(folder):
    """Checkpoint files of a run, oldest first; other names are the user's."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [name for name in names if re.fullmatch(r'ckpt_\d{7,}\.pt', name)]
    return [os.path.join(folder, name) for name in sorted(found, key=step_of)]


def step_of(path):
    return int(os.path.basename(path)[len('ckpt_'):-len('.pt')])


def digest(file, length):
    """sha256 of the first `length` bytes of an open file, as the comment that ends a checkpoint."""
    file.seek(0)
    sha = hashlib.sha256()
    while length > 0 and (block := file.read(min(length, 1 << 20))):
        sha.update(block)
        length -= len(block)
    return b'sha256:' + sha.hexdigest().encode()


def write_checkpoint(path, content):
    """Write `content` so that `path` is whole or not there: temporary file, digest, flush, rename.

    torch.save writes a zip archive. The digest of all bytes before it becomes the archive's comment, so that
    plain torch.load reads the file. Raises UserError when it cannot be written; what was there stays intact.
    """
    temporary = path + '.tmp'
    try:
        with open(temporary, 'w+b') as file:
            torch.save(content, file)
            length = file.seek(0, os.SEEK_END)
            file.seek(length - 2)                       # the archive's last field: the length of its comment
            file.write(COMMENT_LENGTH.to_bytes(2, 'little'))
            file.write(digest(file, length))            # which leaves the file at its end
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == 'posix':                          # so that the new name outlasts a power failure
            folder = os.open(os.path.dirname(path) or '.', os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        system = error if isinstance(error, OSError) else error.__context__     # torch.save ends with its own
        if not isinstance(system, OSError):
            raise
        full = system.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = 'the disk is full, or files may not grow so large' if full else system.strerror
        raise UserError(f'{path}: cannot be written: {reason}; earlier checkpoints are intact') from None


def read_checkpoint(path):
    """Content of a checkpoint.  Raises UserError when it is missing, damaged or no checkpoint."""
    try:
        with open(path, 'rb') as file:
            length = file.seek(0, os.SEEK_END) - COMMENT_LENGTH
            if length < 0 or digest(file, length) != file.read():
                raise UserError(f'{path}: damaged, or not a checkpoint: its digest does not match')
        content = torch.load(path, map_location='cpu', weights_only=True)
        if 'lm_head' not in content.get('model_config', {}):
            raise UserError(f'{path}: of an earlier version, with other names and order of parameters')
        return content
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror}') from None
    except (pickle.UnpicklingError, RuntimeError):      # a good digest, but not what write_checkpoint wrote
        raise UserError(f'{path}: holds more than tensors and plain Python, so it is not loaded') from None


def newest_checkpoint(folder):
    """Path of the newest good checkpoint, or None; damaged ones are named on stderr."""
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            read_checkpoint(path)
            return path
        except UserError as error:
            say(f'{error}; taking the one before')
    if paths:
        raise UserError(f'{folder}: every checkpoint is damaged; start again in another out_dir')
    return None


def hold(folder):
    """Make `folder` this process's until let_go() or its end, of whatever kind.

    The lock is the operating system's, which takes it back from a killed process: none is ever stale.
    Raises UserError with the owner when another process has it.
    """
    let_go()                                            # a process has one run at a time
    os.makedirs(folder, exist_ok=True)
    file = open(os.path.join(folder, 'lock'), 'a+')     # noqa: SIM115, it stays open
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read() or 'another run'
        raise UserError(f'{folder}: in use by {owner}; end that first, or choose another --out_dir') from None
    except (ImportError, OSError):                      # Windows, and file systems without locks
        say(f'{folder} cannot be locked here: start no second run in it')
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    HELD.append(file)


def let_go():
    while HELD:
        HELD.pop().close()


def agree_on_folder(path, folder, ranks):
    """See that all processes have the checkpoint `path` alike, and the folder that rank 0 locked.

    path  rank 0's newest checkpoint, or None: then no other may have any
    Raises UserError with the machine that has not, if a checkpoint is at stake; else rank 0 says so.
    """
    def end_of(name, length):
        with contextlib.suppress(OSError), open(name, 'rb') as file:
            file.seek(-min(length, os.path.getsize(name)), os.SEEK_END)
            return file.read(length)

    seen = end_of(path, COMMENT_LENGTH) if path else checkpoints(folder)
    token = end_of(os.path.join(folder, 'lock'), 100)
    places = ranks.gather([(platform.node(), ranks.rank, seen, token)])
    for host, rank, there, _ in places:
        if there != places[0][2]:
            what = f'has not got {path}' if path else f'holds checkpoints that {places[0][0]} does not have'
            raise UserError(f'{folder}: not the same folder everywhere: rank {rank} on {host} {what}; put '
                            'out_dir on storage that all machines share, or copy it to each of them')
    apart = sorted({host for host, _, _, lock in places if lock != places[0][3]})
    if apart and ranks.main:
        say(f"{folder} is not shared with {', '.join(apart)}: checkpoints are on {places[0][0]} alone, so a "
            'restart goes on only after they are copied to each machine')


def find_checkpoint(init_from, out_dir):
    """Path of the checkpoint that init_from means; None where weights are new or a BERT's."""
    if init_from == 'scratch':
        return None
    if init_from in ('auto', 'resume'):
        path = newest_checkpoint(out_dir)
        if path is None and init_from == 'resume':
            raise UserError(f"init_from='resume': no checkpoint in {out_dir}")
        return path
    return init_from if init_from.endswith('.pt') else newest_checkpoint(init_from)


def refuse_to_overwrite(path, init_from, out_dir):
    """Raise UserError when a run from `path` (None: from step 0) would write over later checkpoints."""
    there = checkpoints(out_dir)
    if there and step_of(there[-1]) > (read_checkpoint(path)['step'] if path else -1):
        raise UserError(f'init_from={init_from!r}: {out_dir} holds {os.path.basename(there[-1])}; go on from '
                        'it with --init_from=resume, or choose another --out_dir')


def refuse_difference(where, stored, ours, what):
    """Raise UserError that names the first field in which two dicts differ."""
    for key, value in ours.items():
        if stored.get(key) != value:
            raise UserError(f'{where}: {what} differs: {key} is {stored.get(key)!r} there and {value!r} here')


def data_identity(meta):
    """What a checkpoint remembers of its data: digests of the tokenizer and of the shards of each split."""
    parts = {'tokenizer': [], 'train': [], 'val': []}
    for name, entry in sorted(meta['files'].items()):
        parts.get(name.partition('_')[0], parts['tokenizer']).append(f"{name} {entry['sha256']}")
    return {'vocab_size': meta['vocab_size'], **{
        part: hashlib.sha256(''.join(lines).encode()).hexdigest()[:16] for part, lines in parts.items()}}


def prune_checkpoints(folder, keep, milestones):
    """Delete all but the milestones and the newest `keep` of the others."""
    spared = {checkpoint_name(step) for step in milestones}
    for path in [path for path in checkpoints(folder) if os.path.basename(path) not in spared][:-keep]:
        os.remove(path)


# ---- log ----

class Log:
    """Lines on stdout and in metrics.jsonl, and Weights & Biases when asked, from the first rank alone."""

    def __init__(self, folder, step, ranks, project, config):
        self.main, self.path, self.wandb = ranks.main, os.path.join(folder, 'metrics.jsonl'), None
        if not self.main:
            return
        seen = [line for line in read_metrics(folder) if step and line['step'] <= step]
        write_whole(self.path, ''.join(json.dumps(line) + '\n' for line in seen))
        if project:
            try:
                import wandb
            except ImportError:
                raise UserError('wandb_project needs the wandb package: pip install wandb') from None
            self.wandb = wandb.init(project=project, name=os.path.basename(folder), config=config,
                                    reinit='finish_previous')       # finetune.py: a run for each trial

    def write(self, kind, step, text, **values):
        if not self.main:
            return
        if sys.stderr.isatty():
            print('\r\033[K', end='', file=sys.stderr, flush=True)                  # the progress bar
        print(text, flush=True)
        finite = {key: value for key, value in values.items() if value is None or math.isfinite(value)}
        with open(self.path, 'a') as file:
            file.write(json.dumps({'kind': kind, 'step': step, **finite}) + '\n')
        if self.wandb:
            self.wandb.log({f'{kind}/{key}': value for key, value in values.items()}, step=step)


def read_metrics(folder):
    """Lines of a run's metrics.jsonl as dicts; one that a kill cut off is dropped."""
    lines, path = [], os.path.join(folder, 'metrics.jsonl')
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):
                    lines.append(json.loads(line))
    return lines


def write_whole(path, text):
    """Replace a text file in one step; of processes that do so at once, one wins."""
    temporary = f'{path}.{os.getpid()}.tmp'
    with open(temporary, 'w') as file:
        file.write(text)
    os.replace(temporary, path)


def catch_signals():
    """A list that SIGTERM and SIGINT append their numbers to from now on, instead of ending the process."""
    caught = []
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda number, frame: caught.append(number))
    return caught


def progress_bar(step, total, ranks):
    """Redraw a bar on the last line of a terminal."""
    if ranks.main and sys.stderr.isatty():
        filled = 40 * step // total
        print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {step}/{total}", end='', file=sys.stderr, flush=True)


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes}:{seconds:02d}'


def describe(config, origins, model, loader, ranks, device, dtype):
    """The head of a log: the resolved knobs and what follows from them."""
    share = -(-loader.total_batch // ranks.world)
    return '\n'.join([
        table(config, origins),
        f'{count_parameters(model):,} parameters on {device} in {str(dtype)[6:]}; '
        f'{len(loader.rows):,} training rows of {loader.rows.block_size} tokens',
        f"total_batch {loader.total_batch} = {ranks.world} process(es) x {-(-share // config['batch_size'])} "
        f"micro-step(s) of at most {config['batch_size']} sequences"])


def changed_knobs(old, new):
    """Knobs that differ from a checkpoint's, for the log."""
    pairs = [f'{key} {old.get(key)!r} -> {value!r}' for key, value in new.items() if old.get(key) != value]
    return f"; changed: {', '.join(pairs)}" if pairs else ''


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{device} {platform.machine()}'


def write_manifest(folder, config, identity, device, ranks):
    """Append to run.json what makes this launch: command, revision, versions, device, data and knobs."""
    def git(*arguments):
        with contextlib.suppress(OSError):              # git may not be installed
            here = os.path.dirname(os.path.abspath(__file__))
            result = subprocess.run(['git', '-C', here, *arguments], capture_output=True, text=True)
            return result.stdout.strip() if result.returncode == 0 else None

    path, launches = os.path.join(folder, 'run.json'), []
    if os.path.exists(path):
        with contextlib.suppress(json.JSONDecodeError), open(path) as file:
            launches = json.load(file)
    status = git('status', '--porcelain')
    launches.append({
        'argv': sys.argv, 'date': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
        'git_revision': git('rev-parse', 'HEAD'), 'git_dirty': None if status is None else bool(status),
        'world_size': ranks.world, 'device': device_name(device),
        'python': platform.python_version(), 'torch': torch.__version__, 'numpy': np.__version__,
        'data': identity, 'config': config})
    write_whole(path, json.dumps(launches, indent=1))


def plot_losses(folder, unigram):
    """loss.png: training and validation loss against the unigram entropy of the corpus; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no loss.png without matplotlib: pip install matplotlib')
        return
    metrics, figure = read_metrics(folder), Figure(figsize=(7, 4))
    axes = figure.subplots()
    for kind, style in (('train', '-'), ('val', 'o-')):
        axes.plot([line['step'] for line in metrics if line['kind'] == kind],
                  [line['loss'] for line in metrics if line['kind'] == kind], style, label=kind)
    axes.axhline(unigram, color='gray', linestyle='--', label='unigram entropy')
    axes.set(xlabel='step', ylabel='masked-LM loss, nats a token', title=os.path.basename(folder))
    axes.legend()
    figure.savefig(os.path.join(folder, 'loss.png'), dpi=120, bbox_inches='tight')


# ---- filling in masks ----

@torch.no_grad()
def predictions(model, tokenizer, special, ids):
    """A line for each [MASK] in `ids` (no [CLS], no [SEP]): the best five tokens and their probabilities."""
    row = torch.tensor([[special['cls'], *ids, special['sep']]], device=next(model.parameters()).device)
    masks = (row[0] == special['mask']).nonzero()[:, 0]
    best = model.eval()(row, positions=masks[None])[0].float().softmax(-1).topk(5)
    lines = []
    for chances, tokens in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        pieces = (tokenizer.piece(token) for token in tokens)
        words = (piece.strip('\u2581 ') or piece for piece in pieces)     # without the mark of a word's start
        lines.append('    ' + '   '.join(f'{word} {p:.3f}' for word, p in zip(words, chances, strict=True)))
    return lines


def fill_masks(model, tokenizer, special, text):
    """`text` and the predictions for its [MASK]s.  Raises UserError when it has none or is too long."""
    first, *others = text.split('[MASK]')
    if not others:
        raise UserError(f'fill={text!r}: put a [MASK] where a word is to be filled in')
    ids = tokenizer.encode(first.rstrip())
    for part in others:
        ids += [special['mask'], *tokenizer.encode(part)]
    if len(ids) + 2 > model.config.block_size:
        raise UserError(f'fill: {len(ids)} tokens, but the model reads at most {model.config.block_size - 2}')
    return '\n'.join([text, *predictions(model, tokenizer, special, ids)])


def masked_sentences(documents, tokenizer, word_start, special, n):
    """First sentences of `n` rows, each with a whole word masked: [(text, the word, ids)], always the same.

    documents  DocumentRows; those are taken that start with 8 to 30 tokens of prose up to a full stop
    """
    rng, sentences = np.random.default_rng(0), []
    for index in rng.permutation(len(documents)):
        ids = documents.get([index])[0, 1:].tolist()
        length = next((i + 1 for i, token in enumerate(ids[:30]) if tokenizer.piece(token).endswith('.')), 0)
        ids, text = ids[:length], tokenizer.decode(ids[:length])
        whole = [i for i in range(2, length - 1) if word_start[ids[i]] and word_start[ids[i + 1]]
                 and len(word := tokenizer.decode([ids[i]]).strip()) > 3 and word.isalpha()]
        prose = sum(letter.isalpha() or letter == ' ' for letter in text) > 0.93 * len(text)
        if length < 8 or not whole or not prose or not word_start[ids[0]]:
            continue
        i = int(rng.choice(whole))
        text = f'{tokenizer.decode(ids[:i])} [MASK] {tokenizer.decode(ids[i + 1:]).strip()}'
        word = tokenizer.decode([ids[i]]).strip()
        sentences.append((text, word, [*ids[:i], special['mask'], *ids[i + 1:]]))
        if len(sentences) == n:
            break
    return sentences[:n]


def show_sentences(model, documents, tokenizer, word_start, special, n):
    """Print `n` of masked_sentences with what the model fills in."""
    for text, word, ids in masked_sentences(documents, tokenizer, word_start, special, n):
        print('', text, f'    masked: {word}', *predictions(model, tokenizer, special, ids), sep='\n')


# ---- main ----

def check_knobs(config, at_least, below, at_most):
    """Raise UserError for a knob out of range, as far as nothing else checks it where it is used."""
    for key, least in at_least.items():
        if config[key] < least:
            raise UserError(f'{key}={config[key]}: must be at least {least}')
    for key in ('learning_rate', 'adam_eps'):
        if config[key] <= 0:
            raise UserError(f'{key}={config[key]}: must be positive')
    for key, limit in below.items():
        if config[key] >= limit:
            raise UserError(f'{key}={config[key]}: must be below {limit}')
    for key, other in at_most.items():
        if config[key] > config[other]:
            raise UserError(f'{key}={config[key]}: must be at most {other}={config[other]}')
    if not config['out_dir']:
        raise UserError("out_dir='': name a folder, as in --out_dir=out/run")
    choose('schedule', config['schedule'], SCHEDULE)


def prepared(dataset, data_dir, prepare, ranks):
    """(folder, meta) of a prepared corpus, prepared first when `prepare` names a config file for that."""
    folder = os.path.join(data_dir, dataset)
    if prepare and ranks.main and not os.path.exists(os.path.join(folder, 'meta.json')):
        here = os.path.dirname(os.path.abspath(__file__))
        print(f'{folder} is not there yet: preparing it with {prepare}', flush=True)
        command = [sys.executable, os.path.join(here, 'prepare_data.py'), os.path.join(here, prepare)]
        command += [f'--name={dataset}', f'--data_dir={data_dir}']
        status = subprocess.run([*command, '--shard=0/1']).returncode       # all, though torchrun numbers us
        if status:
            raise UserError(f'{prepare}: preparing {folder} failed with status {status}')
    ranks.agree(None)                                   # the others wait for the first
    meta = load_meta(folder)
    if ranks.local == 0:
        check_files(folder, meta)
    ranks.gather([folder])                              # all wait for the first of each machine
    return folder, meta


def make_model(encoder_config, objective, init_from, path, content):
    """Model with a checkpoint's weights, a BERT's, or new ones.  Raises UserError where shapes differ."""
    shape = {key: value for key, value in asdict(encoder_config).items() if key not in MAY_CHANGE}
    if path:
        refuse_difference(path, asdict(EncoderConfig(**content['model_config'])), shape, 'the model')
        refuse_difference(path, content['config'], {'objective': objective}, 'the model')
    model = OBJECTIVE[objective][0](encoder_config)
    if path:
        model.load_state_dict(content['model'])
    elif init_from not in ('auto', 'scratch'):
        bert = load_bert(init_from)
        refuse_difference(init_from, {**asdict(bert.config), 'objective': 'mlm'},
                          {**shape, 'objective': objective}, 'the model')
        model.load_state_dict(bert.state_dict())
    return model


def load_bert(name, read=MaskedLM.from_pretrained):
    """read(name), a Hugging Face BERT; what that package says is made one line."""
    try:
        return read(name)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(f'init_from={name!r}: neither a checkpoint nor a BERT: {reason}') from None


def use_checkpoint(fill, export, init_from, out_dir, folder, meta):
    """Load the run's checkpoint or the one that init_from names; print predictions or write a BERT folder."""
    path = find_checkpoint('resume' if init_from in ('auto', 'scratch') else init_from, out_dir)
    if path:
        content = read_checkpoint(path)
        refuse_difference(path, content['data'], {'tokenizer': data_identity(meta)['tokenizer']}, 'the data')
        model = OBJECTIVE[content['config']['objective']][0](EncoderConfig(**content['model_config']))
        model.load_state_dict(content['model'])
    else:
        model = load_bert(init_from)
        ours = {'vocab_size': meta['vocab_size']}
        refuse_difference(init_from, asdict(model.config), ours, 'the tokenizer')
    if fill:
        print(fill_masks(model, load_tokenizer(folder, meta), meta['special'], fill))
    if export:
        if not isinstance(model, MaskedLM):
            raise UserError(f'export={export!r}: transformers\' BERT is a masked language model, '
                            f'{path} is not')
        model.save_pretrained(export)
        shutil.copy(os.path.join(folder, load_tokenizer(folder, meta).file_name), export)
        print(f'wrote {export}: transformers.BertForMaskedLM.from_pretrained({export!r}) loads it')


def main():
    config, origins = configure(globals())
    ranks, torch_device = join_ranks(device)
    check_knobs(config, {**AT_LEAST, 'total_batch': ranks.world}, BELOW, AT_MOST)
    torch_dtype = choose_dtype(dtype, torch_device)
    if zero and queued(torch_device):
        raise UserError(f'zero=True: not with device={device!r}')
    folder, meta = prepared(dataset, data_dir, prepare, ranks)
    if fill or export:
        return use_checkpoint(fill, export, init_from, out_dir, folder, meta)
    watch(ranks, timeout)
    if ranks.main:
        hold(out_dir)

    # data
    word_start = np.fromfile(os.path.join(folder, 'word_start.bin'), np.uint8)
    model_class, masker_class = choose('objective', objective, OBJECTIVE)
    masker = masker_class(meta, block_size, mask_fraction, word_start if whole_word else None)
    rows = choose('packing', packing, PACKING)
    train_rows, val_rows = (rows(folder, meta, split, block_size) for split in ('train', 'val'))
    loader = Loader(train_rows, masker, seed, total_batch, ranks.share(total_batch))
    val_loader = Loader(val_rows, masker, 0, EVAL_ROWS, ranks.share(EVAL_ROWS), eval_samples or len(val_rows))
    identity, unigram = data_identity(meta), meta['unigram_entropy']

    # model, optimizer, and where a checkpoint left them
    path = ranks.agree(find_checkpoint(init_from, out_dir) if ranks.main else None)
    agree_on_folder(path, out_dir, ranks)
    if init_from not in ('auto', 'resume'):
        refuse_to_overwrite(path, init_from, out_dir)
    content = read_checkpoint(path) if path else {}
    torch.manual_seed(seed)
    raw = make_model(model_config(config, meta['vocab_size']), objective, init_from, path, content)
    place(raw, torch_device)
    optimizer = make_optimizer(raw, learning_rate, (beta1, beta2), adam_eps, weight_decay, torch_device,
                               zero and ranks.world > 1)
    scaler = torch.amp.GradScaler(torch_device.type, enabled=torch_dtype == torch.float16)
    step, best_loss = 0, math.inf
    if path:
        refuse_difference(path, content['data'], identity, 'the data')
        load_optimizer(optimizer, content['optimizer'])
        if content['scaler'] and scaler.is_enabled():
            scaler.load_state_dict(content['scaler'])
        step, best_loss = content['step'], content['best_loss']
        config['milestones'] = tuple(sorted({*milestones, *content['config']['milestones']}))

    # compile and wrap
    model = compiled_or_eager(raw, compile, loader.batch(step), batch_size, torch_device, torch_dtype)
    wrapped = wrap(model, ranks, torch_device)
    one, two = (training_flops(raw.config, block_size, masker.k, model_class, rows) for rows in (1, 2))
    micro_steps = ranks.world * -(-total_batch // (ranks.world * batch_size))
    flops = total_batch * (two - one) + micro_steps * (2 * one - two)       # vectors of `rpe` need no rows
    peak = peak_flops(torch_device, torch_dtype)

    # log and signals
    if ranks.main:
        write_manifest(out_dir, config, identity, torch_device, ranks)
        print(describe(config, origins, raw, loader, ranks, torch_device, torch_dtype))
        if path:
            print(f"continuing {path} at step {step}{changed_knobs(content['config'], config)}", flush=True)
    validated = content.pop('validated', False)
    content.clear()                                     # weights and optimizer have their copies
    log = Log(out_dir, step, ranks, wandb_project, config)
    stop = catch_signals()

    def validate():
        scores = evaluate(raw, val_loader, batch_size, ranks, torch_device, torch_dtype)
        text = (f"step {step}: validation loss {scores['loss']:.4f} (unigram {unigram:.4f}), masked accuracy "
                f"{scores['accuracy']:.2%}, perplexity {scores['perplexity']:.1f}")
        log.write('val', step, text, **scores)
        return min(best_loss, scores['loss'])

    # the loop
    if not validated:
        best_loss = validate()
    logged, since, waited = step, time.perf_counter(), 0.0      # last log line; seconds on the loader since
    batches = prefetch(loader.batch, range(step, max_iters))
    while step < max_iters:
        before = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - before
        parts = micro_batches(batch, batch_size, torch_device)
        rate = rate_at(step, learning_rate, min_lr, warmup_iters, max_iters, schedule)
        seed_step(seed, step, ranks.rank)
        count, stopping = ranks.sum(torch.tensor([float(batch['weights'].sum()), len(stop)]).to(torch_device))
        where = f'step {step}, samples {step * total_batch} to {(step + 1) * total_batch - 1}'
        step += 1
        reading = reads_at(step, torch_device, (max_iters, *milestones), log_interval, eval_interval,
                           checkpoint_interval)
        loss, norm = optimizer_step(wrapped, raw, optimizer, scaler, parts, count, rate, grad_clip, ranks,
                                    torch_device, torch_dtype, where, reading)
        stopping = stopping.item() if reading else 0
        if step % log_interval == 0 or step == max_iters:
            seconds = time.perf_counter() - since
            per_step, share = seconds / (step - logged), waited / seconds
            speed = total_batch * block_size / per_step
            mfu = flops / per_step / ranks.world / peak if peak else None
            graphs = compilations(torch_device)
            text = (f'step {step}/{max_iters}: loss {loss:.4f}, lr {rate:.2e}, norm {norm:.2f}, '
                    f"{speed:,.0f} tokens/s, mfu {f'{mfu:.1%}' if mfu else 'n/a'}, loader {share:.1%}, "
                    f'eta {clock((max_iters - step) * per_step)}'
                    f"{''.join(f', {key} {n}' for key, n in graphs.items())}")
            log.write('train', step, text, loss=loss, lr=rate, norm=norm, tokens_per_second=speed, mfu=mfu,
                      loader_seconds=waited / (step - logged), loader_share=share, **graphs)
            logged, since, waited = step, time.perf_counter(), 0.0
        progress_bar(step, max_iters, ranks)
        paused = time.perf_counter()
        validated = not (step == max_iters or (eval_interval and step % eval_interval == 0))
        if not validated and not stopping:              # a resumed run makes up for it
            best_loss, validated = validate(), True
        due = checkpoint_interval and step % checkpoint_interval == 0
        due = due or stopping or step in milestones or step == max_iters
        state = optimizer_state(optimizer, ranks) if due else None
        if due and ranks.main:
            write_checkpoint(os.path.join(out_dir, checkpoint_name(step)), {
                'step': step, 'model': to_host(raw.state_dict(), torch_device),
                'optimizer': to_host(state, torch_device),
                'scaler': scaler.state_dict(), 'rng': {'seed': seed, 'step': step},         # see seed_step
                'config': config, 'model_config': asdict(raw.config), 'data': identity,
                'best_loss': best_loss, 'validated': validated})
            prune_checkpoints(out_dir, keep_checkpoints, config['milestones'])
        since += time.perf_counter() - paused
        if stopping:
            say(f'stopped by signal after step {step}; {out_dir}/{checkpoint_name(step)} is written; '
                '--init_from=auto goes on from there')
            break

    if ranks.main and step == max_iters:
        plot_losses(out_dir, unigram)
        show_sentences(to_host(raw, torch_device), DocumentRows(folder, meta, 'val', block_size),
                       load_tokenizer(folder, meta), word_start, meta['special'], fill_samples)
    leave(ranks, 128 + (stop[0] if stop else signal.SIGTERM) if step < max_iters else 0)


def in_memory(main, scope):
    """main() of the stage whose globals are `scope`, with what befalls a machine in one line."""
    try:
        main()
    except torch.OutOfMemoryError:
        advice = f"halve batch_size={scope['batch_size']}; the total batch stays"
        raise UserError(f'out of memory: {advice}') from None
    except RuntimeError as error:                       # what gloo and NCCL raise differs
        if not dist.is_initialized() or not re.search('gloo|NCCL|onnection|timed out', str(error)):
            raise
        raise UserError(f'lost another process ({str(error).splitlines()[0][:100]}); the same command goes '
                        'on from the last checkpoint') from None


if __name__ == '__main__':
    run(lambda: in_memory(main, globals()))
