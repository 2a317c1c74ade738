"""The runs, the tables and the figure of results/plateau.md: tokens until a model uses their order.

    $ python results/plateau.py search      makes the runs of the search of the rates
    $ python results/plateau.py count       makes the counted runs at the rates found
    $ python results/plateau.py             prints the tables, writes results/plateau.png
    $ python results/plateau.py train config/results/plateau.py --seed=2       makes one run, as train.py does

1. the plan: sizes, systems, seeds; the order of the runs
2. a run of train.py, stopped when its order gap stays; its row in plateau.jsonl
3. the rates of the search
4. the model: lognormal, with censored runs
5. the tables and the figure
6. main

Started once for each core, the same command shares the runs among its processes. Repeated, it goes on with
the runs that have no row yet, and each run with its newest checkpoint.
Needs scipy, and for the figure matplotlib: pip install -r requirements-dev.txt
"""
import itertools
import math
import os
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pandas as pd
import runs
from analysis import (HERE, compare, holm, print_table, shown_difference, shown_interval, shown_mean,
                      shown_p)
from scipy.optimize import brentq, minimize
from scipy.stats import chi2, norm

sys.path.insert(0, os.path.dirname(HERE))
import train
from configurator import run

ROWS = os.path.join(HERE, 'plateau.jsonl')
FIGURE = os.path.join(HERE, 'plateau.png')
OUT = os.path.join('out', 'plateau')

# ---- 1. the plan ----

SIZES = {                       # knobs, and parameters in the blocks of `original`
    '2 x 64': (['--n_embd=64', '--n_inner=128'], 66_944),
    '2 x 128': ([], 264_960),
    '4 x 128': (['--n_layer=4'], 529_920),
}
SYSTEMS = {
    'original': [],
    'symmetric': ['--attention=symmetric'],
    'pairwise': ['--attention=pairwise'],
    'pairwise_unit': ['--attention=pairwise', '--pair_init=unit'],      # as in its authors' code
    'shared': ['--attention=shared'],
    'none': ['--position=none'],                                        # the control
}
SEARCHED = [system for system in SYSTEMS if system != 'none']
SEEDS = range(1, 9)
CONTROL_SEEDS = 1, 2
SEARCH_SEEDS = 101, 102
CONTROL_RATE = 2e-3
GAP = 0.2                       # nats
TOKENS = 1024                   # a step
CAP = 4900 * TOKENS
# the second arm: one setting to its end
FULL = ['--schedule=linear', '--max_iters=4000', '--warmup_iters=400']
FULL_SYSTEMS = 'original', 'symmetric', 'pairwise', 'shared', 'none'
FULL_RATE = 2e-3
PRIMARY = 'symmetric', 'pairwise_unit'


class Plan(NamedTuple):
    """A run that is to be made."""
    arm: str                    # search, count or full
    size: str
    system: str
    seed: int
    rate: float

    @property
    def name(self):
        size = self.size.replace(' ', '')
        return f'{self.arm}/{self.system}_{size}_{self.rate:g}-{self.seed}'

    @property
    def command(self):
        knobs = [*SIZES[self.size][0], *SYSTEMS[self.system]]
        if self.arm == 'full':
            knobs += FULL
        return ['train.py', 'config/results/plateau.py', f'--seed={self.seed}',
                f'--learning_rate={self.rate:g}', f'--out_dir=out/plateau/{self.name}', *knobs]


def search_plans(rows):
    """The runs of the search so far: three rates, and further ones while the best is the outermost.

    `original` at the largest size comes first: if it did not leave within CAP, the sizes would be too large.
    """
    plans = []
    for system, size in itertools.product(SEARCHED, reversed(SIZES)):
        rates = runs.rates_to_try(searched(rows, size, system))
        plans += [Plan('search', size, system, seed, rate) for rate in rates for seed in SEARCH_SEEDS]
    return plans


