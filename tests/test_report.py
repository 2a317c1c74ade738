"""The report over trials: the papers' tables, intervals, paired differences, curves, noise, missing tasks."""
import re

import numpy as np
import pandas as pd
import pytest

from configurator import UserError
from finetune import METRICS, make_report, over_seeds, paper_rows, read_papers, t_quantile
from model import ATTENTION, NORM, POOLING, POSITION

GLUE = {'mrpc': 'f1_accuracy', 'cola': 'matthews', 'mnli': 'accuracy', 'qqp': 'accuracy', 'rte': 'accuracy',
        'stsb': 'pearson_spearman', 'qnli': 'accuracy', 'sst2': 'accuracy'}
PAPERS = read_papers()
TABLES = [table for book in PAPERS.values() for table in [*book['tables'], *(
    book[key] for key in ('noise', 'cross') if key in book)]]


def report(trials, paper='', compare=''):
    return make_report(trials, paper, compare)


def printed(table):
    """{name: {label: points}} of the paper's rows, without deviations."""
    return {name.removeprefix('paper: '): {key: float(text.split()[0]) for key, text in row.items()}
            for name, row in paper_rows(table).to_dict('index').items()}


def trial(score, task='rte', seed=1, init='ours', step=100, attention='pairwise', shape=(12, 768), **more):
    """A finished trial; MNLI's mm scores a point more.  `score` in points."""
    columns = {task: score / 100} | ({'mnli_mm': score / 100 + 0.01} if task == 'mnli' else {})
    metric = GLUE.get(task, 'accuracy')
    return {'init': init, 'step': step, 'task': task, 'seed': seed, 'metric': metric,
            'model': {'attention': attention, 'position': 'absolute', 'norm': 'layer', 'pooling': 'cls',
                      'n_layer': shape[0], 'n_head': 4, 'n_embd': shape[1]},
            'scores': {column: {metric: value, 'other': 0.25} for column, value in columns.items()},
            'majority': {column: {metric: 0.5, 'other': 0.125} for column in columns},
            'n_train': 2490, 'n_dev': dict.fromkeys(columns, 277), 'skipped': {'train: no label': 3},
            'epochs': 5, 'steps': 780, 'best_step': 700, 'seconds_per_epoch': 12.5, 'device': 'CPU',
            'date': '2026-11-21', 'recipe': {'learning_rate': 1e-5}, 'weights': f'{init} {step}', 'data': {},
            **more}


def glue(*scores, seeds=(1, 2), **more):
    """All tasks of GLUE; seed i scores scores[i - 1] everywhere."""
    return [trial(scores[seed - 1], task, seed, **more) for seed in seeds for task in GLUE]


def rows(text, start):
    """The cells of the Markdown rows whose first cell starts with `start`."""
    found = (row for row in text.splitlines() if row.startswith('|'))
    cells = [[cell.strip() for cell in row.strip('|').split('|')] for row in found]
    return [row[1:] for row in cells if row[0].startswith(start)]


# ---- the papers' tables ----

@pytest.mark.parametrize('table', TABLES, ids=lambda table: table.get('title', table['columns']))
def test_a_printed_row_has_every_column_and_words_of_our_tables(table):
    words = {*ATTENTION, *POSITION, *NORM, *POOLING, 'small', 'base', 'large'}
    names = [row.split(';')[0] for row in table['rows']]
    assert len(set(names)) == len(names)
    assert {word for name in names for word in name.split(',')[0].split()} <= words
    columns = table['columns'].split()
    assert {key.split('.')[1] for key in columns if '.' in key and key[0] != '0'} <= METRICS.keys()
    assert all(set(row) == {*columns, *table.get('averages', ())} for row in printed(table).values())


