"""results/report.py: columns, rows and averages of the papers, pooled seeds, curves."""
import json

import numpy as np
import pytest
import torch
from test_finetune import cells

import finetune
from configurator import UserError
from finetune import TASKS
from papers import printed_rows, printed_table, read_book
from report import count_as, make_report


def report(results, paper='', *more):
    """Markdown of results, by read_book(paper)."""
    text, _ = make_report(results, read_book(paper), *more)
    return text


def result(score, task='rte', seed=1, run='ours', step=100):
    """result.json of a trial, with `score` in points; MNLI's mm scores a point more."""
    metric = 'f1_accuracy' if task == 'qqp' else TASKS[task].metrics[0]
    scores = {task: {metric: score / 100, 'other': 0.25}}
    majority = {task: {metric: 0.5, 'other': 0.125}}
    if task == 'mnli':
        scores['mnli_mm'] = {metric: score / 100 + 0.01}
    return {'run': run, 'step': step, 'task': task, 'seed': seed, 'metric': metric, 'seconds': 12.5,
            'scores': scores, 'majority': dict.fromkeys(scores, majority[task]),
            'n': dict.fromkeys(scores, (12, 6)), 'weights': '', 'recipe': {}}


def glue(*scores, **more):
    """All tasks of GLUE; seed i scores scores[i - 1] everywhere."""
    tasks = finetune.find_tasks('glue')
    return [result(score, task, seed, **more) for seed, score in enumerate(scores, 1) for task in tasks]


def test_a_papers_table_has_its_columns_rows_averages_and_differences():
    ours = glue(70, 74)
    text = report(ours + glue(60, 69, 90, run='base'), 'courtois', 'base')
    assert '|  | mrpc.f1_accuracy | cola.matthews | mnli.accuracy | mnli_mm.accuracy | qqp.f1' in text
    every = '72.00 (2.83) ± 25.41'
    row, = cells(text, 'ours')
    assert row == [every] * 3 + ['73.00 (2.83) ± 25.41'] + [every] * 5 + ['72.11 (2.83) ± 25.41', '2']
    assert cells(text, 'majority')[0][:2] == ['50.00'] * 2
    assert cells(text, 'paper: pairwise base')[0][9] == '79.36 (0.37)'
    assert len(cells(text, 'paper:')) == 6
    assert cells(text, 'difference')[0][5] == '7.50 (3.54) ± 31.77'     # of 10 and 5: paired by seed
    assert cells(report(ours), 'rte.other') == [['25.00 (0.00) ± 0.00', '12.50']]
    some = [one for one in ours if one['task'] != 'rte']
    assert cells(report(some, 'courtois'), 'ours')[0][9] == '-'         # no average without all of its tasks


def test_runs_of_one_name_are_averaged_with_pool():
    """Their means over the trials' seeds, and differences paired by pretraining seed."""
    trials = (1, 1, 70), (1, 2, 74), (2, 1, 80), (2, 2, 86), (5, 1, 61)
    ours = [result(score, seed=seed, run=f'ours-{number}') for number, seed, score in trials]
    base = [result(70, run='base-1'), result(82, run='base-2')]
    text = report(ours + base, '', 'base', ['ours', 'base'])
    deviation = np.std([72, 83, 61], ddof=1)
    half = 4.303 * deviation / 3 ** 0.5
    assert cells(text, 'ours')[0] == [f'72.00 ({deviation:.2f}) ± {half:.2f}', '3']
    assert cells(text, 'difference') == [['1.50 (0.71) ± 6.35']]
    with pytest.raises(UserError, match='pool=ours: ours-1 and ours-2 are needed, the runs are ours-1'):
        report(ours[:1], '', '', ['ours'])


