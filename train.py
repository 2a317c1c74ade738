"""Pretraining on one device or many: masked or permuted language model.

    $ python train.py config/quickstart.py
    $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py
    $ python train.py --init_from=out/quickstart --fill="the [MASK] of a matrix"

Sample n of a run, with its masks, depends only on (data, seed, n), dropout only on (seed, step, rank). So a
resumed run repeats an uninterrupted one, bit for bit on the CPU, and any number of processes sees the same
batches.
"""
from configurator import ROOT, UserError, configure, run, say  # first: no traceback on Ctrl-C
import contextlib
import functools
import glob
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from model import (EncoderConfig, MaskedLM, MultipleChoice, PermutationLM, SequenceClassifier, SpanClassifier,
                   choose, count_parameters, model_config, to_transformers, token_losses)
from prepare_data import (check_sizes, copy_tokenizer, fast_tokenizer, load_meta, load_tokenizer, read_json,
                          write_json)

# the run
out_dir = 'out/run'             # checkpoints, metrics.jsonl, run.json and loss.png go here
init_from = ''                  # a checkpoint, a run or a BERT; not used once out_dir holds a checkpoint
seed = 1                        # for weights, sample order, masks and dropout
fill = ''                       # a text with [MASK]: print the predictions of init_from and stop
export = ''                     # a folder: export init_from there for transformers and stop
# data
dataset = 'docstrings'          # folder below data_dir, made by prepare_data.py
data_dir = 'data'               # parent folder of prepared corpora
validation = ''                 # more folders below data_dir to validate on, comma-separated; e.g. ptb
block_size = 512                # tokens per sequence, including [CLS] and [SEP]
packing = 'stream'              # stream: joined documents cut to length; documents: each begins a row, padded
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
pair_init = 'identity'          # pairwise: initial S: identity, fan_in, normal or unit
normaliser = 'softmax_plus'     # gau: softmax, softmax_plus, squared_relu or scaled_squared_relu
relu_scale = 'ns'               # squared_relu: n2, n, ns, s2 or ns2
key_size = 128                  # gau: width of queries and keys
clip_distance = 128             # rpe: relative distances are clipped at +-(clip_distance - 1)
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
warmup_iters = 10_000           # steps of linear warmup; of a run shorter than this: a tenth of it
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
milestones = ()                 # steps whose checkpoints stay, e.g. 1000,10000; of the others the newest two
fill_samples = 3                # held-out rows to fill in at the end
wandb_project = ''              # log to Weights & Biases too
# system
device = 'auto'                 # auto, cpu, cuda, mps or xla
dtype = 'auto'                  # auto (bfloat16 where it is faster), float32, bfloat16 or float16
compile = True                  # torch.compile, on CUDA
timeout = 600                   # seconds a process waits for another before all exit

SCHEDULE = {                    # progress after the warmup, 0 to 1 -> fraction of (learning_rate - min_lr)
    'linear': lambda progress: 1 - progress,
    'cosine': lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    'constant': lambda progress: 1.0,
    'thirds': lambda progress: (1.0, 0.2, 0.02)[min(2, int(3 * progress))],    # 1e-4, 2e-5, 2e-6: Kowsher A.4
}
MAY_CHANGE = 'dropout', 'attention_dropout', 'n_label', 'pooling', 'pair_init'    # fields of a model
KINDS = {                       # objective of train.py or head of finetune.py -> class of the model
    'mlm': MaskedLM, 'plm': PermutationLM, 'classify': SequenceClassifier, 'regress': SequenceClassifier,
    'choose': MultipleChoice, 'span': SpanClassifier,
}


# ---- data: rows, masks, batches ----

