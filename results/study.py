"""The tables, the intervals and the figure of results/study.md, from the rows of results/study.jsonl.

    $ python results/study.py               prints them, writes results/study.png
    $ python results/study.py collect       first copies finished runs of out/study* into study.jsonl

1. the scores: one number for each measure, system and pretraining seed
2. the comparisons: each system with its reference, all at once; main
========
3. what is printed
4. the figure
5. collect: from the folders of the runs to rows

Needs scipy, and matplotlib for the figure: pip install -r requirements-dev.txt
"""
import glob
import json
import os
import sys

import numpy as np
import pandas as pd
from analysis import (HERE, compare, holm, pooled_deviation, print_table, shown_difference, shown_mean,
                      shown_p)
from scipy.stats import bartlett, ttest_ind

ROWS = os.path.join(HERE, 'study.jsonl')
FIGURE = os.path.join(HERE, 'study.png')
# name of a task in the rows: (its name here, its metric)
TASKS = {'cola': ('CoLA', 'matthews'), 'sst2': ('SST-2', 'accuracy'), 'mrpc': ('MRPC', 'f1_accuracy'),
         'custom': ('docstrings', 'accuracy')}
TASK_NAMES = [name for name, _ in TASKS.values()]
LOSSES = ['loss', 'loss at equal time']
MEASURES = [*LOSSES, *TASK_NAMES]
# reference: the systems that are compared with it
COMPARISONS = {
    'original_rope': ['pairwise_rope', 'gau', 'shatter', 'symmetric_rope', 'shared_rope', 'no_position'],
    'original': ['original_rope', 'gau', 'shatter', 'no_position', 'pairwise', 'symmetric', 'shared'],
}
SYSTEMS = ['original_rope', 'pairwise_rope', 'gau', 'shatter', 'symmetric_rope', 'shared_rope', 'no_position',
           'original', 'pairwise', 'symmetric', 'shared']               # the order of the tables
RATES = ['5e-4', '1e-3', '2e-3']
PLATEAU_MARGIN = 0.1        # nats below the final loss of `no_position`: below that, order has been learned
LEVEL = 0.05                # a difference counts if its adjusted p is below


# ---- 1. the scores ----

def read_rows(path=None):
    """Of a file with a JSON object a line, by default study.jsonl."""
    with open(path or ROWS, encoding='utf-8') as file:
        return [json.loads(line) for line in file]


def rows_of(rows, kind):
    return [row for row in rows if row['kind'] == kind]


def system_and_seed(row):
    system, seed = row['run'].rsplit('-', 1)
    return system, seed


def losses_of(rows):
    """Validation losses: a line for each step, a column for each (system, seed)."""
    losses = pd.DataFrame({system_and_seed(row): {step: loss for step, loss, _ in row['curve']}
                           for row in rows_of(rows, 'study')})
    unfinished = losses.columns[losses.iloc[-1].isna()]
    if len(unfinished):
        sys.exit(f'study.py: finish these runs first: {[*unfinished]}')
    return losses


def step_times(rows):
    """{system: milliseconds of a step}"""
    return pd.Series({row['run']: row['ms'] for row in rows_of(rows, 'step')})


def trials_of(rows):
    """A line for each fine-tuning trial: its score and that of the most frequent class, in points."""
    trials = []
    for row in rows_of(rows, 'task'):
        name, metric = TASKS[row['task']]
        points = 100 * row['scores'][metric], 100 * row['majority'][metric]
        trials.append((*system_and_seed(row), name, *points))
    return pd.DataFrame(trials, columns=['system', 'seed', 'task', 'score', 'majority'])


def scores_of(rows):
    """{measure: a table of one score for each system (rows) and pretraining seed (columns)}"""
    losses = losses_of(rows)
    milliseconds = step_times(rows)
    # where each system is when the fastest ends; between two validations the loss is interpolated
    steps = losses.index[-1] * milliseconds.min() / milliseconds
    at_equal_time = {(system, seed): np.interp(steps[system], losses.index, losses[system, seed])
                     for system, seed in losses.columns}
    scores = {'loss': losses.iloc[-1].unstack(), 'loss at equal time': pd.Series(at_equal_time).unstack()}
    for task, trials in trials_of(rows).groupby('task'):
        # the mean of the two trials of a run
        scores[task] = trials.pivot_table(index='system', columns='seed', values='score')
    return scores


