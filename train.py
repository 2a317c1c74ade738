"""Pretraining on one device or many: masked or permuted language model.

    $ python train.py config/quickstart.py
    $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
    $ python train.py --init_from=out/quickstart --fill="the [MASK] of a matrix"

The first half of this file is pretraining, in the order in which data flows; main() ends it. The second
half keeps a run of weeks alive and shows what came of it. No loss depends on it: read it when you need it.

    1  rows       the prepared tokens of a corpus, cut into sequences
    2  batches    sample n of the run -> its row -> its masks
    3  steps      learning rate, update, the loop, evaluation
    4  main       the run

    5  care       devices and processes, checkpoints, signals
    6  results    log, pictures, predictions, export

Sample n of a run and its masks depend on (data, seed, n) alone, dropout on (seed, step, rank). So
any number of processes sees the same batches, and a resumed run of as many processes repeats an
uninterrupted one, on the CPU to the bit.
"""
import atexit
import contextlib
import glob
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from configurator import ROOT, UserError, choose, configure, run, say, shown
from model import (EncoderConfig, MaskedLM, MultipleChoice, PermutationLM, SequenceClassifier, SpanClassifier,
                   count_parameters, model_config, to_transformers, token_losses)
from prepare_data import (check_corpus, copy_tokenizer, fast_tokenizer, load_meta, load_tokenizer, read_json,
                          write_bytes, write_json)

# the run
out_dir = 'out/run'             # the run's folder; a run goes on from its newest checkpoint
init_from = ''                  # if out_dir has no checkpoint: start from this run, checkpoint or BERT
seed = 1                        # for weights, sample order, masks and dropout
fill = ''                       # a text with [MASK]: print the predictions of init_from and stop
export = ''                     # a folder: export init_from there for transformers and stop
# data
dataset = 'docstrings'          # folder below data_dir, made by prepare_data.py
data_dir = 'data'               # parent folder of prepared corpora
validation = ''                 # more folders below data_dir to validate on, of the same tokenizer: a,b
block_size = 512                # tokens per sequence, including [CLS] and [SEP]
packing = 'stream'              # stream: joined documents, cut to length; documents: padded rows
objective = 'mlm'               # mlm: masked; plm: permuted, needs attention = 'xlnet'
mask_fraction = 0.15            # fraction of the tokens that is predicted
whole_word = False              # predict all pieces of a word together
# model
attention = 'original'          # a key of ATTENTION in model.py: symmetric, pairwise, gau ...
position = 'absolute'           # absolute, none, rope, rpe or rab; Shatter and xlnet require none
norm = 'layer'                  # layer, or rms without weights
lm_head = 'bert'                # bert, or decoder: the tied matrix alone
bias = True                     # biases of Linears and norms
pair_rank = 0                   # pairwise: rank of S, 0 for full
pair_init = 'identity'          # pairwise: initial S: identity, fan_in, normal or unit
normaliser = 'softmax_plus'     # gau: softmax, softmax_plus, squared_relu or scaled_squared_relu
relu_scale = 'ns'               # squared_relu: n2, n, ns, s2 or ns2
key_size = 128                  # gau: width of queries and keys
clip_distance = 128             # rpe: relative distances are clipped at +-(clip_distance - 1)
same_partition = False          # Shatter: all layers have the partition of the last layer
one_value_matrix = False        # Shatter but part_mask: the values are not split into parts, y = A v
n_layer = 12                    # blocks
n_head = 12                     # heads; must divide n_embd
n_embd = 768                    # width
n_inner = 3072                  # width of the MLP, usually 4 n_embd
dropout = 0.0                   # after embeddings and sublayers; 0.1 in the papers, 0 is faster
attention_dropout = 0.0         # of attention weights; 0.1 in the papers
# optimization
total_batch = 256               # sequences per optimizer step over all devices
batch_size = 32                 # sequences per device and micro-step; halve it if out of memory
max_iters = 200_000             # optimizer steps
learning_rate = 1e-4            # peak
min_lr = 0.0                    # final value of linear and cosine
warmup_iters = 10_000           # steps of linear warmup; max_iters / 10 if it exceeds max_iters
schedule = 'linear'             # linear, cosine, constant or thirds, after the warmup
beta1 = 0.9                     # of Adam
beta2 = 0.999                   # of Adam
adam_eps = 1e-12                # of Adam
weight_decay = 0.01             # on matrices; never on biases, norms and diagonals
grad_clip = 1.0                 # largest gradient norm; 0: no clipping
# evaluation, log and checkpoints
eval_interval = 1000            # steps between evaluations; 0: only at the end
eval_samples = 10_000           # validation sequences, a fixed random subset
log_interval = 100              # steps between log lines
checkpoint_interval = 1000      # steps between checkpoints; 0: only at the end
milestones = ()                 # steps whose checkpoints stay, 1000,10000; of the others the newest two
fill_samples = 3                # held-out sentences to fill in at the end
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, mps or xla
dtype = 'auto'                  # auto (bfloat16 where it is faster), float32, bfloat16 or float16
compile = True                  # torch.compile, on CUDA
timeout = 600                   # seconds a process waits for another before it exits; 0: no limit

MINIMUM = {**dict.fromkeys((                # least values of knobs; of the others 0
    'batch_size', 'block_size', 'clip_distance', 'eval_samples', 'key_size', 'log_interval',
    'n_embd', 'n_head', 'n_inner', 'n_layer', 'total_batch'), 1)}
MODEL_CLASSES = {                       # objective of train.py or head of finetune.py -> class of the model
    'mlm': MaskedLM, 'plm': PermutationLM, 'classify': SequenceClassifier, 'regress': SequenceClassifier,
    'choose': MultipleChoice, 'span': SpanClassifier,
}


# ---- 1. rows: the tokens of a corpus, cut into sequences ----

