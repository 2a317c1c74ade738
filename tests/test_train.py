"""train.py: batches, masks, resume, ranks, signals, checkpoints under damage, refusals, fill and export."""
import fcntl
import functools
import glob
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, real_stage, seen, stage, terminal, tiny, torchrun
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train as source
from configurator import UserError, configure
from model import (
    ALLOWED_POSITIONS,
    ATTENTION,
    NORMALISER,
    POSITION,
    EncoderConfig,
    MaskedLM,
    PermutationLM,
    token_losses,
)
from prepare_data import WordPieceTokenizer, load_meta, load_tokenizer, write_json
from train import (
    OBJECTIVE,
    PACKING,
    SCHEDULE,
    DocumentRows,
    Loader,
    Masker,
    Permuter,
    Runtime,
    StreamRows,
    shuffled,
)

CPU = torch.device('cpu')


def mostly_slow(names, *fast):
    """Parameters of a test, of which `fast` alone are in the fast set."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope='module')
def meta(corpus):
    return load_meta(corpus)


def split_ids(corpus, meta, split):
    """The documents of a split, in file order, read as prepare_data's format says."""
    documents = []
    for shard in meta['splits'][split]:
        ids = np.fromfile(os.path.join(corpus, f"{shard['stem']}.bin"), meta['dtype']).astype(np.int64)
        starts = np.fromfile(os.path.join(corpus, f"{shard['stem']}.idx"), np.int64)
        documents.append([ids[a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)])
    return documents


def weights(path):
    return torch.load(path, weights_only=True)


def metrics(out_dir, kind='train'):
    with open(os.path.join(out_dir, 'metrics.jsonl')) as file:
        lines = [json.loads(line) for line in file]
    return [{key: line.get(key) for key in ('step', 'loss', 'lr', 'norm', 'accuracy')} for line in lines
            if line['kind'] == kind]


def same_checkpoint(one, other):
    """Equality to the bit of parameters, optimizer tensors, step and best loss."""
    one, other = weights(one), weights(other)
    assert one['model'].keys() == other['model'].keys()
    for name, value in one['model'].items():
        assert torch.equal(value, other['model'][name]), name
    for index, state in one['optimizer']['state'].items():
        for name, value in state.items():
            assert torch.equal(value, other['optimizer']['state'][index][name]), (index, name)
    assert len(one['optimizer']['state']) == len(other['optimizer']['state']) == len(one['model'])
    assert one['step'] == other['step'] and one['samples'] == other['samples']