def plateau_level(scores):
    return scores['loss'].loc['no_position'].mean() - PLATEAU_MARGIN


def learned_systems(scores):
    """Those whose mean final loss is clearly below that of the model that cannot see order."""
    losses = scores['loss'].mean(axis=1)
    return [*losses.index[losses < plateau_level(scores)]]


# ---- 2. the comparisons ----

def peers(measure, reference, scores):
    """The systems that share a deviation with the reference.

    In the tasks these are all.  The losses of systems that see no order differ by far less from seed to seed
    than those of systems that do: each of the two groups has its own deviation.
    """
    learned = learned_systems(scores)
    return [system for system in SYSTEMS
            if measure in TASK_NAMES or (system in learned) == (reference in learned)]


def compare_all(scores, reference):
    """{measure: table of compare}; for tasks with a column `holm`: p adjusted for all tasks and systems"""
    tables = {}
    for measure in MEASURES:
        group = peers(measure, reference, scores)
        others = [system for system in COMPARISONS[reference] if system in group]
        tables[measure] = compare(scores[measure].loc[group], reference, others)
    adjusted = holm(pd.concat({task: tables[task]['p'] for task in TASK_NAMES}))
    for task in TASK_NAMES:
        tables[task]['holm'] = adjusted[task]
    return tables


def main():
    if sys.argv[1:] == ['collect']:
        collect()
    elif sys.argv[1:]:
        sys.exit(f'study.py: no such command {sys.argv[1]!r}: collect, or nothing')
    rows = read_rows()
    scores = scores_of(rows)
    print_rates(rows)
    print_steps(rows)
    print_scores(rows, scores)
    print_comparisons(scores)
    print_deviations(scores)
    print_poolings(scores)
    print_shares(rows, scores)
    print_plateau(rows, scores)
    draw(rows)


# ======== the numbers are decided; below they are printed, drawn and collected ========


# ---- 3. what is printed ----

def digits(measure, others):
    """Decimal places of a loss, or `others`."""
    return 3 if measure in LOSSES else others


def print_rates(rows):
    losses = {row['run']: row['curve'][-1][1] for row in rows_of(rows, 'study_rate')}
    lines = []
    for system in SYSTEMS:
        tried = [losses[f'{system}-{rate}'] for rate in RATES]
        cells = [f'**{loss:.3f}**' if loss == min(tried) else f'{loss:.3f}' for loss in tried]
        lines.append([f'`{system}`', *cells])
    print_table('Validation loss after 270 steps', ['', *RATES], lines)


def print_steps(rows):
    steps = {row['run']: row for row in rows_of(rows, 'step')}
    lines = [[f'`{name}`', str(steps[name]['ms']), str(steps[name]['MiB'])] for name in SYSTEMS]
    print_table('A step', ['', 'ms', 'MiB at the peak'], lines)


def print_scores(rows, scores):
    majority = trials_of(rows).groupby('task')['majority'].first()
    head = ['', 'loss', *(f'{task} ({majority[task]:.2f})' for task in TASK_NAMES)]
    lines = []
    for system in SYSTEMS:
        cells = [shown_mean(scores[task].loc[system], 2) for task in TASK_NAMES]
        lines.append([f'`{system}`', shown_mean(scores['loss'].loc[system], 3), *cells])
    print_table('Mean (deviation) of three seeds', head, lines)


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


def print_deviations(scores):
    print("\nDeviation, degrees of freedom, Bartlett's p")
    for measure in MEASURES:
        groups = [peers(measure, reference, scores) for reference in COMPARISONS]
        # in a task both are all systems
        for group in groups if measure in LOSSES else groups[:1]:
            values = scores[measure].loc[group]
            deviation, freedom = pooled_deviation(values)
            p = shown_p(bartlett(*values.to_numpy()).pvalue)
            print(f'{measure}, {len(group)} systems: {deviation:.{digits(measure, 2)}f}, {freedom}, {p}')


