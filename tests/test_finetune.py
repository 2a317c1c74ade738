"""finetune.py: records, rows and windows, heads, metrics, trials that repeat, own files, the report."""
import itertools
import json
import os
import random
import re
import shutil
import string
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

os.environ.update(HF_DATASETS_CACHE=tempfile.mkdtemp(), HF_DATASETS_DISABLE_PROGRESS_BARS='1')
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import kill, launch, refused, torchrun, words
from records import MARKERS, WORDS, made, write_copy
from test_train import CPU

import finetune
import kowsher
import train
from configurator import UserError
from finetune import HEADS, METRICS, TASKS, Data, Example, Feature, Span, collate, join_texts
from model import ALLOWED_POSITIONS, ATTENTION, EncoderConfig, MaskedLM, PermutationLM
from prepare_data import file_sum, load_tokenizer, write_json

SPECIAL_IDS = {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}
QUICK = {'trials': 1, 'epochs': 1, 'total_batch': 8, 'batch_size': 8, 'learning_rate': 5e-3, 'stride': 16,
         'device': 'cpu', 'dtype': 'float32'}
PUBLISHED = [name for name in TASKS if name != 'custom']


# ---- a tokenizer, runs with random weights, copies of all data sets ----

def write_tokenizer(folder):
    letters = string.ascii_lowercase + string.digits
    pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *WORDS, *MARKERS, *letters[1:], *'山水()[]_?,.',
              *('##' + letter for letter in letters)]
    (folder / 'tokenizer').mkdir(parents=True)
    (folder / 'tokenizer' / 'vocab.txt').write_text('\n'.join(pieces))
    facts = {'kind': 'wordpiece', 'lower_case': True, 'sha256': file_sum(folder / 'tokenizer' / 'vocab.txt')}
    write_json(folder / 'tokenizer' / 'settings.json', {'tokenizer': facts})
    return load_tokenizer(str(folder))


def pretrained(folder, step=3, seed=0, kind=MaskedLM, **changes):
    """Write a checkpoint as train.py does, of random weights; returns the run's folder."""
    tokenizer = write_tokenizer(folder)
    torch.manual_seed(seed)
    shape = {'block_size': 48, 'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32}
    model = kind(EncoderConfig(tokenizer.vocab_size, **{**shape, **changes}))
    objective = 'mlm' if kind is MaskedLM else 'plm'
    train.write_checkpoint(os.path.join(folder, f'ckpt_{step:07}.pt'), {
        'model': model.state_dict(),
        'model_config': asdict(model.config),
        'config': {'objective': objective},
        'data': {}})
    return str(folder)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp('runs') / 'base')


@pytest.fixture(scope='module')
def copies(tmp_path_factory):
    """--data_dir with a small copy of every data set."""
    folder = tmp_path_factory.mktemp('copies')
    for name in PUBLISHED:
        write_copy(folder, name, made(name))
    return str(folder)


def test_a_copy_that_changed_is_read_anew(tmp_path):
    records = made('rte')
    write_copy(tmp_path, 'rte', records)
    n = len(records['validation'])
    assert len(finetune.read_hub('nyu-mll/glue:rte', 'validation', str(tmp_path))) == n
    shutil.rmtree(tmp_path / 'nyu-mll')
    write_copy(tmp_path, 'rte', {**records, 'validation': records['validation'][:3]})
    assert len(finetune.read_hub('nyu-mll/glue:rte', 'validation', str(tmp_path))) == 3


@pytest.fixture
def trial(stage, run, copies, tmp_path):
    """trial('cola', seed=2) fine-tunes in this process; returns result.json of its only trial."""
    def call(name, out='out', **knobs):
        given = {'init_from': run, 'data_dir': copies, 'tasks': name, 'out_dir': tmp_path / out, **QUICK}
        done = stage('finetune', *words(**{**given, **knobs}))
        assert done.code == 0, done
        path, = Path(tmp_path, out).glob('*/*/result.json')
        return json.loads(path.read_text()) | {'folder': path.parent, 'printed': done}
    return call


def knobs(**changes):
    small = {'stride': 16, 'batch_size': 8, 'total_batch': 8, 'dropout': 0.0, 'attention_dropout': 0.0}
    return finetune.Knobs(**{**small, **changes})


def parameters(folder):
    """The state_dict of a finished trial."""
    return train.read_checkpoint(Path(folder, 'model.pt'))['model']


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# ---- records of the hub ----

RECORDS = {     # name: (record, its Example)
    'boolq': ({'question': 'q', 'passage': 'p', 'label': 1, 'idx': 7}, Example(7, ('p', 'q'), 1)),
    'multirc': ({'paragraph': 'p', 'question': 'q', 'answer': 'a', 'label': 1,
                 'idx': {'paragraph': 5, 'question': 6, 'answer': 7}}, Example((5, 6, 7), ('p', 'q a'), 1)),
    'csl': ({'abst': '文', 'keyword': ['一', '二'], 'label': 1, 'idx': 7}, Example(7, ('一 二', '文'), 1)),
    'wsc': ({'idx': 3, 'text': '老师说他', 'label': 0, 'target': {
        'span1_text': '老师', 'span2_text': '他', 'span1_index': 0, 'span2_index': 3}},
        Example(3, ('_老师_说[他]',), 0)),
    'chid': ({'candidates': ['甲', '乙'], 'content': ['#idiom000001#水#idiom000002#'],
              'answers': {'candidate_id': [1, 0]}},
             Example('#idiom000001#', (('甲', '____水****'), ('乙', '____水****')), 1)),
    'c3': ({'id': 8, 'context': ['男：来', '女：去'], 'question': '？', 'choice': ['一', '二'],
            'answer': '二'}, Example(8, (('男：来 女：去', '？ 一'), ('男：来 女：去', '？ 二')), 1)),
}


@pytest.mark.parametrize('name', RECORDS)
def test_a_record_of_the_hub(name):
    record, example = RECORDS[name]
    assert TASKS[name].make(TASKS[name], record, 0)[0] == example


def test_every_split_of_every_data_set_is_read(copies):
    """What was written as parquet comes back as examples, with its labels."""
    for name in PUBLISHED:
        n_classes = min(6, len(TASKS[name].labels))
        for split in TASKS[name].splits:
            examples = finetune.load_examples(TASKS[name], split, knobs(data_dir=copies))
            n = 12 if split == 'train' else 6
            if name == 'chid':                          # two blanks a passage
                n = 2 * n
            assert len(examples) == n
            labels = [example.label for example in examples]
            if split in TASKS[name].test:
                assert labels == [None] * n
            elif n_classes:
                assert labels == [i % n_classes for i in range(n)]


def too_few_choices(task, record, index):
    examples = finetune.make_chid(task, record, index)
    return [example._replace(texts=example.texts[:1]) for example in examples]


@pytest.mark.parametrize('name, changes, message', [
    ('cola', {'columns': ('text',)}, "'text' is None, not a text, the row has .'sentence', 'label', 'idx'.$"),
    ('cola', {'label_column': 'class'}, "no label 'class', the row has .'sentence', 'label', 'idx'.$"),
    ('mnli', {'labels': ('yes', 'no')}, 'row 3: label 2 is not the index of one of 2'),
    ('stsb', {'head': 'classify'}, 'row 1: label 0.0 is not the index of one of 0'),
    ('cola', {'make': finetune.make_multirc}, "row 1: 'question' is None, not a text"),
    ('chid', {'make': too_few_choices}, 'row 1: label 1 is not the index of one of 1')])
def test_a_task_that_does_not_fit_its_records_is_one_line(name, changes, message, copies):
    """As a row of TASKS may be while one writes it: other columns, fewer classes, labels of another kind."""
    task = TASKS[name]._replace(**changes)
    with pytest.raises(UserError, match=message):
        finetune.load_examples(task, 'train', knobs(data_dir=copies))


def test_a_dev_split_of_any_name(trial, tmp_path, monkeypatch):
    """As the hub's ag_news, whose dev split is called test: its labels are read."""
    splits = made('rte')
    write_copy(tmp_path, 'rte', {'train': splits['train'], 'test': splits['validation']})
    monkeypatch.setitem(TASKS, 'rte', TASKS['rte']._replace(dev=('test',), test=()))
    result = trial('rte', data_dir=tmp_path)
    assert result['n'] == {'rte': [12, 6]}
    assert result['majority']['rte']['accuracy'] == 0.5