def run_here(corpus, out_dir, *knobs, signal_at=None, number=signal.SIGTERM, status=None):
    """train.main() in this process, which is faster than a new one; what it changes is put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', ['train.py', *tiny(corpus, out_dir), *knobs])
            patch.setattr(source, 'plot_losses', lambda *arguments: None)       # half of a tiny run's time
            for name in knobs_of(source):
                patch.setattr(source, name, getattr(source, name))      # back to the default afterwards
            if signal_at is not None:
                interrupt(signal_at, patch, number)
            if status is None:
                return source.main()
            with pytest.raises(SystemExit) as end:
                source.main()
            assert end.value.code == status
    finally:
        source.HELD.clear()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture
def two(corpus, meta, tmp_path):
    """Folder of the corpus, `tiny`, and of `other`, which has its tokenizer and is held out as a whole."""
    os.symlink(corpus, tmp_path / 'tiny')
    shutil.copytree(corpus, tmp_path / 'other')
    write_json(tmp_path / 'other' / 'meta.json', {
        **meta, 'splits': {'train': [], 'val': meta['splits']['train'][:2]},
        'identity': {**meta['identity'], 'train': 'none', 'val': 'other'}})
    return tmp_path


@pytest.fixture
def train_here(corpus):
    return functools.partial(run_here, corpus)


def knobs_of(scope):
    return configure(dict(vars(scope)), [])[0]


# ---- rows ----

def test_stream_rows_are_the_stream_cut(corpus, meta):
    rows = StreamRows(corpus, meta, 'train', 32)
    wanted = []
    for shard in split_ids(corpus, meta, 'train'):
        stream = np.concatenate(shard)
        wanted += [stream[i:i + 30] for i in range(0, len(stream) - 29, 30)]
    assert len(meta['splits']['train']) > 2 and len(rows) == len(wanted)
    ids = rows.get(np.arange(len(rows)))
    assert (ids[:, 0] == meta['special']['cls']).all() and (ids[:, -1] == meta['special']['sep']).all()
    assert (ids[:, 1:-1] == np.stack(wanted)).all()


def test_document_rows_hold_each_document_once(corpus, meta, monkeypatch):
    monkeypatch.setattr(DocumentRows, 'COARSE', 7)
    rows = DocumentRows(corpus, meta, 'train', 32)
    special = meta['special']
    wanted = [document[:-1][i:i + 30] for shard in split_ids(corpus, meta, 'train') for document in shard
              for i in range(0, len(document) - 1, 30)]
    assert len(rows) == len(wanted)
    for row, tokens in zip(rows.get(np.arange(len(rows))), wanted, strict=True):
        padding = [special['pad']] * (30 - len(tokens))
        assert row.tolist() == [special['cls'], *tokens, special['sep'], *padding]


@pytest.mark.parametrize('n', [1, 2, 3, 7, 64, 1000, 4097])
def test_shuffled_is_a_permutation_of_each_epoch(n):
    orders = [shuffled(np.arange(n), n, seed, epoch).tolist() for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert all(sorted(order) == list(range(n)) for order in orders)
    if n > 60:
        assert orders[0] != orders[1] != orders[2] != orders[0]
        assert shuffled(np.arange(5, 9), n, 1, 0).tolist() == orders[0][5:9]        # position by position
        gaps = np.abs(np.diff(orders[0]))
        assert abs(gaps.mean() / (n / 3) - 1) < 0.25                    # as far apart as in a random order


def test_an_epoch_sees_every_row_once(corpus, meta):
    rows = StreamRows(corpus, meta, 'val', 32)
    loader = Loader(rows, Masker(meta, 32, 0.15), 1, 8, slice(0, 8))
    seen = np.concatenate([loader.indices(step) for step in range(2 * len(rows) // 8 + 1)])
    assert sorted(seen[:len(rows)]) == sorted(seen[len(rows):2 * len(rows)]) == list(range(len(rows)))
    assert (seen[:len(rows)] != seen[len(rows):2 * len(rows)]).any()


@pytest.mark.parametrize('world', [2, 3, 8])
@pytest.mark.parametrize('objective', OBJECTIVE)
@pytest.mark.parametrize('packing', PACKING)
def test_ranks_see_the_batches_of_one_process(packing, objective, world, corpus, meta):
    rows, masker = PACKING[packing](corpus, meta, 'train', 32), OBJECTIVE[objective][1](meta, 32, 0.15)
    whole = Loader(rows, masker, 1, 16, slice(0, 16)).batch(5)
    places = [Runtime(CPU, rank=rank, world=world) for rank in range(world)]
    parts = [Loader(rows, masker, 1, 16, place.share(16)).batch(5) for place in places]
    for key, value in whole.items():
        assert (np.concatenate([part[key] for part in parts]) == value).all()
    assert whole.keys() == parts[0].keys() and ('order' in whole) == (objective == 'plm')
    assert (whole['ids'] != Loader(rows, masker, 2, 16, slice(0, 16)).batch(5)['ids']).any()


def test_prefetch_yields_in_order_and_raises_what_its_thread_raised():
    assert list(source.prefetch(lambda step: step * 2, range(3, 8))) == [6, 8, 10, 12, 14]
    batches = source.prefetch(lambda step: 1 // (2 - step), range(5))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(batches)


# ---- masks ----

def test_masking_statistics(corpus, meta):
    rows, masker = StreamRows(corpus, meta, 'train', 64), Masker(meta, 64, 0.15)
    ids = rows.get(np.arange(min(len(rows), 2000)))
    batch = masker.apply(ids, *masker.draw(1, 2, len(ids)))
    assert masker.k == 10 and batch['positions'].shape == (len(ids), 10) and (batch['weights'] == 1).all()
    assert all(len(set(row)) == 10 for row in batch['positions'])
    shown = np.take_along_axis(batch['ids'], batch['positions'], 1)
    targets = np.take_along_axis(ids, batch['positions'], 1)
    assert (batch['targets'] == targets).all() and not masker.is_special[targets].any()
    masked, kept = shown == meta['special']['mask'], shown == targets
    n = shown.size
    for share, wanted in ((masked.mean(), 0.8), ((~masked & ~kept).mean(), 0.1 * (1 - 1 / 400))):
        assert abs(share - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / n)
    replaced = shown[~masked & ~kept]
    assert not masker.is_special[replaced].any() and len(set(replaced)) > 300
    untouched = np.ones(ids.shape, bool)
    np.put_along_axis(untouched, batch['positions'], False, 1)
    assert (batch['ids'][untouched] == ids[untouched]).all()
    chances = np.bincount(batch['positions'].ravel(), minlength=64)[1:-1] / len(ids)
    assert abs(chances.mean() - 10 / 62) < 1e-9 and chances.std() < 3 * math.sqrt(10 / 62 / len(ids))


@pytest.mark.parametrize('length, k', [(20, 3), (60, 9), (100, 15), (128, 20), (512, 77)])
def test_k_is_the_ceiling_of_15_percent(meta, length, k):
    assert Masker(meta, length, 0.15).k == k


def test_short_rows_give_weight_0_to_the_surplus(corpus, meta):
    rows, masker = DocumentRows(corpus, meta, 'train', 64), Masker(meta, 64, 0.15)
    ids = rows.get(np.arange(300))
    batch = masker.apply(ids, *masker.draw(1, 0, len(ids)))
    real = (ids != meta['special']['pad']).sum(1)
    assert real.min() < 20 and (batch['weights'].sum(1) == np.ceil(real * 0.15 - 1e-9)).all()
    idle = batch['weights'] == 0
    changed = np.take_along_axis(batch['ids'], batch['positions'], 1)[idle]
    assert (changed == batch['targets'][idle]).all()
    assert not masker.is_special[batch['targets'][~idle]].any()
    only_special = np.full((1, 64), meta['special']['pad'])
    assert masker.apply(only_special, *masker.draw(1, 0, 1))['weights'].sum() == 0


def test_whole_words_are_taken_whole(corpus, meta):
    word_start = np.fromfile(os.path.join(corpus, 'tokenizer', 'word_start.bin'), np.uint8)
    rows, masker = StreamRows(corpus, meta, 'train', 64), Masker(meta, 64, 0.15, word_start)
    ids = rows.get(np.arange(500))
    batch = masker.apply(ids, *masker.draw(1, 0, len(ids)))
    partly = 0
    for row, positions, chosen in zip(ids, batch['positions'], batch['weights'], strict=True):
        taken = set(positions[chosen == 1])
        word = [0]
        for i in range(1, 64):
            first = word_start[row[i]] or masker.is_special[row[i]] or masker.is_special[row[i - 1]]
            word.append(word[-1] + bool(first))
        for number in set(word):
            members = {i for i in range(64) if word[i] == number}
            assert not members & taken or members <= taken
            partly += len(members) > 1 and members <= taken
    assert partly > 100                                             # words of several pieces are among them
    assert 0.97 < batch['weights'].mean() <= 1                      # one that does not fit is passed over
    assert not masker.is_special[batch['targets'][batch['weights'] == 1]].any()


@pytest.mark.parametrize('packing', PACKING)
def test_word_starts_of_a_segmenter_replace_those_of_the_vocabulary(packing, corpus, meta, tmp_path):
    """Bytes beside the tokens: here a word starts at every token with an id that 3 divides."""
    shutil.copytree(corpus, tmp_path / 'words')
    meta = json.loads(json.dumps(meta))
    meta['segmenter'] = {}
    for shard in meta['splits']['train']:
        ids = np.fromfile(os.path.join(corpus, f"{shard['stem']}.bin"), meta['dtype'])
        (ids % 3 == 0).astype(np.uint8).tofile(tmp_path / 'words' / f"{shard['stem']}.words")
    plain = PACKING[packing](corpus, load_meta(corpus), 'train', 64)
    rows = PACKING[packing](str(tmp_path / 'words'), meta, 'train', 64)
    assert plain.word_starts([0, 1]) is None
    indices = np.arange(200) % len(rows)
    ids, starts = rows.get(indices), rows.word_starts(indices)
    inside = (ids != meta['special']['pad']) & (ids != meta['special']['cls'])
    last = inside & ~np.pad(inside, ((0, 0), (0, 1)))[:, 1:]        # the [SEP] that ends a row
    assert (starts[inside & ~last] == (ids[inside & ~last] % 3 == 0)).all() and starts[~inside].all()
    masker = Masker(meta, 64, 0.15, np.ones(meta['vocab_size'], np.uint8))      # single tokens, but for rows
    batch = Loader(rows, masker, 1, 200, slice(0, 200)).batch(0)
    ids = batch['ids'].copy()
    np.put_along_axis(ids, batch['positions'], batch['targets'], 1)
    multiple = 0
    for row, positions, chosen in zip(ids, batch['positions'], batch['weights'] == 1, strict=True):
        special = masker.is_special[row]
        first = (row % 3 == 0) | special | np.roll(special, 1)
        word = np.cumsum(first)
        taken = set(positions[chosen])
        for number in {word[i] for i in taken}:
            members = set(np.flatnonzero(word == number))
            assert members <= taken
            multiple += len(members) > 1
    assert multiple > 100
    os.truncate(tmp_path / 'words' / f"{meta['splits']['train'][0]['stem']}.words", 5)
    with pytest.raises(UserError, match='words: truncated'):
        rows.word_starts(range(len(rows)))


def test_a_permutation_has_special_tokens_first_and_predicted_ones_last(corpus, meta):
    rows = DocumentRows(corpus, meta, 'train', 64)
    ids = rows.get(np.arange(200))
    arguments = meta, 64, 0.15
    draw = Masker(*arguments).draw(1, 3, len(ids))
    batch, masked = Permuter(*arguments).apply(ids, *draw), Masker(*arguments).apply(ids, *draw)
    for key in ('positions', 'targets', 'weights'):
        assert (batch[key] == masked[key]).all()                    # the same tokens are predicted
    assert (batch['ids'] == ids).all()                              # and stay in sight of those after them
    orders = set()
    for row, order, positions, chosen in zip(ids, batch['order'], batch['positions'], batch['weights'] == 1,
                                             strict=True):
        special = np.isin(row, list(meta['special'].values()))
        assert (order[special] == 0).all() and len(set(order[~special])) == (~special).sum()
        others = np.setdiff1d(np.flatnonzero(~special), positions[chosen])
        assert not len(others) or order[positions[chosen]].min() > order[others].max()
        orders.add(tuple(np.argsort(order[others])[:5]))
    assert len(orders) > 100                                        # drawn anew for each row


# ---- optimization ----

@pytest.mark.parametrize('schedule', SCHEDULE)
def test_schedule(schedule):
    rates = [source.get_lr(step, 1.0, 0.1, 10, 110, schedule) for step in range(110)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    middle, end = {'linear': (0.55, 0.109), 'cosine': (0.55, 0.1), 'constant': (1, 1),
                   'thirds': (0.28, 0.118)}[schedule]
    assert rates[60] == pytest.approx(middle) and rates[109] == pytest.approx(end, abs=1e-3)
    with pytest.raises(AssertionError):
        source.get_lr(111, 1.0, 0.1, 10, 110, schedule)


@pytest.mark.parametrize('attention', ATTENTION)
def test_decay_is_on_matrices_alone(attention):
    position = ALLOWED_POSITIONS.get(attention, ['absolute'])[0]
    model = MaskedLM(EncoderConfig(50, 8, 2, 4, 8, 16, attention=attention, position=position))
    optimizer = source.make_optimizer(model, 1e-3, (0.9, 0.999), 1e-8, 0.01, Runtime(CPU))
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    for name, parameter in model.named_parameters():
        plain = name.endswith(('bias', 'diag')) or 'norm.' in name
        assert decay[id(parameter)] == (0 if plain else 0.01), name


def test_evaluation_equals_full_logits(corpus, meta):
    rows = StreamRows(corpus, meta, 'val', 32)
    loader = Loader(rows, Masker(meta, 32, 0.15), 0, 16, slice(0, 16), limit=40)
    model = MaskedLM(EncoderConfig(400, 32, 2, 2, 16, 32))
    scores = source.evaluate(model, loader, 5, Runtime(CPU))
    assert model.training
    losses, hits = [], []
    for step in range(3):
        batch = {key: torch.from_numpy(value) for key, value in loader.batch(step).items()}
        logits = model.eval()(batch['ids']).detach()
        for i in range(len(logits)):
            at = logits[i, batch['positions'][i]]
            losses += F.cross_entropy(at, batch['targets'][i], reduction='none').tolist()
            hits += (at.argmax(-1) == batch['targets'][i]).tolist()
    assert len(losses) == 40 * 5
    assert scores['loss'] == pytest.approx(np.mean(losses), rel=1e-5)
    assert scores['accuracy'] == pytest.approx(np.mean(hits))
    assert scores['perplexity'] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def val_lines(out_dir):
    return [line for line in source.read_metrics(out_dir) if line['kind'] == 'val']


def test_further_corpora_are_validated_on_and_change_nothing_else(two, tmp_path, train_here, capsys):
    """Runs with and without them are equal to the bit, and each goes on from the other's checkpoint."""
    knobs = ['--max_iters=4', '--eval_interval=2', '--milestones=2', '--packing=documents',
             f'--data_dir={two}']
    train_here(tmp_path / 'plain', *knobs)
    capsys.readouterr()
    train_here(tmp_path / 'both', *knobs, '--validation=other')
    said = capsys.readouterr().out
    for name in ('plain', 'both'):
        other = tmp_path / f'from {name}'
        other.mkdir()
        for file in ('ckpt_0000002.pt', 'metrics.jsonl'):
            shutil.copy(tmp_path / name / file, other)
        train_here(other, *knobs, *['--validation=other'] * (name == 'plain'))
        for run in (other, tmp_path / 'both'):
            same_checkpoint(tmp_path / 'plain' / 'ckpt_0000004.pt', run / 'ckpt_0000004.pt')
            for kind in ('train', 'val'):
                assert metrics(tmp_path / 'plain', kind) == metrics(run, kind)
    plain, both = val_lines(tmp_path / 'plain'), val_lines(tmp_path / 'both')
    further = {f'other_{key}' for key in ('loss', 'accuracy', 'perplexity')}
    assert [line.keys() - plain[0].keys() for line in both] == [further] * 3
    assert val_lines(tmp_path / 'from plain') == plain[:2] + both[2:]
    assert val_lines(tmp_path / 'from both') == both[:2] + plain[2:]
    for line in both:
        text = f"step {line['step']}: validation loss {line['other_loss']:.4f} on other, masked accuracy "
        assert f"{text}{line['other_accuracy']:.2%}, perplexity {line['other_perplexity']:.1f}\n" in said
    model, meta = source.load_pretrained(str(tmp_path / 'both'))[0], load_meta(two / 'other')
    rows = DocumentRows(str(two / 'other'), meta, 'val', 32)
    loader = Loader(rows, Masker(meta, 32, 0.15), 0, source.EVAL_ROWS, slice(0, source.EVAL_ROWS), limit=32)
    for key, value in source.evaluate(model, loader, 8, Runtime(CPU)).items():
        assert both[-1][f'other_{key}'] == pytest.approx(value, rel=1e-6) != both[-1][key]


