"""results/blimp.py: scores against a loop over masked sentences, words and punctuation, accuracies, rows."""
import itertools
import json

import blimp
import pytest
import torch
from conftest import refused, words
from test_export import make_run
from test_finetune import pretrained
from test_train import CPU

import train
from configurator import UserError

SENTENCES = ['Who has(not) the unreadable coroutines, value?', 'The asynchronous,well,known (32nd) handler.',
             'The value.', 'handlers value the handlers.', 'The values (32nd), handler the asynchronous.']


@pytest.fixture(params=['sentencepiece', 'wordpiece'])
def loaded(request, tmp_path):
    """(model, tokenizer), in which some words of SENTENCES have several tokens

    Weights are random, and large enough that what else is masked changes a prediction, as dropout would.
    """
    if request.param == 'wordpiece':
        folder = pretrained(tmp_path / 'run', block_size=64)
    else:
        folder = make_run(tmp_path / 'run', request.getfixturevalue('corpus'), block_size=64, dropout=0.5,
                          position='rope', norm_place='pre', mlp='swiglu', bias=False)
    model, tokenizer, _ = train.load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    return model, tokenizer


@pytest.fixture
def data_dir(tmp_path):
    """Three sets of pairs, of two phenomena of the paper and one that names none."""
    right, wrong, equal = ('the value', 'the'), ('the', 'the value'), ('the', 'The')
    (tmp_path / 'sets').mkdir()
    for name, term, pairs in [
            ('animate_a', 's-selection', [right]), ('b', 'argument_structure', [right, wrong, equal, wrong]),
            ('further', '', [wrong])]:
        lines = [json.dumps({'sentence_good': good, 'sentence_bad': bad, 'linguistics_term': term})
                 for good, bad in pairs]
        (tmp_path / 'sets' / f'{name}.jsonl').write_text('\n'.join(lines))
    return str(tmp_path / 'sets')


def word_numbers(pieces, tokenizer):
    """Number of each piece's word, from the pieces alone; blimp.py takes the text."""
    numbers = [0]
    for before, piece in itertools.pairwise(pieces):
        continues = before == '\u2581' or (before[-1].isalnum() and piece[0].isalnum())
        if tokenizer.settings['kind'] == 'library':
            continues = piece.startswith('##')
        numbers.append(numbers[-1] + (not continues))
    return numbers


@torch.no_grad()
def oracle(model, tokenizer, text):
    """Pseudo log-likelihood of a sentence, a token at a time, in float64."""
    special_ids = tokenizer.special_ids
    [ids] = tokenizer.encode([text])
    numbers = word_numbers([tokenizer.pieces[token] for token in ids], tokenizer)
    total = 0
    for place, token in enumerate(ids):
        seen = [special_ids['mask'] if later >= place and numbers[later] == numbers[place] else other
                for later, other in enumerate(ids)]
        row = torch.tensor([[special_ids['cls'], *seen, special_ids['sep']]])
        chances = model(row)[0, place + 1].softmax(-1)
        total += chances[token].log().item()
    return total


def test_scores_are_those_of_a_loop_over_masked_sentences(loaded):
    model, tokenizer = loaded
    sentences = blimp.encode(tokenizer, SENTENCES, most=62)
    assert sum(len(ids) - len(set(words)) for ids, words in sentences) > 10     # words of several tokens
    scores = blimp.log_likelihoods(model, tokenizer.special_ids, sentences, 3, CPU)
    expected = [oracle(model.double(), tokenizer, text) for text in SENTENCES]
    assert [scores[sentence] for sentence in sentences] == pytest.approx(expected, rel=1e-6)


def longer_is_better(model, special_ids, sentences, batch_size, runtime):
    assert not model.training                           # else there would be dropout
    return {sentence: len(sentence[0]) for sentence in sentences}


def test_a_run_gets_a_row_and_is_not_scored_again(corpus, data_dir, stage, monkeypatch, tmp_path):
    """Accuracies are means over sets, of unlike size too, and a tie is not right.

    Set b has the pairs right, wrong, equal and wrong; s-selection is none of the paper's phenomena.
    """
    monkeypatch.setattr(blimp, 'log_likelihoods', longer_is_better)
    folder = make_run(tmp_path / 'run', corpus)
    out = tmp_path / 'new' / 'rows.jsonl'
    knobs = words(runs=folder, data_dir=data_dir, out=out, device='cpu')
    done = stage('blimp', *knobs)
    assert done.code == 0, done
    assert json.loads(out.read_text()) == {
        'checkpoint': train.newest(folder), 'data': data_dir, 'pairs': 0, 'step': 1, 'n_pairs': 6,
        'accuracy': pytest.approx(1.25 / 3), 'phenomena': {'argument_structure': 0.625, 'further': 0},
        'sets': {'animate_a': 1, 'b': 0.25, 'further': 0}}
    assert '41.67 % of 6 pairs' in done.out
    assert '66.67 % of 3 pairs' in stage('blimp', *knobs, '--pairs=1').out
    monkeypatch.setattr(blimp, 'log_likelihoods', None)         # would be called
    assert stage('blimp', *knobs).out == done.out


def test_a_run_of_another_objective_is_refused(data_dir, stage, tmp_path):
    folder = pretrained(tmp_path / 'plm', objective='plm', attention='xlnet', position='none')
    done = stage('blimp', *words(runs=folder, data_dir=data_dir, out=tmp_path / 'rows.jsonl'))
    assert 'a PermutationLM; only runs of objective=mlm are scored' in refused(done)


def test_a_set_without_pairs_is_refused_before_hours_of_scoring(data_dir, tmp_path):
    (tmp_path / 'sets' / 'half.jsonl').write_text('{"sentence_good": "the"}\n')
    with pytest.raises(UserError, match='half.jsonl, row 1: sentence_bad is None, it must be a text'):
        blimp.read_sets(data_dir, 0)
