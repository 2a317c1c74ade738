"""What only a GPU can show: reduced precision, compiled graphs, the float16 scaler, host syncs.

    $ python -m pytest -m cuda -n 14 tests/test_cuda.py     # on a GPU: results/bench.md
    $ python -m pytest -m slow tests/test_cuda.py           # the same code on a CPU
"""
import collections
import copy
import warnings
from dataclasses import replace

import pytest
import torch
from conftest import tiny, words
from test_train import CPU, MASKS
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import train
from model import ATTENTION, model_config, positions_of
from prepare_data import load_meta

MARKS = {
    'cuda': [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')],
    'cpu': pytest.mark.slow,
}
DEVICES = [pytest.param(device, marks=marks) for device, marks in MARKS.items()]
BACKEND = {'cuda': 'inductor', 'cpu': 'aot_eager'}      # of torch.compile; the second needs no C++ compiler
STEPS = {'cuda': 200, 'cpu': 4}
SYSTEMS = [('xlnet', 'none', 'plm'), *((attention, position, 'mlm') for attention in ATTENTION
                                       for position in positions_of(attention))]
CASES = [pytest.param(device, system, marks=MARKS[device])
         for device, step in (('cuda', 1), ('cpu', 8)) for system in SYSTEMS[::step]]
SMALL = {'n_layer': 2, 'n_head': 4, 'n_embd': 64, 'n_inner': 256, 'block_size': 64}
BASE = {'n_layer': 2, 'n_head': 12, 'n_embd': 768, 'n_inner': 3072, 'block_size': 512}
LIMITS = {'first loss': 1e-3, 'first norm': 0.02, 'mean loss': 0.05}        # relative, relative, nats
GRADIENT = {torch.float32: 0.02, torch.float16: 0.02, torch.bfloat16: 0.1}  # relative; scores * 0.9 give 0.13


def make(system, corpus, sizes, rows, steps, packing='stream'):
    """(model, batches) of a system: the same weights and batches in every call."""
    meta = load_meta(corpus)
    knobs = dict(zip(('attention', 'position', 'objective'), system, strict=True))
    torch.manual_seed(1)
    settings = {**knobs, **sizes, 'dropout': 0.0, 'attention_dropout': 0.0}
    model = train.MODEL[knobs['objective']](model_config(settings, meta['vocab_size']))
    masks = {**MASKS, **knobs, **sizes, 'packing': packing, 'seed': 1}
    loader = train.make_loader(corpus, meta, 'train', masks)
    return model, [loader.batch(range(step * rows, (step + 1) * rows)) for step in range(steps)]


def stepper(model, runtime, scale=1024.0):
    """(a function that trains on one batch, its scaler)

    The function returns the loss and the norm of the gradient, (2,) float64 on the CPU.
    """
    optimizer = train.make_optimizer(model, 3e-4, (0.9, 0.999), 1e-12, 0.01, runtime)
    scaler = torch.amp.GradScaler(runtime.device.type, scale, enabled=runtime.dtype == torch.float16)

    def step(batch):
        n_predicted = float(batch['weights'].sum())
        both = train.train_step(model, optimizer, scaler, [batch], n_predicted, 1.0, runtime)
        return torch.stack(both).double().cpu()

    return step, scaler


def gradients(model, batch, runtime):
    """{name: gradient of the first loss, float64 on the CPU} of the matrices."""
    part = runtime.move(batch)
    weights = part.pop('weights')
    with runtime.autocast():
        losses = model(**part)
    (1024 * (losses * weights).sum() / weights.sum()).backward()
    found = {name: p.grad.double().cpu() / 1024 for name, p in model.named_parameters()
             if p.dim() >= 2 and p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def follow(model, batches, runtime, backend=None):
    """(gradients of the first batch, (steps, 2) losses and norms) of a copy of the model."""
    model = copy.deepcopy(model).to(runtime.device)
    if backend:
        torch.compiler.reset()
        model.compile(backend=backend)
    step, _ = stepper(model, runtime)
    first = gradients(model, batches[0], runtime)
    return first, torch.stack([step(batch) for batch in batches])


def distances(exact, ours):
    """{quantity: how far the results of follow() are from those in float64}."""
    exact_gradients, exact_curve = exact
    our_gradients, our_curve = ours
    least = 1e-3 * max(gradient.norm() for gradient in exact_gradients.values())
    wrong = [(our_gradients[name] - gradient).norm() / max(gradient.norm(), least)
             for name, gradient in exact_gradients.items()]
    away = (our_curve - exact_curve).abs()              # (steps, 2): losses and norms
    first_loss, first_norm = (away / exact_curve)[0].tolist()
    return {'gradient': max(wrong).item(), 'first loss': first_loss,
            'first norm': first_norm, 'mean loss': away[:, 0].mean().item()}


@pytest.mark.parametrize('device, system', CASES)
def test_losses_and_gradients_are_those_of_float64(device, system, corpus):
    """Matrices start 6 times larger, as otherwise attention is nearly uniform and an error in it unseen."""
    cases = [('stream', torch.float32, False)]          # TF32 on a GPU
    for dtype in (torch.bfloat16, torch.float16):
        cases += [('stream', dtype, True), ('documents', dtype, False)]
    exact = {}
    wrong = []
    for packing, dtype, compiled in cases:
        model, batches = make(system, corpus, SMALL, 8, STEPS[device], packing)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6 if parameter.dim() >= 2 else 1)
        if packing not in exact:
            exact[packing] = follow(copy.deepcopy(model).double(), batches, CPU)
        runtime = train.make_runtime(device, str(dtype).removeprefix('torch.'), SMALL['n_embd'])
        ours = follow(model, batches, runtime, BACKEND[device] if compiled else None)
        found = distances(exact[packing], ours)
        print(packing, dtype, 'compiled' if compiled else 'eager', found)
        limits = {**LIMITS, 'gradient': GRADIENT[dtype]}
        for key, value in found.items():
            if not value <= limits[key]:                # also if it is not a number
                wrong.append((packing, dtype, compiled, key, value))
    assert not wrong


@pytest.mark.parametrize('device, system', CASES)
def test_a_model_compiles_once_without_a_graph_break(device, system, corpus):
    """At BERT-base's width; PyTorch's fused attention kernels run where our operators use them."""
    sizes, rows = (BASE, 16) if device == 'cuda' else (SMALL, 2)
    model, batches = make(system, corpus, sizes, rows, 4)
    runtime = replace(CPU, device=torch.device(device), dtype=torch.bfloat16)
    model.to(device)
    torch.compiler.reset()
    counters.clear()
    model.compile(backend=BACKEND[device])
    step, _ = stepper(model, runtime)
    for batch in batches[:2]:
        step(batch)
    with profile(activities=[ProfilerActivity.CUDA if device == 'cuda' else ProfilerActivity.CPU]) as trace:
        for batch in batches[2:]:
            step(batch)
    assert not counters['graph_break']
    assert counters['stats']['unique_graphs'] == 1
    if device == 'cuda' and system[:2] == ('original', 'absolute'):
        names = ' '.join(event.key for event in trace.key_averages()).lower()
        assert 'flash' in names or 'cudnn' in names or 'fmha' in names, names


@pytest.mark.parametrize('device', DEVICES)
def test_the_scaler_skips_a_step_that_overflows_float16(device, corpus):
    model, (batch,) = make(('original', 'rope', 'mlm'), corpus, SMALL, 8, 1)
    runtime = replace(CPU, device=torch.device(device), dtype=torch.float16)
    model.to(device)
    step, scaler = stepper(model, runtime, 2.0 ** 40)
    before = model.encoder.token.weight.clone()
    loss, norm = step(batch)
    assert loss.isfinite()
    assert not norm.isfinite()
    assert scaler.get_scale() == 2.0 ** 39
    assert torch.equal(model.encoder.token.weight, before)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('knobs', [{'dtype': 'bfloat16'}, {'dtype': 'float16'},
                                   {'dtype': 'bfloat16', 'attention': 'gau', 'compile': False}])
def test_the_host_waits_only_for_the_log(knobs, device, stage, corpus, tmp_path, monkeypatch, request):
    """From the first step to the checkpoint no line of Python waits for the device in each of 60 steps."""
    mode = torch.cuda.set_sync_debug_mode if device == 'cuda' else lambda name: None
    request.addfinalizer(lambda: mode('default'))       # also if the run fails
    step, write = train.train_step, train.write_checkpoint
    monkeypatch.setattr(train, 'train_step', lambda *arguments: (mode('warn'), step(*arguments))[1])
    monkeypatch.setattr(train, 'write_checkpoint', lambda *arguments: (mode('default'), write(*arguments)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        done = stage('train', *tiny(corpus, tmp_path, device=device, max_iters=60, log_interval=20,
                                    n_embd=64, **knobs))
    lines = collections.Counter(f'{warning.filename}:{warning.lineno}' for warning in caught
                                if 'synchronizing CUDA' in str(warning.message))
    assert done.code == 0, (lines, done.err)
    assert max(lines.values(), default=0) < 20, (lines, done.err)
    assert bool(lines) == (device == 'cuda')            # the log's are seen


@pytest.mark.parametrize('device', DEVICES)
def test_every_stage(device, stage, corpus, tmp_path):
    run = tmp_path / 'run'
    assert stage('train', *tiny(corpus, run, device=device, dtype='auto', fill_samples=2)).code == 0
    done = stage('train', *words(out_dir=run, fill='the [MASK] of a list'))
    assert 'the [MASK] of a list' in done.out
    for name in ('a.csv', 'b.csv'):
        (tmp_path / name).write_text('text,label\n' + 64 * 'the first is returned,first\nthe last,last\n')
    tune = words(init_from=run, tasks='custom', texts='text', label='label', train_file=tmp_path / 'a.csv',
                 dev_file=tmp_path / 'b.csv', trials=1, epochs=2, device=device, out_dir=tmp_path)
    assert stage('finetune', *tune).code == 0
    assert (tmp_path / 'results.md').exists()
    knobs = words(what='speed,memory', variants='shatter', n_layer=1, n_embd=64, n_inner=64, vocab_size=400,
                  lengths=16, batches=2, rounds=1, device=device, out_dir=tmp_path)
    assert stage('bench', *knobs).code == 0