def test_a_metric_of_two_classes_is_refused_for_three(stage, run, copies, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, 'mnli', TASKS['mnli']._replace(metrics=('accuracy', 'f1')))
    command = words(init_from=run, data_dir=copies, tasks='mnli', out_dir=tmp_path / 'out', **QUICK)
    line = refused(stage('finetune', *command))
    assert 'mnli has 3 classes, its metric f1 is of two: choose accuracy or macro_f1' in line


def test_answers_at_wrong_offsets():
    """They move to the nearest place, if need be in another case; those that are missing are last."""
    def starts(context, *answers):
        texts = [text for text, _ in answers]
        places = [start for _, start in answers]
        record = {'id': 0, 'context': context, 'question': 'q',
                  'answers': {'text': texts, 'answer_start': places}}
        return finetune.make_span(TASKS['squad2'], record, 0)[0].label

    assert starts('cat and cat', ('cat', 7)) == (('cat', 8),)
    assert starts('cat and cat', ('cat', 1)) == (('cat', 0),)
    assert starts('The Cat', ('cat', 4)) == (('cat', 4),)
    assert starts('Cat, The Cat sat', ('cat', 7)) == (('cat', 9),)
    assert starts('Cat and a cat', ('cat', 1)) == (('cat', 10),)
    assert starts('one two', ('no', 2), ('two', 4)) == (('two', 4), ('no', -1))
    assert starts('one two', ('FAKE', -1), ('FAKE', -1)) is None


def test_questions_that_cannot_train_are_left_out(tmp_path):
    """From a file in SQuAD's format."""
    questions = [{'id': 'a', 'question': 'q', 'answers': [{'text': 'two', 'answer_start': 4}]},
                 {'id': 'b', 'question': 'q', 'answers': [{'text': 'no', 'answer_start': 4}]},
                 {'id': 'c', 'question': 'q', 'answers': []}]
    path = tmp_path / 'triviaqa.json'
    path.write_text(json.dumps({'data': [{'paragraphs': [{'context': 'one two', 'qas': questions}]}]}))
    for name, ids in (('squad1', ['a']), ('squad2', ['a', 'c'])):
        task = TASKS[name]._replace(train_file=str(path))
        examples = finetune.load_examples(task, 'train', knobs())
        assert [example.id for example in examples] == ids


# ---- rows and windows ----

def test_pairs_are_joined_and_cut_as_in_bert():
    """Token by token from the longer, b at a tie."""
    for n, m, size in itertools.product((1, 2, 7, 12, 30), (1, 5, 11, 30), (8, 9, 16, 25)):
        a = [*range(5, 5 + n)]
        b = [*range(50, 50 + m)]
        row, first = join_texts(SPECIAL_IDS, size, a, b)
        while len(a) + len(b) > size - 3:
            longer = a if len(a) > len(b) else b
            longer.pop()
        assert row.tolist() == [2, *a, 3, *b, 3], (n, m, size)
        assert first == len(a) + 2


def test_a_text_alone_is_cut_at_its_end():
    for n, size in itertools.product((1, 6, 7, 30), (8, 9, 25)):
        a = [*range(5, 5 + n)]
        row, first = join_texts(SPECIAL_IDS, size, a)
        assert row.tolist() == [2, *a[:size - 2], 3], (n, size)
        assert first == len(row), (n, size)


def test_windows_hold_every_token_and_the_answer(run):
    """Each token of the context is in a window, and the span that the target names is the answer's text."""
    tokenizer = load_tokenizer(run)
    context = 'the house 山水 (1998) walks under a river, ' * 6 + 'it ends at last'
    _, offsets = tokenizer.encode_offsets([context])[0]
    for answer in ('the', '山水', '1998', 'house 山水 (1998)', 'last'):
        example = Example(0, ('what ?', context), ((answer, context.index(answer)),))
        features = finetune.span_features([example], tokenizer, 48, 16)
        seen = np.concatenate([feature.offsets for feature in features])
        assert {*map(tuple, seen.tolist())} == {*map(tuple, offsets.tolist())}
        assert len(features) > 2
        assert max(feature.length for feature in features) == 48
        assert all(feature.offsets[1][0] > 0 for feature in features[1:])

        hits = [feature for feature in features if feature.target != (0, 0)]
        assert hits
        for feature in hits:
            first, last = feature.target
            begin, _ = feature.offsets[first - feature.context_start]
            _, end = feature.offsets[last - feature.context_start]
            assert context[begin:end] == answer
    assert finetune.span_target((('abc', 0),), np.array([[0, 3]]), 5) == (5, 5)
    assert finetune.span_target((('abcd', 2),), np.array([[0, 3], [3, 5]]), 5) == (0, 0)      # cut off


def test_windows_overlap_by_half_at_any_stride(run):
    """A short answer is whole in some window, wherever it is."""
    tokenizer = load_tokenizer(run)
    context = 'the river ' * 60
    example = Example(0, ('what ?', context), ())
    features = finetune.span_features([example], tokenizer, 48, stride=1000)
    for feature, following in itertools.pairwise(features):
        middle = len(feature.offsets) // 2
        assert following.offsets[0].tolist() == feature.offsets[middle].tolist()


def test_padding_does_not_change_the_loss_of_a_span():
    start, end = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[1, 2], [0, 0], [3, 4]])
    mask = torch.arange(9) < 5                          # tokens 5 to 8 are padding
    padded = finetune.span_loss((start, end), targets, mask.expand(3, 9))
    short = finetune.span_loss((start[:, :5], end[:, :5]), targets, torch.ones(3, 5, dtype=torch.bool))
    assert torch.allclose(padded, short)
    right = F.cross_entropy(start[:, :5], targets[:, 0], reduction='none')
    right = right + F.cross_entropy(end[:, :5], targets[:, 1], reduction='none')
    assert torch.allclose(padded, right / 2)


def test_choices_are_padded_with_copies_that_count_for_nothing():
    features = [Feature(0, [(np.array([2, 5, 3]), 3)], (0, 1)),
                Feature(1, [(np.array([2, 6, 3]), 3), (np.array([2, 7, 3, 8]), 3)], (1, 2))]
    batch = collate(features, 0, True)
    assert batch['ids'].tolist() == [[[2, 5, 3, 0], [2, 5, 3, 0]], [[2, 6, 3, 0], [2, 7, 3, 8]]]
    assert batch['segments'].tolist() == [[[0] * 4] * 2, [[0] * 4, [0, 0, 0, 1]]]
    assert batch['attention_mask'][0, 0].tolist() == [True, True, True, False]
    logits = torch.tensor([[1.0, 50.0], [1.0, 2.0]])
    losses = HEADS['choose'].loss(logits, batch['targets'], None)
    assert losses[0] == 0
    assert losses[1] == F.cross_entropy(logits[1:], torch.tensor([1]))
    assert HEADS['choose'].outputs(logits, features, knobs()) == [0, 1]
    assert collate(features, 0, True, 10)['ids'].shape == (2, 2, 10)


@pytest.mark.parametrize('n, total, size', [(10, 4, 3), (3, 8, 8), (8, 4, 4)])
def test_an_epoch_has_every_example_once(n, total, size):
    features = [Feature(i, [(np.array([2, 5 + i, 3]), 3)], i) for i in range(n)]
    data = Data(TASKS['cola'], [], features, 0)
    given = knobs(total_batch=total, batch_size=size)
    per_epoch = -(-n // total)                          # rounded up

    def make(step, seed=7):
        """The examples of a step that count."""
        parts = finetune.training_batch(step, data, seed, given, 0)
        assert max(len(part['weights']) for part in parts) <= size
        targets = torch.cat([part['targets'] for part in parts])
        counts = torch.cat([part['weights'] for part in parts]) > 0
        assert len(targets) == total
        return targets[counts].tolist()

    orders = []
    for epoch in range(3):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        orders.append([*itertools.chain.from_iterable(map(make, steps))])
        assert sorted(orders[-1]) == list(range(n))
    if n >= 8:                                          # else two orders may be equal by chance
        assert orders[0] != orders[1]
        assert make(0, seed=8) != make(0) == make(0)


# ---- predictions ----

def test_the_best_span_is_that_of_all_pairs():
    generator = torch.Generator().manual_seed(1)
    features = [Feature(i, [], (0, 0), 2, np.zeros((7, 2))) for i in range(5)]
    for longest in (1, 3, 30):
        start = torch.randn(5, 12, generator=generator)
        end = torch.randn(5, 12, generator=generator)
        spans = HEADS['span'].outputs((start, end), features, knobs(max_answer=longest))
        for i, span in enumerate(spans):
            pairs = {}
            for first in range(2, 9):
                for last in range(first, min(9, first + longest)):
                    pairs[first, last] = (start[i, first] + end[i, last]).item()
            best = max(pairs, key=pairs.get)
            assert (span.first, span.last) == best
            assert span.logit == pairs[best]
            assert span.none_logit == (start[i, 0] + end[i, 0]).item()


def test_windows_are_joined_by_their_logits_and_the_least_logit_of_no_answer():
    examples = [Example(0, ('q', 'one two three'), (('two', 4),)), Example(1, ('q', 'x'), ())]
    offsets = np.array([[0, 3], [3, 7], [7, 13]])
    features = [Feature(0, [], (0, 0), 2, offsets[:2]), Feature(0, [], (0, 0), 2, offsets[1:]),
                Feature(1, [], (0, 0), 2, np.array([[0, 1]]))]
    spans = [Span(3.0, 6.0, 3, 3), Span(9.0, 4.0, 2, 3), Span(5.0, 1.0, 2, 2)]
    for name, threshold, texts in (('squad1', 0.0, ['two', 'x']), ('squad2', 0.0, ['two', '']),
                                   ('squad2', 3.9, ['two', '']), ('squad2', 4.0, ['two', 'x'])):
        data = Data(TASKS[name], examples, features, 0)
        assert finetune.best_answers(data, spans, knobs(null_threshold=threshold)) == texts


@pytest.fixture
def bert(tmp_path):
    """bert(pieces of vocab.txt) writes a Hugging Face BERT of 65 embeddings to tmp_path -> the model"""
    def make(pieces):
        transformers = pytest.importorskip('transformers')
        torch.manual_seed(1)
        model = transformers.BertForSequenceClassification(transformers.BertConfig(
            vocab_size=65, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
            max_position_embeddings=48, num_labels=3, initializer_range=0.2)).eval()
        model.save_pretrained(tmp_path)
        (tmp_path / 'vocab.txt').write_text('\n'.join(pieces))
        return model
    return make


BERT_PIECES = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *(f'w{i}' for i in range(60))]


