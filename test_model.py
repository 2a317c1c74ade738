"""The model against its papers: loop-level oracles, printed counts, padding, reductions, Hugging Face.

    $ python -m pytest test_model.py            # CPU, offline

The tests range over the tables of model.py: a new row is tested at once, and fails until it has an oracle (in
ORACLE, SCHEME, NORMALISERS, SCALES, NORMS, HEADS or POOLINGS), a parameter formula (attention, position), a
deviation in STARTS (pair_init), a value in KNOBS (an option that one row uses).
"""
import math
import runpy
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import model as source
from configurator import UserError
from model import (ALLOWED_POSITIONS, ATTENTION, LM_HEAD, NORM, NORMALISER, PAIR_INIT, POOLING, POSITION,
                   RELU_SCALE, SHATTER, USED_BY, Encoder, EncoderConfig, MaskedLM, MultipleChoice,
                   PermutationLM, SequenceClassifier, SpanClassifier, extended)

SMALL = {'vocab_size': 23, 'block_size': 12, 'n_layer': 2, 'n_head': 3, 'n_embd': 12, 'n_inner': 20}
NEEDS = {**dict.fromkeys(SHATTER, {'n_head': 6}), 'gau': {'key_size': 6},       # what a row needs
         'rpe': {'clip_distance': 3}}                                           # less than T = 6
XLNET = {'attention': 'xlnet', 'position': 'none'}


def system(attention, position, **settings):
    return {'attention': attention, 'position': position,
            **NEEDS.get(attention, {}), **NEEDS.get(position, {}), **settings}


FREE = [{'attention': name} for name in ATTENTION if name not in ALLOWED_POSITIONS]     # go with any position
FREE += [{'attention': 'pairwise', 'pair_rank': 2}]
SYSTEMS = [system(**variant, position=position) for variant in FREE for position in POSITION]
SYSTEMS += [system(name, position) for name in ALLOWED_POSITIONS for position in ALLOWED_POSITIONS[name]]
SYSTEMS += [system('part_mask', 'none', same_partition=True)]
SYSTEMS += [system('shatter', 'none', one_value_matrix=True)]
GATED = [system('gau', 'rope', normaliser=name) for name in NORMALISER]
GATED += [system('gau', 'rope', normaliser=name, relu_scale=scale)
          for name in USED_BY['relu_scale'][1] for scale in RELU_SCALE if scale != EncoderConfig.relu_scale]
CORE = [system(**variant, position='rope') for variant in FREE]         # every attention and position once
CORE += [system(name, ALLOWED_POSITIONS[name][0]) for name in ALLOWED_POSITIONS]
CORE += [system('original', name) for name in POSITION if name != 'rope']

KEEP = torch.arange(6) < torch.tensor([[6], [4], [5]])         # (B, T) of batch(), padded on the right
HOLES = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()

each_system = pytest.mark.parametrize('settings', SYSTEMS, ids=str)
each_core = pytest.mark.parametrize('settings', CORE, ids=str)
each_core_or_gated = pytest.mark.parametrize('settings', [*CORE, *GATED], ids=str)


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
    keys = [turn(silu(linear(w, 'shared', token)) * w['key_diag'] + bias[1], j) for j, token in enumerate(x)]
    for i, query in enumerate(y):
        q = silu(linear(w, 'shared', query)) * w['query_diag'] + bias[0]
        q = q if place.at is None else turn(q, place.at[i])
        normalise = entry(NORMALISERS, config.normaliser, 'oracle')
        weights = normalise([q @ k for k in keys], sees[i], len(q), config.relu_scale)
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


@pytest.mark.parametrize('settings', [*SYSTEMS, *GATED], ids=str)
def test_equals_the_loops_of_the_paper(settings):
    agrees(build(**settings), masked_lm_oracle)
    agrees(build(SequenceClassifier, **settings, pooling='layerwise'), classifier_oracle)


