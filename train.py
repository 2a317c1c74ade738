"""Pretraining on one device or many: masked or permuted language model.

    $ python train.py config/quickstart.py
    $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
    $ python train.py --init_from=out/quickstart --fill="the [MASK] of a matrix"

Above the double line stands the method, in the order in which data flows, with main() as its last function.
Below are devices, checkpoints and results. Of these only Runtime enters a loss: by its precision, and by its
sums over processes.

    1  rows       the prepared tokens of a corpus, cut into sequences
    2  batches    sample n of the run -> its row -> its masks
    3  steps      learning rate, update, the loop, evaluation
    4  main       the run

    5  care       devices and processes, checkpoints, signals
    6  results    log, pictures, predictions, export

Sample n of a run and its masks depend on the corpus, the knobs under "data", seed and n alone; dropout on
seed, step, rank and batch_size. So any number of processes sees the same batches, and a resumed run with
the same knobs and as many processes repeats an uninterrupted one, on the CPU to the bit.
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
from dataclasses import asdict, dataclass, field
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
from prepare_data import (check_corpus, copy_tokenizer, damage_error, digest_of, fast_tokenizer, load_meta,
                          load_tokenizer, lock_bytes, named, read_json, write_bytes, write_json)

# the run
out_dir = 'out/run'             # the run's folder; a run goes on from its newest checkpoint
init_from = ''                  # run, checkpoint or BERT with whose weights a new run begins; '': random
seed = 1                        # for weights, sample order, masks and dropout
fill = ''                       # a text with [MASK]: print what init_from (else out_dir) predicts and stop
export = ''                     # a folder: export the same model there for transformers and stop
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
relu_scale = 'ns'               # squared_relu: n2, n, ns, s2, n2s or ns2
key_size = 128                  # gau: width of queries and keys
clip_distance = 128             # rpe: relative distances are clipped at +-(clip_distance - 1)
same_partition = False          # part_mask to shatter: all layers have the partition of the last layer
one_value_matrix = False        # one_head_softmax to shatter: values are not split into parts, y = A v
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
min_lr = 0.0                    # learning rate at the end of linear and cosine
warmup_iters = 10_000           # steps of linear warmup; max_iters / 10 if it exceeds max_iters
schedule = 'linear'             # linear, cosine, constant or thirds, after the warmup
beta1 = 0.9                     # of Adam
beta2 = 0.999                   # of Adam
adam_eps = 1e-12                # of Adam
weight_decay = 0.01             # on matrices and embeddings; not on biases, norms and diagonals
grad_clip = 1.0                 # largest gradient norm; 0: no clipping
# evaluation, log and checkpoints
eval_interval = 1000            # steps between evaluations; 0: only at the end
eval_samples = 10_000           # validation sequences, a fixed random subset
order_gap = False               # also report gap: nats by which the loss rises if rows are permuted
log_interval = 100              # steps between log lines
checkpoint_interval = 1000      # steps between checkpoints; 0: only at the end
milestones = ()                 # steps whose checkpoints stay: 1000,10000; of the others the newest two
fill_samples = 3                # held-out sentences to fill in at the end
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, mps or xla
dtype = 'auto'                  # auto (bfloat16 where it is faster), float32, bfloat16 or float16
compile = True                  # torch.compile, on CUDA
timeout = 600                   # seconds a process waits for another before it exits; 0: no limit

MINIMUM = {                             # least values of knobs; of all others 0
    'batch_size': 1, 'block_size': 3, 'clip_distance': 1, 'eval_samples': 1, 'key_size': 1, 'log_interval': 1,
    'n_embd': 1, 'n_head': 1, 'n_inner': 1, 'n_layer': 1, 'total_batch': 1,
}
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
    Raises UserError if the split has no row.
    """

    def __init__(self, folder, meta, split, block_size, packing, whole_word=False):
        self.folder = folder
        self.special_ids = meta['special']              # {'pad': id, 'cls': id ...}
        self.dtype = np.dtype(meta['dtype'])            # of the token ids in the files
        self.block_size = block_size
        self.packing = packing
        self.room = block_size - 2                      # tokens between [CLS] and [SEP]

        # (V,) Whether an id starts a word. In Chinese that depends on the text: the shard's .words has it for
        # each token, by the segmenter of prepare_data.py.
        self.id_starts_word = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), bool)
        self.segmented = whole_word and 'segmenter' in meta

        shards = meta['splits'][split]
        self.stems = [os.path.join(folder, shard['stem']) for shard in shards]
        self.row_starts = [self.find_starts(stem, shard['tokens'])
                           for stem, shard in zip(self.stems, shards, strict=True)]
        n_rows = [len(starts) for starts in self.row_starts]
        self.rows_before = np.cumsum([0, *n_rows])      # rows in the shards before each one; last, all rows
        if not len(self):
            raise UserError(f'{folder}: {split} holds less than one row of block_size={block_size}')

    def find_starts(self, stem, n_tokens):
        """Where in the shard each row starts: the index of its first token."""
        if self.packing == 'stream':
            return range(0, n_tokens - self.room + 1, self.room)        # an incomplete last row is left out

        edges = np.fromfile(stem + '.idx', np.int64)    # first token of each document, then n_tokens
        document_starts = edges[:-1]
        lengths = np.diff(edges) - 1                    # without the [SEP] that ends each document
        n_rows = -(-lengths // self.room)               # of each document: lengths / room, rounded up
        # Documents of 2 and 3 rows: first_row is 0 2, the rows 0 1 2 3 4 minus 0 0 2 2 2 are 0 1 0 1 2.
        first_row = np.cumsum(n_rows) - n_rows
        row_in_document = np.arange(n_rows.sum()) - np.repeat(first_row, n_rows)
        return np.repeat(document_starts, n_rows) + row_in_document * self.room

    def __len__(self):
        return int(self.rows_before[-1])

    def __getitem__(self, index):
        """(ids (T,) int64, whether each token starts a word (T,) bool) of a row"""
        shard = np.searchsorted(self.rows_before, index, side='right') - 1
        stem = self.stems[shard]
        start = int(self.row_starts[shard][index - self.rows_before[shard]])
        tokens = np.fromfile(stem + '.bin', self.dtype, self.room, offset=start * self.dtype.itemsize)
        if self.packing == 'documents':                 # what follows [SEP] is of the next document
            separators = np.flatnonzero(tokens == self.special_ids['sep'])
            if len(separators):
                tokens = tokens[:separators[0]]

        n = len(tokens)
        ids = np.full(self.block_size, self.special_ids['pad'], np.int64)
        ids[0] = self.special_ids['cls']
        ids[1:n + 1] = tokens
        ids[n + 1] = self.special_ids['sep']

        refuse_unknown_ids(stem, ids, len(self.id_starts_word))
        word_starts = self.id_starts_word[ids]
        if self.segmented:
            word_starts[1:n + 1] = np.fromfile(stem + '.words', bool, n, offset=start)
        return ids, word_starts


# ---- 2. batches: sample n of the run -> its row -> its masks ----

def shuffled(places, n, seed, epoch):
    """The items at `places`, (B,), of range(n) in random order: one order for each (seed, epoch).

    A list of 10^9 rows in random order would take 8 GB in each process. A cipher needs no list: it maps the
    numbers of a fixed number of bits one to one onto themselves, in an order that its keys decide. Here that
    is the smallest even number of bits that holds n - 1. A result that is not below n is enciphered again
    until it is; two places cannot meet, as the cipher is one to one.  Black and Rogaway 2002, "cycle walking"
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)      # bits of each half of a number
    keys = np.random.SeedSequence([seed, epoch]).generate_state(8, np.uint64)
    items = encipher(np.array(places, np.uint64), half, keys)
    outside = items >= n
    while outside.any():                                # at most three of four numbers are outside
        items[outside] = encipher(items[outside], half, keys)
        outside = items >= n
    return items.astype(np.int64)


def encipher(x, half, keys):
    """A Feistel network, one round for each key: uint64 numbers of 2 * half bits -> others, one to one.

    A round is (left, right) -> (right, left ^ f(right, key)). It can be undone whatever f is, as right is
    still there; so f only has to mix bits well.  Luby and Rackoff 1988
    """
    half = np.uint64(half)
    low = (np.uint64(1) << half) - np.uint64(1)         # the bits of the right half
    left = x >> half
    right = x & low
    for key in keys:
        mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)       # 2^64 / golden ratio; products wrap
        mixed = (mixed ^ (mixed >> np.uint64(29))) * (key | np.uint64(1))
        mixed = (mixed >> np.uint64(32)) & low          # the high bits depend on most of the others
        left, right = right, left ^ mixed
    return left << half | right


class Masker:
    """Decides which tokens of a batch are predicted, and what the model sees of them.

    mlm  BERT.  Devlin et al. 2018, section 3.1
         Of a row's n tokens, [CLS] and [SEP] counted, ceil(fraction n) are predicted: those with the
         smallest random scores. With whole_word it is at most so many. 80 % of them become [MASK], 10 % a
         random token, and 10 % stay as they are.
    plm  XLNet.  Yang et al. 2019, sections 2.2 and 2.3
         The same tokens are predicted, but none is masked: 'order' is each token's place in a random
         permutation, whose last tokens are predicted from those before them.

    Special tokens, [UNK] among them, are never predicted, and never drawn as the random token. Shapes are
    static: each row has k = ceil(fraction T) positions, first the predicted ones; the others have weight 0.
    """

    def __init__(self, meta, block_size, fraction, objective, whole_word):
        self.block_size = block_size
        self.fraction = fraction
        self.objective = objective
        self.whole_word = whole_word
        self.special_ids = meta['special']
        self.is_special = np.isin(np.arange(meta['vocab_size']), list(self.special_ids.values()))       # (V,)
        self.ordinary = np.flatnonzero(~self.is_special)                # the other ids
        self.n_positions = self.share_of(block_size)                    # k

    def share_of(self, n_tokens):
        """How many of n tokens are predicted: ceil(fraction n)"""
        # rounding: 0.07 * 100 is 7.000000000000001, whose ceil would be 8
        return np.ceil(self.fraction * n_tokens - 1e-9).astype(int)

    def __call__(self, ids, word_starts, seed, samples):
        """ids, word_starts (B, T) -> {'ids' (B, T), 'positions', 'targets', 'weights' (B, k)[, 'order']}"""
        # The random numbers of a sample depend on its number alone, never on the rest of its batch.
        rngs = [np.random.default_rng([seed, sample]) for sample in samples]
        scores = np.stack([rng.random(self.block_size, np.float32) for rng in rngs])        # (B, T)
        actions = np.stack([rng.random(self.n_positions, np.float32) for rng in rngs])      # (B, k)
        drawn = np.stack([rng.integers(0, len(self.ordinary), self.n_positions) for rng in rngs])
        random_tokens = self.ordinary[drawn]                                                # (B, k)

        is_special = self.is_special[ids]                                                   # (B, T)
        positions, n_predicted = self.choose_positions(ids, is_special, word_starts, scores)
        is_predicted = np.arange(self.n_positions) < n_predicted[:, None]                   # (B, k)
        targets = np.take_along_axis(ids, positions, axis=1)

        batch = {'ids': ids, 'positions': positions, 'targets': targets,
                 'weights': is_predicted.astype(np.float32)}
        if self.objective == 'mlm':
            # below 0.8: [MASK]; below 0.9: a random token; else the token itself
            inputs = np.where(actions < 0.9, random_tokens, targets)
            inputs = np.where(actions < 0.8, self.special_ids['mask'], inputs)
            inputs = np.where(is_predicted, inputs, targets)            # a position of weight 0 stays
            batch['ids'] = ids.copy()
            np.put_along_axis(batch['ids'], positions, inputs, axis=1)
        else:
            batch['order'] = permuted_order(scores, is_special, positions, is_predicted)
        return batch

    def choose_positions(self, ids, is_special, word_starts, scores):
        """(positions (B, k), of which the first n of a row are predicted; this n of each row (B,))"""
        n_tokens = (ids != self.special_ids['pad']).sum(1)                                  # (B,)
        n_predicted = np.minimum(self.share_of(n_tokens), (~is_special).sum(1))
        sort_by = np.where(is_special, 2, scores)       # scores are below 1: special tokens come last
        positions = np.argsort(sort_by, axis=1, kind='stable')[:, :self.n_positions]
        if self.whole_word:
            for i in range(len(ids)):
                positions[i], n_predicted[i] = whole_words(
                    scores[i], word_starts[i], is_special[i], n_predicted[i], self.n_positions)
        return positions, n_predicted


def whole_words(scores, word_starts, is_special, most, n_positions):
    """(positions (k,) of a row, how many are predicted): first the tokens of whole words, at most `most`.

    Words are taken in the order of random numbers: word number i has scores[i]. A word with more tokens than
    are still wanted is passed over, as in BERT.
    """
    # A special token is a word of its own. After it a word begins, or the rest of one that the row cuts.
    after_special = np.append(True, is_special[:-1])
    begins = word_starts | is_special | after_special               # (T,)
    words = np.split(np.arange(len(begins)), np.flatnonzero(begins)[1:])            # positions of each word
    predicted = []
    for number in np.argsort(scores[:len(words)], kind='stable'):
        word = words[number]
        fits = len(predicted) + len(word) <= most
        if fits and not is_special[word[0]]:
            predicted.extend(word)
    rest = np.setdiff1d(np.arange(len(begins)), predicted)      # any others, for a row of k positions
    return np.append(predicted, rest).astype(int)[:n_positions], len(predicted)


def permuted_order(scores, is_special, positions, is_predicted):
    """Place of each token in XLNet's permutation, (B, T), above 0: by score, the predicted ones last.

    Special tokens have place 0: all tokens see them, and they see special tokens alone. In XLNet's code [SEP]
    and [CLS] keep a place in the permutation.
    """
    comes_last = np.zeros(is_special.shape, bool)
    np.put_along_axis(comes_last, positions, is_predicted, axis=1)
    sort_by = np.where(is_special, -1, scores + 2 * comes_last)         # scores are from 0 to 1
    permutation = np.argsort(sort_by, axis=1, kind='stable')            # of positions
    places = np.argsort(permutation, axis=1) + 1                        # its inverse
    return np.where(is_special, 0, places)


class Loader:
    """Samples 0, 1, 2 ... of a run: every row once per epoch, each epoch in another order."""

    def __init__(self, rows, masker, seed):
        self.rows = rows
        self.masker = masker
        self.seed = seed

    def indices(self, samples):
        """Row of each sample, (B,)"""
        epochs, places = np.divmod(np.array(samples), len(self.rows))
        indices = np.empty_like(places)
        # A batch may begin in one epoch and end in the next, which has another order.
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = shuffled(places[here], len(self.rows), self.seed, int(epoch))
        return indices

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
        n_parts = math.ceil(n / size)
        edges = [n * i // n_parts for i in range(n_parts + 1)]
        return [self.batch(samples[begin:end]) for begin, end in zip(edges[:-1], edges[1:], strict=True)]


class WithoutOrder(Loader):
    """The samples of a Loader, but the visible tokens of each row are permuted: for the knob order_gap.

    A sample is permuted in the same way each time. Predicted and special tokens stay where they are. How much
    the loss rises tells how much the model depends on the order of tokens: not at all without positions.
    """

    def batch(self, samples):
        batch = super().batch(samples)
        ids = batch['ids'].numpy()                      # (B, T), the memory of the tensor
        for row, sample in enumerate(samples):
            is_visible = ~self.masker.is_special[ids[row]]
            is_predicted = batch['weights'][row] > 0    # (k,)
            is_visible[batch['positions'][row][is_predicted]] = False
            places = np.flatnonzero(is_visible)
            rng = np.random.default_rng([self.seed, sample, 1])         # not the numbers of its masks
            ids[row, places] = ids[row, rng.permutation(places)]
        return batch


def prefetch(make, items):
    """Yield make(item) for each item; a background thread makes the next one meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        futures = (pool.submit(make, item) for item in items)       # next() submits one
        following = next(futures, None)
        while following is not None:
            current = following
            following = next(futures, None)             # begun before the caller gets the current one
            yield current.result()


def make_loaders(config):
    """(meta.json, Loader of training rows, {corpus: Loader of validation rows}); '' is the run's corpus

    config  the knobs as a dict
    Raises UserError if a corpus is not prepared, damaged, or of another tokenizer than the run's.
    """
    choose('objective', config['objective'], {'mlm': None, 'plm': None})        # refuses any other value
    choose('packing', config['packing'], {'stream': None, 'documents': None})
    block_size = config['block_size']
    packing = config['packing']
    whole_word = config['whole_word']

    folder = os.path.join(config['data_dir'], config['dataset'])
    meta = load_meta(folder)                            # if it is missing: UserError with the command for it
    check_corpus(folder, meta)                          # before the rows are cut where its files say
    rows = Rows(folder, meta, 'train', block_size, packing, whole_word)
    masker = Masker(meta, block_size, config['mask_fraction'], config['objective'], whole_word)
    loader = Loader(rows, masker, config['seed'])

    folders = {'': folder}
    for name in config['validation'].split(','):
        if name:
            folders[name] = os.path.join(config['data_dir'], name)
    val_loaders = {}
    for name, val_folder in folders.items():
        val_meta = load_meta(val_folder)
        if name:                                        # the run's own is checked
            check_corpus(val_folder, val_meta)
        refuse_difference(val_folder, val_meta['identity'], {'tokenizer': meta['identity']['tokenizer']})
        val_rows = Rows(val_folder, val_meta, 'val', block_size, packing, whole_word)
        val_loaders[name] = Loader(val_rows, masker, 0)         # seed 0: the same samples in every run
    return meta, loader, val_loaders


# ---- 3. steps: learning rate, update, the loop, evaluation ----

# `runtime` is a Runtime, below the double line: the device, the precision, and the rank of this process among
# `world` processes. runtime.sum() adds numbers of all ranks. runtime.scalar(x) is x; on XLA it is a tensor,
# because there each new value of a Python number would compile a graph of its own.

SCHEDULE = {                    # progress after the warmup, 0 to 1 -> fraction of (learning_rate - min_lr)
    'linear': lambda progress: 1 - progress,
    'cosine': lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    'constant': lambda progress: 1.0,
    'thirds': lambda progress: (1.0, 0.2, 0.02)[min(2, int(3 * progress))],    # Kowsher et al. 2024, A.4
}


def get_lr(step, peak, low, warmup, total, schedule):
    """Learning rate of update `step`, from 0: linear warmup to the peak, then SCHEDULE towards `low`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return low + (peak - low) * SCHEDULE[schedule](progress)


def set_lr(optimizer, lr, runtime):
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group['lr'] = runtime.scalar(lr)


def make_optimizer(model, lr, betas, eps, weight_decay, runtime):
    """AdamW, fused if possible; weight decay on parameters of two or more dimensions, embeddings included."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]        # biases, norms, diagonals
    groups = [{'params': matrices, 'weight_decay': weight_decay}, {'params': vectors, 'weight_decay': 0.0}]
    return torch.optim.AdamW(groups, runtime.scalar(lr), betas, eps, **runtime.adam_kernel())


def seed_step(seed, step, runtime):
    """Seed torch for a step: dropout depends on (seed, step, rank), not on the steps before."""
    number = np.random.SeedSequence([seed, step, runtime.rank]).generate_state(1, np.uint64)[0]
    runtime.seed(int(number))


def update(model, optimizer, scaler, micro_batches, n_predicted, grad_clip, runtime):
    """One optimizer step on this rank's micro-batches.

    n_predicted  predicted tokens of the step over all ranks and micro-batches; the loss is their mean.
                 finetune.py has examples in their place: there losses and weights are (b,)
    Returns (this rank's part of that loss, the gradient norm before clipping), tensors on the device: the
    host need not wait for them.
    """
    total_loss = torch.zeros(1, device=runtime.device)              # (1,), the shape of a scalar() on XLA
    n_predicted = runtime.scalar(max(1.0, n_predicted))
    for i, batch in enumerate(micro_batches):
        batch = runtime.move(batch)
        weights = batch.pop('weights')                              # (b, k)
        # DDP averages gradients over the ranks in backward(): once a step, with the last micro-batch.
        accumulates = runtime.is_distributed and i < len(micro_batches) - 1
        with model.no_sync() if accumulates else contextlib.nullcontext():
            with runtime.autocast():
                losses = model(**batch)                             # (b, k)
            loss = (losses * weights).sum() / n_predicted
            scaler.scale(loss * runtime.world).backward()           # DDP divides by the number of ranks
        total_loss += loss.detach()

    scaler.unscale_(optimizer)                          # before the norm: float16's gradients are scaled
    largest_norm = grad_clip if grad_clip else math.inf
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
    scaler.step(optimizer)                              # float16: no step if a gradient is not finite
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    runtime.sync()                                      # on XLA: runs what was recorded so far
    return total_loss[0], norm


@dataclass
class Training:
    """What changes from step to step. A checkpoint has it, and `facts`, which main() makes.

    name and total_batch are constants and not saved. No state of a random generator is in it, as torch is
    seeded anew at each step.
    """
    name: str                       # of the run, in messages
    model: torch.nn.Module          # as built: neither compiled nor wrapped
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler    # of the loss in float16; it does nothing in other precisions
    total_batch: int                # samples of an update
    step: int = 0                   # updates done
    samples: int = 0                # training samples seen

    def advance(self):
        """Count an update."""
        self.step += 1
        self.samples += self.total_batch

    def state_dict(self):
        """The state as a checkpoint holds it."""
        return {'model': self.model.state_dict(), 'optimizer': self.optimizer.state_dict(),
                'scaler': self.scaler.state_dict(), 'step': self.step, 'samples': self.samples}

    def load_state_dict(self, state):
        """Take over the state of a checkpoint."""
        self.model.load_state_dict(state['model'])
        # Adam's moments are the checkpoint's, its hyperparameters and kernel flags those of this command.
        groups = self.optimizer.state_dict()['param_groups']
        self.optimizer.load_state_dict({**state['optimizer'], 'param_groups': groups})
        if state['scaler']:                             # empty if the run before was not in float16
            self.scaler.load_state_dict(state['scaler'])
        self.step = state['step']
        self.samples = state['samples']


class Report(NamedTuple):
    """What the host reads from the device after some steps."""
    loss: float                 # of the last step alone, over all ranks: mean over predicted tokens
    norm: float                 # of its gradient, before clipping
    lr: float                   # of the last step
    steps: int                  # since the last report
    seconds: float              # that they took


class Stopped(Exception):
    """A signal came to some rank: all ranks leave the training loop or a validation."""


def fit(training, model, steps, rate, seed, grad_clip, due_report, runtime):
    """The training loop.  Yields a Report after each step that is due; only then the device is read.

    training    the run's state, which each step advances
    model       training.model, perhaps compiled and wrapped
    steps       yields the list of this rank's micro-batches of each step
    rate        step -> its learning rate
    due_report  after a step: does the caller want a Report?
    Before each step the ranks tell each other of signals. If one has come, this step is still made and
    reported; then Stopped is raised.
    Raises UserError at the next Report if a loss was not finite or, except in float16, a gradient norm.
    """
    n_not_finite = torch.zeros((), device=runtime.device)       # steps, counted on the device
    last_step = training.step                                   # of the last report
    last_time = time.perf_counter()
    for micro_batches in steps:
        # Summed over the ranks: predicted tokens, by which the loss is divided, and signals, so that all
        # stop together. These are numbers of the host: it does not wait for the device here.
        n_predicted = sum(batch['weights'].sum().item() for batch in micro_batches)
        n_predicted, n_signals = runtime.sum(n_predicted, len(runtime.signals))

        lr = rate(training.step)
        set_lr(training.optimizer, lr, runtime)
        seed_step(seed, training.step, runtime)
        loss, norm = update(model, training.optimizer, training.scaler, micro_batches, n_predicted,
                            grad_clip, runtime)
        training.advance()

        # A norm that is not finite is no error in float16: its scaler skips that step and halves the scale.
        float16 = training.scaler.is_enabled()
        is_finite = loss.isfinite() if float16 else (loss + norm).isfinite()
        n_not_finite = n_not_finite + ~is_finite
        if not (due_report() or n_signals):
            continue                                    # the host runs ahead of the device

        loss, n_failed = runtime.sum(loss.item(), n_not_finite.item())      # here it waits for the device
        # A scale below 1 has been halved many times: the gradients are infinite at any scale.
        if n_failed or (float16 and training.scaler.get_scale() < 1):
            raise UserError(f'{training.name}: a loss or gradient after step {last_step} is not finite; '
                            'no checkpoint has it; try a lower learning_rate')
        yield Report(loss, norm.item(), lr, training.step - last_step, time.perf_counter() - last_time)
        if n_signals:
            raise Stopped
        last_step = training.step
        last_time = time.perf_counter()                 # without the time that the caller took


@torch.no_grad()
def evaluate(model, loader, n, batch_size, runtime):
    """Loss (nats), accuracy and perplexity per predicted token of n samples, over all ranks.

    Raises Stopped in all ranks as soon as any rank has a signal.
    """
    n = min(n, len(loader.rows))
    size = batch_size * runtime.world                   # samples of all ranks at a time
    slices = [range(n)[begin:begin + size] for begin in range(0, n, size)]
    mine = [samples[runtime.rank::runtime.world] for samples in slices]

    model.eval()
    sums = np.zeros(3)                                  # of losses, hits and predicted tokens
    batches = prefetch(lambda samples: loader.batch(samples) if samples else None, mine)
    for batch in with_bar(slices, batches, n, runtime):
        if runtime.any(runtime.signals):
            raise Stopped
        if batch is None:                               # the last slice may have fewer rows than ranks
            continue
        batch = runtime.move(batch)
        weights = batch.pop('weights')                              # (b, k)
        targets = batch.pop('targets')                              # without them, the model returns logits
        with runtime.autocast():
            logits = model(**batch)                                 # (b, k, V)
        losses = token_losses(logits, targets) * weights
        hits = (logits.argmax(-1) == targets) * weights
        sums += torch.stack([losses.sum(), hits.sum(), weights.sum()]).tolist()
    model.train()

    loss, hits, n_predicted = runtime.sum(*sums)
    loss = loss / max(1, n_predicted)
    accuracy = hits / max(1, n_predicted)
    perplexity = math.exp(min(loss, 700))               # math.exp raises an error above 709
    return {'loss': loss, 'accuracy': accuracy, 'perplexity': perplexity}


def validate(model, loaders, n, batch_size, order_gap, runtime):
    """{'loss', ...} on the run's corpus, and {'NAME_loss', ...} on each corpus of the knob `validation`.

    order_gap  also 'gap': how much higher the loss is if the visible tokens of each row are permuted
    Raises Stopped, as evaluate() does.
    """
    values = {}
    for name, loader in loaders.items():
        scores = evaluate(model, loader, n, batch_size, runtime)
        if order_gap:
            permuted = WithoutOrder(loader.rows, loader.masker, loader.seed)
            scores['gap'] = evaluate(model, permuted, n, batch_size, runtime)['loss'] - scores['loss']
        prefix = f'{name}_' if name else ''
        for key, value in scores.items():
            values[prefix + key] = value
    return values


# ---- 4. main: the run ----

# Here the knobs are read as the globals above. Other sections and the checkpoint get `config`, the same as a
# dict. It differs in milestones alone: start() adds those of earlier launches of the run.

def start(config, meta, identity, runtime):
    """(Training, what it starts from): the first that there is of

    the run in out_dir, which goes on with its step, samples and optimizer;
    the weights of init_from: a new run begins at step 0, on any corpus prepared with that run's tokenizer;
    random weights.
    """
    torch.manual_seed(seed)
    model = MODEL_CLASSES[objective](model_config(config, meta['vocab_size']))
    path = newest(out_dir)
    if path:
        content = read_run(path, model, objective, identity)
        milestones_before = content['config']['milestones']
        config['milestones'] = tuple(sorted({*milestones, *milestones_before}))
        say_differences(content['config'], config)
        if dtype == 'auto':                             # a run keeps its precision on another machine
            runtime.dtype = choose_dtype(content['dtype'], runtime.device, n_embd)
        origin = path
    elif init_from:
        model.load_state_dict(read_weights(init_from, model, objective, identity))
        origin = f'the weights of {shown(init_from)}'
    else:
        origin = 'random weights'

    model.to(runtime.device)
    optimizer = make_optimizer(model, learning_rate, (beta1, beta2), adam_eps, weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    training = Training(out_dir, model, optimizer, scaler, total_batch)
    if path:
        training.load_state_dict(content)
    if not runtime.agree(training.step):
        raise UserError(f'{out_dir} must be a folder that all machines share')
    return training, origin


def run_steps(training, model, loaders, log, facts, runtime):
    """Train to max_iters, with log lines, validations and checkpoints; returns the exit status.

    model    training.model, perhaps compiled and wrapped
    loaders  what make_loaders() returns
    facts    what a checkpoint holds beside Training.state_dict()
    """
    meta, loader, val_loaders = loaders
    begun = training.step

    # batches: samples are dealt to the ranks in turn; the next step's are made while the device computes
    end = training.samples + (max_iters - begun) * total_batch
    of_steps = (range(first, first + total_batch) for first in range(training.samples, end, total_batch))
    mine = (samples[runtime.rank::runtime.world] for samples in of_steps)
    steps = prefetch(lambda samples: loader.micro_batches(samples, batch_size), mine)
    disable = None if runtime.is_main else True         # None: tqdm shows the bar only on a terminal
    steps = tqdm(steps, total=max_iters, initial=begun, unit='step', disable=disable)

    warmup = warmup_iters if warmup_iters <= max_iters else max_iters // 10
    rate = partial(get_lr, peak=learning_rate, low=min_lr, warmup=warmup, total=max_iters, schedule=schedule)

    def due(interval):
        """Is it time for what is done every `interval` steps, and at the end?"""
        return training.step >= max_iters or bool(interval and training.step % interval == 0)

    def due_save():
        # these milestones include those of earlier launches
        return due(checkpoint_interval) or training.step in facts['config']['milestones']

    def due_report():
        return due(log_interval) or due(eval_interval) or due_save()

    def save_now():
        if runtime.is_main:
            save(out_dir, {**training.state_dict(), **facts})

    def validate_now():
        scores = validate(training.model, val_loaders, eval_samples, batch_size, order_gap, runtime)
        log.write('val', training.step, unigram=meta['unigram_entropy'], **scores)

    try:
        # A run is validated before its first step. One that goes on may have been stopped in a validation:
        # if the log has none of this step, do it first. Only rank 0 reads the log.
        is_missing = runtime.is_main and begun not in validated_steps(out_dir)
        if (begun == 0 or due(eval_interval)) and runtime.any(is_missing):
            validate_now()
        for report in fit(training, model, steps, rate, seed, grad_clip, due_report, runtime):
            if due(log_interval):
                seconds = report.seconds / report.steps             # per step
                log.write('train', training.step, loss=report.loss, lr=report.lr, norm=report.norm,
                          tokens_per_second=total_batch * block_size / seconds,
                          hours_left=(max_iters - training.step) * seconds / 3600)
                steps.set_postfix(loss=report.loss)             # on the bar
            if due(eval_interval):
                validate_now()
            if due_save():
                save_now()
    except Stopped:
        if training.step > begun:
            save_now()
            say(f'stopped by a signal after step {training.step}, which is saved; the same command goes on '
                'from there')
        return 128 + max(runtime.signals, default=signal.SIGTERM)   # the default: it came to another rank
    return 0


def main():
    """Train; with fill or export, use what was trained."""
    config = configure(globals(), MINIMUM)      # sets the globals above and returns them as a dict
    if fill or export:
        source = init_from if init_from else out_dir
        use_checkpoint(source, fill, export)
        return
    runtime = make_runtime(device, dtype, n_embd, timeout)
    check_knobs(config, runtime)
    loaders = make_loaders(config)
    meta, loader, _ = loaders
    identity = {'vocab_size': meta['vocab_size'], **meta['identity']}           # digests: see write_meta()
    with lock_folder(out_dir) if runtime.is_main else contextlib.nullcontext():     # one run at a time
        if runtime.is_main:
            set_damaged_aside(out_dir)
        runtime.wait()                                  # the other ranks wait for that

        # compiled and wrapped models share the parameters of training.model, which is saved and validated
        training, origin = start(config, meta, identity, runtime)
        model = training.model
        if compile and runtime.device.type == 'cuda':
            model = torch.compile(model)
        if runtime.is_distributed:
            model = DistributedDataParallel(model, gradient_as_bucket_view=runtime.device.type == 'xla')
        # what a checkpoint holds beside training.state_dict()
        facts = {'model_config': asdict(training.model.config), 'config': config, 'data': identity,
                 'dtype': str(runtime.dtype).removeprefix('torch.')}

        if runtime.is_main:
            copy_tokenizer(load_tokenizer(loader.rows.folder), out_dir)         # for load(), below
            record_launch(out_dir, config, runtime)
            print(f'{count_parameters(training.model):,} parameters on {runtime.world} x {runtime.device} in '
                  f'{runtime.dtype}; {len(loader.rows):,} training rows; from step {training.step} of '
                  f'{origin}', flush=True)
        log = Log(out_dir, training.step, runtime, wandb_project, config)

        # the run, and what came of it
        with catch_signals() as runtime.signals:
            status = run_steps(training, model, loaders, log, facts, runtime)
        if status == 0 and runtime.is_main:
            plot_losses(out_dir, total_batch * block_size)
            if fill_samples:
                # rows of up to 65,536 tokens, so that almost every document is one row
                documents = Rows(loader.rows.folder, meta, 'val', 1 << 16, 'documents')
                tokenizer = load_tokenizer(loader.rows.folder)
                show_sentences(training.model.cpu(), tokenizer, documents, fill_samples)
            print(f'\n{out_dir}: finished after step {training.step}', flush=True)
    leave(runtime, status)


# ======== above: the method; below: devices, checkpoints, results, none of which changes a batch ========

# ---- 5. care: what would otherwise fail late ----

def check_knobs(config, runtime):
    """Raise a UserError for a knob whose value has no meaning, or none on these processes."""
    choose('schedule', config['schedule'], SCHEDULE)
    if not 0 < config['mask_fraction'] <= 1:
        raise UserError(f"mask_fraction={config['mask_fraction']}: must be above 0 and at most 1")
    if config['total_batch'] < runtime.world:
        raise UserError(f"total_batch={config['total_batch']}: must be at least {runtime.world}, a sequence "
                        'for each process')
    # on XLA all ranks have equal shapes
    if runtime.device.type == 'xla' and config['total_batch'] % runtime.world:
        raise UserError(f"total_batch={config['total_batch']}: on XLA, choose a multiple of the "
                        f'{runtime.world} processes')


# ---- care: devices and processes ----

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


@dataclass
class Runtime:
    """Where this process runs: its device and precision, and its place among those that torchrun started."""
    device: torch.device
    dtype: torch.dtype
    rank: int
    world: int
    cpu_group: object           # gloo group for values on the CPU; None: no other process
    signals: list = field(default_factory=list)         # those that this process caught, see catch_signals()

    @property
    def is_main(self):
        """Whether this process writes what all share: checkpoints, the log."""
        return self.rank == 0

    @property
    def is_distributed(self):
        """Whether there are other processes."""
        return self.cpu_group is not None

    def sum(self, *numbers):
        """Each number summed over the ranks, as floats."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self.is_distributed:
            dist.all_reduce(tensor, group=self.cpu_group)
        return tensor.tolist()

    def wait(self):
        """Until every rank is here."""
        self.sum(0)

    def any(self, flag):
        """Whether the flag is set in at least one rank."""
        return self.sum(bool(flag)) != [0]

    def agree(self, number):
        """Whether the number is the same in all ranks."""
        total, = self.sum(number)
        return not self.any(total != number * self.world)

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
        """XLA: run what was recorded. Elsewhere nothing."""
        if self.device.type == 'xla':
            sys.modules['torch_xla'].sync()

    def scalar(self, number):
        """A number that changes with the step; on XLA (1,): constants recompile, equal scalars are merged."""
        if self.device.type == 'xla':
            return torch.tensor([number], device=self.device)
        return number

    def seed(self, number):
        torch.manual_seed(number)
        if self.device.type == 'xla':                   # XLA has its own generator
            sys.modules['torch_xla'].manual_seed(number)

    def adam_kernel(self):
        """Arguments of torch.optim.AdamW."""
        if self.device.type == 'xla':                   # Adam's count of steps stays on the device
            return {'capturable': True, 'foreach': False}
        return {'fused': self.device.type in ('cuda', 'cpu')}


def make_runtime(device, dtype, width, timeout=600, group=True):
    """Runtime of this process for models `width` wide; with `group` it joins torchrun's other processes."""
    rank = int(os.environ.get('RANK', 0))
    world = int(os.environ.get('WORLD_SIZE', 1))
    local = int(os.environ.get('LOCAL_RANK', 0))
    if device == 'auto':
        device = 'cpu'
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator().type
    choose('device', device, {'cpu': None, 'cuda': None, 'mps': None, 'xla': None})
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
        if device == 'xla':
            dist.init_process_group(backend, 'xla://', limit)
        else:
            dist.init_process_group(backend, store=fresh_store(limit), rank=rank, world_size=world,
                                    timeout=limit)
        rank = dist.get_rank()
        cpu_group = dist.new_group(backend='gloo', timeout=limit)
    device = torch.zeros(1, device=device).device       # with its number; on XLA after the group is made
    return Runtime(device, choose_dtype(dtype, device, width), rank, world, cpu_group)


def fresh_store(limit):
    """The store in which processes find each other's addresses, without those of an earlier start.

    torchrun keeps one store for all its restarts. A process that is started again would find the addresses of
    processes that have ended there, and be refused or wait for them: pytorch#135712. So each start has its
    own prefix. On several machines torchrun counts restarts on each machine by itself, so the prefixes could
    differ; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps, see results/machines.md.
    """
    store, _, _ = next(dist.rendezvous('env://', timeout=limit))
    if os.environ.get('GROUP_WORLD_SIZE') != '1':       # number of machines; not set without torchrun
        return store
    return dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def choose_dtype(dtype, device, width):
    """torch dtype; auto is bfloat16 on CUDA from Ampere on, on some CPUs from width 256: results/bench.md"""
    if dtype == 'auto':
        is_faster = False
        if device.type == 'cuda':
            is_faster = torch.cuda.get_device_capability() >= (8, 0)
        elif device.type == 'cpu' and width >= 256 and hasattr(torch.cpu, 'get_capabilities'):  # new in 2.11
            able = torch.cpu.get_capabilities()
            is_faster = able.get('amx_bf16') or able.get('avx512_bf16')
        dtype = 'bfloat16' if is_faster else 'float32'
    return choose('dtype', dtype, DTYPES)


def leave(runtime, status=0):
    """Exit; in a group without interpreter shutdown, where PyTorch's threads may hang: pytorch#190489"""
    if runtime.is_distributed:
        dist.barrier(runtime.cpu_group)
        dist.destroy_process_group()
        atexit._run_exitfuncs()                         # of wandb and torch_xla
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


# ---- care: signals, and one run in a folder ----

@contextlib.contextmanager
def catch_signals():
    """Within, SIGTERM, SIGINT and SIGHUP only append their numbers to the list that this yields.

    A second Ctrl-C ends a process that does not answer the first. Within a second it counts as the same one:
    some versions of torchrun pass on to the workers what the terminal has sent them too.
    """
    caught = []
    times = []                                          # of each Ctrl-C

    def note(number, frame):
        if number == signal.SIGINT:
            times.append(time.monotonic())
            if times[-1] > times[0] + 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)      # ends the process here and now
        caught.append(number)

    handlers = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:                  # as nohup ignores SIGHUP
            handlers[number] = signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def lock_folder(folder):
    """Lock a folder against a second run, as long as the returned file is open."""
    return lock_bytes(folder, 'another run uses it: end that one, or choose another --out_dir')


# ---- care: damaged files and checkpoints ----

def refuse_unknown_ids(stem, ids, vocab_size):
    """Raise a UserError if a shard holds an id outside the vocabulary: a bit of its file was flipped."""
    if ids.max() >= vocab_size:
        raise UserError(f'{stem}.bin is damaged: it holds an id outside the vocabulary')


def checkpoints(folder):
    """{step: path} of a run's checkpoints, oldest first."""
    paths = {}
    for path in glob.glob(os.path.join(glob.escape(folder), 'ckpt_*.pt')):
        digits = os.path.basename(path)[len('ckpt_'):-len('.pt')]       # seven, or more from step 10^7 on
        if digits.isdecimal():
            paths[int(digits)] = path
    return dict(sorted(paths.items()))


def newest(source):
    """Path of a run's newest checkpoint or of a trial's weights, '' if none; a checkpoint's own path."""
    if source == '' or source.endswith('.pt'):          # '': no run, and not the current folder
        return source
    trial = os.path.join(source, 'model.pt')
    if os.path.exists(trial):
        return trial
    paths = list(checkpoints(source).values())
    return paths[-1] if paths else ''


def save(folder, content):
    """Write a run's checkpoint; of the older ones the newest stays, and those of milestones."""
    write_checkpoint(os.path.join(folder, f"ckpt_{content['step']:07}.pt"), content)
    older = [path for step, path in checkpoints(folder).items()
             if step < content['step'] and step not in content['config']['milestones']]
    for path in older[:-1]:
        os.remove(path)


def write_checkpoint(path, content):
    """Write a checkpoint; a kill or a full disk leaves the earlier ones as they are."""
    temporary = path + '.tmp'
    try:
        with open(temporary, 'wb') as file:
            torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, content), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        # torch.save puts a RuntimeError of its own above the system's, which names no file.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f'{shown(path)} cannot be written: {cause}') from None


