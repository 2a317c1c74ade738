"""train.py: batches, masks, resume, ranks, signals, checkpoints under damage, refusals, fill and export."""
import contextlib
import glob
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refused, stage, tiny, torchrun, train

import train as source
from configurator import UserError
from model import ALLOWED_POSITIONS, ATTENTION, NORMALISER, POSITION, EncoderConfig, MaskedLM, PermutationLM
from prepare_data import load_meta, load_tokenizer
from train import (
    OBJECTIVE,
    PACKING,
    SCHEDULE,
    DocumentRows,
    Loader,
    Masker,
    Permuter,
    Ranks,
    StreamRows,
    shuffled,
)


@pytest.fixture(scope='module')
def meta(corpus):
    return load_meta(corpus)


def split_ids(corpus, meta, split):
    """The documents of a split, in file order, read as prepare_data's format says."""
    documents = []
    for shard in meta['splits'][split]['shards']:
        ids = np.fromfile(os.path.join(corpus, shard['tokens']), meta['dtype']).astype(np.int64)
        starts = np.fromfile(os.path.join(corpus, shard['documents']), np.int64)
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
    assert one['step'] == other['step'] and one['best_loss'] == other['best_loss']


@pytest.fixture
def train_here(corpus, monkeypatch):
    """train.main() in this process, which is faster than a new one; what it changes is put back."""
    def main(out_dir, *knobs):
        monkeypatch.setattr(sys, 'argv', ['train.py', *tiny(corpus, out_dir), *knobs])
        for name in source.configure(dict(vars(source)), [])[0]:
            monkeypatch.setattr(source, name, getattr(source, name))    # back to the default afterwards
        source.main()
        monkeypatch.undo()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)


# ---- rows ----

def test_stream_rows_are_the_stream_cut(corpus, meta):
    rows = StreamRows(corpus, meta, 'train', 32)
    wanted = []
    for shard in split_ids(corpus, meta, 'train'):
        stream = np.concatenate(shard)
        wanted += [stream[i:i + 30] for i in range(0, len(stream) - 29, 30)]
    assert len(meta['splits']['train']['shards']) > 2 and len(rows) == len(wanted)
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
    parts = [Loader(rows, masker, 1, 16, Ranks(rank, world).share(16)).batch(5) for rank in range(world)]
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
    word_start = np.fromfile(os.path.join(corpus, 'word_start.bin'), np.uint8)
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
    for shard in meta['splits']['train']['shards']:
        shard['words'] = shard['tokens'].replace('.bin', '.words')
        ids = np.fromfile(os.path.join(corpus, shard['tokens']), meta['dtype'])
        (ids % 3 == 0).astype(np.uint8).tofile(tmp_path / 'words' / shard['words'])
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
    os.truncate(tmp_path / 'words' / meta['splits']['train']['shards'][0]['words'], 5)
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
    rates = [source.rate_at(step, 1.0, 0.1, 10, 110, schedule) for step in range(110)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    middle, end = {'linear': (0.55, 0.109), 'cosine': (0.55, 0.1), 'constant': (1, 1),
                   'thirds': (0.28, 0.118)}[schedule]
    assert rates[60] == pytest.approx(middle) and rates[109] == pytest.approx(end, abs=1e-3)
    with pytest.raises(AssertionError):
        source.rate_at(111, 1.0, 0.1, 10, 110, schedule)


@pytest.mark.parametrize('attention', ATTENTION)
def test_decay_is_on_matrices_alone(attention):
    position = ALLOWED_POSITIONS.get(attention, ['absolute'])[0]
    model = MaskedLM(EncoderConfig(50, 8, 2, 4, 8, 16, attention=attention, position=position))
    optimizer = source.make_optimizer(model, 1e-3, (0.9, 0.999), 1e-8, 0.01, torch.device('cpu'))
    decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    for name, parameter in model.named_parameters():
        plain = name.endswith(('bias', 'diag')) or 'norm.' in name
        assert decay[id(parameter)] == (0 if plain else 0.01), name


def test_evaluation_equals_full_logits(corpus, meta):
    rows = StreamRows(corpus, meta, 'val', 32)
    loader = Loader(rows, Masker(meta, 32, 0.15), 0, 16, slice(0, 16), limit=40)
    model = MaskedLM(EncoderConfig(400, 32, 2, 2, 16, 32))
    scores = source.evaluate(model, loader, 5, Ranks(), torch.device('cpu'), torch.float32)
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
    'processes': ['--attention=shared'],                # the same through the command line
}