@pytest.mark.parametrize('pooling', POOLING)
def test_pooling_equals_the_loops(pooling):
    agrees(build(SequenceClassifier, pooling=pooling), classifier_oracle)


@each_core
def test_other_norms_and_heads_equal_the_loops(settings):
    """Without biases; the only ones left are those of XLNet and T5."""
    for norm, lm_head in [(norm, 'bert') for norm in NORM] + [('rms', lm_head) for lm_head in LM_HEAD]:
        model = build(**settings, norm=norm, lm_head=lm_head, bias=False, n_layer=1)
        biases = [name for name, _ in model.named_parameters() if 'bias' in name]
        assert all(name.endswith(('content_bias', 'distance_bias', 'bucket_bias.weight')) for name in biases)
        agrees(model, masked_lm_oracle)


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


def test_partition_is_one_of_unity():
    for n_head, n_layer, length in [(4, 1, 1), (6, 3, 2), (12, 12, 50), (16, 24, 3000), (32, 2, 3000)]:
        config = EncoderConfig(9, length, n_layer, n_head, n_head, 4, attention='shatter', position='none')
        for layer in range(n_layer):
            table = ATTENTION['shatter'](config, layer).partition.table
            assert table.shape == (n_head, 2 * length - 1) and table.dtype == torch.float32
            assert (table >= 0).all() and difference(table.double().sum(0), 1) < 1e-6


# ---- parameter counts ----

COUNTS = {                              # masked LMs, small, base and large: Courtois, 2; Kowsher, 4
    'original': [28795194, 109514298, 335174458],
    'symmetric': [27744570, 102427194, 309984058],
    'pairwise': [27875642, 103017018, 311556922],
    'shared': [26700090, 95367738, 284867386],
}
CLASSIFIERS = {'original': 109483778, 'shared': 95337218}


@pytest.mark.parametrize('attention', COUNTS)
def test_parameter_counts_of_the_papers(attention):
    with torch.device('meta'):
        models = [MaskedLM(EncoderConfig(30522, 512, *shape, attention=attention))
                  for shape in ((4, 8, 512, 2048), (12, 12, 768, 3072), (24, 16, 1024, 4096))]
        classifier = SequenceClassifier(EncoderConfig(attention=attention))     # base, 2 labels
    assert [source.count_parameters(model) for model in models] == COUNTS[attention]
    if attention in CLASSIFIERS:
        assert source.count_parameters(classifier) == CLASSIFIERS[attention]


@pytest.mark.parametrize('attention, rank', [*((name, 0) for name in ATTENTION), ('pairwise', 5)])
def test_parameter_formula_of_attention(attention, rank):
    """Without the output projection."""
    D, H, K, s = 96, 6, 16, 6
    three, two = 3 * (D * D + D), 2 * (D * D + D)
    pairs = 2 * H * K * rank if rank else H * K * K
    wanted = {'original': three, 'symmetric': two, 'pairwise': two + pairs, 'shared': D * D + D + 3 * D,
              'part_mask': three, 'one_head_softmax': two, 'one_head_sigmoid': two,
              'part_bias': two + H * D, 'shatter': two + H * D,
              'gau': 4 * D * D + D * s + 4 * s,         # U, V (2D wide), Z, g and b
              'xlnet': 4 * D * D + 2 * D}               # no biases, but u and v
    settings = {**SMALL, **system(attention, 'none', pair_rank=rank), 'n_embd': D, 'n_head': H}
    layer = Encoder(EncoderConfig(**settings)).blocks[0].attention
    without_out = source.count_parameters(layer) - source.count_parameters(layer.out)
    assert without_out == entry(wanted, attention, 'parameter formula')


@pytest.mark.parametrize('position', POSITION)
def test_parameter_formula_of_position(position):
    D, H, L, T, c = 12, 3, 2, 12, 3
    wanted = {'absolute': T * D, 'none': 0, 'rope': 0, 'rpe': L * (2 * c - 1) * D, 'rab': 32 * H + T * D}
    encoder = build(Encoder, **system('original', position))
    assert source.count_parameters(encoder.position) == entry(wanted, position, 'parameter formula')


