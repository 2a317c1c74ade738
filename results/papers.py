"""What the papers print, read from results/plans/papers.json, and a plot like theirs.

curves.py, report.py and kowsher.py show it beside what we have.
"""
import os
import re
import sys
from typing import NamedTuple

import pandas as pd

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import bench
from configurator import ROOT, choose, notice
from prepare_data import read_json


def read_papers():
    """{paper: its tables, rows for bench.py, sizes of tasks ...}"""
    return read_json(os.path.join(ROOT, 'results', 'plans'), 'papers.json')


def read_book(name):
    """The entry of a paper in papers.json; {} for ''."""
    return choose('paper', name, {'': {}, **read_papers()})


class PrintedRow(NamedTuple):
    """A row of papers.json: 'SYSTEM QUALIFIER ...; value; source'."""
    paper: str
    system: str
    qualifiers: list            # say what was measured, see printed_rows()
    value: str
    source: str


def printed_rows(kind):
    """Yield the PrintedRows of all papers.

    kind                                         qualifiers: parameters have all of them, others some
    parameters                                   shape, counted, vocabulary, correction: see count_as()
    time                                         system whose time is 1, train or finetune, shape, length
    memory                                       system that has 100 %, length or half
    rank                                         none; a key of MATRICES takes the place of the system
    convergence, accuracy, loss, CORPUS_loss     shape: these are results of runs of train.py
    """
    for paper, book in read_papers().items():
        for row in book.get('bench', {}).get(kind, []):
            name, value, source = (part.strip() for part in row.split(';'))
            system, *qualifiers = name.split()
            yield PrintedRow(paper, system, qualifiers, value, source)


def paper_name(name):
    """The name of a system in a paper: gau_12k, which has a vocabulary of 12,000, is its gau."""
    return re.sub(r'_\d+k$', '', name)


def printed(kind, name, *qualifiers):
    """A table cell with the papers' values for a system, or None.

    A row counts if all of its qualifiers are given here. A qualifier that names a system, the one whose value
    is 1 or 100 %, need not be given, because the cell shows it. So the row "shatter original train base 256"
    is found by printed('time', 'shatter', 'train', 'base', '256').
    """
    values = []
    for row in printed_rows(kind):
        if row.system == paper_name(name) and set(row.qualifiers) <= {*qualifiers, *bench.SYSTEMS}:
            values.append(f"{row.value} ({' '.join([row.paper, *row.qualifiers])}: {row.source})")
    return '; '.join(values) or None


def printed_table(table):
    """Text DataFrame of a table of papers.json, whose rows are 'name; columns and averages'."""
    cells = {}
    for line in table['rows']:
        name, numbers = line.split(';')
        cells[f'paper: {name}'] = re.findall(r'[\d.]+(?: \([\d.]+\))?', numbers)    # 79.36 (0.37) is one cell
    columns = [*table['columns'].split(), *table.get('averages', ())]
    return pd.DataFrame.from_dict(cells, 'index', columns=columns)


def plot(path, panels, label):
    """Save a picture of panels side by side; panels is {label of x: {name of a line: [(x, y), ...]}}."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        notice(f'{path} is not drawn, because matplotlib is missing: pip install matplotlib')
        return
    figure = Figure(figsize=(4.8 * len(panels), 3.6), layout='constrained')
    for place, (x_label, lines) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(1, len(panels), place, xlabel=x_label, ylabel=label)
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), '.-', label=name)
        axis.legend()
    figure.savefig(path, dpi=150)                      # large type, to be read on a phone
