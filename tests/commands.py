"""The commands on the repository's pages: found in the text, and checked in process, up to their data."""
import glob
import importlib
import os
import re
import shlex

from conftest import ROOT

import bench
import finetune
import prepare_data
import train
from configurator import configure
from model import model_config


def read_page(*names):
    with open(os.path.join(ROOT, *names), encoding='utf-8') as file:
        return file.read()


def unrolled(text):
    """A shell script with its for-loops written out, innermost first."""
    loop = r'for (\w+) in ([^;]+); do\s((?:(?!\bfor \w+ in\b|\bdone\b).)*?);?\s+done'
    while found := re.search(loop, text, re.S):
        name, values, body = found.groups()
        turns = [re.sub(rf'\$(?:{name}\b|{{{name}}})', value, body).strip() for value in values.split()]
        text = text[:found.start()] + '\n'.join(turns) + text[found.end():]
    return text


def commands_of(page):
    """Commands of a page's sh blocks, one a line, without comments."""
    scripts = [unrolled(block.replace('\\\n', '')) for block in re.findall(r'```sh\n(.*?)```', page, re.S)]
    lines = [re.sub(r'(^|\s+)#.*', '', line).strip() for script in scripts for line in script.splitlines()]
    return [command for line in lines if line for command in line.split(' && ')]


def resolved(command):
    """(the stage, its knobs as its main() gets them)"""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith('.py'))
    module = importlib.import_module(words[at].removesuffix('.py'))
    config, _ = configure(dict(vars(module)), words[at + 1:])
    return module, config


def prepared_name(config):
    """Name of the corpus that prepare_data.py makes with these knobs."""
    return config['name'] or prepare_data.find_corpus({**config, 'path': config['path'] or 'files'})[0]


def prepared_names(page):
    """Names of the corpora that config/data_*.py and the page's own commands prepare."""
    configs = [resolved(f'prepare_data.py {path}')[1] for path in glob.glob(f'{ROOT}/config/data_*.py')]
    return {prepared_name(config) for config in configs} | set(re.findall(r'--name=(\w+)', page))


def ready_to_prepare(config):
    if config['check']:
        prepare_data.check_folder(config['check'])
    elif os.path.dirname(config['corpus']):             # files, which are small here
        prepare_data.prepare({**config, 'vocab_size': 200, 'segmenter_vocab': 100, 'val_fraction': 0.1,
                              'num_proc': 1})
    else:
        prepare_data.find_corpus(prepare_data.check_config(config))


def ready_to_train(config):
    train.check_knobs(config)
    model_config(config, 30522)


def ready_to_finetune(config):
    config = {**config, 'data_dir': config['data_dir'] or 'benchmarks'}
    finetune.noise_levels(config['noise'])
    assert finetune.find_sources(config['init_from'], config['compare'])
    assert not config['paper'] or config['paper'] in finetune.read_papers()
    for name in finetune.find_tasks(config['tasks']):
        if name == 'custom':
            assert finetune.custom_task(config).labels
        elif not name.startswith('docstring'):          # made from a prepared corpus, not from files
            finetune.survey(name, config)


READY = {prepare_data: ready_to_prepare, train: ready_to_train, finetune: ready_to_finetune,
         bench: bench.checked}
