"""The figure of results/claims.md: what the papers print, beside what was measured here, with intervals.

    $ python results/forest.py      writes results/forest.png, prints numbers for claims.md and plateau.md

1. what the papers print
2. the rows of the figure
3. the study's new operators beside each other, for claims.md
4. other analyses of the first arm of plateau.md
5. the figure; main

Needs scipy, and matplotlib for the figure: pip install -r requirements-dev.txt
"""
import itertools
import json
import math
import os
from typing import NamedTuple

import numpy as np
import plateau
import study
from analysis import HERE, compare, paired, print_table, shown_difference, shown_interval, shown_p
from scipy.stats import mannwhitneyu, ttest_ind

FIGURE = os.path.join(HERE, 'forest.png')

# ---- 1. what the papers print ----

# Courtois et al. 2024, 4.1: the step at which a loss leaves its first plateau, (small, base)
PLATEAUS = {'original': (12_000, 25_000), 'symmetric': (None, 13_500), 'pairwise': (None, 12_000)}
# the same from the losses in its code, where they pass 5.5 nats
PLATEAUS_OF_CODE = {'original': (14_750, 27_750), 'symmetric': (13_750, 15_000), 'pairwise': (10_750, 13_000)}
# matrices in the blocks of small and base
BLOCKS = 12 * 4 * 512 ** 2, 12 * 12 * 768 ** 2
# Courtois et al. 4.1: nats above `original` at the end
LOSSES = {'symmetric': 0.1, 'pairwise': 0.0}
# Kowsher et al. 2024, figure 3: an epoch of fine-tuning on six tasks
EPOCHS = [0.70, 0.81, 0.82, 0.87, 0.88, 0.89]
# a step: label with the tokens of a row, printed, measured (one thread of a CPU, if not on an H200);
# page and words of its line
COSTS = [
    ('shared / original, time, 256', EPOCHS, 0.90, 'bench.md', '| `shared` | `original` |'),
    ('shared / original, time, 512, H200', EPOCHS, 0.90, 'bench.md', '| `shared` | 46.9 |'),
    ('shatter / original, time, 256', [0.95], 1.02, 'bench.md', '| `shatter` | `original` |'),
    ('shatter / original, time, 512, H200', [0.85], 1.23, 'bench.md', '| `shatter` | 64.7 |'),
    ('rpe / absolute, time, 512', [3.89], 1.44, 'bench.md', '| `original`, `rpe` |'),
    ('rab / absolute, time, 512', [1.21], 1.13, 'bench.md', '| `original`, `rab` |'),
    ('RoFormerV2 / gau, time, 512', [1.224], 1.01, 'bench.md', '| time, RoFormerV2 |'),
    ('RoFormerV2 / gau, time, 2048, H200', [1.902], 1.89, 'bench.md', '| H200, RoFormerV2 |'),
    ('RoFormerV2 / gau, memory, 512', [1.187], 1.05, 'bench.md', '| memory, RoFormerV2 | 9'),
    # printed: "over 50 %" saved; MiB
    ('shatter, memory, rows of 256 / 512', [0.5], 1298 / 2241, 'systems.md', '| `shatter` | 1,298 |'),
]
# time, of the study: 256 wide, 128 tokens, learned positions
COSTS_OF_STUDY = {'shared': EPOCHS, 'shatter': [0.95]}
# the system here, and its paper, in the first table of which `original` stands too
SCORES = {'pairwise': 'courtois', 'symmetric': 'courtois', 'shared': 'kowsher'}
COLUMNS = {'CoLA': 'cola', 'SST-2': 'sst2', 'MRPC': 'mrpc'}


def printed_scores(paper, system):
    """{task: score at base size} in a paper's first table."""
    with open(os.path.join(HERE, 'papers.json'), encoding='utf-8') as file:
        table = json.load(file)[paper]['tables'][0]
    [cells] = [row.partition('; ')[2].split() for row in table['rows'] if row.startswith(f'{system} base;')]
    tasks = [column.partition('.')[0] for column in table['columns'].split()]
    return dict(zip(tasks, map(float, cells), strict=False))             # the average comes after the columns


def printed_slopes(system):
    """By text and by code: doublings of a plateau, less those of `original`, a doubling of the blocks."""
    doublings = math.log2(BLOCKS[1] / BLOCKS[0])
    grown = {name: math.log2(base / small) for name, (small, base) in PLATEAUS_OF_CODE.items()}
    small, base = PLATEAUS['original']
    # 4.1: the plateaus of the others were "almost unaffected"
    return [-math.log2(base / small) / doublings, (grown[system] - grown['original']) / doublings]


# ---- 2. the rows of the figure ----

