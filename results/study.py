"""The tables, the intervals and the figure of results/study.md, from the rows of results/study.jsonl.

    $ python results/study.py               prints the tables, writes results/study.png
    $ python results/study.py collect       first copies finished runs of out/study* into study.jsonl

1. the scores: one number for each measure, system and pretraining seed
2. the comparisons: each system with its reference, all at once; main
========
3. the tables
4. the figure
5. collect: from the folders of the runs to rows

Needs scipy, and matplotlib for the figure: pip install -r requirements-dev.txt
"""
import glob
import itertools
import json
import math
import os
import sys

import numpy as np
import pandas as pd
from analysis import (HERE, compare, holm, pooled_deviation, print_table, shown_difference, shown_mean,
                      shown_p)
from scipy.stats import bartlett, t

ROWS = os.path.join(HERE, 'study.jsonl')
FIGURE = os.path.join(HERE, 'study.png')
# name of a task in the rows: (its name here, its metric)
TASKS = {'cola': ('CoLA', 'matthews'), 'sst2': ('SST-2', 'accuracy'), 'mrpc': ('MRPC', 'f1_accuracy'),
         'custom': ('docstrings', 'accuracy')}
TASK_NAMES = [name for name, _ in TASKS.values()]
LOSSES = ['loss', 'loss at equal time']
# reference: the systems that the plan compares with it
COMPARISONS = {
    'original_rope': ['pairwise_rope', 'gau', 'shatter', 'symmetric_rope', 'shared_rope', 'no_position'],
    'original': ['original_rope', 'gau', 'shatter', 'no_position', 'pairwise', 'symmetric', 'shared'],
}
SYSTEMS = ['original_rope', 'pairwise_rope', 'gau', 'shatter', 'symmetric_rope', 'shared_rope', 'no_position',
           'original', 'pairwise', 'symmetric', 'shared']               # the order of the tables
PLATEAU_MARGIN = 0.1        # nats below the final loss of `no_position`: below that, order has been learned
LEVEL = 0.05                # a difference counts if its adjusted p is below


# ---- 1. the scores ----