def test_printed_averages_follow_from_the_columns_but_for_the_errata():
    wrong = {}
    for table in (table for book in PAPERS.values() for table in book['tables']):
        columns = table['columns'].split()
        for name, row in printed(table).items():
            for average, places in table.get('averages', {}).items():
                told = row[average]
                mean = np.mean([row[columns[i]] for i in places])
                if abs(mean - told) > 0.0101:                                   # rounded or cut
                    wrong[table['title'], name] = told, round(mean, 2)
    assert wrong == {('Kowsher et al. 2024, table 1', 'symmetric base'): (74.28, 76.04),
                     ('Kowsher et al. 2024, table 1', 'pairwise base'): (79.03, 79.66),
                     ('Kowsher et al. 2024, table 2', 'shared base, TriviaQA too'): (83.05, 82.55)}


def test_the_averages_of_courtois_by_hand():
    rows = printed(PAPERS['courtois']['tables'][0])
    for (name, total), told in zip((('original base', 708.64), ('pairwise base', 714.27)), (78.74, 79.36),
                                   strict=True):
        assert sum(list(rows[name].values())[:9]) == pytest.approx(total)
        assert round(total / 9, 2) == told == rows[name]['GLUE']


def test_kowshers_averages_follow_from_the_cola_of_courtois():
    kowsher, courtois = (printed(PAPERS[paper]['tables'][0]) for paper in ('kowsher', 'courtois'))
    for name in ('symmetric base', 'pairwise base'):
        row = {**kowsher[name], 'cola.matthews': courtois[name]['cola.matthews']}
        mean = np.mean([value for key, value in row.items() if key not in ('mnli_mm.accuracy', 'average')])
        assert mean == pytest.approx(kowsher[name]['average'], abs=0.0101)


def test_a_papers_table_is_printed_whole():
    text = report([trial(60, attention='shared', shape=(4, 512))], 'courtois')
    names = re.findall(r'^\| paper: (.*?) \|', text, re.M)
    assert names == [row.split(';')[0] for row in PAPERS['courtois']['tables'][0]['rows']] and len(names) == 6


# ---- numbers ----

def test_t_quantile_is_scipys():
    stats = pytest.importorskip('scipy.stats')
    for freedom in (*range(1, 31), 99, 100):
        for inside in (0.5, 0.95, 0.99):
            told = stats.t.ppf(0.5 + inside / 2, freedom)
            assert t_quantile(freedom, inside) == pytest.approx(told, abs=1e-6, rel=1e-8)


def test_interval_by_hand():
    wide = pd.DataFrame({'five': [1, 2, 3, 4, 5], 'one': [4.0, *[np.nan] * 4], 'two': [7, 7, *[np.nan] * 3]})
    half = 2.776445105 * (2.5 / 5) ** 0.5
    found = over_seeds(wide)
    assert found['five'].tolist() == ['3.00 (1.58)', f'{half:.2f}', '5']
    assert found['one'].tolist() == ['4.00', '-', '1']
    assert found['two'].tolist() == ['7.00 (0.00)', '0.00', '2']


def test_average_is_taken_by_seed_over_the_papers_columns():
    def averages(trials, paper=''):
        return rows(report(trials, paper), 'ours: ours')[0][-1]
    assert averages(glue(70, 74), 'courtois') == '72.11 (2.83)'                 # mm is a point above
    assert rows(report(glue(70, 74), 'courtois'), '±')[0][-1] == '25.41'        # 12.7062 * 2.8284 / 2 ** 0.5
    assert averages(glue(70, 74), 'kowsher') == '-'                             # of MRPC's accuracy
    assert averages(glue(70, 74)) == '72.11 (2.83)'


def test_what_an_average_leaves_out_is_named():
    trials = [trial(70, task, scores={task: {'accuracy': 0.7, 'f1_accuracy': 0.7, 'matthews': 0.7,
                                             'pearson_spearman': 0.7}}) for task in GLUE]
    assert 'average leaves out mnli_mm.accuracy.' in report(trials, 'kowsher')
    assert 'leaves out' not in report(trials, 'courtois')


