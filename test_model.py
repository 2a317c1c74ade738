"""The model against its papers: loop-level oracles, counts, padding, precision, Hugging Face.

    $ python -m pytest test_model.py            # CPU, offline

The file has three floors, with lines `# ====` between them: BERT's oracle and what the tests know of BERT; a
block for each variant, with its oracle, its facts and the tests that only it has; the tests of all variants.
They range over the tables of model.py: a new row is tested at once, and fails until these tests know it.
An attention needs a row of ATTENTIONS, a position encoding one of POSITIONS, a row of another table its
oracle in the table of the same name with an S.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import model as source
from configurator import UserError
from model import (ATTENTION, LM_HEAD, NORM, NORM_PLACE, POOLING, POSITION, Encoder, EncoderConfig, MaskedLM,
                   SequenceClassifier, extended, positions_of)

# ---- models and batches ----

SMALL = {
    'vocab_size': 23,
    'block_size': 12,
    'n_layer': 2,
    'n_head': 3,
    'n_embd': 12,
    'n_inner': 16,
}


def system(attention, position, **settings):
    return {'attention': attention, 'position': position, **ATTENTIONS[attention].needs, **settings}


def digits(rows):
    return torch.tensor([[int(digit) for digit in row] for row in rows.split()])


# real tokens and tokens to predict, each in four rows
KEEP = digits('111111 111100 010111 000000').bool()
PREDICTED = digits('14 30 53 21')


def each(systems):
    return pytest.mark.parametrize('settings', systems, ids=str)


def small(**settings):
    return EncoderConfig(**{**SMALL, **settings})


def randomised(model, std=0.3):
    """Make every parameter random: biases, norms, diagonals and S too; in eval mode."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:                 # not the sinusoids of a RoFormer of transformers
                parameter.normal_(std=std)
    return model.eval()


def build(kind=MaskedLM, **settings):
    """A small random float64 model."""
    std = ATTENTIONS[settings.get('attention', 'original')].std
    return randomised(kind(small(**settings)).double(), std)


def batch(rows=4, length=6):
    """ids (B, T) without 0, and segments (B, T) of both kinds."""
    ids = torch.randint(1, SMALL['vocab_size'], (rows, length), generator=torch.Generator().manual_seed(2))
    second = torch.arange(length) >= length // 2
    return ids, second.long().expand(rows, -1)


def difference(x, y):
    return (x - y).abs().max().item()


# ---- what the tests have to know of a variant ----

class AttentionFacts(NamedTuple):
    """A row of ATTENTIONS."""
    oracle: Callable                            # (weights, query, tokens, Layer) -> input of `out`
    parameters: int                             # their number without `out`, with the sizes D, H, K below
    starts: dict = {}                           # own parameters: the end of a name -> as in STARTS
    decaying: tuple = ()                        # own parameters that have weight decay
    options: dict = {}                          # own options -> a value that is not the default
    needs: dict = {}                            # settings that it needs
    also: tuple = ()                            # more settings to test, with all positions if they name none
    refused: tuple = ()                         # settings, without position, and the error that they raise
    counts: list | None = None                  # of masked LMs, small, base and large, in its paper
    block: Callable | None = None               # oracle of its blocks; None: one of NORM_PLACES
    kind: type = MaskedLM                       # the model that pretrains it
    modern: bool = False                        # whether to test it in modern blocks, too
    std: float = 0.5                            # deviation of random weights


class PositionFacts(NamedTuple):
    """A row of POSITIONS."""
    turn: Callable = lambda x, t: x             # of vectors (..., K) at the positions t
    bias: Callable = lambda layer: 0.0          # (H, n), of the scores
    embedded: bool = False                      # vectors of positions are added to the embeddings
    starts: dict = {}                           # as in AttentionFacts


class ModelFacts(NamedTuple):
    """A row of MODELS."""
    oracle: Callable                            # (weights, ids, segments, real, config, **more) -> logits
    settings: dict = {}                         # that it needs
    more: dict = {}                             # inputs that others do not have
    has_targets: bool = False                   # is it a language model?


D, H, K = 96, 6, 16                     # sizes of test_parameter_formula_of_attention
LINEAR = D * D + D
ZEROS = 0.0, 0.0                        # mean and standard deviation
ONES = 1.0, 0.0
NORMAL = 0.0, 0.02
STARTS = {                              # end of a parameter's name -> how it starts; the first that fits
    'norm.weight': ONES,
    'weight': NORMAL,
    'bias': ZEROS,
    'embedding': NORMAL,
}
QUICK = []                              # settings that are compiled by default, without autograd's graphs
EXTREMES = []                           # see test_weights_of_very_large_and_very_small_scores
OTHERS = []                             # more settings to test
REFUSED = []                            # more settings that are refused, with the error


# ---- BERT's oracle: the equations in numpy and float64, for one query at a time ----

class Layer(NamedTuple):
    """What the oracle of a layer reads besides states."""
    config: EncoderConfig
    number: int
    position: dict              # weights of the encoder's position encoding
    at: object                  # position of the query; None: it has none, and no positional term enters
    seen: np.ndarray            # (n,) positions of the tokens to which it may attend


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


def dropped(x, rate):
    """Replaces dropout in oracles and model. It is not linear: in a wrong place it changes the result."""
    return x + rate * x * x


NORMS = {'layer': layer_norm, 'rms': rms_norm}
POSITIONS = {'absolute': PositionFacts(embedded=True), 'none': PositionFacts()}


def position_of(layer):
    """Facts of the position encoding; those of `none` for a query without a position."""
    return POSITIONS['none' if layer.at is None else layer.config.position]


# weights of a query from the scores of the keys that it sees, which may be none

def softmaxed(scores):
    weights = np.exp(scores)
    return weights / weights.sum()


# attention of the query y (D,) to the tokens x (n, D): what `out` is applied to

def heads_of(layer, *arrays):
    """The part of each array (..., D) for each head."""
    return zip(*(np.split(x, layer.config.n_head, -1) for x in arrays), strict=True)


def attend(layer, q, k, v, bias=0.0, weigh=softmaxed):
    """softmax(q k^T / sqrt(K) + bias) v of each head, with the terms of the position encoding."""
    position = position_of(layer)
    biases = np.broadcast_to(bias + position.bias(layer), (layer.config.n_head, len(k)))
    mixed = []
    for bias_h, (q_h, k_h, v_h) in zip(biases, heads_of(layer, q, k, v), strict=True):
        q_h = position.turn(q_h, layer.at)
        k_h = position.turn(k_h, layer.seen)
        scores = k_h @ q_h / math.sqrt(len(q_h)) + bias_h
        weights = dropped(weigh(scores), layer.config.attention_dropout)
        mixed.append(weights @ v_h)
    return np.concatenate(mixed)


def original(w, y, x, layer):
    """Courtois et al. 2024, eq. 1 and 2."""
    return attend(layer, linear(w, 'query', y), linear(w, 'key', x), linear(w, 'value', x))


ATTENTIONS = {'original': AttentionFacts(
    original, 3 * LINEAR, options={'tied_start': True}, counts=[28_795_194, 109_514_298, 335_174_458])}


def test_tied_start_changes_the_keys_alone():
    """Not what is drawn for other parameters."""
    models = []
    for tied_start in (False, True):
        torch.manual_seed(5)
        models.append(MaskedLM(small(tied_start=tied_start)))
    plain, tied = (dict(model.named_parameters()) for model in models)
    assert plain.keys() == tied.keys()                  # two matrices stay, with names
    for name, x in tied.items():
        assert torch.equal(x, plain[name.replace('attention.key', 'attention.query')]), name


def gelu_expansion(w, x):
    return gelu(linear(w, 'expand', x))