class Row(NamedTuple):
    """A line of the figure."""
    label: str
    printed: list               # the paper's numbers
    ours: float
    low: float = None           # ends of the 95 % interval; None: it has none
    high: float = None


def token_rows(counted):
    """Tokens to the order gap, which stand for the steps on the plateau."""
    found = plateau.medians(counted, 'original')
    contrasts = plateau.contrasts(counted)
    theirs = {'symmetric': 'symmetric', 'pairwise_unit': 'pairwise'}
    rows = []
    for system, name in theirs.items():
        printed = PLATEAUS[name][1] / PLATEAUS['original'][1]
        rows += [Row(f'{system}, {size}', [printed], *found[system, size]) for size in plateau.SIZES]
    for system, name in theirs.items():
        # as ratios, so that they stand on the same axis
        printed = [2 ** slope for slope in printed_slopes(name)]
        of_twice = [2 ** value for value in contrasts[system][:3]]
        rows.append(Row(f'{system}, per doubling of size', printed, *of_twice))
    return rows


def cost_rows():
    milliseconds = study.step_times(study.read_rows())
    rows = [Row(f'{system} / original, time, 128', printed, milliseconds[system] / milliseconds['original'])
            for system, printed in COSTS_OF_STUDY.items()]
    return rows + [Row(label, printed, ours) for label, printed, ours, *_ in COSTS]


def study_row(label, printed, found):
    """found: a row of compare's table"""
    difference, half = found['difference'], found['half']
    return Row(label, [printed], difference, difference - half, difference + half)


def loss_rows(tables):
    """tables: of study.compare_all with `original_rope`; learned positions were not used"""
    return [study_row(system, printed, tables['loss'].loc[f'{system}_rope'])
            for system, printed in LOSSES.items()]


def score_rows(tables):
    rows = []
    for system, paper in SCORES.items():
        theirs, original = printed_scores(paper, system), printed_scores(paper, 'original')
        for task, column in COLUMNS.items():
            printed = theirs[column] - original[column]
            rows.append(study_row(f'{system}, {task}', printed, tables[task].loc[f'{system}_rope']))
    return rows


# ---- 3. the new operators beside each other ----

def print_pairs(scores):
    """Dunnett's p of two: each of the three is compared with the two others, all with `rope`."""
    lines = []
    for system, reference in (('pairwise', 'symmetric'), ('shared', 'symmetric'), ('shared', 'pairwise')):
        others = [f'{name}_rope' for name in SCORES if name != reference]
        line = [f'`{system}`', f'`{reference}`']
        for measure in ('loss', *COLUMNS):
            group = study.peers(measure, f'{reference}_rope', scores)
            found = compare(scores[measure].loc[group], f'{reference}_rope', others)
            line.append(shown_difference(found.loc[f'{system}_rope'], study.digits(measure, 1)))
        lines.append([cell.replace('-', '−') for cell in line])
    print_table("With `rope`: difference (Dunnett's p)", ['', 'less', 'loss', *COLUMNS], lines)


# ---- 4. other analyses of the first arm of plateau.md ----

def log_tokens(counted, system, size):
    """log2 T by seed; infinite without a gap."""
    here = counted[(counted['system'] == system) & (counted['size'] == size)]
    return np.log2(here.set_index('seed')['tokens']).sort_index()


def slopes(counted, system):
    """The slope of log2 T with log2 of the size, of each seed."""
    x = plateau.size_axis(plateau.SIZES)
    by_size = np.array([log_tokens(counted, system, size) for size in plateau.SIZES])
    return x @ by_size / (x @ x)                        # the mean of x is 0


def welch(ours, theirs):
    """(difference of means, low, high, p) of Welch's t; 95 % interval"""
    test = ttest_ind(ours, theirs, equal_var=False)
    return np.mean(ours) - np.mean(theirs), *test.confidence_interval(), test.pvalue


def print_ratios(counted):
    """T over T of `original`: medians of the runs, and intervals that do not pool the cells."""
    cells = {}
    for system, size in itertools.product(plateau.SEARCHED[1:], plateau.SIZES):
        ours, theirs = log_tokens(counted, system, size), log_tokens(counted, 'original', size)
        if np.isinf(ours.median()):
            continue
        p = shown_p(mannwhitneyu(ours, theirs).pvalue)
        cells[system, size] = f'{2 ** (ours.median() - theirs.median()):.2f} ({p})'
        if np.isfinite(ours).all():
            for _, low, high, _ in (welch(ours, theirs), paired(ours - theirs)):
                cells[system, size] += f'; {2 ** low:.2f} to {2 ** high:.2f}'
    plateau.print_cells('T over T of `original`: of medians (rank p); Welch; paired by seed',
                        plateau.SEARCHED[1:], cells)


