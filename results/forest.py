"""The figure of results/claims.md: what the papers print, beside what was measured here, with intervals.

    $ python results/forest.py      writes results/forest.png, prints other analyses for results/plateau.md

1. what the papers print
2. the rows of the figure
3. other analyses of the first arm of plateau.md
4. the figure; main

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
from analysis import HERE, paired, shown_interval, shown_p
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
# what a step takes: label, printed, measured on one thread of a CPU, and where: the page and its first words
COSTS = [
    ('shared / original, time, 256 and 512 tokens', EPOCHS, [0.90, 0.86],
     'bench.md', '| `shared` | `original` |'),
    ('shatter / original, time, 256 tokens', [0.95], [1.02], 'bench.md', '| `shatter` | `original` |'),
    ('shatter / original, time, 512 tokens', [0.85], [1.18], 'bench.md', '| `shatter` | `original` |'),
    ('original with rpe / absolute, time, 512', [3.89], [1.44], 'bench.md', '| `original`, `rpe` |'),
    ('original with rab / absolute, time, 512', [1.21], [1.13], 'bench.md', '| `original`, `rab` |'),
    ('RoFormerV2 / gau, time, 512 tokens', [1.224], [1.01], 'bench.md', '| time, RoFormerV2 |'),
    ('RoFormerV2 / gau, time, 2048 tokens', [1.902], [1.47], 'bench.md', '| time, RoFormerV2 |'),
    ('RoFormerV2 / gau, memory, 512 tokens', [1.187], [1.05], 'bench.md', '| memory, RoFormerV2 | 9'),
    # printed: "over 50 %" saved; MiB
    ('shatter, memory, rows of 256 / 512 tokens', [0.5], [1298 / 2241],
     'systems.md', '| `shatter` | 1,298 |'),
]
# the same of the study: 256 wide, 128 tokens, learned positions
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
    label: str                  # systems, unit, size
    printed: list               # the paper's numbers
    ours: list                  # (number, low, high): with the 95 % interval; low is None: no interval


def ratio_rows(counted):
    """Tokens to the order gap, which stand for the steps on the plateau; then times and memory."""
    rows = []
    found = plateau.medians(counted, 'original')
    contrasts = plateau.contrasts(counted)
    for system, theirs in (('symmetric', 'symmetric'), ('pairwise_unit', 'pairwise')):
        printed = PLATEAUS[theirs][1] / PLATEAUS['original'][1]
        for size in plateau.SIZES:
            label = f'{system} / original, tokens to the gap, {size}'
            rows.append(Row(label, [printed], [found[system, size]]))
    for system, theirs in (('symmetric', 'symmetric'), ('pairwise_unit', 'pairwise')):
        # as a ratio, so that it stands on the same axis
        of_twice = tuple(2 ** value for value in contrasts[system][:3])
        rows.append(Row(f'{system}: the same, change with each doubling of the size',
                        [2 ** slope for slope in printed_slopes(theirs)], [of_twice]))
    milliseconds = study.step_times(study.read_rows())
    for system, printed in COSTS_OF_STUDY.items():
        ratio = milliseconds[system] / milliseconds['original']
        rows.append(Row(f'{system} / original, time, 128 tokens', printed, [(ratio, None, None)]))
    for label, printed, ours, *_ in COSTS:
        rows.append(Row(label, printed, [(value, None, None) for value in ours]))
    return rows


def interval(tables, measure, system):
    """tables: of study.compare_all"""
    found = tables[measure].loc[system]
    return found['difference'], found['difference'] - found['half'], found['difference'] + found['half']


def loss_rows(with_rope):
    """Of the study; with learned positions no system has left the plateau."""
    return [Row(f'{system} less original, rope', [printed], [interval(with_rope, 'loss', f'{system}_rope')])
            for system, printed in LOSSES.items()]


def score_rows(with_rope, absolute):
    """Of the study: with `rope`, then with learned positions."""
    rows = []
    for system, paper in SCORES.items():
        theirs, original = printed_scores(paper, system), printed_scores(paper, 'original')
        for task, column in COLUMNS.items():
            ours = [interval(with_rope, task, f'{system}_rope'), interval(absolute, task, system)]
            printed = theirs[column] - original[column]
            rows.append(Row(f'{system} less original, rope, {task}', [printed], ours))
    return rows


# ---- 3. other analyses of the first arm of plateau.md ----

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


# ---- 4. the figure ----

# Okabe and Ito's colours, which colour-blind readers can tell apart
OURS, ABSOLUTE, PRINTED = '#000000', '#888888', '#D55E00'


def shown(row, places):
    """Our numbers in words; of two pairs of runs those with `rope`."""
    number, low, high = row.ours[0]
    if low is None:
        return ', '.join(f'{value:.{places}f}' for value, _, _ in row.ours)
    rounded = [round(value, places) + 0.0 for value in (number, low, high)]         # no -0.0
    return shown_interval(rounded, places, sign='')


def draw_panel(axis, rows, title, neutral, places):
    """A line of text for each row, its marks below it."""
    across = {'transform': axis.get_yaxis_transform(), 'fontsize': 12, 'va': 'center'}
    axis.axvline(neutral, color='#BBBBBB', linewidth=1, zorder=0)
    for place, row in enumerate(rows):
        axis.axhspan(-place + 0.2, -place + 0.64, color='#F2F2F2', zorder=0.5)
        axis.text(0, -place + 0.42, row.label, **across)
        axis.text(1, -place + 0.42, shown(row, places), ha='right', **across)
        axis.plot(row.printed, [-place] * len(row.printed), 'D', markersize=8, color=PRINTED, zorder=3)
        for number, (value, low, high) in enumerate(row.ours):
            if low is None:
                axis.plot(value, -place, 'o', markersize=8, markerfacecolor='white', color=OURS, zorder=4)
            else:
                ends = [[value - low], [high - value]]
                axis.errorbar(value, -place - 0.16 * number, xerr=ends, fmt='o', markersize=7, linewidth=2.5,
                              color=ABSOLUTE if number else OURS)
    axis.set_ylim(0.7 - len(rows), 0.85)
    axis.set_yticks([])
    axis.set_title(title, fontsize=14, loc='left', fontweight='bold')
    axis.tick_params(labelsize=12)
    axis.spines[['top', 'right', 'left']].set_visible(False)


def draw(ratios, losses, points):
    from matplotlib.figure import Figure
    panels = ratios, losses, points
    heights = [len(rows) + 1.2 for rows in panels]
    figure = Figure((7.2, 0.56 * sum(heights) + 1), layout='constrained')
    first, second, third = figure.subplots(3, 1, height_ratios=heights)
    first.set_xscale('log', base=2)
    draw_panel(first, ratios, 'Ratios (logarithmic scale)', 1, 2)
    ticks = [0.5, 0.7, 1, 1.4, 2, 2.8, 4]
    first.set_xticks(ticks, [f'{tick:g}' for tick in ticks])
    draw_panel(second, losses, 'Final loss, nats', 0, 2)
    draw_panel(third, points, 'Scores, points', 0, 1)
    legend = [('D', PRINTED, PRINTED, 'printed, base size'),
              ('o', OURS, 'white', 'here, no interval'),
              ('o', OURS, OURS, 'here, 95 % interval'),
              ('o', ABSOLUTE, ABSOLUTE, 'the same, learned positions')]
    for marker, colour, inside, words in legend:
        first.plot([], [], marker, color=colour, markerfacecolor=inside, markersize=8, label=words)
    figure.legend(*first.get_legend_handles_labels(), loc='outside upper left', ncols=2, fontsize=12,
                  frameon=False)
    figure.savefig(FIGURE, dpi=100)


def main():
    counted, _ = plateau.balanced(plateau.read_rows())
    scores = study.scores_of(study.read_rows())
    with_rope = study.compare_all(scores, 'original_rope')
    absolute = study.compare_all(scores, 'original')
    print_ratios(counted)
    print_contrasts(counted)
    draw(ratio_rows(counted), loss_rows(with_rope), score_rows(with_rope, absolute))


if __name__ == '__main__':
    main()
