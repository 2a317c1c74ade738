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


def ends(system, other, most=0.0, least=-math.inf, note=''):
    """The claim that the final loss of a system minus that of another lies between two bounds, in nats."""
    kind = 'level with' if least == -most else 'below' if most == 0 else f'at most {most} above'
    kind = f'{least} to {most} above' if least > 0 else kind
    return f'{system} ends {kind} {other}{note}', 'loss', 'difference', system, other, least, most


CLAIMS = {                      # paper -> [(claim, quantity, comparison, system, other, least, most)]
    'Courtois et al. 2024': [
        ('pairwise leaves the plateau in half the steps', 'plateau', 'ratio', 'pairwise', 'original', 0, 0.6),
        ends('pairwise', 'original', LEVEL, -LEVEL), ends('symmetric', 'original', 0.2, LEVEL),
        *(ends(f'pairwise_{kind}', 'pairwise', LEVEL, -LEVEL)
          for kind in ('rank_1', 'rank_16', 'fan_in', 'normal'))],
    'Kowsher et al. 2024': [ends('shared', 'original', LEVEL)],
    'Tian et al. 2021': [
        ends('part_mask', 'no_position'), ends('one_head_sigmoid', 'one_head_softmax'),
        ends('part_bias', 'one_head_sigmoid'), ends('shatter', 'part_bias'), ends('shatter', 'original'),
        *(ends('shatter, equal time', other)
          for other in ('original', 'rpe, equal time', 'rab, equal time'))],
    'Liu 2022': [
        *(ends('gau', f'gau_{other}') for other in ('scaled_squared_relu', 'squared_relu', 'softmax')),
        *(ends('gau_4s_ns', f'gau_4s_{scale}') for scale in ('n2', 'n', 's2')),
        ends('gau, equal time', 'roformer_v2')],
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
    """Differences or ratios of a quantity, seed by seed; a plateau never left lasts as long as the run."""
    ours, theirs = seeds_of(rows, system), seeds_of(rows, other)
    values = []
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = (row['steps'] if row[quantity] is None else row[quantity]
                for row in (ours[seed], theirs[seed]))
        values.append(a / max(b, 1) if kind == 'ratio' else a - b)
    return values


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


def claim_line(rows, text, quantity, kind, system, other, least, most):
    """Table line of a claim: mean over seeds, its 95 % interval and what that says."""
    values = compare(rows, quantity, kind, system, other)
    start, n = f'| {text} | {kind} of {quantity}', len(values)
    if n < 2:
        return f'{start} | | | {n} | cannot tell |'
    middle, half = np.mean(values), QUANTILE[n] * np.std(values, ddof=1) / math.sqrt(n)
    low, high = middle - half, middle + half
    return f'{start} | {middle:.3f} | {low:.3f} to {high:.3f} | {n} | {verdict(low, high, least, most)} |'


def claim_tables(rows, claims):
    """The two tables of a paper: its systems, and its claims."""
    systems = dict.fromkeys(name for claim in claims for name in claim[3:5])
    return '\n'.join([
        '| system | rate: loss of seed 1 | best rate | loss (deviation) | accuracy, % | plateau, steps |',
        '|---|---|---|---|---|---|', *(system_line(rows, system) for system in systems), '',
        '| claim | value | mean | 95 % interval | seeds | verdict |',
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
