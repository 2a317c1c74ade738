"""The second floor of a stage file can be deleted, section by section: a plain run is the same to the bit.

    $ python -m pytest -m slow tests/test_floors.py

Each case deletes a section, by its title, and the other places that name it.
"""
import ast
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, process, tiny, words
from records import made, make_class, write_copy
from test_finetune import QUICK, pretrained
from test_train import assert_equal, last, metrics

pytestmark = pytest.mark.slow
# Title of a section -> other places: (text, what replaces it), or a text whose lines are deleted, with the
# lines below them that are indented deeper.
TRAIN = {
    **dict.fromkeys(['documents', 'whole words', 'permutation', 'schedules', 'XLA'], ()),
    'validation': ['further_loaders(meta, config)'],
}
PREPARE = {
    **dict.fromkeys([r'\.json files', r'\.parquet files', 'compressed files', 'OSCAR', 'docstrings',
                     'characters', 'tiktoken', 'Chinese words'], ()),
    'joined rows': ["if unit['joined'] not in"],
    'the hub': ["elif re.fullmatch(r'[", "if unit['hub']:"],
    'machines': [("find_machine(config['part'])", '0, 1'), 'wait_for_plan(folder, machine'],
}
FINETUNE = dict.fromkeys(['tasks of GLUE', 'numbers', 'choices', 'spans', 'Chinese', 'files of your own',
                          'reports', 'starts', 'labelling', 'options'], ())
SECTIONS = {'train.py': TRAIN, 'prepare_data.py': PREPARE, 'finetune.py': FINETUNE}
NEEDS = {
    'tasks of GLUE': ['numbers', 'spans', 'Chinese', 'files of your own', 'labelling'],
    'spans': ['Chinese'],
    'files of your own': ['spans', 'Chinese', 'labelling'],
    'starts': ['labelling'],
}


def without(text, sections, titles):
    """The text of a stage file without some sections, and without the places that `sections` names.

    A line that ends with a comment `# section 16` goes with that section, and the `if` or `else` above it.
    """
    for title in titles:
        number, = re.findall(rf'(?m)^# ---- (\d+)\. {title}\b', text)
        text = re.sub(rf'(?ms)^# ---- {number}\. .*?(?=^# ---- \d|^# ====)', '', text)
        text = re.sub(rf'(?m)^(?: *(?:if .*|else):\n)?.*  # section {number}\b.*\n', '', text)
        for place in sections[title]:
            if isinstance(place, tuple):
                assert place[0] in text, place
                text = text.replace(*place)
            else:
                text, n = re.subn(rf'(?m)^( *)(?=\S).*{re.escape(place)}.*\n(?:\1 +.*\n)*', '', text)
                assert n, place
    return text


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    """plain(project, folder) runs each stage of a project -> files of the corpus, run, trial of RTE"""
    source = tmp_path_factory.mktemp('source')
    (source / 'a.jsonl').write_text(''.join(
        f'{{"text": "The {n}th of the texts, and of its {n % 7} words."}}\n' for n in range(3000)))
    pick = random.Random(1)
    write_copy(source, 'rte', {split: [make_class('rte', i, pick, split == 'test') for i in range(16)]
                               for split in ('train', 'validation', 'test')})

    def start(project, folder):
        stages = {
            'prepare_data': words(corpus=source / 'a.jsonl', name='a', data_dir=folder, vocab_size=100,
                                  unit_bytes=50_000, num_proc=1, tokenizer='sentencepiece'),
            'train': tiny(str(folder / 'a'), folder / 'run', fill_samples=2),
            'finetune': words(init_from=folder / 'run', tasks='rte', data_dir=source, out_dir=folder,
                              trials=1, epochs=2, block_size=32, device='cpu', dtype='float32')}
        for name, arguments in stages.items():
            done = process(f'{project}/{name}.py', *arguments, cwd=project)
            assert done.code == 0, done.err
        files = {path.name: path.read_bytes() for path in (folder / 'a').rglob('*.[bim]*')}
        assert len(files) > 5
        ours, tuned = last(folder / 'run'), last(folder / 'run' / 'rte_1')
        return files, metrics(folder / 'run'), ours['model'], ours['optimizer'], tuned['model']
    return start


def test_every_line_of_the_plain_case_runs(tmp_path):
    """On the first floor of finetune.py, but for refusals and for lines that name a section below.

    A trial, then another one: the first is only checked then.
    """
    write_copy(tmp_path, 'rte', made('rte'))
    knobs = {'init_from': pretrained(tmp_path / 'run'), 'tasks': 'rte', 'data_dir': tmp_path,
             'out_dir': tmp_path / 'out'}
    for trials in (1, 2):
        done = process('-m', 'trace', '--count', '--missing', f'--file={tmp_path}/counts',
                       f'--coverdir={tmp_path}', f'--ignore-dir={sys.prefix}:{sys.base_prefix}',
                       'finetune.py', *words(**QUICK | knobs | {'trials': trials}))
        assert done.code == 0, done.err
    source = (tmp_path / 'finetune.cover').read_text().split('# ======== above')[0]
    refusals = [node for node in ast.walk(ast.parse(Path(ROOT, 'finetune.py').read_text()))
                if isinstance(node, (ast.Raise, ast.ExceptHandler))]
    refused = {line for node in refusals for line in range(node.lineno, node.end_lineno + 1)}
    missed = [line for i, line in enumerate(source.splitlines(), 1)
              if line.startswith('>>>>>>') and '# section' not in line and i not in refused]
    assert not missed, '\n'.join(missed)


@pytest.fixture(scope='module')
def whole(plain, tmp_path_factory):
    return plain(ROOT, tmp_path_factory.mktemp('whole'))


@pytest.mark.parametrize('name, titles', [
    (name, titles) for name, sections in SECTIONS.items()
    for titles in [*([*NEEDS.get(title, []), title] for title in sections), list(sections)]], ids=str)
def test_the_plain_case_does_without(name, titles, plain, whole, tmp_path):
    """Each section is deleted alone, but for those that need it, and all together."""
    fork = tmp_path / 'fork'
    shutil.copytree(ROOT, fork, ignore=shutil.ignore_patterns('.*', 'out', 'data', 'tests'))
    path = fork / name
    path.write_text(without(path.read_text(), SECTIONS[name], titles))
    found = process('-m', 'ruff', 'check', '--select=F821', path)
    assert found.code == 0, found.out                   # names that are nowhere
    assert_equal(plain(fork, tmp_path), whole)