@pytest.mark.parametrize('system', SYSTEMS)
def test_ten_steps_and_ten_resumed_are_twenty(system, corpus, tmp_path, train_here, capsys):
    """Dropout on, every logged loss, parameter and optimizer tensor, to the bit."""
    knobs = [*SYSTEMS[system], '--max_iters=20', '--eval_interval=5', '--milestones=10']
    if system == 'processes':
        def train_here(out_dir, *knobs):
            print(train(corpus, out_dir, *knobs).stdout)
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


def test_a_finished_run_stays_as_it_is_and_a_longer_one_says_what_changed(corpus, tmp_path, train_here):
    train_here(tmp_path, '--max_iters=4')
    before = (tmp_path / 'ckpt_0000004.pt').read_bytes()
    done = train(corpus, tmp_path, '--max_iters=4')
    assert 'at step 4' in done.stdout and (tmp_path / 'ckpt_0000004.pt').read_bytes() == before
    done = train(corpus, tmp_path, '--max_iters=6', '--seed=5')
    assert 'max_iters 4 -> 6' in done.stdout and 'seed 1 -> 5' in done.stdout
    assert weights(tmp_path / 'ckpt_0000006.pt')['step'] == 6
    train_here(tmp_path, '--max_iters=7', '--weight_decay=0.5', '--beta1=0.8', '--adam_eps=1e-3')
    group = weights(tmp_path / 'ckpt_0000007.pt')['optimizer']['param_groups'][0]
    assert (group['weight_decay'], group['betas'], group['eps']) == (0.5, (0.8, 0.999), 1e-3)
    assert len(json.loads((tmp_path / 'run.json').read_text())) == 4


def test_checkpoints_that_stay(corpus, tmp_path, train_here):
    train_here(tmp_path, '--max_iters=12', '--checkpoint_interval=2', '--milestones=3,4')
    assert [os.path.basename(path) for path in source.checkpoints(tmp_path)] == [
        f'ckpt_{step:07d}.pt' for step in (3, 4, 10, 12)]
    content = weights(tmp_path / 'ckpt_0000012.pt')
    assert set(content) == {'step', 'model', 'optimizer', 'scaler', 'rng', 'config', 'model_config', 'data',
                            'best_loss', 'validated'}
    shutil.copy(tmp_path / 'ckpt_0000003.pt', tmp_path / 'ckpt_best.pt')        # a user's own
    done = train(corpus, tmp_path, '--max_iters=14', '--checkpoint_interval=1', '--keep_checkpoints=1')
    assert 'ckpt_0000012.pt at step 12' in done.stdout
    assert sorted(path.name for path in tmp_path.glob('*.pt')) == [
        *(f'ckpt_{step:07d}.pt' for step in (3, 4, 14)), 'ckpt_best.pt']
    manifest = json.loads((tmp_path / 'run.json').read_text())[0]
    assert manifest['config']['max_iters'] == 12 and manifest['data'] == content['data'] and manifest['torch']


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_trains_and_resumes(dtype, tmp_path, train_here):
    knobs = [f'--dtype={dtype}', '--max_iters=6', '--milestones=3', '--dropout=0', '--attention_dropout=0']
    train_here(tmp_path / 'half', *knobs)
    train_here(tmp_path / 'full', *knobs, '--dtype=float32')
    half, full = (metrics(tmp_path / name)[-1]['loss'] for name in ('half', 'full'))
    assert half != full and abs(half - full) < 0.02
    (tmp_path / 'again').mkdir()
    shutil.copy(tmp_path / 'half' / 'ckpt_0000003.pt', tmp_path / 'again')
    train_here(tmp_path / 'again', *knobs)
    same_checkpoint(tmp_path / 'half' / 'ckpt_0000006.pt', tmp_path / 'again' / 'ckpt_0000006.pt')


