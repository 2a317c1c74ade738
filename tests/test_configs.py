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
import torch
from conftest import ROOT, process, refused, without_storage

import finetune
import train
from configurator import configure
from model import SequenceClassifier, count_parameters, model_config

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
COUNTED = {                         # config whose header counts parameters -> the flags of that model
    'base_pairwise': (), 'liu/base': ('--position=rope',), 'liu/roformer_v2': (), 'liu/gau': (),
}


def read(*names):
    with open(os.path.join(ROOT, *names), encoding='utf-8') as file:
        return file.read()


def header_lines(name):
    """The comment that a config file starts with."""
    return re.match('(?:# .*\n)+', read('config', f'{name}.py'))[0].splitlines()


def header(name):
    """The same as one line."""
    return ' '.join(word for line in header_lines(name) for word in line[1:].split())


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


def knobs(name, *more):
    return resolved(shlex.join([f'{stage_of(name)}.py', f'config/{name}.py', *more]))[1]


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
ROW = r'^\| ((?:`\w+`(?:, )?)+) \| ([\d,]+)(?: \(([\d,]+)\))? \| ([\d.]+) \| (.*) \|$'
# (run, parameters, those in matrices, GPU hours, what to expect); a line of the page may have several runs
ROWS = [(run, *cells) for runs, *cells in re.findall(ROW, PAGE, re.M) for run in re.findall(r'\w+', runs)]


def vocabulary(dataset):
    """Size of the vocabulary with which config/data/<dataset>.py prepares a corpus."""
    corpus = knobs(f'data/{dataset}')
    return 30522 if corpus['tokenizer'] == 'wordpiece' else corpus['vocab_size']


def build(settings, kind=None, vocab_size=None, pooling='cls'):
    """The model of a run's knobs, of the class that their objective or `kind` says, without storage."""
    settings = {**settings, 'pooling': pooling}
    with without_storage():
        return (kind or train.MODEL_CLASSES[settings['objective']])(
            model_config(settings, vocab_size or vocabulary(settings['dataset'])))


def matrices(model):
    """Parameters in matrices, as Tian counts: no embeddings, nor XLNet's u and v, vectors of each head."""
    total = 0
    for part in model.encoder.modules():
        if isinstance(part, torch.nn.Embedding):
            continue
        for key, parameter in part.named_parameters(recurse=False):
            if parameter.dim() > 1 and 'bias' not in key:
                total += parameter.numel()
    return total


# ---- files ----

@pytest.mark.parametrize('name', NAMES)
def test_a_config_resolves_and_says_what_to_expect(name):
    settings, stage = knobs(name), stage_of(name)
    assert 'Expect' in header(name)
    commands = [command for command in header_commands(name) if f'config/{name}.py' in shlex.split(command)]
    assert stage in [resolved(command)[0].__name__ for command in commands]
    if stage == 'train':
        model_config(settings, 100)
        assert f"data/{settings['dataset']}" in NAMES           # which prepares a corpus of that name


def test_no_two_configs_write_to_the_same_folder():
    """Each but tpu.py and modern.py, which come after others, has one in which the file's name is seen."""
    names = [name for name in NAMES if name not in ('tpu', 'modern') and stage_of(name) != 'prepare_data']
    folders = {name: knobs(name)['out_dir'] for name in names}
    assert len({*folders.values()}) == len(names)
    for name, folder in folders.items():
        last = re.split('[/_]', name)[-1]
        assert folder.startswith('out/')
        assert last in re.split('[/_]', folder)


def test_a_config_in_a_folder_is_found_and_imports_others_from_anywhere(tmp_path):
    """config/tian/gpu.py imports config/tian/base.py; only then are its knobs refused by another stage."""
    done = process(os.path.join(ROOT, 'prepare_data.py'), 'config/tian/gpu.py', cwd=tmp_path)
    assert 'config/tian/gpu.py: no knob ' in refused(done)


@pytest.mark.parametrize('name', [name for name in NAMES if name != 'tpu' and not name.startswith('data/')])
def test_tpu_after_any_other_changes_the_device_alone(name):
    assert knobs(name, 'config/tpu.py') == {**knobs(name), 'device': 'xla', 'dtype': 'bfloat16'}


