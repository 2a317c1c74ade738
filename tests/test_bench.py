"""bench.py and results/curves.py: counts, turns and ratios on a fake clock, memory; runs, rank, pictures."""
import errno
import fnmatch
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict

import pandas as pd
import pytest
import torch
from conftest import knobs_of, process, refused, tiny, words
from test_configs import resolved
from test_papers import COMMANDS
from test_train import CPU

import bench
import curves
import train
from bench import PARAMETER_GROUPS, SYSTEMS
from configurator import UserError
from curves import MATRICES
from model import SHATTER, MaskedLM, PermutationLM, SequenceClassifier
from prepare_data import copy_tokenizer, load_tokenizer

SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'vocab_size': 60, 'device': 'cpu',
         'dtype': 'float32'}
CONFIG = {**knobs_of(bench), **SHAPE}
RUNS = {**knobs_of(curves), **{key: value for key, value in SHAPE.items() if key != 'vocab_size'}}
OWN_WORDS = [name for name in SYSTEMS if 'vocab_size' in SYSTEMS[name]]


@pytest.fixture
def call(stage, tmp_path):
    """call('--what=...', key=value, ...) -> (the stage, bench.csv or curves.csv as a DataFrame)."""
    def run(*arguments, pictures=False, **knobs):
        is_bench = '--what=params' in arguments or '--what=sped' in arguments
        name = 'bench' if is_bench else 'curves'
        shape = {'device': 'cpu', 'dtype': 'float32'} if name == 'curves' else SHAPE
        knobs = words(**{**shape, 'out_dir': tmp_path, **knobs})
        done = stage(name, *knobs, *arguments, pictures=pictures)
        return done, pd.read_csv(tmp_path / f'{name}.csv') if done.code == 0 else None
    return run


def test_counts_are_those_of_the_papers_or_explained(monkeypatch):
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)
    rows = list(bench.params({**CONFIG, 'vocab_size': 30522, 'systems': list(SYSTEMS)}, CPU))
    ours = [row for row in rows if not row['printed']]
    theirs = [row for row in rows if row['printed']]
    assert all(sum(row[group] for group in PARAMETER_GROUPS) == row['total'] for row in ours)
    pairwise = {row['shape']: row for row in ours if row['system'] == 'pairwise'}
    assert [row['total'] for row in pairwise.values()] == [531466, 27875642, 103017018, 311556922]
    unequal = {}                                        # row -> why it is another number
    for row in theirs:
        total = row['total']
        as_printed = {'M': f'{total / 1e6:.1f}M', 'k': f'{total / 1e3:,.0f}k'}
        if row['printed'] != as_printed.get(row['printed'][-1], f'{total:,}'):
            unequal[f"{row['system']} {row['shape']} {row['counted']}"] = row['source']
    assert len(theirs) == 21
    assert list(unequal) == ['shared base all', 'original large matrices', 'shatter large matrices']
    assert all('12 of the 24' in source or 'classifier' in source for source in unequal.values())


def test_counts_of_lius_table_4():
    """By the command of results/reproduce.md, whose names of systems tell the words."""
    [command] = [line for line in COMMANDS if line == 'python bench.py config/bench/liu.py']
    knobs = resolved(command)[1]
    rows = bench.params({**knobs, 'systems': knobs['variants'].split(',')}, CPU)
    assert {row['system']: row['total'] for row in rows if row['printed']} == {
        'gau': 96519170, 'roformer_v1': 124147970, 'roformer_v2': 94777090}


def test_a_new_attention_or_position_is_a_system(monkeypatch):
    """By its row in a table of model.py, under its own name, and the attention with rope too."""
    monkeypatch.setitem(bench.ATTENTION, 'mine', bench.ATTENTION['shared'])
    monkeypatch.setitem(bench.POSITION, 'my_position', bench.POSITION['rope'])
    systems = bench.make_systems()
    assert {*systems} - {*SYSTEMS} == {'mine', 'mine_rope', 'my_position'}
    monkeypatch.setattr(bench, 'SYSTEMS', systems)
    model = bench.build('mine', CONFIG, 16)
    assert (model.config.attention, model.config.position) == ('mine', 'absolute')
    assert bench.build('my_position', CONFIG, 16).config.position == 'my_position'