MLPS = {'gelu': gelu_expansion}


def attention_oracle(w, y, x, layer):
    """What a block adds to the query y: attention to the tokens x and its last Linear, with dropout."""
    weights = part(w, 'attention.')
    mixed = ATTENTIONS[layer.config.attention].oracle(weights, y, x, layer)
    return dropped(linear(weights, 'out', mixed), layer.config.dropout)


def mlp_oracle(w, y, config):
    return dropped(linear(w, 'contract', MLPS[config.mlp](w, y)), config.dropout)


def post_norm(w, y, x, layer):
    """x = norm(x + f(x)), attention then MLP."""
    norm = NORMS[layer.config.norm]
    y = y + attention_oracle(w, y, x, layer)
    y = norm(w, 'attention_norm', y)
    return norm(w, 'mlp_norm', y + mlp_oracle(w, y, layer.config))


NORM_PLACES = {'post': post_norm}


def layer_oracle(w, number, y, x, sees, at, config):
    """Each query of y (Q, D) has a position in `at` and attends to those tokens of x (T, D) that it sees.

    With attend_self=False a query never sees the token at its own position: A_ii = 0 (Shin et al. 2020).
    """
    block = ATTENTIONS[config.attention].block or NORM_PLACES[config.norm_place]
    weights = part(w, f'encoder.blocks.{number}.')
    rows = []
    for query, seen, i in zip(y, sees, at, strict=True):
        if not config.attend_self:
            seen = seen[seen != i]
        layer = Layer(config, number, part(w, 'encoder.position.'), i, seen)
        rows.append(block(weights, query, x[seen], layer))
    return np.array(rows)


def final_oracle(w, x, config):
    """What heads and poolings read: the last norm of pre-LN, or x as it is."""
    if config.norm_place == 'post':
        return x
    return NORMS[config.norm](w, 'encoder.final_norm', x)


def embedding_oracle(w, ids, segments, config):
    x = w['encoder.token.weight'][ids] + w['encoder.segment.weight'][segments]
    if POSITIONS[config.position].embedded:
        x = x + w['encoder.position.table.weight'][:len(ids)]
    return dropped(NORMS[config.norm](w, 'encoder.norm', x), config.dropout)


def states_oracle(w, ids, segments, real, config):
    """X^0 to X^L (T, D) of a row, and the final X^L.  real: numbers of the tokens that are not padding"""
    T = len(ids)
    states = [embedding_oracle(w, ids, segments, config)]
    for number in range(config.n_layer):
        x = states[-1]
        states.append(layer_oracle(w, number, x, x, [real] * T, range(T), config))
    return states, final_oracle(w, states[-1], config)


def bert_head(w, x, table, config):
    x = gelu(linear(w, 'transform', x))
    x = NORMS[config.norm](w, 'norm', x)
    return x @ table.T + w.get('bias', 0.0)


LM_HEADS = {'bert': bert_head}


def cls(w, states, final, real, config):
    return np.tanh(linear(w, 'pooler.dense', final[0]))


POOLINGS = {'cls': cls}


def logits_of(w, x, config):
    return LM_HEADS[config.lm_head](part(w, 'head.'), x, w['encoder.token.weight'], config)


def masked_lm_oracle(w, ids, segments, real, config):
    _, final = states_oracle(w, ids, segments, real, config)
    return logits_of(w, final, config)


def classifier_oracle(w, ids, segments, real, config):
    states, final = states_oracle(w, ids, segments, real, config)
    pooled = POOLINGS[config.pooling](w, states, final, real, config)
    return linear(w, 'classifier', dropped(pooled, config.dropout))


MODELS = {
    MaskedLM: ModelFacts(masked_lm_oracle, has_targets=True),
    SequenceClassifier: ModelFacts(classifier_oracle),
}


def outputs(model, ids, segments, keep, **more):
    """Logits as one tensor; those of spans are (B, T, 2)."""
    logits = model(ids, segments=segments, attention_mask=keep, **more)
    return torch.stack(logits, -1) if isinstance(logits, tuple) else logits


@torch.no_grad()
def agrees(model, keep=KEEP):
    """To 1e-10, on a full row, a padded one, one with holes and one without a real token."""
    w = {name: value.numpy() for name, value in model.state_dict().items()}
    config = model.config if model.training else replace(model.config, dropout=0.0, attention_dropout=0.0)
    facts = MODELS[type(model)]
    inputs = (*batch(), keep)
    actual = outputs(model, *inputs, **facts.more)
    for b, row in enumerate(actual.numpy()):
        ids, segments, keep = (x[b].numpy() for x in inputs)
        rest = {name: x[b].numpy() for name, x in facts.more.items()}
        expected = facts.oracle(w, ids, segments, np.flatnonzero(keep), config, **rest)
        assert np.abs(row - expected).max() < 1e-10, f'row {b}'
    return actual


TWINS = [                               # class, its twin in transformers, settings, shape of the inputs
    (MaskedLM, 'BertForMaskedLM', {}, None),
    (SequenceClassifier, 'BertForSequenceClassification', {}, None),
]
SIZES = {source.BERT_SIZES[name]: size for name, size in SMALL.items()}     # of a twin


@pytest.fixture(scope='module')
def transformers():
    return pytest.importorskip('transformers')


def real_batch():
    """The rows of batch() that have a real token: our attention to none is 0, that of transformers is not."""
    return *batch(3), KEEP[:3]


# ======== above: BERT; below: what differs, a block for each ========

# ---- fewer weights ----

def symmetric(w, y, x, layer):
    """Courtois et al. 2024, eq. 3: Q(x) Q(y)^T."""
    return attend(layer, linear(w, 'query', y), linear(w, 'query', x), linear(w, 'value', x))


ATTENTIONS['symmetric'] = AttentionFacts(
    symmetric, 2 * LINEAR, counts=[27_744_570, 102_427_194, 309_984_058], modern=True)


def pairwise(w, y, x, layer):
    """Courtois et al. 2024, eq. 6: Q(x) S Q(y)^T = sum_ab Q(x)_a S_ab Q(y)_b; S_ab = sum_c A_ac B_bc."""
    pair = w['pair']
    if 'pair_key' in w:
        pair = np.einsum('hac,hbc->hab', pair, w['pair_key'])
    q = linear(w, 'query', y).reshape(len(pair), -1)
    q = np.einsum('ha,hab->hb', q, pair).flatten()
    return attend(layer, q, linear(w, 'query', x), linear(w, 'value', x))


ATTENTIONS['pairwise'] = AttentionFacts(
    pairwise, 2 * LINEAR + H * K * K, starts={'pair': None, 'pair_key': None}, decaying=('pair', 'pair_key'),
    options={'pair_rank': 2, 'pair_init': 'normal'}, also=({'pair_rank': 2},),
    counts=[27_875_642, 103_017_018, 311_556_922])
PAIR_INITS = {                          # deviation of S, K = 32
    'identity': 0.02,
    'fan_in': 32 ** -0.5,
    'normal': 0.02,
    'unit': 1.0,
}


@pytest.mark.parametrize('rank', [0, 5])
@pytest.mark.parametrize('pair_init', source.PAIR_INIT)
def test_initial_pairwise_factors(pair_init, rank):
    torch.manual_seed(6)
    config = small(attention='pairwise', pair_init=pair_init, pair_rank=rank, n_head=32, n_embd=32 * 32)
    attention = ATTENTION['pairwise'](config, 0)
    noise = attention.pair @ attention.pair_key.mT if rank else attention.pair
    if pair_init == 'identity':
        ones = torch.eye(32, rank or 32)
        noise = noise - ones @ ones.mT
    assert (noise.mean(0).abs() < 6 * noise.std(0) / 32 ** 0.5).all()               # over 32 heads
    if not (rank and pair_init == 'identity'):          # there they have different deviations
        tolerance = 0.25 if rank else 0.06              # entries of a product are correlated
        assert abs(noise.std().item() / PAIR_INITS[pair_init] - 1) < tolerance