def print_poolings(scores):
    """What the verdicts on the loss owe to the choice of the systems that share a deviation."""
    losses = scores['loss']
    learned = losses.loc[learned_systems(scores)]
    print("\nDunnett's p of the losses less original_rope, by the systems that share a deviation")
    for group in learned, learned.drop('shared_rope'), losses:
        others = [system for system in COMPARISONS['original_rope'] if system in group.index]
        found = compare(group, 'original_rope', others)
        deviation, _ = pooled_deviation(group)
        print(f'{len(group)} systems: {deviation:.3f}', found['dunnett'].map(shown_p).to_dict())
    welch = ttest_ind(losses.loc['shatter'], losses.loc['original_rope'], equal_var=False)
    print(f"Welch's test of shatter alone: {shown_p(welch.pvalue)}")


def print_shares(rows, scores):
    print("\nShare of fine-tuning's own seeds in the variance between the runs of a system")
    of_trials = trials_of(rows).groupby(['task', 'system', 'seed'])['score'].var().groupby('task').mean()
    for task in TASK_NAMES:
        # a run's score is the mean of two trials, which has half of a trial's variance
        share = of_trials[task] / 2 / scores[task].var(axis=1).mean()
        print(f'{task}: {100 * share:.0f} %')


def print_plateau(rows, scores):
    level = plateau_level(scores)
    highest_from_here = losses_of(rows)[::-1].cummax()
    ends = highest_from_here.apply(lambda losses: losses.index[losses < level].min())
    print(f'\nFirst validation step from which the loss stays below {level:.3f}, by seed')
    print(ends.unstack().loc[SYSTEMS].to_string(float_format='%.0f', na_rep='never'))


# ---- 4. the figure ----

# Okabe and Ito's colours, which colour-blind readers can tell apart; gau's and shatter's are one grey to some
LINES = {'original_rope': ('#000000', 'solid'), 'pairwise_rope': ('#0072B2', 'solid'),
         'gau': ('#CC79A7', 'dashed'), 'shatter': ('#009E73', 'solid'),
         'symmetric_rope': ('#E69F00', 'solid'), 'shared_rope': ('#D55E00', 'solid')}
PLATEAU_LINE = '#777777', 'dotted'


def draw(rows):
    """Mean and range of the seeds, by step and by time, where each line is named at its end."""
    from matplotlib.figure import Figure
    losses = losses_of(rows)
    milliseconds = step_times(rows)
    figure = Figure((7.8, 3.8), layout='constrained')
    by_step, by_time = figure.subplots(1, 2)
    for system in SYSTEMS:
        runs = losses[system]
        minutes = runs.index * milliseconds[system] / 60_000
        colour, style = LINES.get(system, PLATEAU_LINE)
        for panel, x in (by_step, runs.index), (by_time, minutes):
            panel.plot(x, runs.mean(axis=1), color=colour, linestyle=style)
            panel.fill_between(x, runs.min(axis=1), runs.max(axis=1), color=colour, alpha=0.15)
        if system in LINES:
            # shatter's name has room below its line alone
            shift, side = ((-4, -14), 'right') if system == 'shatter' else ((5, -3), 'left')
            by_time.annotate(system.replace('_', ', '), (minutes[-1], runs.iloc[-1].mean()), shift,
                             textcoords='offset points', color=colour, ha=side)
    by_step.text(2700, 6.3, 'learned or no positions', color='#555555', ha='right')
    by_step.set(xlim=(0, 2700), ylim=(3.8, 7), xticks=range(0, 2701, 900),
                xlabel='step', ylabel='validation loss (nats)')
    by_time.set(xlim=(5, 26), ylim=(3.95, 5.3), xticks=range(5, 21, 5), xlabel='minutes on one core')
    for panel in (by_step, by_time):
        panel.spines[['top', 'right']].set_visible(False)
    figure.savefig(FIGURE, dpi=170)


# ---- 5. collect ----

def collect():
    """Copy runs, trials and step times below out/ into study.jsonl, in place of rows of the same run."""
    rows = read_rows()
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
    launch, *_ = read_rows(f'{folder}/launches.jsonl')
    curve = [[line['step'], round(line['loss'], 4), round(line['accuracy'], 4)]
             for line in read_rows(path) if line['kind'] == 'val']
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
