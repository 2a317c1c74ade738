"""results/curves.py: finished runs, their plateaus and hours; maps, symmetry and rank of attention."""
import json
import math

import numpy as np
import pandas as pd
import pytest
import test_export as export
import torch
import torch.nn.functional as F
from conftest import knobs_of, refused, tiny, words
from test_train import CPU

import bench
import curves
import train
import model as model_file
from configurator import UserError
from curves import MATRICES
from model import NORMALISER, RELU_SCALE, EncoderConfig, MaskedLM

SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'device': 'cpu', 'dtype': 'float32'}
CONFIG = {**knobs_of(curves), **SHAPE}
MODEL = {**knobs_of(bench), **SHAPE, 'vocab_size': 60}
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


def make_run(folder, losses, ptb_from=1, **knobs):
    """A finished run of train.py, validated every ten steps; on the Penn Treebank too from some line on."""
    lines = []
    for i, loss in enumerate(losses):
        line = {'kind': 'val', 'step': 10 * i, 'loss': loss, 'accuracy': i / 100, 'unigram': 5.6}
        if i >= ptb_from:
            line['ptb_loss'] = loss + 1
        lines.append(line)
    folder.mkdir()
    write_log(folder, [*lines, {'kind': 'train', 'step': 30, 'loss': 1.0}])
    config = {'seed': 1, 'total_batch': 8, 'block_size': 32, **knobs, 'out_dir': str(folder)}
    (folder / 'launches.jsonl').write_text(json.dumps({'config': config}) + '\n')


def write_log(folder, lines):
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def records(frame):
    return frame.astype(object).where(frame.notna(), None).to_dict('records')


