"""The quickstart's tasks: true labels, no text in both splits, the same examples from the same packages."""
import collections
import os
import re
import shutil
import socket

import numpy as np
import pytest

import finetune as quickstart
from finetune import DOCSTRINGS, cut_paragraphs, cut_parameters, docstring_examples, letters
from prepare_data import package_root, parse_docstrings, python_files

PACKAGES = 'email asyncio logging arrays'
SPLITS = 'train', 'dev'
each_task = pytest.mark.parametrize('name', DOCSTRINGS)


@pytest.fixture(scope='module', autouse=True)
def arrays(tmp_path_factory):
    """A package of some real modules of numpy, documented in its style, that must not be imported."""
    folder = tmp_path_factory.mktemp('packages')
    shutil.copytree(os.path.join(os.path.dirname(np.__file__), 'lib'), folder / 'arrays',
                    ignore=shutil.ignore_patterns('tests', '__pycache__', '*.pyi'))
    (folder / 'arrays' / '__init__.py').write_text('raise RuntimeError("imported")\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def examples(name, split):
    return docstring_examples(name, split, PACKAGES, num_proc=1)


@pytest.fixture(scope='module')
def documents():
    """Docstrings by package, each on one line."""
    found = collections.defaultdict(list)
    for package in PACKAGES.split():
        root = package_root(package)
        for item in python_files(root):
            rows = parse_docstrings((root, item))
            found[package] += [' '.join(text.split()) for _, text, bad in rows if not bad]
    return found


@each_task
def test_no_text_is_on_both_sides(name):
    train, dev = (examples(name, split) for split in SPLITS)
    assert len(train) > 60 and 0.05 * len(train) < len(dev) < 0.4 * len(train)
    first = name == 'docstring_type'                            # a question is the name of a parameter
    texts = [{letters(text) for example in part for text in example.texts[first:]} for part in (train, dev)]
    assert not texts[0] & texts[1]
    places = [{':'.join(example.id.split(':')[:2]) for example in part} for part in (train, dev)]
    assert not places[0] & places[1]                            # nor another part of the same docstring
    assert len({example.id for example in train + dev}) == len(train + dev)


@pytest.mark.parametrize('split', SPLITS)
def test_package_labels(split, documents):
    labels = PACKAGES.split()
    part = examples('docstring_package', split)
    assert {example.label for example in part} == set(range(len(labels)))
    for example in part:
        owners = [package for package in labels
                  if any(text.startswith(example.texts[0]) for text in documents[package])]
        assert owners == [labels[example.label]] and example.id.startswith(f'{owners[0]}/')


@pytest.mark.parametrize('split', SPLITS)
def test_order_labels(split, documents):
    """As many of each label; the texts are the docstring's first two paragraphs, exchanged or not."""
    part = examples('docstring_order', split)
    assert abs(np.mean([example.label for example in part]) - 0.5) <= 1 / len(part)
    for example in part:
        pair = example.texts if example.label else example.texts[::-1]
        texts = documents[example.id.split('/')[0]]
        assert any(text.startswith(' '.join(pair)) for text in texts)


@pytest.mark.parametrize('split', SPLITS)
def test_type_offsets(split):
    lengths = []
    for (name, context), ((answer, start),) in (item[1:] for item in examples('docstring_type', split)):
        assert context[start:start + len(answer)] == answer
        assert re.search(rf'(^|\s){re.escape(name)} ?: ?$', context[:start])
        assert len(context) <= quickstart.CONTEXT
        lengths.append(start)
    assert np.mean(np.array(lengths) > 40) > 0.3                # the answer is not always at the head


def test_processes_and_network_make_no_difference(monkeypatch):
    asked = [(name, split) for name in DOCSTRINGS for split in SPLITS]
    expected = [examples(*item) for item in asked]
    assert [docstring_examples(*item, PACKAGES, num_proc=2) for item in asked] == expected
    monkeypatch.setattr(socket, 'socket', None)
    quickstart.read_packages.cache_clear()
    assert [examples(*item) for item in asked] == expected


@each_task
def test_size(name, monkeypatch):
    expected = examples(name, 'train')
    monkeypatch.setitem(quickstart.DOCSTRING_SIZES, 'train', 40)
    part = examples(name, 'train')
    assert 20 <= len(part) <= 40
    assert set(part) < set(expected)


def test_paragraphs_by_hand():
    assert cut_paragraphs('Return the\ngreatest of both.\n\nIt is what max() gives.\n\nMore.') == [
        (('Return the greatest of both.', 'It is what max() gives.'), None)]
    for text in ('Return the greatest of both.', 'max(a, b) -> int\n\nReturn the greatest of both.', '',
                 'Return the greatest of both.\n\nParameters\n----------\na : int\n    The first of both.',
                 'Return the greatest of both.\n\nArgs:\n    a: The first of both.'):
        assert cut_paragraphs(text) == []


def test_parameters_by_hand():
    text = '''Do it.

    Parameters
    ----------
    x, y : array_like
        Points, in
        any order.
    axis:int, optional
    *args
    kind : {'a', 'b'}
        A note : not a type.

    Returns
    -------
    z : float
    '''.replace('\n    ', '\n')
    context = ('x, y : array_like Points, in any order. axis:int, optional *args '
               "kind : {'a', 'b'} A note : not a type.")
    types = [('x, y', 'array_like', 7), ('axis', 'int, optional', 45), ('kind', "{'a', 'b'}", 72)]
    assert cut_parameters(text) == [((context,), types)]
    assert cut_parameters(text.replace('axis:', 'kind:')) == []         # which of the two is asked for?
    assert cut_parameters(text.replace('Parameters', 'Attributes')) == []
    several = 'Parameters\n---' + ''.join(f'\nx{i} : int\n    {"word " * 20}' for i in range(8))
    assert [len(types) for _, types in cut_parameters(several)] == [3, 3, 2]
