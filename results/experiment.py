"""Compare variants over seeds: a plan, its runs of train.py, a table and a figure.

    $ python results/experiment.py plan.py run &    makes the runs of a plan
    $ python results/experiment.py plan.py run &    as many processes as there are free cores, or devices
    $ python results/experiment.py plan.py          prints tables; writes plan.csv, plan.png and plan.pdf
    $ python results/experiment.py plan.py latex    the same with tables in LaTeX, for its package booktabs
    $ python results/experiment.py plan.py folders  prints the folder of each run, one a line

Start it in the project's folder, with a corpus that prepare_data.py has made. A plan is a Python file that
assigns fields of Plan, see below. This one has two attentions and three seeds:

    base = 'config/quickstart.py --max_iters=1400'      # what all runs share, as for train.py
    cells = {'original': '--attention=original', 'pairwise': '--attention=pairwise'}
    reference = 'original'
    seeds = 1, 2, 3

Processes with the same plan share its runs: each of them takes the next run that no other process has taken.
On several GPUs start them with torchrun, which gives each process a GPU of its own. If one was killed, start
it again: its run continues from the newest checkpoint (see --checkpoint_interval of train.py). The runs are
in the folders out/plan/CELL_RATE-SEED. Each finished run adds a line to plan.jsonl, with its knobs, digests
of its corpus and of the code, precision, loss curve, machine, start, end and seconds of training.

If you change the knobs, model.py or train.py, prepare the corpus again, or go on where dtype=auto is another
precision, give the plan another name: such losses do not compare, so no run is added to the plan. If a change
of the code does not concern the plan, `plan.py run any_code` goes on.

Differences are paired by seed: runs with the same seed see the same rows, and also the same masks, unless
their cells mask different fractions. Intervals (95 %) and p are those of Student's paired t test, and p is
adjusted for the number of comparisons by Holm's method (1979). `steps` is the first step at which the loss is
below `target` and stays there at the next validation; a ratio of steps is the geometric mean over the seeds.
A run that never gets below the target counts with all its steps, and a line below the table names its cell.

To search for learning rates, assign `rates`: every cell is then run with each of them. A later plan, with
other seeds, takes the best rate of each cell from the search by rates_from='search.py'.

If a cell is called GROUP/NAME, it is compared with GROUP/REFERENCE, and each group is a panel of the figure.
`contrasts` are planned tests: each tests whether a weighted sum of the losses of some cells is 0. Beside
Student's interval of a few seeds, whose width is itself a matter of luck, stands a pooled one: it takes seeds
as unpaired, and one deviation for all cells of a group.

This needs scipy, and matplotlib for the figure: pip install -r requirements-dev.txt
"""
import importlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import sys
import time
from dataclasses import dataclass, field
from typing import NamedTuple

os.environ.setdefault('OMP_NUM_THREADS', '1')           # each core has its own process with one thread

import numpy as np
import pandas as pd
import torch
from filelock import FileLock, Timeout

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import train
from configurator import UserError, choose, configure, notice, refuse_differences, run, settings
from finetune import markdown
from model import count_parameters
from prepare_data import digest_of

# ---- 1. the plan ----


@dataclass
class Plan:
    """The fields that a plan may assign."""
    base: str                           # config files and flags of train.py that all runs share
    cells: dict                         # name -> config files and flags that are added to base
    reference: str                      # the cell that the others are compared with
    seeds: tuple = (1, 2, 3)
    rates: tuple = ()                   # learning rates to search, for every cell; (): no search
    rates_from: str = ''                # plans of searches, comma-separated, for the best rate of each cell
    target: float = 0.0                 # nats: also compare the steps to this validation loss; 0: do not
    all_rows: bool = False              # measure the last loss again, on all validation rows
    blimp: str = ''                     # a folder of BLiMP's .jsonl files: also score each run on them
    blimp_pairs: int = 0                # pairs of each set, the first ones; 0: all
    contrasts: dict = field(default_factory=dict)       # name of a test -> {cell: weight of its loss}

    def __post_init__(self):
        for name, kind in self.__annotations__.items():
            if not isinstance(getattr(self, name), kind):
                raise UserError(f'{name}={getattr(self, name)}: must be a {kind.__name__}')
        for cell in [*self.cells, *itertools.chain(*self.contrasts.values())]:
            choose('cell', cell, self.cells)
            choose('reference', self.reference_of(cell), self.cells)
        if self.rates and self.rates_from:
            raise UserError('rates and rates_from: a plan searches for rates, or takes those of a search')

    def reference_of(self, cell):
        """The cell that this one is compared with."""
        return os.path.join(os.path.dirname(cell), self.reference)


