"""The runs and the tests of results/grid.md: which of queries, keys and values a masked model can share.

    $ python results/grid.py texts ARTICLES NOVELS      writes data/texts_grid from two folders of .txt
    $ python results/grid.py search                     makes the runs of the search of the rates
    $ python results/grid.py count BLIMP                makes the counted runs at the rates found, and scores
                                                        each on BLiMP, in a folder of its .jsonl files
    $ python results/grid.py                            prints the tables and the tests, draws grid.png

1. the plan: recipes, systems, seeds; the order of the runs
2. a run of train.py; its row in grid.jsonl
3. the rates of the search; the threshold
4. the three primary tests
5. the tables
6. the figure
7. the texts; main

Needs scipy, and matplotlib for the figure: pip install -r requirements-dev.txt
"""
import glob
import itertools
import json
import os
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pandas as pd
import runs
from analysis import HERE, holm, paired, print_table, shown_interval, shown_mean, shown_p

sys.path.insert(0, os.path.dirname(HERE))
from model import count_parameters
from train import load, read_metrics

ROWS = os.path.join(HERE, 'grid.jsonl')
BLIMP_ROWS = os.path.join(HERE, 'grid_blimp.jsonl')
FIGURE = os.path.join(HERE, 'grid.png')
OUT = os.path.join('out', 'grid')

# ---- 1. the plan ----

RECIPES = {'post-LN': [], 'modern': ['config/modern.py']}
SYSTEMS = {
    'original': [],
    'tied_start': ['--tied_start=true'],
    'symmetric': ['--attention=symmetric'],
    'shared_kv': ['--attention=shared_kv'],
    'pairwise': ['--attention=pairwise'],
    'shared': ['--attention=shared'],
}
SEARCHED = [system for system in SYSTEMS if system != 'tied_start']     # it takes the rate of `original`
SEEDS = range(1, 6)             # six were planned; the page says why one is left out
SEARCH_SEED = 101               # not used again
STEPS = 2500
BLIMP_PAIRS = 200               # of each set


class Plan(NamedTuple):
    """A run that is to be made."""
    arm: str                    # search, count, or check: one of the search, repeated on a CPU
    recipe: str
    system: str
    seed: int
    rate: float

    @property
    def name(self):
        return f'{self.arm}/{self.recipe}_{self.system}_{self.rate:g}-{self.seed}'

    @property
    def folder(self):
        return os.path.join(OUT, self.name)

    @property
    def command(self):
        return ['train.py', 'config/results/grid.py', *RECIPES[self.recipe], *SYSTEMS[self.system],
                f'--seed={self.seed}', f'--learning_rate={self.rate:g}', f'--out_dir={self.folder}']


def search_plans(rows):
    """The runs of the search so far: three rates for each cell, further ones while the outermost is best."""
    plans = []
    for recipe, system in itertools.product(RECIPES, SEARCHED):
        rates = runs.rates_to_try(searched(rows, recipe, system))
        plans += [Plan('search', recipe, system, SEARCH_SEED, rate) for rate in rates]
    return plans


def count_plans(rows):
    """All counted runs: seed after seed, so that whole seeds are left out from the last if time runs out."""
    plans = []
    for seed in SEEDS:
        of_seed = [Plan('count', recipe, system, seed, best_rate(rows, recipe, system))
                   for recipe, system in itertools.product(RECIPES, SYSTEMS)]
        order = np.random.default_rng(seed).permutation(len(of_seed))
        plans += [of_seed[index] for index in order]
    return plans


# ---- 2. a run ----

def make(plan, blimp=''):
    """Run train.py to its end, or on from its newest checkpoint; append the run's row.

    blimp  folder of BLiMP's .jsonl files, on which the run is scored before it gets its row
    """
    started = time.time()
    run_script(plan.command)
    minutes = (time.time() - started) / 60
    if blimp:
        run_script([os.path.join(HERE, 'blimp.py'), f'--runs={plan.folder}', f'--data_dir={blimp}',
                    f'--pairs={BLIMP_PAIRS}', f'--out={BLIMP_ROWS}'])
    curve = [[line['step'], round(line['loss'], 4)] for line in read_metrics(plan.folder)
             if line['kind'] == 'val']
    last_step, loss = curve[-1]
    model, *_ = load(plan.folder)
    runs.append_row(ROWS, {
        **plan._asdict(), 'steps': last_step, 'loss': loss,
        'parameters': count_parameters(model), 'machine': runs.machine(),
        'minutes': round(minutes, 1), 'revision': runs.revision_of(plan.folder),
        'curve': curve})
    print(plan.name, loss, flush=True)


def run_script(command):
    """On one thread, without its output; CalledProcessError if it fails."""
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, 'OMP_NUM_THREADS': '1'})