def test_documents_and_whole_words_train(tmp_path, train_here):
    train_here(tmp_path, '--packing=documents', '--whole_word=true', '--max_iters=8', '--position=rope',
               '--schedule=cosine', '--grad_clip=0', '--eval_interval=8', '--learning_rate=1e-2')
    first, last = metrics(tmp_path, 'val')
    assert len(metrics(tmp_path)) == 8 and last['loss'] < first['loss']


# ---- ranks ----

def test_two_processes_equal_accumulation_equal_one(corpus, tmp_path, train_here):
    knobs = ['--max_iters=6', '--dropout=0', '--attention_dropout=0', '--learning_rate=1e-4',
             '--packing=documents']
    train_here(tmp_path / 'one', *knobs)
    train_here(tmp_path / 'micro', *knobs, '--batch_size=3')
    train(corpus, tmp_path / 'two', *knobs, run=torchrun)
    train(corpus, tmp_path / 'both', *knobs, '--batch_size=2', run=torchrun)
    for name in ('micro', 'two', 'both'):
        for kind in ('train', 'val'):
            for one, other in zip(*(metrics(tmp_path / run, kind) for run in ('one', name)), strict=True):
                assert one['loss'] == pytest.approx(other['loss'], rel=1e-5)
                assert one['norm'] == other['norm'] or one['norm'] == pytest.approx(other['norm'], rel=1e-4)
        for key, value in weights(tmp_path / 'one' / 'ckpt_0000006.pt')['model'].items():
            other = weights(tmp_path / name / 'ckpt_0000006.pt')['model'][key]
            assert (value - other).abs().max() < 6e-5, (name, key)      # Adam's steps are 1e-4 each


def test_shared_moments_change_nothing_and_resume_anywhere(corpus, tmp_path, train_here):
    """ZeRO-1 with two processes, then with one, against the plain optimizer: to the bit."""
    knobs = ['--max_iters=6', '--checkpoint_interval=3', '--attention=shared']
    for name, zero in (('plain', 'false'), ('zero', 'true')):
        train(corpus, tmp_path / name, *knobs, f'--zero={zero}', run=torchrun)
    for step in (3, 6):
        same_checkpoint(tmp_path / 'plain' / f'ckpt_{step:07d}.pt', tmp_path / 'zero' / f'ckpt_{step:07d}.pt')
    for name in ('plain', 'zero'):
        (tmp_path / f'{name}1').mkdir()
        shutil.copy(tmp_path / name / 'ckpt_0000003.pt', tmp_path / f'{name}1')
        train_here(tmp_path / f'{name}1', *knobs, '--zero=true')
    same_checkpoint(tmp_path / 'plain1' / 'ckpt_0000006.pt', tmp_path / 'zero1' / 'ckpt_0000006.pt')
    shutil.copytree(tmp_path / 'plain1', tmp_path / 'both')
    os.remove(tmp_path / 'both' / 'ckpt_0000006.pt')
    train(corpus, tmp_path / 'both', *knobs, '--zero=true', run=torchrun)       # from one process to two
    same_checkpoint(tmp_path / 'both' / 'ckpt_0000006.pt', tmp_path / 'zero' / 'ckpt_0000006.pt')


LINGERS = """
import atexit, sys, threading, torch.distributed as dist, train
class Stuck:
    def __del__(self, wait=threading.Event().wait):
        wait()
stuck = Stuck()
ranks, _ = train.join_ranks('cpu')
atexit.register(sys.stdout.write, f'a hook of rank {ranks.rank}' + chr(10))
train.leave(ranks, int(sys.argv[1]))
"""


@pytest.mark.parametrize('status', [0, 3])
def test_what_hangs_while_python_is_taken_apart_holds_no_process(status, tmp_path):
    (tmp_path / 'lingers.py').write_text(LINGERS)
    here = {**os.environ, 'PYTHONPATH': ROOT}
    done = torchrun(str(tmp_path / 'lingers.py'), str(status), timeout=60, env=here)
    assert (done.returncode == 0) == (status == 0), done.stderr
    assert sorted(done.stdout.splitlines()) == ['a hook of rank 0', 'a hook of rank 1']
    assert status == 0 or 'exitcode  : 3' in done.stderr


