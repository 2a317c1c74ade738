"""The model against its papers: loop-level oracles, printed counts, padding, reductions, Hugging Face.

    $ python -m pytest test_model.py            # CPU, offline

The tests range over the tables of model.py: a new row is tested at once, and fails until these tests know it.
A kind of attention needs one row in ATTENTIONS (its oracle, the number of its parameters, how its own ones
start and which decay) and a position encoding one in POSITIONS. A row of another table needs its oracle in
NORMALISERS, SCALES, MLPS, NORMS, BLOCKS, HEADS or POOLINGS, or its deviation in STARTS; an option that not
all use, a value in KNOBS.
"""
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

# ---- models and batches ----

SMALL = {
    'vocab_size': 23, 'block_size': 12,
    'n_layer': 2, 'n_head': 3, 'n_embd': 12, 'n_inner': 16,
}
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
NO_BERT = source.Attention.as_bert
EXPORTED = [variant for variant in FREE if ATTENTION[variant['attention']].as_bert is not NO_BERT]

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
# real tokens (B, T) of batch(): padded on the right, and of any kind
KEEP = torch.arange(6) < torch.tensor([[6], [4], [5]])
HOLES = torch.tensor([
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 1, 0, 0],
    [0, 1, 0, 1, 1, 1],
    [0, 0, 0, 0, 0, 0],
]).bool()


def each(systems):
    return pytest.mark.parametrize('settings', systems, ids=str)


each_system = each([*SYSTEMS, *MODERN_SAMPLE])
each_core = each(CORE)
each_core_or_gated = each([*CORE, *GATED, *MODERN_SAMPLE])


def small(**settings):
    return EncoderConfig(**{**SMALL, **settings})


def build(kind=MaskedLM, **settings):
    """A small float64 model in eval mode with every parameter random: biases, norms, diagonals and S too."""
    torch.manual_seed(1)
    model = kind(small(**settings)).double().eval()
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


def difference(x, y):
    return (x - y).abs().max().item()


# ---- oracles: the papers' equations in numpy and float64; attention goes from query to query ----

class Layer(NamedTuple):
    """What the oracle of a layer reads besides states."""
    config: EncoderConfig
    number: int
    position: dict              # weights of the encoder's position encoding
    sees: list                  # numbers of the tokens to which each query may attend
    at: object                  # position of each query; None: it has none, and no positional term enters


def part(w, prefix):
    return {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}


# functions of rows x (..., D)

def linear(w, name, x):
    return x @ w[name + '.weight'].T + w.get(name + '.bias', 0.0)


def layer_norm(w, name, x):
    centred = x - x.mean(-1, keepdims=True)
    y = rms_norm({}, name, centred) * w[name + '.weight']
    return y + w.get(name + '.bias', 0.0)


def rms_norm(w, name, x):
    """Liu 2022, section 4.1, with the mean square for VAR (see the errata): no weights."""
    assert not part(w, name)
    mean_square = (x * x).mean(-1, keepdims=True)
    return x / np.sqrt(mean_square + 1e-12)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def silu(x):
    return x / (1 + np.exp(-x))


# how parameters start: (mean, standard deviation)
ZEROS = 0.0, 0.0
ONES = 1.0, 0.0
NORMAL = 0.0, 0.02


# positions: turn a vector (K,) at position t; bias of head h and distance d = j - i

