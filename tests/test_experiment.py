"""results/experiment.py: runs that processes share, rows, every number of its tables and figure by hand."""
import contextlib
import json
import math
import os
import runpy
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import experiment
import pandas as pd
import pytest
import test_export as export
from conftest import ROOT, knobs_of, refused, tiny
from filelock import FileLock
from matplotlib.figure import Figure
from test_train import CPU, happening, metrics

import train
from configurator import UserError

PLAN = """
base = '{base}'
cells = {{'original': '', 'symmetric': '--attention=symmetric'}}
reference = 'original'
seeds = 1, 2
"""


@pytest.fixture
def write_plan(corpus, tmp_path, monkeypatch):
    """write_plan(more, knob=...) -> 'plan.py': two cells and two seeds on the `corpus` fixture, then `more`

    A test that uses it has tmp_path as its current folder, as has make_rows().
    """
    monkeypatch.chdir(tmp_path)

    def write(more='', name='plan', **knobs):
        base = tiny(corpus, 'replaced', eval_interval=4, **knobs)
        Path(f'{name}.py').write_text(PLAN.format(base=' '.join(base)) + more)
        return f'{name}.py'
    return write


def make_rows(losses, name='plan', rate=1e-3, **values):
    """Add rows to plan.jsonl from {cell: the losses of seeds 1, 2 ...}; None: not finite."""
    with open(f'{name}.jsonl', 'a') as file:
        for cell, of_cell in losses.items():
            for seed, loss in enumerate(of_cell, 1):
                last = loss or 0
                row = {
                    'cell': cell, 'rate': rate, 'seed': seed, 'loss': loss, 'parameters': 100, 'seconds': 60,
                    'knobs': {'dataset': 'tiny', 'dtype': 'float32'}, 'blimp': last / 10,
                    'curve': [[0, 9.0], [10, last + 0.3], [20, last], [30, last]],
                }
                file.write(json.dumps({**row, **values}) + '\n')


@pytest.fixture
def make_runs(stage, monkeypatch):
    """make_runs('plan.py') makes its runs in this process.

    There train.py gets its defaults without being loaded anew: the tests have its classes.
    """
    defaults = knobs_of(train)
    monkeypatch.setattr(experiment.importlib, 'reload', lambda module: vars(module).update(defaults))

    def make(path):
        vars(train).update(defaults)
        assert stage('experiment', path, 'run').code == 0
        return {(row['cell'], row['seed']): row for row in experiment.read_lines(path)}
    yield make
    vars(train).update(defaults)


def test_processes_share_the_runs_and_a_stopped_one_goes_on(write_plan, make_runs, run, stage, monkeypatch):
    """The lock is that of another process, which makes a run; its row and folder are as train.py's alone."""
    path = write_plan()
    folders = stage('experiment', path, 'folders').out.splitlines()
    *_, other, last = folders
    assert (len(folders), last) == (4, 'out/plan/symmetric_0.001-2')
    knobs = {'eval_interval': 4, 'seed': 2}
    with happening(monkeypatch, 'seed_step', 5, signal.SIGTERM):
        run(last, 143, attention='symmetric', **knobs)
    os.makedirs(other)
    with FileLock(f'{other}/experiment.lock'):
        assert ('original', 2) not in make_runs(path)
    rows = make_runs(path)
    launches = [Path(folder, 'launches.jsonl').read_text().count('"argv"') for folder in folders]
    assert launches == [1, 1, 1, 2]                     # no run is made twice
    run('alone', attention='symmetric', **knobs)
    curve = [[line['step'], round(line['loss'], 4)] for line in metrics('alone', 'val')]
    row = rows['symmetric', 2]
    assert (row['curve'], row['loss'], row['knobs']['attention']) == (curve, curve[-1][1], 'symmetric')
    assert row['start'] == experiment.read_launches(last)[0]['date'] <= row['end']


def test_a_run_that_diverges_is_a_row_and_the_last_loss_can_be_of_all_rows(write_plan, make_runs):
    rows = make_runs(write_plan("cells['bad'] = '--learning_rate=1e30'\nseeds = 1,\nall_rows = True\n"))
    assert rows['bad', 1]['loss'] is None
    model, _, content = train.load('out/plan/symmetric_0.001-1')
    _, _, loaders = train.make_loaders(content['config'])
    every_row = train.evaluate(model, loaders[''], 10 ** 6, 8, CPU)['loss']
    assert rows['symmetric', 1]['loss'] == pytest.approx(every_row, abs=1e-5)


