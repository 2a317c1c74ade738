"""results/curves.py: finished runs, their plateaus and hours; maps, symmetry and rank of attention."""
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, knobs_of, tiny, words
from test_model import randomised
from test_train import CPU

import bench
import curves
import model as source
import train
from curves import MATRICES
from model import merge_heads

SHAPE = {knob: TINY[knob] for knob in bench.SHAPE_KNOBS}
MODEL = {**knobs_of(bench), **SHAPE, 'vocab_size': 60, 'device': 'cpu', 'dtype': 'float32'}
CONFIG = {**knobs_of(curves), **SHAPE}


@pytest.fixture
def call(stage, tmp_path):
    """call('--what=...', key=value, ...) -> rows of curves.csv, without their empty cells."""
    def run(*arguments, pictures=False, **knobs):
        knobs = words(device='cpu', dtype='float32', out_dir=tmp_path, **knobs)
        assert stage('curves', *knobs, *arguments, pictures=pictures).code == 0
        table = pd.read_csv(tmp_path / 'curves.csv')
        return [row.dropna().to_dict() for _, row in table.iterrows()]
    return run


# ---- finished runs ----

def test_where_a_curve_leaves_the_plateau():
    def end(*losses):
        return curves.plateau_end(list(enumerate(losses)), 6.5)
    assert end(9, 7, 6.4, 6.6, 6.3, 6.0) == 4           # not yet at 2: above it again
    assert end(9, 7, 6.6) is None
    assert end(6, 5) == 0
    assert end(9, math.nan, 6) == 2
    assert end(9, 6.5, 6.4) == 2


def make_run(folder, losses, more=()):
    """A finished run of train.py, validated every ten steps, but not at first on the Penn Treebank."""
    lines = [{'kind': 'train', 'step': step, 'tokens_per_second': speed}
             for step, speed in ((10, 10), (30, 40))]
    for i, loss in enumerate(losses):
        lines.append({'kind': 'val', 'step': 10 * i, 'loss': loss, 'accuracy': i / 100, 'unigram': 5.6})
        if i > 0:
            lines[-1]['ptb_loss'] = loss + 1
    lines += more
    folder.mkdir()
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    launch = {'config': {'total_batch': 100, 'block_size': 36}}
    (folder / 'launches.jsonl').write_text(json.dumps(launch))


def test_each_run_has_a_row_and_a_line_for_each_corpus(call, tmp_path, monkeypatch):
    pictures = []
    monkeypatch.setattr(curves, 'plot', lambda path, panels, label: pictures.append(panels['step']))
    make_run(tmp_path / 'base_no_position-1', (6, 5.9, 5.8, 4))
    make_run(tmp_path / 'base_pairwise-1', (6, 5, 4, 3))
    # train.py leaves a loss that is not finite out of metrics.jsonl
    make_run(tmp_path / 'diverged', (6, 3), [{'kind': 'val', 'step': 20, 'accuracy': 0.1, 'unigram': 5.6}])
    runs = f'{tmp_path}/*_no_*,{tmp_path}/*_pair*,{tmp_path}/diverged'
    plain, pairwise, diverged = call('--what=runs', runs=runs, plateau=1.1, target_loss=3.5)
    assert (plain['steps'], plain['loss'], plain['ptb_loss']) == (30, 4, 5)
    assert (plain['plateau'], plain['accuracy, %']) == (30, 3)
    assert plain['hours'] == 1.5                        # 10 steps of 360 s and 20 of 90 s
    assert (pairwise['plateau'], pairwise['target']) == (20, 30)
    assert diverged['steps'] == 20
    assert not {'loss', 'ptb_loss', 'target', 'printed', 'printed loss'} & diverged.keys()
    assert pairwise['printed'] == curves.printed_of_run('convergence', 'base_pairwise')
    assert pictures[0][f'{tmp_path}/base_pairwise-1 ptb_loss'] == [(10, 6), (20, 5), (30, 4)]