class Rows:
    """Sequences [CLS] tokens [SEP] of a split, each read from its shard's file when it is asked for.

    stream     the documents, joined by [SEP], are cut every block_size - 2 tokens
    documents  each document is cut by itself; its last row is shorter and padded
    No file stays open: a large corpus has more shards than a process may open.
    """

    def __init__(self, folder, meta, split, block_size, packing, whole_word=False):
        self.folder, self.special_ids, self.dtype = folder, meta['special'], np.dtype(meta['dtype'])
        self.block_size, self.packing = block_size, packing
        self.room = block_size - 2                      # tokens between [CLS] and [SEP]

        # An id of the vocabulary starts a word or does not. In Chinese that depends on the text: then the
        # segmenter of prepare_data.py has written it down for each token.
        self.word_start = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), bool)
        self.segmented = whole_word and 'segmenter' in meta

        shards = meta['splits'][split]
        self.stems = [os.path.join(folder, shard['stem']) for shard in shards]
        self.starts = [self.row_starts(stem, shard['tokens'])
                       for stem, shard in zip(self.stems, shards, strict=True)]
        self.ends = np.cumsum([0] + [len(starts) for starts in self.starts])        # rows before each shard
        if not len(self):
            raise UserError(f'{folder}: {split} holds less than one row of block_size={block_size}')

    def row_starts(self, stem, n_tokens):
        """Index of the first token of each row of a shard."""
        if self.packing == 'stream':
            return range(0, n_tokens - self.room + 1, self.room)        # an incomplete last row is left out
        edges = np.fromfile(stem + '.idx', np.int64)    # first token of each document, then n_tokens
        lengths = np.diff(edges) - 1                    # of the documents, without the [SEP] that ends each
        n_rows = -(-lengths // self.room)               # of each document: the quotient, rounded up
        first_row = np.cumsum(n_rows) - n_rows          # of each document, counted from the shard's first row
        place = np.arange(n_rows.sum()) - np.repeat(first_row, n_rows)      # of each row in its document
        return np.repeat(edges[:-1], n_rows) + place * self.room

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, index):
        """(ids (T,) int64, whether each token starts a word (T,) bool) of a row"""
        shard = np.searchsorted(self.ends, index, side='right') - 1
        stem = self.stems[shard]
        start = int(self.starts[shard][index - self.ends[shard]])
        tokens = np.fromfile(stem + '.bin', self.dtype, self.room, offset=start * self.dtype.itemsize)
        if self.packing == 'documents':                 # what follows [SEP] is of the next document
            separators = np.flatnonzero(tokens == self.special_ids['sep'])
            tokens = tokens[:separators[0]] if len(separators) else tokens

        n = len(tokens)
        ids = np.full(self.block_size, self.special_ids['pad'], np.int64)
        ids[0] = self.special_ids['cls']
        ids[1:n + 1] = tokens
        ids[n + 1] = self.special_ids['sep']

        word_starts = self.word_start[ids]
        if self.segmented:
            word_starts[1:n + 1] = np.fromfile(stem + '.words', bool, n, offset=start)
        return ids, word_starts


# ---- 2. batches: sample n of the run -> its row -> its masks ----

