"""bench.py: counts, flops, ratios on a fake clock, memory, rank, partition, curves, and every row of WHAT."""
import contextlib
import json
import math
import os
import sys
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import torch
from conftest import refused, stage

import bench
from bench import AUTO, GROUPS, MATRICES, MODES, PEERS, SHAPES, VARIANTS, WHAT, Machine
from model import EncoderConfig, MaskedLM, Partition, count_parameters, training_flops
from train import OBJECTIVE

CPU = Machine(torch.device('cpu'), torch.float32, 1)
PLAN = {'position': '', 'vocab_size': 60, 'mask_fraction': 0.15, 'shape': 'auto', 'fallback': 'middle',
        'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'memory_limit': 0.0, 'sections': {}}
SIZES = (2, 4, 16, 32)
BASE = {                            # of the README: masked-LM models, 30,522 words, 512 positions
    'original': 109514298, 'symmetric': 102427194, 'pairwise': 103017018, 'shared': 95367738,
    'no_position': 109121082, 'roformer_v1': 109121082, 'rpe': 111471162, 'rab': 109514682,
    'roformer_v2': 108377088, 'part_mask': 109121082, 'one_head_softmax': 102033978,
    'one_head_sigmoid': 102033978, 'part_bias': 102144570, 'shatter': 102144570, 'gau': 110742528,
    'xlnet': 116180538, 'xlnet_plm': 116180538 + 768,
}
SHAPE = ['--n_layer=2', '--n_head=4', '--n_embd=16', '--n_inner=32', '--device=cpu']


@pytest.fixture(scope='module')
def here(tmp_path_factory):
    return tmp_path_factory.mktemp('bench')


@pytest.fixture
def run(corpus, monkeypatch, capsys):
    """bench.main() in this process, which is faster than a new one; returns (bench.json, stdout)."""
    def main(out_dir, *knobs):
        data_dir, dataset = os.path.split(corpus)
        argv = ['bench.py', f'--out_dir={out_dir}', f'--data_dir={data_dir}', f'--dataset={dataset}', *SHAPE,
                *knobs]
        with monkeypatch.context() as patch:
            patch.setattr(sys, 'argv', argv)
            for name in bench.configure(dict(vars(bench)), [])[0]:
                patch.setattr(bench, name, getattr(bench, name))       # back to the default afterwards
            bench.main()
        with open(os.path.join(out_dir, 'bench.json')) as file:
            return json.load(file), capsys.readouterr().out
    return main


# ---- params ----

@pytest.mark.parametrize('name', VARIANTS)
def test_groups_sum_to_the_readmes_counts(name):
    plan = {**PLAN, 'vocab_size': 30522, **dict.fromkeys(('n_layer', 'n_head', 'n_embd', 'n_inner'), 0)}
    with torch.device('meta'):
        model = bench.build(name, plan, SHAPES['base'], 512, 'train')
    groups = bench.count_groups(model)
    assert set(groups) == set(GROUPS) and sum(groups.values()) == count_parameters(model)
    same = 'gau' if name.startswith('gau') else name.removesuffix('_recompute')
    assert sum(groups.values()) == BASE[same]
    assert groups['embedding'] == (30522 + 2) * 768 and (groups['MLP'] == 0) == name.startswith('gau')


def test_every_count_that_a_paper_prints_is_ours_or_explained():
    rows = bench.quoted('parameters')
    assert {paper for paper, *_ in rows} == {'courtois', 'kowsher', 'tian', 'liu'}
    unequal = {' '.join(words.split()[:3]): source for _, words, printed, source in rows
               if bench.as_printed(bench.count_printed(words, PLAN), printed) != printed}
    assert list(unequal) == ['shared base all', 'original large matrices', 'shatter large matrices']
    assert all('12 of the 24' in source or 'classifier' in source for source in unequal.values())


# ---- speed ----

@pytest.mark.parametrize('name', VARIANTS)
def test_flops_are_those_of_the_model(name):
    knobs = bench.settings(name, PLAN, SIZES, 32)
    kind = OBJECTIVE[knobs['objective']][0]
    expected = training_flops(bench.model_config(knobs, 60), 32, 5, kind)        # ceil(0.15 32) = 5
    assert bench.count_flops(name, PLAN, SIZES, 32, 'train') == expected > 0
    assert 0 < bench.count_flops(name, PLAN, SIZES, 32, 'forward') < expected
    seven = training_flops(bench.model_config(knobs, 60), 32, 5, kind, 7)
    assert bench.count_flops(name, PLAN, SIZES, 32, 'train', 7) == seven
    once = name == 'rpe' or knobs['attention'] in ('shatter', 'xlnet')          # vectors of distances
    assert seven < 7 * expected if once else seven == 7 * expected


def test_flops_of_full_logits_and_of_a_product_by_hand():
    plan, k, T, V, D = {**PLAN, 'vocab_size': 1000}, 5, 32, 1000, 16
    difference = (bench.count_flops('original', plan, SIZES, T, 'full')
                  - bench.count_flops('original', plan, SIZES, T, 'train'))
    assert difference == 3 * 2 * (T - k) * (D * V + D * D)                       # forward, and twice backward
    step, flops = bench.product_step(CPU)
    assert flops == 2 * 1024 ** 3 and step().shape == (1024, 1024)


def fake(costs, calls):
    """(makers, time_of) of cases whose steps take given seconds, times a load that grows with each call."""
    def maker(case):
        def step():
            calls.append(case)
            return costs[case]
        return lambda: step
    return {case: maker(case) for case in costs}, lambda step: step() * len(calls)


def test_cases_take_turns_and_ratios_stand_a_drift():
    calls = []
    makers, time_of = fake({('original', False): 2.0, ('shared', False): 1.0}, calls)
    seconds, failed = bench.interleave(makers, 4, 3, time_of)
    names = [name for name, _ in calls]
    assert failed == {} and names[:6] == ['original'] * 3 + ['shared'] * 3       # warm-up, which is dropped
    assert names[6:] == ['original', 'shared', 'shared', 'original'] * 2         # the first one changes
    assert [len(times) for times in seconds.values()] == [4, 4]
    assert bench.ratio(seconds['original', False], seconds['shared', False]) == pytest.approx(2, abs=0.2)
    assert bench.ratio([3, 1, 8], [1, 1, 2]) == 3 and bench.ratio([1, 2], [2, 4]) == 0.5


def test_a_clock_is_read_around_a_step():
    ticks = iter([10.0, 12.5])
    assert bench.timed(lambda: None, CPU, lambda: next(ticks)) == 2.5


def test_failures_become_rows_and_bugs_do_not():
    def fails(error):
        def make():
            raise error
        return make
    makers, time_of = fake({('original', False): 1.0}, [])
    makers |= {('wide', False): fails(torch.OutOfMemoryError('CUDA out of memory')),
               ('cpu', False): fails(RuntimeError("DefaultCPUAllocator: can't allocate memory")),
               ('new', True): fails(ValueError('no compiler\nat all'))}
    seconds, failed = bench.interleave(makers, 2, 0, time_of)
    assert list(seconds) == [('original', False)]
    assert failed == {('wide', False): 'out of memory', ('cpu', False): 'out of memory',
                      ('new', True): 'no compiler'}
    with pytest.raises(ValueError, match='a bug'):
        bench.interleave({('original', False): fails(ValueError('a bug'))}, 1, 0, time_of)


def test_a_case_that_runs_out_of_memory_later_is_a_row_too():
    def step():
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError('CUDA out of memory')
    calls = []
    makers = {('original', False): lambda: int, ('wide', False): lambda: step}
    seconds, failed = bench.interleave(makers, 4, 1, lambda step: step() or 1.0)
    assert seconds == {('original', False): [1.0] * 4} and failed == {('wide', False): 'out of memory'}


def test_rates_and_mfu(monkeypatch):
    common = {'mode': 'train', 'batch': 4, 'length': 100, 'compiled': False, 'failed': None}
    group = [{'system': 'matrix product', **common, 'flops': 8e12, 'seconds': [2.0, 2.0, 2.0]},
             {'system': 'original', **common, 'flops': 1e12, 'seconds': [1.0, 4.0, 2.0], 'kernel': 'flash'},
             {'system': 'shared', **common, 'flops': 1e12, 'seconds': [0.5, 2.0, 1.0], 'kernel': 'flash'},
             {'system': 'rpe', **common, 'failed': 'out of memory', 'flops': 1e12, 'seconds': None}]
    monkeypatch.setattr(bench.train, 'peak_flops', lambda device, dtype: 10e12)
    rows = [bench.speed_row(row, group, CPU) for row in group[1:]]
    #                           median         range             tokens/s
    assert rows[0] == ['original', 'no', '2000.0', '1000.0 to 4000.0', '200', '1.00', '-', '0.500', '5.0%',
                       '12.5%', 'flash']
    assert rows[1][4:7] == ['400', '2.00', '-'] and rows[1][7:10] == ['1.000', '10.0%', '25.0%']
    assert rows[2][2] == 'out of memory' and set(rows[2][3:]) == {'-'}
    assert len({len(row) for row in rows}) == 1
    assert bench.time_ratios(group, 'shared original train') == '4 x 100: 0.50'
    assert bench.time_ratios(group, 'rpe original train') == '-'


@pytest.mark.parametrize('name', PEERS)
def test_peers_compute_the_loss_of_a_masked_lm(name):
    """All three heads give the mean loss of the predicted positions, and BERT's flops are ours."""
    pytest.importorskip('transformers')
    torch.manual_seed(0)
    model, rows = bench.build(name, PLAN, SIZES, 32, 'train').eval(), bench.make_rows(2, 32, PLAN, 'cpu')
    peer = model.peer if name != 'hf_bert_masked' else None
    loss = bench.masked_loss(model, rows, name)
    assert loss.item() == pytest.approx(math.log(60), rel=0.1)
    if peer is not None:
        logits = peer(input_ids=rows['ids']).logits.gather(1, rows['positions'][..., None].expand(-1, -1, 60))
        torch.testing.assert_close(loss, bench.token_losses(logits, rows['targets']).mean())
    if name != 'hf_roformer':
        mode = 'train' if name == 'hf_bert_masked' else 'full'
        flops, ours = (bench.count_flops(one, PLAN, SIZES, 32, how)
                       for one, how in ((name, 'train'), ('original', mode)))
        assert flops == ours


def test_the_kernel_that_ran():
    q = torch.randn(1, 2, 8, 4)
    assert 'attention' in bench.kernel(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert bench.kernel(lambda: (q @ q.mT).softmax(-1) @ q) == 'plain products'


# ---- memory ----

def test_largest_batch():
    for most in (0, 1, 2, 3, 7, 8, 100):
        asked = []
        assert bench.largest_batch(lambda n: asked.append(n) or n <= most) == most      # noqa: B023
        assert len(asked) == len(set(asked)) < 20


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('x'), MemoryError(), BrokenProcessPool('killed'),
                                   RuntimeError("can't allocate memory: you tried to allocate 9 bytes")])
