"""results/experiment.py: runs that processes share, rows, statistics of scipy and R, what is said of gaps."""
import json
import time

import experiment
import numpy as np
import pandas as pd
import pytest
from conftest import kill, launch, process, refused, tiny
from scipy.stats import ttest_rel
from test_train import CPU

import train

PLAN = """
base = '{base}'
cells = {{'original': '', 'symmetric': '--attention=symmetric'}}
reference = 'original'
seeds = 1, 2
"""


def write_plan(folder, corpus, more='', **knobs):
    """folder/plan.py: two cells and two seeds on the `corpus` fixture."""
    base = tiny(corpus, 'replaced', **{'eval_interval': 4, 'checkpoint_interval': 1, **knobs})
    path = folder / 'plan.py'
    path.write_text(PLAN.format(base=' '.join(base)) + more)
    return path


def read_rows(folder):
    return [json.loads(line) for line in (folder / 'plan.jsonl').read_text().splitlines()]


def make_rows(folder, losses, name='plan', rate=1e-3, **values):
    """Add rows to folder/plan.jsonl from {cell: the losses of seeds 1, 2 ...}; None: not finite."""
    with open(folder / f'{name}.jsonl', 'a') as file:
        for cell, of_cell in losses.items():
            for seed, loss in enumerate(of_cell, 1):
                row = {
                    'cell': cell, 'rate': rate, 'seed': seed, 'loss': loss,
                    'parameters': 100, 'seconds': 60, 'knobs': {},
                    'curve': [[0, 9.0], [10, 5.0], [20, 4.0]],
                }
                file.write(json.dumps({**row, **values}) + '\n')


def script(folder, *words, start=process):
    return start(experiment.__file__, 'plan.py', *words, cwd=folder)


def test_two_processes_share_the_runs_and_a_killed_one_goes_on(corpus, tmp_path, stage):
    write_plan(tmp_path, corpus, max_iters=60)
    first = script(tmp_path, 'run', start=launch)
    second = script(tmp_path, 'run', start=launch)
    deadline = time.time() + 120
    while not [*tmp_path.glob('out/plan/*/ckpt_0000010.pt')] and time.time() < deadline:
        time.sleep(0.01)
    kill(first)                                         # with SIGKILL, in the middle of a run
    second.communicate(timeout=120)
    assert second.returncode == 0
    assert script(tmp_path, 'run').code == 0
    rows = {(row['cell'], row['seed']): row for row in read_rows(tmp_path)}
    assert sorted(rows) == [('original', 1), ('original', 2), ('symmetric', 1), ('symmetric', 2)]
    launches = [path.read_text().count('"argv"') for path in tmp_path.glob('out/plan/*/launches.jsonl')]
    assert sorted(launches) in ([1, 1, 1, 1], [1, 1, 1, 2])     # a killed run goes on, no run is made twice

    alone = tmp_path / 'alone'
    knobs = {'attention': 'symmetric', 'seed': 2, 'eval_interval': 4, 'max_iters': 60}
    assert stage('train', *tiny(corpus, alone, **knobs)).code == 0
    curve = [[line['step'], round(line['loss'], 4)] for line in train.read_metrics(alone)
             if line['kind'] == 'val']
    row = rows['symmetric', 2]
    assert row['curve'] == curve
    assert (row['loss'], row['knobs']['attention']) == (curve[-1][1], 'symmetric')


def test_a_run_that_diverges_is_a_row_and_the_last_loss_can_be_of_all_rows(corpus, tmp_path):
    write_plan(tmp_path, corpus, "cells['bad'] = '--learning_rate=1e30'\nseeds = 1,\nall_rows = True\n")
    assert script(tmp_path, 'run').code == 0
    losses = {row['cell']: row['loss'] for row in read_rows(tmp_path)}
    assert losses['bad'] is None
    folder, = tmp_path.glob('out/plan/symmetric_*-1')
    model, _, content = train.load(str(folder))
    _, _, loaders = train.make_loaders(content['config'])
    every_row = train.evaluate(model, loaders[''], 10 ** 6, 8, CPU)['loss']
    assert losses['symmetric'] == pytest.approx(every_row, abs=1e-5)


def test_runs_of_another_plan_or_corpus_do_not_share_a_table(corpus, tmp_path):
    """Otherwise a row would have the knobs of the new plan and the losses of the old one."""
    write_plan(tmp_path, corpus, 'seeds = 1,\n')
    assert script(tmp_path, 'run').code == 0
    row, _ = read_rows(tmp_path)
    row['corpus']['val'] = 'another'                    # as if the corpus had been prepared again since
    (tmp_path / 'plan.jsonl').write_text(json.dumps(row) + '\n')
    assert 'plan.jsonl has val=another, this run has ' in refused(script(tmp_path, 'run'))
    (tmp_path / 'plan.jsonl').unlink()
    write_plan(tmp_path, corpus, 'seeds = 1,\n', mask_fraction=0.4)
    assert 'has mask_fraction=0.15, this run has 0.4' in refused(script(tmp_path, 'run'))


def test_differences_are_paired_tests_of_scipy():
    generator = np.random.default_rng(1)
    a, b = generator.normal(size=(2, 5))
    rows = pd.DataFrame({'cell': [*'aaaaabbbbb'], 'seed': [*range(5)] * 2, 'loss': [*a, *b]})
    found = experiment.paired(experiment.differences(rows, {'a': 1, 'b': -1}))
    expected = ttest_rel(a, b)
    low, high = expected.confidence_interval()
    assert found == pytest.approx((a.mean() - b.mean(), low, high, expected.pvalue))


