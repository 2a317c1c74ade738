"""finetune.py: records, rows and windows, heads, metrics, trials that repeat, own files, the table."""
import itertools
import json
import os
import random
import re
import shutil
import string
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from conftest import refused, words
from records import MARKERS, WORDS, made, write_copy
from test_train import CPU

import finetune
import train
from configurator import UserError
from finetune import HEADS, METRICS, TASKS, Data, Example, collate, join_texts
from model import ATTENTION, CLASSIFIER, MODEL, EncoderConfig, SequenceClassifier, positions_of
from prepare_data import (SPECIAL_PIECES, copy_tokenizer, library_file, load_tokenizer, make_wordpiece,
                          open_tokenizer, write_json)

QUICK = {
    'trials': 1, 'epochs': 1, 'total_batch': 8, 'batch_size': 8, 'learning_rate': 5e-3,
    'device': 'cpu', 'dtype': 'float32',
    'texts': 'text', 'label': 'class',
}
PUBLISHED = [name for name in TASKS if TASKS[name].hub]


# ---- a tokenizer, runs with random weights, copies of all data sets ----

LETTERS = string.ascii_lowercase + string.digits
PIECES = [
    *SPECIAL_PIECES, *WORDS, *MARKERS, *LETTERS[1:], *'山水()[]_?,.',
    *('##' + letter for letter in LETTERS),
]


def pretrained(folder, step=3, seed=0, objective='mlm', **changes):
    """Write a checkpoint as train.py does, of random weights; returns the run's folder."""
    tokenizer = open_tokenizer(*library_file(make_wordpiece(PIECES, True)))
    copy_tokenizer(tokenizer, folder)
    torch.manual_seed(seed)
    shape = {'block_size': 48, 'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32}
    model = MODEL[objective](EncoderConfig(tokenizer.vocab_size, **{**shape, **changes}))
    train.write_checkpoint(os.path.join(folder, f'ckpt_{step:07}.pt'), {
        'model': model.state_dict(),
        'model_config': asdict(model.config),
        'config': {'objective': objective, 'data_dir': 'gone', 'dataset': 'tiny'},
        'data': {},
        'step': step,
        'samples': step,
    })
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


@pytest.fixture
def tune(stage, run, copies, tmp_path):
    """tune(seed=2) runs finetune.py in this process -> Done"""
    given = {**QUICK, 'tasks': 'rte', 'init_from': run, 'data_dir': copies, 'out_dir': tmp_path / 'out'}
    return lambda **knobs: stage('finetune', *words(**{**given, **knobs}))


@pytest.fixture
def trial(tune, tmp_path):
    """trial('cola', seed=2) fine-tunes in this process; returns result.json of its only trial."""
    def call(name, out='out', **knobs):
        done = tune(tasks=name, out_dir=tmp_path / out, **knobs)
        assert done.code == 0, done
        path, = Path(tmp_path, out).glob('*/*/result.json')
        return {**json.loads(path.read_text()), 'folder': path.parent, 'printed': done}
    return call


@pytest.fixture
def files(tmp_path):
    """files(train=rows, dev=rows) writes labelled files -> the knobs train_file and dev_file"""
    def write(suffix='.csv', **texts):
        for cached in (finetune.read_places, finetune.load_examples, finetune.load_data, finetune.recipe_of,
                       finetune.say_once):
            cached.cache_clear()                        # as in a process of its own
        paths = {}
        for name, text in texts.items():
            path = paths[f'{name}_file'] = f'{tmp_path}/{name}{suffix}'
            Path(path).write_bytes(text.encode())
        return paths
    return write


def knobs(**changes):
    small = finetune.Knobs(batch_size=8, total_batch=8, dropout=0.0, attention_dropout=0.0)
    return small._replace(**changes)


def parameters(folder):
    """The state_dict of a finished trial."""
    return train.read_checkpoint(Path(folder, 'model.pt'))['model']


def same(a, b, atol=0):
    """Whether two state_dicts are the same."""
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], 0, atol) for key in a)


# ---- records of the hub ----

RECORDS = {     # name: (record, its Example)
    'boolq': (
        {'question': 'q', 'passage': 'p\ud800', 'label': -1, 'idx': 7},         # of a test set
        Example(7, ('p?', 'q'))),
    'multirc': (
        {'paragraph': 'p', 'question': 'q', 'answer': 'a', 'label': 1,
         'idx': {'paragraph': 5, 'question': 6, 'answer': 7}},
        Example((5, 6, 7), ('p', 'q a'), 1)),
    'csl': (
        {'abst': '文', 'keyword': ['一', '二'], 'label': 1, 'idx': 7},
        Example(7, ('一 二', '文'), 1)),
    'wsc': (
        {'idx': 3, 'text': '老师说他', 'label': 0,
         'target': {'span1_text': '老师', 'span1_index': 0, 'span2_text': '他', 'span2_index': 3}},
        Example(3, ('_老师_说[他]',), 0)),
    'chid': (
        {'candidates': ['甲', '乙'],
         'content': [f"山{'水' * 56}#idiom000001##idiom000002#{'水' * 56}"],
         'answers': {'candidate_id': [1, 0]}},
        Example('#idiom000001#', tuple((idiom, '水' * 56 + '____****' + '水' * 52) for idiom in '甲乙'), 1)),
    'c3': (
        {'id': 8, 'context': ['男：来', '女：去'], 'question': '？', 'choice': ['一', '二'], 'answer': '二'},
        Example(8, (('男：来 女：去', '？ 一'), ('男：来 女：去', '？ 二')), 1)),
}


