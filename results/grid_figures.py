"""What the ways to save a matrix cost, in the second to the fourth grid: see results/findings.md

    $ python results/grid_figures.py

It prints the numbers of that page that the plans themselves do not print, and draws results/grid2_cost.png
and grid3_cost.png. Run it in the project's folder. It reads the rows in results/plans; it needs scipy and
matplotlib.

Here a cell is RECIPE/SYSTEM. The recipes are post-LN and modern, of 1.8 million parameters, and larger, which
is modern with 17 million. Student's intervals are paired by seed; pooled ones take seeds as unpaired, and one
deviation for all cells of a recipe.
"""
import json

import numpy as np
import pandas as pd
import torch
from experiment import differences, holm, paired, pooled, read_plan, read_rows, shown_interval
from matplotlib.figure import Figure
from scipy.stats import bartlett
from scipy.stats import t as student

import train
from model import MaskedLM, model_config

PLANS = 'results/plans'
COLOURS = {'post-LN': '#0072B2', 'modern': '#D55E00'}
STEPS = 500, 1000, 1500, 2000, 2500


# ---- rows ----

def rows_of(name):
    plan, runs = read_plan(f'{PLANS}/{name}.py')
    return read_rows(f'{PLANS}/{name}.py', runs)


def all_rows():
    """The counted runs of the second and the third grid and of the scale study, with a column `percent`."""
    parts = [rows_of('grid2')]
    for recipe, name in ('post-LN', 'grid3_post_ln'), ('modern', 'grid3_modern'):
        rows = rows_of(name)                            # the other cells are copies of the second grid's
        parts.append(rows[rows['cell'].isin(['narrow', 'identity_query'])].assign(recipe=recipe))
    parts.append(rows_of('scale').assign(recipe='larger'))
    parts[1:] = [rows.assign(cell=rows['recipe'] + '/' + rows['cell']) for rows in parts[1:]]
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(recipe=rows['cell'].str.split('/').str[0], percent=100 * rows['blimp'])


def lines_of(name):
    """Rows that have no plan here, or that are wanted whether or not they belong to it."""
    with open(f'{PLANS}/{name}.jsonl', encoding='utf-8') as file:
        return pd.DataFrame(map(json.loads, file))


def all_searches():
    """The searches of learning rates, with a column `recipe`; `loss` is by 512 rows for the first grid."""
    first = lines_of('grid')
    parts = [first[first['arm'] == 'search'].rename(columns={'system': 'cell'})]
    for name in ('grid2_search_post_ln', 'grid2_search_modern', 'grid3_search_post_ln', 'grid3_search_modern',
                 'grid3_search_narrow', 'grid3_search_identity'):
        rows = lines_of(name)
        parts.append(rows.assign(recipe='post-LN' if name.endswith('post_ln') else 'modern',
                                 cell=rows['cell'].str.split('/').str[-1]))
    rows = pd.concat(parts).drop_duplicates(['recipe', 'cell', 'rate', 'seed'], keep='last')
    return rows.assign(recipe=rows['recipe'].replace('post_ln', 'post-LN'))


# ---- differences ----

def less(system, other, *recipes):
    """Weights of the difference of two systems, as a mean over these recipes."""
    return {f'{recipe}/{name}': sign / len(recipes)
            for recipe in recipes for name, sign in ((system, 1), (other, -1))}


def print_difference(rows, label, weights, level=0.95):
    """Student's and the pooled interval of a sum of losses."""
    of_seeds = shown_interval(paired(differences(rows, weights), level), 3)
    print(f'{label}: {of_seeds}; pooled {shown_interval(pooled(rows, weights, level), 3)}')


def print_costs(rows):
    """Loss above `original`, and the deviation of all cells, by recipe."""
    for recipe, of_recipe in rows.groupby('recipe', sort=False):
        cells = [losses for _, losses in of_recipe.groupby('cell')['loss']]
        freedom = sum(len(losses) - 1 for losses in cells)
        deviation = (sum(losses.var() * (len(losses) - 1) for losses in cells) / freedom) ** 0.5
        wide = of_recipe.pivot(index='seed', columns='cell', values='loss')
        pairs = wide.corr().to_numpy()[np.triu_indices(len(cells), 1)]
        print(f'\n{recipe}: one deviation of {len(cells)} cells is {deviation:.4f}, {freedom} degrees of '
              f'freedom; Bartlett p {bartlett(*cells).pvalue:.3f}; two cells correlate over seeds by '
              f'{pairs.mean():.2f} on average')
        for cell in wide.columns.drop(f'{recipe}/original'):
            print_difference(rows, f'{cell} less original', {cell: 1, f'{recipe}/original': -1})


