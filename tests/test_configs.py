"""config/: what the files say is what the papers say, and what their models count.

That each file loads, passes train.py's checks and gives an EncoderConfig: tests/test_configurator.py.
"""
import os
import re

import pytest
import torch
from commands import resolved
from conftest import ROOT
from test_configurator import CONFIGS, stage_of

import finetune
import prepare_data
import train
from configurator import configure
from model import NORMALISER, SHATTER, SequenceClassifier, count_parameters, model_config

STAGE = {os.path.basename(path)[:-3]: stage_of(path) for path in CONFIGS}
RECIPES = [name for name in STAGE if STAGE[name] == 'train']
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
MATRICES = {                        # Tian's table 1: without vectors and embeddings
    'tian_original': 84934656, 'base_shatter': 77967360, 'base_rpe': 87284736, 'base_xlnet': 92012544,
    'base_rab': 84934656, 'gpu_original': 84934656, 'gpu_shatter': 77967360,
    'large_original': 301989888, 'large_shatter': 277217280,        # printed as half of it
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


def build(name, kind=None, vocab_size=None, pooling='cls'):
    """The model of a config file, of the class that its objective or `kind` says, without storage."""
    settings = {**knobs(name), 'pooling': pooling}
    with torch.device('meta'):
        return (kind or train.OBJECTIVE[settings['objective']][0])(
            model_config(settings, vocab_size or vocabulary(settings['dataset'])))


def count_matrices(model):
    """Entries of the encoder's matrices: not its embeddings, nor XLNet's u and v, vectors of each head."""
    return sum(p.numel() for module in model.encoder.modules() if not isinstance(module, torch.nn.Embedding)
               for name, p in module.named_parameters(recurse=False) if p.dim() > 1 and 'bias' not in name)


def test_a_header_says_what_to_expect():
    assert [name for name in STAGE if 'Expect' not in header(name)] == []


@pytest.mark.parametrize('name', RECIPES)
def test_a_recipe_names_itself_and_a_corpus_that_a_file_prepares(name):
    settings = knobs(name)
    assert f' train.py config/{name}.py' in header(name) and settings['out_dir'] == f'out/{name}'
    corpus = knobs(f"data_{settings['dataset']}", prepare_data)
    assert (corpus['name'] or corpus['corpus'].replace('+', '_')) == settings['dataset']
    if settings['dataset'] not in ('clue', 'docstrings'):       # open: train.py makes it on the way
        prepare_data.find_corpus(corpus)
        assert re.search('OSCAR|BooksCorpus|no printed result|Expect[^:]*: (as for|see) ', header(name))


@pytest.mark.parametrize('name, documents, download, tokens, speed', [      # see results/prepare.md
    ('fineweb', '15M', 30.639, 10.37e9, 250e3), ('wikipedia', '6.4M', 11.631, 4.6e9, 250e3),
    ('books', '290,000', 4.84, 1.2e9, 250e3), ('c4', '10,000', 326.8 / 36.5, 156e9 / 36.5, 250e3),
    ('books_wikipedia', '6.7M', 16.47, 5.8e9, 250e3), ('books_wikipedia_sp', '6.7M', 16.47, 5.8e9, 3e6)])
def test_prices_of_the_open_corpora(name, documents, download, tokens, speed):
    price = header(f'data_{name}').partition('Expect ')[2]
    found = re.match(r'(\S+) documents.* (\S+) GB .*?download \((\d+) minutes at 100 Mbit/s\), (\S+) GB on '
                     r'disk and (\S+) (?:an )?hour', price).groups()
    assert found[0] == documents and '--max_documents=' in price and 'train.py --dataset=wikitext' in price
    hours = tokens / speed / 3600
    for said, value in zip(found[1:], (download, download * 80 / 60, 2 * tokens / 1e9, hours), strict=True):
        assert float(said.replace('half', '0.5')) == pytest.approx(value, rel=0.1)
    eight = re.search(r'(\S+) on eight', price)
    assert not eight or float(eight[1]) == pytest.approx(max(hours / 8, 1.33 * ('books' in name)), rel=0.1)


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


@pytest.mark.parametrize('name, task, vocab_size, angles, count', [
    ('base_roformer_v1', 'clue_liu_roformer', 50000, 1536 * 64, 124147970),
    ('base_roformer_v2', 'clue_liu_roformer', 12000, 512 * 64, 94777090),
    ('base_gau', 'clue_liu', 12000, 0, 96519170),
])
def test_classifiers_of_lius_table_4(name, task, vocab_size, angles, count):
    """With the pooling of the config file that fine-tunes them; his RoFormer counts include rotary angles."""
    model = build(name, SequenceClassifier, vocab_size, knobs(task, finetune)['pooling'])
    assert count_parameters(model) + angles == count and f'{count:,} in ' in header(name)


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
    ours = {'out_dir': f'out/{name}', 'device': 'xla', 'dtype': 'bfloat16'}
    ours |= {'attention': 'pairwise'} if name == 'tpu_base_pairwise' else {}
    assert knobs(name) == {**knobs(TWINS[name]), **ours}
    if name != 'tpu_base_pairwise':                     # whose count is a test of its own
        counts, twins = (re.findall(r'([\d,]+) (?:parameters|in matrices)', header(which))
                         for which in (name, TWINS[name]))
        assert len(counts) == 2 and counts == twins


def test_kowshers_four_attentions_have_one_recipe():
    """Section 2.5: the corpora of BERT, 4 devices x 132 rows of 512, dropouts 0.1, Adam's 0.9 and 0.999."""
    base = knobs('kowsher_base')
    told = {'dataset': 'books_wikipedia', 'total_batch': 528, 'block_size': 512, 'n_layer': 12, 'n_head': 12,
            'n_embd': 768, 'dropout': 0.1, 'attention_dropout': 0.1, 'mask_fraction': 0.15, 'beta1': 0.9,
            'beta2': 0.999}
    assert base.items() >= told.items()
    assert base['total_batch'] == 4 * 132 and 132 % base['batch_size'] == 0
    for name in KOWSHER:
        ours = {'out_dir': f'out/kowsher_{name}', 'attention': name}
        assert knobs(f'kowsher_{name}') == {**base, **ours}
        assert knobs(f'base_{name}') == {**knobs('base'), **ours, 'out_dir': f'out/base_{name}'}
    steps = 20 * 3.2e9 / (528 * 512)
    words = f'{steps:,.0f} steps', f'max_iters={steps:.0f}', f'{base["max_iters"] / steps * 20:.1f} epochs'
    assert all(word in header('kowsher_base') for word in words)


def test_kowshers_configs_compare_his_runs():
    for name in ('glue_kowsher', 'squad_kowsher'):
        runs = set(re.findall(r'out/(\w+)', re.sub(r'--out_dir=\S+', '', header(name))))
        assert runs <= {f'kowsher_{attention}' for attention in KOWSHER} and 'kowsher_original' in runs
        assert knobs(name, finetune)['init_from'] == 'out/kowsher_shared'


def test_milestones_are_the_steps_that_the_papers_evaluate():
    """Courtois's figure 3 names 30,000 and 65,000, Tian's tables 2 and 5 400,000; the last step is one."""
    for name in RECIPES:
        settings = knobs(name)
        steps = settings['milestones']
        assert not steps or (list(steps) == sorted(set(steps)) and steps[-1] == settings['max_iters'])
    assert {30_000, 65_000} <= set(knobs('base')['milestones'])
    assert all(400_000 in knobs(name)['milestones'] for name in ('tian_base', 'tian_gpu', 'tian_large'))


def test_numbers_that_a_header_expects_are_those_of_papers_json():
    """Every score, loss, ratio or count of hours after "Expect", in a recipe that names a paper."""
    known, unknown = set(re.findall(r'\d+\.?\d*', str(finetune.read_papers()))), {}
    for name in (name for name in STAGE if STAGE[name] in ('train', 'finetune')):
        expected = re.split('Not in the paper| [$] ', header(name).partition('Expect')[2])[0]
        if re.search('Courtois|Kowsher|Tian|Liu', header(name)):
            unknown[name] = set(re.findall(r'(?<!v)\b\d+\.\d+|\d+(?= hours)', expected)) - known
    assert {name: numbers for name, numbers in unknown.items() if numbers} == {}


@pytest.mark.parametrize('name', [name for name in STAGE if STAGE[name] != 'prepare_data'])
def test_every_command_of_a_header_composes(name):
    """Its knobs exist, and the tasks, levels of noise and runs of config files that it names."""
    with open(os.path.join(ROOT, 'config', f'{name}.py')) as file:
        commands = re.findall(r'^# \$ (.*)', file.read().replace('\\\n# ', ''), re.M)
    for stage, settings in map(resolved, commands):
        if stage is train:
            train.check_knobs(settings)
        if stage is finetune:
            finetune.noise_levels(settings['noise'])
            assert [finetune.recipe(settings, task) for task in finetune.find_tasks(settings['tasks'])]
            runs = re.findall(r'out/(\w+)', f"{settings['init_from']} {settings['compare']}")
            assert set(runs) <= set(RECIPES)
