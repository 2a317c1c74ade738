"""The runs, the tables and the figure of results/plateau.md: tokens until a model uses their order.

    $ python results/plateau.py search 0/2      makes the runs of the search of the rates; 1/2: the others
    $ python results/plateau.py count 0/2       makes the counted runs at the rates found; 1/2: the others
    $ python results/plateau.py                 prints the tables, writes results/plateau.png

1. the plan: sizes, systems, seeds; the order of the runs
2. a run of train.py, stopped when its order gap stays; its row in plateau.jsonl
3. the rates of the search
4. the model: lognormal, with censored runs
5. the tables and the figure
6. main

A repeated command goes on with the runs that have no row yet, and each run with its newest checkpoint.
Needs scipy, and for the figure matplotlib: pip install -r requirements-dev.txt
"""
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
import zlib
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize
from scipy.stats import chi2, norm
from study import HERE, holm, print_table

sys.path.insert(0, os.path.dirname(HERE))
import train

ROWS = os.path.join(HERE, 'plateau.jsonl')
FIGURE = os.path.join(HERE, 'plateau.png')

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
FIRST_RATES = 1e-3, 2e-3, 4e-3
FURTHEST_RATES = 1.25e-4, 3.2e-2
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
        rates = sorted({*FIRST_RATES, *searched_rates(rows, size, system)})
        further = further_rate(rows, size, system)
        if further:
            rates.append(further)
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

def tokens_to_gap(validations):
    """Tokens at the first of two validations in a row whose gap is GAP or more, or None.

    validations  [(step, loss, gap), ...]
    """
    for (step, _, gap), (_, _, following) in itertools.pairwise(validations):
        if min(gap, following) >= GAP:
            return step * TOKENS
    return None


def read_validations(folder):
    lines = [line for line in train.read_metrics(folder) if line['kind'] == 'val']
    return [(line['step'], line['loss'], line['gap']) for line in lines]


