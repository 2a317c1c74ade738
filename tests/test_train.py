"""train.py: rows, masks, steps, resume, signals, checkpoints under damage, refusals, fill.

Runs take place in this process, but for a mistake's exit status, a Ctrl-C and the two ranks of `pair`.
Exports are tested in test_export.py, kills in test_faults.py, XLA in test_xla.py.
"""
import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import flip, knobs_of, launch, process, refused, tiny, torchrun
from test_model import CORE, SMALL, decays
from torch.utils._pytree import tree_leaves

import train
from configurator import UserError
from model import EncoderConfig, MaskedLM
from prepare_data import load_meta, load_tokenizer, write_json
from train import Loader, Masker, Rows, Runtime, shuffled

CPU = Runtime(torch.device('cpu'), torch.float32, 0, 1, None)
SYSTEMS = [
    (signal.SIGTERM, {'attention': 'pairwise', 'position': 'rope', 'batch_size': 3, 'mask_fraction': 0.3,
                      'mask_fraction_end': 0.15}),
    (signal.SIGINT, {'attention': 'gau', 'position': 'rope', 'packing': 'documents', 'whole_word': True}),
    (signal.SIGHUP, {'attention': 'xlnet', 'position': 'none', 'objective': 'plm', 'dtype': 'bfloat16'}),
    (signal.SIGTERM, {'attention': 'shatter', 'position': 'none', 'dtype': 'float16', 'grad_clip': 0})]


@pytest.fixture(scope='module')
def meta(corpus):
    return load_meta(corpus)


@pytest.fixture
def run(stage, corpus, tmp_path):
    """run('name', knob=...) trains in the folder `name` -> Done; code: its exit status"""
    def start(name, code=0, **knobs):
        done = stage('train', *tiny(corpus, tmp_path / name, **knobs))
        assert done.code == code, done
        return done
    return start


PAIR = {'dropout': 0, 'attention_dropout': 0, 'batch_size': 3, 'total_batch': 7, 'learning_rate': 1e-4,
        'packing': 'documents', 'attention': 'pairwise', 'eval_samples': 13, 'checkpoint_interval': 3,
        'timeout': 0}


@pytest.fixture(scope='module')
def pair(corpus, tmp_path_factory):     # two processes
    folder = tmp_path_factory.mktemp('pair') / 'run'
    done = torchrun('train.py', *tiny(corpus, folder, **PAIR))
    assert done.code == 0, done.err
    return folder


def corpus_like(corpus, folder, meta):
    """folder/other: a copy of the corpus with another meta.json; returns its path."""
    other = shutil.copytree(corpus, folder / 'other', dirs_exist_ok=True)
    write_json(other / 'meta.json', meta)
    return str(other)


def metrics(folder, kind=None):
    """Lines of metrics.jsonl without times."""
    return [{key: line.get(key) for key in ('kind', 'step', 'loss', 'accuracy', 'lr', 'norm')}
            for line in train.read_metrics(folder) if kind in (None, line['kind'])]


def last(folder):
    return train.read_checkpoint(train.newest(str(folder)))


def same_run(one, other):
    """Equality to the bit of weights, optimizer, counts and log."""
    assert metrics(one) == metrics(other)
    for key in ('model', 'optimizer', 'scaler', 'step', 'samples'):
        for x, y in zip(tree_leaves(last(one)[key]), tree_leaves(last(other)[key]), strict=True):
            assert torch.equal(x, y) if torch.is_tensor(x) else x == y, key