def phase(w, y, x, layer):
    """Ours: each pair of entries of a query is a complex number, times e^(i a); keys are not turned."""
    turned = linear(w, 'query', y).view(complex) * np.exp(1j * w['angle'])
    return attend(layer, turned.view(float), linear(w, 'query', x), linear(w, 'value', x))


ATTENTIONS['phase'] = AttentionFacts(
    phase, 2 * LINEAR + D // 2, starts={'angle': ZEROS},
    refused=({'n_head': 6, 'n_embd': 18}, "'phase'.* 3 entries"))


def identity_query(w, y, x, layer):
    """Karbevski and Mijoski 2025: Wq is the identity."""
    return attend(layer, y, linear(w, 'key', x), linear(w, 'value', x))


ATTENTIONS['identity_query'] = AttentionFacts(identity_query, 2 * LINEAR)
ATTENTIONS['narrow'] = AttentionFacts(          # attend() finds the width of its queries
    original, 2 * LINEAR, options={'narrow_by': 4}, also=({'narrow_by': 4, 'n_embd': 24},),
    refused=({'n_head': 6, 'n_embd': 36}, "'narrow'.* 3 entries"))
REFUSED += [(system('narrow', 'none', narrow_by=n), f'narrow_by={n}: must divide .*4') for n in (0, 3)]


@pytest.mark.parametrize('narrow_by, parameters', [(1, 109_514_298), (2, 102_427_194), (4, 98_883_642)])
def test_parameter_counts_of_narrow_queries(narrow_by, parameters):
    """12 layers of base have 2 (D^2 + D) / narrow_by for queries and keys; 1 is `original`."""
    with torch.device('meta'):
        model = MaskedLM(EncoderConfig(attention='narrow', narrow_by=narrow_by))
    assert source.count_parameters(model) == parameters


def shared_kv(w, y, x, layer):
    """Kayyam et al. 2026: the keys are the values too."""
    return attend(layer, linear(w, 'query', y), linear(w, 'key', x), linear(w, 'key', x))


ATTENTIONS['shared_kv'] = AttentionFacts(shared_kv, 2 * LINEAR)


def shared(w, y, x, layer):
    """Kowsher et al. 2024, section 2.3: S = x Ws, scaled by the diagonals D_q, D_k, D_v."""
    q = linear(w, 'shared', y) * w['query_diag']
    S = linear(w, 'shared', x)
    return attend(layer, q, S * w['key_diag'], S * w['value_diag'])


ATTENTIONS['shared'] = AttentionFacts(
    shared, LINEAR + 3 * D, starts={'diag': ONES}, counts=[26_700_090, 95_367_738, 284_867_386])

# ---- positions ----

def rotated(x, t):
    """Su et al. 2021, eq. 34: the pair (2m, 2m + 1) at position t turns by t 10000^(-2m / K)."""
    K = x.shape[-1]
    angle = np.multiply.outer(t, 10000.0 ** (-np.arange(0, K, 2) / K))
    turn = np.exp(1j * angle).astype(np.complex64)      # the model's tables are float32
    return (x.view(complex) * turn).view(float)         # a pair is a complex number


POSITIONS['rope'] = PositionFacts(turn=rotated)


def bucket(d):
    """Raffel et al. 2019: 8 + floor(8 log(n / 8) / log(128 / 8)) from n = |d| = 8 on, in whole numbers."""
    n = abs(d)
    half = n
    if n >= 8:
        half = max(b for b in range(8, 16) if n * n >= 64 * 2 ** (b - 8))
    return half + 16 * (d > 0)


def bucket_bias(layer):
    buckets = [bucket(j - layer.at) for j in layer.seen]
    return layer.position['bucket_bias.weight'][buckets].T


POSITIONS['rab'] = PositionFacts(bias=bucket_bias, embedded=True, starts={'bucket_bias.weight': NORMAL})
QUICK.append(system('original', 'rab'))


def test_buckets_are_those_of_t5():
    t5 = pytest.importorskip('transformers.models.t5.modeling_t5')
    encoder = Encoder(small(position='rab', block_size=701))
    distances = torch.arange(-700, 701)
    expected = t5.T5Attention._relative_position_bucket(distances, True, 32, 128)
    assert torch.equal(encoder.position.bucket, expected)


def relative(w, y, x, layer):
    """Shaw et al. 2018, eq. 3 and 4, clipped at c - 1, with R Wk and R Wv of Tian et al. 2021, section 2."""
    k = linear(w, 'key', x)
    v = linear(w, 'value', x)
    if layer.at is not None:
        longest = layer.config.clip_distance - 1
        distances = np.clip(layer.seen - layer.at, -longest, longest)
        R = w['distance_vectors'][distances + longest]
        k += R @ w['key.weight'].T
        v += R @ w['value.weight'].T
    return attend(layer, linear(w, 'query', y), k, v)


ATTENTIONS['rpe'] = AttentionFacts(
    relative, 3 * LINEAR + (2 * 3 - 1) * D, starts={'distance_vectors': NORMAL},
    decaying=('distance_vectors',), options={'clip_distance': 5},
    needs={'clip_distance': 3})                         # less than the 6 tokens of batch()


def test_distances_are_added_in_float32():
    """To q k = 256 in bfloat16, where 257 would be 256 again: softmax(256, 257, 256)."""
    vectors = torch.tensor([0.0, 1 / 16, 0.0]).view(1, 1, 3, 1).bfloat16()      # of the distances -1, 0 and 1
    q = torch.full_like(vectors, 16.0)
    context = source.Context(query_positions=torch.arange(3)[None, None])
    y = source.attend_distances(q, q, 0 * q, vectors, vectors, context, 0.0)
    assert abs(y[0, 0, 1, 0] * 16 - math.e / (math.e + 2)) < 0.01


def test_extension_repeats_the_vectors_of_the_longest_distances():
    """Tian et al. 2021, section 2: "copying the learnt embeddings" of the longest distances in training."""
    model = build(**system('rpe', 'none', clip_distance=20))        # rows of 12 tokens: distances -11 to 11
    for block, longer in zip(model.encoder.blocks, extended(model, 40).encoder.blocks, strict=True):
        rows = torch.arange(39).clamp(19 - 11, 19 + 11)             # that of distance 0 is row 19
        assert torch.equal(longer.attention.distance_vectors, block.attention.distance_vectors[rows])


# ---- Shatter ----

def partition(layer):
    """N (H, n) of Tian et al. 2021, section A.1, for the tokens that a query sees; 1 if it has no position.

    At d = 0 each half gets B_v(0) / 2.
    """
    config = layer.config
    if layer.at is None:
        return np.ones((config.n_head, len(layer.seen)))
    d = layer.seen - layer.at
    degree = config.n_head // 2 - 1
    number = config.n_layer - 1 if config.same_partition else layer.number
    depth = (number + 1) / config.n_layer
    alpha = -depth * degree
    beta = -1 / degree * (degree / 12) ** depth
    u = np.log(np.exp(beta * abs(d)) * (1 - np.exp(alpha)) + np.exp(alpha)) / alpha
    parts = [math.comb(degree, v) * u ** v * (1 - u) ** (degree - v) for v in range(degree + 1)]
    N = np.concatenate((parts * np.heaviside(d, 0.5), parts * np.heaviside(-d, 0.5)))
    return N.astype(np.float32)                         # as the model's table


