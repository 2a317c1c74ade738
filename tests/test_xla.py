"""The seam of train.py on XLA's CPU device: results are the CPU's, it compiles once and reads rarely.

    $ .ci/xla                   # makes an environment with torch_xla and runs these tests there

Everywhere else they skip. The device is made here, before any test's backward pass: torch_xla 2.9 cannot
train after one on the CPU that came earlier.
"""
import copy
import dataclasses
import math
import os
import shutil
import signal

import pytest
import torch
from conftest import torchrun
from test_model import (CORE, GATED, KEEP, ORDER, PREDICTED, SMALL, SYSTEMS, XLNET, difference, each, small,
                        system)
from test_train import CPU, happening, metrics, same_run

import train

os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=1')        # compile in half the time
try:
    import torch_xla
    import torch_xla.debug.metrics as counters
    RUNTIME = train.make_runtime('xla', 'float32', 16)
except ImportError:
    torch_xla = None
pytestmark = [pytest.mark.xla, pytest.mark.skipif(torch_xla is None, reason='needs torch_xla: see .ci/xla')]
KNOBS = {
    'device': 'xla', 'attention': 'shatter', 'position': 'none', 'batch_size': 4, 'max_iters': 12,
    'learning_rate': 0.02, 'warmup_iters': 6, 'log_interval': 3, 'eval_interval': 6, 'checkpoint_interval': 4,
}


def build(objective='mlm', **settings):
    torch.manual_seed(1)
    config = small(**{'dropout': 0.0, 'attention_dropout': 0.0, **settings})
    return train.MODEL[objective](config)


def batch(seed=0, **more):
    """Micro-batch as Loader's, on the CPU, but for weights."""
    ids = torch.randint(SMALL['vocab_size'], (4, 6), generator=torch.Generator().manual_seed(seed))
    targets = ids.gather(1, PREDICTED)
    return {'ids': ids, 'positions': PREDICTED, 'targets': targets, **more}


def two_batches(seed):
    """The micro-batches of a step."""
    return [batch(number, weights=torch.ones(4, 2)) for number in (seed, seed + 1)]


@each([*SYSTEMS, *GATED, {**XLNET, 'objective': 'plm'}])
def test_losses_and_gradients_are_the_cpus(settings):
    """And no operator is computed on the host; rows with and without padding in one graph."""
    counters.clear_all()
    ours = build(**settings)
    theirs = copy.deepcopy(ours).to(RUNTIME.device)
    more = {'order': ORDER} if 'objective' in settings else {}
    losses = []
    for model, runtime in ((ours, CPU), (theirs, RUNTIME)):
        batches = batch(0, **more), batch(1, **more, attention_mask=KEEP)
        rows = torch.cat([model(**runtime.move(each)) for each in batches])
        rows.mean().backward()
        runtime.sync()
        losses.append(rows.detach().cpu())
    assert difference(*losses) < 1e-4
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or difference(one.grad, other.grad.cpu()) < 1e-4, name
    assert not [name for name in counters.counter_names() if name.startswith('aten::')]


@each(CORE)
def test_bfloat16_is_near(settings):
    ours = build(**settings)
    theirs = copy.deepcopy(ours).to(RUNTIME.device)
    expected = ours(**batch()).mean()
    with torch.no_grad(), dataclasses.replace(RUNTIME, dtype=torch.bfloat16).autocast():
        loss = theirs(**RUNTIME.move(batch())).mean().cpu()
    assert 0 < abs(loss - expected) < 0.02


@each([{}, system('shatter', 'none')])
def test_the_host_reads_where_it_logs_alone(settings):
    """8 steps with warmup, accumulation and dropout, logged after steps 4 and 7."""
    counters.clear_all()
    model = build(**settings, dropout=0.1, attention_dropout=0.1).to(RUNTIME.device)
    optimizer = train.make_optimizer(model, 1e-3, (0.9, 0.999), 1e-8, 0.01, RUNTIME)
    scaler = torch.amp.GradScaler('xla', enabled=False)
    reads = []
    for step in range(8):
        train.seed_step(1, step, RUNTIME)
        train.set_lr(optimizer, train.get_lr(step, 1e-2, 0.0, 4, 8, 'linear'), RUNTIME)
        loss, norm = train.train_step(model, optimizer, scaler, two_batches(2 * step), 15.0 + step, 1.0,
                                      RUNTIME)
        if step in (4, 7):
            assert math.isfinite(loss.item() + norm.item())
        n_read, *_ = counters.metric_data('TransferFromDeviceTime') or [0]
        reads.append(n_read)
    assert [step for step in range(1, 8) if reads[step] > reads[step - 1]] == [4, 7], reads


def test_a_run_is_steady_and_goes_on_as_if_undisturbed(run, monkeypatch):
    """Graphs are counted at each log line: none is new after step 6.

    The rate passes 0.01, the decay: scalars of equal values were once one input, and so another graph.
    """
    graphs = {}
    write = train.Log.write

    def counting(self, kind, step, **values):
        graphs[kind, step] = counters.counter_value('UncachedCompile')
        write(self, kind, step, **values)

    counters.clear_all()
    with monkeypatch.context() as patch:
        patch.setattr(train.Log, 'write', counting)
        run('whole', **KNOBS)
    assert 0 < graphs['val', 6] == graphs['train', 9] == graphs['val', 12], graphs
    with happening(monkeypatch, 'seed_step', 6, signal.SIGTERM):
        run('cut', 128 + signal.SIGTERM, **KNOBS)
    run('cut', **KNOBS)
    same_run('whole', 'cut')


def test_the_cpu_goes_on_from_xlas_checkpoint_and_xla_from_the_cpus(run):
    """Without dropout from step 8 on, both end with the same losses; then XLA takes the CPU's run."""
    run('whole', **KNOBS, milestones=8)
    still = {**KNOBS, 'dropout': 0, 'attention_dropout': 0}
    for device in ('cpu', 'xla'):
        os.mkdir(device)
        shutil.copy('whole/ckpt_0000008.pt', device)
        run(device, **{**still, 'device': device})
    ours, theirs = (metrics(device, 'val')[-1] for device in ('cpu', 'xla'))
    assert ours['loss'] == pytest.approx(theirs['loss'], abs=1e-4)
    run('cpu', **{**still, 'max_iters': 15})
    assert metrics('cpu', 'train')[-1]['step'] == 15


def test_torchrun_with_one_process():
    """DistributedDataParallel on a group of one: gradients are the plain model's."""
    done = torchrun(os.path.abspath(__file__), n=1, timeout=600)
    assert done.code == 0, done
    assert 'the same' in done.out, done


def wrapped_twin():
    """What the test above starts: an update of the plain model, and of the wrapped one as of two ranks."""
    train.dist.init_process_group('xla', 'xla://')
    group = train.dist.new_group(backend='gloo')
    scaler = torch.amp.GradScaler('xla', enabled=False)
    after = []
    for world in (1, 2):
        runtime = dataclasses.replace(RUNTIME, world=world, cpu_group=group if world > 1 else None)
        model = raw = build().to(runtime.device)
        if world > 1:
            model = train.DistributedDataParallel(raw, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(raw.parameters(), 1.0)
        # DDP divides by 1 here
        train.train_step(model, optimizer, scaler, two_batches(0), 16.0 * world, 0.0, runtime)
        after.append(torch.cat([x.detach().cpu().flatten() for x in raw.parameters()]))
    assert torch.allclose(*after, atol=1e-6)
    print('the same')


if __name__ == '__main__':
    wrapped_twin()
