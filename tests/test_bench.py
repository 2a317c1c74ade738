"""bench.py: parameters, turns and ratios on a fake clock, memory, runs, rank, partition, and tables."""
import json
import math
import os
import re
import sys
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from conftest import refused, stage, tiny, torchrun
from test_report import trial

import bench
import finetune
import train
from bench import GROUPS, MATRICES, MODES, PEERS, VARIANTS, WHAT
from model import EncoderConfig, MaskedLM, Partition
from train import OBJECTIVE, Runtime

CPU = Runtime(torch.device('cpu'))
CONFIG = {'position': 'absolute', 'vocab_size': 60, 'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32,
          'shape': 'tiny', 'compile': False, 'device': 'cpu', 'dtype': 'auto', 'threads': 1, 'dropout': 0.0,
          'full_logits': False}
SHAPE = ['--n_layer=2', '--n_head=4', '--n_embd=16', '--n_inner=32', '--device=cpu',
         '--dtype=float32']
BASE = {                            # of the README: masked-LM models, 30,522 words, 512 positions
    'original': 109514298, 'symmetric': 102427194, 'pairwise': 103017018, 'shared': 95367738,
    'no_position': 109121082, 'roformer_v1': 109121082, 'rpe': 111471162, 'rab': 109514682,
    'roformer_v2': 108377088, 'part_mask': 109121082, 'one_head_softmax': 102033978,
    'one_head_sigmoid': 102033978, 'part_bias': 102144570, 'shatter': 102144570, 'gau': 110742528,
    'xlnet': 116180538, 'xlnet_plm': 116180538 + 768,
}
RANKS = [name for name in VARIANTS if 'pair_rank' in VARIANTS[name]]
SMALL = [name for name in VARIANTS if VARIANTS[name].get('pair_rank', 0) <= 4]      # K of CONFIG


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """bench.main() in this process; returns ({section: rows}, stdout)."""
    def main(*knobs, out_dir=tmp_path / 'out'):
        with monkeypatch.context() as patch:
            patch.setattr(sys, 'argv', ['bench.py', f'--out_dir={out_dir}', *SHAPE, *knobs])
            for name in bench.configure(dict(vars(bench)), [])[0]:
                patch.setattr(bench, name, getattr(bench, name))       # back to the default afterwards
            bench.main()
        rows = [json.loads(line) for line in (out_dir / 'rows.jsonl').read_text().splitlines()]
        found = {name: [row for row in rows if row['section'] == name] for name in WHAT}
        return found, capsys.readouterr().out
    return main


# ---- params ----

def test_groups_sum_to_the_readmes_counts(monkeypatch):
    """Of every system; the rows that differ by normaliser, scale, packing or recomputation have no more."""
    assert {name for name in VARIANTS if not re.search(r'gau_|recompute|rank|\dk$', name)} == set(BASE)
    config = {**CONFIG, **bench.SHAPES['base'], 'vocab_size': 30522, 'variants': list(BASE)}
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)     # quick
    monkeypatch.setattr(bench, 'paper_rows', lambda kind: [])
    monkeypatch.setattr(bench, 'SHAPES', {})
    for row in bench.params(config, CPU):
        assert sum(row[group] for group in GROUPS) == row['total'] == BASE[row['system']]
        assert row['embedding'] == (30522 + 2) * 768 and (row['MLP'] == 0) == (row['system'] == 'gau')
    rows = {row['system']: row['total'] for row in bench.params({**config, 'variants': list(VARIANTS)}, CPU)}
    for name in set(VARIANTS) - set(BASE) - set(RANKS):
        like = 'gau' if 'gau' in name else re.sub(r'_recompute|_\d+k', '', name)
        more = VARIANTS[name].get('vocab_size', 30522) - 30522      # BERT's head has a bias, `decoder` none
        assert rows[name] == rows[like] + more * (769 if like == 'roformer_v1' else 768), name
    full = rows['pairwise'] - 12 * 12 * 64 * 64                         # two matrices K x r for each S
    assert [rows[name] - full for name in RANKS] == [12 * 12 * 2 * 64 * r for r in (1, 2, 4, 8, 16, 32)]