def rotated(x, t):
    """Su et al. 2021, eq. 34: the pair (2m, 2m + 1) at position t turns by t 10000^(-2m / K)."""
    m = np.arange(len(x) // 2)
    angle = t * 10000.0 ** (-2 * m / len(x))
    turn = np.exp(1j * angle).astype(np.complex64)      # the model's tables are float32
    return (x.view(complex) * turn).view(float)         # a pair is a complex number


def bucket(d):
    """Raffel et al. 2019: 8 + floor(8 log(n / 8) / log(128 / 8)) from n = |d| = 8 on, in whole numbers."""
    n = abs(d)
    half = n
    if n >= 8:
        half = max(b for b in range(8, 16) if n * n >= 64 * 2 ** (b - 8))
    return half + 16 * (d > 0)


def bucket_bias(layer, h, d):
    return layer.position['bucket_bias.weight'][bucket(d), h]


class PositionFacts(NamedTuple):
    """What the tests have to know of a position encoding."""
    turn: Callable = lambda x, t: x
    bias: Callable = lambda layer, h, d: 0.0
    embedded: bool = False                      # vectors of positions are added to the embeddings


POSITIONS = {
    'absolute': PositionFacts(embedded=True),
    'none': PositionFacts(),
    'rope': PositionFacts(turn=rotated),
    'rab': PositionFacts(bias=bucket_bias, embedded=True),
}


def position_of(layer):
    """Facts of the position encoding; those of `none` for a query without a position."""
    return POSITIONS['none' if layer.at is None else layer.config.position]


@cache
def bernstein(h, d, n_head, layer, n_layer):
    """f_h(d) of Tian et al. 2021, section A.1; at d = 0 each half gets B_v(0) / 2."""
    degree = n_head // 2 - 1
    left, v = divmod(h, n_head // 2)
    if d == 0:
        return 0.5 if v == 0 else 0.0
    if left != (d < 0):
        return 0.0
    depth = (layer + 1) / n_layer
    start = math.exp(-depth * degree)                   # e^alpha
    beta = -1 / degree * (degree / 12) ** depth
    inside = math.exp(beta * abs(d)) * (1 - start) + start
    u = math.log(inside) / math.log(start)
    value = math.comb(degree, v) * u ** v * (1 - u) ** (degree - v)
    return np.float32(value).item()


def whole(layer, i, h, j):
    return 1.0


def parted(layer, i, h, j):
    """N[h, i, j]; 1 for a query without a position."""
    if layer.at is None:
        return 1.0
    config = layer.config
    number = config.n_layer - 1 if config.same_partition else layer.number
    return bernstein(h, j - layer.at[i], config.n_head, number, config.n_layer)


# weights of one query from the scores of the keys that it sees, which may be none

def softmaxed(scores):
    weights = np.exp(scores)
    return weights / weights.sum()


def sigmoid_l2(scores):
    """Tian et al. 2021, eq. 6."""
    weights = 1 / (1 + np.exp(-np.array(scores)))
    return weights / np.sqrt((weights ** 2).sum())


# queries, keys and values (T, D) of the rows x (T, D)

def original(w, x):
    """Courtois et al. 2024, eq. 1 and 2."""
    return [linear(w, name, x) for name in ('query', 'key', 'value')]


def symmetric(w, x):
    """Courtois et al. 2024, eq. 3: Q(x) Q(y)^T."""
    return [linear(w, name, x) for name in ('query', 'query', 'value')]


def pairwise(w, x):
    """Courtois et al. 2024, eq. 6: Q(x) S Q(y)^T = sum_ab Q(x)_a S_ab Q(y)_b; S_ab = sum_c A_ac B_bc."""
    query = linear(w, 'query', x)
    pair = w['pair']
    if 'pair_key' in w:
        pair = np.einsum('hac,hbc->hab', pair, w['pair_key'])
    q = np.zeros_like(query)
    size = pair.shape[1]
    for h, a, b in np.ndindex(pair.shape):
        q[:, h * size + b] += query[:, h * size + a] * pair[h, a, b]
    return q, query, linear(w, 'value', x)


def phase(w, x):
    """Ours: each pair of entries of a query is a complex number, times e^(i a); keys are not turned."""
    query = linear(w, 'query', x)
    turned = query.view(complex) * np.exp(1j * w['angle'])
    return turned.view(float), query, linear(w, 'value', x)


def shared_kv(w, x):
    """Kayyam et al. 2026: the keys are the values too."""
    return [linear(w, name, x) for name in ('query', 'key', 'key')]


def shared(w, x):
    """Kowsher et al. 2024, section 2.3: S = x Ws, scaled by the diagonals D_q, D_k, D_v."""
    S = linear(w, 'shared', x)
    return S * w['query_diag'], S * w['key_diag'], S * w['value_diag']


# attention of the queries y (Q, D) to the tokens x (T, D)

def head_slices(layer):
    size = layer.config.n_embd // layer.config.n_head
    return [slice(h * size, h * size + size) for h in range(layer.config.n_head)]


def many_heads(w, y, x, layer, project, share=whole):
    """softmax(q k^T / sqrt(K)) v of each head, with the terms of the position encoding."""
    position = position_of(layer)
    queries, _, _ = project(w, y)
    _, keys, values = project(w, x)
    mixed = np.zeros_like(y)
    for i, seen in enumerate(layer.sees):
        at = 0 if layer.at is None else layer.at[i]     # `none` does not read it
        for h, head in enumerate(head_slices(layer)):
            q = position.turn(queries[i, head], at)
            scores = []
            for j in seen:
                k = position.turn(keys[j, head], j)
                bias = position.bias(layer, h, j - at)
                scores.append(q @ k / math.sqrt(len(q)) + bias)
            for j, weight in zip(seen, softmaxed(scores), strict=True):
                mixed[i, head] += weight * share(layer, i, h, j) * values[j, head]
    return mixed


def relative(w, y, x, layer):
    """Shaw et al. 2018, eq. 3 and 4, clipped at c - 1, with R Wk and R Wv of Tian et al. 2021, section 2."""
    c = layer.config.clip_distance
    queries = linear(w, 'query', y)
    mixed = np.zeros_like(y)
    for i, seen in enumerate(layer.sees):
        keys = linear(w, 'key', x[seen])
        values = linear(w, 'value', x[seen])
        if layer.at is not None:
            distances = np.clip(seen - layer.at[i], 1 - c, c - 1)
            vectors = w['distance_vectors'][distances + c - 1]
            keys += vectors @ w['key.weight'].T
            values += vectors @ w['value.weight'].T
        for head in head_slices(layer):
            q = queries[i, head]
            weights = softmaxed(keys[:, head] @ q / math.sqrt(len(q)))
            mixed[i, head] = weights @ values[:, head]
    return mixed


def one_head(w, y, x, layer, weigh, biased=False, valued=False):
    """Tian et al. 2021, sections 3.2 and 3.3: one score matrix, whose keys are the input itself."""
    heads = list(enumerate(head_slices(layer)))
    values = linear(w, 'value', x)
    share = whole if layer.config.one_value_matrix else parted      # a whole matrix: sum_h N_h = 1 remains
    mixed = np.zeros_like(y)
    for i, seen in enumerate(layer.sees):
        q = linear(w, 'query', y[i])
        scores = x[seen] @ q / math.sqrt(len(q))
        if biased and layer.at is not None:
            for h, _ in heads:
                parts = np.array([parted(layer, i, h, j) for j in seen])
                scores += q @ w['part_embedding'][h] * parts
        for j, weight in zip(seen, weigh(scores), strict=True):
            for h, head in heads:
                mixed[i, head] += weight * share(layer, i, h, j) * values[j, head]
                if valued and layer.at is not None:
                    vector = w['value.weight'] @ w['part_embedding'][h]
                    mixed[i] += weight * parted(layer, i, h, j) * vector
    return mixed


def gau(w, y, x, layer):
    """Hua et al. 2022; Liu 2022, section 4.1.  The scale's n counts the real tokens of the row."""
    turn = position_of(layer).turn
    normalise = NORMALISERS[layer.config.normaliser]
    queries = silu(linear(w, 'shared', y)) * w['query_diag']
    keys = silu(linear(w, 'shared', x)) * w['key_diag']
    if layer.config.bias:
        queries += w['query_bias']
        keys += w['key_bias']
    values = silu(linear(w, 'value', x))
    mixed = []
    for i, seen in enumerate(layer.sees):
        q = turn(queries[i], 0 if layer.at is None else layer.at[i])
        products = np.array([q @ turn(keys[j], j) for j in seen])
        weights = normalise(products, len(q), layer.config.relu_scale)
        mixed.append(weights @ values[seen])
    return silu(linear(w, 'gate', y)) * mixed


def softmax(products, s, scale):
    return softmaxed(products / math.sqrt(s))


def softmax_plus(products, s, scale):
    n = len(products) or 1
    return softmaxed(math.log(n, 512) * products / math.sqrt(s))


def squared_relu(products, s, scale):
    squares = np.maximum(products, 0) ** 2
    return squares / SCALES[scale](len(products), s)


def scaled_squared_relu(products, s, scale):
    """Section 3.3: relu^2(q k / sqrt(s)) / (c n s), c their sum."""
    squares = np.maximum(products / math.sqrt(s), 0) ** 2
    c = squares.sum() or 1
    return squares / c / (len(products) * s)


NORMALISERS = {
    'softmax': softmax, 'softmax_plus': softmax_plus,
    'squared_relu': squared_relu, 'scaled_squared_relu': scaled_squared_relu,
}
SCALES = {
    'n2': lambda n, s: n ** 2,
    'n': lambda n, s: n,
    'ns': lambda n, s: n * s,
    's2': lambda n, s: s ** 2,
    'n2s': lambda n, s: n ** 2 * s,
    'ns2': lambda n, s: n * s ** 2,
}


def sinusoid(d, size):
    """Vaswani et al. 2017 as in Dai et al. 2019: the sines of all frequencies, then the cosines."""
    m = np.arange(size // 2)
    angle = d * 10000.0 ** (-2 * m / size)
    table = np.concatenate((np.sin(angle), np.cos(angle)))
    return table.astype(np.float32)


def xlnet(w, y, x, layer):
    """Yang et al. 2019 after Dai et al. 2019, section 3.3: ((q + u) k_j + (q + v) r_(i-j)) / sqrt(K)."""
    queries, _, _ = original(w, y)
    _, keys, values = original(w, x)
    content_queries = queries + w['content_bias']
    distance_queries = queries + w['distance_bias']
    mixed = np.zeros_like(y)
    for i, seen in enumerate(layer.sees):
        for head in head_slices(layer):
            scores = keys[seen, head] @ content_queries[i, head]
            if layer.at is not None:
                for n, j in enumerate(seen):
                    distance = sinusoid(layer.at[i] - j, y.shape[1])
                    r = linear(w, 'distance', distance)
                    scores[n] += distance_queries[i, head] @ r[head]
            weights = softmaxed(scores / math.sqrt(head.stop - head.start))
            mixed[i, head] = weights @ values[seen, head]
    return mixed


class AttentionFacts(NamedTuple):
    """What the tests have to know of an attention."""
    oracle: Callable                # (weights, queries, tokens, Layer) -> input of `out` for each query
    parameters: int                 # their number without `out`, with the sizes below
    own: dict = {}                  # own parameter, not of a Linear -> how it starts; None: a test of its own
    decays: tuple = ()              # those of `own` that have weight decay


D, H, K = 96, 6, 16                                     # sizes of test_parameter_formula_of_attention
S, C = NEEDS['gau']['key_size'], NEEDS['rpe']['clip_distance']
LINEAR = D * D + D

DIAGONALS = {'query_diag': ONES, 'key_diag': ONES}
PARTS = {'own': {'part_embedding': NORMAL}, 'decays': ('part_embedding',)}
ATTENTIONS = {
    'original': AttentionFacts(partial(many_heads, project=original), 3 * LINEAR),
    'symmetric': AttentionFacts(partial(many_heads, project=symmetric), 2 * LINEAR),
    'pairwise': AttentionFacts(
        partial(many_heads, project=pairwise), 2 * LINEAR + H * K * K,
        own={'pair': None, 'pair_key': None}, decays=('pair', 'pair_key')),
    'phase': AttentionFacts(
        partial(many_heads, project=phase), 2 * LINEAR + D // 2,
        own={'angle': ZEROS}),
    'shared_kv': AttentionFacts(partial(many_heads, project=shared_kv), 2 * LINEAR),
    'shared': AttentionFacts(
        partial(many_heads, project=shared), LINEAR + 3 * D,
        own={**DIAGONALS, 'value_diag': ONES}),
    'rpe': AttentionFacts(
        relative, 3 * LINEAR + (2 * C - 1) * D,
        own={'distance_vectors': NORMAL}, decays=('distance_vectors',)),
    'part_mask': AttentionFacts(partial(many_heads, project=original, share=parted), 3 * LINEAR),
    'one_head_softmax': AttentionFacts(partial(one_head, weigh=softmaxed), 2 * LINEAR),
    'one_head_sigmoid': AttentionFacts(partial(one_head, weigh=sigmoid_l2), 2 * LINEAR),
    'part_bias': AttentionFacts(
        partial(one_head, weigh=sigmoid_l2, biased=True),
        2 * LINEAR + H * D, **PARTS),
    'shatter': AttentionFacts(
        partial(one_head, weigh=sigmoid_l2, biased=True, valued=True),
        2 * LINEAR + H * D, **PARTS),
    # Wu and Wv, which are 2 D wide, Wz, d and b
    'gau': AttentionFacts(
        gau, 4 * D * D + D * S + 4 * S,
        own={**DIAGONALS, 'query_bias': ZEROS, 'key_bias': ZEROS}),
    # no biases, but u and v
    'xlnet': AttentionFacts(
        xlnet, 4 * D * D + 2 * D,
        own={'content_bias': NORMAL, 'distance_bias': NORMAL}),
}
NORMS = {'layer': layer_norm, 'rms': rms_norm}


def gelu_expansion(w, x):
    return gelu(linear(w, 'expand', x))


def swiglu_expansion(w, x):
    """Shazeer 2020: silu(x Wa) * (x Wb).  2/3 of SMALL's 16 is 10.7, and the next multiple of 8 is 16."""
    both = linear(w, 'expand', x)
    return silu(both[:, :16]) * both[:, 16:]


MLPS = {'gelu': gelu_expansion, 'swiglu': swiglu_expansion}


def attend_oracle(w, y, x, layer):
    """Attention of the queries y to the tokens x, with its last Linear."""
    weights = part(w, 'attention.')
    mixed = ATTENTIONS[layer.config.attention].oracle(weights, y, x, layer)
    return linear(weights, 'out', mixed)


def post_norm(w, y, x, layer):
    """x = norm(x + f(x)), attention then MLP; GAU has no MLP."""
    norm = NORMS[layer.config.norm]
    y = y + attend_oracle(w, y, x, layer)
    if layer.config.attention == 'gau':
        return norm(w, 'norm', y)
    y = norm(w, 'attention_norm', y)
    expanded = MLPS[layer.config.mlp](w, y)
    return norm(w, 'mlp_norm', y + linear(w, 'contract', expanded))


def pre_norm(w, y, x, layer):
    """Xiong et al. 2020: x = x + f(norm(x))."""
    norm = NORMS[layer.config.norm]
    normed_y = norm(w, 'attention_norm', y)
    normed_x = norm(w, 'attention_norm', x)
    y = y + attend_oracle(w, normed_y, normed_x, layer)
    expanded = MLPS[layer.config.mlp](w, norm(w, 'mlp_norm', y))
    return y + linear(w, 'contract', expanded)


BLOCKS = {'post': post_norm, 'pre': pre_norm}


def layer_oracle(w, number, y, x, sees, at, config):
    layer = Layer(config, number, part(w, 'position.'), sees, at)
    block = BLOCKS[config.norm_place]
    return block(part(w, f'blocks.{number}.'), y, x, layer)


def final_oracle(w, states, config):
    """What heads and poolings read: before the last norm of pre-LN, or as it is."""
    if config.norm_place == 'post':
        return states
    return NORMS[config.norm](w, 'final_norm', states)


def embedding_oracle(w, ids, segments, config):
    x = w['token.weight'][ids] + w['segment.weight'][segments]
    if POSITIONS[config.position].embedded:
        x = x + w['position.table.weight'][:len(ids)]
    return NORMS[config.norm](w, 'norm', x)


def states_oracle(w, ids, segments, real, config):
    """X^0 to X^L (T, D) of one row.  real: the numbers of its tokens that are not padding"""
    sees = [real] * len(ids)
    at = range(len(ids))
    states = [embedding_oracle(w, ids, segments, config)]
    for number in range(config.n_layer):
        x = states[-1]
        states.append(layer_oracle(w, number, x, x, sees, at, config))
    return states


def bert_head(w, x, table, config):
    x = gelu(linear(w, 'transform', x))
    x = NORMS[config.norm](w, 'norm', x)
    return x @ table.T + w.get('bias', 0.0)


def decoder_head(w, x, table, config):
    assert not w
    return x @ table.T


def cls(w, states, real, config):
    return np.tanh(linear(w, 'pooler.dense', first(w, states, real, config)))


def first(w, states, real, config):
    return final_oracle(part(w, 'encoder.'), states[-1], config)[0]


def layerwise(w, states, real, config):
    """Tian et al. 2021, section 3.4: y_0 passes the layers, each of which sees the recorded X^k."""
    encoder = part(w, 'encoder.')
    y = w['pooler.query_embedding'][None]
    for number in range(config.n_layer):
        y = layer_oracle(encoder, number, y, states[number], [real], None, config)
    return final_oracle(encoder, y, config)[0]


HEADS = {'bert': bert_head, 'decoder': decoder_head}
POOLINGS = {'cls': cls, 'first': first, 'layerwise': layerwise}


def logits_of(w, x, config):
    x = final_oracle(part(w, 'encoder.'), x, config)
    return HEADS[config.lm_head](part(w, 'head.'), x, w['encoder.token.weight'], config)


def masked_lm_oracle(w, ids, segments, real, config):
    states = states_oracle(part(w, 'encoder.'), ids, segments, real, config)
    return logits_of(w, states[-1], config)


def classifier_oracle(w, ids, segments, real, config):
    states = states_oracle(part(w, 'encoder.'), ids, segments, real, config)
    pooled = POOLINGS[config.pooling](w, states, real, config)
    return linear(w, 'classifier', pooled)


def span_oracle(w, ids, segments, real, config):
    encoder = part(w, 'encoder.')
    states = states_oracle(encoder, ids, segments, real, config)
    return linear(w, 'classifier', final_oracle(encoder, states[-1], config))


def permutation_oracle(w, ids, segments, real, positions, order, config):
    """Yang et al. 2019, section 2.3: content sees order_j <= order_i, queries see order_j < order_i."""
    encoder = part(w, 'encoder.')
    at = range(len(ids))
    content_sees = [real[order[real] <= order[i]] for i in at]
    query_sees = [real[order[real] < order[i]] for i in positions]
    content = embedding_oracle(encoder, ids, segments, config)
    query = np.tile(w['query_embedding'], (len(positions), 1))
    for number in range(config.n_layer):
        # both read the content of the layer below
        query = layer_oracle(encoder, number, query, content, query_sees, positions, config)
        content = layer_oracle(encoder, number, content, content, content_sees, at, config)
    return logits_of(w, query, config)


def outputs(model, ids, segments, keep, **more):
    """Logits as one tensor; those of spans are (B, T, 2)."""
    if isinstance(model, PermutationLM) and not more:
        more = {'positions': torch.tensor([[0, 2]] * len(ids))}
    logits = model(ids, segments=segments, attention_mask=keep, **more)
    return torch.stack(logits, -1) if isinstance(model, SpanClassifier) else logits


@torch.no_grad()
def agrees(model, oracle, **more):
    """To 1e-10, on a full row, a padded one, one with holes and one without a real token."""
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    inputs = (*batch(rows=4), HOLES, *more.values())
    actual = outputs(model, *inputs[:3], **more).numpy()
    for b in range(4):
        ids, segments, keep, *rest = (x[b].numpy() for x in inputs)
        expected = oracle(w, ids, segments, np.flatnonzero(keep), *rest, model.config)
        assert np.abs(actual[b] - expected).max() < 1e-10, f'row {b}'


@each([*SYSTEMS, *GATED, *MODERN_SAMPLE])
def test_equals_the_loops_of_the_paper(settings):
    agrees(build(**settings), masked_lm_oracle)
    agrees(build(SequenceClassifier, **settings, pooling='layerwise'), classifier_oracle)


@pytest.mark.parametrize('norm_place', BLOCK)
@pytest.mark.parametrize('pooling', POOLING)
def test_pooling_equals_the_loops(pooling, norm_place):
    agrees(build(SequenceClassifier, pooling=pooling, norm_place=norm_place), classifier_oracle)


@pytest.mark.parametrize('norm_place', BLOCK)
def test_spans_equal_the_loops(norm_place):
    agrees(build(SpanClassifier, norm_place=norm_place), span_oracle)


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


@pytest.mark.parametrize('norm_place', BLOCK)
def test_two_streams_equal_the_loops(norm_place):
    """Without an order, the predicted tokens come after all others."""
    model = build(PermutationLM, **XLNET, norm_place=norm_place)
    positions = torch.tensor([[1, 4], [3, 0], [5, 3], [2, 1]])
    order = torch.tensor([
        [3, 0, 5, 1, 4, 2],
        [0, 1, 2, 3, 4, 5],
        [5, 0, 3, 1, 1, 1],
        [5, 4, 3, 2, 1, 0],
    ])
    agrees(model, permutation_oracle, positions=positions, order=order)
    ids, _ = batch(rows=4)
    last = torch.zeros_like(ids).scatter(1, positions, 1)
    assert torch.equal(model(ids, positions), model(ids, positions, order=last))


@pytest.mark.parametrize('n_head, n_layer, length', [(4, 1, 1), (16, 24, 3000), (32, 2, 3000)])
def test_partition_is_one_of_unity(n_head, n_layer, length):
    config = EncoderConfig(9, length, n_layer, n_head, n_head, 4, attention='shatter', position='none')
    for layer in range(n_layer):
        table = source.Partition(config, layer).table
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
    shapes = [
        (4, 8, 512, 2048),
        (12, 12, 768, 3072),
        (24, 16, 1024, 4096),
    ]
    with torch.device('meta'):
        models = [MaskedLM(EncoderConfig(30522, 512, *shape, attention=attention)) for shape in shapes]
        classifier = SequenceClassifier(EncoderConfig(attention=attention))     # base, 2 labels
    assert [source.count_parameters(model) for model in models] == COUNTS[attention]
    if attention in CLASSIFIERS:
        assert source.count_parameters(classifier) == CLASSIFIERS[attention]


def test_every_variant_has_an_oracle_and_a_count_here():
    missing = [name for name in (*ATTENTION, *POSITION) if name not in {**ATTENTIONS, **POSITIONS}]
    assert not missing, f'{missing}: write an oracle from the paper and its row of ATTENTIONS or POSITIONS'


@pytest.mark.parametrize('attention', ATTENTION)
def test_parameter_formula_of_attention(attention):
    """Without the output projection."""
    config = small(**system(attention, 'none', n_embd=D, n_head=H))
    layer = Encoder(config).blocks[0].attention
    without_out = source.count_parameters(layer) - source.count_parameters(layer.out)
    assert without_out == ATTENTIONS[attention].parameters


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


@pytest.mark.parametrize('kind, settings', [
    *[(MaskedLM, settings) for settings in [*SYSTEMS, *GATED, *MODERN_SAMPLE]],
    (PermutationLM, XLNET), (PermutationLM, {**XLNET, **MODERN}),
    *[(SequenceClassifier, {**settings, 'pooling': 'layerwise'}) for settings in CORE],
    *[(kind, {}) for kind in (SequenceClassifier, SpanClassifier)]], ids=str)
def test_every_parameter_gets_its_gradient(kind, settings):
    """The slope along a random direction, by the central difference."""
    n_layer = 1 if kind is MaskedLM else 2              # the two streams and layerwise pooling end otherwise
    model = build(kind, **settings, n_layer=n_layer)
    inputs = (*batch(), KEEP)
    generator = torch.Generator().manual_seed(11)
    shape = outputs(model, *inputs).shape
    onto = torch.randn(shape, generator=generator, dtype=torch.float64)

    def total():
        return (outputs(model, *inputs) * onto).sum()

    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(total(), parameters.values(), materialize_grads=True)
    step = 1e-6
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = total()
            parameter.add_(direction, alpha=-2 * step)
            below = total()
            parameter.add_(direction, alpha=step)
        slope = (gradient * direction).sum()
        expected = (above - below) / (2 * step)
        assert abs(slope - expected) < 1e-5 * max(1, abs(slope)), name
        # a bias of all keys shifts the scores of a softmax alike; a layerwise query has no position
        may_be_0 = name.endswith(('key.bias', 'key_bias')) or 'pooling' in settings
        assert may_be_0 or difference(gradient, 0) > 1e-9, name


@pytest.mark.parametrize('kind', [MaskedLM, PermutationLM])
def test_losses_are_cross_entropies_in_float32(kind):
    model = build(kind, **XLNET)
    ids, segments = batch()
    positions = torch.tensor([[1, 4], [5, 0], [3, 2]])
    targets = torch.tensor([[7, 8], [9, 1], [2, 22]])
    logits = model(ids, positions, segments=segments, attention_mask=KEEP)
    losses = model(ids, positions, targets, segments, KEEP)
    assert losses.dtype == torch.float32
    chances = logits.softmax(-1).gather(-1, targets[:, :, None])
    assert difference(losses.double(), -chances[:, :, 0].log()) < 1e-5


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


def start_of(model, name):
    """(mean, deviation) of a parameter's initial values, or None if another test has them."""
    path, _, last = name.rpartition('.')
    module = model.get_submodule(path)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return NORMAL if last == 'weight' else ZEROS
    if isinstance(module, nn.LayerNorm):
        return ONES if last == 'weight' else ZEROS
    if path.endswith('.attention'):
        return ATTENTIONS[model.config.attention].own[last]
    return {'head.bias': ZEROS, 'query_embedding': NORMAL, 'pooler.query_embedding': NORMAL}[name]


@pytest.mark.parametrize('kind', [MaskedLM, SequenceClassifier, SpanClassifier])
@each_core
def test_initial_values(settings, kind):
    """To five standard errors."""
    if settings == XLNET and kind is MaskedLM:
        kind = PermutationLM
    torch.manual_seed(5)
    sizes = {'vocab_size': 500, 'block_size': 40, 'n_layer': 1, 'n_embd': 96, 'n_inner': 96}
    pooling = 'layerwise' if settings['position'] == 'none' else 'cls'
    model = kind(small(**{**settings, **sizes}, n_label=50, pooling=pooling))
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
    """Not what is drawn for other parameters."""
    models = []
    for tied_start in (False, True):
        torch.manual_seed(5)
        models.append(MaskedLM(small(tied_start=tied_start)))
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
        return last in ATTENTIONS[model.config.attention].decays
    return False                                        # norms, biases, the vectors that streams start from


STARTS = {                              # deviation of S, K = 32
    'identity': 0.02,
    'fan_in': 32 ** -0.5,
    'normal': 0.02,
    'unit': 1.0,
}


@pytest.mark.parametrize('rank', [0, 5])
@pytest.mark.parametrize('pair_init', PAIR_INIT)
def test_initial_pairwise_factors(pair_init, rank):
    torch.manual_seed(6)
    settings = {'attention': 'pairwise', 'pair_init': pair_init, 'pair_rank': rank}
    config = small(**settings, n_head=32, n_embd=32 * 32)
    attention = ATTENTION['pairwise'](config, 0)
    pair = attention.pair @ attention.pair_key.mT if rank else attention.pair
    mean = torch.zeros(32, 32)
    if pair_init == 'identity':
        mean = torch.eye(32, rank or 32) @ torch.eye(rank or 32, 32)
    noise = (pair - mean).detach()
    assert (noise.mean(0).abs() < 6 * noise.std(0) / 32 ** 0.5).all()               # over 32 heads
    deviation = STARTS[pair_init]
    if not (rank and pair_init == 'identity'):          # there they have different deviations
        tolerance = 0.25 if rank else 0.06              # entries of a product are correlated
        assert abs(noise.std().item() / deviation - 1) < tolerance


# ---- dropout; that of BERT's own blocks, embeddings and poolings is compared with transformers below ----

@pytest.mark.parametrize('settings, expected', [
    (system('original', 'none', norm_place='pre'), lambda block, x: x),
    (system('gau', 'none'), lambda block, x: block.norm(x)),
], ids=['pre', 'gated'])
def test_dropout_takes_what_blocks_add(settings, expected):
    """At the highest rate it takes all of that, and the input of a block stays."""
    encoder = build(Encoder, **settings, dropout=math.nextafter(1, 0)).train()
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    for block in encoder.blocks:
        y = block(x, x, source.Context(encoder.position))
        assert torch.equal(y, expected(block, x))


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
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 1, 12, dtype=torch.float64, generator=generator)
    for training in (False, True):
        attention.train(training)(x, x, source.Context(encoder.position, at=torch.zeros(1, 1, 1).long()))
    whole, actual = (y.unflatten(-1, (heads, -1)) for y in before_out)      # (64, 1, heads, K)
    assert kept_or_dropped(actual, whole)
    is_dropped = (actual == 0) & (whole != 0)
    assert (is_dropped.all(-1) | ~is_dropped.any(-1)).all()


def test_embeddings_and_query_stream_are_dropped_out_once():
    """Twice would leave four times a value where it is kept."""
    model = build(PermutationLM, **XLNET, dropout=0.5)
    ids, segments = batch()
    positions = torch.tensor([[1, 4], [5, 0], [3, 2]])
    queries = model.query_embedding.expand(3, 2, -1)
    both = torch.cat((model.encoder.embed(ids, segments), queries), 1)
    inputs = []
    model.encoder.blocks[0].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    model.train()(ids, positions, segments=segments)
    assert kept_or_dropped(inputs[0], both)


# ---- precision ----

@each_core_or_gated
def test_bfloat16_autocast(settings, monkeypatch):
    """Within 3 % of float32 in norm: bfloat16 keeps 8 bits, so each rounding changes up to 0.4 %.

    No product with a float32 parameter makes the queries, keys or values of a fused kernel float32, and no
    norm the states of a post-LN model.
    """
    dtypes = set()
    fused = torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, *others):
        dtypes.update((q.dtype, k.dtype, v.dtype))
        return fused(q, k, v, *others)

    torch.manual_seed(7)
    model = MaskedLM(small(**settings)).eval()
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
    sums = torch.float32 if model.config.norm_place == 'pre' else torch.bfloat16
    assert {x.dtype for x in states[1:]} == {sums}
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize('autocast', [False, True])
@each_core_or_gated
def test_edges_are_finite(settings, autocast):
    """One token, none, the last alone, all, beyond clip_distance; with scores far into saturation."""
    model = build(SequenceClassifier, **settings, pooling='layerwise', n_layer=1).float()
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 5)
    one = torch.tensor([[1], [0]])
    some = torch.zeros(4, 12)
    some[1, 0] = 1
    some[2, -1] = 1
    some[3] = 1
    for keep in (one, some):
        ids, segments = batch(*keep.shape)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            results = [model.encoder(ids, segments, keep), model(ids, segments, keep)]
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
    scores = torch.tensor([[[0.5, -1.0, 0.0, 2.0]]]) + shift
    scores = scores.to(dtype).requires_grad_()
    mask = torch.tensor([[[True, True, False, True]]])
    weights = source.masked_sigmoid(scores, mask)
    expected = sigmoid_l2(scores[mask].tolist())
    assert difference(weights[mask].double(), torch.tensor(expected)) < error
    assert weights[0, 0, 2] == 0
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
    scores = size * torch.randn(1, 1, 100, generator=generator)
    scores = scores.to(dtype)
    mask = (torch.arange(100) < 70)[None, None]
    n = torch.tensor(70.0)
    weights = NORMALISER['scaled_squared_relu'](scores, mask, n, 128, None)[0, 0]
    expected = scaled_squared_relu(scores[mask].double().numpy(), 128, 'ns')
    assert difference(weights[:70], torch.tensor(expected)) < 1e-6 / (70 * 128)
    assert (weights[70:] == 0).all()


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
    generator = torch.Generator().manual_seed(5)
    scores = 20 * torch.randn(3, 5, 7, dtype=torch.float64, generator=generator)
    n = torch.tensor([[[7.0]], [[4.0]], [[2.0]]], dtype=torch.float64)
    mask = torch.arange(7) < n
    weights = NORMALISER[name](scores, mask, n, 16, RELU_SCALE[relu_scale])
    a = scores / 16 ** 0.5
    a[~mask.expand_as(a)] = -math.inf
    expected = in_his_code(a, n, 16).nan_to_num(0)                  # 0 / 0 there
    assert difference(weights, expected) < 1e-12