class DamagedError(UserError):
    """A file whose checksums are wrong."""


def check_archive(path):
    """Raise a DamagedError if the checksums of a checkpoint, which is a zip archive, are wrong."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()                   # name of a member with a wrong checksum, or None
    except OSError:                                     # missing, or not readable now
        raise
    except MemoryError:
        raise UserError(f'{shown(path)} cannot be read: too little memory') from None
    except Exception as error:                          # a flipped bit may raise any other
        wrong = error
    if wrong:
        raise DamagedError(f'{shown(path)} is damaged, or not a checkpoint')


def read_checkpoint(path):
    """Content of a checkpoint of train.py or finetune.py: tensors and plain Python.

    Raises DamagedError if its checksums are wrong; UserError if it is another program's or memory is short.
    """
    check_archive(path)
    try:
        content = torch.load(path, map_location='cpu', weights_only=True)
    except OSError:
        raise
    except Exception as error:                          # the checksums are right: that is no damage
        reason = shown(f'{type(error).__name__}: {error}')
        raise UserError(f'{shown(path)} cannot be loaded: {reason}') from None
    parts = 'model', 'model_config', 'config', 'data'
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in parts):
        raise UserError(f'{shown(path)} is no checkpoint of train.py or finetune.py')
    return content


def set_damaged_aside(folder):
    """Rename damaged checkpoints that are newer than the newest good one, so that the run goes on from it."""
    paths = list(checkpoints(folder).values())
    for path in reversed(paths):
        try:
            check_archive(path)
            return
        except DamagedError as error:
            if path == paths[0]:
                raise UserError(f'{folder}: every checkpoint is damaged: choose another --out_dir') from None
            os.rename(path, path + '.damaged')
            say(f'{error}: now {path}.damaged; the run goes on from the checkpoint before it')


def read_run(path, model, objective, identity):
    """Content of a checkpoint of this run; raises UserError if it has another model or corpus."""
    content = read_checkpoint(path)
    refuse_other_model(path, content, model, objective)
    refuse_difference(path, content['data'], identity)
    return content


def read_weights(source, model, objective, identity):
    """state_dict of a run, a checkpoint or a BERT; raises UserError for another model or tokenizer."""
    path = newest(source)
    if path:
        content = read_checkpoint(path)
        refuse_difference(path, content['data'], {'tokenizer': identity['tokenizer']})
    else:
        path = source
        try:
            bert = MaskedLM.from_pretrained(source)
        except OSError as error:
            raise UserError(f'{shown(source)}: no run, checkpoint or BERT: {shown(str(error))}') from None
        content = {'model': bert.state_dict(), 'model_config': asdict(bert.config),
                   'config': {'objective': 'mlm'}}
    refuse_other_model(path, content, model, objective)
    return content['model']


def refuse_other_model(path, content, model, objective):
    """Raise a UserError if the weights of a checkpoint do not fit a model or mean something else in it.

    The model takes them on: only loading shows whether the size of every tensor fits.
    """
    theirs = {**content['model_config'], 'objective': content['config'].get('objective')}
    ours = {**asdict(model.config), 'objective': objective}
    for name in ('dropout', 'attention_dropout', 'pair_init'):      # may differ
        ours.pop(name)
    refuse_difference(path, theirs, ours)
    with refuse_misfit(path):
        model.load_state_dict(content['model'])         # equal settings do not tell the sizes of another's


def refuse_difference(source, theirs, ours):
    """Raise a UserError naming the first key of `ours` whose value in `theirs` differs."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(f'{shown(source)} has {key}={shown(theirs.get(key))}, this run has '
                            f'{shown(value)}')


