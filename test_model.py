"""The model against its papers: loop-level oracles, printed counts, padding, reductions, Hugging Face.

    $ python -m pytest test_model.py            # CPU, offline

The tests range over the tables of model.py: a new row is tested at once, and fails until it has an entry
in ORACLE, QKV and SEES (attention), SCHEME, POSITION_COUNT and SEES (position), STARTS (pair_init), KNOBS (a
knob that one row reads), or in the table of its oracles: NORMALISERS, SCALES, NORMS, HEADS, POOLINGS.
"""
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as source
from configurator import UserError
from model import (
    ALLOWED_POSITIONS,
    APPLIES_TO,
    ATTENTION,
    LM_HEAD,
    NORM,
    NORMALISER,
    PAIR_INIT,
    POOLING,
    POSITION,
    RELU_SCALE,
    SHATTER,
    Block,
    Encoder,
    EncoderConfig,
    MaskedLM,
    MultipleChoice,
    PermutationLM,
    SequenceClassifier,
    SpanClassifier,
)

SMALL = {'vocab_size': 23, 'block_size': 12, 'n_layer': 2, 'n_head': 3, 'n_embd': 12, 'n_inner': 20}
NEEDS = {**dict.fromkeys(SHATTER, {'n_head': 6}), 'gau': {'key_size': 6},       # what a row needs
         'rpe': {'clip_distance': 3}}                                           # less than T = 6
XLNET = {'attention': 'xlnet', 'position': 'none'}


def system(attention, position, **settings):
    return {'attention': attention, 'position': position,
            **NEEDS.get(attention, {}), **NEEDS.get(position, {}), **settings}


def allowed(attention):
    return ALLOWED_POSITIONS.get(attention, tuple(POSITION))


def rows_of(table):
    return [pytest.param(settings, id='-'.join(map(str, settings.values()))) for settings in table]


FREE = [{'attention': name} for name in ATTENTION if name not in ALLOWED_POSITIONS]     # go with any position
FREE += [{'attention': 'pairwise', 'pair_rank': 2}]
SYSTEMS = [system(**variant, position=position) for variant in FREE for position in POSITION]
SYSTEMS += [system(name, position) for name in ALLOWED_POSITIONS for position in ALLOWED_POSITIONS[name]]
SYSTEMS += [system('part_mask', 'none', same_partition=True)]
SYSTEMS += [system('shatter', 'none', one_value_matrix=True)]
GATED = [system('gau', 'rope', normaliser=name, **scale, bias=bias) for bias in (True, False)
         for name in NORMALISER for scale in ([{'relu_scale': x} for x in RELU_SCALE]
                                              if name in APPLIES_TO['relu_scale'][1] else [{}])]
ONE_EACH = [system(**variant, position='rope') for variant in FREE]             # every attention once
ONE_EACH += [system(name, ALLOWED_POSITIONS[name][0]) for name in ALLOWED_POSITIONS]

KEEP = torch.arange(6) < torch.tensor([[6], [4], [5]])         # (B, T) of batch(), padded on the right
HOLES = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()

each_variant = pytest.mark.parametrize('variant', rows_of(FREE))
each_system = pytest.mark.parametrize('settings', rows_of(SYSTEMS))
each_attention = pytest.mark.parametrize('settings', rows_of(ONE_EACH))
each_position = pytest.mark.parametrize('position', POSITION)


def build(kind=MaskedLM, **settings):
    """A small float64 model in eval mode with every parameter random: biases, norms, diagonals and S too."""
    torch.manual_seed(1)
    model = kind(EncoderConfig(**{**SMALL, **settings})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            live = settings.get('attention') == 'gau' and parameter.dim() > 1       # else all relus are 0
            parameter.normal_(std=1.0 if live else 0.5)
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


# ---- oracles: the papers' equations, one vector at a time, numpy in float64 ----

class Place(NamedTuple):
    """What the oracle of a layer reads besides states."""
    config: EncoderConfig
    layer: int
    weights: dict               # of the encoder's position encoding
    at: object                  # position of each query; None: it has none, and no positional term enters


def linear(w, name, x):
    y = w[name + '.weight'] @ x
    return y + w[name + '.bias'] if name + '.bias' in w else y


def layer_norm(w, name, x):
    mean = sum(x) / len(x)
    variance = sum((a - mean) ** 2 for a in x) / len(x)
    y = (x - mean) / math.sqrt(variance + 1e-12) * w[name + '.weight']
    return y + w[name + '.bias'] if name + '.bias' in w else y


def rms_norm(w, name, x):
    """Liu 2022, section 4.1, with the mean square for VAR (see the errata): no weights."""
    assert not part(w, name)
    return x / math.sqrt(sum(a * a for a in x) / len(x) + 1e-12)


def gelu(x):
    return np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in x])


def silu(x):
    return np.array([a / (1 + math.exp(-a)) for a in x])


def part(w, prefix):
    return {name[len(prefix):]: value for name, value in w.items() if name.startswith(prefix)}


def float32(x):
    return float(np.float32(x))         # the model's constant tables are float32


# positions: turn a vector (K,) at position t; vector (D,) of the distance d = j - i; bias of head h and d