def test_out_of_memory_is_a_row(error):
    def run(*arguments):
        raise error
    row = bench.memory_row(PLAN, CPU, 'original', 'train', 8, 64, run)
    assert row['failed'] == 'out of memory' and bench.used(row) is None
    good = bench.memory_row(PLAN, CPU, 'gau', 'train', 8, 64, lambda *arguments: (2 ** 20, 5 * 2 ** 20))
    assert bench.used(good) == 4
    plan = {**PLAN, 'variants': ['original', 'gau'], 'memory_lengths': (64,), 'memory_batch': 8}
    title, header, lines, notes = bench.memory_table(plan, CPU, [row, good], [])
    assert lines == [['original', 'out of memory', '-', '-'], ['gau', '4', '100.0%', '-']]
    with pytest.raises(RuntimeError, match='a bug'):
        bench.memory_row(PLAN, CPU, 'gau', 'train', 8, 64, lambda *arguments: fail(RuntimeError('a bug')))


def fail(error):
    raise error


def test_a_limit_stops_the_search(monkeypatch):
    monkeypatch.setattr(bench, 'in_fresh_process', lambda plan, machine, name, mode, batch, length:
                        (0, batch * 10 * 2 ** 20))
    found = bench.search_batch({**PLAN, 'memory_limit': 0.5}, CPU, 'original', 64)
    assert found['largest_batch'] == 51                 # 510 of 512 MiB