class Run(NamedTuple):
    cell: str
    rate: float
    seed: int
    arguments: list                     # of train.py
    knobs: dict                         # the values of all knobs of train.py that these give
    folder: str


def read_plan(path):
    """(Plan, list of its Runs). Runs are ordered by seed, so that whole seeds are finished first."""
    try:
        plan = Plan(**settings(path, {}))
    except TypeError as error:          # a name that is no field of Plan, or a field that is missing
        raise UserError(f'{path}: {error}'.replace('Plan.__init__()', 'a plan')) from None
    best = {}
    for search in filter(None, plan.rates_from.split(',')):
        best |= best_rates(search)
    runs = []
    for seed, cell in itertools.product(plan.seeds, plan.cells):
        for rate in plan.rates or [best.get(cell)]:     # None: the rate of the cell's config files and flags
            arguments = [*shlex.split(plan.base), *shlex.split(plan.cells[cell]), '--fill_samples=0']
            arguments.append(f'--seed={seed}')
            if rate is not None:
                arguments.append(f'--learning_rate={rate!r}')
            knobs = configure(dict(vars(train)), train.MINIMUM, arguments)
            name = f"{cell}_{knobs['learning_rate']:g}-{seed}"
            folder = os.path.join('out', os.path.splitext(os.path.basename(path))[0], name)
            arguments.append(f'--out_dir={folder}')
            runs.append(Run(cell, knobs['learning_rate'], seed, arguments, knobs, folder))
    return plan, runs


def rows_path(path):
    return os.path.splitext(path)[0] + '.jsonl'


# Knobs that do not change a loss, so they may differ between the runs of a plan. A row also has the device,
# the precision, and digests of the corpus and of model.py and train.py.
MAY_DIFFER = ('out_dir', 'data_dir', 'device', 'compile', 'timeout', 'wandb_project', 'milestones',
              'checkpoint_interval', 'log_interval', 'validation')


def read_lines(path):
    """All rows of a plan as dicts."""
    if not os.path.exists(rows_path(path)):
        return []
    with open(rows_path(path), encoding='utf-8') as file:
        return list(map(json.loads, file))


def read_rows(path, runs):
    """The rows of these runs, as a DataFrame in the order of `runs`: cell, rate, seed, loss, curve ...

    A row has no loss if the loss of its run was not finite. Raises UserError if the knobs of a row are not
    those of its run, because then the plan was changed after the run.
    """
    found = {}
    for row in read_lines(path):
        key = row['cell'], row['rate'], row['seed']
        if key in found:
            raise UserError(f'{rows_path(path)}: two rows of {row["cell"]}, seed {row["seed"]}')
        found[key] = row
    rows = []
    for one in runs:
        row = found.get((one.cell, one.rate, one.seed))
        if row is None:
            continue
        source = f'give the plan another name: {rows_path(path)}, {one.cell}, seed {one.seed}'
        ours = json.loads(json.dumps(compared_knobs(one, row['knobs'])))        # tuples become lists
        refuse_differences(source, row['knobs'], ours)
        rows.append(row)
    columns = ['cell', 'rate', 'seed', 'loss', 'curve']
    return pd.DataFrame(rows, columns=None if rows else columns).astype({'loss': float})


def compared_knobs(one, theirs):
    """The knobs of a run that must be those of its row or checkpoint, which may be older and lack some."""
    return {knob: value for knob, value in one.knobs.items() if knob in theirs and knob not in MAY_DIFFER}