def shuffled(places, n, seed, epoch):
    """The items at `places`, (B,), of range(n) in random order: one order for each (seed, epoch).

    A list of 10^9 rows in random order would take 8 GB in each process; this takes no memory. A Feistel
    network is a cipher: it permutes all numbers of some even number of bits, without a table. The next even
    number of bits above n gives up to 4n numbers; a result of n or more is put through the network again,
    until it is one of ours. That is still a permutation, as a cycle that leaves range(n) comes back to it.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))       # bits of each half of a number
    low = (np.uint64(1) << half) - np.uint64(1)                     # mask of the right half
    keys = np.random.SeedSequence([seed, epoch]).generate_state(8, np.uint64)       # of the eight rounds
    x = np.array(places, np.uint64)
    again = np.ones(len(x), bool)
    while again.any():
        left, right = x[again] >> half, x[again] & low
        for key in keys:                                            # any function of (right, key) would do
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)           # 2^64 / golden ratio, mod 2^64
            mixed = (mixed ^ (mixed >> np.uint64(29))) * (key | np.uint64(1))
            left, right = right, left ^ (mixed >> np.uint64(32)) & low
        x[again] = left << half | right
        again = x >= n
    return x.astype(np.int64)


class Masker:
    """BERT's masking with static shapes.  Devlin et al. 2018, section 3.1

    Of a row's n tokens ceil(fraction n) are predicted, those with the smallest random scores: 80 % become
    [MASK], 10 % a random token, 10 % stay. Special tokens are neither chosen nor inserted. Every row of the
    batch has k = ceil(fraction T) positions; those that a short row does not need have weight 0.
    plm: nothing is masked; 'order' is each token's place in XLNet's permutation.  Yang et al. 2019, 2.2, 2.3
    """

    def __init__(self, meta, block_size, fraction, objective, whole_word):
        self.fraction, self.objective, self.whole_word = fraction, objective, whole_word
        self.special_ids, self.block_size = meta['special'], block_size
        self.is_special = np.isin(np.arange(meta['vocab_size']), list(self.special_ids.values()))       # (V,)
        self.ordinary = np.flatnonzero(~self.is_special)                                            # ids
        self.k = self.count(block_size)

    def count(self, n):
        return np.ceil(self.fraction * n - 1e-9).astype(int)                # so that 0.15 * 20 gives 3

    def __call__(self, ids, word_starts, seed, samples):
        """ids, word_starts (B, T) -> {'ids' (B, T), 'positions', 'targets', 'weights' (B, k)[, 'order']}"""
        # The random numbers of a sample depend on its number alone, never on the rest of its batch.
        rngs = [np.random.default_rng([seed, sample]) for sample in samples]
        scores = np.stack([rng.random(self.block_size, np.float32) for rng in rngs])                # (B, T)
        actions = np.stack([rng.random(self.k, np.float32) for rng in rngs])                        # (B, k)
        replacements = self.ordinary[[rng.integers(0, len(self.ordinary), self.k) for rng in rngs]]

        # Which tokens: the k of the smallest scores, of which the first `wanted` count.
        special = self.is_special[ids]                                                              # (B, T)
        n_tokens = (ids != self.special_ids['pad']).sum(1)                                              # (B,)
        wanted = np.minimum(self.count(n_tokens), (~special).sum(1))
        ranked = np.where(special, 2, scores)           # scores are below 1: special tokens come last
        positions = np.argsort(ranked, axis=1, kind='stable')[:, :self.k]
        if self.whole_word:
            for i, row in enumerate(zip(scores, word_starts, special, wanted, strict=True)):
                positions[i], wanted[i] = whole_words(*row, self.k)
        chosen = np.arange(self.k) < wanted[:, None]                                                # (B, k)
        targets = np.take_along_axis(ids, positions, axis=1)
        batch = {'ids': ids, 'positions': positions, 'targets': targets, 'weights': chosen.astype(np.float32)}
        if self.objective == 'plm':
            return {**batch, 'order': self.permutation(scores, special, positions, chosen)}

        # What the model sees in their place.
        changed = np.where(actions < 0.9, replacements, targets)
        visible = np.where(actions < 0.8, self.special_ids['mask'], changed)
        np.put_along_axis(ids, positions, np.where(chosen, visible, targets), axis=1)       # in place
        return batch

    def permutation(self, scores, special, positions, chosen):
        """(B, T) place of each token: 0 for special tokens, the predicted ones last, else by score."""
        predicted = np.zeros(special.shape, bool)
        np.put_along_axis(predicted, positions, chosen, axis=1)
        ranked = np.where(special, -1, scores + 2 * predicted)
        by_place = np.argsort(ranked, axis=1, kind='stable')                # token at each place
        place = np.argsort(by_place, axis=1) + 1                            # place of each token
        return np.where(special, 0, place)


def whole_words(scores, word_starts, special, wanted, k):
    """(k positions of a row, how many of them count): whole words in random order, at most `wanted` tokens.

    A word with more tokens than are still wanted is passed over, as in BERT. A special token is a word.
    """
    after_special = np.append(True, special[:-1])
    first = word_starts | special | after_special                   # (T,) does a word start here?
    words = np.split(np.arange(len(first)), np.flatnonzero(first)[1:])
    chosen = []
    for number in np.argsort(scores[:len(words)], kind='stable'):
        word = words[number]
        if not special[word[0]] and len(chosen) + len(word) <= wanted:
            chosen += [*word]
    others = np.setdiff1d(np.arange(len(first)), chosen)            # fill up to k, with weight 0
    return np.array([*chosen, *others])[:k], len(chosen)


class Loader:
    """Samples 0, 1, 2 ... of a run: every row once per epoch, each epoch in another order."""

    def __init__(self, rows, masker, seed):
        self.rows, self.masker, self.seed = rows, masker, seed

    def indices(self, samples):
        """Row of each sample, (B,)"""
        epochs, places = np.divmod(np.array(samples), len(self.rows))
        for epoch in np.unique(epochs):                 # a batch may begin in one epoch and end in the next
            here = epochs == epoch
            places[here] = shuffled(places[here], len(self.rows), self.seed, int(epoch))
        return places

    def batch(self, samples):
        """{'ids', 'positions', 'targets', 'weights'[, 'order'][, 'attention_mask']}, tensors of B rows"""
        rows = [self.rows[index] for index in self.indices(samples)]
        ids = np.stack([ids for ids, _ in rows])
        word_starts = np.stack([starts for _, starts in rows])
        batch = self.masker(ids, word_starts, self.seed, samples)
        if self.rows.packing == 'documents':            # else no row has padding
            batch['attention_mask'] = ids != self.rows.special_ids['pad']
        return {key: torch.from_numpy(x) for key, x in batch.items()}

    def micro_batches(self, samples, size):
        """Batches of at most `size` samples, as equal as possible."""
        n = len(samples)
        parts = -(-n // size)
        edges = [n * i // parts for i in range(parts + 1)]
        return [self.batch(samples[begin:end]) for begin, end in zip(edges[:-1], edges[1:], strict=True)]


def prefetch(make, items):
    """Yield make(item) for each item; a background thread makes the next one meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        submitted = (pool.submit(make, item) for item in items)
        ahead = next(submitted, None)
        while ahead:
            now, ahead = ahead, next(submitted, None)
            yield now.result()


def make_loaders(config):
    """(meta.json, Loader of training rows, {corpus: Loader of validation rows}); '' is the run's corpus"""
    choose('objective', config['objective'], dict.fromkeys(('mlm', 'plm')))
    choose('packing', config['packing'], dict.fromkeys(('stream', 'documents')))
    home, whole_word = config['data_dir'], config['whole_word']
    how = config['block_size'], config['packing'], whole_word

    folder = os.path.join(home, config['dataset'])
    meta = load_meta(folder)                            # says how to prepare the corpus if it is missing
    masker = Masker(meta, config['block_size'], config['mask_fraction'], config['objective'], whole_word)
    loader = Loader(Rows(folder, meta, 'train', *how), masker, config['seed'])

    val_loaders = {}
    for name in ['', *filter(None, config['validation'].split(','))]:
        place = os.path.join(home, name or config['dataset'])
        found = load_meta(place)
        check_corpus(place, found)
        refuse_difference(place, found['identity'], {'tokenizer': meta['identity']['tokenizer']})
        val_loaders[name] = Loader(Rows(place, found, 'val', *how), masker, 0)      # seed 0: of every run
    return meta, loader, val_loaders


# ---- 3. steps: learning rate, update, the loop, evaluation ----

SCHEDULE = {                    # progress after the warmup, 0 to 1 -> fraction of (learning_rate - min_lr)
    'linear': lambda progress: 1 - progress,
    'cosine': lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    'constant': lambda progress: 1.0,
    'thirds': lambda progress: (1.0, 0.2, 0.02)[min(2, int(3 * progress))],    # 1e-4, 2e-5, 2e-6: Kowsher A.4
}


