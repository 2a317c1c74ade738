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
from configurator import configure
from model import model_config

FOLDER = Path(ROOT, 'config')
NAMES = sorted(str(path.relative_to(FOLDER))[:-3] for path in FOLDER.rglob('*.py'))      # base, tian/base ...
PRINTS = r'''
python() { printf '%s\037' python "$@"; printf '\036'; }
torchrun() { printf '%s\037' torchrun "$@"; printf '\036'; }
pip() { printf '%s\037' pip "$@"; printf '\036'; }
pytest() { printf '%s\037' pytest "$@"; printf '\036'; }
'''
SHATTER = 'part_mask', 'one_head_softmax', 'one_head_sigmoid', 'part_bias', 'shatter'
NORMALISERS = 'softmax', 'softmax_plus', 'squared_relu', 'scaled_squared_relu'
SHAPES = {'small': (4, 8, 512, 2048), 'base': (12, 12, 768, 3072), 'large': (24, 16, 1024, 4096)}
TPU = 256, 512, 1_000_000, 10_000, 1e-4
GPU = 128, 256, 1_600_000, 10_000, 1e-4
STEPS = {                           # of the papers: rows a step, tokens a row, steps, warmup, rate
    **dict.fromkeys(('tian_original', 'base_no_position', 'base_rpe', 'base_rab', 'base_xlnet'), TPU),
    **{f'base_{attention}': TPU for attention in SHATTER},
    **dict.fromkeys(('base_one_value', 'base_same_partition', 'tpu_base_pairwise'), TPU),
    **{f'gpu_{attention}': GPU for attention in ('original', 'shatter')},
    **{f'large_{attention}': (1024, *TPU[1:]) for attention in ('original', 'shatter')},
    **{f'base_{name}': (256, 512, 30_000, 3000, 3e-4) for name in ('roformer_v1', 'roformer_v2', 'gau')},
    **{f'gau_{row}_512': (256, 512, 10_000, 1000, 3e-4) for row in NORMALISERS},
    **{f'gau_{row}_diff': (256, 512, 10_000, 1000, 3e-4) for row in NORMALISERS},
    **{f'gau_scales_{scale}': (256, 512, 5000, 500, 3e-4) for scale in ('n2s', 'ns', 'ns2', 's2')},
    'base_gau_100k': (256, 512, 100_000, 10_000, 3e-4),
}
TWINS = {                           # run on a TPU -> the same run on a GPU
    'tpu_tian_original': 'tian_original', 'tpu_base_shatter': 'base_shatter', 'tpu_tian_rpe': 'base_rpe',
    'tpu_tian_rab': 'base_rab', 'tpu_tian_xlnet': 'base_xlnet', 'tpu_large_original': 'large_original',
    'tpu_large_shatter': 'large_shatter',
}


def read(*names):
    with open(os.path.join(ROOT, *names), encoding='utf-8') as file:
        return file.read()


def stage_of(name):
    """The stage whose knobs config/<name>.py sets."""
    folder, _, file = name.rpartition('/')
    if folder in ('data', 'bench'):
        return {'data': 'prepare_data', 'bench': 'bench'}[folder]
    tunes = {'glue', 'superglue', 'squad', 'clue', 'finetune'} & {*file.split('_')}
    return 'finetune' if tunes else 'train'


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
    return resolved(f'{stage_of(name)}.py config/{name}.py')[1]


def runs_of(commands):
    """{last part of out_dir: knobs} of the commands of train.py."""
    runs = {}
    for command in commands:
        module, settings = resolved(command)
        if module is train:
            runs[os.path.basename(settings['out_dir'])] = settings
    return runs


PAGE = read('results', 'reproduce.md')
COMMANDS = commands_of(PAGE)
IN_HEADERS = runs_of(command for name in NAMES for command in header_commands(name))
ON_PAGE = runs_of(COMMANDS)
RUNS = {**IN_HEADERS, **ON_PAGE}


# ---- files ----