def test_every_count_that_a_paper_prints_is_ours_or_explained(monkeypatch):
    """And ours at the papers' shapes and at that of the knobs; theirs do not depend on the knobs."""
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)
    config = {**CONFIG, 'position': 'none', 'vocab_size': 30522, 'variants': ['pairwise']}
    rows = list(bench.params(config, CPU))
    assert [(row['shape'], row['total']) for row in rows if not row['printed']] == [
        ('small', 27875642 - 512 * 512), ('base', 103017018 - 512 * 768), ('large', 311556922 - 512 * 1024),
        ('this run', 531466 - 512 * 16)]
    rows, unequal = [row for row in rows if row['printed']], {}
    for row in rows:
        total, where = row['total'], row['where, or why not']
        rounded = {'M': f'{total / 1e6:.1f}M', 'k': f'{total / 1e3:,.0f}k'}
        if row['printed'] not in (f'{total:,}', rounded.get(row['printed'][-1])):
            unequal[' '.join(row[key] for key in ('system', 'shape', 'counted'))] = where
    assert {row['where, or why not'].split(':')[0] for row in rows} == {'courtois', 'kowsher', 'tian', 'liu'}
    assert len(rows) == 21
    assert list(unequal) == ['shared base all', 'original large matrices', 'shatter large matrices']
    assert all('12 of the 24' in source or 'classifier' in source for source in unequal.values())


# ---- speed ----

class Clock:
    """Steps take the seconds of `costs`, times a load that grows with each step, or raise the error there."""

    def __init__(self, monkeypatch, **costs):
        self.now, self.calls, self.costs = 0.0, [], costs
        monkeypatch.setattr(bench.time, 'perf_counter', lambda: self.now)
        monkeypatch.setattr(bench, 'make_step', lambda name, *arguments: lambda: self.step(name))

    def step(self, name):
        if isinstance(self.costs[name], Exception):
            raise self.costs[name]
        self.calls.append(name)
        self.now += self.costs[name] * len(self.calls)


def test_systems_take_turns(monkeypatch):
    clock = Clock(monkeypatch, original=2.0, shared=1.0, hf_bert=3.0)
    config = {**CONFIG, 'variants': ['original', 'shared'], 'peers': ['hf_bert'], 'rounds': 4, 'warmup': 2}
    seconds = bench.time_systems(config, CPU, 'finetune', 2, 16)                # without peers
    assert clock.calls == ['original'] * 2 + ['shared'] * 2 + ['original', 'shared', 'shared', 'original'] * 2
    assert [len(times) for times in seconds.values()] == [4, 4]                 # without the warmup's two
    assert seconds['original'][0] == 2.0 * 5 and seconds['shared'][0] == 1.0 * 6
    assert list(bench.time_systems(config, CPU, 'train', 2, 16)) == ['original', 'shared', 'hf_bert']


def test_failures_become_rows_and_bugs_do_not(monkeypatch):
    config = {**CONFIG, 'variants': ['original', 'wide', 'cpu'], 'peers': ['hf_bert'], 'rounds': 1,
              'warmup': 1}
    clock = Clock(monkeypatch, original=1.0, wide=torch.OutOfMemoryError('CUDA out of memory'),
                  cpu=RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                  hf_bert=bench.UserError('pip install transformers'))
    assert bench.time_systems(config, CPU, 'train', 2, 16) == {
        'original': [2.0], 'wide': 'CUDA out of memory',
        'cpu': "DefaultCPUAllocator: can't allocate memory", 'hf_bert': 'pip install transformers'}
    clock.costs['original'] = ValueError('a bug')
    with pytest.raises(ValueError, match='a bug'):
        bench.time_systems(config, CPU, 'train', 2, 16)
    found = bench.time_systems({**config, 'compile': True}, CPU, 'train', 2, 16)          # or the compiler's
    assert found['original'] == 'a bug'


def test_rates_and_ratios(monkeypatch):
    monkeypatch.setattr(bench, 'time_systems', lambda *arguments: {
        'original': [1.0, 4.0, 2.0], 'shared': [0.5, 2.0, 1.5], 'gau': 'out of memory'})
    config = {**CONFIG, 'lengths': (100,), 'batches': (4,), 'modes': ['finetune']}
    first, second, failed = bench.speed(config, CPU)
    assert (first['ms'], first['least'], first['most'], first['tokens/s']) == (2000, 1000, 4000, 200)
    assert (first['time / original'], second['time / original'], second['ms']) == (1, 0.5, 1500)
    assert second['printed'].startswith('0.70 (kowsher original finetune: figure 3, CoLA')
    assert first['printed'] is None and 'time / gau' not in first
    assert failed['system'] == 'gau' and failed['ms'] == 'out of memory' and 'seconds' not in failed


