"""train.py: rows, masks, a run beside a loop by hand, resume, signals, checkpoints, refusals, predictions.

Runs take place in this process, but for the two ranks of `pair`. Exports are tested in test_export.py, kills
in test_faults.py, XLA in test_xla.py.
"""
import contextlib
import dataclasses
import errno
import glob
import itertools
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, TINY, flip, knobs_of, refused, tiny, words
from test_model import CORE, decays, small
from torch.distributed.run import main as torchrun
from torch.utils._pytree import tree_leaves

import train
from configurator import UserError
from model import EncoderConfig, MaskedLM
from prepare_data import load_meta, write_json
from train import Loader, Runtime, shuffled

CPU = Runtime(torch.device('cpu'), torch.float32, 0, 1, None)
MASKS = {'block_size': 32, 'mask_fraction': 0.15, 'mask_fraction_end': 0.0, 'objective': 'mlm',
         'eval_mask_fraction': 0.0, 'whole_word': False, 'packing': 'stream', 'max_iters': 1,
         'total_batch': 1}                              # what make_loader() reads besides the seed


@pytest.fixture(scope='module')
def meta(corpus):
    return load_meta(corpus)


PAIR = {'dropout': 0, 'attention_dropout': 0, 'batch_size': 3, 'total_batch': 7, 'learning_rate': 1e-4,
        'packing': 'documents', 'attention': 'pairwise', 'eval_samples': 13, 'checkpoint_interval': 3,
        'timeout': 0}


@pytest.fixture(scope='module')
def pair(corpus, tmp_path_factory):
    """A run of two processes, whose agent is in this one."""
    folder = tmp_path_factory.mktemp('pair') / 'run'
    torchrun(['--standalone', '--nproc_per_node=2', f'{ROOT}/train.py', *tiny(corpus, folder, **PAIR)])
    return folder


def corpus_like(corpus, folder, meta):
    """folder/other: a copy of the corpus with another meta.json; returns its path."""
    other = shutil.copytree(corpus, folder / 'other', dirs_exist_ok=True)
    write_json(other / 'meta.json', meta)
    return str(other)


@pytest.fixture(scope='module')
def segmented(corpus, meta, tmp_path_factory):
    """A corpus whose segmenter has begun a word at one id of three."""
    folder = corpus_like(corpus, tmp_path_factory.mktemp('segmented'), {**meta, 'segmenter': {}})
    for shard in itertools.chain(*meta['splits'].values()):
        stem = f"{folder}/{shard['stem']}"
        (np.fromfile(stem + '.bin', meta['dtype']) % 3 == 0).tofile(stem + '.words')
    return folder


def metrics(folder, kind=None):
    """Lines of metrics.jsonl without times."""
    return [{key: line.get(key) for key in ('kind', 'step', 'loss', 'accuracy', 'lr', 'norm')}
            for line in train.read_metrics(folder) if kind in (None, line['kind'])]


def last(folder):
    return train.read_checkpoint(train.newest(str(folder)))


def assert_equal(one, other):
    """Equality to the bit of all that two contents of checkpoints hold."""
    for x, y in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert torch.equal(x, y) if torch.is_tensor(x) else x == y


def same_run(one, other):
    """Equality to the bit of weights, optimizer, counts and log."""
    assert metrics(one) == metrics(other)
    for key in ('model', 'optimizer', 'scaler', 'step', 'samples'):
        assert_equal(last(one)[key], last(other)[key])


