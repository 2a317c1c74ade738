"""results/papers.json and results/reproduce.md: averages and hours recomputed, commands in their order."""
import fnmatch
import json
import os
import re

import pytest
import torch
from test_configs import COMMANDS, ON_PAGE, ROWS, build, read, resolved
from torch.utils.flop_counter import FlopCounterMode

import finetune
import prepare_data
import train

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
