"""Readers: every row of TASKS from files and from the hub, quirks, bad rows, submissions, real counts."""
import json
import os

import datasets
import pytest
from published import publish

import finetune as readers
from finetune import GROUPS, TASKS, Example, UserError, collect, load_examples, read_path, write_submission

PUBLISHED = [name for name, task in TASKS.items() if task.hub]


def write(path, text, encoding='utf-8'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding=encoding)
    return str(path)


def read_file(name, path, split='test'):
    """Examples of one file in a task's format, by the rules of a split."""
    return collect(TASKS[name], read_path(TASKS[name], path), split, path)


def jsonl(*records):
    return ''.join(json.dumps(record, ensure_ascii=False) + '\n' for record in records)


def squad(context, *answers, **question):
    question = {'id': 'q', 'question': 'who?', 'answers': [{'text': text, 'answer_start': start}
                                                           for text, start in answers]} | question
    return json.dumps({'data': [{'title': '', 'paragraphs': [{'context': context, 'qas': [question]}]}]})


# every row, from files

@pytest.mark.parametrize('name', PUBLISHED)
def test_published_files(name, tmp_path):
    task, made = TASKS[name], publish(name, tmp_path)
    assert set(made) >= {'train', 'dev'}
    for split, (count, skipped) in made.items():
        examples, counts = load_examples(name, split, str(tmp_path))
        assert (len(examples), counts) == (count, skipped)
        assert len({example.id for example in examples}) == count
        assert all((example.label is None) == split.startswith('test') for example in examples)
        for example in examples if task.head != 'choose' else []:
            assert len(example.texts) in (1, 2) and all(isinstance(text, str) for text in example.texts)
    train = load_examples(name, 'train', str(tmp_path))[0]
    if task.head == 'classify':
        assert {example.label for example in train} == set(range(min(len(task.labels), 6)))
        assert task.labels.count(task.positive) == bool(task.positive)
    if task.head == 'span':
        answered = [example for example in train if example.label]
        assert len(answered) == (12 if task.unanswerable else 24)
        for (_, context), ((text, first),) in (example[1:] for example in answered):
            assert context[first:first + len(text)] == text
    if task.head == 'choose':
        assert {len(example.texts) for example in train} == ({2, 3, 4} if name == 'c3' else {10})
        assert all(0 <= example.label < len(example.texts) for example in train)
    assert read_file(name, readers.find_split(task, 'dev', str(tmp_path))[0])[0]


def test_labels_are_of_their_text(tmp_path):
    """The word that published.py puts in says which class it meant."""
    english, hanzi = ['good', 'bad', 'plain'], ['甲金', '甲银', '甲铜']
    for name, words in {'mnli': english, 'boolq': english, 'multirc': english, 'tnews': hanzi,
                        'cmnli': hanzi}.items():
        publish(name, tmp_path)
        for example in load_examples(name, 'train', str(tmp_path))[0]:
            assert example.label >= len(words) or words[example.label] in ' '.join(example.texts)
    publish('c3', tmp_path)
    publish('chid', tmp_path)
    for example in load_examples('c3', 'dev', str(tmp_path))[0]:
        found = [choice.split()[-1] in passage for passage, choice in example.texts]
        assert found.index(True) == example.label
    for example in load_examples('chid', 'dev', str(tmp_path))[0]:
        found = [f'{choice}，____' in passage for choice, passage in example.texts]
        assert found.index(True) == example.label


def test_order_of_the_classes():
    assert TASKS['mnli'].labels == ('entailment', 'neutral', 'contradiction')
    assert TASKS['rte'].labels == TASKS['qnli'].labels == ('entailment', 'not_entailment')
    assert TASKS['wnli'].labels == ('0', '1')
    assert len(TASKS['tnews'].labels) == 15 and not {'105', '111'} & set(TASKS['tnews'].labels)
    assert len(TASKS['iflytek'].labels) == 119
    assert {name for name in TASKS if TASKS[name].positive} == {'mnli', 'qnli', 'qqp', 'mrpc', 'rte'}
    assert len(GROUPS['glue']) == 8
    assert set(sum(GROUPS.values(), ())) == set(TASKS) - {'wnli', 'ocnli', 'custom'}


# where files are