# ---- 2. the runs ----

def make_all(path, any_code):
    """Make every run that has no row yet and that no other process is making.

    any_code  also if other rows were made with other code
    """
    for name in ('RANK', 'WORLD_SIZE'):                 # set by torchrun, but each run uses one process
        os.environ.pop(name, None)
    plan, runs = read_plan(path)
    if not any_code:
        check_code(path)
    for number, one in enumerate(runs, 1):
        if len(read_rows(path, [one])):
            continue
        os.makedirs(one.folder, exist_ok=True)
        lock = FileLock(os.path.join(one.folder, 'experiment.lock'))    # the end of the process releases it
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        with lock:
            if len(read_rows(path, [one])):             # another process has just made it
                continue
            origin = origin_of(one)
            check_origin(path, one, origin, any_code)
            print(f'\nrun {number} of {len(runs)}{time_left(path, runs)}: {one.folder}', flush=True)
            row = {**make(one, plan), **origin}
            with open(rows_path(path), 'a', encoding='utf-8') as file:
                file.write(json.dumps(row) + '\n')
    finished = len(read_rows(path, runs))
    print(f'{finished} of {len(runs)} runs are finished: python results/experiment.py {path}')


def time_left(path, runs):
    """', about 40 minutes left' by the mean of the finished runs; '' if there are none."""
    rows = read_rows(path, runs)
    if rows.empty:
        return ''
    minutes = (len(runs) - len(rows)) * rows['seconds'].mean() / 60
    return f', about {minutes:.0f} minutes left for one process'


def code_digest():
    return digest_of(train.code_digests())


def check_code(path):
    """Raise a UserError if a row was made with another model.py or train.py."""
    code = code_digest()
    for row in read_lines(path):
        if row.get('code', code) != code:               # rows of before 2026-11-28 have no digest
            raise UserError(f'{rows_path(path)}: model.py or train.py has changed since the run of '
                            f'{row["cell"]}, seed {row["seed"]}: give the plan another name or, if the '
                            'change does not concern it, add the word any_code')


def origin_of(one):
    """What the loss of a run depends on besides its knobs."""
    knobs = one.knobs
    runtime = train.make_runtime(knobs['device'], knobs['dtype'], knobs['n_embd'], group=False)
    return {
        'corpus': train.load_meta(os.path.join(knobs['data_dir'], knobs['dataset']))['identity'],
        'code': code_digest(),
        'precision': str(runtime.dtype).removeprefix('torch.')}


def check_origin(path, one, origin, any_code):
    """Raise a UserError if rows of the plan have another corpus or precision than this run.

    The same if a checkpoint of the run has other knobs, code or precision: train.py itself would go on.
    """
    source = f'give the plan another name: {rows_path(path)}'
    for row in read_lines(path):
        theirs = {**origin, **row}                      # rows of before 2026-11-28 lack some of the keys
        if row['knobs']['dataset'] == one.knobs['dataset']:
            refuse_differences(source, theirs['corpus'], origin['corpus'])
        if row['knobs']['dtype'] == one.knobs['dtype']:                 # both are auto, or both the same
            refuse_differences(source, theirs, {'precision': origin['precision']})
    checkpoint = train.newest(one.folder)
    if checkpoint:
        source = f'give the plan another name: {checkpoint}'
        begun = train.read_checkpoint(checkpoint)
        refuse_differences(source, begun['config'], compared_knobs(one, begun['config']))
        refuse_differences(source, begun, {'dtype': origin['precision']})
        if not any_code:
            refuse_differences(source, begun['code'], train.code_digests())


