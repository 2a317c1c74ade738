"""results/plateau.py: its plan is that of results/plateau.md, its model finds what was put in."""
import itertools
import os

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import knobs_of, without_storage
from filelock import FileLock
from test_configs import read, resolved
from test_train import CPU

from model import EncoderConfig, MaskedLM, model_config


@pytest.fixture
def plateau(script):
    return script('plateau')


def search_row(plateau, size, system, rate, seed, tokens, loss=5.0):
    row = plateau.Plan('search', size, system, seed, rate)._asdict()
    return {**row, 'tokens': tokens, 'validations': [[50, loss, 0.0]]}


def searched_everywhere(plateau):
    """Rows of a search whose best rate is the middle one."""
    tokens = dict(zip(plateau.runs.FIRST_RATES, (3e6, 1e6, 2e6), strict=True))
    cells = itertools.product(plateau.SIZES, plateau.SEARCHED, tokens, plateau.SEARCH_SEEDS)
    return [search_row(plateau, size, system, rate, seed, tokens[rate]) for size, system, rate, seed in cells]


def test_the_plan_is_that_of_the_page(plateau):
    page = read('results', 'plateau.md')
    for size, (_, parameters) in plateau.SIZES.items():
        assert size in page
        assert f'{parameters:,}' in page
        plan = plateau.Plan('count', size, 'original', 1, 2e-3)
        _, knobs = resolved(f"python {' '.join(plan.command)}")
        with without_storage():
            model = MaskedLM(model_config(knobs, 4096))
        assert sum(p.numel() for p in model.encoder.blocks.parameters()) == parameters
        assert knobs['block_size'] * knobs['total_batch'] == plateau.TOKENS
        assert knobs['max_iters'] * plateau.TOKENS == plateau.CAP
    assert f'{plateau.CAP:,}' in page


def test_the_page_has_the_knobs_of_every_run(plateau):
    page = read('results', 'plateau.md')
    by_name = [[], *([f'--attention={system}'] for system in plateau.SYSTEMS)]
    sizes = [knobs for knobs, _ in plateau.SIZES.values()]
    for knobs in [*sizes, *plateau.SYSTEMS.values(), plateau.FULL]:
        assert knobs in by_name or f"`{' '.join(knobs)}`" in page


def test_the_tables_of_the_page_are_those_of_its_rows(plateau, table_lines):
    """Every line of every table that results/plateau.py prints is on the page."""
    printed = table_lines(plateau)
    page = read('results', 'plateau.md').splitlines()
    assert len(printed) > 40
    assert [line for line in printed if line not in page] == []


def test_numbers_in_the_sentences_of_the_page_are_those_of_its_rows(plateau, capsys):
    page = read('results', 'plateau.md')
    counted, _ = plateau.balanced(plateau.read_rows())
    plateau.print_cell_model(counted)
    plateau.print_losses(counted)
    printed = capsys.readouterr().out
    assert 'lines: p 0.00087\n' in printed
    assert 'lines (p .0009)' in page
    for numbers in ('0.21', '0.03 to 0.40', '0.67 to 1.49', '5.53 to 5.72'):
        assert f': {numbers}' in printed
        assert numbers in page


def test_tokens_of_every_row_are_those_of_its_validations(plateau):
    rows = plateau.read_rows()
    assert len(rows) > 100
    for row in rows.to_dict('records'):
        if plateau.GAP in [gap for _, _, gap in row['validations']]:
            continue                                    # four digits do not say whether it was below
        tokens = plateau.tokens_to_gap(row['validations'])
        assert row['tokens'] == tokens, row


def test_counted_runs_are_balanced_and_in_the_same_order_again(plateau):
    rows = pd.DataFrame(searched_everywhere(plateau))
    plans = plateau.count_plans(rows)
    assert plans == plateau.count_plans(rows)
    assert len({plan.name for plan in plans}) == len(plans) == 8 * (15 + 5) + 2 * 3
    assert [plan.seed for plan in plans] == sorted(plan.seed for plan in plans)
    assert {plan.rate for plan in plans} == {2e-3}
    for plan in plans[:20]:
        resolved(f"python {' '.join(plan.command)}")
    assert {plan.seed for plan in plateau.search_plans(rows)}.isdisjoint(plateau.SEEDS)


