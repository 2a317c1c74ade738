"""The runs, the tables and the figure of results/plateau.md: tokens until a model uses their order.

    $ python results/plateau.py search      makes the runs of the search of the rates
    $ python results/plateau.py count       makes the counted runs at the rates found
    $ python results/plateau.py             prints the tables, writes results/plateau.png
    $ python results/plateau.py train config/results/plateau.py --seed=2       makes one run, as train.py does

1. the plan: sizes, systems, seeds; the order of the runs
2. a run of train.py, stopped when its order gap stays; its row in plateau.jsonl
3. the rates of the search
4. the model: lognormal, with censored runs
5. the tables
6. the figure; main

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
from scipy.stats import chi2, norm, ttest_ind

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
GAP = 0.2                       # nats
LOSS = 5.8                      # nats: a threshold in place of the gap
TOKENS = 1024                   # a step
CAP = 4900 * TOKENS
# the second arm: one setting to its end
FULL = ['--schedule=linear', '--max_iters=4000', '--warmup_iters=400']
FULL_SYSTEMS = 'original', 'symmetric', 'pairwise', 'shared', 'none'
RATE = 2e-3                     # of the control and of the second arm
PRIMARY = 'symmetric', 'pairwise_unit'
WITH_SLOPE = 'original', 'symmetric', 'pairwise', 'pairwise_unit'       # `shared` has no T at 2 x 64


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
    rates = {(size, system): runs.best_rate(searched(rows, size, system), f'{system} at {size}')
             for size, system in itertools.product(SIZES, SEARCHED)}
    plans = []
    for seed in SEEDS:
        of_seed = [Plan('count', size, system, seed, rate) for (size, system), rate in rates.items()]
        if seed in CONTROL_SEEDS:
            of_seed += [Plan('count', size, 'none', seed, RATE) for size in SIZES]
        of_seed += [Plan('full', '2 x 128', system, seed, RATE) for system in FULL_SYSTEMS]
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
    return plan.arm != 'full' and math.isfinite(tokens_to_gap(validations))


def make(plan):
    """Run train.py until may_end(), or to its end; append its row."""
    folder = os.path.join(OUT, plan.name)
    command = [sys.executable, __file__, 'train', *plan.command[1:]]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    started = time.time()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None and not may_end(plan, read_validations(folder)):
                time.sleep(1)
        finally:
            process.terminate()                         # it saves a checkpoint and ends
    validations = read_validations(folder)
    if process.returncode and not may_end(plan, validations):
        sys.exit(f'plateau.py: {plan.name} ended with status {process.returncode}')
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

def searched(rows, size, system):
    """{rate: (median of tokens, mean loss)} of the rates that have all seeds; the lowest is best"""
    found = {}
    here = rows[(rows['arm'] == 'search') & (rows['size'] == size) & (rows['system'] == system)]
    for rate, part in here.groupby('rate'):
        if len(part) == len(SEARCH_SEEDS):
            losses = [validations[-1][1] for validations in part['validations']]
            found[rate] = part['tokens'].median(), np.mean(losses)
    return found


# ---- 4. the model ----

def balanced(rows):
    """The rows of the first and of the second arm, of the seeds of which every run has been made."""
    unfinished = {plan.seed for plan in runs.without_row(count_plans(rows), rows)}
    counted = rows[(rows['arm'] != 'search') & ~rows['seed'].isin(unfinished)]
    return counted[counted['arm'] == 'count'], counted[counted['arm'] == 'full']


def size_axis(sizes):
    """log2 of the parameters in the blocks of `original`, less their mean over the three sizes."""
    logs = pd.Series({size: math.log2(parameters) for size, (_, parameters) in SIZES.items()})
    return (logs - logs.mean())[[*sizes]].to_numpy()


def line_columns(table):
    """The columns of log2 T = a + b x: a and b of each system.  x: size_axis()"""
    of_system = pd.get_dummies(table['system'], dtype=float)
    slopes = of_system.mul(size_axis(table['size']), axis=0)
    return pd.concat([of_system.add_prefix('a '), slopes.add_prefix('b ')], axis=1)


def bent_columns(table):
    """line_columns(), and a bend at the middle size that is the same for all systems."""
    return line_columns(table).assign(bend=(table['size'] == '2 x 128').astype(float))


def cell_columns(table):
    """The columns of log2 T = the mean of its cell."""
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
        logs = np.where(censored, norm.logsf(z), norm.logpdf(z) - values[-1])
        # minus the slope of each log in z
        slope = np.where(censored, np.exp(norm.logpdf(z) - norm.logsf(z)), z)
        of_deviation = slope * z - ~censored
        return -logs.sum(), -np.append(slope @ matrix / deviation, of_deviation.sum())

    start, *_ = np.linalg.lstsq(matrix, y, rcond=None)
    spread = (y - matrix @ start).std() + 1e-3
    found = minimize(loss, [*start, math.log(spread)], jac=True)
    return pd.Series(found.x[:-1], columns.columns), math.exp(found.x[-1]), -found.fun


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


def cell_means(counted, base=None):
    """{(system, size): (mean of log2 T, low, high, p)}; with a system as `base`: less its mean

    Not of cells of which half or more is censored.
    """
    table = counted.groupby(['system', 'size']).filter(lambda cell: math.isfinite(cell['tokens'].median()))
    columns = cell_columns(table)
    found = {}
    for system, size in itertools.product(SEARCHED, SIZES):
        if f'{system} {size}' in columns and system != base:
            of_base = f'{base} {size}' if base else None
            found[system, size] = profile(table, columns, f'{system} {size}', of_base)
    return found


def medians(counted, base=None):
    """{(system, size): (median T, low, high)} in million tokens; with a system as `base`: over its T"""
    unit = 1 if base else 1e6
    return {cell: tuple(2 ** value / unit for value in found)
            for cell, (*found, _) in cell_means(counted, base).items()}


def with_slope(counted):
    return counted[counted['system'].isin(WITH_SLOPE)]


def contrasts(counted, columns_of=line_columns, fitted=WITH_SLOPE):
    """{system: (slope less that of `original`, low, high, p)}, by the model with a line for each system

    fitted  the systems that the model has: they share its deviation
    """
    table = counted[counted['system'].isin(fitted)]
    columns = columns_of(table)
    return {system: profile(table, columns, f'b {system}', 'b original') for system in WITH_SLOPE[1:]}


# ---- 5. the tables ----

def print_cells(title, systems, cells):
    """A line for each system, a column for each size.  cells: {(system, size): text}"""
    lines = [[f'`{system}`', *(cells.get((system, size), '-') for size in SIZES)] for system in systems]
    print_table(title, ['system', *SIZES], lines)


def print_search(rows):
    cells = {}
    for system, size in itertools.product(SEARCHED, SIZES):
        of_rates = [f'{rate:g}: {tokens / 1e6:.2f}'
                    for rate, (tokens, _) in searched(rows, size, system).items() if math.isfinite(tokens)]
        cells[system, size] = ', '.join(of_rates) or '-'
    print_cells('Search: rate: median of million tokens; rates with a gap in both seeds', SEARCHED, cells)


def print_counts(counted):
    cells = {}
    reached = counted.groupby(['system', 'size']).filter(lambda cell: np.isfinite(cell['tokens']).any())
    for cell, tokens in reached.groupby(['system', 'size'])['tokens']:
        millions = tokens.median() / 1e6, tokens.min() / 1e6, tokens.max() / 1e6
        cells[cell] = shown_interval(millions, sign='').replace('inf', '-')
    print_cells('Million tokens until the gap: median (first to last run); -: none', SEARCHED, cells)


def print_losses(counted):
    """The loss at T, and the tokens until a threshold of the loss in place of the gap."""
    at_gap, below = [], []
    for validations, tokens in zip(counted['validations'], counted['tokens'], strict=True):
        losses = {step * TOKENS: loss for step, loss, _ in validations}
        at_gap.append(losses.get(tokens, math.nan))
        below.append(tokens_to_gap([(step, loss, LOSS - loss) for step, loss, _ in validations], 0) / 1e6)
    table = counted.assign(at_gap=at_gap, below=below)
    medians = table.groupby(['system', 'size'])[['at_gap', 'below']].median()
    lowest, highest = medians['at_gap'].min(), medians['at_gap'].max()
    print(f'\nMedian loss at the gap, over cells: {lowest:.2f} to {highest:.2f} nats')
    print(f'Median million tokens until {LOSS} nats or less:\n{medians["below"].unstack().round(2)}')


def print_ratios(counted):
    cells = {cell: shown_interval(ratio, sign='') for cell, ratio in medians(counted, 'original').items()}
    print_cells('T over T of `original` (95 %)', SEARCHED[1:], cells)
    p = pd.Series({cell: p for cell, (*_, p) in cell_means(counted, 'original').items()})
    adjusted = p.groupby(level=1, group_keys=False).apply(holm)
    print_cells("Holm's p over the systems of a size", SEARCHED[1:], adjusted.map(shown_p))


def print_slopes(counted):
    table = with_slope(counted)
    columns = line_columns(table)
    lines = [[f'`{system}`', shown_interval(profile(table, columns, f'b {system}'))] for system in WITH_SLOPE]
    print_table('Doublings of T for each doubling of the parameters in the blocks of `original`',
                ['system', 'slope (95 %)'], lines)


def print_contrasts(by_fit):
    """The primary contrasts with Holm's p of the two.  by_fit: {words on a fit: as of contrasts()}"""
    lines = []
    for words, of_systems in by_fit.items():
        adjusted = holm(pd.Series({system: of_systems[system][3] for system in PRIMARY}))
        line = [words]
        for system in PRIMARY:
            line += [shown_interval(of_systems[system]), shown_p(adjusted[system])]
        lines.append(line)
    header = ['fit']
    for system in PRIMARY:
        header += [f'`{system}`', "Holm's p"]
    print_table('The primary contrasts by fit', header, lines)


