"""results/errata.md and results/reproduce.md: numbers recomputed, commands checked and some run small."""
import fnmatch
import functools
import gzip
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import zipfile
from dataclasses import replace

import pytest
import torch
from commands import READY, commands_of, prepared_name, read_page, resolved
from conftest import ROOT, TINY, stage
from published import publish
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
WORDS = {'Kowsher, table 2, title', 'Liu, 3.3 and 4.1'}         # rows without numbers to recompute


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
    return points(*(row['average'] for row in rows), 0.37, 0.63)        # the caption says base,pair twice


@erratum('Courtois, 5.2')
def score():
    row = printed('courtois', 'table 3', 'pairwise base')
    assert points(mean(row)) == points(row['average'])
    return points(79.39, mean(row), 9 * mean(row))


@erratum('Kowsher, abstract, 1 and 3')
def attention_block():
    d, standard = 768, count(attention='original')
    whole, shares = standard - count(attention='shared'), (d * d + 3 * d, d * d, 2 * d * d + 3 * d)
    assert whole == 12 * (2 * d * d + 2 * d - 3 * d)                    # d^2 and biases of two Linears less
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


@pytest.mark.parametrize('where', RECOMPUTED)
def test_an_erratum_is_recomputed(where):
    """Its numbers are those of the row; every number of three digits or more is among them."""
    numbers, row = RECOMPUTED[where](), re.findall(r'(?<![\w.,])\d[\d,]*(?:\.\d+)?', ERRATA[where])
    row = [number.rstrip(',') for number in row]
    assert set(numbers) <= set(row), ERRATA[where]
    assert {number for number in row if len(re.sub(r'\D', '', number)) > 2} <= set(numbers)


def test_every_erratum_is_there():
    assert [where for where in ERRATA if where not in WORDS] == list(RECOMPUTED)


# ---- reproduce.md: its commands, in order, and its prices ----

PAGE = read_page('results', 'reproduce.md')
LABELLED = {label: commands_of(f'```sh\n{script}\n```')
            for block in re.findall(r'```sh\n(.*?)```', PAGE, re.S)
            for script, label in re.findall(r'(.*?) # ([A-Z]\d+)$', block, re.S | re.M)}
COMMANDS = [command for commands in LABELLED.values() for command in commands]
PRICES = {name: cells for names, *cells in
          re.findall(r'^\|[^|]*\| (`\w+`.*?)' + 5 * r' \| ([\d,.]+(?: x \d+)?)' + r' \|', PAGE, re.M)
          for name in re.findall(r'`(\w+)`', names)}
OPERATIONS = 4e14               # FLOP/s behind the hours on the page


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


def test_numbers_in_the_text():
    """The rows of GLUE, the most that fine-tuning takes, and Welch's t of Courtois's table 3."""
    sizes = dict(row.split('; ') for row in read_papers()['kowsher']['sizes']['rows'])
    rows = sum(float(cells.split('k')[0]) for name, cells in sizes.items() if not name.startswith('squad'))
    assert round(rows) == 950 and 'GLUE has 950 thousand training rows' in PAGE
    tokens = 25 * 1000 * rows * 512                     # 5 epochs, 5 seeds
    flops = tokens * 12 * (6 * 12 * 768 ** 2 + 12 * 512 * 768)          # as test_training_flops_by_hand
    assert (round(flops / 1e18), round(flops / OPERATIONS / 3600)) == (7, 5)
    assert 'at most 7e18 FLOPs, 5 hours' in PAGE
    (one, a), (other, b) = ((printed('courtois', 'table 3', f'{name} base')['average'], sd ** 2 / 5)
                            for name, sd in (('pairwise', 0.37), ('original', 0.63)))
    t, freedom = (one - other) / math.sqrt(a + b), (a + b) ** 2 / (a * a / 4 + b * b / 4)
    assert f"the gain of {one - other:.2f} significant" in PAGE
    assert f"Welch's t is {t:.2f} with {freedom:.1f} degrees" in PAGE


