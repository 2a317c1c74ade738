"""README.md: its commands resolve, its tables are those of the model, its first command runs.

`-m slow` runs every command of README.md, made small, in the order of the page.
"""
import os
import re
import shlex
import shutil
import sys

import pytest
import torch
from commands import commands_of, read_page, resolved
from conftest import ROOT, TINY, process, words

import bench
import finetune
import prepare_data
import train
from model import ALLOWED_POSITIONS, ATTENTION, POSITION, EncoderConfig, MaskedLM, model_config

PAGE = read_page('README.md')
PAGES = PAGE + read_page('results', 'running.md') + read_page('results', 'machines.md')
SHAPES = (4, 8, 512, 2048), (12, 12, 768, 3072), (24, 16, 1024, 4096)
SMALL = {               # stage -> knobs that make a command of the page small
    'prepare_data': {'vocab_size': 400, 'val_fraction': 0.1, 'num_proc': 1},
    'train': {'max_iters': 10, 'eval_samples': 64, 'device': 'cpu'},
    'finetune': {'trials': 1, 'epochs': 1, 'train_samples': 8, 'eval_samples': 8, 'device': 'cpu'},
    'bench': {'n_layer': 1, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'lengths': 16, 'batches': 2, 'rounds': 1,
              'vocab_size': 400, 'device': 'cpu'},
}


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    """A copy of the repository whose docstrings are those of four packages of the standard library."""
    home = tmp_path_factory.mktemp('home')
    for name in os.listdir(ROOT):
        if name.endswith(('.py', '.txt', '.toml', '.md')):
            shutil.copy(os.path.join(ROOT, name), home)
    for name in ('config', 'tests', 'results'):
        shutil.copytree(os.path.join(ROOT, name), home / name)
    return home


def test_the_first_command_runs(home):
    install, *stages = commands_of(PAGE)[:3]
    assert install == 'pip install -r requirements.txt'
    four = ['--path=email unittest asyncio logging']
    for command, more in zip(stages, (four, []), strict=True):
        name = resolved(command)[0].__name__
        done = process(*shlex.split(command)[1:], *words(**SMALL[name]), *more, cwd=home)
        assert done.code == 0, done.err
    assert len(re.findall(r'\[MASK\].*\n.*\n.*rank \d+ of 400', done.out)) == 5
    assert (home / 'out' / 'quickstart' / 'loss.png').exists() or 'matplotlib' in done.err


@pytest.mark.parametrize('command', [line for line in commands_of(PAGES) if '.py' in line])
def test_a_command_has_its_config_and_knobs(command):
    module, config = resolved(command)                  # raises a UserError otherwise
    if module is train:
        model_config(config, 30522)
        assert config['dataset'] in prepared_names()
    if module is finetune:
        names = finetune.GROUPS.get(config['tasks'], config['tasks']).replace(',', ' ').split()
        assert set(names) <= {*finetune.TASKS, 'custom'}
    if module is bench:
        assert set(config['what'].split(',')) <= {*bench.SECTIONS}


def prepared_names():
    """Names of the corpora that config/data_*.py prepare."""
    files = [name for name in os.listdir(os.path.join(ROOT, 'config')) if name.startswith('data_')]
    configs = [resolved(f'prepare_data.py config/{name}')[1] for name in files]
    return {config['name'] or prepare_data.find_corpus(config)[0] for config in configs} | {'docstrings'}


def test_links_and_files_are_there():
    for folder, page in (('.', 'README.md'), ('results', 'running.md'), ('results', 'machines.md')):
        for link in re.findall(r'\]\(([^):#]+)\)', read_page(folder, page)):
            assert os.path.exists(os.path.join(ROOT, folder, link)), link


def test_the_tables_of_systems_are_those_of_the_model():
    """Every row of ATTENTION and POSITION is there, in order, with the counts of its models."""
    number, page = r'([\d,]+)', PAGE[PAGE.index('## Systems'):PAGE.index('## Pretrain')]
    shared = re.findall(rf'^\| `(\w+)` \|.*\| {number} \| {number} \| {number} \|$', page, re.M)
    order = re.findall(rf'^\| `(\w+)` \|[^|]*\|[^|]*\| {number} \|$', page, re.M)
    own = re.findall(rf'^\| `(\w+)` \|[^|]*\|[^|]*\| {number} \| {number}? ?\|$', page, re.M)
    assert [row[0] for row in shared + own] == list(ATTENTION)
    assert [row[0] for row in order] == list(POSITION)
    for row in shared:
        assert list(row[1:]) == [count(shape, attention=row[0]) for shape in SHAPES]
    for position, printed in order:
        assert printed == count(SHAPES[1], position=position)
    for attention, printed, matrices in own:
        gau = {'norm': 'rms', 'bias': False, 'lm_head': 'decoder'} if attention == 'gau' else {}
        shape = (24, *SHAPES[1][1:]) if attention == 'gau' else SHAPES[1]
        settings = {'attention': attention, 'position': ALLOWED_POSITIONS[attention][0], **gau}
        assert printed == count(shape, **settings)
        assert matrices in ('', count(shape, matrices=True, **settings))


def count(shape, matrices=False, **settings):
    """Parameters of a masked LM, or of the matrices of its blocks, as the page prints them."""
    def counted(n_layer):
        with torch.device('meta'):
            model = MaskedLM(EncoderConfig(30522, 512, n_layer, *shape[1:], **settings))
        part = model.encoder.blocks if matrices else model
        return sum(p.numel() for p in part.parameters() if p.dim() > 1 or not matrices)
    one, two = counted(1), counted(2)                   # all blocks are alike
    return f'{one + (shape[0] - 1) * (two - one):,}'