def sigmoid_l2(scores):
    """Tian et al. 2021, eq. 6."""
    weights = 1 / (1 + np.exp(-scores))
    return weights / np.sqrt((weights ** 2).sum())


def in_parts(v, N):
    """N[h, j] v_j for the part of v (n, D) of each head h."""
    K = v.shape[1] // len(N)
    return v * N.repeat(K, 0).T


def part_mask(w, y, x, layer):
    """Tian et al. 2021, eq. 5."""
    v = in_parts(linear(w, 'value', x), partition(layer))
    return attend(layer, linear(w, 'query', y), linear(w, 'key', x), v)


def one_head(weigh, w, y, x, layer, valued=False):
    """Tian et al. 2021, sections 3.2 and 3.3: all heads have the same scores; the keys are the input."""
    q = linear(w, 'query', y)
    v = linear(w, 'value', x)
    N = partition(layer)
    R = w.get('part_embedding', np.zeros((len(N), 1))) * (layer.at is not None)
    if not layer.config.one_value_matrix:               # else sum_h N_h = 1 remains
        v = in_parts(v, N)
    if valued:
        v = v + N.T @ R @ w['value.weight'].T
    bias = (R * q).sum(1) @ N
    return attend(layer, np.tile(q, len(N)), np.tile(x, len(N)), v, bias, weigh)


NEEDS = {'n_head': 6}
SAME = {'same_partition': True}
PARTS = {'starts': {'part_embedding': NORMAL}, 'decaying': ('part_embedding',)}
ATTENTIONS['part_mask'] = AttentionFacts(
    part_mask, 3 * LINEAR, needs=NEEDS, options=SAME, also=(SAME,),
    refused=({**NEEDS, 'one_value_matrix': True}, 'one_value_matrix=True.*shatter'))
ATTENTIONS['one_head_softmax'] = AttentionFacts(partial(one_head, softmaxed), 2 * LINEAR, needs=NEEDS)
ATTENTIONS['one_head_sigmoid'] = AttentionFacts(partial(one_head, sigmoid_l2), 2 * LINEAR, needs=NEEDS)
ATTENTIONS['part_bias'] = AttentionFacts(
    partial(one_head, sigmoid_l2), 2 * LINEAR + H * D, needs=NEEDS, **PARTS)
ATTENTIONS['shatter'] = AttentionFacts(
    partial(one_head, sigmoid_l2, valued=True), 2 * LINEAR + H * D, needs=NEEDS, **PARTS,
    options={'one_value_matrix': True}, also=({'one_value_matrix': True},),
    refused=({'n_head': 3}, "'shatter' needs an even n_head"))
PRECISIONS = (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)
EXTREMES += [(source.masked_sigmoid, sigmoid_l2, 1.0, shift, *precision)
             for shift in (0, -16, -40, -100) for precision in PRECISIONS]

# ---- GAU ----

def gau(w, y, x, layer):
    """Hua et al. 2022; Liu 2022, section 4.1.  The scale's n counts the real tokens of the row."""
    config = layer.config
    turn = position_of(layer).turn
    q = silu(linear(w, 'shared', y)) * w['query_diag'] + w.get('query_bias', 0.0)
    k = silu(linear(w, 'shared', x)) * w['key_diag'] + w.get('key_bias', 0.0)
    scores = turn(k, layer.seen) @ turn(q, layer.at)
    weights = NORMALISERS[config.normaliser](scores, len(q), config.relu_scale)
    mixed = dropped(weights, config.attention_dropout) @ silu(linear(w, 'value', x))
    return silu(linear(w, 'gate', y)) * mixed


def softmax(products, s, scale):
    return softmaxed(products / math.sqrt(s))


def softmax_plus(products, s, scale):
    n = len(products) or 1
    return softmaxed(math.log(n, 512) * products / math.sqrt(s))


def squared_relu(products, s, scale):
    of_n, of_s = SCALES[scale]
    squares = np.maximum(products, 0) ** 2
    return squares / (len(products) ** of_n * s ** of_s)


def scaled_squared_relu(products, s, scale):
    """Section 3.3: relu^2(q k / sqrt(s)) / (c n s), c their sum."""
    squares = np.maximum(products / math.sqrt(s), 0) ** 2
    c = squares.sum() or 1
    return squares / c / (len(products) * s)


NORMALISERS = {
    'softmax': softmax,
    'softmax_plus': softmax_plus,
    'squared_relu': squared_relu,
    'scaled_squared_relu': scaled_squared_relu,
}
SCALES = {                              # exponents of n and s
    'n2': (2, 0),
    'n': (1, 0),
    'ns': (1, 1),
    's2': (0, 2),
    'n2s': (2, 1),
    'ns2': (1, 2),
}


def gated_block(w, y, x, layer):
    """x = norm(x + f(x)); there is no MLP."""
    return NORMS[layer.config.norm](w, 'norm', y + attention_oracle(w, y, x, layer))


def weigh(name, scores, mask, s=128, relu_scale='ns'):
    """Weights of rows of scores (..., T) whose mask (T,) is the same."""
    n = mask.sum().to(torch.promote_types(scores.dtype, torch.float32))
    return source.NORMALISER[name](scores, mask, n, s, source.RELU_SCALE[relu_scale])


ATTENTIONS['gau'] = AttentionFacts(             # Wu and Wv, which are 2 D wide, Wz, d and b
    gau, 4 * D * D + D * 6 + 4 * 6, starts={'diag': ONES}, needs={'key_size': 6}, block=gated_block,
    std=1.0,                                    # with smaller matrices all relus would be 0
    options={'normaliser': 'softmax', 'relu_scale': 'n', 'key_size': 64},
    also=(*({'position': 'rope', 'normaliser': name} for name in source.NORMALISER),
          *({'position': 'rope', 'normaliser': 'squared_relu', 'relu_scale': scale}
            for scale in source.RELU_SCALE)),
    refused=({'position': 'rope', 'normaliser': 'scaled_squared_relu', 'relu_scale': 'n'},
             "relu_scale='n'.*squared_relu"))
GATED = [system('gau', **settings) for settings in ATTENTIONS['gau'].also]
QUICK.append(system('gau', 'rope'))
EXTREMES += [(partial(weigh, name), lambda scores, oracle=NORMALISERS[name]: oracle(scores, 128, 'ns'), *rest)
             for name, *rest in (
    *(('scaled_squared_relu', size, 0, torch.float16, 1e-5) for size in (1.0, 1e-5, 1e-7)),
    *(('scaled_squared_relu', size, 0, torch.bfloat16, 1e-5) for size in (1e-25, 1e25)),
    ('squared_relu', 300.0, 0, torch.float16, 2e-3))]


@each(GATED)
def test_gau_of_one_real_token(settings):
    """Normalisers that count the real tokens: 1, 1, 2 and none."""
    agrees(build(**settings), digits('100000 000100 100001 000000').bool())


def test_scales_are_those_of_lius_code():
    """His n, n^2 and s n of table 1: github.com/HJHGJGHHG/GAU-PyTorch, utils/layers.py."""
    scores = 20 * torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    mask = torch.arange(7) < 4
    n, s = 4, 16
    a = (scores / s ** 0.5).masked_fill(~mask, -math.inf)           # q k^T / sqrt(s)
    squares = a.relu() ** 2
    for scale, expected in ('ns', squares / n), ('n2s', (a / n).relu() ** 2), ('ns2', squares / (s * n)):
        assert difference(weigh('squared_relu', scores, mask, s, scale), expected) < 1e-12, scale