@pytest.mark.parametrize('kind, run, text', [
    ('convergence', 'base_pairwise-1', 'until 12,000, ends where original does (courtois base: '),
    ('convergence', 'base_shatter', '45 hours (tian base: table 1'),
    ('ptb_loss', 'base_no_position', 'above 6 nats (tian base: figure 1)'),
    ('accuracy', 'gau_scales_ns', '19.34% (liu: table 1, n)')])
def test_what_the_papers_print_of_a_run(kind, run, text):
    """On the corpus that they validated on; Liu's masked accuracy by scale and normaliser."""
    assert curves.printed_of_run(kind, f'out/{run}').startswith(text)


def test_examples_of_the_tasks_beside_a_paper(monkeypatch):
    monkeypatch.setattr(curves, 'read_hub', lambda hub, split, data_dir: [])
    found = curves.examples(CONFIG, CPU)
    printed = {(row['task'], row['split']): row['printed'] for row in found}
    assert printed['squad1', 'validation'] == '10.6k'
    assert printed['mnli', 'validation_mismatched'] == printed['mnli', 'test_matched'] == '9.8k'


# ---- attention ----

@pytest.mark.parametrize('r', [1, 5, 16])
def test_rank_of_matrices_of_known_rank(r):
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 3, 16, r, generator=generator, dtype=torch.float64)
    assert curves.rank_and_zeros(left @ right.mT) == (r / 16, 0.0)
    noisy = torch.tensor([1.0] * r + [1e-9] * (16 - r)).double().diag()         # below float32's precision
    assert curves.rank_and_zeros(noisy) == (r / 16, (256 - r) / 256)


@pytest.mark.parametrize('name, options', [
    *((name, {}) for name in (
        'original', 'symmetric', 'pairwise', 'roformer_v1', 'rab', 'xlnet', 'part_mask', 'one_head_softmax',
        'one_head_sigmoid', 'part_bias')),
    *(('gau', {'normaliser': name}) for name in source.NORMALISER),
    ('gau', {'normaliser': 'squared_relu', 'relu_scale': 'n2'})])
def test_maps_times_values_are_what_the_attention_gives(name, options):
    model = randomised(bench.build(name, {**MODEL, **options}, 16), 0.5)
    ids = torch.randint(60, (1, 16))
    weights = curves.attention_of(model, ids)[0].weights            # (1, H, T, T) of the first layer
    attention = model.encoder.blocks[0].attention
    given = []
    attention.out.register_forward_pre_hook(lambda module, inputs: given.extend(inputs))
    model.encoder(ids)
    x = model.encoder.embed(ids)
    value = attention.value(x)
    if name == 'gau':
        mixed = F.silu(attention.gate(x)) * (weights[:, 0] @ F.silu(value))
    else:
        mixed = merge_heads(weights @ value.view(1, 16, 4, 4).transpose(1, 2))
    torch.testing.assert_close(mixed, given[0])


def symmetric_share(matrix):
    symmetric = (matrix + matrix.T) / 2
    return (symmetric.norm() / matrix.norm()).item() ** 2


def test_a_bool_mask_excludes_tokens_from_scores():
    q = torch.zeros(1, 1, 2, 3)
    mask = torch.ones(2, 2, dtype=torch.bool).tril()
    with curves.Recorder() as recorder:
        F.scaled_dot_product_attention(q, q, q, mask)
    layer, = recorder.layers
    assert layer.weights[0, 0].tolist() == [[1, 0], [0.5, 0.5]]