def test_a_corpus_of_another_tokenizer_and_one_without_training_documents_are_refused(two, train_here):
    knobs = ['--max_iters=2', f'--data_dir={two}']
    with pytest.raises(UserError, match='other: train holds less than one row of block_size=32'):
        train_here(two / 'run', *knobs, '--dataset=other')
    meta = load_meta(two / 'other')
    meta['identity']['tokenizer'] = 'another'
    write_json(two / 'other' / 'meta.json', meta)
    with pytest.raises(UserError, match="other: the data differs: tokenizer is 'another' there and"):
        train_here(two / 'run', *knobs, '--validation=tiny, other')


def test_the_plot_has_a_curve_for_each_loss(tmp_path, monkeypatch):
    pytest.importorskip('matplotlib')
    lines = [{'kind': 'val', 'step': 0, 'loss': 6.0, 'other_loss': 7.0, 'other_accuracy': 0.1},
             {'kind': 'train', 'step': 1, 'loss': 5.5, 'lr': 0.1}, {'kind': 'val', 'step': 2, 'loss': 5.0}]
    (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    figures = []
    monkeypatch.setattr('matplotlib.figure.Figure.savefig', lambda self, *a, **k: figures.append(self))
    source.plot_losses(str(tmp_path), 5.75)
    drawn = {line.get_label(): [list(line[0].get_xdata()), list(line[0].get_ydata())]
             for line in figures[0].axes[0].containers}
    level = figures[0].axes[0].get_lines()[0]
    assert drawn == {'val loss': [[0, 2], [6.0, 5.0]], 'val other_loss': [[0], [7.0]],
                     'train loss': [[1], [5.5]]}
    assert (level.get_label(), level.get_ydata()) == ('unigram entropy', [5.75, 5.75])


def test_a_line_has_the_mean_and_deviation_of_equal_x():
    figure = pytest.importorskip('matplotlib.figure').Figure()
    axis = figure.subplots()
    source.draw_curves(axis, [('b', 2, 5.0), ('b', 2, 7.0), ('b', 1, None), ('a', 1, 3.0), ('b', 3, 1.0)])
    (line, _, (bars,)), (other, *_) = axis.containers
    assert [container.get_label() for container in axis.containers] == ['b', 'a']
    assert list(line.get_xdata()) == [1, 2, 3] and list(line.get_ydata())[1:] == [6, 1]
    assert math.isnan(line.get_ydata()[0]) and list(other.get_ydata()) == [3]
    assert np.allclose(bars.get_segments()[1], [[2, 6 - math.sqrt(2)], [2, 6 + math.sqrt(2)]])


# ---- the bar ----

def test_a_bar_on_a_terminal_and_none_in_a_file(tmp_path, train_here, capsys):
    """What stays on the terminal are the lines of the file."""
    train_here(tmp_path / 'file', '--max_iters=4')
    plain = capsys.readouterr()
    with terminal() as texts:
        train_here(tmp_path / 'file', '--max_iters=6')
        train_here(tmp_path / 'terminal', '--max_iters=4')
    bars = ''.join(texts).partition('continuing')[2].partition('step 0: ')
    assert re.search(r'4/6 \[.*<.*step/s, loss=\d\.\d+, lr=0\.0', bars[0]) and re.search(r'0/4 \[', bars[2])

    def losses(lines):
        return [line.partition(', ')[0] for line in lines if line.startswith('step ')]
    assert losses(plain.out.splitlines()) == losses(seen(texts))[-6:] and not plain.err
    assert not seen(texts)[-1].strip()


@pytest.mark.parametrize('name, flops', [
    ('NVIDIA H200', 989e12), ('NVIDIA H200 NVL', 835e12), ('NVIDIA H100 80GB HBM3', 989e12),
    ('NVIDIA H100 PCIe', 756e12), ('NVIDIA A100-SXM4-80GB', 312e12), ('NVIDIA A100-PCIE-40GB', 312e12),
    ('NVIDIA A100 80GB PCIe', 312e12), ('NVIDIA L40', None), ('NVIDIA H200 MIG 1g.18gb', None)])
def test_peaks_are_known_by_the_whole_name(name, flops, monkeypatch):
    monkeypatch.setattr(source, 'device_name', lambda device: name)
    assert source.peak_flops(Runtime(CPU, torch.bfloat16)) == flops
    assert source.peak_flops(Runtime(CPU)) is None      # float32


# ---- resume ----

GAU = ['--attention=gau', '--position=rope', '--key_size=8', '--n_layer=3']
SYSTEMS = {                                             # name: knobs
    **{name: [f'--attention={name}', f'--position={ALLOWED_POSITIONS.get(name, ["absolute"])[0]}']
       for name in ATTENTION if name != 'gau'},
    **{f'gau {name}': [*GAU, f'--normaliser={name}'] for name in NORMALISER},
    **{f'pairwise {name}': ['--attention=pairwise', f'--position={name}'] for name in POSITION},
    'roformer_v2': ['--position=rope', '--norm=rms', '--bias=False', '--lm_head=decoder'],
    'xlnet plm': ['--attention=xlnet', '--position=none', '--objective=plm'],
    'recomputed': ['--attention=shatter', '--position=none', '--recompute=True'],
}


@pytest.mark.parametrize('system', mostly_slow(SYSTEMS, 'pairwise rope', 'gau softmax_plus', 'xlnet plm',
                                               'recomputed'))
def test_ten_steps_and_ten_resumed_are_twenty(system, tmp_path, train_here, capsys):
    """Dropout on, every logged loss, parameter and optimizer tensor, to the bit."""
    knobs = [*SYSTEMS[system], '--max_iters=20', '--eval_interval=5', '--milestones=10']
    train_here(tmp_path / 'whole', *knobs)
    (tmp_path / 'parts').mkdir()
    shutil.copy(tmp_path / 'whole' / 'ckpt_0000010.pt', tmp_path / 'parts')
    lines = (tmp_path / 'whole' / 'metrics.jsonl').read_text().splitlines()
    (tmp_path / 'parts' / 'metrics.jsonl').write_text('\n'.join(lines[:-3]) + '\n{"cut off')      # by a kill
    train_here(tmp_path / 'parts', *knobs, '--init_from=resume')
    assert 'ckpt_0000010.pt at step 10' in capsys.readouterr().out
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000020.pt', tmp_path / 'parts' / 'ckpt_0000020.pt')
    for kind, n in (('train', 20), ('val', 5)):
        assert metrics(tmp_path / 'whole', kind) == metrics(tmp_path / 'parts', kind)
        assert len(metrics(tmp_path / 'whole', kind)) == n
    losses = [line['loss'] for line in metrics(tmp_path / 'whole', 'val')]
    assert losses[-1] < losses[0] - 0.01                # and it learns


def test_a_finished_run_stays_as_it_is_and_a_longer_one_takes_its_knobs(tmp_path, train_here, capsys):
    train_here(tmp_path, '--max_iters=4')
    before = (tmp_path / 'ckpt_0000004.pt').read_bytes()
    train_here(tmp_path, '--max_iters=4')
    assert 'at step 4' in capsys.readouterr().out and (tmp_path / 'ckpt_0000004.pt').read_bytes() == before
    train_here(tmp_path, '--max_iters=6', '--seed=5')
    content = weights(tmp_path / 'ckpt_0000006.pt')
    assert content['step'] == 6 and content['config']['seed'] == 5
    train_here(tmp_path, '--max_iters=7', '--weight_decay=0.5', '--beta1=0.8', '--adam_eps=1e-3')
    group = weights(tmp_path / 'ckpt_0000007.pt')['optimizer']['param_groups'][0]
    assert (group['weight_decay'], group['betas'], group['eps']) == (0.5, (0.8, 0.999), 1e-3)
    assert len(json.loads((tmp_path / 'run.json').read_text())) == 4


def test_checkpoints_that_stay(tmp_path, train_here, capsys):
    train_here(tmp_path, '--max_iters=12', '--checkpoint_interval=2', '--milestones=3,4')
    assert list(source.checkpoints(tmp_path).items()) == [
        (step, f'{tmp_path}/ckpt_{step:07d}.pt') for step in (3, 4, 10, 12)]
    content = weights(tmp_path / 'ckpt_0000012.pt')
    assert set(content) == {'step', 'samples', 'model', 'optimizer', 'scaler', 'config', 'model_config',
                            'data', 'validated', 'argv', 'dtype'}
    assert content['samples'] == 12 * 8
    shutil.copy(tmp_path / 'ckpt_0000003.pt', tmp_path / 'ckpt_best.pt')        # a user's own
    train_here(tmp_path, '--max_iters=14', '--checkpoint_interval=1', '--keep_checkpoints=1')
    assert 'ckpt_0000012.pt at step 12' in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob('*.pt')) == [
        *(f'ckpt_{step:07d}.pt' for step in (3, 4, 14)), 'ckpt_best.pt']
    manifest = json.loads((tmp_path / 'run.json').read_text())[0]
    assert manifest['config']['max_iters'] == 12 and manifest['data'] == content['data'] and manifest['torch']