@pytest.mark.parametrize('name', PEERS)
def test_peers_compute_the_loss_of_a_masked_lm(name):
    """All heads give the mean loss of the predicted positions."""
    pytest.importorskip('transformers')
    torch.manual_seed(0)
    model, rows = bench.build(name, CONFIG, 32).eval(), bench.make_rows(2, 32, 60, 'cpu')
    ids, positions, targets = rows
    loss = bench.masked_loss(model, *rows)
    assert loss.item() == pytest.approx(math.log(60), rel=0.1)
    logits = model.model(input_ids=ids).logits.gather(1, positions[..., None].expand(-1, -1, 60))
    torch.testing.assert_close(loss, bench.token_losses(logits, targets).mean())


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('name', ['original', 'shatter_recompute', 'gau', 'xlnet_plm'])
def test_a_step_of_each_mode(name, mode, monkeypatch):
    torch.manual_seed(0)
    model = bench.build(name, CONFIG, 16, mode)
    monkeypatch.setattr(bench, 'build', lambda *arguments: model)
    before = [p.clone() for p in model.parameters()]
    bench.make_step(name, mode, 2, 16, CONFIG, CPU)()
    moved = any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert moved == model.training == (mode != 'forward')


@pytest.mark.parametrize('name', ['original', 'gau_12k', 'xlnet'])
def test_all_logits_give_the_loss_of_the_predicted_ones(name, monkeypatch):
    torch.manual_seed(0)
    model, rows = bench.build(name, CONFIG, 32), bench.make_rows(2, 32, 60, 'cpu')
    seen = []
    model.head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.shape))
    loss = bench.full_loss(model, *rows)
    torch.testing.assert_close(loss, bench.masked_loss(model, *rows))
    words = model.config.vocab_size
    assert seen == [(2, 32, words), (2, 5, words)] and words == (12000 if name == 'gau_12k' else 60)
    monkeypatch.setattr(bench, 'build', lambda *arguments: model)
    bench.make_step(name, 'train', 1, 16, {**CONFIG, 'full_logits': True}, CPU)()
    bench.make_step(name, 'train', 1, 16, CONFIG, CPU)()
    assert [shape[1] for shape in seen[2:]] == [16, 3]


def test_dropout_and_a_vocabulary_of_its_own():
    """Random tokens are those of the variant's own vocabulary, here the smaller one."""
    config = {**CONFIG, 'dropout': 0.1, 'vocab_size': 100_000}
    for name in ('original', 'gau_12k'):
        made = bench.build(name, config, 16).config
        assert (made.dropout, made.attention_dropout) == (0.1, 0.1)
    bench.make_step('gau_12k', 'train', 4, 16, config, CPU)()
    pytest.importorskip('transformers')
    assert bench.build('hf_bert', config, 16).model.config.hidden_dropout_prob == 0.1


def test_the_largest_rank_is_that_of_the_comparison_run():
    recipe = bench.configure(dict(vars(bench.train)), ['config/compare.py'])[0]
    assert max(VARIANTS[name]['pair_rank'] for name in RANKS) == recipe['n_embd'] // recipe['n_head']


def test_printed_values_of_a_system_and_length(monkeypatch):
    monkeypatch.setattr(bench, 'paper_rows', lambda kind: [
        ('liu', 'gau original train 256', '1.1', 'a'), ('liu', 'gau original train 512', '1.2', 'b'),
        ('liu', 'gau_n original train 512', '1.3', 'c'), ('tian', 'gau original train', '1.4', 'd')])
    both = '1.2 (liu original train 512: b); 1.4 (tian original train: d)'
    assert bench.printed('time', 'gau', 'train', length=64) == '1.4 (tian original train: d)'
    assert bench.printed('time', 'gau_12k', 'train', length=512) == both
    assert bench.printed('time', 'gau', 'finetune') is None


# ---- memory ----

@pytest.mark.parametrize('error', [torch.OutOfMemoryError('x'), MemoryError(), BrokenProcessPool('killed'),
                                   RuntimeError("can't allocate memory: you tried to allocate 9 bytes")])
