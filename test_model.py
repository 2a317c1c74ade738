"""The model against its papers: loop-level oracles, printed counts, padding, reductions, Hugging Face.

    $ python -m pytest test_model.py            # CPU, offline

The tests range over the tables of model.py: a new row is tested at once, and fails until these tests know it.
A kind of attention needs one row in ATTENTIONS (its oracle, the number of its parameters, how its own ones
start and which decay) and a position encoding one in POSITIONS. A row of another table needs its oracle in
NORMALISERS, SCALES, MLPS, NORMS, BLOCKS, HEADS or POOLINGS, or its deviation in STARTS; an option that not
all use, a value in KNOBS.
"""
import cmath
import json
import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import model as source
from configurator import UserError
from model import (ATTENTION, BLOCK, LM_HEAD, NORM, NORMALISER, PAIR_INIT, POOLING, POSITION,
                   RELU_SCALE, SHATTER, Encoder, EncoderConfig, MaskedLM, MultipleChoice, PermutationLM,
                   SequenceClassifier, SpanClassifier, extended, positions_of)

ALL_POSITIONS = [name for name, kind in ATTENTION.items() if not kind.positions]
OTHERS = [name for name in ATTENTION if name not in ALL_POSITIONS]
EXPORTED = [name for name, kind in ATTENTION.items() if kind.as_bert is not source.Attention.as_bert]

# ---- models and batches ----

SMALL = {'vocab_size': 23, 'block_size': 12, 'n_layer': 2, 'n_head': 3, 'n_embd': 12, 'n_inner': 20}
NEEDS = {                                               # settings that a row of ATTENTION needs
    **dict.fromkeys(SHATTER, {'n_head': 6}),
    'gau': {'key_size': 6},
    'rpe': {'clip_distance': 3},                        # less than the 6 tokens of batch()
}
XLNET = {'attention': 'xlnet', 'position': 'none'}


def system(attention, position, **settings):
    return {'attention': attention, 'position': position, **NEEDS.get(attention, {}), **settings}


FREE = [{'attention': name} for name in ALL_POSITIONS]
FREE += [{'attention': 'pairwise', 'pair_rank': 2}]

SYSTEMS = [system(**variant, position=position) for variant in FREE for position in POSITION]
SYSTEMS += [system(name, position) for name in OTHERS for position in positions_of(name)]
SYSTEMS += [system('part_mask', 'none', same_partition=True)]
SYSTEMS += [system('shatter', 'none', one_value_matrix=True)]

GATED = [system('gau', 'rope', normaliser=name) for name in NORMALISER]
GATED += [system('gau', 'rope', normaliser=name, relu_scale=scale)
          for name in source.users_of()['relu_scale'][1] for scale in RELU_SCALE
          if scale != EncoderConfig.relu_scale]

CORE = [system(**variant, position='rope') for variant in FREE]         # every attention and position once
CORE += [system(name, positions_of(name)[0]) for name in OTHERS]
CORE += [system('original', name) for name in POSITION if name != 'rope']

MODERN = {'norm_place': 'pre', 'mlp': 'swiglu'}
MODERN_SAMPLE = [system('symmetric', 'rope', **MODERN), {**XLNET, **MODERN}]
MODERN_SLOW = [pytest.param({**settings, **MODERN}, marks=pytest.mark.slow)
               for settings in CORE if not ATTENTION[settings['attention']].block]

KEEP = torch.arange(6) < torch.tensor([[6], [4], [5]])         # (B, T) of batch(), padded on the right
HOLES = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()

each_system = pytest.mark.parametrize('settings', [*SYSTEMS, *MODERN_SAMPLE, *MODERN_SLOW], ids=str)
each_core = pytest.mark.parametrize('settings', CORE, ids=str)
each_core_or_gated = pytest.mark.parametrize('settings', [*CORE, *GATED, *MODERN_SAMPLE], ids=str)