@contextlib.contextmanager
def signalled(patch, name, at, number=signal.SIGTERM):
    """Within, a signal comes before call `at`, from 1, of a function of train.py.  Yields its calls."""
    function = getattr(train, name)
    calls = []

    def called(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == at:
            signal.raise_signal(number)
        return function(*arguments, **keywords)
    with patch.context() as inner:
        inner.setattr(train, name, called)
        yield calls


# ---- rows and their order ----

@pytest.mark.parametrize('packing', ['stream', 'documents'])
def test_rows_hold_the_corpus(packing, corpus, meta):
    """Every token once, in file order, as prepare_data.py's format says; no file stays open."""
    expected = []                                       # the tokens of each row
    for shard in meta['splits']['train']:
        stem = os.path.join(corpus, shard['stem'])
        ids = np.fromfile(stem + '.bin', meta['dtype'])
        edges = np.fromfile(stem + '.idx', np.int64)
        if packing == 'stream':
            texts = [ids[:len(ids) // 30 * 30]]
        else:
            texts = [ids[begin:end - 1] for begin, end in zip(edges[:-1], edges[1:], strict=True)]
        for text in texts:
            expected += [text[i:i + 30] for i in range(0, len(text), 30)]
    assert len(meta['splits']['train']) > 2             # shards

    n_open = len(os.listdir('/proc/self/fd'))
    rows = Rows(corpus, meta, 'train', 32, packing)
    assert len(rows) == len(expected)
    pad, cls, sep = (meta['special'][name] for name in ('pad', 'cls', 'sep'))
    for index, tokens in enumerate(expected):
        padding = [pad] * (30 - len(tokens))
        assert rows[index][0].tolist() == [cls, *tokens, sep, *padding]
    assert len(os.listdir('/proc/self/fd')) == n_open


@pytest.mark.parametrize('n', [1, 2, 7, 1000])
def test_shuffled_is_a_permutation_of_each_epoch(n):
    orders = [shuffled(range(n), n, seed, epoch).tolist() for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(n)) for order in orders)
    if n == 1000:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert shuffled([2, 3], n, 1, 0).tolist() == orders[0][2:4]
        distances = np.abs(np.diff(orders[0]))          # of neighbours: n / 3 in a random order
        assert abs(distances.mean() / (n / 3) - 1) < 0.25
        assert len(set(shuffled(range(n), 10 ** 9, 1, 0))) == n


def test_every_row_once_per_epoch_and_masked_anew(corpus, meta):
    rows = Rows(corpus, meta, 'val', 32, 'stream')
    n = len(rows)
    loader = Loader(rows, Masker(meta, 32, 0.15, 'mlm', False), 1)
    indices = loader.indices(range(2 * n)).tolist()
    assert sorted(indices[:n]) == sorted(indices[n:]) == list(range(n))
    assert indices[:n] != indices[n:]

    first = loader.batch([0])
    again = n + indices[n:].index(indices[0])           # the sample of that row in the second epoch
    positions = loader.batch([again])['positions']
    assert set(first['positions'][0].tolist()) != set(positions[0].tolist())
    assert torch.equal(loader.batch([0])['ids'], first['ids'])
    other_seed = Loader(rows, loader.masker, 2)
    assert not torch.equal(other_seed.batch([0])['ids'], first['ids'])


@pytest.mark.parametrize('packing, objective', [('stream', 'mlm'), ('documents', 'plm')])
def test_ranks_see_what_one_process_sees(packing, objective, corpus, meta):
    loader = Loader(Rows(corpus, meta, 'train', 32, packing), Masker(meta, 32, 0.15, objective, False), 1)
    whole = loader.batch(range(16, 32))
    for rank in range(3):
        parts = loader.micro_batches(range(16, 32)[rank::3], 2)
        assert [len(part['ids']) for part in parts] == ([2, 2, 2] if rank == 0 else [1, 2, 2])
        for key, x in whole.items():
            assert torch.equal(torch.cat([part[key] for part in parts]), x[rank::3])


# ---- masks ----

class Sample:
    """The first n training rows of the corpus, plain and as a batch; all arrays (n, ...)."""

    def __init__(self, corpus, meta, n, packing='stream', objective='mlm', whole_word=False):
        rows = Rows(corpus, meta, 'train', 64, packing, whole_word)
        self.masker = Masker(meta, 64, 0.15, objective, whole_word)
        loader = Loader(rows, self.masker, 1)
        plain = [rows[index] for index in loader.indices(range(n))]
        self.ids = np.stack([ids for ids, _ in plain])                          # as they are in the corpus
        self.word_starts = np.stack([starts for _, starts in plain])
        self.is_special = self.masker.is_special[self.ids]
        self.batch = {key: x.numpy() for key, x in loader.batch(range(n)).items()}
        self.visible = np.take_along_axis(self.batch['ids'], self.batch['positions'], 1)


def test_masking_statistics(corpus, meta):
    for length, k in ((20, 3), (60, 9), (100, 15), (128, 20), (512, 77)):       # the ceiling of 15 %
        assert Masker(meta, length, 0.15, 'mlm', False).n_positions == k
    sample = Sample(corpus, meta, 2000)
    masker, ids, batch, visible = sample.masker, sample.ids, sample.batch, sample.visible

    # which tokens: ten different ones of each row, every place as likely, none special
    assert masker.n_positions == 10
    assert batch['positions'].shape == (2000, 10)
    assert all(len(set(row)) == 10 for row in batch['positions'])
    assert (batch['weights'] == 1).all()
    targets = np.take_along_axis(ids, batch['positions'], 1)
    assert (batch['targets'] == targets).all()
    assert not masker.is_special[targets].any()
    frequencies = np.bincount(batch['positions'].ravel(), minlength=64)[1:-1] / len(ids)
    assert frequencies.std() < 3 * math.sqrt(10 / 62 / len(ids))

    # what the model sees of them: 80 % [MASK]; 10 % a random token, which may be the same one
    is_masked = visible == meta['special']['mask']
    is_kept = visible == targets
    is_replaced = ~is_masked & ~is_kept
    for mask, share in ((is_masked, 0.8), (is_replaced, 0.1 * (1 - 1 / 400))):
        assert abs(mask.mean() - share) < 5 * math.sqrt(share * (1 - share) / visible.size)
    replaced = visible[is_replaced]
    assert not masker.is_special[replaced].any()
    assert len(set(replaced)) > 300
    assert (batch['ids'] != ids).sum() == (~is_kept).sum()          # no other token is changed


@pytest.mark.parametrize('segmented', [False, True])
def test_whole_words_are_taken_whole(segmented, corpus, meta, tmp_path):
    """Words of the vocabulary, or by a segmenter's bytes: here one id of three starts one."""
    folder = corpus
    vocabulary = np.fromfile(os.path.join(corpus, 'tokenizer', 'word_start.bin'), bool)
    if segmented:
        folder = shutil.copytree(corpus, tmp_path / 'words')
        meta = {**meta, 'segmenter': {}}
        for shard in meta['splits']['train']:
            stem = os.path.join(folder, shard['stem'])
            (np.fromfile(stem + '.bin', meta['dtype']) % 3 == 0).tofile(stem + '.words')
    sample = Sample(folder, meta, 400, whole_word=True)
    ids, word_starts, is_special, batch = sample.ids, sample.word_starts, sample.is_special, sample.batch
    starts = ids % 3 == 0 if segmented else vocabulary[ids]
    assert (word_starts == starts)[~is_special].all()

    is_predicted = np.zeros(ids.shape, bool)
    np.put_along_axis(is_predicted, batch['positions'], batch['weights'] == 1, 1)
    after_special = np.roll(is_special, 1, axis=1)
    word = (word_starts | is_special | after_special).cumsum()      # number of each token's word
    n_tokens = np.bincount(word)
    n_predicted = np.bincount(word, is_predicted.ravel())
    assert ((n_predicted == 0) | (n_predicted == n_tokens)).all()
    assert (n_predicted > 1).sum() > 100
    assert not is_predicted[is_special].any()
    assert 0.9 < batch['weights'].mean() <= 1           # a word too long for the rest is left out

    # a row may begin inside a word: its rest is a word too
    is_rest = after_special & ~word_starts & ~is_special
    assert is_predicted[is_rest].sum() > 10


def test_a_row_in_which_no_word_fits_predicts_a_part_of_one():
    """Two of its eleven tokens are predicted, and its words have four, or one that is special."""
    is_special = np.isin(np.arange(11), (0, 5, 10))
    word_starts = np.isin(np.arange(11), (1, 6))
    seen = set()
    for seed in range(20):
        scores = np.random.default_rng(seed).random(11)
        positions, n = train.whole_words(scores, word_starts, is_special, 2, 2)
        assert n == 2
        seen.add(tuple(positions.tolist()))
    assert seen == {(1, 2), (6, 7)}
    word_starts[9] = True                               # a word that fits
    assert train.whole_words(scores, word_starts, is_special, 2, 2)[1] == 1


def test_short_rows(corpus, meta):
    """ceil(15 %) of a row's tokens are predicted; the other positions have weight 0 and stay as they are."""
    sample = Sample(corpus, meta, 300, 'documents')
    ids, batch = sample.ids, sample.batch
    is_real = ids != meta['special']['pad']
    is_idle = batch['weights'] == 0
    assert is_real.sum(1).min() < 20
    assert ((~is_idle).sum(1) == np.ceil(is_real.sum(1) * 0.15 - 1e-9)).all()
    assert (batch['attention_mask'] == is_real).all()
    assert not sample.masker.is_special[batch['targets'][~is_idle]].any()
    assert (sample.visible[is_idle] == batch['targets'][is_idle]).all()


@pytest.mark.parametrize('begin, end', [(0.3, 0.15), (0.15, 0.3)])
def test_a_fraction_that_changes_with_the_sample(begin, end, corpus, meta):
    """In a straight line to sample 100, whatever the batch, with shapes of the larger fraction."""
    masker = Masker(meta, 64, begin, 'mlm', False, end, 100)
    loader = Loader(Rows(corpus, meta, 'train', 64, 'stream'), masker, 1)
    batch = loader.batch(range(120))
    assert batch['positions'].shape == (120, 20)
    fractions = np.interp(range(120), [0, 100], [begin, end])
    assert batch['weights'].sum(1).tolist() == np.ceil(64 * fractions - 1e-9).tolist()
    for key, x in loader.batch([70, 3]).items():
        assert torch.equal(x, batch[key][[70, 3]])


def test_validation_has_a_fraction_of_its_own(run, tmp_path):
    """By default that of training; what is masked there does not depend on the training's."""
    losses = []
    for name, knobs in (('plain', {}), ('falls', {'mask_fraction': 0.3, 'eval_mask_fraction': 0.15}),
                        ('rises', {'mask_fraction_end': 0.3}), ('more', {'mask_fraction': 0.3})):
        run(name, max_iters=0, **knobs)
        losses.append(metrics(tmp_path / name)[0]['loss'])
    assert losses[0] == losses[1] == losses[2] != losses[3]


def test_permutations(corpus, meta):
    """The tokens that BERT would mask are predicted, unmasked; they come last, and special tokens first."""
    masked = Sample(corpus, meta, 300, 'documents').batch
    sample = Sample(corpus, meta, 300, 'documents', 'plm')
    batch = sample.batch
    for key in ('positions', 'targets', 'weights'):
        assert (batch[key] == masked[key]).all()
    assert (batch['ids'] == sample.ids).all()           # and seen by those after them

    orders = set()                                      # those of the other tokens
    for i, order in enumerate(batch['order']):
        is_special = sample.is_special[i]
        predicted = batch['positions'][i][batch['weights'][i] == 1]
        others = np.setdiff1d(np.flatnonzero(~is_special), predicted)
        assert (order[is_special] == 0).all()
        assert len(set(order[~is_special])) == (~is_special).sum()
        assert order[predicted].min() > order[others].max(initial=0)
        orders.add(tuple(np.argsort(order[others])[:5]))
    assert len(orders) > 100                            # drawn anew for each row


# ---- a step ----

@pytest.mark.parametrize('schedule, rate35, rate60, end', [
    ('linear', 0.775, 0.55, 0.1), ('cosine', 0.868198, 0.55, 0.1), ('constant', 1, 1, 1),
    ('thirds', 1, 0.28, 0.118)])
def test_schedule(schedule, rate35, rate60, end):
    rates = [train.get_lr(step, 1.0, 0.1, 10, 110, schedule) for step in range(111)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert [rates[35], rates[60], rates[110]] == pytest.approx([rate35, rate60, end])


ROFORMER_V2 = {'position': 'rope', 'norm': 'rms', 'bias': False, 'lm_head': 'decoder'}         # no vectors


@pytest.mark.parametrize('settings', [*CORE, ROFORMER_V2], ids=str)
def test_decay_is_on_matrices_alone(settings):
    model = MaskedLM(EncoderConfig(**{**SMALL, **settings}))
    optimizer = train.make_optimizer(model, 1e-3, (0.9, 0.999), 1e-8, 0.01, CPU)
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.01 if decays(model, name) else 0), name


@pytest.mark.parametrize('scaled', [False, True])       # as float16's losses are
@pytest.mark.parametrize('clip', [0, 0.5])
def test_an_update_is_one_step_on_the_mean_over_all_micro_batches(clip, scaled):
    """With unequal numbers of predicted tokens in its parts; losses are x w, so their gradient is known."""
    x = torch.arange(24.).view(4, 2, 3)
    weights = torch.tensor([[1., 1], [1, 0], [0, 0], [1, 1]])[..., None]
    parts = [{'input': x[:3], 'weights': weights[:3]}, {'input': x[3:], 'weights': weights[3:]}]
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler('cpu', 1024.0, enabled=scaled)
    optimizer.param_groups[0]['factor'] = 0.5
    train.set_lr(optimizer, 1.0, CPU)

    loss, norm = train.update(model, optimizer, scaler, parts, 5.0, clip, CPU)
    gradient = (x * weights).sum((0, 1)) / 5
    assert loss.item() == pytest.approx(gradient.sum().item())
    assert norm == pytest.approx(gradient.norm())
    if clip:
        gradient = gradient * clip / gradient.norm()
    assert torch.allclose(model.weight, 1 - 0.5 * gradient, atol=1e-4)
    assert model.weight.grad is None


def test_evaluation_equals_full_logits(corpus, meta):
    """Without dropout, over rows with surplus positions, which keep their token; training goes on with it.

    The model predicts what it sees: rightly at a surplus position, and at a tenth of the others.
    """
    loader = Loader(Rows(corpus, meta, 'val', 32, 'documents'), Masker(meta, 32, 0.15, 'mlm', False), 0)
    model = MaskedLM(EncoderConfig(meta['vocab_size'], 32, 2, 2, 64, 32, lm_head='decoder'))
    with torch.no_grad():
        model.encoder.token.weight.mul_(8)
    scores = train.evaluate(model.train(), loader, 60, 7, CPU)
    assert model.training

    batch = loader.batch(range(60))
    is_predicted = batch['weights'] > 0
    assert not is_predicted.all()
    logits = model.eval()(batch['ids'], attention_mask=batch['attention_mask'])            # (60, T, V)
    logits = logits[torch.arange(60)[:, None], batch['positions']][is_predicted]           # (n, V)
    targets = batch['targets'][is_predicted]
    loss = F.cross_entropy(logits, targets).item()
    assert scores['loss'] == pytest.approx(loss, rel=1e-5)
    assert scores['perplexity'] == pytest.approx(math.exp(loss), rel=1e-4)
    assert scores['accuracy'] == pytest.approx((logits.argmax(-1) == targets).double().mean().item())
    assert 0.02 < scores['accuracy'] < 0.3


def test_dropout_is_a_function_of_seed_step_and_rank():
    numbers = []
    for seed, step, rank in ((1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0), (1, 0, 0)):
        train.seed_step(seed, step, Runtime(CPU.device, torch.float32, rank, 2, None))
        numbers.append(torch.rand(()).item())
    assert len(set(numbers)) == 4
    assert numbers[0] == numbers[-1]


@pytest.mark.parametrize('able, width, dtype', [
    ('amx_bf16', 256, torch.bfloat16), ('avx512_bf16', 256, torch.bfloat16), ('amx_bf16', 255, torch.float32),
    ('avx512_f', 256, torch.float32)])
def test_automatic_precision_on_a_cpu(able, width, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {able: True}, raising=False)
    assert train.choose_dtype('auto', CPU.device, width) == dtype


def test_stored_graphs_are_of_one_dtype():
    """PyTorch 2.11 runs a stored graph of bfloat16 in float16: tests/test_cuda.py found it on a GPU."""
    tags = []
    for dtype in ('bfloat16', 'float16'):
        train.make_runtime('cpu', dtype, 0)
        tags.append(torch.compiler.config.cache_key_tag)
    assert len({*tags}) == 2


# ---- resume ----

@pytest.mark.parametrize('number, system', SYSTEMS)
def test_resumed_is_uninterrupted(number, system, run, tmp_path, monkeypatch):
    """Stopped by a signal in step 5, with lines of a later step in the log: to the bit, dropout included."""
    knobs = {**system, 'eval_interval': 3}
    run('whole', **knobs)
    with signalled(monkeypatch, 'seed_step', 5, number):
        done = run('parts', 128 + number, **knobs)
    stopped = last(tmp_path / 'parts')['step']
    assert stopped in (5, 6)
    assert 'finished' not in done.out
    assert len(done.err.splitlines()) == 1
    assert f'after step {stopped}' in done.err
    with open(tmp_path / 'parts' / 'metrics.jsonl', 'a') as file:           # of a step that a kill lost
        file.write('{"kind": "train", "step": 7, "loss": 0}\n{"kind": "tr')
    done = run('parts', **knobs)
    same_run(tmp_path / 'whole', tmp_path / 'parts')
    assert [line['step'] for line in metrics(tmp_path / 'whole', 'val')] == [0, 3, 6, 8]
    assert 'differ' not in done.err
    assert len(metrics(tmp_path / 'parts', 'train')) == 8


def test_a_resumed_run_says_in_a_line_what_differs(run, tmp_path):
    """It goes on at the next sample, in its own precision unless another is asked for."""
    run('a', max_iters=2, warmup_iters=1)
    changes = {'schedule': 'cosine', 'seed': 5, 'packing': 'documents', 'mask_fraction': 0.2, 'max_iters': 4,
               'dtype': 'bfloat16', 'total_batch': 4, 'learning_rate': 0.002, 'weight_decay': 0.5}
    line = run('a', warmup_iters=1, **changes).err.splitlines()[0]
    assert line.startswith('knobs that differ')
    assert 'warmup_iters' not in line
    for name, value in changes.items():
        assert f'{name} ' in line
        assert f'-> {value}' in line
    assert last(tmp_path / 'a')['optimizer']['param_groups'][0]['weight_decay'] == 0.5
    assert last(tmp_path / 'a')['samples'] == 2 * 8 + 2 * 4
    assert 'in torch.bfloat16' in run('a', max_iters=5, dtype='auto').out
    assert last(tmp_path / 'a')['dtype'] == 'bfloat16'


def test_checkpoints_that_stay(run, tmp_path):
    """The newest two, those of milestones, also when a later command names none, and newer ones."""
    run('a', max_iters=12, checkpoint_interval=2, milestones=(3, 4))
    assert list(train.checkpoints(str(tmp_path / 'a'))) == [3, 4, 10, 12]
    assert ' '.join(sorted(last(tmp_path / 'a'))) == (
        'config data dtype model model_config optimizer samples scaler step')
    assert 'from step 12 of' in run('a', max_iters=14, checkpoint_interval=1).out
    assert list(train.checkpoints(str(tmp_path / 'a'))) == [3, 4, 13, 14]
    train.save(str(tmp_path / 'a'), {'step': 12, 'config': {'milestones': ()}})
    assert list(train.checkpoints(str(tmp_path / 'a'))) == [4, 12, 13, 14]


def test_a_run_begins_with_the_weights_of_another_one(run, tmp_path):
    """init_from: at step 0, in its own precision and order, though that run went to its end."""
    run('a', max_iters=4, dtype='bfloat16')
    knobs = {'init_from': tmp_path / 'a', 'max_iters': 2, 'dtype': 'auto', 'seed': 2}
    done = run('b', learning_rate=0, **knobs)
    assert 'in torch.float32; ' in done.out
    assert f'from step 0 of the weights of {tmp_path}/a' in done.out
    assert 'differ' not in done.err                     # it is another run
    content = last(tmp_path / 'b')
    assert (content['step'], content['samples']) == (2, 16)
    assert tree_leaves(content['optimizer']['state'])[0].item() == 2        # Adam's count of steps
    for name, x in last(tmp_path / 'a')['model'].items():
        assert torch.equal(content['model'][name], x)
    assert metrics(tmp_path / 'b', 'val')[0]['loss'] == pytest.approx(
        metrics(tmp_path / 'a', 'val')[-1]['loss'], rel=0.01)               # bfloat16 there
    assert 'from step 2 of' in run('b', **{**knobs, 'max_iters': 3}).out     # its own checkpoint comes first


def test_weights_go_on_on_another_corpus_of_their_tokenizer(stage, pair, corpus, meta, tmp_path):
    identity = {**meta['identity'], 'train': 'other', 'val': 'other'}
    other = corpus_like(corpus, tmp_path, {**meta, 'identity': identity})
    knobs = {**PAIR, 'init_from': pair, 'max_iters': 0}
    assert f'step 0 of the weights of {pair}' in stage('train', *tiny(other, tmp_path / 'a', **knobs)).out
    other = corpus_like(corpus, tmp_path, {**meta, 'identity': {**identity, 'tokenizer': 'other'}})
    assert 'has tokenizer=' in refused(stage('train', *tiny(other, tmp_path / 'b', **knobs)))


def test_no_steps_at_all(run, tmp_path):
    """--max_iters=0 validates, and a run that is further than max_iters ends."""
    run('a', max_iters=0)
    line, = metrics(tmp_path / 'a')
    assert (line['kind'], line['step']) == ('val', 0)
    run('b', max_iters=2, milestones=1)
    before = metrics(tmp_path / 'b')
    assert run('b', max_iters=0).out.splitlines()[-1] == f'{tmp_path}/b: finished after step 2'
    assert metrics(tmp_path / 'b') == before
    os.remove(tmp_path / 'b' / 'ckpt_0000002.pt')
    run('b', max_iters=0)
    assert [line['step'] for line in metrics(tmp_path / 'b', 'val')] == [0, 1]
    run('c', max_iters=0, init_from=tmp_path / 'b')
    line, = metrics(tmp_path / 'c')
    assert line['loss'] == metrics(tmp_path / 'b', 'val')[-1]['loss']


def test_the_newest_checkpoint_of_a_folder(tmp_path, monkeypatch):
    """Also beyond ten million steps. No source is not the current folder."""
    for step in (9_999_999, 10_000_000, 123):
        train.save(str(tmp_path), {'step': step, 'config': {'milestones': (123,)}})
    (tmp_path / 'ckpt_new.pt').touch()
    assert list(train.checkpoints(str(tmp_path))) == [123, 9_999_999, 10_000_000]
    assert train.newest(str(tmp_path)) == str(tmp_path / 'ckpt_10000000.pt')
    monkeypatch.chdir(tmp_path)
    assert train.newest('') == ''


def test_milestones_of_an_earlier_command_are_written(run, tmp_path):
    run('a', max_iters=2, milestones=5)
    run('a', max_iters=8)
    assert list(train.checkpoints(str(tmp_path / 'a'))) == [2, 5, 8]


# ---- moments ----

def embeddings_do_not_decay(model, *arguments, plain=train.make_optimizer):
    """make_optimizer as a fork may have it: the groups, and so the places of the parameters, are others."""
    optimizer = plain(model, *arguments)
    matrices, vectors = optimizer.param_groups
    vectors['params'].insert(0, matrices['params'].pop(0))
    vectors['param_names'].insert(0, matrices['param_names'].pop(0))
    return optimizer


@pytest.mark.parametrize('with_names', [True, False])
def test_moments_go_on_by_their_names(with_names, run, tmp_path, monkeypatch):
    """In other groups too; in a checkpoint without names, as earlier revisions wrote it, by their places."""
    knobs = {'weight_decay': 0, 'milestones': 4}
    run('whole', **knobs)
    content = train.read_checkpoint(tmp_path / 'whole' / 'ckpt_0000004.pt')
    (tmp_path / 'parts').mkdir()
    if with_names:
        monkeypatch.setattr(train, 'make_optimizer', embeddings_do_not_decay)
    else:
        for group in content['optimizer']['param_groups']:
            del group['param_names']
    train.save(str(tmp_path / 'parts'), content)
    run('parts', **knobs)
    for name, x in last(tmp_path / 'whole')['model'].items():
        assert torch.equal(last(tmp_path / 'parts')['model'][name], x)


@pytest.mark.parametrize('fault', ['no name', 'another shape'])
def test_moments_of_other_parameters_are_refused(fault, run, tmp_path, monkeypatch):
    run('a', max_iters=2)
    content = last(tmp_path / 'a')
    matrices, vectors = content['optimizer']['param_groups']
    if fault == 'no name':
        matrices['param_names'][0] = 'of another revision'
    else:
        del matrices['param_names'], vectors['param_names']
        monkeypatch.setattr(train, 'make_optimizer', embeddings_do_not_decay)
    train.save(str(tmp_path / 'a'), content)
    assert 'ckpt_0000002.pt has no moments of encoder.' in refused(run('a', 2, max_iters=2))


# ---- signals ----

# ---- signals ----

@pytest.mark.parametrize('at, step', [(6, 4), (10, 8)], ids=['in the middle', 'the last'])
def test_a_signal_inside_a_validation(at, step, run, tmp_path, monkeypatch):
    """It is given up, its checkpoint written, the validation done by the next run: one line each."""
    knobs = {'batch_size': 8, 'eval_interval': 4}
    run('whole', **knobs)
    with signalled(monkeypatch, 'token_losses', at) as calls:           # of four batches each: the second
        run('parts', 143, **knobs)
    assert len(calls) == at
    assert last(tmp_path / 'parts')['step'] == step
    assert metrics(tmp_path / 'parts')[-1]['kind'] == 'train'
    run('parts', **knobs)
    same_run(tmp_path / 'whole', tmp_path / 'parts')


def test_a_signal_between_two_log_lines(run, tmp_path, monkeypatch):
    """After that step the device is read, and the run ends."""
    with signalled(monkeypatch, 'seed_step', 3):
        run('a', 143, max_iters=50, log_interval=100)
    assert last(tmp_path / 'a')['step'] in (3, 4)


def test_a_signal_in_the_first_validation_in_the_last_save_and_under_nohup(run, tmp_path, monkeypatch):
    with signalled(monkeypatch, 'token_losses', 1):
        run('a', 143, batch_size=8)
    assert not train.checkpoints(str(tmp_path / 'a'))
    assert not metrics(tmp_path / 'a')
    with signalled(monkeypatch, 'save', 1):
        run('a')
    signal.signal(signal.SIGHUP, signal.SIG_IGN)        # as nohup does
    with signalled(monkeypatch, 'seed_step', 1, signal.SIGHUP):
        run('a', max_iters=9)
    run('a', max_iters=9)
    assert [line['step'] for line in metrics(tmp_path / 'a', 'val')] == [0, 8, 9]


def test_a_system_without_sighup(run, monkeypatch):
    """As Windows."""
    monkeypatch.delattr(signal, 'SIGHUP')
    run('a', max_iters=1)


def test_a_log_line_that_nobody_reads_is_in_the_file(tmp_path, monkeypatch):
    """A terminal that was closed takes no lines: the run must still be saved."""
    def fail(text):
        raise OSError(errno.EIO, 'Input/output error')
    log = train.Log(str(tmp_path), 0, CPU, '', {})
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, 'write', fail)
        log.write('train', 1, loss=2.0)
    assert train.read_metrics(tmp_path) == [{'kind': 'train', 'step': 1, 'loss': 2.0}]


# ---- damage ----

# ---- damage ----

# ---- damage ----

def test_damage_is_found_or_changes_nothing(pair, tmp_path):
    """Flipped bits; a file that is empty, zeros, or cut."""
    path = tmp_path / 'x.pt'
    whole = (pair / 'ckpt_0000008.pt').read_bytes()
    good = tree_leaves(last(pair))
    n_refused = 0
    for bit in np.random.default_rng(1).integers(0, 8 * len(whole), 40).tolist():
        path.write_bytes(whole)
        flip(path, *divmod(bit, 8))
        try:
            leaves = tree_leaves(train.read_checkpoint(path))
        except UserError:
            n_refused += 1
            continue
        for x, y in zip(leaves, good, strict=True):     # a date, an attribute or padding
            assert torch.equal(x, y) if torch.is_tensor(x) else x == y
    assert n_refused > 20
    for damaged in (b'', bytes(len(whole)), whole[:70], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match='x.pt cannot be loaded: .*if it is damaged, remove it'):
            train.read_checkpoint(str(path))


@pytest.mark.parametrize('content, text', [
    ({'step': pytest.approx(1)}, 'x.pt cannot be loaded: UnpicklingError: Weights only load failed'),
    ({'model': {}}, 'x.pt is no checkpoint of train.py'),
    ([torch.zeros(2)], 'x.pt is no checkpoint of train.py')])
def test_the_file_of_another_program_is_refused(content, text, run, tmp_path):
    """Its code is not run."""
    torch.save(content, tmp_path / 'x.pt')
    assert text in refused(run('b', 2, init_from=tmp_path / 'x.pt'))


def test_fields_of_a_model_that_came_or_went(run, tmp_path):
    """A checkpoint without a field has its default; a field that is unknown here is one line."""
    run('a', max_iters=1)
    content = last(tmp_path / 'a')
    del content['model_config']['norm']
    train.save(str(tmp_path / 'a'), content)
    assert 'from step 1 of' in run('a', max_iters=2).out
    assert 'from step 0 of the weights of' in run('b', max_iters=0, init_from=tmp_path / 'a').out

    content['model_config']['a_newer_field'] = 1
    train.write_checkpoint(str(tmp_path / 'x.pt'), content)
    with pytest.raises(UserError, match='x.pt: no model of this revision: .*a_newer_field'):
        train.load(str(tmp_path / 'x.pt'))


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(run, tmp_path):
    """When the user has removed it, as the one line says."""
    run('whole', checkpoint_interval=4)
    folder = shutil.copytree(tmp_path / 'whole', tmp_path / 'run')
    newest = folder / 'ckpt_0000008.pt'
    flip(newest, 10_000)
    line = refused(run('run', 2, checkpoint_interval=4))
    assert f'{newest} cannot be loaded: BadZipFile: ' in line
    assert 'if it is damaged, remove it: a run goes on from the checkpoint before' in line
    newest.unlink()
    run('run', checkpoint_interval=4)
    same_run(tmp_path / 'whole', folder)


def test_a_checkpoint_gets_its_name_when_it_is_whole(tmp_path, monkeypatch):
    path = tmp_path / 'x.pt'

    def save(content, file, plain=torch.save):
        plain(content, file)
        assert not path.exists()
    monkeypatch.setattr(torch, 'save', save)
    train.write_checkpoint(str(path), {'step': 1})
    assert [file.name for file in tmp_path.iterdir()] == ['x.pt']


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(run, tmp_path):
    """No file may grow beyond a part of a checkpoint; torch.save hides the system's error."""
    knobs = {'max_iters': 5, 'milestones': 4, 'n_inner': 1024}      # larger than the tokenizer's file
    run('a', **knobs)
    os.remove(tmp_path / 'a' / 'ckpt_0000005.pt')
    size = os.path.getsize(tmp_path / 'a' / 'ckpt_0000004.pt')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * 0.9), limits[1]))
    try:
        text = refused(run('a', 2, **knobs))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert text.endswith('a/ckpt_0000005.pt cannot be written: [Errno 27] File too large')
    assert not [name for name in os.listdir(tmp_path / 'a') if name.endswith('.tmp')]
    assert last(tmp_path / 'a')['step'] == 4
    run('a', **knobs)
    assert last(tmp_path / 'a')['step'] == 5