def test_squared_relu_of_large_scores_in_float16():
    """Their squares are beyond float16 before they are divided."""
    scores = torch.tensor([[[300.0, -1.0, 400.0]]]).half()
    n = torch.tensor(70.0)
    weights = NORMALISER['squared_relu'](scores, None, n, 128, RELU_SCALE['ns'])
    expected = torch.tensor([300 ** 2, 0, 400 ** 2]) / (70 * 128)
    assert difference(weights.float(), expected) < 0.05


def test_gau_counts_keys_beyond_float16():
    """A scale of n s = 512 * 128 is infinite in float16: all weights would be 0."""
    settings = system('gau', 'none', normaliser='squared_relu', key_size=128, block_size=512)
    encoder = build(Encoder, **settings, n_layer=1).float()
    attention = encoder.blocks[0].attention
    x = torch.randn(1, 512, 12, generator=torch.Generator().manual_seed(4))
    expected = attention(x)
    y = attention.half()(x.half())
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
    ({'dropout': 1.0}, 'dropout=1.0.*below 1'),
    *[(system(name, position), f"position='{position}'.*'{name}' works only with")
      for name in OTHERS for position in POSITION if position not in positions_of(name)],
    (system('part_mask', 'none', one_value_matrix=True), 'one_value_matrix=True.*shatter'),
    ({'attention': 'phase', 'n_head': 6, 'n_embd': 18}, "attention='phase'.*even"),
], ids=str)
def test_a_combination_that_would_compute_something_else_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        small(**settings)


