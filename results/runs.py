"""Runs of train.py that several processes share: one row of a .jsonl for each finished run.

A plan is a NamedTuple of a run's settings with a `name` of its own. Started once for each core, a study's
command shares its runs among the processes; repeated, it goes on with the runs that have no row.
"""
import json
import os
import platform
import time

import pandas as pd
from filelock import FileLock, Timeout


def read_rows(path, columns):
    """Rows of finished runs as a table; without a file, an empty one with these columns."""
    if not os.path.exists(path):
        return pd.DataFrame(columns=columns)
    with open(path) as file:
        return pd.DataFrame([json.loads(line) for line in file])


def append_row(path, row):
    with open(path, 'a') as file:
        file.write(json.dumps(row) + '\n')


def without_row(plans, rows):
    """The plans whose run has not been made."""
    if not plans:
        return []
    done = set(rows[[*plans[0]._fields]].itertuples(index=False, name=None))
    return [plan for plan in plans if tuple(plan) not in done]


def make_all(plans_now, rows_now, make, folder):
    """Make all runs that have no row, the first one first.

    plans_now  () -> the plans, as the rows decide them now
    rows_now   () -> the rows now, which other processes write too
    make       plan -> None: makes the run and appends its row
    folder     of the locks by which processes share the runs; one that ends, however, gives its lock back
    """
    while True:
        left = without_row(plans_now(), rows_now())
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


def machine():
    """Name of the processor."""
    with open('/proc/cpuinfo') as file:
        names = [line.partition(':')[2].strip() for line in file if line.startswith('model name')]
    return names[0] if names else platform.processor()


def revision_of(folder):
    """The revision that a run's newest launch recorded."""
    with open(os.path.join(folder, 'launches.jsonl')) as file:
        *_, launch = file
    return json.loads(launch)['revision']