def test_every_system_has_the_attention_of_its_name():
    for attention in bench.ATTENTION:
        assert bench.build(attention, CONFIG, 16).config.attention == attention
    assert SYSTEMS['gau']['position'] == 'rope'
    assert SYSTEMS['xlnet']['position'] == 'none'


def test_systems_take_turns_and_ratios_are_of_one_round(monkeypatch):
    """On a clock of which every second round takes twice as long."""
    costs = {'original': 2.0, 'shared': 1.0, 'hf_bert': 6.0}            # seconds
    clock = 0.0
    calls = []

    def step(name):
        nonlocal clock
        slow_round = len(calls) // 3 % 2 == 1
        clock += 2 * costs[name] if slow_round else costs[name]
        calls.append(name)

    monkeypatch.setattr(bench.time, 'perf_counter', lambda: clock)
    monkeypatch.setattr(bench, 'make_step', lambda name, *arguments: lambda: step(name))
    config = {**CONFIG, 'systems': list(costs), 'rounds': 3, 'lengths': (100,), 'batches': (4,)}
    rows = list(bench.speed(config, CPU))
    rounds = [*costs] * 2                               # each begins with the next
    assert calls == rounds[0:3] + rounds[1:4] + rounds[2:5] + rounds[0:3] + rounds[1:4]
    assert [row['ms'] for row in rows] == [2000, 1000, 6000]            # 1, 2, 1 times the cost: the median
    assert [row['x original'] for row in rows] == [1, 2, 1 / 3]
    assert [row['x hf_bert'] for row in rows] == [3, 6, 1]
    assert [row['time / original'] for row in rows] == [1, 0.5, 3]
    assert rows[0]['tokens/s'] == 4 * 100 / 2
    assert rows[1]['printed'] is None
    shared = list(bench.speed({**config, 'finetune': True}, CPU))[1]
    assert shared['printed'].startswith('0.70 (kowsher original finetune: figure 3, CoLA')


def test_printed_values_are_those_of_a_system_and_its_qualifiers():
    for mode in 'train', 'finetune':                    # a masked LM by the paper, a classifier by its code
        time = bench.printed('time', 'roformer_v2_12k', mode, '512')
        assert time == '1.224 (liu gau 512: table 4, 8 rows, one T40)'
    assert bench.printed('memory', 'roformer_v2', '512', 'half').startswith('10047 MiB, 118.7% (liu gau 512')
    assert bench.printed('time', 'roformer_v2', 'train', '300') is None


def test_printed_times_are_those_of_the_shape(monkeypatch):
    """Tian et al. 2021, table 1, has Shatter in base and in large size."""
    monkeypatch.setattr(bench, 'make_step', lambda *arguments: lambda: None)
    cells = {}
    for size in 'base', 'large', 'small':
        sizes = dict(zip(bench.SHAPE_KNOBS, bench.SHAPES[size], strict=True))
        config = {**CONFIG, **sizes, 'systems': ['original', 'shatter'], 'lengths': (512,), 'batches': (1,)}
        cells[size] = list(bench.speed(config, CPU))[1]['printed']
    assert cells['base'] == '0.85 (tian original train base 512: table 1, 45 against 53 hours, TPUv3)'
    assert cells['large'] == '0.84 (tian original train large 512: table 1, 151 against 180 hours, TPUv3)'
    assert cells['small'] is None


def batch_of(n, length):
    ids = torch.randint(60, (n, length))
    positions = torch.arange(5).repeat(n, 1) * 3
    return ids, positions, ids.gather(1, positions)


