"""Statistics and tables that the scripts of the studies share; needs scipy.

1. systems that share a deviation: differences from a reference, adjusted p
2. pairs
3. numbers as text
"""
import math
import os

import numpy as np
import pandas as pd
from scipy.stats import chi2, norm, t, ttest_1samp

HERE = os.path.dirname(os.path.abspath(__file__))

# ---- 1. systems that share a deviation ----


def pooled_deviation(scores):
    """Deviation of a run from system + seed, and its degrees of freedom.  scores: (systems, seeds)

    Two-way analysis of variance without interaction.  All systems share the deviation, so that eleven systems
    with three seeds give 20 degrees of freedom, where a pair of systems has two.
    """
    systems, seeds = scores.shape
    residual = scores.sub(scores.mean(axis=1), axis=0)
    residual = residual - residual.mean()
    freedom = (systems - 1) * (seeds - 1)
    return math.sqrt((residual.to_numpy() ** 2).sum() / freedom), freedom


def dunnett(statistic, count, freedom):
    """P(the largest of `count` |t| is above `statistic`) if no system differs (Dunnett 1955).

    scipy.stats.dunnett takes raw samples without seeds in common, and is exact to four digits only.
    """
    # All `count` differences share two errors: the reference's, and that of the pooled deviation.
    # Given both they are independent.  So average over both, the rows being values of the deviation.
    reference = np.linspace(-8, 8, 161)
    weight = norm.pdf(reference) / norm.pdf(reference).sum()
    quantiles = (np.arange(1000) + 0.5) / 1000
    deviation = np.sqrt(chi2.ppf(quantiles, freedom) / freedom)[:, None]
    bound = math.sqrt(2) * statistic * deviation
    inside = norm.cdf(reference + bound) - norm.cdf(reference - bound)
    return 1 - (inside ** count @ weight).mean()


def holm(p):
    """Adjusted p of a family of tests (Holm 1979): the smallest times n, the next times n - 1, ..."""
    ordered = p.sort_values()
    factors = np.arange(len(ordered), 0, -1)
    return (ordered * factors).cummax().clip(upper=1).reindex(p.index)


def compare(scores, reference, others):
    """Differences from the reference, half of their 95 % intervals, p, and Dunnett's p.

    scores: (systems, seeds), of the systems that share a deviation
    """
    deviation, freedom = pooled_deviation(scores)
    means = scores.mean(axis=1)
    error = deviation * math.sqrt(2 / scores.shape[1])
    table = pd.DataFrame({'difference': means[others] - means[reference]})
    table['half'] = t.ppf(0.975, freedom) * error
    statistics = table['difference'].abs() / error
    table['p'] = 2 * t.sf(statistics, freedom)
    table['dunnett'] = [dunnett(statistic, len(others), freedom) for statistic in statistics]
    return table


# ---- 2. pairs ----

def paired(differences):
    """(mean, low, high, p) of Student's t for differences of pairs; 95 % interval."""
    test = ttest_1samp(differences, 0)
    return np.mean(differences), *test.confidence_interval(), test.pvalue


# ---- 3. numbers as text ----

def shown_p(p):
    if p < 0.001:
        return '<.001'
    return f'{p:.3f}'.removeprefix('0')


def shown_mean(values, places):
    """Mean and deviation.  values: a Series"""
    return f'{values.mean():.{places}f} ({values.std():.{places}f})'


def shown_interval(found, places=2, sign='+'):
    """found: (number, low, high, ...); sign='': no sign of what is above 0"""
    number, low, high = (f'{value:{sign}.{places}f}' for value in found[:3])
    return f'{number} ({low} to {high})'


def shown_difference(found, places):
    """found: a row of compare's table"""
    return f"{found['difference']:+.{places}f} ± {found['half']:.{places}f} ({shown_p(found['dunnett'])})"


def print_table(title, head, lines):
    print(f'\n{title}\n')
    print('| ' + ' | '.join(head) + ' |')
    print('|' + '---|' * len(head))
    for line in lines:
        print('| ' + ' | '.join(line) + ' |')