@pytest.mark.parametrize('name', RECORDS)
def test_a_record_of_the_hub(name):
    record, expected = RECORDS[name]
    first, *_ = TASKS[name].make(TASKS[name], record, 0)
    assert first == expected


@pytest.mark.parametrize('context, given, expected', [
    ('cat and cat', 7, 8),
    ('Cat and cat', 0, 0),
    ('Cat, The Cat sat', 7, 9),
    ('Cat and a cat', 1, 10),
])
def test_an_answer_at_a_wrong_offset_is_at_the_nearest_place(context, given, expected):
    """If need be in another case."""
    assert finetune.find_answer(context, 'cat', given) == expected


def test_answers_that_are_missing_are_last():
    def label_of(texts, starts):
        answers = {'text': texts, 'answer_start': starts}
        record = {'context': 'one two', 'question': 'q', 'answers': answers}
        example, = finetune.make_span(TASKS['squad2'], record, 0)
        return example.label
    assert label_of(['no', 'two'], [2, '3']) == (('two', 4), ('no', -1))
    assert label_of(['FAKE', 'FAKE'], [-1, -1]) is None
    assert label_of(['', ' '], [4, 3]) == ()            # empty texts are everywhere, and no answers


# ---- rows and windows ----

def test_texts_are_joined_and_cut_as_in_bert():
    """Token by token from the longer, b at a tie; a text alone at its end."""
    special_ids = {'cls': 2, 'sep': 3}
    for n, m, size in itertools.product((1, 2, 7, 12, 30), (1, 5, 11, 30), (8, 9, 16)):
        a = [*range(5, 5 + n)]
        b = [*range(50, 50 + m)]
        alone, first = join_texts(special_ids, size, a)
        assert alone.tolist() == [2, *a[:size - 2], 3], (n, size)
        assert first == len(alone)
        row, first = join_texts(special_ids, size, a, b)
        while len(a) + len(b) > size - 3:
            longer = a if len(a) > len(b) else b
            longer.pop()
        assert row.tolist() == [2, *a, 3, *b, 3], (n, m, size)
        assert first == len(a) + 2


def test_windows_hold_every_token_and_the_answer(run, monkeypatch):
    """Each token of the context is in a window, windows overlap by half at least, and targets are answers."""
    tokenizer = load_tokenizer(run)
    context = 'the house 山水 (1998) walks under a river, ' * 9 + 'it ends at last'
    (_, offsets), = tokenizer.encode_offsets([context])
    questions = ('what ?', 48, 5), ('what ? ' * 9, 48, 24), ('what ? ' * 30, 200, 64)   # 64 as in BERT's code
    answers = 'the', '山水', '1998', 'last'
    for (question, length, n_question), answer, stride in itertools.product(questions, answers, (8, 1000)):
        example = Example(0, (question, context), [(answer, context.index(answer))])
        monkeypatch.setattr(finetune, 'STRIDE', stride)
        features = finetune.span_features([example], tokenizer, length)
        seen = np.concatenate([feature.offsets for feature in features])
        assert np.array_equal(np.unique(seen, axis=0), offsets)
        for feature, following in itertools.pairwise(features):
            assert (feature.length, feature.context_start) == (length, n_question + 2)
            step = min(stride, len(feature.offsets) // 2)
            assert following.offsets[0].tolist() == feature.offsets[step].tolist()

        hits = [feature for feature in features if feature.target != (0, 0)]
        assert hits
        for feature in hits:
            first, last = np.subtract(feature.target, feature.context_start)
            begin, end = feature.offsets[[first, last], [0, 1]]
            assert context[begin:end] == answer


# ---- predictions ----

def test_the_best_span_of_a_window():
    generator = torch.Generator().manual_seed(1)
    offsets = np.array([[10 * i, 10 * i + 9] for i in range(7)])
    feature = finetune.Window(None, 0, (0, 0), 0, 2, offsets)
    for longest in (1, 3, 30):
        start, end = torch.randn(2, 1, 12, generator=generator)
        logits = {}
        for first, last in itertools.combinations_with_replacement(range(7), 2):
            if last - first < longest:
                logits[10 * first, 10 * last + 9] = (start[0, 2 + first] + end[0, 2 + last]).item()
        best = max(logits, key=logits.get)
        span, = HEADS['span'].predict((start, end), [feature], knobs(max_answer=longest))
        assert span == ((start[0, 0] + end[0, 0]).item(), logits[best], *best)


@pytest.mark.parametrize('name, threshold, expected', [
    ('squad1', -9, ['b', 'c']),
    ('squad2', -4, ['b', '']),
    ('squad2', -4.1, ['', '']),
    ('squad2', 8, ['b', 'c']),
])
def test_an_answer_is_the_best_span_of_its_windows(name, threshold, expected):
    """Or '', if the least logit of no answer exceeds the span's by more than null_threshold."""
    spans = [finetune.Span(3, 4, 0, 2), finetune.Span(1, 5, 2, 4), finetune.Span(9, 1, 4, 6)]
    features = [finetune.Window(None, 0, (0, 0), example, 2, None) for example in (0, 0, 1)]
    data = Data(TASKS[name], 2 * [Example(0, ('q', 'a b c '))], features, 0)
    assert finetune.best_answers(data, spans, knobs(null_threshold=threshold)) == expected


def test_a_choice_is_one_of_its_example():
    """Not one of those with which its batch is filled up."""
    features = [finetune.Choices([None], (0, 1)), finetune.Choices([None, None], (1, 2))]
    logits = torch.tensor([[1.0, 50.0], [1.0, 2.0]])
    assert HEADS['choose'].predict(logits, features, knobs()) == [0, 1]


def test_a_hugging_face_bert_gives_its_own_logits(tmp_path):
    """Encoder, pooler and tokenizer come from the folder; only the classifier is copied by hand."""
    transformers = pytest.importorskip('transformers')
    vocabulary = {piece: i for i, piece in enumerate([*SPECIAL_PIECES, *WORDS])}        # of 15
    their_tokenizer = transformers.BertTokenizerFast(vocab=vocabulary)
    their_tokenizer.save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=15, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32,
        num_labels=3, initializer_range=0.2)
    torch.manual_seed(1)
    theirs = transformers.BertForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)

    ours, tokenizer = finetune.make_model(str(tmp_path), TASKS['mnli'], 1, knobs())
    ours.classifier.load_state_dict(theirs.classifier.state_dict())
    pairs = [(' '.join(WORDS[i:]).upper(), 'the house') for i in range(5)]
    examples = [Example(0, pair, 0) for pair in pairs]
    batch = collate(finetune.text_features(examples, tokenizer, 48), 0)
    batch.pop('targets')
    rows = their_tokenizer(pairs, padding=True, return_tensors='pt')
    assert (ours.eval()(**batch) - theirs(**rows).logits).abs().max() < 1e-5