# ---- convergence ----

def test_where_a_curve_leaves_the_plateau():
    assert bench.falls_below([9, 7, 6.4, 6.6, 6.3, 6.0], 6.5) == 4               # back above, so not yet at 2
    assert bench.falls_below([9, 7, 6.6], 6.5) is None and bench.falls_below([6, 5], 6.5) == 0
    assert bench.falls_below([9, None, 6], 6.5) == 2 and bench.falls_below([9, 6.5, 6.4], 6.5) == 2
    assert bench.spread([10, 20, None], '{:.0f}', 3) == '15 (7), 2 of 3'
    assert bench.spread([None], '{:.0f}', 1) == 'none of 1' and bench.spread([3.0], '{:.1f}', 1) == '3.0'


def test_seconds_of_a_curve(tmp_path, corpus, monkeypatch):
    """30 steps of 8 x 32 tokens: 10 at 256 tokens a second, 20 at 512; validations cost nothing."""
    lines = [{'kind': 'val', 'step': 0, 'loss': 6.0, 'accuracy': 0.0},
             {'kind': 'train', 'step': 10, 'tokens_per_second': 256.0},
             {'kind': 'train', 'step': 30, 'tokens_per_second': 512.0},
             {'kind': 'val', 'step': 30, 'loss': 5.0, 'accuracy': 0.5}]
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (tmp_path / 'run.json').write_text(json.dumps([{'config': {'total_batch': 8, 'block_size': 32}}]))
    monkeypatch.setattr(bench, 'count_run', lambda config: 7)
    assert bench.read_curve(str(tmp_path)) == {'step': [0, 30], 'loss': [6.0, 5.0], 'accuracy': [0.0, 0.5],
                                               'seconds': [0.0, 10 + 20 / 2], 'parameters': 7}