# ---- padding and gradients ----

@each_system
def test_padding_changes_nothing(settings):
    encoder = build(Encoder, **settings)
    classifier = build(SequenceClassifier, **settings, pooling='layerwise')
    ids, segments = batch()
    keep, states, logits = (torch.arange(10) < 6).expand(3, -1), [], []
    for seed, mask in ((3, keep), (4, keep.long())):    # padding of other tokens and segments
        padding, kinds = batch(length=4, seed=seed)
        padded = torch.cat((ids, padding), 1), torch.cat((segments, (kinds + seed) % 2), 1)
        states.append(encoder(*padded, mask)[:, :6])
        logits.append(classifier(*padded, mask))
    assert torch.equal(*states) and torch.equal(*logits)                # weight exactly 0, not merely small
    assert difference(states[0], encoder(ids, segments)) < 1e-12
    assert difference(logits[0], classifier(ids, segments)) < 1e-12


def outputs(model, ids, segments, keep):
    """Logits as one tensor."""
    given = {'segments': segments, 'attention_mask': keep}
    if isinstance(model, PermutationLM):
        return model(ids, torch.tensor([[0, 2]] * len(ids)), **given)
    logits = model(ids, **given)
    return torch.stack(logits) if isinstance(model, SpanClassifier) else logits


def is_a_shift(name, settings, layerwise):
    """Is it a bias of keys?  It adds the same q_i b to all scores of a softmax, unless rope rotates it."""
    rotated = settings.get('position') == 'rope' and not layerwise
    felt = rotated or settings.get('normaliser', '').endswith('relu')
    return name.endswith(('attention.key.bias', 'attention.key_bias')) and not felt


@pytest.mark.parametrize('kind, settings', [
    *[(MaskedLM, settings) for settings in [*SYSTEMS, *GATED]], (PermutationLM, XLNET),
    *[(SequenceClassifier, {**settings, 'pooling': 'layerwise'}) for settings in CORE],
    *[(kind, {}) for kind in (SequenceClassifier, SpanClassifier)]], ids=str)
def test_every_parameter_gets_its_gradient(kind, settings):
    """The slope along a random direction, by the central difference; not 0, but where scores only shift."""
    model, given = build(kind, **settings), (*batch(), KEEP)
    generator, step, layerwise = torch.Generator().manual_seed(11), 1e-6, 'pooling' in settings
    onto = torch.randn(outputs(model, *given).shape, generator=generator, dtype=torch.float64)
    (outputs(model, *given) * onto).sum().backward()
    for name, parameter in model.named_parameters():
        direction, values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64), []
        with torch.no_grad():
            for move in (step, -2 * step, step):
                parameter.add_(direction, alpha=move)
                values.append((outputs(model, *given) * onto).sum())
        last = layerwise and name.startswith('encoder.blocks.1')        # one query, without a position
        if last and name.endswith(('part_embedding', 'distance.weight', 'distance_bias')):
            continue
        assert (difference(parameter.grad, 0) < 1e-9) == is_a_shift(name, settings, last), name
        slope = (parameter.grad * direction).sum()
        assert abs(slope - (values[0] - values[1]) / (2 * step)) < 1e-5 * max(1, abs(slope)), name


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
    first, second = (build(Encoder, attention=name, position=position) for name in (one, other))
    rest = {name: x for name, x in first.state_dict().items() if '.attention.' not in name}
    second.load_state_dict(rest, strict=False)
    for a, b in zip(first.blocks, second.blocks, strict=True):
        b.attention.load_state_dict(translate(a.attention.state_dict()))
    assert difference(first(ids, segments, KEEP), second(ids, segments, KEEP)) < 1e-10


# ---- losses and initial values ----

