"""bench.py: counts, turns and ratios on a fake clock, memory, finished runs, rank, pictures and tables."""
import json
import math
import os
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import knobs_of, refused, tiny, words

import bench
import train
from bench import GROUPS, MATRICES, VARIANTS
from model import SHATTER, MaskedLM, PermutationLM, SequenceClassifier

CPU = train.Runtime(torch.device('cpu'), torch.float32, 0, 1, None)
SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'vocab_size': 60, 'device': 'cpu',
         'dtype': 'float32'}
CONFIG = {**knobs_of(bench), **SHAPE, 'variants': ['original', 'shared']}
BASE = {                            # of the README: masked-LM models, 30,522 words, 512 positions
    'original': 109514298, 'symmetric': 102427194, 'pairwise': 103017018, 'shared': 95367738,
    'no_position': 109121082, 'roformer_v1': 109121082, 'rpe': 111471162, 'rab': 109514682,
    'roformer_v2': 108377088, 'part_mask': 109121082, 'one_head_softmax': 102033978,
    'one_head_sigmoid': 102033978, 'part_bias': 102144570, 'shatter': 102144570, 'gau': 110742528,
    'xlnet': 116180538, 'xlnet_plm': 116180538 + 768,
}
OWN_WORDS = [name for name in VARIANTS if 'vocab_size' in VARIANTS[name]]


@pytest.fixture
def call(stage, tmp_path):
    """call('--what=...', key=value, ...) -> (the stage, bench.csv as a DataFrame)."""
    def run(*arguments, pictures=False, **knobs):
        knobs = words(**{**SHAPE, 'out_dir': tmp_path, **knobs})
        done = stage('bench', *knobs, *arguments, pictures=pictures)
        return done, pd.read_csv(tmp_path / 'bench.csv') if done.code == 0 else None
    return run


# ---- parameters ----

def test_counts_are_the_readmes_and_the_papers_or_explained(monkeypatch):
    """Groups of all systems, at this run's and at the papers' shapes; the papers' do not depend on knobs."""
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)
    assert set(BASE) == set(VARIANTS) - set(OWN_WORDS) - {'hf_bert'}
    rows = list(bench.params({**CONFIG, 'vocab_size': 30522, 'variants': list(VARIANTS)}, CPU))
    found, theirs, unequal = {}, [row for row in rows if row['printed']], {}
    for row in rows:
        assert sum(row[group] for group in GROUPS) == row['total'] or row['printed']
        if row['system'] in BASE and not row['printed']:
            found[row['system'], row['shape']] = row['total']
            assert (row['MLP'] == 0) == (row['system'] == 'gau')
            assert row['shape'] != 'base' or row['embedding'] == (30522 + 2) * 768
    assert {name: found[name, 'base'] for name in BASE} == BASE
    assert [found['pairwise', shape] for shape in ('this run', 'small', 'large')] == [
        531466, 27875642, 311556922]
    for row in theirs:
        total, where = row['total'], row['where, or why not']
        rounded = {'M': f'{total / 1e6:.1f}M', 'k': f'{total / 1e3:,.0f}k'}
        if row['printed'] not in (f'{total:,}', rounded.get(row['printed'][-1])):
            unequal[' '.join(row[key] for key in ('system', 'shape', 'counted'))] = where
    papers = {row['where, or why not'].split(':')[0] for row in theirs}
    assert papers == {'courtois', 'kowsher', 'tian', 'liu'}
    assert len(theirs) == 21
    assert list(unequal) == ['shared base all', 'original large matrices', 'shatter large matrices']
    assert all('12 of the 24' in source or 'classifier' in source for source in unequal.values())


# ---- time ----

class Clock:
    """Steps take the seconds of `costs`, and twice as long in every second round."""

    def __init__(self, monkeypatch, **costs):
        self.now, self.calls, self.costs = 0.0, [], costs
        monkeypatch.setattr(bench.time, 'perf_counter', lambda: self.now)
        monkeypatch.setattr(bench, 'make_step', lambda name, *arguments: lambda: self.step(name))

    def step(self, name):
        load = 1 + len(self.calls) // len(self.costs) % 2
        self.calls.append(name)
        self.now += load * self.costs[name]