def test_each_run_has_a_row_and_a_line_for_each_corpus(call, tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr(train, 'plot', lambda path, panels, label: pictures.append(panels['step']))
    make_run(tmp_path / 'plain-1', (6, 5.9, 5.8, 4))
    make_run(tmp_path / 'base_pairwise-1', (6, 5, 4, 3))                # Courtois et al.
    runs = f'{tmp_path}/plain-*,{tmp_path}/base_*'
    done, frame = call('--what=runs', runs=runs, plateau=1.1, target_loss=3.5)
    plain, pairwise = records(frame)
    assert plain['run'] == f'{tmp_path}/plain-1'
    assert (plain['steps'], plain['loss'], plain['ptb_loss']) == (30, 4, 5)
    assert (plain['plateau'], plain['target'], plain['accuracy, %']) == (30, None, 3)
    assert (pairwise['plateau'], pairwise['target']) == (20, 30)
    assert pairwise['printed'].startswith('until 12,000, ends where original does (courtois base: ')
    assert f'{tmp_path}/plain-1' in done.out
    names = [f"{row['run']} {key}" for row in (plain, pairwise) for key in ('loss', 'ptb_loss')]
    assert [*pictures[0]] == names
    assert pictures[0][names[-1]] == [(10, 6), (20, 5), (30, 4)]


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
    rows = {row['run'].rpartition('/')[2]: row for row in records(frame)}
    assert rows['tian_original']['printed ptb_loss'] == 'about 2 nats (tian: figure 1)'
    assert rows['base_no_position']['printed ptb_loss'] == 'above 6 nats (tian base: figure 1)'
    assert rows['gau_scales_ns']['printed accuracy'] == '19.34% (liu: table 1, n)'
    assert rows['gau_softmax_plus_512']['printed accuracy'] == '41.07% (liu: table 2)'
    assert 'hours' in rows['tian_original']['printed']
    assert 'nats' not in rows['tian_original']['printed']
    assert 'printed loss' not in frame


def test_examples_of_the_tasks_beside_a_paper(monkeypatch):
    monkeypatch.setattr(curves, 'read_hub', lambda hub, split, data_dir: [hub, split, data_dir])
    found = curves.examples({**CONFIG, 'data_dir': 'copies'}, CPU)
    printed = {(row['task'], row['split']): row['printed'] for row in found}
    assert len(printed) == 30
    assert printed['squad1', 'validation'] == '10.6k'
    assert printed['mnli', 'validation_mismatched'] == printed['mnli', 'test_matched'] == '9.8k'
    assert printed['rte', 'test'] == '3k'


# ---- attention ----

@pytest.mark.parametrize('r', [1, 5, 16])
def test_rank_of_matrices_of_known_rank(r):
    torch.manual_seed(0)
    left = torch.randn(3, 16, r).double()
    right = torch.randn(3, r, 16).double()
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


@pytest.mark.parametrize('name', [
    'original', 'symmetric', 'pairwise', 'roformer_v1', 'rab', 'xlnet', 'part_mask', 'one_head_softmax',
    'one_head_sigmoid', 'part_bias'])
def test_maps_times_values_are_what_the_attention_gives(name):
    model = bench.build(name, MODEL, 16)
    randomise(model)
    ids = torch.randint(60, (1, 16))
    maps = list(curves.attention_maps(model, curves.scores_of(model, ids)))
    assert [a.shape for a in maps] == [(4, 16, 16)] * 2
    attention = model.encoder.blocks[0].attention
    value = attention.value(model.encoder.embed(ids)).view(16, 4, 4).transpose(0, 1)
    mixed = (maps[0] @ value).transpose(0, 1).reshape(16, 16)
    torch.testing.assert_close(mixed, given_to_out(model, ids))


def randomise(model):
    """Weights that are large enough for scores that differ."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)


def given_to_out(model, ids):
    """What the output matrix of the first layer gets, (T, width)."""
    seen = []
    model.encoder.blocks[0].attention.out.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0][0]))
    with torch.no_grad():
        model.encoder(ids)
    return seen[0]


@pytest.mark.parametrize('scale', RELU_SCALE)
@pytest.mark.parametrize('normaliser', NORMALISER)
def test_maps_of_a_gau_are_divided_as_in_the_model(normaliser, scale):
    torch.manual_seed(0)
    scale = scale if normaliser == 'squared_relu' else 'ns'
    config = EncoderConfig(60, 16, 1, 4, 16, attention='gau', position='rope', key_size=8,
                           normaliser=normaliser, relu_scale=scale)
    model = MaskedLM(config)
    ids = torch.randint(60, (1, 16))
    a, = curves.attention_maps(model, curves.scores_of(model, ids))
    operator = model.encoder.blocks[0].attention
    x = model.encoder.embed(ids)[0]
    expected = F.silu(operator.gate(x)) * (a[0] @ F.silu(operator.value(x)))
    torch.testing.assert_close(expected, given_to_out(model, ids))


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


@pytest.mark.parametrize('attention', ['original', 'symmetric'])
def test_symmetric_shares_of_scores_and_weights(attention, call, corpus, tmp_path):
    folder = make_checkpoint(tmp_path / 'mine', corpus, attention=attention)
    done, frame = call('--what=maps', runs=folder, text='the value of a list', pictures=True)
    assert done.code == 0, done
    picture, = tmp_path.glob('maps_*mine.png')
    assert picture.stat().st_size > 1000
    rows = records(frame)
    assert [(row['layer'], row['head']) for row in rows] == [*np.ndindex(2, 4)]
    model, tokenizer, _ = train.load(folder)
    ids, _ = curves.encode_text(folder, model, tokenizer, 'the value of a list')
    states = model.double().encoder.states(ids)
    for row in rows:
        layer = model.encoder.blocks[row['layer']].attention
        head = slice(4 * row['head'], 4 * row['head'] + 4)
        key_of = layer.query if attention == 'symmetric' else layer.key
        x = states[row['layer']][0]
        scores = layer.query(x)[:, head] @ key_of(x)[:, head].T
        scores = scores - scores.mean()
        share = ((scores + scores.T) / 2).norm() ** 2 / scores.norm() ** 2
        assert row['symmetric share'] == pytest.approx(share.item(), rel=1e-9)
        if attention == 'symmetric':                    # it has no Wk of its own
            assert row['symmetric share'] == pytest.approx(1)
            assert row.get('Wq Wk^T') is None
        else:
            matrix = layer.query.weight[head].T @ key_of.weight[head]
            symmetric = ((matrix + matrix.T).norm() / 2) ** 2
            antisymmetric = ((matrix - matrix.T).norm() / 2) ** 2
            expected = (symmetric - antisymmetric) / matrix.norm() ** 2
            assert row['Wq Wk^T'] == pytest.approx(expected.item(), rel=1e-6)


def make_checkpoint(folder, corpus, **fields):
    """A run of large random weights -> folder as a str"""
    path = export.make_run(folder, corpus, **fields)
    model, _, content = train.load(path)
    randomise(model)
    train.write_checkpoint(train.newest(path), {**content, 'model': model.state_dict()})
    return path


def test_the_score_of_saponati_et_al():
    torch.manual_seed(0)
    attention = torch.nn.Module()
    attention.query = torch.nn.Linear(64, 64)
    attention.key = torch.nn.Linear(64, 64)
    assert all(abs(score) < 0.1 for score in curves.weight_symmetry(attention, 2))
    antisymmetric = attention.key.weight - attention.key.weight.T
    tied = attention.query.state_dict()
    attention.key.load_state_dict(tied)
    assert curves.weight_symmetry(attention, 2) == pytest.approx([1, 1])
    with torch.no_grad():
        attention.query.weight.copy_(torch.eye(64))
        attention.key.weight.copy_(antisymmetric)
    assert curves.weight_symmetry(attention, 1) == pytest.approx([-1])
    attention.key = torch.nn.Linear(64, 16)             # keys that heads share
    assert curves.weight_symmetry(attention, 1) == [None]


def test_an_unknown_normaliser_is_refused(monkeypatch):
    model = bench.build('original', MODEL, 16)
    monkeypatch.setattr(model_file, 'fused_attention', lambda q, k, v, *rest: v)
    with pytest.raises(UserError, match="attention='original': results/curves.py does not know its normal"):
        curves.scores_of(model, torch.arange(16)[None])


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


def test_a_run_of_train_its_rank_and_pictures(stage, call, corpus, tmp_path):
    run = tmp_path / 'mine'
    stage('train', *tiny(corpus, run, attention='shatter', position='none', max_iters=2), pictures=True)
    _, frame = call('--what=runs,rank,partition', runs=run, pictures=True)
    assert [*frame.section] == ['runs'] + ['rank'] * 4 + ['partition'] * 12
    rows = frame[frame.section == 'rank']
    assert [*rows.matrix] == [*MATRICES]
    assert rows['rank / T'].between(0, 1).all()
    assert (rows['T'] == 32).all()
    assert rows.printed.iloc[0] == '0.25, about 0% (liu: table 3, rows of 512)'
    assert (frame[frame.section == 'partition'].error < 1e-6).all()
    for name in ('runs', 'partition'):
        assert (tmp_path / f'{name}.png').stat().st_size > 1000
    content = torch.load(train.newest(str(run)))
    content['data']['tokenizer'] = 'another'
    train.write_checkpoint(train.newest(str(run)), content)
    assert 'tokenizer' in refused(call('--what=rank', runs=run)[0])