@pytest.mark.parametrize('kind', [MaskedLM, PermutationLM])
def test_losses_are_cross_entropies_in_float32(kind):
    model, (ids, segments) = build(kind, **XLNET), batch()
    positions, targets = torch.tensor([[1, 4], [5, 0], [3, 2]]), torch.tensor([[7, 8], [9, 1], [2, 22]])
    logits = model(ids, positions, segments=segments, attention_mask=KEEP)
    losses = model(ids, positions, targets, segments, KEEP)
    assert losses.dtype == torch.float32
    for b in range(3):
        if kind is MaskedLM:                                        # the head runs at the positions alone
            full = model(ids, segments=segments, attention_mask=KEEP)
            assert difference(logits[b], full[b, positions[b]]) < 1e-12
        for i in range(2):
            chances = logits[b, i].exp() / logits[b, i].exp().sum()
            assert abs(losses[b, i] + chances[targets[b, i]].log()) < 1e-5


def test_segments_are_0_and_all_tokens_real_when_not_given():
    encoder = build(Encoder)
    ids, segments = batch()
    assert difference(encoder(ids), encoder(ids, torch.zeros_like(ids), torch.ones_like(ids).bool())) < 1e-12
    assert difference(encoder(ids), encoder(ids, segments)) > 1e-3


@pytest.mark.parametrize('kind', [MaskedLM, SequenceClassifier, SpanClassifier])
@each_core
def test_initial_values(settings, kind):
    kind = PermutationLM if settings == XLNET and kind is MaskedLM else kind
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
    assert (noise.mean(0).abs() < 6 * noise.std(0) / 32 ** 0.5).all()              # over 32 heads
    deviation = entry(STARTS, pair_init, 'deviation')
    if not (rank and pair_init == 'identity'):          # there they have different deviations
        assert abs(noise.std().item() / deviation - 1) < (0.25 if rank else 0.06)     # A B^T: correlated


# ---- dropout: that it falls somewhere is seen at rate 1, on what exactly at rate 1/2 ----

@each_system
def test_attention_without_weights_gives_the_bias_of_its_output(settings):
    """So every term, those of distances and parts too, has the dropped weights."""
    encoder = build(Encoder, **settings, attention_dropout=1.0)
    x, context = encoder.embed(*batch()), source.Context(encoder.position, KEEP[:, None, None])
    for block in encoder.train().blocks:
        bias = block.attention.out.bias
        y = block.attention(x, x, context)
        assert difference(y, torch.zeros(()) if bias is None else bias) < 1e-12


def test_dropout_takes_what_blocks_add_embeddings_query_stream_and_pooled_state():
    (ids, segments), positions = batch(), torch.zeros(3, 1, dtype=torch.long)
    x = torch.randn(3, 6, 12, dtype=torch.float64)
    plain, gated = (build(Encoder, **system(*names), dropout=1.0).train()
                    for names in (('original', 'none'), ('gau', 'rope')))
    for block in plain.blocks:                          # the input of a block stays
        wanted = block.mlp_norm(block.attention_norm(x))
        assert torch.equal(block(x, x, source.Context(plain.position)), wanted)
    for block in gated.blocks:
        assert torch.equal(block(x, x, source.Context(gated.position)), block.norm(x))
    model = build(PermutationLM, **XLNET, dropout=1.0).train()
    assert (model.encoder.embed(ids, segments) == 0).all()
    model(ids, positions).sum().backward()
    assert (model.query_embedding.grad == 0).all()
    classifier = build(SequenceClassifier, dropout=1.0).train()
    assert torch.equal(classifier(ids, segments), classifier.classifier.bias.expand(3, -1))


def kept_or_dropped(given, whole):
    """Is each entry 0 or twice that of `whole`, as after one dropout of rate 1/2?  Both have to occur."""
    dropped = given == 0
    kept = (given - 2 * whole).abs() < 1e-12
    assert dropped.any() and kept.any()
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
        attention.train(training)(x, x, source.Context(encoder.position))
    whole, given = (y.unflatten(-1, (heads, -1)) for y in before_out)       # (64, 1, heads, K)
    assert kept_or_dropped(given, whole)
    dropped = (given == 0) & (whole != 0)
    assert (dropped.all(-1) | ~dropped.any(-1)).all()