@pytest.mark.parametrize('option', {**KNOBS, **source.users_of()})
def test_an_option_that_nothing_reads_is_refused(option):
    value = KNOBS[option]
    _, users = source.users_of()[option]
    others = system('gau', 'rope') if 'original' in users else {}
    with pytest.raises(UserError, match=f'{option}={value!r}: only .*{users[-1]}'):
        small(**{**others, option: value})


def test_two_streams_need_the_attention_of_xlnet():
    with pytest.raises(UserError, match="only attention='xlnet'"):
        PermutationLM(small())


# ---- Hugging Face ----

SIZES = {source.BERT_SIZES[name]: size for name, size in SMALL.items()}


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
    return torch.stack(output.to_tuple(), -1) if 'start_logits' in output else output.logits


@pytest.mark.parametrize('kind, name', [
    (MaskedLM, 'MaskedLM'), (SequenceClassifier, 'SequenceClassification'),
    (SpanClassifier, 'QuestionAnswering'), (MultipleChoice, 'MultipleChoice')])
def test_bert_gives_the_logits_of_hugging_face(kind, name, transformers):
    """In training with the same seed: both apply dropout at the same points in the same order."""
    bert_class = getattr(transformers, f'BertFor{name}')
    bert = randomised(bert_class(transformers.BertConfig(**SIZES))).train()
    ours = kind(small()).train()
    theirs = bert.state_dict()
    names = {our_name: name for name, our_name in source.hugging_face_names(2).items() if name in theirs}
    ours.load_state_dict({our_name: theirs[names[our_name]] for our_name in ours.state_dict()})
    inputs = padded_batch()
    if kind is MultipleChoice:                                      # (B, C, T): three choices for each of two
        inputs = [torch.stack([x, x.roll(1, 0)]) for x in inputs]
    torch.manual_seed(9)
    expected = logits_of_library(bert, *inputs)
    torch.manual_seed(9)
    actual = outputs(ours, *inputs)
    assert difference(actual, expected) < 1e-5 * expected.abs().max()


