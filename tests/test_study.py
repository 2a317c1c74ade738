"""results/study.py and results/study.md, and the statistics of results/analysis.py."""
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
from test_configs import build, called, read, runs_of

from model import count_parameters

PAGE = read('results', 'study.md')


@pytest.fixture
def study(script):
    return script('study')


def test_the_numbers_of_the_page_are_those_of_the_rows(study, tmp_path, monkeypatch, capsys):
    """Every table that results/study.py prints is on the page; every loss and p of the page is printed."""
    pytest.importorskip('matplotlib')
    monkeypatch.setattr(study, 'FIGURE', str(tmp_path / 'figure.png'))
    monkeypatch.setattr(sys, 'argv', ['study.py'])
    study.main()
    assert (tmp_path / 'figure.png').exists()

    printed = capsys.readouterr().out
    tables = [line for line in printed.splitlines() if line.startswith('|')]
    assert len(tables) > 50
    assert [line for line in tables if line not in PAGE.splitlines()] == []

    decimals = re.compile(r'\d*\.\d{3}\b')
    pilot = study.rows_of(study.read_rows(), 'study_pilot')
    known = {*decimals.findall(printed), *(f'{loss:.3f}' for row in pilot for _, loss, _ in row['curve'])}
    # the entropy of the corpus, and how near two runs are to the end of the plateau
    known |= {'6.918', '0.002', '0.009'}
    text, _ = PAGE.split('## Commands')
    assert {*decimals.findall(text)} <= known


def test_the_parameters_are_those_of_the_runs(study):
    """The models of the commands of the page, which name every run."""
    [block] = re.findall(r'```sh\n(export .*?)```', PAGE, re.S)
    runs = runs_of(called(block))
    assert {f'{system}-{seed}' for system in study.SYSTEMS for seed in (1, 2, 3)} <= {*runs}
    for system in study.SYSTEMS:
        assert f"{count_parameters(build(runs[f'{system}-1'])):,}" in PAGE, system


def test_the_intervals_of_the_study_are_the_textbooks(script):
    """Dunnett's p is scipy's, Holm's is worked out by hand, the deviation is that of a least-squares fit."""
    stats = pytest.importorskip('scipy.stats')
    analysis = script('analysis')
    draws = np.random.default_rng(0).normal(size=(5, 3)) + np.array([[0], [0.5], [1], [2], [3]])

    theirs = stats.dunnett(*draws[1:], control=draws[0])
    ours = [analysis.dunnett(abs(statistic), 4, 10) for statistic in theirs.statistic]
    assert ours == pytest.approx(theirs.pvalue, abs=1e-3)

    assert [*analysis.holm(pd.Series([0.01, 0.04, 0.03, 0.005]))] == pytest.approx([0.03, 0.06, 0.06, 0.02])

    system, seed = np.divmod(np.arange(15), 3)
    design = np.concatenate([np.eye(5)[system], np.eye(3)[seed]], axis=1)
    fitted = design @ np.linalg.lstsq(design, draws.ravel(), rcond=None)[0]
    squares = ((draws.ravel() - fitted) ** 2).sum()
    freedom = 15 - np.linalg.matrix_rank(design)
    expected = np.sqrt(squares / freedom), freedom
    assert analysis.pooled_deviation(pd.DataFrame(draws)) == pytest.approx(expected)


def test_collected_rows_replace_those_of_the_same_run(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, 'ROWS', str(tmp_path / 'study.jsonl'))
    launch = {'argv': ['train.py', 'config/results/study.py', '--seed=1', '--out_dir=out/study/gau-1'],
              'revision': 'abc', 'date': '2026-11-23T10:00', 'config': {'max_iters': 150}}
    validation = {'kind': 'val', 'step': 150, 'loss': 4.00001, 'accuracy': 0.3}
    # the second was stopped before its first validation
    for run, lines in ('gau-1', [{'kind': 'train'}, validation]), ('gau-2', [{'kind': 'train'}]):
        folder = tmp_path / 'out' / 'study' / run
        folder.mkdir(parents=True)
        (folder / 'launches.jsonl').write_text(json.dumps(launch) + '\n')
        (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    trial = {'task': 'cola', 'run': 'gau-1', 'seed': 2, 'n': {'cola': [9, 5]},
             'scores': {'cola': {'matthews': 0.1}}, 'majority': {'cola': {'matthews': 0.0}}}
    folder = tmp_path / 'out' / 'finetune_study' / 'gau-1' / 'cola' / '2'
    folder.mkdir(parents=True)
    (folder / 'result.json').write_text(json.dumps(trial))
    old = [{'kind': 'study', 'run': run, 'curve': []} for run in ('gau-1', 'gau-3')]
    (tmp_path / 'study.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in old))

    study.collect()
    rows = {(row['kind'], row['run']): row for row in study.read_rows()}
    assert len(study.read_rows()) == 3
    assert rows['study', 'gau-3'] == old[1]
    assert rows['study', 'gau-1']['curve'] == [[150, 4.0, 0.3]]
    assert rows['study', 'gau-1']['knobs'] == ['--seed=1']
    assert rows['task', 'gau-1']['scores'] == {'matthews': 0.1}
