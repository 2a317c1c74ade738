"""results/curves.py: finished runs, their plateaus and hours; maps, symmetry and rank of attention."""
import fnmatch
import json
import math
import re
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import test_export as export
import torch
import torch.nn.functional as F
from conftest import knobs_of, refused, tiny, words
from test_configs import resolved
from test_papers import COMMANDS
from test_train import CPU

import bench
import curves
import train
from bench import SYSTEMS
import model as model_file
from curves import MATRICES
from model import ATTENTION, NORMALISER, RELU_SCALE, SHATTER, EncoderConfig, MaskedLM
from prepare_data import copy_tokenizer, load_tokenizer

SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'device': 'cpu', 'dtype': 'float32'}
CONFIG = {**knobs_of(curves), **SHAPE}
MODEL = {**knobs_of(bench), **SHAPE, 'vocab_size': 60}
LIST = 'the value of a list'
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
    lines.append({'kind': 'train', 'step': 30, 'loss': 1.0})
    folder.mkdir()
    write_log(folder, lines)
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
    assert frame.run[0] == rf'{tmp_path}/a\x1b[31m'
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
    if config.attention not in SCORES:
        pytest.skip('an attention of a fork may have a normaliser of its own')
    maps = list(curves.attention_maps(model, curves.scores_of(model, ids)))
    heads = 1 if config.attention == 'gau' else 4
    assert [a.shape for a in maps] == [(heads, 16, 16)] * config.n_layer
    if config.attention not in SHATTER:
        assert all(torch.allclose(a.sum(-1), torch.ones(heads, 16).double()) for a in maps)
    if config.attention in ('original', 'pairwise', 'part_mask', 'part_bias'):
        operator = model.encoder.blocks[0].attention
        value = operator.value(model.encoder.embed(ids)).view(16, 4, 4).transpose(0, 1)
        mixed = (maps[0] @ value).transpose(0, 1).reshape(16, 16)
        torch.testing.assert_close(mixed, given_to_out(model, ids))


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


# the papers' scores of one head, from its weights and the layer's input x (T, D), in float64
def products(q, k):
    return q @ k.T / math.sqrt(q.size(1))


def projected(w, x, name):
    return x @ w[f'{name}.weight'].T + w.get(f'{name}.bias', 0)


def of_two(query, key):
    def scores(w, x, head, layer):
        return products(projected(w, x, query)[:, head], projected(w, x, key)[:, head])
    return scores