def make(one, plan):
    """Train in this process, from the newest checkpoint if there is one; return the row of the run."""
    importlib.reload(train)                             # gives its knobs their defaults again
    sys.argv = ['train.py', *one.arguments]
    finite = True
    try:
        train.main()
    except train.NotFiniteError as error:
        print(error, file=sys.stderr)
        finite = False
    except SystemExit as end:                           # train.main() always ends with one
        if end.code:                                    # a signal stopped the run, and it has been saved
            raise
    launches = read_launches(one.folder)
    launch = launches[-1]
    validations = [line for line in train.read_metrics(one.folder)
                   if line['kind'] == 'val' and 'loss' in line]
    row = {
        'cell': one.cell, 'rate': one.rate, 'seed': one.seed, 'loss': None, 'parameters': None,
        'start': launches[0]['date'], 'end': time.strftime('%Y-%m-%dT%H:%M:%S%z'),
        'seconds': round(3600 * (hours_of(one.folder) or 0), 1), 'revision': launch['revision'],
        'machine': machine(), 'torch': launch['torch'], 'device': launch['device'],
        'knobs': launch['config'], 'curve': [[line['step'], round(line['loss'], 4)] for line in validations]}
    if finite:
        model, *_ = train.load(one.folder)
        row['parameters'] = count_parameters(model)
        row['loss'] = loss_on_all_rows(model, launch['config']) if plan.all_rows else row['curve'][-1][1]
        if plan.blimp:
            row.update(blimp_scores(one.folder, plan))
    return row


def read_launches(folder):
    return train.read_lines(os.path.join(folder, 'launches.jsonl'))


def hours_of(folder):
    """Hours of training up to the last line of the log that has a speed; None if no line has one."""
    knobs = read_launches(folder)[-1]['config']
    seconds = 0.0
    step = 0
    for line in train.read_metrics(folder):
        if line.get('tokens_per_second'):
            tokens = (line['step'] - step) * knobs['total_batch'] * knobs['block_size']
            seconds += tokens / line['tokens_per_second']
            step = line['step']
    return seconds / 3600 if step else None


def machine():
    """Name of the GPU, or of the processor if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with open('/proc/cpuinfo') as file:
        names = [line.partition(':')[2].strip() for line in file if line.startswith('model name')]
    return names[0] if names else platform.processor()


def loss_on_all_rows(model, knobs):
    runtime = train.make_runtime(knobs['device'], knobs['dtype'], knobs['n_embd'])
    _, _, loaders = train.make_loaders(knobs)
    n_rows = len(loaders[''].rows)
    scores = train.evaluate(model.to(runtime.device), loaders[''], n_rows, knobs['batch_size'], runtime)
    return round(scores['loss'], 5)


def blimp_scores(folder, plan):
    """{'blimp': accuracy, 'phenomena': {phenomenon: accuracy}}, see blimp.py."""
    import blimp
    runtime = train.make_runtime('auto', 'float32', 0)
    sets = blimp.read_sets(plan.blimp, plan.blimp_pairs)
    scores = blimp.score_run(train.newest(folder), sets, blimp.batch_size, runtime)
    return {'blimp': scores['accuracy'], 'phenomena': scores['phenomena']}


# ---- 3. statistics ----

def paired(differences, level=0.95):
    """(mean, low, high, p) of Student's t over the seeds; low and high are the interval of this level."""
    if len(differences) < 2:
        return np.mean(differences), math.nan, math.nan, math.nan
    from scipy.stats import ttest_1samp
    test = ttest_1samp(differences, 0)
    return np.mean(differences), *test.confidence_interval(level), test.pvalue


def holm(p):
    """Adjusted p of n tests: the smallest p is multiplied by n, the next by n - 1, and so on.  Holm 1979

    A comparison on one seed has no p and does not count.
    """
    ordered = p.dropna().sort_values()
    factors = np.arange(len(ordered), 0, -1)
    return (ordered * factors).cummax().clip(upper=1).reindex(p.index)


def differences(rows, weights, measure='loss'):
    """Weighted sum of a measure over some cells, for each seed that all of these cells have.

    weights  {cell: weight}
    """
    of_cells = rows[rows['cell'].isin(weights)].pivot(index='seed', columns='cell', values=measure)
    return (of_cells.reindex(columns=list(weights)) * pd.Series(weights)).sum(axis=1, skipna=False).dropna()


