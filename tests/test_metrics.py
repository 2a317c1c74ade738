"""METRICS of finetune.py against scikit-learn, scipy and the official definitions, written out again here."""
import random
import re
import string
from collections import Counter

import numpy as np
import pytest

import finetune
from finetune import METRICS, chinese_tokens

random_state = np.random.default_rng(1)
CLASSES = [random_state.integers(0, 2, (2, n)) for n in (1, 2, 3, 10, 1000)] + [
    np.array(pair) for pair in ([[0, 0], [0, 0]], [[1, 1], [1, 1]], [[1, 1, 0], [0, 0, 0]], [[0, 0], [1, 0]])]
NUMBERS = [random_state.normal(size=(2, n)) for n in (2, 3, 50)] + [
    random_state.integers(0, 6, (2, 200)) / 5,                                  # ties, as in STS-B
    random_state.normal(size=(2, 40)) * 1e-6 + 1e3,
    np.array([[1., 2, 3, 4], [1, 1, 1, 4]]), np.array([[5., 1, 3], [-5, -1, -3]])]
ENGLISH = ['the', 'The', 'a', 'an', 'cat', 'Cat', 'cats', 'sat', 'U.S.', 'u.s', "john's", 'x-ray', 'Öl', '  ']
CHINESE = [*'中国北京大学，《》·-。', ' bert ', ' 2018 ', ' BERT ']


@pytest.mark.filterwarnings('ignore:A single label')
@pytest.mark.parametrize('targets, predictions', CLASSES)
def test_classes(targets, predictions):
    sklearn = pytest.importorskip('sklearn.metrics')
    f1 = sklearn.f1_score(targets, predictions, zero_division=0)
    accuracy = sklearn.accuracy_score(targets, predictions)
    expected = {'f1': f1, 'accuracy': accuracy, 'f1_accuracy': (f1 + accuracy) / 2,
                'matthews': sklearn.matthews_corrcoef(targets, predictions)}
    for name, value in expected.items():
        assert METRICS[name](targets, predictions) == pytest.approx(value, abs=1e-12), name


def multirc_oracle(ids, targets, predictions):
    """(F1a, EM) as SuperGLUE defines them: F1 of all answers, and questions with every answer right."""
    sklearn = pytest.importorskip('sklearn.metrics')
    questions = {}
    for (paragraph, question, _), target, guess in zip(ids, targets, predictions, strict=True):
        questions.setdefault(f'{paragraph}-{question}', []).append(target == guess)
    right = sum(sum(answers) == len(answers) for answers in questions.values())
    return sklearn.f1_score(targets, predictions), right / len(questions)