def test_systems_take_turns_and_ratios_are_of_one_round(monkeypatch):
    clock = Clock(monkeypatch, original=2.0, shared=1.0, hf_bert=6.0)
    config = {**CONFIG, 'variants': ['original', 'shared', 'hf_bert'], 'rounds': 3, 'lengths': (100,),
              'batches': (4,)}
    rows = {row['system']: row for row in bench.speed(config, CPU)}
    rounds = ['original', 'shared', 'hf_bert', 'original', 'shared'] * 3    # each begins with the next
    assert clock.calls == rounds[0:3] + rounds[1:4] + rounds[2:5] + rounds[0:3] + rounds[1:4]
    assert [row['ms'] for row in rows.values()] == [2000, 1000, 6000]   # 1, 2, 1 times the cost: the median
    assert [row['x original'] for row in rows.values()] == [1, 2, 1 / 3]
    assert [row['x hf_bert'] for row in rows.values()] == [3, 6, 1]
    assert [row['time / original'] for row in rows.values()] == [1, 0.5, 3]
    assert rows['original']['tokens/s'] == 4 * 100 / 2
    assert rows['shared']['printed'] is None
    rows = bench.speed({**config, 'finetune': True}, CPU)
    assert next(row for row in rows if row['system'] == 'shared')['printed'].startswith(
        '0.70 (kowsher original finetune: figure 3, CoLA')


def test_printed_values_of_a_system_and_length(monkeypatch):
    monkeypatch.setattr(bench, 'paper_rows', lambda kind: [
        ('liu', 'gau original train 256', '1.1', 'a'), ('liu', 'gau original train 512', '1.2', 'b'),
        ('liu', 'gau_n original train 512', '1.3', 'c'), ('tian', 'gau original train', '1.4', 'd')])
    both = '1.2 (liu original train 512: b); 1.4 (tian original train: d)'
    assert bench.printed('time', 'gau', 'train', length=64) == '1.4 (tian original train: d)'
    assert bench.printed('time', 'gau_12k', 'train', length=512) == both
    assert bench.printed('time', 'gau', 'finetune') is None


def rows_of(n, length):
    ids, positions = torch.randint(60, (n, length)), torch.arange(5).repeat(n, 1) * 3
    return ids, positions, ids.gather(1, positions)


def test_transformers_bert_computes_the_loss_of_a_masked_lm():
    """The mean loss of the predicted positions, as the other systems."""
    pytest.importorskip('transformers')
    torch.manual_seed(0)
    model, rows = bench.build('hf_bert', {**CONFIG, 'dropout': 0.1}, 32).eval(), rows_of(2, 32)
    loss = bench.loss_of(model, rows, CONFIG)
    assert loss.item() == pytest.approx(math.log(60), rel=0.1)
    logits = model.model(rows[0]).logits.gather(1, rows[1][..., None].expand(-1, -1, 60))
    torch.testing.assert_close(loss, train.token_losses(logits, rows[2]).mean())
    assert model.model.config.hidden_dropout_prob == model.model.config.attention_probs_dropout_prob == 0.1


@pytest.mark.parametrize('name', ['original', 'gau_12k', 'xlnet'])
def test_all_logits_give_the_loss_of_the_predicted_ones(name):
    torch.manual_seed(0)
    model, rows, seen = bench.build(name, CONFIG, 32), rows_of(2, 32), []
    model.head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.shape))
    loss = bench.loss_of(model, rows, {**CONFIG, 'full_logits': True})
    torch.testing.assert_close(loss, bench.loss_of(model, rows, CONFIG))
    size = 12000 if name == 'gau_12k' else 60
    assert seen == [(2, 32, size), (2, 5, size)]


@pytest.mark.parametrize('name, kind', [('original', MaskedLM), ('shatter', SequenceClassifier),
                                        ('gau_12k', MaskedLM), ('xlnet_plm', PermutationLM)])
