"""config/: each file resolves with the knobs of its stage, and says and sets what the papers say."""
import glob
import importlib
import os
import re
import shlex

import pytest
import torch
from conftest import ROOT

import finetune
import train
from configurator import configure
from model import NORMALISER, SHATTER, SequenceClassifier, count_parameters, model_config

PREFIXES = {'data_': 'prepare_data', 'bench_': 'bench', 'glue_': 'finetune', 'squad_': 'finetune',
            'superglue_': 'finetune', 'clue_': 'finetune', 'finetune_': 'finetune'}
NAMES = sorted(os.path.basename(path)[:-3] for path in glob.glob(os.path.join(ROOT, 'config', '*.py')))
STAGE = {name: next((PREFIXES[key] for key in PREFIXES if name.startswith(key)), 'train') for name in NAMES}
RECIPES = [name for name in NAMES if STAGE[name] == 'train']
COUNTED = [name for name in RECIPES if re.match(
    '(small|base|large|gpu|gau)_|tian_original|kowsher_(?!base)|tpu_base_pairwise', name)]
KOWSHER = 'original', 'symmetric', 'pairwise', 'shared'
TWINS = {                           # recipe for a TPU: the same for a GPU
    'tpu_base_pairwise': 'tian_base', 'tpu_base_shatter': 'base_shatter',
    **{f'tpu_{name}': name for name in ('large_original', 'large_shatter', 'tian_original')},
    **{f'tpu_tian_{system}': f'base_{system}' for system in ('rpe', 'rab', 'xlnet')},
}
TPU, GPU = (256, 512, 1_000_000, 10_000, 1e-4), (128, 256, 1_600_000, 10_000, 1e-4)
STEPS = {                           # of the papers: rows a step, tokens a row, steps, warmup, rate
    **dict.fromkeys(('tian_original', 'base_no_position', 'base_rpe', 'base_rab', 'base_xlnet'), TPU),
    **{f'base_{attention}': TPU for attention in SHATTER},
    **{name: (1024, *TPU[1:]) if 'large' in name else TPU for name in TWINS},
    **{f'gpu_{attention}': GPU for attention in ('original', 'shatter')},
    **{f'large_{attention}': (1024, *TPU[1:]) for attention in ('original', 'shatter')},
    **{f'base_{name}': (256, 512, 30_000, 3000, 3e-4) for name in ('roformer_v1', 'roformer_v2', 'gau')},
    **{f'gau_{row}_{rows}': (256, 512, 10_000, 1000, 3e-4) for row in NORMALISER for rows in ('512', 'diff')},
    'gau_scales': (256, 512, 5000, 500, 3e-4), 'base_gau_100k': (256, 512, 100_000, 10_000, 3e-4),
}
ROOTS = {                           # config -> what its header must name, as the paper does not say it
    'base': 'decay clipping dropout dtype milestones 250', 'kowsher_base': 'epsilon decay clipping dtype 10k',
    'tian_base': 'epsilon clipping dropout dtype N(0,', 'liu_base': 'clipping 15 12,000 jieba dtype packing',
    'glue_courtois': 'warmup 128 decay epsilon clipping dropout dtype', 'kowsher_pairwise': 'N(0,',
    'glue_tian': 'epsilon clipping dev dtype epochs', 'glue_kowsher': 'epsilon clipping seeds dtype norm',
    'squad_tian': 'dev windows answers', 'clue_liu': 'clipping seeds dtype windows', 'base_xlnet': '15',
    'base_pairwise': 'N(0, code', 'small_pairwise': 'N(0,', 'kowsher_shared': 'diagonals decayed',
    'data_clue': '12,000 jieba', 'data_oscar': '22.01 harmful_pp', 'base_one_head_sigmoid': 'reading',
    'gau_scales': 'cannot',
}


def read(*names):
    with open(os.path.join(ROOT, *names), encoding='utf-8') as file:
        return file.read()


def header(name):
    """The comment that a config file starts with, as one line."""
    return ' '.join(re.match('(?:# .*\n)+', read('config', f'{name}.py'))[0].replace('\n#', ' ').split())


