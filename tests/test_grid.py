"""results/grid.py: its plan is that of results/grid.md, its tests find what was put in."""
import itertools
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel
from test_configs import read, resolved


@pytest.fixture
def grid(script):
    return script('grid')


def row(grid, arm, recipe, system, seed, rate, loss, curve=()):
    plan = grid.Plan(arm, recipe, system, seed, rate)
    return {**plan._asdict(), 'loss': loss, 'curve': [*curve]}


def searched_everywhere(grid):
    """Rows of a search whose best rate is the middle one."""
    losses = dict(zip(grid.runs.FIRST_RATES, (4.1, 4.0, 4.2), strict=True))
    curve = [[250, 6.0], [2500, 4.0]]
    return [row(grid, 'search', recipe, system, 101, rate, losses[rate], curve)
            for recipe, system, rate in itertools.product(grid.RECIPES, grid.SEARCHED, losses)]


def test_the_plan_is_that_of_the_page(grid):
    page = read('results', 'grid.md')
    for rate in grid.runs.FIRST_RATES:
        assert f'{rate:g}' in page
    for recipe, system in itertools.product(grid.RECIPES, grid.SYSTEMS):
        plan = grid.Plan('count', recipe, system, 1, 2e-3)
        _, knobs = resolved(f"python {' '.join(plan.command)}")
        assert knobs['max_iters'] == grid.STEPS
        assert knobs['position'] == 'rope'
        assert (knobs['norm_place'] == 'pre') == (recipe == 'modern')
        assert knobs['mask_fraction'] == (0.3 if recipe == 'modern' else 0.15)
        assert f'`{system}`' in page
        for knob in grid.SYSTEMS[system]:
            assert knob == f'--attention={system}' or knob in page


def test_the_page_has_every_knob_of_both_recipes(grid):
    """Those of both in a sentence, then a table of knob, post-LN, modern: as the commands resolve them."""
    _, _, section = read('results', 'grid.md').partition('## The knobs')
    both, _, differing = section.partition('| knob |')
    table = {knob: [value, value] for knob, value in re.findall(r'`(\w+)`\s(\S+)[,.]\s', both)}
    table |= {knob: [post, modern]
              for knob, post, modern in re.findall(r'\| `(\w+)` \| (\S+).*? \| (\S+) \|', differing)}
    of_recipes = [resolved(f"python {' '.join(grid.Plan('count', recipe, 'original', 1, 2e-3).command)}")[1]
                  for recipe in grid.RECIPES]
    post, modern = of_recipes
    for knob, cells in table.items():
        assert cells == [str(post[knob]), str(modern[knob])], knob
    differ = {knob for knob in post if post[knob] != modern[knob]} - {'out_dir'}
    assert differ <= table.keys()
    of_the_run = {'out_dir', 'seed', 'learning_rate', 'attention', 'tied_start'}
    without_effect = {'init_from', 'fill', 'export', 'show', 'validation', 'milestones', 'wandb_project',
                      'compile', 'timeout', 'device', 'data_dir'}
    options_of_others = {'pair_rank', 'normaliser', 'relu_scale', 'key_size', 'clip_distance',
                         'same_partition', 'one_value_matrix'}
    assert post.keys() - table.keys() == of_the_run | without_effect | options_of_others


def test_the_tables_of_the_page_are_those_of_its_rows(grid, table_lines):
    """The primary tests and the cells; the other tables that results/grid.py prints are not on the page."""
    starts = 'a: ', 'b: ', 'c: ', *(f'{recipe} |' for recipe in grid.RECIPES)
    on_page = [line for line in read('results', 'grid.md').splitlines()
               if line.removeprefix('| ').startswith(starts)]
    assert len(on_page) == 3 + len(grid.RECIPES) * len(grid.SYSTEMS)
    assert {*on_page} <= {*table_lines(grid)}


def test_the_search_goes_on_beyond_its_outermost_rate(grid):
    found = {1e-3: 4.3, 2e-3: 4.2, 4e-3: 4.1}
    assert grid.runs.rates_to_try({1e-3: 4.3}) == [1e-3, 2e-3, 4e-3]
    assert grid.runs.rates_to_try(found) == [1e-3, 2e-3, 4e-3, 8e-3]
    assert grid.runs.rates_to_try({**found, 8e-3: 5.0}) == [1e-3, 2e-3, 4e-3, 8e-3]
    assert grid.runs.rates_to_try({1e-3: 4.1, 2e-3: 4.2, 4e-3: 4.3}) == [5e-4, 1e-3, 2e-3, 4e-3]
    rows = [row(grid, 'search', 'modern', 'shared', 101, rate, loss) for rate, loss in found.items()]
    assert grid.best_rate(pd.DataFrame(rows), 'modern', 'shared') == 4e-3
    rates = [plan.rate for plan in grid.search_plans(pd.DataFrame(rows))
             if (plan.recipe, plan.system) == ('modern', 'shared')]
    assert rates == [1e-3, 2e-3, 4e-3, 8e-3]


def test_counted_runs_are_balanced_and_tied_start_takes_the_rate_of_original(grid):
    rows = searched_everywhere(grid)
    for line in rows:
        if (line['recipe'], line['system'], line['rate']) == ('modern', 'original', 4e-3):
            line['loss'] = 3.0
    rows.append(row(grid, 'search', 'modern', 'original', 101, 8e-3, 5.0))
    table = pd.DataFrame(rows)
    plans = grid.count_plans(table)
    assert len(plans) == len(grid.RECIPES) * len(grid.SYSTEMS) * len(grid.SEEDS)
    rates = {(plan.recipe, plan.system): plan.rate for plan in plans}
    assert rates['modern', 'tied_start'] == rates['modern', 'original'] == 4e-3
    assert rates['post-LN', 'tied_start'] == 2e-3

    made = plans[:2 * len(rates) - 1]                   # one run of seed 2 is left
    rows += [row(grid, *plan, loss=4.0) for plan in made]
    counted = grid.balanced(pd.DataFrame(rows))
    assert {*counted['seed']} == {1}
    assert len(counted) == len(rates)


