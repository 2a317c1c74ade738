"""results/papers.json and results/reproduce.md: averages and prices recomputed, commands in their order."""
import fnmatch
import json
import math
import os
import re

import pytest
import torch
from conftest import knobs_of
from test_configs import COMMANDS, ON_PAGE, PAGE, ROWS, build, read, resolved
from torch.utils.flop_counter import FlopCounterMode

import bench
import finetune
import prepare_data
import train


TEXT = ' '.join(PAGE.split())                 # a sentence may go on in the next line
PAPERS = json.loads(read('results', 'papers.json'))


def test_columns_and_averages_of_papers_json():
    """Each column is a metric of a task; averages follow from the columns, but for those of errata.md."""
    wrong = []
    for book in PAPERS.values():
        for table in book.get('tables', ()):
            columns = table['columns'].split()
            for column in columns:
                task, metric = column.replace('_mm', '').split('.')
                assert metric in finetune.METRICS, column
                assert metric in finetune.TASKS[task].metrics, column
            for row in table['rows']:
                cells = [float(cell) for cell in re.findall(r'[\d.]+', row.partition(';')[2])]
                averages = table.get('averages', {}).values()
                for places, value in zip(averages, cells[len(columns):], strict=False):
                    if abs(sum(cells[i] for i in places) / len(places) - value) > 0.0101:
                        wrong.append(row.partition(';')[0])
    assert wrong == ['symmetric base', 'pairwise base', 'shared base, TriviaQA too']


def test_both_readings_of_kowshers_table_6():
    """The second is the first transposed; section 3 says of models trained on MNLI which tasks improve."""
    tasks = PAPERS['kowsher']['cross']['columns'].split()
    readings = {'': {}, ', columns as training tasks': {}}
    for row in PAPERS['kowsher']['cross']['rows']:
        name, numbers = row.split('; ')
        model, trained, *reading = name.split(', ')
        accuracies = zip(tasks, map(float, numbers.split()), strict=True)
        for evaluated, accuracy in accuracies:
            readings[''.join(f', {words}' for words in reading)][model, trained, evaluated] = accuracy
    by_rows, by_columns = readings.values()
    assert len(by_rows) == 32
    assert by_columns == {(model, b, a): accuracy for (model, a, b), accuracy in by_rows.items()}
    improved = []
    for reading in (by_rows, by_columns):
        improved.append([task for task in tasks
                         if reading['shared base', 'mnli', task] > reading['original base', 'mnli', task]])
    assert improved == [['qnli', 'qqp', 'mrpc'], ['qnli', 'mrpc']]


# ---- reproduce.md: its commands, in order, and its prices ----

def is_made(source, runs):
    """Whether a run {out_dir: knobs} above makes it: a folder, a milestone, or a glob of them."""
    folder, file = os.path.split(source) if source.endswith('.pt') else (source, '')
    steps = [step for name in fnmatch.filter(runs, folder) for step in runs[name]['milestones']]
    files = [f'ckpt_{step:07d}.pt' for step in steps]
    return bool(fnmatch.filter(files, file) if file else fnmatch.filter(runs, folder))


def test_every_command_finds_what_those_above_it_made():
    corpora, runs = set(), {}
    for command in COMMANDS:
        module, config = resolved(command)
        paths = ','.join(str(config.get(key, '')) for key in ('init_from', 'compare', 'runs')).split(',')
        missing = [path for path in paths if path.startswith('out/') and not is_made(path, runs)]
        assert not missing or module is train and not config['init_from'], (command, missing)
        if module is prepare_data:
            corpora.add(config['name'] or prepare_data.find_corpus(config)[0])
        elif module is train:
            assert {config['dataset'], *filter(None, config['validation'].split(','))} <= corpora, command
            runs[config['out_dir']] = config
        elif module is finetune:                        # the folders of its trials
            names = {os.path.basename(path) for path in paths}
            runs |= {f"{config['out_dir']}/{name}/*": {'milestones': ()} for name in names}
        elif module.__name__ in ('report', 'kowsher'):
            pool = finetune.listed(config.get('pool', ''))
            names = {config.get('compare', ''), *config.get('runs', '').split(',')} - {'', *pool}
            names |= {f'{name}-1' for name in pool}
            for name in names or {'*'}:
                trials = f"{config['out_dir']}/{name}/*"
                assert is_made(trials, runs) or any(fnmatch.fnmatch(trials, run) for run in runs), command
        else:
            assert set(config['what'].split(',')) <= set(module.SECTIONS), command
    assert len(COMMANDS) > 100


