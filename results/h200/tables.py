"""Raw files of this folder, and results/STUDY.md's tables made from them.

    $ PYTHONPATH=. python results/h200/tables.py

A raw file has one JSON object a line, written as soon as it is known. In results/STUDY.md everything between
`<!-- NAME -->` and `<!-- end -->` is replaced by the table of claim NAME; the rest is written by hand.
"""
from configurator import configure, run

import json
import math
import os
import re
import time
from contextlib import suppress

import numpy as np

raw = 'results/h200'            # folder of study.jsonl
page = 'results/STUDY.md'       # the page whose tables are written again; made if missing

QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}        # number of seeds -> Student's t, 97.5 %
LEVEL, BELOW = (-0.03, 0.03), (-math.inf, 0.0)              # nats
LOSS, PLATEAU = 'loss', 'plateau'                           # compared by difference, by ratio
CLAIMS = {                      # paper -> [(quantity, system, other system, what the paper claims)]
    'Courtois et al. 2024': [
        (PLATEAU, 'pairwise', 'original', (0, 0.6)), (LOSS, 'pairwise', 'original', LEVEL),
        (LOSS, 'symmetric', 'original', (0.03, 0.2)),
        *((LOSS, f'pairwise_{kind}', 'pairwise', LEVEL)     # rank and start of S
          for kind in ('rank_1', 'rank_16', 'fan_in', 'normal'))],
    'Kowsher et al. 2024': [(LOSS, 'shared', 'original', (-math.inf, 0.03))],
    'Tian et al. 2021': [(LOSS, *pair, BELOW) for pair in (
        ('part_mask', 'no_position'), ('one_head_sigmoid', 'one_head_softmax'), ('shatter', 'part_bias'),
        ('part_bias', 'one_head_sigmoid'), ('shatter', 'original'), ('shatter, equal time', 'original'),
        ('shatter, equal time', 'rpe, equal time'), ('shatter, equal time', 'rab, equal time'))],
    'Liu 2022': [(LOSS, *pair, BELOW) for pair in (
        ('gau', 'gau_scaled_squared_relu'), ('gau', 'gau_squared_relu'), ('gau', 'gau_softmax'),
        ('gau_4s_ns', 'gau_4s_n2'), ('gau_4s_ns', 'gau_4s_n'), ('gau_4s_ns', 'gau_4s_s2'),
        ('gau, equal time', 'roformer_v2'))],
}


def add(folder, name, **row):
    """Append a row to <folder>/<name>.jsonl, and print its numbers and short texts."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f'{name}.jsonl'), 'a') as file:
        file.write(json.dumps({'date': time.strftime('%Y-%m-%d %H:%M:%S'), **row}) + '\n')
    cells = (f'{key} {value:.5g}' if isinstance(value, float) else f'{key} {value}'
             for key, value in row.items() if not isinstance(value, (list, dict)))
    print('  '.join(cells), flush=True)


def read(folder, name):
    """The rows of <folder>/<name>.jsonl; a damaged line is skipped, a missing file has none."""
    rows = []
    with suppress(FileNotFoundError), open(os.path.join(folder, f'{name}.jsonl')) as file:
        for line in file:
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def best_rates(rows):
    """{system: the rate with the lowest final loss of seed 1}; a run that diverged has no loss."""
    best = {}
    for row in rows:
        key, loss = row['system'], math.inf if row['loss'] is None else row['loss']
        if row['seed'] == 1 and loss < best.get(key, (math.inf, None))[0]:
            best[key] = loss, row['rate']
    return {key: rate for key, (_, rate) in best.items()}


def seeds_of(rows, system):
    """{seed: row} of a system's finished runs at its best rate."""
    rate = best_rates(rows).get(system)
    return {row['seed']: row for row in rows
            if row['system'] == system and row['rate'] == rate and row['loss'] is not None}