def print_fits(counted):
    """Does the verdict depend on the plan's model, or on two runs?"""
    of_original = counted[(counted['system'] == 'original') & (counted['size'] == '4 x 128')]
    latest = of_original['tokens'].nlargest(2).index
    print_contrasts({
        'as planned': contrasts(counted),
        'with `shared`, all censored at 2 x 64': contrasts(counted, fitted=SEARCHED),
        'a bend at 2 x 128, the same for all systems': contrasts(counted, bent_columns),
        'without the two latest runs of `original` at 4 x 128': contrasts(counted.drop(latest)),
    })


def print_cell_model(counted):
    """Whether lines say as much as a mean for each cell; how far apart two runs of one cell are."""
    table = with_slope(counted)
    _, _, of_lines = fit(table, line_columns(table))
    _, deviation, of_cells = fit(table, cell_columns(table))
    freedom = len(WITH_SLOPE) * (len(SIZES) - 2)                        # a line has two numbers
    print(f'\nA mean for each cell against lines: p {chi2.sf(2 * (of_cells - of_lines), freedom):.2g}')
    of_cell = np.log2(table['tokens']).groupby([table['system'], table['size']]).std()
    ratio = 2 ** (norm.ppf(0.975) * math.sqrt(2) * deviation)           # of two independent runs
    print(f'Deviation of log2 T: {deviation:.2f}; by cell: {of_cell.min():.2f} to {of_cell.max():.2f}')
    print(f'Two runs of one cell (95 %): {1 / ratio:.2f} to {ratio:.2f}')


