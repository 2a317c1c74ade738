"""The seam of train.py on XLA's CPU device: results are the CPU's, it compiles once and reads rarely.

    $ .ci/xla                   # makes an environment with torch_xla and runs these tests there

Everywhere else they skip, but for the first ones. The device is made here, before any test's backward pass:
torch_xla 2.9 cannot train after one on the CPU that came earlier.
"""
import copy
import dataclasses
import functools
import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from conftest import ROOT, real_stage, refused, stage, tiny, torchrun, train
from published import publish
from test_finetune import QUICK
from test_train import KILL, metrics, same_checkpoint

import train as source
from model import (
    ALLOWED_POSITIONS,
    ATTENTION,
    NORMALISER,
    POOLING,
    POSITION,
    EncoderConfig,
    MaskedLM,
    MultipleChoice,
    PermutationLM,
    SequenceClassifier,
    SpanClassifier,
)

os.environ.setdefault('PJRT_DEVICE', 'CPU')
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=1')        # compile in half the time
try:
    import torch_xla
    import torch_xla.debug.metrics as counters
    RUNTIME = source.join('xla', 'float32')
except ImportError:
    torch_xla = None
ON_CPU = source.Runtime(torch.device('cpu'))
needs_xla = pytest.mark.skipif(torch_xla is None, reason='needs torch_xla: .ci/xla installs and runs it')
SHAPE = {'vocab_size': 50, 'block_size': 16, 'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32,
         'dropout': 0.0, 'attention_dropout': 0.0}
ON_XLA = ['--device=xla', '--max_iters=12', '--batch_size=4', '--warmup_iters=6', '--log_interval=3',
          '--eval_interval=6', '--checkpoint_interval=4', '--attention=shatter', '--position=none']
slow = functools.partial(stage, timeout=900)            # compilation takes seconds a graph
MODELS = MaskedLM, PermutationLM, SequenceClassifier, SpanClassifier, MultipleChoice
SYSTEMS = [
    *({'attention': attention, 'position': position} for attention in ATTENTION
      for position in ALLOWED_POSITIONS.get(attention, POSITION)),
    *({'attention': 'gau', 'position': 'rope', 'normaliser': name} for name in NORMALISER),
    {'attention': 'shatter', 'position': 'none', 'recompute': True},
    {'attention': 'pairwise', 'pair_rank': 2},
    {'attention': 'xlnet', 'position': 'none', 'objective': 'plm'},
]


def name_of(system):
    return '-'.join(map(str, system.values()))


def build(attention='original', position='absolute', objective='mlm', **knobs):
    torch.manual_seed(1)
    return source.OBJECTIVE[objective][0](EncoderConfig(attention=attention, position=position,
                                                        **{**SHAPE, **knobs}))