def of_pairwise(w, x, head, layer):
    q = projected(w, x, 'query')[:, head]
    return products(q @ w['pair'][head.start // (head.stop - head.start)], q)


def of_shared(w, x, head, layer):
    s = projected(w, x, 'shared')
    return products((s * w['query_diag'])[:, head], (s * w['key_diag'])[:, head])


def of_rpe(w, x, head, layer):
    q, k = (projected(w, x, name)[:, head] for name in ('query', 'key'))
    relative = w['distance_vectors'] @ w['key.weight'][head].T
    return products(q, k) + by_distance(products(q, relative))


def by_distance(table):
    """y[i, j] = table[i, j - i], with distance 0 in the middle column"""
    T = range(len(table))
    return torch.stack([torch.stack([table[i, table.size(1) // 2 + j - i] for j in T]) for i in T])


def of_one_head(w, x, head, layer):
    return products(projected(w, x, 'query'), x)


def of_parts(w, x, head, layer):
    q = projected(w, x, 'query')
    return products(q, x) + by_distance(q @ w['part_embedding'].T @ layer.partition.table.double())


def of_gau(w, x, head, layer):
    z = F.silu(projected(w, x, 'shared'))
    q, k = (z * w[f'{name}_diag'] + w[f'{name}_bias'] for name in ('query', 'key'))
    return math.log(len(x), 512) * products(q, k)


def of_xlnet(w, x, head, layer):
    q = projected(w, x, 'query')
    r = layer.sinusoid.double() @ w['distance.weight'].T                        # of i - j = last .. -last
    content = products((q + w['content_bias'])[:, head], projected(w, x, 'key')[:, head])
    return content + by_distance(products((q + w['distance_bias'])[:, head], r[:, head]))


SCORES = {
    **dict.fromkeys(('original', 'shared_kv', 'part_mask'), of_two('query', 'key')),
    'symmetric': of_two('query', 'query'), 'pairwise': of_pairwise, 'shared': of_shared, 'rpe': of_rpe,
    **dict.fromkeys(('one_head_softmax', 'one_head_sigmoid'), of_one_head),
    **dict.fromkeys(('part_bias', 'shatter'), of_parts), 'gau': of_gau, 'xlnet': of_xlnet,
}


def share_by_loops(scores):
    T = range(len(scores))
    mean = sum(scores[i][j] for i in T for j in T) / len(T) ** 2
    symmetric = sum(((scores[i][j] + scores[j][i]) / 2 - mean) ** 2 for i in T for j in T)
    return symmetric / sum((scores[i][j] - mean) ** 2 for i in T for j in T)


@pytest.mark.parametrize('attention', ATTENTION)
def test_maps_of_every_attention(attention, call, corpus, tmp_path):
    """A variant of a fork, without an oracle here, is drawn with shares from 0 to 1, or refused in a line."""
    folder = make_checkpoint(tmp_path / 'mine', corpus, attention=attention, position='none')
    done, frame = call('--what=maps', runs=folder, text=LIST, pictures=True)
    if attention not in SCORES and done.code == 2:
        assert 'does not know its normaliser' in refused(done)
        return
    assert done.code == 0, done
    picture, = tmp_path.glob('maps_*mine.png')
    assert picture.stat().st_size > 1000
    rows = records(frame)
    assert all(0 <= row['symmetric share'] <= 1 + 1e-9 for row in rows)
    if attention in SCORES:
        model, tokenizer, _ = train.load(folder)
        ids, pieces = curves.encode_text(folder, model, tokenizer, LIST)
        assert ''.join(pieces) == '[CLS]' + f' {LIST}'.replace(' ', '\u2581') + '[SEP]'
        heads = 1 if SCORES[attention] in (of_one_head, of_parts, of_gau) else 4
        assert [(row['layer'], row['head']) for row in rows] == [*np.ndindex(2, heads)]
        with torch.no_grad():
            compare_with_oracles(model.double(), ids, rows)


def compare_with_oracles(model, ids, rows):
    states = model.encoder.states(ids)
    for row in rows:
        layer = model.encoder.blocks[row['layer']].attention
        head = slice(4 * row['head'], 4 * row['head'] + 4)
        w = dict(layer.named_parameters())
        scores = SCORES[model.config.attention](w, states[row['layer']][0], head, layer)
        assert row['symmetric share'] == pytest.approx(share_by_loops(scores.tolist()), rel=1e-9)
        if model.config.attention == 'symmetric':
            assert row['symmetric share'] == pytest.approx(1)
        expected = None
        if 'query.weight' in w and 'key.weight' in w:
            matrix = w['query.weight'][head].T @ w['key.weight'][head]
            symmetric, antisymmetric = ((matrix + sign * matrix.T).norm() ** 2 / 4 for sign in (1, -1))
            expected = pytest.approx(((symmetric - antisymmetric) / matrix.norm() ** 2).item(), rel=1e-6)
        assert row.get('Wq Wk^T') == expected


def make_checkpoint(folder, corpus, **fields):
    """A run of weights that are large enough for scores that differ -> folder as a str"""
    path = export.make_run(folder, corpus, **fields)
    content = torch.load(train.newest(path))
    torch.manual_seed(1)
    for value in content['model'].values():
        value.normal_(std=0.5)
    train.write_checkpoint(train.newest(path), content)
    return path


def test_the_score_of_saponati_et_al():
    torch.manual_seed(0)
    attention = torch.nn.Module()
    attention.query = torch.nn.Linear(64, 64)
    attention.key = torch.nn.Linear(64, 64)
    assert all(abs(score) < 0.1 for score in curves.weight_symmetry(attention, 2))
    attention.key = attention.query
    assert curves.weight_symmetry(attention, 2) == pytest.approx([1, 1])
    with torch.no_grad():
        attention.query.weight.copy_(torch.eye(64))
        attention.key = torch.nn.Linear(64, 64)
        attention.key.weight.copy_(attention.key.weight - attention.key.weight.mT.clone())
    assert curves.weight_symmetry(attention, 1) == pytest.approx([-1])
    attention.key = torch.nn.Linear(64, 16)             # keys that heads share
    assert curves.weight_symmetry(attention, 1) == [None]


def test_what_maps_refuses(call, corpus, tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / 'mine', corpus, block_size=16)
    line = refused(call('--what=maps', runs=folder, text='value ' * 20)[0])
    assert 'pieces with [CLS] and [SEP], at most 16' in line
    assert f'{tmp_path}: no checkpoint there' in refused(call('--what=maps', runs=tmp_path)[0])
    monkeypatch.setattr(model_file, 'fused_attention', lambda q, k, v, *rest: v)
    line = refused(call('--what=maps', runs=folder, text=LIST)[0])
    assert "attention='original': results/curves.py does not know its normaliser" in line


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
    knobs = words(runs=run)
    done, frame = call('--what=runs,rank,partition', *knobs, pictures=True)
    assert [*frame.section] == ['runs'] + ['rank'] * 4 + ['partition'] * 12
    rows = frame[frame.section == 'rank']
    assert [*rows.matrix] == [*MATRICES]
    assert rows['rank / T'].between(0, 1).all()
    assert (rows['T'] == 32).all()
    assert rows.printed.iloc[0] == '0.25, about 0% (liu: table 3, rows of 512)'
    assert (frame[frame.section == 'partition'].error < 1e-6).all()
    for name in ('runs', 'partition'):
        assert (tmp_path / f'{name}.png').stat().st_size > 1000
    assert frame.made.nunique() == 1
    assert f'torch {torch.__version__}' in done.out
    content = torch.load(train.newest(str(run)))
    content['data']['tokenizer'] = 'another'
    train.write_checkpoint(train.newest(str(run)), content)
    assert 'tokenizer' in refused(call('--what=rank', *knobs)[0])


@pytest.mark.parametrize('knob, message', [
    ('--what=speed', "what='speed': choose one of runs, maps, rank"),
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
    model = bench.build('original', {**MODEL, 'vocab_size': 400, 'finetune': True}, 16)
    train.write_checkpoint(str(tmp_path / 'trial' / 'model.pt'), {
        'model': model.state_dict(), 'model_config': asdict(model.config), 'config': {}, 'data': {},
        'head': 'classify', 'task': 'sst2', 'labels': ['0', '1']})
    copy_tokenizer(load_tokenizer(corpus), str(tmp_path / 'trial'))
    assert 'trial: a trial of finetune.py' in refused(call('--what=rank', runs=tmp_path / 'trial')[0])
    _, frame = call('--what=maps', runs=tmp_path / 'trial', text='a list')      # needs no corpus
    assert len(frame) == 2 * 4