def test_a_hugging_face_bert_gives_its_own_logits(bert, tmp_path):
    """Encoder, pooler and vocabulary come from the folder; only the classifier is copied by hand."""
    theirs = bert(BERT_PIECES)
    ours, tokenizer = finetune.make_model(str(tmp_path), TASKS['mnli'], 1, knobs())
    ours.classifier.load_state_dict(theirs.classifier.state_dict())
    texts = [' '.join(f'W{j}' for j in range(i, 20)) for i in range(5)]
    examples = [Example(i, (text, 'w44 w45'), 0) for i, text in enumerate(texts)]
    batch = collate(finetune.text_features(examples, tokenizer, 48, 16), 0)
    ids, segments, mask = batch['ids'], batch['segments'], batch['attention_mask']
    assert ids[0, :3].tolist() == [2, 5, 6]
    expected = theirs(ids, token_type_ids=segments, attention_mask=mask).logits
    assert (ours.eval()(ids, segments, mask) - expected).abs().max() < 1e-5
    assert expected.std() > 0.1


@pytest.mark.parametrize('files, casing, first', [
    ({}, 'auto', 'w1'), ({}, 'cased', '[UNK]'),
    ({'tokenizer_config.json': {'do_lower_case': False}}, 'auto', '[UNK]'),
    ({'tokenizer_config.json': {'do_lower_case': True}}, 'uncased', 'w1'),
    ({'tokenizer_config.json': {}, 'tokenizer.json': {'normalizer': {'lowercase': False}}}, 'auto', '[UNK]'),
    ({'tokenizer.json': {'normalizer': None}}, 'auto', 'w1'),
    ({'tokenizer_config.json': {'do_lower_case': False}}, 'uncased', 'config.json of .* says cased'),
    ({'tokenizer.json': {'normalizer': {'lowercase': True}}}, 'cased', 'tokenizer.json of .* says uncased')])
def test_the_casing_of_a_bert_is_that_of_its_files(files, casing, first, bert, tmp_path):
    """W1 is a word of an uncased one alone."""
    bert(BERT_PIECES)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if 'says' in first:
        with pytest.raises(UserError, match=first):
            finetune.make_model(str(tmp_path), TASKS['mnli'], 1, knobs(casing=casing))
        return
    _, tokenizer = finetune.make_model(str(tmp_path), TASKS['mnli'], 1, knobs(casing=casing))
    assert [tokenizer.pieces[i] for i in tokenizer.encode(['W1'])[0]] == [first]


@pytest.mark.parametrize('attention', ATTENTION)
def test_any_pretrained_encoder_takes_any_head(attention, tmp_path):
    """The encoder's states are those of pretraining, at its length and, on short rows, beyond it."""
    position = ALLOWED_POSITIONS.get(attention, ('absolute',))[0]
    kind = PermutationLM if attention == 'xlnet' else MaskedLM
    run = pretrained(tmp_path, kind=kind, attention=attention, position=position, n_layer=1)
    pretrained_model, *_ = train.load(run)
    ids = torch.randint(5, 40, (2, 9))
    rows = {'cola': ids, 'c3': ids[:, None].expand(-1, 3, -1), 'squad1': ids}
    for name, length in itertools.product(rows, (48, 64)):
        given = knobs(block_size=length, pooling='layerwise' if name == 'c3' else 'first')
        model, _ = finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS[name], 1, given)
        assert torch.allclose(model.eval().encoder(ids), pretrained_model.encoder(ids), atol=1e-5)
        assert model.config.block_size == length
        logits = model(rows[name])
        if name == 'squad1':                            # of start and of end
            logits = torch.stack(logits)
        assert torch.isfinite(logits).all()


# ---- metrics ----

rng = np.random.default_rng(1)
CLASSES = [*(rng.integers(0, 2, (2, n)) for n in (1, 2, 3, 10, 1000)),
           np.array([[0, 0], [0, 0]]), np.array([[1, 1, 0], [0, 0, 0]]), np.array([[0, 0], [1, 0]])]


@pytest.mark.filterwarnings('ignore')
def test_classes_are_scored_as_in_scikit_learn():
    sklearn = pytest.importorskip('sklearn.metrics')
    for targets, predictions in CLASSES:
        f1 = sklearn.f1_score(targets, predictions, zero_division=0)
        accuracy = sklearn.accuracy_score(targets, predictions)
        expected = {'f1': f1, 'f1a': f1, 'accuracy': accuracy, 'f1_accuracy': (f1 + accuracy) / 2,
                    'matthews': sklearn.matthews_corrcoef(targets, predictions)}
        for name, value in expected.items():
            assert METRICS[name](targets, predictions) == pytest.approx(value, abs=1e-12), name
    targets = rng.integers(0, 4, 50)
    predictions = rng.integers(1, 5, 50)
    assert METRICS['macro_f1'](targets, predictions) == pytest.approx(
        sklearn.f1_score(targets, predictions, average='macro', zero_division=0))


@pytest.mark.parametrize('targets, predictions', [
    *(rng.normal(size=(2, n)) for n in (2, 3, 50)), rng.integers(0, 6, (2, 200)) / 5,
    rng.normal(size=(2, 40)) * 1e-6 + 1e3, np.array([[1., 2, 3, 4], [1, 1, 1, 4]])])
def test_correlations_are_scipys(targets, predictions):
    scipy = pytest.importorskip('scipy.stats')
    expected = {'pearson': scipy.pearsonr(targets, predictions)[0],
                'spearman': scipy.spearmanr(targets, predictions)[0]}
    expected['pearson_spearman'] = sum(expected.values()) / 2
    for name, value in expected.items():
        assert METRICS[name](targets, predictions) == pytest.approx(value, abs=1e-9), name
    constant = targets * 0 + 0.1
    for name in expected:
        assert METRICS[name](targets, constant) == 0
        assert METRICS[name](constant, targets) == 0


def test_multirc_is_scored_by_question():
    """Questions of different paragraphs share numbers; answers of one need not be neighbours."""
    ids = [(0, 0, 0), (1, 0, 0), (0, 0, 1), (0, 1, 2)]
    examples = [Example(item, (), target) for item, target in zip(ids, [1, 1, 0, 1], strict=True)]
    assert finetune.score(TASKS['multirc'], examples, [1, 1, 0, 0]) == pytest.approx(
        {'accuracy': 3 / 4, 'f1a': 4 / 5, 'exact_question': 2 / 3})