def test_gau_counts_keys_beyond_float16():
    """A scale of n s = 512 * 128 is infinite in float16: all weights would be 0."""
    settings = system('gau', 'none', normaliser='squared_relu', key_size=128, block_size=512)
    attention = build(Encoder, **settings).float().blocks[0].attention
    x = torch.randn(1, 512, 12, generator=torch.Generator().manual_seed(4))
    expected = attention(x, x, source.Context())
    half = x.half()
    y = attention.half()(half, half, source.Context())
    assert (y.float() - expected).norm() < 0.01 * expected.norm()


def decoder_head(w, x, table, config):
    assert not w
    return x @ table.T


LM_HEADS['decoder'] = decoder_head

# ---- XLNet ----

def sinusoid(d, size):
    """Vaswani et al. 2017 as in Dai et al. 2019: the sines of all frequencies, then the cosines; (n, size)"""
    angle = np.multiply.outer(d, 10000.0 ** (-np.arange(0, size, 2) / size))
    table = np.concatenate((np.sin(angle), np.cos(angle)), 1)
    return table.astype(np.float32)


def xlnet(w, y, x, layer):
    """Yang et al. 2019 after Dai et al. 2019, section 3.3: ((q + u) k_j + (q + v) r_(i-j)) / sqrt(K)."""
    q = linear(w, 'query', y)
    bias = 0.0
    if layer.at is not None:
        r = linear(w, 'distance', sinusoid(layer.at - layer.seen, len(y)))
        heads = heads_of(layer, q + w['distance_bias'], r)
        bias = np.array([r_h @ q_h / math.sqrt(len(q_h)) for q_h, r_h in heads])
    return attend(layer, q + w['content_bias'], linear(w, 'key', x), linear(w, 'value', x), bias)


def permutation_oracle(w, ids, segments, real, config, positions, order):
    """Yang et al. 2019, section 2.3: content sees order_j <= order_i, queries see order_j < order_i."""
    at = range(len(ids))
    content_sees = [real[order[real] <= order[i]] for i in at]
    query_sees = [real[order[real] < order[i]] for i in positions]
    content = embedding_oracle(w, ids, segments, config)
    query = np.tile(dropped(w['query_embedding'], config.dropout), (len(positions), 1))
    for number in range(config.n_layer):
        # both read the content of the layer below
        query = layer_oracle(w, number, query, content, query_sees, positions, config)
        content = layer_oracle(w, number, content, content, content_sees, at, config)
    return logits_of(w, final_oracle(w, query, config), config)


ORDER = digits('345012 102345 513011 543210')           # places in a random order, in four rows
ATTENTIONS['xlnet'] = AttentionFacts(                   # no biases, but u and v
    xlnet, 4 * D * D + 2 * D, starts={'content_bias': NORMAL, 'distance_bias': NORMAL},
    kind=source.PermutationLM, modern=True)
XLNET = system('xlnet', 'none')
MODELS[source.PermutationLM] = ModelFacts(
    permutation_oracle, XLNET, {'positions': PREDICTED, 'order': ORDER}, has_targets=True)


def test_without_an_order_the_predicted_tokens_come_after_all_others():
    model = build(source.PermutationLM, **XLNET)
    ids, _ = batch()
    last = torch.zeros_like(ids).scatter(1, PREDICTED, 1)
    assert torch.equal(model(ids, PREDICTED), model(ids, PREDICTED, order=last))


def test_two_streams_need_the_attention_of_xlnet():
    with pytest.raises(UserError, match="only attention='xlnet'"):
        source.PermutationLM(small())


@torch.no_grad()
def test_two_streams_give_the_logits_of_hugging_face(transformers):
    """In orders that begin with a real token: in theirs, a query that sees none averages the padding."""
    config = transformers.XLNetConfig(
        vocab_size=23, d_model=12, n_layer=2, n_head=3, d_inner=16, ff_activation='gelu',
        untie_r=True, attn_type='bi', dropout=0.0, layer_norm_eps=1e-12)
    library = randomised(transformers.XLNetModel(config))
    ours = build(source.PermutationLM, **XLNET).float()
    ours.query_embedding.copy_(library.mask_emb.flatten())
    for block, layer in zip(ours.encoder.blocks, library.layer, strict=True):
        theirs = layer.rel_attn
        block.attention.load_state_dict({
            'query.weight': theirs.q.flatten(1).T,
            'key.weight': theirs.k.flatten(1).T,
            'value.weight': theirs.v.flatten(1).T,
            'distance.weight': theirs.r.flatten(1).T,
            'out.weight': theirs.o.flatten(1),
            'content_bias': theirs.r_w_bias.flatten(),
            'distance_bias': theirs.r_r_bias.flatten(),
        })
        block.expand.load_state_dict(layer.ff.layer_1.state_dict())
        block.contract = layer.ff.layer_2
        block.attention_norm = theirs.layer_norm
        block.mlp_norm = layer.ff.layer_norm
    ids, segments, keep = real_batch()
    order = ORDER[[0, 1, 1]]
    states = library(
        inputs_embeds=ours.encoder.embed(ids, segments), attention_mask=keep.float(),
        perm_mask=(order[:, None] >= order[:, :, None]).float(),
        target_mapping=F.one_hot(PREDICTED[:3], 6).float())[0]
    expected = ours.head(states, ours.encoder.token.weight)
    actual = outputs(ours, ids, segments, keep, positions=PREDICTED[:3], order=order)
    assert difference(actual, expected) < 1e-5 * expected.abs().max()


# ---- modern blocks ----

def pre_norm(w, y, x, layer):
    """Xiong et al. 2020: x = x + f(norm(x))."""
    norm = NORMS[layer.config.norm]
    y = y + attention_oracle(w, norm(w, 'attention_norm', y), norm(w, 'attention_norm', x), layer)
    return y + mlp_oracle(w, norm(w, 'mlp_norm', y), layer.config)


NORM_PLACES['pre'] = pre_norm


def swiglu_expansion(w, x):
    """Shazeer 2020: silu(x Wa) * (x Wb).  2/3 of SMALL's 16 is 10.7, and the next multiple of 8 is 16."""
    both = linear(w, 'expand', x)
    return silu(both[:16]) * both[16:]


MLPS['swiglu'] = swiglu_expansion
MODERN = {'norm_place': 'pre', 'mlp': 'swiglu'}
OTHERS += [system(name, 'rope' if 'rope' in positions_of(name) else positions_of(name)[0], **MODERN)
           for name, facts in ATTENTIONS.items() if facts.modern]

# ---- fine-tuning ----

def gelu_pooling(w, states, final, real, config):
    """transformers' RoFormerClassificationHead, of which classifier_oracle() is the end."""
    return gelu(linear(w, 'pooler.transform', dropped(final[0], config.dropout)))


def first(w, states, final, real, config):
    return final[0]


def layerwise(w, states, final, real, config):
    """Tian et al. 2021, section 3.4: y_0 passes the layers, each of which sees the recorded X^k."""
    y = w['pooler.query_embedding'][None]
    for number in range(config.n_layer):
        y = layer_oracle(w, number, y, states[number], [real], [None], config)
    return final_oracle(w, y, config)[0]


POOLINGS.update(gelu=gelu_pooling, first=first, layerwise=layerwise)
TWINS.append((SequenceClassifier, 'RoFormerForSequenceClassification',
              {'position': 'rope', 'pooling': 'gelu'}, None))


def span_oracle(w, ids, segments, real, config):
    _, final = states_oracle(w, ids, segments, real, config)
    return linear(w, 'classifier', final)


MODELS[source.SpanClassifier] = ModelFacts(span_oracle)
TWINS.append((source.SpanClassifier, 'BertForQuestionAnswering', {}, None))


