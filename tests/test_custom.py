"""The task `custom`: a user's own labelled files, their columns and labels, mistakes, predictions."""
import json
import os

import pytest

import finetune
from finetune import (
    METRICS,
    TASKS,
    Example,
    UserError,
    custom_task,
    load_examples,
    read_path,
    write_submission,
)

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
                (tmp_path / (split + suffix)).write_bytes(text if isinstance(text, bytes) else text.encode())
        task = custom_task({**paths, 'texts': 'text', 'label': 'class', **knobs})
        monkeypatch.setitem(TASKS, 'custom', task)
        return task
    return make


def predicted(task, folder, predictions):
    """The rows of the file that is written."""
    examples = load_examples('custom', 'test', '')[0]
    path = write_submission('custom', 'custom', str(folder), examples, predictions)
    assert path == os.path.join(folder, 'predicted' + task.write)
    return [row for _, row in read_path(task, path)]


def rows_of(labels, key='class', **more):
    return [{'text': f'a {label} thing, {i}', key: label, **more} for i, label in enumerate(labels)]


@pytest.mark.parametrize('suffix', FORMATS)
def test_classes_come_from_the_training_file(suffix, custom):
    task = custom(rows_of(['red', 'Red', 'green'] * 2), rows_of(['Red', 'green']), suffix=suffix)
    assert (task.head, task.labels, task.metrics) == (
        'classify', ('Red', 'green', 'red'), ('accuracy', 'macro_f1'))
    examples, counts = load_examples('custom', 'dev', '')
    assert [example[1:] for example in examples] == [(('a Red thing, 0',), 0), (('a green thing, 1',), 1)]
    assert examples[0].id == {'text': 'a Red thing, 0', 'class': 'Red'} and not counts


def test_cells_with_line_breaks_quotes_and_long_texts(custom):
    text = 'one "line"\n\nand, another ' + 140_000 * 'x'
    custom(rows_of(['red', 'green', 'red']), [{'class': 'green', 'text': text}])
    assert load_examples('custom', 'dev', '')[0] == [Example({'class': 'green', 'text': text}, (text,), 0)]


def test_two_texts_joined_columns_and_two_classes(custom):
    rows = [{'q': 'who?', 'a': 'me', 'more': 'and you', 'class': i % 2} for i in range(4)]
    task = custom(rows, suffix='.jsonl', texts='q, a+more')
    assert (task.labels, task.metrics) == (('0', '1'), ('accuracy', 'f1', 'matthews'))
    assert load_examples('custom', 'train', '')[0][1] == Example(rows[1], ('who?', 'me and you'), 1)


@pytest.mark.parametrize('suffix', FORMATS)
def test_a_decimal_point_means_numbers(suffix, custom, tmp_path):
    values = [100.0, 300.0, 500.0]
    task = custom(rows_of(values), rows_of([200, 400]), rows_of([1.5, 2.5], 'weight'), suffix)
    assert (task.head, task.labels, task.metrics[0]) == ('regress', (), 'pearson_spearman')
    assert [example.label for example in load_examples('custom', 'train', '')[0]] == [-1, 0, 1]
    assert [example.label for example in load_examples('custom', 'dev', '')[0]] == [-0.5, 0.5]
    found = predicted(task, tmp_path, [0.25, -1.0])
    assert [(float(row['weight']), float(row['prediction'])) for row in found] == [(1.5, 350), (2.5, 100)]
    assert custom(rows_of([1, 2, 3])).labels == ('1', '2', '3')


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
    """The same columns and cells, in the order and format of the file."""
    test = [{'text': 'a "b" c', 'note': 'é/, '}, {'text': 'd', 'note': ''}]
    task = custom(rows_of([2, 10]), test=test, suffix=suffix)
    assert [example.label for example in load_examples('custom', 'test', '')[0]] == [None, None]
    assert predicted(task, tmp_path, [1, 0]) == [{**test[0], 'prediction': '2'},
                                                 {**test[1], 'prediction': '10'}]