def read_rows():
    with open(ROWS, encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def rows_of(rows, kind):
    return [row for row in rows if row['kind'] == kind]


def system_and_seed(row):
    return row['run'].rsplit('-', 1)


def points(row, kind='scores'):
    """A trial's score in its task's metric; kind='majority': that of the most frequent class."""
    _, metric = TASKS[row['task']]
    return 100 * row[kind][metric]


def step_times(rows):
    """{system: milliseconds of a step}"""
    return {row['run']: row['ms'] for row in rows_of(rows, 'step')}


def all_scores(rows):
    """A table of system, pretraining seed, measure and score; a task has a score of each fine-tuning."""
    milliseconds = step_times(rows)
    # the run that ends first, by the step times of bench.py
    budget = min(row['steps'] * milliseconds[system_and_seed(row)[0]] for row in rows_of(rows, 'study'))
    scores = []
    for row in rows_of(rows, 'study'):
        system, seed = system_and_seed(row)
        steps, losses, accuracies = np.array(row['curve']).T
        if steps[-1] < row['steps']:
            sys.exit(f"study.py: {row['run']} is at step {steps[-1]:.0f} of {row['steps']}: finish it first")
        # a loss between two validations lies on the line that joins them
        at_equal_time = np.interp(budget / milliseconds[system], steps, losses)
        scores.append((system, seed, 'loss', losses[-1]))
        scores.append((system, seed, 'loss at equal time', at_equal_time))
        scores.append((system, seed, 'accuracy', 100 * accuracies[-1]))
    for row in rows_of(rows, 'task'):
        name, _ = TASKS[row['task']]
        scores.append((*system_and_seed(row), name, points(row)))
    return pd.DataFrame(scores, columns=['system', 'seed', 'measure', 'score'])


def scores_of(rows):
    """{measure: a table of one score for each system (rows) and pretraining seed (columns)}"""
    # pivot_table takes the mean of the two fine-tuning trials of a run
    return {measure: part.pivot_table(index='system', columns='seed', values='score')
            for measure, part in all_scores(rows).groupby('measure')}


def learned_systems(scores):
    """Those whose mean final loss is clearly below that of the model that cannot see order."""
    losses = scores['loss'].mean(axis=1)
    return [system for system in losses.index if losses[system] < losses['no_position'] - PLATEAU_MARGIN]


# ---- 2. the comparisons ----

def peers(measure, reference, scores):
    """The systems that share a deviation with the reference.

    In the tasks these are all.  The losses of systems that see no order differ by far less from seed to seed
    than those of systems that do: each of the two groups has its own deviation.
    """
    systems = list(scores[measure].index)
    if measure not in LOSSES:
        return systems
    learned = learned_systems(scores)
    return [system for system in systems if (system in learned) == (reference in learned)]


def compare_all(scores, reference):
    """{measure: table of compare}; for tasks with a column `holm`: p adjusted for all tasks and systems"""
    tables = {}
    for measure in [*LOSSES, *TASK_NAMES]:
        group = peers(measure, reference, scores)
        others = [system for system in COMPARISONS[reference] if system in group]
        tables[measure] = compare(scores[measure].loc[group], reference, others)
    adjusted = holm(pd.concat({task: tables[task]['p'] for task in TASK_NAMES}))
    for task in TASK_NAMES:
        tables[task]['holm'] = adjusted[task]
    return tables


def plateau_end(curve, level):
    """First validation step from which the loss stays below `level`, or 'never'."""
    below = itertools.takewhile(lambda validation: validation[1] < level, reversed(curve))
    steps = [step for step, *_ in below]
    return str(steps[-1]) if steps else 'never'


def tuning_share(rows, scores):
    """{task: share of the variance between the runs of a system that comes from fine-tuning's own seeds}"""
    of_runs = all_scores(rows).groupby(['measure', 'system', 'seed'])['score'].var()
    of_a_trial = of_runs.groupby('measure').mean()
    # a run's score is the mean of two trials, which has half of a trial's variance
    return {task: of_a_trial[task] / 2 / scores[task].var(axis=1).mean() for task in TASK_NAMES}


def main():
    if sys.argv[1:] == ['collect']:
        collect()
    elif sys.argv[1:]:
        sys.exit(f'study.py: no such command {sys.argv[1]!r}: collect, or nothing')
    rows = read_rows()
    scores = scores_of(rows)
    print_pilot(rows)
    print_rates(rows)
    print_steps(rows)
    print_scores(rows, scores)
    print_deviations(scores)
    print_comparisons(scores)
    print_poolings(scores)
    print_plateau(rows, scores)
    print_tuning(rows, scores)
    draw(rows)


# ======== the numbers are decided; below they are printed, drawn and collected ========


# ---- 3. the tables ----

def digits(measure, others):
    """Decimal places of a loss, or `others`."""
    return 3 if measure in LOSSES else others


def print_rates(rows):
    losses = {row['run']: row['curve'][-1][1] for row in rows_of(rows, 'study_rate')}
    lines = []
    for system in SYSTEMS:
        tried = [losses[f'{system}-{rate}'] for rate in ('5e-4', '1e-3', '2e-3')]
        cells = [f'**{loss:.3f}**' if loss == min(tried) else f'{loss:.3f}' for loss in tried]
        lines.append([f'`{system}`', *cells])
    print_table('Validation loss after 270 steps', ['', '5e-4', '1e-3', '2e-3'], lines)


def print_steps(rows):
    steps = pd.DataFrame(rows_of(rows, 'step')).set_index('run').loc[SYSTEMS]
    tokens = 32 * 128 / steps['ms'] * 1000
    lines = [[f'`{system}`', f"{steps['ms'][system]:.1f}", f'{tokens[system]:,.0f}',
              str(steps['MiB'][system])] for system in SYSTEMS]
    print_table('A step', ['', 'ms', 'tokens/s', 'MiB at the peak'], lines)


def print_pilot(rows):
    lines = []
    for row in rows_of(rows, 'study_pilot'):
        losses = {step: f'{loss:.3f}' for step, loss, _ in row['curve']}
        third = row['steps'] // 3
        last = row['curve'][-1][0]
        lines.append([row['run'], f'{row["steps"]:,}', losses.get(third, ''), f'{last:,}', losses[last]])
    print_table('The pilot', ['run', 'steps', 'loss after a third', 'stopped at', 'loss there'], lines)


def print_scores(rows, scores):
    majority = {TASKS[row['task']][0]: points(row, 'majority') for row in rows_of(rows, 'task')}
    measures = ['loss', 'accuracy', 'loss at equal time', *TASK_NAMES]
    head = ['']
    for measure in measures:
        head.append(f'{measure} ({majority[measure]:.2f})' if measure in majority else measure)
    lines = []
    for system in SYSTEMS:
        cells = [shown_mean(scores[measure].loc[system], digits(measure, 2)) for measure in measures]
        lines.append([f'`{system}`', *cells])
    print_table('Scores: mean (deviation) of three seeds', head, lines)


def print_deviations(scores):
    lines = []
    for measure in [*LOSSES, *TASK_NAMES]:
        groups = [peers(measure, reference, scores) for reference in COMPARISONS]
        if groups[0] == groups[1]:
            groups = groups[:1]
        for group in groups:
            values = scores[measure].loc[group]
            deviation, freedom = pooled_deviation(values)
            half = t.ppf(0.975, freedom) * deviation * math.sqrt(2 / values.shape[1])
            places = digits(measure, 2)
            lines.append([measure, str(len(group)), f'{deviation:.{places}f}', str(freedom),
                          f'{half:.{places}f}', shown_p(bartlett(*values.to_numpy()).pvalue)])
    head = ['', 'systems', 'deviation', 'degrees of freedom', '± of a difference', "Bartlett's p"]
    print_table('The pooled deviations', head, lines)


def shown_verdict(found, places):
    """found: a row of compare_all's table; bold: Dunnett's p is below LEVEL, star: Holm's too"""
    text = shown_difference(found, places)
    if found['dunnett'] < LEVEL:
        text = f'**{text}**'
    if found.get('holm', 1) < LEVEL:
        text += ' \\*'
    return text


def print_comparisons(scores):
    for reference, others in COMPARISONS.items():
        tables = compare_all(scores, reference)
        lines = []
        for system in others:
            line = [f'`{system}`']
            for measure, table in tables.items():
                places = digits(measure, 1)
                if system in table.index:
                    text = shown_verdict(table.loc[system], places)
                else:
                    means = scores[measure].mean(axis=1)
                    text = f'{means[system] - means[reference]:+.{places}f}'
                line.append(text.replace('-', '−'))
            lines.append(line)
        print_table(f'Differences from {reference}', [f'less `{reference}`', *tables], lines)


def print_poolings(scores):
    """What the verdicts on the loss owe to the choice of the systems that share a deviation."""
    learned = learned_systems(scores)
    groups = {
        'the six that learned (the tables)': learned,
        'the five without `shared_rope`': [system for system in learned if system != 'shared_rope'],
        'all eleven': list(scores['loss'].index),
    }
    lines = []
    for name, group in groups.items():
        others = [system for system in COMPARISONS['original_rope'] if system in group]
        table = compare(scores['loss'].loc[group], 'original_rope', others)
        deviation, _ = pooled_deviation(scores['loss'].loc[group])
        line = [name, f'{deviation:.3f}']
        for system in ('pairwise_rope', 'gau', 'shatter', 'symmetric_rope'):
            line.append(shown_p(table['dunnett'][system]))
        lines.append(line)
    head = ['deviation of the loss from', 'nats', '`pairwise_rope`', '`gau`', '`shatter`', '`symmetric_rope`']
    print_table("Dunnett's p by the systems that are pooled", head, lines)


def print_plateau(rows, scores):
    level = scores['loss'].loc['no_position'].mean() - PLATEAU_MARGIN
    ends = {}
    for row in rows_of(rows, 'study'):
        system, _ = system_and_seed(row)
        ends.setdefault(system, []).append(plateau_end(row['curve'], level))
    lines = [[f'`{system}`', ', '.join(ends[system])] for system in SYSTEMS]
    title = f'First validation step from which the loss stays below {level:.3f}'
    print_table(title, ['', 'seeds 1, 2, 3'], lines)


def print_tuning(rows, scores):
    shares = tuning_share(rows, scores)
    percents = [f'{100 * share:.0f} %' for share in shares.values()]
    print_table('Share of fine-tuning in the variance of scores', ['', *shares], [['share', *percents]])


# ---- 4. the figure ----

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {'original_rope': '#000000', 'pairwise_rope': '#0072B2', 'gau': '#CC79A7', 'shatter': '#009E73',
           'symmetric_rope': '#E69F00', 'shared_rope': '#D55E00'}
GREY = '#777777'            # the systems that stay on the plateau


def draw(rows):
    """Mean and range of the seeds, by step and by time; each system is named at its line."""
    from matplotlib.figure import Figure
    milliseconds = step_times(rows)
    curves = {}
    for row in rows_of(rows, 'study'):
        system, _ = system_and_seed(row)
        curves.setdefault(system, []).append(row['curve'])

    figure = Figure((13, 6.2), layout='constrained')
    by_step, by_time = figure.subplots(1, 2)
    ends = {}
    for system, runs in curves.items():
        steps, losses, _ = np.array(runs).transpose(2, 0, 1)            # (seeds, validations) each
        minutes = steps * milliseconds[system] / 60_000
        ends[system] = minutes[0, -1], losses[:, -1].mean()
        colour = COLOURS.get(system, GREY)
        if system not in COLOURS:
            style = 'dotted'
        elif system == 'gau':                   # its colour and shatter's are one grey to some readers
            style = 'dashed'
        else:
            style = 'solid'
        for panel, x in ((by_step, steps[0]), (by_time, minutes[0])):
            panel.plot(x, losses.mean(axis=0), color=colour, linestyle=style, linewidth=2.5)
            panel.fill_between(x, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15)
    name_lines(by_step, by_time, ends)
    by_step.text(2870, 6.1, 'without positions,\nor learned ones', color='#555555', fontsize=17, va='center')
    by_step.set(xlim=(0, 4550), ylim=(3.8, 7), xticks=range(0, 2701, 900))
    by_time.set(xlim=(5, 25.5), ylim=(3.95, 5.3), xticks=range(5, 21, 5))
    by_step.set_xlabel('step', fontsize=17)
    by_time.set_xlabel('minutes of one core, from the fifth', fontsize=17)
    by_step.set_ylabel('validation loss (nats)', fontsize=17)
    for panel in (by_step, by_time):
        panel.tick_params(labelsize=16)
        panel.spines[['top', 'right']].set_visible(False)
    figure.savefig(FIGURE, dpi=100)


def name_lines(by_step, by_time, ends):
    """ends: {system: (minutes, loss) at the end of its line}"""
    height = -math.inf
    for system in sorted(COLOURS, key=lambda system: ends[system][1]):
        minutes, loss = ends[system]
        name = {'s': system.replace('_', ', '), 'color': COLOURS[system], 'fontsize': 17}
        # all lines end at one step: the names stand beside them, far enough apart to be read
        height = max(loss, height + 0.16)
        by_step.plot([2700, 2850], [loss, height], color=COLOURS[system], linewidth=0.8)
        by_step.text(2870, height, va='center', **name)
        # each line ends at a time of its own; shatter's name has room below alone
        if system == 'shatter':
            by_time.text(minutes, loss - 0.03, ha='right', va='top', **name)
        else:
            by_time.text(minutes + 0.3, loss, va='center', **name)


# ---- 5. collect ----

def collect():
    """Copy runs, trials and step times below out/ into study.jsonl, in place of rows of the same run."""
    rows = read_rows() if os.path.exists(ROWS) else []
    # a run that was stopped early may have no validation yet
    runs = map(run_row, glob.glob('out/study*/*/metrics.jsonl'))
    rows += [row for row in runs if row['curve']]
    rows += map(task_row, glob.glob('out/finetune_study/*/*/*/result.json'))
    if os.path.exists('out/study_time/bench.csv'):
        rows += step_rows()
    newest = {str([row.get(name) for name in ('kind', 'run', 'task', 'seed')]): row for row in rows}
    with open(ROWS, 'w', encoding='utf-8') as file:
        for key in sorted(newest):
            file.write(json.dumps(newest[key]) + '\n')


def run_row(path):
    """A pretraining run's knobs and validations.  path: of its metrics.jsonl"""
    folder = os.path.dirname(path)
    with open(f'{folder}/launches.jsonl', encoding='utf-8') as file:
        launch = json.loads(next(file))
    with open(path, encoding='utf-8') as file:
        lines = [json.loads(line) for line in file]
    curve = [[line['step'], round(line['loss'], 4), round(line['accuracy'], 4)]
             for line in lines if line['kind'] == 'val']
    knobs = [word for word in launch['argv'][2:] if 'out_dir' not in word]
    kind, run = folder.split('/')[1:]
    return {'kind': kind, 'run': run, 'revision': launch['revision'], 'date': launch['date'][:10],
            'knobs': knobs, 'steps': launch['config']['max_iters'], 'curve': curve}


def task_row(path):
    """One fine-tuning trial's scores."""
    with open(path, encoding='utf-8') as file:
        trial = json.load(file)
    task = trial['task']
    return {'kind': 'task', 'run': trial['run'], 'task': task, 'seed': trial['seed'], 'n': trial['n'][task],
            'scores': trial['scores'][task], 'majority': trial['majority'][task]}


def step_rows():
    """Time and memory of a step of each system."""
    times = pd.read_csv('out/study_time/bench.csv')
    memory = pd.read_csv('out/study_memory/bench.csv')
    both = pd.merge(times, memory, on='system').replace('roformer_v1', 'original_rope')
    return [{'kind': 'step', 'run': row['system'], 'ms': round(row['ms'], 1), 'MiB': round(row['MiB']),
             'made': row['made_x'].partition('; ')[2]} for row in both.to_dict('records')]


if __name__ == '__main__':
    main()