def test_a_curve_over_pretraining_steps(stage, tmp_path, monkeypatch):
    """The picture has the numbers of the table, the average too."""
    for task, add in (('rte', 0), ('cola', 10)):
        for step, score in ((10, 73), (20, 76.5), (30, 80)):
            folder = tmp_path / f'ours@{step}' / f'{task}_1'
            folder.mkdir(parents=True)
            (folder / 'result.json').write_text(json.dumps(result(score + add, task, step=step)))
    seen = []
    monkeypatch.setattr('report.plot', lambda path, panels, label: seen.append(panels))
    text = stage('report', f'--out_dir={tmp_path}').out
    assert cells(text, 'ours')[0] == ['90.00', '80.00', '85.00', '1']           # of the last step
    curve = text[text.index('## ours by pretraining step'):]
    assert [cells(curve, row)[0] for row in ('10', '20', 'first')] == [
        ['83.00', '73.00', '78.00'],
        ['86.50', '76.50', '81.50'],
        ['20', '20', '20']]                             # the first with 95 % of the last score
    curves = seen[0]['pretraining step']
    assert [*curves] == ['ours cola.matthews', 'ours rte.accuracy', 'ours average']
    assert curves['ours average'] == [(10, 78), (20, 81.5), (30, 85)]


def test_counts_of_the_papers_are_ours_or_explained(monkeypatch):
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)     # slow on meta
    unequal = {}                                        # row -> why it is another number
    for row in printed_rows('parameters'):
        total = count_as(row)
        as_printed = {'M': f'{total / 1e6:.1f}M', 'k': f'{total / 1e3:,.0f}k'}
        if row.value != as_printed.get(row.value[-1], f'{total:,}'):
            unequal[' '.join([row.system, *row.qualifiers[:2]])] = row.source
    assert list(unequal) == ['shared base all', 'original large matrices', 'shatter large matrices']
    assert all('12 of the 24' in source or 'classifier' in source for source in unequal.values())


def test_rows_of_bench_are_shown_beside_what_papers_print(stage, tmp_path):
    """gau_12k is gau; a masked LM is timed by Liu's paper and a classifier by his code."""
    (tmp_path / 'bench.csv').write_text("""system,shape,length,half as long / MiB,section,made
gau_12k,base,,,params,us
shatter,base train,512,,speed,us
roformer_v2_12k,base finetune,512,,speed,us
shatter,base train,512,0.4,memory,us
roformer_v2,base train,512,,memory,us
roformer_v2,base train,300,,memory,us
""")
    text = stage('report', f'--out_dir={tmp_path}').out
    assert cells(text, 'gau')[1][1:4] == ['classifier', '96,519,170', '96,519k']
    tian, half = (row[-1] for row in cells(text, 'shatter'))
    assert tian == '0.85 (tian original train base 512: table 1, 45 against 53 hours, TPUv3)'
    assert half.startswith('below 50% (tian half: abstract: over 50 % saved')
    assert cells(text, 'roformer_v2_12k')[0][-1] == '1.224 (liu gau 512: table 4, 8 rows, one T40)'
    _, memory, other = (row[-1] for row in cells(text, 'roformer_v2'))
    assert memory.startswith('10047 MiB, 118.7% (liu gau 512')
    assert other == '-'


def test_averages_of_papers_json_follow_from_their_columns():
    """But for those of errata.md. Each column is a metric of a task."""
    wrong = []
    for name in ('courtois', 'kowsher', 'tian', 'liu'):
        for table in read_book(name).get('tables', ()):
            for column in table['columns'].split():
                task, metric = column.replace('_mm', '').split('.')
                assert metric in TASKS[task].metrics, column
            printed = printed_table(table).map(lambda cell: float(cell.split()[0]))
            for average, places in table.get('averages', {}).items():
                gap = printed.iloc[:, places].mean(axis=1) - printed[average]
                wrong += printed.index[gap.abs() > 0.0101].to_list()
    assert wrong == [
        'paper: symmetric base',
        'paper: pairwise base',
        'paper: shared base, TriviaQA too']