def test_out_of_memory_is_known(error):
    assert bench.is_out_of_memory(error) and not bench.is_out_of_memory(RuntimeError('a bug'))


def test_out_of_memory_is_a_row(monkeypatch):
    mib = {'original': 3.0, 'gau': 4.0}
    monkeypatch.setattr(bench, 'in_fresh_process', lambda name, n, length, config: (
        None if (name, length) == ('original', 64) else mib[name] * length / 32))
    config = {**CONFIG, 'variants': ['original', 'gau'], 'batches': (8,), 'memory_lengths': (32, 64)}
    rows = {(row['system'], row['length']): [row['MiB'], row['/ gau'], row['half']]
            for row in bench.memory(config, CPU)}
    assert rows['original', 32] == [3.0, 0.75, None] and rows['gau', 64] == [8.0, 1.0, 0.5]
    assert rows['original', 64] == ['out of memory', None, None]
    assert 'MALLOC_MMAP_THRESHOLD_' not in os.environ


def test_memory_above_what_was_there():
    """A model with 8 MiB of embeddings keeps four times that: weights, gradients and two moments."""
    assert bench.step_memory('original', 2, 16, {**CONFIG, 'vocab_size': 2 ** 17}) > 4 * 8


@pytest.mark.slow
def test_memory_in_fresh_processes(run):
    found, out = run('--what=memory', '--variants=original,shatter', '--batches=2', '--memory_lengths=16,32',
                     '--vocab_size=60')
    rows = found['memory'][1:]
    assert [(row['system'], row['length']) for row in rows] == [
        (name, length) for name in ('original', 'shatter') for length in (16, 32)]
    assert all(0 < row['MiB'] < 64 for row in rows) and '| half ' in out


# ---- convergence ----

def test_where_a_curve_leaves_the_plateau():
    def end(losses, level):
        return bench.plateau_end([[10 * i, loss, 0.1] for i, loss in enumerate(losses)], level)
    assert end([9, 7, 6.4, 6.6, 6.3, 6.0], 6.5) == 40                           # back above, so not yet at 20
    assert end([9, 7, 6.6], 6.5) is None and end([6, 5], 6.5) == 0
    assert end([9, None, 6], 6.5) == 20 and end([9, 6.5, 6.4], 6.5) == 20


def write_run(folder, corpus, seed, losses, **knobs):
    """A run folder of train.py as bench.py reads it: validations every 10 steps, up to 30 of 30."""
    data_dir, dataset = os.path.split(corpus)
    config = {'objective': 'mlm', 'total_batch': 8, 'block_size': 32, 'n_layer': 1, 'n_head': 4, 'n_embd': 16,
              'n_inner': 32, 'data_dir': data_dir, 'dataset': dataset, 'seed': seed, 'max_iters': 30, **knobs}
    lines = [{'kind': 'val', 'step': 10 * i, 'loss': loss, 'accuracy': i / 100}
              for i, loss in enumerate(losses)]
    folder.mkdir(parents=True)
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    launches = [{'config': {**config, 'max_iters': 1}, 'world_size': 1}, {'config': config, 'world_size': 2}]
    (folder / 'run.json').write_text(json.dumps(launches))


def test_finished_runs_by_name(run, corpus, tmp_path):
    unigram = bench.load_meta(corpus)['unigram_entropy']
    for seed, losses in enumerate([(6, 5, 4, 3), (6, 5.9, 5.8, 4)], 1):
        write_run(tmp_path / f'plain-{seed}', corpus, seed, losses)
    write_run(tmp_path / 'wide', corpus, 1, (6, 5, 4), n_inner=64)
    found, out = run('--what=convergence', f'--plateau={unigram - 4.5}', '--target_loss=3.5',
                     f'--runs={tmp_path}/plain-*,{tmp_path}/wide')
    first, second, wide = found['convergence'][1:]
    assert [row['system'] for row in (first, second, wide)] == ['plain', 'plain', 'wide']
    assert first['curve'][1] == [10, 5, 0.01]
    assert first['loss'] == 3 and first['accuracy, %'] == pytest.approx(3)
    assert (first['plateau'], second['plateau'], first['processes']) == (20, 30, 2)
    assert [row['steps to 3.5'] for row in (first, second, wide)] == [30, None, None]
    assert wide['end'] == 'at step 20' and wide['loss'] is None                  # unfinished, or diverged
    assert wide['parameters'] - first['parameters'] == 32 * (16 + 16 + 1)
    lines = [line.split('|')[1:-1] for line in out.splitlines() if line.startswith('|')]
    head, _, *rows = ([cell.strip() for cell in line] for line in lines)
    rows = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row['seed'] for row in rows] == ['1, 2', '1']
    assert (rows[0]['loss'], rows[0]['plateau'], rows[0]['end']) == ('3.5 (0.71)', '25 (7.1)', 'finished')
    assert [row['steps to 3.5'] for row in rows] == ['30, 1 of 2', '-']
    assert (tmp_path / 'out' / 'convergence.png').stat().st_size > 1000
    assert first['printed'] is None
    write_run(tmp_path / 'base_pairwise', corpus, 1, (6, 5))        # Courtois et al.: folders of config/
    named, _ = run('--what=convergence', f'--runs={tmp_path}/base_pairwise')
    assert named['convergence'][1]['printed'].startswith('until 12,000, ends where original does (courtois b')
    with pytest.raises(bench.UserError, match='holds no validation'):
        write_run(tmp_path / 'new', corpus, 1, ())
        run('--what=convergence', f'--runs={tmp_path}/new')