def test_holm_gives_the_values_of_r():
    """p.adjust(c(0.03, 0.01, 0.05, 0.02, 0.04), 'holm') of R."""
    found = experiment.holm(pd.Series([0.03, 0.01, 0.05, 0.02, 0.04]))
    assert found.tolist() == pytest.approx([0.09, 0.05, 0.09, 0.08, 0.09])
    assert experiment.holm(pd.Series([0.6, 0.7])).tolist() == [1, 1]


def test_steps_are_those_of_two_validations_in_a_row():
    curve = [[0, 9], [10, 4.9], [20, 5.1], [30, 4.8], [40, 4.7]]
    assert experiment.steps_below(curve, 5) == 30
    assert experiment.steps_below(curve, 4.75) == 40    # the last one has none after it: all its steps


def test_the_table_compares_within_a_group_on_the_seeds_that_both_have(corpus, tmp_path, stage):
    more = """
cells = {'x/original': '', 'x/other': '', 'y/original': '', 'y/other': ''}
seeds = 1, 2, 3
contrasts = {'more in y': {'x/other': -1, 'x/original': 1, 'y/other': 1, 'y/original': -1}}
target = 4.5
"""
    path = write_plan(tmp_path, corpus, more)
    make_rows(tmp_path, {'x/original': [4, 4.1, 4.2], 'x/other': [4.5, 4.7, 4.6],
                         'y/original': [3, 3.1], 'y/other': [3.2, None, 3.6]})
    done = stage('experiment', path, pictures=True)
    assert done.code == 0, done.err
    assert 'y/original, rate 0.001, has no finished run: seed 3' in done.out
    assert 'y/other, rate 0.001, has a loss that is not finite: seed 2' in done.out
    assert 'y/other is compared only on seed 1' in done.out
    # Student's t of 0.5, 0.6 and 0.4 is 8.66, with n = 2: half of the interval is 4.303 * 0.1 / sqrt(3), and
    # p = 1 - t / sqrt(t^2 + n) = 0.0131, of one test, since the other comparison has one seed.
    for row in ('| x/other | 0.001 | 3 | 100 | 1.0 | 4.600 (0.100) | +0.500 (+0.252 to +0.748) | .013 |',
                '| y/other | 0.001 | 2 | 100 | 1.0 | 3.400 (0.283) | +0.200 |  |',
                '| more in y | 1 | -0.300 |'):          # 0.2 - 0.5 of seed 1
        assert row in done.out, row
    assert (tmp_path / 'plan.png').stat().st_size > 0


def test_a_plan_takes_the_best_rates_of_a_search(corpus, tmp_path, stage):
    search = write_plan(tmp_path, corpus, 'rates = 1e-3, 2e-3, 4e-3\n').rename(tmp_path / 'search.py')
    plan = write_plan(tmp_path, corpus, f"rates_from = '{search}'\ncells['third'] = '--learning_rate=7e-3'\n")
    make_rows(tmp_path, {'original': [5, 5], 'symmetric': [5, 5]}, 'search', 1e-3)
    make_rows(tmp_path, {'original': [4, 4], 'symmetric': [5, 5]}, 'search', 2e-3)
    make_rows(tmp_path, {'original': [5, 5], 'symmetric': [4]}, 'search', 4e-3)
    with pytest.raises(experiment.UserError, match='1 runs of the search are missing'):
        experiment.read_plan(str(plan))
    make_rows(tmp_path, {'symmetric': [4]}, 'search', 4e-3, seed=2)
    _, runs = experiment.read_plan(str(plan))
    assert {one.cell: one.knobs['learning_rate'] for one in runs} == {
        'original': 2e-3, 'symmetric': 4e-3, 'third': 7e-3}
    done = stage('experiment', search, pictures=True)
    assert 'symmetric: the best rate is the outermost, 0.004' in done.out
    assert 'original: the best' not in done.out


@pytest.mark.parametrize('more, parts', [
    ("seed = 1\n", ['seed']), ("seeds = 3\n", ['seeds=3', 'tuple']),
    ("reference = 'first'\n", ['first', 'original']),
    ("contrasts = {'a': {'thin': 1}}\n", ['thin', 'symmetric']),
    ("cells['x'] = '--atention=shared'\n", ['atention', 'attention'])])
def test_a_wrong_plan_is_refused(more, parts, corpus, tmp_path, stage):
    message = refused(stage('experiment', write_plan(tmp_path, corpus, more)))
    assert all(part in message for part in parts), message


def test_rows_of_another_plan_are_refused(corpus, tmp_path, stage):
    path = write_plan(tmp_path, corpus)
    knobs = {'max_iters': 8, 'out_dir': 'elsewhere', 'a_newer_knob': 1}
    make_rows(tmp_path, {'original': [4.0]}, knobs=knobs)
    make_rows(tmp_path, {'symmetric': [4.0]}, knobs={'max_iters': 9})
    assert 'has max_iters=9, the plan 8' in refused(stage('experiment', path))
    make_rows(tmp_path, {'original': [4.0]})
    assert 'two rows of original, seed 1' in refused(stage('experiment', path))