def resolved(command):
    """(stage, its knobs) of a command line, as the stage's main() gets them."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith('.py'))
    module = importlib.import_module(words[at].removesuffix('.py'))
    return module, configure(dict(vars(module)), module.MINIMUM, words[at + 1:])


def knobs(name):
    return resolved(f'{STAGE[name]}.py config/{name}.py')[1]


def vocabulary(dataset):
    """Size of the vocabulary with which data_<dataset>.py prepares a corpus."""
    corpus = knobs(f'data_{dataset}')
    return 30522 if corpus['tokenizer'] == 'wordpiece' else corpus['vocab_size']


def build(name, kind=None, vocab_size=None, pooling='cls'):
    """The model of a config file, of the class that its objective or `kind` says, without storage."""
    settings = {**knobs(name), 'pooling': pooling}
    with torch.device('meta'):
        return (kind or train.MODEL_CLASSES[settings['objective']])(
            model_config(settings, vocab_size or vocabulary(settings['dataset'])))


@pytest.mark.parametrize('name', NAMES)
def test_a_config_resolves_and_says_what_to_expect(name):
    settings, text = knobs(name), header(name)
    assert 'Expect' in text and f'{STAGE[name]}.py config/{name}.py' in text
    if STAGE[name] in ('train', 'finetune'):
        assert settings['out_dir'] == f'out/{name}'
    if STAGE[name] == 'train':
        model_config(settings, 100)
        assert f"data_{settings['dataset']}" in NAMES           # which prepares a corpus of that name


@pytest.mark.parametrize('name', ROOTS)
def test_a_header_names_what_the_paper_does_not_say(name):
    assert [word for word in ROOTS[name].split() if word not in header(name)] == []


def test_values_of_the_authors_code():
    """What mcrts/ACL2024-SymmetricAttentionBert and HJHGJGHHG/GAU-PyTorch set beyond the papers."""
    both = {'weight_decay': 0.01, 'grad_clip': 1.0, 'dropout': 0.1, 'attention_dropout': 0.1,
            'mask_fraction': 0.15}
    assert knobs('base').items() >= {**both, 'adam_eps': 1e-12, 'packing': 'stream'}.items()
    assert knobs('liu_base').items() >= {**both, 'adam_eps': 1e-6, 'packing': 'documents'}.items()
    for name in ('base_pairwise', 'small_pairwise', 'kowsher_pairwise'):
        assert knobs(name)['pair_init'] == 'unit'
    glue = {'block_size': 128, 'warmup_fraction': 0.1, 'weight_decay': 0.0, 'adam_eps': 1e-8, 'seed': 1,
            'epochs': 5, 'total_batch': 16, 'learning_rate': 1e-5, 'trials': 5, 'schedule': 'linear'}
    assert knobs('glue_courtois').items() >= glue.items()
    assert 'qqp.metric=f1_accuracy' in knobs('glue_courtois')['overrides']
    assert len(knobs('base')['milestones']) == 18 and knobs('base')['milestones'][-1] == 200_000
    assert all(400_000 in knobs(name)['milestones'] for name in ('tian_base', 'tian_gpu', 'tian_large'))
    tian = {'vocab_size': vocabulary('books_wikipedia_sp'), 'dropout': knobs('tian_base')['dropout']}
    assert knobs('bench_tian').items() >= tian.items() and tian == {'vocab_size': 32000, 'dropout': 0.1}


@pytest.mark.parametrize('name', COUNTED)
def test_parameters_in_the_header(name):
    """And those in matrices, as Tian counts: no embeddings, nor XLNet's u and v, vectors of each head."""
    n = r'([\d,]+)'
    counts = re.findall(rf'{n} parameters(?: with {n} words)?(?:, {n} in matrices)?', header(name))
    assert counts
    for count, words, matrices in counts:
        model = build(name, vocab_size=int(words.replace(',', '') or 0))
        found = [p.numel() for part in model.encoder.modules() if not isinstance(part, torch.nn.Embedding)
                 for key, p in part.named_parameters(recurse=False) if p.dim() > 1 and 'bias' not in key]
        assert f'{count_parameters(model):,}' == count and matrices in ('', f'{sum(found):,}')


@pytest.mark.parametrize('name, task, vocab_size, angles, count', [
    ('base_roformer_v1', 'clue_liu_roformer', 50000, 1536 * 64, 124147970),
    ('base_roformer_v2', 'clue_liu_roformer', 12000, 512 * 64, 94777090),
    ('base_gau', 'clue_liu', 12000, 0, 96519170),
])
def test_classifiers_of_lius_table_4(name, task, vocab_size, angles, count):
    """With the pooling of the config file that fine-tunes them; his RoFormer counts include rotary angles."""
    model = build(name, SequenceClassifier, vocab_size, knobs(task)['pooling'])
    assert count_parameters(model) + angles == count and f'{count:,} in ' in header(name)