def test_a_second_run_in_a_folder_is_refused(run, tmp_path):
    with train.lock_folder(str(tmp_path / 'a')):
        assert 'another run uses it' in refused(run('a', 2))
        assert os.listdir(tmp_path / 'a') == ['lock']
    run('a', max_iters=1)


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError(errno.ENOLCK, 'No locks available')
    monkeypatch.setattr('fcntl.flock', fail)
    with train.lock_folder(str(tmp_path)):
        assert 'cannot be locked (No locks available)' in capsys.readouterr().err


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
@pytest.mark.parametrize('what', ['loss', 'gradient'])
def test_what_is_not_finite_is_never_saved(what, dtype, run, tmp_path, monkeypatch):
    """The loss of step 6, or each gradient of a bias: float16 skips such steps until its scale is used up."""
    calls = itertools.count(1)

    def spoil(module, _, losses):
        return losses * math.inf if module.training and next(calls) == 6 else losses

    def make_optimizer(model, *arguments, plain=train.make_optimizer):
        if what == 'loss':
            model.register_forward_hook(spoil)
        else:
            model.head.bias.register_hook(lambda gradient: gradient * math.inf)
        return plain(model, *arguments)
    monkeypatch.setattr(train, 'make_optimizer', make_optimizer)
    interval = 5 if what == 'loss' else 0
    text = refused(run('a', 2, max_iters=30, dtype=dtype, log_interval=100, checkpoint_interval=interval))
    assert f'after step {interval} is not finite; no checkpoint has it; try a lower learning_rate' in text
    assert list(train.checkpoints(str(tmp_path / 'a'))) == ([5] if interval else [])