def batch(seed=0, objective='mlm', padded=False, n=4):
    """Micro-batch as Loader's, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SHAPE['vocab_size'], (n, 16), generator=generator)
    positions = torch.rand(n, 8, generator=generator).argsort(1)[:, :4]
    found = {'ids': ids, 'positions': positions, 'targets': ids.gather(1, positions)}
    if objective == 'plm':
        found['order'] = torch.rand(n, 16, generator=generator).argsort(1)
    if padded:
        found['attention_mask'] = torch.arange(16) < torch.tensor([16, 9, 12, 8])[:n, None]
    return found


def moved(tensors, runtime):
    return {key: value.to(runtime.device) for key, value in tensors.items()}


# ---- everywhere ----

def test_a_missing_package_is_one_line(monkeypatch, tmp_path):
    (tmp_path / 'torch_xla.py').write_text("raise ImportError('hidden')\n")
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    for script in ('train.py', 'finetune.py', 'bench.py'):
        error = refused(real_stage(script, '--device=xla'))
        assert error.startswith("error: device='xla' needs torch_xla: pip install torch")


@pytest.mark.parametrize('kind', MODELS)
@pytest.mark.parametrize('pooling', POOLING)
def test_no_parameter_has_two_names(kind, pooling):
    model = kind(EncoderConfig(attention='xlnet', position='none', pooling=pooling, **SHAPE))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) == len(list(model.parameters()))


def test_half_precision_of_gpus_is_refused():
    with pytest.raises(source.UserError, match='bfloat16'):
        source.choose_dtype('float16', torch.device('xla'), 64)


# ---- on XLA: models ----

@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize('system', SYSTEMS, ids=name_of)
def test_losses_and_gradients_are_the_cpus(system):
    """And no operator is computed on the host; rows with and without padding in one graph."""
    counters.clear_all()
    objective = system.get('objective', 'mlm')
    ours = build(**system)
    theirs = source.to_device(copy.deepcopy(ours), RUNTIME)
    losses = []
    for model, runtime in ((ours, ON_CPU), (theirs, RUNTIME)):
        rows = [model(**moved(batch(i, objective, padded), runtime))
                for i, padded in enumerate((False, True))]
        sum(part.mean() for part in rows).backward()
        runtime.sync()
        losses.append(torch.cat(rows).detach().cpu())
    assert (losses[0] - losses[1]).abs().max() < 1e-4
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or (one.grad - other.grad.cpu()).abs().max() < 1e-4, name
    assert not [name for name in counters.counter_names() if name.startswith('aten::')]


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize('attention', ATTENTION)
def test_bfloat16_is_near(attention):
    ours = build(attention, ALLOWED_POSITIONS.get(attention, ('absolute',))[0])
    theirs, rows = source.to_device(copy.deepcopy(ours), RUNTIME), batch()
    with torch.no_grad(), dataclasses.replace(RUNTIME, dtype=torch.bfloat16).autocast():
        loss = theirs(**moved(rows, RUNTIME)).mean().cpu()
        logits = theirs(moved(rows, RUNTIME)['ids'])
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert 0 < abs(loss - ours(**rows).mean()) < 0.02


# ---- on XLA: steps ----

def steps(runtime, looks, system, n=8, **knobs):
    """[(loss, norm or None, compilations, reads)] of n steps with warmup and accumulation, and the model.

    The rate passes 0.01, the decay: scalars of equal values were once one input, and so another graph.
    """
    raw = source.to_device(build(**system, **knobs), runtime)
    optimizer = source.make_optimizer(raw, 1e-3, (0.9, 0.999), 1e-8, 0.01, runtime)
    scaler, found = torch.amp.GradScaler(runtime.device.type, enabled=False), []
    health = source.Health(runtime)
    for step in range(n):
        parts = [moved(batch(2 * step + i), runtime) for i in range(2)]
        for part in parts:
            part['weights'] = torch.ones_like(part['targets'], dtype=torch.float32)
        source.seed_step(1, step, runtime)
        source.set_lr(optimizer, source.get_lr(step, 1e-2, 0.0, 4, n, 'linear'), runtime)
        loss, norm = source.update(raw, optimizer, scaler, parts, 30.0 + step, 1.0, runtime)
        health.add(loss, norm, scaler)
        runtime.sync()
        values = health.look(step + 1, 'here') if step in looks else (None, None)
        if runtime.is_xla:
            transfers = counters.metric_data('TransferFromDeviceTime')
            values = *values, source.compilations(runtime)['compiled'], transfers[0] if transfers else 0
        found.append(values)
    return found, raw


@needs_xla
@pytest.mark.xla
def test_updates_are_the_cpus():
    (ours, one), (theirs, other) = (steps(runtime, range(8), {}) for runtime in (ON_CPU, RUNTIME))
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b[:2], abs=1e-4)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert (a - b.cpu()).abs().max() < 1e-4


@needs_xla
@pytest.mark.xla
def test_what_is_infinite_once_is_named_at_the_next_look(monkeypatch):
    """The gradient norm of step 3 overflows; clipping makes zeros of it, so the weights stay finite."""
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def harmed(parameters, *arguments):
        calls.append(1)
        parameters = list(parameters)
        if len(calls) == 3:
            parameters[0].grad = parameters[0].grad + 1e25
        return clip(parameters, *arguments)
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', harmed)
    with pytest.raises(source.UserError, match='here: loss or gradient norm of step 3 is not finite'):
        steps(RUNTIME, (5,), {})
    assert len(calls) == 6


def test_ranks_of_xla_take_equal_shares():
    runtime = source.Runtime(torch.device('xla'), rank=1, world=4)
    assert runtime.share(8) == slice(2, 4)
    with pytest.raises(source.UserError, match='10 rows a step on 4 processes: choose a multiple'):
        runtime.share(10)


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize('attention', ['original', 'shatter'])
def test_a_steady_run_compiles_nothing_and_reads_where_it_logs_alone(attention):
    counters.clear_all()
    system = {'attention': attention, 'position': ALLOWED_POSITIONS.get(attention, ('absolute',))[0]}
    found, _ = steps(RUNTIME, (4, 7), system, dropout=0.1, attention_dropout=0.1)
    compiled, reads = ([values[i] for values in found] for i in (2, 3))
    assert 0 < compiled[0] <= compiled[2] == compiled[-1], compiled
    assert [step for step in range(1, 8) if reads[step] > reads[step - 1]] == [4, 7], reads
    assert [values[0] is None for values in found] == [step not in (4, 7) for step in range(8)]


@needs_xla
@pytest.mark.xla
def test_dropout_is_a_function_of_seed_step_and_rank():
    model, rows, losses = source.to_device(build(dropout=0.5), RUNTIME), moved(batch(), RUNTIME), []
    for seed, step, rank in ((1, 1, 0), (1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1)):
        source.seed_step(seed, step, dataclasses.replace(RUNTIME, rank=rank))
        losses.append(model(**rows).mean().item())
    assert losses[0] == losses[1] and len(set(losses)) == 4


# ---- on XLA: the scripts, as users run them ----

@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """A run of 12 steps, undisturbed."""
    folder = tmp_path_factory.mktemp('xla') / 'whole'
    train(corpus, folder, *ON_XLA, run=slow)
    return folder


@needs_xla
@pytest.mark.xla
def test_train_says_how_often_it_compiled(whole):
    lines = [line for line in source.read_metrics(whole) if line['kind'] == 'train']
    compiled = [line['compiled'] for line in lines]
    assert [line['step'] for line in lines] == [3, 6, 9, 12] and compiled[0] == compiled[-1] > 0, compiled


@needs_xla
@pytest.mark.xla
def test_a_killed_run_goes_on_as_if_undisturbed(whole, corpus, tmp_path):
    """Killed while it saves step 8: the next one begins at step 4."""
    (tmp_path / 'killed.py').write_text(KILL.format(root=ROOT))
    done = slow(str(tmp_path / 'killed.py'), *tiny(corpus, tmp_path / 'cut'), *ON_XLA)
    assert done.returncode == -signal.SIGKILL
    assert list(source.checkpoints(tmp_path / 'cut')) == [4]
    train(corpus, tmp_path / 'cut', *ON_XLA, run=slow)
    for kind in ('train', 'val'):
        assert metrics(tmp_path / 'cut', kind) == metrics(whole, kind)
    same_checkpoint(tmp_path / 'cut' / 'ckpt_0000012.pt', whole / 'ckpt_0000012.pt')


@needs_xla
@pytest.mark.xla
def test_the_cpu_goes_on_from_xlas_checkpoint_and_xla_from_the_cpus(whole, corpus, tmp_path):
    """Without dropout from step 8 on, both end with the same losses; then each takes the other's run."""
    for device in ('cpu', 'xla'):
        (tmp_path / device).mkdir()
        shutil.copy(whole / 'ckpt_0000008.pt', tmp_path / device)
        train(corpus, tmp_path / device, *ON_XLA, '--dropout=0', '--attention_dropout=0',
              f'--device={device}', run=slow)
    ours, theirs = (metrics(tmp_path / device, 'val')[-1] for device in ('cpu', 'xla'))
    assert ours['step'] == theirs['step'] == 12 and ours['loss'] == pytest.approx(theirs['loss'], abs=1e-4)
    content = source.read_checkpoint(tmp_path / 'xla' / 'ckpt_0000012.pt')
    tensors = [*content['model'].values(), *(value for state in content['optimizer']['state'].values()
                                             for value in state.values())]
    assert {tensor.device.type for tensor in tensors} == {'cpu'}
    train(corpus, tmp_path / 'cpu', *ON_XLA, '--max_iters=13', run=slow)
    assert metrics(tmp_path / 'cpu')[-1]['step'] == 13