def test_a_run_of_another_corpus_code_precision_or_plan_is_not_added(write_plan, corpus, monkeypatch):
    """Otherwise a table would compare losses that do not compare, or a row have the new plan's knobs."""
    monkeypatch.setattr(experiment, 'code_digest', lambda: 'ours')
    path = write_plan()
    _, (*_, one) = experiment.read_plan(path)
    origin = experiment.origin_of(one)
    for key, other, message in [
            ('corpus', {**origin['corpus'], 'val': 'another'}, 'plan.jsonl has val=another, this run has '),
            ('precision', 'bfloat16', 'plan.jsonl has precision=bfloat16, this run has precision=float32'),
            ('code', 'another', 'model.py or train.py has changed since the run of original, seed 1')]:
        make_rows({'original': [4.0]}, **{**origin, key: other})
        with pytest.raises(UserError, match=message):
            experiment.make_all(path, any_code=False)
        os.remove('plan.jsonl')
    make_rows({'original': [4.0]})                      # a row of an older revision
    experiment.check_origin(path, one, origin, any_code=False)

    for said, begun in [
            ('mask_fraction=0.4', {'config': {**one.knobs, 'mask_fraction': 0.4}}),
            ('dtype=bfloat16', {'dtype': 'bfloat16'}),
            ('model.py=another', {'code': {**train.code_digests(), 'model.py': 'another'}})]:
        shutil.rmtree('out')
        begun = {'config': one.knobs, 'dtype': 'float32', 'code': train.code_digests(), **begun}
        export.make_run(Path(one.folder), corpus, content=begun)
        with pytest.raises(UserError, match=f'has {said}, this run has '):
            experiment.check_origin(path, one, origin, any_code=False)
    experiment.check_origin(path, one, origin, any_code=True)


def test_holm_gives_the_values_of_r():
    """p.adjust(c(0.03, 0.01, 0.05, 0.02, 0.04), 'holm') of R."""
    found = experiment.holm(pd.Series([0.03, 0.01, 0.05, 0.02, 0.04]))
    assert found.tolist() == pytest.approx([0.09, 0.05, 0.09, 0.08, 0.09])
    assert experiment.holm(pd.Series([0.6, 0.7])).tolist() == [1, 1]


def test_steps_are_those_of_two_validations_in_a_row():
    curve = [[0, 9], [10, 4.9], [20, 5.1], [30, 4.8], [40, 4.7]]
    assert experiment.steps_below(curve, 5) == 30
    assert experiment.steps_below(curve, 4.8) == 40     # not below at 30, and none follows: all its steps


def test_every_number_of_the_tables_and_of_the_figure(write_plan, stage):
    """Cells are compared within their group, on the seeds that both have."""
    more = """
cells = {'x/original': '', 'x/other': '', 'y/original': '', 'y/other': ''}
seeds = 1, 2, 3
contrasts = {'more in y': {'x/other': -1, 'x/original': 1, 'y/other': 1, 'y/original': -1}}
target = 4.5
blimp = 'folder'
"""
    path = write_plan(more)
    make_rows({'x/original': [4, 4.1, 4.2], 'x/other': [4.5, 4.7, 4.6]}, code='a')
    make_rows({'y/original': [3, 3.1], 'y/other': [3.2, None, 3.6]}, code='b')
    done = stage('experiment', path, pictures=True)
    assert done.code == 0, done.err
    assert 'the rows differ in code: a, b' in done.err
    # Student's t of 0.5, 0.6 and 0.4 is 8.66, with n = 2: half of the interval is 4.303 * 0.1 / sqrt(3), and
    # p = 1 - t / sqrt(t^2 + n) = 0.0131, of one test, since the other comparison has one seed.
    # x/original is below 4.5 from steps 10, 10 and 20 on, x/other never, so its steps are 30. The logarithms
    # of 3, 3 and 1.5 are 0.868 (0.400) on average: half of the interval is 4.303 * 0.400 / sqrt(3) = 0.994.
    for line in (
            'y/original, rate 0.001, has no finished run: seed 3',
            'y/other, rate 0.001, has a loss that is not finite: seed 2',
            'y/other is compared only on seed 1',
            'never below 4.5 nats, so that all steps count: x/other',
            '| x/other | 0.001 | 3 | 100 | 1.0 | 4.600 (0.100) | +0.500 (+0.252 to +0.748) | .013 '
            '| 2.38 (0.88 to 6.43) | 30 | 46.0 (1.0) | +5.0 (+2.5 to +7.5) |',
            '| x/original | 0.001 | 3 | 100 | 1.0 | 4.100 (0.100) |  |  |  | 13 | 41.0 (1.0) |  |',
            '| y/other | 0.001 | 2 | 100 | 1.0 | 3.400 (0.283) | +0.200 |  | 1.00 | 10 | 34.0 (2.8) | +2.0 |',
            '| y/other | 3.200 | nan | 3.600 |',
            '| more in y | 1 | -0.300 |'):              # 0.2 - 0.5 of seed 1
        assert line in done.out, line
    assert '4.600 (0.100),+0.500 (+0.252 to +0.748),.013,' in Path('plan.csv').read_text()
    assert all(os.path.getsize(f'plan.{kind}') > 0 for kind in ('png', 'pdf'))
    in_latex = experiment.latex(pd.DataFrame([['more in y', 1, '-0.300']]))
    assert 'more in y & 1 & $-$0.300' in in_latex

    plan, runs = experiment.read_plan(path)
    panel, _ = experiment.draw(plan, experiment.read_rows(path, runs).dropna(subset='loss')).axes
    _, other = panel.lines
    assert other.get_ydata() == pytest.approx([9, 4.9, 4.6, 4.6])
    band = panel.collections[1].get_paths()[0].vertices
    assert {y for x, y in band if x == 20} == {4.5, 4.7}