def test_rows_do_not_take_the_recipes_operators(corpus):
    data_dir, dataset = os.path.split(corpus)
    plan = {**PLAN, 'steps': 4, 'eval_interval': 2, 'dataset': dataset, 'data_dir': data_dir, 'device': 'cpu',
            'dtype': 'auto', 'out_dir': 'out', 'recipe': 'config/base_roformer_v2.py'}
    for name in VARIANTS:
        path, knobs, whole = bench.run_knobs(plan, name, 1)
        other = bench.run_knobs({**plan, 'recipe': 'config/base_shatter.py'}, name, 1)[1]
        assert knobs == other and knobs.items() <= whole.items()
    assert whole['learning_rate'] == 3e-4               # but its recipe


# ---- rank, attention, partition ----

def test_key_size_bounds_the_rank_where_no_position_adds_to_it():
    built = {name: bench.build(name, PLAN, SIZES, 16, 'train') for name in VARIANTS}
    share = {name: bench.key_share(model.config, 16) for name, model in built.items()}
    assert share['original'] == '0.25' and share['one_head_sigmoid'] == '1.00' and share['gau'] == '8.00'
    assert {name for name in share if share[name] == '-'} == {
        'rpe', 'rab', 'part_bias', 'shatter', 'shatter_recompute', 'xlnet', 'xlnet_plm'}



def test_rank_of_matrices_of_known_rank():
    torch.manual_seed(0)
    for r in (1, 5, 16):
        matrix = torch.randn(2, 3, 16, r, dtype=torch.float64) @ torch.randn(2, 3, r, 16, dtype=torch.float64)
        assert bench.rank_and_zeros(matrix, 1e-6) == (r / 16, 0.0)
    noisy = torch.eye(16, dtype=torch.float64) * torch.tensor([1.0] * 4 + [1e-9] * 12)
    assert bench.rank_and_zeros(noisy, 1e-6) == (4 / 16, 252 / 256)              # below float32's precision
    assert bench.rank_and_zeros(torch.zeros(4, 4), 1e-6) == (0.0, 1.0)


@pytest.mark.parametrize('name', VARIANTS)
def test_scores_are_those_that_the_model_uses(name):
    """The maps, times the model's own values, are what its attention gives: checked by a second way."""
    torch.manual_seed(0)
    model = bench.build(name, PLAN, SIZES, 16, 'train')
    ids = torch.randint(60, (1, 16))
    maps = bench.attention_maps(model, ids)
    layers = model.config.n_layer
    heads = {'gau': 1, 'xlnet': 4}.get(model.config.attention, 4)
    assert [a.shape for a in maps] == [(heads, 16, 16)] * layers
    assert all(a.dtype == torch.float64 and torch.isfinite(a).all() and (a >= 0).all() for a in maps)
    if model.config.attention in ('original', 'symmetric', 'pairwise', 'shared', 'xlnet') or (
            model.config.normaliser.startswith('softmax') and model.config.attention == 'gau'):
        assert all(torch.allclose(a.sum(-1), torch.ones(heads, 16).double()) for a in maps)
    operator = model.encoder.blocks[0].attention
    if model.config.attention in ('original', 'pairwise', 'part_mask') and model.config.position != 'rpe':
        x, seen = model.encoder.embed(ids), []
        value = operator.value(x).view(16, 4, 4).transpose(0, 1)
        handle = operator.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        with torch.no_grad():
            model.encoder(ids)
        handle.remove()
        ours = (maps[0] @ value).transpose(0, 1).reshape(16, 16)
        theirs = seen[0][0]
        torch.testing.assert_close(ours, theirs)