@needs_xla
@pytest.mark.xla
def test_finetune_on_xla_is_finetune_on_the_cpu(whole, tmp_path):
    for name in ('cola', 'squad1'):
        publish(name, tmp_path / 'labelled')
    command = [f'--init_from={whole}', '--tasks=cola,squad1', f'--data_dir={tmp_path}/labelled', *QUICK,
               '--dropout=0', '--attention_dropout=0', '--learning_rate=1e-3', '--log_interval=2']
    results = {}
    for device in ('cpu', 'xla'):
        out = tmp_path / device
        done = stage('finetune.py', *command, f'--device={device}', f'--out_dir={out}', timeout=900)
        assert done.returncode == 0, done.stderr
        with open(out / 'results.json') as file:
            results[device] = json.load(file)['trials']
        folder, = out.glob('*/cola_1_*')
        results[device + ' logits'] = [
            json.loads(line)['outputs'][0]
            for line in (folder / 'predictions.jsonl').read_text().splitlines()]
    assert [trial['scores'] for trial in results['cpu']] == [trial['scores'] for trial in results['xla']]
    assert np.allclose(results['cpu logits'], results['xla logits'], atol=1e-3)
    lines = [line for line in source.read_metrics(folder) if line['kind'] == 'train']
    assert lines[-1]['compiled'] == lines[1]['compiled'] > 0, lines