def pooled(rows, weights, level=0.95):
    """(weighted sum of the mean losses of some cells, low, high): the interval with pooled deviations.

    All cells of a group have one deviation, also those without a weight. A sum over several groups has the
    degrees of freedom of Satterthwaite 1946.
    weights  {cell: weight}
    """
    from scipy.stats import t as student
    cells = rows.groupby('cell')['loss'].agg(['mean', 'var', 'count'])
    freedom = cells['count'] - 1
    squares = cells['var'].fillna(0) * freedom
    weights = pd.Series(weights, dtype=float)
    number = (weights * cells['mean'].reindex(weights.index)).sum(skipna=False)

    # a row for each group: its deviation squared, its part of the variance of the sum
    freedom = freedom.groupby(os.path.dirname).sum()
    deviation_squared = squares.groupby(os.path.dirname).sum() / freedom
    parts = (weights ** 2 / cells['count'].reindex(weights.index)).groupby(os.path.dirname).sum()
    parts = parts * deviation_squared.reindex(parts.index)
    variance = parts.sum(skipna=False)                  # no number if a group has one seed of each cell
    freedom = variance ** 2 / (parts ** 2 / freedom.reindex(parts.index)).sum()
    half = variance ** 0.5 * student.ppf((1 + level) / 2, freedom)
    return number, number - half, number + half


def steps_below(curve, target):
    """Step of the first of two consecutive validations below `target`; the last step if there are none."""
    for (step, loss), (_, following) in itertools.pairwise(curve):
        if max(loss, following) < target:
            return step
    return curve[-1][0]


def best_rates(path):
    """{cell: the rate with the lowest mean loss} of a search.  Raises UserError if any run is missing."""
    plan, runs = read_plan(path)
    rows = read_rows(path, runs)
    if len(rows) < len(runs):
        raise UserError(f'{path}: {len(runs) - len(rows)} runs of the search are missing: '
                        f'python results/experiment.py {path} run')
    best = best_of(rows)
    return {cell: float(best[cell]) for cell in plan.cells}


def best_of(rows):
    """The rate with the lowest mean loss of each cell, without rates at which any seed diverged."""
    means = rows.groupby(['cell', 'rate'])['loss'].agg(lambda losses: losses.mean(skipna=False))
    return means.dropna().unstack().idxmin(axis=1)


# ---- 4. tables and figure ----

def shown_p(p):
    return '' if np.isnan(p) else '<.001' if p < 0.001 else f'{p:.3f}'.removeprefix('0')


def shown_mean(values, places):
    """Mean and standard deviation as text."""
    return f'{values.mean():.{places}f}' + (f' ({values.std():.{places}f})' if len(values) > 1 else '')


def shown_interval(found, places, sign='+'):
    """A number with its interval as text.  found: (number, low, high, ...); one seed has no interval."""
    if np.isnan(found[0]):                              # no seed
        return ''
    number, low, high = (f'{value:{sign}.{places}f}' for value in found[:3])
    return number if np.isnan(found[1]) else f'{number} ({low} to {high})'


def report_gaps(runs, rows):
    """Print a line for each cell and rate with runs that are missing or whose loss is not finite."""
    losses = rows.set_index(['cell', 'rate', 'seed'])['loss']
    gaps = {}
    for one in runs:
        loss = losses.get(one[:3])
        if loss is None or math.isnan(loss):
            text = 'has no finished run' if loss is None else 'has a loss that is not finite'
            gaps.setdefault((one.cell, one.rate, text), []).append(one.seed)
    for (cell, rate, text), seeds in gaps.items():
        print(f"{cell}, rate {rate:g}, {text}: seed {', '.join(map(str, seeds))}")


def search_table(plan, rows):
    """A row for each cell: its mean loss by learning rate, and the best rate."""
    best = best_of(rows)
    for cell, rate in best.items():
        if rate in (min(plan.rates), max(plan.rates)):
            print(f'{cell}: the best rate is the outermost, {rate:g}: add one beyond it')
    shown = rows.groupby(['cell', 'rate'])['loss'].agg(
        lambda losses: 'diverged' if losses.isna().any() else shown_mean(losses, 3))
    table = shown.unstack(fill_value='-').rename(columns='{:g}'.format)
    table['best'] = best.map('{:g}'.format)
    return table.reindex(rows['cell'].unique()).reset_index()