def test_matrices_of_scores():
    scores = torch.tensor([[[[1.0, -1.0], [0.0, 2.0]]]], dtype=torch.float64)
    made = {name: make(scores)[0, 0] for name, make in MATRICES.items()}
    assert made['QK^T'].tolist() == [[1, -1], [0, 2]] and made['relu^2'].tolist() == [[1, 0], [0, 4]]
    assert torch.allclose(made['softmax'].sum(-1), torch.ones(2).double())
    sigmoid = scores[0, 0].sigmoid()
    torch.testing.assert_close(made['l2 sigmoid'], sigmoid / sigmoid.square().sum(-1, keepdim=True).sqrt())


def test_the_partition_sums_to_one(run, here):
    found, out = run(here, '--what=partition', '--n_layer=12', '--n_head=12', '--n_embd=24')
    rows = found['partition']['raw']
    assert len(rows) == 12 and all(row['largest_error'] < 1e-6 and len(row['peaks']) == 12 for row in rows)
    assert all(sorted(row['peaks'])[i] == -sorted(row['peaks'])[-1 - i] for row in rows for i in range(5))
    table = Partition(EncoderConfig(1, 512, 12, 12, 24, 96, attention='shatter', position='none'), 3).table
    assert table.sum(0).sub(1).abs().max() < 1e-6


# ---- the whole ----

def head(section):
    assert section['made'].startswith('`python bench.py --out_dir=')
    assert f'torch {torch.__version__}' in section['made']
    assert section['knobs']['n_embd'] == 16 and section['seconds'] > 0


def test_params_and_speed_end_to_end(run, here):
    pytest.importorskip('transformers')
    found, out = run(here, '--what=params,speed', '--variants=original,shared,gau', '--lengths=32',
                     '--batches=2', '--rounds=3', '--warmup=1', '--vocab_size=60',
                     '--peers=hf_bert,hf_bert_masked')
    for name in ('params', 'speed'):
        head(found[name])
    assert ['tian', 'shatter', 'large', 'matrices', '277,217,280', '138.6M', 'no'] in [
        [cell.strip() for cell in line.split('|')[1:8]] for line in out.splitlines()]
    rows = found['speed']['raw']
    for mode in ('forward', 'train', 'finetune'):
        systems = [row['system'] for row in rows if row.get('mode') == mode]
        peers = ['hf_bert', 'hf_bert_masked'] if mode != 'finetune' else []
        assert systems == ['matrix product', 'original', 'shared', 'gau', *peers]
    assert all(len(row['seconds']) == 3 and min(row['seconds']) > 0 for row in rows)
    assert {row['batch'] for row in rows if row.get('mode') == 'finetune'} == {16}
    assert rows[-1]['system'] == 'loader' and '## Loader' in out
    page = (here / 'bench.md').read_text()
    assert page.strip() in out.strip() or all(line in page for line in out.splitlines())
    tables = [line for line in page.splitlines() if line.startswith('|')]
    assert tables and all(line.endswith('|') for line in tables)


def test_memory_end_to_end(run, here):
    found, out = run(here, '--what=memory', '--variants=original,shatter', '--memory_lengths=16,32',
                     '--vocab_size=60')
    head(found['memory'])
    rows = found['memory']['raw']
    assert [(row['system'], row['mode'], row['length']) for row in rows] == [
        (name, mode, length) for length in (16, 32) for name, mode in (
            *((one, 'train') for one in ('original', 'shatter', 'shatter_recompute')), ('original', 'full'))]
    assert all(row['peak'] >= row['before'] > 2 ** 20 for row in rows)
    assert 'Memory at half the length' in out and 'original, full logits' in out