def get_lr(step, peak, low, warmup, total, schedule):
    """Learning rate of update `step`, from 0: linear warmup to the peak, then SCHEDULE towards `low`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return low + (peak - low) * SCHEDULE[schedule](progress)


def set_lr(optimizer, lr, runtime):
    for group in optimizer.param_groups:
        group['lr'] = runtime.scalar(lr)


def make_optimizer(model, lr, betas, eps, weight_decay, runtime):
    """AdamW, fused if possible; weight decay on parameters of two or more dimensions, also pairwise's S."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]        # biases, norms, diagonals
    groups = [{'params': matrices, 'weight_decay': weight_decay}, {'params': vectors, 'weight_decay': 0.0}]
    if runtime.device.type == 'xla':                    # Adam's count of steps stays on the device
        kernel = {'capturable': True, 'foreach': False}
    else:
        kernel = {'fused': runtime.device.type in ('cuda', 'cpu')}
    return torch.optim.AdamW(groups, runtime.scalar(lr), betas, eps, **kernel)


def seed_step(seed, step, runtime):
    """Seed torch for a step: dropout depends only on (seed, step, rank), not on earlier steps."""
    number = int(np.random.SeedSequence([seed, step, runtime.rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    if runtime.device.type == 'xla':                    # XLA has its own generator
        sys.modules['torch_xla'].manual_seed(number)


def update(model, optimizer, scaler, parts, count, grad_clip, runtime):
    """One optimizer step on this rank's micro-batches; returns its part of the loss and the gradient norm.

    count  predicted tokens of the step over all ranks and micro-batches: the loss is their mean
    Both results are tensors: the host does not wait for the device here.
    """
    total = torch.zeros(1, device=runtime.device)
    count = runtime.scalar(max(1.0, count))
    for i, part in enumerate(parts):
        part = runtime.move(part)
        weights = part.pop('weights')                               # (b, k)
        # DDP all-reduces the gradients in backward(): once a step, with the last micro-batch.
        accumulates = runtime.cpu_group is not None and i < len(parts) - 1
        with model.no_sync() if accumulates else contextlib.nullcontext():
            with runtime.autocast():
                losses = model(**part)                              # (b, k)
            loss = (losses * weights).sum() / count
            scaler.scale(loss * runtime.world).backward()           # DDP divides by the number of ranks
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)                              # float16: no step if a gradient is not finite
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    runtime.sync()
    return total[0], norm


class Report(NamedTuple):
    """What the host reads from the device after some steps."""
    loss: float                 # of the last step
    norm: float                 # of its gradient
    lr: float
    steps: int                  # since the last report
    seconds: float              # that they took


def fit(training, model, batches, rate, seed, grad_clip, due, runtime, stop=()):
    """The training loop.  Yields a Report after each step that is due; in between nothing is read.

    batches  the micro-batches of each step, for this rank
    rate     step -> its learning rate
    due      after a step: does the caller want a Report?
    stop     list of caught signals: after the step, all ranks raise Stopped
    """
    bad = torch.zeros((), device=runtime.device)        # steps that were not finite
    looked, since = training.step, time.perf_counter()
    for parts in batches:
        predicted = sum(part['weights'].sum().item() for part in parts)
        predicted, signals = runtime.sum(predicted, len(stop))
        lr = rate(training.step)
        set_lr(training.optimizer, lr, runtime)
        seed_step(seed, training.step, runtime)
        loss, norm = update(model, training.optimizer, training.scaler, parts, predicted, grad_clip, runtime)
        float16 = training.scaler.is_enabled()
        finite = loss.isfinite() if float16 else (loss + norm).isfinite()       # its scaler skips a bad norm
        bad = bad + ~finite
        training.advance()
        if not signals and not due():
            continue                                    # the host runs ahead of the device
        loss, broken = runtime.sum(loss.item(), bad.item())         # the host waits for the device
        if broken or (float16 and training.scaler.get_scale() < 1):
            raise UserError(f'{training.name}: a loss or gradient after step {looked} is not finite; '
                            'no checkpoint has it; try a lower learning_rate')
        yield Report(loss, norm.item(), lr, training.step - looked, time.perf_counter() - since)
        if signals:
            raise Stopped
        looked, since = training.step, time.perf_counter()          # without the time of the caller


@torch.no_grad()
def evaluate(model, loader, n, batch_size, runtime, stop=()):
    """Loss (nats), accuracy and perplexity per predicted token of n samples, over all ranks.

    stop  list of caught signals; Stopped is raised in all ranks as soon as any rank has one
    """
    model.eval()
    n, size = min(n, len(loader.rows)), batch_size * runtime.world
    mine = [range(n)[i:i + size][runtime.rank::runtime.world] for i in range(0, n, size)]
    sums = np.zeros(3)                                              # of losses, hits and predicted tokens
    for batch in prefetch(lambda samples: loader.batch(samples) if samples else None, mine):
        if runtime.any(stop):
            raise Stopped
        if batch is None:                               # the last part may have fewer rows than ranks
            continue
        batch = runtime.move(batch)
        weights, targets = batch.pop('weights'), batch.pop('targets')
        with runtime.autocast():
            logits = model(**batch)                                 # (b, k, V)
        losses = token_losses(logits, targets) * weights
        hits = (logits.argmax(-1) == targets) * weights
        sums += torch.stack([losses.sum(), hits.sum(), weights.sum()]).tolist()
    model.train()
    loss, hits, tokens = runtime.sum(*sums)
    loss, accuracy = loss / max(1, tokens), hits / max(1, tokens)
    return {'loss': loss, 'accuracy': accuracy, 'perplexity': math.exp(min(loss, 700))}


def validate(model, loaders, n, batch_size, runtime, stop):
    """{'loss', ...} on the run's corpus and {'NAME_loss', ...} on each other one; raises Stopped"""
    values = {}
    for name, loader in loaders.items():
        scores = evaluate(model, loader, n, batch_size, runtime, stop)
        values |= {f'{name}_{key}' if name else key: value for key, value in scores.items()}
    return values


# ---- 4. main: the run ----

@dataclass
class Training:
    """All that changes from step to step, so all that a run needs to go on as if nothing had happened."""
    name: str                       # of the run, in messages
    model: torch.nn.Module          # as built: neither compiled nor wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    total_batch: int                # samples of an update
    step: int = 0                   # updates done
    samples: int = 0                # training samples seen

    def advance(self):
        self.step += 1
        self.samples += self.total_batch

    def state_dict(self):
        return {'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
                'scaler': self.scaler.state_dict(), 'step': self.step, 'samples': self.samples}

    def load_state_dict(self, content):
        self.model.load_state_dict(content['model'])
        if 'step' not in content:                       # the weights of a BERT: a new run
            return
        self.step, self.samples = content['step'], content['samples']
        groups = self.optimizer.state_dict()['param_groups']        # decay, betas and kernel of this command
        self.optimizer.load_state_dict({**content['optimizer'], 'param_groups': groups})
        if content['scaler']:                           # empty if the run before was not in float16
            self.scaler.load_state_dict(content['scaler'])


def start(config, meta, identity, runtime):
    """(Training, source of its weights, knobs of that run): from out_dir, else from init_from, else new."""
    torch.manual_seed(seed)
    model = MODEL_CLASSES[objective](model_config(config, meta['vocab_size']))
    source = newest(out_dir) or newest(init_from) or init_from
    content = {}
    if source:
        content = read_start(source, {**asdict(model.config), 'objective': objective}, identity)
    if dtype == 'auto' and 'dtype' in content:          # a run keeps its precision on another machine
        runtime.dtype = choose_dtype(content['dtype'], runtime.device, n_embd)
    model.to(runtime.device)
    optimizer = make_optimizer(model, learning_rate, (beta1, beta2), adam_eps, weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    training = Training(out_dir, model, optimizer, scaler, total_batch)
    if content:
        training.load_state_dict(content)
    if runtime.sum(training.step) != [training.step * runtime.world]:
        raise UserError(f'{out_dir} must be a folder that all machines share')
    return training, source, content.get('config', {})


def main():
    config = configure(globals(), MINIMUM)
    if fill or export:
        return use_checkpoint(init_from or out_dir, fill, export)
    choose('schedule', schedule, SCHEDULE)
    runtime = make_runtime(device, dtype, n_embd, timeout)
    if total_batch < runtime.world or (runtime.device.type == 'xla' and total_batch % runtime.world):
        raise UserError(f'total_batch={total_batch}: choose a multiple of the {runtime.world} processes')

    # data
    meta, loader, val_loaders = make_loaders(config)
    identity = {'vocab_size': meta['vocab_size'], **meta['identity']}

    # the run's folder: one run at a time, and no damaged checkpoint at its end
    _held = lock_folder(out_dir) if runtime.is_main else None              # until main() returns
    if runtime.is_main:
        set_damaged_aside(out_dir)
    runtime.wait()                                      # the other ranks wait for that

    # model, optimizer and their state; then compile, then wrap
    training, source, before = start(config, meta, identity, runtime)
    config['milestones'] = tuple(sorted({*milestones, *before.get('milestones', ())}))
    model = torch.compile(training.model) if compile and runtime.device.type == 'cuda' else training.model
    if runtime.cpu_group is not None:
        model = DistributedDataParallel(model, gradient_as_bucket_view=runtime.device.type == 'xla')

    # log and signals
    if runtime.is_main:
        copy_tokenizer(load_tokenizer(loader.rows.folder), out_dir)         # for load()
        record_launch(out_dir, config, runtime)
        print(f'{count_parameters(training.model):,} parameters on {runtime.world} x {runtime.device} in '
              f'{runtime.dtype}; {len(loader.rows):,} training rows; from step {training.step} of '
              f'{source or "random weights"}', flush=True)
    say_differences(before, config)
    log = Log(out_dir, training.step, runtime, wandb_project, config)
    stop = catch_signals()

    # batches: samples are dealt to the ranks in turn; the next step's are made while the device computes
    end = training.samples + (max_iters - training.step) * total_batch
    firsts = range(training.samples, end, total_batch)              # first sample of each step
    mine = (range(first, first + total_batch)[runtime.rank::runtime.world] for first in firsts)
    batches = prefetch(lambda samples: loader.micro_batches(samples, batch_size), mine)
    bar = tqdm(batches, total=max_iters, initial=training.step, unit='step',
               disable=not runtime.is_main or None)                 # None: only on a terminal

    def due(interval):
        """Is it time for what is done every `interval` steps, and at the end?"""
        return training.step == max_iters or bool(interval and training.step % interval == 0)

    def saves():
        return due(checkpoint_interval) or training.step in milestones

    def save_now():
        if runtime.is_main:
            save(out_dir, {**training.state_dict(), 'model_config': asdict(training.model.config),
                           'config': config, 'data': identity, 'dtype': str(runtime.dtype)[6:]})

    def validate_now():
        scores = validate(training.model, val_loaders, eval_samples, batch_size, runtime, stop)
        log.write('val', training.step, unigram=meta['unigram_entropy'], **scores)

    # the run
    warmup = warmup_iters if warmup_iters <= max_iters else max_iters // 10
    rate = partial(get_lr, peak=learning_rate, low=min_lr, warmup=warmup, total=max_iters, schedule=schedule)
    begun = training.step
    try:
        # A run is validated before its first step; one that goes on, if a signal cut its validation short.
        missing = (begun == 0 or due(eval_interval)) and begun not in validated_steps(out_dir)
        if runtime.any(runtime.is_main and missing):
            validate_now()
        for report in fit(training, model, bar, rate, seed, grad_clip,
                          lambda: due(log_interval) or due(eval_interval) or saves(), runtime, stop):
            if due(log_interval):
                seconds = report.seconds / report.steps             # of a step
                log.write('train', training.step, loss=report.loss, lr=report.lr, norm=report.norm,
                          tokens_per_second=total_batch * block_size / seconds,
                          hours_left=(max_iters - training.step) * seconds / 3600)
                bar.set_postfix(loss=report.loss)
            if due(eval_interval):
                validate_now()
            if saves():
                save_now()
    except Stopped:                                     # by a signal; a validation that it cut is done again
        if training.step > begun:
            save_now()
            say(f'stopped by a signal after step {training.step}, which is saved; the same command goes on '
                'from there')
        leave(runtime, 128 + max(stop, default=signal.SIGTERM))

    # what came of it
    if runtime.is_main:
        plot_losses(out_dir)
    if runtime.is_main and fill_samples:
        documents = Rows(loader.rows.folder, meta, 'val', 1 << 16, 'documents')
        show_sentences(training.model.cpu(), load_tokenizer(loader.rows.folder), documents, fill_samples)
    leave(runtime)


# ======== what follows keeps a run alive and shows what came of it; no loss depends on it ========

# ---- 5. care: devices and processes ----

@dataclass
class Runtime:
    """Where this process runs: its device and precision, and its place among those that torchrun started."""
    device: torch.device
    dtype: torch.dtype
    rank: int
    world: int
    cpu_group: object           # gloo group for values on the CPU; None: no other process

    @property
    def is_main(self):
        """Whether this process writes what all share: checkpoints, the log."""
        return self.rank == 0

    def sum(self, *numbers):
        """Each number summed over the ranks, as floats."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self.cpu_group is not None:
            dist.all_reduce(tensor, group=self.cpu_group)
        return tensor.tolist()

    def wait(self):
        """Until every rank is here."""
        self.sum(0)

    def any(self, flag):
        """Whether the flag is set in at least one rank."""
        return self.sum(bool(flag)) != [0]

    def move(self, batch):
        """The tensors of a batch on the device; on CUDA the host does not wait for the copy."""
        if self.device.type == 'cuda':                  # only copies from pinned memory are asynchronous
            return {key: x.pin_memory().to(self.device, non_blocking=True) for key, x in batch.items()}
        return {key: x.to(self.device) for key, x in batch.items()}

    def autocast(self):
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    # XLA, for TPUs, traces lazily: operations are recorded; sync() compiles them as one graph and runs it.

    def sync(self):
        if self.device.type == 'xla':
            sys.modules['torch_xla'].sync()

    def scalar(self, number):
        """A number that changes with the step; on XLA (1,): constants recompile, equal scalars are merged."""
        return torch.tensor([number], device=self.device) if self.device.type == 'xla' else number


def make_runtime(device, dtype, width, timeout=600, group=True):
    """Runtime of this process for models `width` wide; with `group` it joins torchrun's other processes."""
    rank = int(os.environ.get('RANK', 0))
    world = int(os.environ.get('WORLD_SIZE', 1))
    local = int(os.environ.get('LOCAL_RANK', 0))
    if device == 'auto':
        found = torch.accelerator.is_available()
        device = torch.accelerator.current_accelerator().type if found else 'cpu'
    choose('device', device, dict.fromkeys(('cpu', 'cuda', 'mps', 'xla')))
    if device == 'cuda':
        if not torch.cuda.is_available():
            raise UserError("device='cuda': PyTorch finds none here")
        torch.cuda.set_device(local)
        torch.set_float32_matmul_precision('high')      # TF32 for float32 matmuls
    if device == 'xla':
        import torch_xla.distributed.xla_backend        # noqa: F401 (of torch_xla[tpu]==2.9.0)

    cpu_group = None
    if group and world > 1:
        limit = timedelta(seconds=timeout or 10 ** 8)
        backend = {'cuda': 'nccl', 'xla': 'xla'}.get(device, 'gloo')
        dist.init_process_group(backend, 'xla://' if device == 'xla' else None, limit)
        rank, cpu_group = dist.get_rank(), dist.new_group(backend='gloo', timeout=limit)
    device = torch.zeros(1, device=device).device       # with its number; on XLA after the group is made
    return Runtime(device, choose_dtype(dtype, device, width), rank, world, cpu_group)


def choose_dtype(dtype, device, width):
    """torch dtype; auto is bfloat16 on CUDA from Ampere on, on some CPUs from width 256: results/dtype"""
    if dtype == 'auto':
        fast = False
        if device.type == 'cuda':
            fast = torch.cuda.get_device_capability() >= (8, 0)
        elif device.type == 'cpu' and width >= 256 and hasattr(torch.cpu, 'get_capabilities'):  # new in 2.11
            able = torch.cpu.get_capabilities()
            fast = able.get('amx_bf16') or able.get('avx512_bf16')
        dtype = 'bfloat16' if fast else 'float32'
    return choose('dtype', dtype, {name: getattr(torch, name) for name in ('float32', 'bfloat16', 'float16')})


def leave(runtime, status=0):
    """Exit; in a group without interpreter shutdown, where PyTorch's threads may hang: pytorch#190489"""
    if runtime.cpu_group is not None:
        dist.barrier(runtime.cpu_group)
        dist.destroy_process_group()
        atexit._run_exitfuncs()                         # of wandb and torch_xla
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


# ---- care: signals, and one run in a folder ----

class Stopped(Exception):
    """A signal came to some rank: all ranks leave the training loop or a validation."""


def catch_signals():
    """From now on SIGTERM, SIGINT and SIGHUP only append their numbers to the list that is returned."""
    caught = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:                  # as nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: caught.append(number))
    return caught


def lock_folder(folder):
    """Lock a folder, until this process ends, against a second run.  Returns the open file."""
    import fcntl
    os.makedirs(folder, exist_ok=True)
    file = open(os.path.join(folder, 'lock'), 'a')                      # noqa: SIM115, it stays open
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f'{folder}: another run uses it: end that one, or choose another --out_dir') from None
    except OSError as error:                            # some file systems have no locks
        say(f'{folder} cannot be locked ({error.strerror}): start no second run in it')
    return file


# ---- care: checkpoints ----

def checkpoints(folder):
    """{step: path} of a run's checkpoints, oldest first."""
    paths = glob.glob(os.path.join(glob.escape(folder), 'ckpt_' + 7 * '[0-9]' + '.pt'))
    return {int(path[-10:-3]): path for path in sorted(paths)}


def newest(source):
    """Path of a run's newest checkpoint or of a trial's weights, '' if none; a checkpoint's own path."""
    if source.endswith('.pt'):
        return source
    trial = os.path.join(source, 'model.pt')
    return trial if os.path.exists(trial) else max(checkpoints(source).values(), default='')


def save(folder, content):
    """Write a run's checkpoint; of the older ones the newest stays, and those of milestones."""
    write_checkpoint(os.path.join(folder, f"ckpt_{content['step']:07}.pt"), content)
    older = [path for step, path in checkpoints(folder).items()
             if step < content['step'] and step not in content['config']['milestones']]
    for path in older[:-1]:
        os.remove(path)


def write_checkpoint(path, content):
    """Write a checkpoint; a kill or a full disk leaves the earlier ones as they are."""
    with open(path + '.tmp', 'wb') as file:
        try:
            torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, content), file)
        except RuntimeError as error:                   # torch.save puts its own error above the system's
            raise error.__context__ or error from None
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)