@pytest.mark.parametrize('name', NAMES)
def test_a_config_and_the_commands_of_its_header_resolve(name):
    settings = knobs(name)
    commands = header_commands(name)
    stages = [resolved(command)[0].__name__ for command in commands if f'config/{name}.py' in command]
    assert stage_of(name) in stages
    if stage_of(name) == 'train':
        model_config(settings, 100)
        assert f"data/{settings['dataset']}" in NAMES           # which prepares a corpus of that name


@pytest.mark.parametrize('command', dict.fromkeys(COMMANDS))
def test_a_command_of_the_page_resolves(command):
    """Its config and its knobs exist, and the model is one that model.py allows."""
    module, settings = resolved(command)
    if module is train:
        model_config(settings, 100)


@pytest.mark.parametrize('run', sorted({*IN_HEADERS} & {*ON_PAGE}))
def test_a_header_and_the_page_make_the_same_run(run):
    assert IN_HEADERS[run] == ON_PAGE[run] or IN_HEADERS[run]['dataset'] == 'fineweb'


# ---- the papers' values ----

def test_values_of_the_authors_code():
    """What mcrts/ACL2024-SymmetricAttentionBert and HJHGJGHHG/GAU-PyTorch set beyond the papers."""
    both = {'weight_decay': 0.01, 'grad_clip': 1.0, 'dropout': 0.1, 'attention_dropout': 0.1,
            'mask_fraction': 0.15}
    courtois = {**both, 'adam_eps': 1e-12, 'packing': 'stream', 'eval_interval': 250}
    assert knobs('courtois/base').items() >= courtois.items()
    assert knobs('liu/base').items() >= {**both, 'adam_eps': 1e-6, 'packing': 'documents'}.items()
    for run in 'base_pairwise', 'small_pairwise', 'kowsher_pairwise', 'base_pairwise-5', 'pairwise_rank_1':
        assert (RUNS[run]['attention'], RUNS[run]['pair_init']) == ('pairwise', 'unit')
    glue = {'block_size': 128, 'warmup_fraction': 0.1, 'weight_decay': 0.0, 'adam_eps': 1e-8, 'seed': 1,
            'epochs': 5, 'total_batch': 16, 'learning_rate': 1e-5, 'trials': 5, 'schedule': 'linear'}
    assert knobs('courtois/glue').items() >= glue.items()
    assert 'qqp.metric=f1_accuracy' in knobs('courtois/glue')['overrides']
    assert knobs('base')['milestones'][-1] == 200_000
    assert knobs('data/books_wikipedia_sp')['vocab_size'] == knobs('bench/tian')['vocab_size'] == 32000


@pytest.mark.parametrize('name', STEPS)
def test_steps_of_the_papers(name):
    settings = RUNS[name]
    keys = 'total_batch', 'block_size', 'max_iters', 'warmup_iters', 'learning_rate'
    assert tuple(settings[key] for key in keys) == STEPS[name]
    rest = 'schedule', 'min_lr', 'weight_decay', 'adam_eps', 'dropout', 'attention_dropout'
    assert tuple(settings[key] for key in rest) == ('linear', 0, 0.01, 1e-6, 0.1, 0.1)


def test_attentions_and_positions_of_the_runs():
    """Of Tian et al.'s runs and of Liu's, by the names of the papers."""
    pairs = {'tian_original': ('original', 'absolute'), 'base_no_position': ('original', 'none'),
             'base_rpe': ('rpe', 'none'), 'base_rab': ('original', 'rab'), 'base_xlnet': ('xlnet', 'none'),
             'gpu_original': ('original', 'absolute'), 'gpu_shatter': ('shatter', 'none'),
             'large_original': ('original', 'absolute'), 'large_shatter': ('shatter', 'none'),
             **{f'base_{attention}': (attention, 'none') for attention in SHATTER},
             'base_one_value': ('one_head_sigmoid', 'none'), 'base_same_partition': ('shatter', 'none'),
             'base_roformer_v1': ('original', 'rope'), 'base_roformer_v2': ('original', 'rope'),
             'base_gau': ('gau', 'rope'), 'base_gau_100k': ('gau', 'rope')}
    for name, pair in pairs.items():
        assert (RUNS[name]['attention'], RUNS[name]['position']) == pair, name
    assert [name for name in RUNS if RUNS[name]['objective'] == 'plm'] == ['base_xlnet', 'tpu_tian_xlnet']
    assert [name for name in RUNS if RUNS[name]['one_value_matrix']] == ['base_one_value']
    assert [name for name in RUNS if RUNS[name]['same_partition']] == ['base_same_partition']