def sources_of(config):
    """Folders, globs and files that a command reads as models or runs."""
    keys = 'init_from', 'compare', 'runs', 'checkpoint'
    parts = [part for key in keys for part in str(config.get(key, '')).split(',')]
    return [part for part in parts if part.startswith('out/')]


def is_made(source, runs):
    """Whether one of the runs {out_dir: knobs} above makes it: a folder, or the checkpoint of a milestone."""
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
    assert commands_of(PAGE) == COMMANDS and len(COMMANDS) > 50


def test_what_is_not_made_is_noticed():
    runs = {'out/a-1': {'milestones': (5,)}, 'out/b': {'milestones': ()}}
    assert is_made('out/a-*', runs) and is_made('out/a-1/ckpt_*.pt', runs) and is_made('out/b', runs)
    for source in ('out/a', 'out/c-*', 'out/b/ckpt_*.pt', 'out/a-1/ckpt_0000006.pt'):
        assert not is_made(source, runs)


def test_bash_reads_the_same_commands(tmp_path):
    """It expands the loops and quotes of the page as commands_of() does, which uses no shell."""
    script = '\n'.join(re.findall(r'```sh\n(.*?)```', PAGE, re.S))
    programs = ''.join(f'{name}() {{ echo {name} "$*"; }}\n' for name in ('python', 'torchrun'))
    done = subprocess.run(['bash', '-euc', programs + script], cwd=tmp_path, capture_output=True, text=True)
    words = [' '.join(shlex.split(command)).removeprefix('PJRT_DEVICE=TPU ') for command in COMMANDS]
    assert done.stdout.splitlines() == words, done.stderr


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


# ---- one sequence of commands per paper at a small size, from corpus to tables ----

SMALL = {                       # stage -> what makes its commands small, after those of the page
    'prepare_data.py': ['--vocab_size=400', '--val_fraction=0.1', '--tokenizer_sample=1000000',
                        '--max_documents=0', '--num_proc=1'],
    'train.py': [*TINY, '--max_iters=4', '--milestones=2,4'],
    'finetune.py': ['--data_dir=benchmarks', '--trials=1', '--epochs=1', '--train_samples=8', '--stride=16',
                    '--eval_samples=12', '--device=cpu'],
    'bench.py': ['--n_layer=1', '--n_head=4', '--n_embd=16', '--n_inner=32', '--vocab_size=400',
                 '--lengths=16', '--memory_lengths=16', '--batches=2', '--rounds=1', '--warmup=1',
                 '--rank_rows=1', '--device=cpu'],
}


@pytest.fixture
def run(tmp_path, corpus):
    """run(label, *more knobs, only=slice of its commands) -> their output, in a folder of their own."""
    for name in ('books_wikipedia', 'books_wikipedia_sp'):
        shutil.copytree(corpus, tmp_path / 'data' / name)
    for name in finetune.TASKS:
        if finetune.TASKS[name].hub:
            publish(name, tmp_path / 'benchmarks')

    def call(label, *more, only=slice(None)):
        out = []
        for command in LABELLED[label][only]:
            words = shlex.split(command)
            at = next(i for i, word in enumerate(words) if word.endswith('.py'))
            name = words[at]
            done = stage(os.path.join(ROOT, name), *words[at + 1:], *SMALL[name], *more, cwd=tmp_path)
            assert done.returncode == 0, (command, done.stderr)
            out.append(done.stdout)
        return ''.join(out)

    call.home = tmp_path
    return call


def results(home, folder):
    names = ('results.md', 'tables.md')
    return next((home / 'out' / folder / name).read_text() for name in names
                if (home / 'out' / folder / name).exists())