@pytest.mark.parametrize('folder', ['glue/CoLA', 'CoLA', 'glue/cola', 'cola_public', 'CoLA/cola_public'])
def test_folders(folder, tmp_path):
    write(tmp_path / folder / 'dev.tsv', 'gj04\t1\t\tFine.\n')
    assert load_examples('cola', 'dev', str(tmp_path))[0] == [Example(0, ('Fine.',), 1)]


def test_data_dir_is_the_folder_itself_but_never_that_of_another_task(tmp_path):
    write(tmp_path / 'RTE' / 'dev.tsv', 'index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n')
    assert load_examples('rte', 'dev', str(tmp_path / 'RTE'))[0] == [Example('0', ('a', 'b'), 0)]
    with pytest.raises(UserError, match='no dev.tsv'):
        load_examples('wnli', 'dev', str(tmp_path / 'RTE'))


def test_missing_files_and_splits(tmp_path):
    with pytest.raises(UserError) as error:
        load_examples('c3', 'train', str(tmp_path))
    for part in (f'{tmp_path}/clue/c3', 'd-train.json and m-train.json or c3-d-train.json', 'clue/clue, c3'):
        assert part in str(error.value)
    with pytest.raises(FileNotFoundError, match='nowhere.tsv'):
        read_file('rte', str(tmp_path / 'nowhere.tsv'))


# quirks

def test_tables_have_no_quotes_and_lose_their_byte_order_mark(tmp_path):
    path = write(tmp_path / 'a.tsv', '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n'
                                     '1\t2\t3\t" he said\tshe " said\u2028so\r\n0\t4\t5\t\t"\r\n\r\n')
    assert read_file('mrpc', path, 'train')[0] == [Example(0, ('" he said', 'she " said\u2028so'), 1),
                                                   Example(1, ('', '"'), 0)]


def test_cola_with_and_without_header(tmp_path):
    for text, label in (('gj04\t0\t*\tsentence\n', 0), ('index\tsentence\n0\tsentence\n', None)):
        (example,), _ = read_file('cola', write(tmp_path / 'a.tsv', text))
        assert example.texts == ('sentence',) and example.label == label


def test_csv_of_afqmc(tmp_path):
    write(tmp_path / 'AFQMC' / 'train.csv', 'sentence1,sentence2,label\n一,"二,""三""",1\n四,五,0\n')
    assert [example[1:] for example in load_examples('afqmc', 'train', str(tmp_path))[0]] == [
        (('一', '二,"三"'), 1), (('四', '五'), 0)]


def test_gold_label_of_mnli_is_found_by_its_name(tmp_path):
    text = 'label1\tgold_label\tsentence2\tsentence1\nneutral\tcontradiction\tb\ta\n'
    assert read_file('mnli', write(tmp_path / 'a.tsv', text))[0] == [Example(0, ('a', 'b'), 2)]


def test_disputed_labels_are_counted_and_never_fatal(tmp_path):
    labels = ['-'] * 9 + ['neutral']
    rows = [{'sentence1': 'a', 'sentence2': 'b', 'gold_label': label} for label in labels]
    examples, counts = read_file('cmnli', write(tmp_path / 'a.json', jsonl(*rows)), 'train')
    assert len(examples) == 1 and counts == {readers.DISPUTED: 9}
    with pytest.raises(UserError, match='a.json:1: no gold label'):
        read_file('cmnli', write(tmp_path / 'a.json', jsonl(*rows[:9])), 'train')


def test_wsc_marks_both_spans_in_either_order(tmp_path):
    def record(first, second):
        target = {'span1_text': first[0], 'span1_index': first[1]}
        target |= {'span2_text': second[0], 'span2_index': second[1]}
        return {'text': '老师说他来了', 'label': 'true', 'target': target}
    rows = record(('老师', 0), ('他', 3)), record(('来', 4), ('他', 3)), record(('老师', 1), ('他', 3))
    path = write(tmp_path / 'a.json', jsonl(*rows))
    examples, counts = read_file('wsc', path, 'train')
    assert [example.texts for example in examples] == [('_老师_说[他]来了',), ('老师说[他]_来_了',)]
    assert counts == {'span not in the text': 1} and examples[0].label == 1


