"""Runs of train.py that several processes share: one row of a .jsonl for each finished run.

A plan is a NamedTuple of a run's settings with a `name` of its own. Started once for each core, a study's
command shares its runs among the processes; repeated, it goes on with the runs that have no row.

1. rows
2. the runs that are left
3. the search of the rates
"""
import json
import os
import platform
import sys
import time

import pandas as pd
import torch
from filelock import FileLock, Timeout

FIRST_RATES = 1e-3, 2e-3, 4e-3
FURTHEST_RATES = 1.25e-4, 3.2e-2

# ---- 1. rows ----


def read_rows(path, columns):
    """Rows of finished runs as a table; without a file, an empty one with these columns."""
    if not os.path.exists(path):
        return pd.DataFrame(columns=columns)
    with open(path) as file:
        return pd.DataFrame([json.loads(line) for line in file])


def append_row(path, row):
    with open(path, 'a') as file:
        file.write(json.dumps(row) + '\n')


def machine():
    """Name of the device that runs take: the GPU, if there is one, else the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    with open('/proc/cpuinfo') as file:
        names = [line.partition(':')[2].strip() for line in file if line.startswith('model name')]
    return names[0] if names else platform.processor()


def revision_of(folder):
    """The revision that a run's newest launch recorded."""
    with open(os.path.join(folder, 'launches.jsonl')) as file:
        *_, launch = file
    return json.loads(launch)['revision']


# ---- 2. the runs that are left ----

def without_row(plans, rows):
    """The plans whose run has not been made."""
    if not plans:
        return []
    done = set(rows[[*plans[0]._fields]].itertuples(index=False, name=None))
    return [plan for plan in plans if tuple(plan) not in done]


def make_all(plans_of, rows_now, make, folder):
    """Make all runs that have no row, the first one first.

    plans_of   rows -> the plans, as these rows decide them
    rows_now   () -> the rows now, which other processes write too
    make       plan -> None: makes the run and appends its row
    folder     of the locks by which processes share the runs; one that ends, however, gives its lock back
    """
    while True:
        rows = rows_now()
        left = without_row(plans_of(rows), rows)
        if not left:
            return
        for plan in left:
            path = os.path.join(folder, f'{plan.name}.lock')
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with FileLock(path, blocking=False):
                    if without_row([plan], rows_now()):         # else another process has just made it
                        make(plan)
                        break
            except Timeout:                             # another process makes it
                continue
        else:
            time.sleep(10)                              # others make all that is left


# ---- 3. the search of the rates ----

def rates_to_try(found):
    """The three first rates, and further ones while the best is the outermost, in their order.

    found  {rate: its result, the lowest is best}, of the rates of which all runs have been made
    """
    rates = sorted({*FIRST_RATES, *found})
    if rates == sorted(found):
        best = min(found, key=found.get)
        lowest, highest = FURTHEST_RATES
        if best == rates[0] and best > lowest:
            rates.insert(0, best / 2)
        elif best == rates[-1] and best < highest:
            rates.append(best * 2)
    return rates


def best_rate(found, name):
    """The rate with the lowest result.  found: as of rates_to_try; name: of what is searched"""
    if not {*FIRST_RATES} <= {*found}:
        sys.exit(f'the search of {name} has not ended')
    return min(found, key=found.get)
