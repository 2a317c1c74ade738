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
import contextlib
import fcntl
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import brentq, minimize
from scipy.stats import chi2, norm
from study import HERE, compare, holm, print_table, shown_p

sys.path.insert(0, os.path.dirname(HERE))
import train
from configurator import run

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
    return [(line['step'], line['loss'], line['permuted_loss'] - line['loss']) for line in lines]


def may_end(plan, validations):
    """Whether all that is wanted of a run is known."""
    if plan.arm == 'full' or not validations:
        return False
    if tokens_to_gap(validations):
        return True
    return plan.arm == 'search' and is_beaten(plan, validations, read_rows())


def make(plan):
    """Run train.py until may_end(), or to its end; append its row."""
    folder = os.path.join('out', 'plateau', plan.name)
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    started = time.time()
    ends_early = False
    process = subprocess.Popen([sys.executable, __file__, 'train', *plan.command[1:]], env=environment,
                               stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            time.sleep(1)
            ends_early = may_end(plan, read_validations(folder))
            if ends_early:
                process.terminate()                     # it saves a checkpoint and ends
                process.wait()
    finally:
        process.terminate()
        process.wait()
    if process.returncode and not ends_early:
        sys.exit(f'plateau.py: {plan.name} ended with status {process.returncode}')
    validations = read_validations(folder)
    reached = tokens_to_gap(validations)
    with open(os.path.join(folder, 'launches.jsonl')) as file:
        *_, launch = file
    revision = json.loads(launch)['revision']
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


def without_row(plans):
    """The plans whose run has not been made."""
    done = set(read_rows()[[*Plan._fields]].itertuples(index=False, name=None))
    return [plan for plan in plans if tuple(plan) not in done]


def make_all(plans_of):
    """Make all runs that have no row, the first one first; processes share them.  plans_of: rows -> Plans"""
    while True:
        left = without_row(plans_of(read_rows()))
        if not left:
            return
        for plan in left:
            with lock(plan) as is_ours:
                # another process may have made it since the rows were read
                if is_ours and without_row([plan]):
                    make(plan)
                    break
        else:
            time.sleep(10)                              # others make all that is left


@contextlib.contextmanager
def lock(plan):
    """Gives whether this process is the one to make a run; a process that ends, however, gives it back."""
    path = os.path.join('out', 'plateau', f'{plan.name}.lock')
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


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


def is_beaten(plan, validations, rows):
    """Whether the rate of a run of the search can no longer have the lowest median: the choice is the same.

    The run has no gap so far, so that its T is the last validation's or more.
    """
    at_least = [validations[-1][0] * TOKENS]
    others = rows[(rows['arm'] == 'search') & (rows['size'] == plan.size) & (rows['system'] == plan.system)
                  & (rows['rate'] == plan.rate)]
    for tokens, their_validations in zip(others['tokens'], others['validations'], strict=True):
        at_least.append(their_validations[-1][0] * TOKENS if pd.isna(tokens) else tokens)
    # without a row a seed may have any T; the median of two seeds is their mean
    lowest_median = sum(at_least) / len(SEARCH_SEEDS)
    medians = [tokens for tokens, _ in searched(rows, plan.size, plan.system).values()]
    return lowest_median > min(medians, default=math.inf)


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


def line_columns(table):
    """The columns of log2 T = a + b x: a and b of each system, and of machines.  x: size_axis()"""
    x = size_axis(table['size'])
    columns = {}
    for system in sorted(table['system'].unique()):
        is_system = (table['system'] == system).to_numpy(float)
        columns[f'a {system}'] = is_system
        columns[f'b {system}'] = is_system * x
    return pd.DataFrame({**columns, **machine_columns(table)})


def bent_columns(table):
    """line_columns(), and a bend at the middle size that is the same for all systems."""
    _, middle, _ = SIZES
    return line_columns(table).assign(bend=(table['size'] == middle).to_numpy(float))


def cell_columns(table):
    """The columns of log2 T = the mean of its cell, a system at a size, and of machines."""
    cells = table['system'] + ' ' + table['size']
    columns = {cell: (cells == cell).to_numpy(float) for cell in sorted(cells.unique())}
    return pd.DataFrame({**columns, **machine_columns(table)})


def machine_columns(table):
    """A column for each kind of processor but the first: its difference from that one."""
    _, *others = sorted(table['machine'].unique())
    return {machine: (table['machine'] == machine).to_numpy(float) for machine in others}


def fit(table, columns, known=0.0):
    """(coefficients by column, deviation, log of the likelihood) at the maximum of the likelihood

    A normal deviation from the line; a run without the gap says only that T is above CAP.
    known  (runs,): a part of log2 T that is given
    """
    censored = table['tokens'].isna().to_numpy()
    y = np.log2(table['tokens'].astype(float).fillna(CAP).to_numpy()) - known
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
    coefficients, _, highest = fit(table, columns)
    estimate = coefficients[name]
    others = columns.drop(columns=[name])
    if base:
        estimate = estimate - coefficients[base]
        others[base] = columns[base] + columns[name]

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
    unfinished = {plan.seed for plan in without_row(count_plans(rows))}
    counted = rows[(rows['arm'] != 'search') & ~rows['seed'].isin(unfinished)]
    return counted[counted['arm'] == 'count'], counted[counted['arm'] == 'full']


def with_medians(counted):
    """The runs of the cells (a system at a size) of which at most half are censored; not the control's."""
    share = counted['tokens'].isna().groupby([counted['system'], counted['size']]).transform('mean')
    return counted[(share <= 0.5) & (counted['system'] != 'none')]


def with_slopes(counted):
    """The runs of the systems of which with_medians() has every size."""
    table = with_medians(counted)
    sizes = table.groupby('system')['size'].transform('nunique')
    return table[sizes == len(SIZES)]


def medians(counted):
    """{(system, size): (median T, low, high)}, in tokens, by the model with a mean for each cell"""
    table = with_medians(counted)
    columns = cell_columns(table)
    found = {}
    for system, size in {*zip(table['system'], table['size'], strict=True)}:
        estimate, low, high, _ = profile(table, columns, f'{system} {size}')
        found[system, size] = 2 ** estimate, 2 ** low, 2 ** high
    return found


def ratios(counted):
    """{(system, size): (T over T of `original`, low, high)}, by the same model"""
    table = with_medians(counted)
    columns = cell_columns(table)
    found = {}
    for system, size in itertools.product(SEARCHED[1:], SIZES):
        ours, theirs = f'{system} {size}', f'original {size}'
        if {ours, theirs} <= {*columns}:
            estimate, low, high, _ = profile(table, columns, ours, theirs)
            found[system, size] = 2 ** estimate, 2 ** low, 2 ** high
    return found


def contrasts(counted, columns_of=line_columns):
    """{system: (slope less that of `original`, low, high, p)}, by the model with a line for each system"""
    table = with_slopes(counted)
    columns = columns_of(table)
    systems = [system for system in SEARCHED[1:] if {f'b {system}', 'b original'} <= {*columns}]
    return {system: profile(table, columns, f'b {system}', 'b original') for system in systems}


def primary_p(of_systems):
    """Holm's p of the two primary contrasts; without a slope p is 1.  of_systems: as of contrasts()"""
    p = dict.fromkeys(PRIMARY, 1.0)
    for system in PRIMARY:
        if system in of_systems:
            *_, p[system] = of_systems[system]
    return holm(pd.Series(p))


def other_contrasts(counted):
    """{another fit, which was not planned: as of contrasts()}: does the verdict depend on the plan's?"""
    alone = {}
    for system in PRIMARY:
        alone |= contrasts(counted[counted['system'].isin(['original', system])])
    of_original = counted[(counted['system'] == 'original') & (counted['size'] == '4 x 128')]
    late = of_original['tokens'].astype(float).fillna(math.inf).nlargest(2)
    return {
        'as planned': contrasts(counted),
        'a bend at 2 x 128, the same for all systems': contrasts(counted, bent_columns),
        '`original` and the system alone': alone,
        'without the two latest runs of `original` at 4 x 128': contrasts(counted.drop(late.index)),
    }


def full_scores(full):
    """{'loss', 'gap': a table of systems x seeds}, of the last validations of the second arm"""
    ends = pd.DataFrame([validations[-1] for validations in full['validations']], full.index,
                        ['step', 'loss', 'gap'])
    full = full.assign(loss=ends['loss'], gap=ends['gap'])
    return {measure: full.pivot(index='system', columns='seed', values=measure)
            for measure in ('loss', 'gap')}


def full_differences(scores):
    """study.compare's table of differences from `original`, with one deviation for all but the control."""
    learned = scores.drop(index='none')         # runs without positions have no gap and another deviation
    others = [system for system in FULL_SYSTEMS if system not in ('original', 'none')]
    return compare(learned, 'original', others)


# ---- 5. the tables and the figure ----

def print_search(rows):
    lines = []
    for size, system in itertools.product(SIZES, SEARCHED):
        by_rate = searched(rows, size, system)
        cells = []
        for rate in sorted(by_rate):
            tokens, loss = by_rate[rate]
            cells.append(f'{rate:g}: {shown_millions(tokens)} ({loss:.2f})')
        lines.append([f'`{system}`', size, '; '.join(cells)])
    print_table('Search: rate: median of million tokens (last loss)', ['system', 'size', 'rates'], lines)


def shown_millions(tokens):
    return '-' if math.isinf(tokens) else f'{tokens / 1e6:.2f}'


def print_cells(title, systems, cell):
    """A line for each system, a column for each size.  cell: (system, size) -> text"""
    lines = [[f'`{system}`', *(cell(system, size) for size in SIZES)] for system in systems]
    print_table(title, ['system', *SIZES], lines)


def print_counts(counted):
    def cell(system, size):
        here = (counted['system'] == system) & (counted['size'] == size)
        tokens = sorted(counted['tokens'][here].astype(float).fillna(math.inf))
        return ' '.join(map(shown_millions, tokens))
    print_cells('Million tokens until the gap, each seed, sorted; -: none', SYSTEMS, cell)


def print_medians(of_cells):
    """of_cells: as of medians()"""
    def cell(system, size):
        if (system, size) not in of_cells:
            return f'above {CAP / 1e6:.2f}'
        return shown_estimate([tokens / 1e6 for tokens in of_cells[system, size]])
    print_cells('Million tokens until the gap: median by the model (95 %)', SEARCHED, cell)


def print_ratios(of_cells):
    """T of each system over that of `original` at each size: exploratory.  of_cells: as of ratios()"""
    def cell(system, size):
        if (system, size) not in of_cells:
            return '-'
        return shown_estimate(of_cells[system, size])
    print_cells('T over T of `original` (95 %)', SEARCHED[1:], cell)


def shown_estimate(found):
    ratio, low, high = found
    return f'{ratio:.2f} ({low:.2f} to {high:.2f})'


def print_slopes(counted):
    """The slope of each system, and the contrasts, of which two are primary."""
    table = with_slopes(counted)
    columns = line_columns(table)
    lines = {system: [f'`{system}`', 'none: censored', '', '', ''] for system in SEARCHED}
    for system in {*table['system']}:
        lines[system][1] = shown_interval(profile(table, columns, f'b {system}'))
    of_systems = contrasts(counted)
    for system, contrast in of_systems.items():
        lines[system][2:4] = shown_interval(contrast), f'{contrast[3]:.3g}'
    for system, p in primary_p(of_systems).items():
        lines[system][4] = f'{p:.3g}'
    print_table('Doublings of T for each doubling of the parameters in the blocks of `original`',
                ['system', 'slope (95 %)', 'less that of `original`', 'p', 'Holm, of the two primary ones'],
                lines.values())
    print_fit(table)


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


def cell_deviation(counted, system, size):
    """Deviation of log2 T over seeds; NaN with a censored run."""
    here = (counted['system'] == system) & (counted['size'] == size)
    return np.log2(counted['tokens'][here].astype(float)).std(skipna=False)


def print_deviations(counted):
    def cell(system, size):
        deviation = cell_deviation(counted, system, size)
        return '-' if math.isnan(deviation) else f'{deviation:.2f}'
    print_cells('Deviation of log2 T; -: with a censored run', SEARCHED, cell)


def print_pairs(counted):
    """How far are two runs of one cell apart, by one deviation or another?"""
    with_slope = with_slopes(counted)
    with_median = with_medians(counted)
    _, of_slopes, _ = fit(with_slope, cell_columns(with_slope))
    _, of_medians, _ = fit(with_median, cell_columns(with_median))
    deviations = {'one for the cells of systems with a slope': of_slopes,
                  'one for all cells with a median': of_medians,
                  '`original` at 4 x 128': cell_deviation(counted, 'original', '4 x 128'),
                  '`pairwise` at 2 x 64': cell_deviation(counted, 'pairwise', '2 x 64')}
    lines = []
    for words, deviation in deviations.items():
        ratio = 2 ** (norm.ppf(0.975) * math.sqrt(2) * deviation)       # of two independent runs
        lines.append([words, f'{deviation:.2f}', f'{1 / ratio:.2f} to {ratio:.2f}'])
    header = ['deviation of log2 T', '', 'T of one over T of the other (95 %)']
    print_table('Two runs of one cell', header, lines)


def print_other_contrasts(counted):
    lines = []
    for words, of_systems in other_contrasts(counted).items():
        adjusted = primary_p(of_systems)
        line = [words]
        for system in PRIMARY:
            line.append(shown_interval(of_systems[system]) if system in of_systems else '-')
            line.append(shown_p(adjusted[system]))
        lines.append(line)
    header = ['fit', *itertools.chain(*((f'`{system}`', "Holm's p") for system in PRIMARY))]
    print_table('The primary contrasts by other fits', header, lines)


def shown_interval(found):
    estimate, low, high, _ = found
    return f'{estimate:+.2f} ({low:+.2f} to {high:+.2f})'


def print_full(full):
    """The second arm: last loss and gap, and differences from `original`."""
    lines = {system: [f'`{system}`', str((full['system'] == system).sum())] for system in FULL_SYSTEMS}
    for scores in full_scores(full).values():
        differences = full_differences(scores)
        for system, line in lines.items():
            own = scores.loc[system]
            line.append(f'{own.mean():.3f} ({own.std():.3f})')
            line.append(shown_difference(differences.loc[system]) if system in differences.index else '')
    print_table("Second arm: mean (deviation), less `original` (Dunnett's p)",
                ['system', 'runs', 'last loss', 'less `original`', 'last gap', 'less `original`'],
                lines.values())


def shown_difference(found):
    return f"{found['difference']:+.3f} ± {found['half']:.3f} ({shown_p(found['dunnett'])})"


# Okabe and Ito's colours, which colour-blind readers can tell apart
COLOURS = {'original': '#000000', 'symmetric': '#E69F00', 'pairwise': '#0072B2', 'pairwise_unit': '#56B4E9',
           'shared': '#D55E00'}


def draw(of_cells):
    """Medians with their intervals; an arrow where more than half of the runs are censored."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('plateau.py: no figure without matplotlib', file=sys.stderr)
        return
    figure = Figure((9, 6.2), layout='constrained')
    axis = figure.add_subplot(xscale='log', yscale='log')
    for number, system in enumerate(SEARCHED):
        beside = 1.04 ** (number - 2)                   # so that intervals stand beside each other
        points = []
        for size, (_, parameters) in SIZES.items():
            if (system, size) in of_cells:
                points.append((parameters * beside, *of_cells[system, size]))
            else:
                axis.plot(parameters * beside, CAP / 1e6, '^', color=COLOURS[system], markersize=10)
        if points:
            x, middle, low, high = np.array(points).T
            middle, low, high = middle / 1e6, low / 1e6, high / 1e6
            axis.errorbar(x, middle, (middle - low, high - middle), color=COLOURS[system], marker='o',
                          linewidth=2, capsize=4, label=system)
        else:
            axis.plot([], [], '^', color=COLOURS[system], label=f'{system}: no gap')
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
    if len(sys.argv) == 2 and sys.argv[1] in plans_of:
        make_all(plans_of[sys.argv[1]])
        return
    if sys.argv[1:2] == ['train']:
        train_with_gap(sys.argv[2:])
        return
    if sys.argv[1:]:
        sys.exit('plateau.py: search, count, train, or nothing')
    rows = read_rows()
    print_search(rows)
    counted, full = balanced(rows)
    if counted['seed'].nunique() < 2:
        print('plateau.py: no intervals before all runs of two seeds are made', file=sys.stderr)
        return
    print_counts(counted)
    of_cells = medians(counted)
    print_medians(of_cells)
    print_ratios(ratios(counted))
    print_slopes(counted)
    print_other_contrasts(counted)
    print_deviations(counted)
    print_pairs(counted)
    print_full(full)
    draw(of_cells)


if __name__ == '__main__':
    main()