# ---- refusals ----

@pytest.mark.parametrize('knobs, text', [
    ({'schedule': 'x'}, "schedule='x': choose one of linear"), ({'packing': 'x'}, 'stream, documents'),
    ({'objective': 'classify'}, 'choose one of mlm, plm'), ({'objective': 'plm'}, "attention='original'"),
    ({'attention': 'shatter'}, 'position'), ({'n_embd': 18}, 'n_head'), ({'dtype': 'x'}, 'float32'),
    ({'device': 'tpu'}, 'cpu, cuda, mps, xla'), ({'device': 'cuda'}, 'none here'),
    ({'dataset': 'none'}, 'not prepared: run python prepare_data.py'), ({'validation': 'none'}, 'none'),
    ({'block_size': 10 ** 6, 'position': 'none'}, 'train holds less than one row of block_size=1000000'),
    ({'init_from': 'some/bert'}, 'some/bert: no run, checkpoint or BERT'), ({'init_from': 'no.pt'}, 'no.pt'),
    ({'fill': 'no mask'}, 'put a [MASK]'), ({'export': 'x', 'init_from': 'no'}, 'no: no checkpoint there'),
    ({'block_size': 2}, 'at least 3'), ({'mask_fraction': 1.1}, 'mask_fraction=1.1: must be at most 1'),
    ({'mask_fraction': 0.0}, 'mask_fraction=0.0: must be above 0'),
    ({'eval_mask_fraction': 2.0}, 'eval_mask_fraction=2.0: must be at'), ({'total_batch': 0}, 'at least 1'),
    ({'beta2': 1.5}, 'beta2=1.5: must be below 1'), ({'dropout': 1.0}, 'dropout=1.0: must be at'),
    ({'init_from': '\x1b[31m'}, 'no run, checkpoint or BERT'), ({'init_from': '\x1b[31m.pt'}, '31m.pt')])