def squad_oracle(answers, prediction):
    """(EM, F1) of a question by the official definition, as plainly as can be."""
    def clean(text):
        text = ''.join(c for c in text.lower() if c not in set(string.punctuation))
        return [word for word in re.sub(r'\b(a|an|the)\b', ' ', text).split() if word]

    def f1(a, b):
        if not a or not b:
            return float(a == b)
        shared = sum(min(n, b.count(word)) for word, n in Counter(a).items())
        if not shared:
            return 0.0
        precision, recall = shared / len(b), shared / len(a)
        return 2 * precision * recall / (precision + recall)

    guess = clean(prediction)
    golds = [clean(item) for item in answers if clean(item)]
    if not golds:
        golds = [[]]
    return max(float(gold == guess) for gold in golds), max(f1(gold, guess) for gold in golds)


def cmrc_oracle(answers, prediction):
    """(EM, F1) of a question; its words must be between blanks or Chinese characters."""
    marks = '-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』'

    def clean(text):
        return ''.join(c for c in text.lower().strip() if c not in marks)

    def tokens(text):
        return re.sub('([\u4e00-\u9fa5])', r' \1 ', clean(text)).split()

    def f1(a, b):
        longest = 0                                     # run of tokens of a that b has too
        for i, j in itertools.combinations(range(len(a) + 1), 2):
            if any(a[i:j] == b[k:k + j - i] for k in range(len(b))):
                longest = max(longest, j - i)
        return 2 * longest / (len(a) + len(b)) if longest else 0.0

    return (max(float(clean(item) == clean(prediction)) for item in answers),
            max(f1(tokens(item), tokens(prediction)) for item in answers))


ENGLISH = ['the', 'The', 'a', 'an', 'cat', 'Cat', 'cats', 'sat', 'U.S.', 'u.s', "john's", 'x-ray', 'Öl']
MIXED = [*'中国北京大学，《》·-。', ' bert ', ' 2018 ', ' BERT ']


@pytest.mark.parametrize('names, oracle, vocabulary, joint, empty', [
    (('exact', 'f1_words'), squad_oracle, ENGLISH, ' ', 0.4),
    (('exact_chinese', 'f1_characters', 'exact_f1_chinese'), cmrc_oracle, MIXED, '', 0)])
def test_answers_are_scored_by_the_official_definition(names, oracle, vocabulary, joint, empty):
    pick = random.Random(1)

    def text(most):
        return joint.join(pick.choices(vocabulary, k=pick.randint(1, most)))

    scores = []
    for _ in range(400):
        answers = []
        if pick.random() >= empty:
            answers = [text(6) for _ in range(pick.randint(1, 3))]
        one_of_them = pick.choice(answers) if answers else ''
        guess = pick.choice([one_of_them, text(6), text(2), '' if empty else text(1)])
        if oracle is cmrc_oracle and not all(map(finetune.chinese_tokens, answers)):
            continue                                    # CMRC has no answers of punctuation alone
        expected = oracle(answers, guess)
        scores.append(expected)
        targets = [[(answer, 0) for answer in answers]]
        for name, value in zip(names, (*expected, np.mean(expected)), strict=False):
            assert METRICS[name](targets, [guess]) == pytest.approx(value), (answers, guess)
    mean_exact, mean_f1 = np.mean(scores, 0)
    assert len(scores) > 250
    assert 0.1 < mean_exact < mean_f1 < 0.9


@pytest.mark.parametrize('text, tokens', [
    ('于1,000.5米处v1.0。', ['于', '1,000.5', '米', '处', 'v1.0']), ('U.S.人', ['u.s', '.', '人']),
    ('a,b (20%)', ['a', ',', 'b', '(', '20', '%', ')']), ('0.5-1', ['0.51']), ('ア・イの', ['ア・イの']),
    ("john's", ['john', "'s"]), ('龙…—龙', ['龙', '…', '—', '龙']), ('  ，', [])])
def test_words_in_chinese_are_those_of_nltk(text, tokens):
    """Expected: what NLTKWordTokenizer of nltk 3.9 makes of the parts between Chinese characters."""
    assert finetune.chinese_tokens(text) == tokens


# ---- trials ----

FAST = {'cola', 'stsb', 'mnli', 'squad2', 'multirc', 'chid', 'c3'}      # each of the others is like one


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))
                                  for name in PUBLISHED])
def test_every_task_from_its_records_to_its_predictions(name, trial):
    task = TASKS[name]
    result = trial(name, predict='test' if task.test else '')
    columns = [name, 'mnli_mm'] if name == 'mnli' else [name]
    for kind in ('scores', 'majority'):
        assert [*result[kind]] == columns
        for values in result[kind].values():
            assert (*values,) == task.metrics
    assert result['n'][name] == ([24, 12] if name == 'chid' else [12, 6])

    stems = list(columns)
    if task.test:
        stems += [f'test_{column}' for column in columns]
    for stem in stems:
        path, = result['folder'].glob(f'{stem}.*')
        if task.hub.startswith('nyu-mll'):
            header, *lines = [line.split('\t') for line in path.read_text().splitlines()]
            assert header == ['index', 'prediction']
            assert [index for index, _ in lines] == list('012345')
            assert {label for _, label in lines} <= {*task.labels} or name == 'stsb'
        elif name in ('squad1', 'squad2', 'cmrc', 'chid'):
            first_id = [*json.loads(path.read_text())][0]
            assert first_id == ('#idiom000000#' if name == 'chid' else 'Q0')
        else:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            key = 'idx' if name in ('boolq', 'multirc') else 'id'
            assert len(rows) == 6
            assert [*rows[1]] == [key, 'label']


@pytest.mark.parametrize('name, rate, epochs, least', [('stsb', 1e-2, 20, 0.75), ('c3', 5e-3, 25, 0.7)])
def test_a_head_learns(name, rate, epochs, least, trial, tmp_path):
    """Trained and evaluated on the same examples, it passes the majority by far."""
    write_copy(tmp_path, name, made(name, 24, shared=True))
    result = trial(name, data_dir=tmp_path, learning_rate=rate, epochs=epochs)
    assert result['scores'][name][result['metric']] > max(least, result['majority'][name][result['metric']])


def test_the_same_command_gives_the_same_weights(trial):
    """batch_size and what is not in the recipe change nothing, each of the others does."""
    plain = {'dropout': 0, 'attention_dropout': 0, 'adam_eps': 1, 'learning_rate': 0.1}     # as plain descent
    first = parameters(trial('rte', **plain)['folder'])
    again = parameters(trial('rte', 'again', log_interval=1, **plain)['folder'])
    assert same(first, again)
    halves = parameters(trial('rte', 'halves', batch_size=4, **plain)['folder'])
    assert all(torch.allclose(x, halves[key], atol=1e-6) for key, x in first.items())
    for changes in ({'seed': 2}, {'dropout': 0.5}, {'attention_dropout': 0.5}, {'train_samples': 9},
                    {'pooling': 'first'}, {'weight_decay': 0.5}, {'overrides': 'rte.learning_rate=1e-3'}):
        name = '_'.join(changes)
        other = parameters(trial('rte', name, **{**plain, **changes})['folder'])
        assert not same(first, other), changes


def test_the_step_of_a_run_is_that_of_its_newest_checkpoint(stage, copies, tmp_path):
    """So a checkpoint of before is not the last of the tables; the folder's own trials keep their place."""
    run = pretrained(tmp_path / 'base', step=7, seed=1)
    shutil.copy(os.path.join(run, 'ckpt_0000007.pt'), os.path.join(run, 'ckpt_0000004.pt'))
    done = stage('finetune', *words(init_from=f'{run},{run}/ckpt_0000004.pt', data_dir=copies, tasks='rte',
                                    out_dir=tmp_path / 'out', **QUICK))
    assert done.code == 0, done
    steps = {}
    for result in finetune.read_results(str(tmp_path / 'out')):
        steps[result['run'], result['step']] = result['scores']['rte']['accuracy']
    assert [*steps] == [('base', 7), ('base', 4)]
    assert cells(done.out, 'rte.accuracy')[0][:3] == ['base', f"{100 * steps['base', 7]:.2f}", '1']
    assert cells(done.out, 'rte.accuracy')[1][:3] == ['base@4', f"{100 * steps['base', 4]:.2f}", '1']
    assert sorted(path.name for path in (tmp_path / 'out').glob('base*')) == ['base', 'base@4']
    assert finetune.find_start(str(tmp_path / 'out' / 'base' / 'rte_1')).subfolder == 'base'
    assert finetune.find_start(str(tmp_path / 'out' / 'base@4' / 'rte_1')).subfolder == 'base@4'


def test_numbers_of_examples(trial):
    assert trial('rte', train_samples=9, eval_samples=4)['n'] == {'rte': [9, 4]}