def choices(x):
    """(B, C, T): three choices for each of two"""
    return torch.stack([x, x.roll(1, 0)])


TWINS.append((source.MultipleChoice, 'BertForMultipleChoice', {}, choices))


# ======== above: what the tests know of a variant; below: the tests of all variants ========

missing = ATTENTION.keys() - ATTENTIONS.keys()
assert not missing, f'{missing}: each needs an oracle and a row of ATTENTIONS, see AttentionFacts'
SYSTEMS = []
for name in ATTENTION:
    for settings in ({}, *ATTENTIONS[name].also):
        positions = [settings['position']] if 'position' in settings else positions_of(name)
        SYSTEMS += [{**system(name, position), **settings} for position in positions]
ALONE = [system(name, position, attend_self=False) for name in ATTENTION for position in POSITION
         if ATTENTION[name].positions is None and (position == 'rope' or name == 'symmetric')]
SYSTEMS += ALONE
# every attention with rope, if it works with it, and `original` with every position
CORE = [
    settings for settings in SYSTEMS
    if settings['position'] == 'rope' or settings['attention'] == 'original'
    or 'rope' not in positions_of(settings['attention'])
]

# models whose equations, gradients, dropout and initial values are tested
CASES = [(kind, {**settings, 'pooling': 'layerwise'})
         for kind in (MaskedLM, SequenceClassifier) for settings in [*SYSTEMS, *OTHERS]]
for place in NORM_PLACE:
    CASES += [(SequenceClassifier, {'pooling': pooling, 'norm_place': place}) for pooling in POOLING]
    CASES += [(kind, {**facts.settings, 'norm_place': place}) for kind, facts in MODELS.items()]
BARE_CASES = [
    (MaskedLM, {**settings, 'bias': False, 'n_layer': 1, 'norm': norm, 'lm_head': lm_head})
    for settings in [*CORE, *OTHERS] for norm in NORM for lm_head in LM_HEAD
]
each_core = each([*CORE, *OTHERS])
each_case = pytest.mark.parametrize('kind, settings', CASES, ids=str)


def starts_of(config):
    """Own parameters of the attention and of the positions of a model -> how they start."""
    return {**ATTENTIONS[config.attention].starts, **POSITIONS[config.position].starts}


# ---- equations ----


@pytest.mark.parametrize('kind, settings', [*CASES, *BARE_CASES], ids=str)
def test_equals_the_loops_of_the_paper(kind, settings):
    """Without biases, only those with a start of their own are left."""
    model = build(kind, **settings)
    logits = agrees(model)
    biases = [name for name, _ in model.named_parameters() if 'bias' in name]
    own = tuple(starts_of(model.config))
    assert model.config.bias or all(name.endswith(own) for name in biases)
    if kind is MaskedLM:
        some = outputs(model, *batch(), KEEP, positions=PREDICTED)
        assert difference(some, logits[torch.arange(4)[:, None], PREDICTED]) < 1e-10


@each(ALONE)
def test_a_token_that_sees_no_other_gets_0(settings):
    """As with padding: rows of one real token, of two, and of none."""
    agrees(build(**settings), digits('100000 000100 100001 000000').bool())


@each_case
def test_dropout_is_where_the_papers_have_it(kind, settings, monkeypatch):
    """PyTorch's fused attention, which applies dropout to the attention weights, is replaced too."""
    def dropout(x, p, training=True, inplace=False):
        return dropped(x, p) if training else x

    def attention(q, k, v, mask, p):
        scores = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:                          # a bias
            scores = scores + mask
        return dropped(scores.softmax(-1), p) @ v

    monkeypatch.setattr(F, 'dropout', dropout)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention)
    agrees(build(kind, **settings, dropout=0.2).train())