@pytest.mark.parametrize('train, dev, knobs, message', [
    (rows_of(WORDS), None, {'label': 'clas'}, "train.csv: no column 'clas', it has text, class"),
    (rows_of(WORDS), rows_of(WORDS, 'label'), {}, "dev.csv: no column 'class', it has text, label"),
    (rows_of(WORDS), None, {'texts': 'text+title'}, "no column 'title', it has text, class"),
    (rows_of(WORDS), rows_of(['pink']), {}, "class 'pink' is not in .*train.csv, which has blue, green, red"),
    (rows_of(['red'] * 9), None, {}, 'train.csv: class is red in all rows; two classes or more are needed'),
    (rows_of(['']), None, {}, 'train.csv: class is empty in all rows; two classes or more are needed'),
    ('', None, {}, 'train.csv: .*No columns to parse'), ('text,class\n', None, {}, 'train.csv: no rows'),
    (rows_of(WORDS), 'text,class\n', {}, 'dev.csv: no rows'),
    (rows_of(WORDS), 'text,class\na, b,red\n', {}, 'dev.csv: .*Expected 2 fields in line 2, saw 3'),
    (rows_of(WORDS), b'text,class\ncaf\xe9,red\n', {}, 'dev.csv: .*UnicodeDecodeError'),
    (rows_of(WORDS), None, {'label': ''}, 'tasks=custom: needs --train_file'),
    ('text\tclass\na\tx\n'.encode('utf-16'), None, {'suffix': '.tsv'}, 'train.tsv: cannot be read: Uni'),
    (b'text\tclass\na\tr\xe9d\n', None, {'suffix': '.tsv'}, 'train.tsv: cannot be read: UnicodeEncodeErr'),
    (rows_of(WORDS), None, {'train_file': ''}, 'tasks=custom: needs --train_file'),
    (rows_of(WORDS), None, {'texts': 'a,b,c'}, 'needs .*--texts=COLUMN or two'),
    (rows_of(WORDS), None, {'label': 'text,class'}, '--label=ANSWER,START|ANSWER,START for spans'),
    (rows_of(WORDS), None, {'train_file': 'a.xlsx'}, "a.xlsx: suffix='.xlsx': choose one of .csv, .tsv, .js"),
])
def test_mistakes_are_one_line(train, dev, knobs, message, custom):
    with pytest.raises(UserError, match=message) as error:
        custom(train, dev, **knobs)
    assert '\n' not in str(error.value)


def test_a_label_that_is_no_number(custom):
    custom(rows_of([0.5, 1.5, 2.5]), rows_of(['0.5', 'high', 'low']))
    with pytest.raises(UserError, match="dev.csv: row 2: unknown label: 'high', expected a number"):
        load_examples('custom', 'dev', '')


def test_few_bad_rows_are_counted(custom):
    """A row without a label, and an answer whose start is no number."""
    custom(rows_of(['red', 'green', '']))
    assert load_examples('custom', 'train', '')[1] == {'no label': 1}
    rows = [{'q': 'who?', 'text': 'the cat', 'answer': 'cat', 'start': start} for start in (4, 'four')]
    custom(rows, suffix='.tsv', texts='q,text', label='answer,start')
    examples, counts = load_examples('custom', 'train', '')
    assert len(examples) == 1 and counts == {'not in the expected format': 1}


def test_macro_f1_counts_classes_alike():
    """Of 0 alone found, 1 missed: F1 8/9 and 0; of three, one is only predicted."""
    assert METRICS['macro_f1']([0, 0, 0, 0, 1], [0] * 5) == pytest.approx(4 / 9)
    assert METRICS['macro_f1']([0, 1], [0, 2]) == pytest.approx(1 / 3)


def test_another_file_has_the_format_of_its_suffix(custom, tmp_path):
    custom(rows_of(WORDS))
    (tmp_path / 'new.jsonl').write_text(jsonl(rows_of(WORDS)))
    assert len(load_examples('custom', str(tmp_path / 'new.jsonl'), '')[0]) == 3
    with pytest.raises(UserError, match="new.txt: suffix='.txt': choose one of .csv, .tsv, .jsonl"):
        load_examples('custom', 'new.txt', '')