def read_checkpoint(path):
    """Content of a checkpoint: tensors and plain Python.  Raises UserError if the file is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():                       # name of a member with a wrong checksum
                raise zipfile.BadZipFile
        return torch.load(path, map_location='cpu', weights_only=True)
    except OSError:                                     # missing, or not readable now
        raise
    except Exception:                                   # a flipped bit may raise any
        raise UserError(f'{path} is damaged, or not a checkpoint') from None


def set_damaged_aside(folder):
    """Rename damaged checkpoints that are newer than the newest good one, so that the run goes on from it."""
    paths = list(checkpoints(folder).values())
    for path in reversed(paths):
        try:
            read_checkpoint(path)
            return
        except UserError as error:
            if path == paths[0]:
                raise UserError(f'{folder}: every checkpoint is damaged: choose another --out_dir') from None
            os.rename(path, path + '.damaged')
            say(f'{error}: now {path}.damaged; the run goes on from the checkpoint before it')


def read_start(source, config, identity):
    """Content of a checkpoint, or a BERT's weights in that form; refused if model or data differ."""
    if source.endswith('.pt'):
        content = read_checkpoint(source)
    else:
        try:
            bert = MaskedLM.from_pretrained(source)
        except OSError as error:
            raise UserError(f'{source}: no run, checkpoint or BERT: {shown(str(error))}') from None
        content = {'model': bert.state_dict(), 'model_config': asdict(bert.config), 'data': identity,
                   'config': {'objective': 'mlm'}}
    theirs = {'objective': content['config'].get('objective'), **content['model_config'], **content['data']}
    may_differ = 'dropout', 'attention_dropout', 'pair_init'
    ours = {key: value for key, value in config.items() if key not in may_differ}
    refuse_difference(source, theirs, {**ours, **identity})
    return content


