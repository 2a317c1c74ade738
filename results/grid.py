"""The runs and the tests of results/grid.md: which of queries, keys and values a masked model can share.

    $ python results/grid.py texts ARTICLES NOVELS      writes data/texts_grid from two folders of .txt
    $ python results/grid.py search                     makes the runs of the search of the rates
    $ python results/grid.py count                      makes the counted runs at the rates found
    $ python results/grid.py                            prints the tables and the tests

1. the plan: recipes, systems, seeds; the order of the runs
2. a run of train.py; its row in grid.jsonl
3. the rates of the search; the threshold
4. the three primary tests
5. the tables; main

Needs scipy: pip install -r requirements-dev.txt
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
from train import read_metrics

ROWS = os.path.join(HERE, 'grid.jsonl')
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
SEEDS = range(1, 7)
SEARCH_SEED = 101               # not used again
STEPS = 2500


class Plan(NamedTuple):
    """A run that is to be made."""
    arm: str                    # search or count
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

def make(plan):
    """Run train.py to its end, or on from its newest checkpoint; append the run's row."""
    started = time.time()
    subprocess.run([sys.executable, *plan.command], check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, 'OMP_NUM_THREADS': '1'})
    curve = [[line['step'], round(line['loss'], 4)] for line in read_metrics(plan.folder)
             if line['kind'] == 'val']
    last_step, loss = curve[-1]
    runs.append_row(ROWS, {
        **plan._asdict(), 'steps': last_step, 'loss': loss, 'machine': runs.machine(),
        'minutes': round((time.time() - started) / 60, 1), 'revision': runs.revision_of(plan.folder),
        'curve': curve})
    print(plan.name, loss, flush=True)


def rows_now():
    return runs.read_rows(ROWS, [*Plan._fields, 'loss', 'curve'])


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


def primary_differences(counted, level):
    """{test: its difference in each seed}; a seed's runs have the same rows and masks."""
    losses = counted.pivot(index='seed', columns=['recipe', 'system'], values='loss')
    post, modern = losses['post-LN'], losses['modern']
    steps = counted.assign(steps=[steps_below(curve, level) for curve in counted['curve']])
    steps = steps.pivot(index='seed', columns=['recipe', 'system'], values='steps')['post-LN']
    kv_less_symmetric = [recipe['shared_kv'] - recipe['symmetric'] for recipe in (post, modern)]
    return {
        'a: loss of shared_kv less symmetric, mean of both recipes': sum(kv_less_symmetric) / 2,
        'b: log of the steps of tied_start over those of original, post-LN':
            np.log(steps['tied_start'] / steps['original']),
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


def print_tests(counted, level):
    found = {name: paired(differences) for name, differences in primary_differences(counted, level).items()}
    adjusted = holm(pd.Series({name: p for name, (*_, p) in found.items()}))
    lines = [[name, shown_interval(test, 3), shown_p(test[3]), shown_p(adjusted[name])]
             for name, test in found.items()]
    print_table(f'Primary tests, {counted["seed"].nunique()} seeds; threshold of b: {level:.2f} nats',
                ['test', 'mean (95 %)', 'p', "Holm's p"], lines)


def print_losses(counted, level):
    """A line a cell: mean and deviation of the last loss, less `original` of its recipe, steps below."""
    lines = []
    for recipe in RECIPES:
        of_recipe = counted[counted['recipe'] == recipe]
        losses = of_recipe.pivot(index='seed', columns='system', values='loss')
        for system in SYSTEMS:
            cell = of_recipe[of_recipe['system'] == system]
            steps = cell['curve'].map(lambda curve: steps_below(curve, level))
            line = [recipe, f'`{system}`', f'{cell["rate"].iloc[0]:g}',
                    shown_mean(losses[system], 3)]
            if system == 'original':
                line.append('')
            else:
                line.append(shown_interval(paired(losses[system] - losses['original']), 3))
            lines.append([*line, shown_mean(steps, 0)])
    print_table('Last loss and steps below the threshold: mean (deviation)',
                ['recipe', 'system', 'rate', 'loss', 'less `original` (95 %)', 'steps'], lines)


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
    elif command in ('search', 'count') and not words:
        plans_of = {'search': search_plans, 'count': count_plans}[command]
        runs.make_all(plans_of, rows_now, make, OUT)
    elif command or words:
        sys.exit('grid.py: texts ARTICLES NOVELS, search, count, or nothing')
    else:
        rows = rows_now()
        print_search(rows)
        counted = balanced(rows)
        if counted['seed'].nunique() < 2:
            sys.exit('grid.py: no tests before all runs of two seeds are made')
        level = threshold(rows)
        print_losses(counted, level)
        print_tests(counted, level)


if __name__ == '__main__':
    main()