def test_csl_joins_keywords_and_multirc_question_with_answer(tmp_path):
    path = write(tmp_path / 'a.json', jsonl({'id': 7, 'abst': '文', 'keyword': ['一', '二'], 'label': '1'}))
    assert read_file('csl', path)[0] == [Example(7, ('一 二', '文'), 1)]
    passage = {'text': 'P', 'questions': [{'idx': 3, 'question': 'Q?', 'answers': [
        {'idx': 4, 'text': 'A', 'label': 1}, {'idx': 5, 'text': 'B', 'label': 0}]}]}
    assert read_file('multirc', write(tmp_path / 'a.jsonl', jsonl({'idx': 2, 'passage': passage})))[0] == [
        Example((2, 3, 4), ('P', 'Q? A'), 1), Example((2, 3, 5), ('P', 'Q? B'), 0)]


def test_chid_blanks(tmp_path):
    record = {'candidates': ['甲', '乙'], 'content': ['山' * 90 + '#idiom000001#水#idiom000002#' + '火' * 90]}
    write(tmp_path / 'dev_answer.json', json.dumps({'#idiom000001#': 1, '#idiom000002#': 0}))
    first, second = read_file('chid', write(tmp_path / 'dev.json', jsonl(record)), 'dev')[0]
    near = readers.BLANK_AROUND
    assert first == Example('#idiom000001#', tuple(
        (candidate, '山' * near + '____水****' + '火' * (near - 5)) for candidate in '甲乙'), 1)
    assert second.texts[1] == ('乙', '山' * (near - 5) + '****水____' + '火' * near) and second.label == 0
    (tmp_path / 'dev_answer.json').unlink()
    assert [example.label for example in read_file('chid', str(tmp_path / 'dev.json'))[0]] == [None, None]
    write(tmp_path / 'dev_answer.json', json.dumps({'#idiom000001#': 1}))
    with pytest.raises(UserError, match='dev.json:1: unknown label'):
        read_file('chid', str(tmp_path / 'dev.json'), 'dev')


@pytest.mark.parametrize('start, first', [(0, 0), (1, 0), (5, 4), (3, 4), (2, 0), (99, 8), (-1, 0)])
def test_wrong_offsets_move_to_the_nearest_occurrence(start, first, tmp_path):
    path = write(tmp_path / 'a.json', squad('aba aba aba', ('aba', start), ('b', 1)))
    (example,), counts = read_file('cmrc', path, 'train')
    assert example.label == (('aba', first), ('b', 1))
    assert counts == ({readers.MOVED: 1} if start != first else {})


def test_overlapping_occurrences_count(tmp_path):
    path = write(tmp_path / 'a.json', squad('xaaa', ('aa', 3)))
    assert read_file('cmrc', path, 'train')[0][0].label == (('aa', 2),)


def test_absent_answers_stay_for_scoring_and_cannot_train(tmp_path):
    path = write(tmp_path / 'a.json', squad('context', ('absent', 2), ('text', 3)))
    for split in ('train', 'dev'):
        (example,), counts = read_file('cmrc', path, split)
        assert example.label == (('text', 3), ('absent', -1)) and counts == {readers.ABSENT: 1}
    path = write(tmp_path / 'a.json', squad('context', ('absent', 2)))
    assert read_file('cmrc', path, 'dev')[0][0].label == (('absent', -1),)
    with pytest.raises(UserError, match='a.json: question q: no answer in the text'):
        read_file('cmrc', path, 'train')


def test_unanswerable_and_unlabelled_questions(tmp_path):
    empty = write(tmp_path / 'a.json', squad('text', is_impossible=True, plausible_answers=[{'text': 'te'}]))
    assert read_file('squad2', empty, 'train')[0][0].label == ()
    with pytest.raises(UserError, match='question q: no answer in the text'):
        read_file('squad1', empty, 'train')
    for path in (write(tmp_path / 'b.json', squad('text', ('FAKE', -1), ('FAKER', -1))),
                 write(tmp_path / 'c.json', squad('text').replace('"answers"', '"other"'))):
        assert read_file('cmrc', path)[0][0].label is None
        with pytest.raises(UserError, match='no label'):
            read_file('cmrc', path, 'dev')