@pytest.mark.parametrize('kind', [MaskedLM, PermutationLM])
def test_embeddings_and_query_stream_are_dropped_out_once(kind):
    """Twice would leave four times a value where it is kept."""
    model = build(kind, **XLNET, dropout=0.5)
    ids, segments = batch()
    whole = model.encoder.embed(ids, segments)
    arguments = {'segments': segments}
    if kind is PermutationLM:
        arguments['positions'] = torch.tensor([[1, 4], [5, 0], [3, 2]])
        whole = torch.cat((whole, model.query_embedding.expand(3, 2, -1)), 1)
    inputs = []
    model.encoder.blocks[0].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    model.train()(ids, **arguments)
    assert kept_or_dropped(inputs[0], whole)


# ---- precision ----

@each_core_or_gated
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
    assert logits.dtype == torch.bfloat16 and (logits.float() - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize('autocast', [False, True])
@each_core_or_gated
def test_edges_are_finite(settings, autocast):
    """One token, none, the last alone, all, beyond clip_distance; with scores far into saturation."""
    model = build(SequenceClassifier, **settings, pooling='layerwise', n_layer=1).float()
    parameters = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, 5)
    for keep in ([[1], [0]], [[0] * 12, [1] + [0] * 11, [0] * 11 + [1], [1] * 12], [[1] * 12] * 2):
        keep = torch.tensor(keep).bool()
        given = *batch(*keep.shape), None if keep.all() else keep
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            results = [model.encoder(*given), model(*given)]
        total = sum(x.float().square().sum() for x in results)
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        assert all(x.isfinite().all() for x in (*results, *gradients)), keep


def test_distances_are_added_in_float32():
    """To q k = 256 in bfloat16, where 257 would be 256 again: softmax(256, 257, 256)."""
    vectors = torch.tensor([[0.0], [1 / 16], [0.0]]).bfloat16()          # of the distances -1, 0 and 1
    q = torch.full((1, 1, 3, 1), 16.0).bfloat16()
    v = torch.zeros_like(q)
    y = source.attention_with_distances(q, q, v, vectors, vectors, None, 0.0)
    assert abs(y[0, 0, 1, 0] * 16 - math.e / (math.e + 2)) < 0.01


@pytest.mark.parametrize('dtype, error', [
    (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)], ids=str)
def test_sigmoid_weights_of_rows_far_below_zero(dtype, error):
    """The norm of a row brings its weights back to order 1, however small the sigmoids are."""
    for shift in (0, -16, -40, -100):
        scores = (torch.tensor([[[0.5, -1.0, 0.0, 2.0]]]) + shift).to(dtype).requires_grad_()
        mask = torch.tensor([1, 1, 0, 1]).bool().view(1, 1, 4)
        weights = source.masked_sigmoid(scores, mask)
        wanted = sigmoid_l2(scores[0, 0].tolist(), mask.flatten().tolist())
        assert difference(weights[0, 0].double(), torch.tensor(wanted)) < error
        gradient, = torch.autograd.grad(weights[0, 0, 0], scores)
        assert gradient.isfinite().all() and gradient[0, 0, 0] > 0.1


@pytest.mark.parametrize('dtype, size', [
    (torch.float16, 1.0), (torch.float16, 1e-5), (torch.float16, 1e-7),
    (torch.bfloat16, 1e-25), (torch.bfloat16, 1e25)], ids=str)