def test_multirc():
    """Questions of different paragraphs share numbers; answers of one need not be neighbours."""
    pick = random.Random(3)
    ids = [(paragraph, question, answer) for paragraph in range(30) for question in range(3)
           for answer in range(pick.randint(1, 4))]
    pick.shuffle(ids)
    targets = [pick.randint(0, 1) for _ in ids]
    predictions = [target if pick.random() < 0.8 else 1 - target for target in targets]
    f1a, exact = multirc_oracle(ids, targets, predictions)
    assert METRICS['f1a'](targets, predictions) == pytest.approx(f1a)
    assert METRICS['exact_question'](targets, predictions, ids) == pytest.approx(exact) and 0.3 < exact < 0.8
    examples = [finetune.Example(item, (), target) for item, target in zip(ids, targets, strict=True)]
    assert finetune.score('multirc', examples, predictions) == pytest.approx(
        {'accuracy': np.mean(np.equal(targets, predictions)), 'f1a': f1a, 'exact_question': exact})
    assert METRICS['exact_question']([1, 0, 1, 1], [1, 0, 0, 1], [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
                                     ) == pytest.approx(2 / 3)


@pytest.mark.parametrize('targets, predictions', NUMBERS)
def test_correlations(targets, predictions):
    scipy = pytest.importorskip('scipy.stats')
    pearson = scipy.pearsonr(targets, predictions)[0]
    spearman = scipy.spearmanr(targets, predictions)[0]
    expected = {'pearson': pearson, 'spearman': spearman, 'pearson_spearman': (pearson + spearman) / 2}
    for name, value in expected.items():
        assert METRICS[name](targets, predictions) == pytest.approx(value, abs=1e-9), name
        assert METRICS[name](predictions, targets) == pytest.approx(value, abs=1e-9), name


@pytest.mark.parametrize('constant', [0.0, 0.1, 1e9 / 3])
@pytest.mark.parametrize('name', ['matthews', 'pearson', 'spearman', 'pearson_spearman'])
def test_constants_have_no_correlation(name, constant):
    assert METRICS[name](np.arange(7.), np.full(7, constant)) == 0
    assert METRICS[name](np.full(7, constant), np.arange(7.)) == 0


@pytest.mark.parametrize('name', METRICS)
def test_range_and_types(name):
    """A float everywhere, 1 for what is right, 0 for nothing."""
    right = [('ab',), ('中国',)] if name.endswith(('exact', 'words', 'chinese', 'characters')) else [1, 0]
    guesses = [item[0] if isinstance(item, tuple) else item for item in right]
    assert type(METRICS[name](right, guesses)) is float
    assert METRICS[name](right, guesses) == pytest.approx(1, abs=1e-12)
    assert type(METRICS[name]([], [])) is float
    assert METRICS[name]([], []) == 0


def test_by_hand():
    targets, predictions = [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]       # 2 hits, 1 false alarm, 1 miss
    assert METRICS['accuracy'](targets, predictions) == pytest.approx(4 / 6)
    assert METRICS['f1'](targets, predictions) == pytest.approx(4 / 6)
    assert METRICS['matthews'](targets, predictions) == pytest.approx((2 * 2 - 1 * 1) / 9)
    assert METRICS['spearman']([1, 2, 3], [1, 1, 9]) == pytest.approx(3**.5 / 2)     # ranks 1.5, 1.5, 3


@pytest.mark.parametrize('answers, prediction, exact, f1', [
    (('the Cat.',), 'cat', 1, 1),
    (('cat', 'black cat'), 'a black cat', 1, 1),                        # the best answer counts
    (('black cat',), 'cat sat', 0, 1 / 2),
    (('U.S.',), 'us', 1, 1),
    (('theory of a mind',), 'theory of mind', 1, 1),
    (('to be or not to be',), 'to be be be', 0, 2 * 3 / 10),            # as often as they are in both
    ((), '', 1, 1), ((), 'cat', 0, 0), (('cat',), '', 0, 0),
    (('the',), '', 1, 1), (('the', 'cat'), '', 0, 0),                   # an answer of articles is none
    ((), 'The', 1, 1),
])
def test_squad_by_hand(answers, prediction, exact, f1):
    assert METRICS['exact']([answers], [prediction]) == exact
    assert METRICS['f1_words']([answers], [prediction]) == pytest.approx(f1)


@pytest.mark.parametrize('answers, prediction, exact, f1', [
    (('北京大学',), '北京大学。', 1, 1),
    (('北京大学',), '京大', 0, 2 * 2 / 6),
    (('北京大学',), '北大学京', 0, 2 * 2 / 8),                          # the run 大学; as a bag it would be 1
    (('《BERT》 2018年',), 'bert 2018年', 1, 1),
    (('bert模型',), 'BERTs模型', 0, 2 * 2 / 6),                         # a word is one token
    (('清华', '北大'), '北大', 1, 1),
    (('清华',), '', 0, 0), (('清华',), '北大', 0, 0), (('中 国',), '中国', 0, 1),
])
def test_cmrc_by_hand(answers, prediction, exact, f1):
    assert METRICS['exact_chinese']([answers], [prediction]) == exact
    assert METRICS['f1_characters']([answers], [prediction]) == pytest.approx(f1)
    assert METRICS['exact_f1_chinese']([answers], [prediction]) == pytest.approx((exact + f1) / 2)


@pytest.mark.parametrize('text, tokens', [
    ('于1,000.5米处v1.0。', ['于', '1,000.5', '米', '处', 'v1.0']), ('U.S.人', ['u.s', '.', '人']),
    ('a,b (20%)', ['a', ',', 'b', '(', '20', '%', ')']), ('0.5-1', ['0.51']), ('ア・イの', ['ア・イの']),
    ("john's", ['john', "'s"]), ('龙…—龙', ['龙', '…', '—', '龙']), ('  ，', []),
])
def test_words_in_chinese_are_those_of_nltk(text, tokens):
    """Expected values: what NLTKWordTokenizer of nltk 3.9 makes of the parts between Chinese characters."""
    assert chinese_tokens(text) == tokens


# the official definitions a second time, as plainly as can be

def squad_oracle(answers, prediction):
    """(EM, F1) of one question."""
    def clean(text):
        text = ''.join(c for c in text.lower() if c not in set(string.punctuation))
        return [word for word in re.sub(r'\b(a|an|the)\b', ' ', text).split() if word]

    def f1(a, b):
        same = sum(min(n, b.count(word)) for word, n in Counter(a).items())
        if not a or not b:
            return float(a == b)
        precision, recall = same / len(b), same / len(a)
        return 2 * precision * recall / (precision + recall) if same else 0.0
    golds = [clean(item) for item in answers if clean(item)] or [[]]
    guess = clean(prediction)
    return max(float(gold == guess) for gold in golds), max(f1(gold, guess) for gold in golds)


def cmrc_oracle(answers, prediction):
    """(EM, F1) of one question; its words must be between blanks or Chinese characters."""
    marks = list('-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』')

    def clean(text):
        return ''.join(c for c in text.lower().strip() if c not in marks)

    def cut(text):
        return re.sub('([\u4e00-\u9fa5])', r' \1 ', clean(text)).split()

    def f1(a, b):
        runs = [j - i for i in range(len(a)) for j in range(i + 1, len(a) + 1)
                if any(a[i:j] == b[k:k + j - i] for k in range(len(b)))]
        precision, recall = max(runs, default=0) / max(len(b), 1), max(runs, default=0) / max(len(a), 1)
        return 2 * precision * recall / (precision + recall) if runs else 0.0
    return (max(float(clean(item) == clean(prediction)) for item in answers),
            max(f1(cut(item), cut(prediction)) for item in answers))


def make_questions(vocabulary, joint, count, empty, seed):
    """Lists (targets, predictions); the prediction shares words with an answer, or is one, or is empty."""
    pick = random.Random(seed)

    def text(most):
        return joint.join(pick.choices(vocabulary, k=pick.randint(1, most)))
    targets = [() if pick.random() < empty else tuple(text(6) for _ in range(pick.randint(1, 3)))
               for _ in range(count)]
    predictions = [pick.choice([pick.choice(answers or ('',)), text(6), text(2), '' if empty else text(1)])
                   for answers in targets]
    return targets, predictions


@pytest.mark.parametrize('names, oracle, vocabulary, joint, empty', [
    (('exact', 'f1_words'), squad_oracle, ENGLISH, ' ', 0.4),
    (('exact_chinese', 'f1_characters'), cmrc_oracle, CHINESE, '', 0),
])
def test_spans_against_the_oracle(names, oracle, vocabulary, joint, empty):
    targets, predictions = make_questions(vocabulary, joint, 600, empty, seed=1)
    pairs = [(answers, guess) for answers, guess in zip(targets, predictions, strict=True)
             if oracle is squad_oracle or all(map(chinese_tokens, answers))]    # CMRC has none of punctuation
    scores = np.array([oracle(*pair) for pair in pairs])
    assert len(pairs) > 400 and 0.1 < scores[:, 0].mean() < scores[:, 1].mean() < 0.9
    for column, name in enumerate(names):
        for pair, score in zip(pairs, scores[:, column], strict=True):
            assert METRICS[name](*([item] for item in pair)) == pytest.approx(score), pair
        assert METRICS[name](*zip(*pairs, strict=True)) == pytest.approx(scores[:, column].mean())