def test_triviaqa_as_its_script_converts_it(tmp_path):
    """Answers in lower case, and questions whose answer is beyond the cut: left out, however many, as in
    Devlin et al. 2018; no question is unanswerable then, for SQuAD v2.0 neither."""
    texts = [('Main Street made Sinclair Lewis known .', 'sinclair lewis', 17), ('A cut text', None, 0)]
    data = [{'paragraphs': [{'context': context, 'qas': [{
        'question': 'Who ?', 'answers': [{'text': answer, 'answer_start': start}] if answer else [],
        'id': f'tc_{i}--a.txt', 'qid': f'tc_{i}'}]}]} for i, (context, answer, start) in enumerate(texts * 3)]
    path = write(tmp_path / 'trivia.json', json.dumps({'data': data, 'version': 1.0}))
    for name in ('squad1', 'squad2'):
        examples, counts = load_examples(name, 'extra_train', '', path)
        assert counts == {readers.NO_ANSWER: 3} and len(examples) == 3
        assert examples[0] == Example('tc_0--a.txt', ('Who ?', texts[0][0]), (('sinclair lewis', 17),))
    with pytest.raises(UserError, match=r'no answer in the text \(3 bad of 6 rows\)'):
        read_file('squad1', path, 'train')


# bad rows

HEADER = 'index\tsentence1\tsentence2\tlabel\n'


LABELS, COLUMNS = 'expected entailment, not_entailment', 'expected 4: index, sentence1, sentence2, label'


@pytest.mark.parametrize('row, kind, details', [
    ('0\ta\tb', 'missing columns', f'3 cells, {COLUMNS}'),
    ('0\ta\tb\tentailment\tmore', 'missing columns', f'5 cells, {COLUMNS}'),
    ('0\ta\tb\tmaybe', 'unknown label', f"'maybe', {LABELS}"),
    ('0\ta\tb\t2', 'unknown label', f"'2', {LABELS}"), ('0\ta\tb\t', 'unknown label', f"'', {LABELS}"),
    ('0\t\udcff\tb\tentailment', 'invalid UTF-8', r"'\udcff'")])
def test_bad_rows_are_counted_up_to_one_percent(row, kind, details, tmp_path):
    good, path = '0\ta\tb\tentailment\n', tmp_path / 'train.tsv'
    for n_good, n_bad, fine in ((1, 1, True), (2, 2, False), (198, 2, True), (197, 3, False), (0, 1, False)):
        text = HEADER + good * n_good + f'{row}\n' * n_bad
        path.write_bytes(text.encode('utf-8', 'surrogateescape'))
        if fine:
            examples, counts = read_file('rte', str(path), 'train')
            assert len(examples) == n_good and counts == {kind: n_bad}
        else:
            with pytest.raises(UserError) as error:
                read_file('rte', str(path), 'train')
            assert str(error.value) == (
                f'{path}:{n_good + 2}: {kind}: {details} ({n_bad} bad of {n_good + n_bad} rows)')


@pytest.mark.parametrize('name, text, message', [
    ('boolq', '{"question": "q"\n', 'a:1: broken JSON'),
    ('boolq', '[1]\n', 'a:1: not in the expected format: TypeError'),
    ('boolq', '"text"\n', 'a:1: no text: expected a string in passage'),
    ('boolq', 'null\n', 'a:1: not in the expected format: TypeError'),
    ('boolq', jsonl({'question': 'q', 'passage': None, 'label': True}),
     'a:1: no text: expected a string in passage; the row has question, passage, label'),
    ('boolq', jsonl({'question': 1, 'passage': 'p', 'label': True}),
     'a:1: no text: expected a string in question; the row has question, passage, label'),
    ('boolq', jsonl({'question': 'q', 'passage': 'p'}), 'a:1: no label: expected one in label'),
    ('boolq', r'{"question": "\ud800", "passage": "p", "label": true}', 'a:1: invalid UTF-8'),
    ('boolq', '', 'a: no rows'),
    ('squad1', '{"data":\n [}',
     "a: not in the expected format of squad: JSONDecodeError('Expecting value: line 2"),
    ('squad1', '{"version": 1}', 'a: not in the expected format of squad'),
    ('squad1', '[]', 'a: not in the expected format of squad'),
    ('cmrc', squad('text', ('text', None)), 'a: question q: not in the expected format'),
    ('c3', json.dumps([[['p'], [{'question': 'q', 'choice': ['a'], 'answer': 'b'}], '1']]),
     'a: passage 1: unknown label'),
    ('c3', json.dumps([[['p']]]), 'a: not in the expected format of clue/c3'),
    ('chid', jsonl({'content': ['#idiom1#']}), 'a:1: not in the expected format'),
    ('wsc', jsonl({'text': '他', 'label': 'true'}), 'a:1: not in the expected format'),
    ('tnews', jsonl({'sentence': 's', 'label': '105'}),
     "a:1: unknown label: '105', expected 100, 101, 102, 103, 104, 106 ... 116"),
    ('multirc', jsonl({'idx': 1}), 'a: not in the expected format of superglue/MultiRC')])