def test_means_over_seeds():
    def mean(*values):
        return bench.mean_cell(bench.pd.Series(values, dtype=object))
    assert mean(10.0, 20.0, None) == '15 (7.1), 2 of 3' and mean(None) is None and mean(3.0) == '3'
    assert mean('a', 'b', 'a') == 'a, b' and mean(7.0, 7.0) == '7 (0)'
    assert [bench.cell(value) for value in (None, 109514298, 3366.6, 0.51234, True, 'a')] == [
        '-', '109,514,298', '3,367', '0.5123', 'true', 'a']


@pytest.mark.parametrize('recipe', ['config/base_roformer_v2.py', 'config/base_shatter.py'])
def test_a_run_takes_its_recipe_but_not_its_operators(recipe, monkeypatch, tmp_path):
    def diverge(words, **keywords):
        commands.append(words[2:])
        return bench.subprocess.CompletedProcess(words, 2, '', 'error: the loss is not finite')

    monkeypatch.setattr(bench.subprocess, 'run', diverge)               # train.py: a divergence is a result
    commands, recipe_knobs = [], bench.configure(dict(vars(bench.train)), [recipe])[0]
    config = {**CONFIG, 'steps': 40, 'eval_interval': 2, 'dataset': 'a', 'data_dir': 'b', 'recipe': recipe,
              'out_dir': str(tmp_path)}
    for name in VARIANTS:
        folder = bench.train_run(config, name, 3)
        assert folder == str(tmp_path / 'runs' / f'{name}-3')
        knobs = bench.configure(dict(vars(bench.train)), commands[-1])[0]
        expected = {**bench.knobs_of(name, {**CONFIG, **bench.SHAPES['base']}), 'seed': 3, 'max_iters': 40,
                    'warmup_iters': 4, 'dataset': 'a', 'learning_rate': recipe_knobs['learning_rate']}
        assert {key: knobs[key] for key in expected} == expected
    os.makedirs(folder)
    with open(os.path.join(folder, 'run.json'), 'w') as file:
        json.dump([{'config': {**knobs, 'adam_eps': 1e-8}}], file)
    with pytest.raises(bench.UserError, match='adam_eps is 1e-08 there and 1e-06 here'):
        bench.train_run(config, name, 3)


# ---- attention ----

def test_rank_of_matrices_of_known_rank():
    torch.manual_seed(0)
    for r in (1, 5, 16):
        matrix = torch.randn(2, 3, 16, r, dtype=torch.float64) @ torch.randn(2, 3, r, 16, dtype=torch.float64)
        assert bench.rank_and_zeros(matrix) == (r / 16, 0.0)
        assert np.linalg.matrix_rank(matrix.numpy(), rtol=16 * 2 ** -23).mean() == r
    noisy = torch.eye(16, dtype=torch.float64) * torch.tensor([1.0] * 4 + [1e-9] * 12)
    assert bench.rank_and_zeros(noisy) == (4 / 16, 252 / 256)                    # below float32's precision
    assert bench.rank_and_zeros(torch.zeros(4, 4)) == (0.0, 1.0)


