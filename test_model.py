"""The model against its papers: loop-level oracles, printed counts, padding, reductions, Hugging Face.

    $ python -m pytest test_model.py            # CPU, offline

The tests range over ATTENTION, POSITION and PAIR_INIT: a new row is under test at once, and fails until it
has its entry in ORACLE, QKV and COUNTS (an operator), ROTATE and SEES (a position) or STARTS (a start of S).
"""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as source
from configurator import UserError
from model import (
    ATTENTION,
    PAIR_INIT,
    POSITION,
    Encoder,
    EncoderConfig,
    MaskedLM,
    MultipleChoice,
    SequenceClassifier,
    SpanClassifier,
)

SMALL = {'vocab_size': 23, 'block_size': 12, 'n_layer': 2, 'n_head': 3, 'n_embd': 12, 'n_inner': 20}
KEEP = torch.arange(6) < torch.tensor([[6], [4], [5]])         # (B, T) of batch(), padded on the right
VARIANTS = [{'attention': name} for name in ATTENTION] + [{'attention': 'pairwise', 'pair_rank': 2}]

each_variant = pytest.mark.parametrize('variant', VARIANTS, ids=lambda v: '-'.join(map(str, v.values())))
each_position = pytest.mark.parametrize('position', POSITION)


def build(kind=MaskedLM, **settings):
    """A small float64 model in eval mode with every parameter random: biases, norms, diagonals and S too."""
    torch.manual_seed(1)
    model = kind(EncoderConfig(**{**SMALL, **settings})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def batch(rows=3, length=6, seed=2):
    """ids (B, T) without 0, and segments (B, T) of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SMALL['vocab_size'], (rows, length), generator=generator)
    return ids, (torch.arange(length) >= length // 2).long().expand(rows, -1)


def entry(table, name, wanted):
    assert name in table, f"'{name}' has no {wanted} in test_model.py: write one from the paper"
    return table[name]


def difference(x, y):
    return (x - y).abs().max().item()


# ---- oracles: SPEC sections 1 to 3 and the papers, one vector at a time, numpy in float64 ----

def linear(w, name, x):
    return w[name + '.weight'] @ x + w[name + '.bias']


def layer_norm(w, name, x):
    mean = sum(x) / len(x)
    variance = sum((a - mean) ** 2 for a in x) / len(x)
    return (x - mean) / math.sqrt(variance + 1e-12) * w[name + '.weight'] + w[name + '.bias']


def gelu(x):
    return np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in x])


def original(w, x, h, head):
    """Courtois et al. 2024, eq. 1 and 2: q, k, v (K,) of head h for one token x (D,)."""
    return [linear(w, name, x)[head] for name in ('query', 'key', 'value')]


def symmetric(w, x, h, head):
    """Courtois et al. 2024, eq. 3: Q(x) Q(y)^T."""
    return [linear(w, name, x)[head] for name in ('query', 'query', 'value')]


def pairwise(w, x, h, head):
    """Courtois et al. 2024, eq. 6: Q(x) S Q(y)^T = sum_ab Q(x)_a S_ab Q(y)_b; S_ab = sum_c A_ac B_bc."""
    q, pair = linear(w, 'query', x)[head], w['pair'][h]
    size = range(len(q))
    if 'pair_key' in w:
        rank, right = range(pair.shape[1]), w['pair_key'][h]
        pair = np.array([[sum(pair[a, c] * right[b, c] for c in rank) for b in size] for a in size])
    return np.array([sum(q[a] * pair[a, b] for a in size) for b in size]), q, linear(w, 'value', x)[head]


def shared(w, x, h, head):
    """Kowsher et al. 2024, section 2.3: S = x Ws, scaled by the diagonals D_q, D_k, D_v."""
    return [(linear(w, 'shared', x) * w[name])[head] for name in ('query_diag', 'key_diag', 'value_diag')]


def unrotated(x, t):
    return x


def rotated(x, t):
    """Su et al. 2021, eq. 34: the pair (2i, 2i + 1) at position t turns by t 10000^(-2i / K)."""
    y = np.zeros(len(x))
    for i in range(len(x) // 2):
        angle = t * 10000 ** (-2 * i / len(x))
        cos, sin = (float(np.float32(f(angle))) for f in (math.cos, math.sin))  # the model's table is float32
        y[2 * i] = x[2 * i] * cos - x[2 * i + 1] * sin
        y[2 * i + 1] = x[2 * i] * sin + x[2 * i + 1] * cos
    return y


ORACLE = {'original': original, 'symmetric': symmetric, 'pairwise': pairwise, 'shared': shared}
ROTATE = {'absolute': unrotated, 'none': unrotated, 'rope': rotated}


def attention_oracle(w, x, keep, config):
    """softmax(q k^T / sqrt(K)) v over the real keys, and the output projection.  x: T vectors (D,)."""
    operator = entry(ORACLE, config.attention, 'oracle')
    rotate = entry(ROTATE, config.position, 'oracle')
    T, size = len(x), config.n_embd // config.n_head
    y = np.zeros((T, config.n_embd))
    for h in range(config.n_head):
        head = slice(h * size, (h + 1) * size)
        qkv = [operator(w, x[t], h, head) for t in range(T)]
        for i in range(T):
            weight = [0.0] * T
            for j in range(T):
                if keep[j]:
                    weight[j] = math.exp(rotate(qkv[i][0], i) @ rotate(qkv[j][1], j) / math.sqrt(size))
            for j in range(T):
                y[i, head] += weight[j] / sum(weight) * qkv[j][2]
    return [linear(w, 'out', y[t]) for t in range(T)]


def part(w, prefix):
    return {name[len(prefix):]: value for name, value in w.items() if name.startswith(prefix)}


def encoder_oracle(w, ids, segments, keep, config):
    """Post-LN BERT on one row of T tokens: T vectors (D,)."""
    x = [w['token.weight'][ids[t]] + w['segment.weight'][segments[t]] for t in range(len(ids))]
    if config.position == 'absolute':
        x = [x[t] + w['position.table.weight'][t] for t in range(len(ids))]
    x = [layer_norm(w, 'norm', a) for a in x]
    for layer in range(config.n_layer):
        b = part(w, f'blocks.{layer}.')
        y = attention_oracle(part(b, 'attention.'), x, keep, config)
        x = [layer_norm(b, 'attention_norm', x[t] + y[t]) for t in range(len(ids))]
        x = [layer_norm(b, 'mlp_norm', a + linear(b, 'contract', gelu(linear(b, 'expand', a)))) for a in x]
    return x


def masked_lm_oracle(w, x):
    x = [layer_norm(w, 'norm', gelu(linear(w, 'transform', a))) for a in x]
    return [w['encoder.token.weight'] @ a + w['bias'] for a in x]


def classifier_oracle(w, x):
    return linear(w, 'classifier', np.tanh(linear(w, 'pooler', x[0])))


@pytest.mark.parametrize('kind, head', [(MaskedLM, masked_lm_oracle),
                                        (SequenceClassifier, classifier_oracle)])
@each_position
@each_variant
def test_equals_the_loops_of_the_paper(variant, position, kind, head):
    model = build(kind, position=position, **variant)
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    ids, segments = batch()
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]]).bool()
    given = model(ids, segments=segments, keep=keep)
    for b in range(len(ids)):
        row = [x[b].tolist() for x in (ids, segments, keep)]
        wanted = head(w, encoder_oracle(part(w, 'encoder.'), *row, model.config))
        assert np.abs(given[b].detach().numpy() - np.array(wanted)).max() < 1e-10


# ---- counts ----

SHAPES = {'small': (4, 8, 512, 2048), 'base': (12, 12, 768, 3072), 'large': (24, 16, 1024, 4096)}
COUNTS = {                              # SPEC section 8: masked LM of the three shapes
    'original': (28795194, 109514298, 335174458),
    'symmetric': (27744570, 102427194, 309984058),
    'pairwise': (27875642, 103017018, 311556922),
    'shared': (26700090, 95367738, 284867386),
}
CLASSIFIERS = {'original': 109483778, 'shared': 95337218}       # base, 2 labels
QKV = {                                 # SPEC section 2: parameters of the q, k, v part
    'original': lambda D, H, K, r: 3 * (D * D + D),
    'symmetric': lambda D, H, K, r: 2 * (D * D + D),
    'pairwise': lambda D, H, K, r: 2 * (D * D + D) + (2 * H * K * r if r else H * K * K),
    'shared': lambda D, H, K, r: D * D + D + 3 * D,
}


def count_of(kind, shape, attention='original'):
    with torch.device('meta'):
        return source.count_parameters(kind(EncoderConfig(30522, 512, *SHAPES[shape], attention=attention)))


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('attention', ATTENTION)
def test_parameter_counts_of_the_papers(attention, shape):
    counts = dict(zip(SHAPES, entry(COUNTS, attention, 'parameter count'), strict=True))
    assert count_of(MaskedLM, shape, attention) == counts[shape]


@pytest.mark.parametrize('attention', CLASSIFIERS)
def test_parameter_counts_of_classifiers(attention):
    assert count_of(SequenceClassifier, 'base', attention) == CLASSIFIERS[attention]


@pytest.mark.parametrize('kind, shape, attention, percent', [
    (MaskedLM, 'small', 'symmetric', 3.65), (MaskedLM, 'small', 'pairwise', 3.19),      # Courtois, table 2
    (MaskedLM, 'base', 'symmetric', 6.47), (MaskedLM, 'base', 'pairwise', 5.93),
    (MaskedLM, 'base', 'shared', 12.92), (SequenceClassifier, 'base', 'shared', 12.92)])    # SPEC section 9
def test_saved_parameters_in_percent(kind, shape, attention, percent):
    whole = count_of(kind, shape)
    assert round(100 * (1 - count_of(kind, shape, attention) / whole), 2) == percent


@pytest.mark.parametrize('variant', [*VARIANTS, {'attention': 'pairwise', 'pair_rank': 1},
                                     {'attention': 'pairwise', 'pair_rank': 16}], ids=str)
def test_parameter_formula_of_q_k_v(variant):
    config = EncoderConfig(50, 8, 1, 4, 64, 96, **variant)
    attention = Encoder(config).blocks[0].attention
    formula = entry(QKV, config.attention, 'parameter formula')
    without_out = source.count_parameters(attention) - source.count_parameters(attention.out)
    assert without_out == formula(64, 4, 16, config.pair_rank)


@pytest.mark.parametrize('variant', VARIANTS, ids=str)
def test_training_flops_are_those_pytorch_counts(variant):
    """To the last one, under the plain kernel: the counter knows no cost of the CPU's fused one."""
    model = build(**variant)
    (ids, segments), positions = batch(rows=1, length=10), torch.tensor([[1, 4, 7]])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, positions, ids.gather(1, positions), segments).sum().backward()
    assert counter.get_total_flops() == source.training_flops(model.config, length=10, n_predicted=3)