def test_broken_files(name, text, message, tmp_path):
    path = write(tmp_path / 'a', text)
    with pytest.raises(UserError) as error:
        read_file(name, path, 'train')
    assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('score', ['nan', 'inf', 'high', ''])
def test_scores_are_finite(score, tmp_path):
    text = f'index\tsentence1\tsentence2\tscore\n0\ta\tb\t2.5\n1\ta\tb\t{score}\n'
    examples, counts = read_file('stsb', write(tmp_path / 'a.tsv', text), 'train')
    assert [example.label for example in examples] == [2.5] and counts == {'unknown label': 1}


# the hub: columns and class names as on the cards of nyu-mll/glue, rajpurkar/squad, aps/super_glue, clue/clue

STRING, INT = datasets.Value('string'), datasets.Value('int32')
SEQUENCE = datasets.Sequence
ANSWERS = SEQUENCE({'text': STRING, 'answer_start': INT})
SPAN = ({'id': STRING, 'context': STRING, 'question': STRING, 'answers': ANSWERS},
        {'id': '56', 'context': 'his name is Li', 'question': 'what?',
         'answers': {'text': ['Li'], 'answer_start': [12]}})
NLI = ('sentence1 sentence2', 'neutral entailment contradiction')
HUB = {     # name: (text columns, class names in the hub's order) or (features, record)
    'cola': ('sentence', 'unacceptable acceptable'), 'sst2': ('sentence', 'negative positive'),
    'mrpc': ('sentence1 sentence2', 'not_equivalent equivalent'), 'stsb': ('sentence1 sentence2', ''),
    'qqp': ('question1 question2', 'not_duplicate duplicate'),
    'mnli': ('premise hypothesis', 'entailment neutral contradiction'),
    'qnli': ('question sentence', 'entailment not_entailment'),
    'rte': ('sentence1 sentence2', 'entailment not_entailment'),
    'wnli': ('sentence1 sentence2', 'not_entailment entailment'),
    'boolq': ('passage question', 'False True'), 'afqmc': ('sentence1 sentence2', '0 1'),
    'cmnli': NLI, 'ocnli': NLI,
    'tnews': ('sentence', '100 101 102 103 104 106 107 108 109 110 112 113 114 115 116'),
    'iflytek': ('sentence', ' '.join(map(str, range(119)))),
    'squad1': SPAN, 'squad2': SPAN, 'cmrc': SPAN,
    'multirc': ({'paragraph': STRING, 'question': STRING, 'answer': STRING,
                 'idx': {'paragraph': INT, 'question': INT, 'answer': INT},
                 'label': datasets.ClassLabel(names=['False', 'True'])},
                {'paragraph': 'p', 'question': 'q', 'answer': 'a', 'label': 1,
                 'idx': {'paragraph': 5, 'question': 6, 'answer': 7}}),
    'csl': ({'idx': INT, 'corpus_id': INT, 'abst': STRING, 'label': datasets.ClassLabel(names=['0', '1']),
             'keyword': SEQUENCE(STRING)},
            {'idx': 3, 'corpus_id': 9, 'abst': '文', 'label': 1, 'keyword': ['一', '二']}),
    'wsc': ({'idx': INT, 'text': STRING, 'label': datasets.ClassLabel(names=['true', 'false']),
             'target': {'span1_text': STRING, 'span2_text': STRING, 'span1_index': INT, 'span2_index': INT}},
            {'idx': 3, 'text': '老师说他', 'label': 0,
             'target': {'span1_text': '老师', 'span2_text': '他', 'span1_index': 0, 'span2_index': 3}}),
    'chid': ({'idx': INT, 'candidates': SEQUENCE(STRING), 'content': SEQUENCE(STRING),
              'answers': SEQUENCE({'text': STRING, 'candidate_id': INT})},
             {'idx': 0, 'candidates': ['甲', '乙'], 'content': ['#idiom000001#水'],
              'answers': {'text': ['乙'], 'candidate_id': [1]}}),
    'c3': ({'id': INT, 'context': SEQUENCE(STRING), 'question': STRING, 'choice': SEQUENCE(STRING),
            'answer': STRING},
           {'id': 8, 'context': ['男：来', '女：去'], 'question': '？', 'choice': ['一', '二'],
            'answer': '二'}),
}
FROM_RECORD = {     # name: what its record in HUB becomes
    **dict.fromkeys(['squad1', 'squad2', 'cmrc'], Example('56', ('what?', 'his name is Li'), (('Li', 12),))),
    'multirc': Example((5, 6, 7), ('p', 'q a'), 1), 'csl': Example(3, ('一 二', '文'), 1),
    'wsc': Example(3, ('_老师_说[他]',), 1),
    'chid': Example('#idiom000001#', (('甲', '____水'), ('乙', '____水')), 1),
    'c3': Example(8, (('男：来 女：去', '？ 一'), ('男：来 女：去', '？ 二')), 1),
}