def test_convergence_rank_and_attention_end_to_end(run, here, monkeypatch):
    recipe = here / 'recipe.py'
    recipe.write_text('\n'.join(['block_size = 16', 'total_batch = 4', 'batch_size = 4', 'eval_samples = 8',
                                 'learning_rate = 1e-3', 'checkpoint_interval = 0']))
    knobs = [f'--recipe={recipe}', '--variants=original,shatter', '--seeds=1', '--eval_interval=2',
             '--steps=4']
    found, out = run(here, '--what=convergence,rank,attention', *knobs, '--rank_rows=2',
                     '--sentence=Return a list')
    runs = found['convergence']['raw']['runs']
    assert [(one['system'], one['seed'], one['step']) for one in runs] == [
        (name, 1, [0, 2, 4]) for name in ('original', 'shatter')]
    assert all(one['seconds'][0] == 0 < one['seconds'][1] < one['seconds'][2] for one in runs)
    assert len(found['rank']['raw']) == 2 * len(MATRICES)
    layers = [layer for row in found['rank']['raw'] for layer in row['layers']]
    assert all(0 < rank <= 1 and 0 <= zeros <= 1 for rank, zeros in layers)
    maps = found['attention']['raw']
    n = len(maps[0]['tokens'])
    assert [np.shape(one['maps']) for one in maps] == [(2, 4, n, n)] * 2
    with contextlib.suppress(ImportError):
        import matplotlib  # noqa: F401
        for name in ('convergence', 'attention_original-1', 'attention_shatter-1'):
            assert (here / f'{name}.png').stat().st_size > 1000

    # finished runs are not repeated, other sections stay, and other knobs are refused
    monkeypatch.setattr(bench.subprocess, 'run', lambda *words, **keywords: fail(AssertionError(words)))
    again, _ = run(here, '--what=convergence', *knobs)
    assert again['convergence']['raw'] == found['convergence']['raw'] and again['rank'] == found['rank']
    with pytest.raises(bench.UserError, match='max_iters is 4 there and 6 here'):
        run(here, '--what=convergence', *knobs[:-1], '--steps=6')
    recipe.write_text(recipe.read_text().replace('1e-3', '2e-3'))
    with pytest.raises(bench.UserError, match='learning_rate is 0.001 there and 0.002 here'):
        run(here, '--what=convergence', *knobs)

    # a loss that is not finite is a divergence; the log leaves it out
    recipe.write_text(recipe.read_text().replace('2e-3', '1e-3'))
    path = here / 'runs' / 'original-1' / 'metrics.jsonl'
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(''.join(json.dumps({key: value for key, value in line.items() if key != 'loss' or (
        line['kind'], line['step']) != ('val', 4)}) + '\n' for line in lines))
    _, out = run(here, '--what=convergence', *knobs)
    assert '| diverges ' in out


def test_plots_are_optional(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    bench.figure_class.cache_clear()
    assert list(bench.plots({'out_dir': '/nowhere'}, 'a', (1, 1), (1, 1))) == []
    assert list(bench.plots({'out_dir': '/nowhere'}, 'b', (1, 1), (1, 1))) == []
    bench.figure_class.cache_clear()
    assert len(capsys.readouterr().err.splitlines()) == 1                        # said once


@pytest.mark.parametrize('knob, words', [
    ('--what=sped', "what='sped': choose one of params, speed"),
    ('--what=', "what='': choose one or more of params"),
    ('--variants=original,pair', "variants='pair': choose one of original, symmetric"),
    ('--shape=huge', "shape='huge': choose one of auto, middle"),
    ('--compile=maybe', "compile='maybe': choose one of false, true, both"),
    ('--modes=backward', "modes='backward': choose one of forward, train"),
    ('--rounds=-1', 'rounds=-1: must be at least'),
    ('--lengths=0', 'lengths=0: must be at least 1'),
    ('--n_embd=18', 'n_embd=18: must be a multiple of n_head=4'),
    ('--memory_limit=-1', 'memory_limit=-1.0: must be at least 0'),
    ('--checkpoint=nowhere', "checkpoint='nowhere': no checkpoint there"),
    ('--dataset=', "dataset='': name a corpus"),
])
def test_bad_input_is_refused(knob, words, run, tmp_path):
    with pytest.raises(bench.UserError) as error:
        run(tmp_path, '--what=rank', knob)
    assert words in str(error.value)


def test_a_refusal_is_one_line():
    assert refused(stage('bench.py', '--variant=shared')) == \
        "error: command line: no such key 'variant', did you mean 'variants'?"


def test_the_tables_fit_together():
    assert list(WHAT) == bench.what.split(',')
    assert set(MODES) >= set(bench.modes.split(',')) and set(AUTO['cpu']) == set(AUTO['cuda'])
    for name in VARIANTS:
        assert issubclass(type(bench.build(name, PLAN, SIZES, 16, 'train')), (MaskedLM, OBJECTIVE['plm'][0]))
