"""config/: what the files say is what the papers say, and what their models count.

That each file loads, passes train.py's checks and gives an EncoderConfig: tests/test_configurator.py.
"""
import os
import re

import pytest
import torch
from conftest import ROOT
from test_configurator import CONFIGS, stage_of

import prepare_data
import train
from configurator import configure
from model import NORMALISER, SHATTER, Encoder, SequenceClassifier, count_parameters, model_config

RECIPES = [os.path.basename(path)[:-3] for path in CONFIGS if stage_of(path) == 'train']
COUNTED = [name for name in RECIPES if re.match('(small|base|large|gpu|tpu|gau)_|tian_original', name)]
TPU, GPU = (256, 512, 1_000_000, 10_000, 1e-4), (128, 256, 1_600_000, 10_000, 1e-4)
STEPS = {                           # of the papers: rows a step, tokens a row, steps, warmup, rate
    **dict.fromkeys(('tian_original', 'base_no_position', 'base_rpe', 'base_rab', 'base_xlnet'), TPU),
    **{f'base_{attention}': TPU for attention in SHATTER},
    **dict.fromkeys(('tpu_base_shatter', 'tpu_base_pairwise'), TPU), 'tpu_large_shatter': (1024, *TPU[1:]),
    **{f'gpu_{attention}': GPU for attention in ('original', 'shatter')},
    **{f'large_{attention}': (1024, *TPU[1:]) for attention in ('original', 'shatter')},
    **{f'base_{name}': (256, 512, 30_000, 3000, 3e-4) for name in ('roformer_v1', 'roformer_v2', 'gau')},
    **{f'gau_{row}_{rows}': (256, 512, 10_000, 1000, 3e-4) for row in NORMALISER for rows in ('512', 'diff')},
    'gau_scales': (256, 512, 5000, 500, 3e-4),
}
MATRICES = {                        # Tian's table 1: without vectors and embeddings
    'tian_original': 84934656, 'base_shatter': 77967360, 'base_rpe': 87284736, 'base_xlnet': 92012544,
    'base_rab': 84934656, 'gpu_original': 84934656, 'gpu_shatter': 77967360,
    'large_original': 301989888, 'large_shatter': 277217280,        # printed as half of it
    'tpu_base_shatter': 77967360, 'tpu_large_shatter': 277217280,
}


def header(name):
    """The comment that a config file starts with, as one line."""
    with open(os.path.join(ROOT, 'config', f'{name}.py')) as file:
        return ' '.join(re.match('(?:# .*\n)+', file.read())[0].replace('\n#', ' ').split())


def knobs(name, stage=train):
    return configure(dict(vars(stage)), [os.path.join(ROOT, 'config', f'{name}.py')])[0]


def vocabulary(dataset):
    """Size of the vocabulary with which data_<dataset>.py prepares a corpus."""
    corpus = knobs(f'data_{dataset}', prepare_data)
    return 30522 if corpus['tokenizer'] == 'wordpiece' else corpus['vocab_size']


def build(name, kind=None, vocab_size=None):
    """The model of a config file, of the class that its objective or `kind` says, without storage."""
    settings = knobs(name)
    with torch.device('meta'):
        return (kind or train.OBJECTIVE[settings['objective']][0])(
            model_config(settings, vocab_size or vocabulary(settings['dataset'])))


def count_matrices(model):
    """Entries of the encoder's matrices: not its embeddings, nor XLNet's u and v, vectors of each head."""
    return sum(p.numel() for module in model.encoder.modules() if not isinstance(module, torch.nn.Embedding)
               for name, p in module.named_parameters(recurse=False) if p.dim() > 1 and 'bias' not in name)


@pytest.mark.parametrize('name', RECIPES)
def test_a_recipe_names_itself_and_a_corpus_that_a_file_prepares(name):
    settings = knobs(name)
    assert f' train.py config/{name}.py' in header(name) and settings['out_dir'] == f'out/{name}'
    corpus = knobs(f"data_{settings['dataset']}", prepare_data)
    assert (corpus['name'] or corpus['corpus'].replace('+', '_')) == settings['dataset']


@pytest.mark.parametrize('name', COUNTED)
def test_parameters_in_the_header(name):
    counts = re.findall(r'([\d,]+) parameters(?: with ([\d,]+) words)?', header(name))
    assert counts
    for count, words in counts:
        model = build(name, vocab_size=int(words.replace(',', '') or 0))
        assert f'{count_parameters(model):,}' == count


@pytest.mark.parametrize('name', MATRICES)
def test_matrices_of_tians_table_1(name):
    assert count_matrices(build(name)) == MATRICES[name]
    assert f'{MATRICES[name]:,} in matrices' in header(name)


@pytest.mark.parametrize('name, kind, vocab_size, besides, count', [
    ('base_roformer_v1', SequenceClassifier, 50000, 1536 * 64, 124147970),      # and tables of rotary angles
    ('base_roformer_v2', SequenceClassifier, 12000, 512 * 64, 94777090),
    ('base_gau', Encoder, 12000, 768 * 2 + 2, 96519170),                        # and a Linear(D, 2)
])
def test_classifiers_of_lius_table_4(name, kind, vocab_size, besides, count):
    assert count_parameters(build(name, kind, vocab_size)) + besides == count
    assert f'{count:,} in ' in header(name)


@pytest.mark.parametrize('name', STEPS)
def test_steps_of_the_papers(name):
    settings = knobs(name)
    keys = ('total_batch', 'block_size', 'max_iters', 'warmup_iters', 'learning_rate')
    assert tuple(settings[key] for key in keys) == STEPS[name]
    rest = ('schedule', 'min_lr', 'weight_decay', 'adam_eps', 'dropout', 'attention_dropout')
    assert tuple(settings[key] for key in rest) == ('linear', 0, 0.01, 1e-6, 0.1, 0.1)


@pytest.mark.parametrize('attention', SHATTER)
def test_each_step_of_tians_ablation(attention):
    settings = knobs(f'base_{attention}')
    assert (settings['attention'], settings['position']) == (attention, 'none')


@pytest.mark.parametrize('normaliser', NORMALISER)
@pytest.mark.parametrize('rows, packing', [('512', 'stream'), ('diff', 'documents')])
def test_each_cell_of_lius_table_2(normaliser, rows, packing):
    settings = knobs(f'gau_{normaliser}_{rows}')
    assert (settings['attention'], settings['normaliser']) == ('gau', normaliser)
    assert settings['packing'] == packing and settings['whole_word']


@pytest.mark.parametrize('name', [name for name in RECIPES if name.startswith('tpu_')])
def test_recipes_for_tpus_change_the_device_alone(name):
    twin = knobs('tian_base' if name == 'tpu_base_pairwise' else name.removeprefix('tpu_'))
    ours = {'out_dir': f'out/{name}', 'device': 'xla', 'dtype': 'bfloat16'}
    ours |= {'attention': 'pairwise'} if name == 'tpu_base_pairwise' else {}
    assert knobs(name) == {**twin, **ours}