# ---- padding, gradients, order ----

@each_position
@each_variant
def test_padding_changes_nothing(variant, position):
    encoder = build(Encoder, position=position, **variant)
    ids, segments = batch()
    keep = (torch.arange(10) < 6).expand(3, -1)
    outputs = []
    for seed in (3, 4):                                 # other tokens of other segments in the padding
        padding, kinds = batch(length=4, seed=seed)
        padded = torch.cat((ids, padding), 1), torch.cat((segments, (kinds + seed) % 2), 1)
        outputs.append(encoder(*padded, keep)[:, :6])
    assert torch.equal(*outputs)                        # weight exactly 0, not merely small
    assert difference(outputs[0], encoder(ids, segments)) < 1e-12
    assert difference(encoder(*padded)[:, :6], outputs[0]) > 1e-3       # without the mask it matters


@each_position
@each_variant
def test_every_parameter_gets_a_gradient(variant, position):
    model, classifier = (build(kind, position=position, **variant) for kind in (MaskedLM, SequenceClassifier))
    ids, segments = batch()
    model(ids, targets=ids, segments=segments, keep=KEEP).sum().backward()
    F.cross_entropy(classifier(ids, segments, KEEP), torch.tensor([0, 1, 1])).backward()
    for name, parameter in [*model.named_parameters(), *classifier.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if name.endswith('attention.key.bias') and entry(ROTATE, position, 'oracle') is unrotated:
            assert difference(parameter.grad, 0) < 1e-9, name       # q_i . b, the same for all keys
        else:
            assert difference(parameter.grad, 0) > 1e-6, name


SEES = {'absolute': 'places', 'none': 'a set', 'rope': 'distances'}


@each_position
@each_variant
def test_what_a_position_scheme_sees(variant, position):
    """A set: permuted tokens give permuted states.  Distances: a row moved right gives the same states."""
    encoder = build(Encoder, position=position, **variant)
    ids, segments = batch()
    states, order = encoder(ids, segments), torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = encoder(ids[:, order], segments[:, order])
    moved = encoder(F.pad(ids, (3, 0)), F.pad(segments, (3, 0)), (torch.arange(9) >= 3).expand(3, -1))[:, 3:]
    seen = entry(SEES, position, 'property')
    for changed, same in [(difference(permuted, states[:, order]), seen == 'a set'),
                          (difference(moved, states), seen != 'places')]:
        assert changed < 1e-6 if same else changed > 1e-3           # 1e-6: rope's table is float32


@each_position
@each_variant
def test_which_scores_are_symmetric(variant, position, monkeypatch):
    """Also those of shared: s D_q D_k s^T is symmetric, until rope comes between D_q and D_k."""
    calls = []

    def spy(q, k, v, **options):
        calls.append((q, k))
        return plain(q, k, v, **options)

    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(F, 'scaled_dot_product_attention', spy)
    encoder = build(Encoder, position=position, **variant)
    encoder(*batch())
    assert len(calls) == encoder.config.n_layer
    name, still = variant['attention'], entry(ROTATE, position, 'oracle') is unrotated
    for q, k in calls:
        skew = difference(q @ k.mT, k @ q.mT)
        assert skew < 1e-12 if name == 'symmetric' or name == 'shared' and still else skew > 1e-3


# ---- reductions: claim -> (settings, settings, weights of an attention of one -> weights of the other) ----

def tied_query_and_key(w):
    return {**w, 'key.weight': w['query.weight'], 'key.bias': w['query.bias']}


def unit_pair(w):
    return {**w, 'pair': torch.eye(4, dtype=torch.float64).expand(3, 4, 4)}


def multiplied_factors(w):
    w = dict(w)
    right = w.pop('pair_key')
    return {**w, 'pair': w['pair'] @ right.mT}


def pair_in_query(w):
    """x Wq S per head: in the layout of nn.Linear, rows of a head are S^T Wq^T."""
    w = tied_query_and_key(w)
    pair = w.pop('pair').mT
    w['query.weight'] = (pair @ w['query.weight'].view(3, 4, 12)).view(12, 12)
    w['query.bias'] = (pair @ w['query.bias'].view(3, 4, 1)).view(12)
    return w


def scaled_matrices(w):
    """Kowsher et al. 2024, section 2.3: Wq = Ws D_q and so on."""
    matrices = {'out.weight': w['out.weight'], 'out.bias': w['out.bias']}
    for name in ('query', 'key', 'value'):
        matrices[f'{name}.weight'] = w[f'{name}_diag'][:, None] * w['shared.weight']
        matrices[f'{name}.bias'] = w[f'{name}_diag'] * w['shared.bias']
    return matrices


REDUCTIONS = {
    'symmetric is original with Wk = Wq': (
        {'attention': 'symmetric'}, {'attention': 'original'}, tied_query_and_key),
    'symmetric is pairwise with S = I': (
        {'attention': 'symmetric'}, {'attention': 'pairwise'}, unit_pair),
    'pairwise is original with Wk = Wq and Wq S for Wq': (
        {'attention': 'pairwise'}, {'attention': 'original'}, pair_in_query),
    'factors of rank K are pairwise with S = A B^T': (
        {'attention': 'pairwise', 'pair_rank': 4}, {'attention': 'pairwise'}, multiplied_factors),
    'shared is original with Ws D for each W, so with D = 1 original with tied matrices': (
        {'attention': 'shared'}, {'attention': 'original'}, scaled_matrices),
}


@each_position
@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_reduction(reduction, position):
    one, other, translate = REDUCTIONS[reduction]
    first, second = build(Encoder, position=position, **one), build(Encoder, position=position, **other)
    rest = {name: value for name, value in first.state_dict().items() if '.attention.' not in name}
    second.load_state_dict(rest, strict=False)
    for a, b in zip(first.blocks, second.blocks, strict=True):
        b.attention.load_state_dict(translate(a.attention.state_dict()))
    ids, segments = batch()
    assert difference(first(ids, segments, KEEP), second(ids, segments, KEEP)) < 1e-10


# ---- arguments of forward ----

def test_segments_are_0_and_all_tokens_real_when_not_given():
    encoder = build(Encoder)
    ids, segments = batch()
    assert difference(encoder(ids), encoder(ids, torch.zeros_like(ids), torch.ones_like(ids).bool())) < 1e-12
    assert difference(encoder(ids), encoder(ids, segments)) > 1e-3


def test_head_on_gathered_positions_is_the_full_head():
    model = build()
    ids, segments = batch()
    positions, targets = torch.tensor([[1, 4], [5, 0], [3, 2]]), torch.tensor([[7, 8], [9, 1], [2, 22]])
    full = model(ids, segments=segments, keep=KEEP)
    wanted = torch.stack([full[b, positions[b]] for b in range(3)])
    assert difference(model(ids, positions, segments=segments, keep=KEEP), wanted) < 1e-12
    losses = model(ids, positions, targets, segments, KEEP)
    assert losses.dtype == torch.float32 and losses.shape == targets.shape
    each = [[F.cross_entropy(wanted[b, i], targets[b, i]).item() for i in range(2)] for b in range(3)]
    assert difference(losses, torch.tensor(each)) < 1e-5
    gathered = torch.autograd.grad(losses.sum(), list(model.parameters()))
    labels = torch.full_like(ids, -100).scatter(1, positions, targets)
    total = F.cross_entropy(full.flatten(0, 1), labels.flatten(), reduction='sum')
    assert abs(total.item() - losses.sum().item()) < 1e-4
    for one, other in zip(gathered, torch.autograd.grad(total, list(model.parameters())), strict=True):
        assert difference(one, other) < 1e-5 * max(1, other.abs().max().item())


# ---- initial values ----

@pytest.mark.parametrize('kind', [MaskedLM, SequenceClassifier, SpanClassifier, MultipleChoice])
@each_position
@each_variant
def test_initial_values(variant, position, kind):
    torch.manual_seed(5)
    model = kind(EncoderConfig(500, 40, 1, 4, 64, 96, position=position, n_label=50, **variant))
    for name, value in model.named_parameters():
        if name.endswith('bias'):
            assert (value == 0).all(), name
        elif 'norm' in name or name.endswith('diag'):
            assert (value == 1).all(), name
        elif '.attention.pair' not in name:                         # N(0, 0.02), five standard errors
            assert abs(value.mean().item()) < 5 * 0.02 / value.numel() ** 0.5, name
            assert abs(value.std().item() / 0.02 - 1) < 5 / (2 * value.numel()) ** 0.5, name


STARTS = {      # mean of S of rank r; deviation of the entries of S; of those of A B^T, None: not one for all
    'identity': (lambda K, r: torch.eye(K, r) @ torch.eye(r, K), lambda K: 0.02, None),
    'fan_in': (lambda K, r: torch.zeros(K, K), lambda K: K ** -0.5, lambda K: K ** -0.5),
    'normal': (lambda K, r: torch.zeros(K, K), lambda K: 0.02, lambda K: 0.02),
}


@pytest.mark.parametrize('size', [8, 32])
@pytest.mark.parametrize('rank', [0, 1, 5])
@pytest.mark.parametrize('pair_init', PAIR_INIT)
def test_initial_pairwise_factors(pair_init, rank, size):
    torch.manual_seed(6)
    mean, full, factored = entry(STARTS, pair_init, 'statistics')
    settings = {'attention': 'pairwise', 'pair_init': pair_init, 'pair_rank': rank}
    attention = ATTENTION['pairwise'](EncoderConfig(9, 8, 1, 32, 32 * size, 8, **settings))
    pair = attention.pair @ attention.pair_key.mT if rank else attention.pair
    noise = (pair - mean(size, rank or size)).detach()
    assert (noise.mean(0).abs() < 6 * noise.std(0) / 32 ** 0.5).all()              # over 32 heads
    deviation = factored if rank else full
    if deviation:                                       # entries of A B^T depend on each other: a wider bound
        assert abs(noise.std().item() / deviation(size) - 1) < (0.25 if rank else 0.06)


# ---- dropout, precision, compilation ----

@pytest.mark.parametrize('knob', ['dropout', 'attention_dropout'])
@each_variant
def test_dropout_is_applied_in_training_alone(variant, knob):
    rates = {'dropout': 0.0, 'attention_dropout': 0.0}
    model = build(**{**variant, **rates, knob: 0.5})
    ids, segments = batch()
    states = model(ids, segments=segments)
    assert torch.equal(states, model(ids, segments=segments))
    model.train()
    first, second = model(ids, segments=segments), model(ids, segments=segments)
    assert difference(first, second) > 1e-3 and difference(first, states) > 1e-3
    plain = build(**{**variant, **rates}).train()
    assert difference(plain(ids, segments=segments), states) < 1e-12


@each_position
@each_variant
def test_bfloat16_autocast(variant, position):
    """Within 3 % of float32 in norm: bfloat16 keeps 8 bits, so every rounding errs by up to 0.4 %."""
    torch.manual_seed(7)
    model = MaskedLM(EncoderConfig(**SMALL, position=position, **variant)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ids, segments = batch()
    wanted = model(ids, segments=segments, keep=KEEP)
    with torch.autocast('cpu', torch.bfloat16):
        logits = model(ids, segments=segments, keep=KEEP)
        losses = model(ids, targets=ids, segments=segments, keep=KEEP)
    assert logits.dtype == torch.bfloat16 and losses.dtype == torch.float32
    assert (logits.float() - wanted).norm() < 0.03 * wanted.norm()
    losses.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@each_variant
def test_compiles_to_one_graph(variant):
    """Forward and backward, as torch.compile captures them; aot_eager needs no C++ compiler."""
    torch._dynamo.reset()
    model = build(n_layer=1, position='rope', **variant)
    ids, segments = batch()
    gradients = []
    for function in (model, torch.compile(model, fullgraph=True, backend='aot_eager')):
        losses = function(ids, targets=ids, segments=segments, keep=KEEP)
        gradients.append(torch.autograd.grad(losses.sum(), list(model.parameters())))
    for one, other in zip(*gradients, strict=True):
        assert difference(one, other) < 1e-5 * other.abs().max()            # the losses are float32


# ---- what a user can get wrong ----

@pytest.mark.parametrize('settings, words', [
    ({'attention': 'pairwize'}, ["attention='pairwize'", *ATTENTION]),
    ({'position': 'rpe2'}, ["position='rpe2'", *POSITION]),
    ({'pair_init': 'zeros'}, ["pair_init='zeros'", *PAIR_INIT]),
    ({'n_head': 5}, ['n_embd=12', 'n_head=5', 'multiple']),
    ({'n_embd': 9, 'position': 'rope'}, ["position='rope'", '3', 'even']),
    ({'attention': 'pairwise', 'pair_rank': 5}, ['pair_rank=5', '4']),
    ({'attention': 'pairwise', 'pair_rank': -1}, ['pair_rank=-1', '4']),
    ({'attention': 'shared', 'pair_rank': 2}, ['pair_rank=2', "attention='pairwise'"]),
    ({'n_layer': 1.5}, ['n_layer=1.5', 'int']), ({'n_head': True}, ['n_head=True', 'int']),
    ({'dropout': '0.1'}, ["dropout='0.1'", 'float']), ({'attention': ['x']}, ["attention=['x']", 'str']),
    *[({name: value}, [f'{name}={value}', '[0, 1)'])
      for name in ('dropout', 'attention_dropout') for value in (-0.1, 1.0, math.nan)],
    *[({name: 0}, [f'{name}=0', 'at least 1']) for name in
      ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'n_inner', 'n_segment', 'n_label')],
], ids=str)
def test_config_error_names_key_value_and_choices(settings, words):
    with pytest.raises(UserError) as error:
        EncoderConfig(**{**SMALL, **settings})
    assert all(word in str(error.value) for word in words), str(error.value)
    assert '\n' not in str(error.value)


@each_position
def test_rows_longer_than_block_size_raise(position):
    encoder = build(Encoder, position=position)
    encoder(torch.ones(1, 12, dtype=torch.long))
    with pytest.raises(ValueError, match='13.*block_size=12'):
        encoder(torch.ones(1, 13, dtype=torch.long))


def test_model_config_takes_the_knobs_it_knows():
    settings = {'n_layer': 3, 'attention': 'shared', 'batch_size': 7, 'vocab_size': 9}
    assert source.model_config(settings, 31) == EncoderConfig(vocab_size=31, n_layer=3, attention='shared')
    with pytest.raises(UserError, match='n_layer=0'):
        source.model_config({'n_layer': 0}, 31)


# ---- Hugging Face ----

SIZES = {'vocab_size': 40, 'hidden_size': 24, 'num_hidden_layers': 3, 'num_attention_heads': 4,
         'intermediate_size': 36, 'max_position_embeddings': 16, 'type_vocab_size': 2}


def randomised(model):
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:                             # not RoFormer's sinusoids
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope='module')
def bert(tmp_path_factory):
    """(transformers' BertForMaskedLM with random weights, its folder)"""
    transformers = pytest.importorskip('transformers')
    theirs = randomised(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)))
    folder = tmp_path_factory.mktemp('bert')
    theirs.save_pretrained(folder)
    return theirs, folder