def test_steps_below_a_threshold_for_two_validations(grid):
    curve = [[25, 6.0], [50, 4.9], [75, 5.1], [100, 4.9], [125, 4.8], [150, 5.2]]
    assert grid.steps_below(curve, 5.0) == 100
    assert grid.steps_below(curve, 4.0) == grid.STEPS
    assert grid.threshold(pd.DataFrame(searched_everywhere(grid))) == 5.0


def test_the_three_tests_are_those_of_the_plan(grid):
    """Against scipy's paired t-test, on losses and curves that are made up here."""
    rng = np.random.default_rng(1)
    rows = []
    losses, steps = {}, {}
    for seed, recipe, system in itertools.product(range(1, 7), grid.RECIPES, grid.SYSTEMS):
        loss = losses[seed, recipe, system] = 4 + rng.random()
        below = steps[seed, recipe, system] = 25 * int(rng.integers(2, 80))
        curve = [[step, 6.0 if step < below else 4.0] for step in range(25, 2525, 25)]
        rows.append(row(grid, 'count', recipe, system, seed, 2e-3, loss, curve))
    found = grid.primary_differences(pd.DataFrame(rows), 5.0)

    def of(values, recipe, system):
        return np.array([values[seed, recipe, system] for seed in range(1, 7)])
    kv = (of(losses, 'post-LN', 'shared_kv') + of(losses, 'modern', 'shared_kv')) / 2
    symmetric = (of(losses, 'post-LN', 'symmetric') + of(losses, 'modern', 'symmetric')) / 2
    effect = {recipe: of(losses, recipe, 'symmetric') - of(losses, recipe, 'original')
              for recipe in grid.RECIPES}
    expected = [(kv, symmetric),
                (np.log(of(steps, 'post-LN', 'tied_start')), np.log(of(steps, 'post-LN', 'original'))),
                (effect['modern'], effect['post-LN'])]
    for differences, (x, y) in zip(found.values(), expected, strict=True):
        test = ttest_rel(x, y)
        low, high = test.confidence_interval(0.95)
        assert grid.paired(differences) == pytest.approx((np.mean(x - y), low, high, test.pvalue))


def test_texts_keep_prose_and_every_line_of_a_novel(grid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a').mkdir()
    (tmp_path / 'n').mkdir()
    prose = 'A line of prose that is long enough to be one, and that ends as a sentence does.'
    (tmp_path / 'a' / 'x.txt').write_text(f'TITLE\n{prose}\n* {prose}\n')
    (tmp_path / 'n' / 'y.txt').write_text('\ufeffline\n' * 101)
    grid.write_texts('a', 'n')
    articles = pd.read_json(tmp_path / 'data/texts_grid/articles.jsonl', lines=True)
    novels = pd.read_json(tmp_path / 'data/texts_grid/novels.jsonl', lines=True)
    assert [*articles['text']] == [prose]
    assert [text.count('line') for text in novels['text']] == [100, 1]


def test_the_report_has_every_cell(grid, tmp_path, monkeypatch, capsys):
    """Rows that are made up: what the tables say of `symmetric` is recomputed here."""
    rng = np.random.default_rng(2)
    rows = searched_everywhere(grid)
    scored, made = [], {}
    for plan in grid.count_plans(pd.DataFrame(rows))[:2 * len(grid.RECIPES) * len(grid.SYSTEMS)]:
        start, accuracy, other = rng.uniform((6, 0.5, 0.5), (7, 0.6, 0.9))
        curve = [[step, start - step / 500] for step in range(0, 2525, 25)]
        below = 25 * int((start - 5.0) * 500 // 25 + 1)         # the threshold is 5.0
        made[plan.recipe, plan.system, plan.seed] = curve[-1][1], 100 * accuracy, np.log(below)
        rows.append({**row(grid, *plan, loss=curve[-1][1], curve=curve), 'parameters': 1_867_136})
        scored.append({'checkpoint': f'{plan.folder}/ckpt.pt', 'accuracy': accuracy,
                       'phenomena': {'binding': accuracy, 'ellipsis': other}})
    monkeypatch.setattr(grid, 'BLIMP_ROWS', str(tmp_path / 'blimp.jsonl'))
    monkeypatch.setattr(grid, 'FIGURE', str(tmp_path / 'grid.png'))
    pd.DataFrame(scored).to_json(grid.BLIMP_ROWS, orient='records', lines=True)

    grid.report(pd.DataFrame(rows))
    lines = capsys.readouterr().out.splitlines()
    differences = [np.subtract(made['modern', 'symmetric', seed], made['modern', 'original', seed])
                   for seed in (1, 2)]
    loss, accuracy, log_steps = np.mean(differences, axis=0)
    _, cell, _ = [line for line in lines if line.startswith('| modern | `symmetric` |')]
    assert f'| {loss:+.3f} (' in cell
    assert f'| {accuracy:+.1f} (' in cell
    assert f'| {np.exp(log_steps):.2f} (' in cell
    of_binding = [line for line in lines if line.startswith('| binding |')]
    assert f'| {accuracy:+.1f} (' in of_binding[1]
    assert (tmp_path / 'grid.png').exists()