def print_differences(rows):
    """Between other systems, in each recipe and as a mean of the two small ones."""
    print()
    pairs = [('narrow', 'symmetric'), ('identity_query', 'symmetric'), ('narrow', 'thin'),
             ('identity_query', 'thin'), ('narrow', 'pairwise'), ('narrow', 'original'),
             ('identity_query', 'original'), ('identity_query', 'shared_kv'), ('shared_kv', 'symmetric'),
             ('shared_kv', 'original'), ('symmetric', 'original'),
             ('pairwise', 'symmetric'), ('pairwise', 'original'), ('pairwise', 'thin'),
             ('thin', 'symmetric'), ('thin', 'original'), ('phase', 'symmetric'), ('phase', 'thin')]
    for system, other in pairs:
        for recipes in ('post-LN',), ('modern',), ('post-LN', 'modern'):
            print_difference(rows, f'{system} less {other}, {" and ".join(recipes)}',
                             less(system, other, *recipes))
    for system, other in (('symmetric', 'thin'), ('symmetric', 'narrow'), ('symmetric', 'identity_query'),
                          ('narrow', 'thin'), ('narrow', 'pairwise'), ('pairwise', 'symmetric')):
        print_difference(rows, f'{system} less {other}, larger', less(system, other, 'larger'))
    growth = {**less('symmetric', 'original', 'larger'), **less('original', 'symmetric', 'modern')}
    print(f'cost of q = k, larger less modern: pooled {shown_interval(pooled(rows, growth), 3)}')


def print_blimp(rows):
    """Differences in points of BLiMP."""
    print()
    for system, other in (('symmetric', 'original'), ('narrow', 'symmetric'), ('narrow', 'original'),
                          ('identity_query', 'symmetric'), ('thin', 'symmetric'), ('phase', 'symmetric')):
        for recipes in ('post-LN',), ('modern',), ('post-LN', 'modern'):
            points = differences(rows, less(system, other, *recipes), 'percent')
            of_seeds = shown_interval(paired(points), 2)
            print(f'BLiMP, {system} less {other}, {" and ".join(recipes)}: {of_seeds}')


def print_without_a_seed(rows):
    """The planned tests of the second grid without seed 5, which a pilot had used."""
    print()
    tests = [('thin', 'symmetric'), ('phase', 'symmetric'), ('phase', 'thin')]
    found = [paired(differences(rows[rows['seed'] != 5], less(*test, *COLOURS))) for test in tests]
    for test, interval, p in zip(tests, found, holm(pd.Series([p for *_, p in found])), strict=True):
        print(f"without seed 5, {' less '.join(test)}: {shown_interval(interval, 3)}, Holm's p {p:.3f}")


def print_repeats(rows):
    """How far repeated runs end from their rows."""
    print()
    for name in 'grid3_cpu', 'grid3_repeat':
        again = rows_of(name)
        has_recipe = again['cell'].str.contains('/')
        again['cell'] = again['cell'].where(has_recipe, 'modern/' + again['cell'])
        again = again[~again['cell'].isin(['modern/narrow', 'modern/identity_query'])]      # copies
        both = again.merge(rows, on=['cell', 'seed'])
        moved = both['loss_x'] - both['loss_y']
        print(f'{name}: {len(both)} repeats move by {moved.min():+.4f} to {moved.max():+.4f}, '
              f'{moved.mean():+.4f} on average')


# ---- by step ----

def at(rows, step):
    """The rows with a column `at_step`: the loss of 512 validation rows at this step."""
    return rows.assign(at_step=[dict(curve)[step] for curve in rows['curve']])


def print_by_step(rows):
    """Loss above `original` by 512 rows, and how much it has changed at the end."""
    print()
    for recipe, steps in ('post-LN', STEPS), ('modern', STEPS), ('larger', (1000, 3000, 5400)):
        of_recipe = rows[rows['recipe'] == recipe]
        systems = ['symmetric', 'shared_kv', 'narrow', 'identity_query']
        for system in systems[:1] if recipe == 'larger' else systems:
            costs = {step: differences(at(of_recipe, step), less(system, 'original', recipe), 'at_step')
                     for step in steps}
            for step, cost in costs.items():
                change = shown_interval(paired(costs[steps[-1]] - cost), 3) if step < steps[-1] else 'none'
                print(f'{recipe}, {system} less original, step {step}: {shown_interval(paired(cost), 3)}, '
                      f'change to the end {change}')