def count_plans(rows):
    """All counted runs: seed after seed, so that the design is balanced wherever they end."""
    plans = []
    for seed in SEEDS:
        of_seed = [Plan('count', size, system, seed, best_rate(rows, size, system))
                   for size, system in itertools.product(SIZES, SEARCHED)]
        if seed in CONTROL_SEEDS:
            of_seed += [Plan('count', size, 'none', seed, CONTROL_RATE) for size in SIZES]
        of_seed += [Plan('full', '2 x 128', system, seed, FULL_RATE) for system in FULL_SYSTEMS]
        order = np.random.default_rng(seed).permutation(len(of_seed))
        plans += [of_seed[index] for index in order]
    return plans


# ---- 2. a run ----

class WithoutOrder(train.Loader):
    """The samples of a Loader, but the visible tokens of each row are permuted.

    A sample is permuted in the same way each time. Predicted and special tokens stay where they are. How much
    the loss rises tells how much the model depends on the order of tokens: not at all without positions.
    """

    def batch(self, samples):
        batch = super().batch(samples)
        ids = batch['ids'].numpy()                      # (B, T), the memory of the tensor
        for row, sample in enumerate(samples):
            is_visible = ~self.masker.is_special[ids[row]]
            is_predicted = batch['weights'][row] > 0    # (k,)
            is_visible[batch['positions'][row][is_predicted]] = False
            places = np.flatnonzero(is_visible)
            rng = np.random.default_rng([self.seed, sample, 1])         # not the numbers of its masks
            ids[row, places] = ids[row, rng.permutation(places)]
        return batch


def make_loaders(config, plain=train.make_loaders):
    """As train.py's, with one more validation, `permuted`: the run's own rows without their order."""
    meta, loader, val_loaders = plain(config)
    own = val_loaders['']
    return meta, loader, {**val_loaders, 'permuted': WithoutOrder(own.rows, own.masker, own.seed)}


def train_with_gap(words):
    """train.py with these words on its command line; its log has permuted_loss."""
    train.make_loaders = make_loaders
    sys.argv = ['train.py', *words]
    run(train.main)


def tokens_to_gap(validations, gap=GAP):
    """Tokens at the first of two validations in a row whose gaps are `gap` or more; inf without them.

    validations  [(step, loss, gap), ...]
    """
    for (step, _, one), (_, _, two) in itertools.pairwise(validations):
        if min(one, two) >= gap:
            return step * TOKENS
    return math.inf


def read_validations(folder):
    lines = [line for line in train.read_metrics(folder) if line['kind'] == 'val']
    return [(line['step'], line['loss'], line['permuted_loss'] - line['loss']) for line in lines]


def may_end(plan, validations):
    """Whether all that is wanted of a run is known."""
    if plan.arm == 'full' or not validations:
        return False
    if math.isfinite(tokens_to_gap(validations)):
        return True
    return plan.arm == 'search' and is_beaten(plan, validations, read_rows())


def make(plan):
    """Run train.py until may_end(), or to its end; append its row."""
    folder = os.path.join(OUT, plan.name)
    command = [sys.executable, __file__, 'train', *plan.command[1:]]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    started = time.time()
    ends_early = False
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and not ends_early:
                time.sleep(1)
                ends_early = may_end(plan, read_validations(folder))
        finally:
            process.terminate()                         # it saves a checkpoint and ends
    if process.returncode and not ends_early:
        sys.exit(f'plateau.py: {plan.name} ended with status {process.returncode}')
    validations = read_validations(folder)
    reached = tokens_to_gap(validations)
    tokens = reached if math.isfinite(reached) else None
    runs.append_row(ROWS, {
        **plan._asdict(), 'tokens': tokens, 'minutes': round((time.time() - started) / 60, 1),
        'machine': runs.machine(), 'revision': runs.revision_of(folder),
        'validations': [[step, round(loss, 4), round(gap, 4)] for step, loss, gap in validations]})
    print(plan.name, f'{tokens:,} tokens' if tokens else 'no gap', flush=True)


def read_rows():
    """Rows of finished runs, a table with the columns of Plan and of make(); tokens: inf without a gap."""
    rows = runs.read_rows(ROWS, [*Plan._fields, 'tokens', 'validations'])
    return rows.assign(tokens=rows['tokens'].astype(float).fillna(math.inf))