@pytest.mark.parametrize('position', ['absolute', 'rope'])
def test_export_and_import_again(position, tmp_path, transformers):
    config = small(position=position, dropout=0.2, attention_dropout=0.3)
    ours = randomised(MaskedLM(config)).train()
    source.to_transformers(ours).save_pretrained(tmp_path)
    again = MaskedLM.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert not again.training
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize('kind, position', source.EXPORTS)
@pytest.mark.parametrize('variant', EXPORTED, ids=str)
def test_export_has_the_logits(variant, kind, position, transformers):
    """Those of BERT and RoFormer with our weights: float32, padded, two segments; with and without biases."""
    ids, segments, keep = padded_batch()
    for bias in (True, False):
        config = small(position=position, bias=bias, n_label=3, **variant)
        ours = randomised(kind(config))
        twin = source.to_transformers(ours, pad_token_id=3)
        assert type(twin).__name__ == source.EXPORTS[kind, position]
        assert twin.config.pad_token_id == 3
        actual = ours(ids, segments=segments, attention_mask=keep)
        expected = logits_of_library(twin, ids, segments, keep)
        if kind is MaskedLM:                                        # logits of padding mean nothing
            actual = actual[keep]
            expected = expected[keep]
        assert difference(actual, expected) < 1e-4 * expected.abs().max()


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
    ('Bert', 'hidden_act', 'gelu_new'),
    ('Bert', 'layer_norm_eps', 1e-5),
    ('Bert', 'tie_word_embeddings', False),
    ('Bert', 'is_decoder', True),
    ('RoFormer', 'rotary_value', True),
    ('RoFormer', 'embedding_size', 8),
    ('RoFormer', 'norm_type', 'rms_norm'),
    ('RoFormer', 'use_bias', False),
])
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
    with pytest.raises(UserError, match=r'[\w.]+ is \(23\D.*, but config.json asks for \(30\D'):
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
    encoder = Encoder(small(position='rab', block_size=701))
    distances = torch.arange(-700, 701)
    expected = t5.T5Attention._relative_position_bucket(distances, True, 32, 128)
    assert torch.equal(encoder.position.bucket, expected)
    assert expected.tolist() == [bucket(d) for d in distances.tolist()]