def rotated(x, t):
    """Su et al. 2021, eq. 34: the pair (2i, 2i + 1) at position t turns by t 10000^(-2i / K)."""
    y = np.zeros(len(x))
    for i in range(len(x) // 2):
        angle = t * 10000 ** (-2 * i / len(x))
        cos, sin = float32(math.cos(angle)), float32(math.sin(angle))
        y[2 * i] = x[2 * i] * cos - x[2 * i + 1] * sin
        y[2 * i + 1] = x[2 * i] * sin + x[2 * i + 1] * cos
    return y


def clipped(place, d):
    """Shaw et al. 2018, eq. 3: distances beyond c - 1 share the row of c - 1."""
    c = place.config.clip_distance
    return place.weights['table'][place.layer, c - 1 + max(-(c - 1), min(d, c - 1))]


def bucket(d):
    """Raffel et al. 2019: 8 + floor(8 log(n / 8) / log(128 / 8)) from n = |d| = 8 on, in whole numbers."""
    n = abs(d)
    half = n if n < 8 else max(b for b in range(8, 16) if n * n >= 64 * 2 ** (b - 8))
    return half + 16 * (d > 0)


def bucket_bias(place, h, d):
    return place.weights['bucket_bias.weight'][bucket(d), h]


class Scheme(NamedTuple):
    turn: Callable = lambda x, t: x
    vector: Callable = lambda place, d: None
    bias: Callable = lambda place, h, d: 0.0
    embedded: bool = False      # vectors of positions are added to the embeddings


SCHEME = {'absolute': Scheme(embedded=True), 'none': Scheme(), 'rope': Scheme(turn=rotated),
          'rpe': Scheme(vector=clipped), 'rab': Scheme(bias=bucket_bias, embedded=True)}


def scheme_of(place):
    return Scheme() if place.at is None else entry(SCHEME, place.config.position, 'oracle')


@cache
def bernstein(h, d, n_head, layer, n_layer):
    """f_h(d) of Tian et al. 2021, section A.1; at d = 0 each half gets B_v(0) / 2."""
    degree = n_head // 2 - 1
    left, v = divmod(h, n_head // 2)
    if d == 0:
        return 0.5 if v == 0 else 0.0
    if left != (d < 0):
        return 0.0
    alpha = -(layer + 1) / n_layer * degree
    beta = -1 / degree * (degree / 12) ** ((layer + 1) / n_layer)
    u = math.log(math.exp(beta * abs(d)) * (1 - math.exp(alpha)) + math.exp(alpha)) / alpha
    return float32(math.comb(degree, v) * u ** v * (1 - u) ** (degree - v))


def whole(place, i, h, j):
    return 1.0


def parted(place, i, h, j):
    """N[h, i, j]; 1 for a query without a position."""
    if place.at is None:
        return 1.0
    layer = place.config.n_layer - 1 if place.config.same_partition else place.layer
    return bernstein(h, j - place.at[i], place.config.n_head, layer, place.config.n_layer)


# weights of one query from its scores and the keys that it sees

def softmaxed(scores, sees):
    weights = [math.exp(score) if seen else 0.0 for score, seen in zip(scores, sees, strict=True)]
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def sigmoid_l2(scores, sees):
    """Tian et al. 2021, eq. 6; weights of padding are 0 before the norm."""
    weights = [1 / (1 + math.exp(-score)) if seen else 0.0 for score, seen in zip(scores, sees, strict=True)]
    length = math.sqrt(sum(weight ** 2 for weight in weights))
    return [weight / length if length else 0.0 for weight in weights]


# attention of the queries y to the tokens x.  sees[i][j]: query i may look at token j

def original(w, x):
    """Courtois et al. 2024, eq. 1 and 2: q, k, v (D,) of one token."""
    return [linear(w, name, x) for name in ('query', 'key', 'value')]


def symmetric(w, x):
    """Courtois et al. 2024, eq. 3: Q(x) Q(y)^T."""
    return [linear(w, name, x) for name in ('query', 'query', 'value')]


def pairwise(w, x):
    """Courtois et al. 2024, eq. 6: Q(x) S Q(y)^T = sum_ab Q(x)_a S_ab Q(y)_b; S_ab = sum_c A_ac B_bc."""
    query, pair = linear(w, 'query', x), w['pair']
    n_head, size = pair.shape[:2]
    if 'pair_key' in w:
        pair = np.array([[[sum(a * b) for b in right] for a in left]
                         for left, right in zip(pair, w['pair_key'], strict=True)])
    q = [sum(query[h * size + a] * pair[h, a, b] for a in range(size))
         for h in range(n_head) for b in range(size)]
    return np.array(q), query, linear(w, 'value', x)


def shared(w, x):
    """Kowsher et al. 2024, section 2.3: S = x Ws, scaled by the diagonals D_q, D_k, D_v."""
    return [linear(w, 'shared', x) * w[name] for name in ('query_diag', 'key_diag', 'value_diag')]


def head_slices(place):
    size = place.config.n_embd // place.config.n_head
    return [slice(h * size, (h + 1) * size) for h in range(place.config.n_head)]


def many_heads(w, y, x, sees, place, project, share=whole):
    """softmax(q k^T / sqrt(K)) v of each head, with the terms of the position encoding."""
    scheme, mixed = scheme_of(place), np.zeros((len(y), place.config.n_embd))
    matrices = {name: value for name, value in w.items() if not name.endswith('bias')}
    for i, query in enumerate(y):
        at = None if place.at is None else place.at[i]
        q, keys, values = project(w, query)[0], [], []
        for j, token in enumerate(x):
            _, k, v = project(w, token)
            vector = None if at is None else scheme.vector(place, j - at)
            if vector is not None:                      # Tian et al. 2021, section 2: R Wk and R Wv
                _, k_rel, v_rel = project(matrices, vector)
                k, v = k + k_rel, v + v_rel
            keys.append(k)
            values.append(v)
        for h, head in enumerate(head_slices(place)):
            turned = scheme.turn(q[head], at)
            scores = [turned @ scheme.turn(k[head], j) / math.sqrt(len(turned))
                      + (0.0 if at is None else scheme.bias(place, h, j - at)) for j, k in enumerate(keys)]
            for j, weight in enumerate(softmaxed(scores, sees[i])):
                mixed[i, head] += weight * share(place, i, h, j) * values[j][head]
    return mixed


def one_head(w, y, x, sees, place, weigh, biased=False, valued=False):
    """Tian et al. 2021, sections 3.2 and 3.3: one score matrix, whose keys are the input itself."""
    mixed, T = np.zeros((len(y), place.config.n_embd)), range(len(x))
    values = [linear(w, 'value', token) for token in x]
    share = whole if place.config.one_value_matrix else parted      # a whole matrix: sum_h N_h = 1 remains
    for i, query in enumerate(y):
        q = linear(w, 'query', query)
        scores = [q @ token / math.sqrt(len(q)) for token in x]
        heads = list(enumerate(head_slices(place)))
        if biased and place.at is not None:
            table = w['part_embedding']
            scores = [scores[j] + sum(q @ table[h] * parted(place, i, h, j) for h, _ in heads) for j in T]
        weights = weigh(scores, sees[i])
        for h, head in heads:
            for j in T:
                mixed[i, head] += weights[j] * share(place, i, h, j) * values[j][head]
            if valued and place.at is not None:
                total = sum(weights[j] * parted(place, i, h, j) for j in T)
                mixed[i] += total * (w['value.weight'] @ w['part_embedding'][h])
    return mixed


def gau(w, y, x, sees, place):
    """Hua et al. 2022; Liu 2022, section 4.1.  The scale's n counts the real tokens of the row."""
    turn, config, mixed = scheme_of(place).turn, place.config, []
    bias = [w.get(name, 0.0) for name in ('query_bias', 'key_bias')]
    keys = [silu(linear(w, 'shared', token)) * w['key_diag'] + bias[1] for token in x]
    for i, query in enumerate(y):
        q = silu(linear(w, 'shared', query)) * w['query_diag'] + bias[0]
        q = q if place.at is None else turn(q, place.at[i])
        products = [q @ (k if place.at is None else turn(k, j)) for j, k in enumerate(keys)]
        normalise = entry(NORMALISERS, config.normaliser, 'oracle')
        weights = normalise(products, sees[i], len(q), config.relu_scale)
        seen = sum(a * silu(linear(w, 'value', token)) for a, token in zip(weights, x, strict=True))
        mixed.append(silu(linear(w, 'gate', query)) * seen)
    return mixed


def softmax(products, sees, s, scale):
    return softmaxed([product / math.sqrt(s) for product in products], sees)


def softmax_plus(products, sees, s, scale):
    n = sum(map(bool, sees))
    return softmaxed([math.log(n, 512) * product / math.sqrt(s) if n else 0.0 for product in products], sees)


def squares(products, sees):
    return [max(product, 0.0) ** 2 if seen else 0.0 for product, seen in zip(products, sees, strict=True)]


def squared_relu(products, sees, s, scale):
    divisor = entry(SCALES, scale, 'oracle')(sum(map(bool, sees)), s)
    return [weight / divisor if divisor else 0.0 for weight in squares(products, sees)]


def scaled_squared_relu(products, sees, s, scale):
    """Section 3.3: relu^2(q k / sqrt(s)) / (c n s), c their sum."""
    weights, n = squares([product / math.sqrt(s) for product in products], sees), sum(map(bool, sees))
    return [weight / (sum(weights) * n * s) if sum(weights) else 0.0 for weight in weights]


def sinusoid(d, size):
    """Vaswani et al. 2017 as in Dai et al. 2019: the sines of all frequencies, then the cosines."""
    angles = [d * 10000 ** (-2 * m / size) for m in range(size // 2)]
    return np.array([float32(f(angle)) for f in (math.sin, math.cos) for angle in angles])


def xlnet(w, y, x, sees, place):
    """Yang et al. 2019 after Dai et al. 2019, section 3.3: ((q + u) k_j + (q + v) r_(i-j)) / sqrt(K)."""
    mixed = np.zeros((len(y), place.config.n_embd))
    for i, query in enumerate(y):
        for head in head_slices(place):
            q, scores = linear(w, 'query', query)[head], []
            for j, token in enumerate(x):
                score = (q + w['content_bias'][head]) @ linear(w, 'key', token)[head]
                if place.at is not None:
                    r = linear(w, 'distance', sinusoid(place.at[i] - j, place.config.n_embd))[head]
                    score += (q + w['distance_bias'][head]) @ r
                scores.append(score / math.sqrt(len(q)))
            for weight, token in zip(softmaxed(scores, sees[i]), x, strict=True):
                mixed[i, head] += weight * linear(w, 'value', token)[head]
    return mixed


ORACLE = {
    'original': partial(many_heads, project=original),
    'symmetric': partial(many_heads, project=symmetric),
    'pairwise': partial(many_heads, project=pairwise),
    'shared': partial(many_heads, project=shared),
    'part_mask': partial(many_heads, project=original, share=parted),
    'one_head_softmax': partial(one_head, weigh=softmaxed),
    'one_head_sigmoid': partial(one_head, weigh=sigmoid_l2),
    'part_bias': partial(one_head, weigh=sigmoid_l2, biased=True),
    'shatter': partial(one_head, weigh=sigmoid_l2, biased=True, valued=True),
    'gau': gau,
    'xlnet': xlnet,
}
NORMALISERS = {'softmax': softmax, 'softmax_plus': softmax_plus, 'squared_relu': squared_relu,
               'scaled_squared_relu': scaled_squared_relu}
SCALES = {'n2': lambda n, s: n ** 2, 'n': lambda n, s: n, 'ns': lambda n, s: n * s, 's2': lambda n, s: s ** 2,
          'ns2': lambda n, s: n * s * s}
NORMS = {'layer': layer_norm, 'rms': rms_norm}


def block_oracle(w, y, x, sees, place):
    """Post-LN: x = norm(x + f(x)), attention then MLP; GAU has no MLP."""
    norm = entry(NORMS, place.config.norm, 'oracle')
    attend, own = entry(ORACLE, place.config.attention, 'oracle'), part(w, 'attention.')
    y = [a + linear(own, 'out', b) for a, b in zip(y, attend(own, y, x, sees, place), strict=True)]
    if place.config.attention == 'gau':
        return [norm(w, 'norm', a) for a in y]
    y = [norm(w, 'attention_norm', a) for a in y]
    return [norm(w, 'mlp_norm', a + linear(w, 'contract', gelu(linear(w, 'expand', a)))) for a in y]


def layer_oracle(w, layer, y, x, sees, at, config):
    place = Place(config, layer, part(w, 'position.'), at)
    return block_oracle(part(w, f'blocks.{layer}.'), y, x, sees, place)


def embedding_oracle(w, ids, segments, config):
    x = [w['token.weight'][ids[t]] + w['segment.weight'][segments[t]] for t in range(len(ids))]
    if entry(SCHEME, config.position, 'oracle').embedded:
        x = [a + w['position.table.weight'][t] for t, a in enumerate(x)]
    return [entry(NORMS, config.norm, 'oracle')(w, 'norm', a) for a in x]


def states_oracle(w, ids, segments, keep, config):
    """X^0 to X^L of one row, T vectors (D,) each."""
    T, states = range(len(ids)), [embedding_oracle(w, ids, segments, config)]
    for layer in range(config.n_layer):
        states.append(layer_oracle(w, layer, states[-1], states[-1], [keep for _ in T], T, config))
    return states


def bert_head(w, x, table, config):
    norm = entry(NORMS, config.norm, 'oracle')
    x = norm(w, 'norm', gelu(linear(w, 'transform', x)))
    return table @ x + w.get('bias', 0.0)


def decoder_head(w, x, table, config):
    assert not w
    return table @ x


def cls(w, states, keep, config):
    return np.tanh(linear(w, 'pooler.dense', states[-1][0]))


def first(w, states, keep, config):
    assert not part(w, 'pooler.')
    return states[-1][0]


def layerwise(w, states, keep, config):
    """Tian et al. 2021, section 3.4: y_0 passes the layers, each of which sees the recorded X^k."""
    y = [w['pooler.query_embedding']]
    for layer in range(config.n_layer):
        y = layer_oracle(part(w, 'encoder.'), layer, y, states[layer], [keep], None, config)
    return y[0]


HEADS = {'bert': bert_head, 'decoder': decoder_head}
POOLINGS = {'cls': cls, 'first': first, 'layerwise': layerwise}


def masked_lm_oracle(w, ids, segments, keep, config):
    states = states_oracle(part(w, 'encoder.'), ids, segments, keep, config)
    head, table = entry(HEADS, config.lm_head, 'oracle'), w['encoder.token.weight']
    return [head(part(w, 'head.'), x, table, config) for x in states[-1]]


def classifier_oracle(w, ids, segments, keep, config):
    states = states_oracle(part(w, 'encoder.'), ids, segments, keep, config)
    return linear(w, 'classifier', entry(POOLINGS, config.pooling, 'oracle')(w, states, keep, config))


def permutation_oracle(w, ids, segments, keep, positions, order, config):
    """Yang et al. 2019, section 2.3: content sees order_j <= order_i, queries see order_j < order_i."""
    encoder, T = part(w, 'encoder.'), range(len(ids))
    x, g = embedding_oracle(encoder, ids, segments, config), [w['query_embedding'] for _ in positions]
    content = [[keep[j] and order[j] <= order[i] for j in T] for i in T]
    query = [[keep[j] and order[j] < order[i] for j in T] for i in positions]
    for layer in range(config.n_layer):
        g, x = (layer_oracle(encoder, layer, g, x, query, positions, config),
                layer_oracle(encoder, layer, x, x, content, T, config))
    head, table = entry(HEADS, config.lm_head, 'oracle'), w['encoder.token.weight']
    return [head(part(w, 'head.'), a, table, config) for a in g]


def weights_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def agrees(model, oracle):
    """To 1e-10, on a full row, a padded one, one with holes and one without a real token."""
    w, (ids, segments) = weights_of(model), batch(rows=4)
    given = model(ids, segments=segments, attention_mask=HOLES).detach().numpy()
    for b in range(len(ids)):
        wanted = oracle(w, *(x[b].tolist() for x in (ids, segments, HOLES)), model.config)
        assert np.abs(given[b] - np.array(wanted)).max() < 1e-10, f'row {b}'


@each_system
def test_equals_the_loops_of_the_paper(settings):
    agrees(build(**settings), masked_lm_oracle)


@pytest.mark.parametrize('pooling', POOLING)
@each_system
def test_classifier_equals_the_loops_of_the_paper(settings, pooling):
    agrees(build(SequenceClassifier, **settings, pooling=pooling), classifier_oracle)


@pytest.mark.parametrize('norm, lm_head, bias', [*itertools.product(NORM, LM_HEAD, (True, False))][1:])
@each_attention
def test_other_axes_equal_the_loops(settings, norm, lm_head, bias):
    agrees(build(**settings, norm=norm, lm_head=lm_head, bias=bias), masked_lm_oracle)


@pytest.mark.parametrize('settings', rows_of(GATED))
def test_normalisers_equal_the_loops(settings):
    model = build(**settings, norm='rms', lm_head='decoder')
    assert any(name.endswith('key_bias') for name in model.state_dict()) == settings['bias']
    agrees(model, masked_lm_oracle)
    agrees(build(SequenceClassifier, **settings, pooling='layerwise'), classifier_oracle)


@pytest.mark.parametrize('drawn', [True, False])
def test_two_streams_equal_the_loops(drawn):
    model = build(PermutationLM, **XLNET)
    w, (ids, segments) = weights_of(model), batch(rows=4)
    positions = torch.tensor([[1, 4], [3, 0], [5, 3], [2, 1]])
    order = torch.tensor([[3, 0, 5, 1, 4, 2], [0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 1, 1], [0, 1, 2, 3, 4, 5]])
    given = model(ids, positions, segments=segments, attention_mask=HOLES, order=order if drawn else None)
    if not drawn:
        order = torch.zeros_like(ids).scatter(1, positions, 1)
    for b in range(len(ids)):
        row = (x[b].tolist() for x in (ids, segments, HOLES, positions, order))
        wanted = permutation_oracle(w, *row, model.config)
        assert np.abs(given[b].detach().numpy() - np.array(wanted)).max() < 1e-10, f'row {b}'


# ---- the partition of unity ----

PARTS = {       # (H, L, k, x): f_0(x) to f_(H/2-1)(x), by hand from Tian, A.1.  (4, 12, 11, 12) in full:
    # D' = 1, alpha = -1, beta = -1/12, u = -ln(e^-1 (1 - e^-1) + e^-1) = -ln 0.600424 = 0.510120; 1 - u, u
    (4, 12, 0, 1): (0.4538572561, 0.5461427439),        # alpha = -1/12, beta = -(1/12)^(1/12) = -0.812966
    (4, 12, 0, 3): (0.0906546245, 0.9093453755),
    (4, 12, 11, 1): (0.9481364701, 0.0518635299),
    (4, 12, 11, 12): (0.4898801256, 0.5101198744),
    # D' = 5, alpha = -5/12, beta = -(5/12)^(1/12) / 5 = -0.185931; for k = 11 alpha = -5, beta = -1/12
    (12, 12, 0, 1): (0.4624670717, 0.3856193639, 0.1286165463, 0.0214488917, 0.0017884750, 0.0000596510),
    (12, 12, 0, 5): (0.0175664647, 0.1092816890, 0.2719383261, 0.3383478691, 0.2104875804, 0.0523780707),
    (12, 12, 11, 1): (0.9199459858, 0.0774046597, 0.0026051448, 0.0000438396, 0.0000003689, 0.0000000012),
    (12, 12, 11, 12): (0.3324221964, 0.4095658825, 0.2018447792, 0.0497371933, 0.0061279474, 0.0003020013),
    (12, 12, 11, 60): (0.0000499666, 0.0015611467, 0.0195104832, 0.1219164558, 0.3809137384, 0.4760482093),
}


def partition_table(attention, n_head, n_layer, layer, block_size):
    """N (H, 2 T - 1) of a layer, column j - i + T - 1."""
    settings = {'attention': attention, 'position': 'none'}
    config = EncoderConfig(9, block_size, n_layer, n_head, n_head, 4, **settings)
    return Block(config, layer).attention.partition.table


@pytest.mark.parametrize('attention', SHATTER)
def test_partition_has_the_values_of_the_paper(attention):
    for (n_head, n_layer, layer, x), values in PARTS.items():
        for block_size in (x + 1, 70):                                      # at any length of the row
            table = partition_table(attention, n_head, n_layer, layer, block_size)
            wanted, half = torch.tensor(values), n_head // 2
            right, left = table[:, block_size - 1 + x], table[:, block_size - 1 - x]
            assert difference(right[:half], wanted) < 1e-7 and difference(left[half:], wanted) < 1e-7
            assert (right[half:] == 0).all() and (left[:half] == 0).all()
            here = table[:, block_size - 1].tolist()
            assert here == [0.5, *[0.0] * (half - 1), 0.5, *[0.0] * (half - 1)]


@pytest.mark.parametrize('block_size', [1, 2, 50, 3000])
@pytest.mark.parametrize('n_head, n_layer', [(4, 1), (6, 3), (12, 12), (16, 24), (32, 2)])
def test_partition_is_one_of_unity(n_head, n_layer, block_size):
    for layer in range(n_layer):
        table = partition_table('shatter', n_head, n_layer, layer, block_size)
        assert table.shape == (n_head, 2 * block_size - 1) and table.dtype == torch.float32
        assert (table >= 0).all()
        assert difference(table.double().sum(0), torch.ones(2 * block_size - 1)) < 1e-6
        assert torch.equal(table[:n_head // 2], table[n_head // 2:].flip(1))


@pytest.mark.parametrize('unfold', [source.unfold, source.unfold_copy])
@pytest.mark.parametrize('rows, length, size', [(1, 1, 1), (2, 5, 1), (2, 5, 5), (3, 11, 6), (4, 9, 3)])
def test_unfold_is_that_of_pytorch(unfold, rows, length, size):
    """Values and gradients; the copy is what torch_xla and torch.compile get."""
    x = torch.randn(rows, length, dtype=torch.float64, requires_grad=True)
    wanted = x.unfold(1, size, 1)
    onto = torch.randn(wanted.shape, dtype=torch.float64)
    given = unfold(x, size)
    assert torch.equal(given, wanted) and (given.data_ptr() == x.data_ptr()) == (unfold is source.unfold)
    gradients = [torch.autograd.grad((y * onto).sum(), x)[0] for y in (given, wanted)]
    assert difference(*gradients) < 1e-14
    assert unfold(x.detach().to('meta'), size).shape == wanted.shape


# ---- counts ----

SHAPES = {'small': (4, 8, 512, 2048), 'base': (12, 12, 768, 3072), 'large': (24, 16, 1024, 4096)}
COUNTS = {                              # masked LM of the three shapes: Courtois, 2; Kowsher, 4
    'original': (28795194, 109514298, 335174458),
    'symmetric': (27744570, 102427194, 309984058),
    'pairwise': (27875642, 103017018, 311556922),
    'shared': (26700090, 95367738, 284867386),
}
CLASSIFIERS = {'original': 109483778, 'shared': 95337218}       # base, 2 labels
QKV = {                                 # parameters of attention without its output projection
    'original': lambda D, H, K, r, s: 3 * (D * D + D),
    'symmetric': lambda D, H, K, r, s: 2 * (D * D + D),
    'pairwise': lambda D, H, K, r, s: 2 * (D * D + D) + (2 * H * K * r if r else H * K * K),
    'shared': lambda D, H, K, r, s: D * D + D + 3 * D,
    'part_mask': lambda D, H, K, r, s: 3 * (D * D + D),
    'one_head_softmax': lambda D, H, K, r, s: 2 * (D * D + D),
    'one_head_sigmoid': lambda D, H, K, r, s: 2 * (D * D + D),
    'part_bias': lambda D, H, K, r, s: 2 * (D * D + D) + H * D,
    'shatter': lambda D, H, K, r, s: 2 * (D * D + D) + H * D,
    'gau': lambda D, H, K, r, s: 4 * D * D + D * s + 4 * s,                     # U, V (2D wide), Z, g and b
    'xlnet': lambda D, H, K, r, s: 4 * D * D + 2 * D,                           # no biases, but u and v
}
POSITION_COUNT = {
    'absolute': lambda T, L, D, H, c: T * D,
    'none': lambda T, L, D, H, c: 0,
    'rope': lambda T, L, D, H, c: 0,
    'rpe': lambda T, L, D, H, c: L * (2 * c - 1) * D,
    'rab': lambda T, L, D, H, c: 32 * H + T * D,
}


def on_paper(kind, shape, vocab_size=30522, **settings):
    with torch.device('meta'):
        return kind(EncoderConfig(vocab_size, 512, *SHAPES[shape], **settings))


@cache
def count_of(kind, shape, attention='original'):
    return source.count_parameters(on_paper(kind, shape, attention=attention))


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('attention', COUNTS)
def test_parameter_counts_of_the_papers(attention, shape):
    assert count_of(MaskedLM, shape, attention) == dict(zip(SHAPES, COUNTS[attention], strict=True))[shape]


@pytest.mark.parametrize('attention', CLASSIFIERS)
def test_parameter_counts_of_classifiers(attention):
    assert count_of(SequenceClassifier, 'base', attention) == CLASSIFIERS[attention]


@pytest.mark.parametrize('kind, shape, attention, percent', [
    (MaskedLM, 'small', 'symmetric', 3.65), (MaskedLM, 'small', 'pairwise', 3.19),      # Courtois, table 2
    (MaskedLM, 'base', 'symmetric', 6.47), (MaskedLM, 'base', 'pairwise', 5.93),
    (MaskedLM, 'base', 'shared', 12.92), (SequenceClassifier, 'base', 'shared', 12.92)])    # see the errata
def test_saved_parameters_in_percent(kind, shape, attention, percent):
    saved = 1 - count_of(kind, shape, attention) / count_of(kind, shape)
    assert round(100 * saved, 2) == percent


@pytest.mark.parametrize('shape, attention, position, count', [
    ('base', 'original', 'absolute', 84934656), ('large', 'original', 'absolute', 301989888),
    ('base', 'shatter', 'none', 77967360), ('large', 'shatter', 'none', 277217280),
    ('base', 'original', 'rpe', 87284736), ('base', 'xlnet', 'none', 92012544)])
def test_matrices_of_tian_table_1(shape, attention, position, count):
    """Without embeddings, biases and norms; the large rows with all of their 24 layers (see the errata)."""
    encoder = on_paper(Encoder, shape, 32000, attention=attention, position=position)
    left_out = ('token.', 'segment.', 'position.table.weight', 'norm', 'bias')
    assert count == sum(parameter.numel() for name, parameter in encoder.named_parameters()
                        if not any(word in name for word in left_out))


def test_classifiers_of_liu_table_4():
    """It counts the RoFormers' rotary tables, and GAU without b_q and b_k of section 4.1 (see the errata)."""
    rms = {'position': 'rope', 'norm': 'rms', 'lm_head': 'decoder', 'bias': False}
    version_1 = on_paper(SequenceClassifier, 'base', 50000, position='rope')
    version_2 = on_paper(SequenceClassifier, 'base', 12000, **rms)
    assert source.count_parameters(version_1) + 1536 * 64 == 124147970
    assert source.count_parameters(version_2) + 512 * 64 == 94777090
    gau = {**rms, 'attention': 'gau', 'pooling': 'first'}
    with torch.device('meta'):
        for bias, count in [(False, 96519170), (True, 96525314)]:
            config = EncoderConfig(12000, 512, 24, 12, 768, 3072, **{**gau, 'bias': bias})
            assert source.count_parameters(SequenceClassifier(config)) == count


@pytest.mark.parametrize('variant', rows_of([
    *[{'attention': name} for name in ATTENTION],
    *[{'attention': 'pairwise', 'pair_rank': rank} for rank in (1, 2, 16)]]))
def test_parameter_formula_of_attention(variant):
    sizes = {**SMALL, 'n_embd': 96, 'n_head': 6}
    attention = Encoder(EncoderConfig(**{**sizes, **system(**variant, position='none')})).blocks[0].attention
    formula = entry(QKV, variant['attention'], 'parameter formula')
    without_out = source.count_parameters(attention) - source.count_parameters(attention.out)
    assert without_out == formula(96, 6, 16, variant.get('pair_rank', 0), NEEDS['gau']['key_size'])


@each_position
def test_parameter_formula_of_position(position):
    formula = entry(POSITION_COUNT, position, 'parameter formula')
    encoder = build(Encoder, **system('original', position))
    assert source.count_parameters(encoder.position) == formula(12, 2, 12, 3, 3)


@each_attention
def test_without_biases_and_norms(settings):
    """The only parameters named bias are then those of XLNet and T5, and none is named norm."""
    names = [name for name, _ in build(**settings, bias=False, norm='rms').named_parameters()]
    left = [name for name in names if 'norm' in name or 'bias' in name]
    assert all(name.endswith(('content_bias', 'distance_bias', 'bucket_bias.weight')) for name in left), left
    assert 'head.transform.weight' in names


@each_system
def test_training_flops_are_those_of_pytorch(settings):
    """Exactly. Under the plain kernel, for the counter has no formula for the CPU's fused one."""
    model = build(**settings)
    (ids, segments), positions = batch(rows=1, length=10), torch.tensor([[1, 4, 7]])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, positions, ids.gather(1, positions), segments).sum().backward()
    assert counter.get_total_flops() == source.training_flops(model.config, length=10, n_predicted=3)
    matrices = sum(weight.numel() for name, weight in model.encoder.blocks.named_parameters()
                   if name.endswith('weight') and weight.dim() == 2)
    assert counter.get_total_flops() > 6 * 10 * matrices


@pytest.mark.parametrize('attention', SHATTER)
def test_recomputation_is_no_training_flop(attention):
    one, other = (EncoderConfig(**{**SMALL, **system(attention, 'none'), 'recompute': recompute})
                  for recompute in (False, True))
    assert source.training_flops(one, 10, 3) == source.training_flops(other, 10, 3)


def test_two_streams_cost_more_flops_than_one():
    config = EncoderConfig(**{**SMALL, **XLNET})
    assert source.training_flops(config, 10, 3) < source.training_flops(config, 10, 3, PermutationLM)


MATRICES = {            # entries of the matrices by which attention multiplies each token, the output's too
    'original': lambda D, K, r: 4 * D * D,
    'symmetric': lambda D, K, r: 3 * D * D,
    'pairwise': lambda D, K, r: 3 * D * D + D * (2 * r or K),
    'shared': lambda D, K, r: 2 * D * D,
}


@pytest.mark.parametrize('lm_head', LM_HEAD)
@each_variant
def test_training_flops_by_hand(variant, lm_head):
    """A step has three products, of 2 operations each: 6 a matrix entry and token, 12 D a pair and layer."""
    config, D, T, k = EncoderConfig(**{**SMALL, **variant, 'lm_head': lm_head}), 12, 10, 3
    entries = MATRICES[variant['attention']](D, 4, config.pair_rank) + 2 * D * config.n_inner
    head = D * config.vocab_size + (D * D if lm_head == 'bert' else 0)
    wanted = config.n_layer * (6 * entries * T + 12 * T * T * D) + 6 * head * k
    assert source.training_flops(config, T, k) == wanted


# ---- padding, gradients, positions ----

@each_system
def test_padding_changes_nothing(settings):
    encoder = build(Encoder, **settings)
    classifier = build(SequenceClassifier, **settings, pooling='layerwise')
    ids, segments = batch()
    keep = (torch.arange(10) < 6).expand(3, -1)
    states, logits = [], []
    for seed in (3, 4):                                 # padding of other tokens and segments
        padding, kinds = batch(length=4, seed=seed)
        padded = torch.cat((ids, padding), 1), torch.cat((segments, (kinds + seed) % 2), 1)
        states.append(encoder(*padded, keep)[:, :6])
        logits.append(classifier(*padded, keep))
    assert torch.equal(*states) and torch.equal(*logits)                # weight exactly 0, not merely small
    assert difference(states[0], encoder(ids, segments)) < 1e-12
    assert difference(logits[0], classifier(ids, segments)) < 1e-12
    assert difference(encoder(*padded)[:, :6], states[0]) > 1e-3        # without the mask it matters
    assert difference(classifier(*padded), logits[0]) > 1e-3


def is_a_shift(name, settings, ordered):
    """Is it a bias of keys?  It adds the same q_i b to all scores of a softmax, unless rope rotates it."""
    felt = settings['position'] == 'rope' and ordered or settings.get('normaliser', '').endswith('relu')
    return name.endswith(('attention.key.bias', 'attention.key_bias')) and not felt


@pytest.mark.parametrize('settings', rows_of([*SYSTEMS, *GATED]))
def test_every_parameter_gets_a_gradient(settings):
    ids, segments = batch()
    kinds = [(MaskedLM, 'cls'), *[(SequenceClassifier, name) for name in POOLING]]
    one_query_may_be_dead = settings.get('normaliser', '').endswith('relu')
    for kind, pooling in kinds[:1] if one_query_may_be_dead else kinds:
        model = build(kind, **settings, pooling=pooling)
        if kind is MaskedLM:
            model(ids, targets=ids, segments=segments, attention_mask=KEEP).sum().backward()
        else:
            F.cross_entropy(model(ids, segments, KEEP), torch.tensor([0, 1, 1])).backward()
        for name, parameter in model.named_parameters():
            ordered = pooling != 'layerwise' or not name.startswith('encoder.blocks.1')
            if not ordered and name.endswith(('part_embedding', 'distance.weight', 'distance_bias')):
                continue                                # the last block has one query, without a position
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            if is_a_shift(name, settings, ordered):
                assert difference(parameter.grad, 0) < 1e-9, name
            else:
                assert difference(parameter.grad, 0) > 1e-6, name


def test_every_distance_gets_a_gradient():
    model = build(**system('original', 'rpe'))
    ids, segments = batch()
    model(ids, targets=ids, segments=segments, attention_mask=KEEP).sum().backward()
    assert (model.encoder.position.table.grad.abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize('settings', rows_of([*SYSTEMS, *GATED]))
def test_gradients_are_slopes(settings):
    """Of the states along one random direction of all parameters, against the central difference."""
    encoder, (ids, segments) = build(Encoder, **settings), batch(rows=4)
    parameters, generator = list(encoder.parameters()), torch.Generator().manual_seed(11)
    onto = torch.randn(4, 6, 12, generator=generator, dtype=torch.float64)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    gradients = torch.autograd.grad((encoder(ids, segments, HOLES) * onto).sum(), parameters)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    values, step = [], 1e-6
    with torch.no_grad():
        for move in (step, -2 * step):
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=move)
            values.append((encoder(ids, segments, HOLES) * onto).sum())
    assert difference(slope, (values[0] - values[1]) / (2 * step)) < 1e-5 * max(1, slope.abs().item())


@pytest.fixture
def kernel_calls(monkeypatch):
    """Arguments of each call of scaled_dot_product_attention: q, k, v, the mask or bias, ..."""
    calls, plain = [], F.scaled_dot_product_attention

    def spy(*arguments):
        calls.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', spy)
    return calls


@pytest.mark.parametrize('settings', rows_of([system('original', position='rab'), XLNET]))
@pytest.mark.parametrize('keep', [None, KEEP], ids=['whole', 'padded'])
def test_learned_biases_are_laid_out_for_the_fused_kernel(settings, keep, kernel_calls):
    """CUDA's memory-efficient kernel needs a last stride of 1; else a slower one is taken silently."""
    build(Encoder, **settings)(*batch(), keep)
    assert [bias.stride(-1) for q, k, v, bias, *_ in kernel_calls] == [1, 1]


@pytest.mark.parametrize('settings', rows_of([
    *[system(**variant, position='rab') for variant in FREE], XLNET]))
def test_learned_biases_get_the_gradient_of_a_plain_softmax(settings, monkeypatch):
    """In float32, for which PyTorch also has kernels that give no gradient of the bias."""
    def plain(q, k, v, mask=None, dropout=0.0):
        scores = q @ k.mT / math.sqrt(q.size(-1))
        mask = torch.zeros(()) if mask is None else mask
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
        return (scores + mask).softmax(-1) @ v

    model, (ids, segments), gradients = build(**settings).float(), batch(), []
    for function in (F.scaled_dot_product_attention, plain):
        monkeypatch.setattr(F, 'scaled_dot_product_attention', function)
        losses = model(ids, targets=ids, segments=segments, attention_mask=KEEP)
        gradients.append(torch.autograd.grad(losses.sum(), list(model.parameters())))
    for (name, _), one, other in zip(model.named_parameters(), *gradients, strict=True):
        assert difference(one, other) < 1e-4 * max(1, other.abs().max().item()), name
        if name.endswith(('bucket_bias.weight', 'content_bias', 'distance_bias')):
            assert difference(one, other) < 1e-4 * other.abs().max(), name


SEES = {'absolute': 'places', 'none': 'a set', 'rope': 'distances', 'rpe': 'distances', 'rab': 'places',
        **dict.fromkeys(SHATTER, 'distances'), 'xlnet': 'distances', 'gau': 'as its position'}


@each_system
def test_what_a_system_sees(settings):
    """A set: permuted tokens give permuted states.  Distances: a row moved right gives the same states."""
    encoder = build(Encoder, **settings)
    ids, segments = batch()
    states, order = encoder(ids, segments), torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = encoder(ids[:, order], segments[:, order])
    moved = encoder(F.pad(ids, (3, 0)), F.pad(segments, (3, 0)), (torch.arange(9) >= 3).expand(3, -1))[:, 3:]
    own = entry(SEES, settings['attention'], 'property') if settings['attention'] in ALLOWED_POSITIONS else ''
    seen = own if own in ('a set', 'distances', 'places') else entry(SEES, settings['position'], 'property')
    bound = 1e-6 if settings['position'] == 'rope' else 1e-12           # rope's table is float32
    for changed, same in [(difference(permuted, states[:, order]), seen == 'a set'),
                          (difference(moved, states), seen != 'places')]:
        assert changed < bound if same else changed > 1e-3


@pytest.mark.parametrize('position', [name for name in POSITION if name != 'rpe'])      # no fused kernel
@each_variant
def test_which_scores_are_symmetric(variant, position, kernel_calls):
    """Those of shared too: s D_q D_k s^T is symmetric, unless rope comes between D_q and D_k."""
    encoder = build(Encoder, position=position, **variant)
    encoder(*batch())
    assert len(kernel_calls) == encoder.config.n_layer
    name, still = variant['attention'], position != 'rope'
    for q, k, *_ in kernel_calls:
        skew = difference(q @ k.mT, k @ q.mT)
        assert skew < 1e-12 if name == 'symmetric' or name == 'shared' and still else skew > 1e-3


@pytest.mark.parametrize('equal', [True, False])
@pytest.mark.parametrize('position', ALLOWED_POSITIONS['gau'])
def test_gated_scores_are_symmetric_with_equal_diagonals(position, equal, monkeypatch):
    calls, plain = [], NORMALISER['softmax_plus']

    def spy(scores, *others):
        calls.append(scores)
        return plain(scores, *others)

    monkeypatch.setitem(NORMALISER, 'softmax_plus', spy)
    encoder = build(Encoder, **system('gau', position))
    if equal:
        for block in encoder.blocks:
            block.attention.key_diag.data = block.attention.query_diag.data
            block.attention.key_bias.data = block.attention.query_bias.data
    encoder(*batch())
    assert len(calls) == encoder.config.n_layer
    assert all((difference(scores, scores.mT) < 1e-6) == equal for scores in calls)     # 1e-6: rope's table


# ---- reductions: claim -> (settings of one, settings of other, its attention's weights -> the other's) ----

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


def without_terms(w):
    """XLNet with u = v = 0 and W_r = 0, from the weights of `original` without biases."""
    terms = {name: torch.zeros(12) for name in ('content_bias', 'distance_bias')}
    return {**w, **terms, 'distance.weight': torch.zeros(12, 12)}


REDUCTIONS = {
    'symmetric is original with Wk = Wq': (
        {'attention': 'symmetric'}, {'attention': 'original'}, tied_query_and_key),
    'symmetric is pairwise with S = I': (
        {'attention': 'symmetric'}, {'attention': 'pairwise'}, unit_pair),
    'factors of rank K are pairwise with S = A B^T': (
        {'attention': 'pairwise', 'pair_rank': 4}, {'attention': 'pairwise'}, multiplied_factors),
    'shared is original with Ws D for each W, so with D = 1 original with tied matrices': (
        {'attention': 'shared'}, {'attention': 'original'}, scaled_matrices),
}
TIED = {        # S multiplies queries alone, so Wq S cannot stand for it where keys of distances pass Wq
    'pairwise is original with Wk = Wq and Wq S for Wq': (
        {'attention': 'pairwise'}, {'attention': 'original'}, pair_in_query),
}
OWN_REDUCTIONS = {
    'xlnet without its terms is original without positions and biases': (
        {'attention': 'original', 'position': 'none', 'bias': False}, {**XLNET, 'bias': False},
        without_terms),
}


def same_rest(one, other, translate=dict):
    """`other` with all weights of `one`, those of attention translated."""
    rest = {name: value for name, value in one.state_dict().items() if '.attention.' not in name}
    other.load_state_dict(rest, strict=False)
    for a, b in zip(one.blocks, other.blocks, strict=True):
        b.attention.load_state_dict(translate(a.attention.state_dict()))


@pytest.mark.parametrize('one, other, translate', [
    *[pytest.param({**one, 'position': position}, {**other, 'position': position}, translate,
                   id=f'{claim}-{position}')
      for claim, (one, other, translate) in (REDUCTIONS | TIED).items() for position in POSITION],
    *[pytest.param(*reduction, id=claim) for claim, reduction in OWN_REDUCTIONS.items()]])
def test_reduction(one, other, translate):
    first, second = build(Encoder, **one), build(Encoder, **other)
    same_rest(first, second, translate)
    ids, segments = batch()
    assert difference(first(ids, segments, KEEP), second(ids, segments, KEEP)) < 1e-10


def same_states(one, other):
    ids, segments = batch()
    return difference(one(ids, segments, KEEP), other(ids, segments, KEEP)) < 1e-12


def test_part_mask_without_parts_is_original():
    one = build(Encoder, n_head=6, attention='original', position='none')
    other = build(Encoder, **system('part_mask', 'none'))
    same_rest(one, other)
    assert not same_states(one, other)
    for block in other.blocks:
        block.attention.partition.table.fill_(1.0)
    assert same_states(one, other)


def test_part_bias_without_embeddings_is_one_head_sigmoid():
    one, other = (build(Encoder, **system(name, 'none')) for name in ('one_head_sigmoid', 'part_bias'))
    same_rest(one, other, lambda w: {**w, 'part_embedding': torch.zeros(6, 12)})
    assert same_states(one, other)


def values_without_parts(w):
    """Wv that maps all rows of R to 0."""
    onto = torch.linalg.pinv(w['part_embedding']) @ w['part_embedding']
    return {**w, 'value.weight': w['value.weight'] @ (torch.eye(12, dtype=torch.float64) - onto)}


@pytest.mark.parametrize('translate, same', [(dict, False), (values_without_parts, True)])
def test_shatter_without_values_of_parts_is_part_bias(translate, same):
    one, other = (build(Encoder, **system(name, 'none')) for name in ('part_bias', 'shatter'))
    same_rest(one, other, translate)
    same_rest(other, one)
    assert same_states(one, other) == same


@pytest.mark.parametrize('position, plain', [('rpe', 'none'), ('rab', 'absolute')])
@each_variant
def test_zero_tables_add_nothing(variant, position, plain):
    one = build(Encoder, **system(**variant, position=plain))
    other = build(Encoder, **system(**variant, position=position))
    with torch.no_grad():
        (other.position.table if position == 'rpe' else other.position.bucket_bias.weight).zero_()
    same_rest(one, other)
    assert same_states(one, other)


@pytest.mark.parametrize('real', [100, 512])
def test_softmax_plus_is_softmax_at_512_tokens(real):
    sizes = {**system('gau', 'rope'), 'block_size': 520, 'n_layer': 1}
    one, other = build(Encoder, **sizes), build(Encoder, **sizes, normaliser='softmax')
    ids, segments = batch(rows=1, length=520)
    keep = (torch.arange(520) < real)[None]
    assert (difference(one(ids, segments, keep), other(ids, segments, keep)) < 1e-12) == (real == 512)


@pytest.mark.parametrize('pooling', POOLING)
@pytest.mark.parametrize('attention', SHATTER)
def test_recomputation_changes_nothing(attention, pooling):
    """Also in training: the same weights are dropped again."""
    (ids, segments), results = batch(), []
    for recompute in (False, True):
        model = build(SequenceClassifier, **system(attention, 'none'), recompute=recompute, pooling=pooling)
        torch.manual_seed(12)
        logits = model.train()(ids, segments, KEEP)
        gradients = torch.autograd.grad(logits.sum(), list(model.parameters()), materialize_grads=True)
        results.append((logits, *gradients))
    for one, other in zip(*results, strict=True):
        assert difference(one, other) < 1e-12


@pytest.mark.parametrize('settings', rows_of([*[
    system(**variant, position=position) for variant in FREE for position in ('absolute', 'none')],
    system('gau', 'none'), system('gau', 'absolute')]))
def test_layerwise_pooling_from_a_token_follows_it(settings):
    """Where attention does not depend on positions, y_0 = X^0[i] gives y_L = X^L[i]."""
    model = build(SequenceClassifier, **settings, pooling='layerwise')
    ids, segments = batch(rows=1)
    states = model.encoder.states(ids, segments)
    assert len(states) == 3 and torch.equal(states[-1], model.encoder(ids, segments))
    assert torch.equal(states[0], model.encoder.embed(ids, segments))
    with torch.no_grad():
        model.pooler.query_embedding.copy_(states[0][0, 2])
    assert difference(model(ids, segments), model.classifier(states[-1][:, 2])) < 1e-12


# ---- the permutation objective ----

def test_predictions_see_what_comes_before_them_alone():
    """Shown by the gradients of the logits at position p with respect to each token's embedding."""
    model, (ids, segments) = build(PermutationLM, **XLNET), batch()
    positions, order = torch.tensor([[4], [1], [3]]), torch.tensor([[3, 0, 5, 1, 4, 2]]).expand(3, -1)
    keep, embedded = HOLES[:3] | torch.tensor([[0] * 6, [0] * 6, [1] + [0] * 5]).bool(), []
    model.encoder.norm.register_forward_hook(lambda module, given, x: embedded.append(x.requires_grad_()))
    logits = model(ids, positions, segments=segments, attention_mask=keep, order=order)
    gradient, = torch.autograd.grad((logits * torch.randn(logits.shape)).sum(), embedded)
    seen = keep & (order < order.gather(1, positions))
    assert torch.equal(gradient.abs().amax(-1) > 1e-9, seen)
    assert (gradient[~seen] == 0).all()


def test_permutation_loss_and_padding():
    model, (ids, segments) = build(PermutationLM, **XLNET), batch()
    positions = torch.tensor([[1, 4], [3, 0], [4, 3]])
    targets = ids.gather(1, positions)
    logits = model(ids, positions, segments=segments, attention_mask=KEEP)
    losses = model(ids, positions, targets, segments, KEEP)
    assert losses.dtype == torch.float32 and losses.shape == targets.shape
    assert difference(losses, F.cross_entropy(logits.mT, targets, reduction='none')) < 1e-5
    ids, segments, keep = F.pad(ids, (0, 3), value=7), F.pad(segments, (0, 3)), F.pad(KEEP, (0, 3))
    longer = model(ids, positions, segments=segments, attention_mask=keep)
    assert difference(longer, logits) < 1e-12
    losses.sum().backward()
    assert all(difference(parameter.grad, 0) > 1e-6 for parameter in model.parameters())
    assert source.count_parameters(model) == source.count_parameters(build(**XLNET)) + 12


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
    full = model(ids, segments=segments, attention_mask=KEEP)
    wanted = torch.stack([full[b, positions[b]] for b in range(3)])
    assert difference(model(ids, positions, segments=segments, attention_mask=KEEP), wanted) < 1e-12
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

@pytest.mark.parametrize('kind', [SequenceClassifier, SpanClassifier, MultipleChoice, None])
@each_system
def test_initial_values(settings, kind):
    kind = kind or (PermutationLM if settings == XLNET else MaskedLM)
    torch.manual_seed(5)
    sizes = {'vocab_size': 500, 'block_size': 40, 'n_layer': 1, 'n_embd': 96, 'n_inner': 96, 'n_label': 50}
    pooling = 'layerwise' if settings['position'] == 'none' else 'cls'
    model = kind(EncoderConfig(**{**SMALL, **settings, **sizes, 'pooling': pooling}))
    for name, value in model.named_parameters():
        if name.endswith('bias') and not name.endswith(('content_bias', 'distance_bias')):     # XLNet's u, v
            assert (value == 0).all(), name
        elif 'norm' in name or name.endswith('diag'):
            assert (value == 1).all(), name
        elif '.attention.pair' not in name:                         # N(0, 0.02), five standard errors
            assert abs(value.mean().item()) < 5 * 0.02 / value.numel() ** 0.5, name
            assert abs(value.std().item() / 0.02 - 1) < 5 / (2 * value.numel()) ** 0.5, name


STARTS = {      # mean of S of rank r; deviation of S's entries; of those of A B^T, None if they differ
    'identity': (lambda K, r: torch.eye(K, r) @ torch.eye(r, K), lambda K: 0.02, None),
    'fan_in': (lambda K, r: torch.zeros(K, K), lambda K: K ** -0.5, lambda K: K ** -0.5),
    'normal': (lambda K, r: torch.zeros(K, K), lambda K: 0.02, lambda K: 0.02),
    'unit': (lambda K, r: torch.zeros(K, K), lambda K: 1.0, lambda K: 1.0),
}


@pytest.mark.parametrize('size', [8, 32])
@pytest.mark.parametrize('rank', [0, 1, 5])
@pytest.mark.parametrize('pair_init', PAIR_INIT)
def test_initial_pairwise_factors(pair_init, rank, size):
    torch.manual_seed(6)
    mean, full, factored = entry(STARTS, pair_init, 'statistics')
    settings = {'attention': 'pairwise', 'pair_init': pair_init, 'pair_rank': rank}
    attention = ATTENTION['pairwise'](EncoderConfig(9, 8, 1, 32, 32 * size, 8, **settings), 0)
    pair = attention.pair @ attention.pair_key.mT if rank else attention.pair
    noise = (pair - mean(size, rank or size)).detach()
    assert (noise.mean(0).abs() < 6 * noise.std(0) / 32 ** 0.5).all()              # over 32 heads
    deviation = factored if rank else full
    if deviation:                                       # entries of A B^T depend on each other: a wider bound
        assert abs(noise.std().item() / deviation(size) - 1) < (0.25 if rank else 0.06)


# ---- dropout, precision, compilation ----

@pytest.mark.parametrize('knob', ['dropout', 'attention_dropout'])
@each_system
def test_dropout_is_applied_in_training_alone(settings, knob):
    rates = {'dropout': 0.0, 'attention_dropout': 0.0}
    model = build(**{**settings, **rates, knob: 0.5})
    ids, segments = batch()
    states = model(ids, segments=segments)
    assert torch.equal(states, model(ids, segments=segments))
    model.train()
    first, second = model(ids, segments=segments), model(ids, segments=segments)
    assert difference(first, second) > 1e-3 and difference(first, states) > 1e-3
    plain = build(**{**settings, **rates}).train()
    assert difference(plain(ids, segments=segments), states) < 1e-12


@pytest.mark.parametrize('knob', ['dropout', 'attention_dropout'])
def test_dropout_of_two_streams(knob):
    rates = {'dropout': 0.0, 'attention_dropout': 0.0, knob: 0.5}
    model, (ids, segments) = build(PermutationLM, **XLNET, **rates), batch()
    positions = torch.tensor([[1, 4], [3, 0], [4, 3]])
    logits = [model.train(train)(ids, positions, segments=segments) for train in (False, False, True, True)]
    assert torch.equal(*logits[:2]) and difference(*logits[1:3]) > 1e-3 and difference(*logits[2:]) > 1e-3


def trained(model, ids, segments, keep):
    """Losses (B, k) of a model of any kind."""
    if isinstance(model, PermutationLM):
        positions = torch.zeros(len(ids), 1, dtype=torch.long)
        return model(ids, positions, ids[:, :1], segments, keep)
    if isinstance(model, SequenceClassifier):
        return F.cross_entropy(model(ids, segments, keep).float(), ids[:, 0] % 2, reduction='none')
    return model(ids, targets=ids, segments=segments, attention_mask=keep)


@pytest.mark.parametrize('settings', rows_of([*SYSTEMS, *GATED]))
def test_bfloat16_autocast(settings):
    """Within 3 % of float32 in norm: bfloat16 keeps 8 bits, so each rounding changes up to 0.4 %."""
    torch.manual_seed(7)
    model = MaskedLM(EncoderConfig(**{**SMALL, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ids, segments = batch()
    wanted = model(ids, segments=segments, attention_mask=KEEP)
    with torch.autocast('cpu', torch.bfloat16):
        logits = model(ids, segments=segments, attention_mask=KEEP)
        losses = model(ids, targets=ids, segments=segments, attention_mask=KEEP)
    assert logits.dtype == torch.bfloat16 and losses.dtype == torch.float32
    assert (logits.float() - wanted).norm() < 0.03 * wanted.norm()
    losses.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


EDGES = {           # keep (B, T): T = 1, T beyond clip_distance; no real token, one, the last alone, all
    'one token': torch.tensor([[1], [0]]).bool(),
    'long': torch.tensor([[0] * 12, [1] + [0] * 11, [0] * 11 + [1], [1] * 12]).bool(),
    'all real': torch.ones(2, 12).bool(),               # given as None
}


@pytest.mark.parametrize('settings', rows_of([*SYSTEMS, *GATED]))
def test_edges_are_finite(settings):
    for kind in [MaskedLM, SequenceClassifier, *[PermutationLM] * (settings == XLNET)]:
        model = build(kind, **settings, pooling='layerwise').float()
        parameters = list(model.parameters())
        for growth in (1, 5):                           # 5: scores grow 25 times, far into saturation
            with torch.no_grad():
                torch._foreach_mul_(parameters, growth)
            for autocast, (name, keep) in itertools.product((False, True), EDGES.items()):
                ids, segments = batch(*keep.shape)
                with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
                    losses = trained(model, ids, segments, None if keep.all() else keep)
                gradients = torch.autograd.grad(losses.sum(), parameters, materialize_grads=True)
                finite = [x.isfinite().all() for x in (losses, *gradients)]
                assert all(finite), (growth, autocast, name)


QUICK = [                   # in every run; the others, made of much the same operations, are slow tests
    system('original', 'rope'), system('pairwise', 'rab'), system('shatter', 'none', recompute=True),
    system('gau', 'rope')]
SLOW = [system('pairwise', 'rpe'), *[x for x in ONE_EACH if 'pair_rank' not in x and x not in QUICK]]
COMPILED = rows_of(QUICK) + [pytest.param(*row.values, id=row.id, marks=pytest.mark.slow)
                             for row in rows_of(SLOW)]


@pytest.mark.parametrize('settings', COMPILED)
def test_texts_of_any_length_compile_twice(settings):
    """With the first length, then with any; else fine-tuning would compile for each length of a batch."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(build(SequenceClassifier, n_layer=1, **settings), backend='eager')
    for length in (9, 7, 10, 8, 12):
        compiled(torch.ones(3, length, dtype=torch.long), attention_mask=torch.ones(3, length).bool())
    assert counters['stats']['unique_graphs'] == 2


@pytest.mark.parametrize('settings', [*COMPILED, pytest.param(XLNET, id='plm')])
def test_compiles_to_one_graph(settings):
    """Forward and backward, as torch.compile captures them; aot_eager needs no C++ compiler."""
    torch.compiler.reset()
    kind = PermutationLM if settings is XLNET else MaskedLM
    model, gradients = build(kind, n_layer=1, **settings), []
    ids, segments = batch()
    compiled = torch.compile(partial(trained, model), fullgraph=True, backend='aot_eager')
    for function in (partial(trained, model), compiled):
        losses = function(ids, segments, KEEP)
        gradients.append(torch.autograd.grad(losses.sum(), list(model.parameters()), materialize_grads=True))
    for one, other in zip(*gradients, strict=True):
        assert difference(one, other) <= 1e-5 * other.abs().max()           # the losses are float32


@pytest.mark.parametrize('dtype, error', [
    (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize('shift', [0, -10, -16, -40, -60, -100])
def test_sigmoid_weights_of_rows_far_below_zero(shift, dtype, error):
    """The norm of a row brings its weights back to order 1, however small the sigmoids are."""
    scores = (torch.tensor([[[0.5, -1.0, 0.0, 2.0]]]) + shift).to(dtype).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1]).bool().view(1, 1, 4)
    weights = source.masked_sigmoid(scores, mask)
    wanted = sigmoid_l2(scores[0, 0].tolist(), mask.flatten().tolist())
    assert difference(weights[0, 0].double(), torch.tensor(wanted)) < error
    gradient, = torch.autograd.grad(weights[0, 0, 0], scores)
    assert gradient.isfinite().all() and gradient[0, 0, 0] > 0.1


@pytest.mark.parametrize('size', [1.0, 1e-3, 1e-5, 1e-7])
def test_rows_of_scaled_squared_relu_in_float16(size):
    """Scores of 1e-5 and 1e-7 are subnormal numbers there; rows sum to 1 / (n s)."""
    scores = (size * torch.randn(2, 6, 100, generator=torch.Generator().manual_seed(13))).half()
    mask = (torch.arange(100) < 70).expand(2, 1, 100)
    weights = 70 * 128 * NORMALISER['scaled_squared_relu'](scores, mask, torch.tensor(70.0), 128, None)
    assert difference(weights.sum(-1), 1) < 1e-6 and (weights[..., 70:] == 0).all()
    wanted = scaled_squared_relu(scores[1, 2].tolist(), mask[1, 0].tolist(), 128, 'ns')
    assert difference(weights[1, 2], 70 * 128 * torch.tensor(wanted)) < 1e-6


@pytest.mark.parametrize('name, relu_scale, theirs', [
    ('squared_relu', 'ns2', lambda a, n, s: a.relu() ** 2 / (s * n)),
    ('scaled_squared_relu', 'ns', lambda a, n, s: a.relu() ** 2 / (s * n * (a.relu() ** 2).sum(-1, True))),
    ('softmax', 'ns', lambda a, n, s: a.softmax(-1)),
    ('softmax_plus', 'ns', lambda a, n, s: (a * n.log() / math.log(512)).softmax(-1)),
])
def test_normalisers_of_table_2_are_those_of_lius_code(name, relu_scale, theirs):
    """github.com/HJHGJGHHG/GAU-PyTorch, utils/layers.py: a = q k^T / sqrt(s), padding -inf, n real tokens."""
    scores = 20 * torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    n = torch.tensor([7.0, 4.0, 2.0], dtype=torch.float64)[:, None, None]
    mask, s = torch.arange(7) < n, 16
    wanted = theirs((scores / s ** 0.5).masked_fill(~mask, -math.inf), n, s).nan_to_num(0)     # 0 / 0 there
    assert difference(NORMALISER[name](scores, mask, n, s, RELU_SCALE[relu_scale]), wanted) < 1e-12


# ---- longer and shorter rows ----

@pytest.mark.parametrize('block_size', [40, 8])
@each_system
def test_extend(settings, block_size):
    """Short rows give the same states; long ones those of one built at that length, with its weights."""
    config = EncoderConfig(**{**SMALL, **settings})
    encoder = build(Encoder, **settings)
    given, weights = encoder.config, {name: value.clone() for name, value in encoder.state_dict().items()}
    (ids, segments), keep = batch(rows=4), HOLES
    before = encoder(ids, segments, keep)
    encoder.extend(block_size)
    assert given is encoder.config and encoder.config.block_size == block_size
    assert difference(encoder(ids, segments, keep), before) < 1e-12
    fresh = build(Encoder, **{**settings, 'block_size': block_size})
    fresh.load_state_dict(encoder.state_dict())
    assert fresh.config == encoder.config and config.block_size == 12
    ids, segments = batch(length=block_size)
    assert difference(encoder(ids, segments), fresh(ids, segments)) < 1e-12
    with pytest.raises(ValueError, match=f'block_size={block_size}'):
        encoder(torch.ones(1, block_size + 1, dtype=torch.long))
    for name, value in encoder.state_dict().items():
        rows = min(len(value), len(weights[name]))
        assert torch.equal(value[:rows], weights[name][:rows]) and value.dtype == torch.float64
        assert value.shape == weights[name].shape or name == 'position.table.weight'
    assert all(parameter.requires_grad for parameter in encoder.parameters())


@pytest.mark.parametrize('position', [name for name in POSITION if SCHEME[name].embedded])
def test_extension_draws_new_rows(position):
    encoder = build(Encoder, position=position)
    encoder.extend(1012)
    rows = encoder.position.table.weight[12:]
    assert rows.shape == (1000, 12) and abs(rows.std().item() / 0.02 - 1) < 5 / (2 * rows.numel()) ** 0.5


def test_extension_of_rpe_repeats_the_rows_of_the_longest_distances():
    """Tian et al. 2021, section 2: "copying the learnt embeddings" of the longest distances in training."""
    encoder = build(Encoder, position='rpe', clip_distance=20)      # rows of 12 tokens: distances -11 to 11
    table = encoder.position.table.detach().clone()
    encoder.extend(40)
    for row in range(39):
        assert torch.equal(encoder.position.table[:, row], table[:, min(max(row, 19 - 11), 19 + 11)])
    longer = encoder.position.table.detach().normal_().clone()      # trained at that length
    for block_size in (12, 40):
        encoder.extend(block_size)
        assert torch.equal(encoder.position.table, longer)          # shorter rows forget nothing


def test_models_leave_the_config_they_are_given():
    config = EncoderConfig(**SMALL)
    model, other = MaskedLM(config), MaskedLM(config)
    model.encoder.extend(40)
    assert (model.config.block_size, other.config.block_size, config.block_size) == (40, 12, 12)
    assert model(torch.ones(1, 40, dtype=torch.long)).shape == (1, 40, 23)


# ---- what a user can get wrong ----

KNOBS = {'pair_rank': 2, 'pair_init': 'normal', 'normaliser': 'softmax', 'key_size': 64,    # not defaults
         'recompute': True, 'relu_scale': 'n', 'clip_distance': 5, 'same_partition': True,
         'one_value_matrix': True}


def test_every_knob_of_one_row_is_tried():
    assert KNOBS.keys() == APPLIES_TO.keys()


@pytest.mark.parametrize('settings, words', [
    ({'attention': 'pairwize'}, ["attention='pairwize'", *ATTENTION]),
    ({'position': 'rpe2'}, ["position='rpe2'", *POSITION]),
    ({'pair_init': 'zeros'}, ["pair_init='zeros'", *PAIR_INIT]),
    ({'norm': 'batch'}, ["norm='batch'", *NORM]),
    ({'lm_head': 'gpt'}, ["lm_head='gpt'", *LM_HEAD]),
    ({'normaliser': 'relu'}, ["normaliser='relu'", *NORMALISER]),
    ({'relu_scale': 'n3'}, ["relu_scale='n3'", *RELU_SCALE]),
    ({'pooling': 'mean'}, ["pooling='mean'", *POOLING]),
    *[({**system(name, 'none'), 'n_head': n_head}, [f'n_head={n_head}', f"attention='{name}'", 'even', '4'])
      for name in SHATTER for n_head in (2, 3)],
    *[(system(name, position), [f"position='{position}'", f"attention='{name}'",
                               f"choose {' or '.join(ALLOWED_POSITIONS[name])}"])
      for name in ALLOWED_POSITIONS for position in POSITION if position not in ALLOWED_POSITIONS[name]],
    ({**system('gau', 'rope'), 'key_size': 5}, ["position='rope'", '5', 'even', 'key_size']),
    *[({'attention': name, knob: value}, [f'{knob}={value!r}', 'attention', *map(repr, APPLIES_TO[knob][1])])
      for knob, value in KNOBS.items() if APPLIES_TO[knob][0] == 'attention'
      for name in ATTENTION if name not in ALLOWED_POSITIONS and name not in APPLIES_TO[knob][1]],
    *[({**system(name, ALLOWED_POSITIONS[name][0]), knob: value},
       [f'{knob}={value!r}', *map(repr, APPLIES_TO[knob][1])])
      for knob, value in KNOBS.items() if APPLIES_TO[knob][0] == 'attention'
      for name in ALLOWED_POSITIONS if name not in APPLIES_TO[knob][1]],
    *[({'position': name, 'clip_distance': 5}, ['clip_distance=5', "position='rpe'"])
      for name in POSITION if name != 'rpe'],
    *[(system('gau', 'rope', normaliser=name, relu_scale='n'), ["relu_scale='n'", "'squared_relu'"])
      for name in NORMALISER if name != 'squared_relu'],
    ({'n_head': 5}, ['n_embd=12', 'n_head=5', 'multiple']),
    ({'n_embd': 9, 'position': 'rope'}, ["position='rope'", '3', 'even']),
    ({'attention': 'pairwise', 'pair_rank': 5}, ['pair_rank=5', '4']),
    ({'attention': 'pairwise', 'pair_rank': -1}, ['pair_rank=-1', '4']),
    ({'n_layer': 1.5}, ['n_layer=1.5', 'int']), ({'n_head': True}, ['n_head=True', 'int']),
    ({'dropout': '0.1'}, ["dropout='0.1'", 'float']), ({'attention': ['x']}, ["attention=['x']", 'str']),
    *[({name: value}, [f'{name}={value}', '[0, 1)'])
      for name in ('dropout', 'attention_dropout') for value in (-0.1, 1.0, math.nan)],
    *[({name: 0}, [f'{name}=0', 'at least 1']) for name in
      ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'n_inner', 'n_segment', 'n_label')],
    ({**system('gau', 'rope'), 'key_size': 0}, ['key_size=0', 'at least 1']),
    ({'position': 'rpe', 'clip_distance': 0}, ['clip_distance=0', 'at least 1']),
    ({'bias': 1}, ['bias=1', 'bool']), ({'recompute': 'yes'}, ["recompute='yes'", 'bool']),
], ids=str)
def test_config_error_names_key_value_and_choices(settings, words):
    with pytest.raises(UserError) as error:
        EncoderConfig(**{**SMALL, **settings})
    assert all(word in str(error.value) for word in words), str(error.value)
    assert '\n' not in str(error.value)


@each_system
def test_every_system_is_allowed_and_no_other(settings):
    config = EncoderConfig(**{**SMALL, **settings})
    assert config.position in allowed(config.attention)
    if settings != XLNET:
        with pytest.raises(UserError, match="only attention='xlnet'"):
            PermutationLM(config)


@each_position
def test_rows_longer_than_block_size_raise(position):
    encoder = build(Encoder, **system('original', position))
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


@pytest.fixture(scope='module')
def transformers():
    return pytest.importorskip('transformers')


def randomised(model):
    torch.manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:                             # not RoFormer's sinusoids
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope='module')
def bert(transformers, tmp_path_factory):
    """(transformers' BertForMaskedLM with random weights, its folder)"""
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
    given = ours(ids, segments=segments, attention_mask=keep)
    assert difference(given[keep], wanted[keep]) < 1e-5 * wanted.abs().max()
    assert source.count_parameters(ours) == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize('train', [False, True])
def test_bert_gives_the_gradients_of_hugging_face(bert, train):
    """In training too, with the same seed: both apply dropout at the same points in the same order."""
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
    ours.train(train)(ids, targets=targets, segments=segments, attention_mask=keep).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    names = {ours: theirs for theirs, ours in source.hugging_face_names(ours.config.n_layer).items()
             if theirs in gradients}
    for name, parameter in ours.named_parameters():
        one, other = parameter.grad, gradients[names[name]]
        assert difference(one, other) < 1e-4 * max(other.abs().max().item(), 1e-2), name


@pytest.mark.parametrize('ours, theirs, head', [
    (SequenceClassifier, 'BertForSequenceClassification', 'classifier'),
    (SpanClassifier, 'BertForQuestionAnswering', 'qa_outputs'),
    (MultipleChoice, 'BertForMultipleChoice', 'classifier')])
def test_heads_give_the_logits_of_hugging_face(ours, theirs, head, transformers):
    theirs = randomised(getattr(transformers, theirs)(transformers.BertConfig(**SIZES)))
    ours = ours(EncoderConfig(40, 16, 3, 4, 24, 36)).eval()
    weights, names = theirs.state_dict(), source.hugging_face_names(ours.config.n_layer)
    ours.load_state_dict({name: weights[theirs] for theirs, name in names.items() if theirs in weights})
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


def test_export_and_import_again(tmp_path, transformers):
    ours = randomised(MaskedLM(EncoderConfig(**SMALL, dropout=0.2, attention_dropout=0.3))).train()
    source.to_transformers(ours).save_pretrained(tmp_path)
    again = MaskedLM.from_pretrained(tmp_path)
    assert not again.training
    assert again.config == ours.config
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize('settings', rows_of([
    {**variant, 'position': position, 'bias': bias}
    for variant in FREE for position in source.FAMILY for bias in (True, False)]))
def test_export_has_the_logits_and_the_input_gradients(settings, tmp_path, transformers):
    """Float32, padded, two segments; gradients with respect to the token embeddings of the batch."""
    ours = randomised(MaskedLM(EncoderConfig(**{**SMALL, 'n_head': 2, **settings})))
    source.to_transformers(ours, pad_token_id=3).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == source.FAMILY[settings['position']] + 'ForMaskedLM'
    ids, segments, keep = padded_batch()
    found = []
    for model, table in ((ours, ours.encoder.token), (theirs, theirs.get_input_embeddings())):
        states = []                                                 # the embeddings, (B, T, D)
        table.register_forward_hook(lambda module, ids, x, states=states: states.append(x))
        logits = (ours(ids, segments=segments, attention_mask=keep) if model is ours
                  else their_logits(theirs, ids, segments, keep))[keep]
        gradient, = torch.autograd.grad(F.cross_entropy(logits, ids[keep]), states)
        found.append((logits, gradient[keep]))
    for given, wanted in zip(*found, strict=True):
        assert difference(given, wanted) < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize('position', ['absolute', 'rope'])
@pytest.mark.parametrize('kind', [SequenceClassifier, SpanClassifier, MultipleChoice])
def test_fine_tuned_export_has_the_logits(kind, position, transformers):
    ours = randomised(kind(EncoderConfig(**{**SMALL, 'n_head': 2, 'attention': 'pairwise', 'n_label': 3,
                                            'lm_head': 'decoder', 'position': position})))
    if (kind, position) == (SequenceClassifier, 'rope'):
        with pytest.raises(UserError, match='no equivalent in .*RoFormerForSequenceClassification'):
            source.to_transformers(ours)
        return
    theirs = source.to_transformers(ours)
    ids, segments, keep = padded_batch()
    if kind is MultipleChoice:
        ids, segments, keep = (torch.stack([x, x.roll(1, 0)]) for x in (ids, segments, keep))
    given = ours(ids, segments, keep)
    wanted = theirs(input_ids=ids, token_type_ids=segments, attention_mask=keep.long())
    if kind is SpanClassifier:
        given = torch.stack(given)[:, keep]
        wanted = torch.stack([wanted.start_logits, wanted.end_logits])[:, keep]
    else:
        wanted = wanted.logits
    assert difference(given, wanted) < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize('settings, kind', [
    *[(settings, MaskedLM) for settings in SYSTEMS
      if settings['attention'] not in source.FOLD or settings['position'] not in source.FAMILY],
    ({'norm': 'rms'}, MaskedLM), ({'lm_head': 'decoder'}, MaskedLM),
    ({'pooling': 'first'}, SequenceClassifier), ({'pooling': 'layerwise'}, MultipleChoice)], ids=str)
def test_export_refuses_what_transformers_has_no_layer_for(settings, kind):
    with pytest.raises(UserError) as error:
        source.to_transformers(build(kind, **settings))
    name = next(name for name, (_, allowed, _) in source.EXPORTABLE.items()
                if name in settings and settings[name] not in allowed)
    said = f"{name}={settings[name]!r}: no equivalent in transformers' BERT and RoFormer, which have only "
    assert str(error.value).startswith(said) and '\n' not in str(error.value)


@pytest.mark.parametrize('setting', [
    {'hidden_act': 'gelu_new'}, {'layer_norm_eps': 1e-5}, {'tie_word_embeddings': False},
    {'is_decoder': True}], ids=str)
def test_import_refuses_other_berts(setting, tmp_path, transformers):
    transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **setting)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f'{next(iter(setting))}={next(iter(setting.values()))}'):
        MaskedLM.from_pretrained(tmp_path)


def test_import_refuses_what_is_no_masked_lm(tmp_path, transformers):
    with pytest.raises(UserError, match='nowhere: neither a checkpoint nor a BERT: [^\n]*$'):
        MaskedLM.from_pretrained(tmp_path / 'nowhere')
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / 'headless')
    with pytest.raises(UserError, match='headless: has no cls.predictions.*: not a masked-LM model'):
        MaskedLM.from_pretrained(tmp_path / 'headless')
    other = transformers.DistilBertConfig(vocab_size=40, dim=24, n_layers=3, n_heads=4, hidden_dim=36)
    transformers.DistilBertForMaskedLM(other).save_pretrained(tmp_path / 'distilled')
    with pytest.raises(UserError, match='model_type=distilbert'):
        MaskedLM.from_pretrained(tmp_path / 'distilled')


def test_rope_gives_the_logits_of_roformer(transformers):
    config = transformers.RoFormerConfig(**SIZES, rotary_value=False)
    theirs = randomised(transformers.RoFormerForMaskedLM(config))
    ours = MaskedLM(EncoderConfig(40, 16, 3, 4, 24, 36, position='rope')).eval()
    weights = {name.replace('roformer.', 'bert.', 1): value for name, value in theirs.state_dict().items()}
    names = source.hugging_face_names(ours.config.n_layer)
    ours.load_state_dict({name: weights[theirs] for theirs, name in names.items() if theirs in weights
                          and name in ours.state_dict()})
    ids, segments, keep = padded_batch()
    wanted = their_logits(theirs, ids, segments, keep)
    given = ours(ids, segments=segments, attention_mask=keep)
    assert difference(given[keep], wanted[keep]) < 1e-5 * wanted.abs().max()


def test_buckets_are_those_of_t5():
    t5 = pytest.importorskip('transformers.models.t5.modeling_t5')
    encoder = Encoder(EncoderConfig(**{**SMALL, 'position': 'rab', 'block_size': 701}))
    wanted = t5.T5Attention._relative_position_bucket(torch.arange(-700, 701), True, 32, 128)
    assert torch.equal(encoder.position.buckets(701), wanted)
    assert wanted.tolist() == [bucket(d) for d in range(-700, 701)]
    assert set(range(32)) - set(wanted.tolist()) == {16}


@pytest.fixture(scope='module')
def xlnet_pair(transformers):
    """(transformers' XLNetModel with random weights, PermutationLM with the same)"""
    config = transformers.XLNetConfig(
        vocab_size=40, d_model=24, n_layer=3, n_head=4, d_inner=36, ff_activation='gelu', untie_r=True,
        attn_type='bi', dropout=0.0, layer_norm_eps=1e-12)
    theirs = randomised(transformers.XLNetModel(config))
    ours = randomised(PermutationLM(EncoderConfig(40, 16, 3, 4, 24, 36, **XLNET)))
    weights = {'query_embedding': theirs.mask_emb.flatten()}
    for i, layer in enumerate(theirs.layer):
        own, block = layer.rel_attn, f'encoder.blocks.{i}.'
        for name, matrix in [('query', own.q), ('key', own.k), ('value', own.v), ('distance', own.r)]:
            weights[f'{block}attention.{name}.weight'] = matrix.flatten(1).T
        weights[f'{block}attention.out.weight'] = own.o.flatten(1)
        weights[f'{block}attention.content_bias'] = own.r_w_bias.flatten()
        weights[f'{block}attention.distance_bias'] = own.r_r_bias.flatten()
        for name, module in [('attention_norm', own.layer_norm), ('expand', layer.ff.layer_1),
                             ('contract', layer.ff.layer_2), ('mlp_norm', layer.ff.layer_norm)]:
            weights.update({f'{block}{name}.{kind}': x for kind, x in module.state_dict().items()})
    left = ours.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and not any('blocks' in name for name in left.missing_keys)
    return theirs, ours


def test_content_stream_gives_the_states_of_hugging_face(xlnet_pair):
    theirs, ours = xlnet_pair
    ids, segments, keep = padded_batch()
    wanted = theirs(inputs_embeds=ours.encoder.embed(ids, segments), attention_mask=keep.float())[0]
    assert difference(ours.encoder(ids, segments, keep)[keep], wanted[keep]) < 1e-5 * wanted.abs().max()


def test_two_streams_give_the_states_of_hugging_face(xlnet_pair):
    """In orders that begin with a real token: in theirs, a query that sees none averages the padding."""
    theirs, ours = xlnet_pair
    ids, segments, keep = padded_batch()
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in range(3)])
    order = torch.where(torch.arange(9) == 2, -1, order)
    positions = torch.tensor([[0, 8, 4], [4, 3, 1], [5, 0, 6]])
    wanted = theirs(
        inputs_embeds=ours.encoder.embed(ids, segments), attention_mask=keep.float(),
        perm_mask=(order[:, None] >= order[:, :, None]).float(),
        target_mapping=F.one_hot(positions, 9).float())[0]
    wanted = ours.head(wanted, ours.encoder.token.weight)
    given = ours(ids, positions, segments=segments, attention_mask=keep, order=order)
    assert difference(given, wanted) < 1e-5 * wanted.abs().max()