class Rows:
    """Sequences [CLS] tokens [SEP] of a split, read on demand from its memory-mapped shards.

    stream: the joined documents, cut every block_size - 2 tokens.  documents: each document is cut by itself;
    its last row is shorter and padded.
    """

    def __init__(self, folder, meta, split, block_size, packing, whole_word=False):
        self.special, self.block_size, self.packing = meta['special'], block_size, packing
        self.room, self.starts, self.files, self.words = block_size - 2, [], [], None
        for shard in filter(lambda shard: shard['tokens'], meta['splits'][split]):
            stem = os.path.join(folder, shard['stem'])
            self.files.append(np.memmap(stem + '.bin', meta['dtype'], 'r'))
            starts = range(0, shard['tokens'] - self.room + 1, self.room)
            if packing == 'documents':                  # each ends with [SEP]
                edges = np.fromfile(stem + '.idx', np.int64)
                rows = -(-(np.diff(edges) - 1) // self.room)                # of each document
                number = np.arange(rows.sum()) - np.repeat(rows.cumsum() - rows, rows)
                starts = np.repeat(edges[:-1], rows) + number * self.room
            self.starts.append(starts)
        if whole_word and 'segmenter' in meta:
            self.words = [np.memmap(file.filename[:-4] + '.words', np.uint8, 'r') for file in self.files]
        self.word_start = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), bool)
        self.ends = np.cumsum([len(starts) for starts in self.starts])

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, index):
        """(ids (T,) int64, word starts (T,) bool) of a row"""
        shard = np.searchsorted(self.ends, index, 'right')
        start = self.starts[shard][index - self.ends[shard]]                # counted from the end: negative
        tokens = self.files[shard][start:start + self.room]
        if self.packing == 'documents':
            tokens = tokens[:[*np.flatnonzero(tokens == self.special['sep']), self.room][0]]
        ids = np.full(self.block_size, self.special['pad'], np.int64)
        ids[0], ids[len(tokens) + 1] = self.special['cls'], self.special['sep']
        ids[1:len(tokens) + 1] = tokens
        starts = self.word_start[ids]
        if self.words:
            starts[1:len(tokens) + 1] = self.words[shard][start:start + len(tokens)]
        return ids, starts


class Masker:
    """BERT's masking with static shapes.  Devlin et al. 2018, section 3.1

    Of a row's n tokens, ceil(fraction n) random ones are predicted, or at most that many of whole words: 80 %
    become [MASK], 10 % a random token, 10 % are unchanged. Special tokens are neither chosen nor inserted.
    Every row has k = ceil(fraction T) positions; surplus ones have weight 0.
    plm: nothing is masked; 'order' is each token's place in XLNet's permutation.  Yang et al. 2019, 2.2, 2.3
    """

    def __init__(self, meta, block_size, fraction, objective, whole_word):
        self.fraction, self.objective, self.whole_word = fraction, objective, whole_word
        self.special, self.block_size = meta['special'], block_size
        self.is_special = np.isin(np.arange(meta['vocab_size']), list(self.special.values()))
        self.ordinary, self.k = np.flatnonzero(~self.is_special), max(1, self.count(block_size))

    def count(self, n):
        return np.ceil(self.fraction * n - 1e-9).astype(int)                # so that 0.15 * 20 gives 3

    def draw(self, seed, sample):
        """Random numbers of a sample: scores (T,), actions (k,), replacements (k,)"""
        rng = np.random.default_rng([seed, sample])
        return (rng.random(self.block_size, np.float32), rng.random(self.k, np.float32),
                self.ordinary[rng.integers(0, len(self.ordinary), self.k)])

    def __call__(self, ids, starts, seed, samples):
        """ids, starts (B, T) -> {'ids' (B, T), 'positions', 'targets' (B, k) int64, 'weights' (B, k), ...}"""
        draws = [self.draw(seed, sample) for sample in samples]
        scores, actions, replacements = map(np.stack, zip(*draws, strict=True))
        special = self.is_special[ids]
        wanted = np.minimum(self.count((ids != self.special['pad']).sum(1)), (~special).sum(1))   # (B,)
        positions = np.argsort(np.where(special, 2, scores), axis=1, kind='stable')[:, :self.k]
        for i in range(len(ids)) if self.whole_word else ():
            positions[i], wanted[i] = whole_words(scores[i], starts[i], special[i], wanted[i], self.k)
        chosen, targets = np.arange(self.k) < wanted[:, None], np.take_along_axis(ids, positions, 1)
        batch = {'positions': positions, 'targets': targets, 'weights': chosen.astype(np.float32)}
        if self.objective == 'plm':         # 0: special tokens, then those not predicted, then the others
            last = np.zeros(ids.shape, bool)
            np.put_along_axis(last, positions, chosen, 1)
            ranks = np.argsort(np.argsort(np.where(special, -1, scores + 2 * last), kind='stable'))
            return {'ids': ids, **batch, 'order': np.where(special, 0, ranks + 1)}
        shown = np.where(actions < 0.8, self.special['mask'], np.where(actions < 0.9, replacements, targets))
        np.put_along_axis(ids, positions, np.where(chosen, shown, targets), 1)
        return {'ids': ids, **batch}