def refuse_difference(source, theirs, ours):
    """Raise a UserError naming the first key of `ours` whose value in `theirs` differs."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(f'{source} has {key}={shown(theirs.get(key))}, this run has {shown(value)}')


def say_differences(theirs, ours):
    """A line with the knobs that are not those of the checkpoint: allowed, but seldom meant."""
    changes = [f'{name} {shown(value)} -> {shown(ours[name])}'
               for name, value in theirs.items() if name in ours and ours[name] != value]
    if changes:
        say(f'knobs that differ from the checkpoint: {", ".join(changes)}')


def load(source):
    """(model in eval mode, tokenizer, content of the checkpoint) of a run, a checkpoint or a trial."""
    path = newest(source)
    if not path:
        raise UserError(f'{source}: no checkpoint there')
    content = read_checkpoint(path)
    kind = content.get('head') or content['config']['objective']
    model = MODEL_CLASSES[kind](EncoderConfig(**content['model_config']))
    model.load_state_dict(content['model'])
    return model.eval(), load_tokenizer(os.path.dirname(path)), content


# ---- 6. results: log and pictures ----

class Log:
    """Lines on stdout, in metrics.jsonl and optionally in Weights & Biases; only on rank 0."""

    def __init__(self, folder, step, runtime, project, config):
        self.path, self.name = os.path.join(folder, 'metrics.jsonl'), os.path.basename(folder)
        self.main, self.wandb = runtime.rank == 0, None
        if not self.main:
            return
        # Lines of steps after the checkpoint are of a run that was killed; its steps will be repeated.
        kept = [line for line in read_metrics(folder) if step and line['step'] <= step]
        write_bytes(self.path, ''.join(json.dumps(line) + '\n' for line in kept).encode())
        if project:
            import wandb                                # finetune.py starts a run for each trial
            self.wandb = wandb.init(project=project, name=self.name, config=config, reinit='finish_previous')

    def write(self, kind, step, **values):
        if not self.main:
            return
        text = ', '.join(f'{key} {value:.4g}' if value < 1000 else f'{key} {value:,.0f}'
                         for key, value in values.items())
        with tqdm.external_write_mode():                # above a progress bar
            print(f'{self.name} step {step}, {kind}: {text}', flush=True)
        finite = {key: value for key, value in values.items() if math.isfinite(value)}      # JSON has no NaN
        with open(self.path, 'a') as file:
            file.write(json.dumps({'kind': kind, 'step': step, **finite}) + '\n')
        if self.wandb:
            self.wandb.log({f'{kind}/{key}': value for key, value in values.items()}, step=step)


def read_metrics(folder):
    """Lines of a run's metrics.jsonl as dicts; one that a kill cut off is left out."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, 'metrics.jsonl')) as file:
        return [json.loads(line) for line in file if line.endswith('\n')]
    return []