def build(kind=MaskedLM, **settings):
    """A small float64 model in eval mode with every parameter random: biases, norms, diagonals and S too."""
    torch.manual_seed(1)
    model = kind(EncoderConfig(**{**SMALL, **settings})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # with smaller matrices all relus of GAU would be 0
            wide = settings.get('attention') == 'gau' and parameter.dim() > 1
            parameter.normal_(std=1.0 if wide else 0.5)
    return model


def batch(rows=3, length=6, seed=2):
    """ids (B, T) without 0, and segments (B, T) of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, SMALL['vocab_size'], (rows, length), generator=generator)
    second = torch.arange(length) >= length // 2
    return ids, second.long().expand(rows, -1)


def known(table, name, what):
    """table[name]; the failure of a new row says what is to be written."""
    assert name in table, f"'{name}' has no {what} in test_model.py: write one from the paper"
    return table[name]


def difference(x, y):
    return (x - y).abs().max().item()


# ---- oracles: the papers' equations, one vector at a time, numpy in float64 ----

class Layer(NamedTuple):
    """What the oracle of a layer reads besides states."""
    config: EncoderConfig
    number: int
    position: dict              # weights of the encoder's position encoding
    at: object                  # position of each query; None: it has none, and no positional term enters


def linear(w, name, x):
    y = w[name + '.weight'] @ x
    return y + w[name + '.bias'] if name + '.bias' in w else y


def layer_norm(w, name, x):
    y = (x - x.mean()) / math.sqrt(x.var() + 1e-12) * w[name + '.weight']
    return y + w[name + '.bias'] if name + '.bias' in w else y


def rms_norm(w, name, x):
    """Liu 2022, section 4.1, with the mean square for VAR (see the errata): no weights."""
    assert not part(w, name)
    return x / math.sqrt((x * x).mean() + 1e-12)


def gelu(x):
    return np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in x])


def silu(x):
    return np.array([a / (1 + math.exp(-a)) for a in x])


def part(w, prefix):
    return {name[len(prefix):]: value for name, value in w.items() if name.startswith(prefix)}


def float32(x):
    return float(np.float32(x))         # the model's constant tables are float32


# how parameters start: (mean, standard deviation)
ZEROS, ONES, NORMAL = (0.0, 0.0), (1.0, 0.0), (0.0, 0.02)


# positions: turn a vector (K,) at position t; bias of head h and distance d = j - i

def rotated(x, t):
    """Su et al. 2021, eq. 34: the pair (2i, 2i + 1) at position t turns by t 10000^(-2i / K)."""
    y = np.zeros(len(x))
    for i in range(len(x) // 2):
        angle = t * 10000 ** (-2 * i / len(x))
        cos = float32(math.cos(angle))
        sin = float32(math.sin(angle))
        y[2 * i] = x[2 * i] * cos - x[2 * i + 1] * sin
        y[2 * i + 1] = x[2 * i] * sin + x[2 * i + 1] * cos
    return y


def bucket(d):
    """Raffel et al. 2019: 8 + floor(8 log(n / 8) / log(128 / 8)) from n = |d| = 8 on, in whole numbers."""
    n = abs(d)
    half = n if n < 8 else max(b for b in range(8, 16) if n * n >= 64 * 2 ** (b - 8))
    return half + 16 * (d > 0)


def bucket_bias(layer, h, d):
    return layer.position['bucket_bias.weight'][bucket(d), h]


class PositionFacts(NamedTuple):
    """What the tests have to know of a position encoding."""
    parameters: Callable                        # their number, from the sizes of EncoderConfig
    turn: Callable = lambda x, t: x
    bias: Callable = lambda layer, h, d: 0.0
    embedded: bool = False                      # vectors of positions are added to the embeddings


POSITIONS = {
    'absolute': PositionFacts(lambda c: c.block_size * c.n_embd, embedded=True),
    'none': PositionFacts(lambda c: 0),
    'rope': PositionFacts(lambda c: 0, turn=rotated),
    'rab': PositionFacts(lambda c: 32 * c.n_head + c.block_size * c.n_embd, bias=bucket_bias, embedded=True),
}


def position_of(layer):
    """Facts of the position encoding; those of `none` for a query without a position."""
    return known(POSITIONS, 'none' if layer.at is None else layer.config.position, 'row in POSITIONS')


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


def whole(layer, i, h, j):
    return 1.0


def parted(layer, i, h, j):
    """N[h, i, j]; 1 for a query without a position."""
    if layer.at is None:
        return 1.0
    config = layer.config
    number = config.n_layer - 1 if config.same_partition else layer.number
    return bernstein(h, j - layer.at[i], config.n_head, number, config.n_layer)


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
    query = linear(w, 'query', x)
    pair = w['pair']
    n_head, size = pair.shape[:2]
    if 'pair_key' in w:
        products = []
        for left, right in zip(pair, w['pair_key'], strict=True):
            products.append([[sum(a * b) for b in right] for a in left])
        pair = np.array(products)
    q = []
    for h in range(n_head):
        for b in range(size):
            q.append(sum(query[h * size + a] * pair[h, a, b] for a in range(size)))
    return np.array(q), query, linear(w, 'value', x)


def phase(w, x):
    """Ours: each pair of entries of a query is a complex number, times e^(i a); keys are not turned."""
    query = linear(w, 'query', x)
    turned = []
    for m, angle in enumerate(w['angle']):
        number = complex(query[2 * m], query[2 * m + 1]) * cmath.exp(1j * angle)
        turned += [number.real, number.imag]
    return np.array(turned), query, linear(w, 'value', x)


def shared_kv(w, x):
    """Kayyam et al. 2026: the keys are the values too."""
    return [linear(w, name, x) for name in ('query', 'key', 'key')]


def shared(w, x):
    """Kowsher et al. 2024, section 2.3: S = x Ws, scaled by the diagonals D_q, D_k, D_v."""
    return [linear(w, 'shared', x) * w[name] for name in ('query_diag', 'key_diag', 'value_diag')]


def head_slices(layer):
    size = layer.config.n_embd // layer.config.n_head
    return [slice(h * size, (h + 1) * size) for h in range(layer.config.n_head)]


def many_heads(w, y, x, sees, layer, project, share=whole):
    """softmax(q k^T / sqrt(K)) v of each head, with the terms of the position encoding."""
    position = position_of(layer)
    mixed = np.zeros((len(y), layer.config.n_embd))
    _, keys, values = zip(*[project(w, token) for token in x], strict=True)
    for i, query in enumerate(y):
        at = 0 if layer.at is None else layer.at[i]     # `none` does not read it
        q, _, _ = project(w, query)
        for h, head in enumerate(head_slices(layer)):
            turned = position.turn(q[head], at)
            scores = []
            for j, k in enumerate(keys):
                product = turned @ position.turn(k[head], j)
                scores.append(product / math.sqrt(len(turned)) + position.bias(layer, h, j - at))
            for j, weight in enumerate(softmaxed(scores, sees[i])):
                mixed[i, head] += weight * share(layer, i, h, j) * values[j][head]
    return mixed


def relative(w, y, x, sees, layer):
    """Shaw et al. 2018, eq. 3 and 4, clipped at c - 1, with R Wk and R Wv of Tian et al. 2021, section 2."""
    c = layer.config.clip_distance
    mixed = np.zeros((len(y), layer.config.n_embd))
    for i, query in enumerate(y):
        q = linear(w, 'query', query)
        keys = [linear(w, 'key', token) for token in x]
        values = [linear(w, 'value', token) for token in x]
        if layer.at is not None:
            for j in range(len(x)):
                distance = max(1 - c, min(j - layer.at[i], c - 1))
                vector = w['distance_vectors'][distance + c - 1]
                keys[j] = keys[j] + w['key.weight'] @ vector
                values[j] = values[j] + w['value.weight'] @ vector
        for head in head_slices(layer):
            scores = [q[head] @ k[head] / math.sqrt(len(q[head])) for k in keys]
            for weight, v in zip(softmaxed(scores, sees[i]), values, strict=True):
                mixed[i, head] += weight * v[head]
    return mixed


def one_head(w, y, x, sees, layer, weigh, biased=False, valued=False):
    """Tian et al. 2021, sections 3.2 and 3.3: one score matrix, whose keys are the input itself."""
    T = range(len(x))
    heads = list(enumerate(head_slices(layer)))
    values = [linear(w, 'value', token) for token in x]
    share = whole if layer.config.one_value_matrix else parted      # a whole matrix: sum_h N_h = 1 remains
    mixed = np.zeros((len(y), layer.config.n_embd))
    for i, query in enumerate(y):
        q = linear(w, 'query', query)
        scores = [q @ token / math.sqrt(len(q)) for token in x]
        if biased and layer.at is not None:
            table = w['part_embedding']
            for j in T:
                scores[j] += sum(q @ table[h] * parted(layer, i, h, j) for h, _ in heads)
        weights = weigh(scores, sees[i])
        for h, head in heads:
            for j in T:
                mixed[i, head] += weights[j] * share(layer, i, h, j) * values[j][head]
            if valued and layer.at is not None:
                total = sum(weights[j] * parted(layer, i, h, j) for j in T)
                mixed[i] += total * (w['value.weight'] @ w['part_embedding'][h])
    return mixed


def gau(w, y, x, sees, layer):
    """Hua et al. 2022; Liu 2022, section 4.1.  The scale's n counts the real tokens of the row."""
    config = layer.config
    turn = position_of(layer).turn
    normalise = known(NORMALISERS, config.normaliser, 'oracle')
    query_bias = w.get('query_bias', 0.0)
    key_bias = w.get('key_bias', 0.0)
    keys = []
    for j, token in enumerate(x):
        k = silu(linear(w, 'shared', token)) * w['key_diag'] + key_bias
        keys.append(turn(k, j))
    values = [silu(linear(w, 'value', token)) for token in x]
    mixed = []
    for i, query in enumerate(y):
        at = 0 if layer.at is None else layer.at[i]
        q = silu(linear(w, 'shared', query)) * w['query_diag'] + query_bias
        q = turn(q, at)
        products = [q @ k for k in keys]
        weights = normalise(products, sees[i], len(q), config.relu_scale)
        seen = sum(a * value for a, value in zip(weights, values, strict=True))
        mixed.append(silu(linear(w, 'gate', query)) * seen)
    return mixed


def softmax(products, sees, s, scale):
    return softmaxed([product / math.sqrt(s) for product in products], sees)


def softmax_plus(products, sees, s, scale):
    n = sum(map(bool, sees))
    if not n:
        return [0.0] * len(products)
    scores = [math.log(n, 512) * product / math.sqrt(s) for product in products]
    return softmaxed(scores, sees)


def squares(products, sees):
    return [max(product, 0.0) ** 2 if seen else 0.0 for product, seen in zip(products, sees, strict=True)]


def squared_relu(products, sees, s, scale):
    n = sum(map(bool, sees))
    divisor = known(SCALES, scale, 'oracle')(n, s)
    return [weight / divisor if divisor else 0.0 for weight in squares(products, sees)]


def scaled_squared_relu(products, sees, s, scale):
    """Section 3.3: relu^2(q k / sqrt(s)) / (c n s), c their sum."""
    n = sum(map(bool, sees))
    weights = squares([product / math.sqrt(s) for product in products], sees)
    total = sum(weights)
    return [weight / (total * n * s) if total else 0.0 for weight in weights]


NORMALISERS = {'softmax': softmax, 'softmax_plus': softmax_plus, 'squared_relu': squared_relu,
               'scaled_squared_relu': scaled_squared_relu}
SCALES = {'n2': lambda n, s: n ** 2, 'n': lambda n, s: n, 'ns': lambda n, s: n * s, 's2': lambda n, s: s ** 2,
          'n2s': lambda n, s: n ** 2 * s, 'ns2': lambda n, s: n * s * s}


def sinusoid(d, size):
    """Vaswani et al. 2017 as in Dai et al. 2019: the sines of all frequencies, then the cosines."""
    angles = [d * 10000 ** (-2 * m / size) for m in range(size // 2)]
    return np.array([float32(f(angle)) for f in (math.sin, math.cos) for angle in angles])


def xlnet(w, y, x, sees, layer):
    """Yang et al. 2019 after Dai et al. 2019, section 3.3: ((q + u) k_j + (q + v) r_(i-j)) / sqrt(K)."""
    mixed = np.zeros((len(y), layer.config.n_embd))
    for i, query in enumerate(y):
        for head in head_slices(layer):
            q = linear(w, 'query', query)[head]
            scores = []
            for j, token in enumerate(x):
                score = (q + w['content_bias'][head]) @ linear(w, 'key', token)[head]
                if layer.at is not None:
                    r = linear(w, 'distance', sinusoid(layer.at[i] - j, layer.config.n_embd))[head]
                    score += (q + w['distance_bias'][head]) @ r
                scores.append(score / math.sqrt(len(q)))
            for weight, token in zip(softmaxed(scores, sees[i]), x, strict=True):
                mixed[i, head] += weight * linear(w, 'value', token)[head]
    return mixed


class AttentionFacts(NamedTuple):
    """What the tests have to know of an attention."""
    oracle: Callable                # (weights, queries, tokens, sees, Layer) -> input of `out` for each query
    parameters: Callable            # their number without `out`, from D, H, K = D / H, s, r and c
    own: dict = {}                  # own parameter, not of a Linear -> how it starts; None: a test of its own
    decays: tuple = ()              # those of `own` that have weight decay
    positional: tuple = ()          # parameters that only a query with a position feels


def three(D, **sizes):
    return 3 * (D * D + D)


def two(D, **sizes):
    return 2 * (D * D + D)


def with_pairs(D, H, K, r, **sizes):
    return 2 * (D * D + D) + (2 * H * K * r if r else H * K * K)


def with_parts(D, H, **sizes):
    return 2 * (D * D + D) + H * D


DIAGONALS = {'query_diag': ONES, 'key_diag': ONES}
PARTS = {'own': {'part_embedding': NORMAL}, 'decays': ('part_embedding',), 'positional': ('part_embedding',)}
ATTENTIONS = {
    'original': AttentionFacts(partial(many_heads, project=original), three),
    'symmetric': AttentionFacts(partial(many_heads, project=symmetric), two),
    'pairwise': AttentionFacts(partial(many_heads, project=pairwise), with_pairs,
                               {'pair': None, 'pair_key': None}, ('pair', 'pair_key')),
    'phase': AttentionFacts(partial(many_heads, project=phase), lambda D, **sizes: 2 * (D * D + D) + D // 2,
                            {'angle': ZEROS}),
    'shared_kv': AttentionFacts(partial(many_heads, project=shared_kv), two),
    'shared': AttentionFacts(partial(many_heads, project=shared), lambda D, **sizes: D * D + D + 3 * D,
                             {**DIAGONALS, 'value_diag': ONES}),
    'rpe': AttentionFacts(relative, lambda D, c, **sizes: 3 * (D * D + D) + (2 * c - 1) * D,
                          {'distance_vectors': NORMAL}, ('distance_vectors',), ('distance_vectors',)),
    'part_mask': AttentionFacts(partial(many_heads, project=original, share=parted), three),
    'one_head_softmax': AttentionFacts(partial(one_head, weigh=softmaxed), two),
    'one_head_sigmoid': AttentionFacts(partial(one_head, weigh=sigmoid_l2), two),
    'part_bias': AttentionFacts(partial(one_head, weigh=sigmoid_l2, biased=True), with_parts, **PARTS),
    'shatter': AttentionFacts(partial(one_head, weigh=sigmoid_l2, biased=True, valued=True), with_parts,
                              **PARTS),
    # Wu and Wv, which are 2 D wide, Wz, d and b
    'gau': AttentionFacts(gau, lambda D, s, **sizes: 4 * D * D + D * s + 4 * s,
                          {**DIAGONALS, 'query_bias': ZEROS, 'key_bias': ZEROS}),
    # no biases, but u and v
    'xlnet': AttentionFacts(xlnet, lambda D, **sizes: 4 * D * D + 2 * D,
                            {'content_bias': NORMAL, 'distance_bias': NORMAL},
                            positional=('distance.weight', 'distance_bias')),
}
NORMS = {'layer': layer_norm, 'rms': rms_norm}


def facts_of(config):
    return known(ATTENTIONS, config.attention, 'row in ATTENTIONS')


def gelu_expansion(w, x):
    return gelu(linear(w, 'expand', x))


def swiglu_expansion(w, x):
    """Shazeer 2020: silu(x Wa) * (x Wb), of 16 numbers each, as 2/3 of SMALL's 20 is 13.3."""
    both = linear(w, 'expand', x)
    return silu(both[:16]) * both[16:]


MLPS = {'gelu': gelu_expansion, 'swiglu': swiglu_expansion}


def attend_oracle(w, y, x, sees, layer):
    """Attention of the queries y to the tokens x, with its last Linear."""
    weights = part(w, 'attention.')
    mixed = facts_of(layer.config).oracle(weights, y, x, sees, layer)
    return [linear(weights, 'out', a) for a in mixed]


def post_norm(w, y, x, sees, layer):
    """x = norm(x + f(x)), attention then MLP; GAU has no MLP."""
    norm = known(NORMS, layer.config.norm, 'oracle')
    attended = attend_oracle(w, y, x, sees, layer)
    y = [a + b for a, b in zip(y, attended, strict=True)]
    if layer.config.attention == 'gau':
        return [norm(w, 'norm', a) for a in y]
    expand = known(MLPS, layer.config.mlp, 'oracle')
    y = [norm(w, 'attention_norm', a) for a in y]
    y = [a + linear(w, 'contract', expand(w, a)) for a in y]
    return [norm(w, 'mlp_norm', a) for a in y]


def pre_norm(w, y, x, sees, layer):
    """Xiong et al. 2020: x = x + f(norm(x))."""
    norm = known(NORMS, layer.config.norm, 'oracle')
    expand = known(MLPS, layer.config.mlp, 'oracle')
    normed_y = [norm(w, 'attention_norm', a) for a in y]
    normed_x = [norm(w, 'attention_norm', a) for a in x]
    attended = attend_oracle(w, normed_y, normed_x, sees, layer)
    y = [a + b for a, b in zip(y, attended, strict=True)]
    return [a + linear(w, 'contract', expand(w, norm(w, 'mlp_norm', a))) for a in y]


BLOCKS = {'post': post_norm, 'pre': pre_norm}


def layer_oracle(w, number, y, x, sees, at, config):
    layer = Layer(config, number, part(w, 'position.'), at)
    block = known(BLOCKS, config.norm_place, 'oracle')
    return block(part(w, f'blocks.{number}.'), y, x, sees, layer)


def final_oracle(w, states, config):
    """What heads and poolings read: before the last norm of pre-LN, or as it is."""
    if config.norm_place == 'post':
        return states
    return [known(NORMS, config.norm, 'oracle')(w, 'final_norm', a) for a in states]


def embedding_oracle(w, ids, segments, config):
    norm = known(NORMS, config.norm, 'oracle')
    x = [w['token.weight'][ids[t]] + w['segment.weight'][segments[t]] for t in range(len(ids))]
    if known(POSITIONS, config.position, 'row in POSITIONS').embedded:
        x = [a + w['position.table.weight'][t] for t, a in enumerate(x)]
    return [norm(w, 'norm', a) for a in x]


def states_oracle(w, ids, segments, keep, config):
    """X^0 to X^L of one row, T vectors (D,) each."""
    T = range(len(ids))
    sees = [keep for _ in T]
    states = [embedding_oracle(w, ids, segments, config)]
    for number in range(config.n_layer):
        states.append(layer_oracle(w, number, states[-1], states[-1], sees, T, config))
    return states


def bert_head(w, x, table, config):
    norm = known(NORMS, config.norm, 'oracle')
    x = norm(w, 'norm', gelu(linear(w, 'transform', x)))
    return table @ x + w.get('bias', 0.0)


def decoder_head(w, x, table, config):
    assert not w
    return table @ x


def cls(w, states, keep, config):
    return np.tanh(linear(w, 'pooler.dense', first(w, states, keep, config)))


def first(w, states, keep, config):
    return final_oracle(part(w, 'encoder.'), states[-1], config)[0]


def layerwise(w, states, keep, config):
    """Tian et al. 2021, section 3.4: y_0 passes the layers, each of which sees the recorded X^k."""
    encoder = part(w, 'encoder.')
    y = [w['pooler.query_embedding']]
    for number in range(config.n_layer):
        y = layer_oracle(encoder, number, y, states[number], [keep], None, config)
    return final_oracle(encoder, y, config)[0]


HEADS = {'bert': bert_head, 'decoder': decoder_head}
POOLINGS = {'cls': cls, 'first': first, 'layerwise': layerwise}


def logits_of(w, states, config):
    head = known(HEADS, config.lm_head, 'oracle')
    return [head(part(w, 'head.'), x, w['encoder.token.weight'], config) for x in states]


def masked_lm_oracle(w, ids, segments, keep, config):
    encoder = part(w, 'encoder.')
    states = states_oracle(encoder, ids, segments, keep, config)
    return logits_of(w, final_oracle(encoder, states[-1], config), config)


def classifier_oracle(w, ids, segments, keep, config):
    pooling = known(POOLINGS, config.pooling, 'oracle')
    states = states_oracle(part(w, 'encoder.'), ids, segments, keep, config)
    return linear(w, 'classifier', pooling(w, states, keep, config))


def permutation_oracle(w, ids, segments, keep, positions, order, config):
    """Yang et al. 2019, section 2.3: content sees order_j <= order_i, queries see order_j < order_i."""
    encoder = part(w, 'encoder.')
    T = range(len(ids))
    content_sees = [[keep[j] and order[j] <= order[i] for j in T] for i in T]
    query_sees = [[keep[j] and order[j] < order[i] for j in T] for i in positions]
    content = embedding_oracle(encoder, ids, segments, config)
    query = [w['query_embedding'] for _ in positions]
    for number in range(config.n_layer):
        # both read the content of the layer below
        query = layer_oracle(encoder, number, query, content, query_sees, positions, config)
        content = layer_oracle(encoder, number, content, content, content_sees, T, config)
    return logits_of(w, final_oracle(encoder, query, config), config)


def weights_of(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


def agrees(model, oracle):
    """To 1e-10, on a full row, a padded one, one with holes and one without a real token."""
    w = weights_of(model)
    ids, segments = batch(rows=4)
    actual = model(ids, segments=segments, attention_mask=HOLES).detach().numpy()
    for b in range(len(ids)):
        expected = oracle(w, ids[b].tolist(), segments[b].tolist(), HOLES[b].tolist(), model.config)
        assert np.abs(actual[b] - np.array(expected)).max() < 1e-10, f'row {b}'


@pytest.mark.parametrize('settings', [*SYSTEMS, *GATED, *MODERN_SAMPLE, *MODERN_SLOW], ids=str)
def test_equals_the_loops_of_the_paper(settings):
    agrees(build(**settings), masked_lm_oracle)
    agrees(build(SequenceClassifier, **settings, pooling='layerwise'), classifier_oracle)


@pytest.mark.parametrize('norm_place', BLOCK)
@pytest.mark.parametrize('pooling', POOLING)
def test_pooling_equals_the_loops(pooling, norm_place):
    agrees(build(SequenceClassifier, pooling=pooling, norm_place=norm_place), classifier_oracle)


@pytest.mark.parametrize('norm_place', BLOCK)
def test_spans_equal_the_loops(norm_place):
    model = build(SpanClassifier, norm_place=norm_place)
    w = weights_of(model)
    ids, segments = batch()
    starts, ends = model(ids, segments, KEEP)
    encoder = part(w, 'encoder.')
    for b in range(3):
        row = [x[b].tolist() for x in (ids, segments, KEEP)]
        states = states_oracle(encoder, *row, model.config)
        for t, state in enumerate(final_oracle(encoder, states[-1], model.config)):
            expected = linear(w, 'classifier', state)
            actual = np.array([starts[b, t].item(), ends[b, t].item()])
            assert np.abs(expected - actual).max() < 1e-10


@each_core
def test_other_norms_and_heads_equal_the_loops(settings):
    """Without biases; the only ones left are those of XLNet and T5."""
    pairs = [(norm, 'bert') for norm in NORM]
    pairs += [('rms', lm_head) for lm_head in LM_HEAD]
    for norm, lm_head in pairs:
        model = build(**settings, norm=norm, lm_head=lm_head, bias=False, n_layer=1)
        biases = [name for name, _ in model.named_parameters() if 'bias' in name]
        assert all(name.endswith(('content_bias', 'distance_bias', 'bucket_bias.weight')) for name in biases)
        agrees(model, masked_lm_oracle)


@pytest.mark.parametrize('drawn, norm_place', [(True, 'post'), (False, 'post'), (True, 'pre')])
def test_two_streams_equal_the_loops(drawn, norm_place):
    model = build(PermutationLM, **XLNET, norm_place=norm_place)
    w = weights_of(model)
    ids, segments = batch(rows=4)
    positions = torch.tensor([[1, 4], [3, 0], [5, 3], [2, 1]])
    order = torch.tensor([[3, 0, 5, 1, 4, 2], [0, 1, 2, 3, 4, 5], [5, 0, 3, 1, 1, 1], [0, 1, 2, 3, 4, 5]])
    actual = model(ids, positions, segments=segments, attention_mask=HOLES, order=order if drawn else None)
    if not drawn:
        order = torch.zeros_like(ids).scatter(1, positions, 1)
    for b in range(len(ids)):
        row = [x[b].tolist() for x in (ids, segments, HOLES, positions, order)]
        expected = permutation_oracle(w, *row, model.config)
        assert np.abs(actual[b].detach().numpy() - np.array(expected)).max() < 1e-10, f'row {b}'


@pytest.mark.parametrize('n_head, n_layer, length', [(4, 1, 1), (12, 12, 50), (16, 24, 3000), (32, 2, 3000)])
def test_partition_is_one_of_unity(n_head, n_layer, length):
    config = EncoderConfig(9, length, n_layer, n_head, n_head, 4, attention='shatter', position='none')
    for layer in range(n_layer):
        table = source.Partition(config, layer).table
        assert table.shape == (n_head, 2 * length - 1)
        assert (table >= 0).all()
        assert difference(table.double().sum(0), 1) < 1e-6


# ---- parameter counts ----

COUNTS = {                              # masked LMs, small, base and large: Courtois, 2; Kowsher, 4
    'original': [28795194, 109514298, 335174458],
    'symmetric': [27744570, 102427194, 309984058],
    'shared_kv': [27744570, 102427194, 309984058],      # of no paper: 2 (D^2 + D), as `symmetric`
    'pairwise': [27875642, 103017018, 311556922],
    'phase': [27745594, 102431802, 309996346],          # of no paper: `symmetric` and D / 2 angles a layer
    'shared': [26700090, 95367738, 284867386],
}
CLASSIFIERS = {'original': 109483778, 'shared': 95337218}


@pytest.mark.parametrize('attention', COUNTS)
def test_parameter_counts_of_the_papers(attention):
    shapes = (4, 8, 512, 2048), (12, 12, 768, 3072), (24, 16, 1024, 4096)
    with torch.device('meta'):
        models = [MaskedLM(EncoderConfig(30522, 512, *shape, attention=attention)) for shape in shapes]
        classifier = SequenceClassifier(EncoderConfig(attention=attention))     # base, 2 labels
    assert [source.count_parameters(model) for model in models] == COUNTS[attention]
    if attention in CLASSIFIERS:
        assert source.count_parameters(classifier) == CLASSIFIERS[attention]


@pytest.mark.parametrize('attention, rank', [*((name, 0) for name in ATTENTION), ('pairwise', 5)])
def test_parameter_formula_of_attention(attention, rank):
    """Without the output projection."""
    settings = system(attention, 'none', pair_rank=rank, n_embd=96, n_head=6)
    config = EncoderConfig(**{**SMALL, **settings})
    layer = Encoder(config).blocks[0].attention
    without_out = source.count_parameters(layer) - source.count_parameters(layer.out)
    sizes = {'D': 96, 'H': 6, 'K': 16, 's': config.key_size, 'r': rank, 'c': config.clip_distance}
    assert without_out == facts_of(config).parameters(**sizes)


@pytest.mark.parametrize('position', POSITION)
def test_parameter_formula_of_position(position):
    encoder = build(Encoder, **system('original', position))
    formula = known(POSITIONS, position, 'row in POSITIONS').parameters
    assert source.count_parameters(encoder.position) == formula(encoder.config)


@pytest.mark.parametrize('bias', [True, False])
def test_parameters_of_pre_norm_and_swiglu(bias):
    """One more norm, and three matrices of 2/3 of the width for two."""
    sizes = {'n_embd': 96, 'n_inner': 384, 'n_head': 6, 'n_layer': 1, 'bias': bias}
    post = source.count_parameters(build(**sizes))
    pre = source.count_parameters(build(**sizes, norm_place='pre'))
    swiglu = source.count_parameters(build(**sizes, mlp='swiglu'))
    assert pre - post == 96 * (1 + bias)
    assert swiglu - post == (2 * 256 - 384) * bias          # 3 * 256 is 2 * 384: only biases differ
    large = EncoderConfig(**{**SMALL, 'n_inner': 4096})
    assert source.MLP['swiglu'](large).width == 2736        # 2/3 of 4096 is 2730.7, rounded up


# ---- padding and gradients ----

@each_system
def test_padding_changes_nothing(settings):
    encoder = build(Encoder, **settings)
    classifier = build(SequenceClassifier, **settings, pooling='layerwise')
    ids, segments = batch()
    keep = (torch.arange(10) < 6).expand(3, -1)
    states = []
    logits = []
    for seed, mask in ((3, keep), (4, keep.long())):    # padding of other tokens and segments
        more_ids, more_segments = batch(length=4, seed=seed)
        padded_ids = torch.cat((ids, more_ids), 1)
        padded_segments = torch.cat((segments, (more_segments + seed) % 2), 1)
        states.append(encoder(padded_ids, padded_segments, mask)[:, :6])
        logits.append(classifier(padded_ids, padded_segments, mask))
    # weight exactly 0, not merely small
    assert torch.equal(*states)
    assert torch.equal(*logits)
    assert difference(states[0], encoder(ids, segments)) < 1e-12
    assert difference(logits[0], classifier(ids, segments)) < 1e-12


def outputs(model, ids, segments, keep):
    """Logits as one tensor."""
    if isinstance(model, PermutationLM):
        positions = torch.tensor([[0, 2]] * len(ids))
        return model(ids, positions, segments=segments, attention_mask=keep)
    logits = model(ids, segments=segments, attention_mask=keep)
    return torch.stack(logits) if isinstance(model, SpanClassifier) else logits


def is_a_shift(name, settings, has_position):
    """Is it a bias of keys?  It adds the same q_i b to all scores of a softmax, unless rope rotates it."""
    rotated_key = settings.get('position') == 'rope' and has_position
    no_softmax = settings.get('normaliser', '').endswith('relu')
    is_value = settings.get('attention') == 'shared_kv'
    is_bias = name.endswith(('attention.key.bias', 'attention.key_bias'))
    return is_bias and not is_value and not rotated_key and not no_softmax


@pytest.mark.parametrize('kind, settings', [
    *[(MaskedLM, settings) for settings in [*SYSTEMS, *GATED, *MODERN_SAMPLE]],
    (PermutationLM, XLNET), (PermutationLM, {**XLNET, **MODERN}),
    *[(SequenceClassifier, {**settings, 'pooling': 'layerwise'}) for settings in CORE],
    *[(kind, {}) for kind in (SequenceClassifier, SpanClassifier)]], ids=str)
def test_every_parameter_gets_its_gradient(kind, settings):
    """The slope along a random direction, by the central difference; not 0, but where scores only shift."""
    n_layer = 1 if kind is MaskedLM else 2              # the two streams and layerwise pooling end otherwise
    model = build(kind, **settings, n_layer=n_layer)
    inputs = (*batch(), KEEP)
    generator = torch.Generator().manual_seed(11)
    onto = torch.randn(outputs(model, *inputs).shape, generator=generator, dtype=torch.float64)

    def total():
        return (outputs(model, *inputs) * onto).sum()

    total().backward()
    step = 1e-6
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = total()
            parameter.add_(direction, alpha=-2 * step)
            below = total()
            parameter.add_(direction, alpha=step)
        # layerwise pooling: the query, which has no position, is the only one of the last block
        has_position = 'pooling' not in settings or not name.startswith('encoder.blocks.1')
        if not has_position and name.endswith(facts_of(model.config).positional):
            continue
        assert (difference(parameter.grad, 0) < 1e-9) == is_a_shift(name, settings, has_position), name
        slope = (parameter.grad * direction).sum()
        assert abs(slope - (above - below) / (2 * step)) < 1e-5 * max(1, abs(slope)), name


# ---- reductions: with such weights one kind of attention is another ----

def unit_pair(w):
    return {**w, 'pair': torch.eye(4, dtype=torch.float64).expand(3, 4, 4)}


def scaled_matrices(w):
    """Kowsher et al. 2024, section 2.3: Wq = Ws D_q and so on; with D = 1 the three are tied."""
    matrices = {'out.weight': w['out.weight'], 'out.bias': w['out.bias']}
    for name in ('query', 'key', 'value'):
        matrices[f'{name}.weight'] = w[f'{name}_diag'][:, None] * w['shared.weight']
        matrices[f'{name}.bias'] = w[f'{name}_diag'] * w['shared.bias']
    return matrices


@pytest.mark.parametrize('position', POSITION)
@pytest.mark.parametrize('one, other, translate', [
    ('symmetric', 'pairwise', unit_pair), ('shared', 'original', scaled_matrices)])
def test_reduction(one, other, translate, position):
    ids, segments = batch()
    first_encoder = build(Encoder, attention=one, position=position)
    second_encoder = build(Encoder, attention=other, position=position)
    rest = {name: x for name, x in first_encoder.state_dict().items() if '.attention.' not in name}
    second_encoder.load_state_dict(rest, strict=False)
    for a, b in zip(first_encoder.blocks, second_encoder.blocks, strict=True):
        weights = translate(a.attention.state_dict())
        b.attention.load_state_dict(weights)
    states = first_encoder(ids, segments, KEEP)
    assert difference(states, second_encoder(ids, segments, KEEP)) < 1e-10


@pytest.mark.parametrize('name', ATTENTION)
def test_an_attention_can_be_called_alone(name):
    """As self-attention without positions and padding."""
    attention = build(Encoder, **system(name, positions_of(name)[0])).blocks[0].attention
    x = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    without = source.Context(source.NoPosition())
    assert torch.equal(attention(x), attention(x, x, without))


# ---- losses and initial values ----

@pytest.mark.parametrize('kind', [MaskedLM, PermutationLM])
def test_losses_are_cross_entropies_in_float32(kind):
    model = build(kind, **XLNET)
    ids, segments = batch()
    positions = torch.tensor([[1, 4], [5, 0], [3, 2]])
    targets = torch.tensor([[7, 8], [9, 1], [2, 22]])
    logits = model(ids, positions, segments=segments, attention_mask=KEEP)
    losses = model(ids, positions, targets, segments, KEEP)
    assert losses.dtype == torch.float32
    for b in range(3):
        for i in range(2):
            chances = logits[b, i].exp() / logits[b, i].exp().sum()
            assert abs(losses[b, i] + chances[targets[b, i]].log()) < 1e-5


@each_system
def test_the_last_block_and_the_head_run_at_the_positions_alone(settings):
    """With the logits and gradients that they have there if they run on all tokens."""
    model = build(**settings)
    queries = []
    last = model.encoder.blocks[-1].attention.out
    last.register_forward_hook(lambda module, inputs, y: queries.append(y.size(1)))
    ids, segments = batch()
    positions = torch.tensor([[1, 4], [5, 0], [3, 2]])
    some = model(ids, positions, segments=segments, attention_mask=KEEP)
    every = model(ids, segments=segments, attention_mask=KEEP)[torch.arange(3)[:, None], positions]
    assert queries == [2, 6]
    assert difference(some, every) < 1e-10 * every.abs().max()
    gradients = [torch.autograd.grad(logits.square().sum(), model.parameters()) for logits in (some, every)]
    for a, b in zip(*gradients, strict=True):
        assert difference(a, b) < 1e-10 * max(b.abs().max(), 1)


def test_segments_are_0_and_all_tokens_real_when_not_given():
    encoder = build(Encoder)
    ids, segments = batch()
    states = encoder(ids)
    zeros = torch.zeros_like(ids)
    all_real = torch.ones_like(ids).bool()
    assert difference(states, encoder(ids, zeros, all_real)) < 1e-12
    assert difference(states, encoder(ids, segments)) > 1e-3


def start_of(model, name):
    """(mean, deviation) of a parameter's initial values, or None if another test has them."""
    path, _, last = name.rpartition('.')
    module = model.get_submodule(path)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return NORMAL if last == 'weight' else ZEROS
    if isinstance(module, nn.LayerNorm):
        return ONES if last == 'weight' else ZEROS
    if path.endswith('.attention'):
        return known(facts_of(model.config).own, last, 'start in ATTENTIONS')
    return {'head.bias': ZEROS, 'query_embedding': NORMAL, 'pooler.query_embedding': NORMAL}[name]


@pytest.mark.parametrize('kind', [MaskedLM, SequenceClassifier, SpanClassifier])
@each_core
def test_initial_values(settings, kind):
    """To five standard errors."""
    if settings == XLNET and kind is MaskedLM:
        kind = PermutationLM
    torch.manual_seed(5)
    sizes = {'vocab_size': 500, 'block_size': 40, 'n_layer': 1, 'n_embd': 96, 'n_inner': 96, 'n_label': 50}
    pooling = 'layerwise' if settings['position'] == 'none' else 'cls'
    model = kind(EncoderConfig(**{**SMALL, **settings, **sizes, 'pooling': pooling}))
    for name, value in model.named_parameters():
        start = start_of(model, name)
        if start is None:
            continue
        mean, deviation = start
        n = value.numel()
        if deviation == 0.0:
            assert (value == mean).all(), name
        else:
            assert abs(value.mean().item() - mean) < 5 * deviation / n ** 0.5, name
            assert abs(value.std().item() / deviation - 1) < 5 / (2 * n) ** 0.5, name


def test_tied_start_changes_the_keys_alone():
    """Not what is drawn for other parameters, here or later."""
    models = []
    drawn = []
    for tied_start in (False, True):
        torch.manual_seed(5)
        models.append(MaskedLM(EncoderConfig(**SMALL, tied_start=tied_start)))
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]
    assert source.count_parameters(models[0]) == source.count_parameters(models[1])     # two matrices stay
    tied = models[1].state_dict()
    for name, x in models[0].state_dict().items():
        is_key = name.endswith('attention.key.weight')
        assert torch.equal(x, tied[name]) != is_key, name
        if is_key:
            assert torch.equal(tied[name], tied[name.replace('key', 'query')])
            assert torch.equal(tied[name.replace('weight', 'bias')], torch.zeros(12))


def decays(model, name):
    """Should a parameter have weight decay?  For tests/test_train.py."""
    path, _, last = name.rpartition('.')
    if isinstance(model.get_submodule(path), (nn.Linear, nn.Embedding)):
        return last == 'weight'
    if path.endswith('.attention'):
        return last in facts_of(model.config).decays
    return False                                        # norms, biases, the vectors that streams start from


STARTS = {'identity': 0.02, 'fan_in': 32 ** -0.5, 'normal': 0.02, 'unit': 1.0}     # deviation of S, K = 32


@pytest.mark.parametrize('rank', [0, 5])
@pytest.mark.parametrize('pair_init', PAIR_INIT)
def test_initial_pairwise_factors(pair_init, rank):
    torch.manual_seed(6)
    settings = {'attention': 'pairwise', 'pair_init': pair_init, 'pair_rank': rank}
    attention = ATTENTION['pairwise'](EncoderConfig(9, 8, 1, 32, 32 * 32, 8, **settings), 0)
    pair = attention.pair @ attention.pair_key.mT if rank else attention.pair
    mean = (torch.arange(32) < (rank or 32)).diag().float() if pair_init == 'identity' else 0.0
    noise = (pair - mean).detach()
    assert (noise.mean(0).abs() < 6 * noise.std(0) / 32 ** 0.5).all()               # over 32 heads
    deviation = known(STARTS, pair_init, 'deviation')
    if not (rank and pair_init == 'identity'):          # there they have different deviations
        tolerance = 0.25 if rank else 0.06              # entries of a product are correlated
        assert abs(noise.std().item() / deviation - 1) < tolerance


# ---- dropout: that it falls somewhere is seen where it takes all, on what exactly at rate 1/2 ----

ALL = math.nextafter(1, 0)                              # the highest rate; a draw of 1e-16 does not happen


@each_system
def test_attention_without_weights_gives_the_bias_of_its_output(settings):
    """So every term, those of distances and parts too, has the dropped weights."""
    encoder = build(Encoder, **settings, attention_dropout=ALL)
    x = encoder.embed(*batch())
    context = source.Context(encoder.position, KEEP[:, None, None], torch.arange(6)[None, None])
    for block in encoder.train().blocks:
        bias = block.attention.out.bias
        y = block.attention(x, x, context)
        assert difference(y, torch.zeros(()) if bias is None else bias) < 1e-12


@pytest.mark.parametrize('settings, expected', [
    (system('original', 'none'), lambda block, x: block.mlp_norm(block.attention_norm(x))),
    (system('original', 'none', norm_place='pre'), lambda block, x: x),
    (system('gau', 'none'), lambda block, x: block.norm(x))], ids=['post', 'pre', 'gated'])
def test_dropout_takes_what_blocks_add(settings, expected):
    """The input of a block stays."""
    encoder = build(Encoder, **settings, dropout=ALL).train()
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    for block in encoder.blocks:
        assert torch.equal(block(x, x, source.Context(encoder.position)), expected(block, x))


def kept_or_dropped(actual, whole):
    """Is each entry 0 or twice that of `whole`, as after one dropout of rate 1/2?  Both have to occur."""
    dropped = actual == 0
    kept = (actual - 2 * whole).abs() < 1e-12
    assert dropped.any()
    assert kept.any()
    return (dropped | kept).all()


@each_core
def test_dropout_takes_weights_and_not_values(settings):
    """One key has one weight: dropout takes a query's whole head, never one of its entries alone."""
    encoder = build(Encoder, **settings, n_layer=1, attention_dropout=0.5)
    attention = encoder.blocks[0].attention
    heads = 1 if settings['attention'] == 'gau' else encoder.config.n_head
    before_out = []
    attention.out.register_forward_pre_hook(lambda module, inputs: before_out.append(inputs[0]))
    x = torch.randn(64, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for training in (False, True):
        attention.train(training)(x, x, source.Context(encoder.position, at=torch.zeros(1, 1, 1).long()))
    whole, actual = (y.unflatten(-1, (heads, -1)) for y in before_out)      # (64, 1, heads, K)
    assert kept_or_dropped(actual, whole)
    is_dropped = (actual == 0) & (whole != 0)
    assert (is_dropped.all(-1) | ~is_dropped.any(-1)).all()


@pytest.mark.parametrize('kind', [MaskedLM, PermutationLM])
def test_embeddings_and_query_stream_are_dropped_out_once(kind):
    """Twice would leave four times a value where it is kept."""
    model = build(kind, **XLNET, dropout=0.5)
    ids, segments = batch()
    positions = torch.tensor([[1, 4], [5, 0], [3, 2]])
    whole = model.encoder.embed(ids, segments)
    if kind is PermutationLM:
        queries = model.query_embedding.expand(3, 2, -1)
        whole = torch.cat((whole, queries), 1)
    inputs = []
    model.encoder.blocks[0].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    model.train()(ids, positions, segments=segments)
    assert kept_or_dropped(inputs[0], whole)


# ---- precision ----

@each_core_or_gated
def test_bfloat16_autocast(settings, monkeypatch):
    """Within 3 % of float32 in norm: bfloat16 keeps 8 bits, so each rounding changes up to 0.4 %.

    No product with a float32 parameter makes the queries, keys or values of a fused kernel float32, and no
    norm the states.
    """
    dtypes = set()
    fused = torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, *others):
        dtypes.update((q.dtype, k.dtype, v.dtype))
        return fused(q, k, v, *others)

    torch.manual_seed(7)
    model = MaskedLM(EncoderConfig(**{**SMALL, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ids, segments = batch()
    expected = model(ids, segments=segments, attention_mask=KEEP)
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', recorded)
    with torch.autocast('cpu', torch.bfloat16):
        logits = model(ids, segments=segments, attention_mask=KEEP)
        states = model.encoder.states(ids, segments, KEEP)
    assert logits.dtype == torch.bfloat16
    assert dtypes <= {torch.bfloat16}
    assert {x.dtype for x in states[1:]} == {torch.bfloat16}
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize('autocast', [False, True])
@each_core_or_gated
def test_edges_are_finite(settings, autocast):
    """One token, none, the last alone, all, beyond clip_distance; with scores far into saturation."""
    model = build(SequenceClassifier, **settings, pooling='layerwise', n_layer=1).float()
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 5)
    one = [[1], [0]]
    some = [[0] * 12, [1] + [0] * 11, [0] * 11 + [1], [1] * 12]
    every = [[1] * 12] * 2
    for keep in (one, some, every):
        keep = torch.tensor(keep).bool()
        mask = None if keep.all() else keep
        ids, segments = batch(*keep.shape)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            results = [model.encoder(ids, segments, mask), model(ids, segments, mask)]
        total = sum(x.float().square().sum() for x in results)
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        assert all(x.isfinite().all() for x in (*results, *gradients)), keep


def test_distances_are_added_in_float32():
    """To q k = 256 in bfloat16, where 257 would be 256 again: softmax(256, 257, 256)."""
    vectors = torch.tensor([[[[0.0], [1 / 16], [0.0]]]]).bfloat16()      # of the distances -1, 0 and 1
    q = torch.full((1, 1, 3, 1), 16.0).bfloat16()
    v = torch.zeros_like(q)
    context = source.Context(at=torch.arange(3)[None, None])
    y = source.attend_distances(q, q, v, vectors, vectors, context, 0.0)
    assert abs(y[0, 0, 1, 0] * 16 - math.e / (math.e + 2)) < 0.01


@pytest.mark.parametrize('shift', [0, -16, -40, -100])
@pytest.mark.parametrize('dtype, error', [
    (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)], ids=str)
def test_sigmoid_weights_of_rows_far_below_zero(dtype, error, shift):
    """The norm of a row brings its weights back to order 1, however small the sigmoids are."""
    scores = (torch.tensor([[[0.5, -1.0, 0.0, 2.0]]]) + shift).to(dtype).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1]).bool().view(1, 1, 4)
    weights = source.masked_sigmoid(scores, mask)
    expected = sigmoid_l2(scores[0, 0].tolist(), mask.flatten().tolist())
    assert difference(weights[0, 0].double(), torch.tensor(expected)) < error
    gradient, = torch.autograd.grad(weights[0, 0, 0], scores)
    assert gradient.isfinite().all()
    assert gradient[0, 0, 0] > 0.1


@pytest.mark.parametrize('dtype, size', [
    (torch.float16, 1.0), (torch.float16, 1e-5), (torch.float16, 1e-7),
    (torch.bfloat16, 1e-25), (torch.bfloat16, 1e25)], ids=str)
def test_rows_of_scaled_squared_relu(dtype, size):
    """They sum to 1 / (n s), however large scores are.

    Scores of 1e-5 and 1e-7 are subnormal numbers in float16. The squares of 1e-25 and 1e25 would be 0 and
    infinite in float32; there the largest of a row, by which scores are divided first, is needed.
    """
    generator = torch.Generator().manual_seed(13)
    scores = (size * torch.randn(2, 6, 100, generator=generator)).to(dtype)
    mask = (torch.arange(100) < 70).expand(2, 1, 100)
    weights = NORMALISER['scaled_squared_relu'](scores, mask, torch.tensor(70.0), 128, None)
    weights = 70 * 128 * weights
    assert difference(weights.sum(-1), 1) < 1e-6
    assert (weights[..., 70:] == 0).all()
    expected = scaled_squared_relu(scores[1, 2].tolist(), mask[1, 0].tolist(), 128, 'ns')
    assert difference(weights[1, 2], 70 * 128 * torch.tensor(expected)) < 1e-6


@pytest.mark.parametrize('name, relu_scale, in_his_code', [
    ('squared_relu', 'ns', lambda a, n, s: a.relu() ** 2 / n),
    ('squared_relu', 'n2s', lambda a, n, s: (a / n).relu() ** 2),
    ('squared_relu', 'ns2', lambda a, n, s: a.relu() ** 2 / (s * n)),
    ('scaled_squared_relu', 'ns', lambda a, n, s: a.relu() ** 2 / (s * n * (a.relu() ** 2).sum(-1, True))),
    ('softmax', 'ns', lambda a, n, s: a.softmax(-1)),
    ('softmax_plus', 'ns', lambda a, n, s: (a * n.log() / math.log(512)).softmax(-1)),
])
def test_normalisers_are_those_of_lius_code(name, relu_scale, in_his_code):
    """Of tables 1 and 2: github.com/HJHGJGHHG/GAU-PyTorch, utils/layers.py.

    a = q k^T / sqrt(s), -inf at padding; n real tokens.
    """
    scores = 20 * torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    n = torch.tensor([7.0, 4.0, 2.0], dtype=torch.float64)[:, None, None]
    s = 16
    mask = torch.arange(7) < n
    a = (scores / s ** 0.5).masked_fill(~mask, -math.inf)
    expected = in_his_code(a, n, s).nan_to_num(0)                   # 0 / 0 there
    weights = NORMALISER[name](scores, mask, n, s, RELU_SCALE[relu_scale])
    assert difference(weights, expected) < 1e-12


def test_squared_relu_of_large_scores_in_float16():
    """Their squares are beyond float16 before they are divided."""
    scores = torch.tensor([[[300.0, -1.0, 400.0]]]).half()
    weights = NORMALISER['squared_relu'](scores, None, torch.tensor(70.0), 128, RELU_SCALE['ns'])
    expected = torch.tensor([300 ** 2, 0, 400 ** 2]) / (70 * 128)
    assert difference(weights.float(), expected) < 0.05


@pytest.mark.parametrize('padded', [False, True])
def test_gau_counts_keys_beyond_float16(padded):
    """A scale of n s = 512 * 128 is infinite in float16: all weights would be 0."""
    settings = system('gau', 'none', normaliser='squared_relu', key_size=128, block_size=512)
    encoder = build(Encoder, **settings, n_layer=1).float()
    attention = encoder.blocks[0].attention
    mask = torch.ones(1, 1, 1, 512, dtype=torch.bool) if padded else None
    x = torch.randn(1, 512, 12, generator=torch.Generator().manual_seed(4))
    context = source.Context(encoder.position, mask)
    expected = attention(x, x, context)
    y = attention.half()(x.half(), x.half(), context)
    assert expected.norm() > 0
    assert (y.float() - expected).norm() < 0.01 * expected.norm()


# ---- compilation, longer and shorter rows ----

QUICK = [system('pairwise', 'rab'), system('gau', 'rope')]
# made of much the same operations
SLOW = [settings for settings in [*CORE, *MODERN_SAMPLE] if settings not in QUICK]


@pytest.mark.parametrize('settings', [
    *QUICK, *(pytest.param(settings, marks=pytest.mark.slow) for settings in SLOW)], ids=str)
def test_texts_of_any_length_compile_twice(settings):
    """With the first length, then with any, block_size too; no graph breaks, and eager mode's gradients."""
    torch.compiler.reset()
    counters.clear()
    model = build(PermutationLM if settings == XLNET else MaskedLM, **{**settings, 'n_layer': 1})
    compiled = torch.compile(outputs, fullgraph=True, backend='aot_eager')
    parameters = list(model.parameters())
    for length in (9, 7, 10, 12, 3):
        keep = torch.arange(length) < torch.tensor([[length], [3], [1]])
        inputs = (*batch(length=length), keep)
        actual = torch.autograd.grad(compiled(model, *inputs).sum(), parameters)
        expected = torch.autograd.grad(outputs(model, *inputs).sum(), parameters)
        for a, b in zip(actual, expected, strict=True):
            assert difference(a, b) <= 1e-9 * max(1, b.abs().max())
    assert counters['stats']['unique_graphs'] <= 2


@each_core
def test_extended(settings):
    """Short rows give the same states; long ones those of one built at that length, with its weights."""
    model = build(**settings)
    ids, segments = batch(rows=4)
    for block_size in (40, 8):
        other = extended(model, block_size)
        assert model.config.block_size == 12
        assert other.config.block_size == block_size
        assert not other.training
        logits = [x(ids, segments=segments, attention_mask=HOLES) for x in (model, other)]
        assert difference(*logits) < 1e-12
        fresh = build(**{**settings, 'block_size': block_size})
        fresh.load_state_dict(other.state_dict())
        rows, _ = batch(length=block_size)
        assert difference(other(rows), fresh(rows)) < 1e-12
        with pytest.raises(ValueError, match=f'{block_size + 1} .*block_size={block_size}'):
            other(torch.ones(1, block_size + 1, dtype=torch.long))


def test_extension_draws_new_positions():
    rows = extended(build(), 1012).encoder.position.table.weight[12:]
    assert rows.shape == (1000, 12)
    assert abs(rows.std().item() / 0.02 - 1) < 5 / (2 * rows.numel()) ** 0.5


def test_extension_repeats_the_vectors_of_the_longest_distances():
    """Tian et al. 2021, section 2: "copying the learnt embeddings" of the longest distances in training."""
    model = build(**system('rpe', 'none', clip_distance=20))        # rows of 12 tokens: distances -11 to 11
    models = model, extended(model, 40), extended(model, 8)
    for layer in range(2):
        old, new, same = (x.encoder.blocks[layer].attention.distance_vectors for x in models)
        for row in range(39):                                       # that of distance 0 is row 19
            assert torch.equal(new[row], old[min(max(row, 19 - 11), 19 + 11)])
        assert torch.equal(same, old)


# ---- what a user can get wrong ----

KNOBS = {                               # an option that not all use -> a value that is not its default
    'mlp': 'swiglu', 'norm_place': 'pre', 'tied_start': True,
    'pair_rank': 2, 'pair_init': 'normal', 'normaliser': 'softmax', 'key_size': 64, 'relu_scale': 'n',
    'clip_distance': 5, 'same_partition': True, 'one_value_matrix': True,
}


@pytest.mark.parametrize('settings, message', [
    ({'attention': 'pairwize'}, "attention='pairwize'.*original, symmetric, pairwise"),
    ({'dropout': 1.0}, 'dropout=1.0.*below 1'),
    ({'attention_dropout': math.nan}, 'attention_dropout=nan.*below 1'),
    *[(system(name, position), f"position='{position}'.*'{name}' works only with")
      for name in OTHERS for position in POSITION if position not in positions_of(name)],
    (system('part_mask', 'none', one_value_matrix=True), 'one_value_matrix=True.*shatter'),
    (system('shatter', 'none', n_head=2), 'n_head=2.*even'),
    (system('shatter', 'none', n_head=5, n_embd=20), 'n_head=5.*even'),
    (system('gau', 'rope', key_size=5), "position='rope'.*5.*even"),
    ({'n_embd': 9, 'attention': 'phase'}, "attention='phase'.*even"),
], ids=str)
def test_a_combination_that_would_compute_something_else_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        EncoderConfig(**{**SMALL, **settings})


@pytest.mark.parametrize('option', {**KNOBS, **source.users_of()})
def test_an_option_that_nothing_reads_is_refused(option):
    value = known(KNOBS, option, 'value')
    _, users = known(source.users_of(), option, 'row')
    others = system('gau', 'rope') if 'original' in users else {}
    with pytest.raises(UserError, match=f'{option}={value!r}: only .*{users[-1]}'):
        EncoderConfig(**{**SMALL, **others, option: value})


def test_two_streams_need_the_attention_of_xlnet():
    with pytest.raises(UserError, match="only attention='xlnet'"):
        PermutationLM(EncoderConfig(**SMALL))


# ---- Hugging Face ----

SIZES = {'vocab_size': 40, 'hidden_size': 24, 'num_hidden_layers': 3, 'num_attention_heads': 4,
         'intermediate_size': 36, 'max_position_embeddings': 16, 'type_vocab_size': 2}
OURS = 40, 16, 3, 4, 24, 36                             # the same sizes of an EncoderConfig


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


def padded_batch():
    """ids, segments, keep (B, T), padded with id 0 on the right."""
    ids, segments = batch(length=9)
    keep = torch.arange(9) < torch.tensor([[9], [5], [7]])
    return ids * keep, segments * keep, keep


def logits_of_library(twin, ids, segments, keep):
    output = twin(input_ids=ids, token_type_ids=segments, attention_mask=keep.long())
    return torch.stack(output.to_tuple()) if 'start_logits' in output else output.logits


@pytest.mark.parametrize('kind, name', [
    (MaskedLM, 'MaskedLM'), (SequenceClassifier, 'SequenceClassification'),
    (SpanClassifier, 'QuestionAnswering'), (MultipleChoice, 'MultipleChoice')])
def test_bert_gives_the_logits_of_hugging_face(kind, name, transformers):
    """In training with the same seed: both apply dropout at the same points in the same order."""
    bert_class = getattr(transformers, f'BertFor{name}')
    bert = randomised(bert_class(transformers.BertConfig(**SIZES))).train()
    ours = kind(EncoderConfig(*OURS)).train()
    our_names = source.hugging_face_names(3)
    ours.load_state_dict({our_names[name]: x for name, x in bert.state_dict().items()
                          if our_names.get(name) in ours.state_dict()})
    inputs = padded_batch()
    if kind is MultipleChoice:                                      # (B, C, T): three choices for each of two
        inputs = [torch.stack([x, x.roll(1, 0)]) for x in inputs]
    torch.manual_seed(9)
    expected = logits_of_library(bert, *inputs)
    torch.manual_seed(9)
    actual = outputs(ours, *inputs)
    assert difference(actual, expected) < 1e-5 * expected.abs().max()


@pytest.mark.parametrize('position', [position for _, position, _ in source.IMPORTS.values()])
def test_export_and_import_again(position, tmp_path, transformers):
    sizes = {**SMALL, 'n_head': 2, 'dropout': 0.2, 'attention_dropout': 0.3}
    ours = randomised(MaskedLM(EncoderConfig(**sizes, position=position))).train()
    source.to_transformers(ours).save_pretrained(tmp_path)
    again = MaskedLM.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert not again.training
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize('kind, position', source.EXPORTS)
@pytest.mark.parametrize('variant', [each for each in FREE if each['attention'] in EXPORTED], ids=str)
def test_export_has_the_logits(variant, kind, position, transformers):
    """Those of BERT and RoFormer with our weights: float32, padded, two segments; with and without biases."""
    ids, segments, keep = padded_batch()
    sizes = {**SMALL, 'n_head': 2, 'n_label': 3}
    for bias in (True, False):
        ours = randomised(kind(EncoderConfig(**sizes, position=position, bias=bias, **variant)))
        twin = source.to_transformers(ours, pad_token_id=3)
        assert type(twin).__name__ == source.EXPORTS[kind, position]
        assert twin.config.pad_token_id == 3
        actual = ours(ids, segments=segments, attention_mask=keep)
        expected = logits_of_library(twin, ids, segments, keep)
        if kind is MaskedLM:                                        # logits of padding mean nothing
            actual = actual[keep]
            expected = expected[keep]
        assert difference(actual, expected) < 1e-4 * expected.abs().max()


@pytest.mark.parametrize('kind, settings', [
    *[(MaskedLM, settings) for settings in CORE
      if settings['attention'] not in EXPORTED or settings['position'] == 'rab'],
    *[(MaskedLM, setting) for setting in ({'norm': 'rms'}, {'norm_place': 'pre'}, {'mlp': 'swiglu'})],
    (MaskedLM, {'lm_head': 'decoder'}), (SpanClassifier, {}),
    (SequenceClassifier, {'pooling': 'first'}), (SequenceClassifier, {'position': 'rope'})], ids=str)
def test_export_refuses_what_transformers_has_no_layer_for(kind, settings, transformers):
    with pytest.raises(UserError, match='^transformers has no equal of [^\n]*$'):
        source.to_transformers(build(kind, **settings))


def test_export_refuses_what_it_would_leave_out(transformers):
    """As a fork's norm of the encoder, or its attention whose as_bert() is that of another."""
    model = build()
    model.encoder.last_norm = nn.LayerNorm(12)
    with pytest.raises(UserError, match=r'no place for [^\n]*encoder.last_norm.bias'):
        source.to_transformers(model)
    model = build()
    attention = model.encoder.blocks[1].attention
    forward = attention.forward
    attention.forward = lambda *inputs: 1.01 * forward(*inputs)
    with pytest.raises(UserError, match='its logits differ'):
        source.to_transformers(model)


@pytest.mark.parametrize('name, key, value', [
    ('Bert', 'hidden_act', 'gelu_new'), ('Bert', 'layer_norm_eps', 1e-5),
    ('Bert', 'tie_word_embeddings', False), ('Bert', 'is_decoder', True),
    ('RoFormer', 'rotary_value', True), ('RoFormer', 'embedding_size', 12),
    ('RoFormer', 'norm_type', 'rms_norm'), ('RoFormer', 'use_bias', False)])
def test_import_refuses_what_computes_something_else(name, key, value, tmp_path, transformers):
    """The last two are those of RoFormerV2."""
    config_class = getattr(transformers, f'{name}Config')
    config_class(**{**SIZES, key: value}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f'{key}={value}: only a {name.lower()} with {key}='):
        source.pretrained_encoder(tmp_path)


def test_import_refuses_weights_that_are_missing_or_of_other_sizes(tmp_path, transformers):
    """Else they would be random."""
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    assert 'encoder.token.weight' in source.pretrained_encoder(tmp_path)[1]
    with pytest.raises(UserError, match='has no cls.predictions'):
        MaskedLM.from_pretrained(tmp_path)
    transformers.BertConfig(**{**SIZES, 'vocab_size': 30}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r'[\w.]+ is \(40\D.*, but config.json asks for \(30\D'):
        source.pretrained_encoder(tmp_path)


def test_code_beside_a_model_does_not_run(tmp_path, transformers, monkeypatch):
    """Nor is it asked for in a terminal."""
    monkeypatch.setattr('builtins.input', lambda *question: 'y')
    marker = tmp_path / 'it ran'
    (tmp_path / 'code.py').write_text(
        'from transformers import BertConfig\n'
        f'open({str(marker)!r}, "w").close()\n'
        'class Config(BertConfig):\n    model_type = "unheard_of"\n')
    config = {'model_type': 'unheard_of', 'auto_map': {'AutoConfig': 'code.Config'}}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(UserError, match='custom code'):
        source.pretrained_encoder(tmp_path)
    assert not marker.exists()


def test_buckets_are_those_of_t5():
    t5 = pytest.importorskip('transformers.models.t5.modeling_t5')
    encoder = Encoder(EncoderConfig(**{**SMALL, 'position': 'rab', 'block_size': 701}))
    expected = t5.T5Attention._relative_position_bucket(torch.arange(-700, 701), True, 32, 128)
    assert torch.equal(encoder.position.bucket, expected)
    assert expected.tolist() == [bucket(d) for d in range(-700, 701)]


def xlnet_pair(transformers):
    """(transformers' XLNetModel with random weights, PermutationLM with the same)"""
    config = transformers.XLNetConfig(
        vocab_size=40, d_model=24, n_layer=3, n_head=4, d_inner=36, ff_activation='gelu', untie_r=True,
        attn_type='bi', dropout=0.0, layer_norm_eps=1e-12)
    library = randomised(transformers.XLNetModel(config))
    ours = randomised(PermutationLM(EncoderConfig(40, 16, 3, 4, 24, 36, **XLNET)))
    state = {'query_embedding': library.mask_emb.flatten()}
    for i, layer in enumerate(library.layer):
        relative = layer.rel_attn
        block = f'encoder.blocks.{i}.'
        matrices = {'query': relative.q, 'key': relative.k, 'value': relative.v, 'distance': relative.r}
        for name, matrix in matrices.items():
            state[f'{block}attention.{name}.weight'] = matrix.flatten(1).T
        state[f'{block}attention.out.weight'] = relative.o.flatten(1)
        state[f'{block}attention.content_bias'] = relative.r_w_bias.flatten()
        state[f'{block}attention.distance_bias'] = relative.r_r_bias.flatten()
        modules = {'attention_norm': relative.layer_norm, 'expand': layer.ff.layer_1,
                   'contract': layer.ff.layer_2, 'mlp_norm': layer.ff.layer_norm}
        for name, module in modules.items():
            state.update({f'{block}{name}.{key}': x for key, x in module.state_dict().items()})
    mismatch = ours.load_state_dict(state, strict=False)
    assert not mismatch.unexpected_keys
    assert not any('blocks' in name for name in mismatch.missing_keys)
    return library, ours


def test_two_streams_give_the_states_and_logits_of_hugging_face(transformers):
    """In orders that begin with a real token: in theirs, a query that sees none averages the padding."""
    library, ours = xlnet_pair(transformers)
    ids, segments, keep = padded_batch()
    embedded = ours.encoder.embed(ids, segments)
    expected = library(inputs_embeds=embedded, attention_mask=keep.float())[0]
    actual = ours.encoder(ids, segments, keep)
    assert difference(actual[keep], expected[keep]) < 1e-5 * expected.abs().max()
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in range(3)])
    order = torch.where(torch.arange(9) == 2, -1, order)
    positions = torch.tensor([[0, 8, 4], [4, 3, 1], [5, 0, 6]])
    hidden = (order[:, None] >= order[:, :, None]).float()
    one_hot = nn.functional.one_hot(positions, 9).float()
    states = library(inputs_embeds=embedded, attention_mask=keep.float(), perm_mask=hidden,
                     target_mapping=one_hot)[0]
    expected = ours.head(states, ours.encoder.token.weight)
    actual = ours(ids, positions, segments=segments, attention_mask=keep, order=order)
    assert difference(actual, expected) < 1e-5 * expected.abs().max()