def whole_words(scores, starts, special, wanted, k):
    """(k places of a row, number that count): whole words in random order, at most `wanted` tokens."""
    starts = starts | special | np.append(True, special[:-1])
    words = np.split(np.arange(len(starts)), np.flatnonzero(starts)[1:])
    chosen = []
    for word in np.argsort(scores[:len(words)], kind='stable'):
        if len(chosen) == wanted:
            break
        if not special[words[word][0]] and len(chosen) + len(words[word]) <= wanted:
            chosen += [*words[word]]
    others = np.setdiff1d(np.arange(len(starts)), chosen)
    return np.array([*chosen, *others])[:k], len(chosen)


@functools.lru_cache(2)
def order(n, seed, epoch):
    """Permutation of n rows in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


class Loader:
    """Samples 0, 1, 2 ... of a run: every row once per epoch, each epoch in another order."""

    def __init__(self, rows, masker, seed):
        self.rows, self.masker, self.seed = rows, masker, seed

    def row(self, sample):
        epoch, place = divmod(sample, len(self.rows))
        return self.rows[order(len(self.rows), self.seed, epoch)[place]]

    def batch(self, samples):
        """{'ids', 'positions', 'targets', 'weights'[, 'order'][, 'attention_mask']}, (B, ...) tensors"""
        ids, starts = map(np.stack, zip(*map(self.row, samples), strict=True))
        batch = self.masker(ids, starts, self.seed, samples)
        if self.rows.packing == 'documents':
            batch['attention_mask'] = batch['ids'] != self.rows.special['pad']
        batch = {key: torch.from_numpy(x) for key, x in batch.items()}
        return {key: x.pin_memory() if torch.cuda.is_available() else x for key, x in batch.items()}

    def micro_batches(self, samples, size):
        """Batches of at most `size` rows."""
        return [self.batch(part) for part in np.array_split(samples, -(-len(samples) // size))]


def prefetch(make, items):
    """Yield make(item) for each item; a background thread is one ahead."""
    with ThreadPoolExecutor(1) as pool:
        waiting = []
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > 1:
                yield waiting.pop(0).result()
        yield from (last.result() for last in waiting)


# ---- devices and processes ----
# XLA, for TPUs, traces lazily: sync() compiles the traced operations as one graph and runs it. A Python
# number is a constant of the graph, so a new value recompiles; input() makes it a tensor.

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

    def autocast(self):
        half = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype) if half else contextlib.nullcontext()

    def input(self, number):
        return torch.tensor([number], device=self.device) if self.device.type == 'xla' else number

    def sync(self):
        if self.device.type == 'xla':
            sys.modules['torch_xla'].sync()


def join(device, dtype, width, timeout=600, group=True):
    """Runtime of this process for models `width` wide; with `group` it joins torchrun's other processes."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (('RANK', 0), ('WORLD_SIZE', 1), ('LOCAL_RANK', 0)))
    if device == 'auto':
        accelerator = torch.accelerator.current_accelerator()
        device = accelerator.type if accelerator else 'cpu'
    if device == 'cuda':
        torch.cuda.set_device(local)
        torch.set_float32_matmul_precision('high')      # TF32 for float32 matmuls
    if device == 'xla':
        import torch_xla.distributed.xla_backend  # noqa: F401 (pip install torch==2.9.1 torch_xla[tpu]==2.9.0)
    host, limit = None, timedelta(seconds=timeout)
    if group and world > 1:
        backend = {'cuda': 'nccl', 'xla': 'xla'}.get(device, 'gloo')
        dist.init_process_group(backend, 'xla://' if device == 'xla' else None, limit)
        rank, host = dist.get_rank(), dist.new_group(backend='gloo', timeout=limit)
    found = torch.zeros(1, device=device).device        # on XLA only after the group
    return Runtime(found, choose_dtype(dtype, found, width), rank, world, host)


