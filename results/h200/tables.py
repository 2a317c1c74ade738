"""Raw files of this folder, and results/STUDY.md's tables made from them.

    $ PYTHONPATH=. python results/h200/tables.py

A raw file has one JSON object a line, written as soon as it is known. In results/STUDY.md everything between
`<!-- NAME -->` and `<!-- end -->` is replaced by the table of claim NAME; the rest is written by hand.
"""
from configurator import configure, run

# isort: split
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
LEVEL = 0.03                    # nats: losses closer than this are level
# claim -> [(what the paper says, quantity, 'difference' or 'ratio', system, other system, lowest, highest)]
CLAIMS = {
    'Courtois et al. 2024': [
        ('pairwise leaves the plateau in half the steps', 'plateau', 'ratio', 'pairwise', 'original', 0, 0.6),
        ('pairwise ends level with original', 'loss', 'difference', 'pairwise', 'original', -LEVEL, LEVEL),
        ('symmetric ends 0.1 above original', 'loss', 'difference', 'symmetric', 'original', LEVEL, 0.2),
        ('S of rank 1 ends level with full S', 'loss', 'difference', 'pairwise_rank_1', 'pairwise', -LEVEL, LEVEL),
        ('S of rank 16 ends level with full S', 'loss', 'difference', 'pairwise_rank_16', 'pairwise', -LEVEL,
         LEVEL),
        ('S ~ N(0, 1/K) ends level with S near I', 'loss', 'difference', 'pairwise_fan_in', 'pairwise', -LEVEL,
         LEVEL),
        ('S ~ N(0, 0.02) ends level with S near I', 'loss', 'difference', 'pairwise_normal', 'pairwise', -LEVEL,
         LEVEL)],
    'Kowsher et al. 2024': [
        ('shared ends level with original', 'loss', 'difference', 'shared', 'original', -math.inf, LEVEL)],
    'Tian et al. 2021': [
        (f'{system} ends below {other}', 'loss', 'difference', system, other, -math.inf, 0)
        for system, other in (
            ('part_mask', 'no_position'), ('one_head_sigmoid', 'one_head_softmax'),
            ('part_bias', 'one_head_sigmoid'), ('shatter', 'part_bias'), ('shatter', 'original'),
            ('shatter, equal time', 'original'), ('shatter, equal time', 'rpe, equal time'),
            ('shatter, equal time', 'rab, equal time'))],
    'Liu 2022': [
        *((f'gau with softmax_plus ends below {other}', 'loss', 'difference', 'gau', other, -math.inf, 0)
          for other in ('gau_scaled_squared_relu', 'gau_squared_relu', 'gau_softmax')),
        *((f'scale ns ends below {scale}, with T = 4 s', 'loss', 'difference', 'gau_ns', f'gau_{scale}', -math.inf,
           0) for scale in ('n2', 'n', 's2')),
        ('gau ends below RoFormerV2 at equal time', 'loss', 'difference', 'gau, equal time', 'roformer_v2',
         -math.inf, 0)],
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


def compare(rows, quantity, kind, system, other):
    """Differences or ratios of a quantity, seed by seed; a plateau that was never left has the run's length."""
    ours, theirs = seeds_of(rows, system), seeds_of(rows, other)
    values = []
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = (row['steps'] if row[quantity] is None else row[quantity] for row in (ours[seed], theirs[seed]))
        values.append(a / max(b, 1) if kind == 'ratio' else a - b)
    return values


def verdict(low, high, least, most):
    """What a 95 % interval says of the claim that the value lies between least and most."""
    if least <= low and high <= most:
        return 'holds here'
    return 'does not' if high < least or low > most else 'cannot tell'


def claim_table(rows, claims):
    """Two tables of a paper: its systems, and its claims with their 95 % intervals over seeds."""
    lines = ['| system | loss of seed 1 at each rate | best rate | loss (deviation) | accuracy, % | plateau ends |',
             '|---|---|---|---|---|---|']
    for system in dict.fromkeys(name for claim in claims for name in claim[3:5]):
        seeds = list(seeds_of(rows, system).values())
        if not seeds:
            lines.append(f'| {system} | not run | | | | |')
            continue
        tried = ', '.join(f"{row['rate']:g}: " + ('diverged' if row['loss'] is None else f"{row['loss']:.3f}")
                          for row in sorted(rows, key=lambda row: row['rate'])
                          if row['system'] == system and row['seed'] == 1)
        losses = [row['loss'] for row in seeds]
        deviation = f' ({np.std(losses, ddof=1):.3f})' if len(seeds) > 1 else ''
        ends = ', '.join(str(row['plateau'] or 'never') for row in seeds)
        lines.append(f"| {system} | {tried} | {seeds[0]['rate']:g} | {np.mean(losses):.3f}{deviation} | "
                     f"{np.mean([row['accuracy, %'] for row in seeds]):.1f} | {ends} |")
    lines += ['', '| claim | quantity | value | 95 % interval | seeds | verdict |', '|---|---|---|---|---|---|']
    for text, quantity, kind, system, other, least, most in claims:
        values = compare(rows, quantity, kind, system, other)
        if len(values) < 2:
            lines.append(f'| {text} | {quantity}, {kind} | - | - | {len(values)} | cannot tell |')
            continue
        middle = float(np.mean(values))
        half = QUANTILE[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values))
        lines.append(f'| {text} | {quantity}, {kind} | {middle:.3f} | {middle - half:.3f} to {middle + half:.3f} | '
                     f'{len(values)} | {verdict(middle - half, middle + half, least, most)} |')
    return '\n'.join(lines)


def made_by(rows):
    """Devices, versions and dates of the runs, and the command that every run's is like."""
    last = rows[-1]
    dates = sorted({row['date'][:10] for row in rows})
    devices = ', '.join(sorted({row['device'] for row in rows}))
    return (f"{len(rows)} runs on {devices}, torch {last['torch']}, {dates[0]} to {dates[-1]}; unigram entropy "
            f"{last['unigram']:.3f} nats; the last was `{last['command']}`")


def main():
    configure(globals())
    rows = read(raw, 'study')
    text = '# The claims of the papers on one GPU\n\n' + '\n'.join(
        f'## {name}\n\n<!-- {name} -->\n<!-- end -->\n' for name in ('Runs', *CLAIMS))
    with suppress(FileNotFoundError), open(page) as file:
        text = file.read()
    tables = {'Runs': made_by(rows) if rows else 'none yet'}
    tables |= {name: claim_table(rows, claims) for name, claims in CLAIMS.items()}
    for name, table in tables.items():
        text = re.sub(rf'(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)', lambda found, table=table:
                      f'{found[1]}{table}\n{found[2]}', text, flags=re.S)
    with open(page, 'w') as file:
        file.write(text)


if __name__ == '__main__':
    run(main)