def make(plan):
    """Run train.py, up to the gap in the first arm, to its end in the second; append its row."""
    folder = os.path.join('out', 'plateau', plan.name)
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    started = time.time()
    process = subprocess.Popen([sys.executable, *plan.command], env=environment, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            time.sleep(1)
            if plan.arm != 'full' and tokens_to_gap(read_validations(folder)):
                process.terminate()                     # it saves a checkpoint and ends
                process.wait()
    finally:
        process.terminate()
        process.wait()
    validations = read_validations(folder)
    reached = tokens_to_gap(validations)
    if process.returncode and not (reached and plan.arm != 'full'):
        sys.exit(f'plateau.py: {plan.name} ended with status {process.returncode}')
    with open(os.path.join(folder, 'run.json')) as file:
        revision = json.load(file)[-1]['revision']
    row = {**plan._asdict(), 'tokens': reached, 'minutes': round((time.time() - started) / 60, 1),
           'machine': machine(), 'revision': revision,
           'validations': [[step, round(loss, 4), round(gap, 4)] for step, loss, gap in validations]}
    with open(ROWS, 'a') as file:
        file.write(json.dumps(row) + '\n')
    print(plan.name, f'{reached:,} tokens' if reached else 'no gap', flush=True)


def machine():
    """Name of the processor."""
    with open('/proc/cpuinfo') as file:
        names = [line.partition(':')[2].strip() for line in file if line.startswith('model name')]
    return names[0] if names else platform.processor()


def read_rows():
    """Rows of finished runs, a table with the columns of Plan and of make()."""
    if not os.path.exists(ROWS):
        return pd.DataFrame(columns=[*Plan._fields, 'tokens', 'machine', 'validations'])
    with open(ROWS) as file:
        return pd.DataFrame([json.loads(line) for line in file])


def make_all(plans_of, part):
    """Make every n-th run that has no row, until none is left.  plans_of: rows -> Plans"""
    index, n = map(int, part.split('/'))
    while True:
        rows = read_rows()
        done = set(rows[[*Plan._fields]].itertuples(index=False, name=None))
        # by its name: while the search asks for further rates, places in the list change
        mine = [plan for plan in plans_of(rows) if zlib.crc32(plan.name.encode()) % n == index]
        left = [plan for plan in mine if tuple(plan) not in done]
        if not left:
            return
        make(left[0])


# ---- 3. the rates ----

def searched(rows, size, system):
    """{rate: (median of tokens, mean loss)} of the rates that have all their seeds; inf: no gap."""
    here = rows[(rows['arm'] == 'search') & (rows['size'] == size) & (rows['system'] == system)]
    found = {}
    for rate, part in here.groupby('rate'):
        if len(part) == len(SEARCH_SEEDS):
            losses = [validations[-1][1] for validations in part['validations']]
            found[rate] = part['tokens'].astype(float).fillna(math.inf).median(), np.mean(losses)
    return found


def searched_rates(rows, size, system):
    return [*searched(rows, size, system)]


def best_rate(rows, size, system):
    """The rate of the lowest median; of several, as if all are infinite, that of the lowest loss."""
    found = searched(rows, size, system)
    if not {*FIRST_RATES} <= {*found}:
        sys.exit(f'plateau.py: the search of {system} at {size} has not ended')
    return min(found, key=found.get)


def further_rate(rows, size, system):
    """A rate beyond the outermost one, if that is the best so far, or None."""
    found = searched(rows, size, system)
    if not {*FIRST_RATES} <= {*found}:
        return None
    best = best_rate(rows, size, system)
    lowest, highest = FURTHEST_RATES
    if best == min(found) and best > lowest:
        return best / 2
    if best == max(found) and best < highest:
        return best * 2
    return None


# ---- 4. the model ----

def size_axis(sizes):
    """log2 of the parameters in the blocks of `original`, less their mean over the three sizes."""
    logs = {size: math.log2(parameters) for size, (_, parameters) in SIZES.items()}
    middle = np.mean([*logs.values()])
    return np.array([logs[size] - middle for size in sizes])


def design(table):
    """The columns of log2 T = a + b x: a and b of each system, and a difference of each further machine.

    x: size_axis()
    """
    x = size_axis(table['size'])
    columns = {}
    for system in sorted(table['system'].unique()):
        is_system = (table['system'] == system).to_numpy(float)
        columns['a', system] = is_system
        columns['b', system] = is_system * x
    for machine in sorted(table['machine'].unique())[1:]:
        columns['machine', machine] = (table['machine'] == machine).to_numpy(float)
    return pd.DataFrame(columns)


def fit(table, columns, known=0.0):
    """(coefficients by column, deviation, log of the likelihood) at the maximum of the likelihood

    A normal deviation from the line; a run without the gap says only that T is above CAP.
    known  (runs,): a part of log2 T that is given
    """
    censored = table['tokens'].isna().to_numpy()
    y = np.log2(table['tokens'].astype(float).fillna(CAP).to_numpy()) - known
    matrix = columns.to_numpy()

    def loss(values):
        deviation = math.exp(values[-1])
        z = (y - matrix @ values[:-1]) / deviation
        logs = np.where(censored, norm.logsf(z), norm.logpdf(z) - math.log(deviation))
        return -logs.sum()

    start, *_ = np.linalg.lstsq(matrix, y, rcond=None)
    spread = (y - matrix @ start).std() + 1e-3
    found = minimize(loss, [*start, math.log(spread)], method='BFGS')
    coefficients = pd.Series(found.x[:-1], columns.columns)
    return coefficients, math.exp(found.x[-1]), -found.fun


def slope_contrast(table, system):
    """(slope of the system less that of `original`, low, high, p), by the ratio of likelihoods."""
    columns = design(table)
    ours, theirs = ('b', system), ('b', 'original')
    coefficients, _, highest = fit(table, columns)
    difference = coefficients[ours] - coefficients[theirs]

    def statistic(value):                               # of the model in which the difference is `value`
        joined = columns.drop(columns=[ours])
        joined[theirs] = columns[theirs] + columns[ours]
        _, _, likelihood = fit(table, joined, value * columns[ours].to_numpy())
        return 2 * (highest - likelihood)

    def outside(value):
        return statistic(value) - chi2.ppf(0.95, 1)

    low = brentq(outside, difference - 5, difference, xtol=1e-4)
    high = brentq(outside, difference, difference + 5, xtol=1e-4)
    return difference, low, high, chi2.sf(max(0.0, statistic(0.0)), 1)


def censored_share(table):
    """Share of runs without the gap, (systems, sizes)"""
    return table.assign(censored=table['tokens'].isna()).pivot_table(
        index='system', columns='size', values='censored', sort=False)


# ---- 5. the tables and the figure ----

def shown_tokens(tokens):
    """Million tokens of runs, sorted; those without the gap as the cap."""
    values = sorted(tokens.astype(float).fillna(math.inf))
    return ' '.join('-' if math.isinf(value) else f'{value / 1e6:.2f}' for value in values)


def print_search(rows):
    lines = []
    for size, system in itertools.product(SIZES, SEARCHED):
        found = searched(rows, size, system)
        cells = []
        for rate in sorted(found):
            tokens, loss = found[rate]
            cells.append(f'{rate:g}: {tokens / 1e6:.2f} ({loss:.2f})')
        lines.append([system, size, '; '.join(cells)])
    print_table('Search: rate: median of million tokens (last loss)', ['system', 'size', 'rates'], lines)


def print_counts(counted):
    lines = []
    for system in SYSTEMS:
        cells = [shown_tokens(counted[(counted['system'] == system) & (counted['size'] == size)]['tokens'])
                 for size in SIZES]
        lines.append([system, *cells])
    print_table('Million tokens until the gap, each seed', ['system', *SIZES], lines)


def print_slopes(counted):
    """The two primary contrasts; a bound where more than half of the runs of a cell are censored."""
    shares = censored_share(counted)
    usable = [system for system in SEARCHED if shares.loc[system].max() <= 0.5]
    table = counted[counted['system'].isin(usable)]
    lines, p = [], {}
    for system in SEARCHED[1:]:
        if system not in usable or 'original' not in usable:
            lines.append([system, 'more than half of a cell has no gap: no slope', ''])
            continue
        difference, low, high, p[system] = slope_contrast(table, system)
        lines.append([system, f'{difference:+.2f} ({low:+.2f} to {high:+.2f})', f'{p[system]:.3g}'])
    adjusted = holm(pd.Series({system: p.get(system, 1.0) for system in PRIMARY}))
    for line in lines:
        line.append(f'{adjusted[line[0]]:.3g}' if line[0] in PRIMARY and line[0] in p else '')
    print_table('Slope of log2 (T / T of `original`) for each doubling of the blocks',
                ['system', 'difference (95 %)', 'p', 'Holm, of the two primary ones'], lines)


def print_full(rows):
    full = rows[rows['arm'] == 'full']
    lines = []
    for system in FULL_SYSTEMS:
        ends = [validations[-1] for validations in full[full['system'] == system]['validations']]
        if ends:
            _, losses, gaps = zip(*ends, strict=True)
            lines.append([system, len(ends), f'{np.mean(losses):.3f} ({np.std(losses, ddof=1):.3f})',
                          f'{np.mean(gaps):.3f} ({np.std(gaps, ddof=1):.3f})'])
    print_table('Second arm: last loss and gap', ['system', 'runs', 'loss', 'gap'], lines)


def draw(counted):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('plateau.py: no figure without matplotlib', file=sys.stderr)
        return
    figure = Figure((8, 5.5), layout='constrained')
    axis = figure.add_subplot(xscale='log', yscale='log', xlabel='parameters in the blocks of `original`',
                              ylabel='million tokens until the order gap')
    for system in SEARCHED:
        points = []
        for size, (_, parameters) in SIZES.items():
            cell = counted[(counted['system'] == system) & (counted['size'] == size)]['tokens']
            tokens = np.sort(cell.astype(float).fillna(math.inf)) / 1e6
            if len(tokens) and math.isfinite(np.median(tokens)):
                points.append((parameters, np.median(tokens), tokens[0], tokens[-1]))
        if points:
            x, middle, low, high = np.array(points).T
            axis.plot(x, middle, 'o-', label=system)
            axis.fill_between(x, low, np.minimum(high, CAP / 1e6), alpha=0.12)
    axis.legend()
    figure.savefig(FIGURE, dpi=100)


# ---- 6. main ----

def main():
    if sys.argv[1:2] == ['search'] and len(sys.argv) == 3:
        make_all(search_plans, sys.argv[2])
        return
    if sys.argv[1:2] == ['count'] and len(sys.argv) == 3:
        make_all(count_plans, sys.argv[2])
        return
    if sys.argv[1:]:
        sys.exit('plateau.py: search I/N, count I/N, or nothing')
    rows = read_rows()
    counted = rows[rows['arm'] == 'count']
    print_search(rows)
    print_counts(counted)
    print_slopes(counted)
    print_full(rows)
    draw(counted)


if __name__ == '__main__':
    main()