def print_full(full):
    """The second arm: last losses, and differences from `original`, with one deviation."""
    ends = full.assign(loss=[validations[-1][1] for validations in full['validations']])
    losses = ends.pivot(index='system', columns='seed', values='loss')
    learned = losses.drop(index='none')         # without positions the deviation is another one
    differences = compare(learned, 'original', learned.index.drop('original'))
    lines = []
    for system in FULL_SYSTEMS:
        line = [f'`{system}`', shown_mean(losses.loc[system], 3), '', '']
        if system in differences.index:
            welch = ttest_ind(losses.loc[system], losses.loc['original'], equal_var=False)
            line[2:] = shown_difference(differences.loc[system], 3), shown_p(welch.pvalue)
        lines.append(line)
    print_table("Second arm: mean (deviation) of the last loss, less `original` (Dunnett's p)",
                ['system', 'last loss', 'less `original`', "Welch's p"], lines)


# ---- 6. the figure; main ----

# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {'original': '#000000', 'symmetric': '#E69F00', 'pairwise': '#0072B2', 'pairwise_unit': '#56B4E9',
           'shared': '#D55E00'}


def draw(found):
    """Medians with their intervals.  found: as of medians()"""
    from matplotlib.figure import Figure
    figure = Figure((9, 6.2), layout='constrained')
    axis = figure.add_subplot(xscale='log', yscale='log')
    for number, (system, colour) in enumerate(COLOURS.items()):
        sizes = [size for size in SIZES if (system, size) in found]
        beside = 1.04 ** (number - 2)                   # so that intervals stand beside each other
        x = [SIZES[size][1] * beside for size in sizes]
        middle, low, high = np.array([found[system, size] for size in sizes]).T
        axis.errorbar(x, middle, (middle - low, high - middle), color=colour, marker='o', linewidth=2,
                      capsize=4, label=system)
    labels = [f'{size}\n{parameters:,}' for size, (_, parameters) in SIZES.items()]
    axis.set_xticks([parameters for _, parameters in SIZES.values()], labels)
    axis.set_yticks([1, 1.5, 2, 2.5, 3], ['1', '1.5', '2', '2.5', '3'])
    axis.minorticks_off()
    axis.set_xlabel('layers x width; parameters in the blocks of `original`', fontsize=15)
    axis.set_ylabel('million tokens until the order gap', fontsize=15)
    axis.tick_params(labelsize=14)
    axis.spines[['top', 'right']].set_visible(False)
    axis.legend(fontsize=14)
    figure.savefig(FIGURE, dpi=100)


def main():
    command, *words = sys.argv[1:] or ['']
    plans_of = {'search': search_plans, 'count': count_plans}
    if command == 'train':
        train_with_gap(words)
    elif command in plans_of and not words:
        runs.make_all(plans_of[command], read_rows, make, OUT)
    elif command:
        sys.exit('plateau.py: search, count, train, or nothing')
    else:
        rows = read_rows()
        print_search(rows)
        counted, full = balanced(rows)
        if counted['seed'].nunique() < 2:
            sys.exit('plateau.py: no intervals before all runs of two seeds are made')
        print_counts(counted)
        print_losses(counted)
        print_ratios(counted)
        print_slopes(counted)
        print_fits(counted)
        print_cell_model(counted)
        print_full(full)
        draw(medians(counted))


if __name__ == '__main__':
    main()