def test_a_trial_depends_on_its_own_seed_alone(trial, stage, run, copies, tmp_path):
    """The second trial of a command that begins with seed 1 is the first of one that begins with seed 2."""
    command = {'init_from': run, 'data_dir': copies, 'tasks': 'rte', 'out_dir': tmp_path / 'two', **QUICK}
    assert stage('finetune', *words(**{**command, 'trials': 2})).code == 0
    alone = trial('rte', 'alone', seed=2)
    assert same(parameters(tmp_path / 'two' / 'base' / 'rte_2'), parameters(alone['folder']))


def test_a_process_of_torchrun_may_have_no_trial(stage, run, copies, tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setenv('WORLD_SIZE', '2')
    command = {'init_from': run, 'data_dir': copies, 'tasks': 'rte', 'out_dir': tmp_path / 'out', **QUICK}
    done = stage('finetune', *words(**{**command, 'trials': 1}))
    assert done.code == 0
    assert done.out == '1 trials of other processes go on\n'


def test_two_commands_never_share_a_trial(stage, run, copies, tmp_path):
    """Another command's process is in the trial's folder, though no process has the lock of out_dir."""
    folder = tmp_path / 'out' / 'base' / 'rte_1'
    hold = f'import train; lock = train.lock_folder({str(folder)!r}); print("locked", flush=True); input()'
    other = launch('-c', hold, stdin=subprocess.PIPE)
    assert other.stdout.readline() == 'locked\n'
    command = words(init_from=run, data_dir=copies, tasks='rte', out_dir=tmp_path / 'out', **QUICK)
    line = refused(stage('finetune', *command))
    kill(other)
    other.communicate()
    assert f'{folder}: another run uses it' in line
    assert [path.name for path in folder.iterdir()] == ['lock']
    assert stage('finetune', *command).code == 0


def test_a_finished_trial_is_kept_and_another_recipe_refused(trial, stage, run, copies, tmp_path):
    command = {'init_from': run, 'data_dir': copies, 'tasks': 'rte', 'out_dir': tmp_path / 'out', **QUICK}
    place = trial('rte')['folder'] / 'result.json'
    before = place.stat().st_mtime_ns
    assert stage('finetune', *words(**command)).code == 0
    assert place.stat().st_mtime_ns == before
    line = refused(stage('finetune', *words(**{**command, 'epochs': 2, 'seed': 7})))
    assert 'epochs=1, this' in line
    assert 'out_dir' in line
    other = pretrained(tmp_path / 'base', seed=1)               # of the same name and step
    assert 'other parameters' in refused(stage('finetune', *words(**{**command, 'init_from': other})))


def test_trials_of_an_earlier_revision_go_on(trial, stage, run, copies, tmp_path):
    """Their recipes have other knobs, but none that differs; a file of another task is none of theirs."""
    given = {'tasks': 'rte', 'train_file': easy(tmp_path / 'a.csv', 60)}
    place = trial('rte', train_file=given['train_file'])['folder'] / 'result.json'
    result = json.loads(place.read_text())
    assert result['recipe']['file_sums'] == {}
    del result['recipe']['keep_best']
    write_json(place, {**result, 'recipe': {**result['recipe'], 'noise': ''}})
    before = place.read_bytes()
    command = words(init_from=run, data_dir=copies, out_dir=tmp_path / 'out', **QUICK, **given)
    assert stage('finetune', *command).code == 0
    assert place.read_bytes() == before
    assert 'keep_best=False, this run has True' in refused(stage('finetune', *command, '--keep_best=true'))


def test_a_damaged_start_is_one_line(stage, run, copies, tmp_path):
    path = Path(shutil.copytree(run, tmp_path / 'base'), 'ckpt_0000003.pt')
    path.write_bytes(path.read_bytes()[:-200])
    command = words(init_from=path.parent, data_dir=copies, tasks='rte', out_dir=tmp_path / 'out', **QUICK)
    assert 'ckpt_0000003.pt cannot be loaded' in refused(stage('finetune', *command))


@pytest.mark.parametrize('pooling', ['first', 'layerwise'])
def test_a_finished_trial_is_evaluated_by_its_own_recipe(pooling, trial, run, tmp_path):
    """Every predicted number stays, whatever the command says of training and of the model."""
    first = trial('stsb', init_from=f'{run}/ckpt_0000003.pt', pooling=pooling, block_size=40, seed=2)
    again = trial('rte', 'again', init_from=first['folder'], trials=4, epochs=0, predict='test')
    for name in ('stsb.tsv', 'test_stsb.tsv'):
        assert (again['folder'] / name).exists()
    assert (again['folder'] / 'stsb.tsv').read_bytes() == (first['folder'] / 'stsb.tsv').read_bytes()
    for key in ('scores', 'majority', 'n', 'run', 'step', 'seed', 'task'):
        assert again[key] == first[key]
    assert again['folder'] == tmp_path / 'again' / 'base@3' / 'stsb_2'
    assert again['recipe'] == {**first['recipe'], 'epochs': 0, 'predict': 'test'}
    assert not (again['folder'] / 'model.pt').exists()


def predict_alone(stage, folder, path):
    """The command that labels a file with a finished trial -> what it printed last"""
    done = stage('finetune', *words(init_from=folder, predict=path, device='cpu'))
    assert done.code == 0, done
    return done.out.splitlines()[-1]


def test_a_file_is_labelled_by_a_trial_alone(trial, stage, tmp_path):
    """Nothing but its folder and the file is there; classes have their names and probabilities."""
    folder = trial('custom', train_file=easy(tmp_path / 'a.csv', 40), dev_file=easy(tmp_path / 'b.csv', 20),
                   texts='title', label='class')['folder']
    (tmp_path / 'a.csv').unlink()
    (tmp_path / 'b.csv').unlink()
    (tmp_path / 'new.csv').write_text('number,title\n1,the quick stone\n2,a river\n')
    before = (folder / 'result.json').read_bytes()
    line = predict_alone(stage, folder, tmp_path / 'new.csv')
    assert line == f'2 rows with their predictions: {folder}/predicted_new.csv'
    assert (folder / 'result.json').read_bytes() == before

    header, *lines = (folder / 'predicted_new.csv').read_text().splitlines()
    assert header == 'number,title,prediction,probability'
    model, tokenizer, content = train.load(str(folder))
    for line, text in zip(lines, ('the quick stone', 'a river'), strict=True):
        _, title, name, chance = line.split(',')
        ids = torch.tensor([join_texts(SPECIAL_IDS, 48, tokenizer.encode([text])[0])[0].tolist()])
        chances = model(ids).softmax(-1)[0]
        assert title == text
        assert name == content['labels'][chances.argmax()]
        assert float(chance) == pytest.approx(chances.max().item(), abs=1e-6)


def test_a_damaged_tokenizer_of_a_trial_is_one_line(trial, stage, run, tmp_path):
    """And what the line says mends it."""
    (tmp_path / 'new.csv').write_text('sentence\na river\n')
    folder = trial('sst2')['folder']
    for name in ('vocab.txt', 'settings.json'):
        (folder / 'tokenizer' / name).write_bytes(b'?')
        line = refused(stage('finetune', *words(init_from=folder, predict=tmp_path / 'new.csv')))
        assert f'{folder}/tokenizer/{name}: missing or damaged: copy it from the corpus or run' in line
        shutil.copy(f'{run}/tokenizer/{name}', folder / 'tokenizer')
    predict_alone(stage, folder, tmp_path / 'new.csv')


def test_numbers_and_published_tasks_are_predicted_by_a_trial_alone(trial, stage, tmp_path):
    """Numbers in their own scale; .jsonl stays .jsonl."""
    (tmp_path / 'a.csv').write_text('text,y\n' + ''.join(f'the river {i},{1.5 * i}\n' for i in range(30)))
    (tmp_path / 'new.csv').write_text('text\nthe house\n')
    (tmp_path / 'new.jsonl').write_text('{"sentence": "good", "note": null}\n')
    folder = trial('custom', train_file=tmp_path / 'a.csv', texts='text', label='y')['folder']
    predict_alone(stage, folder, tmp_path / 'new.csv')
    model, tokenizer, content = train.load(str(folder))
    ids = torch.tensor([join_texts(SPECIAL_IDS, 48, tokenizer.encode(['the house'])[0])[0].tolist()])
    mean, deviation = content['scale']
    _, line = (folder / 'predicted_new.csv').read_text().splitlines()
    assert float(line.split(',')[1]) == pytest.approx(model(ids).item() * deviation + mean, abs=1e-4)

    folder = trial('sst2', 'sst2')['folder']
    predict_alone(stage, folder, tmp_path / 'new.jsonl')
    row = json.loads((folder / 'predicted_new.jsonl').read_text())
    assert [*row] == ['sentence', 'note', 'prediction', 'probability']
    assert row['prediction'] in ('0', '1')


def test_training_rows_are_not_scored_without_a_word(trial, stage, tmp_path):
    """A trial on all rows of a file, evaluated on that file, or on a copy of it."""
    a = easy(tmp_path / 'a.csv', 60)
    first = trial('custom', train_file=a, dev_file=easy(tmp_path / 'b.csv', 20, seed=2), texts='title',
                  label='class')
    assert 'dev rows have the text of a training row' not in first['printed'].err
    line = refused(stage('finetune', *words(init_from=first['folder'], epochs=0, dev_file=a, device='cpu',
                                            out_dir=tmp_path / 'out_a')))
    assert f'dev_file={a}: ' in line
    assert 'was trained on it' in line
    copy = shutil.copy(a, tmp_path / 'c.csv')
    again = trial('custom', 'c', init_from=first['folder'], epochs=0, dev_file=copy)
    assert 'custom: 60 of 60 dev rows have the text of a training row' in again['printed'].err


def test_truncated_rows_and_unknown_tokens_are_counted(trial, tmp_path):
    """46 tokens fit beside two special ones; from 1 % on, the share of [UNK] is said."""
    rows = [f'{"the " * (40 + i)}{"ж" * (i == 2)},{i % 2}\n' for i in range(10)]
    (tmp_path / 'a.csv').write_text(HEAD + ''.join(rows))
    (tmp_path / 'b.csv').write_text(HEAD + 'the ж ж river,1\n')
    done = trial('custom', train_file=tmp_path / 'a.csv', dev_file=tmp_path / 'b.csv', texts='text',
                 label='class')['printed']
    assert 'a.csv train: 3 of 10 rows (30.0%) are truncated to 48 tokens' in done.err
    assert 'b.csv dev: 50.0% of the tokens are [UNK]' in done.err
    for line in done.err.splitlines():
        assert not line.startswith((f'{tmp_path}/a.csv train: 0', f'{tmp_path}/b.csv dev: 1'))


def test_long_questions_and_choices_are_counted(run):
    """A question has at most half of a window; a choice is a row of its own."""
    tokenizer = load_tokenizer(run)
    question = 'the river ' * 20
    spans = [Example(0, (question, 'a house ' * 50), ()), Example(1, ('the ?', 'a house ' * 50), ())]
    choices = [Example(0, (('a', 'the'), ('a', question * 2)), 0), Example(1, (('a', 'the'),), 0)]
    for features in (finetune.span_features(spans, tokenizer, 48, 16),
                     finetune.choice_features(choices, tokenizer, 48, 16)):
        assert {feature.example for feature in features if feature.is_cut} == {0}


def test_a_bar_over_predictions_on_a_terminal_alone(trial, monkeypatch):
    assert 'predictions:' not in trial('rte')['printed'].err
    monkeypatch.setattr('sys.stderr.isatty', lambda: True, raising=False)
    assert re.search(r'predictions: *\d+%.*\| \d+/1 \[', trial('rte', 'again')['printed'].err)


def test_the_norm_of_the_noise(run):
    model, tokenizer = finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS['cola'], 1, knobs())
    examples = [Example(i, ('the river ' * i,), 0) for i in range(1, 6)]
    data = Data(TASKS['cola'], examples, finetune.text_features(examples, tokenizer, 48, 16), 0)
    batch = collate(data.features, 0)
    seen = []
    with torch.no_grad():
        plain = model.encoder.embed(batch['ids'], batch['segments'])
        hook = kowsher.add_noise(model.eval(), data, CPU, 0.3)
        model.encoder.dropout.register_forward_hook(lambda module, inputs, x: seen.append(x))
        model(batch['ids'], batch['segments'], batch['attention_mask'])
    hook.remove()
    norms = (seen[0] - plain).norm(dim=-1)
    expected = 0.3 * plain.norm(dim=-1)[batch['attention_mask']].mean()         # of tokens, not of padding
    assert torch.allclose(norms, expected.expand_as(norms), rtol=1e-4)