# ---- 3. the rates ----

def of_search(rows, size, system):
    return rows[(rows['arm'] == 'search') & (rows['size'] == size) & (rows['system'] == system)]


def searched(rows, size, system):
    """{rate: (median of tokens, mean loss)} of the rates that have all their seeds"""
    found = {}
    for rate, part in of_search(rows, size, system).groupby('rate'):
        if len(part) == len(SEARCH_SEEDS):
            losses = [validations[-1][1] for validations in part['validations']]
            found[rate] = part['tokens'].median(), np.mean(losses)
    return found


def best_rate(rows, size, system):
    """The rate of the lowest median; of several, as if all are infinite, that of the lowest loss."""
    return runs.best_rate(searched(rows, size, system), f'{system} at {size}')


def is_beaten(plan, validations, rows):
    """Whether the rate of a run of the search can no longer have the lowest median: the choice is the same.

    The run has no gap so far, so that its T is the last validation's or more.
    """
    at_least = validations[-1][0] * TOKENS
    others = of_search(rows, plan.size, plan.system)
    for row in others[others['rate'] == plan.rate].itertuples():
        at_least += row.validations[-1][0] * TOKENS if math.isinf(row.tokens) else row.tokens
    # without a row a seed may have any T; the median of two seeds is their mean
    lowest_median = at_least / len(SEARCH_SEEDS)
    of_rates = [tokens for tokens, _ in searched(rows, plan.size, plan.system).values()]
    return lowest_median > min(of_rates, default=math.inf)


# ---- 4. the model ----

def size_axis(sizes):
    """log2 of the parameters in the blocks of `original`, less their mean over the three sizes."""
    logs = {size: math.log2(parameters) for size, (_, parameters) in SIZES.items()}
    middle = np.mean([*logs.values()])
    return np.array([logs[size] - middle for size in sizes])


def line_columns(table):
    """The columns of log2 T = a + b x: a and b of each system.  x: size_axis()"""
    of_system = pd.get_dummies(table['system'], dtype=float)
    slopes = of_system.mul(size_axis(table['size']), axis=0)
    return pd.concat([of_system.add_prefix('a '), slopes.add_prefix('b ')], axis=1)


def bent_columns(table):
    """line_columns(), and a bend at the middle size that is the same for all systems."""
    _, middle, _ = SIZES
    return line_columns(table).assign(bend=(table['size'] == middle).astype(float))


def cell_columns(table):
    """The columns of log2 T = the mean of its cell, a system at a size."""
    return pd.get_dummies(table['system'] + ' ' + table['size'], dtype=float)


def fit(table, columns, known=0.0):
    """(coefficients by column, deviation, log of the likelihood) at the maximum of the likelihood

    A normal deviation from the line; a run without the gap says only that T is above CAP.
    known  (runs,): a part of log2 T that is given
    """
    censored = np.isinf(table['tokens'].to_numpy())
    y = np.log2(table['tokens'].clip(upper=CAP).to_numpy()) - known
    matrix = columns.to_numpy()

    def loss(values):
        """Minus the log of the likelihood, and its gradient.  values: coefficients, log of the deviation"""
        deviation = math.exp(values[-1])
        z = (y - matrix @ values[:-1]) / deviation
        logs = np.where(censored, norm.logsf(z), norm.logpdf(z) - math.log(deviation))
        # minus the slope of each log in z
        slope = np.where(censored, np.exp(norm.logpdf(z) - norm.logsf(z)), z)
        of_deviation = slope * z - ~censored
        return -logs.sum(), -np.append(slope @ matrix / deviation, of_deviation.sum())

    start, *_ = np.linalg.lstsq(matrix, y, rcond=None)
    spread = (y - matrix @ start).std() + 1e-3
    found = minimize(loss, [*start, math.log(spread)], jac=True, method='BFGS')
    coefficients = pd.Series(found.x[:-1], columns.columns)
    return coefficients, math.exp(found.x[-1]), -found.fun