def print_contrasts(counted):
    """The two primary contrasts by tests on the slopes of the seeds, and with a smaller gap."""
    of_original = slopes(counted, 'original')
    ours = {system: slopes(counted, system) for system in plateau.PRIMARY}
    sooner = [plateau.tokens_to_gap(validations, 0.1) for validations in counted['validations']]
    plateau.print_contrasts({
        'paired by seed, t': {system: paired(ours[system] - of_original) for system in ours},
        "Welch's t of the slopes of the seeds": {system: welch(ours[system], of_original) for system in ours},
        'as planned, with a gap of 0.1 nats': plateau.contrasts(counted.assign(tokens=sooner)),
    })


# ---- 5. the figure ----

OURS, PRINTED = '#000000', '#D55E00'


def shown_ours(row, places):
    if row.low is None:
        return f'{row.ours:.{places}f}'
    rounded = [round(value, places) + 0.0 for value in (row.ours, row.low, row.high)]       # no -0.0
    return shown_interval(rounded, places, sign='')


def shown_printed(row, places):
    ends = [f'{value:.{places}f}' for value in (min(row.printed), max(row.printed))]
    return ' to '.join(dict.fromkeys(ends))             # one number has equal ends


def draw_panel(axis, title, rows, are_ratios, places):
    """A line of text for each row, its marks below it."""
    across = {'transform': axis.get_yaxis_transform(), 'fontsize': 14, 'va': 'center'}
    axis.axvline(1 if are_ratios else 0, color='#BBBBBB', linewidth=1, zorder=0)
    for place, row in enumerate(rows):
        axis.axhspan(-place + 0.2, -place + 0.66, color='#F2F2F2', zorder=0.5)
        axis.text(0, -place + 0.42, row.label, **across)
        axis.text(0.7, -place + 0.42, shown_printed(row, places), ha='right', color=PRINTED, **across)
        axis.text(1, -place + 0.42, shown_ours(row, places), ha='right', **across)
        axis.plot(row.printed, [-place] * len(row.printed), 'D', markersize=8, color=PRINTED, zorder=3)
        if row.low is None:
            axis.plot(row.ours, -place, 'o', markersize=8, markerfacecolor='white', color=OURS, zorder=4)
        else:
            ends = [[row.ours - row.low], [row.high - row.ours]]
            axis.errorbar(row.ours, -place, xerr=ends, fmt='o', markersize=7, linewidth=2.5, color=OURS)
    if are_ratios:
        axis.set_xscale('log', base=2)
        ticks = [tick for tick in (0.5, 0.7, 1, 1.4, 2, 2.8, 4) if tick < axis.get_xlim()[1]]
        axis.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
    axis.set_ylim(0.7 - len(rows), 0.85)
    axis.set_yticks([])
    axis.set_title(title, fontsize=15, loc='left', fontweight='bold')
    axis.tick_params(labelsize=14)
    axis.spines[['top', 'right', 'left']].set_visible(False)


def draw(tokens, costs, losses, scores):
    """tokens, costs, losses, scores: lists of Row"""
    from matplotlib.figure import Figure
    # title, rows, whether they are ratios, decimal places
    panels = [
        ('Tokens until order is used, over those of original', tokens, True, 2),
        ('Time or memory of a step, by tokens a row: ratio', costs, True, 2),
        ('Final loss less that of original, rope: nats', losses, False, 2),
        ('Score less that of original, rope: points', scores, False, 1),
    ]
    heights = [len(rows) + 1.2 for _, rows, _, _ in panels]
    figure = Figure((7.2, 0.6 * sum(heights) + 1), layout='constrained')
    axes = figure.subplots(len(panels), 1, height_ratios=heights)
    for axis, panel in zip(axes, panels, strict=True):
        draw_panel(axis, *panel)
    axes[0].plot([], [], 'D', markersize=8, color=PRINTED, label='printed')
    axes[0].plot([], [], 'o', markersize=8, color=OURS, label='here')
    axes[0].plot([], [], 'o', markersize=8, color=OURS, markerfacecolor='white', label='here, no interval')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside upper left', ncols=3, fontsize=14,
                  frameon=False)
    figure.savefig(FIGURE, dpi=100)


def main():
    counted, _ = plateau.balanced(plateau.read_rows())
    scores = study.scores_of(study.read_rows())
    tables = study.compare_all(scores, 'original_rope')
    print_pairs(scores)
    print_ratios(counted)
    print_contrasts(counted)
    draw(token_rows(counted), cost_rows(), loss_rows(tables), score_rows(tables))


if __name__ == '__main__':
    main()