@pytest.mark.parametrize('name', [name for name in SMALL if 'packing' not in VARIANTS[name]])
def test_scores_are_those_that_the_model_uses(name):
    """The maps, times the model's own values, are what its attention gives: checked by a second way."""
    torch.manual_seed(0)
    model = bench.build(name, CONFIG, 16)
    ids = torch.randint(60, (1, 16))
    maps, config = bench.attention_maps(model, ids), model.config
    heads = 1 if config.attention == 'gau' else 4
    assert [a.shape for a in maps] == [(heads, 16, 16)] * config.n_layer
    assert all(a.dtype == torch.float64 and torch.isfinite(a).all() and (a >= 0).all() for a in maps)
    if config.attention in ('original', 'symmetric', 'pairwise', 'shared', 'xlnet') or (
            config.normaliser.startswith('softmax') and config.attention == 'gau'):
        assert all(torch.allclose(a.sum(-1), torch.ones(heads, 16).double()) for a in maps)
    operator = model.encoder.blocks[0].attention
    if config.attention in ('original', 'pairwise', *bench.SHATTER) and config.position != 'rpe' \
            and config.attention != 'shatter':
        x, seen = model.encoder.embed(ids), []
        value = operator.value(x).view(16, 4, 4).transpose(0, 1)
        handle = operator.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            model.encoder(ids)
        handle.remove()
        torch.testing.assert_close((maps[0] @ value).transpose(0, 1).reshape(16, 16), seen[0][0])


def test_matrices_of_scores():
    scores = torch.tensor([[[[1.0, -1.0], [0.0, 2.0]]]], dtype=torch.float64)
    made = {name: make(scores)[0, 0] for name, make in MATRICES.items()}
    assert made['QK^T'].tolist() == [[1, -1], [0, 2]] and made['relu^2'].tolist() == [[1, 0], [0, 4]]
    assert torch.allclose(made['softmax'].sum(-1), torch.ones(2).double())
    sigmoid = scores[0, 0].sigmoid()
    torch.testing.assert_close(made['l2 sigmoid'], sigmoid / sigmoid.square().sum(-1, keepdim=True).sqrt())


def test_rank_and_pictures_of_a_checkpoint(run, corpus, tmp_path):
    data_dir, dataset = os.path.split(corpus)
    meta, folder = bench.load_meta(corpus), tmp_path / 'mine'
    shape = EncoderConfig(meta['vocab_size'], 16, 2, 4, 16, 32, attention='shatter', position='none')
    model = MaskedLM(shape)
    folder.mkdir()
    content = {'step': 4, 'model': model.state_dict(), 'config': {'objective': 'mlm'},
               'model_config': vars(model.config), 'data': meta['identity']}
    bench.train.write_checkpoint(str(folder / bench.train.checkpoint_name(4)), content)
    knobs = [f'--data_dir={data_dir}', f'--dataset={dataset}', f'--checkpoint={folder}', '--sentence=A list']
    found, out = run('--what=rank', *knobs, '--rank_rows=2')
    rows = found['rank'][1:]
    assert [(row['checkpoint'], row['T']) for row in rows] == [('mine', 16)] * 4
    assert [row['matrix'] for row in rows] == list(MATRICES) and all(0 <= row['zeros'] < 1 for row in rows)
    assert all(0 < row['least'] <= row['rank / T'] <= row['most'] <= 1 for row in rows)
    assert rows[0]['printed'] == '0.25, about 0% (liu: table 3, rows of 512)' and len(rows[0]['layers']) == 2
    assert (tmp_path / 'out' / 'attention_mine.png').stat().st_size > 1000
    content['data']['tokenizer'] = 'another'
    bench.train.write_checkpoint(str(folder / bench.train.checkpoint_name(4)), content)
    with pytest.raises(bench.UserError, match='tokenizer is'):
        run('--what=rank', *knobs)


def test_the_partition_sums_to_one(monkeypatch):
    monkeypatch.setattr(train, 'plot', lambda *arguments: None)
    rows = list(bench.partition({'out_dir': ''}, CPU))
    assert len(rows) == 12 and all(row['error'] < 1e-6 for row in rows)
    table = Partition(EncoderConfig(1, 512, 12, 12, 24, 96, attention='shatter', position='none'), 3).table
    assert table.sum(0).sub(1).abs().max() < 1e-6


# ---- the whole ----