def validated_steps(folder):
    return [line['step'] for line in read_metrics(folder) if line['kind'] == 'val']


def record_launch(folder, config, runtime):
    """Append this launch to run.json: command, revision, versions, date and knobs."""
    launches = read_json(folder, 'run.json') if 'run.json' in os.listdir(folder) else []
    revision = subprocess.getoutput(f'git -C {shlex.quote(ROOT)} describe --always --dirty 2>/dev/null')
    launches.append({
        'argv': sys.argv, 'revision': revision, 'torch': torch.__version__, 'world_size': runtime.world,
        'device': str(runtime.device), 'date': time.strftime('%Y-%m-%dT%H:%M:%S%z'), 'config': config})
    write_json(os.path.join(folder, 'run.json'), launches)


def differ_in_seed_alone(folders):
    """Whether runs are repetitions: the knobs of their last launches differ in `seed` and `out_dir` alone.

    No, if a run has no run.json: then nobody can tell. A knob that only a newer revision has is passed over.
    """
    configs = []
    for folder in folders:
        if not os.path.exists(os.path.join(folder, 'run.json')):
            return False
        configs.append(read_json(folder, 'run.json')[-1]['config'])
    first, *others = configs
    for config in others:
        common = first.keys() & config.keys() - {'seed', 'out_dir'}
        if any(config[key] != first[key] for key in common):
            return False
    return len({config['seed'] for config in configs}) == len(configs)