def test_refusals_are_one_line(knobs, text, run, pair, monkeypatch):
    """Without escape sequences."""
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    line = refused(run('a', 2, **({'init_from': pair} if 'fill' in knobs else {}), **knobs))
    assert text in line
    assert '\x1b' not in line


def test_every_process_needs_a_sequence_of_a_step():
    """On XLA as many as every other process."""
    def check(device, total_batch):
        runtime = Runtime(torch.device(device), torch.float32, 0, 4, None)
        train.check_knobs({**knobs_of(train), 'total_batch': total_batch}, runtime)

    for device in 'cpu', 'xla':
        check(device, 4)
        with pytest.raises(UserError, match='total_batch=3: must be at least 4'):
            check(device, 3)
    check('cpu', 6)
    with pytest.raises(UserError, match='total_batch=6: on XLA, choose a multiple of the 4 processes'):
        check('xla', 6)


def test_every_field_of_a_model_is_a_knob():
    """But for those of a head that finetune.py makes, and what the data decides."""
    fields = {field.name for field in dataclasses.fields(EncoderConfig)}
    assert fields - {*knobs_of(train)} == {'vocab_size', 'n_segment', 'pooling', 'n_label'}


@pytest.mark.parametrize('knobs, identity, text', [
    ({'n_inner': 64}, {}, 'n_inner=32, this run has 64'), ({'attention': 'gau'}, {}, 'attention=pairwise'),
    ({}, {'tokenizer': 'other'}, 'has tokenizer='), ({}, {'train': 'other'}, 'has train='),
    ({}, {'val': 'other'}, 'has val=')])
