"""results/forest.py: its numbers are those of the pages, of the rows and of the papers."""
import json
import math
from pathlib import Path

import pytest
from conftest import ROOT


def page(name):
    return Path(ROOT, 'results', name).read_text()


@pytest.fixture
def forest(script):
    return script('forest')


@pytest.mark.slow
def test_its_lines_are_on_the_page(forest, table_lines):
    """Other analyses of plateau.md: every line is there."""
    lines = page('plateau.md').splitlines()
    printed = table_lines(forest)
    assert len(printed) > 8
    assert [line for line in printed if line not in lines] == []


def test_ratios_and_differences_are_those_of_the_pages(forest):
    """Of the tables that plateau.py and study.py print: theirs are held to the rows."""
    counted, _ = forest.plateau.balanced(forest.plateau.read_rows())
    rows = {row.label: row for row in forest.ratio_rows(counted)}
    lines = page('plateau.md').splitlines()
    for system in ('symmetric', 'pairwise_unit'):
        cells = [forest.shown(rows[f'{system} / original, tokens to the gap, {size}'], 2)
                 for size in forest.plateau.SIZES]
        assert f"| `{system}` | {' | '.join(cells)} |" in lines
        [(slope, low, high)] = rows[f'{system}: the same, change with each doubling of the size'].ours
        slope, low, high = map(math.log2, (slope, low, high))
        contrast = f'| {slope:+.2f} ({low:+.2f} to {high:+.2f}) |'
        assert any(contrast in line for line in lines), system

    scores = forest.study.scores_of(forest.study.read_rows())
    tables = [forest.study.compare_all(scores, reference) for reference in ('original_rope', 'original')]
    text = page('study.md').replace('−', '-')
    for places, rows in (3, forest.loss_rows(tables[0])), (1, forest.score_rows(*tables)):
        for value, low, high in (ours for row in rows for ours in row.ours):
            assert f'{value:+.{places}f} ± {(high - low) / 2:.{places}f} (' in text


def test_printed_numbers_are_the_papers(forest):
    papers = json.loads(page('papers.json'))
    convergence = ' '.join(papers['courtois']['bench']['convergence'])
    for steps in (forest.PLATEAUS, forest.PLATEAUS_OF_CODE):
        for step in filter(None, sum(steps.values(), ())):
            assert f'{step:,}' in convergence
    assert forest.printed_slopes('symmetric') == pytest.approx([-0.384, -0.285], abs=1e-3)
    assert forest.printed_slopes('pairwise') == pytest.approx([-0.384, -0.231], abs=1e-3)
    scores = forest.printed_scores('kowsher', 'shared')
    assert (scores['cola'], scores['mnli'], scores['sst2']) == (53.91, 80.94, 91.14)


def test_costs_are_those_of_the_pages(forest):
    for label, _, ours, name, start in forest.COSTS:
        [line] = [line for line in page(name).splitlines() if line.startswith(start)]
        for number in ours:
            texts = f' {number:.2f} ', f' {100 * number:.0f} % ', ' 1,298 | 2,241 '
            assert any(text in line for text in texts), label