@pytest.mark.parametrize('size', ['small', 'base'])
@pytest.mark.parametrize('attention', ['original', 'symmetric', 'pairwise'])
def test_runs_of_courtois_differ_in_nothing_else(attention, size):
    ours = {'attention': attention, 'out_dir': f'out/{size}_{attention}',
            'pair_init': 'unit' if attention == 'pairwise' else 'identity'}
    oscar = {'dataset': 'oscar', 'eval_interval': 250}
    assert ON_PAGE[f'{size}_{attention}'] == {**knobs(size), **oscar, **ours}


@pytest.mark.parametrize('size', SHAPES)
def test_three_sizes_differ_in_the_shape_alone(size):
    settings = knobs(size)
    sizes = 'n_layer', 'n_head', 'n_embd', 'n_inner'
    assert tuple(settings[key] for key in sizes) == SHAPES[size]
    same = {key: settings[key] for key in ('out_dir', 'batch_size', *sizes)}
    assert settings == {**knobs('base'), **same}


@pytest.mark.parametrize('attention', ['original', 'symmetric', 'pairwise', 'shared'])
def test_kowshers_four_attentions_have_one_recipe(attention):
    """Section 2.5: the corpora of BERT, 4 devices x 132 rows of 512, dropouts 0.1, Adam's 0.9 and 0.999."""
    settings = RUNS[f'kowsher_{attention}']
    printed = {'dataset': 'books_wikipedia', 'total_batch': 4 * 132, 'block_size': 512, 'n_layer': 12,
               'n_head': 12, 'n_embd': 768, 'dropout': 0.1, 'attention_dropout': 0.1,
               'mask_fraction': 0.15, 'beta1': 0.9, 'beta2': 0.999}
    assert settings.items() >= printed.items()
    ours = {'attention': attention, 'out_dir': f'out/kowsher_{attention}',
            'pair_init': 'unit' if attention == 'pairwise' else 'identity'}
    assert settings == {**knobs('kowsher/base'), **ours}


@pytest.mark.parametrize('name', TWINS)
def test_runs_on_tpus_differ_in_the_device_alone(name):
    """And in the Penn Treebank, on which the curves are drawn."""
    ours = {'out_dir': f'out/{name}', 'device': 'xla', 'dtype': 'bfloat16', 'validation': ''}
    assert RUNS[name] == {**RUNS[TWINS[name]], **ours}


def test_pairwise_on_a_tpu_has_tians_recipe():
    ours = {'out_dir': 'out/tpu_base_pairwise', 'device': 'xla', 'dtype': 'bfloat16', 'attention': 'pairwise'}
    assert RUNS['tpu_base_pairwise'] == {**knobs('tian/base'), **ours}


@pytest.mark.parametrize('normaliser', NORMALISERS)
def test_each_row_of_lius_table_2(normaliser):
    fixed, varying = (RUNS[f'gau_{normaliser}_{rows}'] for rows in ('512', 'diff'))
    wanted = {'attention': 'gau', 'normaliser': normaliser, 'packing': 'documents', 'whole_word': True,
              'relu_scale': 'ns2' if normaliser == 'squared_relu' else 'ns'}
    assert fixed.items() >= wanted.items()
    assert varying == {**fixed, 'out_dir': f'out/gau_{normaliser}_diff', 'seed': 2}


@pytest.mark.parametrize('scale', ['n2s', 'ns', 'ns2', 's2'])
def test_each_row_of_lius_table_1(scale):
    ours = {'normaliser': 'squared_relu', 'relu_scale': scale, 'max_iters': 5000, 'warmup_iters': 500}
    assert RUNS[f'gau_scales_{scale}'] == {**knobs('liu/gau'), **ours, 'out_dir': f'out/gau_scales_{scale}'}