def profile(table, columns, name, base=None):
    """(coefficient of a column, less that of `base` if given, low, high, p), by the ratio of likelihoods.

    low and high are the ends of its 95 % interval; p is that of 0.
    """
    if base:                                            # then the coefficient of `name` is the difference
        columns = columns.assign(**{base: columns[base] + columns[name]})
    coefficients, _, highest = fit(table, columns)
    estimate = coefficients[name]
    others = columns.drop(columns=name)

    def statistic(value):                               # of the model in which the coefficient is `value`
        _, _, likelihood = fit(table, others, value * columns[name].to_numpy())
        return 2 * (highest - likelihood)

    def outside(value):
        return statistic(value) - chi2.ppf(0.95, 1)

    low = brentq(outside, estimate - 5, estimate, xtol=1e-4)
    high = brentq(outside, estimate, estimate + 5, xtol=1e-4)
    return estimate, low, high, chi2.sf(max(0.0, statistic(0.0)), 1)


def balanced(rows):
    """The rows of the first and of the second arm, of the seeds of which every run has been made."""
    unfinished = {plan.seed for plan in runs.without_row(count_plans(rows), rows)}
    counted = rows[(rows['arm'] != 'search') & ~rows['seed'].isin(unfinished)]
    return counted[counted['arm'] == 'count'], counted[counted['arm'] == 'full']


def with_medians(counted):
    """The runs of the cells (a system at a size) of which at most half are censored; not the control's."""
    share = np.isinf(counted['tokens']).groupby([counted['system'], counted['size']]).transform('mean')
    return counted[(share <= 0.5) & (counted['system'] != 'none')]


def with_slopes(counted):
    """The runs of the systems of which with_medians() has every size."""
    table = with_medians(counted)
    sizes = table.groupby('system')['size'].transform('nunique')
    return table[sizes == len(SIZES)]


def medians(counted, base=None):
    """{(system, size): (median T, low, high)} by a mean of log2 T for each cell

    In million tokens; with a system as `base`: over its T.
    """
    table = with_medians(counted)
    columns = cell_columns(table)
    unit = 1 if base else 1e6
    found = {}
    for system, size in itertools.product(SEARCHED, SIZES):
        cell = f'{system} {size}'
        if cell in columns and system != base:
            estimate, low, high, _ = profile(table, columns, cell, base and f'{base} {size}')
            found[system, size] = 2 ** estimate / unit, 2 ** low / unit, 2 ** high / unit
    return found


def contrasts(counted, columns_of=line_columns):
    """{system: (slope less that of `original`, low, high, p)}, by the model with a line for each system"""
    table = with_slopes(counted)
    columns = columns_of(table)
    systems = [system for system in SEARCHED[1:] if f'b {system}' in columns]
    return {system: profile(table, columns, f'b {system}', 'b original') for system in systems}


def primary_p(of_systems):
    """Holm's p of the two primary contrasts.  of_systems: as of contrasts()"""
    return holm(pd.Series({system: of_systems[system][3] for system in PRIMARY}))


def other_contrasts(counted):
    """{another fit, which was not planned: as of contrasts()}: does the verdict depend on the plan's?"""
    alone = {}
    for system in PRIMARY:
        alone |= contrasts(counted[counted['system'].isin(['original', system])])
    is_late = (counted['system'] == 'original') & (counted['size'] == '4 x 128')
    late = counted['tokens'][is_late].nlargest(2)
    return {
        'as planned': contrasts(counted),
        'a bend at 2 x 128, the same for all systems': contrasts(counted, bent_columns),
        '`original` and the system alone': alone,
        'without the two latest runs of `original` at 4 x 128': contrasts(counted.drop(late.index)),
    }


# ---- 5. the tables and the figure ----

def print_search(rows):
    lines = []
    for size, system in itertools.product(SIZES, SEARCHED):
        cells = []
        for rate, (tokens, loss) in searched(rows, size, system).items():
            cells.append(f'{rate:g}: {shown_millions(tokens)} ({loss:.2f})')
        lines.append([f'`{system}`', size, '; '.join(cells)])
    print_table('Search: rate: median of million tokens (last loss)', ['system', 'size', 'rates'], lines)


