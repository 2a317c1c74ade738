"""results/errata.md and results/reproduce.md: numbers recomputed, commands resolved, small forms run."""
import fnmatch
import functools
import math
import os
import re
from dataclasses import replace

import pytest
import torch
from commands import READY, commands_of, prepared_name, read_page, resolved
from test_configs import knobs, vocabulary

import finetune
import prepare_data
import train
from finetune import read_papers
from model import (
    Encoder,
    EncoderConfig,
    MaskedLM,
    SequenceClassifier,
    count_parameters,
    model_config,
    training_flops,
)

# ---- errata: each number of a row is printed by a paper, or recomputed from what it prints ----

ERRATA = {where: ' '.join(cells) for where, *cells in
          re.findall(r'^\| (\w+, .*?) \| (.*?) \| (.*?) \|$', read_page('results', 'errata.md'), re.M)}
RECOMPUTED = {}                 # row of the page -> function that returns its numbers as texts


def erratum(where):
    def add(function):
        RECOMPUTED[where] = function
        return function
    return add


def printed(book, title, row):
    """{column: number} of a row of papers.json, with `average` for the first number after the columns."""
    table = next(table for table in read_papers()[book]['tables'] if table['title'].endswith(title))
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
def count(kind=MaskedLM, vocab_size=30522, n_layer=12, **knobs):
    with torch.device('meta'):
        one, two = (count_parameters(kind(EncoderConfig(vocab_size, 512, n, **knobs))) for n in (1, 2))
    return one + (n_layer - 1) * (two - one)            # all layers are alike


