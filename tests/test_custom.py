"""The task `custom`: a user's own labelled files, their columns and labels, mistakes, predictions."""
import csv
import json

import pytest

import finetune
from finetune import TASKS, Example, UserError, custom_task, load_examples, write_predictions

WORDS = ('red', 'green', 'blue')


def jsonl(rows):
    return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)


def table(rows, cell=str, tab='\t'):
    return ''.join(tab.join(map(cell, row)) + '\n' for row in [rows[0], *(row.values() for row in rows)])


def quoted(value):
    return '"{}"'.format(str(value).replace('"', '""'))


FORMATS = {'.csv': lambda rows: table(rows, quoted, ','), '.tsv': table, '.jsonl': jsonl}


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """custom(train rows, dev rows, test rows, suffix, **knobs) puts the row into TASKS and returns it."""
    def make(train, dev=None, test=None, suffix='.csv', **knobs):
        paths = {}
        for split, rows in (('train', train), ('dev', train if dev is None else dev), ('test', test)):
            text = FORMATS[suffix](rows) if isinstance(rows, list) else rows
            paths[f'{split}_file'] = str(tmp_path / (split + suffix)) if rows is not None else ''
            if rows is not None:
                (tmp_path / (split + suffix)).write_text(text, newline='')
        task = custom_task({**paths, 'texts': 'text', 'label': 'class', **knobs})
        monkeypatch.setitem(TASKS, 'custom', task)
        return task
    return make


def rows_of(labels, key='class', **more):
    return [{'text': f'a {label} thing, {i}', key: label, **more} for i, label in enumerate(labels)]


@pytest.mark.parametrize('suffix', FORMATS)
def test_classes_come_from_the_training_file(suffix, custom):
    task = custom(rows_of(['red', 'Red', 'green'] * 2), rows_of(['Red', 'green']), suffix=suffix)
    assert (task.head, task.labels, task.metrics) == ('classify', ('Red', 'green', 'red'), ('accuracy',))
    assert load_examples('custom', 'dev', '') == ([
        Example(0, ('a Red thing, 0',), 0), Example(1, ('a green thing, 1',), 1)], {})


def test_cells_with_line_breaks_quotes_and_long_texts(custom):
    text = 'one "line"\n\nand, another ' + 140_000 * 'x'
    custom(rows_of(['red', 'green', 'red']), [{'class': 'green', 'text': text}])
    assert load_examples('custom', 'dev', '')[0] == [Example(0, (text,), 0)]


def test_two_texts_joined_columns_and_two_classes(custom):
    rows = [{'q': 'who?', 'a': 'me', 'more': 'and you', 'class': i % 2} for i in range(4)]
    task = custom(rows, suffix='.jsonl', texts='q, a+more')
    assert (task.labels, task.metrics) == ((0, 1), ('accuracy', 'f1', 'matthews'))
    assert load_examples('custom', 'train', '')[0][1] == Example(1, ('who?', 'me and you'), 1)


@pytest.mark.parametrize('suffix', FORMATS)
def test_a_decimal_point_means_numbers(suffix, custom, tmp_path):
    values = [100.0, 300.0, 500.0]
    task = custom(rows_of(values), rows_of([200, 400]), rows_of([1.5, 2.5], 'weight'), suffix)
    assert (task.head, task.labels, task.metrics[0]) == ('regress', (), 'pearson_spearman')
    assert [example.label for example in load_examples('custom', 'train', '')[0]] == [-1, 0, 1]
    assert [example.label for example in load_examples('custom', 'dev', '')[0]] == [-0.5, 0.5]
    assert custom(rows_of([1, 2, 3])).labels == ('1', '2', '3')
    path = write_predictions(task, task.files['test'], str(tmp_path), [0.25, -1.0])
    found = [record for _, record in finetune.read_own(path)]
    assert [(float(row['weight']), float(row['prediction'])) for row in found] == [(1.5, 350), (2.5, 100)]


@pytest.mark.parametrize('suffix', FORMATS)
def test_spans(suffix, custom):
    text = 'the cat and the cat'
    rows = [{'q': 'who?', 'text': text, 'answer': answer, 'start': start}
            for answer, start in (('cat', 16), ('cat', 15), ('', ''))]
    task = custom(rows, suffix=suffix, texts='q,text', label='answer,start')
    assert task.head == 'span' and task.unanswerable
    examples, counts = load_examples('custom', 'train', '')
    assert [example.label for example in examples] == [(('cat', 16),), (('cat', 16),), ()]
    assert examples[0].texts == ('who?', text) and counts == {finetune.MOVED: 1}
    assert not custom(rows[:2], suffix=suffix, texts='q,text', label='answer,start').unanswerable


@pytest.mark.parametrize('suffix', FORMATS)
def test_predictions_keep_the_rows(suffix, custom, tmp_path):
    """The same columns and cells, labels as in the training file, in the format of the file."""
    test = [{'text': 'a "b" c', 'note': 'é'}, {'text': 'd', 'note': ''}]
    task = custom(rows_of([2, 10]), test=test, suffix=suffix)
    assert [example.label for example in load_examples('custom', 'test', '')[0]] == [None, None]
    path = write_predictions(task, task.files['test'], str(tmp_path), [1, 0])
    assert path == f'{tmp_path}/test.predicted{suffix}'
    labels = (2, 10) if suffix == '.jsonl' else ('2', '10')
    assert [record for _, record in finetune.read_own(path)] == [
        {**test[0], 'prediction': labels[0]}, {**test[1], 'prediction': labels[1]}]
    if suffix == '.csv':
        with open(path, newline='') as file:
            assert list(csv.reader(file))[0] == ['text', 'note', 'prediction']


@pytest.mark.parametrize('train, dev, knobs, message', [
    (rows_of(WORDS), None, {'label': 'clas'}, "train.csv: no column 'clas', it has text, class"),
    (rows_of(WORDS), rows_of(WORDS, 'label'), {}, "dev.csv: no column 'class', it has text, label"),
    (rows_of(WORDS), None, {'texts': 'text+title'}, "no column 'title', it has text, class"),
    (rows_of(WORDS), rows_of(['pink']), {}, "class 'pink' is not in .*train.csv, which has blue, green, red"),
    (rows_of(['red'] * 9), None, {}, 'train.csv: class is red in all rows, expected two classes or more'),
    ('', None, {}, 'train.csv: no rows'), ('text,class\n', None, {}, 'train.csv: no rows'),
    (rows_of(WORDS), '', {}, 'dev.csv: no rows'),
    (rows_of(WORDS), None, {'label': ''}, 'tasks=custom: needs --train_file'),
    (rows_of(WORDS), None, {'texts': 'a,b,c'}, 'one or two texts and one label'),
    (rows_of(WORDS), None, {'train_file': 'a.xlsx'}, "a.xlsx: file name ends in='.xlsx': choose one"),
])
def test_mistakes_are_one_line(train, dev, knobs, message, custom):
    with pytest.raises(UserError, match=message) as error:
        custom(train, dev, **knobs)
    assert '\n' not in str(error.value)


def test_a_label_that_is_no_number(custom):
    custom(rows_of([0.5, 1.5, 2.5]), rows_of(['0.5', 'high', 'low']))
    with pytest.raises(UserError, match=r"dev.csv:3: unknown label: 'high', expected a number"):
        load_examples('custom', 'dev', '')