@pytest.mark.parametrize('attention', ATTENTION)
def test_any_pretrained_encoder_takes_any_head(attention, tmp_path):
    """The encoder's states are those of pretraining, also in a longer one."""
    objective = 'plm' if attention == 'xlnet' else 'mlm'
    position, *_ = positions_of(attention)
    run = pretrained(tmp_path, objective=objective, attention=attention, position=position, n_layer=1)
    before, *_ = train.load(run)
    ids = torch.randint(5, 40, (2, 9))
    for name in ('cola', 'c3', 'squad1'):
        path = f'{run}/ckpt_0000003.pt'
        model, _ = finetune.make_model(path, TASKS[name], 1, knobs(block_size=64))
        assert torch.allclose(model.eval().encoder(ids), before.encoder(ids), atol=1e-5)
        assert model.config.block_size == 64


def test_the_seed_decides_the_new_head(run):
    for seed in (1, 2):
        model, _ = finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS['mnli'], seed, knobs())
        torch.manual_seed(seed)
        assert torch.equal(model.classifier.weight, SequenceClassifier(model.config).classifier.weight)


class Renamed(SequenceClassifier):
    """Whose encoder has another name than that of the pretrained model."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = self.encoder
        del self.encoder


def test_an_encoder_that_does_not_fit_is_refused(run, monkeypatch):
    """Not started at random."""
    monkeypatch.setitem(CLASSIFIER, 'classify', Renamed)
    with pytest.raises(UserError, match=r'missing.*: encoder\.blocks'):
        finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS['rte'], 1, knobs())


# ---- metrics ----

rng = np.random.default_rng(1)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('targets, predictions', [
    rng.integers(0, 2, (2, 1000)),
    ([1], [1]),
    ([0, 0], [0, 0]),
    ([1, 1, 0], [0, 0, 0]),
    ([0, 0], [1, 0]),
])
def test_classes_are_scored_as_in_scikit_learn(targets, predictions):
    sklearn = pytest.importorskip('sklearn.metrics')
    f1 = sklearn.f1_score(targets, predictions, zero_division=0)
    accuracy = sklearn.accuracy_score(targets, predictions)
    expected = {
        'f1': f1,
        'accuracy': accuracy,
        'f1_accuracy': (f1 + accuracy) / 2,
        'matthews': sklearn.matthews_corrcoef(targets, predictions),
        'macro_f1': sklearn.f1_score(targets, predictions, average='macro', zero_division=0),
    }
    ours = {name: METRICS[name](targets, predictions) for name in expected}
    assert ours == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('targets, predictions', [
    rng.normal(size=(2, 50)),
    rng.integers(0, 6, (2, 200)) / 5,
    rng.normal(size=(2, 40)) * 1e-6 + 1e3,
])
def test_correlations_are_scipys(targets, predictions):
    """Also of ranks with ties, and of values that hardly differ."""
    stats = pytest.importorskip('scipy.stats')
    pearson = stats.pearsonr(targets, predictions)[0]
    spearman = stats.spearmanr(targets, predictions)[0]
    constant = [0.1] * len(targets)
    for name, expected in (('pearson', pearson), ('spearman', spearman),
                           ('pearson_spearman', (pearson + spearman) / 2)):
        assert METRICS[name](targets, predictions) == pytest.approx(expected, abs=1e-9)
        assert METRICS[name](targets, constant) == METRICS[name](constant, targets) == 0


def squad_clean(text):
    text = ''.join(c for c in text.lower() if c not in string.punctuation)
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', text).split())


def squad_common(a, b):
    return sum(min(a.count(word), b.count(word)) for word in {*a})


def cmrc_clean(text):
    marks = '-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』'
    return ''.join(c for c in text.lower().strip() if c not in marks)


def cmrc_common(a, b):
    """Length of the longest run of tokens of a that b has too."""
    runs = [a[i:j] for i, j in itertools.combinations(range(len(a) + 1), 2)]
    common = [len(run) for run in runs if any(run == b[k:k + len(run)] for k in range(len(b)))]
    return max(common, default=0)


ENGLISH = ['the', 'The', 'a', 'an', 'cat', 'Cat', 'cats', 'sat', 'U.S.', 'u.s', "john's", 'x-ray', 'Öl']
MIXED = [*'中国北京大学，《》·-。', ' bert ', ' 2018 ', ' BERT ']


@pytest.mark.parametrize('names, clean, common, vocabulary, joint', [
    ('exact f1_words', squad_clean, squad_common, ENGLISH, ' '),
    ('exact_chinese f1_characters exact_f1_chinese', cmrc_clean, cmrc_common, MIXED, '')])
def test_answers_are_scored_by_the_official_definition(names, clean, common, vocabulary, joint):
    """As plainly as can be. Some questions have no answer, which CMRC's do not know: it is scored alike."""
    pick = random.Random(1)

    def text(most):
        return joint.join(pick.choices(vocabulary, k=pick.randint(1, most)))

    def tokens(text):                                   # a Chinese character, or what is between blanks
        return re.sub('([\u4e00-\u9fa5])', r' \1 ', text).split()

    def f1(a, b):
        return 2 * common(a, b) / (len(a) + len(b)) if a and b else float(a == b)

    for _ in range(400):
        answers = [text(6) for _ in range(pick.choice([0, 0, 1, 2, 3]))]
        guess = pick.choice([*answers[:1], text(6), text(2), ''])
        golds = [clean(answer) for answer in answers if clean(answer)] or ['']
        exact = float(clean(guess) in golds)
        best = max(f1(tokens(gold), tokens(clean(guess))) for gold in golds)
        targets = [[(answer, 0) for answer in answers]]
        for name, value in zip(names.split(), (exact, best, (exact + best) / 2), strict=False):
            score = METRICS[name](targets, [guess])
            assert score == pytest.approx(value), (answers, guess)


