"""results/errata.md and results/reproduce.md: numbers recomputed, commands resolved in their order."""
import fnmatch
import functools
import json
import math
import os
import re

import pytest
import torch
from conftest import ROOT
from test_configs import knobs, resolved

import bench
import finetune
import prepare_data
import train
from model import Encoder, EncoderConfig, MaskedLM, SequenceClassifier, count_parameters


def read(*names):
    with open(os.path.join(ROOT, *names), encoding='utf-8') as file:
        return file.read()


PAPERS, PAGE = json.loads(read('results', 'papers.json')), read('results', 'reproduce.md')
ERRATA = {where: ' '.join(cells) for where, *cells in
          re.findall(r'^\| (\w+, .*?) \| (.*?) \| (.*?) \|$', read('results', 'errata.md'), re.M)}


# ---- errata: each number of a row is printed by a paper or its code, or recomputed from what they print ----

def printed(book, title, row):
    """{column: number} of a row of papers.json, with `average` for the first number after the columns."""
    table = next(table for table in PAPERS[book]['tables'] if table['title'].endswith(title))
    cells = next(text.partition(';')[2] for text in table['rows'] if text.startswith(f'{row};'))
    numbers = [float(cell) for cell in cells.replace('(', '').replace(')', '').split() if cell != '-']
    return dict(zip([*table['columns'].split(), 'average'], numbers, strict=False))


def mean(row, *without):
    values = [value for column, value in row.items() if column not in ('average', *without)]
    return sum(values) / len(values)


def points(*values):
    """Numbers with two decimals, half away from zero after removing binary noise."""
    return [f'{math.floor(100 * value + 0.5 + 1e-6) / 100:.2f}' for value in values]


@functools.cache
def count(kind=MaskedLM, vocab_size=30522, n_layer=12, **settings):
    with torch.device('meta'):
        one, two = (count_parameters(kind(EncoderConfig(vocab_size, 512, n, **settings))) for n in (1, 2))
    return one + (n_layer - 1) * (two - one)            # all layers are alike