def test_planned_tests_are_corrected_by_holm_and_have_a_pooled_interval():
    """By hand: Student's t with n = 2 has p = 1 - t / sqrt(t^2 + n) and 95 % of it lie within 4.3027.

    Less `first`, `second` is 0.5, 0.6 and 0.4 (t = 8.66), `third` 0.3, 0.1 and 0.3 (t = 3.5), and they differ
    by 0.2, 0.5 and 0.1 (t = 2.219). The squared deviations are 0.01, 0.01 and 0.0233, so pooled 0.01444 with
    n = 6: half of an interval is 2.4469 sqrt(0.01444 (1/3 + 1/3)) = 0.240.
    """
    losses = {'first': [4, 4.1, 4.2], 'second': [4.5, 4.7, 4.6], 'third': [4.3, 4.2, 4.5]}
    rows = pd.DataFrame([{'cell': cell, 'seed': seed, 'loss': loss}
                         for cell, of_cell in losses.items() for seed, loss in enumerate(of_cell, 1)])
    plan = SimpleNamespace(contrasts={
        'a': {'second': 1, 'third': -1}, 'b': {'second': 1, 'first': -1}, 'c': {'third': 1, 'first': -1}})
    assert experiment.contrast_table(plan, rows).values.tolist() == [
        ['a', 3, '+0.267 (-0.250 to +0.784)', '+0.267 (+0.027 to +0.507)', '.157', '.157'],
        ['b', 3, '+0.500 (+0.252 to +0.748)', '+0.500 (+0.260 to +0.740)', '.013', '.039'],     # 3 x .0131
        ['c', 3, '+0.233 (-0.054 to +0.520)', '+0.233 (-0.007 to +0.473)', '.073', '.146']]     # 2 x .0728


def test_a_pooled_interval_takes_one_deviation_for_each_group():
    """By hand, with cells of unequal numbers of seeds.

    x: (2 * 1 + 1 * 2 + 2 * 3) / 5 = 2 is the squared deviation, so the sum's is 2 (1/3 + 1/2) = 5/3, with 5
    degrees of freedom. y: (2 * 4 + 2 * 16) / 4 = 10, so 10 (1/3 + 1/3) = 20/3, with 4. Of both these are 25/3
    and (25/3)^2 / ((5/3)^2 / 5 + (20/3)^2 / 4) = 5.952 (Satterthwaite).
    """
    losses = {'x/a': [1, 2, 3], 'x/b': [2, 4], 'x/c': [4, 7, 7], 'y/a': [0, 2, 4], 'y/b': [1, 5, 9]}
    rows = pd.DataFrame([(cell, loss) for cell, of_cell in losses.items() for loss in of_cell],
                        columns=['cell', 'loss'])
    in_x = {'x/a': 1, 'x/b': -1}
    half = 2.5706 * (5 / 3) ** 0.5                      # 97.5 % of Student's t with 5 degrees of freedom
    assert experiment.pooled(rows, in_x) == pytest.approx((-1, -1 - half, -1 + half), abs=1e-3)
    half = 2.4519 * (25 / 3) ** 0.5                     # with 5.952
    both = experiment.pooled(rows, {**in_x, 'y/a': -1, 'y/b': 1})
    assert both == pytest.approx((2, 2 - half, 2 + half), abs=1e-3)
    number, low, high = experiment.pooled(rows[:1], {'x/a': 1})         # one seed has no deviation
    assert (number, math.isnan(low), math.isnan(high)) == (1, True, True)