def test_every_label_of_the_page():
    """Each label begins a group of commands, and each is used in the table below its commands."""
    for letter in 'CKTL':
        labels = re.findall(rf'^# ({letter}\d+): .+\n(?!#)', PAGE, re.M)
        assert labels == [f'{letter}{number}' for number in range(1, len(labels) + 1)]
        cells = ' '.join(row.split('|')[2] for row in PAGE.splitlines() if row.startswith('|'))
        named = re.findall(rf'\b{letter}(\d+)(?: to {letter}(\d+))?', cells)
        used = {number for a, b in named for number in range(int(a), int(b or a) + 1)}
        assert used == set(range(1, len(labels) + 1)), letter


@pytest.mark.slow
@pytest.mark.parametrize('name, hours', [(row[0], row[3]) for row in ROWS])
def test_gpu_hours(name, hours):
    """From the matrix products of one row, with 15 % of its tokens predicted."""
    knobs = ON_PAGE[name]
    model = build(knobs).to('meta')
    ids = torch.zeros(1, knobs['block_size'], dtype=torch.long, device='meta')
    predicted = ids[:, :round(knobs['mask_fraction'] * knobs['block_size'])]
    with FlopCounterMode(display=False) as counter:
        model(ids, predicted, predicted).mean().backward()
    flops = counter.get_total_flops() * knobs['total_batch'] * knobs['max_iters']
    assert f'{flops / 4e14 / 3600:.1f}' == hours


@pytest.mark.slow
def test_speeds_beside_the_assumed_one():
    """FLOP/s of the steps of bench.md's first table: the matrix products of a row, times tokens/s."""
    config = {**knobs_of(bench), 'n_layer': 12, 'n_head': 12, 'n_embd': 768, 'n_inner': 3072}
    ids = torch.zeros(1, 512, dtype=torch.long, device='meta')
    reached = {}
    table = read('results', 'bench.md').partition('## Time and memory of')[0]
    for system, speed in re.findall(r'^\| `(\w+)` \| [\d.]+ \| ([\d,]+) \|', table, re.M):
        model = bench.build(system, config, 512).to('meta')
        with FlopCounterMode(display=False) as counter:
            model(ids, ids[:, :77], ids[:, :77]).mean().backward()
        rate = counter.get_total_flops() / 512 * int(speed.replace(',', ''))
        reached[system] = f'{rate / 1e14:.1f}e14'
    assert f"{reached['original']} with `original`" in TEXT
    assert f"{reached['gau']} with `gau`, {reached['shatter']} with `shatter`" in TEXT
    others = sorted(reached[system] for system in ('symmetric', 'pairwise', 'shared'))
    assert f'{others[0]} to {others[-1]} with `symmetric`, `pairwise` and `shared`' in TEXT


def test_price_of_glue():
    sizes = dict(row.split('; ') for row in PAPERS['kowsher']['sizes']['rows'])
    examples = sum(float(cells.split('k')[0]) for name, cells in sizes.items() if 'squad' not in name)
    tokens = 25 * 1000 * examples * 128                 # 5 epochs, 5 seeds
    flops = tokens * 12 * (6 * 12 * 768 ** 2 + 12 * 128 * 768)
    assert round(examples) == 950
    assert f'at most {flops / 1e18:.1f}e18 FLOPs' in TEXT
    (one, a), (other, b) = (79.36, 0.37 ** 2 / 5), (78.74, 0.63 ** 2 / 5)      # Courtois et al., table 3
    t, freedom = (one - other) / math.sqrt(a + b), (a + b) ** 2 / (a * a / 4 + b * b / 4)
    assert f"Welch's t is {t:.2f} with {freedom:.1f} degrees" in TEXT