def plot(path, lines, labels):
    """Save a picture of lines {name: [(x, y), ...]}; of several points with one x their mean."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return say(f'no {path} without matplotlib: pip install matplotlib')
    figure = Figure(layout='constrained')
    axis = figure.add_subplot(xlabel=labels[0], ylabel=labels[1])
    for name, points in lines.items():
        xs = sorted({x for x, _ in points})
        means = [np.mean([y for other, y in points if other == x]) for x in xs]
        axis.plot(xs, means, '.-', label=name)
    axis.legend()
    figure.savefig(path)


def plot_losses(folder):
    """loss.png: training and validation losses, and the unigram entropy of the corpus."""
    lines = {}
    for line in read_metrics(folder):
        for key in line:
            if key.endswith(('loss', 'unigram')):
                lines.setdefault(f"{line['kind']} {key}", []).append((line['step'], line[key]))
    plot(os.path.join(folder, 'loss.png'), lines, ('step', 'nats per predicted token'))


# ---- results: predictions and export ----

FUNCTION_WORDS = {'a', 'an', 'and', 'are', 'as', 'at', 'be', 'by', 'for', 'from', 'if', 'in', 'is', 'it',
                  'not', 'of', 'on', 'or', 'that', 'the', 'this', 'to', 'with'}     # for show_sentences


@torch.no_grad()
def fill_masks(model, tokenizer, parts):
    """Join parts (lists of ids) by [MASK], print the likeliest tokens of each; returns (n, V) chances."""
    ids = [tokenizer.special_ids['cls'], *parts[0]]
    for part in parts[1:]:
        ids += [tokenizer.special_ids['mask'], *part]
    ids = torch.tensor([[*ids, tokenizer.special_ids['sep']]])
    positions = (ids[0] == tokenizer.special_ids['mask']).nonzero().T           # (1, n)
    chances = model.eval()(ids, positions=positions)[0].softmax(-1)
    for row in chances:
        best = row.topk(5)
        words = [tokenizer.pieces[i].strip('\u2581') or '\u2581' for i in best.indices]
        print('    ' + '   '.join(f'{word} {p:.3f}' for word, p in zip(words, best.values, strict=True)))
    return chances


def masked_word(ids, starts, tokenizer, longest):
    """(place of the word to mask, end of the first sentence) of a document; None if none fits.

    The sentence has 8 to 30 tokens. Of its words that are FUNCTION_WORDS or occur twice, and are one token
    each, the middle one is taken: this rule was fixed before any output was seen.
    """
    ends = [i for i in range(1, min(31, longest - 1))
            if tokenizer.pieces[ids[i]].endswith(('.', '\u3002')) and starts[i + 1]]
    end = min(ends, default=0)
    words = {i: tokenizer.decode([ids[i]]).strip() for i in range(3, end) if starts[i] and starts[i + 1]}
    letters = [word for word in words.values() if word.isalpha()]
    fits = [i for i, word in words.items() if word in FUNCTION_WORDS or letters.count(word) > 1]
    return (fits[len(fits) // 2], end) if end >= 8 and fits else None


def show_sentences(model, tokenizer, documents, n):
    """Mask a word in the first sentence of n documents; print the predictions and the true word's rank."""
    print('\nheld-out sentences with a masked word: a function word ("the") or one that the sentence repeats')
    for index in shuffled(range(len(documents)), len(documents), 0, 0):
        ids, starts = documents[index]
        found = masked_word(ids, starts, tokenizer, model.config.block_size)
        if not found:
            continue
        at, end = found
        before, after = ids[1:at].tolist(), ids[at + 1:end + 1].tolist()
        print(f'\n{tokenizer.decode(before).strip()} [MASK] {tokenizer.decode(after).strip()}')
        chances = fill_masks(model, tokenizer, [before, after])[0]
        rank = 1 + int((chances > chances[ids[at]]).sum())
        print(f'    masked: {tokenizer.decode([ids[at]]).strip()}, rank {rank}')
        n -= 1
        if not n:
            break


def use_checkpoint(source, fill, export):
    """Print the predictions for `fill`; write `export`, a folder that transformers loads."""
    model, tokenizer, content = load(source)
    if fill and '[MASK]' not in fill:
        raise UserError(f'fill={shown(fill)}: put a [MASK] where a word is to be filled in')
    if fill:
        print(fill)
        fill_masks(model, tokenizer, tokenizer.encode([part.rstrip() for part in fill.split('[MASK]')]))
    if export:
        export_model(model, tokenizer, content, export)


def export_model(model, tokenizer, content, folder):
    """Write the model and its tokenizer as transformers loads them, with a card."""
    twin = to_transformers(model, pad_token_id=tokenizer.special_ids['pad'])
    fast = fast_tokenizer(tokenizer, model.config.block_size)
    twin.save_pretrained(folder)
    fast.save_pretrained(folder)
    shutil.copy(os.path.join(tokenizer.home, tokenizer.file_name), folder)
    card = (f'# {type(twin).__name__}\n\n'
            f"Trained on {content['config'].get('dataset', content.get('task'))}, with "
            f'{count_parameters(model):,} parameters before the export.\n'
            f'Its logits are those of {model.config}.\n'
            'A sentencepiece tokenizer gives the ids of training, but for ties of scores (in 1 of 1,000\n'
            'sentences) and capitals whose accent is a code point of its own.\n')
    write_bytes(os.path.join(folder, 'README.md'), card.encode())


if __name__ == '__main__':
    run(main)
