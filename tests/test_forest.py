"""results/forest.py and systems.py: their numbers are those of the pages, of the rows and of the papers."""
import json
import math
import re
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
    # without the table for claims.md
    printed = [line for line in table_lines(forest) if not re.search('CoLA|−|---', line)]
    assert len(printed) > 8
    assert [line for line in printed if line not in lines] == []


def test_the_scales_of_gau_are_on_the_page(script, capsys):
    """Every line of both tables of results/systems.py; on the page a column of Liu's follows."""
    script('systems').print_scales()
    text = page('systems.md')
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('| `')]
    assert len(lines) == 16
    assert [line for line in lines if f'\n{line}' not in text] == []


def test_every_p_of_the_claims_is_printed(forest, script, capsys):
    """And every number with ± beside it, to the last digit, by the script that has its rows."""
    scores = forest.study.scores_of(forest.study.read_rows())
    _, second_arm = forest.plateau.balanced(forest.plateau.read_rows())
    forest.study.print_comparisons(scores)
    forest.plateau.print_full(second_arm)
    forest.print_pairs(scores)
    script('systems').main()
    grid = script('grid')
    rows = grid.rows_now()
    counted, level = grid.with_blimp(grid.balanced(rows)), grid.threshold(rows)
    grid.print_tests(counted, level)
    grid.print_cells(counted, level)
    printed = capsys.readouterr().out.replace('-', '−')
    text = page('claims.md')
    with_p = re.findall(r'[+−][\d.]+ ± [\d.]+ \([<.\d]+', text)
    other = re.findall(r'[\d.]+ ± [\d.]+', text) + re.findall(r'(?<![\d.])\.\d{3}', text)
    assert len(with_p) > 25
    assert [words for words in with_p + other if words not in printed] == []


def test_ratios_and_differences_are_those_of_the_pages(forest):
    """Of the tables that plateau.py and study.py print: theirs are held to the rows."""
    counted, _ = forest.plateau.balanced(forest.plateau.read_rows())
    rows = {row.label: row for row in forest.token_rows(counted)}
    lines = page('plateau.md').splitlines()
    for system in ('symmetric', 'pairwise_unit'):
        cells = [forest.shown_ours(rows[f'{system}, {size}'], 2) for size in forest.plateau.SIZES]
        assert f"| `{system}` | {' | '.join(cells)} |" in lines
        row = rows[f'{system}, per doubling of size']
        slope, low, high = map(math.log2, (row.ours, row.low, row.high))
        contrast = f'| {slope:+.2f} ({low:+.2f} to {high:+.2f}) |'
        assert any(contrast in line for line in lines), system

    scores = forest.study.scores_of(forest.study.read_rows())
    tables = forest.study.compare_all(scores, 'original_rope')
    text = page('study.md').replace('−', '-')
    for places, rows in (3, forest.loss_rows(tables)), (1, forest.score_rows(tables)):
        for row in rows:
            assert f'{row.ours:+.{places}f} ± {(row.high - row.low) / 2:.{places}f} (' in text


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
        texts = f' {ours:.2f} ', f' {100 * ours:.0f} % ', ' 1,298 | 2,241 '
        assert any(text in line for text in texts), label