@pytest.mark.parametrize('name', NAMES)
def test_every_command_of_a_header_composes(name):
    """Its knobs exist; another command makes what it starts from; what reproduce.md makes it makes alike."""
    stages = [resolved(command) for command in header_commands(name)]
    made = {*RUNS}
    made |= {re.sub(r'-\d$', '-', run) for run in RUNS}                 # the beginning of base_pairwise-*
    tuned = {settings['out_dir'] for stage, settings in stages if stage is finetune}
    made |= {folder.split('/')[1] for folder in tuned}
    for stage, settings in stages:
        if stage.__name__ == 'report':                  # of trials of a command of the header
            assert settings['out_dir'] in tuned
        elif stage is finetune:
            needed = re.findall(r'out/([\w-]+)', f"{settings['init_from']} {settings['compare']}")
            assert {*needed} <= made
        elif stage is train and settings['dataset'] != 'fineweb':
            run = os.path.basename(settings['out_dir'])
            assert settings == ON_PAGE.get(run, settings)


# ---- the papers' values ----

def test_values_of_the_authors_code():
    """What mcrts/ACL2024-SymmetricAttentionBert and HJHGJGHHG/GAU-PyTorch set beyond the papers."""
    both = {'weight_decay': 0.01, 'grad_clip': 1.0, 'dropout': 0.1, 'attention_dropout': 0.1,
            'mask_fraction': 0.15}
    courtois = {**both, 'adam_eps': 1e-12, 'packing': 'stream'}
    assert knobs('base').items() >= courtois.items()
    assert knobs('courtois/base').items() >= {**courtois, 'eval_interval': 250}.items()
    assert knobs('liu/base').items() >= {**both, 'adam_eps': 1e-6, 'packing': 'documents'}.items()
    for settings in (knobs('base_pairwise'), RUNS['base_pairwise'], RUNS['small_pairwise'],
                     RUNS['kowsher_pairwise'], RUNS['base_pairwise-5'], RUNS['pairwise_rank_1']):
        assert (settings['attention'], settings['pair_init']) == ('pairwise', 'unit')
    glue = {'block_size': 128, 'warmup_fraction': 0.1, 'weight_decay': 0.0, 'adam_eps': 1e-8, 'seed': 1,
            'epochs': 5, 'total_batch': 16, 'learning_rate': 1e-5, 'trials': 5, 'schedule': 'linear'}
    assert knobs('courtois/glue').items() >= glue.items()
    assert 'qqp.metric=f1_accuracy' in knobs('courtois/glue')['overrides']
    assert len(knobs('base')['milestones']) == 18
    assert knobs('base')['milestones'][-1] == 200_000
    assert all(400_000 in knobs(f'tian/{name}')['milestones'] for name in ('base', 'gpu', 'large'))
    tian = {'vocab_size': vocabulary('books_wikipedia_sp'), 'dropout': knobs('tian/base')['dropout']}
    assert knobs('bench/tian').items() >= tian.items()
    assert tian == {'vocab_size': 32000, 'dropout': 0.1}


@pytest.mark.parametrize('name', STEPS)
def test_steps_of_the_papers(name):
    settings = RUNS[name]
    keys = 'total_batch', 'block_size', 'max_iters', 'warmup_iters', 'learning_rate'
    assert tuple(settings[key] for key in keys) == STEPS[name]
    rest = 'schedule', 'min_lr', 'weight_decay', 'adam_eps', 'dropout', 'attention_dropout'
    assert tuple(settings[key] for key in rest) == ('linear', 0, 0.01, 1e-6, 0.1, 0.1)


def test_attentions_and_positions_of_the_runs():
    """Of Tian et al.'s runs and of Liu's, by the names of the papers."""
    tian = {'tian_original': ('original', 'absolute'), 'base_no_position': ('original', 'none'),
            'base_rpe': ('rpe', 'none'), 'base_rab': ('original', 'rab'), 'base_xlnet': ('xlnet', 'none'),
            'gpu_original': ('original', 'absolute'), 'gpu_shatter': ('shatter', 'none'),
            'large_original': ('original', 'absolute'), 'large_shatter': ('shatter', 'none'),
            **{f'base_{attention}': (attention, 'none') for attention in SHATTER},
            'base_one_value': ('one_head_sigmoid', 'none'), 'base_same_partition': ('shatter', 'none'),
            'base_roformer_v1': ('original', 'rope'), 'base_roformer_v2': ('original', 'rope'),
            'base_gau': ('gau', 'rope'), 'base_gau_100k': ('gau', 'rope')}
    assert {name: (RUNS[name]['attention'], RUNS[name]['position']) for name in tian} == tian
    assert [name for name in RUNS if RUNS[name]['objective'] == 'plm'] == ['base_xlnet', 'tpu_tian_xlnet']
    assert [name for name in RUNS if RUNS[name]['one_value_matrix']] == ['base_one_value']
    assert [name for name in RUNS if RUNS[name]['same_partition']] == ['base_same_partition']
    validated = [name for name in ON_PAGE if re.match('(tian|gpu|large)_', name) or name in tian]
    for name in validated:
        ours = ON_PAGE[name]['dataset'] == 'books_wikipedia_sp'
        assert ON_PAGE[name]['validation'] == ('ptb' if ours else ''), name