def say_differences(theirs, ours):
    """A line with the knobs that are not those of the checkpoint: allowed, but seldom meant."""
    changes = [f'{name} {shown(value)} -> {shown(ours[name])}'
               for name, value in theirs.items() if name in ours and ours[name] != value]
    if changes:
        say(f'knobs that differ from the checkpoint: {", ".join(changes)}')


@contextlib.contextmanager
def refuse_misfit(path):
    """Within, a kind, a field or a size of a checkpoint's model that this revision lacks is a UserError."""
    try:
        yield
    except (KeyError, TypeError, RuntimeError) as error:
        raise UserError(f'{shown(path)}: no model of this revision: {shown(str(error))}') from None


def load(source):
    """(model in eval mode, tokenizer, content of the checkpoint) of a run, a checkpoint or a trial."""
    path = newest(source)
    if not path:
        raise UserError(f'{shown(source)}: no checkpoint there')
    content = read_checkpoint(path)
    if 'head' in content:                               # a trial of finetune.py
        kind = content['head']
    else:
        kind = content['config']['objective']
    with refuse_misfit(path):
        model = MODEL_CLASSES[kind](EncoderConfig(**content['model_config']))
        model.load_state_dict(content['model'])
    return model.eval(), load_tokenizer(os.path.dirname(path)), content