@pytest.mark.parametrize('dtype', mostly_slow(['bfloat16', 'float16'], 'float16'))
def test_half_precision_trains_and_resumes(dtype, tmp_path, train_here):
    knobs = [f'--dtype={dtype}', '--max_iters=6', '--milestones=3', '--dropout=0', '--attention_dropout=0']
    train_here(tmp_path / 'half', *knobs)
    train_here(tmp_path / 'full', *knobs, '--dtype=float32')
    half, full = (metrics(tmp_path / name)[-1]['loss'] for name in ('half', 'full'))
    assert half != full and abs(half - full) < 0.02
    (tmp_path / 'again').mkdir()
    shutil.copy(tmp_path / 'half' / 'ckpt_0000003.pt', tmp_path / 'again')
    train_here(tmp_path / 'again', *knobs, '--dtype=auto')             # keeps the checkpoint's
    same_checkpoint(tmp_path / 'half' / 'ckpt_0000006.pt', tmp_path / 'again' / 'ckpt_0000006.pt')


@pytest.mark.parametrize('knows', [True, False, None])
def test_automatic_precision_on_a_cpu(knows, monkeypatch):
    """bfloat16 from width 256 where torch (None: one that cannot tell) knows of the CPU's matrix units."""
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'amx_bf16': knows}, raising=False)
    if knows is None:
        monkeypatch.delattr(torch.cpu, 'get_capabilities')
    found = [source.choose_dtype('auto', CPU, width) for width in (128, 255, 256, 768)]
    assert found == [torch.float32, torch.float32] + 2 * [torch.bfloat16 if knows else torch.float32]
    assert source.choose_dtype('float32', CPU, 768) == torch.float32


def test_documents_and_whole_words_train(tmp_path, train_here):
    train_here(tmp_path, '--packing=documents', '--whole_word=true', '--max_iters=8', '--position=rope',
               '--schedule=cosine', '--grad_clip=0', '--eval_interval=8', '--learning_rate=1e-2')
    first, last = metrics(tmp_path, 'val')
    assert len(metrics(tmp_path)) == 8 and last['loss'] < first['loss']