def cell_table(plan, rows):
    """A row for each cell: its measures, and their differences or ratios to those of its reference.

    The cells of a group and their reference are compared on the seeds that both have.
    """
    minus = f'minus {plan.reference}'
    p = {}
    lines = []
    for cell, of_cell in rows.groupby('cell', sort=False):
        reference = plan.reference_of(cell)
        compared = rows.head(0) if cell == reference else rows          # a reference has no difference
        pair = {cell: 1, reference: -1}
        pairs = differences(compared, pair)
        test = paired(pairs)
        p[cell] = test[3]
        if cell != reference and 0 < len(pairs) < len(plan.seeds):
            print(f"{cell} is compared only on seed {', '.join(map(str, pairs.index))}")
        line = {
            'cell': cell,
            'rate': f"{of_cell['rate'].iloc[0]:g}",
            'runs': len(of_cell),
            'parameters': f"{of_cell['parameters'].max():,.0f}",
            'minutes a run': f"{of_cell['seconds'].mean() / 60:.1f}",
            'loss': shown_mean(of_cell['loss'], 3),
            minus: shown_interval(test, 3),
            "Holm's p": '',
        }
        if plan.target:
            logs = differences(compared.assign(log_steps=np.log(compared['steps'])), pair, 'log_steps')
            line[f'steps over {plan.reference}'] = shown_interval(np.exp(paired(logs)[:3]), 2, sign='')
            line['steps'] = f"{of_cell['steps'].mean():.0f}"
        if plan.blimp:
            percents = differences(compared.assign(percent=100 * compared['blimp']), pair, 'percent')
            line['BLiMP, %'] = shown_mean(100 * of_cell['blimp'], 1)
            line[f'BLiMP {minus}'] = shown_interval(paired(percents), 1)
        lines.append(line)
    table = pd.DataFrame(lines)
    table["Holm's p"] = table['cell'].map(holm(pd.Series(p, dtype=float))).map(shown_p)
    return table


def contrast_table(plan, rows):
    lines = []
    for name, weights in plan.contrasts.items():
        of_seeds = differences(rows, weights)
        test = paired(of_seeds)
        lines.append({
            'test': name,
            'seeds': len(of_seeds),
            'nats (95 %)': shown_interval(test, 3),
            'pooled (95 %)': shown_interval(pooled(rows, weights), 3),
            'p': test[3],
        })
    table = pd.DataFrame(lines)
    table["Holm's p"] = holm(table['p']).map(shown_p)
    table['p'] = table['p'].map(shown_p)
    return table


def cell_tables(plan, rows):
    """{caption: table}, the main one first."""
    rows = rows.assign(steps=[steps_below(curve, plan.target) for curve in rows['curve']])
    is_never = rows['steps'] == [curve[-1][0] for curve in rows['curve']]
    if plan.target and is_never.any():
        names = ', '.join(rows['cell'][is_never].unique())
        print(f'never below {plan.target:g} nats, so that all steps count: {names}')
    by_seed = rows.pivot(index='cell', columns='seed', values='loss').reindex(rows['cell'].unique())
    tables = {
        'Last validation loss in nats: mean (deviation), then its difference from the reference with a\n'
        '95 % interval: positive if the cell is worse; if the interval includes 0, the sign is open':
            cell_table(plan, rows),
        'Loss of each seed': by_seed.map('{:.3f}'.format).reset_index()}
    if plan.contrasts:
        tables['Planned tests'] = contrast_table(plan, rows)
    return tables


COLOURS = '#000000', '#E69F00', '#009E73', '#56B4E9', '#CC79A7', '#0072B2', '#D55E00', '#999999'
MARKERS = 'o', 's', '^', 'D', 'v', 'P', 'X', '*'        # tell cells apart without colours