def padded_batch():
    """ids, segments, keep (B, T), padded with id 0 on the right."""
    ids, segments = batch(length=9)
    keep = torch.arange(9) < torch.tensor([[9], [5], [7]])
    return ids * keep, segments * keep, keep


def their_logits(theirs, ids, segments, keep):
    return theirs(input_ids=ids, token_type_ids=segments, attention_mask=keep.long()).logits


def test_bert_gives_the_logits_of_hugging_face(bert):
    theirs, folder = bert
    ids, segments, keep = padded_batch()
    wanted = their_logits(theirs, ids, segments, keep)
    ours = MaskedLM.from_pretrained(folder)
    assert difference(ours(ids, segments=segments, keep=keep)[keep], wanted[keep]) < 1e-5 * wanted.abs().max()
    assert source.count_parameters(ours) == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize('train', [False, True])
def test_bert_gives_the_gradients_of_hugging_face(bert, train):
    """In training the same seed drops the same values: dropout sits in the same places, in the same order."""
    theirs, folder = bert
    ours = MaskedLM.from_pretrained(folder)
    assert (ours.config.dropout, ours.config.attention_dropout) == (0.1, 0.1)
    ids, segments, keep = padded_batch()
    targets = torch.where(keep, ids, -100)
    theirs.zero_grad()
    torch.manual_seed(9)
    logits = their_logits(theirs.train(train), ids, segments, keep)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='sum').backward()
    theirs.eval()
    torch.manual_seed(9)
    ours.train(train)(ids, targets=targets, segments=segments, keep=keep).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, their_name in source.hugging_face_names(ours).items():
        one, other = ours.get_parameter(name).grad, gradients[their_name]
        assert difference(one, other) < 1e-4 * max(other.abs().max().item(), 1e-2), name