@needs_xla
@pytest.mark.xla
def test_bench_waits_for_the_device(tmp_path):
    """A step takes a third of a second on a CPU, and tracing it a few milliseconds."""
    done = stage('bench.py', '--device=xla', '--what=speed', '--variants=original,shatter', '--modes=train',
                 '--rounds=2', '--peers=none', f'--out_dir={tmp_path}', timeout=900)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / 'rows.jsonl').read_text().splitlines()]
    assert [row['system'] for row in rows[1:]] == ['original', 'shatter']
    assert all(row['ms'] > 30 for row in rows[1:])


# ---- on XLA: processes ----

@needs_xla
@pytest.mark.xla
def test_torchrun_with_one_process(corpus, tmp_path):
    train(corpus, tmp_path, '--device=xla', '--max_iters=2', run=lambda *a: torchrun(*a, n=1, timeout=600))
    assert [line['step'] for line in metrics(tmp_path)] == [1, 2]


@needs_xla
@pytest.mark.xla
def test_the_wrapper_accumulates_on_xla(tmp_path):
    """DistributedDataParallel on a group of one: gradients are the plain model's, and nothing is read."""
    done = torchrun(os.path.abspath(__file__), n=1, timeout=600)
    assert done.returncode == 0 and 'the same' in done.stdout, (done.stdout, done.stderr)


@needs_xla
@pytest.mark.xla
def test_two_processes(corpus, tmp_path):
    done = torchrun('train.py', *tiny(corpus, tmp_path), '--device=xla', '--max_iters=2', timeout=600)
    if "torch_xla sees 1 process(es), torchrun started 2" in done.stderr:
        pytest.skip("PJRT's CPU client is a world of its own in each process: there is nothing to join")
    assert done.returncode == 0, done.stderr


@needs_xla
@pytest.mark.xla
def test_another_world_than_torchruns_is_refused(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '8')
    monkeypatch.setattr(source.dist, 'init_process_group', lambda *arguments: None)
    monkeypatch.setattr(source.dist, 'get_world_size', lambda: 4)
    with pytest.raises(source.UserError, match=r'sees 4 process\(es\), torchrun started 8; --nproc'):
        source.join('xla', 'float32')


def wrapped_twin():
    """What test_the_wrapper_accumulates_on_xla starts: two worlds, of one and, says Runtime, of two."""
    source.dist.init_process_group('xla', 'xla://')
    alone = dataclasses.replace(RUNTIME, host=source.dist.new_group(backend='gloo'))
    changes = []
    for world in (1, 2):
        runtime = dataclasses.replace(alone, world=world)
        raw = source.to_device(build(), runtime)
        model = runtime.wrap(raw)
        parts = [moved(batch(i), runtime) for i in range(2)]
        for part in parts:
            part['weights'] = torch.ones_like(part['targets'], dtype=torch.float32)
        optimizer = torch.optim.SGD(raw.parameters(), 1.0)
        before = [parameter.detach().cpu() for parameter in raw.parameters()]
        scaler = torch.amp.GradScaler('xla', enabled=False)
        source.update(model, optimizer, scaler, parts, 32.0 * world, 0.0, runtime)      # DDP divides by 1
        runtime.sync()
        after = [parameter.detach().cpu() for parameter in raw.parameters()]
        changes.append([one - other for one, other in zip(before, after, strict=True)])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*changes, strict=True))
    assert alone.gather(3) == [3]
    print('the same')


if __name__ == '__main__':
    wrapped_twin()
