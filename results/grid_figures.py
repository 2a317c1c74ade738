"""What the ways to save a matrix cost, in the second and the third grid: see results/findings.md

    $ python results/grid_figures.py

It prints the share of the cost of q = k that `phase` and `identity_query` return, and what some systems cost
at some steps, and draws results/grid2_cost.png and grid3_cost.png. Run it in the project's folder. It reads
the rows in results/*.jsonl; it needs scipy and matplotlib.
"""
import numpy as np
import pandas as pd
from experiment import differences, paired, read_plan, read_rows, shown_interval
from matplotlib.figure import Figure
from scipy.stats import t as student

COLOURS = {'post-LN': '#0072B2', 'modern': '#D55E00'}
STEPS = 500, 1000, 1500, 2000, 2500


def second_grid():
    """{recipe: rows}; in the plan a cell is called RECIPE/SYSTEM, here SYSTEM."""
    rows = rows_of('results/plans/grid2.py')
    recipe = rows['cell'].str.split('/').str[0]
    return {name: rows[recipe == name].assign(cell=rows['cell'].str.removeprefix(f'{name}/'))
            for name in COLOURS}


def rows_of(path):
    plan, runs = read_plan(path)
    return read_rows(path, runs)


def print_shares(recipes, system):
    """By the loss of all validation rows after the last step, then by that of 512 rows at some steps."""
    print(system)
    for recipe, rows in recipes.items():
        print(f"{recipe}, last step, all rows: {shown_interval(share(rows, system, 'loss'), 2, '')}")
        for step in STEPS:
            print(f"{recipe}, step {step}: {shown_interval(share(at(rows, step), system, 'at_step'), 2, '')}")


def at(rows, step):
    """The rows with a column `at_step`: the loss of 512 validation rows at this step."""
    return rows.assign(at_step=[dict(curve)[step] for curve in rows['curve']])


def print_costs(name, rows, systems, steps):
    """Loss above `original` by 512 rows at some steps."""
    for system in systems:
        for step in steps:
            cost = differences(at(rows, step), {system: 1, 'original': -1}, 'at_step')
            print(f'{name}, {system}, step {step}: {shown_interval(paired(cost), 3)}')


def share(rows, system, measure):
    """(ratio, low, high) of what a system gains over q = k to what q = k costs, paired by seed.  Fieller 1954

    The interval has all ratios r for which Student's t test does not reject that gain - r * cost is 0 on
    average.
    """
    gain = differences(rows, {'symmetric': 1, system: -1}, measure)
    cost = differences(rows, {'symmetric': 1, 'original': -1}, measure)
    covariance = np.cov(gain, cost) / len(gain) * student.ppf(0.975, len(gain) - 1) ** 2
    constant = gain.mean() ** 2 - covariance[0, 0]
    linear = gain.mean() * cost.mean() - covariance[0, 1]
    square = cost.mean() ** 2 - covariance[1, 1]
    low, high = sorted(np.roots([square, -2 * linear, constant]))
    return gain.mean() / cost.mean(), low, high


def print_beside_pairwise(recipe, rows, second):
    """Last loss of `narrow` less that of `pairwise`, which only the second grid has; all validation rows."""
    compared = pd.concat([rows[rows['cell'] == 'narrow'], second[second['cell'] == 'pairwise']])
    less = differences(compared, {'narrow': 1, 'pairwise': -1})
    print(f'{recipe}, narrow less pairwise: {shown_interval(paired(less), 3)}')


def draw(recipes, labels, title, path):
    """Loss above `original` with 95 % intervals; below a name, the mean share of the parameters saved.

    recipes: {recipe: rows}; labels: {cell: its name in the figure}
    """
    figure = Figure((6, 1.5 + len(labels)), layout='constrained')
    panel = figure.subplots()
    names = []
    for y, (system, label) in enumerate(labels.items()):
        kept = []
        for recipe, rows in recipes.items():
            parameters = rows.groupby('cell')['parameters'].first()
            kept.append(parameters[system] / parameters['original'])
            cost, low, high, _ = paired(differences(rows, {system: 1, 'original': -1}))
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
    second = second_grid()
    third = {'post-LN': rows_of('results/plans/grid3_post_ln.py'),
             'modern': rows_of('results/plans/grid3_modern.py')}
    print_shares(second, 'phase')
    print_shares(third, 'identity_query')
    for recipe, rows in third.items():
        print_costs(recipe, rows, ['narrow', 'identity_query'], [500, 2500])
        print_beside_pairwise(recipe, rows, second[recipe])
    print_costs('larger', rows_of('results/plans/scale.py'), ['symmetric'], [1000, 3000, 5400])
    draw(second, {'symmetric': 'q = k', 'shared_kv': 'k = v', 'phase': 'phase', 'pairwise': 'pairwise',
                  'thin': 'thin MLP'},
         'A thin MLP saves about as much\nas q = k, for less loss', 'results/grid2_cost.png')
    draw(third,
         {'symmetric': 'q = k', 'identity_query': 'no Wq', 'narrow': 'narrow q, k', 'thin': 'thin MLP'},
         'Narrow q and k save what\nq = k saves, for less loss', 'results/grid3_cost.png')