def rows_now():
    return runs.read_rows(ROWS, [*Plan._fields, 'loss', 'curve'])


def with_blimp(counted):
    """The counted rows, with their accuracies in %: `BLiMP` over all sets, then a column a phenomenon."""
    scored = runs.read_rows(BLIMP_ROWS, ['checkpoint', 'accuracy', 'phenomena'])
    accuracies = {os.path.dirname(row.checkpoint): {'BLiMP': row.accuracy, **row.phenomena}
                  for row in scored.itertuples()}
    folders = [Plan(*values).folder for values in counted[[*Plan._fields]].itertuples(index=False)]
    columns = pd.DataFrame([accuracies[folder] for folder in folders], index=counted.index)
    return counted.join(100 * columns)


# ---- 3. the rates and the threshold ----

def searched(rows, recipe, system):
    """{rate: last loss} of the search in a cell"""
    here = rows[(rows['arm'] == 'search') & (rows['recipe'] == recipe) & (rows['system'] == system)]
    return dict(zip(here['rate'], here['loss'], strict=True))


def best_rate(rows, recipe, system):
    """The rate with the lowest last loss; that of `original` for tied_start."""
    searched_system = 'original' if system == 'tied_start' else system
    return runs.best_rate(searched(rows, recipe, searched_system), f'{searched_system}, {recipe}')