def test_another_total_batch_goes_on_at_the_same_sample(corpus, meta, tmp_path, train_here, monkeypatch):
    """256 rows a step, then 128, cut off by a signal: no row is left out or comes twice."""
    drawn, indices = {}, Loader.indices

    def recorded(self, step):
        found = indices(self, step)
        if not self.limit:
            drawn[step, self.total_batch] = found
        return found
    monkeypatch.setattr(Loader, 'indices', recorded)
    train_here(tmp_path / 'run', '--max_iters=3', '--total_batch=256', '--n_layer=1')
    shutil.copytree(tmp_path / 'run', tmp_path / 'cut')
    knobs = ['--max_iters=12', '--total_batch=128', '--n_layer=1']
    train_here(tmp_path / 'run', *knobs)
    wanted = [(step, 256 if step < 3 else 128) for step in range(12)]
    n, samples = len(StreamRows(corpus, meta, 'train', 32)), 3 * 256 + 9 * 128
    order = [shuffled(np.arange(n), n, 1, epoch) for epoch in range(samples // n + 1)]
    assert np.concatenate([drawn[key] for key in wanted]).tolist() == np.concatenate(order)[:samples].tolist()
    assert set(drawn) - {(3, 256)} == set(wanted)
    assert weights(tmp_path / 'run' / 'ckpt_0000012.pt')['samples'] == samples
    train_here(tmp_path / 'cut', *knobs, signal_at=9, status=128 + signal.SIGTERM)
    train_here(tmp_path / 'cut', *knobs)
    same_checkpoint(tmp_path / 'run' / 'ckpt_0000012.pt', tmp_path / 'cut' / 'ckpt_0000012.pt')


DAMAGE = {'cut off': b'{"kind": "train", "st', 'bytes': bytes(range(256)), 'a number': b'3\n',
          'a list': b'[]\n', 'no step': b'{"kind": "train"}\n',
          'text for a step': b'{"kind": "val", "step": "x"}\n',
          'deep': b'[' * 100_000 + b'\n', 'empty': b''}


@pytest.mark.parametrize('damage', mostly_slow(DAMAGE, 'text for a step', 'deep'))
def test_damaged_logs_stop_no_run(damage, tmp_path, train_here):
    train_here(tmp_path, '--max_iters=2')
    lines = (tmp_path / 'metrics.jsonl').read_bytes()
    (tmp_path / 'metrics.jsonl').write_bytes(DAMAGE[damage] + b'\n' + lines)
    (tmp_path / 'run.json').write_bytes(DAMAGE[damage])
    train_here(tmp_path, '--max_iters=3')
    assert [line['step'] for line in metrics(tmp_path)] == [1, 2, 3]
    launches = json.loads((tmp_path / 'run.json').read_text())
    assert [launch['config']['max_iters'] for launch in launches] == [3]


def test_a_long_warmup_is_shortened_with_one_line(tmp_path, train_here, capsys):
    train_here(tmp_path, '--max_iters=20', '--warmup_iters=10000', '--schedule=constant')
    assert 'warmup_iters=10000 is longer than the run: 2 of its 20 steps warm up\n' in capsys.readouterr().err
    assert [line['lr'] for line in metrics(tmp_path)][:3] == [0.0005, 0.001, 0.001]


# ---- what the host reads ----

class Reads(TorchDispatchMode):
    """Appends 'read' to `events` at each item(), bool() or float() of a tensor."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.events.append('read')
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize('dtype', mostly_slow(['float32', 'bfloat16', 'float16'], 'float32', 'float16'))
@pytest.mark.parametrize('interval', mostly_slow([1, 4], 4))
def test_the_host_reads_the_device_where_it_logs_alone(interval, dtype, tmp_path, train_here, monkeypatch):
    events = []

    def counted(method):
        def call(self, *arguments, **keywords):
            events.append('read')
            return method(self, *arguments, **keywords)
        return call
    for name in ('tolist', 'numpy', 'cpu'):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    monkeypatch.setattr(Runtime, 'sum', lambda self, *numbers: list(map(float, numbers)))       # of the host
    monkeypatch.setattr(source, 'seed_step', lambda *arguments: events.append('step'))
    with Reads(events):
        train_here(tmp_path, '--max_iters=12', f'--log_interval={interval}', f'--dtype={dtype}')
    steps = ' '.join(events).split('step')[1:]          # what was read in each step
    assert [bool(read.strip()) for read in steps] == [step % interval == 0 for step in range(1, 13)]


# ---- two processes ----

EQUAL = ['--max_iters=6', '--dropout=0', '--attention_dropout=0', '--learning_rate=1e-4',
         '--packing=documents', '--validation=tiny']    # its own corpus once more
EIGHT = ['--max_iters=8', '--milestones=4']
CASES = {                                               # name: knobs, what befalls a rank
    'two': (EQUAL, None), 'both': ([*EQUAL, '--batch_size=2'], None), 'whole': (EIGHT, None),
    'parts': (EIGHT, 'start'), 'cut': (EIGHT, 'signal'),
    'nan': (['--max_iters=20', '--log_interval=4'], 'nan'),
    'inf': (['--max_iters=20', '--log_interval=4', '--checkpoint_interval=3'], 'inf'),
    'apart': (['--max_iters=4'], 'folder'), 'late': (['--max_iters=8'], 'validation'),
    'not prepared': (['--dataset=fineweb'], None),
}


def befall(kind, rank, folder, patch):
    """What happens to one of two ranks in a case."""
    if kind == 'start' and rank == 0:
        (folder / 'parts').mkdir()
        shutil.copy(folder / 'whole' / 'ckpt_0000004.pt', folder / 'parts')
    if kind == 'signal' and rank == 1:
        interrupt(4, patch)
    if kind == 'validation' and rank == 0:              # rank 1 has no rows in it
        patch.setattr(source, 'token_losses', lambda *arguments: signal.raise_signal(signal.SIGTERM) or
                      token_losses(*arguments))
    if kind in ('nan', 'inf') and rank == 1:
        harm(5, float(kind), patch)
    if kind == 'folder' and rank == 1:                  # a machine with a disk of its own
        patch.setattr(source, 'checkpoints', lambda out_dir: {3: 'out/ckpt_0000003.pt'})


def interrupt(step, patch, number=signal.SIGTERM):
    seed_step = source.seed_step

    def signalled(seed, now, runtime):
        if now == step:
            signal.raise_signal(number)
        seed_step(seed, now, runtime)
    patch.setattr(source, 'seed_step', signalled)


def harm(step, value, patch):
    batch = Loader.batch

    def harmed(self, now):
        found = batch(self, now)
        if not self.limit and now == step:
            found['weights'] = found['weights'] * np.float32(value)
        return found
    patch.setattr(Loader, 'batch', harmed)


def twin(corpus, folder, ports):
    """All CASES in this process, one of two; torchrun starts it once for the fixture `pairs`."""
    rank, defaults = int(os.environ['RANK']), {name: getattr(source, name) for name in knobs_of(source)}
    os.environ.pop('TORCHELASTIC_USE_AGENT_STORE')      # a group and a store for each case
    for (name, (knobs, kind)), port in zip(CASES.items(), ports, strict=True):
        os.environ['MASTER_PORT'] = port
        vars(source).update(defaults)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source, 'plot_losses', lambda *arguments: None)
            patch.setattr(source, 'leave', lambda runtime, status=0: sys.exit(status))
            patch.setattr(sys, 'argv', ['train.py', *tiny(corpus, folder / name), *knobs])
            befall(kind, rank, folder, patch)
            try:
                source.main()
                end = 'returned'
            except UserError as error:
                end = str(error)
            except SystemExit as error:
                end = f'finished with {error.code}'
        (folder / f'{name}.{rank}').write_text(end)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.fixture(scope='module')
def pairs(corpus, tmp_path_factory):
    """(folder, {case: how each rank ended}) of two gloo processes."""
    folder = tmp_path_factory.mktemp('pairs')
    done = torchrun(os.path.abspath(__file__), corpus, str(folder), *(str(free_port()) for _ in CASES))
    assert done.returncode == 0, done.stderr
    return folder, {name: [(folder / f'{name}.{rank}').read_text() for rank in range(2)] for name in CASES}


def free_port():
    with socket.socket() as server:
        server.bind(('127.0.0.1', 0))
        return server.getsockname()[1]


def test_two_processes_equal_accumulation_equal_one(pairs, tmp_path, train_here):
    folder, ends = pairs
    assert ends['two'] == ends['both'] == ['finished with 0'] * 2
    train_here(folder / 'one', *EQUAL)
    train_here(folder / 'micro', *EQUAL, '--batch_size=3')
    for name in ('micro', 'two', 'both'):
        for kind in ('train', 'val'):
            for one, other in zip(*(metrics(folder / run, kind) for run in ('one', name)), strict=True):
                assert one['loss'] == pytest.approx(other['loss'], rel=1e-5)
                assert one['norm'] == other['norm'] or one['norm'] == pytest.approx(other['norm'], rel=1e-4)
        for key, value in weights(folder / 'one' / 'ckpt_0000006.pt')['model'].items():
            other = weights(folder / name / 'ckpt_0000006.pt')['model'][key]
            assert (value - other).abs().max() < 6e-5, (name, key)      # Adam's steps are 1e-4 each
        assert [line['tiny_loss'] for line in val_lines(folder / name)] == [
            line['loss'] for line in metrics(folder / name, 'val')]


def test_a_resumed_pair_of_processes_repeats_itself(pairs):
    folder, ends = pairs
    assert ends['whole'] == ends['parts'] == ['finished with 0'] * 2
    same_checkpoint(folder / 'whole' / 'ckpt_0000008.pt', folder / 'parts' / 'ckpt_0000008.pt')


def test_a_signal_to_one_rank_saves_and_ends_all(pairs):
    """In a step, and in the validation before the first one."""
    folder, ends = pairs
    for name, step in (('cut', 5), ('late', 0)):
        assert ends[name] == [f'finished with {128 + signal.SIGTERM}'] * 2
        assert weights(folder / name / f'ckpt_{step:07d}.pt')['step'] == step
    assert not weights(folder / 'late' / 'ckpt_0000000.pt')['validated']
    assert not metrics(folder / 'late', 'val')


@pytest.mark.parametrize('value', ['nan', 'inf'])
def test_what_is_not_finite_on_one_rank_ends_all_and_names_its_step(value, pairs):
    """Step 6 of rank 1 is harmed; the next look is at a save or a log line."""
    folder, ends = pairs
    line = 'loss or gradient norm of step 6 is not finite; no checkpoint has it; try a lower learning_rate'
    assert ends[value] == [f'{folder / value}: {line}'] * 2
    steps = list(source.checkpoints(folder / value))
    assert steps == {'nan': [], 'inf': [3]}[value]
    assert all(value.isfinite().all() for step in steps for value in
               weights(folder / 'inf' / f'ckpt_{step:07d}.pt')['model'].values())


def test_a_folder_that_machines_do_not_share_is_refused(pairs):
    ends = pairs[1]['apart']
    assert ends[0] == ends[1] and 'the newest checkpoint is ckpt_0000003.pt here and none there' in ends[0]
    assert 'out_dir must be a folder that all machines share' in ends[0]


@pytest.mark.parametrize('code', [0, 2, -signal.SIGINT])
def test_a_missing_corpus_is_made_on_the_way(code, corpus, tmp_path, train_here, monkeypatch, capsys):
    """With the price in a line; prepare_data.py says itself what is wrong."""
    commands = []

    def prepares(command):
        commands.append(command[2:])
        if not code:
            shutil.copytree(corpus, tmp_path / 'my data' / 'fineweb')
        return types.SimpleNamespace(returncode=code)
    monkeypatch.setattr(source.subprocess, 'run', prepares)
    monkeypatch.setattr(source, 'write_manifest', lambda *arguments: None)      # which runs git
    status = {0: None, 2: 2}.get(code, 128 + signal.SIGINT)
    train_here(tmp_path / 'out', 'config/base_pairwise.py', '--dataset=fineweb', '--max_iters=1',
               f'--data_dir={tmp_path}/my data', f'--out_dir={tmp_path}/out', status=status)
    assert commands == [['config/data_fineweb.py', f'--data_dir={tmp_path}/my data', '--part=0/1']]
    line, *rest = [line for line in capsys.readouterr().out.splitlines() if 'is missing; preparing' in line]
    for part in (f"first: python prepare_data.py config/data_fineweb.py '--data_dir={tmp_path}/my data'",
                 'GB to download', 'GB on disk', 'hours on one', '--max_documents=1', '--dataset=wikitext'):
        assert part in line and not rest


@pytest.mark.parametrize('knobs, message', [
    *((f'--dataset={name}', f'not prepared .*: run python prepare_data.py config/data_{name}.py')
      for name in ('oscar', 'clue', 'ptb')),
    ('--fill=a [MASK]', 'out: no checkpoint there'), ('--export=x', 'out: no checkpoint there')])
def test_what_is_not_made_on_the_way(knobs, message, tmp_path, train_here, monkeypatch):
    """Corpora of the user's own files; and none to look at a checkpoint."""
    monkeypatch.setattr(source.subprocess, 'run', None)
    with pytest.raises(UserError, match=message):
        train_here(tmp_path / 'out', '--dataset=fineweb', f'--data_dir={tmp_path}/data', knobs)


def test_several_processes_name_the_command_that_prepares(pairs):
    for end in pairs[1]['not prepared']:
        assert 'run first: python prepare_data.py config/data_fineweb.py --data_dir=' in end
        assert all(part in end for part in (' GB to download ', ' GB on disk and ', 'train.py --dataset=wik'))


LINGERS = """
import atexit, sys, threading, torch.distributed as dist, train
class Stuck:
    def __del__(self, wait=threading.Event().wait):
        wait()
stuck = Stuck()
runtime = train.join('cpu', 'float32')
atexit.register(sys.stdout.write, f'a hook of rank {runtime.rank}' + chr(10))
train.leave(runtime, 3)
"""


@pytest.mark.slow
def test_what_hangs_at_interpreter_shutdown_holds_no_process(tmp_path):
    (tmp_path / 'lingers.py').write_text(LINGERS)
    done = torchrun(str(tmp_path / 'lingers.py'), timeout=60, env={**os.environ, 'PYTHONPATH': ROOT})
    assert done.returncode != 0 and 'exitcode  : 3' in done.stderr
    assert sorted(done.stdout.splitlines()) == ['a hook of rank 0', 'a hook of rank 1']


# ---- signals ----

@pytest.mark.parametrize('number', mostly_slow([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGINT))
def test_a_signal_saves_after_its_step_and_nothing_is_lost(number, tmp_path, train_here, capsys):
    knobs = ['--max_iters=8', '--eval_interval=5']
    train_here(tmp_path / 'cut', *knobs, signal_at=4, number=number, status=128 + number)
    assert 'stopped by signal after step 5' in capsys.readouterr().err
    assert len(metrics(tmp_path / 'cut', 'val')) == 1 and len(source.checkpoints(tmp_path / 'cut')) == 1
    assert not weights(tmp_path / 'cut' / 'ckpt_0000005.pt')['validated']       # the next run makes up for it
    train_here(tmp_path / 'cut', *knobs)
    train_here(tmp_path / 'whole', *knobs)
    for kind in ('train', 'val'):
        assert metrics(tmp_path / 'cut', kind) == metrics(tmp_path / 'whole', kind)
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000008.pt', tmp_path / 'cut' / 'ckpt_0000008.pt')


def test_the_second_interrupt_ends_a_process_that_is_alone(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)    # as nohup does
        caught = source.catch_signals()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        assert caught == [signal.SIGINT] and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        monkeypatch.setenv('RANK', '0')
        caught = source.catch_signals()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert caught == [signal.SIGINT] * 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize('validation, last', [('', 6), ('other', 14)])
def test_a_signal_in_a_validation_ends_it(validation, last, two, tmp_path, train_here, monkeypatch):
    """In the second validation, in the second of four batches of the last corpus."""
    monkeypatch.setattr(source, 'EVAL_ROWS', 8)
    knobs = ['--max_iters=4', '--eval_interval=2', f'--data_dir={two}', f'--validation={validation}']
    calls = []

    def signalled(*arguments):
        calls.append(1)
        if len(calls) == last:
            signal.raise_signal(signal.SIGTERM)
        return token_losses(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(source, 'token_losses', signalled)
        train_here(tmp_path / 'cut', *knobs, status=128 + signal.SIGTERM)
    assert len(calls) == last and weights(tmp_path / 'cut' / 'ckpt_0000002.pt')['validated'] is False
    for name in ('cut', 'whole'):
        train_here(tmp_path / name, *knobs)
    assert val_lines(tmp_path / 'cut') == val_lines(tmp_path / 'whole')
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000004.pt', tmp_path / 'cut' / 'ckpt_0000004.pt')


def test_closed_output_ends_a_run_with_a_checkpoint(tmp_path, train_here, monkeypatch):
    """As in `python train.py ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, 'w') as closed, monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', closed)
        train_here(tmp_path, '--max_iters=4', status=128 + signal.SIGTERM)
    assert list(source.checkpoints(tmp_path)) == [0]
    train_here(tmp_path, '--max_iters=4')
    assert [line['step'] for line in metrics(tmp_path)] == [1, 2, 3, 4]


KILL = """
import sys
sys.path.insert(0, {root!r})
import os, signal, torch, configurator, train
save = torch.save
def killed(content, file):
    save(content, file)
    if content['step'] == 8:
        file.truncate(100)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
sys.argv[0] = 'train.py'
configurator.run(train.main)
"""


def test_a_kill_in_the_middle_of_a_save_loses_nothing(corpus, tmp_path, train_here):
    knobs = ['--max_iters=12', '--checkpoint_interval=4']
    (tmp_path / 'killed.py').write_text(KILL.format(root=ROOT))
    done = stage(str(tmp_path / 'killed.py'), *tiny(corpus, tmp_path / 'cut'), *knobs)
    assert done.returncode == -signal.SIGKILL
    assert list(source.checkpoints(tmp_path / 'cut')) == [4]
    assert os.path.exists(tmp_path / 'cut' / 'ckpt_0000008.pt.tmp')
    train_here(tmp_path / 'cut', *knobs)
    train_here(tmp_path / 'whole', *knobs)
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000012.pt', tmp_path / 'cut' / 'ckpt_0000012.pt')
    assert not glob.glob(str(tmp_path / 'cut' / '*.tmp'))


def test_a_second_run_in_a_folder_is_refused(tmp_path, train_here):
    tmp_path.joinpath('run').mkdir()
    with open(tmp_path / 'run' / 'lock', 'a') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match='run: in use by another run'):
            train_here(tmp_path / 'run', '--max_iters=2')
        assert os.listdir(tmp_path / 'run') == ['lock']
    train_here(tmp_path / 'run', '--max_iters=2')       # the system took the lock back


def test_what_the_step_and_the_seed_change(corpus, meta):
    rows, masker = StreamRows(corpus, meta, 'train', 32), Masker(meta, 32, 0.15)
    draws = [masker.draw(seed, step, 4) for seed, step in ((1, 0), (1, 1), (2, 0), (1, 0))]
    for other in draws[1:3]:
        assert all((a != b).any() for a, b in zip(draws[0], other, strict=True))
    assert all((a == b).all() for a, b in zip(draws[0], draws[3], strict=True))
    numbers = set()
    for seed, step, rank in ((1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0)):
        source.seed_step(seed, step, Runtime(CPU, rank=rank))
        numbers.add(torch.rand(()).item())
    assert len(numbers) == 4
    first = Loader(rows, masker, 1, 4, slice(0, 4))                 # a row is masked anew in each epoch
    n = len(rows)
    later = next(step for step in range(n // 4 + 1, n) if set(first.indices(step)) & set(first.indices(0)))
    index = (set(first.indices(later)) & set(first.indices(0))).pop()
    masks = [first.batch(step)['positions'][list(first.indices(step)).index(index)] for step in (0, later)]
    assert set(masks[0]) != set(masks[1])


def test_seed_leaves_validation_alone_and_knobs_reach_the_optimizer(tmp_path, train_here):
    changes = {'one': [], 'clip': ['--grad_clip=1e-9', '--adam_eps=1e-3'], 'seed': ['--seed=2'],
               'free': ['--grad_clip=0', '--adam_eps=1e-3'], 'slow': ['--learning_rate=1e-12']}
    for name, knobs in changes.items():
        train_here(tmp_path / name, '--max_iters=4', '--warmup_iters=2', '--schedule=constant', *knobs)
    rate = [line['lr'] for line in metrics(tmp_path / 'one')]
    assert rate == [0.0005, 0.001, 0.001, 0.001]
    assert weights(tmp_path / 'one' / 'ckpt_0000004.pt')['optimizer']['param_groups'][0]['lr'] == 0.001
    first, last = ({name: metrics(tmp_path / name, 'val')[i]['loss'] for name in changes} for i in (0, -1))
    assert abs(first['slow'] - last['slow']) < 1e-6 < first['one'] - last['one']
    assert abs(first['clip'] - last['clip']) < 1e-4 < first['free'] - last['free']
    assert first['one'] == first['slow'] != first['seed']
    shutil.copytree(tmp_path / 'one', tmp_path / 'other')           # the weights of seed 1 under seed 2
    train_here(tmp_path / 'other', '--max_iters=5', '--seed=2', '--learning_rate=1e-12')
    assert metrics(tmp_path / 'other', 'val')[-1]['loss'] == pytest.approx(last['one'], abs=1e-6)


def test_fp16_gives_up_when_no_scale_helps(tmp_path, train_here, monkeypatch):
    """Each step halves the scale, from 65,536 on; the refusal names fp16, not a step."""
    make_optimizer = source.make_optimizer

    def hooked(model, *arguments):
        model.head.bias.register_hook(lambda gradient: gradient * math.inf)
        return make_optimizer(model, *arguments)
    monkeypatch.setattr(source, 'make_optimizer', hooked)
    with pytest.raises(UserError, match='float16 found no scale with finite gradients up to step 20'):
        train_here(tmp_path, '--max_iters=60', '--dtype=float16', '--log_interval=10')
    assert len(metrics(tmp_path)) == 1 and 'NaN' not in (tmp_path / 'metrics.jsonl').read_text()


@pytest.mark.parametrize('value', mostly_slow([math.nan, math.inf], math.inf))
@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_what_is_not_finite_is_refused_at_the_next_look(dtype, value, tmp_path, train_here, monkeypatch):
    """Step 6 is harmed, the look before the save of step 10 finds it."""
    harm(5, value, monkeypatch)
    with pytest.raises(UserError, match='loss or gradient norm of step 6 is not finite'):
        train_here(tmp_path, '--max_iters=20', '--checkpoint_interval=5', '--log_interval=100',
                   f'--dtype={dtype}')
    assert list(source.checkpoints(tmp_path)) == [5]


@pytest.mark.parametrize('place', ['one entry', 'the squares'])
def test_an_infinite_gradient_norm_is_refused(place, tmp_path, train_here, monkeypatch):
    """One infinite entry, of which clipping makes NaN; or a norm that overflows, of which it makes zeros."""
    make_optimizer = source.make_optimizer

    def hooked(model, *arguments):
        size = model.encoder.token.weight.shape
        extra = torch.full(size, 1e25) if place == 'the squares' else torch.zeros(size)
        extra[7] += math.inf if place == 'one entry' else 0
        model.encoder.token.weight.register_hook(lambda gradient: gradient + extra)
        return make_optimizer(model, *arguments)
    monkeypatch.setattr(source, 'make_optimizer', hooked)
    with pytest.raises(UserError, match='loss or gradient norm of step 1 is not finite'):
        train_here(tmp_path, '--max_iters=4', '--log_interval=4')
    assert not source.checkpoints(tmp_path)


# ---- checkpoints under damage ----

@pytest.fixture(scope='module')
def finished(corpus, tmp_path_factory):
    """Folder of a finished run with two checkpoints, of `original` + `absolute`."""
    folder = tmp_path_factory.mktemp('finished')
    run_here(corpus, folder, '--max_iters=8', '--checkpoint_interval=4')
    return folder


def flip(content, position):
    changed = bytearray(content)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def test_damage_is_found_or_changes_nothing(finished, tmp_path):
    """30 flipped bits in the whole file and 30 in what describes its parts, 10 truncations, and worse."""
    path = tmp_path / 'ckpt_0000008.pt'
    whole = (finished / 'ckpt_0000008.pt').read_bytes()
    good, rng = source.read_checkpoint(str(finished / 'ckpt_0000008.pt')), random.Random(1)
    directory = 8 * whole.index(b'PK\1\2')
    damaged = [whole[:length] for length in (0, 1, 70, len(whole) // 2, len(whole) - 1)]
    damaged += [whole[:rng.randrange(len(whole))] for _ in range(10)] + [bytes(len(whole))]
    found = [refusal(path, content) for content in damaged]
    assert all(found), found
    flipped = [flip(whole, rng.randrange(8 * len(whole))) for _ in range(30)]
    flipped += [flip(whole, rng.randrange(directory, 8 * len(whole))) for _ in range(30)]
    found = [refusal(path, content, good) for content in flipped]
    assert sum(map(bool, found)) > 30                   # the others are equal: padding, dates, attributes


def test_another_file_of_torch_is_one_line(finished, tmp_path):
    """A list, and what finetune.py writes, which has no pretraining head."""
    content = source.read_checkpoint(str(finished / 'ckpt_0000008.pt'))
    tuned = {**content, 'config': {'tokenizer': 'data/tiny'}}
    for number, (thing, said) in enumerate([([1, 2], 'earlier version'), (tuned, 'fine-tuned')]):
        torch.save(thing, tmp_path / f'{number}.pt')
        with pytest.raises(UserError, match=f'{number}.pt: .*{said}'):
            source.load_pretrained(str(tmp_path / f'{number}.pt'))


def refusal(path, content, good=None):
    """The UserError with which a checkpoint of these bytes is refused; '' if it is `good` all the same."""
    path.write_bytes(content)
    try:
        read = source.read_checkpoint(str(path))
    except UserError as error:
        assert 'ckpt_0000008.pt' in str(error) and '\n' not in str(error)
        return str(error)
    read, good = (tree_leaves(content) for content in (read, good))
    for one, other in zip(read, good, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other
    return ''


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(finished, tmp_path, train_here, capsys):
    shutil.copytree(finished, tmp_path / 'run')
    whole = (tmp_path / 'run' / 'ckpt_0000008.pt').read_bytes()
    (tmp_path / 'run' / 'ckpt_0000008.pt').write_bytes(flip(whole, 80_000))
    train_here(tmp_path / 'run', '--max_iters=8', '--checkpoint_interval=4')
    said = capsys.readouterr()
    assert 'ckpt_0000008.pt: damaged' in said.err and 'ckpt_0000004.pt at step 4' in said.out
    same_checkpoint(finished / 'ckpt_0000008.pt', tmp_path / 'run' / 'ckpt_0000008.pt')
    for path in source.checkpoints(tmp_path / 'run').values():
        with open(path, 'w'):
            pass
    with pytest.raises(UserError, match='every checkpoint is damaged'):
        source.newest_checkpoint(str(tmp_path / 'run'))


def test_the_identity_of_a_checkpoint_is_that_of_its_content(finished, tmp_path):
    path = str(finished / 'ckpt_0000008.pt')
    content = source.read_checkpoint(path)
    source.write_checkpoint(str(tmp_path / 'same.pt'), content)
    assert source.checkpoint_identity(str(tmp_path / 'same.pt')) == source.checkpoint_identity(path)
    content['model']['encoder.token.weight'][3, 5] += 1e-6
    source.write_checkpoint(str(tmp_path / 'other.pt'), content)
    assert source.checkpoint_identity(str(tmp_path / 'other.pt')) != source.checkpoint_identity(path)
    with pytest.raises(UserError, match='no.pt: missing'):
        source.checkpoint_identity('no.pt')


def test_a_checkpoint_of_an_earlier_version_is_refused(finished, tmp_path, train_here):
    content = weights(finished / 'ckpt_0000008.pt')
    del content['model_config']['lm_head']
    source.write_checkpoint(str(tmp_path / 'old.pt'), content)
    for knobs in ([], ['--fill=a [MASK]']):
        with pytest.raises(UserError, match='old.pt: of an earlier version'):
            train_here(tmp_path / 'run', f'--init_from={tmp_path / "old.pt"}', '--max_iters=8', *knobs)


def test_a_hostile_checkpoint_runs_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return open, (str(tmp_path / 'harm'), 'w')

    source.write_checkpoint(str(tmp_path / 'ckpt_0000001.pt'), {'step': Hostile()})
    with pytest.raises(UserError, match='ckpt_0000001.pt'):
        source.read_checkpoint(str(tmp_path / 'ckpt_0000001.pt'))
    assert not (tmp_path / 'harm').exists()


def test_an_unwritable_folder_is_one_line(tmp_path):
    with pytest.raises(UserError, match='missing/x.pt: cannot be written: No such file'):
        source.write_checkpoint(str(tmp_path / 'missing' / 'x.pt'), {'step': 1})


class Lost:
    def __reduce__(self):
        raise RuntimeError('CUDA error: unspecified launch failure')


def test_an_error_of_the_device_is_not_told_as_a_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match='^CUDA error'):
        source.write_checkpoint(str(tmp_path / 'x.pt'), {'step': 1, 'model': Lost()})
    assert not os.listdir(tmp_path)


# ---- what is refused ----

@pytest.mark.parametrize('knobs, words', [
    (['--n_layer=3'], 'the model differs: n_layer is 2 there and 3 here'),
    (['--attention=shared'], "attention is 'original' there and 'shared' here"),
    (['--attention=xlnet', '--position=none'], "attention is 'original' there and 'xlnet' here"),
    (['--block_size=64'], 'block_size is 32 there and 64 here'),
    (['--init_from=scratch'], 'holds ckpt_0000008.pt'),
    (['--init_from=some/bert'], 'some/bert: neither a checkpoint nor a BERT: '),
    (['--init_from=no.pt'], 'no.pt: cannot be read: No such file'),
    (['--fill=no mask here'], "fill='no mask here': put a [MASK]"),
    (['--fill=' + '[MASK] ' * 31], 'tokens; the model reads at most 30'),
])
def test_a_checkpoint_that_does_not_fit_is_refused(knobs, words, finished, train_here):
    with pytest.raises(UserError) as error:
        train_here(finished, '--max_iters=8', *knobs)
    assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('part', ['tokenizer', 'train', 'val'])
def test_other_data_is_refused_by_name(part, finished, corpus, train_here, monkeypatch):
    meta = load_meta(corpus)
    meta['identity'][part] = 'another'
    monkeypatch.setattr(source, 'load_meta', lambda folder: meta)
    with pytest.raises(UserError, match=f'the data differs: {part} is '):
        train_here(finished, '--max_iters=8')


@pytest.mark.parametrize('knob, words', [
    ('--total_batch=0', 'total_batch=0: must be at least 1'), ('--batch_size=0', 'batch_size=0: must be'),
    ('--learning_rate=0', 'learning_rate=0.0: must be at least 1e-12'), ('--beta2=1', 'beta2=1.0: must be'),
    ('--weight_decay=-1', 'weight_decay=-1.0: must be at'), ('--seed=-1', 'seed=-1: must be at least 0'),
    (f'--seed={2 ** 63}', 'and at most'), ('--device=meta', "device='meta'"), ('--out_dir=', "out_dir=''"),
    ('--warmup_iters=-1', 'warmup_iters=-1: must be at least 0'), ('--schedule=x', 'linear, cosine'),
    ('--min_lr=1', 'min_lr=1.0: must be at most learning_rate=0.001'), ('--dropout=1', 'dropout=1.0: must'),
    ('--n_head=3', 'n_embd=16: must be a multiple of n_head=3'), ('--attention=x', 'original, symmetric'),
    ('--position=x', 'absolute, none, rope, rpe, rab'), ('--objective=x', 'choose one of mlm, plm'),
    ('--objective=plm', "attention='original': only attention='xlnet'"), ('--norm=x', 'layer, rms'),
    ('--attention=shatter', "position='absolute': cannot be combined with attention='shatter'; choose none"),
    ('--recompute=True', "recompute=True: only attention='part_mask' or"), ('--lm_head=x', 'bert, decoder'),
    ('--normaliser=x', 'softmax, softmax_plus,'), ('--relu_scale=x', 'n2, n, ns, s2'),
    ('--packing=x', 'stream, documents'), ('--dtype=x', 'float32'),
    ('--device=x', "device='x'"), ('--device=cuda', "device='cuda'"), ('--compile=x', 'auto, true, false'),
    ('--block_size=4', 'block_size=4: must be at least 8'), ('--mask_fraction=1', 'mask_fraction=1.0: must'),
    ('--dataset=none', 'none: not prepared'), ('--validation=none', 'none: not prepared'),
    ('--pair_rank=3', "pair_rank=3: only attention='pairwise'"),
    ('--init_from=some/bert', 'neither a checkpoint nor a BERT'),
    ('--init_from=resume', "init_from='resume': no checkpoint in"), ('--log_interval=0', 'log_interval=0'),
    ('--timeout=-1', 'timeout=-1: must be'), ('--device=tpu', 'choose auto, cpu, cuda, mps or xla'),
    ('--zero=true', "no such key 'zero'"),
])
def test_knobs_out_of_range(knob, words, tmp_path, train_here):
    """In this process: the one line and the status of a stage are what test_configurator sees of it."""
    if knob == '--device=cuda' and torch.cuda.is_available():
        pytest.skip('there is a CUDA device')
    with pytest.raises(UserError) as error:
        train_here(tmp_path, '--max_iters=8', knob)
    assert words in str(error.value) and '\n' not in str(error.value)


def test_a_shard_of_another_size_is_named(corpus, meta, tmp_path, train_here):
    shutil.copytree(corpus, tmp_path / 'tiny')
    stem = meta['splits']['train'][0]['stem']
    os.truncate(tmp_path / 'tiny' / f'{stem}.bin', 1000)
    with pytest.raises(UserError, match=f'{stem}.bin: 1000 bytes, should have'):
        train_here(tmp_path / 'run', '--max_iters=1', f'--data_dir={tmp_path}')
    rows = StreamRows(str(tmp_path / 'tiny'), meta, 'train', 32)
    with pytest.raises(UserError, match=f'{stem}.bin: truncated'):
        rows.get([40])
    with open(tmp_path / 'tiny' / f'{stem}.bin', 'r+b') as file:
        file.write(b'\xff\xff')
    with pytest.raises(UserError, match=f'{stem}.bin: .*ids beyond 400'):
        rows.get([0])


@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=pytest.mark.slow)])
def test_compiled_training_equals_eager(backend, tmp_path, train_here, monkeypatch, capsys):
    monkeypatch.setattr(torch, 'compile', functools.partial(torch.compile, backend=backend))
    for name in ('true', 'false'):
        train_here(tmp_path / name, '--max_iters=3', '--n_layer=1', '--dropout=0', '--attention_dropout=0',
                   f'--compile={name}')
    assert 'torch.compile fails' not in capsys.readouterr().err
    for one, other in zip(metrics(tmp_path / 'true'), metrics(tmp_path / 'false'), strict=True):
        assert one['loss'] == pytest.approx(other['loss'], rel=1e-4)


def test_compile_falls_back_with_one_line(monkeypatch, capsys, corpus, meta):
    monkeypatch.setattr(torch, 'compile', lambda model: lambda **part: 1 / 0)
    loader = Loader(StreamRows(corpus, meta, 'train', 32), Masker(meta, 32, 0.15), 1, 4, slice(0, 4))
    model = MaskedLM(EncoderConfig(400, 32, 1, 2, 16, 32))
    assert source.compiled(model, 'true', loader.batch(0), 4, Runtime(CPU)) is model
    assert capsys.readouterr().err == 'torch.compile fails here, running without it: division by zero\n'


# ---- fill, export, BERT ----

def test_fill_prints_five_predictions_for_each_mask(finished, corpus, meta, train_here, capsys):
    train_here(finished, '--fill=the [MASK] of a [MASK]')
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'the [MASK] of a [MASK]' and len(lines) == 3
    tokenizer, special = load_tokenizer(corpus), meta['special']
    content = source.read_checkpoint(str(finished / 'ckpt_0000008.pt'))
    model = MaskedLM(EncoderConfig(**content['model_config'])).eval()
    model.load_state_dict(content['model'])
    mask = special['mask']
    first, second = tokenizer.encode(['the', ' of a'])
    ids = [special['cls'], *first, mask, *second, mask]
    logits = model(torch.tensor([[*ids, special['sep']]]))[0]
    masks = [i for i, token in enumerate(ids) if token == mask]
    for line, where in zip(lines[1:], masks, strict=True):
        best = logits[where].softmax(-1).topk(5)
        best = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        words = [(tokenizer.pieces[i].strip('\u2581') or '\u2581', p) for p, i in best]
        assert line.strip() == '   '.join(f'{word} {p:.3f}' for word, p in words)


def test_text_is_filled_in_under_any_locale(finished, corpus):
    """A real process: what Python makes of its arguments and streams is decided at its start."""
    words = ['train.py', *tiny(corpus, finished), '--fill=\u4e2d [MASK] \u03b1']
    ascii_alone = {'LC_ALL': 'C', 'PYTHONIOENCODING': 'ascii', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    done = real_stage(*words, env={**os.environ, **ascii_alone})
    assert done.returncode == 0 and done.stdout.startswith('\\u4e2d [MASK] \\u03b1\n'), done


class Documents:
    """Rows of a WordPiece vocabulary, as DocumentRows gives them."""

    def __init__(self, tokenizer, texts):
        self.rows = [[0, *ids] for ids in tokenizer.encode(texts)]

    def __len__(self):
        return len(self.rows)

    def get(self, indices):
        return np.array([self.rows[index] for index in indices])


@pytest.fixture
def chinese(tmp_path):
    pytest.importorskip('tokenizers')
    ideographs = map(chr, range(0x4e00, 0x4e40))
    words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '.', '\u3002', '\uff0c', 'of', '##of',
             *ideographs]
    (tmp_path / 'vocab.txt').write_text('\n'.join(words), encoding='utf-8')
    return WordPieceTokenizer(str(tmp_path), {'lower_case': True})


def test_a_repeated_or_closed_class_word_is_masked_and_ranked(chinese, capsys):
    """Chinese sentences end in their own full stop."""
    ideographs = ''.join(map(chr, range(0x4e00, 0x4e14)))
    repeats, closed = f'{ideographs}{ideographs[5]}\u3002', f'{ideographs[:7]}of{ideographs[7:9]}.'
    model = MaskedLM(EncoderConfig(chinese.vocab_size, 32, 1, 2, 16, 32))
    for sentence, before, word in ((repeats, ideographs, ideographs[5]), (closed, ideographs[:7], 'of')):
        documents = Documents(chinese, [sentence + ideographs] * 3)
        source.show_sentences(model, documents, chinese, chinese.word_starts(), 2)
        rule, *found = capsys.readouterr().out.strip().split('\n\n')
        assert 'repeats' in rule and len(found) == 2
        text, best, truth = found[0].splitlines()
        assert text.replace(' ', '') == sentence.replace(before + word, f'{before}[MASK]')
        first, second = chinese.encode([before, text.split('[MASK]')[1]])
        ids = [chinese.special[name] for name in ('cls', 'mask', 'sep')]
        logits = model(torch.tensor([[ids[0], *first, ids[1], *second, ids[2]]]))[0, len(first) + 1].tolist()
        rank = sorted(logits, reverse=True).index(logits[chinese.encode([word])[0][0]]) + 1
        assert truth == f'    masked: {word}, rank {rank} of {chinese.vocab_size}' and len(best.split()) == 10


def test_no_sentence_is_said_in_one_line(chinese, capsys):
    """No full stop, one too early or inside a word, no word, none repeated or of a closed class."""
    twice = 2 * ''.join(map(chr, range(0x4e00, 0x4e0a)))
    documents = Documents(chinese, [twice, f'{twice[7:13]}\u3002 of', f'{twice}.', '\uff0c' * 9 + '\u3002 of',
                                    f'{twice[:10]}. of', f'{twice[:13]}of. of'])
    documents.rows[2].append(chinese.pieces.index('##of'))
    model = MaskedLM(EncoderConfig(chinese.vocab_size, 16, 1, 2, 16, 32))      # too short for the last
    source.show_sentences(model, documents, chinese, chinese.word_starts(), 2)
    assert capsys.readouterr().out.splitlines()[2:] == [
        'no other document of the validation split begins with a sentence to fill in']


def test_sentences_are_looked_for_where_wanted_alone(tmp_path, train_here, monkeypatch, capsys):
    monkeypatch.setattr(source, 'show_sentences', lambda *arguments: print(arguments[-1], 'to fill in'))
    train_here(tmp_path, '--max_iters=1', '--fill_samples=0')
    assert 'to fill in' not in capsys.readouterr().out
    train_here(tmp_path, '--max_iters=2', '--fill_samples=2')
    assert '2 to fill in' in capsys.readouterr().out


def test_export_loads_in_transformers_and_comes_back(finished, tmp_path, train_here):
    transformers = pytest.importorskip('transformers')
    train_here(finished, f'--export={tmp_path / "bert"}')
    assert os.path.exists(tmp_path / 'bert' / 'sentencepiece.model')
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / 'bert').eval()
    content = source.read_checkpoint(str(finished / 'ckpt_0000008.pt'))
    ours = MaskedLM(EncoderConfig(**content['model_config'])).eval()
    ours.load_state_dict(content['model'])
    ids = torch.randint(5, 400, (2, 32))
    assert (theirs(ids).logits - ours(ids)).abs().max() < 1e-4
    train_here(tmp_path / 'tuned', f'--init_from={tmp_path / "bert"}', '--max_iters=1', '--warmup_iters=0',
               '--learning_rate=1e-12')
    back = weights(tmp_path / 'tuned' / 'ckpt_0000001.pt')['model']
    assert all((back[name] - value).abs().max() < 1e-9 for name, value in content['model'].items())
    with pytest.raises(UserError, match='n_layer is 2 there and 3 here'):
        train_here(tmp_path / 'other', f'--init_from={tmp_path / "bert"}', '--n_layer=3')


def test_export_refuses_what_bert_cannot_hold(tmp_path, train_here):
    train_here(tmp_path, '--max_iters=2', '--position=rab')
    with pytest.raises(UserError, match="position='rab'"):
        train_here(tmp_path, f'--export={tmp_path / "bert"}', '--position=rab')
    assert not (tmp_path / 'bert').exists()


def test_a_permuted_model_fills_in_and_is_not_exported(tmp_path, train_here, capsys):
    knobs = SYSTEMS['xlnet plm']
    train_here(tmp_path, '--max_iters=2', *knobs)
    capsys.readouterr()
    train_here(tmp_path, *knobs, '--fill=the [MASK] of a [MASK]')
    assert len(capsys.readouterr().out.splitlines()) == 3
    with pytest.raises(UserError, match="attention='xlnet': no equivalent in transformers' BERT and"):
        train_here(tmp_path, *knobs, f'--export={tmp_path / "bert"}')
    content = source.read_checkpoint(str(tmp_path / 'ckpt_0000002.pt'))
    model = PermutationLM(EncoderConfig(**content['model_config']))
    model.load_state_dict(content['model'])
    with pytest.raises(UserError, match='objective is'):
        train_here(tmp_path, *knobs[:2])                # masked from permuted


@pytest.mark.slow
def test_predictions_of_a_trained_model_beat_chance(corpus, tmp_path, train_here):
    """600 steps on real text: below the unigram entropy, which bare frequencies cannot reach."""
    train_here(tmp_path, '--max_iters=600', '--seed=2', '--learning_rate=5e-3', '--warmup_iters=60',
               '--position=rope', '--n_head=2', '--n_embd=64', '--n_inner=128', '--total_batch=16',
               '--dropout=0', '--attention_dropout=0', '--log_interval=100', '--attention=pairwise',
               '--eval_samples=0')
    score = metrics(tmp_path, 'val')[-1]
    assert score['loss'] < load_meta(corpus)['unigram_entropy'] - 0.3 and score['accuracy'] > 0.1


if __name__ == '__main__':
    twin(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:])
