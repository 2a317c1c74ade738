"""The second floor of a stage file can be deleted, section by section: a plain run is the same to the bit.

    $ python -m pytest -m slow tests/test_floors.py

Each case deletes a section, by its title, and then replaces the other places that name it.
"""
import re
import shutil

import pytest
from conftest import ROOT, process, tiny
from test_train import same_run

pytestmark = pytest.mark.slow
TRAIN = {                               # title of a section -> [(text, what replaces it)]
    'documents': [(", 'documents': DocumentRows", '')],
    'whole words': [(', True: WholeWordMasker', '')],
    'permutation': [("    'plm': Objective(PermutationLM, permuted, cross_entropy),\n", '')],
    'validation': [('    val_loaders.update(further_loaders(meta, config))   # section 9\n', '')],
    'schedules': [(", 'cosine': cosine, 'constant': constant, 'thirds': thirds", '')],
    'XLA': [("{'xla': (XlaRuntime, connect_xla)}", '{}')],
}


def without(text, cases, titles):
    """The text of a stage file without some sections, of which `cases` names the other places."""
    for title in titles:
        text, n = re.subn(rf'(?ms)^# ---- \d+\. {title}\b.*?(?=^# ---- \d|^# ====)', '', text)
        assert n == 1, title
        for old, new in cases[title]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    return text


@pytest.fixture
def fork(tmp_path):
    """fork('train.py', cases, titles): a copy of the project without these sections of a file -> its path"""
    def make(name, cases, titles):
        shutil.copytree(ROOT, tmp_path / 'fork', ignore=shutil.ignore_patterns('.*', 'out', 'data', 'tests'))
        path = tmp_path / 'fork' / name
        path.write_text(without(path.read_text(), cases, titles))
        found = process('-m', 'ruff', 'check', '--select=F821', path)
        assert found.code == 0, found.out               # names that are nowhere
        return path
    return make


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole') / 'run'
    done = process('train.py', *tiny(corpus, folder, fill_samples=2))
    assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize('titles', [*([title] for title in TRAIN), list(TRAIN)], ids=', '.join)
def test_training(titles, fork, whole, corpus, tmp_path):
    path = fork('train.py', TRAIN, titles)
    done = process(path, *tiny(corpus, tmp_path / 'run', fill_samples=2), cwd=path.parent)
    assert done.code == 0, done.err
    same_run(whole, tmp_path / 'run')