def test_tables_and_rows_of_a_run(run, tmp_path):
    """Two sections in turn: the second run keeps the first's rows, and each says what made it."""
    pytest.importorskip('transformers')
    knobs = ['--variants=original,shared', '--vocab_size=60', '--lengths=32', '--batches=2', '--rounds=3']
    run('--what=partition', *knobs)
    found, out = run('--what=speed', *knobs, '--peers=hf_bert_masked', '--modes=forward,finetune')
    for name in ('partition', 'speed'):
        assert found[name][0]['made'].startswith('`python bench.py --out_dir=')
        assert f'torch {torch.__version__}' in found[name][0]['made']
        assert found[name][0]['knobs']['n_embd'] == 16
    for mode in ('forward', 'finetune'):
        rows = [row for row in found['speed'][1:] if row['mode'] == mode]
        peers = ['hf_bert_masked'] if mode == 'forward' else []
        assert [row['system'] for row in rows] == ['original', 'shared', *peers]
        assert all(len(row['seconds']) == 3 and min(row['seconds']) > 0 and row['rows'] == 2 for row in rows)
    page = (tmp_path / 'out' / 'tables.md').read_text()
    assert page.startswith('`python bench.py') and out.strip() in page and 'seconds |' not in page


@pytest.mark.slow
def test_a_run_under_torchrun_is_read_as_one(run, corpus, tmp_path):
    for n, seed in ((2, 1), (1, 2)):
        done = torchrun('train.py', *tiny(corpus, tmp_path / f'small_pairwise-{seed}'), f'--seed={seed}',
                        '--attention=pairwise', '--max_iters=4', '--eval_interval=2', '--dropout=0', n=n)
        assert done.returncode == 0, done.stderr
    found, out = run('--what=convergence', f'--runs={tmp_path}/small_pairwise-*')
    rows = found['convergence'][1:]
    assert [(row['system'], row['seed'], row['processes'], row['end']) for row in rows] == [
        ('small_pairwise', 1, 2, 'finished'), ('small_pairwise', 2, 1, 'finished')]
    assert all([point[0] for point in row['curve']] == [0, 2, 4] for row in rows)


@pytest.mark.slow
def test_the_default_sections_end_to_end(run, corpus, tmp_path):
    """convergence trains, a finished run is read again, rank reads the checkpoints."""
    data_dir, dataset = os.path.split(corpus)
    recipe = tmp_path / 'recipe.py'
    recipe.write_text('block_size = 16\ntotal_batch = 4\nbatch_size = 4\neval_samples = 8\nn_layer = 2\n'
                      'n_head = 4\nn_embd = 16\nn_inner = 32\ncheckpoint_interval = 0\n')
    knobs = [f'--data_dir={data_dir}', f'--dataset={dataset}', f'--recipe={recipe}', '--sentence=A list',
             '--variants=original,gau', '--seeds=2', '--eval_interval=2', '--steps=4', '--rank_rows=2']
    found, _ = run('--what=convergence,rank', *knobs)
    rows = found['convergence'][1:]
    assert [(row['system'], row['seed'], [point[0] for point in row['curve']]) for row in rows] == [
        (name, seed, [0, 2, 4]) for seed in (1, 2) for name in ('original', 'gau')]
    assert len(found['rank'][1:]) == 2 * len(MATRICES)
    again, _ = run('--what=convergence', *knobs)
    assert [row['curve'] for row in again['convergence'][1:]] == [row['curve'] for row in rows]
    assert again['rank'] == found['rank']
    with pytest.raises(bench.UserError, match='max_iters is 4 there and 6 here'):
        run('--what=convergence', *knobs, '--steps=6')


