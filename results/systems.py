"""Differences between the short runs of systems.md, for it and for claims.md: python results/systems.py

1. of all systems on one run, and of operators and initial values of S
2. of GAU's normalisers and scales at n = 4 s

Needs scipy: pip install -r requirements-dev.txt
"""
import itertools
import json
import os

import pandas as pd
from analysis import HERE, compare, holm, paired, print_table, shown_difference, shown_mean, shown_p
from scipy.stats import ttest_ind

RATE = '2e-3'                   # the one rate that every system has with every seed
SEEDS = 1, 2, 3

# ---- 1. rows ----

LOSS, ACCURACY = 1, 2           # in a validation
# title, rows, measure, the reference, what is compared with it
COMPARISONS = [
    ('loss with `rope`', 'systems.jsonl', LOSS, 'roformer_v1', ['symmetric', 'pairwise', 'shared']),
    ('loss with learned positions', 'tiny.jsonl', LOSS, 'original',
     ['symmetric', 'pairwise_identity', 'pairwise_fan_in', 'pairwise_normal', 'shared']),
    ('masked accuracy, points', 'systems.jsonl', ACCURACY, 'gau_softmax',
     ['gau', 'gau_squared_relu', 'gau_scaled_squared_relu']),
]
# Tian et al. 2021, figure 1: each is the one before it with one change
STEPS = ['no_position', 'part_mask', 'one_head_softmax', 'one_head_sigmoid', 'part_bias', 'shatter']


def last_scores(name, measure, systems):
    """A table of the last validations: systems (rows) and seeds (columns); accuracy in %."""
    with open(os.path.join(HERE, name), encoding='utf-8') as file:
        rows = [json.loads(line) for line in file]
    unit = 100 if measure == ACCURACY else 1
    last = {row['run']: unit * row['validation'][-1][measure] for row in rows}
    scores = {system: [last[f'{system}-{RATE}-{seed}'] for seed in SEEDS] for system in systems}
    return pd.DataFrame(scores, index=SEEDS).T


def welch_holm(scores, pairs):
    """{(system, other): p of Welch's t, by Holm over these pairs}"""
    p = {}
    for first, second in pairs:
        p[first, second] = ttest_ind(scores.loc[first], scores.loc[second], equal_var=False).pvalue
    return holm(pd.Series(p))


def print_comparisons():
    """Dunnett's p with one deviation for all systems, as in the study; Welch's t has those of the two."""
    for title, name, measure, reference, others in COMPARISONS:
        scores = last_scores(name, measure, [reference, *others])
        found = compare(scores, reference, others)
        adjusted = welch_holm(scores, [(system, reference) for system in others])
        places = 1 if measure == ACCURACY else 3
        lines = []
        for system in others:
            difference = shown_difference(found.loc[system], places)
            lines.append([f'`{system}`', difference, shown_p(adjusted[system, reference])])
        print_table(title, [f'less `{reference}`', "(Dunnett's p)", "Welch's p, by Holm"], lines)


def print_steps():
    scores = last_scores('systems.jsonl', LOSS, STEPS)
    means = scores.mean(axis=1)
    adjusted = welch_holm(scores, itertools.pairwise(STEPS))
    lines = []
    for (before, after), p in adjusted.items():
        lines.append([f'`{after}`', f'`{before}`', f'{means[after] - means[before]:+.3f}', shown_p(p)])
    print_table('Loss of each step', ['', 'less', 'difference', "Welch's p, by Holm"], lines)


# ---- 2. GAU's normalisers and scales ----

SCALES = ['gau_softmax', 'gau', 'gau_n', 'gau_s2', 'gau_n2', 'gau_ns2', 'gau_squared_relu',
          'gau_scaled_squared_relu']
PAIRS = [
    ('gau', 'gau_softmax'),
    ('gau_softmax', 'gau_ns2'),
    ('gau_softmax', 'gau_scaled_squared_relu'),
    ('gau_scaled_squared_relu', 'gau_ns2'),
    ('gau_n', 'gau_squared_relu'),
    ('gau_n', 'gau_n2'),
    ('gau_n', 'gau_s2'),
    ('gau_n', 'gau_ns2'),
]


def print_scales():
    """Runs with the same seed are paired; an interval is Student's, 95 %, with two degrees of freedom."""
    joined = last_scores('scales.jsonl', LOSS, SCALES)
    single = [f'{name}_diff' for name in SCALES]        # a document a row
    losses = last_scores('scales.jsonl', LOSS, single).set_axis(SCALES)
    accuracies = last_scores('scales.jsonl', ACCURACY, single).set_axis(SCALES)
    lines = [[f'`{name}`', shown_mean(joined.loc[name], 3), shown_mean(losses.loc[name], 3),
              shown_mean(accuracies.loc[name], 2)] for name in SCALES]
    print_table("GAU's normalisers and scales: mean (deviation)",
                ['', 'loss, joined rows', 'loss, a document a row', 'accuracy'], lines)
    lines = []
    for first, second in PAIRS:
        line = [f'`{first}`', f'`{second}`']
        for scores in joined, losses:
            difference, low, high, p = paired(scores.loc[first] - scores.loc[second])
            line.append(f'{difference:+.3f} ± {(high - low) / 2:.3f} ({shown_p(p)})')
        lines.append(line)
    print_table("Student's p, unadjusted", ['', 'less', 'joined rows', 'a document a row'], lines)


def main():
    print_comparisons()
    print_steps()
    print_scales()


if __name__ == '__main__':
    main()