def test_the_search_goes_on_while_the_best_rate_is_the_outermost(plateau):
    def after(tokens_by_rate):
        rows = [search_row(plateau, '2 x 64', 'shared', rate, seed, tokens, loss)
                for rate, (tokens, loss) in tokens_by_rate.items() for seed in plateau.SEARCH_SEEDS]
        rates = [plan.rate for plan in plateau.search_plans(pd.DataFrame(rows))
                 if (plan.size, plan.system) == ('2 x 64', 'shared')]
        return sorted({*rates})

    assert after({1e-3: (2e6, 5)}) == [1e-3, 2e-3, 4e-3]
    assert after({1e-3: (2e6, 5), 2e-3: (1e6, 5), 4e-3: (3e6, 5)}) == [1e-3, 2e-3, 4e-3]
    assert after({1e-3: (2e6, 5), 2e-3: (1e6, 5), 4e-3: (5e5, 5)}) == [1e-3, 2e-3, 4e-3, 8e-3]
    assert after({1e-3: (np.inf, 4.9), 2e-3: (np.inf, 5), 4e-3: (np.inf, 6)}) == [5e-4, 1e-3, 2e-3, 4e-3]


def test_tokens_until_the_gap_stays(plateau):
    validations = [(0, 8, 0.3), (50, 7, 0.1), (100, 6, 0.2), (150, 6, 0.3)]
    assert plateau.tokens_to_gap(validations) == 100 * 1024
    assert plateau.tokens_to_gap(validations, 0.3) == np.inf
    assert plateau.tokens_to_gap(validations[:3]) == np.inf


STUB = """                           # of train.py: its files, then a run that does not end by itself
import json, os, sys, time
[folder] = [word.partition('=')[2] for word in sys.argv if word.startswith('--out_dir=')]
os.makedirs(folder)
with open(f'{folder}/launches.jsonl', 'w') as file:
    json.dump({'revision': 'abc'}, file)
with open(f'{folder}/metrics.jsonl', 'w') as file:
    for step, gap in (0, 0.0), (50, 0.2), (100, 0.3):
        line = {'kind': 'val', 'step': step, 'loss': 6.0, 'permuted_loss': 6.0 + gap}
        file.write(json.dumps(line) + chr(10))
time.sleep(100)
"""


def test_a_run_ends_when_its_gap_stays_and_has_a_row(plateau, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plateau, 'ROWS', str(tmp_path / 'rows.jsonl'))
    (tmp_path / 'stub.py').write_text(STUB)
    monkeypatch.setattr(plateau, '__file__', str(tmp_path / 'stub.py'))
    plan = plateau.Plan('count', '2 x 64', 'shared', 3, 2e-3)
    plateau.make(plan)
    [row] = plateau.read_rows().to_dict('records')
    assert {key: row[key] for key in plan._fields} == plan._asdict()
    assert row['tokens'] == 50 * 1024
    assert row['revision'] == 'abc'
    assert row['machine']
    assert row['validations'] == [[0, 6.0, 0.0], [50, 6.0, 0.2], [100, 6.0, 0.3]]
    # a repeated command makes no run twice
    plateau.runs.make_all(lambda rows: [plan], plateau.read_rows, plateau.make, plateau.OUT)
    assert len(plateau.read_rows()) == 1


def test_processes_share_the_runs(plateau, monkeypatch, tmp_path):
    """A run that another process makes is left to it; the next ones are made in their order."""
    monkeypatch.setattr(plateau, 'ROWS', str(tmp_path / 'rows.jsonl'))
    plans = [plateau.Plan('count', '2 x 64', 'shared', seed, 2e-3) for seed in (1, 2, 3)]
    made = []

    def make(plan):
        made.append(plan)
        plateau.runs.append_row(plateau.ROWS, {**plan._asdict(), 'tokens': None})

    (tmp_path / plans[0].name).parent.mkdir()
    with FileLock(tmp_path / f'{plans[0].name}.lock'):
        # all that is left is made by another process: this one waits, until that has ended
        monkeypatch.setattr(plateau.time, 'sleep', lambda seconds: make(plans[0]))
        plateau.runs.make_all(lambda rows: plans, plateau.read_rows, make, str(tmp_path))
    assert made == [plans[1], plans[2], plans[0]]
    assert plateau.runs.without_row(plans, plateau.read_rows()) == []