@pytest.mark.parametrize('ours, theirs, head', [
    (SequenceClassifier, 'BertForSequenceClassification', 'classifier'),
    (SpanClassifier, 'BertForQuestionAnswering', 'qa_outputs'),
    (MultipleChoice, 'BertForMultipleChoice', 'classifier')])
def test_heads_give_the_logits_of_hugging_face(ours, theirs, head):
    transformers = pytest.importorskip('transformers')
    theirs = randomised(getattr(transformers, theirs)(transformers.BertConfig(**SIZES)))
    ours = ours(EncoderConfig(40, 16, 3, 4, 24, 36)).eval()
    weights, names = theirs.state_dict(), source.hugging_face_names(ours)
    names = {name: their_name for name, their_name in names.items() if name.startswith('encoder.')}
    for kind in ('weight', 'bias'):
        names.update({f'pooler.{kind}': f'bert.pooler.dense.{kind}', f'classifier.{kind}': f'{head}.{kind}'})
    ours.load_state_dict({name: weights[names[name]] for name in ours.state_dict()})
    ids, segments, keep = padded_batch()
    if isinstance(ours, MultipleChoice):                            # (B, C, T): three choices for each of two
        ids, segments, keep = (torch.stack([x, x.roll(1, 0)]) for x in (ids, segments, keep))
    given = ours(ids, segments, keep)
    wanted = theirs(input_ids=ids, token_type_ids=segments, attention_mask=keep.long())
    if isinstance(ours, SpanClassifier):
        given = torch.stack(given)[:, keep]
        wanted = torch.stack([wanted.start_logits, wanted.end_logits])[:, keep]
    else:
        wanted = wanted.logits
    assert difference(given, wanted) < 1e-5 * wanted.abs().max()