@erratum('Courtois, table 1')
def factors():
    h, n, pairwise, symmetric = 768, 12, count(attention='pairwise'), count(attention='symmetric')
    assert n * (h // n) ** 2 == h ** 2 // n and 12 * h ** 2 // n == pairwise - symmetric
    return [f'{value:,}' for value in (h ** 2 // n, 12 * h ** 2 // n, pairwise, symmetric, h // n)]


@erratum('Courtois, 4.2')
def drop():
    rows = [printed('courtois', 'table 3', f'{name} {size}')['average']
            for size in ('base', 'small') for name in ('original', 'symmetric')]
    return points(*rows, rows[0] - rows[1], rows[2] - rows[3])


@erratum('Courtois, table 3, caption')
def caption():
    rows = [printed('courtois', 'table 3', f'{name} base') for name in ('pairwise', 'original')]
    return points(*(row['average'] for row in rows), 0.37, 0.63)        # caption: base,pair in both places


@erratum('Courtois, 5.2')
def score():
    row = printed('courtois', 'table 3', 'pairwise base')
    assert points(mean(row)) == points(row['average'])
    return points(79.39, mean(row), 9 * mean(row))


@erratum('Kowsher, abstract, 1 and 3')
def attention_block():
    d, standard = 768, count(attention='original')
    whole, shares = standard - count(attention='shared'), (d * d + 3 * d, d * d, 2 * d * d + 3 * d)
    assert whole == 12 * (2 * d * d + 2 * d - 3 * d)                    # with the two biases that are saved
    saved = [100 - 100 * share / all_ / d ** 2 for share, all_ in zip(shares, (3, 3, 4), strict=True)]
    return ['66.53', '66.67', '768', *points(*saved)]


@erratum('Kowsher, equation 1')
def width():
    return ['768', '64', *points(math.sqrt(768 / 64))]


@erratum('Kowsher, 2.5')
def epochs():
    step, tokens = 528 * 512, 3.2e9
    return ['528', '512', '800', '2,500', f'{0.8 + 2.5:.1f}', '3.2', f'{20 * tokens / step:,.0f}',
            '200,000', f'{200_000 * step / tokens:.1f}']


def both_papers(name):
    """[(column of Courtois, number of Kowsher's table 1, of Courtois's table 3)] of a system."""
    ours, theirs = printed('kowsher', 'table 1', name), printed('courtois', 'table 3', name)
    return list(zip(theirs, ours.values(), theirs.values(), strict=True))[:-1]


@erratum('Kowsher, table 1, Standard')
def replaced():
    for name in ('symmetric base', 'pairwise base'):
        assert [row[0] for row in both_papers(name) if row[1] != row[2]] == ['cola.matthews']
    changed = [row for row in both_papers('original base') if row[1] != row[2]]
    assert [row[0].partition('.')[0] for row in changed] == ['mrpc', 'cola', 'stsb']
    average, = points(mean(printed('courtois', 'table 3', 'original base'), 'mnli_mm.accuracy'))
    standard, shared = (printed('kowsher', 'table 1', f'{name} base')['average']
                        for name in ('original', 'shared'))
    numbers = [number for row in changed for number in row[1:]]
    return points(*numbers, standard, shared, shared - standard, float(average), shared - float(average))


@erratum('Kowsher, table 1, averages')
def averages():
    shared = printed('kowsher', 'table 1', 'shared base')
    numbers = [shared['cola.matthews']]
    for name in ('symmetric base', 'pairwise base'):
        row, cola = printed('kowsher', 'table 1', name), printed('courtois', 'table 3', name)['cola.matthews']
        fitting = mean({**row, 'cola.matthews': cola}, 'mnli_mm.accuracy')
        assert 0 <= fitting - row['average'] < 0.01                     # he cuts the third decimal off
        average = float(*points(mean(row, 'mnli_mm.accuracy')))
        numbers += [row['average'], shared['average'] - row['average'], cola, row['cola.matthews'],
                    average, shared['average'] - average]
        if name == 'symmetric base':
            numbers.append(shared['cola.matthews'] - cola)
    return points(*numbers)


@erratum('Kowsher, table 1, metrics')
def metrics():
    for name in ('original base', 'symmetric base', 'pairwise base'):
        assert all(row[1] == row[2] for row in both_papers(name) if row[0].startswith('mnli'))
    rows = [both_papers(name)[0] for name in ('symmetric base', 'pairwise base')]
    assert all(row[0] == 'mrpc.f1_accuracy' and row[1] == row[2] for row in rows)
    return points(*(row[1] for row in rows))


@erratum('Kowsher, table 2, averages')
def squad():
    row = printed('kowsher', 'table 2', 'shared base, TriviaQA too')
    assert row['average'] == 83.05
    exact = row['squad1.exact'], row['squad2.exact']
    return points(83.05, *exact, sum(exact) / 2)


@erratum('Kowsher, table 2, title')
def title():
    return []                                           # words alone


@erratum('Kowsher, table 4')
def classifier():
    models = {kind: [count(kind, attention=name, **knobs) for name in ('original', 'shared')]
              for kind, knobs in ((MaskedLM, {}), (SequenceClassifier, {'n_label': 2}))}
    (lm, shared_lm), (original, shared) = models.values()
    assert 12.94 < 100 - 100 * shared / lm < 12.95
    return ['12.94', f'{lm:,}', f'{shared_lm:,}', f'{original:,}', f'{shared:,}',
            *points(100 - 100 * shared_lm / lm, 100 - 100 * shared / original)]


@erratum('Kowsher, 3')
def noise():
    rows = dict(row.split('; ') for row in read_papers()['kowsher']['noise']['rows'])
    standard, shared = ([float(cell) for cell in rows[f'{name} base, sst2'].split()]
                        for name in ('original', 'shared'))
    lower = [level for level in range(9) if shared[level] < standard[level]]
    assert lower == [1, 2]                              # 5 and 10 %
    return points(*(row[level] for level in lower for row in (shared, standard)))


@erratum('Kowsher, table 6')
def own_task():
    cross = dict(row.split('; ') for row in read_papers()['kowsher']['cross']['rows'])
    tasks, numbers = read_papers()['kowsher']['cross']['columns'].split(), []
    for name, task in (('original', 'qnli'), ('original', 'mrpc'), ('shared', 'qqp')):
        diagonal = float(cross[f'{name} base, {task}'].split()[tasks.index(task)])
        numbers += [diagonal, printed('kowsher', 'table 1', f'{name} base')[f'{task}.accuracy']]
    assert all(numbers[i] != numbers[i + 1] for i in (0, 2, 4))
    return points(*numbers)


@erratum('Tian, table 1')
def half_the_layers():
    numbers = []
    for attention, position, shown in (('original', 'absolute', '151.0'), ('shatter', 'none', '138.6')):
        with torch.device('meta'):
            model = MaskedLM(EncoderConfig(32000, 512, 1, 16, 1024, 4096, attention=attention,
                                           position=position))
        layer = sum(p.numel() for p in model.encoder.blocks.parameters() if p.dim() > 1)
        assert f'{12 * layer / 1e6:.1f}' == shown
        numbers += [shown, f'{24 * layer:,}']
    return numbers


@erratum('Tian, table 3')
def exact_above_f1():
    rows = [printed('tian', 'table 3', f'{name} base, GPU 256-l')
            for name in ('original absolute', 'shatter')]
    assert all(row['squad1.exact'] > row['squad1.f1_words'] for row in rows)
    return [f'{value:.1f}' for row in rows for value in row.values()]


@erratum('Tian, 5.2.1')
def consistently():
    bert, shatter = (printed('tian', 'tables 2, 6 and 7', f'{name} large') for name in
                     ('original absolute', 'shatter'))
    worse = [column for column in bert if shatter[column] < bert[column]]
    assert worse == ['mnli.accuracy', 'mnli_mm.accuracy']
    return [str(row[column]) for row in (bert, shatter) for column in worse] + ['71.2', '71.6']   # table 2


@erratum('Liu, 3.3 and table 2')
def divisors():
    n, s, width = 512, 128, 768
    scores = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).relu()
    squares = (scores / width ** 0.5) ** 2
    assert torch.allclose(squares / (n * s), scores ** 2 / (n * s * width))
    rows = (squares / squares.sum(1, keepdim=True) / (n * s)).sum(1)
    assert torch.allclose(rows, torch.full_like(rows, 1 / (n * s)))
    return [f'{n * s * width:,}', f'{n * s:,}', '512', '128', '768', f'{1 / (n * s):.6f}']


@erratum('Liu, 3.3 and 4.1')
def code():
    return []                                           # words alone


@erratum('Liu, 4.1 and table 4')
def offsets():
    gau = {'attention': 'gau', 'position': 'rope', 'norm': 'rms'}
    numbers = [count(Encoder, 12000, 24, bias=bias, **gau) + 768 * 2 + 2 for bias in (False, True)]
    assert numbers[0] // 1000 == 96519 and numbers[1] - numbers[0] == 24 * 2 * 128
    return ['96,519', *(f'{number:,}' for number in numbers)]


@erratum('Liu, table 5')
def clue_average():
    rows = [printed('liu', 'table 5', name) for name in ('gau', 'original rope layer', 'gau, 30k')]
    right = [points(mean(row)) == points(row['average']) for row in rows]
    assert right == [False, True, True]
    return points(rows[0]['average'], mean(rows[0]), 9 * mean(rows[0]))


@pytest.mark.parametrize('where', ERRATA)
def test_an_erratum_is_recomputed(where):
    """Its numbers are those of the row; every number of three digits or more is among them."""
    numbers, row = RECOMPUTED[where](), re.findall(r'(?<![\w.,])\d[\d,]*(?:\.\d+)?', ERRATA[where])
    row = [number.rstrip(',') for number in row]
    assert set(numbers) <= set(row), ERRATA[where]
    assert {number for number in row if len(re.sub(r'\D', '', number)) > 2} <= set(numbers)


def test_every_erratum_is_there():
    assert list(ERRATA) == list(RECOMPUTED)


# ---- reproduce.md: its commands, in order, and its prices ----

PAGE = read_page('results', 'reproduce.md')
COMMANDS = commands_of(PAGE)
PRICES = {name: cells for names, *cells in
          re.findall(r'^\|[^|]*\| (`\w+`.*?)' + 5 * r' \| ([\d,.]+(?: x \d+)?)' + r' \|', PAGE, re.M)
          for name in re.findall(r'`(\w+)`', names)}
OPERATIONS = 4e14               # a second, of the hours on the page


@pytest.mark.parametrize('name', PRICES)
def test_steps_and_tokens(name):
    steps, shape, tokens, *_ = PRICES[name]
    config = knobs(name)
    rows = config['total_batch'] * config['block_size']
    assert steps == f"{config['max_iters']:,}"
    assert shape == f"{config['total_batch']} x {config['block_size']}"
    assert tokens == f"{rows * config['max_iters'] / 1e9:.1f}"


def price(name):
    """FLOPs of a whole run, from those of models with one and with two layers."""
    config = knobs(name)
    shape = model_config(config, vocabulary(config['dataset']))
    predicted = math.ceil(config['mask_fraction'] * config['block_size'] - 1e-9)
    kind = train.OBJECTIVE[config['objective']][0]
    one, two = (training_flops(replace(shape, n_layer=n), config['block_size'], predicted, kind)
                for n in (1, 2))
    return (one + (shape.n_layer - 1) * (two - one)) * config['total_batch'] * config['max_iters']


@pytest.mark.slow
@pytest.mark.parametrize('name', PRICES)
def test_flops_and_hours(name):
    *_, flops, hours = PRICES[name]
    total = price(name)
    assert (flops, hours) == (f'{total / 1e18:.1f}', f'{total / OPERATIONS / 3600:.1f}')


def sources_of(config):
    """Folders, globs and files that a command reads as models or runs."""
    keys = 'init_from', 'compare', 'runs', 'checkpoint'
    parts = [part for key in keys for part in str(config.get(key, '')).split(',')]
    return [part for part in parts if part.startswith('out/')]


def is_made(source, runs):
    """Whether training commands above made it: {out_dir: knobs}.  Milestones for files, folders else."""
    folder, file = os.path.split(source) if source.endswith('.pt') else (source, '')
    steps = [step for name in fnmatch.filter(runs, folder) for step in runs[name]['milestones']]
    files = [train.checkpoint_name(step) for step in steps]
    return bool(fnmatch.filter(files, file) if file else fnmatch.filter(runs, folder))


def check_knobs(module, config, corpora):
    """The knobs as far as they can be checked without data."""
    folder = os.path.basename(config.get('tokenizer', ''))
    if module is prepare_data and folder in corpora:                    # a tokenizer of a corpus above
        config = {**config, 'tokenizer': 'sentencepiece'}
    if module is train:
        train.check_knobs(config)
        model_config(config, vocabulary(config['dataset']))
    elif module is finetune:
        finetune.noise_levels(config['noise'])
        assert config['paper'] in finetune.read_papers()
        for name in finetune.find_tasks(config['tasks']):
            finetune.recipe(config, name)
    else:
        READY[module](config)


def test_every_command_finds_what_those_above_it_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'ptb').mkdir()                          # the texts that the page says to bring
    corpora, runs = set(), {}
    for command in COMMANDS:
        module, config = resolved(command)
        check_knobs(module, config, corpora)
        missing = [source for source in sources_of(config) if not is_made(source, runs)]
        assert not missing, command
        if module is prepare_data:
            corpora.add(prepared_name(config))
        elif module is train:
            wanted = {config['dataset'], *filter(None, config['validation'].split(','))}
            assert wanted <= corpora, command
            runs[config['out_dir']] = config
    assert len(COMMANDS) > 80


def test_what_is_not_made_is_noticed():
    runs = {'out/a-1': {'milestones': (5,)}, 'out/b': {'milestones': ()}}
    assert is_made('out/a-*', runs) and is_made('out/a-1/ckpt_*.pt', runs) and is_made('out/b', runs)
    for source in ('out/a', 'out/c-*', 'out/b/ckpt_*.pt', 'out/a-1/ckpt_0000006.pt'):
        assert not is_made(source, runs)


def test_every_label_of_the_page():
    """Each label names a command, and each is used in the table below its commands."""
    sections = re.split(r'^## ', PAGE, flags=re.M)[2:]
    assert [section.split()[0] for section in sections] == ['Courtois', 'Kowsher', 'Tian', 'Liu']
    for section, letter in zip(sections, 'CKTL', strict=True):
        _, script, table = re.split(r'```(?:sh)?', section)
        labels = re.findall(rf'# ({letter}\d+)$', script, re.M)
        assert labels == [f'{letter}{number}' for number in range(1, len(labels) + 1)]
        rows = [row.split('|')[2] for row in table.splitlines() if row.startswith('|')]
        named = re.findall(rf'{letter}(\d+)(?: to {letter}(\d+))?', ' '.join(rows))
        used = {number for a, b in named for number in range(int(a), int(b or a) + 1)}
        assert used == set(range(1, len(labels) + 1)), letter
