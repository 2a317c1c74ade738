"""Differences of GAU's normalisers and scales, for systems.md: python results/systems.py

Runs with the same seed are paired; an interval is Student's, 95 %, with two degrees of freedom.
"""
import json
import os
import statistics
import sys

FOLDER = 'out/scales'
SEEDS = 1, 2, 3
QUANTILE = 4.303                # 97.5 %, of Student's t with two degrees of freedom
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


def last_loss(run):
    """Validation loss of a run's last validation, in nats."""
    folder = os.path.join(FOLDER, run)
    if not os.path.isdir(folder):
        sys.exit(f'systems.py: no run {folder}: the loop in results/systems.md makes it')
    with open(os.path.join(folder, 'metrics.jsonl')) as file:
        lines = [json.loads(line) for line in file]
    return [line['loss'] for line in lines if line['kind'] == 'val'][-1]


for first, second in PAIRS:
    for rows in ('', '_diff'):                          # joined rows, or a document a row
        differences = [last_loss(f'{first}{rows}-{seed}') - last_loss(f'{second}{rows}-{seed}')
                       for seed in SEEDS]
        half = QUANTILE * statistics.stdev(differences) / len(SEEDS) ** 0.5
        print(f'{first} - {second}{rows}: {statistics.mean(differences):.3f} ± {half:.3f}')
