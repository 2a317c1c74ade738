"""README.md and the pages: commands resolve, the first ones run, links lead to files, counts are the model's.

`-m slow` runs every command of README.md on one machine, made small, in the order of the page.
"""
import glob
import gzip
import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, knobs_of, process, words
from test_configs import COMMANDS as REPRODUCE
from test_configs import IN_HEADERS, NAMES, commands_of, read, resolved

import bench
import costs
import finetune
import train
from model import model_config

PAGE = read('README.md')
PAGES = ['README.md', *sorted(glob.glob('results/*.md', root_dir=ROOT))]
FOUR = '--path=email unittest asyncio logging'          # packages of the standard library
SHAPE = {knob: TINY[knob] for knob in bench.SHAPE_KNOBS}
SMALL = {               # stage -> knobs that make a command of the page small
    'prepare_data': {'vocab_size': 400, 'val_fraction': 0.1, 'num_proc': 1},
    'train': {'max_iters': 10, 'eval_samples': 64, 'device': 'cpu'},
    'finetune': {'trials': 1, 'epochs': 1, 'train_samples': 8, 'eval_samples': 8, 'device': 'cpu'},
    'bench': {'what': 'params,speed', 'lengths': 16, 'batches': 2, 'rounds': 1, 'vocab_size': 400,
              'device': 'cpu', **SHAPE},
    'curves': {'device': 'cpu'},
}

COMMANDS = [line for name in ('README.md', 'results/running.md') for line in commands_of(read(name))]


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    """A copy of the programs and their configs."""
    home = tmp_path_factory.mktemp('home')
    for name in ('config', 'results'):
        shutil.copytree(os.path.join(ROOT, name), home / name)
    for file in Path(ROOT).glob('*.py'):
        shutil.copy(file, home)
    return home


def small(command, *more):
    """(stage, words) of a command line, made small."""
    stage = resolved(command)[0].__name__
    return stage, [*shlex.split(command)[2:], *words(**SMALL[stage]), *more]


def test_the_first_commands_run(stage, tmp_path, monkeypatch):
    """As in README, on the docstrings of four packages."""
    monkeypatch.chdir(tmp_path)
    install, prepare, pretrain = commands_of(PAGE)[:3]
    assert install == 'pip install -r requirements.txt'
    for command, *more in ((prepare, FOUR), (pretrain,)):
        name, arguments = small(command, *more)
        done = stage(name, *arguments)
        assert done.code == 0, done
    # five documents, of which one may have no word of one token
    assert len(re.findall(r'\[MASK\].*\n.*\n.*rank \d+', done.out)) >= 4


@pytest.mark.parametrize('command', dict.fromkeys(
    line for line in COMMANDS + REPRODUCE + IN_HEADERS if '.py' in line))
def test_a_command_has_its_config_and_knobs(command):
    """The model is one that model.py allows, and the corpus has a config or a command."""
    module, config = resolved(command)                  # a UserError otherwise
    if module is train:
        model_config(config, 30522)
        named = re.search(rf"--name={config['dataset']}\b", '\n'.join(COMMANDS))
        assert named or f"data/{config['dataset']}" in NAMES
    elif module is finetune:
        assert finetune.find_tasks(config['tasks'])     # a UserError otherwise


@pytest.mark.slow
def test_every_command_runs(home):
    """Those that need a hub or several machines excepted; base models keep two small layers."""
    write_files(home)
    base = words(**SHAPE, block_size=32, total_batch=8, batch_size=8)
    for command in commands_of(PAGE):
        if not command.startswith('python ') or re.search('fineweb|wikipedia|glue', command):
            continue
        more = [FOUR] if command == 'python prepare_data.py' else []
        more += base if 'config/base' in command else []
        _, arguments = small(command, *more)
        done = process(shlex.split(command)[1], *arguments, cwd=home, timeout=300)
        assert done.code == 0, done.err
    assert (home / 'out' / 'quickstart_hf' / 'config.json').exists()
    labels = home / 'out' / 'labels'
    assert 'majority' in (labels / 'results.md').read_text()
    predicted = (labels / 'quickstart' / 'custom_1' / 'predicted_new.csv').read_text()
    assert predicted.startswith('text,prediction,probability,p_no,p_yes\n"who is 7, me?",')


def write_files(home):
    """The texts and the labelled files that the commands of the page name."""
    lines = [json.dumps({'body': f'{PAGE[i * 20:i * 20 + 300]} {i}'}) for i in range(300)]
    rows = [f'"who is {i}, me?",yes\nwhen is {i}?,no\n' for i in range(20)]
    (home / 'texts').mkdir()
    for name in 'ab':
        (home / 'texts' / f'{name}.jsonl.gz').write_bytes(gzip.compress('\n'.join(lines).encode()))
        (home / f'{name}.csv').write_text('text,class\n' + ''.join(rows))
    (home / 'new.csv').write_text('text\n"who is 7, me?"\n')


# ---- links and counts of the pages ----

@pytest.mark.parametrize('name', PAGES)
def test_a_link_leads_to_a_file(name):
    for link in re.findall(r'\]\(([^):#]+)\)', read(name)):
        assert os.path.exists(os.path.join(ROOT, os.path.dirname(name), link)), link


@pytest.mark.parametrize('name', ['quickstart', 'results/grid', pytest.param('base', marks=pytest.mark.slow)])
def test_a_header_says_what_its_run_costs(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)     # slow on meta
    path = Path(ROOT, 'config', f'{name}.py')
    assert f'# Cost (results/costs.py): {costs.cost(costs.header_arguments(path))}\n' in path.read_text()


def test_the_operations_of_a_token_are_those_of_its_products():
    """By hand, of the quickstart's: 6 for each weight, forward and backward, and the products of the scores.

    Two layers of 128, an MLP of 256, 64 tokens of which 10 are predicted. In the last block only these have
    queries, outputs and MLP; S (4, 32, 32) multiplies queries.
    """
    D, F, T, k, V = 128, 256, 64, 10, 4096
    queries = D * D + 4 * 32 * 32 + D * D + 2 * D * F   # Wq is that of the keys, too; S, Wo, the MLP
    first = T * (queries + D * D) + 2 * T * T * D       # Wv; q k^T and A v
    last = T * 2 * D * D + k * (queries - D * D) + 2 * k * T * D
    head = k * (D * D + D * V)
    by_hand = 6 * (first + last + head) / T / 1e9
    found = re.search(r'([\d.]+) GFLOP', costs.cost(['config/quickstart.py']))[1]
    assert float(found) == pytest.approx(by_hand, rel=2e-2)


def test_the_table_of_systems_has_the_parameters_of_the_model(monkeypatch):
    """In BERT-base's size. A variant of a fork needs no row."""
    monkeypatch.setattr(torch.Tensor, 'normal_', lambda self, *arguments, **keywords: self)     # slow on meta
    rows = re.findall(r'^\| \[?`(\w+)`.*? \|.*\| ([\d,]+) \|$', PAGE, re.M)
    assert len(rows) > 10
    systems = {'absolute': 'original', 'none': 'no_position', 'rope': 'roformer_v1'}
    base = dict(zip(bench.SHAPE_KNOBS, bench.SHAPES['base'], strict=True))
    for name, printed in rows:
        counts = bench.group_counts(systems.get(name, name), {**knobs_of(bench), **base})
        assert f'{sum(counts.values()):,}' == printed, name