@pytest.mark.slow
def test_courtois_from_oscar_to_table_3(run, corpus):
    """Appendix A's filter, three pretrainings, figure 2a, table 3 of the small models."""
    english = {'identification': {'label': 'en', 'prob': 0.9}, 'quality_warnings': None, 'categories': None}
    (run.home / 'oscar').mkdir()
    with open(os.path.join(corpus, 'docstrings.jsonl')) as texts, \
            gzip.open(run.home / 'oscar' / 'en_meta_part_1.jsonl.gz', 'wt') as file:
        for number, line in enumerate(texts):
            metadata = {**english, 'harmful_pp': 3.0 if number % 5 == 0 else 50.0}
            print(json.dumps({'content': json.loads(line)['text'], 'metadata': metadata}), file=file)
    run('C1', '--tokenizer=sentencepiece')
    meta = json.loads((run.home / 'data' / 'oscar' / 'meta.json').read_text())
    assert 'filtered: harmful_pp' in json.dumps(meta)
    run('C2', only=slice(3))
    run('C4', only=slice(1))
    assert all(f'| small_{name} ' in results(run.home, 'courtois_small')
               for name in ('original', 'symmetric', 'pairwise'))
    run('C5', only=slice(1))
    table = results(run.home, 'glue_courtois')
    assert '81.04' in table and 'small_pairwise - small_original' in table


@pytest.mark.slow
def test_kowsher_from_pretraining_to_tables(run):
    """Table 1, its models again for tables 5 and 6, table 2 with and without TriviaQA, figure 3."""
    run('K2')
    run('K4', '--overrides=')
    for label in ('K5', 'K6'):
        assert re.search(r'(\d+) trials, \1 of them finished before', run(label, '--overrides='))
    table = results(run.home, 'glue_kowsher')
    assert all(word in table for word in ('53.91', 'Noise on the embeddings', 'evaluated on (columns)'))
    shutil.copy(run.home / 'benchmarks' / 'squad' / 'train-v1.1.json', run.home / 'triviaqa.json')
    run('K7')
    assert '0 of them finished before' in run('K8')
    run('K9', '--overrides=')


@pytest.mark.slow
def test_tian_from_the_tokenizer_to_longer_rows(run):
    """Penn Treebank and the loss on it, table 2 at twice the length, tables 4 and 5."""
    (run.home / 'ptb').mkdir()
    for number in range(8):
        (run.home / 'ptb' / f'wsj_{number}.txt').write_text('the value of the list is returned .\n' * 20)
    run('T2', '--val_fraction=1')
    run('T3', only=slice(0, 2))
    run('T3', only=slice(-2, None))
    lines = (run.home / 'out' / 'gpu_shatter' / 'metrics.jsonl').read_text().splitlines()
    assert any('ptb_loss' in json.loads(line) for line in lines)
    run('T5', '--block_size=64', '--overrides=', '--tasks=mrpc,rte')
    assert 'gpu_shatter' in results(run.home, 'glue_tian')
    run('T12', '--block_size=64')
    run('T13')
    assert 'exact_question' in results(run.home, 'superglue_tian')
    curve = results(run.home, 'boolq_curve')
    assert re.search(r'large_shatter by pretraining step.*\| 2 \|.*\| 4 \|', curve, re.S)


@pytest.mark.slow
def test_liu_from_the_archives_to_tables(run):
    """CLUECorpusSmall's own form, a scale, one normaliser at both lengths with CLUE, table 3, table 4."""
    (run.home / 'clue').mkdir()
    with zipfile.ZipFile(run.home / 'clue' / 'wiki_zh.zip', 'w') as archive:
        for number in range(6):
            rows = [''.join(2 * chr(0x4e00 + (i * j * number) % 90) for j in range(1, 50)) for i in range(30)]
            archive.writestr(f'wiki_zh/{number}.txt', '\n\n'.join(rows))
    run('L1', '--segmenter=sentencepiece', '--segmenter_vocab=150')
    run('L2', only=slice(1))
    run('L3', only=slice(4, 6))
    run('L3', only=slice(1))
    run('L4', '--overrides=', '--block_size=64', only=slice(2, 3))
    table = results(run.home, 'clue_liu')
    assert 'gau_softmax_diff' in table and '67.61' in table
    run('L5')
    assert '0.9983' in results(run.home, 'liu_rank')
    run('L6', '--memory_lengths=512')                   # the paper's values are shown at their own length
    assert '124.6' in results(run.home, 'bench_liu')