@pytest.mark.parametrize('attention, packing', [('original', 'documents'), ('symmetric', 'stream')])
def test_maps_of_a_text_and_of_masked_rows(attention, packing, stage, call, corpus, tmp_path):
    """Saponati et al.'s score of Wq Wk^T is +-1 for a symmetric or antisymmetric matrix: 2 share - 1.

    The weights on the tokens before and after are those of a loop over tokens, in rows without padding.
    """
    run = str(tmp_path / 'mine')
    stage('train', *tiny(corpus, run, attention=attention, packing=packing, max_iters=0), pictures=True)
    model, tokenizer, content = train.load(run)
    randomised(model, 0.5)
    train.write_checkpoint(train.newest(run), {**content, 'model': model.state_dict()})
    rows = call('--what=maps,rank,partition', runs=run, text='the value of a list', masked_rows=3,
                pictures=True, **SHAPE)
    assert [row['section'] for row in rows] == ['maps'] * 8 + ['rank'] * 4 + ['partition'] * 2
    assert [row['matrix'] for row in rows[8:12]] == [*MATRICES]
    assert all(row['error'] < 1e-6 for row in rows[12:])
    assert all(path.stat().st_size > 1000 for path in tmp_path.glob('*.png'))
    ids, _ = curves.encode_text(run, model, tokenizer, 'the value of a list')
    scores = [layer.scores[0] for layer in curves.attention_of(model, ids)]
    _, _, loaders = train.make_loaders(content['config'])
    mask_id = tokenizer.special_ids['mask']
    assert mask_id not in torch.cat(curves.validation_rows(run, content, 3, masked=False))      # of rank
    of_all = []                                         # (2, 4, before and after) of each token
    of_masks = []
    for ids in loaders[''].batch(range(3))['ids']:
        ids = ids[ids != tokenizer.special_ids['pad']]
        weights = torch.stack([layer.weights[0] for layer in curves.attention_of(model, ids[None])])
        for i in range(1, len(ids) - 1):
            of_all.append(weights[..., i, [i - 1, i + 1]])
            if ids[i] == mask_id:
                of_masks.append(of_all[-1])
    means = torch.cat([torch.stack(looks).mean(0) for looks in (of_all, of_masks)], -1)
    for row, (number, h) in zip(rows[:8], np.ndindex(2, 4), strict=True):
        assert (row['layer'], row['head']) == (number, h)
        found = [row[name] for name in ('before', 'after', '[MASK] before', '[MASK] after')]
        assert found == pytest.approx(means[number, h].tolist())
        centred = scores[number][h] - scores[number][h].mean()
        assert row['symmetric share'] == pytest.approx(symmetric_share(centred), rel=1e-9)
        if attention == 'symmetric':                    # it has no Wk of its own
            assert row['symmetric share'] == pytest.approx(1)
            assert 'Wq Wk^T' not in row
        else:
            layer = model.encoder.blocks[number].attention
            query, key = (linear.weight.view(4, 4, 16)[h] for linear in (layer.query, layer.key))
            assert row['Wq Wk^T'] == pytest.approx(2 * symmetric_share(query.T @ key) - 1, rel=1e-6)


def test_attention_of_an_untrained_gau():
    """Half of the weights of a training step are dropped here; scores of 8 dimensions have rank 8 of 32."""
    config = {**CONFIG, 'dropout': 0.5, 'key_size': 8, 'lengths': (32,)}
    rows = {(row['mode'], row['matrix']): row for row in curves.untrained(config, CPU)}
    for mode in 'train', 'eval':
        assert (rows[mode, 'QK^T']['rank / T'], rows[mode, 'QK^T']['zeros']) == (8 / 32, 0)
    assert 0.45 < rows['train', 'softmax']['zeros'] < 0.55
    assert rows['eval', 'softmax']['zeros'] == 0
    assert rows['train', 'softmax']['printed'] == '0.9983, 10.03% (liu: table 3)'
    torch.manual_seed(1)
    model = bench.build('gau_12k', {**config, 'finetune': False, 'normaliser': 'squared_relu'}, 32)
    scores = [layer.scores for layer in curves.attention_of(model, torch.randint(12_000, (1, 32)))]
    negative = (torch.stack(scores) <= 0).double().mean().item()
    assert rows['eval', 'relu^2']['zeros'] == pytest.approx(negative)
    assert rows['train', 'relu^2']['zeros'] > 0.5 > negative