def test_rows_of_scaled_squared_relu(dtype, size):
    """They sum to 1 / (n s), however large scores are.

    Scores of 1e-5 and 1e-7 are subnormal numbers in float16. The squares of 1e-25 and 1e25 would be 0 and
    infinite in float32; there the largest of a row, by which scores are divided first, is needed.
    """
    scores = (size * torch.randn(2, 6, 100, generator=torch.Generator().manual_seed(13))).to(dtype)
    mask = (torch.arange(100) < 70).expand(2, 1, 100)
    weights = 70 * 128 * NORMALISER['scaled_squared_relu'](scores, mask, torch.tensor(70.0), 128, None)
    assert difference(weights.sum(-1), 1) < 1e-6
    assert (weights[..., 70:] == 0).all()
    expected = scaled_squared_relu(scores[1, 2].tolist(), mask[1, 0].tolist(), 128, 'ns')
    assert difference(weights[1, 2], 70 * 128 * torch.tensor(expected)) < 1e-6


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


def test_squared_relu_of_large_scores_in_float16():
    """Their squares are beyond float16 before they are divided."""
    scores = torch.tensor([[[300.0, -1.0, 400.0]]]).half()
    weights = NORMALISER['squared_relu'](scores, None, torch.tensor(70.0), 128, RELU_SCALE['ns'])
    assert difference(weights.float(), torch.tensor([300 ** 2, 0, 400 ** 2]) / (70 * 128)) < 0.05


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

QUICK = [system('pairwise', 'rab'), system('original', 'rpe'), system('shatter', 'none'),
         system('gau', 'rope')]
SLOW = [settings for settings in CORE if settings not in QUICK]         # made of much the same operations


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
        one, other = (torch.autograd.grad(function(model, *batch(length=length), keep).sum(), parameters)
                      for function in (compiled, outputs))
        assert all(difference(a, b) <= 1e-9 * max(1, b.abs().max()) for a, b in zip(one, other, strict=True))
    assert counters['stats']['unique_graphs'] <= 2


@each_core
def test_extended(settings):
    """Short rows give the same states; long ones those of one built at that length, with its weights."""
    model, (ids, segments) = build(**settings), batch(rows=4)
    for block_size in (40, 8):
        other, fresh = extended(model, block_size), build(**{**settings, 'block_size': block_size})
        assert (model.config.block_size, other.config.block_size) == (12, block_size) and not other.training
        states = (x(ids, segments=segments, attention_mask=HOLES) for x in (model, other))
        assert difference(*states) < 1e-12
        fresh.load_state_dict(other.state_dict())
        rows = batch(length=block_size)[0]
        assert difference(other(rows), fresh(rows)) < 1e-12
        with pytest.raises(ValueError, match=f'{block_size + 1} .*block_size={block_size}'):
            other(torch.ones(1, block_size + 1, dtype=torch.long))


def test_extension_draws_new_positions_and_repeats_the_longest_distances():
    """Tian et al. 2021, section 2: "copying the learnt embeddings" of the longest distances in training."""
    rows = extended(build(), 1012).encoder.position.table.weight[12:]
    assert rows.shape == (1000, 12) and abs(rows.std().item() / 0.02 - 1) < 5 / (2 * rows.numel()) ** 0.5
    model = build(position='rpe', clip_distance=20)                 # rows of 12 tokens: distances -11 to 11
    old, new = (x.encoder.position.table for x in (model, extended(model, 40)))
    for row in range(39):
        assert torch.equal(new[:, row], old[:, min(max(row, 19 - 11), 19 + 11)])
    assert torch.equal(extended(model, 8).encoder.position.table, old)


# ---- what a user can get wrong ----

TABLES = {'attention': ATTENTION, 'position': POSITION, 'pair_init': PAIR_INIT, 'norm': NORM,
          'lm_head': LM_HEAD, 'normaliser': NORMALISER, 'relu_scale': RELU_SCALE, 'pooling': POOLING}
KNOBS = {'pair_rank': 2, 'pair_init': 'normal', 'normaliser': 'softmax', 'key_size': 64,    # not defaults
         'relu_scale': 'n', 'clip_distance': 5, 'same_partition': True, 'one_value_matrix': True}