# ---- 6. results: log and pictures ----

class Log:
    """Lines on stdout, in metrics.jsonl and optionally in Weights & Biases; only on rank 0."""

    def __init__(self, folder, step, runtime, project, config):
        self.path = os.path.join(folder, 'metrics.jsonl')
        self.name = os.path.basename(folder)
        self.is_main = runtime.is_main
        self.wandb = None
        if not self.is_main:
            return
        # Lines of steps after the checkpoint are of a run that was killed; its steps will be repeated.
        kept = [line for line in read_metrics(folder) if step and line['step'] <= step]
        write_bytes(self.path, ''.join(map(metrics_line, kept)).encode())
        if project:
            import wandb                                # finetune.py starts a run for each trial
            self.wandb = wandb.init(project=project, name=self.name, config=config, reinit='finish_previous')

    def write(self, kind, step, **values):
        if not self.is_main:
            return
        texts = [f'{key} {value:.4g}' if value < 1000 else f'{key} {value:,.0f}'
                 for key, value in values.items()]
        print_or_hang_up(f'{self.name} step {step}, {kind}: {", ".join(texts)}')
        finite = {key: value for key, value in values.items() if math.isfinite(value)}      # JSON has no NaN
        try:
            with open(self.path, 'a') as file:
                file.write(metrics_line({'kind': kind, 'step': step, **finite}))
        except OSError as error:
            raise named(error, self.path) from None
        if self.wandb:
            self.wandb.log({f'{kind}/{key}': value for key, value in values.items()}, step=step)