def compare(rows, quantity, system, other):
    """Differences of losses or ratios of plateaus, seed by seed; one never left lasts as long as the run."""
    ours, theirs = seeds_of(rows, system), seeds_of(rows, other)
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    if quantity == LOSS:
        return [a[LOSS] - b[LOSS] for a, b in pairs]
    return [(a[PLATEAU] or a['steps']) / (b[PLATEAU] or b['steps']) for a, b in pairs]


def verdict(low, high, least, most):
    """What a 95 % interval says of the claim that the value lies between least and most."""
    if least <= low and high <= most:
        return 'holds here'
    return 'does not' if high < least or low > most else 'cannot tell'


def system_line(rows, system):
    """Table line of a system: its rates with seed 1, then all seeds at the best rate."""
    seeds = [row for _, row in sorted(seeds_of(rows, system).items())]
    if not seeds:
        return f'| {system} | not run | | | | |'
    first = sorted((row['rate'], row['loss']) for row in rows if row['system'] == system and row['seed'] == 1)
    tried = ', '.join(f'{rate:g}: ' + ('diverged' if loss is None else f'{loss:.3f}') for rate, loss in first)
    losses, accuracies = ([row[key] for row in seeds] for key in ('loss', 'accuracy, %'))
    deviation = f' ({np.std(losses, ddof=1):.3f})' if len(seeds) > 1 else ''
    plateaus = ' '.join(str(row['plateau'] or 'never') for row in seeds)
    return (f"| {system} | {tried} | {seeds[0]['rate']:g} | {np.mean(losses):.3f}{deviation} | "
            f'{np.mean(accuracies):.1f} | {plateaus} |')


def claim_line(rows, quantity, system, other, claimed):
    """Table line of a claim: mean over seeds, its 95 % interval and what that says."""
    values, sign = compare(rows, quantity, system, other), '-' if quantity == LOSS else '/'
    start = f'| {quantity}: {system} {sign} {other} | {claimed[0]} to {claimed[1]} | {len(values)}'
    if len(values) < 2:
        return f'{start} | | | cannot tell |'
    middle, half = np.mean(values), QUANTILE[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
    low, high = middle - half, middle + half
    return f'{start} | {middle:.3f} | {low:.3f} to {high:.3f} | {verdict(low, high, *claimed)} |'


def claim_tables(rows, claims):
    """The two tables of a paper: its systems, and its claims."""
    systems = dict.fromkeys(name for claim in claims for name in claim[1:3])
    return '\n'.join([
        '| system | rate: loss of seed 1 | best rate | loss (deviation) | accuracy, % | plateau, steps |',
        '|---|---|---|---|---|---|', *(system_line(rows, system) for system in systems), '',
        '| compared | claimed | seeds | mean | 95 % interval | verdict |',
        '|---|---|---|---|---|---|', *(claim_line(rows, *claim) for claim in claims)])


def made_by(rows):
    """Devices, versions and dates of the runs, and one command."""
    last, dates = rows[-1], sorted({row['date'][:10] for row in rows})
    devices = ', '.join(sorted({row['device'] for row in rows}))
    return (f"{len(rows)} runs on {devices}, torch {last['torch']}, {dates[0]} to {dates[-1]};\n"
            f"unigram entropy {last['unigram']:.3f} nats. The last was `{last['command']}`.")


def main():
    configure(globals())
    rows = read(raw, 'study')
    text = '# The claims of the papers on one GPU\n\n' + '\n'.join(
        f'## {name}\n\n<!-- {name} -->\n<!-- end -->\n' for name in ('Runs', *CLAIMS))
    with suppress(FileNotFoundError), open(page) as file:
        text = file.read()
    tables = {'Runs': made_by(rows) if rows else 'none yet'}
    tables |= {name: claim_tables(rows, claims) for name, claims in CLAIMS.items()}
    for name, table in tables.items():
        text = re.sub(rf'(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)', lambda found, table=table:
                      f'{found[1]}{table}\n{found[2]}', text, flags=re.S)
    with open(page, 'w') as file:
        file.write(text)


if __name__ == '__main__':
    run(main)
