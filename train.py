"""Pretraining on one device or many: masked or permuted language model.

    $ python train.py config/quickstart.py
    $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
    $ python train.py --init_from=out/quickstart --fill="the [MASK] of a matrix"

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
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from configurator import ROOT, UserError, configure, run, say, shown
from model import (EncoderConfig, MaskedLM, MultipleChoice, PermutationLM, SequenceClassifier, SpanClassifier,
                   choose, count_parameters, model_config, to_transformers, token_losses)
from prepare_data import (check_sizes, copy_tokenizer, fast_tokenizer, load_meta, load_tokenizer, read_json,
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

SCHEDULE = {                    # progress after the warmup, 0 to 1 -> fraction of (learning_rate - min_lr)
    'linear': lambda progress: 1 - progress,
    'cosine': lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    'constant': lambda progress: 1.0,
    'thirds': lambda progress: (1.0, 0.2, 0.02)[min(2, int(3 * progress))],    # 1e-4, 2e-5, 2e-6: Kowsher A.4
}
KINDS = {                       # objective of train.py or head of finetune.py -> class of the model
    'mlm': MaskedLM, 'plm': PermutationLM, 'classify': SequenceClassifier, 'regress': SequenceClassifier,
    'choose': MultipleChoice, 'span': SpanClassifier,
}
FUNCTION_WORDS = {'a', 'an', 'and', 'are', 'as', 'at', 'be', 'by', 'for', 'from', 'if', 'in', 'is', 'it',
                  'not', 'of', 'on', 'or', 'that', 'the', 'this', 'to', 'with'}     # for show_sentences


# ---- data: rows, their order, masks, batches ----

class Rows:
    """Sequences [CLS] tokens [SEP] of a split, each read from its shard's file when it is asked for.

    stream     the documents, joined by [SEP], are cut every block_size - 2 tokens
    documents  each document is cut by itself; its last row is shorter and padded
    No file stays open: a large corpus has more shards than a process may open.
    """

    def __init__(self, folder, meta, split, block_size, packing, whole_word=False):
        self.special, self.block_size, self.packing = meta['special'], block_size, packing
        self.dtype, self.room = np.dtype(meta['dtype']), block_size - 2     # tokens between [CLS] and [SEP]
        self.word_start = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), bool)
        self.segmented = whole_word and 'segmenter' in meta         # word starts are in the .words files
        self.stems = [os.path.join(folder, shard['stem']) for shard in meta['splits'][split]]
        self.starts = []                                # of each shard: index of the first token of each row
        for stem, shard in zip(self.stems, meta['splits'][split], strict=True):
            starts = range(0, shard['tokens'] - self.room + 1, self.room)   # incomplete ones left out
            if packing == 'documents':
                edges = np.fromfile(stem + '.idx', np.int64)        # of documents, which end with [SEP]
                rows = -(-(np.diff(edges) - 1) // self.room)                # of each document
                place = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)     # in its document
                starts = np.repeat(edges[:-1], rows) + place * self.room
            self.starts.append(starts)
        self.ends = np.cumsum([0] + [len(starts) for starts in self.starts])        # rows before each shard
        if not len(self):
            raise UserError(f'{folder}: {split} holds less than one row of block_size={block_size}')

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, index):
        """(ids (T,) int64, whether each token starts a word (T,) bool) of a row"""
        shard = np.searchsorted(self.ends, index, side='right') - 1
        stem, start = self.stems[shard], int(self.starts[shard][index - self.ends[shard]])
        tokens = np.fromfile(stem + '.bin', self.dtype, self.room, offset=start * self.dtype.itemsize)
        if self.packing == 'documents':
            tokens = tokens[:min(np.flatnonzero(tokens == self.special['sep']), default=self.room)]
        n, ids = len(tokens), np.full(self.block_size, self.special['pad'], np.int64)
        ids[0], ids[1:n + 1], ids[n + 1] = self.special['cls'], tokens, self.special['sep']
        word_starts = self.word_start[ids]
        if self.segmented:
            word_starts[1:n + 1] = np.fromfile(stem + '.words', bool, n, offset=start)
        return ids, word_starts


def shuffled(places, n, seed, epoch):
    """The items at `places`, (B,), of range(n) in random order: one order for each (seed, epoch).

    A Feistel network permutes all numbers of some even number of bits; a result of n or more is put through
    it again. This takes no memory; a list of 10^9 rows in random order takes 8 GB in each process.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))       # bits of each half of a number
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(8, np.uint64)
    x = np.array(places, np.uint64)
    again = np.ones(len(x), bool)
    while again.any():
        left, right = x[again] >> half, x[again] & low
        for key in keys:
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
        self.special, self.block_size = meta['special'], block_size
        self.is_special = np.isin(np.arange(meta['vocab_size']), list(self.special.values()))
        self.ordinary, self.k = np.flatnonzero(~self.is_special), self.count(block_size)

    def count(self, n):
        return np.ceil(self.fraction * n - 1e-9).astype(int)                # so that 0.15 * 20 gives 3

    def __call__(self, ids, word_starts, seed, samples):
        """ids, word_starts (B, T) -> {'ids' (B, T), 'positions', 'targets', 'weights' (B, k)[, 'order']}"""
        rngs = [np.random.default_rng([seed, sample]) for sample in samples]
        scores = np.stack([rng.random(self.block_size, np.float32) for rng in rngs])                # (B, T)
        actions = np.stack([rng.random(self.k, np.float32) for rng in rngs])                        # (B, k)
        replacements = self.ordinary[[rng.integers(0, len(self.ordinary), self.k) for rng in rngs]]
        special = self.is_special[ids]                  # (B, T); they come last, as scores are below 1
        wanted = np.minimum(self.count((ids != self.special['pad']).sum(1)), (~special).sum(1))     # (B,)
        positions = np.argsort(np.where(special, 2, scores), axis=1, kind='stable')[:, :self.k]
        if self.whole_word:
            for i, row in enumerate(zip(scores, word_starts, special, wanted, strict=True)):
                positions[i], wanted[i] = whole_words(*row, self.k)
        chosen, targets = np.arange(self.k) < wanted[:, None], np.take_along_axis(ids, positions, axis=1)
        batch = {'ids': ids, 'positions': positions, 'targets': targets, 'weights': chosen.astype(np.float32)}
        if self.objective == 'plm':         # place 0: special tokens; the predicted ones are the last
            predicted = np.zeros(ids.shape, bool)
            np.put_along_axis(predicted, positions, chosen, axis=1)
            by_place = np.argsort(np.where(special, -1, scores + 2 * predicted), axis=1, kind='stable')
            return {**batch, 'order': np.where(special, 0, np.argsort(by_place, axis=1) + 1)}
        changed = np.where(actions < 0.9, replacements, targets)
        visible = np.where(actions < 0.8, self.special['mask'], changed)
        np.put_along_axis(ids, positions, np.where(chosen, visible, targets), axis=1)       # in place
        return batch