def test_a_step_trains(name, kind, monkeypatch):
    """Of a vocabulary of its own, here the smaller one; GAU has twice the layers."""
    config = {**CONFIG, 'dropout': 0.1, 'vocab_size': 20_000, 'finetune': kind is SequenceClassifier}
    torch.manual_seed(0)
    model = bench.build(name, config, 16)
    assert type(model) is kind and (model.config.dropout, model.config.attention_dropout) == (0.1, 0.1)
    assert model.config.n_layer == (4 if name == 'gau_12k' else 2)
    monkeypatch.setattr(bench, 'build', lambda *arguments: model)
    before = {key: p.clone() for key, p in model.named_parameters()}
    bench.make_step(name, 4, 16, config, CPU)()
    assert all(not torch.equal(p, before[key]) for key, p in model.named_parameters() if p.dim() > 1)
    assert all(p.grad is None for p in model.parameters())


# ---- memory ----

def test_memory_above_what_was_there():
    """A model with 8 MiB of embeddings keeps four times that: weights, gradients and two moments."""
    ballast = np.ones(2 ** 26)                          # 512 MiB, released before the model is built
    del ballast
    assert 4 * 8 < bench.step_memory('original', 2, 16, {**CONFIG, 'vocab_size': 2 ** 17}) < 400


class Pool:
    """In place of processes: the memory of a case, or the error of one without enough of it."""

    def __init__(self, *arguments):
        assert os.environ['MALLOC_MMAP_THRESHOLD_'] == '65536'
    __enter__, __exit__ = lambda self: self, lambda self, *arguments: None

    def submit(self, function, name, n, length, config):
        self.case = name, length
        return self

    def result(self):
        if self.case == ('gau', 64):
            raise BrokenProcessPool('killed')
        return {'original': 3.0, 'gau': 4.0}[self.case[0]] * self.case[1] / 32


def test_out_of_memory_is_a_row(monkeypatch):
    monkeypatch.setattr(bench, 'ProcessPoolExecutor', Pool)
    rows = list(bench.memory({**CONFIG, 'variants': ['original', 'gau'], 'lengths': (32, 64)}, CPU))
    assert [(row['length'], row['system'], row['MiB']) for row in rows[:3]] == [
        (32, 'original', 3.0), (32, 'gau', 4.0), (64, 'original', 6.0)]
    assert [row['MiB / original'] for row in rows[:3]] == [1, 4 / 3, 1] and math.isnan(rows[3]['MiB'])
    assert 'MALLOC_MMAP_THRESHOLD_' not in os.environ


@pytest.mark.slow
def test_the_table_of_the_readme(call):
    done, frame = call('--what=steps', variants='original,shatter,hf_bert', batches=2, lengths='16,32')
    assert [*frame.system] == ['original', 'shatter', 'hf_bert'] * 2
    assert [*frame.length] == [16] * 3 + [32] * 3
    assert (frame.MiB > 0).all() and (frame.MiB < 64).all() and (frame.ms > 0).all()
    columns = 'system rows length ms tokens/s x original x hf_bert MiB section made'
    assert ' '.join(frame) == columns and columns.split(' section')[0] in ' '.join(done.out.split())


# ---- finished runs ----

def test_where_a_curve_leaves_the_plateau():
    def end(losses, level):
        return bench.plateau_end([(10 * i, loss) for i, loss in enumerate(losses)], level)
    assert end([9, 7, 6.4, 6.6, 6.3, 6.0], 6.5) == 40           # not yet at 20: above it again
    assert end([9, 7, 6.6], 6.5) is None and end([6, 5], 6.5) == 0
    assert end([9, math.nan, 6], 6.5) == 20 and end([9, 6.5, 6.4], 6.5) == 20