def test_rows_of_different_recipes_data_or_weights_are_never_averaged():
    """A row is an init and what differs; the others' tasks join the row that has their recipe."""
    short, long = ({'recipe': {'block_size': size, 'learning_rate': 1e-5}} for size in (128, 512))
    text = report([*glue(70, 74, **short), trial(80, 'rte', **long), trial(90, 'rte', 2, **long)])
    assert rows(text, 'ours: ours block_size=128')[0][-1] == '72.11 (2.83)'
    assert rows(text, 'ours: ours block_size=512')[0][-1] == '-'
    assert rows(text, 'ours: ours block_size=512')[0].count('85.00 (7.07)') == 1
    assert 'No average of ours block_size=512: missing' in text
    overrides = [trial(70, task, recipe={'learning_rate': rate})                # each task has one recipe
                 for task, rate in (('rte', 1e-5), ('cola', 5e-6))]
    assert rows(report(overrides), 'ours: ours') == [['70.00', '70.00', '70.00']]
    for key in ('data', 'weights'):
        values = [{'train': 'a' * 16}, {'train': 'b' * 16}] if key == 'data' else ['a' * 16, 'b' * 16]
        text = report([trial(60, **{key: values[0]}), trial(80, **{key: values[1]})])
        assert sorted(row[0] for row in rows(text, 'ours: ours')) == ['60.00', '80.00']
        assert len(set(re.findall(r'ours: ours ([0-9a-f]{6}) ', text))) == 2


def test_table_in_the_papers_order():
    text = report(glue(70, 74), 'courtois')
    assert '|  | mrpc.f1_accuracy | cola.matthews | mnli.accuracy | mnli_mm.accuracy | qqp.accuracy' in text
    cells = ['72.00 (2.83)'] * 10
    cells[3], cells[9] = '73.00 (2.83)', '72.11 (2.83)'
    assert rows(text, 'ours: ours')[0] == cells
    assert rows(text, '± 95 %')[0] == ['25.41'] * 10 and rows(text, 'seeds')[0] == ['2'] * 10
    assert rows(text, 'majority')[0] == ['50.00'] * 10
    assert rows(text, 'paper: pairwise base')[0][-1] == '79.36 (0.37)'
    assert rows(text, 'rte.other') == [['25.00 (0.00)', '12.50']]               # every form of a metric
    assert rows(text, 'mnli')[-1] == ['12.50']                                  # seconds


def test_missing_tasks_leave_the_average_out_and_are_named():
    some = [one for one in glue(70, 74) if one['task'] not in ('cola', 'rte')]
    text = report(some, 'courtois')
    assert 'No GLUE of ours: missing cola.matthews, rte.accuracy.' in text
    assert rows(text, 'ours: ours')[0][1] == rows(text, 'ours: ours')[0][-1] == '-'
    split = [one for one in glue(70, 74) if (one['task'] == 'rte') == (one['seed'] == 1)]
    assert 'No GLUE of ours: missing a seed with all.' in report(split, 'courtois')


def test_a_single_seed_has_no_interval():
    text = report(glue(70, seeds=(1,)), 'courtois')
    assert rows(text, 'ours: ours')[0][0] == '70.00' and rows(text, '± 95 %')[0] == ['-'] * 10


def test_tasks_outside_the_papers_tables_are_shown_too():
    text = report([trial(60), trial(70, 'c3')], 'tian')
    assert re.findall('^## (.*)', text, re.M)[1:4] == [
        'Tian et al. 2021, tables 2, 6 and 7', 'Tian et al. 2021, table 2, test sets', 'Other tasks']
    assert rows(text, 'ours: ours')[2] == ['70.00']