def shown_millions(tokens):
    return '-' if math.isinf(tokens) else f'{tokens / 1e6:.2f}'


def print_cells(title, systems, cells, missing='-'):
    """A line for each system, a column for each size.  cells: {(system, size): text}"""
    lines = [[f'`{system}`', *(cells.get((system, size), missing) for size in SIZES)] for system in systems]
    print_table(title, ['system', *SIZES], lines)


def print_counts(counted):
    cells = {cell: ' '.join(map(shown_millions, sorted(tokens)))
             for cell, tokens in counted.groupby(['system', 'size'])['tokens']}
    print_cells('Million tokens until the gap, each seed, sorted; -: none', SYSTEMS, cells)


def print_medians(title, systems, found, missing):
    """found: as of medians()"""
    cells = {cell: shown_interval(of_cell, sign='') for cell, of_cell in found.items()}
    print_cells(title, systems, cells, missing)


def print_slopes(counted):
    """The slope of each system, and the contrasts, of which two are primary."""
    table = with_slopes(counted)
    columns = line_columns(table)
    of_systems = contrasts(counted)
    adjusted = primary_p(of_systems)
    lines = []
    for system in SEARCHED:
        line = [f'`{system}`', 'none: censored', '', '', '']
        if f'b {system}' in columns:
            line[1] = shown_interval(profile(table, columns, f'b {system}'))
        if system in of_systems:
            line[2:4] = shown_interval(of_systems[system]), f'{of_systems[system][3]:.3g}'
        if system in adjusted:
            line[4] = f'{adjusted[system]:.3g}'
        lines.append(line)
    print_table('Doublings of T for each doubling of the parameters in the blocks of `original`',
                ['system', 'slope (95 %)', 'less that of `original`', 'p', 'Holm, of the two primary ones'],
                lines)


def print_fit(table):
    """Do lines say as much as a mean for each cell?"""
    _, _, of_lines = fit(table, line_columns(table))
    _, _, of_bent = fit(table, bent_columns(table))
    _, _, of_cells = fit(table, cell_columns(table))
    freedom = table['system'].nunique() * (len(SIZES) - 2)              # a line has two numbers
    p_lines = chi2.sf(2 * (of_cells - of_lines), freedom)
    p_bent = chi2.sf(2 * (of_cells - of_bent), freedom - 1)
    print(f'\nA mean for each cell against lines: p {p_lines:.2g}; against lines with one bend for all: '
          f'p {p_bent:.2g}.')


def print_contrasts(by_fit):
    """The primary contrasts.  by_fit: {words on a fit: as of contrasts()}"""
    lines = []
    for words, of_systems in by_fit.items():
        adjusted = primary_p(of_systems)
        line = [words]
        for system in PRIMARY:
            line += [shown_interval(of_systems[system]), shown_p(adjusted[system])]
        lines.append(line)
    header = ['fit']
    for system in PRIMARY:
        header += [f'`{system}`', "Holm's p"]
    print_table('The primary contrasts by other fits', header, lines)


def print_deviations(counted):
    """Of log2 T over the seeds of a cell; then how far apart two runs are, by one deviation or another."""
    by_cell = np.log2(counted['tokens']).groupby([counted['system'], counted['size']]).std().dropna()
    print_cells('Deviation of log2 T; -: with a censored run', SEARCHED, by_cell.map('{:.2f}'.format))

    with_slope, with_median = with_slopes(counted), with_medians(counted)
    _, of_slopes, _ = fit(with_slope, cell_columns(with_slope))
    _, of_medians, _ = fit(with_median, cell_columns(with_median))
    deviations = {'one for the cells of systems with a slope': of_slopes,
                  'one for all cells with a median': of_medians,
                  '`original` at 4 x 128': by_cell['original', '4 x 128'],
                  '`pairwise` at 2 x 64': by_cell['pairwise', '2 x 64']}
    lines = []
    for words, deviation in deviations.items():
        ratio = 2 ** (norm.ppf(0.975) * math.sqrt(2) * deviation)       # of two independent runs
        lines.append([words, f'{deviation:.2f}', f'{1 / ratio:.2f} to {ratio:.2f}'])
    header = ['deviation of log2 T', '', 'T of one over T of the other (95 %)']
    print_table('Two runs of one cell', header, lines)


