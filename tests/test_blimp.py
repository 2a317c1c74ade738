"""results/blimp.py: scores against a loop over masked sentences, words and punctuation, accuracies, rows."""
import json
from itertools import permutations

import blimp
import pytest
import torch
from conftest import refused, words
from test_export import make_run
from test_finetune import pretrained
from test_train import CPU

import train
from configurator import UserError
from model import PermutationLM

SENTENCES = ['Who has(not) the unreadable coroutines, value?', 'The asynchronous,well,known (32nd) handler.',
             'The value.', 'handlers value the handlers.', 'The values (32nd), handler the asynchronous.']


@pytest.fixture(params=['sentencepiece', 'wordpiece'])
def folder(request, tmp_path):
    """A run of random weights, in which some words of SENTENCES have several tokens."""
    if request.param == 'wordpiece':
        return pretrained(tmp_path / 'run', block_size=64)
    return make_run(tmp_path / 'run', request.getfixturevalue('corpus'), block_size=64, position='rope',
                    norm_place='pre', mlp='swiglu', bias=False)


@pytest.fixture
def loaded(folder):
    """(model, tokenizer) with weights large enough that what else is masked changes a prediction"""
    model, tokenizer, _ = train.load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model, tokenizer


@pytest.fixture
def data_dir(tmp_path):
    """Three sets of pairs, of two phenomena of the paper and one that names none."""
    return write_sets(tmp_path / 'sets', {
        'animate_a': ('s-selection', [('the value', 'the')]),
        'b': ('argument_structure',
              [('the value', 'the'), ('the', 'the value'), ('the', 'The'), ('the', '.')]),
        'further': ('', [('the', 'the value')])})


def write_sets(folder, sets):
    """Write {set: (phenomenon, [(good, bad), ...])} as .jsonl files -> folder as a str"""
    folder.mkdir()
    for name, (term, pairs) in sets.items():
        with open(folder / f'{name}.jsonl', 'w') as file:
            for good, bad in pairs:
                record = {'sentence_good': good, 'sentence_bad': bad, 'linguistics_term': term}
                file.write(json.dumps(record) + '\n')
    return str(folder)


def word_numbers(pieces, tokenizer):
    """Number of each piece's word, from the pieces alone; blimp.py takes the text."""
    numbers = [0]
    for before, piece in zip(pieces, pieces[1:], strict=False):
        continues = before == '\u2581' or (before[-1].isalnum() and piece[0].isalnum())
        if tokenizer.settings['kind'] == 'wordpiece':
            continues = piece.startswith('##')
        numbers.append(numbers[-1] + (not continues))
    return numbers


@torch.no_grad()
def oracle(model, tokenizer, text):
    """Pseudo log-likelihood of a sentence, a token at a time, in float64."""
    special_ids = tokenizer.special_ids
    ids, = tokenizer.encode([text])
    numbers = word_numbers([tokenizer.pieces[token] for token in ids], tokenizer)
    total = 0
    for place, token in enumerate(ids):
        seen = list(ids)
        for later in range(place, len(ids)):
            if numbers[later] == numbers[place]:
                seen[later] = special_ids['mask']
        row = torch.tensor([[special_ids['cls'], *seen, special_ids['sep']]])
        chances = model(row)[0, place + 1].softmax(-1)
        total += chances[token].log().item()
    return total


@pytest.mark.parametrize('batch_size', [1, 64])
def test_scores_are_those_of_a_loop_over_masked_sentences(batch_size, loaded):
    model, tokenizer = loaded
    sentences = blimp.encode(tokenizer, SENTENCES, most=62)
    assert sum(len(ids) - len(set(words)) for ids, words in sentences) > 10     # words of several tokens
    scores = blimp.log_likelihoods(model, tokenizer.special_ids, sentences, batch_size, CPU)
    expected = [oracle(model.double(), tokenizer, text) for text in SENTENCES]
    assert [scores[sentence] for sentence in sentences] == pytest.approx(expected, rel=1e-6)


def test_accuracies_are_means_over_sets(monkeypatch, loaded, data_dir):
    """A tie is not right; sets of unlike size count alike; s-selection is none of the paper's phenomena."""
    model, tokenizer = loaded
    longer_is_better = {sentence: len(sentence[0]) for sentence in
                        blimp.encode(tokenizer, ['the value', 'the', 'The', '.'], most=62)}
    monkeypatch.setattr(blimp, 'log_likelihoods', lambda *arguments: longer_is_better)
    sets = blimp.read_sets(data_dir, 0)
    accuracies = blimp.set_accuracies(model, tokenizer, sets, 1, CPU)
    assert accuracies == {'animate_a': 1, 'b': 0.25, 'further': 0}
    assert blimp.phenomenon_accuracies(accuracies, sets) == {'argument_structure': 0.625, 'further': 0}


def test_a_run_gets_a_row_and_is_not_scored_again(corpus, data_dir, stage, monkeypatch, tmp_path):
    folder = make_run(tmp_path / 'run', corpus)
    out = tmp_path / 'new' / 'rows.jsonl'
    knobs = words(runs=folder, data_dir=data_dir, out=out, device='cpu')
    done = stage('blimp', *knobs)
    assert done.code == 0, done
    row = json.loads(out.read_text())
    assert row['checkpoint'] == train.newest(folder)
    assert (row['step'], row['data'], row['pairs'], row['n_pairs']) == (1, data_dir, 0, 6)
    assert row['sets']['b'] in (0.25, 0.5)              # of two opposite pairs one is right; The is the
    assert row['accuracy'] == pytest.approx(sum(row['sets'].values()) / 3)
    assert f"{100 * row['accuracy']:.2f} % of 6 pairs" in done.out

    with monkeypatch.context() as patch:
        patch.setattr(blimp, 'score_run', None)         # would be called
        assert stage('blimp', *knobs).out == done.out
    assert stage('blimp', *knobs, '--pairs=1').code == 0
    _, row = map(json.loads, out.read_text().splitlines())
    assert (row['pairs'], row['n_pairs']) == (1, 3)


def test_a_run_is_scored_without_dropout(corpus, tmp_path):
    """Half of the activations dropped would turn many of these pairs."""
    path = make_run(tmp_path / 'run', corpus, block_size=64, dropout=0.5, attention_dropout=0.5)
    orders = [' '.join(order) for order in permutations(['the', 'value', 'of', 'an', 'array'])]
    pairs = list(zip(orders[:60], orders[60:], strict=True))
    sets = blimp.read_sets(write_sets(tmp_path / 'sets', {'many': ('', pairs)}), 0)
    found, again = (blimp.score_run(path, sets, 256, CPU) for _ in range(2))
    assert found == again
    assert 0 < found['accuracy'] < 1


def test_a_run_of_another_objective_is_refused(data_dir, stage, tmp_path):
    folder = pretrained(tmp_path / 'plm', kind=PermutationLM, attention='xlnet', position='none')
    knobs = words(runs=folder, data_dir=data_dir, device='cpu', out=tmp_path / 'rows.jsonl')
    line = refused(stage('blimp', *knobs))
    assert 'a PermutationLM; only runs of objective=mlm are scored' in line


@pytest.mark.parametrize('line, message', [
    ('', 'half.jsonl: no pair of sentences in it'),
    ('{"sentence_good": "the"}\n', 'half.jsonl, row 1: sentence_bad is None, it must be a text'),
])
def test_a_set_without_pairs_is_refused_before_hours_of_scoring(line, message, data_dir, tmp_path):
    (tmp_path / 'sets' / 'half.jsonl').write_text(line)
    with pytest.raises(UserError, match=message):
        blimp.read_sets(data_dir, 0)
