"""bench.py: counts, turns and ratios on a fake clock, memory."""
import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import knobs_of
from test_model import COUNTS
from test_train import CPU, MASKS

import bench
import train
from configurator import UserError

SHAPE = {
    'n_layer': 2,
    'n_head': 4,
    'n_embd': 16,
    'n_inner': 32,
}
CONFIG = {**knobs_of(bench), **SHAPE, 'vocab_size': 60, 'device': 'cpu', 'dtype': 'float32'}


def test_counts_are_by_group():
    """README's table has the sums of all attentions, see test_readme.py."""
    knobs = {**CONFIG, 'vocab_size': 30522, 'systems': ['original', 'hf_bert']}
    this_run, *others = bench.params(knobs, CPU)
    assert [row['total'] for row in others] == COUNTS['original']
    assert this_run['position'] == 512 * 16
    assert this_run['attention'] == 2 * 4 * (16 * 16 + 16)


def test_a_timed_step_is_one_of_training(monkeypatch):
    """But for clipping: the same parameters follow."""
    models = []
    make_optimizer = train.make_optimizer
    monkeypatch.setattr(train, 'make_optimizer', lambda model, *rest: models.append(model) or make_optimizer(
        model, 0.1, *rest[1:]))
    bench.make_step('original', 3, 16, CONFIG, CPU)()
    torch.manual_seed(0)
    step = bench.make_step('original', 3, 16, CONFIG, CPU)
    trained = bench.build('original', CONFIG, 16)
    trained.load_state_dict(models[1].state_dict())
    step()
    optimizer = make_optimizer(trained, 0.1, (0.9, 0.999), 1e-12, 0.01, CPU)
    ids, positions, targets = bench.random_batch(3, 16, CONFIG['vocab_size'])
    batch = {'ids': ids, 'positions': positions, 'targets': targets, 'weights': torch.ones(positions.shape)}
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    train.train_step(trained, optimizer, scaler, [batch], positions.numel(), 0, CPU)
    for ours, timed in zip(trained.parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, timed)


def test_systems_take_turns(monkeypatch):
    """Two rounds do not count, then three do; each begins with the next system."""
    calls = []
    # call n takes 2n + 1 seconds
    monkeypatch.setattr(bench.time, 'perf_counter', lambda: len(calls) ** 2)
    steps = [partial(calls.append, name) for name in 'abc']
    seconds = bench.time_in_turn(steps, 3)
    assert ''.join(calls) == 'abc' 'bca' 'cab' 'abc' 'bca'
    assert seconds.tolist() == [[15, 17, 13], [19, 21, 23], [29, 25, 27]]


def test_ratios_are_of_one_round(monkeypatch):
    seconds = np.array([[2.0, 1.0, 6.0], [3.0, 2.0, 3.0], [1.0, 4.0, 8.0]])
    monkeypatch.setattr(bench, 'make_step', lambda *arguments: None)
    monkeypatch.setattr(bench, 'time_in_turn', lambda *arguments: seconds)
    knobs = {**CONFIG, 'systems': ['original', 'shatter', 'hf_bert'], 'lengths': [512], 'batches': [4]}
    rows = pd.DataFrame(bench.speed(knobs, CPU))
    assert [*rows.ms] == [2000, 2000, 6000]
    assert rows['tokens/s'][0] == 1024
    assert [*rows['x original']] == pytest.approx([1, 1.5, 1 / 3])
    assert [*rows['x hf_bert']] == [3, 2, 1]
    assert [*rows['time / original']] == pytest.approx([1, 2 / 3, 3])
    assert [*rows['(time / original)']] == ['1 to 1', '0.5 to 4', '1 to 8']


def test_rows_predict_as_many_tokens_as_in_training():
    for length in 16, 20, 128:
        ids, positions, targets = bench.random_batch(4, length, 60)
        meta = {'special': {'pad': 0}, 'vocab_size': 60}
        masker = train.Masker(SimpleNamespace(meta=meta), {**MASKS, 'block_size': length})
        assert ids.shape == (4, length)
        assert positions.shape == targets.shape == (4, masker.n_positions)