@pytest.mark.parametrize('text, tokens', [
    ('于1,000.5米处v1.0。', '于 1,000.5 米 处 v1.0'),
    ('a,b (20%)', 'a , b ( 20 % )'),
    ("john's", "john 's"),
    ('龙…—龙', '龙 … — 龙'),
    ('  ，', ''),
])
def test_words_in_chinese_are_those_of_nltk(text, tokens):
    """Expected: what NLTKWordTokenizer of nltk 3.9 makes of the parts between Chinese characters."""
    assert finetune.chinese_tokens(text) == tokens.split()


# ---- trials ----

HEAD = 'text,class\n'
GOOD = HEAD + ''.join(f'a {i},{("red", "green")[i % 2]}\n' for i in range(200))
FAST = {'cola', 'stsb', 'mnli', 'squad2', 'multirc', 'chid', 'c3'}      # each of the others is like one


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))
                                  for name in PUBLISHED])
def test_every_task_from_its_records_to_its_predictions(name, trial):
    task = TASKS[name]
    result = trial(name, predict='test' if task.test else '')
    columns = [name, 'mnli_mm'] if name == 'mnli' else [name]
    assert [*result['scores']] == [*result['majority']] == columns
    assert result['n'][name] == ([24, 12] if name == 'chid' else [12, 6])

    for stem in columns + [f'test_{column}' for column in columns if task.test]:
        path, = result['folder'].glob(f'{stem}.*')
        if path.suffix == '.tsv':
            frame = pd.read_csv(path, sep='\t', dtype=str)
            assert [*frame.columns, *frame['index']] == ['index', 'prediction', *'012345']
            assert {*frame.prediction} <= {*task.labels} or name == 'stsb'
        elif path.suffix == '.json':
            first, *_ = json.loads(path.read_text())
            assert first == ('#idiom000000#' if name == 'chid' else 'Q0')
        else:
            frame = pd.read_json(path, lines=True)
            assert [*frame] == ['idx' if name in ('boolq', 'multirc') else 'id', 'label']
            assert len(frame) == 6


RECIPE = {
    'epochs': 4, 'total_batch': 8, 'seed': 3,
    'learning_rate': 1e-2, 'warmup_fraction': 0.25,
    'beta1': 0.7, 'beta2': 0.9, 'adam_eps': 1e-3,
    'weight_decay': 0.1, 'grad_clip': 0.5,
    'dropout': 0.0, 'attention_dropout': 0.0,
    'batch_size': 3, 'log_interval': 1,
}