def print_shares(rows, system):
    """By the loss of all validation rows after the last step, then by that of 512 rows at some steps."""
    print(f'\n{system}')
    print(f"both, last step, all rows: {shown_interval(share(rows, COLOURS, system, 'loss'), 2, '')}")
    for recipe in COLOURS:
        of_recipe = rows[rows['recipe'] == recipe]
        found = share(of_recipe, [recipe], system, 'loss')
        print(f'{recipe}, last step, all rows: {shown_interval(found, 2, "")}')
        for step in STEPS:
            found = share(at(of_recipe, step), [recipe], system, 'at_step')
            print(f'{recipe}, step {step}: {shown_interval(found, 2, "")}')


def share(rows, recipes, system, measure):
    """(ratio, low, high) of what a system gains over q = k to what q = k costs."""
    return fieller(differences(rows, less('symmetric', system, *recipes), measure),
                   differences(rows, less('symmetric', 'original', *recipes), measure))


def fieller(gain, cost):
    """(ratio, low, high) of the mean of one difference to that of another, paired by seed.  Fieller 1954

    The interval has all ratios r for which Student's t test does not reject that gain - r * cost is 0 on
    average.
    """
    covariance = np.cov(gain, cost) / len(gain) * student.ppf(0.975, len(gain) - 1) ** 2
    constant = gain.mean() ** 2 - covariance[0, 0]
    linear = gain.mean() * cost.mean() - covariance[0, 1]
    square = cost.mean() ** 2 - covariance[1, 1]
    low, high = sorted(np.roots([square, -2 * linear, constant]))
    return gain.mean() / cost.mean(), low, high


# ---- the fourth grid ----

def print_fourth_grid():
    """What a mask of each token's score for itself does, and what a quarter of the width of q and k costs."""
    rows = as_recipe('grid4')
    print_costs(rows)
    for system, other in (('symmetric_no_self', 'symmetric'), ('symmetric_no_self', 'original_no_self'),
                          ('phase_no_self', 'original_no_self'), ('phase_no_self', 'phase'),
                          ('phase_no_self', 'symmetric_no_self')):
        print_difference(rows, f'{system} less {other}', less(system, other, 'grid4'))
    no_cost = less('phase_no_self', 'original', 'grid4')
    print_difference(rows, 'phase_no_self less original, 90 %', no_cost, 0.9)
    cost = differences(rows, less('symmetric', 'original', 'grid4'))
    masked = differences(rows, less('symmetric_no_self', 'original_no_self', 'grid4'))
    share_of_cost = shown_interval(fieller(cost - masked, cost), 2, '')
    print(f'share of the cost of q = k that the mask takes away: {share_of_cost}')

    rows = as_recipe('narrow_4')
    print_costs(rows)
    print_difference(rows, 'narrow_4 less narrow', less('narrow_4', 'narrow', 'narrow_4'))


def as_recipe(name):
    """The counted runs of a plan, whose cells have the plan's name as their recipe."""
    rows = rows_of(name)
    return rows.assign(recipe=name, cell=name + '/' + rows['cell'])


# ---- learning rates, sizes, the quickstart ----

def print_rates(rows, searches):
    """What a parabola through the best rate of a search and its neighbours would still gain."""
    gains = {}
    for (recipe, cell), of_cell in searches.groupby(['recipe', 'cell']):
        means = of_cell.groupby('rate')['loss'].mean().sort_index()
        middle = int(np.argmin(means))
        near = means.iloc[max(middle - 1, 0):middle + 2]
        if len(near) == 3:
            a, b, c = np.polyfit(np.log2(near.index), near, 2)
            gains[f'{recipe}/{cell}'] = means.min() - (c - b ** 2 / (4 * a))
    print('\nif each cell had the rate at the lowest point of that parabola')
    pairs = [('symmetric', 'original'), ('narrow', 'original'), ('identity_query', 'original'),
             ('thin', 'original'), ('pairwise', 'original'), ('phase', 'original'),
             ('shared_kv', 'original'), ('narrow', 'symmetric'), ('identity_query', 'symmetric'),
             ('narrow', 'thin'), ('identity_query', 'thin')]
    for system, other in pairs:
        for recipe in COLOURS:
            weights = less(system, other, recipe)
            loss = differences(rows, weights).mean()
            moved = loss - sum(weight * gains[cell] for cell, weight in weights.items())
            print(f'{system} less {other}, {recipe}: {loss:+.3f} would be {moved:+.3f}')


def print_at_one_rate(searches):
    """Two systems at one rate, seed 101. Against `original` by 512 rows, all that its search has."""
    print()
    for system, other, recipe in (('narrow', 'thin', 'post-LN'), ('narrow', 'thin', 'modern'),
                                  ('narrow', 'original', 'post-LN'), ('narrow', 'original', 'modern')):
        of_recipe = searches[(searches['recipe'] == recipe) & (searches['seed'] == 101)]
        if other == 'original':
            of_recipe = of_recipe.assign(loss=[curve[-1][1] for curve in of_recipe['curve']])
        wide = of_recipe.pivot(index='rate', columns='cell', values='loss')
        for rate, difference in (wide[system] - wide[other]).dropna().items():
            print(f'{system} less {other}, {recipe}, rate {rate:g}: {difference:+.3f}')