@pytest.mark.parametrize('finetune', [False, True])
def test_transformers_bert_has_the_loss_of_original(finetune):
    pytest.importorskip('transformers')
    config = {**CONFIG, 'finetune': finetune}
    batch = batch_of(2, 32)
    losses = []
    for name in ('original', 'hf_bert'):
        torch.manual_seed(0)
        model = bench.build(name, config, 32).eval()
        losses.append(bench.loss_of(name, model, batch, config))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize('name', ['original', 'hf_bert'])
def test_a_step_runs_in_training_mode(name, monkeypatch):
    """transformers builds its models in evaluation mode: without dropout a step is faster."""
    if name == 'hf_bert':
        pytest.importorskip('transformers')
    modes = []
    loss_of = bench.loss_of

    def record(name, model, batch, config):
        modes.extend(module.training for module in model.modules())
        return loss_of(name, model, batch, config)

    monkeypatch.setattr(bench, 'loss_of', record)
    bench.make_step(name, 2, 32, CONFIG, CPU)()
    assert modes
    assert all(modes)


@pytest.mark.parametrize('length, n_predicted', [(16, 3), (20, 3), (128, 20)])
def test_rows_predict_as_many_tokens_as_in_training(length, n_predicted):
    """15 %, rounded up; no position twice."""
    ids, positions, targets = bench.random_batch(4, length, 60)
    meta = {'special': {'pad': 0}, 'vocab_size': 60}
    assert train.Masker(meta, length, 0.15, 'mlm', False).n_positions == n_predicted
    assert positions.shape == targets.shape == (4, n_predicted)
    assert all(len(set(row)) == n_predicted for row in positions.tolist())
    assert torch.equal(targets, ids.gather(1, positions))
    assert ids.shape == (4, length)
    assert ids.max() < 60


@pytest.mark.parametrize('name', ['original', 'gau_12k', 'xlnet'])
def test_all_logits_give_the_loss_of_the_predicted_ones(name):
    torch.manual_seed(0)
    model = bench.build(name, CONFIG, 32)
    batch = batch_of(2, 32)
    seen = []                                           # (B, tokens) whose logits are computed
    model.head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.shape[:2]))
    loss = bench.loss_of(name, model, batch, {**CONFIG, 'full_logits': True})
    torch.testing.assert_close(loss, bench.loss_of(name, model, batch, CONFIG))
    assert seen == [(2, 32), (2, 5)]


@pytest.mark.parametrize('name, kind', [('original', MaskedLM), ('shatter', SequenceClassifier),
                                        ('gau_12k', MaskedLM), ('xlnet_plm', PermutationLM)])
def test_a_step_trains(name, kind, monkeypatch):
    """Of a vocabulary of its own, here the smaller one; GAU has twice the layers."""
    config = {**CONFIG, 'dropout': 0.1, 'vocab_size': 20_000, 'finetune': kind is SequenceClassifier}
    torch.manual_seed(0)
    model = bench.build(name, config, 16)
    assert type(model) is kind
    assert (model.config.dropout, model.config.attention_dropout) == (0.1, 0.1)
    assert model.config.n_layer == (4 if name == 'gau_12k' else 2)
    monkeypatch.setattr(bench, 'build', lambda *arguments: model)
    before = {key: p.clone() for key, p in model.named_parameters()}
    bench.make_step(name, 4, 16, config, CPU)()
    assert all(not torch.equal(p, before[key]) for key, p in model.named_parameters() if p.dim() > 1)


def test_memory_above_what_was_there():
    """A model with 8 MiB of embeddings has four times that after a step: weights, gradients and two moments.

    The second step has the moments beside the logits and the gradients of both uses of the embeddings.
    """
    config = {**CONFIG, 'vocab_size': 2 ** 17}
    ballast = 'numpy.ones(2 ** 26)'                     # 512 MiB, released before the model is built
    code = f"import numpy, bench; {ballast}; print(bench.step_memory('original', 2, 16, {config}))"
    done = process('-c', code, env={'MALLOC_MMAP_THRESHOLD_': '65536'})        # as in memory()
    assert 5 * 8 < float(done.out) < 400, done.err