def print_full(full):
    """The second arm: last loss and gap, and differences from `original`, with one deviation."""
    ends = full[['system', 'seed']].copy()
    ends[['loss', 'gap']] = [validations[-1][1:] for validations in full['validations']]
    lines = {system: [f'`{system}`', str((full['system'] == system).sum())] for system in FULL_SYSTEMS}
    for measure in ('loss', 'gap'):
        scores = ends.pivot(index='system', columns='seed', values=measure)
        learned = scores.drop(index='none')     # runs without positions have no gap and another deviation
        differences = compare(learned, 'original', learned.index.drop('original'))
        for system, line in lines.items():
            line.append(shown_mean(scores.loc[system], 3))
            is_compared = system in differences.index
            line.append(shown_difference(differences.loc[system], 3) if is_compared else '')
    print_table("Second arm: mean (deviation), less `original` (Dunnett's p)",
                ['system', 'runs', 'last loss', 'less `original`', 'last gap', 'less `original`'],
                lines.values())


# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {'original': '#000000', 'symmetric': '#E69F00', 'pairwise': '#0072B2', 'pairwise_unit': '#56B4E9',
           'shared': '#D55E00'}


def draw(found):
    """Medians with their intervals; a triangle where more than half of the runs are censored.

    found: as of medians()
    """
    from matplotlib.figure import Figure
    figure = Figure((9, 6.2), layout='constrained')
    axis = figure.add_subplot(xscale='log', yscale='log')
    for number, system in enumerate(SEARCHED):
        beside = 1.04 ** (number - 2)                   # so that intervals stand beside each other
        points = []
        for size, (_, parameters) in SIZES.items():
            if (system, size) in found:
                points.append((parameters * beside, *found[system, size]))
            else:
                axis.plot(parameters * beside, CAP / 1e6, '^', color=COLOURS[system], markersize=10)
        x, middle, low, high = np.array(points).T
        axis.errorbar(x, middle, (middle - low, high - middle), color=COLOURS[system], marker='o',
                      linewidth=2, capsize=4, label=system)
    labels = [f'{size}\n{parameters:,}' for size, (_, parameters) in SIZES.items()]
    axis.set_xticks([parameters for _, parameters in SIZES.values()], labels, fontsize=14)
    axis.set_xticks([], minor=True)
    axis.set_xlabel('layers x width; parameters in the blocks of `original`', fontsize=15)
    axis.set_ylabel('million tokens until the order gap', fontsize=15)
    axis.yaxis.set_major_formatter('{x:g}')
    axis.yaxis.set_minor_formatter('{x:g}')
    axis.tick_params(labelsize=13)
    axis.spines[['top', 'right']].set_visible(False)
    axis.legend(fontsize=14)
    figure.savefig(FIGURE, dpi=100)


# ---- 6. main ----

def main():
    plans_of = {'search': search_plans, 'count': count_plans}
    command, *words = sys.argv[1:] or ['']
    if command in plans_of and not words:
        runs.make_all(plans_of[command], read_rows, make, OUT)
        return
    if command == 'train':
        train_with_gap(words)
        return
    if command:
        sys.exit('plateau.py: search, count, train, or nothing')
    rows = read_rows()
    print_search(rows)
    counted, full = balanced(rows)
    if counted['seed'].nunique() < 2:
        sys.exit('plateau.py: no intervals before all runs of two seeds are made')
    print_counts(counted)
    found = medians(counted)
    title = 'Million tokens until the gap: median by the model (95 %)'
    print_medians(title, SEARCHED, found, f'above {CAP / 1e6:.2f}')
    print_medians('T over T of `original` (95 %)', SEARCHED[1:], medians(counted, 'original'), '-')
    print_slopes(counted)
    print_fit(with_slopes(counted))
    print_contrasts(other_contrasts(counted))
    print_deviations(counted)
    print_full(full)
    draw(found)


if __name__ == '__main__':
    main()