def print_sizes(rows):
    """Parameters, of the model and of its blocks, of modern and larger; what each system saves."""
    print()
    counts = {}
    for cell, of_cell in rows.groupby('cell', sort=False):
        knobs = {**vars(train), **of_cell['knobs'].iloc[0]}
        with torch.device('meta'):
            model = MaskedLM(model_config(knobs, 8192))
        counts[cell] = np.array([sum(p.numel() for p in part.parameters())
                                 for part in (model, model.encoder.blocks)])
        recipe = cell.split('/')[0]
        saved = 100 * (1 - counts[cell] / counts[f'{recipe}/original'])
        print(f'{cell}: {counts[cell][0]:,} parameters, {counts[cell][1]:,} in the blocks; it saves '
              f'{saved[0]:.1f} and {saved[1]:.1f} %')
    ratios = counts['larger/original'] / counts['modern/original']
    print(f'larger is {ratios[0]:.1f} times modern, {ratios[1]:.1f} times in the blocks')


def print_quickstart():
    """Where one more run of the quickstart ends, by its five newest seeds and by ten of an older revision."""
    print()
    rows = lines_of('quickstart')
    rows = rows.assign(loss=[validation[-1][1] for validation in rows['validation']])
    for name, losses in (('older revision', rows[rows['attention'].isna()]['loss']),
                         ('today', rows[rows['attention'] == 'pairwise']['loss'])):
        n = len(losses)
        half = losses.std() * (1 + 1 / n) ** 0.5 * student.ppf(0.975, n - 1)
        print(f'quickstart, {name}, {n} seeds: {losses.mean():.3f} ({losses.std():.3f}), one more '
              f'{losses.mean() - half:.2f} to {losses.mean() + half:.2f}')


# ---- figures ----

def draw(rows, labels, title, path):
    """Loss above `original` with pooled intervals; below a name, the mean share of the parameters saved.

    labels: {system: its name in the figure}
    """
    figure = Figure((6, 1.5 + len(labels)), layout='constrained')
    panel = figure.subplots()
    names = []
    parameters = rows.groupby('cell')['parameters'].first()
    for y, (system, label) in enumerate(labels.items()):
        kept = []
        for recipe in COLOURS:
            kept.append(parameters[f'{recipe}/{system}'] / parameters[f'{recipe}/original'])
            cost, low, high = pooled(rows, less(system, 'original', recipe))
            shift = 0.13 if recipe == 'post-LN' else -0.13
            panel.errorbar(cost, y + shift, xerr=[[cost - low], [high - cost]], fmt='o', markersize=9,
                           linewidth=3, color=COLOURS[recipe], label=recipe if y == 0 else None)
        names.append(f'{label}\n−{100 * (1 - np.mean(kept)):.1f} %')
    panel.axvline(0, color='black')
    panel.set_yticks(range(len(names)), names)
    panel.set_xticks([0, 0.05, 0.1], ['0', '0.05', '0.1'])
    panel.tick_params(labelsize=17)
    panel.tick_params(axis='y', length=0)
    panel.set_xlabel('loss above `original` (nats)', fontsize=17)
    panel.set_title(title, fontsize=19)
    panel.legend(fontsize=17, loc='upper right', frameon=False)
    panel.spines[['top', 'right', 'left']].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == '__main__':
    rows = all_rows()
    searches = all_searches()
    print_sizes(rows)
    print_costs(rows)
    print_differences(rows)
    print_blimp(rows)
    print_without_a_seed(rows)
    print_repeats(rows)
    print_by_step(rows)
    print_shares(rows, 'phase')
    print_shares(rows, 'identity_query')
    print_shares(rows, 'pairwise')
    print_fourth_grid()
    print_rates(rows, searches)
    print_at_one_rate(searches)
    print_quickstart()
    draw(rows, {'symmetric': 'q = k', 'shared_kv': 'k = v', 'phase': 'phase', 'pairwise': 'pairwise',
                'thin': 'thin MLP'},
         'A thin MLP saves about as much\nas q = k, for less loss', 'results/grid2_cost.png')
    draw(rows,
         {'symmetric': 'q = k', 'identity_query': 'no Wq', 'narrow': 'narrow q, k', 'thin': 'thin MLP'},
         'Narrow q and k save what\nq = k saves, for less loss', 'results/grid3_cost.png')