def test_another_model_or_corpus_is_refused(knobs, identity, text, stage, pair, corpus, meta, tmp_path):
    other = corpus_like(corpus, tmp_path, {**meta, 'identity': {**meta['identity'], **identity}})
    assert text in refused(stage('train', *tiny(other, pair, **{**PAIR, **knobs})))


def test_another_objective_is_refused(run):
    knobs = {'attention': 'xlnet', 'position': 'none', 'max_iters': 1}
    run('a', **knobs)
    assert 'has objective=mlm, this run has plm' in refused(run('a', 2, objective='plm', **knobs))


@pytest.mark.parametrize('name', ['RANK', 'WORLD_SIZE'])
def test_half_a_place_among_processes_is_refused(name, run, monkeypatch):
    monkeypatch.setenv(name, '1')
    assert 'of RANK and WORLD_SIZE one is set' in refused(run('a', 2))


def test_no_memory_on_the_gpu_is_one_line(run, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB.')
    monkeypatch.setattr(train, 'update', fail)
    assert refused(run('a', 2)).endswith('out of memory. Tried to allocate 2 GiB.; try half the batch_size')


def test_a_folder_that_machines_do_not_share_is_refused(run, monkeypatch):
    monkeypatch.setattr(Runtime, 'sum', lambda self, *numbers: [number + 1 for number in numbers])
    assert 'a folder that all machines share' in refused(run('a', 2))


@pytest.mark.parametrize('ending', ['bin', 'idx'])
def test_a_corpus_that_changed_is_refused(ending, run, corpus, meta, tmp_path, monkeypatch):
    """A flipped bit: of 2 GB and more only the sizes are compared, else a run would start late."""
    other = corpus_like(corpus, tmp_path, meta)
    stem = meta['splits']['train'][0]['stem']
    flip(f'{other}/{stem}.{ending}')
    knobs = {'data_dir': tmp_path, 'dataset': 'other', 'max_iters': 0}
    assert f'{stem}.{ending}: missing, damaged' in refused(run('a', 2, **knobs))
    monkeypatch.setattr('prepare_data.SUMS_BELOW', 0)
    run('a', **knobs)


# ---- what a run shows ----

def test_further_corpora_are_validated_on(run, corpus, meta, tmp_path):
    """Beside the run's own, and nothing else changes; a corpus of another tokenizer is refused."""
    os.symlink(corpus, tmp_path / 'tiny')
    splits = {'train': [], 'val': meta['splits']['train'][:1]}
    other = corpus_like(corpus, tmp_path, {**meta, 'splits': splits})
    run('plain')
    run('both', data_dir=tmp_path, validation='other')
    same_run(tmp_path / 'plain', tmp_path / 'both')
    line = train.read_metrics(tmp_path / 'both')[-1]
    rows = Rows(other, load_meta(other), 'val', 32, 'stream')
    loader = Loader(rows, Masker(meta, 32, 0.15, 'mlm', False), 0)
    scores = train.evaluate(train.load(str(tmp_path / 'both'))[0], loader, 32, 32, CPU)
    assert line['other_loss'] == pytest.approx(scores['loss'], rel=1e-6) != line['loss']
    assert line['unigram'] == meta['unigram_entropy']
    corpus_like(corpus, tmp_path, {**meta, 'identity': {**meta['identity'], 'tokenizer': 'another'}})
    assert 'other has tokenizer=another' in refused(run('c', 2, data_dir=tmp_path, validation='other'))


def test_a_run_learns_and_validates_the_same_with_any_seed(run, tmp_path):
    """And a warmup longer than the run becomes a tenth of it."""
    run('a', max_iters=20, learning_rate=1e-2, warmup_iters=10_000, schedule='constant')
    run('b', max_iters=1, learning_rate=0, seed=2, init_from=tmp_path / 'a')
    first, final = metrics(tmp_path / 'a', 'val')
    assert final['loss'] < first['loss'] - 0.1
    assert metrics(tmp_path / 'b', 'val')[-1]['loss'] == final['loss']
    assert [line['lr'] for line in metrics(tmp_path / 'a', 'train')][:3] == [0.005, 0.01, 0.01]


def test_the_speed_counts_all_tokens_of_a_step(run, tmp_path):
    """Of all its micro-batches; the same seconds a step as hours_left has."""
    run('a', max_iters=5, batch_size=3)
    lines = [line for line in train.read_metrics(tmp_path / 'a') if line['kind'] == 'train']
    for line in lines[:-1]:
        seconds = line['hours_left'] * 3600 / (5 - line['step'])
        assert line['tokens_per_second'] == pytest.approx(8 * 32 / seconds)


def test_the_picture_has_losses_by_step(run, tmp_path, monkeypatch):
    """And is a line without matplotlib."""
    assert run('a').err == f'no {tmp_path}/a/loss.png without matplotlib: pip install matplotlib\n'
    seen = []
    monkeypatch.setattr(train, 'plot', lambda path, panels, label: seen.append(panels['step']))
    train.plot_losses(tmp_path / 'a')
    losses = {kind: [(line['step'], line['loss']) for line in metrics(tmp_path / 'a', kind)]
              for kind in ('val', 'train')}
    assert [*seen[0]] == ['val unigram', 'val loss', 'train loss']
    assert seen[0]['val loss'] == losses['val']
    assert seen[0]['train loss'] == losses['train']


def test_a_bar_on_a_terminal_alone(run, monkeypatch):
    plain = run('a', max_iters=4)
    monkeypatch.setattr('sys.stderr.isatty', lambda: True, raising=False)
    with_bar = run('b', max_iters=4, batch_size=8)
    assert 'step/s' not in plain.err
    assert '4/4 [' in with_bar.err
    assert 'loss=' in with_bar.err
    assert re.search(r'validation: *\d+%.*\| \d+/32 \[', with_bar.err)       # 32 rows
    assert 'validation:' not in plain.err
    assert len(plain.out.splitlines()) == len(with_bar.out.splitlines())    # above the bar


def test_weights_and_biases(run, corpus, stage, tmp_path, monkeypatch):
    """A run that goes on is the same run there; its name is its folder's, also with a slash at the end."""
    begun = []                                          # arguments of wandb.init
    logged = []

    def init(**arguments):
        begun.append(arguments)
        log = lambda values, step: logged.append((step, *values))           # noqa: E731
        return types.SimpleNamespace(id=arguments['id'] or f'id{len(begun)}', log=log)

    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    for max_iters in (2, 4):
        stage('train', *tiny(corpus, f'{tmp_path}/a/', max_iters=max_iters, wandb_project='mine'))
    run('b', max_iters=1, wandb_project='mine')
    assert [(arguments['name'], arguments['id']) for arguments in begun] == [
        ('a', None), ('a', 'id1'), ('b', None)]
    assert {(arguments['project'], arguments['resume']) for arguments in begun} == {('mine', 'allow')}
    assert [step for step, *_ in logged][:7] == [0, 1, 2, 2, 3, 4, 4]
    assert 'train/loss' in logged[1]


# ---- show, fill ----

def test_rows_are_shown_before_and_after_masking(corpus, stage, meta, tmp_path):
    out = stage('train', *tiny(corpus, f'{tmp_path}/a', show=2, packing='documents')).out
    rows = [line.split() for line in out.splitlines() if line]
    assert len(rows) == 4
    assert not (tmp_path / 'a').exists()
    for before, after in (rows[:2], rows[2:]):
        assert len(before) == len(after) == 32
        assert before[0] == after[0] == '[CLS]'
        predicted = [place for place, text in enumerate(before) if text[0] + text[-1] == '><']
        n_tokens = sum(text != '[PAD]' for text in before)
        assert len(predicted) == math.ceil(0.15 * n_tokens)
        changed = [place for place in range(32) if before[place] != after[place]]
        assert changed
        assert {*changed} <= {*predicted}


def test_fill_prints_five_predictions_for_each_mask(pair, stage, meta, monkeypatch):
    """The model sees the ids of training, also of a full stop behind a mask."""
    seen = []

    def forward(self, ids, *arguments, plain=MaskedLM.forward, **keywords):
        seen.extend(ids.tolist())
        return plain(self, ids, *arguments, **keywords)
    monkeypatch.setattr(MaskedLM, 'forward', forward)
    lines = stage('train', f'--init_from={pair}', '--fill=the [MASK] of a [MASK].').out.splitlines()
    assert lines[0] == 'the [MASK] of a [MASK].'
    assert len(lines) == 3
    model, tokenizer, _ = train.load(str(pair))
    ids = [meta['special']['cls'], *tokenizer.encode(['the in of a and.'])[0], meta['special']['sep']]
    places = [2, len(ids) - 3]                          # of " in" and " and", a token each
    for place in places:
        ids[place] = meta['special']['mask']
    assert seen == [ids]
    chances = model(torch.tensor([ids]))[0].softmax(-1)
    for line, where in zip(lines[1:], places, strict=True):
        best = chances[where].topk(5)
        pieces = [tokenizer.pieces[i].strip('\u2581') or '\u2581' for i in best.indices]
        assert line.split()[::2] == pieces
        assert line.split()[1::2] == [f'{p:.3f}' for p in best.values]


def test_a_text_longer_than_the_model_is_one_line(pair, stage):
    line = refused(stage('train', f'--init_from={pair}', f"--fill={'a ' * 40}[MASK]"))
    assert '43 tokens with [CLS] and [SEP]: the model takes 32' in line


def test_fill_shows_no_escape_sequences_of_anothers_tokenizer(capsys):
    pieces = ['[PAD]', '[CLS]', '[SEP]', '[MASK]', '\x1b[31m', '\u2581', '\u2581a']
    tokenizer = types.SimpleNamespace(pieces=pieces, special_ids={'cls': 1, 'sep': 2, 'mask': 3})
    train.fill_masks(MaskedLM(EncoderConfig(7, 64, 1, 2, 16, 32)), tokenizer, [[4], [5]])
    line = capsys.readouterr().out
    assert '\x1b' not in line
    assert len(line.split()) == 10


def test_the_first_words_of_held_out_documents(corpus, meta, capsys):
    """Of two documents at most 24 tokens, one word of them masked; the last line names it and its rank."""
    model = MaskedLM(EncoderConfig(meta['vocab_size'], 32, 1, 2, 16, 32))
    train.show_masked_words(model, corpus, meta, 2)
    title, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 2 * 3
    tokenizer = load_tokenizer(corpus)
    documents = Rows(corpus, meta, 'val', 1 << 16, 'documents')
    for number, (text, _, truth) in enumerate((lines[:3], lines[3:])):
        ids = documents[number * len(documents) // 2][0]
        word, rank = re.fullmatch(r'    masked: ([a-z]+), rank ([0-9]+)', truth).groups()
        spaced = text.replace('[MASK]', f' {word} ')
        assert spaced.split() == tokenizer.decode(ids[1:25].tolist()).split()
        assert 1 <= int(rank) <= meta['vocab_size']


# ---- processes ----

def test_one_process_takes_the_steps_of_two_or_goes_on_from_them(pair, run, tmp_path):
    """Losses, norms, validation and weights, though 7 rows and 13 are not shared equally."""
    shutil.copytree(pair, tmp_path / 'rest')
    os.remove(tmp_path / 'rest' / 'ckpt_0000008.pt')
    run('one', **PAIR)
    assert 'from step 6 of' in run('rest', **PAIR).out
    for folder in (tmp_path / 'one', tmp_path / 'rest'):
        for one, two in zip(metrics(folder), metrics(pair), strict=True):
            assert one['loss'] == pytest.approx(two['loss'], rel=1e-5)
            assert one['lr'] == two['lr']
            assert (one['norm'] or 0) == pytest.approx(two['norm'] or 0, rel=1e-4)      # None: validation
            assert one['accuracy'] == two['accuracy']
        for name, x in last(folder)['model'].items():
            assert (x - last(pair)['model'][name]).abs().max() < 6e-5, name     # Adam's steps are 1e-4 each
    launches = (tmp_path / 'rest' / 'launches.jsonl').read_text().splitlines()
    assert [json.loads(launch)['world_size'] for launch in launches] == [2, 1]


def test_a_mistake_ends_with_status_2_and_one_line():
    assert refused(process('train.py', '--n_layr=3')).startswith('error: --n_layr=3')


def test_ctrl_c_saves_and_ends(corpus, tmp_path):
    started = launch('train.py', *tiny(corpus, tmp_path / 'a', max_iters=10_000, log_interval=10))
    while len(train.read_metrics(tmp_path / 'a')) < 3 and started.poll() is None:
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    line, = started.communicate(timeout=60)[1].splitlines()
    step = last(tmp_path / 'a')['step']
    assert started.returncode == 130
    assert step > 10
    assert line.startswith(f'stopped by a signal after step {step}, which is saved')