def test_a_resumed_pair_of_processes_repeats_itself(corpus, tmp_path):
    train(corpus, tmp_path / 'whole', '--max_iters=8', '--milestones=4', run=torchrun)
    (tmp_path / 'parts').mkdir()
    shutil.copy(tmp_path / 'whole' / 'ckpt_0000004.pt', tmp_path / 'parts')
    train(corpus, tmp_path / 'parts', '--max_iters=8', run=torchrun)
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000008.pt', tmp_path / 'parts' / 'ckpt_0000008.pt')


def started(corpus, out_dir, *knobs, command=(), steps=3):
    """A long run in the background, once it has logged a few steps."""
    process = subprocess.Popen(
        [sys.executable, *command, 'train.py', *tiny(corpus, out_dir), *knobs], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.time() + 90
    while time.time() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if len(metrics(out_dir)) >= steps:
                return process
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(process.communicate())


LONG = ['--max_iters=200', '--log_interval=1', '--eval_interval=50']


@pytest.fixture(scope='module')
def undisturbed(corpus, tmp_path_factory):
    """{processes: folder of a run of LONG}"""
    folders = {n: tmp_path_factory.mktemp(f'undisturbed{n}') for n in (1, 2)}
    for n, folder in folders.items():
        train(corpus, folder, *LONG, run=torchrun if n > 1 else stage)
    return folders


@pytest.mark.parametrize('number, n', [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_at_the_next_step_and_nothing_is_lost(number, n, corpus, tmp_path, undisturbed):
    command = ('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={n}') if n > 1 else ()
    process = started(corpus, tmp_path / 'cut', *LONG, command=command)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0
    paths = source.checkpoints(tmp_path / 'cut')
    step = weights(paths[-1])['step']
    assert len(paths) == 1 and 3 <= step < 200 and f'stopped by signal after step {step}' in err
    if n == 1:
        assert process.returncode == 128 + number and 'Traceback' not in err
    train(corpus, tmp_path / 'cut', *LONG, run=torchrun if n > 1 else stage)
    same_checkpoint(undisturbed[n] / 'ckpt_0000200.pt', tmp_path / 'cut' / 'ckpt_0000200.pt')
    assert metrics(undisturbed[n]) == metrics(tmp_path / 'cut')


def test_what_the_step_and_the_seed_change(corpus, meta):
    rows, masker = StreamRows(corpus, meta, 'train', 32), Masker(meta, 32, 0.15)
    draws = [masker.draw(seed, step, 4) for seed, step in ((1, 0), (1, 1), (2, 0), (1, 0))]
    for other in draws[1:3]:
        assert all((a != b).any() for a, b in zip(draws[0], other, strict=True))
    assert all((a == b).all() for a, b in zip(draws[0], draws[3], strict=True))
    numbers = set()
    for seed, step, rank in ((1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0)):
        source.seed_step(seed, step, rank)
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


def patched(tmp_path, code):
    """A train.py with `code` in front of its main."""
    path = tmp_path / 'patched.py'
    head = f'import sys\nsys.path.insert(0, {ROOT!r})\nimport configurator, numpy, os, signal, train\n'
    path.write_text(f"{head}{code}\nsys.argv[0] = 'train.py'\nconfigurator.run(train.main)\n")
    return str(path)


HARM = '''
batch = train.Loader.batch
def harmed(self, step):
    result = batch(self, step)
    if not self.limit and step == 5 and os.environ.get('RANK', '0') == '{rank}':
        result['weights'] = result['weights'] * numpy.float32('{value}')
    return result
train.Loader.batch = harmed
'''
KILL = '''
save = train.torch.save
def killed(content, file):
    save(content, file)
    if content['step'] == 8:
        file.truncate(100)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
train.torch.save = killed
'''
TERMINATE = '''
seed_step = train.seed_step
def terminated(seed, step, rank):
    if step == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    seed_step(seed, step, rank)
train.seed_step = terminated
'''
INFINITE = '''
make_optimizer = train.make_optimizer
def hooked(model, *arguments):
    model.head.bias.register_hook(lambda gradient: gradient * numpy.inf)
    return make_optimizer(model, *arguments)
train.make_optimizer = hooked
'''
BAD_LUCK = '''
make_optimizer = train.make_optimizer
def unlucky(*arguments):
    if os.environ['RANK'] == '1':
        raise configurator.UserError('bad luck')
    return make_optimizer(*arguments)
train.make_optimizer = unlucky
'''


def test_a_signal_skips_validation_and_the_next_run_makes_up_for_it(corpus, tmp_path, train_here):
    knobs = ['--max_iters=8', '--eval_interval=5']
    done = stage(patched(tmp_path, TERMINATE), *tiny(corpus, tmp_path / 'cut'), *knobs)
    assert done.returncode == 128 + signal.SIGTERM and 'after step 5' in done.stderr
    assert len(metrics(tmp_path / 'cut', 'val')) == 1
    assert not weights(tmp_path / 'cut' / 'ckpt_0000005.pt')['validated']
    train_here(tmp_path / 'cut', *knobs)
    train_here(tmp_path / 'whole', *knobs)
    for kind in ('train', 'val'):
        assert metrics(tmp_path / 'cut', kind) == metrics(tmp_path / 'whole', kind)
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000008.pt', tmp_path / 'cut' / 'ckpt_0000008.pt')


def test_fp16_gives_up_when_no_scale_helps(corpus, tmp_path):
    done = stage(patched(tmp_path, INFINITE), *tiny(corpus, tmp_path), '--max_iters=60', '--dtype=float16')
    assert re.match(r'error: step 1\d, samples .* loss 5\.\d+, gradient norm (nan|inf)', refused(done))
    assert len(metrics(tmp_path)) < 40 and 'NaN' not in (tmp_path / 'metrics.jsonl').read_text()


def test_an_error_of_one_rank_is_said(corpus, tmp_path):
    done = torchrun(patched(tmp_path, BAD_LUCK), *tiny(corpus, tmp_path / 'out'), '--max_iters=4')
    assert done.returncode != 0 and 'error on local rank 1: bad luck' in done.stderr


@pytest.mark.parametrize('value', ['nan', 'inf'])
@pytest.mark.parametrize('n', [1, 2])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_before_the_update(n, value, corpus, tmp_path):
    script = patched(tmp_path, HARM.format(rank=n - 1, value=value))
    command = [script, *tiny(corpus, tmp_path), '--max_iters=20', '--checkpoint_interval=5']
    done = torchrun(*command) if n > 1 else stage(*command)
    lines = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
    assert done.returncode != 0 and len(lines) == 1
    assert lines[0].startswith('error: step 5, samples 40 to 47: loss ')
    if n == 1:
        assert refused(done) == lines[0]
    assert [line['step'] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert weights(source.checkpoints(tmp_path)[-1])['step'] == 5


def test_a_kill_in_the_middle_of_a_save_loses_nothing(corpus, tmp_path, train_here):
    knobs = ['--max_iters=12', '--checkpoint_interval=4']
    done = stage(patched(tmp_path, KILL), *tiny(corpus, tmp_path / 'cut'), *knobs)
    assert done.returncode == -signal.SIGKILL
    assert [os.path.basename(path) for path in source.checkpoints(tmp_path / 'cut')] == ['ckpt_0000004.pt']
    assert os.path.exists(tmp_path / 'cut' / 'ckpt_0000008.pt.tmp')
    train_here(tmp_path / 'cut', *knobs)
    train_here(tmp_path / 'whole', *knobs)
    same_checkpoint(tmp_path / 'whole' / 'ckpt_0000012.pt', tmp_path / 'cut' / 'ckpt_0000012.pt')
    assert not glob.glob(str(tmp_path / 'cut' / '*.tmp'))


# ---- checkpoints under damage ----

@pytest.fixture(scope='module')
def finished(corpus, tmp_path_factory):
    """Folder of a finished run with two checkpoints, of `original` + `absolute`."""
    folder = tmp_path_factory.mktemp('finished')
    train(corpus, folder, '--max_iters=8', '--checkpoint_interval=4')
    return folder


def flip(content, position):
    changed = bytearray(content)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def test_every_kind_of_damage_is_found(finished, tmp_path):
    path = tmp_path / 'ckpt_0000008.pt'
    whole = (finished / 'ckpt_0000008.pt').read_bytes()
    rng = random.Random(1)
    damaged = [whole[:length] for length in (0, 1, 70, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b'\0', bytes(len(whole))]
    damaged += [flip(whole, rng.randrange(8 * len(whole))) for _ in range(100)]
    damaged += [flip(whole, 8 * (len(whole) - i) - 1) for i in range(1, 100)]      # the comment
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match='damaged'):
            source.read_checkpoint(str(path))
    path.write_bytes(whole)
    assert source.read_checkpoint(str(path))['step'] == 8
    assert torch.load(path, weights_only=True)['step'] == 8                     # the digest is no obstacle


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(finished, corpus, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    whole = (tmp_path / 'run' / 'ckpt_0000008.pt').read_bytes()
    (tmp_path / 'run' / 'ckpt_0000008.pt').write_bytes(flip(whole, 80_000))
    done = train(corpus, tmp_path / 'run', '--max_iters=8', '--checkpoint_interval=4')
    assert 'ckpt_0000008.pt: damaged' in done.stderr and 'ckpt_0000004.pt at step 4' in done.stdout
    same_checkpoint(finished / 'ckpt_0000008.pt', tmp_path / 'run' / 'ckpt_0000008.pt')
    for path in source.checkpoints(tmp_path / 'run'):
        with open(path, 'w'):
            pass
    with pytest.raises(UserError, match='every checkpoint is damaged'):
        source.newest_checkpoint(str(tmp_path / 'run'))


def test_a_checkpoint_of_an_earlier_version_is_refused(finished, corpus, tmp_path):
    content = weights(finished / 'ckpt_0000008.pt')
    del content['model_config']['lm_head']
    source.write_checkpoint(str(tmp_path / 'old.pt'), content)
    for knobs in ([], ['--fill=a [MASK]']):
        line = refused(run_with(corpus, tmp_path / 'run', f'--init_from={tmp_path / "old.pt"}', *knobs))
        assert 'old.pt: of an earlier version' in line


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

def run_with(corpus, out_dir, *knobs):
    return stage('train.py', *tiny(corpus, out_dir), '--max_iters=8', *knobs)


@pytest.mark.parametrize('knobs, words', [
    (['--n_layer=3'], 'the model differs: n_layer is 2 there and 3 here'),
    (['--attention=shared'], "attention is 'original' there and 'shared' here"),
    (['--attention=xlnet', '--position=none'], "attention is 'original' there and 'xlnet' here"),
    (['--block_size=64'], 'block_size is 32 there and 64 here'),
    (['--init_from=scratch'], 'holds ckpt_0000008.pt'),
    (['--init_from=some/bert'], "init_from='some/bert': "),
    (['--init_from=no.pt'], 'no.pt: cannot be read: No such file'),
    (['--fill=no mask here'], "fill='no mask here': put a [MASK]"),
    (['--fill=' + '[MASK] ' * 31], 'tokens, but the model reads at most 30'),
])
def test_a_checkpoint_that_does_not_fit_is_refused(knobs, words, finished, train_here):
    with pytest.raises(UserError) as error:
        train_here(finished, '--max_iters=8', *knobs)
    assert words in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('part', ['tokenizer', 'train', 'val'])
def test_other_data_is_refused_by_name(part, finished, corpus, tmp_path, train_here):
    shutil.copytree(corpus, tmp_path / 'tiny')
    path = tmp_path / 'tiny' / 'meta.json'
    text = json.loads(path.read_text())
    name = next(name for name in text['files'] if name.startswith({'tokenizer': 'word'}.get(part, part)))
    data = bytearray((tmp_path / 'tiny' / name).read_bytes())
    data[0] ^= 1
    (tmp_path / 'tiny' / name).write_bytes(data)
    text['files'][name]['sha256'] = hashlib.sha256(data).hexdigest()
    path.write_text(json.dumps(text))
    with pytest.raises(UserError, match=f'the data differs: {part} is '):
        train_here(finished, '--max_iters=8', f'--data_dir={tmp_path}')


@pytest.mark.parametrize('knob, words', [
    ('--total_batch=0', 'total_batch=0: must be at least 1'), ('--batch_size=0', 'batch_size=0: must be'),
    ('--learning_rate=0', 'learning_rate=0.0: must be positive'), ('--beta2=1', 'beta2=1.0: must be below 1'),
    ('--weight_decay=-1', 'weight_decay=-1.0: must be at'), ('--seed=-1', 'seed=-1: must be at least 0'),
    (f'--seed={2 ** 63}', 'must be below'), ('--device=meta', "device='meta'"), ('--out_dir=', "out_dir=''"),
    ('--warmup_iters=9', 'warmup_iters=9: must be at most max_iters=8'), ('--schedule=x', 'linear, cosine'),
    ('--min_lr=1', 'min_lr=1.0: must be at most learning_rate=0.001'), ('--dropout=1', 'dropout=1.0: must'),
    ('--n_head=3', 'n_embd=16: must be a multiple of n_head=3'), ('--attention=x', 'original, symmetric'),
    ('--position=x', 'absolute, none, rope, rpe, rab'), ('--objective=x', 'choose one of mlm, plm'),
    ('--objective=plm', "attention='original': only attention='xlnet'"), ('--norm=x', 'layer, rms'),
    ('--attention=shatter', "position='absolute': attention='shatter' has its own order; choose none"),
    ('--recompute=True', "recompute=True: only attention='part_mask' or"), ('--lm_head=x', 'bert, decoder'),
    ('--normaliser=x', 'softmax, softmax_plus,'), ('--relu_scale=x', 'n2, n, ns, s2'),
    ('--packing=x', 'stream, documents'), ('--dtype=x', 'float32'),
    ('--device=x', "device='x'"), ('--device=cuda', "device='cuda'"), ('--compile=x', 'auto, true, false'),
    ('--block_size=4', 'block_size=4: must be at least 8'), ('--mask_fraction=1', 'mask_fraction=1.0: must'),
    ('--dataset=none', 'none: not prepared'), ('--pair_rank=3', "pair_rank=3: only attention='pairwise'"),
    ('--init_from=some/bert', 'neither a checkpoint nor a BERT'),
    ('--init_from=resume', "init_from='resume': no checkpoint in"), ('--log_interval=0', 'log_interval=0'),
])
def test_knobs_out_of_range(knob, words, tmp_path, train_here):
    """In this process: the one line and the status of a stage are what test_configurator sees of it."""
    if knob == '--device=cuda' and torch.cuda.is_available():
        pytest.skip('there is a CUDA device')
    with pytest.raises(UserError) as error:
        train_here(tmp_path, '--max_iters=8', knob)
    assert words in str(error.value) and '\n' not in str(error.value)


def test_a_truncated_shard_is_named(corpus, meta, tmp_path):
    shutil.copytree(corpus, tmp_path / 'tiny')
    name = meta['splits']['train']['shards'][0]['tokens']
    os.truncate(tmp_path / 'tiny' / name, 1000)
    with pytest.raises(UserError, match=name):
        load_meta(str(tmp_path / 'tiny'))
    rows = StreamRows(str(tmp_path / 'tiny'), meta, 'train', 32)
    with pytest.raises(UserError, match=f'{name}: truncated'):
        rows.get([40])


def test_compiled_training_equals_eager(corpus, tmp_path):
    for name in ('true', 'false'):
        done = train(corpus, tmp_path / name, '--max_iters=3', '--n_layer=1', '--dropout=0',
                     '--attention_dropout=0', f'--compile={name}')
        assert 'torch.compile fails' not in done.stderr
    for one, other in zip(metrics(tmp_path / 'true'), metrics(tmp_path / 'false'), strict=True):
        assert one['loss'] == pytest.approx(other['loss'], rel=1e-4)


def test_compile_falls_back_with_one_line(monkeypatch, capsys, corpus, meta):
    monkeypatch.setattr(torch, 'compile', lambda model: lambda **part: 1 / 0)
    loader = Loader(StreamRows(corpus, meta, 'train', 32), Masker(meta, 32, 0.15), 1, 4, slice(0, 4))
    model = MaskedLM(EncoderConfig(400, 32, 1, 2, 16, 32))
    cpu = torch.device('cpu')
    assert source.compiled_or_eager(model, 'true', loader.batch(0), 4, cpu, torch.float32) is model
    assert capsys.readouterr().err == 'torch.compile fails here, running without it: division by zero\n'


# ---- fill, export, BERT ----

def test_fill_prints_five_predictions_for_each_mask(finished, corpus, meta):
    done = run_with(corpus, finished, '--fill=the [MASK] of a [MASK]')
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == 'the [MASK] of a [MASK]' and len(lines) == 3
    tokenizer, special = load_tokenizer(corpus, meta), meta['special']
    content = source.read_checkpoint(str(finished / 'ckpt_0000008.pt'))
    model = MaskedLM(EncoderConfig(**content['model_config'])).eval()
    model.load_state_dict(content['model'])
    mask = special['mask']
    ids = [special['cls'], *tokenizer.encode('the'), mask, *tokenizer.encode(' of a'), mask]
    logits = model(torch.tensor([[*ids, special['sep']]]))[0]
    masks = [i for i, token in enumerate(ids) if token == mask]
    for line, where in zip(lines[1:], masks, strict=True):
        best = logits[where].softmax(-1).topk(5)
        best = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        words = [(tokenizer.piece(i).strip('\u2581') or '\u2581', p) for p, i in best]
        assert line.strip() == '   '.join(f'{word} {p:.3f}' for word, p in words)


def test_export_loads_in_transformers_and_comes_back(finished, corpus, tmp_path, train_here):
    transformers = pytest.importorskip('transformers')
    done = run_with(corpus, finished, f'--export={tmp_path / "bert"}')
    assert done.returncode == 0, done.stderr
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
    assert 'n_layer is 2 there and 3 here' in refused(
        run_with(corpus, tmp_path / 'other', f'--init_from={tmp_path / "bert"}', '--n_layer=3'))


def test_export_refuses_what_bert_cannot_hold(corpus, tmp_path, train_here):
    train_here(tmp_path, '--max_iters=2', '--attention=shared')
    line = refused(run_with(corpus, tmp_path, f'--export={tmp_path / "bert"}', '--attention=shared'))
    assert "attention='shared'" in line and not (tmp_path / 'bert').exists()


def test_a_permuted_model_fills_in_and_is_not_exported(corpus, tmp_path, train_here):
    knobs = SYSTEMS['xlnet plm']
    train_here(tmp_path, '--max_iters=2', *knobs)
    done = run_with(corpus, tmp_path, *knobs, '--fill=the [MASK] of a [MASK]')
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr
    assert 'is not' in refused(run_with(corpus, tmp_path, *knobs, f'--export={tmp_path / "bert"}'))
    content = source.read_checkpoint(str(tmp_path / 'ckpt_0000002.pt'))
    model = PermutationLM(EncoderConfig(**content['model_config']))
    model.load_state_dict(content['model'])
    assert 'objective is' in refused(run_with(corpus, tmp_path, *knobs[:2]))        # masked from permuted


def test_predictions_of_a_trained_model_beat_chance(corpus, tmp_path, train_here):
    """600 steps on real text: below the unigram entropy, which bare frequencies cannot reach."""
    train_here(tmp_path, '--max_iters=600', '--learning_rate=5e-3', '--warmup_iters=60', '--position=rope',
               '--n_head=2', '--n_embd=64', '--n_inner=128', '--total_batch=16', '--dropout=0',
               '--attention_dropout=0', '--log_interval=100', '--attention=pairwise', '--eval_samples=0')
    score = metrics(tmp_path, 'val')[-1]
    assert score['loss'] < load_meta(corpus)['unigram_entropy'] - 0.3 and score['accuracy'] > 0.1
