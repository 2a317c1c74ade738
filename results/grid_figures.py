"""The second grid's figure, and the share of the cost of q = k that `phase` returns: see results/findings.md

    $ python results/grid2_figure.py        prints the shares and draws results/grid2_cost.png

Run it in the project's folder. It reads the rows in results/grid2.jsonl and needs scipy and matplotlib.
"""
import numpy as np
from experiment import differences, paired, read_plan, read_rows, shown_interval
from matplotlib.figure import Figure
from scipy.stats import t as student

PLAN = 'results/grid2.py'
COLOURS = {'post-LN': '#0072B2', 'modern': '#D55E00'}
LABELS = {'symmetric': 'q = k', 'shared_kv': 'k = v', 'phase': 'phase', 'pairwise': 'pairwise',
          'thin': 'thin MLP'}
STEPS = 500, 1000, 1500, 2000, 2500


def print_shares(rows):
    """By the loss of all validation rows after the last step, then by that of 512 rows at some steps."""
    for recipe in COLOURS:
        print(f"{recipe}, last step, all rows: {shown_interval(share(rows, recipe, 'loss'), 2, '')}")
        for step in STEPS:
            at_step = rows.assign(at_step=[dict(curve)[step] for curve in rows['curve']])
            print(f"{recipe}, step {step}: {shown_interval(share(at_step, recipe, 'at_step'), 2, '')}")


def share(rows, recipe, measure):
    """(ratio, low, high) of what `phase` gains over q = k to what q = k costs, paired by seed.  Fieller 1954

    The interval has all ratios r for which Student's t test does not reject that gain - r * cost is 0 on
    average.
    """
    gain = differences(rows, {f'{recipe}/symmetric': 1, f'{recipe}/phase': -1}, measure)
    cost = differences(rows, {f'{recipe}/symmetric': 1, f'{recipe}/original': -1}, measure)
    covariance = np.cov(gain, cost) / len(gain) * student.ppf(0.975, len(gain) - 1) ** 2
    constant = gain.mean() ** 2 - covariance[0, 0]
    linear = gain.mean() * cost.mean() - covariance[0, 1]
    square = cost.mean() ** 2 - covariance[1, 1]
    low, high = sorted(np.roots([square, -2 * linear, constant]))
    return gain.mean() / cost.mean(), low, high


def draw(rows):
    """Loss above `original` with 95 % intervals; below a name, the mean share of the parameters saved."""
    figure = Figure((6, 6.6), layout='constrained')
    panel = figure.subplots()
    parameters = rows.groupby('cell')['parameters'].first()
    names = []
    for y, (system, label) in enumerate(LABELS.items()):
        kept = []
        for (recipe, colour), shift in zip(COLOURS.items(), (0.13, -0.13), strict=True):
            cell, reference = f'{recipe}/{system}', f'{recipe}/original'
            kept.append(parameters[cell] / parameters[reference])
            cost, low, high, _ = paired(differences(rows, {cell: 1, reference: -1}))
            panel.errorbar(cost, y + shift, xerr=[[cost - low], [high - cost]], fmt='o', color=colour,
                           markersize=9, linewidth=3, label=recipe if y == 0 else None)
        names.append(f'{label}\n−{100 * (1 - np.mean(kept)):.1f} %')
    panel.axvline(0, color='black')
    panel.set_yticks(range(len(names)), names)
    panel.set_xticks([0, 0.05, 0.1], ['0', '0.05', '0.1'])
    panel.tick_params(labelsize=17)
    panel.tick_params(axis='y', length=0)
    panel.set_xlabel('loss above `original` (nats)', fontsize=17)
    panel.set_title('A thin MLP saves about as much\nas q = k, for less loss', fontsize=19)
    panel.legend(fontsize=17, loc='upper right', frameon=False)
    panel.spines[['top', 'right', 'left']].set_visible(False)
    figure.savefig('results/grid2_cost.png', dpi=120)


if __name__ == '__main__':
    plan, runs = read_plan(PLAN)
    found = read_rows(PLAN, runs)
    print_shares(found)
    draw(found)
