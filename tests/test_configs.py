"""config/ and results/reproduce.md: files and commands resolve, and set what the papers set.

A model of a paper is a recipe in config/ and a command of reproduce.md with its flags. Here bash runs the
commands as a reader does, loops included, but python and torchrun are functions that print their arguments.
"""
import importlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
from conftest import ROOT

import train
from bench import SHAPE_KNOBS, SHAPES
from configurator import configure
from model import NORMALISER, SHATTER

FOLDER = Path(ROOT, 'config')
NAMES = sorted(str(path.relative_to(FOLDER))[:-3] for path in FOLDER.rglob('*.py'))      # base, tian/base ...
PRINTS = r'''
python() { printf '%s\037' python "$@"; printf '\036'; }
torchrun() { printf '%s\037' torchrun "$@"; printf '\036'; }
pip() { printf '%s\037' pip "$@"; printf '\036'; }
pytest() { printf '%s\037' pytest "$@"; printf '\036'; }
'''
TPU = 256, 512, 1_000_000, 10_000, 1e-4
GPU = 128, 256, 1_600_000, 10_000, 1e-4
LARGE = 1024, *TPU[1:]
LIU = 256, 512, 30_000, 3000, 3e-4
# run -> attention, position, rows a step, tokens a row, steps, warmup, rate; the others are in DIFFERENCES
PRINTED = {
    'tian_original': ('original', 'absolute', *TPU),
    'base_no_position': ('original', 'none', *TPU),
    'base_rpe': ('rpe', 'none', *TPU),
    'base_rab': ('original', 'rab', *TPU),
    'base_xlnet': ('xlnet', 'none', *TPU),
    **{f'base_{attention}': (attention, 'none', *TPU) for attention in SHATTER},
    'base_one_value': ('one_head_sigmoid', 'none', *TPU),
    'base_same_partition': ('shatter', 'none', *TPU),
    'gpu_original': ('original', 'absolute', *GPU),
    'gpu_shatter': ('shatter', 'none', *GPU),
    'large_original': ('original', 'absolute', *LARGE),
    'large_shatter': ('shatter', 'none', *LARGE),
    'base_roformer_v1': ('original', 'rope', *LIU),
    'base_roformer_v2': ('original', 'rope', *LIU),
    'base_gau': ('gau', 'rope', *LIU),
    'base_gau_100k': ('gau', 'rope', 256, 512, 100_000, 10_000, 3e-4),
    **{f'gau_{row}_512': ('gau', 'rope', 256, 512, 10_000, 1000, 3e-4) for row in NORMALISER},
}
TWINS = {                           # run on a TPU -> the same run on a GPU
    'tpu_tian_original': 'tian_original',
    'tpu_base_shatter': 'base_shatter',
    'tpu_tian_rpe': 'base_rpe',
    'tpu_tian_rab': 'base_rab',
    'tpu_tian_xlnet': 'base_xlnet',
    'tpu_large_original': 'large_original',
    'tpu_large_shatter': 'large_shatter',
}


def read(*names):
    return Path(ROOT, *names).read_text(encoding='utf-8')


def called(script):
    """Command lines 'python train.py ...' of stages that bash comes to in a script, with their arguments."""
    with tempfile.TemporaryDirectory() as empty:        # no glob matches a file there, no program is found
        done = subprocess.run([shutil.which('bash'), '-c', PRINTS + script], capture_output=True, text=True,
                              cwd=empty, env={'PATH': empty})
    assert (done.returncode, done.stderr) == (0, ''), done.stderr
    commands = [shlex.join(command.split('\037')[:-1]) for command in done.stdout.split('\036')[:-1]]
    # experiment.py has a plan and no knobs
    return [command for command in commands if 'results/experiment.py' not in command]


def commands_of(page):
    """Command lines of the sh blocks of a page, in their order."""
    return called('\n'.join(re.findall(r'```sh\n(.*?)```', page, re.S)))


@lru_cache
def header_commands(name):
    """Command lines of the header of config/<name>.py."""
    lines = re.findall(r'^# \$ (.*)', read('config', f'{name}.py').replace('\\\n# ', ''), re.M)
    return called('\n'.join(lines))