@pytest.mark.parametrize('attention', ATTENTION)
def test_linears_can_be_replaced(attention):
    """By layers with the same product, as LoRA, FP8 and quantization do: what is no product stays."""
    called = []

    class Wrapped(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            called.append(self)
            return self.linear(x)

    model = build(**system(attention, positions_of(attention)[0]))
    ids, _ = batch()
    plain = model(ids, PREDICTED)
    wrapped = []
    for name, linear in list(model.encoder.blocks.named_modules()):
        if isinstance(linear, nn.Linear):
            wrapped.append(Wrapped(linear))
            model.encoder.blocks.set_submodule(name, wrapped[-1])
    assert difference(model(ids, PREDICTED), plain) < 1e-10
    assert set(called) == set(wrapped)


@pytest.mark.filterwarnings('ignore:Full backward hook')        # where no input has a gradient
@pytest.mark.parametrize('change', ['forward_pre', 'forward', 'full_backward_pre', 'full_backward', 'itself'])
def test_a_linear_with_a_hook_is_called(change):
    """Or with another forward() of its own."""
    called = set()
    model = build()
    ids, _ = batch()
    linears = {x for x in model.encoder.blocks.modules() if isinstance(x, nn.Linear)}
    for linear in linears:
        if change == 'itself':
            linear.forward = lambda x, linear=linear: called.add(linear) or nn.Linear.forward(linear, x)
        else:
            getattr(linear, f'register_{change}_hook')(lambda module, *rest: called.add(module))
    model(ids, PREDICTED).sum().backward()
    assert called == linears


def test_logits_on_a_gpu_are_of_a_multiple_of_64_words(monkeypatch):
    """Only the product is wider."""
    class OnCuda(torch.Tensor):
        is_cuda = True

    sizes = []
    linear = F.linear
    monkeypatch.setattr(F, 'linear', lambda x, w, bias: sizes.append(len(w)) or linear(x, w, bias))
    x, table, bias = torch.randn(3, 12), torch.randn(23, 12), torch.randn(23)
    logits = source.token_logits(x.as_subclass(OnCuda), table, bias)
    assert difference(logits, source.token_logits(x, table, bias)) < 1e-5
    assert sizes == [64, 23]


# ---- parameters; tests/test_report.py counts the models of the papers, test_readme.py all variants ----

COUNTS = {name: facts.counts for name, facts in ATTENTIONS.items() if facts.counts}


@pytest.mark.parametrize('attention', COUNTS)
def test_parameter_counts_of_the_papers(attention):
    """Those of Courtois et al. 2024 (table 2) and Kowsher et al. 2024 (table 4), to the last one."""
    shapes = (4, 8, 512, 2048), (), (24, 16, 1024, 4096)            # the defaults are those of base
    with torch.device('meta'):
        models = [MaskedLM(EncoderConfig(30522, 512, *shape, attention=attention)) for shape in shapes]
    assert [source.count_parameters(model) for model in models] == COUNTS[attention]


@pytest.mark.parametrize('attention', ATTENTION)
def test_parameter_formula_of_attention(attention):
    """Without the output projection."""
    config = small(**system(attention, 'none', n_embd=D, n_head=H))
    layer = Encoder(config).blocks[0].attention
    parameters = ATTENTIONS[attention].parameters
    assert source.count_parameters(layer) - source.count_parameters(layer.out) == parameters


# ---- padding, gradients and losses ----

@each([*SYSTEMS, *OTHERS])
def test_padding_changes_nothing(settings):
    """A padded token has weight exactly 0. The mask may be of integers too, and None without padding."""
    ids, segments = batch()
    for kind in (MaskedLM, SequenceClassifier):
        model = build(kind, **settings, pooling='layerwise')
        logits = outputs(model, ids, segments, KEEP)
        others = torch.where(KEEP, ids, 1), torch.where(KEEP, segments, 1 - segments)
        real = KEEP if kind is MaskedLM else [0, 1, 2, 3]       # logits at padding may differ
        assert torch.equal(outputs(model, *others, KEEP.long())[real], logits[real])
        assert difference(outputs(model, ids[:1], segments[:1], None), logits[:1]) < 1e-12


@each_case
def test_every_parameter_gets_its_gradient(kind, settings):
    """The slope along a random direction of all parameters, by central differences."""
    model = build(kind, **settings)
    more = {'positions': PREDICTED} if MODELS[kind].has_targets else {}
    parameters = dict(model.named_parameters())
    direction = {name: torch.randn_like(x) for name, x in parameters.items()}

    def logits(step):
        moved = {name: x + step * direction[name] for name, x in parameters.items()}

        def call(*arguments, **keywords):
            return torch.func.functional_call(model, moved, arguments, keywords)
        return outputs(call, *batch(), KEEP, **more)

    start = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(logits, start, atol=1e-8, rtol=1e-8, fast_mode=True)
    total = logits(start).square().sum()
    gradients = torch.autograd.grad(total, [*parameters.values()], materialize_grads=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        # a bias of all keys shifts the scores of a softmax alike; a layerwise query has no position
        may_be_0 = name.endswith(('key.bias', 'key_bias')) or kind is SequenceClassifier
        assert may_be_0 or difference(gradient, 0) > 1e-9, name


@pytest.mark.parametrize('kind', [kind for kind, facts in MODELS.items() if facts.has_targets])
def test_losses_are_cross_entropies_in_float32(kind):
    """The last block computes the predicted tokens alone."""
    model = build(kind, **MODELS[kind].settings)
    lengths = []
    last = model.encoder.blocks[-1]
    last.register_forward_hook(lambda module, inputs, x: lengths.append(x.size(1)))
    ids, segments = batch()
    targets = ids[:, :2]
    logits = outputs(model, ids, segments, KEEP, positions=PREDICTED)
    losses = outputs(model, ids, segments, KEEP, positions=PREDICTED, targets=targets)
    assert lengths == [2, 2]
    assert losses.dtype == torch.float32
    expected = -logits.log_softmax(-1).gather(-1, targets[:, :, None])[:, :, 0]
    assert difference(losses.double(), expected) < 1e-5


# ---- initial values ----

def decays(model, name):
    """Should a parameter have weight decay?  For tests/test_train.py."""
    own = ATTENTIONS[model.config.attention].decaying
    return name.endswith(('weight', *own)) and not name.endswith('norm.weight')


@each_case
def test_initial_values(kind, settings):
    """To five standard errors."""
    torch.manual_seed(5)
    sizes = {'vocab_size': 500, 'block_size': 40, 'n_layer': 1, 'n_embd': 96, 'n_inner': 96}
    model = kind(small(**{**settings, **sizes}, n_label=50))
    starts = {**starts_of(model.config), **STARTS}
    for name, value in model.named_parameters():
        ends = [end for end in starts if name.endswith(end)]
        assert ends, f'{name}: say in `starts` of its row how it begins'
        start = starts[ends[0]]
        if start is None:
            continue
        mean, deviation = start
        n = value.numel()
        if deviation == 0.0:
            assert (value == mean).all(), name
        else:
            assert abs(value.mean().item() - mean) < 5 * deviation / n ** 0.5, name
            assert abs(value.std().item() / deviation - 1) < 5 / (2 * n) ** 0.5, name


# ---- precision ----

@each_core
def test_bfloat16_autocast(settings, monkeypatch):
    """Within 3 % of float32 in norm: bfloat16 keeps 8 bits, so each rounding changes up to 0.4 %.

    No product with a float32 parameter makes the queries, keys or values of a fused kernel float32, and no
    norm the states of a post-LN model.
    """
    dtypes = set()
    fused = F.scaled_dot_product_attention

    def recorded(q, k, v, *others):
        dtypes.update((q.dtype, k.dtype, v.dtype))
        return fused(q, k, v, *others)

    model = randomised(MaskedLM(small(**settings)), 0.3)
    inputs = (*batch(), KEEP)
    expected = outputs(model, *inputs)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', recorded)
    for name in ('layer_norm', 'rms_norm'):             # float32 under autocast, as on a GPU
        norm = getattr(F, name)
        monkeypatch.setattr(F, name, lambda *arguments, norm=norm: norm(*arguments).float())
    block = model.encoder.blocks[0]
    if hasattr(block, 'expand') and model.config.norm_place == 'post':
        block.expand.register_forward_pre_hook(lambda _, x: dtypes.add(x[0].dtype))
    with torch.autocast('cpu', torch.bfloat16):
        logits = outputs(model, *inputs)
        states = source.block_inputs(model.encoder, *inputs)
    assert logits.dtype == torch.bfloat16
    assert dtypes <= {torch.bfloat16}
    sums = torch.float32 if model.config.norm_place == 'pre' else torch.bfloat16
    assert {x.dtype for x in states[1:]} == {sums}
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize('autocast', [False, True])
@each_core
def test_edges_are_finite(settings, autocast):
    """Each token alone, none, all, beyond clip_distance; with scores far into saturation."""
    model = SequenceClassifier(small(**settings, pooling='layerwise', n_layer=1))
    parameters = list(randomised(model, 5.0).parameters())
    for length in (1, 12):
        keep = torch.cat((torch.eye(length), torch.zeros(1, length), torch.ones(1, length)))
        inputs = (*batch(*keep.shape), keep)
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
            results = [model.encoder(*inputs), model(*inputs)]
        total = sum(x.float().square().sum() for x in results)
        gradients = torch.autograd.grad(total, parameters, materialize_grads=True)
        assert all(x.isfinite().all() for x in (*results, *gradients)), length


@pytest.mark.parametrize('weigh, oracle, size, shift, dtype, error', EXTREMES)
def test_weights_of_very_large_and_very_small_scores(weigh, oracle, size, shift, dtype, error):
    """And their gradients.

    The norm of a row brings sigmoids back to order 1, however small they are. Rows of scaled_squared_relu sum
    to 1 / (n s), however large scores are: 1e-5 and 1e-7 are subnormal numbers in float16, and the squares of
    1e-25 and 1e25 would be 0 and infinite in float32; there the largest of a row, by which scores are divided
    first, is needed. The squares of 300 are beyond float16 before they are divided.
    """
    generator = torch.Generator().manual_seed(13)
    scores = (size * torch.randn(100, generator=generator) + shift).to(dtype)
    mask = torch.arange(100) < 70
    weights = weigh(scores, mask)
    expected = torch.tensor(oracle(scores[mask].double().numpy()))
    assert difference(weights[mask], expected) < error * expected.max()
    assert (weights[~mask] == 0).all()
    gradient = torch.func.grad(lambda scores: weigh(scores, mask).max())
    exact = gradient(scores.double())
    assert difference(gradient(scores), exact) < 0.02 * exact.abs().max()


# ---- compilation, longer and shorter rows ----

@pytest.mark.parametrize('settings, backend', [
    *((settings, 'eager') for settings in QUICK),
    *(pytest.param(settings, 'aot_eager', marks=pytest.mark.slow) for settings in [*CORE, *OTHERS])], ids=str)
def test_texts_of_any_length_compile_twice(settings, backend):
    """With the first length, then with any, block_size too; no graph breaks, and eager mode's gradients."""
    torch.compiler.reset()
    counters.clear()
    model = build(ATTENTIONS[settings['attention']].kind, **{**settings, 'n_layer': 1})
    compiled = torch.compile(outputs, fullgraph=True, backend=backend)
    positions = torch.tensor([[0, 2]] * 3)
    for length in (9, 7, 10, 12, 3):
        inputs = (*batch(3, length), torch.arange(length) < torch.tensor([[length], [3], [1]]))
        gradients = [torch.autograd.grad(run(model, *inputs, positions=positions).sum(), model.parameters())
                     for run in (compiled, outputs)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)
    assert counters['stats']['unique_graphs'] <= 2


@each_core
def test_extended(settings):
    """Short rows give the same states; long ones are read up to the new length."""
    model = build(**settings)
    inputs = (*batch(), KEEP)
    for block_size in (40, 8):
        other = extended(model, block_size)
        assert model.config.block_size == 12
        assert other.config.block_size == block_size
        assert not other.training
        assert difference(outputs(model, *inputs), outputs(other, *inputs)) < 1e-12
        other(torch.ones(1, block_size, dtype=torch.long))
        with pytest.raises(ValueError, match=f'{block_size + 1} .*block_size={block_size}'):
            other(torch.ones(1, block_size + 1, dtype=torch.long))


# ---- what a user can get wrong ----

OPTIONS = {'mlp': 'swiglu', 'norm_place': 'pre', 'attend_self': False}        # as in AttentionFacts
for facts in ATTENTIONS.values():
    OPTIONS |= facts.options


@pytest.mark.parametrize('settings, message', [
    ({'dropout': 1.0}, 'dropout=1.0.*below 1'),
    ({'position': 'rope', 'n_head': 6, 'n_embd': 18}, "'rope'.* 3 entries"),
    *REFUSED,
    *[(system(name, position), f"position='{position}'.*'{name}' works only with")
      for name in ATTENTION for position in POSITION if position not in positions_of(name)],
    *[({**system(name, positions_of(name)[0]), **facts.refused[0]}, facts.refused[1])
      for name, facts in ATTENTIONS.items() if facts.refused],
], ids=str)
def test_a_combination_that_would_compute_something_else_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        small(**settings)


@pytest.mark.parametrize('option', {**OPTIONS, **source.which_read()})
def test_an_option_that_nothing_reads_is_refused(option):
    value = OPTIONS[option]
    field, users = source.which_read()[option]
    other = next((name for name in source.tables()[field] if name not in users), None)
    if other is None:
        pytest.skip('all read it')
    others = system(other, positions_of(other)[0]) if field == 'attention' else {}
    with pytest.raises(UserError, match=f'{option}={value!r}: only .*{users[-1]}'):
        small(**{**others, option: value})


# ---- Hugging Face ----

EXPORTED = [(kind, {**settings, **head})
            for (kind, position), (_, head) in source.EXPORTS.items() for settings in SYSTEMS
            if settings['position'] == position and ATTENTION[settings['attention']].as_bert
            and settings not in ALONE]


def logits_of_library(twin, ids, segments, keep):
    output = twin(input_ids=ids, token_type_ids=segments, attention_mask=keep.long())
    return torch.stack(output.to_tuple(), -1) if 'start_logits' in output else output.logits


@pytest.mark.parametrize('kind, name, settings, shape', TWINS)
def test_models_give_the_logits_of_hugging_face(kind, name, settings, shape, transformers):
    """In training with the same seed: both apply dropout at the same points in the same order."""
    bert_class = getattr(transformers, name)
    bert = randomised(bert_class(bert_class.config_class(**SIZES))).train()
    ours = kind(small(**settings)).train()
    names = source.hugging_face_names(2, bert.config.model_type)
    ours.load_state_dict({names[name]: x for name, x in bert.state_dict().items() if name in names})
    inputs = real_batch()
    if shape:
        inputs = [shape(x) for x in inputs]
    torch.manual_seed(9)
    expected = logits_of_library(bert, *inputs)
    torch.manual_seed(9)
    actual = outputs(ours, *inputs)
    assert difference(actual, expected) < 1e-5 * expected.abs().max()


@pytest.mark.parametrize('position', [position for _, position, _ in source.IMPORTS.values()])
def test_export_and_import_again(position, tmp_path, transformers):
    ours = build(position=position, dropout=0.2, attention_dropout=0.3).float().train()
    source.to_transformers(ours).save_pretrained(tmp_path)
    again = MaskedLM.from_pretrained(tmp_path)
    assert again.config == ours.config
    assert not again.training
    torch.testing.assert_close(again.state_dict(), ours.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize('kind, settings', EXPORTED, ids=str)
def test_export_has_the_logits(kind, settings, transformers):
    """Those of BERT and RoFormer with our weights: float32, padded, two segments; with and without biases."""
    inputs = real_batch()
    for bias in (True, False):
        ours = build(kind, **settings, bias=bias, n_label=3).float()
        twin = source.to_transformers(ours, pad_token_id=3)
        assert type(twin).__name__ == source.EXPORTS[kind, settings['position']][0]
        assert twin.config.pad_token_id == 3
        expected = logits_of_library(twin, *inputs)
        assert difference(outputs(ours, *inputs), expected) < 1e-4 * expected.abs().max()


@pytest.mark.parametrize('kind, settings, reason', [
    *[(kind, {'position': position, option: other}, f'{twin}.*{option}=.{other}.; .*{option}={name}')
      for (kind, position), (twin, head) in source.EXPORTS.items() for option, name in head.items()
      for other in source.tables()[option] if other != name],
    *[(MaskedLM, {option: name}, f'{option}=.{name}.')
      for option in ('mlp', 'norm', 'norm_place') for name in [*source.tables()[option]][1:]],
    (MaskedLM, {'attend_self': False}, 'attend_self=False; train with --attend_self=True'),
    *[(MaskedLM, system('original', position), 'those in EXPORTS')
      for position in POSITION if (MaskedLM, position) not in source.EXPORTS],
    *[(MaskedLM, system(name, positions_of(name)[0]), f'attention=.{name}.*as_bert')
      for name in ATTENTION if not ATTENTION[name].as_bert],
    *[(kind, facts.settings, 'those in EXPORTS')
      for kind, facts in MODELS.items() if (kind, 'absolute') not in source.EXPORTS],
], ids=str)
def test_a_model_without_a_twin_is_refused(kind, settings, reason, transformers):
    """Before it is trained, too."""
    with pytest.raises(UserError, match=f'{kind.__name__}.*{reason}') as error:
        source.to_transformers(build(kind, **settings))
    assert source.export_refusal(kind, small(**settings)) == str(error.value)


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
    with pytest.raises(UserError, match='gives other logits'):
        source.to_transformers(model)


@pytest.mark.parametrize('name, key, value', [
    ('Bert', 'hidden_act', 'gelu_new'),
    ('Bert', 'layer_norm_eps', 1e-5),
    ('Bert', 'tie_word_embeddings', False),
    ('Bert', 'is_decoder', True),
    ('Bert', 'type_vocab_size', 1),
    ('RoFormer', 'rotary_value', True),
    ('RoFormer', 'embedding_size', 8),
    ('RoFormer', 'norm_type', 'rms_norm'),
    ('RoFormer', 'use_bias', False),
])
def test_import_refuses_what_computes_something_else(name, key, value, tmp_path, transformers):
    """The last two are those of RoFormerV2."""
    config_class = getattr(transformers, f'{name}Config')
    config_class(**{**SIZES, key: value}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f'{key}={value!r}: only a {name.lower()} with {key}='):
        source.pretrained_encoder(tmp_path)


def test_import_refuses_weights_that_are_missing_or_of_other_sizes(tmp_path, transformers):
    """Else they would be random."""
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path)
    assert 'encoder.token.weight' in source.pretrained_encoder(tmp_path)[1]
    with pytest.raises(UserError, match='has no cls.predictions'):
        MaskedLM.from_pretrained(tmp_path)
    transformers.BertConfig(**{**SIZES, 'vocab_size': 30}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r'differ: [^\n]*\(\[23\D.*\(\[30\D'):
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