def courtois():
    h, n, pairwise, symmetric = 768, 12, count(attention='pairwise'), count(attention='symmetric')
    assert 12 * h ** 2 // n == pairwise - symmetric
    score = {name: printed('courtois', 'table 3', name)['average'] for name in
             ('original base', 'symmetric base', 'pairwise base', 'original small', 'symmetric small')}
    pair = printed('courtois', 'table 3', 'pairwise base')
    aim = round(0.95 * 79.0521, 2)                      # of the last score of `pairwise` in the code
    lines = (30_000, 35_000, 74.16, 75.84), (50_000, 75_000, 71.08, 77.56)
    crossings = [start + (end - start) * (aim - low) / (high - low) for start, end, low, high in lines]
    yield 'table 1', [f'{value:,}' for value in (h ** 2 // n, 12 * h ** 2 // n, pairwise, symmetric, h // n)]
    drops = [[score[f'{name} {size}'] for name in ('original', 'symmetric')] for size in ('base', 'small')]
    yield '4.2', points(*(value for one, other in drops for value in (one, other, one - other)))
    yield '4.3 and figure 3', points(74.16, 75.84, 71.08, 77.56, aim) + [
        f'{value:,.0f}' for value in (30_000, 65_000, 35_000, 50_000, 75_000, *crossings)]
    assert printed('courtois', 'table 3', 'original base')['qqp.f1_accuracy'] == 88.86
    yield 'table 3, qqp', points(90.54, 87.18, (90.54 + 87.18) / 2)
    yield 'table 3, caption', points(score['pairwise base'], score['original base'], 0.37, 0.63)
    yield '5.2', points(79.39, mean(pair), 9 * mean(pair))


def kowsher():
    d, step, tokens = 768, 528 * 512, 3.2e9
    shares = (d * d + 3 * d, 3), (d * d, 3), (2 * d * d + 3 * d, 4)
    saved = [100 - 100 * share / n / d ** 2 for share, n in shares]
    yield 'abstract, 1 and 3', ['66.53', '768', *points(*saved)]
    yield 'equation 1', ['768', *points(math.sqrt(768 / 64))]
    yield '2.5', ['528', '512', '800', '2,500', f'{20 * tokens / step:,.0f}', '200,000',
                  f'{200_000 * step / tokens:.1f}']
    names = 'original', 'symmetric', 'pairwise'
    ours = {name: printed('kowsher', 'table 1', f'{name} base') for name in names}
    theirs = {name: printed('courtois', 'table 3', f'{name} base') for name in names}
    changed = {name: [(column, ours[name][key], theirs[name][column])
                      for key, column in list(zip(ours[name], theirs[name], strict=True))[:-1]
                      if ours[name][key] != theirs[name][column]] for name in ours}
    assert [[pair[0].partition('.')[0] for pair in found] for found in changed.values()] == [
        ['mrpc', 'cola', 'stsb'], ['cola'], ['cola']]
    shared = printed('kowsher', 'table 1', 'shared base')
    lead, average = shared['average'], mean(theirs['original'], 'mnli_mm.accuracy')
    standard, fair = ours['original']['average'], float(*points(average))
    yield 'table 1, Standard', points(*(value for pair in changed['original'] for value in pair[1:]),
                                      lead, standard, lead - standard, fair, lead - fair)
    cola = shared['cola.matthews']
    numbers = [3.55, 0.89, cola, cola - theirs['symmetric']['cola.matthews']]
    for name in ('symmetric', 'pairwise'):
        row, cola = ours[name], theirs[name]['cola.matthews']
        fitting = mean({**row, 'cola.matthews': cola}, 'mnli_mm.accuracy')
        assert 0 <= fitting - row['average'] < 0.01     # the third decimal is cut off
        fair = float(*points(mean(row, 'mnli_mm.accuracy')))
        numbers += [row['average'], lead - row['average'], cola, row['cola.matthews'], fair, lead - fair]
    yield 'table 1, averages', ['2025', *points(*numbers)]
    yield 'table 1, metrics', points(*(theirs[name]['mrpc.f1_accuracy'] for name in names[1:]),
                                     *(theirs[name]['qqp.f1_accuracy'] for name in names))
    row = printed('kowsher', 'table 2', 'shared base, TriviaQA too')
    yield 'table 2, averages', points(row['average'], row['squad1.exact'], row['squad2.exact'],
                                      (row['squad1.exact'] + row['squad2.exact']) / 2)
    (lm, shared_lm), (whole, part) = ([count(kind, attention=name) for name in ('original', 'shared')]
                                      for kind in (MaskedLM, SequenceClassifier))
    yield 'table 4', ['12.94', *(f'{value:,}' for value in (lm, shared_lm, whole, part)),
                      *points(100 - 100 * shared_lm / lm, 100 - 100 * part / whole)]


def kowsher_ablations():
    rows = dict(row.split('; ') for kind in ('noise', 'cross') for row in PAPERS['kowsher'][kind]['rows'])
    standard, shared = ([float(cell) for cell in rows[f'{name} base, sst2'].split()]
                        for name in ('original', 'shared'))
    lower = [level for level in range(9) if shared[level] < standard[level]]
    assert lower == [1, 2]                              # 5 and 10 %
    yield '3', points(*(row[level] for level in lower for row in (shared, standard)))
    tasks, numbers = PAPERS['kowsher']['cross']['columns'].split(), []
    for name, task in (('original', 'qnli'), ('original', 'mrpc'), ('shared', 'qqp')):
        own = float(rows[f'{name} base, {task}'].split()[tasks.index(task)])
        numbers += [own, printed('kowsher', 'table 1', f'{name} base')[f'{task}.accuracy']]
    yield 'table 6', points(*numbers)


def tian():
    numbers = []
    for attention, position, shown in (('original', 'absolute', '151.0'), ('shatter', 'none', '138.6')):
        with torch.device('meta'):
            model = MaskedLM(EncoderConfig(32000, 512, 1, 16, 1024, 4096, attention=attention,
                                           position=position))
        layer = sum(p.numel() for p in model.encoder.blocks.parameters() if p.dim() > 1)
        assert f'{12 * layer / 1e6:.1f}' == shown
        numbers += [shown, f'{24 * layer:,}']
    yield 'table 1', numbers
    names = 'original absolute', 'shatter'
    rows = [printed('tian', 'table 3', f'{name} base, GPU 256-l') for name in names]
    assert all(row['squad1.exact'] > row['squad1.f1_words'] for row in rows)
    yield 'table 3', [f'{value:.1f}' for row in rows for value in row.values()]
    bert, shatter = (printed('tian', 'tables 2, 6 and 7', f'{name} large') for name in names)
    worse = [column for column in bert if shatter[column] < bert[column]]
    yield '5.2.1', ['71.2', '71.6', *(str(row[column]) for row in (bert, shatter) for column in worse)]
    bert, shatter = (printed('tian', 'test sets', f'{name} base') for name in names)
    worse, = [column for column in bert if shatter[column] < bert[column]]
    yield '5.2.1, test', [str(shatter[worse]), str(bert[worse])]


def liu():
    rows = dict(row.split('; ', 1) for row in PAPERS['liu']['bench']['convergence'])
    values = {name: [float(value) for value in re.findall(r'\d+\.\d+', text)] for name, text in rows.items()}
    changes = [[b - a for a, b in zip(values[f'{name} base'], values[f'{name}_diff base'], strict=True)]
               for name in ('gau_ns2', 'gau_scaled_squared_relu', 'gau_softmax', 'gau')]
    yield 'table 2, strategies', ['512', *(f'{abs(change):.2f}' for pair in changes for change in pair)]
    smallest = torch.tensor(2.0 ** -24).half()
    assert smallest > 0 and 1 / (512 ** 2 * 128) == 2 ** -25 and torch.tensor(2.0 ** -25).half() == 0
    yield 'table 2, scaled squared ReLU', ['512', '128', *map(str, values['gau_scaled_squared_relu base'])]
    gau = {'attention': 'gau', 'position': 'rope', 'norm': 'rms'}
    plain, offsets = (count(Encoder, 12000, 24, bias=bias, **gau) + 768 * 2 + 2 for bias in (False, True))
    yield '4.1 and table 4', ['96,519', f'{plain:,}', f'{offsets:,}']
    full, *starred = (printed('liu', 'table 5', name)
                      for name in ('gau', 'gau, 30k', 'original rope rms, 30k'))
    yield 'table 5', points(full['average'], mean(full), 9 * mean(full))
    yield 'table 5, starred rows', points(*(row['wsc.accuracy'] for row in starred)) + ['75.9', '76.41']


RECOMPUTED = {f"{book.__name__.partition('_')[0].capitalize()}, {where}": numbers
              for book in (courtois, kowsher, kowsher_ablations, tian, liu) for where, numbers in book()}
WORDS = {'Kowsher, table 2, title', 'Liu, 3.3 and 4.1', 'Kowsher, abstract, time', 'Liu, table 4, title'}


@pytest.mark.parametrize('where', ERRATA)
def test_an_erratum_is_recomputed(where):
    """Its numbers are those of the row; every number of three digits or more is among them."""
    row = [number.rstrip(',') for number in re.findall(r'(?<![\w.,])\d[\d,]*(?:\.\d+)?', ERRATA[where])]
    assert (where in WORDS) != (where in RECOMPUTED) and len(ERRATA) == len(WORDS) + len(RECOMPUTED)
    if where in RECOMPUTED:
        assert set(RECOMPUTED[where]) <= set(row), ERRATA[where]
        assert {number for number in row if len(re.sub(r'\D', '', number)) > 2} <= set(RECOMPUTED[where])


def test_columns_and_averages_of_papers_json():
    """Each column is a metric of a task; averages follow from the columns, but for those of errata.md."""
    wrong = []
    for book in PAPERS.values():
        for table in book.get('tables', ()):
            columns = table['columns'].split()
            for column in columns:
                task, metric = column.replace('_mm', '').split('.')
                assert metric in finetune.METRICS and metric in finetune.TASKS[task].metrics, column
            for row in table['rows']:
                cells = [float(cell) for cell in re.findall(r'[\d.]+', row.partition(';')[2])]
                averages = table.get('averages', {}).values()
                for places, value in zip(averages, cells[len(columns):], strict=False):
                    if abs(sum(cells[i] for i in places) / len(places) - value) > 0.0101:
                        wrong.append(row.partition(';')[0])
    assert wrong == ['symmetric base', 'pairwise base', 'shared base, TriviaQA too']


# ---- reproduce.md: its commands, in order, and its prices ----

def unrolled(text):
    """A shell script with its for-loops written out, innermost first."""
    loop = r'for (\w+) in ([^;]+); do\s((?:(?!\bfor \w+ in\b|\bdone\b).)*?);?\s+done'
    while found := re.search(loop, text, re.S):
        name, values, body = found.groups()
        turns = [re.sub(rf'\$(?:{name}\b|{{{name}}})', value, body).strip() for value in values.split()]
        text = text[:found.start()] + '\n'.join(turns) + text[found.end():]
    return text


SCRIPT = re.sub(r'\s+# [A-Z]\d+$', '', '\n'.join(re.findall(r'```sh\n(.*?)```', PAGE, re.S)), flags=re.M)
COMMANDS = [line.strip() for line in unrolled(SCRIPT.replace('\\\n', '')).splitlines() if line.strip()]


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
        else:
            assert set(config['what'].split(',')) <= set(bench.SECTIONS), command
    assert len(COMMANDS) > 100


def test_every_label_of_the_page():
    """Each label ends a command, and each is used in the table below its commands."""
    for letter in 'CKTL':
        labels = re.findall(rf'# ({letter}\d+)$', PAGE, re.M)
        assert labels == [f'{letter}{number}' for number in range(1, len(labels) + 1)]
        cells = ' '.join(row.split('|')[2] for row in PAGE.splitlines() if row.startswith('|'))
        named = re.findall(rf'\b{letter}(\d+)(?: to {letter}(\d+))?', cells)
        used = {number for a, b in named for number in range(int(a), int(b or a) + 1)}
        assert used == set(range(1, len(labels) + 1)), letter


def test_prices():
    """Steps, rows and tokens of the table; hours from its FLOPs; the numbers of the text."""
    rows = re.findall(r'^\|[^|]*\| (`\w+`.*?)' + 5 * r' \| ([\d,.]+(?: x \d+)?)' + r' \|', PAGE, re.M)
    assert len(rows) > 25
    for names, steps, shape, tokens, flops, hours in rows:
        for config in map(knobs, re.findall(r'`(\w+)`', names)):
            size = config['total_batch'] * config['block_size'] * config['max_iters']
            assert steps == f"{config['max_iters']:,}" and tokens == f'{size / 1e9:.1f}'
            assert shape == f"{config['total_batch']} x {config['block_size']}"
        assert abs(float(flops) * 1e18 / 4e14 / 3600 - float(hours)) < 0.09
    sizes = dict(row.split('; ') for row in PAPERS['kowsher']['sizes']['rows'])
    examples = sum(float(cells.split('k')[0]) for name, cells in sizes.items() if 'squad' not in name)
    tokens = 25 * 1000 * examples * 128                 # 5 epochs, 5 seeds
    flops = tokens * 12 * (6 * 12 * 768 ** 2 + 12 * 128 * 768)
    assert round(examples) == 950 and f'at most {flops / 1e18:.1f}e18 FLOPs' in PAGE
    (one, a), (other, b) = ((printed('courtois', 'table 3', f'{name} base')['average'], sd ** 2 / 5)
                            for name, sd in (('pairwise', 0.37), ('original', 0.63)))
    t, freedom = (one - other) / math.sqrt(a + b), (a + b) ** 2 / (a * a / 4 + b * b / 4)
    assert f"Welch's t is {t:.2f} with {freedom:.1f} degrees" in PAGE