def resolved(command):
    """(stage, its knobs) of a command line, as the stage's main() gets them."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith('.py'))
    module = importlib.import_module(os.path.basename(words[at]).removesuffix('.py'))
    return module, configure(dict(vars(module)), module.MINIMUM, words[at + 1:])


def knobs(name):
    """The knobs after config/<name>.py, of the stage that its header starts with it."""
    command = next(command for command in header_commands(name) if f'config/{name}.py' in command)
    return resolved(re.sub(r'\.py .*', f'.py config/{name}.py', command))[1]


def runs_of(commands):
    """{last part of out_dir: knobs} of the commands of train.py."""
    found = [resolved(command) for command in commands]
    return {os.path.basename(settings['out_dir']): settings for module, settings in found if module is train}


IN_HEADERS = [command for name in NAMES for command in header_commands(name)]
COMMANDS = commands_of(read('results', 'reproduce.md'))
HEADER_RUNS = runs_of(IN_HEADERS)
PAGE_RUNS = runs_of(COMMANDS)
RUNS = {**HEADER_RUNS, **PAGE_RUNS}


# ---- runs of headers and of the page; test_readme.py resolves every command ----

@pytest.mark.parametrize('run', sorted({*HEADER_RUNS} & {*PAGE_RUNS}))
def test_a_header_and_the_page_make_the_same_run(run):
    assert HEADER_RUNS[run] == PAGE_RUNS[run] or HEADER_RUNS[run]['dataset'] == 'fineweb'


# ---- the papers' values ----

def test_values_of_the_authors_code():
    """What mcrts/ACL2024-SymmetricAttentionBert and HJHGJGHHG/GAU-PyTorch set beyond the papers."""
    both = {
        'weight_decay': 0.01,
        'grad_clip': 1.0,
        'dropout': 0.1,
        'attention_dropout': 0.1,
        'mask_fraction': 0.15,
    }
    courtois = {**both, 'adam_eps': 1e-12, 'packing': 'stream', 'eval_interval': 250}
    assert knobs('courtois/base').items() >= courtois.items()
    assert knobs('liu/base').items() >= {**both, 'adam_eps': 1e-6, 'packing': 'documents'}.items()
    for run in 'base_pairwise-5', 'pairwise_rank_1':    # for the others see differences()
        assert (RUNS[run]['attention'], RUNS[run]['pair_init']) == ('pairwise', 'unit')
    glue = {'block_size': 128, 'warmup_fraction': 0.1, 'weight_decay': 0.0, 'adam_eps': 1e-8, 'seed': 1,
            'epochs': 5, 'total_batch': 16, 'learning_rate': 1e-5, 'trials': 5, 'schedule': 'linear'}
    assert knobs('courtois/glue').items() >= glue.items()
    assert 'qqp.metric=f1_accuracy' in knobs('courtois/glue')['overrides']
    assert knobs('base')['milestones'][-1] == 200_000
    assert knobs('data/books_wikipedia_sp')['vocab_size'] == knobs('bench/tian')['vocab_size'] == 32000


@pytest.mark.parametrize('name', PRINTED)
def test_models_and_steps_of_the_papers(name):
    settings = RUNS[name]
    keys = ('attention', 'position', 'total_batch', 'block_size', 'max_iters', 'warmup_iters',
            'learning_rate')
    assert tuple(settings[key] for key in keys) == PRINTED[name]
    rest = 'schedule', 'min_lr', 'weight_decay', 'adam_eps', 'dropout', 'attention_dropout'
    assert tuple(settings[key] for key in rest) == ('linear', 0, 0.01, 1e-6, 0.1, 0.1)


def test_runs_that_alone_have_an_option():
    assert [name for name in RUNS if RUNS[name]['objective'] == 'plm'] == ['base_xlnet', 'tpu_tian_xlnet']
    assert [name for name in RUNS if RUNS[name]['one_value_matrix']] == ['base_one_value']
    assert [name for name in RUNS if RUNS[name]['same_partition']] == ['base_same_partition']


def differences():
    """{run: (knobs of another run or of a config, what else the run sets, besides out_dir)}"""
    found = {}
    for attention in 'original', 'symmetric', 'pairwise', 'shared':
        ours = {'attention': attention, 'pair_init': 'unit' if attention == 'pairwise' else 'identity'}
        found[f'kowsher_{attention}'] = knobs('kowsher/base'), ours
        for size in ('small', 'base') if attention != 'shared' else ():
            found[f'{size}_{attention}'] = knobs(size), {**ours, 'dataset': 'oscar', 'eval_interval': 250}
    tpu = {'device': 'xla', 'dtype': 'bfloat16'}
    for name, twin in TWINS.items():                    # the curves are drawn on the Penn Treebank
        found[name] = RUNS[twin], {**tpu, 'validation': ''}
    found['tpu_base_pairwise'] = knobs('tian/base'), {**tpu, 'attention': 'pairwise'}
    for normaliser in NORMALISER:                       # Liu 2022, table 2
        found[f'gau_{normaliser}_diff'] = RUNS[f'gau_{normaliser}_512'], {'seed': 2}
    for scale in ('n2s', 'ns', 'ns2', 's2'):            # Liu 2022, table 1
        found[f'gau_scales_{scale}'] = knobs('liu/gau'), {
            'normaliser': 'squared_relu', 'relu_scale': scale, 'max_iters': 5000, 'warmup_iters': 500}
    return found


DIFFERENCES = differences()


@pytest.mark.parametrize('run', DIFFERENCES)
def test_a_run_differs_from_another_in_nothing_else(run):
    base, ours = DIFFERENCES[run]
    assert RUNS[run] == {**base, **ours, 'out_dir': f'out/{run}'}


@pytest.mark.parametrize('size', SHAPES)
def test_three_sizes_differ_in_the_shape_alone(size):
    shape = dict(zip(SHAPE_KNOBS, SHAPES[size], strict=True))
    settings = knobs(size)
    ours = {key: settings[key] for key in ('out_dir', 'batch_size')}
    assert settings == {**knobs('base'), **shape, **ours}


def test_kowshers_recipe():
    """Section 2.5: the corpora of BERT, 4 devices x 132 rows of 512, dropouts 0.1, Adam's 0.9 and 0.999."""
    printed = {'dataset': 'books_wikipedia', 'total_batch': 4 * 132, 'block_size': 512, 'n_layer': 12,
               'n_head': 12, 'n_embd': 768, 'dropout': 0.1, 'attention_dropout': 0.1,
               'mask_fraction': 0.15, 'beta1': 0.9, 'beta2': 0.999}
    assert knobs('kowsher/base').items() >= printed.items()


@pytest.mark.parametrize('normaliser', NORMALISER)
def test_each_row_of_lius_table_2(normaliser):
    wanted = {'normaliser': normaliser, 'packing': 'documents', 'whole_word': True,
              'relu_scale': 'ns2' if normaliser == 'squared_relu' else 'ns'}
    assert RUNS[f'gau_{normaliser}_512'].items() >= wanted.items()