def test_export_and_import_again(tmp_path):
    transformers = pytest.importorskip('transformers')
    ours = randomised(MaskedLM(EncoderConfig(**SMALL, dropout=0.2, attention_dropout=0.3))).train()
    ours.save_pretrained(tmp_path)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    ids, segments, keep = padded_batch()
    wanted = ours.eval()(ids, segments=segments, keep=keep)
    given = their_logits(theirs, ids, segments, keep)
    assert difference(given[keep], wanted[keep]) < 1e-5 * wanted.abs().max()
    again = MaskedLM.from_pretrained(tmp_path)
    assert not again.training
    assert again.config == ours.config
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize('variant, position', [
    (variant, position) for variant in VARIANTS for position in POSITION
    if (variant['attention'], position) != ('original', 'absolute')])
def test_export_refuses_what_bert_has_no_layer_for(variant, position, tmp_path):
    with pytest.raises(UserError) as error:
        build(position=position, **variant).save_pretrained(tmp_path)
    for words in (variant['attention'], position, "only attention='original' with position='absolute'"):
        assert words in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('setting', [
    {'hidden_act': 'gelu_new'}, {'layer_norm_eps': 1e-5}, {'tie_word_embeddings': False},
    {'is_decoder': True}], ids=str)
def test_import_refuses_other_berts(setting, tmp_path):
    transformers = pytest.importorskip('transformers')
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **setting)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f'{next(iter(setting))}={next(iter(setting.values()))}'):
        MaskedLM.from_pretrained(tmp_path)