def test_out_of_memory_is_a_row(monkeypatch):
    def peak(name, n, length, config):
        assert os.environ['MALLOC_MMAP_THRESHOLD_'] == '65536'
        if (name, length) == ('gau', 64):
            raise BrokenProcessPool('killed')
        return {'original': 3.0, 'gau': 4.0}[name] * length / 32

    monkeypatch.setattr(bench, 'ProcessPoolExecutor', lambda n, context: ThreadPoolExecutor(n))
    monkeypatch.setattr(bench, 'step_memory', peak)
    rows = list(bench.memory({**CONFIG, 'systems': ['original', 'gau'], 'lengths': (32, 64)}, CPU))
    assert [row['MiB'] for row in rows[:3]] == [3.0, 4.0, 6.0]
    assert [row['MiB / original'] for row in rows[:3]] == [1, 4 / 3, 1]
    assert math.isnan(rows[3]['MiB'])
    assert [row['half as long / MiB'] for row in rows[:3]] == [None, None, 0.5]
    assert 'MALLOC_MMAP_THRESHOLD_' not in os.environ


def test_what_half_the_length_saves_stands_beside_it(monkeypatch):
    """Tian et al. 2021, abstract: of 256 tokens over 512, so in the row of 512."""
    monkeypatch.setattr(bench, 'ProcessPoolExecutor', lambda n, context: ThreadPoolExecutor(n))
    monkeypatch.setattr(bench, 'step_memory', lambda *arguments: 1.0)
    rows = list(bench.memory({**CONFIG, 'systems': ['shatter'], 'lengths': (256, 512)}, CPU))
    assert [row['printed'] for row in rows] == [
        None, 'below 50% (tian half: abstract: over 50 % saved, by rows of half the length)']


def test_memory_without_proc_is_refused(monkeypatch):
    monkeypatch.setattr(bench.os.path, 'exists', lambda path: False)
    with pytest.raises(UserError, match='leave memory out'):
        next(bench.memory({**CONFIG, 'systems': ['original']}, CPU))


# ---- finished runs ----

def test_where_a_curve_leaves_the_plateau():
    def end(losses, level):
        return curves.plateau_end([(10 * i, loss) for i, loss in enumerate(losses)], level)
    assert end([9, 7, 6.4, 6.6, 6.3, 6.0], 6.5) == 40           # not yet at 20: above it again
    assert end([9, 7, 6.6], 6.5) is None
    assert end([6, 5], 6.5) == 0
    assert end([9, math.nan, 6], 6.5) == 20
    assert end([9, 6.5, 6.4], 6.5) == 20


def test_tokens_to_an_order_gap(call, tmp_path):
    """At the first of two validations in a row; without any of them in one run, there is no mean."""
    lines = [{'kind': 'val', 'step': 10 * i, 'loss': 3, 'unigram': 5, 'gap': gap}
             for i, gap in enumerate([0, 0.2, 0.1, 0.3, 0.2, 0.1])]
    make_run(tmp_path / 'seen-1', (), seed=1, total_batch=1000, block_size=50)
    make_run(tmp_path / 'seen-2', (), seed=2, total_batch=1000, block_size=50)
    for seed, kept in ((1, lines), (2, lines[2:])):
        (tmp_path / f'seen-{seed}' / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, kept)))
    runs = f'--runs={tmp_path}/seen-*'
    _, frame = call('--what=runs', runs, '--target_gap=0.2')
    assert records(frame)[0]['million tokens to gap'] == '1.5 (0)'
    _, frame = call('--what=runs', runs, '--target_gap=0.25')
    assert records(frame)[0].get('million tokens to gap') is None
    _, frame = call('--what=runs', runs)
    assert 'million tokens to gap' not in frame
    os.remove(tmp_path / 'seen-1' / 'run.json')
    assert 'seen-1: no record of a launch' in refused(call('--what=runs', runs, '--target_gap=0.2')[0])