def test_cross_tasks_are_reduced_to_yes_and_no(stage, run, tmp_path):
    """MNLI's positive class is 0, QQP's 1; five questions, so that yes and no are not as many."""
    for name in ('mnli', 'qqp'):
        write_copy(tmp_path / 'copies', name, made(name, 12, 5))
    given = knobs(data_dir=str(tmp_path / 'copies'))
    done = stage('finetune', *words(init_from=run, data_dir=given.data_dir, tasks='mnli,qqp',
                                    out_dir=tmp_path, **QUICK))
    assert done.code == 0, done
    folder = tmp_path / 'base' / 'mnli_1'
    model, tokenizer, _ = train.load(str(folder))
    data = finetune.load_data(TASKS['qqp'], 'validation', tokenizer, 48, given)
    predictions = finetune.predict_data(model, data, given, CPU)
    hits = [(prediction == 0) == (example.label == 1)
            for prediction, example in zip(predictions, data.examples, strict=True)]
    result = json.loads((folder / 'result.json').read_text())
    done = stage('kowsher', *words(out_dir=tmp_path, runs='base', tasks='mnli,qqp', cross=True,
                                   noise='0,0.5,20', data_dir=given.data_dir, device='cpu'))
    line = done.out.splitlines()[0]
    own = f"{100 * result['scores']['mnli']['accuracy']:.2f}"
    assert line.startswith(f'{folder}: 0 {own}, 0.5 ')
    assert line.endswith(f', mnli {own}, qqp {100 * np.mean(hits):.2f}')


def test_keep_best_keeps_the_best_weights(trial, tmp_path):
    """With a rate that spoils them in the end the reported score is the best that was logged."""
    write_copy(tmp_path, 'stsb', made('stsb', 24, shared=True))
    result = trial('stsb', data_dir=tmp_path, keep_best=True, epochs=20, learning_rate=2e-2)
    lines = train.read_metrics(result['folder'])
    logged = [line['pearson_spearman'] for line in lines if line['kind'] == 'val']
    assert result['scores']['stsb']['pearson_spearman'] == pytest.approx(max(logged))
    assert len(logged) == 20
    assert max(logged) > logged[-1]


def test_the_pooler_of_a_trial_goes_on(trial):
    """And a trial keeps its seed."""
    first = trial('rte', seed=3)
    before = parameters(first['folder'])
    model, _ = finetune.make_model(str(first['folder'] / 'model.pt'), TASKS['mnli'], 1, knobs())
    assert torch.equal(model.state_dict()['pooler.dense.weight'], before['pooler.dense.weight'])
    result = trial('qqp', 'next', init_from=first['folder'], trials=2)
    assert (result['run'], result['seed'], result['folder'].name) == ('base', 3, 'qqp_3')


@pytest.mark.parametrize('first, same, other', [
    ('squad1', ['squad1', 'squad2'], ['rte', 'qqp']),           # start and end have the shape of two classes
    ('rte', ['rte', 'qnli'], ['qqp', 'mnli', 'squad1']),
    ('stsb', ['stsb'], ['c3'])])                                # both have one logit and no labels
def test_the_head_of_a_trial_goes_on_for_the_same_labels_alone(first, same, other, trial, run):
    """Else it starts at random, as after pretraining."""
    path = trial(first)['folder'] / 'model.pt'
    trained = parameters(path.parent)['classifier.weight']
    for name in same + other:
        model, _ = finetune.make_model(str(path), TASKS[name], 1, knobs())
        new_model, _ = finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS[name], 1, knobs())
        expected = trained if name in same else new_model.classifier.weight
        assert torch.equal(model.classifier.weight, expected), name


@pytest.mark.slow
def test_processes_share_the_trials(run, copies, tmp_path):
    """Two processes of torchrun write what one writes."""
    given = {**QUICK, 'init_from': run, 'data_dir': copies, 'tasks': 'cola,rte', 'trials': 2}
    for n, out in enumerate(('one', 'two'), 1):
        done = torchrun('finetune.py', *words(**given, out_dir=tmp_path / out), n=n)
        assert done.code == 0, done
        assert '| rte.accuracy | base |' in (tmp_path / out / 'results.md').read_text(), done
    for name in ('cola_1', 'cola_2', 'rte_1', 'rte_2'):
        one = parameters(tmp_path / 'one' / 'base' / name)
        two = parameters(tmp_path / 'two' / 'base' / name)
        assert same(one, two)


# ---- files of your own ----

CLUES = [('stone', 'red'), ('good', 'red'), ('garden', 'green'), ('river', 'green'), ('small', 'blue'),
         ('quick', 'blue')]