def test_plots_are_optional(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    train.plot('/nowhere', 'a', {'': None}, ('', ''))
    assert capsys.readouterr().err == 'no a.png without matplotlib: pip install matplotlib\n'


def test_the_five_pictures_share_a_style_that_is_read_in_grey(corpus, tmp_path, monkeypatch):
    matplotlib, drawn = pytest.importorskip('matplotlib'), {}

    def save(figure, path):
        drawn[os.path.basename(path)] = figure, {key: matplotlib.rcParams[key] for key in train.STYLE}
    monkeypatch.setattr('matplotlib.figure.Figure.savefig', save)
    with matplotlib.rc_context(train.STYLE):
        wanted = {key: matplotlib.rcParams[key] for key in train.STYLE}
    config = {'out_dir': str(tmp_path), 'runs': str(tmp_path / 'a-1'), 'plateau': 0.1, 'target_loss': 0,
              'sentence': 'A list'}
    write_run(tmp_path / 'a-1', corpus, 1, (6, 5))
    list(bench.convergence(config, CPU))
    train.plot_losses(str(tmp_path / 'a-1'), 5.5)
    list(bench.partition(config, CPU))
    meta = bench.load_meta(corpus)
    model = MaskedLM(EncoderConfig(meta['vocab_size'], 16, 2, 4, 16, 32))
    bench.draw_sentence(config, 'a', model, bench.load_tokenizer(corpus), meta['special'])
    for step in (1, 2):
        folder = tmp_path / 'trials' / str(step)
        folder.mkdir(parents=True)
        (folder / 'result.json').write_text(json.dumps(trial(50 + step, step=step)))
    finetune.write_report({**config, 'compare': '', 'paper': ''}, False)
    assert set(drawn) == {f'{name}.png' for name in (
        'loss', 'convergence', 'partition', 'attention_a', 'curve')}
    for figure, style in drawn.values():
        assert style == wanted
        x, y = ({getattr(axis, f'get_{side}label')() for axis in figure.axes} - {''} for side in 'xy')
        assert len(x) == len(y) == 1 and re.search(r'step|\(', *x) and re.search(r'share|\(', *y)
    images = [image for axis in drawn['attention_a.png'][0].axes for image in axis.get_images()]
    assert len(images) == 8 and {image.get_cmap().name for image in images} == {'gray_r'}
    cycle = list(wanted['axes.prop_cycle'])
    greys = sorted({float(np.dot(matplotlib.colors.to_rgb(row['color']), (0.299, 0.587, 0.114)))
                    for row in cycle})
    assert len({tuple(row.values()) for row in cycle}) == len(cycle) == 16
    assert min(np.diff([*greys, 1])) > 0.2              # white is the background


@pytest.mark.parametrize('knob, words', [
    ('--what=sped', "what='sped': choose one of params, speed"),
    ('--what=', "what='': choose one of params"),
    ('--variants=original,pair', "variants='pair': choose one of original, symmetric"),
    ('--peers=hf', "peers='hf': choose one of hf_bert"),
    ('--compile=maybe', "compile"),
    ('--modes=backward', "modes='backward': choose one of forward, train"),
    ('--rounds=0', 'rounds=0: must be at least 1'),
    ('--out_dir=', "out_dir='': name a folder"),
    ('--plateau=-1', 'plateau=-1.0: must be at least 0'),
    ('--dropout=1', 'dropout=1.0: must lie in [0, 1)'),
    ('--target_loss=-1', 'target_loss=-1.0: must be at least 0'),
    ('--variants=pairwise_rank_32', 'pair_rank=32: choose 0 (full) or 1 to 4'),
    ('--lengths=0', 'lengths=0: must be at least 1'),
    ('--batches=', 'batches=0: must be at least 1'),
    ('--n_embd=18', 'n_embd=18: must be a multiple of n_head=4'),
])
def test_bad_input_is_refused(knob, words, run):
    with pytest.raises(bench.UserError) as error:
        run('--what=params', knob)
    assert words in str(error.value)


def test_a_missing_checkpoint_is_refused(run, corpus):
    data_dir, dataset = os.path.split(corpus)
    for knobs, words in ((['--checkpoint=nowhere'], "checkpoint='nowhere': no checkpoint there"),
                         ([], 'no checkpoint there; --what=convergence makes some')):
        with pytest.raises(bench.UserError, match=words):
            run('--what=rank', f'--data_dir={data_dir}', f'--dataset={dataset}', *knobs)


def test_a_refusal_is_one_line(tmp_path):
    assert refused(stage('bench.py', '--variant=shared')) == \
        "error: command line: no such key 'variant', did you mean 'variants'?"
    missing = stage('bench.py', '--what=convergence', '--runs=nowhere', f'--out_dir={tmp_path}')
    assert refused(missing) == 'error: nowhere/run.json: No such file or directory'


def test_the_tables_fit_together():
    assert list(WHAT) == bench.what.split(',') and set(MODES) >= set(bench.modes.split(','))
    for name in SMALL:
        assert isinstance(bench.build(name, CONFIG, 16), (MaskedLM, OBJECTIVE['plm'][0]))