def hub_rows(columns, names, names_known=True, labelled=True):
    """A hub dataset with two rows a class; texts end with the name of their class."""
    names, columns = names.split(), columns.split()
    values = (range(len(names)) if names else [0.0, 2.5]) if labelled else [-1]
    numbers = datasets.Value('int64' if names else 'float32')
    features = dict.fromkeys(columns, STRING) | {'idx': INT}
    features['label'] = datasets.ClassLabel(names=names) if names and names_known else numbers
    said = [names[value] if names else value for value in values] * 2
    rows = {column: [f'{column} {item}' for item in said] for column in columns}
    rows |= {'label': [*values] * 2, 'idx': [*range(2 * len(values))]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def hub_record(features, record):
    rows = {column: [value] for column, value in record.items()}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def stand_in(monkeypatch, data):
    """load_dataset without a network; returns the list of what it was asked for."""
    asked = []
    monkeypatch.setattr(datasets, 'load_dataset', lambda *names, split: asked.append((*names, split)) or data)
    return asked


@pytest.mark.parametrize('name', PUBLISHED)
def test_hub(name, monkeypatch):
    task, (columns, rest) = TASKS[name], HUB[name]
    data = hub_record(columns, rest) if name in FROM_RECORD else hub_rows(columns, rest)
    asked = stand_in(monkeypatch, data)
    examples, counts = load_examples(name, 'dev', '')
    repository, _, configuration = task.hub.partition(':')
    split = 'validation_matched' if name == 'mnli' else 'validation'
    assert asked == [(repository, configuration or None, split)] and counts == {}
    if name in FROM_RECORD:
        assert examples == [FROM_RECORD[name]]
    else:
        assert [example.id for example in examples] == [*range(len(data))]
        names = HUB[name][1].split()
        order = sorted(names, key=task.labels.index) if set(names) == set(task.labels) else names
        for example in examples:
            meant = order[example.label] if names else str(example.label)
            assert example.texts == tuple(f'{column} {meant}' for column in columns.split())


@pytest.mark.parametrize('name', [name for name in HUB if name not in FROM_RECORD])
def test_hub_without_labels_and_without_names(name, monkeypatch):
    stand_in(monkeypatch, hub_rows(*HUB[name], labelled=False))
    assert {example.label for example in load_examples(name, 'test', '')[0]} == {None}
    if HUB[name][1] and name not in ('cmnli', 'ocnli'):         # by index then
        stand_in(monkeypatch, hub_rows(*HUB[name], names_known=False))
        labels = [example.label for example in load_examples(name, 'train', '')[0]]
        assert labels == [*range(len(TASKS[name].labels))] * 2


def test_hub_splits_fakes_and_errors(monkeypatch):
    asked = stand_in(monkeypatch, hub_rows(*HUB['mnli']))
    for split in TASKS['mnli'].files:
        load_examples('mnli', split, '')
    assert [split for *_, split in asked] == [
        'train', 'validation_matched', 'validation_mismatched', 'test_matched', 'test_mismatched']
    features, record = SPAN
    fake = record | {'answers': {'text': ['FAKE_ANSWER_1'] * 3, 'answer_start': [-1] * 3}}
    stand_in(monkeypatch, hub_record(features, fake))
    assert load_examples('cmrc', 'test', '')[0][0].label is None
    empty = record | {'answers': {'text': [], 'answer_start': []}}
    stand_in(monkeypatch, hub_record(features, empty))
    assert load_examples('squad2', 'dev', '')[0][0].label == ()
    monkeypatch.setattr(datasets, 'load_dataset', lambda *names, split: 1 / 0)
    with pytest.raises(UserError, match='nyu-mll/glue: cannot be read from .* hub: ZeroDivisionError'):
        load_examples('rte', 'train', '')


def test_a_row_may_name_a_function(monkeypatch):
    made = [Example(0, ('a',), 1)]
    row = readers.Task('classify', ('accuracy',), ('no', 'yes'), files={'train': ''},
                       source=lambda *details: iter(made))
    monkeypatch.setitem(TASKS, 'mine', row)
    assert load_examples('mine', 'train', '') == (made, {})


# submissions

def submitted(name, folder, ids, predictions, column=None):
    examples = [Example(item, ()) for item in ids]
    path = write_submission(name, column or name, str(folder / 'new'), examples, predictions)
    with open(path, encoding='utf-8') as file:
        return os.path.basename(path), file.read()


@pytest.mark.parametrize('name, column, predictions, file_name, answers', [
    ('cola', 'cola', [1, 0], 'CoLA.tsv', '1 0'), ('sst2', 'sst2', [1, 0], 'SST-2.tsv', '1 0'),
    ('mrpc', 'mrpc', [1, 0], 'MRPC.tsv', '1 0'), ('qqp', 'qqp', [1, 0], 'QQP.tsv', '1 0'),
    ('wnli', 'wnli', [1, 0], 'WNLI.tsv', '1 0'), ('stsb', 'stsb', [-0.5, 5.2], 'STS-B.tsv', '0.0 5.0'),
    ('stsb', 'stsb', [1.23456, 3], 'STS-B.tsv', '1.23456 3.0'),
    ('mnli', 'mnli', [2, 1], 'MNLI-m.tsv', 'contradiction neutral'),
    ('mnli', 'mnli_mm', [0, 1], 'MNLI-mm.tsv', 'entailment neutral'),
    ('qnli', 'qnli', [1, 0], 'QNLI.tsv', 'not_entailment entailment'),
    ('rte', 'rte', [1, 0], 'RTE.tsv', 'not_entailment entailment')])
def test_glue_submissions(name, column, predictions, file_name, answers, tmp_path):
    first, second = answers.split()
    assert submitted(name, tmp_path, [0, 1], predictions, column) == (
        file_name, f'index\tprediction\n0\t{first}\n1\t{second}\n')


@pytest.mark.parametrize('name, predictions, file_name, records', [
    ('boolq', [1, 0], 'BoolQ.jsonl', [{'idx': 0, 'label': 'true'}, {'idx': 1, 'label': 'false'}]),
    ('afqmc', [1, 0], 'afqmc_predict.json', [{'id': 0, 'label': '1'}, {'id': 1, 'label': '0'}]),
    ('csl', [1, 0], 'csl_predict.json', [{'id': 0, 'label': '1'}, {'id': 1, 'label': '0'}]),
    ('tnews', [5, 14], 'tnews11_predict.json', [{'id': 0, 'label': '106'}, {'id': 1, 'label': '116'}]),
    ('iflytek', [5, 118], 'iflytek_predict.json', [{'id': 0, 'label': '5'}, {'id': 1, 'label': '118'}]),
    ('wsc', [1, 0], 'cluewsc11_predict.json', [{'id': 0, 'label': 'true'}, {'id': 1, 'label': 'false'}]),
    ('cmnli', [1, 0], 'cmnli_predict.json',
     [{'id': 0, 'label': 'neutral'}, {'id': 1, 'label': 'entailment'}]),
    ('ocnli', [2, 1], 'ocnli_50k_predict.json',
     [{'id': 0, 'label': 'contradiction'}, {'id': 1, 'label': 'neutral'}]),
    ('c3', [3, 0], 'c311_predict.json', [{'id': 0, 'label': 3}, {'id': 1, 'label': 0}])])
def test_json_line_submissions(name, predictions, file_name, records, tmp_path):
    file, text = submitted(name, tmp_path, [0, 1], predictions)
    assert file == file_name and [json.loads(line) for line in text.splitlines()] == records


def test_nested_submissions(tmp_path):
    for name, ids, predictions, file_name in (
            ('squad2', ['a', 'b'], ['x', ''], 'predictions.json'),
            ('cmrc', ['a', 'b'], ['山', '水'], 'cmrc2018_predict.json'),
            ('chid', ['#idiom1#', '#idiom2#'], [3, 0], 'chid11_predict.json')):
        file, text = submitted(name, tmp_path, ids, predictions)
        assert file == file_name and json.loads(text) == dict(zip(ids, predictions, strict=True))
    file, text = submitted('multirc', tmp_path, [(0, 0, 0), (0, 0, 1), (0, 1, 2), (3, 4, 5)], [1, 0, 1, 1])
    assert file == 'MultiRC.jsonl' and [json.loads(line) for line in text.splitlines()] == [
        {'idx': 0, 'passage': {'questions': [
            {'idx': 0, 'answers': [{'idx': 0, 'label': 1}, {'idx': 1, 'label': 0}]},
            {'idx': 1, 'answers': [{'idx': 2, 'label': 1}]}]}},
        {'idx': 3, 'passage': {'questions': [{'idx': 4, 'answers': [{'idx': 5, 'label': 1}]}]}}]


@pytest.mark.parametrize('name', [name for name in PUBLISHED if 'test' in TASKS[name].files])
def test_submission_of_the_published_test_file(name, tmp_path):
    publish(name, tmp_path)
    examples, _ = load_examples(name, 'test', str(tmp_path))
    predictions = ['山' if TASKS[name].head == 'span' else 1] * len(examples)
    _, text = submitted(name, tmp_path, [example.id for example in examples], predictions)
    brackets = {'table': 1, 'map': 2, 'nested': 2 - 12}                 # 12 answers, 2 passages
    assert len(text.splitlines()) == 12 + brackets.get(TASKS[name].write, 0)
    with pytest.raises(ValueError):
        submitted(name, tmp_path, [example.id for example in examples], predictions[1:])


# the real files: LABELLED_DATA is the folder that ../shared/data/labelled.tar.xz was unpacked in

REAL = [('cola', 'train', 8551), ('cola', 'dev', 1043), ('cola', 'test', 1063), ('sst2', 'train', 67349),
        ('sst2', 'dev', 872), ('sst2', 'test', 1821), ('mrpc', 'train', 3668), ('mrpc', 'dev', 408),
        ('mrpc', 'test', 1725), ('qnli', 'dev', 5463), ('boolq', 'dev', 3270), ('boolq', 'test', 3245),
        ('afqmc', 'train', 34334), ('afqmc', 'dev', 4316), ('afqmc', 'test', 3861), ('cmrc', 'train', 10142),
        ('cmrc', 'dev', 3219), ('cmrc', 'test', 2000), ('c3', 'train', 11869), ('c3', 'dev', 3816),
        ('c3', 'test', 3892)]


@pytest.fixture
def real():
    folder = os.environ.get('LABELLED_DATA', '')
    if not os.path.isdir(folder):
        pytest.skip('LABELLED_DATA does not name the folder of the real labelled files')
    return folder


@pytest.mark.parametrize('name, split, count', REAL)
def test_real_counts(name, split, count, real):
    examples, counts = load_examples(name, split, real)
    wrong = {'train': {readers.MOVED: 21}, 'dev': {readers.MOVED: 7, readers.ABSENT: 193}, 'test': {}}
    assert len(examples) == count and counts == (wrong[split] if name == 'cmrc' else {})
    assert all(example.label is None for example in examples) == (split == 'test' and name != 'c3')


def test_real_squad(real):
    examples, counts = read_file('squad2', os.path.join(real, 'squad', 'half-dev-v2.0.json'), 'dev')
    assert (len(examples), counts) == (6078, {}) and sum(example.label == () for example in examples) == 3168