def xlnet_pair(transformers):
    """(transformers' XLNetModel with random weights, PermutationLM with the same)"""
    config = transformers.XLNetConfig(
        vocab_size=23, d_model=12, n_layer=2, n_head=3, d_inner=16, ff_activation='gelu',
        untie_r=True, attn_type='bi', dropout=0.0, layer_norm_eps=1e-12)
    library = randomised(transformers.XLNetModel(config))
    ours = randomised(PermutationLM(small(**XLNET)))
    state = {'query_embedding': library.mask_emb.flatten()}
    for i, layer in enumerate(library.layer):
        relative = layer.rel_attn
        attention = {
            'query.weight': relative.q.flatten(1).T,
            'key.weight': relative.k.flatten(1).T,
            'value.weight': relative.v.flatten(1).T,
            'distance.weight': relative.r.flatten(1).T,
            'out.weight': relative.o.flatten(1),
            'content_bias': relative.r_w_bias.flatten(),
            'distance_bias': relative.r_r_bias.flatten(),
        }
        modules = {
            'attention_norm': relative.layer_norm, 'expand': layer.ff.layer_1,
            'contract': layer.ff.layer_2, 'mlp_norm': layer.ff.layer_norm,
        }
        block = f'encoder.blocks.{i}.'
        state.update({f'{block}attention.{name}': value for name, value in attention.items()})
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