def easy(path, n, seed=1):
    """Write a .csv of rows of three classes, named by their last word."""
    pick = random.Random(seed)
    lines = ['title,class']
    for i in range(n):
        word, label = CLUES[i % len(CLUES)]
        text = ' '.join(pick.choices(['the', 'a', 'house', 'walks', 'reads'], k=5))
        lines.append(f'{text} {word},{label}')
    path.write_text('\n'.join(lines))
    return path


@pytest.fixture
def own(tmp_path):
    """own(train text, suffix='.csv', **knobs) -> the task `custom` and its knobs."""
    def make(text, dev='', suffix='.csv', **changes):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        files = {'train_file': folder / f'train{suffix}', 'dev_file': folder / f'dev{suffix}'}
        files['train_file'].write_text(text)
        files['dev_file'].write_text(dev)
        if not dev:
            files['dev_file'] = ''
        paths = {key: str(path) for key, path in files.items()}
        given = knobs(**{**paths, 'texts': 'text', 'label': 'class', **changes})
        return finetune.custom_task(given), given
    return make


def test_the_example_of_the_readme_learns(trial, tmp_path):
    """200 easy rows of three classes, with the knobs of README's command."""
    train_file = easy(tmp_path / 'a.csv', 200)
    dev_file = easy(tmp_path / 'b.csv', 60, seed=2)
    wide = pretrained(tmp_path / 'wide', n_embd=128, n_inner=256)
    result = trial('custom', init_from=wide, train_file=train_file, dev_file=dev_file, texts='title',
                   label='class', learning_rate=1e-3, epochs=10, total_batch=16, batch_size=16)
    assert result['majority']['custom']['accuracy'] < 0.4
    assert result['scores']['custom']['accuracy'] > 0.9


def test_classes_and_numbers_of_your_own(own):
    task, given = own('text,class\na,not red\nb,green\nc,Green\n')
    assert (task.head, task.labels) == ('classify', ('Green', 'green', 'not red'))
    all_rows = task._replace(dev_file='')               # no seventh is held out
    examples = finetune.load_examples(all_rows, 'train', given)
    assert examples == [Example(0, ('a',), 2), Example(1, ('b',), 1), Example(2, ('c',), 0)]
    lines = '{"text": "a", "class": 0}\n{"text": "b", "class": 10}\n{"text": "b", "class": 2}\n'
    for suffix in ('.jsonl', '.JSONL', '.ndjson'):
        assert own(lines, suffix=suffix)[0].labels == ('0', '10', '2')


def test_an_array_of_records(own):
    """A .json file that is no SQuAD."""
    records = [{'text': 'a', 'class': 'red'}, {'text': 'b', 'class': 'green'}]
    task, given = own(json.dumps(records), json.dumps(records), suffix='.json')
    examples = finetune.load_examples(task, 'train', given)
    assert examples == [Example(0, ('a',), 1), Example(1, ('b',), 0)]


def test_numbers_are_predicted_in_their_own_scale(own):
    task, given = own('text\tclass\n"a\t100\nb"\t299.5\nc\t500.5\n', 'text\tclass\nd\t350\n', '.tsv')
    assert task.head == 'regress'
    mean, deviation = task.scale
    assert (mean, deviation) == (300, pytest.approx(200.25, abs=1e-3))
    examples = finetune.load_examples(task, 'train', given)
    assert examples[0] == Example(0, ('"a',), (100 - mean) / deviation)
    dev_examples = finetune.load_examples(task, 'dev', given)
    assert dev_examples == [Example(0, ('d',), 50 / deviation)]
    assert finetune.answers_of(task, [0.5]) == [mean + deviation / 2]


def test_a_finished_trial_keeps_the_scale_of_its_numbers(trial, tmp_path):
    """Its predictions in their own scale are the same beside another dev_file."""
    def numbers(name, factor):
        lines = [f'the river {i},{factor * (i % 7)}' for i in range(30)]
        (tmp_path / name).write_text('\n'.join(['text,class', *lines]))
        return tmp_path / name

    first = trial('custom', train_file=numbers('a.csv', 1.5), dev_file=numbers('dev.csv', 1.5), texts='text',
                  label='class')
    assert 'is taken as 7 numbers: 1.5 has a fraction' in first['printed'].err
    again = trial('custom', 'again', init_from=first['folder'], epochs=0, dev_file=numbers('b.csv', 1e3))
    before = (first['folder'] / 'custom.jsonl').read_text()
    assert (again['folder'] / 'custom.jsonl').read_text() == before
    assert again['scores']['custom'] == pytest.approx(first['scores']['custom'])


@pytest.mark.parametrize('labels, kind, said', [
    ('0.0 1.0 1.0 0.0', 'auto', '2 classes: no number has a fraction'),
    ('0 1 2 3.0', 'auto', '4 classes: no number has a fraction'),
    ('a b 1.5', 'auto', '3 classes: most are no numbers'),
    ('1.0 2.0 3.5 2', 'auto', '3 numbers: 3.5 has a fraction'),
    ('1 2 3 3.0', 'numbers', '3 numbers: label_kind says so'),
    ('1.0 2.0 3.5 2', 'classes', '3 classes: label_kind says so')])
def test_classes_or_numbers(labels, kind, said, own, capsys):
    """A line says which, and why; the knob decides otherwise."""
    text = HEAD + ''.join(f'a,{label}\n' for label in labels.split())
    task, _ = own(text, label_kind=kind)
    assert task.head == ('regress' if 'numbers:' in said else 'classify')
    assert capsys.readouterr().err.endswith(f"train.csv: label 'class' is taken as {said}\n")


def test_whole_numbers_with_a_point_are_the_same_classes(own):
    """As pandas writes them in a column with a gap; 01 is no 1."""
    task, given = own(HEAD + 'a,0.0\nb,1.0\nc,1\nd,-2.00\n', HEAD + 'e,1\nf,-2\n')
    assert task.labels == ('-2', '0', '1')
    labels = {split: [example.label for example in finetune.load_examples(task, split, given)]
              for split in task.splits}
    assert labels == {'train': [1, 2, 2, 0], 'dev': [2, 0]}
    assert own(HEAD + 'a,1\nb,01\nc,1.05\nd,x.0\n', label_kind='classes')[0].labels == (
        '01', '1', '1.05', 'x.0')


def test_a_seventh_is_held_out_by_its_text(own, capsys):
    """And a line says so."""
    rows = ''.join(f'text {i % 300},{i % 2}\n' for i in range(600))
    task, given = own('text,class\n' + rows)
    texts = {}
    for split in ('train', 'dev'):
        examples = finetune.load_examples(task, split, given)
        texts[split] = {example.texts for example in examples}
    assert not texts['train'] & texts['dev']
    assert len(texts['train'] | texts['dev']) == 300
    assert 25 < len(texts['dev']) < 65
    finetune.describe('custom', task, given)
    assert f'{task.train_file}: a seventh of the rows, by their texts, is held out' in capsys.readouterr().err


GOOD = ''.join(f'a {i},{("red", "green")[i % 2]}\n' for i in range(200))
HEAD = 'text,class\n'