@pytest.mark.parametrize('name', STEPS)
def test_steps_of_the_papers(name):
    settings = knobs(name)
    keys = 'total_batch', 'block_size', 'max_iters', 'warmup_iters', 'learning_rate'
    assert tuple(settings[key] for key in keys) == STEPS[name]
    rest = 'schedule', 'min_lr', 'weight_decay', 'adam_eps', 'dropout', 'attention_dropout'
    assert tuple(settings[key] for key in rest) == ('linear', 0, 0.01, 1e-6, 0.1, 0.1)
    if name.removeprefix('base_') in SHATTER:
        assert (settings['attention'], settings['position']) == (name.removeprefix('base_'), 'none')


@pytest.mark.parametrize('normaliser', NORMALISER)
def test_each_row_of_lius_table_2(normaliser):
    fixed, varying = (knobs(f'gau_{normaliser}_{rows}') for rows in ('512', 'diff'))
    wanted = {'attention': 'gau', 'normaliser': normaliser, 'packing': 'documents', 'whole_word': True,
              'relu_scale': 'ns2' if normaliser == 'squared_relu' else 'ns'}
    assert fixed.items() >= wanted.items()
    assert varying == {**fixed, 'out_dir': f'out/gau_{normaliser}_diff', 'seed': 2}


@pytest.mark.parametrize('name', TWINS)
def test_recipes_for_tpus_change_the_device_alone(name):
    ours = {'out_dir': f'out/{name}', 'device': 'xla', 'dtype': 'bfloat16'}
    ours |= {'attention': 'pairwise'} if name == 'tpu_base_pairwise' else {}
    assert knobs(name) == {**knobs(TWINS[name]), **ours}


def test_kowshers_four_attentions_have_one_recipe():
    """Section 2.5: the corpora of BERT, 4 devices x 132 rows of 512, dropouts 0.1, Adam's 0.9 and 0.999."""
    base = knobs('kowsher_base')
    told = {'dataset': 'books_wikipedia', 'total_batch': 528, 'block_size': 512, 'n_layer': 12, 'n_head': 12,
            'n_embd': 768, 'dropout': 0.1, 'attention_dropout': 0.1, 'mask_fraction': 0.15, 'beta1': 0.9,
            'beta2': 0.999}
    assert base.items() >= told.items() and base['total_batch'] == 4 * 132 and 132 % base['batch_size'] == 0
    for name in KOWSHER:
        ours = {'attention': name, 'pair_init': 'unit' if name == 'pairwise' else 'identity'}
        assert knobs(f'kowsher_{name}') == {**base, **ours, 'out_dir': f'out/kowsher_{name}'}
        assert knobs(f'base_{name}') == {**knobs('base'), **ours, 'out_dir': f'out/base_{name}'}
    steps = 20 * 3.2e9 / (528 * 512)
    words = f'{steps:,.0f} steps', f'max_iters={steps:.0f}', f'{base["max_iters"] / steps * 20:.1f} epochs'
    assert all(word in header('kowsher_base') for word in words)


def test_numbers_that_a_header_expects_are_those_of_papers_json():
    """Every score, loss, ratio or count of hours after "Expect", in a recipe that names a paper."""
    known, unknown = set(re.findall(r'\d+\.?\d*', read('results', 'papers.json'))), {}
    for name in (name for name in NAMES if STAGE[name] in ('train', 'finetune')):
        expected = re.split('Not in the paper| [$] ', header(name).partition('Expect')[2])[0]
        if re.search('Courtois|Kowsher|Tian|Liu', header(name)):
            unknown[name] = set(re.findall(r'(?<!v)\b\d+\.\d+|\d+(?= hours on)', expected)) - known
    assert {name: numbers for name, numbers in unknown.items() if numbers} == {}


@pytest.mark.parametrize('name', NAMES)
def test_every_command_of_a_header_composes(name):
    """Its knobs exist; the runs that it names are made by config files or by its own --out_dir."""
    commands = re.findall(r'^# \$ (.*)', read('config', f'{name}.py').replace('\\\n# ', ''), re.M)
    assert commands
    for stage, settings in map(resolved, commands):
        if stage is finetune:
            runs = set(re.findall(r'out/(\w+)', f"{settings['init_from']} {settings['compare']}"))
            assert runs <= set(NAMES) | set(re.findall(r'--out_dir=out/(\w+)', ' '.join(commands)))