def threshold(rows):
    """Nats, a multiple of 0.05: in the best run of the search of `original`, post-LN, half way from the loss
    at the end of the warmup to the last one."""
    rate = best_rate(rows, 'post-LN', 'original')
    here = rows[(rows['arm'] == 'search') & (rows['recipe'] == 'post-LN') & (rows['system'] == 'original')
                & (rows['rate'] == rate)]
    curve = dict(here['curve'].iloc[0])
    return round(20 * (curve[STEPS // 10] + curve[STEPS]) / 2) / 20


def steps_below(curve, level):
    """Step of the first of two validations in a row below `level`; STEPS if there are none."""
    for (step, loss), (_, following) in itertools.pairwise(curve):
        if max(loss, following) < level:
            return step
    return STEPS


# ---- 4. the tests ----

def balanced(rows):
    """The counted rows of the seeds of which every run has been made."""
    unfinished = {plan.seed for plan in runs.without_row(count_plans(rows), rows)}
    return rows[(rows['arm'] == 'count') & ~rows['seed'].isin(unfinished)]


def pivoted(counted, recipe, measure):
    """A table of a measure: seeds x systems."""
    of_recipe = counted[counted['recipe'] == recipe]
    return of_recipe.pivot(index='seed', columns='system', values=measure)


def log_ratios(counted, recipe, system, levels):
    """Log of the steps of a system until the loss is below a level, over those of `original`, of each seed.

    levels  nats of each seed
    """
    curves = pivoted(counted, recipe, 'curve')
    steps = {}
    for name in (system, 'original'):
        pairs = zip(curves[name], levels, strict=True)
        steps[name] = np.array([steps_below(curve, level) for curve, level in pairs])
    return np.log(steps[system] / steps['original'])


def primary_differences(counted, level):
    """{test: its difference in each seed}; a seed's runs have the same rows and masks."""
    post, modern = (pivoted(counted, recipe, 'loss') for recipe in RECIPES)
    kv_less_symmetric = [recipe['shared_kv'] - recipe['symmetric'] for recipe in (post, modern)]
    return {
        'a: loss of shared_kv less symmetric, mean of both recipes': sum(kv_less_symmetric) / 2,
        'b: log of the steps of tied_start over those of original, post-LN':
            log_ratios(counted, 'post-LN', 'tied_start', [level] * len(post)),
        'c: loss of symmetric less original, of modern less that of post-LN':
            (modern['symmetric'] - modern['original']) - (post['symmetric'] - post['original']),
    }


# ---- 5. the tables ----

def print_search(rows):
    lines = []
    for recipe, system in itertools.product(RECIPES, SEARCHED):
        found = searched(rows, recipe, system)
        rates = '; '.join(f'{rate:g}: {found[rate]:.3f}' for rate in sorted(found))
        lines.append([recipe, f'`{system}`', rates])
    print_table('Search: rate: last loss', ['recipe', 'system', 'rates'], lines)


def print_check(rows):
    """Last losses of the runs of the search that a CPU repeated, less those of the search."""
    lines = []
    for row in rows[rows['arm'] == 'check'].itertuples():
        difference = row.loss - searched(rows, row.recipe, row.system)[row.rate]
        lines.append([row.recipe, f'`{row.system}`', f'{row.rate:g}', f'{difference:+.3f}'])
    print_table('Last loss on a CPU less that on the GPU', ['recipe', 'system', 'rate', 'nats'], lines)


def print_tests(counted, level):
    found = {name: paired(differences) for name, differences in primary_differences(counted, level).items()}
    adjusted = holm(pd.Series({name: p for name, (*_, p) in found.items()}))
    lines = [[name, shown_interval(test, 3), shown_p(test[3]), shown_p(adjusted[name])]
             for name, test in found.items()]
    print_table(f'Primary tests, {counted["seed"].nunique()} seeds; threshold of b: {level:.2f} nats',
                ['test', 'mean (95 %)', 'p', "Holm's p"], lines)


def print_cells(counted, level):
    """A line a cell: rate, last loss, BLiMP, steps; also less, or over, those of `original`."""
    rates = counted.set_index(['recipe', 'system'])['rate']
    cells = [*itertools.product(RECIPES, SYSTEMS)]
    losses = {recipe: pivoted(counted, recipe, 'loss') for recipe in RECIPES}
    p = holm(pd.Series({(recipe, system): paired(losses[recipe][system] - losses[recipe]['original'])[3]
                        for recipe, system in cells if system != 'original'}))
    lines = []
    for recipe, system in cells:
        p_of_loss = steps = ''                          # `original` is compared with nothing
        if system != 'original':
            p_of_loss = shown_p(p[recipe, system])
            steps = shown_steps(counted, recipe, system, level)
        lines.append([recipe, f'`{system}`', f'{rates[recipe, system].iloc[0]:g}',
                      *shown_measure(counted, recipe, system, 'loss', 3), p_of_loss,
                      *shown_measure(counted, recipe, system, 'BLiMP', 1), steps])
    print_table(f'Last loss in nats, BLiMP in %, steps until the loss is below {level:.2f}: '
                'mean (deviation), less or over `original` (95 %)',
                ['recipe', 'system', 'rate', 'loss', 'less `original`', "Holm's p",
                 'BLiMP', 'less `original`', 'steps'], lines)


def shown_measure(counted, recipe, system, measure, places):
    """Of a cell: mean and deviation, and what it is less `original`."""
    scores = pivoted(counted, recipe, measure)
    return shown_mean(scores[system], places), shown_less(scores[system], scores['original'], places)


def shown_less(scores, reference, places):
    """Mean of their differences, one a seed, with its interval; '' if they are the same scores."""
    if scores.equals(reference):
        return ''
    return shown_interval(paired(scores - reference), places)


def print_recipes(counted):
    """What modern changes, a line a system."""
    lines = []
    for system in SYSTEMS:
        line = [f'`{system}`']
        for measure, places in (('loss', 3), ('BLiMP', 1)):
            post, modern = (pivoted(counted, recipe, measure)[system] for recipe in RECIPES)
            line.append(shown_less(modern, post, places))
        lines.append(line)
    print_table('Modern less post-LN (95 %)', ['system', 'loss in nats', 'BLiMP in %'], lines)


def shown_steps(counted, recipe, system, levels):
    """Steps until a loss, over those of `original`: geometric mean over the seeds.

    levels  nats, one number or one of each seed
    """
    seeds = counted['seed'].unique()
    ratios = log_ratios(counted, recipe, system, np.broadcast_to(levels, len(seeds)))
    return shown_interval(np.exp(paired(ratios)[:3]), sign='')


def print_steps(counted, level):
    """Steps until other losses than that of the primary test.

    A run that never comes below counts as all its steps, so the last loss of `original` is no measure of a
    system that ends above it.
    """
    lines = []
    for recipe, system in itertools.product(RECIPES, SYSTEMS):
        if system == 'original':
            continue
        line = [recipe, f'`{system}`']
        line += [shown_steps(counted, recipe, system, nats) for nats in (level + 0.5, level - 0.5)]
        last = pivoted(counted, recipe, 'loss')['original']
        line.append(shown_steps(counted, recipe, system, last) if system == 'tied_start' else '')
        lines.append(line)
    print_table('Steps until the loss is below, over those of `original` (95 %)',
                ['recipe', 'system', f'{level + 0.5:.2f}', f'{level - 0.5:.2f}', 'last loss of `original`'],
                lines)


def print_phenomena(counted):
    """Differences of BLiMP from `original`, a table a recipe, a line a phenomenon."""
    phenomena = counted.columns[counted.columns.get_loc('BLiMP') + 1:]
    others = [system for system in SYSTEMS if system != 'original']
    for recipe in RECIPES:
        lines = []
        for phenomenon in phenomena:
            scores = pivoted(counted, recipe, phenomenon)
            differences = [paired(scores[system] - scores['original']) for system in others]
            lines.append([phenomenon, shown_mean(scores['original'], 1),
                          *(shown_interval(difference, 1) for difference in differences)])
        print_table(f'BLiMP, {recipe}: `original` in %, then the others less `original` (95 %)',
                    ['phenomenon', '`original`', *(f'`{system}`' for system in others)], lines)


# ---- 6. the figure ----

COLOURS = {'post-LN': '#0072B2', 'modern': '#D55E00'}
MARKERS = {'original': 'o', 'tied_start': 'X', 'symmetric': 's', 'shared_kv': 'D', 'pairwise': '^',
           'shared': 'v'}


def draw(counted):
    """Loss against parameters, BLiMP against loss: a point a cell, 95 % intervals of its mean over seeds."""
    from matplotlib.figure import Figure
    figure = Figure((13, 6.2), layout='constrained')
    by_size, by_loss = figure.subplots(1, 2)
    for (recipe, system), cell in counted.groupby(['recipe', 'system'], sort=False):
        million = cell['parameters'].iloc[0] / 1e6
        loss, accuracy = paired(cell['loss']), paired(cell['BLiMP'])
        draw_cell(by_size, (million, million, million), loss, COLOURS[recipe], MARKERS[system])
        draw_cell(by_loss, loss, accuracy, COLOURS[recipe], MARKERS[system])
    by_size.set_xlabel('million parameters', fontsize=16)
    by_size.set_ylabel('last validation loss (nats)', fontsize=16)
    by_loss.set_xlabel('last validation loss (nats)', fontsize=16)
    by_loss.set_ylabel('BLiMP (%)', fontsize=16)
    for recipe, colour in COLOURS.items():
        by_loss.plot([], [], 's', color=colour, label=recipe)
    for system, marker in MARKERS.items():
        by_loss.plot([], [], marker, color='#777777', label=system)
    figure.legend(loc='outside upper center', ncols=8, fontsize=13, markerscale=1.5)
    for panel in (by_size, by_loss):
        panel.tick_params(labelsize=14)
        panel.spines[['top', 'right']].set_visible(False)
    figure.savefig(FIGURE, dpi=100)


def draw_cell(panel, x, y, colour, marker):
    """x, y: (middle, low, high, ...)"""
    half_widths = [[[found[0] - found[1]], [found[2] - found[0]]] for found in (x, y)]
    panel.errorbar(x[0], y[0], xerr=half_widths[0], yerr=half_widths[1], color=colour, marker=marker,
                   markersize=10, alpha=0.8)


# ---- 7. the texts; main ----

def write_texts(articles, novels):
    """data/texts_grid/*.jsonl: a row is an article's lines of prose, or 100 lines of a novel."""
    folder = os.path.join('data', 'texts_grid')
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'articles.jsonl'), 'w', encoding='utf-8') as file:
        for lines in read_lines(articles):
            write_text(file, [line for line in lines if is_prose(line)])
    with open(os.path.join(folder, 'novels.jsonl'), 'w', encoding='utf-8') as file:
        for lines in read_lines(novels):
            for begin in range(0, len(lines), 100):     # so that validation has a part of many novels
                write_text(file, lines[begin:begin + 100])


def read_lines(folder):
    """The lines of each file of a folder."""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), '*'))):
        with open(path, encoding='utf-8-sig', errors='replace') as file:
            yield [line.strip() for line in file]