def test_a_plan_takes_the_best_rates_of_searches(write_plan, stage):
    """A later search replaces an earlier one. A rate at which a seed diverged is not the best one."""
    first, second = (write_plan('rates = 1e-3, 2e-3, 4e-3\n', name) for name in ('first', 'second'))
    plan = write_plan(f"rates_from = '{first},{second}'\ncells['third'] = '--learning_rate=7e-3'\n")
    for rate in 1e-3, 2e-3, 4e-3:                       # the last one would be the best for both
        make_rows({'original': [4 - rate] * 2, 'symmetric': [4 - rate] * 2}, 'first', rate)
    make_rows({'original': [4, 4], 'symmetric': [5, 5]}, 'second', 1e-3)
    make_rows({'original': [5, 5], 'symmetric': [4, 4]}, 'second', 2e-3)
    make_rows({'original': [5, 5], 'symmetric': [3]}, 'second', 4e-3)
    with pytest.raises(UserError, match='1 runs of the search are missing'):
        experiment.read_plan(plan)
    make_rows({'symmetric': [None]}, 'second', 4e-3, seed=2)
    _, runs = experiment.read_plan(plan)
    assert {one.cell: one.knobs['learning_rate'] for one in runs} == {
        'original': 1e-3, 'symmetric': 2e-3, 'third': 7e-3}
    done = stage('experiment', second, pictures=True)
    assert '| symmetric | 5.000 (0.000) | 4.000 (0.000) | diverged | 0.002 |' in done.out


@pytest.mark.parametrize('more, parts', [
    ("seed = 1\n", ['seed']), ("seeds = 3\n", ['seeds=3', 'tuple']),
    ("contrasts = {'a': {'thin': 1}}\n", ['thin', 'symmetric'])])
def test_a_wrong_plan_is_refused(more, parts, write_plan, stage):
    message = refused(stage('experiment', write_plan(more)))
    assert all(part in message for part in parts), message


def test_rows_of_another_plan_are_refused(write_plan, stage):
    """Except for knobs that change no loss, and for those that the plan's revision does not have."""
    path = write_plan()
    _, (one, *_) = experiment.read_plan(path)
    may_differ = set()
    for knob in ['a_newer_knob', *one.knobs]:
        make_rows({'original': [4.0]}, knobs={knob: 9})
        with contextlib.suppress(UserError):
            experiment.read_rows(path, [one])
            may_differ.add(knob)
        os.remove('plan.jsonl')
    assert may_differ == {
        'a_newer_knob', 'out_dir', 'data_dir', 'device', 'compile', 'timeout', 'wandb_project', 'milestones',
        'checkpoint_interval', 'log_interval', 'validation'}
    make_rows({'original': [4.0]}, knobs={'max_iters': 9})
    assert 'original, seed 1 has max_iters=9, this run has max_iters=8' in refused(stage('experiment', path))
    make_rows({'original': [4.0]})
    assert 'two rows of original, seed 1' in refused(stage('experiment', path))


@pytest.mark.slow
def test_the_grids_report_shares_pooled_intervals_and_sizes(monkeypatch, capsys):
    """As results/findings.md has them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Figure, 'savefig', lambda *arguments, **keywords: None)
    runpy.run_path('results/grid_figures.py', run_name='__main__')
    found = capsys.readouterr().out
    assert 'post-LN, last step, all rows: 0.34 (-0.15 to 0.83)' in found
    assert 'symmetric less thin, larger: +0.201 (+0.139 to +0.262); pooled +0.201 (+0.179 to +0.223)' in found
    assert 'larger is 9.4 times modern, 17.9 times in the blocks' in found
    assert 'phase_no_self less original, 90 %: -0.006 (-0.023 to +0.012); pooled -0.006 (-0.016 to' in found
    assert 'share of the cost of q = k that the mask takes away: 0.46 (0.31 to 0.59)' in found