@contextlib.contextmanager
def happening(patch, name, at=0, event=None):
    """Within, an event comes before call `at`, from 1, of a function of train.py.  Yields all its calls.

    event: number of a signal, or a function of the call's arguments that returns others or raises an error
    """
    function = getattr(train, name)
    calls = []

    def called(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            if isinstance(event, int):
                signal.raise_signal(event)
            else:
                arguments = event(*arguments)
        return function(*arguments)
    with patch.context() as inner:
        inner.setattr(train, name, called)
        yield calls


# ---- rows and their order ----

@pytest.mark.parametrize('packing', ['stream', 'documents'])
def test_rows_hold_the_corpus(packing, corpus, meta):
    """Every token once, in file order, as prepare_data.py's format says."""
    expected = []                                       # the tokens of each row
    for shard in meta['splits']['train']:
        stem = f"{corpus}/{shard['stem']}"
        ids = np.fromfile(stem + '.bin', meta['dtype'])
        texts = [ids[:len(ids) // 30 * 30]]
        if packing == 'documents':
            edges = np.fromfile(stem + '.idx', np.int64)
            texts = [text[:-1] for text in np.split(ids, edges[1:-1])]         # without their [SEP]
        for text in texts:
            expected += [text[i:i + 30] for i in range(0, len(text), 30)]
    assert len(meta['splits']['train']) > 2             # shards

    rows = train.PACKING[packing](corpus, meta, 'train', 32)
    special = meta['special']
    for index, tokens in zip(range(len(rows)), expected, strict=True):
        row = [special['cls'], *tokens, special['sep']]
        assert rows[index].tolist() == row + [special['pad']] * (32 - len(row))


@pytest.mark.parametrize('n', [1, 2, 7, 1000])
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(n):
    orders = [Loader(range(n), None, seed).indices(range(2 * n)).reshape(2, n) for seed in (1, 2)]
    assert (np.sort(orders) == np.arange(n)).all()
    if n == 1000:
        assert len(np.unique(np.concatenate(orders), axis=0)) == 4
        assert orders[0][0, :6].tolist() == [778, 439, 342, 893, 442, 566]     # saved runs go on with it
        part = shuffled(range(n), 5000, 1, 0)           # an odd number of bits
        assert abs((part < 4096).mean() - 4096 / 5000) < 0.05


# ---- masks ----

def masked_by_hand(ids, word_starts, fraction, k, meta, rng):
    """A row with BERT's masks and XLNet's order.  Devlin et al. 2018, 3.1, and Yang et al. 2019, 2.2 and 2.3

    Returns (positions that are predicted, what BERT sees, the place of each token in the permutation).
    """
    special = set(meta['special'].values())
    scores = rng.random(len(ids), np.float32)
    actions = rng.random(k, np.float32)
    ordinary = [index for index in range(meta['vocab_size']) if index not in special]
    drawn = [ordinary[i] for i in rng.integers(0, len(ordinary), k)]

    n_real = sum(ids != meta['special']['pad'])
    free = [t for t, index in enumerate(ids) if index not in special]
    most = min(math.ceil(fraction * n_real - 1e-9), len(free))
    words = []
    for t, index in enumerate(ids):                     # [CLS] is the first
        if word_starts[t] or index in special or ids[t - 1] in special:
            words.append([])
        words[-1].append(t)
    words = [words[number] for number in np.argsort(scores[:len(words)])]
    words = [word for word in words if ids[word[0]] not in special]
    chosen = []
    for word in words:
        if len(chosen) + len(word) <= most:             # one that is too long is passed over
            chosen += word
    if words and not chosen:
        chosen = words[0][:most]

    seen = list(ids)
    for t, action, index in zip(chosen, actions, drawn):                        # noqa: B905
        if action < 0.8:
            seen[t] = meta['special']['mask']
        elif action < 0.9:
            seen[t] = index
    places = [0] * len(ids)                             # special tokens come first, what is predicted last
    ordered = sorted(free, key=lambda t: (t in chosen, scores[t]))
    for place, t in enumerate(ordered, len(ids) - len(free) + 1):
        places[t] = place
    return chosen, seen, places


def test_whole_words_need_a_tokenizer_with_words(tmp_path, stage, run):
    """Each character would be a word."""
    (tmp_path / 'a.txt').write_text('\n\n'.join(['我来到北京abc ' * 40] * 20))
    prepared = stage('prepare_data', *words(corpus='a.txt', data_dir='.', vocab_size=20,
                                            tokenizer='character', val_fraction=0.5, num_proc=1))
    assert prepared.code == 0, prepared
    assert 'whole_word: most tokens are characters' in refused(run('a', 2, data_dir='.', dataset='a',
                                                                   whole_word=True, show=1))


@pytest.mark.parametrize('begin, end', [(1.0, 0.0), (0.15, 0.0), (0.3, 0.07), (0.07, 0.3)])
@pytest.mark.parametrize('objective', ['mlm', 'plm'])
@pytest.mark.parametrize('packing, words', [
    ('stream', ''), ('documents', ''), ('stream', 'pieces'), ('documents', 'segmenter')])
def test_masks_are_those_by_hand(packing, words, objective, begin, end, corpus, segmented):
    """Of 300 samples; the fraction changes until sample 200, or not at all if its end is 0."""
    folder = segmented if words == 'segmenter' else corpus
    meta = load_meta(folder)
    masks = {'block_size': 64, 'mask_fraction': begin, 'mask_fraction_end': end, 'max_iters': 20,
             'total_batch': 10, 'packing': packing, 'objective': objective, 'whole_word': bool(words)}
    loader = train.make_loader(folder, meta, 'train', {**MASKS, **masks, 'seed': 3})
    batch = {key: x.numpy() for key, x in loader.batch(range(300)).items()}
    k = math.ceil(64 * max(begin, end))
    assert train.n_to_predict(100, 0.07) == 7               # though 0.07 * 100 is 7.000000000000001
    vocabulary = np.arange(meta['vocab_size'])
    starts_word = {
        '': vocabulary >= 0,                            # each token is a word
        'pieces': np.fromfile(f'{corpus}/tokenizer/word_start.bin', bool),
        'segmenter': vocabulary % 3 == 0,
    }[words]

    cut = 0                                             # rows that begin inside a word
    for sample, index in enumerate(loader.indices(range(300))):
        ids = loader.rows[index]
        word_starts = starts_word[ids]
        cut += not word_starts[1]
        fraction = begin + min(sample / 200, 1) * ((end or begin) - begin)
        rng = np.random.default_rng([3, sample])
        chosen, seen, places = masked_by_hand(ids, word_starts, fraction, k, meta, rng)
        n = len(chosen)
        positions = batch['positions'][sample]
        assert batch['weights'][sample].tolist() == [1] * n + [0] * (k - n)
        assert positions[:n].tolist() == chosen
        assert len(set(positions)) == k
        assert (batch['targets'][sample] == ids[positions]).all()
        assert batch['ids'][sample].tolist() == (seen if objective == 'mlm' else ids.tolist())
        if objective == 'plm':
            assert batch['order'][sample].tolist() == places
        if packing == 'documents':
            assert (batch['attention_mask'][sample] == (ids != meta['special']['pad'])).all()
    assert cut > 10 or not words


# ---- steps ----

HAND = {'max_iters': 12, 'total_batch': 8, 'batch_size': 3, 'seed': 4, 'schedule': 'cosine',
        'warmup_iters': 3, 'learning_rate': 0.01, 'min_lr': 0.002, 'beta1': 0.8, 'beta2': 0.95,
        'adam_eps': 1e-3, 'weight_decay': 0.3, 'mask_fraction': 0.3, 'mask_fraction_end': 0.1,
        'packing': 'documents', 'whole_word': True, 'tied_start': True,
        'eval_samples': 2000}                           # there are fewer


@pytest.mark.parametrize('dtype, scale, clip, eval_fraction', [
    ('float32', 1, 0, 0), ('float32', 1, 0.3, 0.2), ('float16', 2 ** 16, 0.3, 0)])
def test_a_run_is_the_loop_written_by_hand(dtype, scale, clip, eval_fraction, run, segmented, monkeypatch):
    """Three micro-batches a step, with unequal numbers of predicted tokens. float16 has scaled losses."""
    meta = load_meta(segmented)
    with happening(monkeypatch, 'token_losses') as judged:
        run('a', **HAND, dataset=segmented, dtype=dtype, grad_clip=clip, eval_mask_fraction=eval_fraction)
    assert {logits.dtype for logits, _ in judged} == {getattr(torch, dtype)}            # in validation
    loader = train.make_loader(segmented, meta, 'train', {**MASKS, **HAND})
    torch.manual_seed(4)
    model = MaskedLM(EncoderConfig(
        meta['vocab_size'], 32, 2, 4, 16, 32, dropout=0.1, attention_dropout=0.1, tied_start=True))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{'params': matrices, 'weight_decay': 0.3}, {'params': vectors, 'weight_decay': 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-3)

    lines = train.read_metrics('a')
    for step, line in enumerate(line for line in lines if line['kind'] == 'train'):
        rate = 0.01 * (step + 1) / 3
        if step >= 3:
            rate = 0.002 + 0.008 * (1 + math.cos(math.pi * (step - 3) / 9)) / 2
        for group in optimizer.param_groups:
            group['lr'] = rate
        train.seed_step(4, step, CPU)
        edges = [8 * step + n for n in (0, 2, 5, 8)]
        parts = [loader.batch(range(begin, end)) for begin, end in itertools.pairwise(edges)]
        n_predicted = sum(part['weights'].sum() for part in parts)
        total = 0
        for part in parts:
            weights = part.pop('weights')
            with torch.autocast('cpu', torch.float16, enabled=dtype == 'float16'):
                losses = model(**part)
            loss = (losses * weights).sum() / n_predicted
            (loss * scale).backward()
            total += loss.item()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item() / scale
        for p in model.parameters():
            p.grad *= min(1, clip / norm) / scale if clip else 1 / scale
        optimizer.step()
        optimizer.zero_grad()
        assert line['lr'] == pytest.approx(rate)
        assert line['loss'] == pytest.approx(total, rel=1e-5)
        # a last bit of a weight becomes a bit of a float16 state, which is 5e-4 of it
        assert line['norm'] == pytest.approx(norm, rel=1e-4 if dtype == 'float32' else 5e-4)
        assert norm > 0.3                               # and is clipped
    tolerance = 1e-5 if dtype == 'float32' else 1e-4
    for name, x in last('a')['model'].items():
        assert (x - model.state_dict()[name]).abs().max() < tolerance, name

    # Every validation row once, without dropout, from the logits of all positions.
    masks = {**MASKS, 'whole_word': True, 'packing': 'documents', 'mask_fraction': eval_fraction or 0.3}
    loader = train.make_loader(segmented, meta, 'val', masks)
    rows = loader.rows
    batch = loader.batch(range(len(rows)))
    is_predicted = batch['weights'] > 0
    assert not is_predicted.all()
    with torch.no_grad():
        logits = model.eval()(batch['ids'], attention_mask=batch['attention_mask'])            # (n, T, V)
    logits = logits[torch.arange(len(rows))[:, None], batch['positions']][is_predicted]
    targets = batch['targets'][is_predicted]
    line = lines[-1]
    loss = F.cross_entropy(logits, targets).item()
    assert line['loss'] == pytest.approx(loss, rel=1e-5 if dtype == 'float32' else 1e-3)
    assert line['perplexity'] == pytest.approx(math.exp(line['loss']))
    hits = (logits.argmax(-1) == targets).double().mean().item()
    assert line['accuracy'] == pytest.approx(hits, abs=1e-9 if dtype == 'float32' else 0.005)
    assert line['unigram'] == meta['unigram_entropy']


@pytest.mark.parametrize('schedule, rates', [
    ('linear', (0.775, 0.55, 0.325)), ('constant', (1, 1, 1)), ('thirds', (1, 0.28, 0.118))])
def test_schedules_after_a_tenth_of_a_short_run(schedule, rates, run):
    """At 4, 8 and 12 of 16 steps after the warmup; the cosine is in the run by hand."""
    run('a', schedule=schedule, max_iters=17, warmup_iters=10_000, learning_rate=1e-2, min_lr=1e-3)
    first, *logged = [line['lr'] * 100 for line in metrics('a', 'train')]
    assert first == pytest.approx(1)                    # 17 // 10 is one step of warmup
    assert logged[4:13:4] == pytest.approx(rates)


ROFORMER_V2 = {'position': 'rope', 'norm': 'rms', 'bias': False, 'lm_head': 'decoder'}         # no vectors


@pytest.mark.parametrize('settings', [*CORE, ROFORMER_V2], ids=str)
def test_decay_is_on_matrices_alone(settings):
    model = MaskedLM(small(**settings))
    optimizer = train.make_optimizer(model, 1e-3, (0.9, 0.999), 1e-8, 0.01, CPU)
    decay = {name: group['weight_decay'] for group in optimizer.param_groups
             for name in group['param_names']}
    assert decay == {name: 0.01 if decays(model, name) else 0 for name, _ in model.named_parameters()}


def test_each_rank_has_dropout_of_its_own():
    numbers = set()
    for rank in (0, 1, 1):
        train.seed_step(1, 0, dataclasses.replace(CPU, rank=rank))
        numbers.add(torch.rand(()).item())
    assert len(numbers) == 2


@pytest.mark.parametrize('able, width, dtype', [
    ('amx_bf16 avx512_fp16', 256, torch.bfloat16), ('avx512_bf16 avx512_fp16', 256, torch.float32),
    ('amx_bf16', 255, torch.float32)])
def test_automatic_precision_on_a_cpu(able, width, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: dict.fromkeys(able.split(), True),
                        raising=False)
    assert train.make_runtime('cpu', 'auto', width).dtype == dtype
    assert torch.compiler.config.cache_key_tag == str(dtype)        # tests/test_cuda.py found it on a GPU


# ---- resume ----

def full_disk(*arguments):
    """torch.save() puts an error of its own above the system's."""
    try:
        raise OSError(errno.ENOSPC, 'No space left')
    finally:
        raise RuntimeError('unexpected pos')


def spoil_gradient(*arguments):
    """Loss and norm of the step are finite."""
    *others, grad_clip, runtime = arguments
    return *others, math.nan, runtime


def spoil_and_stop(*arguments):
    signal.raise_signal(signal.SIGTERM)
    return spoil_gradient(*arguments)


STOPPED = 'stops after this step\nstopped by a signal; repeat the command to go on from step {}'
FULL = 'error: parts/ckpt_0000008.pt cannot be written: [Errno 28] No space left'
DIVERGED = 'error: parts: a loss or gradient after step {} is not finite; no checkpoint contains it'
ENDS = [                                                # call, event, exit status, last step, what is said
    ('seed_step', 5, signal.SIGTERM, 143, 5, STOPPED, {
        'attention': 'pairwise', 'position': 'rope', 'batch_size': 3, 'mask_fraction': 0.3,
        'mask_fraction_end': 0.15}),
    ('seed_step', 5, signal.SIGINT, 143, 5, STOPPED, {
        'attention': 'gau', 'position': 'rope', 'packing': 'documents', 'whole_word': True, 'seed': 3,
        'schedule': 'cosine', 'min_lr': 1e-4, 'beta1': 0.8, 'beta2': 0.9, 'adam_eps': 1e-6,
        'weight_decay': 0.1, 'eval_mask_fraction': 0.2}),
    ('seed_step', 5, signal.SIGHUP, 143, 5, STOPPED, {
        'attention': 'xlnet', 'position': 'none', 'objective': 'plm', 'dtype': 'bfloat16'}),
    ('seed_step', 5, signal.SIGTERM, 143, 5, STOPPED, {
        'attention': 'shatter', 'position': 'none', 'dtype': 'float16', 'grad_clip': 0, 'log_interval': 100}),
    ('token_losses', 6, signal.SIGTERM, 143, 4, STOPPED, {}),           # in a validation of four batches
    ('token_losses', 10, signal.SIGTERM, 143, 8, STOPPED, {}),          # in the last one
    ('save', 1, signal.SIGTERM, 0, 8, 'stops after this step', {}),     # which is the last
    ('tree_map_only', 2, full_disk, 2, 4, FULL, {'checkpoint_interval': 4}),
    ('train_step', 6, spoil_gradient, 2, 5, DIVERGED, {'checkpoint_interval': 1}),
    ('train_step', 6, spoil_and_stop, 2, 4, DIVERGED, {'checkpoint_interval': 4, 'log_interval': 100}),
]


@pytest.mark.parametrize('name, at, event, code, step, said, knobs', ENDS)
def test_a_run_that_ends_early_goes_on_to_the_bit(name, at, event, code, step, said, knobs, run, monkeypatch):
    """Dropout included. A validation that was given up is repeated, and lines that a kill has lost too."""
    knobs = {'batch_size': 8, 'eval_interval': 4, **knobs}
    run('whole', **knobs)
    with happening(monkeypatch, name, at, event) as calls:
        done = run('parts', code, **knobs)
    assert name != 'token_losses' or len(calls) == at
    assert said.format(step) in done.err, done
    assert last('parts')['step'] == step
    assert not glob.glob('parts/*.tmp')
    with open('parts/metrics.jsonl', 'ab') as file:     # of a step that was not saved, and damaged ones
        file.write(b'{"kind": "train", "step": 9, "loss": 0}\n\xff\n{"kind": "tr')
    assert 'differ' not in run('parts', **knobs).err
    same_run('whole', 'parts')
    assert [line['step'] for line in metrics('parts', 'val')] == [0, 4, 8]


def test_what_is_new_is_resumed():
    """Each knob that changes a number is in a run that was resumed above: name a new one there, too."""
    changes_none = {
        'out_dir', 'init_from', 'fill', 'export', 'show', 'data_dir', 'dataset', 'validation', 'milestones',
        'fill_samples', 'wandb_project', 'device', 'compile', 'timeout'}
    tested = {*TINY, *EncoderConfig.__annotations__}.union(*(knobs for *_, knobs in ENDS))
    assert not knobs_of(train).keys() - tested - changes_none


@pytest.mark.parametrize('n_bad, code', [(1, 0), (30, 2)])
def test_float16_passes_over_what_is_not_finite(n_bad, code, run, monkeypatch):
    """Once; or always, until the scale is used up. Nothing of that is saved."""
    calls = itertools.count()

    def make_optimizer(model, *arguments, plain=train.make_optimizer):
        model.head.bias.register_hook(lambda x: x * math.inf if next(calls) < n_bad else x)
        return plain(model, *arguments)
    monkeypatch.setattr(train, 'make_optimizer', make_optimizer)
    done = run('a', code, max_iters=max(6, n_bad), dtype='float16', log_interval=100)
    if code:
        assert 'after step 0 is not finite' in refused(done)
        assert not train.checkpoints('a')
    else:
        assert last('a')['scaler']['scale'] == 2 ** 15


def test_a_resumed_run_takes_the_next_samples_and_says_what_differs(run, monkeypatch):
    """With another batch too; its precision stays, unless the command names one.

    The checkpoint is as of an earlier revision: a knob and a field of the model are new, and the code is not
    named.
    """
    seen = []

    def micro_batches(loader, samples, size, plain=Loader.micro_batches):
        seen.append(list(samples))
        return plain(loader, samples, size)
    monkeypatch.setattr(Loader, 'micro_batches', micro_batches)
    run('a', max_iters=2, dtype='bfloat16')
    content = last('a')
    del content['config']['packing'], content['model_config']['norm']
    del content['optimizer_class'], content['code']
    for group in content['optimizer']['param_groups']:
        del group['param_names']
    train.write_checkpoint(train.newest('a'), content)
    done = run('a', max_iters=4, dtype='auto', total_batch=4, weight_decay=0.5, seed=5)
    differ, *_ = done.err.splitlines()
    assert differ.endswith(': seed 1 -> 5, packing None -> stream, total_batch 8 -> 4, max_iters 2 -> 4, '
                           'weight_decay 0.01 -> 0.5, dtype bfloat16 -> auto')
    assert seen == [[*range(0, 8)], [*range(8, 16)], [*range(16, 20)], [*range(20, 24)]]
    content = last('a')
    assert content['samples'] == 24
    assert content['optimizer']['param_groups'][0]['weight_decay'] == 0.5


def test_checkpoints_that_stay(run):
    """The newest two, those of milestones, also when a later command names none, and newer ones."""
    run('a', max_iters=12, checkpoint_interval=2, milestones=(0, 3, 4, 13))
    assert list(train.checkpoints('a')) == [0, 3, 4, 10, 12]
    run('a', max_iters=16, checkpoint_interval=1)
    assert list(train.checkpoints('a')) == [0, 3, 4, 13, 15, 16]
    for path in train.checkpoints('a').values():
        os.remove(path)                                 # as if they were moved elsewhere
    run('a', max_iters=1)
    assert [line['step'] for line in metrics('a')] == [0, 1, 1]         # its log is new
    assert os.path.exists('a/metrics.jsonl.old')


def test_a_run_begins_with_the_weights_of_another_one(run):
    """At step 0, with moments and samples of its own; its own checkpoint comes first."""
    run('a', max_iters=4)
    knobs = {'init_from': 'a', 'seed': 2}
    done = run('b', learning_rate=0, max_iters=2, **knobs)
    assert 'from step 0 of a' in done.out
    content = last('b')
    count, *_ = tree_leaves(content['optimizer']['state'])
    assert (content['step'], content['samples'], count.item()) == (2, 16, 2)
    assert_equal(content['model'], last('a')['model'])
    # validation samples do not depend on the seed
    assert metrics('b', 'val')[0]['loss'] == metrics('a', 'val')[-1]['loss']
    assert 'from step 2 of' in run('b', max_iters=3, **knobs).out


def test_code_that_changed_is_said(run):
    run('a', max_iters=2)
    path = train.newest('a')
    train.write_checkpoint(path, {**last('a'), 'code': {'model.py': 'another', 'train.py': 'one more'}})
    for knobs in {}, {'fill': 'the [MASK]'}:
        assert f'model.py and train.py changed since {path}' in run('a', max_iters=2, **knobs).err


@pytest.mark.parametrize('text, same', [
    ('"""Words."""\nx = 1   # one\n\n  # two\n', True), ('x = 1\n# ==== above\ny = 2\n', True),
    ('x = "a  # 1"\n', False), ('x = 1\ny = 2\n', False)])
def test_code_is_what_decides_a_number(text, same):
    """Neither comments nor docstrings, nor the third floor."""
    third = '# ==== above: everything that decides a number\nz = 3\n'
    plain = train.code_lines(f'x = 1\n{third}')
    assert (train.code_lines(text if '====' in text else text + third) == plain) == same


def test_a_group_of_parameters_may_have_a_factor_of_the_learning_rate():
    one, other = torch.zeros(2, 1)
    optimizer = torch.optim.SGD([{'params': [one]}, {'params': [other], 'lr_factor': 0.5}])
    train.set_lr(optimizer, 0.25, CPU)
    assert [group['lr'] for group in optimizer.param_groups] == [0.25, 0.125]


# ---- checkpoints ----

def test_damage_is_found_or_changes_nothing(pair, tmp_path):
    """Of flipped bits."""
    path = tmp_path / 'x.pt'
    whole = (pair / 'ckpt_0000008.pt').read_bytes()
    n_refused = 0
    for bit in np.random.default_rng(1).integers(0, 8 * len(whole), 40).tolist():
        path.write_bytes(whole)
        flip(path, *divmod(bit, 8))
        try:
            content = train.read_checkpoint(path)
        except UserError:
            n_refused += 1
            continue
        assert_equal(content, last(pair))               # it was a date, an attribute or padding
    assert n_refused > 20


def test_files_of_other_programs_and_revisions(pair, tmp_path):
    """No code of a file is run."""
    path = str(tmp_path / 'x.pt')
    content = last(pair)
    newer = {**content, 'model_config': {**content['model_config'], 'a_newer_field': 1}}
    for other in {'model': {}}, newer, {**content, 'step': pytest.approx(1)}:
        torch.save(other, path)
        with pytest.raises(UserError, match='x.pt cannot be loaded: .*another version of model.py'):
            train.read_checkpoint(path)


def test_a_second_run_in_a_folder_is_refused(run):
    with train.lock_folder('a'):
        assert 'another run uses it' in refused(run('a', 2))


# ---- refusals: without most of these a wrong run would go on ----

def test_what_a_run_must_have_in_common_with_its_checkpoint(stage, pair, corpus, tmp_path, monkeypatch):
    """A new run may take the weights to another corpus of the same tokenizer and has an optimizer of its own.

    Fields that may differ are those that only decide a model's start or its dropout.
    """
    run = shutil.copytree(pair, tmp_path / 'run')
    content = last(run)
    monkeypatch.setattr(train, 'read_checkpoint', lambda path: content)
    parts = dict.fromkeys(content['model_config'], content['model_config'])         # key -> part that has it
    parts |= dict.fromkeys(('tokenizer', 'train', 'val'), content['data'])
    parts['objective'] = content['config']
    parts['optimizer_class'] = content
    parts['param_names'] = content['optimizer']['param_groups'][0]
    may_differ = {'goes on': set(), 'begins': set()}
    for key, part in parts.items():
        with monkeypatch.context() as patch:
            patch.setitem(part, key, 'another')
            for what, folder in (('goes on', run), ('begins', tmp_path / key)):
                done = stage('train', *tiny(corpus, folder, **PAIR, init_from=run, max_iters=0))
                is_moments = key in ('optimizer_class', 'param_names')
                said = 'moments of another optimizer' if is_moments else f'has {key}=another, this'
                if done.code == 0:
                    may_differ[what].add(key)
                else:
                    assert said in done.err
    start = {'dropout', 'attention_dropout', 'pair_init', 'tied_start'}
    assert may_differ['goes on'] == start
    assert may_differ['begins'] == {*start, 'train', 'val', 'optimizer_class', 'param_names'}


@pytest.mark.parametrize('knobs', [
    {'mask_fraction': 0.0}, {'mask_fraction': 15.0}, {'seed': 2 ** 63},
    {'attention': 'gau', 'position': 'none', 'key_size': 0}, {'schedule': 'x'},
    {'init_from': 'some/bert'}, {'device': 'mps'},
    {'block_size': 10 ** 6, 'position': 'none'}])
def test_mistakes_are_one_line(knobs, run):
    refused(run('a', 2, **knobs))


def test_every_process_needs_equally_many_sequences():
    runtime = train.XlaRuntime(torch.device('xla'), torch.float32, 0, 4, None)
    for total_batch, message in (3, 'must be at least 4'), (6, 'on xla, choose a multiple of 4'):
        with pytest.raises(UserError, match=f'total_batch: {message}'):
            train.check_knobs({**knobs_of(train), 'total_batch': total_batch}, runtime)


def test_a_folder_that_machines_do_not_share_is_refused(run, monkeypatch):
    monkeypatch.setattr(Runtime, 'sum', lambda self, *numbers: [number + 1 for number in numbers])
    assert 'a folder that all machines share' in refused(run('a', 2))


# ---- what a run shows ----

def test_a_model_learns_more_than_how_often_tokens_occur(run):
    run('a', max_iters=300, total_batch=16, batch_size=16, n_layer=1, n_embd=32, n_inner=64,
        mask_fraction=0.3, learning_rate=1e-2, warmup_iters=30, dropout=0, attention_dropout=0,
        log_interval=1000, position='rope', norm_place='pre')
    begun, ended = [line for line in train.read_metrics('a') if line['kind'] == 'val']
    assert ended['loss'] < ended['unigram'] - 0.1 < begun['loss'] - 0.5


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_an_eager_one(run, monkeypatch):
    """On the CPU, where main() compiles nothing by itself; checkpoints have the names of the model itself."""
    knobs = {'dropout': 0, 'attention_dropout': 0}
    run('eager', **knobs)
    monkeypatch.setattr(Runtime, 'compiles', True)
    run('compiled', **knobs)
    for line, other in zip(metrics('eager', 'train'), metrics('compiled', 'train'), strict=True):
        assert line['loss'] == pytest.approx(other['loss'], abs=1e-4)
    assert last('eager')['model'].keys() == last('compiled')['model'].keys()


def test_further_corpora_are_validated_on(run, corpus, meta, tmp_path):
    """As by a run that has the other corpus as its own; no file may be damaged."""
    splits = {**meta['splits'], 'val': meta['splits']['train'][:1]}
    corpus_like(corpus, tmp_path, {**meta, 'splits': splits})
    knobs = {'data_dir': tmp_path, 'max_iters': 0}
    run('a', **knobs, dataset=corpus, validation='other')
    run('b', **knobs, dataset='other')
    [one], [other] = train.read_metrics('a'), train.read_metrics('b')
    assert one['other_loss'] == other['loss'] != one['loss']
    flip(f"other/{meta['splits']['train'][0]['stem']}.bin")
    assert 'missing, damaged' in refused(run('c', 2, **knobs, dataset='other'))


def test_show_walks_from_a_text_to_its_loss(run):
    """Which is that of a step of one sequence, without dropout; every predicted token has a line."""
    knobs = {'dropout': 0, 'attention_dropout': 0, 'total_batch': 1, 'max_iters': 1}
    shown = run('a', show=1, **{**knobs, 'dropout': 0.5}).out
    assert shown.count(', predicted: ') == 5            # of 32
    assert not os.path.exists('a')
    assert '(1, 32, 16)' in shown                       # what a module returns
    run('a', **knobs)
    assert f"\nloss {metrics('a', 'train')[0]['loss']:.3f} nats" in shown


def test_fill_prints_five_predictions_for_each_mask(pair, stage, meta):
    """The model sees the ids of training, also of a full stop behind a mask."""
    lines = stage('train', f'--init_from={pair}', '--fill=the [MASK] of a [MASK].').out.splitlines()
    model, tokenizer, _ = train.load(str(pair))
    special = meta['special']
    ids = [special['cls'], *tokenizer.encode(['the in of a and.'])[0], special['sep']]
    places = [2, len(ids) - 3]                          # of " in" and " and", a token each
    for place in places:
        ids[place] = special['mask']
    best = model(torch.tensor([ids]))[0, places].softmax(-1).topk(5)
    parts = [ids[1:places[0]], ids[places[0] + 1:-1]]
    model.encoder.dropout.p = 0.5                       # the run has none
    chances = train.fill_masks(model.train(), tokenizer, parts)         # without dropout all the same
    torch.testing.assert_close(chances.topk(5).values, best.values)
    for line, indices, chances in zip(lines[1:], best.indices, best.values, strict=True):
        assert line.split()[::2] == [tokenizer.pieces[index].strip('\u2581') or '\u2581' for index in indices]
        assert line.split()[1::2] == [f'{chance:.3f}' for chance in chances]


def test_what_is_no_run_is_refused(run, stage):
    """An empty folder as the first weights; a checkpoint that was copied without its tokenizer."""
    os.mkdir('empty')
    assert 'repeated without init_from' in refused(run('empty', 2, init_from='empty'))
    run('a', max_iters=1)
    os.mkdir('copy')
    shutil.copy(train.newest('a'), 'copy')
    assert 'copy the folder `tokenizer`' in refused(stage('train', '--init_from=copy', '--fill=a [MASK]'))


def test_the_rank_of_a_masked_word(pair, corpus, meta, capsys, monkeypatch):
    """In the first words of the first held-out document."""
    model, tokenizer, _ = train.load(str(pair))
    with happening(monkeypatch, 'fill_masks') as calls:
        train.show_masked_words(model, corpus, meta, 1)
    (*_, (before, after)), = calls
    ids = train.DocumentRows(corpus, meta, 'val', 1 << 16)[0]
    target = ids[1 + len(before)]
    assert [*before, target, *after] == ids[1:2 + len(before + after)].tolist()
    chances, = train.fill_masks(model, tokenizer, [before, after])
    rank = 1 + chances.argsort(descending=True).tolist().index(target)
    assert f'masked: {tokenizer.decode([target]).strip()}, rank {rank}\n' in capsys.readouterr().out


def test_a_part_of_a_tensor_is_not_saved(tmp_path):
    class Sharded(torch.Tensor):
        full_tensor = None
    with pytest.raises(UserError, match='a tensor is sharded'):
        train.write_checkpoint(tmp_path / 'ckpt_0000001.pt', {'model': {'x': Sharded(torch.zeros(2))}})


def test_losses_have_the_shape_of_their_weights():
    """Else they would be broadcast, to a mean of something else."""
    model = torch.nn.Linear(3, 1)                       # losses (2, 1) for weights (2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    batch = {'input': torch.ones(2, 3), 'weights': torch.ones(2, 3)}
    with pytest.raises(ValueError, match=r'losses of \(2, 1\) for weights of \(2, 3\)'):
        train.train_step(model, optimizer, torch.amp.GradScaler('cpu', enabled=False), [batch], 6, 1, CPU)


# ---- processes ----

def test_one_process_takes_the_steps_of_two_or_goes_on_from_them(pair, run):
    """Losses, norms, validation and weights, though 7 rows and 13 are not shared equally."""
    shutil.copytree(pair, 'rest')
    os.remove('rest/ckpt_0000008.pt')
    run('one', **PAIR)
    assert 'from step 6 of' in run('rest', **PAIR).out
    for folder in ('one', 'rest'):
        for one, two in zip(metrics(folder), metrics(pair), strict=True):
            assert one['loss'] == pytest.approx(two['loss'], rel=1e-5)
            assert (one['norm'] or 0) == pytest.approx(two['norm'] or 0, rel=1e-4)      # None: validation
            assert one['accuracy'] == two['accuracy']
        for name, x in last(folder)['model'].items():
            assert (x - last(pair)['model'][name]).abs().max() < 6e-5, name     # Adam's steps are 1e-4 each