def print_or_hang_up(text):
    """Print a line. If nobody can read it, as the terminal is closed or a pipe's reader has gone: SIGHUP."""
    try:
        with tqdm.external_write_mode():                # above a progress bar
            print(text, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, 'w')              # noqa: SIM115, for what is printed from now on
        signal.raise_signal(signal.SIGHUP)              # the run saves and ends, unless it is under nohup


def with_bar(slices, batches, n, runtime):
    """Yield the batches of a validation, with a bar on the main process's terminal."""
    disable = None if runtime.is_main else True         # None: tqdm shows the bar only on a terminal
    with tqdm(desc='validation', total=n, unit='row', leave=False, disable=disable) as bar:
        for samples, batch in zip(slices, batches, strict=True):
            yield batch
            bar.update(len(samples))                    # of all ranks


def read_metrics(folder):
    """Lines of a run's metrics.jsonl as dicts; what a kill cut off is left out, and so are damaged lines."""
    path = os.path.join(folder, 'metrics.jsonl')
    if not os.path.exists(path):
        return []
    lines = []
    n_damaged = 0
    with open(path, encoding='utf-8', errors='replace') as file:
        for text in file:
            if not text.endswith('\n'):
                continue
            line = parse_metrics(text)
            if line:
                lines.append(line)
            else:
                n_damaged += 1
    if n_damaged:
        say(f'{shown(path)}: {n_damaged} damaged lines are left out')
    return lines