def test_the_model_finds_slopes_also_with_censored_runs(plateau):
    """Two systems, drawn with slopes 0.8 and 0.2 of log2 T; a third of the runs is beyond the cap."""
    rng = np.random.default_rng(0)
    rows = []
    for system, slope in (('original', 0.8), ('symmetric', 0.2)):
        for size, _ in itertools.product(plateau.SIZES, range(40)):
            log_tokens = 22 + slope * plateau.size_axis([size])[0] + 0.3 * rng.normal()
            tokens = 2 ** log_tokens if 2 ** log_tokens < plateau.CAP else np.inf
            rows.append({'size': size, 'system': system, 'tokens': tokens})
    table = pd.DataFrame(rows)
    assert 0.1 < np.isinf(table['tokens']).mean() < 0.5
    columns = plateau.line_columns(table)
    difference, low, high, p = plateau.profile(table, columns, 'b symmetric', 'b original')
    assert low < -0.6 < high
    assert abs(difference + 0.6) < 0.12
    assert p < 1e-6
    assert 0.15 < high - low < 0.4


def test_without_censored_runs_the_model_is_least_squares(plateau):
    rng = np.random.default_rng(1)
    rows = [{'size': size, 'system': system, 'tokens': 2 ** (20 + rng.normal())}
            for size, system, _ in itertools.product(plateau.SIZES, ('original', 'shared'), range(4))]
    table = pd.DataFrame(rows)
    columns = plateau.line_columns(table)
    coefficients, deviation, _ = plateau.fit(table, columns)
    y = np.log2(table['tokens'])
    expected, squares, *_ = np.linalg.lstsq(columns.to_numpy(), y, rcond=None)
    assert coefficients.to_numpy() == pytest.approx(expected, abs=1e-3)
    assert deviation == pytest.approx(np.sqrt(squares[0] / len(y)), abs=1e-3)


def test_the_order_gap(plateau, corpus):
    """Visible tokens change places within their row, the same for any batch; 0 for a bag of words."""
    data_dir, dataset = os.path.split(corpus)
    config = {**knobs_of(plateau.train), 'data_dir': data_dir, 'dataset': dataset, 'block_size': 32,
              'packing': 'documents'}
    meta, _, loaders = plateau.make_loaders(config)
    loader, permuted = loaders[''], loaders['permuted']
    batch, without = loader.batch(range(20)), permuted.batch(range(20))
    assert torch.equal(permuted.batch([7, 8])['ids'], without['ids'][7:9])
    n_moved = 0
    for row in range(20):
        ids, others = batch['ids'][row], without['ids'][row]
        stays = torch.isin(ids, torch.tensor([*meta['special'].values()]))
        stays[batch['positions'][row][batch['weights'][row] > 0]] = True
        assert torch.equal(ids[stays], others[stays])
        assert torch.equal(ids.sort()[0], others.sort()[0])
        n_moved += (ids != others).sum().item()
    assert n_moved > 300                                # of 640

    gaps = {}
    for position in ('absolute', 'none'):
        torch.manual_seed(0)
        config = EncoderConfig(meta['vocab_size'], 32, 2, 2, 16, 32, position=position)
        model = MaskedLM(config)
        for matrix in filter(lambda parameter: parameter.dim() == 2, model.parameters()):
            torch.nn.init.normal_(matrix, std=0.5)      # else order hardly matters
        scores = plateau.train.validate(model, loaders, 20, 3, CPU)
        gaps[position] = scores['permuted_loss'] - scores['loss']
    assert gaps['none'] == pytest.approx(0, abs=1e-5)
    assert abs(gaps['absolute']) > 1e-2
