"""results/curves.py: finished runs, their plateaus, hours and seeds; rank of attention; pictures."""
import fnmatch
import json
import math
import re
from dataclasses import asdict

import pandas as pd
import pytest
import torch
from conftest import knobs_of, refused, tiny, words
from test_configs import resolved
from test_papers import COMMANDS
from test_train import CPU

import bench
import curves
import train
from bench import SYSTEMS
from curves import MATRICES
from model import SHATTER, MaskedLM
from prepare_data import copy_tokenizer, load_tokenizer

SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'device': 'cpu', 'dtype': 'float32'}
CONFIG = {**knobs_of(curves), **SHAPE}
MODEL = {**knobs_of(bench), **SHAPE, 'vocab_size': 60}
SMALL = [name for name in SYSTEMS if name != 'hf_bert' and 'vocab_size' not in SYSTEMS[name]]


@pytest.fixture
def call(stage, tmp_path):
    """call('--what=...', key=value, ...) -> (the stage, curves.csv as a DataFrame)."""
    def run(*arguments, pictures=False, **knobs):
        knobs = words(**{'device': 'cpu', 'dtype': 'float32', 'out_dir': tmp_path, **knobs})
        done = stage('curves', *knobs, *arguments, pictures=pictures)
        return done, pd.read_csv(tmp_path / 'curves.csv') if done.code == 0 else None
    return run


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
    lines = [{'kind': 'val', 'step': 10 * i, 'loss': 3, 'unigram': 5, 'permuted_loss': 3 + gap}
             for i, gap in enumerate([0, 0.25, 0.125, 0.375, 0.25, 0.125])]
    make_run(tmp_path / 'seen-1', (), seed=1, total_batch=1000, block_size=50)
    make_run(tmp_path / 'seen-2', (), seed=2, total_batch=1000, block_size=50)
    write_log(tmp_path / 'seen-1', lines)
    write_log(tmp_path / 'seen-2', lines[2:])
    runs = f'--runs={tmp_path}/seen-*'
    _, frame = call('--what=runs', runs, '--target_gap=0.25')
    assert records(frame)[0]['million tokens to gap'] == '1.5 (0)'
    _, frame = call('--what=runs', runs, '--target_gap=0.3')
    assert records(frame)[0].get('million tokens to gap') is None
    _, frame = call('--what=runs', runs)
    assert 'million tokens to gap' not in frame


def test_hours_of_a_run(call, tmp_path):
    """From line to line of the log at the speed of the second; none without a speed."""
    make_run(tmp_path / 'base_shatter', (), total_batch=100, block_size=36)
    make_run(tmp_path / 'slow', (6, 5))
    write_log(tmp_path / 'base_shatter', [
        {'kind': 'val', 'step': 0, 'loss': 3, 'unigram': 5},
        {'kind': 'train', 'step': 10, 'loss': 3, 'tokens_per_second': 10},
        {'kind': 'train', 'step': 30, 'loss': 3, 'tokens_per_second': 40}])
    rows = records(call('--what=runs', runs=f'{tmp_path}/base_*,{tmp_path}/slow')[1])
    assert [row['hours'] for row in rows] == [1.5, None]                # 10 x 360 s and 20 x 90 s
    assert rows[0]['printed'].startswith('45 hours (tian base: table 1')


def test_a_run_of_an_earlier_revision(call, tmp_path):
    """It had run.json in place of launches.jsonl, gap of permuted_loss, and a checksum in each line."""
    for seed in 1, 2:
        folder = tmp_path / f'old-{seed}'
        make_run(folder, (), seed=seed, total_batch=1000, block_size=50)
        line = {'kind': 'val', 'loss': 3, 'unigram': 5, 'gap': 0.25, 'checksum': '7b29bec8d5929ad0'}
        write_log(folder, [{**line, 'step': step} for step in (10, 20)])
        (folder / 'run.json').write_text(f"[{(folder / 'launches.jsonl').read_text()}]")
        (folder / 'launches.jsonl').unlink()
    row, = records(call('--what=runs', runs=f'{tmp_path}/old-*', target_gap=0.25)[1])
    assert (row['system'], row['runs'], row['million tokens to gap']) == ('old', 2, '0.5 (0)')
    (folder / 'run.json').unlink()
    assert 'old-2: no launches.jsonl' in refused(call('--what=runs', runs=f'{tmp_path}/old-*')[0])


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
    write_log(folder, lines)
    config = {'seed': 1, 'total_batch': 8, 'block_size': 32, **knobs, 'out_dir': str(folder)}
    (folder / 'launches.jsonl').write_text(json.dumps({'config': config}) + '\n')


def write_log(folder, lines):
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


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
    path.write_text(path.read_text() + json.dumps(more) + '\n')
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
    found = curves.examples({**CONFIG, 'data_dir': 'copies'}, CPU)
    rows = {(row['task'], row['split']): row for row in found}
    assert asked[0] == ('rajpurkar/squad', 'train', 'copies')
    assert len(asked) == len(rows) == 30
    assert rows['squad1', 'validation'] == {
        'task': 'squad1', 'split': 'validation', 'examples': 2, 'printed': '10.6k'}
    for split in ('validation_mismatched', 'test_matched'):
        assert rows['mnli', split]['printed'] == '9.8k'
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


@pytest.mark.parametrize('name', SMALL)
def test_scores_are_those_that_the_model_uses(name):
    """The maps, times the model's own values, are what its attention gives: checked by a second way."""
    torch.manual_seed(0)
    model = bench.build(name, MODEL, 16)
    ids = torch.randint(60, (1, 16))
    config = model.config
    maps = list(curves.attention_maps(model, ids))
    heads = 1 if config.attention == 'gau' else 4
    assert [a.shape for a in maps] == [(heads, 16, 16)] * config.n_layer
    if config.attention not in SHATTER:
        assert all(torch.allclose(a.sum(-1), torch.ones(heads, 16).double()) for a in maps)
    if config.attention in ('original', 'pairwise', 'part_mask', 'part_bias'):
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
    config = {**CONFIG, 'dropout': 0.5, 'key_size': 8, 'lengths': (32,)}
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
    ('--what=speed', "what='speed': choose one of runs, rank"),
    ('--what=runs', "runs='': no such folder"),
    ('--runs=\x1b[2J', r"runs='\x1b[2J': no such folder"),
])
def test_bad_input_is_refused(knob, message, call):
    assert message in refused(call(knob)[0])


def test_folders_that_are_no_runs_are_refused(call, corpus, tmp_path):
    """An empty folder; a trial of finetune.py, whose validations are scores of a task."""
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'trial').mkdir()
    (tmp_path / 'trial' / 'metrics.jsonl').write_text('{"kind": "val", "step": 3, "accuracy": 0.5}\n')
    for name in 'empty', 'trial':
        line = refused(call('--what=runs', runs=tmp_path / name)[0])
        assert f'{name}: no validation of a run of train.py' in line
    model = bench.build('original', {**MODEL, 'finetune': True}, 16)
    train.write_checkpoint(str(tmp_path / 'trial' / 'model.pt'), {
        'model': model.state_dict(), 'model_config': asdict(model.config), 'config': {}, 'data': {},
        'head': 'classify', 'task': 'sst2', 'labels': ['0', '1']})
    copy_tokenizer(load_tokenizer(corpus), str(tmp_path / 'trial'))
    assert 'trial: a trial of finetune.py' in refused(call('--what=rank', runs=tmp_path / 'trial')[0])