def plain_trial(name, run, data_dir):
    """A trial with RECIPE by hand, a row at a time.

    Returns ([(learning rate, loss)] of each step, parameters).
    """
    given = knobs(data_dir=data_dir)
    model, tokenizer = finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS[name], 3, given)
    features = finetune.load_data(TASKS[name], 'train', tokenizer, 48, given).features

    def loss_of(feature):
        batch = HEADS[TASKS[name].head].collate([feature], 0)
        target, = batch.pop('targets')
        logits = model(**batch)
        if name == 'stsb':
            return (logits[0, 0] - target) ** 2
        if name == 'squad2':                            # of start and of end
            return sum(F.cross_entropy(logits[k][0], target[k]) for k in (0, 1)) / 2
        return F.cross_entropy(logits[0], target[0] if name == 'c3' else target)

    optimizer = train.make_optimizer(model, 1e-2, (0.7, 0.9), 1e-3, 0.1, CPU)           # see test_train.py
    steps = []
    for epoch in range(4):
        order = train.shuffled(range(22), 22, 3, epoch)
        for batch in np.split(order, [8, 16]):
            step = len(steps)                           # of 12; 3 of them are warmup
            rate = 1e-2 * min((step + 1) / 3, (12 - step) / 9)
            for group in optimizer.param_groups:
                group['lr'] = rate
            optimizer.zero_grad()
            loss = sum(loss_of(features[i]) for i in batch) / len(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            steps.append((rate, loss.item()))
    return steps, model.state_dict()


@pytest.mark.parametrize('name', ['rte', 'stsb', 'c3', 'squad2'])
def test_every_head_learns_as_without_padding(name, trial, run, tmp_path, monkeypatch):
    seeds = []                                          # of dropout, which is 0 here
    monkeypatch.setattr(train, 'seed_step', lambda seed, step, runtime: seeds.append((seed, step)))
    write_copy(tmp_path, name, made(name, 22, 8))
    steps, trained = plain_trial(name, run, str(tmp_path))
    folder = trial(name, **RECIPE, data_dir=tmp_path)['folder']
    logged = [(line['lr'], line['loss']) for line in train.read_metrics(folder) if line['kind'] == 'train']
    assert np.allclose(logged, steps)
    assert seeds == [(3, step) for step in range(12)]
    assert same(parameters(folder), trained, atol=1e-5)


def test_the_first_best_epoch_is_kept(trial, tmp_path, monkeypatch):
    """At a constant rate, a trial of two epochs is the beginning of one of four. The majority is of train."""
    splits = made('rte', 22, 8)
    splits['validation'][0]['label'] = 1                # 5 of 8; in train 0 is the first of equals
    write_copy(tmp_path, 'rte', splits)
    given = {**RECIPE, 'schedule': 'constant', 'warmup_fraction': 0, 'data_dir': tmp_path}
    two = trial('rte', 'two', **{**given, 'epochs': 2})
    assert two['majority']['rte']['accuracy'] == 3 / 8
    scores = itertools.chain((0.2, 0.7, 0.7, 0.1), itertools.repeat(0.5))
    monkeypatch.setitem(METRICS, 'accuracy', lambda targets, predictions: next(scores))
    kept = trial('rte', keep_best=True, **given)
    assert same(parameters(kept['folder']), parameters(two['folder']))


def test_the_same_command_gives_the_same_weights(trial):
    """What is not in the recipe changes nothing, each of the others does."""
    first = parameters(trial('rte')['folder'])
    again = parameters(trial('rte', 'again', log_interval=1)['folder'])
    assert same(first, again)
    recipe = {
        'seed': 2,
        'dropout': 0.5,
        'attention_dropout': 0.5,
        'train_samples': 9,
        'pooling': 'first',
        'schedule': 'constant',
        'overrides': 'rte.learning_rate=1e-3',
    }
    for knob, value in recipe.items():
        other = parameters(trial('rte', knob, **{knob: value})['folder'])
        assert not same(first, other), knob


def test_an_override_is_of_its_task_alone():
    command = knobs(overrides='cola.learning_rate=1e-3 cola.metric=accuracy mrpc.epochs=5')
    for name, *expected in (('cola', 1e-3, 3, 'accuracy'), ('mrpc', 2e-5, 5, 'f1_accuracy'),
                            ('stsb', 2e-5, 3, 'pearson_spearman')):
        _, found = finetune.task_and_knobs(name, command)
        assert [found.learning_rate, found.epochs, found.metric] == expected


def test_fewer_examples_are_a_choice_in_the_order_of_the_split(copies):
    """The same for every seed of a command."""
    for seed in (1, 2):
        command = knobs(data_dir=copies, train_samples=5, eval_samples=2, seed=seed)
        for split, limit, n in (('train', 5, 12), ('validation', 2, 6), ('test', 6, 6)):
            few = finetune.load_examples(TASKS['rte'], split, command)
            assert [example.id for example in few] == sorted(train.shuffled(range(limit), n, 0, 0))


def test_runs_and_steps_have_folders_of_their_own(tune, run, tmp_path):
    """The step of a run is that of its newest checkpoint. A run may be in compare, too, but not another one
    of its name, which would have its folder.
    """
    newest = pretrained(tmp_path / 'base', step=7, seed=1)
    earlier = f'{newest}/ckpt_0000004.pt'
    shutil.copy(f'{run}/ckpt_0000003.pt', earlier)
    done = tune(init_from=f'{newest},{earlier}', compare=newest)
    for step, name in ((7, 'base'), (4, 'base@4')):
        result = json.loads((tmp_path / 'out' / name / 'rte_1' / 'result.json').read_text())
        assert (result['run'], result['step']) == ('base', step)
    # scores and a difference
    assert [row[0] for row in cells(done.out, 'rte.accuracy')] == ['base', 'base@4', 'base@4']
    assert 'two runs of init_from and compare would have this folder' in refused(tune(compare=newest))


def test_processes_share_the_trials(tune, trial, tmp_path, monkeypatch):
    """Each trial is that of a process alone, whichever process has it; the last one writes the table."""
    with monkeypatch.context() as environment:
        environment.setenv('WORLD_SIZE', '2')
        environment.setenv('MASTER_ADDR', 'localhost')
        for rank, last in (('1', '2 trials of other processes go on'), ('0', 'finished: 3 trials, ')):
            environment.setenv('RANK', rank)
            done = tune(trials=3)
            assert done.out.splitlines()[-1].startswith(last)
    for seed in (2, 3):
        alone = trial('rte', f'alone_{seed}', seed=seed)
        assert same(parameters(tmp_path / 'out' / 'base' / f'rte_{seed}'), parameters(alone['folder']))


def test_two_commands_never_share_a_trial(tune, tmp_path):
    """Another command's process may be in the trial's folder, though no process has the lock of out_dir."""
    folder = tmp_path / 'out' / 'base' / 'rte_1'
    with train.lock_folder(str(folder)):
        assert f'{folder}: another run uses it' in refused(tune())


def test_a_finished_trial_is_kept_and_another_recipe_refused(trial, tune, tmp_path, monkeypatch):
    """Before anything trains. Also one of an earlier revision: with other knobs, without what is no knob."""
    folder = trial('rte')['folder']
    path = folder / 'result.json'
    result = json.loads(path.read_text())
    earlier = {**result, 'recipe': {**result['recipe'], 'noise': ''}}
    for key in ('keep_best', 'examples', 'labels', 'scale', 'model.py'):
        del earlier['recipe'][key]
    other_run = pretrained(tmp_path / 'base', seed=1)
    monkeypatch.setattr(finetune, 'fine_tune', None)    # nothing is trained
    for kept in (earlier, result):
        write_json(path, kept)
        assert tune(dtype='auto').code == 0
        for changes, message in (({'epochs': 2, 'tasks': 'cola,rte'}, 'epochs=1, this run has epochs=2'),
                                 ({'keep_best': True}, 'keep_best=False, this run has keep_best=True'),
                                 ({'init_from': other_run}, 'other parameters')):
            assert message in refused(tune(**{'seed': 7, **changes}))
        assert json.loads(path.read_text()) == kept
    assert 'dtype=float32, this' in refused(tune(dtype='bfloat16'))
    assert 'has block_size=0, this run has' in refused(tune(init_from=folder, epochs=0, block_size=96))
    monkeypatch.setattr(train, 'code_digests', lambda *files: {'finetune.py': 'changed'})
    assert 'finetune.py=changed' in refused(tune(seed=7))
    path.write_text('{"scores": {}}')
    assert 'result.json: damaged: remove it' in refused(tune(seed=7))


def numbers(factor):
    return HEAD + ''.join(f'the river {i},{factor * (i % 7)}\n' for i in range(30))


@pytest.mark.parametrize('kind, name, before, after', [
    ('classes', 'train', GOOD, GOOD.replace('red', 'rot')),             # the indices are the same
    ('numbers', 'train', numbers(1), numbers(2)),       # the standardized numbers are the same, to the bit
    ('classes', 'dev', GOOD, GOOD.replace('a 1,', 'b 1,')),
])
def test_another_file_is_another_recipe(kind, name, before, after, trial, tune, files):
    given = {'label_kind': kind, **files(train=before)}
    trial('custom', **{**given, **files(**{name: before})})
    done = tune(tasks='custom', seed=2, **{**given, **files(**{name: after})})
    assert 'choose another out_dir' in done.err


def test_a_finished_trial_is_evaluated_by_its_own_recipe(trial, run, files, tmp_path):
    """Every predicted number stays, whatever the command says, and in whatever scale a new dev_file is.

    Neither the file nor the folder of the training is needed. Few knobs may change, as the threshold of no
    answer.
    """
    first = trial('custom', init_from=f'{run}/ckpt_0000003.pt', label_kind='numbers', pooling='layerwise',
                  block_size=40, seed=2, **files(train=numbers(1.5), dev=numbers(1.5)))
    (tmp_path / 'train.csv').write_text('another file of this name')
    changes = {'epochs': 0, 'predict': 'test', 'null_threshold': 1.0,
               **files('.tsv', dev=numbers(1e3).replace(',', '\t'))}
    again = trial('rte', 'again', init_from=first['folder'], trials=4, **changes)
    before, after = (pd.read_json(result['folder'] / 'custom.jsonl', lines=True) for result in (first, again))
    assert after.equals(before)
    assert 3 < before.label.mean() < 6                  # in the scale of train_file
    for key in ('n', 'run', 'step', 'seed', 'task', 'model', 'majority'):
        assert again[key] == first[key]
    assert again['scores']['custom'] == pytest.approx(first['scores']['custom'])
    assert again['folder'] == tmp_path / 'again' / 'base@3' / 'custom_2'
    assert again['recipe'] == {**first['recipe'], **changes, 'examples': again['recipe']['examples']}
    assert '30 of 30 dev sequences are in the training set too' in again['printed'].err


def test_a_file_is_labelled_by_a_trial_alone(trial, tune, files, tmp_path):
    """Records stay as they are, to the digit; classes have names and probabilities, predictions stay."""
    folder = trial('custom', **files(train=GOOD))['folder']
    (tmp_path / 'train.csv').unlink()
    command = {'init_from': folder, 'out_dir': tmp_path / 'mine'}

    def labelled(name, text):
        (tmp_path / name).write_bytes(text.encode())
        done = tune(predict=tmp_path / name, **command)
        written = tmp_path / 'mine' / 'base' / 'custom_1' / f'predicted_{name}'
        assert done.out == f'4 records with their predictions: {written}\n'
        return written.read_bytes().decode()

    texts = ['NA', 'a, river', '"a" b', '']
    records = [{'number': 1 / 3e12, 'text': text, 'class': 'pink'} for text in texts]
    rows = [*map(json.loads, labelled('d.jsonl', '\n'.join(map(json.dumps, records))).splitlines())]
    model, tokenizer, content = train.load(str(folder))
    new = [',prediction,probability,p_green,p_red']     # cells
    for row, record, ids in zip(rows, records, tokenizer.encode(texts), strict=True):
        chances = model(torch.tensor([[2, *ids, 3]]))[0].softmax(0)
        label = content['labels'][chances.argmax()]
        green, red = chances.tolist()
        added = {'probability': max(green, red), 'p_green': green, 'p_red': red}
        found = {key: row.pop(key) for key in added}
        assert found == pytest.approx(added, abs=1e-6)
        assert row == {**record, 'prediction': label}
        new.append(','.join(['', label, *map(str, found.values())]))

    form = ('\ufeff,text,note,note{}\r\n1,NA,x,{}\r\n2,"a, river",y,z{}\r\n'     # {}: where new cells belong
            '3,"""a"" b",,{}\r\n4,,,{}\r\n')
    text = form.format(*5 * [''])
    text = text.replace('1,NA,x,\r', '1,NA,x\r')        # a row that lacks a cell
    assert labelled('E.CSV', text) == form.format(*new)
    assert 'predicted_E.CSV is there already' in refused(tune(predict=tmp_path / 'E.CSV', **command))


@pytest.mark.parametrize('first, name, has_same_labels', [
    ('squad1', 'qqp', False),                           # start and end have the shape of two classes
    ('rte', 'qnli', True),
    ('stsb', 'c3', False),                              # both have one logit and no labels
])
def test_a_trial_goes_on(first, name, has_same_labels, trial, run):
    """Its head only for the same labels, else it starts at random; its encoder and pooler for any."""
    folder = trial(first)['folder']
    trained = parameters(folder)
    ours, new = (finetune.make_model(path, TASKS[name], 1, knobs())[0].state_dict()
                 for path in (f'{folder}/model.pt', f'{run}/ckpt_0000003.pt'))
    for key, x in ours.items():
        is_new = key.startswith('classifier.') and not has_same_labels
        assert torch.equal(x, new[key] if is_new else trained.get(key, new[key])), key


@pytest.mark.parametrize('given, message', [
    ({'overrides': 'rte.train_file=3'}, 'train_file is the same for all tasks of a command'),
    ({'overrides': 'rte.epochs=0'}, 'epochs=0 must be finite and at least 1'),
    ({'epochs': 0}, 'no finished trial: name OUT_DIR'),
    ({'learning_rate': 1e38, 'epochs': 4}, 'rte_1: a loss or gradient after step 0 is not finite'),
    # otherwise the scores of the hub's examples would be taken for those of the file
    ({'train_file': 'mine.csv'}, 'mine.csv: only custom and SQuAD read a file, not rte'),
])
def test_a_mistake_on_the_command_line_is_one_line(given, message, tune):
    assert message in refused(tune(**given))


# ---- files of your own ----

@pytest.fixture
def own(files):
    """own(train=rows, dev=rows, ...) -> the task `custom`, [(text, label)] of train and of dev"""
    def make(suffix='.csv', label_kind='classes', **rows):
        given = knobs(**files(suffix, **rows), texts='text', label='class', label_kind=label_kind)
        task = finetune.make_task('custom', given)
        splits = [finetune.load_examples(task, split, given) for split in ('train', *task.dev)]
        return task, *([(*example.texts, example.label) for example in split] for split in splits)
    return make


def test_every_format_of_labelled_files(own):
    """Texts NA and null are texts, 01 and 1.0 are not 1, and blank lines are no rows."""
    rows = [('NA', 'not red'), ('null', '01'), ('a, "b"', '1'), ('"c', '1.0'), ('d', 'NA')]
    frame = pd.DataFrame(rows, columns=['text', 'class'])
    commas = frame.to_csv(index=False)
    lines = frame.to_json(orient='records', lines=True)
    formats = {
        '.csv': commas,
        '.CSV': '\ufeff' + commas.replace('\n', '\r\n').replace('d,NA', '\r\nd, NA '),
        '.tsv': ''.join('\t'.join(row) + '\n' for row in [('text', 'class'), *rows]),
        '.jsonl': '\n' + lines.replace('\n', '\n \n\n'),
        '.json': frame.to_json(orient='records'),
    }
    for suffix, text in formats.items():
        task, train_rows, dev_rows = own(suffix, train=text, dev=text)
        assert task.labels == ('01', '1', '1.0', 'NA', 'not red')
        expected = [(text, task.labels.index(label)) for text, label in rows]
        assert train_rows == dev_rows == expected


@pytest.mark.parametrize('labels, scale, targets', [
    ('1 3 5', (3, 2), [-1, 0, 1]),
    ('7', (7, 1), [0]),
])
def test_numbers_are_standardized(labels, scale, targets, own):
    text = HEAD + ''.join(f'a,{label}\n' for label in labels.split())
    task, rows, _ = own(train=text, dev=text, label_kind='numbers')
    assert task.scale == scale
    assert [target for _, target in rows] == targets


def test_a_class_that_one_side_lacks_is_said(trial, tune, files, tmp_path):
    given = files(train=GOOD + 'b,blue\n', dev=HEAD + 'b,red\n')
    first = trial('custom', **given)
    assert "dev.csv dev: no example of the classes ['blue', 'green']" in first['printed'].err
    done = tune(tasks='custom', train_samples=1, out_dir=tmp_path / 'few', **given)
    assert re.search('train.csv train: no example of the classes .*, ', done.err)


def test_classes_that_look_alike_are_said(own, capsys):
    same = ['1.5', '１.50', 'café', 'cafe\u0301', 'Café\u200b', '1e3', '1_000', 'red wine', 'red\xa0 wine']
    labels = [*same, 'C', 'C#', 'nan', '2', 'wine']
    own(train=HEAD + ''.join(f'{label},{label}\n' for label in labels), dev=HEAD + 'a,C\n')
    said = capsys.readouterr().err
    assert f'or are one number: {sorted(same)}' in said


def test_a_seventh_is_held_out_by_its_text(own, files):
    rows = ''.join(f'text {i % 300},{i % 2}\n' for i in range(600))
    _, *splits = own(train=HEAD + rows)
    train_texts, dev_texts = ({text for text, _ in split} for split in splits)
    assert not train_texts & dev_texts
    assert len(train_texts | dev_texts) == 300
    assert 25 < len(dev_texts) < 65
    # of pairs both texts decide
    pairs = files(train='text,other,class\n' + ''.join(f'the same,{i},{i % 2}\n' for i in range(60)))
    command = knobs(**pairs, texts='text,other', label='class')
    task = finetune.make_task('custom', command)
    assert 1 < len(finetune.load_examples(task, 'dev', command)) < 30


@pytest.mark.parametrize('suffix, text, message', [
    ('.csv', HEAD + '"b\n",red\nc,\n\nd\n', "'class' is empty in line 4, line 6; the columns are"),
    ('.csv', 'text,class,class\nb,red,green\n', r"the columns are \['text'\]"),        # which one?
    ('.csv', HEAD + 'a,red\n"b,red\nc,red\n', 'after line 2: Error: unexpected end of data'),
    ('.jsonl', '\n{"text": "b", "class": "a"}\n\n{"text": 5, "class": "a"}', "line 4: 'text' is 5, not"),
    ('.csv', HEAD + 'a,1.5\nb,-1e400\n', "line 3: class='-1e400' must be a finite number"),
])
def test_mistakes_in_a_file_are_one_line(suffix, text, message, own):
    with pytest.raises(UserError, match=message):
        own(suffix, train=text, label_kind='numbers' if '1.5' in text else 'classes')


@pytest.mark.parametrize('name, n_train', [('squad1', 1), ('squad2', 2)])
def test_squad_from_files_of_your_own(name, n_train, trial, tune, files):
    """Questions that cannot train are left out. An answer may come first.

    Of two questions with the same id only one would be written.
    """
    context = 'the river walks'
    questions = []
    for i, answers in enumerate((['the'], ['no'], [])):
        answers = [{'text': text, 'answer_start': 0} for text in answers]
        questions.append({'id': str(i), 'question': 'who ?', 'answers': answers})
    nested = [{'paragraphs': [{'context': context, 'qas': questions}]}]
    flat = [{**question, 'context': context} for question in questions]                 # as in transformers
    flat[0]['answers'], = flat[0]['answers']            # it may be outside of a list
    train_text, dev_text = (json.dumps({'data': data}) for data in (nested, flat))
    result = trial(name, **files('.json', train=train_text, dev=dev_text))
    assert result['n'] == {name: [n_train, 3]}
    twice = json.dumps([*flat, {**flat[0], 'id': 2}])
    assert '2 records have the id 2' in tune(tasks=name, **files('.json', dev=twice)).err


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
    stats = pytest.importorskip('scipy.stats')
    for n in (2, 3, 5, 10):
        values = pd.Series(range(n))
        half = stats.t.ppf(0.975, n - 1) * stats.sem(values)
        assert finetune.spread(values) == f'{values.mean():.2f} ({values.std():.2f}) ± {half:.2f}'


def test_scores_and_differences_that_are_paired_by_seed():
    results = []
    for run_name, percents in (('ours', (70, 74, 90)), ('base', (60, 69))):
        for seed, percent in enumerate(percents, 1):
            results.append({'subfolder': run_name, 'seed': seed, 'n': {'rte': [12, 6]},
                            'scores': {'rte': {'accuracy': percent / 100}},
                            'majority': {'rte': {'accuracy': 0.5}}})
    text = finetune.make_report(results, {'base'})
    assert cells(text, 'rte.accuracy') == [
        ['base', '64.50 (6.36) ± 57.18', '2', '50.0', '12', '6'],
        ['ours', '78.00 (10.58) ± 26.29', '3', '50.0', '12', '6'],
        ['ours', '7.50 (3.54) ± 31.77', '2'],           # of 10 and 5
    ]


@pytest.mark.parametrize('n_classes', [4, 40])
def test_classes_of_your_own_have_a_table(n_classes):
    """Precision, recall and F1 as in scikit-learn, and, of few classes, the confusions, over all seeds."""
    sklearn = pytest.importorskip('sklearn.metrics')
    task = TASKS['custom']._replace(labels=tuple(f'k{i:02}' for i in range(n_classes)))
    targets = rng.integers(0, n_classes - 1, (2, 300))
    guesses = rng.integers(1, n_classes, (2, 300))
    results = [{'subfolder': 'base', 'scores': {}, 'confusions': finetune.confusions(
        task, [Example(0, (), label) for label in target], guess)}
        for target, guess in zip(targets, guesses, strict=True)]        # of each seed
    rows = cells(finetune.make_report(results, set()), 'k')
    both = targets.ravel(), guesses.ravel()
    *rates, _ = sklearn.precision_recall_fscore_support(*both, zero_division=0)
    expected = 100 * np.array(rates).T
    if n_classes == 4:
        expected = np.column_stack([expected, sklearn.confusion_matrix(*both)])
    assert np.array(rows, float) == pytest.approx(expected.round(2))