@pytest.mark.parametrize('train_text, dev, changes, message', [
    ('text, class\na,b\n', '', {}, r"'class' has 0; the columns are \['text', ' class'\]"),
    (HEAD + 'a,1.5\nb,2.5\nc,n/a\nd,3\n', '', {}, "train, row 3: could not convert string to float: 'n/a'"),
    (HEAD + 'a,1.5\nb,2.5\nc,-1e400\nd,nan\ne,3\n', '', {},
     'csv train, row 3: label -inf is no number to learn'),
    ('{"text": "a", "class": 1.5}\n{"text": "b", "class": 2}\n{"text": "c", "class": NaN}\n', '',
     {'suffix': '.jsonl'}, "jsonl train, row 3: no label 'class'"),
    ('', '', {}, r"two different labels are needed, 'class' has 0; the columns are \[\]"),
    (HEAD + 'a,red\nb,red\n', '', {}, r"'class' has 1; the columns are \['text', 'class'\]"),
    (HEAD + 'a,3.50\nb,3.5\n', '', {}, "'class' has 1; the columns"),
    (HEAD + GOOD, HEAD, {}, 'dev: no rows'),
    (HEAD + GOOD, '', {'label_kind': 'text'}, 'choose one of auto, '),
    ('{\n "text": "a",\n "class": "b"\n}', '', {'suffix': '.json'}, 'neither an array of records nor SQuAD'),
    ('text;class\na;b\n', '', {}, r"'class' has 0; the columns are \['text;class'\]"),
    ('"text"\t"class"\n"a"\t"b"\n', '', {'suffix': '.tsv'}, "'class' has 0; the columns are"),
    (HEAD + GOOD, '', {'texts': 'title'}, "row 1: 'title' is None, not a text, the row has .'text'"),
    (HEAD + '"a,red\nb,green\n', '', {}, r"train.csv, row 1: Error\('unexpected end"),
    (HEAD + GOOD, HEAD + 'a,pink\n', {}, r"dev.csv dev, row 1: label class='pink': choose one of green, red"),
    (HEAD + GOOD + 'b\n', '', {}, "row 201: no label 'class'"),
    (HEAD + GOOD + 'b,red,c\n', '', {}, 'train.csv, row 201: .*1 more cells than columns'),
    ('text,class,class\na,b,c\n', '', {}, 'train.csv, row 1: .*two columns of one name'),
    ('\x1b[31mtext,class\na,b\nb,c\n', '', {}, r"'text' is None, not a text, the row has \['\\x1b\[31mtext'"),
    ('{"text": 5, "class": "a"}\n{"text": "b", "class": "b"}\n', '', {'suffix': '.jsonl'},
     "train.jsonl train, row 1: 'text' is 5, not a text"),
    ('{"text": "b", "class": "b"}\n{"text"\n{"text": "b", "class": "a"}\n', '', {'suffix': '.jsonl'},
     'train.jsonl, row 2: JSONDecodeError'),
    ('[{"text": "a", "class": "x"}, "b", {"text": "c"}]', '', {'suffix': '.json'}, 'train.json, row 2: '),
    (HEAD + GOOD, '', {'texts': ''}, 'tasks=custom needs --train_file=FILE'),
    (HEAD + 'a,0.5\nb,1.5\n', HEAD + 'a,high\n', {}, 'dev.csv dev, row 1: could not convert'),
])
def test_mistakes_in_a_file_are_one_line(train_text, dev, changes, message, own):
    with pytest.raises(UserError, match=message) as error:
        task, given = own(train_text, dev, **changes)
        for split in task.splits:
            finetune.load_examples(task, split, given)
    assert '\n' not in str(error.value)
    assert '\x1b' not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_replaced_file_is_another_recipe(trial, stage, run, tmp_path):
    dev_file = easy(tmp_path / 'b.csv', 20, seed=2)
    given = {'train_file': easy(tmp_path / 'a.csv', 30), 'dev_file': dev_file, 'texts': 'title',
             'label': 'class'}
    trial('custom', **given)
    command = words(**{'init_from': run, 'tasks': 'custom', 'out_dir': tmp_path / 'out', **QUICK, **given})
    assert stage('finetune', *command).code == 0
    easy(dev_file, 20, seed=3)
    done = stage('finetune', *command)
    assert done.code == 2
    assert 'out has file_sums={' in done.err.splitlines()[-1]


def test_rows_and_classes_are_counted_and_what_is_missing_is_said(trial, tmp_path):
    """On stderr: stray spaces are seen, and that dev has one class."""
    rows = [(f'a {i}', ('red', 'green', 'green ')[i % 3]) for i in range(30)]
    (tmp_path / 'a.csv').write_text(HEAD + ''.join(f'{text},{label}\n' for text, label in rows))
    (tmp_path / 'b.csv').write_text(HEAD + 'x,red\na 3,red\n')
    result = trial('custom', train_file=tmp_path / 'a.csv', dev_file=tmp_path / 'b.csv', texts='text',
                   label='class')
    for line in ("a.csv: label 'class' is taken as 3 classes: most are no numbers",
                 "custom, train: 30 rows, 3 of 3 classes: 'green' 10, 'green ' 10, 'red' 10",
                 "custom, dev: 2 rows, 1 of 3 classes: 'green' 0, 'green ' 0, 'red' 2",
                 'custom: 1 of 2 dev rows have the text of a training row'):
        assert line in result['printed'].err
    last = result['printed'].out.splitlines()[-1]
    assert last == f"finished: 1 trials, {tmp_path / 'out' / 'results.md'}"


def test_squad_is_evaluated_on_a_file_of_your_own(trial, tmp_path):
    def squad(name, n):
        questions = [{'id': f'{name}{i}', 'question': f'who is {i} ?',
                      'answers': [{'text': 'river', 'answer_start': 4}]} for i in range(n)]
        content = {'data': [{'paragraphs': [{'context': 'the river walks', 'qas': questions}]}]}
        (tmp_path / f'{name}.json').write_text(json.dumps(content))
        return tmp_path / f'{name}.json'

    result = trial('squad1', train_file=squad('a', 9), dev_file=squad('b', 4))
    assert result['n'] == {'squad1': [9, 4]}
    predictions = json.loads((result['folder'] / 'squad1.json').read_text())
    assert [*predictions] == ['b0', 'b1', 'b2', 'b3']
    same_file = trial('squad1', 'same', train_file=squad('c', 40), dev_file=tmp_path / 'c.json')
    n_train, n_dev = same_file['n']['squad1']
    assert n_train + n_dev == 40
    assert 0 < n_dev < 20


@pytest.mark.parametrize('given, message', [
    ({'predict': 'a.csv'}, 'base: no finished trial: name OUT_DIR/RUN/TASK_SEED'),
    ({'tasks': 'colla'}, 'choose one of cola, sst2'),
    ({'overrides': 'rta.epochs=3'}, "TASK='rta': choose"), ({'metric': 'f1'}, 'choose one of accuracy'),
    ({'overrides': 'rte.seed=3'}, 'seed is the same for all tasks of a command'),
    ({'schedule': 'steps'}, 'choose one of linear'), ({'beta2': 1.5}, 'beta2=1.5: must be below 1'),
    ({'warmup_fraction': 1.5}, 'must be at most 1'), ({'pooling': 'mean'}, 'choose one of cls'),
    ({'epochs': 0}, 'epochs=0 evaluates finished trials'), ({'init_from': ''}, "no trial: init_from is ''"),
    ({'init_from': 'out/nothing'}, 'no checkpoint there'),
    ({'init_from': 'out/\x1b[31mred'}, r'out/\x1b[31mred: no checkpoint there'),
    ({'data_dir': 'nowhere'}, 'hf download nyu-mll/glue'),
    ({'data_dir': 'no'}, 'nyu-mll/glue:rte validation: '),
    ({'learning_rate': 1e38, 'epochs': 4}, 'rte_1: a loss or gradient up to step 2 is not finite'),
])
def test_a_mistake_on_the_command_line_is_one_line(given, message, stage, run, copies, tmp_path):
    command = {'tasks': 'rte', 'init_from': run, 'data_dir': copies, 'out_dir': tmp_path / 'out', **QUICK}
    line = refused(stage('finetune', *words(**{**command, **given})))
    assert message in line
    assert not [*tmp_path.glob('out/*/*/result.json')]


# ---- the table ----

def cells(text, start):
    """Cells of the table rows whose first cell starts with `start`."""
    rows = []
    for line in text.splitlines():
        first, *others = [cell.strip() for cell in line.strip('|').split('|')]
        if first.startswith(start):
            rows.append(others)
    return rows


def test_mean_deviation_and_interval():
    """t of 1, 4 and, for ten and more seeds, 9 degrees of freedom."""
    import pandas as pd
    stats = pytest.importorskip('scipy.stats')
    for n in (2, 3, 5, 10):
        deviation = np.std(range(n), ddof=1)
        half = stats.t.ppf(0.975, n - 1) * deviation / n ** 0.5
        assert finetune.spread(pd.Series(range(n))) == f'{(n - 1) / 2:.2f} ({deviation:.2f}) ± {half:.2f}'
    assert finetune.spread(pd.Series([4.0, np.nan])) == '4.00'
    assert finetune.spread(pd.Series([np.nan])) == '-'


def test_scores_and_differences_that_are_paired_by_seed():
    results = []
    for run_name, scores in (('ours', (70, 74, 90)), ('base', (60, 69))):
        results += [{'subfolder': run_name, 'seed': seed, 'scores': {'rte': {'accuracy': value / 100}},
                     'majority': {'rte': {'accuracy': 0.5}}, 'n': {'rte': [12, 6]}}
                    for seed, value in enumerate(scores, 1)]
    text = finetune.make_report(results, {'base'})
    assert cells(text, 'rte.accuracy') == [
        ['base', '64.50 (6.36) ± 57.18', '2', '50.0', '12', '6'],
        ['ours', '78.00 (10.58) ± 26.29', '3', '50.0', '12', '6'],
        ['ours', '7.50 (3.54) ± 31.77', '2']]           # of 10 and 5
    assert 'paired' not in finetune.make_report(results, {'other'})