def metrics_line(values):
    """A line of metrics.jsonl, with its checksum as its last key."""
    return json.dumps({**values, 'checksum': digest_of(values)}) + '\n'


def parse_metrics(text):
    """The dict that metrics_line wrote as a line, None if it is damaged; lines of before have no checksum."""
    try:
        line = json.loads(text)
        given = line.pop('checksum', None)
        numbers = {key: value for key, value in line.items() if key != 'kind'}
        is_sound = isinstance(line['kind'], str) and 'step' in numbers and all(
            isinstance(value, (int, float)) for value in numbers.values())
        is_sound = is_sound and given in (None, digest_of(line))
    except (ValueError, AttributeError, KeyError, RecursionError):
        is_sound = False
    return line if is_sound else None


def validated_steps(folder):
    return [line['step'] for line in read_metrics(folder) if line['kind'] == 'val']


def read_launches(folder):
    """The dicts that record_launch wrote to run.json; [] if there is none."""
    if not os.path.exists(os.path.join(folder, 'run.json')):
        return []
    launches = read_json(folder, 'run.json')
    if not isinstance(launches, list):
        raise damage_error(folder, 'run.json')
    if not all(isinstance(launch, dict) and 'config' in launch for launch in launches):
        raise damage_error(folder, 'run.json')
    return launches