def whole_words(scores, word_starts, special, wanted, k):
    """(k positions of a row, how many of them count): whole words in random order, at most `wanted` tokens.

    A word with more tokens than are still wanted is passed over, as in BERT. A special token is a word.
    """
    first = word_starts | special | np.append(True, special[:-1])
    words = np.split(np.arange(len(first)), np.flatnonzero(first)[1:])
    chosen = []
    for number in np.argsort(scores[:len(words)], kind='stable'):
        word = words[number]
        if not special[word[0]] and len(chosen) + len(word) <= wanted:
            chosen += [*word]
    others = np.setdiff1d(np.arange(len(first)), chosen)
    return np.array([*chosen, *others])[:k], len(chosen)


class Loader:
    """Samples 0, 1, 2 ... of a run: every row once per epoch, each epoch in another order."""

    def __init__(self, rows, masker, seed):
        self.rows, self.masker, self.seed = rows, masker, seed

    def indices(self, samples):
        """Row of each sample, (B,)"""
        epochs, places = np.divmod(np.array(samples), len(self.rows))
        for epoch in np.unique(epochs):
            here = epochs == epoch
            places[here] = shuffled(places[here], len(self.rows), self.seed, int(epoch))
        return places

    def batch(self, samples):
        """{'ids', 'positions', 'targets', 'weights'[, 'order'][, 'attention_mask']}, tensors of B rows"""
        rows = [self.rows[index] for index in self.indices(samples)]
        ids, word_starts = np.stack([ids for ids, _ in rows]), np.stack([starts for _, starts in rows])
        batch = self.masker(ids, word_starts, self.seed, samples)
        if self.rows.packing == 'documents':
            batch['attention_mask'] = ids != self.rows.special['pad']
        return {key: torch.from_numpy(x) for key, x in batch.items()}

    def micro_batches(self, samples, size):
        """Batches of at most `size` samples."""
        n, parts = len(samples), -(-len(samples) // size)
        return [self.batch(samples[n * i // parts:n * (i + 1) // parts]) for i in range(parts)]


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
    k, loaders = SimpleNamespace(**config), {}
    choose('objective', k.objective, dict.fromkeys(('mlm', 'plm')))
    choose('packing', k.packing, dict.fromkeys(('stream', 'documents')))
    folder = os.path.join(k.data_dir, k.dataset)
    meta = load_meta(folder)                            # says how to prepare the corpus if it is missing
    masker = Masker(meta, k.block_size, k.mask_fraction, k.objective, k.whole_word)
    rows = Rows(folder, meta, 'train', k.block_size, k.packing, k.whole_word)
    for name in ['', *filter(None, k.validation.split(','))]:
        place = os.path.join(k.data_dir, name or k.dataset)
        found = load_meta(place)
        check_sizes(place, found)
        refuse_difference(place, found['identity'], {'tokenizer': meta['identity']['tokenizer']})
        loaders[name] = Loader(Rows(place, found, 'val', k.block_size, k.packing, k.whole_word), masker, 0)
    return meta, Loader(rows, masker, k.seed), loaders


# ---- devices and processes ----
# XLA, for TPUs, traces lazily: sync() compiles the traced operations as one graph and runs it.

@dataclass
class Runtime:
    """Where this process runs: its device and precision, and its place among those that torchrun started."""
    device: torch.device
    dtype: torch.dtype
    rank: int
    world: int
    host: object                # gloo group for values on the CPU; None: no other process

    def sum(self, *numbers):
        """Each number summed over the ranks, as floats."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self.host is not None:
            dist.all_reduce(tensor, group=self.host)
        return tensor.tolist()

    def move(self, batch):
        """The tensors of a batch on the device; on CUDA the host does not wait for the copy."""
        pin = self.device.type == 'cuda'                # only copies from pinned memory are asynchronous
        return {key: (x.pin_memory() if pin else x).to(self.device, non_blocking=pin)
                for key, x in batch.items()}

    def autocast(self):
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype) if half else contextlib.nullcontext()

    def input(self, number):
        """A number that changes with the step; on XLA (1,): constants recompile, equal scalars are merged."""
        return torch.tensor([number], device=self.device) if self.device.type == 'xla' else number

    def sync(self):
        if self.device.type == 'xla':
            sys.modules['torch_xla'].sync()


def join(device, dtype, width, timeout=600, group=True):
    """Runtime of this process for models `width` wide; with `group` it joins torchrun's other processes."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
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
    host, limit = None, timedelta(seconds=timeout or 10 ** 8)
    if group and world > 1:
        backend = {'cuda': 'nccl', 'xla': 'xla'}.get(device, 'gloo')
        dist.init_process_group(backend, 'xla://' if device == 'xla' else None, limit)
        rank, host = dist.get_rank(), dist.new_group(backend='gloo', timeout=limit)
    device = torch.zeros(1, device=device).device       # with its number; on XLA after the group is made
    return Runtime(device, choose_dtype(dtype, device, width), rank, world, host)


def choose_dtype(dtype, device, width):
    """torch dtype; auto is bfloat16 on CUDA from Ampere on, on some CPUs from width 256: results/dtype"""
    if dtype == 'auto':
        fast = device.type == 'cuda' and torch.cuda.get_device_capability() >= (8, 0)
        if device.type == 'cpu' and width >= 256 and hasattr(torch.cpu, 'get_capabilities'):    # new in 2.11
            able = torch.cpu.get_capabilities()
            fast = able.get('amx_bf16') or able.get('avx512_bf16')
        dtype = 'bfloat16' if fast else 'float32'
    return choose('dtype', dtype, {name: getattr(torch, name) for name in ('float32', 'bfloat16', 'float16')})


def leave(runtime, status=0):
    """Exit; in a group without interpreter shutdown, where PyTorch's threads may hang: pytorch#190489"""
    if runtime.host is not None:
        dist.barrier(runtime.host)
        dist.destroy_process_group()
        atexit._run_exitfuncs()                         # of wandb and torch_xla
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def catch_signals():
    """From now on SIGTERM, SIGINT and SIGHUP only append their numbers to the list that is returned."""
    caught = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:                  # as nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: caught.append(number))
    return caught


# ---- one step ----

def make_optimizer(model, lr, betas, eps, weight_decay, runtime):
    """AdamW, fused if possible; weight decay on parameters of two or more dimensions, also pairwise's S."""
    groups = [{'params': [p for p in model.parameters() if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in model.parameters() if p.dim() < 2], 'weight_decay': 0.0}]
    is_xla, fused = runtime.device.type == 'xla', runtime.device.type in ('cuda', 'cpu')
    kernel = {'capturable': True, 'foreach': False} if is_xla else {'fused': fused}
    return torch.optim.AdamW(groups, runtime.input(lr), betas, eps, **kernel)


def get_lr(step, peak, low, warmup, total, schedule):
    """Learning rate of update `step`, from 0: linear warmup to the peak, then SCHEDULE towards `low`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return low + (peak - low) * SCHEDULE[schedule]((step - warmup) / max(1, total - warmup))


def set_lr(optimizer, lr, runtime):
    for group in optimizer.param_groups:
        group['lr'] = runtime.input(lr)


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
    total, count = torch.zeros(1, device=runtime.device), runtime.input(max(1.0, count))
    for i, part in enumerate(parts):
        part = runtime.move(part)
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
    runtime.sync()
    return total[0], norm


@torch.no_grad()
def evaluate(model, loader, n, batch_size, runtime, stop=()):
    """Loss (nats), accuracy and perplexity per predicted token of n samples, over all ranks.

    stop  list of caught signals; None is returned as soon as any rank has one
    """
    model.eval()
    n, sums, size = min(n, len(loader.rows)), np.zeros(3), batch_size * runtime.world   # loss, hits, tokens
    parts = [range(n)[i:i + size][runtime.rank::runtime.world] for i in range(0, n, size)]
    for part in prefetch(lambda part: loader.batch(part) if part else None, parts):
        if runtime.sum(len(stop)) != [0]:
            return None
        if part is None:                                # the last part may have fewer rows than ranks
            continue
        part = runtime.move(part)
        weights, targets = part.pop('weights'), part.pop('targets')
        with runtime.autocast():
            logits = model(**part)                                  # (b, k, V)
        losses = token_losses(logits, targets) * weights
        hits = (logits.argmax(-1) == targets) * weights
        sums += torch.stack([losses.sum(), hits.sum(), weights.sum()]).tolist()
    model.train()
    loss, hits, tokens = runtime.sum(*sums)
    loss, accuracy = loss / max(1, tokens), hits / max(1, tokens)
    return {'loss': loss, 'accuracy': accuracy, 'perplexity': math.exp(min(loss, 700))}


# ---- checkpoints and log ----

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


def save(folder, content):
    """Write a run's checkpoint; of the older ones the newest stays, and those of milestones."""
    write_checkpoint(os.path.join(folder, f"ckpt_{content['step']:07}.pt"), content)
    older = [path for step, path in checkpoints(folder).items()
             if step < content['step'] and step not in content['config']['milestones']]
    for path in older[:-1]:
        os.remove(path)


def hold(folder):
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


def refuse_difference(source, theirs, ours):
    """Raise a UserError naming the first key of `ours` whose value in `theirs` differs."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(f'{source} has {key}={shown(theirs.get(key))}, this run has {shown(value)}')


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
    ours = {key: x for key, x in config.items() if key not in ('dropout', 'attention_dropout', 'pair_init')}
    refuse_difference(source, theirs, {**ours, **identity})
    return content


def load(source):
    """(model in eval mode, tokenizer, content of the checkpoint) of a run, a checkpoint or a trial."""
    path = newest(source)
    if not path:
        raise UserError(f'{source}: no checkpoint there')
    content = read_checkpoint(path)
    kind = content.get('head') or content['config']['objective']
    model = KINDS[kind](EncoderConfig(**content['model_config']))
    model.load_state_dict(content['model'])
    return model.eval(), load_tokenizer(os.path.dirname(path)), content


class Log:
    """Lines on stdout, in metrics.jsonl and optionally in Weights & Biases; only on rank 0."""

    def __init__(self, folder, step, runtime, project, config):
        self.path, self.name = os.path.join(folder, 'metrics.jsonl'), os.path.basename(folder)
        self.main, self.wandb = runtime.rank == 0, None
        if not self.main:
            return
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


def record_launch(folder, config, runtime):
    """Append this launch to run.json: command, revision, versions, date and knobs."""
    launches = read_json(folder, 'run.json') if 'run.json' in os.listdir(folder) else []
    revision = subprocess.getoutput(f'git -C {shlex.quote(ROOT)} describe --always --dirty 2>/dev/null')
    write_json(os.path.join(folder, 'run.json'), [*launches, {
        'argv': sys.argv, 'revision': revision, 'torch': torch.__version__, 'world_size': runtime.world,
        'device': str(runtime.device), 'date': time.strftime('%Y-%m-%dT%H:%M:%S%z'), 'config': config}])


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
        axis.plot(xs, [np.mean([y for other, y in points if other == x]) for x in xs], '.-', label=name)
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


# ---- use of a checkpoint ----

@torch.no_grad()
def fill_masks(model, tokenizer, parts):
    """Join parts (lists of ids) by [MASK], print the likeliest tokens of each; returns (n, V) chances."""
    ids = [tokenizer.special['cls'], *parts[0]]
    for part in parts[1:]:
        ids += [tokenizer.special['mask'], *part]
    ids = torch.tensor([[*ids, tokenizer.special['sep']]])
    positions = (ids[0] == tokenizer.special['mask']).nonzero().T           # (1, n)
    chances = model.eval()(ids, positions=positions)[0].softmax(-1)
    for row in chances:
        best = row.topk(5)
        words = [tokenizer.pieces[i].strip('\u2581') or '\u2581' for i in best.indices]
        print('    ' + '   '.join(f'{word} {p:.3f}' for word, p in zip(words, best.values, strict=True)))
    return chances


def show_sentences(model, tokenizer, documents, n):
    """Mask a word in the first sentence, 8 to 30 tokens, of n documents; print predictions and its rank.

    The middle one of those that are FUNCTION_WORDS or occur twice: fixed before any output was seen.
    """
    print('\nheld-out sentences with a masked word: a function word ("the") or one that the sentence repeats')
    for index in shuffled(range(len(documents)), len(documents), 0, 0):
        ids, starts = documents[index]
        ends = [i for i in range(1, min(31, model.config.block_size - 1))
                if tokenizer.pieces[ids[i]].endswith(('.', '\u3002')) and starts[i + 1]]
        end = min(ends, default=0)
        words = {i: tokenizer.decode([ids[i]]).strip() for i in range(3, end) if starts[i] and starts[i + 1]}
        letters = [word for word in words.values() if word.isalpha()]
        fits = [i for i, word in words.items() if word in FUNCTION_WORDS or letters.count(word) > 1]
        if end >= 8 and fits:
            n, at = n - 1, fits[len(fits) // 2]
            before, after = ids[1:at].tolist(), ids[at + 1:end + 1].tolist()
            print(f'\n{tokenizer.decode(before).strip()} [MASK] {tokenizer.decode(after).strip()}')
            chances = fill_masks(model, tokenizer, [before, after])[0]
            print(f'    masked: {words[at]}, rank {1 + int((chances > chances[ids[at]]).sum())}')
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
        twin = to_transformers(model, pad_token_id=tokenizer.special['pad'])
        fast = fast_tokenizer(tokenizer, model.config.block_size)
        twin.save_pretrained(export)
        fast.save_pretrained(export)
        shutil.copy(os.path.join(tokenizer.home, tokenizer.file_name), export)
        card = (f'# {type(twin).__name__}\n\n'
                f"Trained on {content['config'].get('dataset', content.get('task'))}, with "
                f'{count_parameters(model):,} parameters before the export.\n'
                f'Its logits are those of {model.config}.\n'
                'A sentencepiece tokenizer gives the ids of training, but for ties of scores (in 1 of 1,000\n'
                'sentences) and capitals whose accent is a code point of its own.\n')
        write_bytes(os.path.join(export, 'README.md'), card.encode())


def main():
    config = configure(globals())
    if fill or export:
        return use_checkpoint(init_from or out_dir, fill, export)
    choose('schedule', schedule, SCHEDULE)
    runtime = join(device, dtype, n_embd, timeout)
    if total_batch < runtime.world or (runtime.device.type == 'xla' and total_batch % runtime.world):
        raise UserError(f'total_batch={total_batch}: choose a multiple of the {runtime.world} processes')

    # data
    meta, loader, val_loaders = make_loaders(config)
    identity, folder = {'vocab_size': meta['vocab_size'], **meta['identity']}, os.path.join(data_dir, dataset)

    # model and optimizer: from the newest checkpoint of out_dir, else from init_from, else new
    _held = hold(out_dir) if runtime.rank == 0 else None            # until main() returns
    if runtime.rank == 0:
        set_damaged_aside(out_dir)
    runtime.sum(0)                                      # the other ranks wait for that
    torch.manual_seed(seed)
    raw = KINDS[objective](model_config(config, meta['vocab_size']))
    source = newest(out_dir) or newest(init_from) or init_from
    content = read_start(source, {**asdict(raw.config), 'objective': objective}, identity) if source else {}
    raw.load_state_dict(content.get('model', raw.state_dict()))
    if dtype == 'auto' and 'dtype' in content:          # a run keeps its precision on another machine
        runtime.dtype = choose_dtype(content['dtype'], runtime.device, n_embd)
    raw.to(runtime.device)
    optimizer = make_optimizer(raw, learning_rate, (beta1, beta2), adam_eps, weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    step, samples = content.get('step', 0), content.get('samples', 0)       # done so far
    if 'step' in content:
        groups = optimizer.state_dict()['param_groups']         # of this command: decay, betas, kernel
        optimizer.load_state_dict({**content['optimizer'], 'param_groups': groups})
        scaler.load_state_dict(content['scaler'] or scaler.state_dict())
        config['milestones'] = tuple(sorted({*milestones, *content['config']['milestones']}))
    if runtime.sum(step) != [step * runtime.world]:
        raise UserError(f'{out_dir} must be a folder that all machines share')
    model = torch.compile(raw) if compile and runtime.device.type == 'cuda' else raw
    if runtime.host is not None:
        model = DistributedDataParallel(model, gradient_as_bucket_view=runtime.device.type == 'xla')

    # log and signals
    if runtime.rank == 0:
        copy_tokenizer(load_tokenizer(folder), out_dir)                     # for load()
        record_launch(out_dir, config, runtime)
        print(f'{count_parameters(raw):,} parameters on {runtime.world} x {runtime.device} in '
              f'{runtime.dtype}; {len(loader.rows):,} training rows; from step {step} of '
              f'{source or "random weights"}', flush=True)
    changes = [f'{name} {shown(value)} -> {shown(config[name])}'
               for name, value in content.get('config', {}).items() if config.get(name, value) != value]
    if changes:
        say(f'knobs that differ from the checkpoint: {", ".join(changes)}')
    content.clear()                                     # frees memory
    log, stop = Log(out_dir, step, runtime, wandb_project, config), catch_signals()

    def due_at(interval):
        return step == max_iters or (interval and step % interval == 0)

    def validate():
        """Log the scores on each corpus; False if a signal came."""
        values = {'unigram': meta['unigram_entropy']}
        for name, val_loader in val_loaders.items():
            scores = evaluate(raw, val_loader, eval_samples, batch_size, runtime, stop)
            if scores is None:
                return False
            values |= {f'{name}_{key}' if name else key: value for key, value in scores.items()}
        log.write('val', step, **values)
        return True

    # the first validation, or one that a signal cut short in an earlier process
    known = [line['step'] for line in read_metrics(out_dir) if line['kind'] == 'val']
    missing = runtime.rank == 0 and (step == 0 or due_at(eval_interval)) and step not in known
    if runtime.sum(missing) != [0] and not validate():
        leave(runtime, 128 + max(stop, default=signal.SIGTERM))     # nothing new to save

    warmup = warmup_iters if warmup_iters <= max_iters else max_iters // 10
    firsts = range(samples, samples + (max_iters - step) * total_batch, total_batch)
    mine = (range(first, first + total_batch)[runtime.rank::runtime.world] for first in firsts)
    steps = prefetch(lambda part: loader.micro_batches(part, batch_size), mine)
    bad = torch.zeros((), device=runtime.device)        # steps that are not finite; read where it logs
    looked, since = step, time.perf_counter()           # the step that was last read, and when
    bar = tqdm(steps, total=max_iters, initial=step, unit='step', disable=runtime.rank > 0 or None)
    for parts in bar:                                   # micro-batches of this rank; bar: on a terminal alone
        count, stopping = runtime.sum(sum(part['weights'].sum().item() for part in parts), len(stop))
        lr = get_lr(step, learning_rate, min_lr, warmup, max_iters, schedule)
        set_lr(optimizer, lr, runtime)
        seed_step(seed, step, runtime)
        loss, norm = update(model, optimizer, scaler, parts, count, grad_clip, runtime)
        finite = (loss if scaler.is_enabled() else loss + norm).isfinite()  # the scaler skips a bad norm
        bad, step, samples = bad + ~finite, step + 1, samples + total_batch
        due = stopping or due_at(checkpoint_interval) or step in milestones
        if not (due or due_at(log_interval) or due_at(eval_interval)):
            continue
        loss, broken = runtime.sum(loss.item(), bad.item())     # the host waits for the device here
        if broken or (scaler.is_enabled() and scaler.get_scale() < 1):
            raise UserError(f'a loss or gradient after step {looked} is not finite; no checkpoint has it; '
                            'try a lower learning_rate')
        if due_at(log_interval):
            seconds = (time.perf_counter() - since) / (step - looked)
            log.write('train', step, loss=loss, lr=lr, norm=norm.item(),
                      tokens_per_second=total_batch * block_size / seconds,
                      hours_left=(max_iters - step) * seconds / 3600)
            bar.set_postfix(loss=loss)
        if due_at(eval_interval) and not validate():
            due = stopping = True
        if due and runtime.rank == 0:
            save(out_dir, {'model': raw.state_dict(), 'model_config': asdict(raw.config), 'config': config,
                           'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict(), 'step': step,
                           'samples': samples, 'data': identity, 'dtype': str(runtime.dtype)[6:]})
        looked, since = step, time.perf_counter()
        if stopping:
            say(f'stopped by a signal after step {step}, which is saved; the same command goes on from there')
            leave(runtime, 128 + max(stop, default=signal.SIGTERM))

    if runtime.rank == 0:
        plot_losses(out_dir)
    if runtime.rank == 0 and fill_samples:
        documents = Rows(folder, meta, 'val', 1 << 16, 'documents')
        show_sentences(raw.cpu(), load_tokenizer(folder), documents, fill_samples)
    leave(runtime)


if __name__ == '__main__':
    run(main)