def test_differences_are_paired_by_common_seeds():
    base = glue(60, 69, 0, seeds=(1, 2), init='base', attention='original', seconds_per_epoch=10.0)
    text = report(glue(70, 74, 90, seeds=(1, 2, 3)) + base, 'courtois', compare='base')
    assert re.findall('^## (.*paired.*)', text, re.M) == ['ours - base, paired by seed']
    assert rows(text, 'GLUE') == [['7.50 (3.54)', '31.77', '2']]                # of 10 and 5
    assert ['7.50 (3.54)', '31.77', '2'] in rows(text, 'rte.accuracy')
    assert sorted(rows(text, 'rte')[-1]) == ['1.25', '10.00', '12.50']          # seconds and their ratio
    for others in ([trial(60, seed=2, init='base')], []):       # no common seed, nothing of base finished yet
        text = report([trial(70), *others], compare='base')
        assert 'paired' not in text
    recipes = {'recipe': {'learning_rate': 1e-4}}, {'recipe': {'learning_rate': 1e-5}}
    text = report([trial(score, init=init, seconds_per_epoch=score, **recipe) for recipe in recipes
                   for init, score in (('ours', 70.0), ('base', 60.0))], compare='base')
    for rate in ('0.0001', '1e-05'):                    # each recipe has its own pair and its own ratio
        assert f'## ours learning_rate={rate} - base learning_rate={rate}, paired by seed' in text
        assert f'| ours learning_rate={rate} / base learning_rate={rate} |' in text
    assert rows(text, 'rte')[-1][-2:] == ['1.17', '1.17']
    other = trial(60, init='base', recipe={'learning_rate': 1e-4})
    assert 'paired' not in report([trial(70), other], compare='base')           # another recipe is no pair


def pretrained(*runs, init='ours', **more):
    """RTE of several pretraining runs: (pretraining seed, score of seed 1, score of seed 2 ...) each."""
    return [trial(score, seed=seed, init=init, run_seed=run, weights=f'{init} {run}', **more)
            for run, *scores in runs for seed, score in enumerate(scores, 1)]


def test_deviation_over_pretraining_runs_is_apart_from_that_over_seeds():
    """Over the runs' means, whatever their numbers of seeds; t with two and with one degree of freedom."""
    text = report(pretrained((1, 70, 74), (2, 80, 86), (5, 61)))
    mean, sd = np.mean([72, 83, 61]), np.std([72, 83, 61], ddof=1)
    assert rows(text, 'ours: ours') == [[f'{mean:.2f} ({sd:.2f})'], ['72.00 (2.83)'], ['83.00 (4.24)'],
                                        ['61.00']]
    assert rows(text, '±') == [[f'{4.302653 * sd / 3 ** 0.5:.2f}'], ['25.41'], ['38.12'], ['-']]
    assert rows(text, 'pretraining seeds') == [['3']] and rows(text, 'seeds') == [['2'], ['2'], ['1']]
    assert 'ours: ours, pretraining seed 5 |' in text
    assert rows(text, 'rte.accuracy') == [[f'{mean:.2f} ({sd:.2f})', '50.00']]  # every form of a metric


def test_a_run_without_all_tasks_is_not_in_the_average():
    runs = [one for run, score in ((1, 70), (2, 80)) for one in glue(score, score, run_seed=run)]
    text = report([*runs, *pretrained((3, 95))], 'courtois')
    assert rows(text, 'ours: ours')[0][-1] == '75.11 (7.07)' and rows(text, 'pretraining')[0][-1] == '2'


def test_differences_are_paired_by_pretraining_seed_and_seed():
    """Pairs have equal seeds, not equal places: of 1, 2, 4 and 2, 4, 7 only 2 and 4 are pairs."""
    base = pretrained((2, 60, 70), (4, 50), (7, 0), init='base')
    text = report(pretrained((1, 99), (2, 64, 72), (4, 51, 80)) + base, compare='base')
    paired = text[text.index('ours - base, paired'):]
    assert rows(paired, 'rte.accuracy')[:3] == [['2.00 (1.41)', '12.71', '2'], ['3.00 (1.41)', '12.71', '2'],
                                                ['1.00', '-', '1']]
    assert 'pretraining seeds |' in paired and 'ours, pretraining seed 4 - base, paired' in paired
    alone = trial(60, init='base')                      # it has no pretraining seed
    text = report([*pretrained((1, 99)), alone], compare='base')
    assert 'paired' not in text and 'No difference of ours and base: they have no seed in common.' in text


def test_a_run_alone_is_no_pretraining_seed_of_a_system_with_its_name():
    text = report([trial(10), *pretrained((1, 70), (2, 74))])
    assert rows(text, 'ours: ours |') == [] and rows(text, 'ours: ours alone') == [['10.00']]
    assert rows(text, 'ours: ours')[:1] == [['72.00 (2.83)']]