def test_two_sizes_and_three_attentions_of_courtois_differ_in_nothing_else():
    for size in ('small', 'base'):
        for attention in ('original', 'symmetric', 'pairwise'):
            ours = {'attention': attention, 'out_dir': f'out/{size}_{attention}',
                    'pair_init': 'unit' if attention == 'pairwise' else 'identity'}
            told = {'dataset': 'oscar', 'eval_interval': 250}
            assert ON_PAGE[f'{size}_{attention}'] == {**knobs(size), **told, **ours}
    for size in ('small', 'base'):                      # of one recipe, on FineWeb
        ours = {'attention': 'shared', 'out_dir': f'out/{size}_shared'}
        assert IN_HEADERS[f'{size}_shared'] == {**knobs(size), **ours}
    ours = {'attention': 'pairwise', 'out_dir': 'out/base_pairwise', 'pair_init': 'unit'}
    assert knobs('base_pairwise') == {**knobs('base'), **ours}
    sizes = 'n_layer', 'n_head', 'n_embd', 'n_inner'
    for size, shape in SHAPES.items():
        settings = knobs(size)
        assert tuple(settings[key] for key in sizes) == shape
        same = {key: settings[key] for key in ('out_dir', 'batch_size', *sizes)}
        assert settings == {**knobs('base'), **same}


def test_kowshers_four_attentions_have_one_recipe():
    """Section 2.5: the corpora of BERT, 4 devices x 132 rows of 512, dropouts 0.1, Adam's 0.9 and 0.999."""
    base = knobs('kowsher/base')
    told = {'dataset': 'books_wikipedia', 'total_batch': 528, 'block_size': 512, 'n_layer': 12, 'n_head': 12,
            'n_embd': 768, 'dropout': 0.1, 'attention_dropout': 0.1, 'mask_fraction': 0.15, 'beta1': 0.9,
            'beta2': 0.999}
    assert base.items() >= told.items()
    assert base['total_batch'] == 4 * 132
    assert 132 % base['batch_size'] == 0
    for attention in ('original', 'symmetric', 'pairwise', 'shared'):
        ours = {'attention': attention, 'pair_init': 'unit' if attention == 'pairwise' else 'identity'}
        name = f'kowsher_{attention}'
        assert RUNS[name] == {**base, **ours, 'out_dir': f'out/{name}'}


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


# ---- numbers of the page and of the headers ----

@pytest.mark.parametrize('name, count, in_matrices', [row[:3] for row in ROWS])
def test_parameters_on_the_page(name, count, in_matrices):
    model = build(ON_PAGE[name])
    assert f'{count_parameters(model):,}' == count
    assert in_matrices in ('', f'{matrices(model):,}')


@pytest.mark.parametrize('name', COUNTED)
def test_parameters_in_a_header(name):
    [count] = re.findall(r'([\d,]+) parameters', header(name))
    assert f'{count_parameters(build(knobs(name, *COUNTED[name]))):,}' == count
    assert {name for name in NAMES if re.search(r'[\d,]{9,} parameters', header(name))} == {*COUNTED}


@pytest.mark.parametrize('run, tuned, vocab_size, angles, count', [
    ('base_roformer_v1', 'base_roformer_v2', 50000, 1536 * 64, 124147970),
    ('base_roformer_v2', 'base_roformer_v2', 12000, 512 * 64, 94777090),
    ('base_gau', 'base_gau', 12000, 0, 96519170),
])
def test_classifiers_of_lius_table_4(run, tuned, vocab_size, angles, count):
    """With the pooling of the command that fine-tunes them; his RoFormer counts include rotary angles."""
    poolings = set()
    for command in COMMANDS:
        module, settings = resolved(command)
        if module is finetune and f'out/{tuned}' in settings['init_from'].split(','):
            poolings.add(settings['pooling'])
    model = build(RUNS[run], SequenceClassifier, vocab_size, *poolings)
    assert count_parameters(model) + angles == count


@pytest.mark.parametrize('name', [name for name in NAMES if stage_of(name) in ('train', 'finetune')])
def test_numbers_that_a_header_expects_are_those_of_papers_json(name):
    """Every score, loss, ratio or count of hours after "Expect" where a paper is named."""
    known = set(re.findall(r'\d+\.?\d*', read('results', 'papers.json')))
    expected = re.split('Not in the paper| [$] ', header(name).partition('Expect')[2])[0]
    if re.search('Courtois|Kowsher|Tian|Liu', header(name)):
        assert set(re.findall(r'(?<!v)\b\d+\.\d+|\d+(?= hours on)', expected)) <= known