def record_launch(folder, config, runtime):
    """Append this launch to run.json: command, revision, versions, date and knobs."""
    launches = read_launches(folder)
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
        launches = read_launches(folder)
        if not launches:
            return False
        configs.append(launches[-1]['config'])
    first, *others = configs
    for config in others:
        common = first.keys() & config.keys() - {'seed', 'out_dir'}
        if any(config[key] != first[key] for key in common):
            return False
    return len({config['seed'] for config in configs}) == len(configs)


def plot(path, panels, label):
    """Save a picture: beside each other, panels {label of x: {name: [(x, y), ...]}}, all with one y.

    Of several points of a name with one x their mean is drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(f'no {path} without matplotlib: pip install matplotlib')
        return
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout='constrained')
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (x_label, lines) in zip(axes, panels.items(), strict=True):
        axis.set_xlabel(x_label)
        for name, points in lines.items():
            values = {}                                 # x -> the ys there
            for x, y in points:
                values.setdefault(x, []).append(y)
            xs = sorted(values)
            axis.plot(xs, [np.mean(values[x]) for x in xs], '.-', label=name)
    axes[0].set_ylabel(label)
    axes[0].legend()
    figure.savefig(path)


def training_seconds(lines, tokens_per_step):
    """{step: seconds of training until then, without validations} from the speeds in a log; {0: 0} if none"""
    seconds = {0: 0.0}
    last = 0
    for line in lines:
        if line.get('tokens_per_second'):
            since_last = (line['step'] - last) * tokens_per_step / line['tokens_per_second']
            seconds[line['step']] = seconds[last] + since_last
            last = line['step']
    return seconds


def plot_losses(folder, tokens_per_step):
    """loss.png: losses of training and validation, and the unigram entropy, by step and by time."""
    lines = read_metrics(folder)
    by_step = {}
    for line in lines:
        for key in line:
            if key.endswith(('loss', 'unigram')):
                by_step.setdefault(f"{line['kind']} {key}", []).append((line['step'], line[key]))
    seconds = training_seconds(lines, tokens_per_step)
    by_time = {}
    for name, points in by_step.items():
        steps, losses = zip(*points, strict=True)
        minutes = np.interp(steps, [*seconds], [*seconds.values()]) / 60
        by_time[name] = [*zip(minutes, losses, strict=True)]
    plot(os.path.join(folder, 'loss.png'), {'step': by_step, 'minutes of training': by_time},
         'nats per predicted token')


# ---- results: predictions and export ----

FUNCTION_WORDS = {'a', 'an', 'and', 'are', 'as', 'at', 'be', 'by', 'for', 'from', 'if', 'in', 'is', 'it',
                  'not', 'of', 'on', 'or', 'that', 'the', 'this', 'to', 'with'}     # for show_sentences
WORD_SIGN = '\u2581'            # sentencepiece writes it before a word


@torch.no_grad()
def fill_masks(model, tokenizer, parts):
    """Join parts (lists of ids) by [MASK], print the likeliest tokens of each; returns (n, V) chances."""
    special_ids = tokenizer.special_ids
    ids = [special_ids['cls'], *parts[0]]
    for part in parts[1:]:
        ids += [special_ids['mask'], *part]
    ids = torch.tensor([[*ids, special_ids['sep']]])                # (1, T)
    positions = (ids[0] == special_ids['mask']).nonzero().T         # (1, n)
    chances = model.eval()(ids, positions=positions)[0].softmax(-1)
    for row in chances:
        best = row.topk(5)
        texts = []
        for index, chance in zip(best.indices, best.values, strict=True):
            piece = tokenizer.pieces[index].strip(WORD_SIGN)
            if not piece:
                piece = WORD_SIGN
            texts.append(f'{shown(piece)} {chance:.3f}')            # another's tokenizer may hold anything
        print('    ' + '   '.join(texts))
    return chances


def masked_word(ids, word_starts, tokenizer, longest):
    """(place of the word to mask, end of the first sentence) of a document; None if none fits.

    The sentence has 8 to 30 tokens. Of its words that are FUNCTION_WORDS or occur twice, and are one token
    each, the middle one is taken: this rule was fixed before any output was seen.
    """
    # the first full stop that ends a word
    end = 0
    for i in range(1, min(31, longest - 1)):
        if tokenizer.pieces[ids[i]].endswith(('.', '\u3002')) and word_starts[i + 1]:
            end = i
            break
    if end < 8:
        return None
    words = {i: tokenizer.decode([ids[i]]).strip() for i in range(3, end)
             if word_starts[i] and word_starts[i + 1]}              # those of one token
    of_letters = [word for word in words.values() if word.isalpha()]
    places = [i for i, word in words.items() if word in FUNCTION_WORDS or of_letters.count(word) > 1]
    if not places:
        return None
    return places[len(places) // 2], end


def show_sentences(model, tokenizer, documents, n):
    """Mask a word in the first sentence of n documents; print the predictions and the true word's rank."""
    print('\nheld-out sentences with a masked word: a function word ("the") or one that the sentence repeats')
    n_shown = 0
    for index in shuffled(range(len(documents)), len(documents), 0, 0):
        ids, word_starts = documents[index]
        found = masked_word(ids, word_starts, tokenizer, model.config.block_size)
        if not found:
            continue
        place, end = found
        before = ids[1:place].tolist()
        after = ids[place + 1:end + 1].tolist()
        texts = [shown(tokenizer.decode(part).strip()) for part in (before, after)]
        print(f'\n{texts[0]} [MASK] {texts[1]}')
        chances = fill_masks(model, tokenizer, [before, after])[0]
        rank = 1 + int((chances > chances[ids[place]]).sum())
        print(f'    masked: {shown(tokenizer.decode([ids[place]]).strip())}, rank {rank}')
        n_shown += 1
        if n_shown == n:
            break