def test_a_curve_over_pretraining_runs():
    trials = [one for step, scores in ((10, (50, 52)), (20, (60, 70))) for one in pretrained(
        *enumerate(scores, 1), step=step)]
    curve = report(trials)
    curve = curve[curve.index('## ours by pretraining step'):]
    assert rows(curve, '10')[0] == ['51.00 (1.41)'] and rows(curve, '20')[0] == ['65.00 (7.07)']


def test_names_of_averages_are_of_one_table_alone():
    for book in PAPERS.values():
        names = [name for table in book['tables'] for name in table.get('averages', {})]
        assert len(names) == len(set(names))


def test_curve_and_the_step_of_95_percent():
    steps = {300: 80, 10: 50, 30: 77, 20: 76, 200: 75}                          # 0.95 x 80 = 76
    text = report([one for step, score in steps.items() for one in glue(score, score, step=step)], 'courtois')
    curve = text[text.index('## ours by pretraining step'):]
    assert [line.split()[1] for line in curve.splitlines()[4:9]] == ['10', '20', '30', '200', '300']
    assert rows(curve, '95 %')[0][0] == '76.00' and rows(curve, '300')[0][0] == '80.00 (0.00)'
    assert rows(text, 'ours: ours')[0][0] == '80.00 (0.00)'                     # of the last step
    assert rows(text, 'reached at') == [['20'] * 10] and '65,000 (original)' in text


def test_a_curve_that_ends_at_nothing_reaches_nothing():
    text = report([trial(score, step=step) for step, score in ((1, 5), (2, -3))])
    assert rows(text, 'reached at')[0] == ['-']
    assert 'by pretraining step' not in report([trial(50, step=None)])


def test_noise_and_cross_beside_the_papers():
    trials = [trial(81, 'mnli', seed, attention='original', cross={'mnli': 0.81, 'qqp': 0.5},
                    noise={'mnli': {'0.4': 0.6, '0': 0.8, '0.05': 0.7 + seed / 50}}) for seed in (1, 2)]
    text = report(trials, 'kowsher')
    assert '|  | 0 | 0.05 | 0.1 | 0.15 | 0.2 | 0.25 | 0.3 | 0.35 | 0.4 |' in text
    assert rows(text, 'ours, mnli') == [['80.00 (0.00)', '73.00 (1.41)', *['-'] * 6, '60.00 (0.00)'],
                                        ['81.00 (0.00)', '-', '-', '50.00 (0.00)']]
    paper = [['81.66', '80.02', '79.42', '78.53', '77.42', '74.53', '72.47', '70.34', '68.24'],
             ['81.66', '60.12', '72.24', '49.03']]                              # mnli, mrpc, qnli, qqp
    assert rows(text, 'paper: original base, mnli') == paper
    assert 'Noise' not in report(glue(70, 74), 'kowsher')


def test_every_paper_reports_any_trials():
    trials = [one for step in (1, 2) for one in glue(70, 74, step=step)] + glue(60, seeds=(1,), init='base')
    trials.append(trial(50, 'squad2', step=2, noise={'squad2': {'0.1': 0.5}}))
    for paper in ('', *PAPERS):
        text = report(trials, paper, 'base')
        assert 'nan' not in text.lower() and 'base' in text and '## Seconds an epoch' in text


def test_errors_name_the_choices():
    with pytest.raises(UserError, match="paper='x': choose one of courtois, kowsher, tian, liu"):
        report([trial(50)], 'x')


def test_averages_of_lius_table_2_stand_beside_their_normaliser_alone():
    def notes(attention, normaliser):
        one = trial(60, 'afqmc', attention=attention)
        return re.findall(r'(\w+): AVG ([\d.]+)', make_report([
            {**one, 'model': {**one['model'], 'normaliser': normaliser}}], 'liu'))

    assert notes('gau', 'softmax') == [('softmax', '62.8')]
    assert notes('gau', 'softmax_plus') == [('softmax_plus', '64.23')]
    assert not notes('original', 'softmax_plus')