def test_hours_of_a_run(call, tmp_path):
    """From line to line of the log at the speed of the second; none without a speed, or without run.json."""
    for name in 'base_shatter', 'alone':
        make_run(tmp_path / name, (), total_batch=100, block_size=36)
    make_run(tmp_path / 'slow', (6, 5))
    lines = [{'kind': 'val', 'step': 0, 'loss': 3, 'unigram': 5},
             {'kind': 'train', 'step': 10, 'loss': 3, 'tokens_per_second': 10},
             {'kind': 'train', 'step': 30, 'loss': 3, 'tokens_per_second': 40}]
    for name in 'base_shatter', 'alone':
        (tmp_path / name / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    (tmp_path / 'alone' / 'run.json').unlink()
    rows = records(call('--what=runs', runs=f'{tmp_path}/base_*,{tmp_path}/alone,{tmp_path}/slow')[1])
    assert [row['hours'] for row in rows] == [1.5, None, None]          # 10 x 360 s and 20 x 90 s
    assert rows[0]['printed'].startswith('45 hours (tian base: table 1')


def make_run(folder, losses, ptb_from=1, **knobs):
    """A finished run of train.py, validated every ten steps; on the Penn Treebank too from some line on."""
    lines = []
    for i, loss in enumerate(losses):
        line = {'kind': 'val', 'step': 10 * i, 'loss': loss, 'accuracy': i / 100, 'unigram': 5.6}
        if i >= ptb_from:
            line['ptb_loss'] = loss + 1
        lines.append(line)
    lines.append({'kind': 'train', 'step': 30, 'loss': 1.0})
    folder.mkdir()
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    launch = {'config': {'seed': 1, 'n_embd': 16, **knobs, 'out_dir': str(folder)}}
    (folder / 'run.json').write_text(json.dumps([launch]))


def records(frame):
    return frame.astype(object).where(frame.notna(), None).to_dict('records')


def test_seeds_of_a_system_are_pooled(call, tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr(train, 'plot', lambda path, panels, label: pictures.append(panels['step']))
    make_run(tmp_path / 'plain_rank_4-1', (6, 5, 4, 3), seed=1)
    make_run(tmp_path / 'plain_rank_4-2', (6, 5.9, 5.8, 4), seed=2)
    make_run(tmp_path / 'plain_rank_4-3', (6, 5, 4), seed=3)            # stopped
    make_run(tmp_path / 'base_pairwise', (6, 5, 4, 3))                  # Courtois et al.
    runs = f'{tmp_path}/plain_*,{tmp_path}/base_pairwise'
    done, frame = call('--what=runs', runs=runs, plateau=1.1, target_loss=3.5)
    plain, stopped, pairwise = records(frame)
    assert (plain['system'], plain['runs'], plain['steps']) == ('plain_rank_4', 2, 30)
    assert (plain['loss'], plain['ptb_loss'], plain['accuracy, %']) == ('3.5 (0.71)', '4.5 (0.71)', '3 (0)')
    assert (plain['plateau'], plain['target']) == ('25 (7.1)', None)
    assert (stopped['system'], stopped['runs'], stopped['plateau']) == ('plain_rank_4-3', 1, '20')
    assert (pairwise['system'], pairwise['target']) == ('base_pairwise', 30)
    assert pairwise['printed'].startswith('until 12,000, ends where original does (courtois base: ')
    assert '3.5 (0.71)' in done.out
    names = 'plain_rank_4', 'plain_rank_4-3', 'base_pairwise'
    assert [*pictures[0]] == [f'{name} {key}' for name in names for key in ('loss', 'ptb_loss')]
    assert pictures[0]['base_pairwise ptb_loss'] == [(10, 6), (20, 5), (30, 4)]


def test_a_sweep_is_not_pooled(call, tmp_path):
    make_run(tmp_path / 'width-1', (6, 3), n_embd=64)
    make_run(tmp_path / 'width-2', (6, 5), n_embd=128)
    rows = records(call('--what=runs', runs=f'{tmp_path}/width-*')[1])
    assert [(row['system'], row['runs']) for row in rows] == [('width-1', 1), ('width-2', 1)]
    assert [row['loss'] for row in rows] == [3, 5]


def test_a_loss_that_is_not_finite(call, tmp_path):
    """train.py leaves it out of metrics.jsonl. A corpus that the last validation lacks has no last loss."""
    make_run(tmp_path / 'a', (6, 3))
    path = tmp_path / 'a' / 'metrics.jsonl'
    more = {'kind': 'val', 'step': 20, 'accuracy': 0.1, 'unigram': 5.6}
    path.write_text(path.read_text() + json.dumps(more) + '\n' + json.dumps({**more, 'loss': 'high'}) + '\n')
    row, = records(call('--what=runs', runs=tmp_path / 'a', target_loss=4)[1])
    assert (row['steps'], row['accuracy, %']) == (20, 10)
    assert not {'loss', 'ptb_loss', 'target'} & row.keys()


def test_what_the_papers_print_beside_a_run(call, tmp_path):
    """On the corpus that they validated on; Liu's masked accuracy by scale and normaliser."""
    for name in 'tian_original', 'base_no_position', 'gau_scales_ns', 'gau_softmax_plus_512':
        make_run(tmp_path / name, (6, 3))
    frame = call('--what=runs', runs=f'{tmp_path}/*_*')[1]
    rows = {row['system']: row for row in records(frame)}
    assert rows['tian_original']['printed ptb_loss'] == 'about 2 nats (tian: figure 1)'
    assert rows['base_no_position']['printed ptb_loss'] == 'above 6 nats (tian base: figure 1)'
    assert rows['gau_scales_ns']['printed accuracy'] == '19.34% (liu: table 1, n)'
    assert rows['gau_softmax_plus_512']['printed accuracy'] == '41.07% (liu: table 2)'
    assert 'hours' in rows['tian_original']['printed']
    assert 'nats' not in rows['tian_original']['printed']
    assert 'printed loss' not in frame


def test_examples_of_the_tasks_beside_a_paper(monkeypatch):
    asked = []

    def read_hub(hub, split, data_dir):
        asked.append((hub, split, data_dir))
        return [None] * len(asked)

    monkeypatch.setattr(curves, 'read_hub', read_hub)
    rows = {(row['task'], row['split']): row for row in curves.examples({**RUNS, 'data_dir': 'copies'}, CPU)}
    assert asked[0] == ('rajpurkar/squad', 'train', 'copies')
    assert len(asked) == len(rows) == 30
    assert rows['squad1', 'dev'] == {'task': 'squad1', 'split': 'dev', 'examples': 2, 'printed': '10.6k'}
    assert rows['mnli', 'dev_mismatched']['printed'] == rows['mnli', 'test_matched']['printed'] == '9.8k'
    assert rows['rte', 'test']['printed'] == '3k'
    assert ('squad2', 'test') not in rows


def test_each_printed_run_is_made_by_a_command():
    """Runs of papers.json are folders of reproduce.md, and a command there shows them beside the value."""
    made = set()
    shown = []
    for command in COMMANDS:
        module, knobs = resolved(command)
        made.add(re.sub(r'-\d+$', '', knobs.get('out_dir', '')))
        if module is curves and knobs['what'] == 'runs':
            shown += knobs['runs'].split(',')
    for kind in 'convergence', 'accuracy', 'ptb_loss':
        for row in bench.printed_rows(kind):
            names = {row.system, *(f'{size}_{row.system}' for size in row.qualifiers)}
            folders = made & {f'out/{name}' for name in names}
            assert any(fnmatch.fnmatch(folder, pattern) for folder in folders for pattern in shown), row


def test_names_of_other_people_are_printed_without_control_characters(call, tmp_path):
    make_run(tmp_path / 'a\x1b[31m', (6, 3))
    path = tmp_path / 'a\x1b[31m' / 'metrics.jsonl'
    path.write_text(path.read_text().replace('ptb_loss', '\\u001b[2J_loss'))
    done, frame = call('--what=runs', runs=f'{tmp_path}/a*')
    assert frame.system[0] == r'a\x1b[31m'
    assert r'\x1b[2J_loss' in frame
    assert '\x1b' not in done.out


# ---- attention ----

@pytest.mark.parametrize('r', [1, 5, 16])
def test_rank_of_matrices_of_known_rank(r):
    torch.manual_seed(0)
    left, right = torch.randn(2, 3, 16, r).double(), torch.randn(2, 3, r, 16).double()
    assert curves.rank_and_zeros(left @ right) == (r / 16, 0.0)
    noisy = torch.tensor([1.0] * r + [1e-9] * (16 - r)).double().diag()         # below float32's precision
    assert curves.rank_and_zeros(noisy) == (r / 16, (256 - r) / 256)


def test_matrices_of_scores():
    scores = torch.tensor([[1.0, -1.0], [0.0, 2.0]], dtype=torch.float64)
    made = {name: make(scores) for name, make in MATRICES.items()}
    sigmoid = scores.sigmoid()
    assert made['QK^T'].tolist() == [[1, -1], [0, 2]]
    assert made['relu^2'].tolist() == [[1, 0], [0, 4]]
    assert torch.allclose(made['softmax'].sum(-1), torch.ones(2).double())
    torch.testing.assert_close(made['l2 sigmoid'], sigmoid / sigmoid.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize('name', sorted(set(SYSTEMS) - {'hf_bert', *OWN_WORDS}))
def test_scores_are_those_that_the_model_uses(name):
    """The maps, times the model's own values, are what its attention gives: checked by a second way."""
    torch.manual_seed(0)
    model = bench.build(name, CONFIG, 16)
    ids = torch.randint(60, (1, 16))
    config = model.config
    maps = list(curves.attention_maps(model, ids))
    heads = 1 if config.attention == 'gau' else 4
    assert [a.shape for a in maps] == [(heads, 16, 16)] * config.n_layer
    if config.attention not in SHATTER:
        assert all(torch.allclose(a.sum(-1), torch.ones(heads, 16).double()) for a in maps)
    if config.attention in ('original', 'pairwise', 'part_mask', 'part_bias') and config.position != 'rpe':
        operator = model.encoder.blocks[0].attention
        seen = []                                       # what the output matrix of the first layer gets
        value = operator.value(model.encoder.embed(ids)).view(16, 4, 4).transpose(0, 1)
        operator.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            model.encoder(ids)
        torch.testing.assert_close((maps[0] @ value).transpose(0, 1).reshape(16, 16), seen[0][0])


def test_scores_of_squared_relu_are_scaled_as_inside_softmax():
    """squared_relu divides after relu; the matrices of Liu's table 3 are of scores over sqrt(s)."""
    scores = []
    for normaliser in ('softmax', 'squared_relu'):
        torch.manual_seed(0)
        config = curves.EncoderConfig(60, 16, 1, 4, 16, 32, attention='gau', position='rope', key_size=8,
                                     normaliser=normaliser)
        scores += curves.scores_of(MaskedLM(config), torch.arange(16)[None])
    assert [name for name, _ in scores] == ['softmax', 'relu^2']
    torch.testing.assert_close(scores[0][1], scores[1][1])


def test_attention_of_an_untrained_gau():
    """Half of the weights of a training step are dropped here; scores of 8 dimensions have rank 8 of 32."""
    config = {**RUNS, 'dropout': 0.5, 'key_size': 8, 'lengths': (32,)}
    rows = {(row['mode'], row['matrix']): row for row in curves.untrained(config, CPU)}
    assert [*rows] == [(mode, kind) for mode in ('train', 'eval') for kind in ('QK^T', 'softmax', 'relu^2')]
    for mode in 'train', 'eval':
        assert rows[mode, 'QK^T']['rank / T'] == 8 / 32
        assert rows[mode, 'QK^T']['zeros'] == 0
    assert 0.45 < rows['train', 'softmax']['zeros'] < 0.55
    assert rows['eval', 'softmax']['zeros'] == 0
    assert rows['train', 'relu^2']['zeros'] > 0.5 > rows['eval', 'relu^2']['zeros']
    assert rows['train', 'softmax']['printed'] == '0.9983, 10.03% (liu: table 3)'
    assert rows['eval', 'softmax']['printed'] is None
    torch.manual_seed(1)
    model = bench.build('gau_12k', {**config, 'finetune': False, 'normaliser': 'squared_relu'}, 32)
    scores = [layer for _, layer in curves.scores_of(model, torch.randint(12_000, (1, 32)))]
    negative = (torch.stack(scores) <= 0).double().mean().item()
    assert rows['eval', 'relu^2']['zeros'] == pytest.approx(negative)


def test_a_run_of_train_and_its_rank_and_pictures(stage, call, corpus, tmp_path):
    run = tmp_path / 'mine'
    stage('train', *tiny(corpus, run, attention='shatter', position='none', max_iters=2), pictures=True)
    knobs = words(runs=run, sentence='A list')
    done, frame = call('--what=runs,rank,partition', *knobs, pictures=True)
    assert [*frame.section] == ['runs'] + ['rank'] * 4 + ['partition'] * 12
    rows = frame[frame.section == 'rank']
    assert [*rows.matrix] == [*MATRICES]
    assert rows['rank / T'].between(0, 1).all()
    assert (rows['T'] == 32).all()
    assert rows.printed.iloc[0] == '0.25, about 0% (liu: table 3, rows of 512)'
    assert (frame[frame.section == 'partition'].error < 1e-6).all()
    for name in ('runs', 'attention_mine', 'partition'):
        assert (tmp_path / f'{name}.png').stat().st_size > 1000
    assert frame.made.nunique() == 1
    assert f'torch {torch.__version__}' in done.out
    content = torch.load(train.newest(str(run)))
    content['data']['tokenizer'] = 'another'
    train.write_checkpoint(train.newest(str(run)), content)
    assert 'tokenizer' in refused(call('--what=rank', *knobs)[0])


@pytest.mark.parametrize('knob, message', [
    ('--what=sped', "what='sped': choose one of params, speed"),
    ('--what=params --variants=original,pair', "variants='pair': choose one of original, symmetric"),
    ('--what=speed', "what='speed': choose one of runs, rank"),
    ('--what=runs', "runs='': no such folder"),
    ('--runs=\x1b[2J', r"runs='\x1b[2J': no such folder"),
    ('--lengths=0', 'lengths=(0,) must be finite and at least 1'),
])
def test_bad_input_is_refused(knob, message, call):
    assert message in refused(call(*knob.split())[0])


def test_a_full_disk_is_one_line(call, monkeypatch):
    def fail(file):
        raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', fail)
    line = refused(call('--what=params', '--variants=original')[0])
    assert line.endswith('No space left on device')


def test_folders_that_are_no_runs_are_refused(call, corpus, tmp_path):
    """An empty folder; a trial of finetune.py, whose validations are scores of a task."""
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'trial').mkdir()
    (tmp_path / 'trial' / 'metrics.jsonl').write_text('{"kind": "val", "step": 3, "accuracy": 0.5}\n')
    for name in 'empty', 'trial':
        line = refused(call('--what=runs', runs=tmp_path / name)[0])
        assert f'{name}: no validation of a run of train.py' in line
    model = bench.build('original', {**CONFIG, 'finetune': True}, 16)
    train.write_checkpoint(str(tmp_path / 'trial' / 'model.pt'), {
        'model': model.state_dict(), 'model_config': asdict(model.config), 'config': {}, 'data': {},
        'head': 'classify', 'task': 'sst2', 'labels': ['0', '1']})
    copy_tokenizer(load_tokenizer(corpus), str(tmp_path / 'trial'))
    assert 'trial: a trial of finetune.py' in refused(call('--what=rank', runs=tmp_path / 'trial')[0])