def draw(plan, rows):
    """Figure of the validation loss by step: the mean over seeds in a band from minimum to maximum.

    Each group of cells has its own panel.
    """
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams['font.size'] = 14
    groups = list(dict.fromkeys(map(os.path.dirname, rows['cell'])))
    names = list(dict.fromkeys(map(os.path.basename, plan.cells)))
    figure = Figure((7, 5.5 * len(groups)), layout='constrained')
    panels = figure.subplots(len(groups), 1, squeeze=False, sharey=True)[:, 0]
    top = 0.0
    for (cell, rate), of_cell in rows.groupby(['cell', 'rate'], sort=False):
        curves = pd.concat([pd.Series(dict(curve)) for curve in of_cell['curve']], axis=1).dropna()
        panel = panels[groups.index(os.path.dirname(cell))]
        name = os.path.basename(cell)
        label = f'{name}, rate {rate:g}' if plan.rates else name
        number = len(panel.lines) if plan.rates else names.index(name)
        colour = COLOURS[number % len(COLOURS)]
        panel.plot(curves.index, curves.mean(axis=1), label=label, color=colour, markevery=0.1,
                   marker=MARKERS[number % len(MARKERS)])
        panel.fill_between(curves.index, curves.min(axis=1), curves.max(axis=1), alpha=0.25, color=colour)
        later = curves[curves.index >= curves.index[-1] / 10]   # the first steps would fill half the figure
        top = max(top, later.max(axis=None))
    for panel, group in zip(panels, groups, strict=True):
        panel.set(title=group, xlabel='step', ylabel='validation loss (nats)')
        panel.legend()
    figure.suptitle('Mean over seeds, in a band from the lowest\nto the highest')
    panels[0].set_ylim(top=top)
    return figure


def latex(table):
    """A table in LaTeX, in which a number below 0 has a minus and not a hyphen."""
    return re.sub(r'(?<![\w-])-(?=\d)', '$-$', table.to_latex(index=False, escape=True))


def report(path, form):
    """Print the tables of a plan, each as form(table), and write its .csv, .png and .pdf."""
    plan, runs = read_plan(path)
    rows = read_rows(path, runs)
    report_gaps(runs, rows)
    finished = rows.dropna(subset='loss')
    if finished.empty:
        raise UserError(f'{path}: no run is finished: python results/experiment.py {path} run')
    for key in 'code', 'precision':                     # rows of before 2026-11-28 have neither
        values = rows.get(key, pd.Series()).dropna().unique()
        if len(values) > 1:
            notice(f"{rows_path(path)}: the rows differ in {key}: {', '.join(values)}")
        elif key == 'code' and len(values) and values[0] != code_digest():
            notice(f'{rows_path(path)}: model.py or train.py has changed since these runs')
    if plan.rates:
        tables = {'Last loss in nats by learning rate, mean (deviation)': search_table(plan, rows)}
    else:
        tables = cell_tables(plan, finished)
    for caption, table in tables.items():
        print(f'\n{caption}\n\n{form(table)}')
    stem = os.path.splitext(path)[0]
    table, *_ = tables.values()
    table.to_csv(f'{stem}.csv', index=False)
    figure = draw(plan, finished)
    for suffix in 'png', 'pdf':
        figure.savefig(f'{stem}.{suffix}', dpi=100)
    print(f'\nthe first table: {stem}.csv; losses by step: {stem}.png and {stem}.pdf')


def main():
    path, *words = sys.argv[1:] or ['--help']
    if path in ('--help', '-h'):
        sys.exit(__doc__)
    if words not in ([], ['latex'], ['folders'], ['run'], ['run', 'any_code']):
        given = ' '.join(words)
        raise UserError(f'{given}: give a plan, then nothing, latex, folders, run or run any_code')
    if 'run' in words:
        make_all(path, 'any_code' in words)
    elif 'folders' in words:
        _, runs = read_plan(path)
        for one in runs:
            print(one.folder)
    else:
        report(path, latex if 'latex' in words else markdown)


if __name__ == '__main__':
    run(main)