@pytest.mark.parametrize('settings, words', [
    *[({name: 'pairwize'}, [f"{name}='pairwize'", *table]) for name, table in TABLES.items()],
    *[({option: entry(KNOBS, option, 'value')}, [f'{option}={KNOBS[option]!r}', *USED_BY[option][1]])
      for option in USED_BY],
    *[(system(name, position), [f"position='{position}'", f"attention='{name}'", *ALLOWED_POSITIONS[name]])
      for name in ALLOWED_POSITIONS for position in POSITION if position not in ALLOWED_POSITIONS[name]],
    *[(system('shatter', 'none', n_head=n_head), [f'n_head={n_head}', "attention='shatter'", 'even'])
      for n_head in (2, 3)],
    (system('gau', 'rope', key_size=5), ["position='rope'", '5', 'even', 'key_size']),
    (system('part_mask', 'none', one_value_matrix=True), ['one_value_matrix=True', 'shatter']),
    ({'n_head': 5}, ['n_embd=12', 'n_head=5', 'multiple']),
    ({'n_embd': 9, 'position': 'rope'}, ["position='rope'", '3', 'even']),
], ids=str)
def test_config_error_names_key_value_and_choices(settings, words):
    with pytest.raises(UserError) as error:
        EncoderConfig(**{**SMALL, **settings})
    assert all(word in str(error.value) for word in words), str(error.value)
    assert '\n' not in str(error.value)


def test_other_classes_say_what_they_need():
    with pytest.raises(UserError, match="only attention='xlnet'"):
        PermutationLM(EncoderConfig(**SMALL))
    with pytest.raises(SystemExit, match=r'^[^\n]*python train.py config/quickstart.py$'):
        runpy.run_path(source.__file__, run_name='__main__')


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


def their_logits(theirs, ids, segments, keep):
    found = theirs(input_ids=ids, token_type_ids=segments, attention_mask=keep.long())
    return torch.stack(found.to_tuple()) if 'start_logits' in found else found.logits


@pytest.mark.parametrize('kind, name', [
    (MaskedLM, 'MaskedLM'), (SequenceClassifier, 'SequenceClassification'),
    (SpanClassifier, 'QuestionAnswering'), (MultipleChoice, 'MultipleChoice')])
def test_bert_gives_the_logits_of_hugging_face(kind, name, transformers):
    """In training with the same seed: both apply dropout at the same points in the same order."""
    theirs = randomised(getattr(transformers, f'BertFor{name}')(transformers.BertConfig(**SIZES))).train()
    names, ours, given = source.hugging_face_names(3), kind(EncoderConfig(*OURS)).train(), padded_batch()
    ours.load_state_dict({names[name]: x for name, x in theirs.state_dict().items()
                          if names.get(name) in ours.state_dict()})
    if kind is MultipleChoice:                                      # (B, C, T): three choices for each of two
        given = [torch.stack([x, x.roll(1, 0)]) for x in given]
    torch.manual_seed(9)
    wanted = their_logits(theirs, *given)
    torch.manual_seed(9)
    assert difference(outputs(ours, *given), wanted) < 1e-5 * wanted.abs().max()


def test_export_and_import_again(tmp_path, transformers):
    ours = randomised(MaskedLM(EncoderConfig(**SMALL, dropout=0.2, attention_dropout=0.3))).train()
    source.to_transformers(ours).save_pretrained(tmp_path)
    again = MaskedLM.from_pretrained(tmp_path)
    assert again.config == ours.config and not again.training
    assert again.state_dict().keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize('kind, position', source.EXPORTS)