def use_checkpoint(source, fill, export):
    """Print the predictions for `fill`; write `export`, a folder that transformers loads."""
    if export:
        refuse_others_folder(export)
    model, tokenizer, content = load(source)
    if fill:
        if '[MASK]' not in fill:
            raise UserError(f'fill={shown(fill)}: put a [MASK] where a word is to be filled in')
        if 'head' in content:
            raise UserError(f"{shown(source)} was fine-tuned for {shown(content['task'])} and predicts no "
                            'words: name a run of train.py')
        print(fill)
        texts = [text.rstrip() for text in fill.split('[MASK]')]
        fill_masks(model, tokenizer, tokenizer.encode(texts))
    if export:
        export_model(model, tokenizer, content, export)


CARD_SIGN = 'Its logits are those of EncoderConfig('    # in the README.md of every folder that is exported


def refuse_others_folder(folder):
    """Raise a UserError if an export would write into something that is not an earlier export."""
    if not os.path.exists(folder) or os.path.isdir(folder) and not os.listdir(folder):
        return
    card = os.path.join(folder, 'README.md')
    if os.path.isfile(card):
        with open(card, encoding='utf-8', errors='replace') as file:
            if CARD_SIGN in file.read():
                return
    raise UserError(f'export={shown(folder)}: it is not empty, and no earlier export: choose another folder')


def export_model(model, tokenizer, content, folder):
    """Write the model and its tokenizer as transformers loads them, with a card."""
    settings = {'pad_token_id': tokenizer.special_ids['pad']}
    for key in ('labels', 'scale'):                     # a trial's: names of classes, scale of numbers
        if key in content:
            settings[key] = content[key]
    trained_on = content['task'] if 'head' in content else content['config']['dataset']
    twin = to_transformers(model, **settings)
    fast = fast_tokenizer(tokenizer, model.config.block_size)

    card = (f'# {type(twin).__name__}\n\n'
            f'Trained on {trained_on}, with {count_parameters(model):,} parameters before the export.\n'
            f'Its logits are those of {model.config}.\n')
    if tokenizer.facts['kind'] == 'sentencepiece':
        card += ('Its tokenizer gives the ids of training, but for ties of scores (in 1 of 1,000 sentences)\n'
                 'and capitals whose accent is a code point of its own.\n')
    os.makedirs(folder, exist_ok=True)
    write_bytes(os.path.join(folder, 'README.md'), card.encode())       # first: now the folder is an export
    try:
        twin.save_pretrained(folder)
        fast.save_pretrained(folder)
        shutil.copy(os.path.join(tokenizer.home, tokenizer.file_name), folder)
    except Exception as error:                          # on a full disk, safetensors has one of its own
        raise UserError(f'export={shown(folder)} cannot be written: {shown(str(error))}') from None


if __name__ == '__main__':
    run(main)