@pytest.mark.parametrize('name, other, tunes', [
    ('original', 'hf_bert', False),
    ('original', 'hf_bert', True),
    ('original', 'original', False),
    ('gau_12k', 'gau_12k', False),
    ('xlnet', 'xlnet', False),
])
def test_two_ways_to_one_loss(name, other, tunes):
    """transformers' BERT has the loss of `original`, all logits have that of the predicted tokens."""
    pytest.importorskip('transformers')
    batch = bench.random_batch(2, 32, 60)
    losses = []
    shapes = []                                         # (B, tokens) whose logits are computed
    full = name == other
    for system, full_logits in (name, False), (other, full):
        config = {**CONFIG, 'finetune': tunes, 'full_logits': full_logits}
        torch.manual_seed(0)
        model = bench.build(system, config, 32).eval()
        if full:
            model.head.register_forward_hook(lambda module, inputs, logits: shapes.append(logits.shape[:2]))
        losses.append(bench.loss_of(system, model, batch, config))
    torch.testing.assert_close(*losses)
    assert shapes == ([(2, 5), (2, 32)] if full else [])


@pytest.mark.parametrize('name, kind', [
    ('original', 'MaskedLM'),
    ('shatter', 'SequenceClassifier'),
    ('gau_12k', 'MaskedLM'),
    ('xlnet_plm', 'PermutationLM'),
    ('hf_bert', 'BertForMaskedLM'),
])
def test_a_step_trains(name, kind, monkeypatch):
    """The model that the name says; transformers builds its own for evaluation, without dropout."""
    pytest.importorskip('transformers')
    config = {**CONFIG, 'dropout': 0.2, 'vocab_size': 20_000, 'finetune': kind == 'SequenceClassifier'}
    torch.manual_seed(0)
    model = bench.build(name, config, 16)
    assert type(model).__name__ == kind
    rates = {value for key, value in vars(model.config).items() if 'dropout' in key}
    assert rates - {None} == {0.2}
    monkeypatch.setattr(bench, 'build', lambda *arguments: model)
    before = {key: p.clone() for key, p in model.named_parameters()}
    bench.make_step(name, 4, 16, config, CPU)()
    assert all(part.training for part in model.modules())
    for key, parameter in model.named_parameters():
        assert parameter.dim() < 2 or not torch.equal(parameter, before[key]), key
        assert parameter.grad is None, key


def test_memory_above_what_was_there():
    """A model with 40 MiB of embeddings has four times that after a step: weights, gradients and two moments.

    The second step has the moments beside the logits and the gradients of both uses of the embeddings. Arrays
    of more than 32 MiB are returned to the system at once.
    """
    config = {**CONFIG, 'vocab_size': 2 ** 17, 'n_embd': 80}
    np.ones(2 ** 26)                                    # 512 MiB, released before the model is built
    assert 5 * 40 < bench.step_memory('original', 2, 16, config) < 400


def test_out_of_memory_is_a_row(monkeypatch):
    """Tian et al. 2021, abstract: what 256 tokens save over 512, so in the row of 512."""
    def peak(name, n, length, config):
        assert os.environ['MALLOC_MMAP_THRESHOLD_'] == '65536'
        if (name, length) == ('gau', 512):
            raise BrokenProcessPool('killed')
        return {'shatter': 3.0, 'gau': 4.0}[name] * length / 256

    monkeypatch.setattr(bench, 'ProcessPoolExecutor', lambda n, context: ThreadPoolExecutor(n))
    monkeypatch.setattr(bench, 'step_memory', peak)
    rows = pd.DataFrame(bench.memory({**CONFIG, 'systems': ['shatter', 'gau'], 'lengths': (256, 512)}, CPU))
    found = rows[['MiB', 'MiB / shatter', 'half as long / MiB']]
    assert found.fillna(0).values.tolist() == [         # 0: none
        [3, 1, 0], [4, 4 / 3, 0], [6, 1, 0.5], [0, 0, 0]]


def test_a_parameter_without_a_group_is_named(monkeypatch):
    """As that of a module that somebody adds; else its group would be a wrong number."""
    monkeypatch.delitem(bench.PARAMETER_GROUPS, 'MLP')
    with pytest.raises(UserError, match="'shared'.*encoder.blocks.0.expand.weight is in no group"):
        bench.group_counts('shared', CONFIG)