@pytest.mark.parametrize('variant', FREE, ids=str)
def test_export_has_the_logits(variant, kind, position, transformers):
    """Those of BERT and RoFormer with our weights: float32, padded, two segments; with and without biases."""
    (ids, segments, keep), sizes = padded_batch(), {**SMALL, 'n_head': 2, 'n_label': 3}
    for bias in (True, False):
        ours = randomised(kind(EncoderConfig(**sizes, position=position, bias=bias, **variant)))
        theirs = source.to_transformers(ours, pad_token_id=3)
        assert type(theirs).__name__ == source.EXPORTS[kind, position] and theirs.config.pad_token_id == 3
        given = ours(ids, segments=segments, attention_mask=keep)
        wanted = their_logits(theirs, ids, segments, keep)
        given, wanted = (x[keep] if kind is MaskedLM else x for x in (given, wanted))
        assert difference(given, wanted) < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize('kind, settings', [
    *[(MaskedLM, settings) for settings in CORE
      if settings['attention'] not in source.FOLD or settings['position'] in ('rpe', 'rab')],
    (MaskedLM, {'norm': 'rms'}), (MaskedLM, {'lm_head': 'decoder'}), (SpanClassifier, {}),
    (SequenceClassifier, {'pooling': 'first'}), (SequenceClassifier, {'position': 'rope'})], ids=str)
def test_export_refuses_what_transformers_has_no_layer_for(kind, settings, transformers):
    with pytest.raises(UserError, match='^transformers has no equal of [^\n]*$'):
        source.to_transformers(build(kind, **settings))


@pytest.mark.parametrize('setting', [
    {'hidden_act': 'gelu_new'}, {'layer_norm_eps': 1e-5}, {'tie_word_embeddings': False},
    {'is_decoder': True}], ids=str)
def test_import_refuses_other_berts(setting, tmp_path, transformers):
    transformers.BertConfig(**SIZES, **setting).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f'{next(iter(setting))}={next(iter(setting.values()))}'):
        source.pretrained_encoder(tmp_path)


def test_import_refuses_what_lacks_a_head_or_is_no_bert(tmp_path, transformers):
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / 'headless')
    assert 'encoder.token.weight' in source.pretrained_encoder(tmp_path / 'headless')[1]
    with pytest.raises(UserError, match='headless: has no cls.predictions'):
        MaskedLM.from_pretrained(tmp_path / 'headless')
    transformers.DistilBertConfig().save_pretrained(tmp_path / 'distilled')
    with pytest.raises(UserError, match='model_type=distilbert'):
        source.pretrained_encoder(tmp_path / 'distilled')


def test_buckets_are_those_of_t5():
    t5 = pytest.importorskip('transformers.models.t5.modeling_t5')
    encoder = Encoder(EncoderConfig(**{**SMALL, 'position': 'rab', 'block_size': 701}))
    wanted = t5.T5Attention._relative_position_bucket(torch.arange(-700, 701), True, 32, 128)
    assert torch.equal(encoder.position.bucket, wanted)
    assert wanted.tolist() == [bucket(d) for d in range(-700, 701)]


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


def test_content_and_two_streams_give_the_states_of_hugging_face(transformers):
    """In orders that begin with a real token: in theirs, a query that sees none averages the padding."""
    theirs, ours = xlnet_pair(transformers)
    ids, segments, keep = padded_batch()
    wanted = theirs(inputs_embeds=ours.encoder.embed(ids, segments), attention_mask=keep.float())[0]
    assert difference(ours.encoder(ids, segments, keep)[keep], wanted[keep]) < 1e-5 * wanted.abs().max()
    generator = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(9, generator=generator) for _ in range(3)])
    order = torch.where(torch.arange(9) == 2, -1, order)
    positions = torch.tensor([[0, 8, 4], [4, 3, 1], [5, 0, 6]])
    wanted = theirs(
        inputs_embeds=ours.encoder.embed(ids, segments), attention_mask=keep.float(),
        perm_mask=(order[:, None] >= order[:, :, None]).float(),
        target_mapping=torch.nn.functional.one_hot(positions, 9).float())[0]
    wanted = ours.head(wanted, ours.encoder.token.weight)
    given = ours(ids, positions, segments=segments, attention_mask=keep, order=order)
    assert difference(given, wanted) < 1e-5 * wanted.abs().max()