def test_import_refuses_what_is_no_masked_lm(tmp_path):
    transformers = pytest.importorskip('transformers')
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / 'headless')
    with pytest.raises(UserError, match='headless: has no cls.predictions.*: not a masked-LM model'):
        MaskedLM.from_pretrained(tmp_path / 'headless')
    other = transformers.DistilBertConfig(vocab_size=40, dim=24, n_layers=3, n_heads=4, hidden_dim=36)
    transformers.DistilBertForMaskedLM(other).save_pretrained(tmp_path / 'distilled')
    with pytest.raises(UserError, match='model_type=distilbert'):
        MaskedLM.from_pretrained(tmp_path / 'distilled')


def test_rope_gives_the_logits_of_roformer():
    transformers = pytest.importorskip('transformers')
    config = transformers.RoFormerConfig(**SIZES, rotary_value=False)
    theirs = randomised(transformers.RoFormerForMaskedLM(config))
    ours = MaskedLM(EncoderConfig(40, 16, 3, 4, 24, 36, position='rope')).eval()
    names, weights = source.hugging_face_names(ours), theirs.state_dict()
    del names['encoder.position.table.weight']
    ours.load_state_dict({name: weights[names[name].replace('bert.', 'roformer.', 1)] for name in names})
    ids, segments, keep = padded_batch()
    wanted = their_logits(theirs, ids, segments, keep)
    assert difference(ours(ids, segments=segments, keep=keep)[keep], wanted[keep]) < 1e-5 * wanted.abs().max()