def choose_dtype(dtype, device, width):
    """torch dtype; auto is bfloat16 on CUDA from Ampere on, and with AMX from width 256: results/dtype"""
    if dtype == 'auto':
        fast = torch.cuda.get_device_capability() >= (8, 0) if device.type == 'cuda' else (
            device.type == 'cpu' and width >= 256 and torch.cpu.get_capabilities().get('amx_bf16'))
        dtype = 'bfloat16' if fast else 'float32'
    return choose('dtype', dtype, {name: getattr(torch, name) for name in ('float32', 'bfloat16', 'float16')})


def leave(runtime, status=0):
    """Exit; in a group without interpreter shutdown, where PyTorch's threads may hang: pytorch#190489"""
    if runtime.host is not None:
        dist.barrier(runtime.host)
        dist.destroy_process_group()
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


def seed_step(seed, step, runtime):
    """Seed torch for a step: dropout depends only on (seed, step, rank), not on earlier steps."""
    number = int(np.random.SeedSequence([seed, step, runtime.rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    if runtime.device.type == 'xla':                    # XLA has its own generator
        sys.modules['torch_xla'].manual_seed(number)


def update(model, optimizer, scaler, parts, lr, count, grad_clip, runtime):
    """One optimizer step on this rank's micro-batches; returns its part of the loss and the gradient norm.

    count  predicted tokens of the step over all ranks and micro-batches: the loss is their mean
    Both results are tensors: no host sync here.
    """
    total, count = torch.zeros(1, device=runtime.device), runtime.input(max(1.0, count))
    for i, part in enumerate(parts):
        part = {key: x.to(runtime.device, non_blocking=True) for key, x in part.items()}
        weights = part.pop('weights')                               # (b, k)
        silent = runtime.host is not None and i < len(parts) - 1    # DDP all-reduces once per step
        with model.no_sync() if silent else contextlib.nullcontext():
            with runtime.autocast():
                losses = model(**part)
            loss = (losses * weights).sum() / count
            scaler.scale(loss * runtime.world).backward()           # DDP divides by the number of ranks
        total += loss.detach()
    for group in optimizer.param_groups:
        group['lr'] = runtime.input(lr)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    runtime.sync()
    return total[0], norm


@torch.no_grad()
def evaluate(model, loader, n, batch_size, runtime, stop=()):
    """Loss (nats), accuracy and perplexity per predicted token of the first n samples, over all ranks.

    stop  list of caught signals; None is returned as soon as any rank has one
    """
    model.eval()
    sums, size = np.zeros(3), batch_size * runtime.world                    # loss, hits, tokens
    parts = [range(n)[i:i + size][runtime.rank::runtime.world] for i in range(0, n, size)]
    for part in prefetch(lambda part: loader.batch(part) if part else {}, parts):
        if runtime.sum(len(stop)) != [0]:
            return None
        if not part:                                    # the last part may have fewer rows than ranks
            continue
        part = {key: x.to(runtime.device, non_blocking=True) for key, x in part.items()}
        weights, targets = part.pop('weights'), part.pop('targets')
        with runtime.autocast():
            logits = model(**part)                                  # (b, k, V)
        losses, hits = token_losses(logits, targets) * weights, (logits.argmax(-1) == targets) * weights
        sums += torch.stack([losses.sum(), hits.sum(), weights.sum()]).tolist()
    model.train()
    loss, hits, tokens = runtime.sum(*sums)
    return {'loss': loss / tokens, 'accuracy': hits / tokens, 'perplexity': math.exp(loss / tokens)}


# ---- checkpoints and log ----

def checkpoints(folder):
    """Paths of a run's checkpoints, oldest first."""
    return sorted(glob.glob(os.path.join(glob.escape(folder), 'ckpt_*.pt')))


def newest(source):
    """Path of a run's newest checkpoint or a trial's weights, '' if none; the path of a checkpoint itself."""
    trial = os.path.join(source, 'model.pt')
    return source if source.endswith('.pt') else ['', *checkpoints(source),
                                                  *glob.glob(glob.escape(trial))][-1]


def set_damaged_aside(folder):
    """Rename a run's damaged newest checkpoints, so that the one before them goes on."""
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is None:           # every member has its checksum
                    return
        except Exception:                               # a flipped bit may raise any
            pass
        if path == paths[0]:
            raise UserError(f'{folder}: every checkpoint is damaged: start again in another out_dir')
        os.rename(path, path + '.damaged')
        say(f'{path} is damaged, now {path}.damaged; the checkpoint before it goes on')


def hold(folder):
    """Lock a folder, until this process ends, against a second run.  Returns the open file."""
    import fcntl
    os.makedirs(folder, exist_ok=True)
    file = open(os.path.join(folder, 'lock'), 'a')                      # noqa: SIM115, it stays open
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f'{folder}: another run uses it: end that one, or choose another --out_dir') from None
    return file


def write_checkpoint(path, content):
    """Write a checkpoint; a kill or a full disk leaves the earlier ones as they are."""
    with open(path + '.tmp', 'wb') as file:
        torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, content), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.tmp', path)


def read_checkpoint(path):
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except OSError:
        raise
    except Exception as error:                          # of many kinds, if the file is damaged
        raise UserError(f'{path}: no checkpoint, or a damaged one ({error})') from None


def load(source):
    """(model in eval mode, tokenizer, content of the checkpoint) of a run, a checkpoint or a trial.

    The tokenizer has encode(texts), decode(ids), pieces and special: see TOKENIZERS in prepare_data.py.
    """
    path = newest(source)
    if not path:
        raise UserError(f'{source}: no checkpoint there')
    content = read_checkpoint(path)
    kind = KINDS[content.get('head') or content['config']['objective']]
    model = kind(EncoderConfig(**content['model_config']))
    model.load_state_dict(content['model'])
    return model.eval(), load_tokenizer(os.path.dirname(path)), content


def refuse_difference(source, theirs, ours):
    """Raise a UserError naming the first key of `ours` whose value in `theirs` differs."""
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise UserError(f'{source} has {key}={theirs.get(key)!r}, this run has {value!r}')


class Log:
    """Lines on stdout, in metrics.jsonl and optionally in Weights & Biases; only on rank 0."""

    def __init__(self, folder, step, runtime, project, config):
        self.path, self.main, self.wandb = os.path.join(folder, 'metrics.jsonl'), runtime.rank == 0, None
        self.name = os.path.basename(folder)
        if not self.main:
            return
        kept = [line for line in read_metrics(folder) if step and line['step'] <= step]
        with open(self.path, 'w') as file:
            file.writelines(json.dumps(line) + '\n' for line in kept)
        if project:
            import wandb
            self.wandb = wandb.init(project=project, name=self.name, config=config)

    def write(self, kind, step, **values):
        if self.main:
            text = ', '.join(f'{key} {value:.5g}' for key, value in values.items())
            tqdm.write(f'{self.name} step {step}, {kind}: {text}')
            with open(self.path, 'a') as file:
                file.write(json.dumps({'kind': kind, 'step': step, **values}) + '\n')
        if self.wandb:
            self.wandb.log({f'{kind}/{key}': value for key, value in values.items()}, step=step)


def read_metrics(folder):
    """Lines of a run's metrics.jsonl as dicts; one that a kill cut off is dropped."""
    path, lines = os.path.join(folder, 'metrics.jsonl'), []
    with contextlib.suppress(FileNotFoundError), open(path) as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
    return lines


def record_launch(folder, config, runtime):
    """Append this launch to run.json: command, revision, versions, date and knobs."""
    place, git = os.path.join(folder, 'run.json'), ['git', '-C', ROOT, 'describe', '--always', '--dirty']
    launches = read_json(folder, 'run.json') if os.path.exists(place) else []
    with contextlib.suppress(OSError):                  # git may not be installed
        git = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    write_json(place, [*launches, {
        'argv': sys.argv, 'revision': git, 'torch': torch.__version__, 'world_size': runtime.world,
        'device': str(runtime.device), 'date': time.strftime('%Y-%m-%dT%H:%M:%S%z'), 'config': config}])


def plot(path, lines, labels):
    """Save a picture of lines {name: [(x, y), ...]}; of several points with one x their mean."""
    from matplotlib.figure import Figure
    figure = Figure(layout='constrained')
    axis = figure.add_subplot(xlabel=labels[0], ylabel=labels[1])
    for name, points in lines.items():
        xs = sorted({x for x, _ in points})
        axis.plot(xs, [np.mean([y for other, y in points if other == x]) for x in xs], '.-', label=name)
    axis.legend()
    figure.savefig(path)


def plot_losses(folder, unigram):
    """loss.png: training and validation losses, and the unigram entropy of the corpus."""
    lines = {}
    for line in read_metrics(folder):
        for key in filter(re.compile('loss$').search, line):
            lines.setdefault(f"{line['kind']} {key}", []).append((line['step'], line[key]))
    last = max(line['step'] for line in read_metrics(folder))
    lines['unigram entropy'] = [(0, unigram), (last, unigram)]
    plot(os.path.join(folder, 'loss.png'), lines, ('step', 'nats per predicted token'))


# ---- use of a checkpoint ----

@torch.no_grad()
def fill_masks(model, tokenizer, text):
    """Print the five likeliest tokens of each [MASK] in a text; returns the probabilities, (masks, V)."""
    special, parts = tokenizer.special, [part.rstrip() for part in text.split('[MASK]')]
    first, *others = tokenizer.encode(parts)
    ids = [special['cls'], *first, *(i for part in others for i in (special['mask'], *part)), special['sep']]
    ids = torch.tensor([ids], device=next(model.parameters()).device)
    probabilities = model.eval()(ids, positions=(ids == special['mask']).nonzero()[None, :, 1])[0].softmax(-1)
    print(text)
    for chances in probabilities:
        best = zip(*(x.tolist() for x in chances.topk(5)), strict=True)
        print('    ' + '   '.join(f"{tokenizer.pieces[i].strip(chr(0x2581))} {p:.3f}" for p, i in best))
    return probabilities


def fill_held_out(model, tokenizer, rows, n):
    """Fill in the twelfth token of n validation rows; print the token that was there and its rank."""
    for index in order(len(rows), 0, 0)[:n]:
        ids = rows[index][0][1:25].tolist()
        text = f'{tokenizer.decode(ids[:11])} [MASK]{tokenizer.decode(ids[12:])}'
        chances = fill_masks(model, tokenizer, text)[0]
        print(f'    was {tokenizer.pieces[ids[11]]}: rank {1 + int((chances > chances[ids[11]]).sum())}')


def use_checkpoint(source, fill, export):
    """Print the predictions for `fill`; write `export`, a folder that transformers loads."""
    model, tokenizer, content = load(source)
    if fill:
        fill_masks(model, tokenizer, fill)
    if export:
        twin = to_transformers(model, pad_token_id=tokenizer.special['pad'])
        twin.save_pretrained(export)
        fast_tokenizer(tokenizer, model.config.block_size).save_pretrained(export)
        shutil.copy(os.path.join(tokenizer.home, tokenizer.file_name), export)
        with open(os.path.join(export, 'README.md'), 'w') as file:
            file.write(f'A {type(twin).__name__} with the logits of a model trained on '
                       f"{content['config'].get('dataset', content.get('task'))} with {model.config}\n\n"
                       f"Parameters as trained: {count_parameters(model):,}\n")


# ---- main ----

def main():
    config = configure(globals())
    if fill or export:
        return use_checkpoint(init_from or out_dir, fill, export)
    runtime, folder = join(device, dtype, n_embd, timeout), os.path.join(data_dir, dataset)
    choose('schedule', schedule, SCHEDULE)
    choose('objective', objective, dict.fromkeys(('mlm', 'plm')))
    choose('packing', packing, dict.fromkeys(('stream', 'documents')))
    if total_batch < runtime.world:
        raise UserError(f'total_batch={total_batch}: must be at least {runtime.world}, one per process')

    # data
    meta = load_meta(folder)                            # says how to prepare the corpus if it is missing
    identity = {'vocab_size': meta['vocab_size'], **meta['identity']}
    masker = Masker(meta, block_size, mask_fraction, objective, whole_word)
    train_rows, val_rows = (Rows(folder, meta, split, block_size, packing, whole_word)
                            for split in ('train', 'val'))
    loader, val_loaders = Loader(train_rows, masker, seed), {'': Loader(val_rows, masker, 0)}
    for name in filter(None, validation.split(',')):
        other = os.path.join(data_dir, name)
        refuse_difference(other, load_meta(other)['identity'], {'tokenizer': identity['tokenizer']})
        val_loaders[name] = Loader(Rows(other, load_meta(other), 'val', block_size, packing, whole_word),
                                   masker, 0)
    check_sizes(folder, meta)

    # model and optimizer: new, from a BERT or from a checkpoint
    _held = hold(out_dir) if runtime.rank == 0 else None         # until main() returns
    if runtime.rank == 0:
        set_damaged_aside(out_dir)
    runtime.sum(0)                                      # the others wait for that
    torch.manual_seed(seed)
    raw, step, samples = KINDS[objective](model_config(config, meta['vocab_size'])), 0, 0
    source, content = newest(out_dir) or newest(init_from) or init_from, {}
    if source.endswith('.pt'):
        content = read_checkpoint(source)
        fields = {key: value for key, value in asdict(raw.config).items() if key not in MAY_CHANGE}
        refuse_difference(source, content['model_config'] | content['data'], fields | identity)
        raw.load_state_dict(content['model'])
    elif source:
        raw.load_state_dict(MaskedLM.from_pretrained(source).state_dict())
    raw.to(runtime.device)
    optimizer = make_optimizer(raw, learning_rate, (beta1, beta2), adam_eps, weight_decay, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, enabled=runtime.dtype == torch.float16)
    if content:
        groups = optimizer.state_dict()['param_groups']         # keep this run's decay, betas, kernels
        optimizer.load_state_dict({**content['optimizer'], 'param_groups': groups})
        scaler.load_state_dict(content['scaler'] or scaler.state_dict())
        step, samples = content['step'], content['samples']
    if runtime.sum(step) != [step * runtime.world]:
        raise UserError(f'{out_dir} must be a folder that all machines share')
    model = torch.compile(raw) if compile and runtime.device.type == 'cuda' else raw
    if runtime.host is not None:
        model = DistributedDataParallel(model, gradient_as_bucket_view=runtime.device.type == 'xla')

    # log and signals
    if runtime.rank == 0:
        copy_tokenizer(load_tokenizer(folder), out_dir)                     # for load(); makes out_dir
        record_launch(out_dir, config, runtime)
        differ = {key: f'{old} then, {config.get(key)} now' for key, old in content.get('config', {}).items()
                  if config.get(key) != old}
        print(f'{config}\n{count_parameters(raw):,} parameters on {runtime.world} x {runtime.device} in '
              f'{runtime.dtype}; {len(train_rows):,} training rows; from step {step} of {source or "scratch"}'
              + (f'; knobs that differ: {differ}' if differ else ''), flush=True)
    log, stop = Log(out_dir, step, runtime, wandb_project, config), catch_signals()

    def ends(interval):
        return step == max_iters or (interval and step % interval == 0)

    def validate():
        """Log the scores on each validation corpus; False if a signal came."""
        values = {'unigram': meta['unigram_entropy']}
        for name, val_loader in val_loaders.items():
            scores = evaluate(raw, val_loader, min(eval_samples, len(val_loader.rows)), batch_size, runtime,
                              stop)
            if scores is None:
                return False
            values |= {f'{name}_{key}' if name else key: value for key, value in scores.items()}
        log.write('val', step, **values)
        return True

    def micro_batches(first):
        mine = range(first, first + total_batch)[runtime.rank::runtime.world]
        return loader.micro_batches(mine, batch_size)

    # the loop
    known = [line['step'] for line in read_metrics(out_dir) if line['kind'] == 'val']
    if (step == 0 or ends(eval_interval)) and runtime.sum(runtime.rank == 0
                                                          and step not in known) != [0] and not validate():
        leave(runtime, 1)                               # nothing to save yet
    warmup = warmup_iters if warmup_iters <= max_iters else max_iters // 10
    last = samples + (max_iters - step) * total_batch
    bad, looked, since = torch.zeros((), device=runtime.device), step, time.perf_counter()
    bar = tqdm(prefetch(micro_batches, range(samples, last, total_batch)), total=max_iters, initial=step,
               unit='step', disable=runtime.rank > 0 or None)           # None: unless on a terminal
    for parts in bar:
        count, stopping = runtime.sum(sum(part['weights'].sum().item() for part in parts), len(stop))
        lr = get_lr(step, learning_rate, min_lr, warmup, max_iters, schedule)
        seed_step(seed, step, runtime)
        loss, norm = update(model, optimizer, scaler, parts, lr, count, grad_clip, runtime)
        bad = bad + ~(loss if scaler.is_enabled() else loss + norm).isfinite()      # float16 skips such steps
        step, samples = step + 1, samples + total_batch
        due = stopping or ends(checkpoint_interval) or step in milestones
        if not (due or ends(log_interval) or ends(eval_interval)):
            continue                                    # the only host sync is below
        loss, broken = runtime.sum(loss.item(), bad.item())
        if broken:
            raise UserError(f'a loss or gradient after step {looked} is not finite; no checkpoint has it; '
                            'try a lower learning_rate')
        if ends(log_interval):
            seconds = (time.perf_counter() - since) / (step - looked)
            log.write('train', step, loss=loss, lr=lr, norm=norm.item(),
                      tokens_per_second=total_batch * block_size / seconds,
                      hours_left=(max_iters - step) * seconds / 3600)
            bar.set_postfix(loss=loss)
        if ends(eval_interval) and not validate():
            due = stopping = True
        if due and runtime.rank == 0:
            write_checkpoint(os.path.join(out_dir, f'ckpt_{step:07}.pt'), {
                'model': raw.state_dict(), 'model_config': asdict(raw.config), 'config': config,
                'optimizer': optimizer.state_dict(), 'scaler': scaler.state_dict(), 'data': identity,
                'step': step, 'samples': samples})
            passing = [path for path in checkpoints(out_dir) if int(path[-10:-3]) not in milestones]
            for path in passing[:-2]:
                os.remove(path)
        looked, since = step, time.perf_counter()
        if stopping:
            say(f'stopped by a signal after step {step}; the same command goes on from there')
            leave(runtime, 1)
    bar.close()
    if runtime.rank == 0:
        plot_losses(out_dir, meta['unigram_entropy'])
        fill_held_out(raw.cpu(), load_tokenizer(folder), val_rows, fill_samples)
    leave(runtime)


if __name__ == '__main__':
    run(main)
