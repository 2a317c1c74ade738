"""The quickstart's tasks: true labels, no text in both splits, the same examples in any order of the file."""
import collections
import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest

import finetune
from configurator import UserError
from finetune import TASKS, letters, load_examples, prose

PACKAGES = 'email unittest asyncio logging'                     # of the fixture `corpus`
NAMES = finetune.GROUPS['docstrings']
SPLITS = 'train', 'dev'


@pytest.fixture(autouse=True)
def labels(monkeypatch):
    row = replace(TASKS['docstring_package'], labels=tuple(PACKAGES.split()))
    monkeypatch.setitem(TASKS, 'docstring_package', row)


@pytest.fixture(scope='module')
def records(corpus):
    with open(os.path.join(corpus, 'docstrings.jsonl'), encoding='utf-8') as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope='module')
def documents(records):
    """Docstrings by package, each on one line."""
    found = collections.defaultdict(list)
    for record in records:
        found[record['package']].append(' '.join(record['text'].split()))
    return found


@pytest.mark.parametrize('name', NAMES)
def test_no_text_is_on_both_sides(name, corpus):
    train, dev = (load_examples(name, split, corpus)[0] for split in SPLITS)
    assert len(train) > 40 and 0.05 * len(train) < len(dev) < 0.4 * len(train)
    texts = [{letters(text) for example in part for text in example.texts} for part in (train, dev)]
    assert not texts[0] & texts[1] and sum(map(len, texts)) == sum(
        len(example.texts) for example in train + dev)          # nor is any there twice
    assert len({example.id for example in train + dev}) == len(train + dev)


@pytest.mark.parametrize('split', SPLITS)
def test_package_labels(split, corpus, documents):
    labels = PACKAGES.split()
    part = load_examples('docstring_package', split, corpus)[0]
    assert {example.label for example in part} == set(range(len(labels)))
    for example in part:
        owners = [package for package in labels
                  if any(text.startswith(example.texts[0]) for text in documents[package])]
        assert owners == [labels[example.label]] and example.id.startswith(f'{owners[0]}/')


@pytest.mark.parametrize('split', SPLITS)
def test_order_labels(split, corpus, documents):
    """As many of each label; the texts are the docstring's first two paragraphs, exchanged or not."""
    part = load_examples('docstring_order', split, corpus)[0]
    assert abs(np.mean([example.label for example in part]) - 0.5) <= 1 / len(part)
    for example in part:
        pair = example.texts if example.label else example.texts[::-1]
        texts = documents[example.id.split('/')[0]]
        assert any(text.startswith(' '.join(pair)) for text in texts)


@pytest.mark.parametrize('name', NAMES)
def test_the_order_of_the_file_and_the_kind_of_folder_make_no_difference(name, corpus, records, tmp_path):
    mixed = random.Random(1).sample(records, len(records))
    (tmp_path / 'docstrings').mkdir()
    lines = ''.join(json.dumps(row) + '\n' for row in mixed)
    (tmp_path / 'docstrings' / 'docstrings.jsonl').write_text(lines)
    for split in SPLITS:
        assert load_examples(name, split, str(tmp_path)) == load_examples(name, split, corpus)


@pytest.mark.parametrize('name', NAMES)
def test_size(name, corpus, monkeypatch):
    expected = load_examples(name, 'train', corpus)[0]
    monkeypatch.setitem(finetune.DOCSTRING_SIZES, 'train', 40)
    part = load_examples(name, 'train', corpus)[0]
    assert 20 <= len(part) <= 40 and set(part) < set(expected)


def test_a_missing_file_or_another_corpus_gets_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match='docstrings/docstrings.jsonl: no such file; python prepare_data.py'):
        load_examples('docstring_order', 'train', '')
    row = {'package': 'mine', 'where': 'mine/a.py:1', 'text': 'Return the greatest of both.'}
    (tmp_path / 'docstrings.jsonl').write_text(json.dumps(row))
    with pytest.raises(UserError, match='no docstring makes an example of docstring_package'):
        load_examples('docstring_package', 'train', str(tmp_path))


def test_paragraphs_by_hand():
    text = 'Return the\ngreatest of both.\n\nIt is what max() gives.\n\nMore.'
    assert prose(text, 2) == ('Return the greatest of both.', 'It is what max() gives.')
    assert prose(text, 1) == ('Return the greatest of both.',)
    for text in ('Return the greatest of both.', 'max(a, b) -> int\n\nReturn the greatest of both.', '',
                 'Return the greatest of both.\n\nParameters\n----------\na : int\n    The first of both.',
                 'Return the greatest of both.\n\nArgs:\n    a: The first of both.'):
        assert prose(text, 2) == ()