def write_run(folder, seed, losses):
    """A run folder of train.py as bench.py reads it: validations every 10 steps, up to 30 of 30."""
    lines = [{'kind': 'val', 'step': 10 * i, 'loss': loss, 'accuracy': i / 100, 'unigram': 5.6}
             for i, loss in enumerate(losses)] + [{'kind': 'train', 'step': 30, 'loss': 1.0}]
    launches = [{'config': {'seed': seed, 'max_iters': last}} for last in (1, 30)]
    folder.mkdir()
    (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    (folder / 'run.json').write_text(json.dumps(launches))


def test_finished_runs_by_name(call, tmp_path):
    for seed, losses in enumerate([(6, 5, 4, 3), (6, 5.9, 5.8, 4)], 1):
        write_run(tmp_path / f'plain_rank_4-{seed}', seed, losses)
    write_run(tmp_path / 'wide', 1, (6, 5, 4))                      # stopped, or diverged
    write_run(tmp_path / 'base_pairwise', 1, (6, 5, 4, 3))          # Courtois et al.: folders of config/
    folders = [tmp_path / name for name in ('plain_*', 'wide', 'base_pairwise')]
    done, frame = call('--what=runs', runs=','.join(map(str, folders)), plateau=1.1, target_loss=3.5,
                       pictures=True)
    plain, wide, pairwise = frame.astype(object).where(frame.notna(), None).to_dict('records')
    assert (plain['system'], plain['runs'], plain['steps']) == ('plain_rank_4', 2, 30)
    assert (plain['loss'], plain['accuracy, %']) == ('3.5 (0.71)', '3 (0)')
    assert (plain['plateau'], plain['target']) == ('25 (7.1)', '30, 1 of 2')
    assert (wide['runs'], wide['loss'], wide['plateau'], wide['target']) == (1, None, '20', None)
    assert pairwise['printed'].startswith('until 12,000, ends where original does (courtois base: ')
    assert '3.5 (0.71)' in done.out and (tmp_path / 'runs.png').stat().st_size > 1000
    assert bench.mean_cell(pd.Series([10, 20, None], dtype=object)) == '15 (7.1), 2 of 3'


# ---- attention ----

def test_rank_of_matrices_of_known_rank():
    torch.manual_seed(0)
    for r in (1, 5, 16):
        matrix = torch.randn(2, 3, 16, r, dtype=torch.float64) @ torch.randn(2, 3, r, 16, dtype=torch.float64)
        assert bench.rank_and_zeros(matrix) == (r / 16, 0.0)
    noisy = torch.eye(16, dtype=torch.float64) * torch.tensor([1.0] * 4 + [1e-9] * 12)
    assert bench.rank_and_zeros(noisy) == (4 / 16, 252 / 256)                    # below float32's precision


def test_matrices_of_scores():
    scores = torch.tensor([[1.0, -1.0], [0.0, 2.0]], dtype=torch.float64)
    made = {name: make(scores[None, None])[0, 0] for name, make in MATRICES.items()}
    sigmoid = scores.sigmoid()
    assert made['QK^T'].tolist() == [[1, -1], [0, 2]] and made['relu^2'].tolist() == [[1, 0], [0, 4]]
    assert torch.allclose(made['softmax'].sum(-1), torch.ones(2).double())
    torch.testing.assert_close(made['l2 sigmoid'], sigmoid / sigmoid.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize('name', sorted(set(VARIANTS) - {'hf_bert', *OWN_WORDS}))
def test_scores_are_those_that_the_model_uses(name):
    """The maps, times the model's own values, are what its attention gives: checked by a second way."""
    torch.manual_seed(0)
    model = bench.build(name, CONFIG, 16)
    ids, config = torch.randint(60, (1, 16)), model.config
    maps, heads = bench.attention_maps(model, ids), 1 if config.attention == 'gau' else 4
    assert [a.shape for a in maps] == [(heads, 16, 16)] * config.n_layer
    assert all(a.dtype == torch.float64 and torch.isfinite(a).all() and (a >= 0).all() for a in maps)
    if config.attention not in SHATTER:
        assert all(torch.allclose(a.sum(-1), torch.ones(heads, 16).double()) for a in maps)
    operator = model.encoder.blocks[0].attention
    if config.attention in ('original', 'pairwise', 'part_mask', 'part_bias') and config.position != 'rpe':
        x, seen = model.encoder.embed(ids), []
        value = operator.value(x).view(16, 4, 4).transpose(0, 1)
        operator.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            model.encoder(ids)
        torch.testing.assert_close((maps[0] @ value).transpose(0, 1).reshape(16, 16), seen[0][0])


def test_scores_of_squared_relu_are_scaled_as_inside_softmax():
    """squared_relu divides after relu; the matrices of Liu's table 3 are of scores over sqrt(s)."""
    scores = []
    for normaliser in ('softmax', 'squared_relu'):
        torch.manual_seed(0)
        config = bench.EncoderConfig(60, 16, 1, 4, 16, 32, attention='gau', position='rope', key_size=8,
                                     normaliser=normaliser)
        scores += bench.scores_of(MaskedLM(config), torch.arange(16)[None])
    assert [name for name, _ in scores] == ['softmax', 'relu^2']
    torch.testing.assert_close(scores[0][1], scores[1][1])


def test_a_run_of_train_and_its_rank_and_pictures(stage, call, corpus, tmp_path):
    knobs = {'attention': 'shatter', 'position': 'none', 'max_iters': 2, 'warmup_iters': 1}
    for seed in (1, 2):
        assert stage('train', *tiny(corpus, tmp_path / f'mine-{seed}', seed=seed, **knobs),
                     pictures=True).code == 0
    folders = words(runs=tmp_path / 'mine-*', rank_rows=2, sentence='A list')
    done, frame = call('--what=runs,rank,partition', *folders, pictures=True)
    assert [*frame.section] == ['runs'] + ['rank'] * 8 + ['partition'] * 12 and frame.runs[0] == 2
    rows = frame[frame.section == 'rank']
    assert [*rows.run] == ['mine-1'] * 4 + ['mine-2'] * 4 and [*rows.matrix] == [*MATRICES] * 2
    assert rows['rank / T'].between(0, 1).all() and (rows.least <= rows['rank / T']).all()
    assert rows.printed.iloc[0] == '0.25, about 0% (liu: table 3, rows of 512)' and (rows['T'] == 32).all()
    assert (frame[frame.section == 'partition'].error < 1e-6).all()
    for name in ('runs', 'attention_mine-1', 'attention_mine-2', 'partition'):
        assert (tmp_path / f'{name}.png').stat().st_size > 1000
    assert frame.made.nunique() == 1 and f'torch {torch.__version__}' in done.out
    (tmp_path / 'partition.png').unlink()
    plain, _ = call('--what=partition')
    assert plain.err == 'no partition.png without matplotlib: pip install matplotlib\n'
    content = torch.load(train.newest(str(tmp_path / 'mine-1')))
    content['data']['tokenizer'] = 'another'
    train.write_checkpoint(train.newest(str(tmp_path / 'mine-1')), content)
    assert 'tokenizer' in refused(call('--what=rank', *folders)[0])


# ---- the whole ----

def test_cells():
    assert [bench.cell(value) for value in (None, math.nan, 109514298, 3366.6, 0.51234, 7.0, 'a')] == [
        '-', '-', '109,514,298', '3,367', '0.5123', '7', 'a']


def test_without_transformers_the_others_are_compared(call, monkeypatch):
    monkeypatch.setattr(bench.importlib.util, 'find_spec', lambda name: None)
    done, frame = call('--what=speed', variants='original,hf_bert', lengths=16, batches=1, rounds=1)
    assert [*frame.system] == ['original'] and done.err.startswith('no hf_bert without transformers')


@pytest.mark.parametrize('knob, message', [
    ('--what=sped', "what='sped': choose one of params, steps"),
    ('--variants=original,pair', "variants='pair': choose one of original, symmetric"),
    ('--rounds=0', 'rounds=0'), ('--variant=shared', 'variants'), ('--n_embd=18', 'n_embd=18: must be a'),
    ('--what=runs', "runs='': no such folder"), ('--runs=nowhere', "runs='nowhere': no such folder"),
])
def test_bad_input_is_refused(knob, message, call):
    assert message in refused(call('--what=rank' if knob == '--runs=nowhere' else '--what=params', knob)[0])