def write_text(file, lines):
    if any(lines):
        file.write(json.dumps({'text': '\n'.join(lines)}) + '\n')


def is_prose(line):
    """Not a title, an item of a list, or the rest of a table."""
    return len(line) >= 60 and line[0] != '*' and line[-1] in '.!?"'


def main():
    command, *words = sys.argv[1:] or ['']
    if command == 'texts' and len(words) == 2:
        write_texts(*words)
    elif command == 'search' and not words:
        runs.make_all(search_plans, rows_now, make, OUT)
    elif command == 'count' and len(words) == 1:
        blimp, = words
        runs.make_all(count_plans, rows_now, lambda plan: make(plan, blimp), OUT)
    elif command or words:
        sys.exit('grid.py: texts ARTICLES NOVELS, search, count BLIMP, or nothing')
    else:
        report(rows_now())


def report(rows):
    print_search(rows)
    print_check(rows)
    counted = balanced(rows)
    if counted['seed'].nunique() < 2:
        sys.exit('grid.py: no tests before all runs of two seeds are made')
    counted = with_blimp(counted)
    level = threshold(rows)
    print_tests(counted, level)
    print_cells(counted, level)
    print_recipes(counted)
    print_steps(counted, level)
    print_phenomena(counted)
    draw(counted)


if __name__ == '__main__':
    main()
