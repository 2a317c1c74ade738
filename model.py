"""BERT encoders with weight-sharing attention; each kind of attention or position encoding is a class.

Sizes: B batch, T tokens, D n_embd, H n_head, K = D / H, L n_layer, F n_inner, V vocab_size, r pair_rank,
k predicted tokens per sequence; Q queries: T, but 1 in layerwise pooling and T + k in XLNet's streams.
Vectors are rows, so x W is an nn.Linear. All attention is bidirectional; padding keys get weight 0.

References
    Devlin et al. 2018    BERT, arXiv 1810.04805: the encoder, the masked-LM head and the initial values
    Courtois et al. 2024  Symmetric Dot-Product Attention, arXiv 2406.06366: `symmetric`, `pairwise`
    Kowsher et al. 2024   Does Self-Attention Need Separate Weights, arXiv 2412.00359: `shared`
    Tian et al. 2021      Shatter, arXiv 2108.13032: `part_mask` to `shatter`, `none`, layerwise pooling
    Liu 2022              GAU-based Model; Hua et al. 2022, arXiv 2202.10447: `gau`
    Yang et al. 2019      XLNet, arXiv 1906.08237: `xlnet`, PermutationLM
    Su et al. 2021        RoFormer, arXiv 2104.09864: `rope`
    Shaw et al. 2018      Relative Position Representations, arXiv 1803.02155: `rpe`
    Raffel et al. 2019    T5, arXiv 1910.10683: `rab`
"""
import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from configurator import UserError


@dataclass
class EncoderConfig:
    """Sizes and variants of a model, by default BERT-base.  Raises UserError on invalid combinations."""
    vocab_size: int = 30522         # V
    block_size: int = 512           # longest sequence, in tokens
    n_layer: int = 12               # L
    n_head: int = 12                # H
    n_embd: int = 768               # D
    n_inner: int = 3072             # F, width of the MLP
    n_segment: int = 2
    attention: str = 'original'     # a key of ATTENTION
    position: str = 'absolute'      # a key of POSITION
    norm: str = 'layer'             # a key of NORM
    lm_head: str = 'bert'           # a key of LM_HEAD
    bias: bool = True               # in the encoder's Linears and norms and in BertHead
    pair_rank: int = 0              # pairwise: rank of S = A B^T; 0 keeps S full
    pair_init: str = 'identity'     # pairwise: a key of PAIR_INIT
    normaliser: str = 'softmax_plus'    # gau: a key of NORMALISER
    relu_scale: str = 'ns'          # squared_relu: a key of RELU_SCALE
    key_size: int = 128             # gau: s, width of queries and keys
    clip_distance: int = 128        # rpe: c, distances are clipped at +-(c - 1)
    recompute: bool = False         # Shatter: recompute A * N in the backward pass to save memory
    same_partition: bool = False    # Shatter: all layers have the partition of layer L - 1
    one_value_matrix: bool = False  # Shatter but part_mask: no parts in the values, y = A v
    dropout: float = 0.1            # after the embeddings and after each sublayer
    attention_dropout: float = 0.1  # of attention weights
    pooling: str = 'cls'            # SequenceClassifier, MultipleChoice: a key of POOLING
    n_label: int = 2                # classes of a SequenceClassifier

    def __post_init__(self):
        tables = {'attention': ATTENTION, 'position': POSITION, 'pooling': POOLING, 'normaliser': NORMALISER,
                  'norm': NORM, 'lm_head': LM_HEAD, 'pair_init': PAIR_INIT, 'relu_scale': RELU_SCALE}
        for field in fields(self):
            name, value, kind = field.name, getattr(self, field.name), type(field.default)
            if type(value) is not kind and (kind, type(value)) != (float, int):
                raise UserError(f'{name}={value!r}: must be {kind.__name__}')
            if kind is int and name != 'pair_rank' and value < 1:
                raise UserError(f'{name}={value}: must be at least 1')
            if kind is float and not 0 <= value < 1:
                raise UserError(f'{name}={value}: must lie in [0, 1); 0.1 is usual')
            if kind is str:
                choose(name, value, tables[name])
        allowed = ALLOWED_POSITIONS.get(self.attention, POSITION)
        if self.position not in allowed:
            raise UserError(f'position={self.position!r}: cannot be combined with '
                            f"attention={self.attention!r}; choose {' or '.join(allowed)}")
        for name, (axis, rows) in APPLIES_TO.items():
            value, default = getattr(self, name), getattr(EncoderConfig, name)
            if value != default and getattr(self, axis) not in rows:
                raise UserError(f"{name}={value!r}: only {axis}={' or '.join(map(repr, rows))} uses {name}; "
                                f'leave it at {default!r}')
        if self.n_embd % self.n_head:
            raise UserError(f'n_embd={self.n_embd}: must be a multiple of n_head={self.n_head}')
        if self.position == 'rope' and self.query_size % 2:
            raise UserError(f"position='rope': n_embd / n_head (gau: key_size) is {self.query_size}; "
                            'it must be even')
        if self.attention in SHATTER and (self.n_head % 2 or self.n_head < 4):
            raise UserError(f'n_head={self.n_head}: attention={self.attention!r} needs an even n_head >= 4')
        if not 0 <= self.pair_rank <= self.query_size:
            raise UserError(f'pair_rank={self.pair_rank}: choose 0 (full) or 1 to {self.query_size}')

    @property
    def query_size(self):
        """Width of a query: s in GAU, else K."""
        return self.key_size if self.attention == 'gau' else self.n_embd // self.n_head


def choose(key, name, table):
    """table[name]; raises a UserError that lists the keys if there is no such key."""
    if name not in table:
        raise UserError(f'{key}={name!r}: choose one of {", ".join(table)}')
    return table[name]


# ---- functions used by several kinds of attention ----

class Context(NamedTuple):
    """Inputs of a layer other than hidden states."""
    position: nn.Module | None              # None in layerwise pooling: its query has no position
    mask: torch.Tensor | None = None        # (B, 1, 1|Q, T) bool, True: may attend; None: all True
    offsets: torch.Tensor | None = None     # (B, 1, Q, T), see relative_offsets; None: query i is at i


def split_heads(x, n_head):
    """(B, T, D) -> (B, H, T, K)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def merge_heads(x):
    """(B, H, T, K) -> (B, T, D)"""
    return x.transpose(1, 2).flatten(2)


def projections(n, width, bias):
    """n Linears from `width` to `width`."""
    return (nn.Linear(width, width, bias=bias) for _ in range(n))


def unfold(x, size):
    """Sliding windows: x (H, P) -> y (H, P - size + 1, size), y[h, i, j] = x[h, i + j]."""
    traced = x.device.type == 'xla' or torch.compiler.is_compiling()    # x.unfold recompiles for each length
    return unfold_copy(x, size) if traced else x.unfold(1, size, 1)


def unfold_copy(x, size):
    """The same as a copy: repeat each row, split it every P + 1 entries: each piece starts one later."""
    (H, P), n = x.shape, x.size(1) - size + 1
    return x.repeat(1, n + 1)[:, :n * (P + 1)].reshape(H, n, P + 1)[:, :, :size]


def attend(attention, q, k, v, context):
    """softmax(q k^T / sqrt(K)) v with positions; q (B, H, Q, K), k and v (B, H, T, K) -> (B, Q, D)"""
    dropout = attention.dropout if attention.training else 0.0
    if context.position is None:
        return merge_heads(fused_attention(q, k, v, context.mask, dropout))
    return merge_heads(context.position.attend(attention, q, k, v, context.mask, dropout))


def fused_attention(q, k, v, mask, dropout, bias=None):
    """softmax(q k^T / sqrt(K) + bias) v; 0, never NaN, for queries whose keys are all masked."""
    has_key = None if mask is None else mask.any(-1, keepdim=True)
    mask = None if mask is None else mask | ~has_key
    if bias is None:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    else:                               # (1|B, H, Q, T); only these two kernels compute its gradient
        bias = bias.to(q.dtype)
        bias = bias if mask is None else bias.masked_fill(~mask, -math.inf)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            y = F.scaled_dot_product_attention(q, k, v, bias, dropout)
    return y if mask is None else y.masked_fill(~has_key, 0)


def masked_softmax(scores, mask):
    """Softmax over the keys where the mask is True; 0 for queries whose keys are all masked."""
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0)


def relative_offsets(positions, length):
    """Index j - i + T - 1 into a table of all offsets; i in positions (..., Q), j < T -> (..., Q, T)"""
    return torch.arange(length - 1, 2 * length - 1, device=positions.device) - positions.unsqueeze(-1)


def angles(positions, size):
    """Angle of each position (n,) at each frequency: p 10000^(-2m / size), m = 0, 1, ... -> (n, size / 2)"""
    return positions.outer(10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))


# ---- kinds of attention: queries from x (B, Q, D), keys and values from source (B, T, D) -> (B, Q, D) ----
# relative(table), for position='rpe': table Wk and table Wv, without biases.

class OriginalAttention(nn.Module):
    """Separate queries, keys and values.  Vaswani et al. 2017; Courtois et al. 2024, eq. 1 and 2

        q = x Wq,  k = x Wk,  v = x Wv                     (B, H, T, K) each
        y = softmax(q k^T / sqrt(K)) v

    Parameters: 3 (D^2 + D), and D^2 + D for the output.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.layer, self.dropout = config.n_head, layer, config.attention_dropout
        self.query, self.key, self.value, self.out = projections(4, config.n_embd, config.bias)

    def forward(self, x, source, context):
        q = split_heads(self.query(x), self.n_head)
        k = split_heads(self.key(source), self.n_head)
        v = split_heads(self.value(source), self.n_head)
        return self.out(attend(self, q, k, v, context))

    def relative(self, table):
        return F.linear(table, self.key.weight), F.linear(table, self.value.weight)


class SymmetricAttention(nn.Module):
    """Keys equal queries, so scores are symmetric.  Courtois et al. 2024, eq. 3

        q = k = x Wq,  v = x Wv
        y = softmax(q q^T / sqrt(K)) v

    Parameters: 2 (D^2 + D), and D^2 + D for the output.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.layer, self.dropout = config.n_head, layer, config.attention_dropout
        self.query, self.value, self.out = projections(3, config.n_embd, config.bias)

    def forward(self, x, source, context):
        q = split_heads(self.query(x), self.n_head)
        k = q if source is x else split_heads(self.query(source), self.n_head)
        v = split_heads(self.value(source), self.n_head)
        return self.out(attend(self, q, k, v, context))

    def relative(self, table):
        return F.linear(table, self.query.weight), F.linear(table, self.value.weight)


class PairwiseAttention(nn.Module):
    """Shared queries and keys with learned pairwise factors S.  Courtois et al. 2024, eq. 6

        q = x Wq,  v = x Wv,  S (H, K, K), or A B^T with A and B (H, K, r) when pair_rank = r > 0
        y = softmax(q S q^T / sqrt(K)) v

    S is applied before `rope`, so that its scores depend on position only through i - j. Init: PAIR_INIT.
    Parameters: 2 (D^2 + D) + H K^2, or 2 (D^2 + D) + 2 H K r; and D^2 + D for the output.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.layer, self.dropout = config.n_head, layer, config.attention_dropout
        self.query, self.value, self.out = projections(3, config.n_embd, config.bias)
        init, shape = PAIR_INIT[config.pair_init], (config.n_head, config.query_size, config.pair_rank)
        self.pair = nn.Parameter(init(*shape))                                          # S, or A
        self.pair_key = nn.Parameter(init(*shape)) if config.pair_rank else None        # B

    def forward(self, x, source, context):
        q = split_heads(self.query(x), self.n_head)
        k = q if source is x else split_heads(self.query(source), self.n_head)
        q = q @ self.pair                                       # (B, H, Q, K), or (B, H, Q, r)
        if self.pair_key is not None:
            q = q @ self.pair_key.mT
        v = split_heads(self.value(source), self.n_head)
        return self.out(attend(self, q, k, v, context))

    def relative(self, table):
        return F.linear(table, self.query.weight), F.linear(table, self.value.weight)


class SharedAttention(nn.Module):
    """One matrix for queries, keys and values, and a diagonal for each.  Kowsher et al. 2024, section 2.3

        s = x Ws + b,  q = s * d_q,  k = s * d_k,  v = s * d_v          d (D,) each, initially 1
        y = softmax(q k^T / sqrt(K)) v

    Parameters: D^2 + D + 3 D, and D^2 + D for the output.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.layer, self.dropout = config.n_head, layer, config.attention_dropout
        self.shared, self.out = projections(2, config.n_embd, config.bias)
        self.query_diag, self.key_diag, self.value_diag = (
            nn.Parameter(torch.ones(config.n_embd)) for _ in range(3))

    def forward(self, x, source, context):
        s = self.shared(x)
        q = split_heads(s * self.query_diag.to(s.dtype), self.n_head)   # autocast skips *
        s = s if source is x else self.shared(source)
        k = split_heads(s * self.key_diag.to(s.dtype), self.n_head)
        v = split_heads(s * self.value_diag.to(s.dtype), self.n_head)
        return self.out(attend(self, q, k, v, context))

    def relative(self, table):
        s = F.linear(table, self.shared.weight)
        return s * self.key_diag.to(s.dtype), s * self.value_diag.to(s.dtype)


# ---- Shatter and its ablation steps: attention weights split into parts by relative position ----

class Partition(nn.Module):
    """Bernstein partition of unity over relative positions.  Tian et al. 2021, section A.1

        B_v(u) = C(d, v) u^v (1 - u)^(d - v),  v = 0..d,  d = H/2 - 1
        u(x) = ln(e^(beta x) (1 - e^alpha) + e^alpha) / alpha,  x >= 0
        alpha = -(k + 1)/L d,  beta = -1/d (d/12)^((k + 1)/L)           for layer k = 0..L-1
        f_v(x) = B_v(u(x)) for x > 0,  f_(H/2 + v)(x) = B_v(u(-x)) for x < 0

    At x = 0, undefined in the paper, each half gets B_v(0) / 2, so that the H functions sum to 1.
    With same_partition, a preliminary experiment of the paper, k = L - 1 in all layers (our choice of k).
    N[h, i, j] = f_h(j - i) is stored as table[h, j - i + block_size - 1], (H, 2 block_size - 1).
    """

    def __init__(self, config, layer):
        super().__init__()
        layer = config.n_layer - 1 if config.same_partition else layer
        self.n_head, self.progress = config.n_head, (layer + 1) / config.n_layer
        self.resize(config.block_size)

    def resize(self, block_size):
        degree = self.n_head // 2 - 1
        alpha = -self.progress * degree
        beta = -(degree / 12) ** self.progress / degree
        x = torch.arange(block_size, dtype=torch.float64)
        u = ((math.exp(alpha) - (beta * x).exp() * math.expm1(alpha)).log() / alpha).clamp(0, 1)
        right = torch.stack([math.comb(degree, v) * u ** v * (1 - u) ** (degree - v)
                             for v in range(degree + 1)])                       # (H / 2, block_size)
        right[:, 0] /= 2
        zeros = torch.zeros_like(right[:, 1:])
        table = torch.cat((torch.cat((zeros, right), 1), torch.cat((right.flip(1), zeros), 1)))
        self.register_buffer('table', table.float(), persistent=False)

    def forward(self, context, v):
        """N (H, T, T) with a reversed query axis, [h, i, j] = f_h(j - (T - 1 - i)); None without positions.

        A strided view of the table, which takes no memory. Without the reversal a stride would be negative,
        which PyTorch does not support, so callers flip q and y. v (B, H, T, K) gives T and the dtype.
        """
        if context.position is None:
            return None
        middle, length = self.table.size(1) // 2, v.size(2)
        return unfold(self.table[:, middle - length + 1:middle + length].to(v.dtype), length)


def attend_parts(attention, a, v, partition):
    """concat_h((a * N_h) v_h): a (B, 1|H, Q, T), v (B, H, T, K) -> (B, Q, D); N = 1 if partition is None.

    With `recompute` autograd stores only a; the backward pass recomputes a * N (B, H, Q, T).
    """
    def weighted(a, v):
        return (a if partition is None else a * partition) @ v

    a = a.to(v.dtype)                                   # autocast computes softmax and sigmoid in float32
    if attention.recompute and a.requires_grad:
        return merge_heads(checkpoint(weighted, a, v, use_reentrant=False, preserve_rng_state=False))
    return merge_heads(weighted(a, v))


class PartMaskAttention(nn.Module):
    """Each head attends to one part of the sequence.  Tian et al. 2021, section 3.1, eq. 5

        A_h = softmax(q_h k_h^T / sqrt(K)) * N_h,  y_h = A_h v_h          N of Partition

    Dropout is applied to the softmax, before N, as in OneHeadAttention to a.
    Parameters: 3 (D^2 + D), and D^2 + D for the output.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.dropout, self.recompute = config.n_head, config.attention_dropout, config.recompute
        self.query, self.key, self.value, self.out = projections(4, config.n_embd, config.bias)
        self.partition = Partition(config, layer)

    def forward(self, x, source, context):
        k = split_heads(self.key(source), self.n_head)
        v = split_heads(self.value(source), self.n_head)
        partition = self.partition(context, v)
        q = split_heads(self.query(x).flip(1), self.n_head)
        a = masked_softmax(q @ k.mT * q.size(-1) ** -0.5, context.mask)
        y = attend_parts(self, F.dropout(a, self.dropout, self.training), v, partition)
        return self.out(y.flip(1))


class OneHeadAttention(nn.Module):
    """One score matrix for all parts: four variants, see SHATTER.  Tian et al. 2021, sections 3.2, 3.3

        one_head_softmax  A = softmax(q x^T / sqrt(D)),  q = x Wq         the keys are the layer's input
        one_head_sigmoid  a = sigmoid(q x^T / sqrt(D)),  A_ij = a_ij / |a_i|          eq. 6, L2 norm of a row
        part_bias         a = sigmoid(q x^T / sqrt(D) + b),  b_ij = sum_h (q_i R_h) N[h, i, j]
        shatter           as part_bias, with A_part (R Wv) added to y

        y = concat_h((A * N_h) v_h),  v = x Wv;  A_part[i, h] = sum_j A_ij N[h, i, j],  N of Partition

    R (H, D) is part_embedding; R Wv (H, D) leaves out the bias of v. With one_value_matrix, a preliminary
    experiment of section 3.2, all parts have all of v: y = sum_h (A * N_h) v = A v.
    Parameters: 2 (D^2 + D), plus H D for R if used, and D^2 + D for the output.
    """

    def __init__(self, config, layer, weights, part_bias=False, part_values=False):
        super().__init__()
        self.n_head, self.dropout, self.recompute = config.n_head, config.attention_dropout, config.recompute
        self.weights, self.part_values, self.one_value_matrix = weights, part_values, config.one_value_matrix
        self.query, self.value, self.out = projections(3, config.n_embd, config.bias)
        shape = config.n_head, config.n_embd
        self.part_embedding = nn.Parameter(0.02 * torch.randn(shape)) if part_bias else None      # R
        self.partition = Partition(config, layer)

    def forward(self, x, source, context):
        v = split_heads(self.value(source), self.n_head)
        partition = self.partition(context, v)
        q = self.query(x).flip(1)
        scores = q @ source.mT * q.size(-1) ** -0.5                                     # (B, Q, T)
        has_parts = self.part_embedding is not None and partition is not None
        if has_parts:
            scores = scores + torch.einsum('bih,hij->bij', F.linear(q, self.part_embedding), partition)
        a = self.weights(scores, None if context.mask is None else context.mask.squeeze(1))
        a = F.dropout(a, self.dropout, self.training)
        y = attend_parts(self, a[:, None], v, None if self.one_value_matrix else partition)
        if has_parts and self.part_values:
            shares = torch.einsum('bij,hij->bih', a.to(v.dtype), partition)             # A_part
            y = y + shares @ F.linear(self.part_embedding, self.value.weight)
        return self.out(y.flip(1))


def masked_sigmoid(scores, mask):
    """Sigmoid of the scores (B, Q, T), divided by the L2 norm of its row; 0 where the mask is False.

    The sigmoid is first divided by the maximum of its row, so that squares do not underflow.
    """
    a = F.logsigmoid(scores)
    if mask is not None:
        a = a.masked_fill(~mask, -math.inf)
    a = (a - a.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).min)).exp()
    return F.normalize(a, dim=-1, eps=0.5)                                              # norm >= 1, or 0


# ---- GAU: replaces both attention and MLP ----

class GatedAttention(nn.Module):
    """Gated attention unit.  Hua et al. 2022; Liu 2022, section 4.1

        u = silu(x Wu), v = silu(x Wv) (B, T, 2D),  z = silu(x Wz) (B, T, s)
        q = z g_q + b_q,  k = z g_k + b_k,  both rotated by `rope`
        y = (u * A v) Wo,  A = normaliser(q k^T) (B, T, T)          see NORMALISER

    One head with s = key_size; n_head and n_inner are unused. b_q and b_k are the only biases (bias=True).
    Parameters: 6 D^2 + D s + 2 s, and 2 s for the biases.
    """

    def __init__(self, config, layer):
        super().__init__()
        inner, size = 2 * config.n_embd, config.key_size
        self.dropout = config.attention_dropout
        self.normaliser, self.scale = NORMALISER[config.normaliser], RELU_SCALE[config.relu_scale]
        self.gate, self.value = (nn.Linear(config.n_embd, inner, bias=False) for _ in range(2))
        self.shared = nn.Linear(config.n_embd, size, bias=False)
        self.out = nn.Linear(inner, config.n_embd, bias=False)
        self.query_diag, self.key_diag = (nn.Parameter(torch.ones(size)) for _ in range(2))
        self.query_bias, self.key_bias = (nn.Parameter(torch.zeros(size)) if config.bias else None
                                          for _ in range(2))

    def forward(self, x, source, context):
        u, v, z = F.silu(self.gate(x)), F.silu(self.value(source)), F.silu(self.shared(x))
        q = z * self.query_diag.to(z.dtype)
        k = (z if source is x else F.silu(self.shared(source))) * self.key_diag.to(z.dtype)
        if self.query_bias is not None:
            q, k = q + self.query_bias.to(z.dtype), k + self.key_bias.to(z.dtype)
        if context.position is not None:
            q, k = context.position.rotate(q), context.position.rotate(k)
        mask = None if context.mask is None else context.mask.squeeze(1)                # (B, 1, T)
        scores = q @ k.mT
        n = torch.tensor(k.size(1), device=k.device) if mask is None else mask.sum(-1, keepdim=True)
        n = n.clamp(min=1).to(torch.promote_types(scores.dtype, torch.float32))         # (), or (B, 1, 1)
        a = self.normaliser(scores, mask, n, q.size(-1), self.scale).to(v.dtype)
        return self.out(u * (F.dropout(a, self.dropout, self.training) @ v))


# normalisers: q k^T (B, Q, T), mask None or (B, 1, T), n unmasked keys, s, scale -> A (B, Q, T)

def softmax(scores, mask, n, size, scale):
    """softmax(q k^T / sqrt(s))"""
    return masked_softmax(scores * size ** -0.5, mask)


def softmax_plus(scores, mask, n, size, scale):
    """softmax(log_512(n) q k^T / sqrt(s)): its entropy depends less on n.  Su 2021; Liu 2022, section 3.3"""
    return masked_softmax(scores * (n.log() / math.log(512) * size ** -0.5).to(scores.dtype), mask)


def squared_relu(scores, mask, n, size, scale):
    """relu(q k^T)^2 / scale, as in Liu's table 1; table 2 has q k^T / sqrt(d_h) inside relu.

    It overflows float16 above 65,504: at 512 tokens with scale n this is q k^T >= 5,800.
    """
    a = (scores.relu() * scale(n, size).rsqrt().to(scores.dtype)).square()
    return a if mask is None else a.masked_fill(~mask, 0)


def scaled_squared_relu(scores, mask, n, size, scale):
    """relu(q k^T)^2 / sum_j relu(q k^T)^2: rows sum to 1, a row of zeros stays 0.  Liu 2022, section 3.3

    The paper has an extra factor 1 / (n s), with which rows would not sum to 1. Scores are divided by the
    maximum of their row, which cancels out, in float32 (the dtype of n), so that small ones do not underflow.
    """
    a = scores.relu() if mask is None else scores.relu().masked_fill(~mask, 0)
    a = a.to(n.dtype)
    a = (a / a.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)).square()
    return a / a.sum(-1, keepdim=True).clamp_min(0.5)                                   # sum >= 1, or 0


NORMALISER = {'softmax': softmax, 'softmax_plus': softmax_plus, 'squared_relu': squared_relu,
              'scaled_squared_relu': scaled_squared_relu}
RELU_SCALE = {                      # Liu 2022, table 1; n2 as in Hua et al.
    'n2': lambda n, s: n * n, 'n': lambda n, s: n,
    'ns': lambda n, s: n * s, 's2': lambda n, s: torch.full_like(n, s * s),
}


# ---- XLNet ----

class XLNetAttention(nn.Module):
    """Relative attention with two global biases.  Yang et al. 2019, after Dai et al. 2019, section 3.3

        score_ij = ((q_i + u) k_j + (q_i + v) r_(i-j)) / sqrt(K),  r_d = sinusoid(d) Wr
        sinusoid(d) = (sin(d w_m) for all m, then cos(d w_m)),  w_m = 10000^(-2m / D),  m = 0, 1, ...
        y_i = sum_j softmax(score)_ij (x_j Wv),  u and v (D,), K entries per head;  no biases

    Yang et al.'s code also applies dropout to the sinusoids, after the MLP's activation and to the final
    states; here it is where BERT has it. If a query has no key, y_i = 0; in their code, the mean of v.
    Parameters: 4 D^2 + 2 D, and D^2 for the output.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.attention_dropout
        self.query, self.key, self.value, self.distance, self.out = projections(5, config.n_embd, bias=False)
        self.content_bias, self.distance_bias = (                                       # u, v
            nn.Parameter(0.02 * torch.randn(config.n_embd)) for _ in range(2))
        self.resize(config.block_size)

    def resize(self, block_size):
        """sinusoid(i - j) of all offsets, (2 block_size - 1, D), in row j - i + block_size - 1."""
        angle = angles(torch.arange(block_size - 1, -block_size, -1, dtype=torch.float64), self.n_embd)
        table = torch.cat((angle.sin(), angle.cos()), 1)[:, :self.n_embd]
        self.register_buffer('sinusoid', table.float(), persistent=False)

    def forward(self, x, source, context):
        q = self.query(x)
        content = split_heads(q + self.content_bias.to(q.dtype), self.n_head)
        k = split_heads(self.key(source), self.n_head)
        v = split_heads(self.value(source), self.n_head)
        if context.position is None:
            return self.out(attend(self, content, k, v, context))
        T, middle = k.size(2), len(self.sinusoid) // 2
        r = split_heads(self.distance(self.sinusoid[middle - T + 1:middle + T])[None], self.n_head)
        q = split_heads(q + self.distance_bias.to(q.dtype), self.n_head)
        scores = q @ r.mT * q.size(-1) ** -0.5                                          # (B, H, Q, 2T - 1)
        offsets = context.offsets
        offsets = relative_offsets(torch.arange(T, device=x.device), T) if offsets is None else offsets
        bias = scores.gather(-1, offsets.expand(*scores.shape[:3], T))
        dropout = self.dropout if self.training else 0.0
        return self.out(merge_heads(fused_attention(content, k, v, context.mask, dropout, bias)))


SHATTER = {                         # in the order of the paper's ablation
    'part_mask': PartMaskAttention,
    'one_head_softmax': partial(OneHeadAttention, weights=masked_softmax),
    'one_head_sigmoid': partial(OneHeadAttention, weights=masked_sigmoid),
    'part_bias': partial(OneHeadAttention, weights=masked_sigmoid, part_bias=True),
    'shatter': partial(OneHeadAttention, weights=masked_sigmoid, part_bias=True, part_values=True),
}
ATTENTION = {
    'original': OriginalAttention, 'symmetric': SymmetricAttention, 'pairwise': PairwiseAttention,
    'shared': SharedAttention, **SHATTER, 'gau': GatedAttention, 'xlnet': XLNetAttention,
}
ALLOWED_POSITIONS = {               # attention -> position encodings; all, if not listed
    **dict.fromkeys((*SHATTER, 'xlnet'), ('none',)), 'gau': ('rope', 'absolute', 'none'),
}
APPLIES_TO = {                      # option -> (field, values of it that use the option)
    'pair_rank': ('attention', ('pairwise',)), 'pair_init': ('attention', ('pairwise',)),
    'normaliser': ('attention', ('gau',)), 'key_size': ('attention', ('gau',)),
    'relu_scale': ('normaliser', ('squared_relu',)), 'recompute': ('attention', tuple(SHATTER)),
    'clip_distance': ('position', ('rpe',)), 'same_partition': ('attention', tuple(SHATTER)),
    'one_value_matrix': ('attention', tuple(SHATTER)[1:]),
}


# ---- initial values of S (H, K, K), or if r > 0 of A and of B (H, K, r), with A B^T similar to S ----

def normal(n_head, size, rank, std):
    """S from N(0, std^2), or A or B such that the entries of A B^T have standard deviation std."""
    return torch.randn(n_head, size, rank or size) * ((std / rank ** 0.5) ** 0.5 if rank else std)


PAIR_INIT = {                       # why identity is the default: results/tiny.md
    'identity': lambda H, K, r: torch.eye(K, r or K) + 0.02 * torch.randn(H, K, r or K),    # near `symmetric`
    'fan_in': lambda H, K, r: normal(H, K, r, K ** -0.5),           # |q S| is about |q|
    'normal': lambda H, K, r: normal(H, K, r, 0.02),                # as in BERT; attention is nearly uniform
}


# ---- position encodings.  embed: x (B, T, D) before the first norm -> x; attend: see function attend ----

class NoPosition(nn.Module):
    """No positions: tokens are an unordered set.  Tian et al. 2021, "No_Position".  Parameters: 0."""

    def __init__(self, config):
        super().__init__()

    def embed(self, x):
        return x

    def rotate(self, x):
        return x

    def attend(self, attention, q, k, v, mask, dropout):
        return fused_attention(self.rotate(q), self.rotate(k), v, mask, dropout)


class AbsolutePosition(NoPosition):
    """Learned vectors added to the embeddings.  Devlin et al. 2018.  Parameters: block_size D."""

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.block_size, config.n_embd)

    def resize(self, block_size):
        old = self.table.weight.data
        fresh = torch.empty(block_size, old.size(1), dtype=old.dtype, device=old.device).normal_(std=0.02)
        fresh[:len(old)] = old[:block_size]
        self.table = nn.Embedding.from_pretrained(fresh, freeze=False)

    def embed(self, x):
        return x + self.table.weight[:x.size(1)]


class RotaryPosition(NoPosition):
    """Queries and keys rotated by angles that grow with position.  Su et al. 2021, eq. 34.  Parameters: 0.

        (q_2i, q_2i+1) at position m is rotated by m 10000^(-2i/K), so positions enter q_m k_n only as m - n
    """

    def __init__(self, config):
        super().__init__(config)
        self.size = config.query_size
        self.resize(config.block_size)

    def resize(self, block_size):
        angle = angles(torch.arange(block_size, dtype=torch.float64), self.size)        # (block_size, K / 2)
        cos, sin = angle.cos().float(), angle.sin().float()
        self.register_buffer('cos', torch.stack((cos, cos), 2).flatten(1), persistent=False)
        self.register_buffer('sin', torch.stack((-sin, sin), 2).flatten(1), persistent=False)

    def rotate(self, x):
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)         # (x_1, x_0, x_3, x_2, ...)
        return (x * self.cos[:x.size(-2)] + swapped * self.sin[:x.size(-2)]).to(x.dtype)


class RelativePosition(NoPosition):
    """Learned vectors of relative distances.  Shaw et al. 2018, as in Tian et al. 2021, section 2

        d = j - i, clipped at +-(c - 1);  R (2c - 1, D), one per layer
        K_rel = R Wk,  V_rel = R Wv,  Wk and Wv of the layer's attention, without biases
        score_ij = q_i (k_j + K_rel[d]) / sqrt(K),  y_i = sum_j A_ij (v_j + V_rel[d])

    V_rel needs A_ij, which no fused kernel returns. Parameters: L (2c - 1) D.
    """

    def __init__(self, config):
        super().__init__(config)
        self.clip, self.block_size = config.clip_distance, config.block_size
        shape = config.n_layer, 2 * self.clip - 1, config.n_embd
        self.table = nn.Parameter(0.02 * torch.randn(shape))                            # R of each layer

    @torch.no_grad()
    def resize(self, block_size):
        """Distances beyond the old block_size get the vector of the largest distance within it."""
        far = min(self.block_size, self.clip) - 1
        if block_size > self.block_size:
            self.table[:, :self.clip - 1 - far] = self.table[:, self.clip - 1 - far, None]
            self.table[:, self.clip + far:] = self.table[:, self.clip - 1 + far, None]
            self.block_size = block_size

    def attend(self, attention, q, k, v, mask, dropout):
        T = k.size(-2)
        far = min(T, self.clip) - 1                                                     # largest distance
        table = self.table[attention.layer, self.clip - 1 - far:self.clip + far]
        k_rel, v_rel = (split_heads(x[None], attention.n_head) for x in attention.relative(table))
        distance = (relative_offsets(torch.arange(T, device=q.device), T) - T + 1).clamp(-far, far)
        row = (distance + far).expand(*q.shape[:2], T, T)                   # of the table
        wide = torch.promote_types(q.dtype, torch.float32)                  # its gradient sums many terms
        by_distance = (q @ k_rel.mT).to(wide).gather(-1, row)
        scores = (q @ k.mT + by_distance) * q.size(-1) ** -0.5
        weight = F.dropout(masked_softmax(scores, mask), dropout)
        by_distance = weight.new_zeros(*q.shape[:3], 2 * far + 1).scatter_add(-1, row, weight)
        return weight.to(v.dtype) @ v + by_distance.to(v.dtype) @ v_rel


class BiasPosition(AbsolutePosition):
    """A learned bias for each bucket of distances, the same in all layers.  Raffel et al. 2019; BERT-RAB

        score_ij = q_i k_j / sqrt(K) + W[bucket(j - i)],  W (32, H);  `absolute` is kept as well

    16 buckets for j <= i and 16 for j > i: one for each distance up to 7, then 8 of logarithmic width up to
    128; the last also takes all longer distances. As in T5, bucket 16 is never used: j > i has no distance 0.
    Parameters: 32 H + block_size D.
    """

    def __init__(self, config):
        super().__init__(config)
        self.bucket_bias = nn.Embedding(32, config.n_head)
        self.register_buffer('bucket', self.buckets(config.block_size), persistent=False)

    def resize(self, block_size):
        super().resize(block_size)
        self.bucket = self.buckets(block_size)

    @staticmethod
    def buckets(block_size):
        """Bucket of each offset j - i = 1 - block_size, ..., block_size - 1"""
        distance = torch.arange(1 - block_size, block_size)
        size = distance.abs()
        large = 8 + ((size.clamp(min=8).float() / 8).log() / math.log(128 / 8) * 8).long().clamp(max=7)
        return torch.where(size < 8, size, large) + 16 * (distance > 0)

    def attend(self, attention, q, k, v, mask, dropout):
        T, middle = k.size(-2), len(self.bucket) // 2
        bias = self.bucket_bias(self.bucket[middle - T + 1:middle + T]).mT.contiguous()     # (H, 2T - 1)
        bias = unfold(bias, T).flip(1)[None]                                            # (1, H, T, T)
        return fused_attention(q, k, v, mask, dropout, bias)


POSITION = {'absolute': AbsolutePosition, 'none': NoPosition, 'rope': RotaryPosition,
            'rpe': RelativePosition, 'rab': BiasPosition}


# ---- the encoder ----

NORM = {                            # rms: x / sqrt(mean(x^2) + eps) without weights.  Liu 2022, section 4.1
    'layer': lambda config: nn.LayerNorm(config.n_embd, eps=1e-12, bias=config.bias),
    'rms': lambda config: nn.RMSNorm(config.n_embd, eps=1e-12, elementwise_affine=False),
}


class Block(nn.Module):
    """x = norm(x + dropout(f(x))), where f is attention, then the MLP (post-LN).  Devlin et al. 2018"""

    def __init__(self, config, layer):
        super().__init__()
        self.attention = ATTENTION[config.attention](config, layer)
        self.attention_norm = NORM[config.norm](config)
        self.expand = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.contract = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)
        self.mlp_norm = NORM[config.norm](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, source, context):
        """Queries from x (B, Q, D), keys and values from source (B, T, D); in the encoder source is x."""
        x = self.attention_norm(x + self.dropout(self.attention(x, source, context)))
        return self.mlp_norm(x + self.dropout(self.contract(F.gelu(self.expand(x)))))


class GatedBlock(nn.Module):
    """A GAU layer, which needs no MLP: x = norm(x + dropout(y)).  Two of them replace one Block."""

    def __init__(self, config, layer):
        super().__init__()
        self.attention = ATTENTION[config.attention](config, layer)
        self.norm = NORM[config.norm](config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, source, context):
        return self.norm(x + self.dropout(self.attention(x, source, context)))


BLOCK = {'gau': GatedBlock}         # attention -> its block; default: Block


class Encoder(nn.Module):
    """Token, segment and position embeddings, then L blocks.  Devlin et al. 2018, post-LN."""

    def __init__(self, config):
        super().__init__()
        self.config = replace(config)                   # a copy, since extend changes it
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.segment = nn.Embedding(config.n_segment, config.n_embd)
        self.position = POSITION[config.position](config)
        self.norm = NORM[config.norm](config)
        self.dropout = nn.Dropout(config.dropout)
        block = BLOCK.get(config.attention, Block)
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.n_layer))
        self.apply(init_weights)

    def forward(self, ids, segments=None, attention_mask=None):
        """Hidden states (B, T, D).

        ids             (B, T) int64, T at most block_size
        segments        (B, T) int64 below n_segment; None: all 0
        attention_mask  (B, T) bool or 0 and 1, true at real tokens; None: no padding
        """
        return self.states(ids, segments, attention_mask)[-1]

    def states(self, ids, segments=None, attention_mask=None, n_block=None):
        """List of (B, T, D): the embeddings, then the output of each block, or of the first n_block."""
        context, states = Context(self.position, key_mask(attention_mask)), [self.embed(ids, segments)]
        for block in self.blocks[:n_block]:
            states.append(block(states[-1], states[-1], context))
        return states

    def embed(self, ids, segments=None):
        """Input of the first block, (B, T, D)."""
        if ids.size(1) > self.config.block_size:
            raise ValueError(f'{ids.size(1)} tokens in a row, but block_size={self.config.block_size}')
        x = self.token(ids) + (self.segment.weight[0] if segments is None else self.segment(segments))
        return self.dropout(self.norm(self.position.embed(x)))

    def extend(self, block_size):
        """Raise or lower block_size, the longest sequence allowed.  Tian et al. 2021, "ext."

        `absolute` and `rab` get random vectors for new positions, `rpe` repeats its outermost vectors, others
        need no new weights. Some parameters are replaced, so create the optimizer afterwards.
        """
        self.config.block_size = replace(self.config, block_size=block_size).block_size     # checked
        for module in self.modules():
            if hasattr(module, 'resize'):
                module.resize(block_size)
                module.to(self.token.weight)            # its device and dtype


def key_mask(attention_mask):
    """attention_mask of Encoder.forward -> mask of Context: None or (B, 1, 1, T) bool"""
    return None if attention_mask is None else attention_mask.bool()[:, None, None, :]


def init_weights(module):
    """N(0, 0.02) for weights of Linear and Embedding, 0 for biases.  Devlin et al. 2018"""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# ---- LM heads: states x (B, k, D), tied token embeddings `table` (V, D) -> logits (B, k, V) ----

class BertHead(nn.Module):
    """Linear(D, D), GELU, norm, tied decoder, bias (V,).  Devlin et al. 2018"""

    def __init__(self, config):
        super().__init__()
        self.transform = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.norm = NORM[config.norm](config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.bias else None
        init_weights(self.transform)

    def forward(self, x, table):
        return F.linear(self.norm(F.gelu(self.transform(x))), table, self.bias)


class DecoderHead(nn.Module):
    """Only the tied decoder, without bias.  Liu 2022 (GAU and RoFormerV2)"""

    def __init__(self, config):
        super().__init__()

    def forward(self, x, table):
        return F.linear(x, table)


LM_HEAD = {'bert': BertHead, 'decoder': DecoderHead}


class MaskedLM(nn.Module):
    """Encoder and one of LM_HEAD.  Devlin et al. 2018"""

    def __init__(self, config):
        super().__init__()
        self.encoder = Encoder(config)
        self.config = self.encoder.config
        self.head = LM_HEAD[config.lm_head](config)

    def forward(self, ids, positions=None, targets=None, segments=None, attention_mask=None):
        """Logits (B, T, V), or only those at `positions` (B, k): (B, k, V), k / T of the head's cost.

        With `targets` (B, k) the losses (B, k), float32, in nats. Other arguments: see Encoder.forward.
        """
        x = self.encoder(ids, segments, attention_mask)
        if positions is not None:
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.size(-1)))      # (B, k, D)
        logits = self.head(x, self.encoder.token.weight)
        return logits if targets is None else token_losses(logits, targets)

    @classmethod
    def from_pretrained(cls, name):
        """A Hugging Face BERT (hub name or local folder) as `original` + `absolute`, in eval mode."""
        config, weights = pretrained_encoder(name, ('encoder.', 'head.'), 'masked-LM model')
        model = cls(config)
        model.load_state_dict({ours: weights[ours] for ours in model.state_dict()})
        return model.eval()


def token_losses(logits, targets):
    """Cross-entropy of each target, in float32.  logits (B, k, V), targets (B, k) int64 -> (B, k)"""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction='none')
    return losses.view_as(targets)


class PermutationLM(nn.Module):
    """XLNet's objective: predict tokens from those before them in a random order.  Yang et al. 2019, 2.3

        content stream h_i attends to j if order_j <= order_i;  query stream g_i if order_j < order_i
        g_i starts from a learned vector, the same for all i; only relative positions tell it where it is

    In Yang et al.'s code all tokens that are not predicted attend to each other; here they follow the order.
    Each block processes both streams at once: T + k queries, keys and values from h.
    Fine-tuning uses `encoder`, which is the content stream. Parameters: those of MaskedLM plus D.
    """

    def __init__(self, config):
        super().__init__()
        if config.attention != 'xlnet':
            raise UserError(f"attention={config.attention!r}: only attention='xlnet' allows objective='plm'")
        self.encoder = Encoder(config)
        self.config = self.encoder.config
        self.head = LM_HEAD[config.lm_head](config)
        self.query_embedding = nn.Parameter(0.02 * torch.randn(config.n_embd))

    def forward(self, ids, positions, targets=None, segments=None, attention_mask=None, order=None):
        """Logits (B, k, V) at `positions` (B, k); with `targets` (B, k) the losses (B, k), float32, in nats.

        order  (B, T) int64, rank of each token in the factorisation order; ranks may be equal.
               None: 1 at `positions`, 0 elsewhere: predict from all tokens outside `positions`
        """
        if order is None:
            order = torch.zeros_like(ids).scatter(1, positions, 1)
        content, length = self.encoder.embed(ids, segments), ids.size(1)
        query = self.encoder.dropout(self.query_embedding.to(content.dtype).expand(*positions.shape, -1))
        both = torch.cat((content, query), 1)                                           # (B, T + k, D)
        last = torch.cat((order, order.gather(1, positions) - 1), 1)                    # largest visible rank
        mask = (order[:, None] <= last[:, :, None])[:, None]                            # (B, 1, T + k, T)
        mask = mask if attention_mask is None else mask & key_mask(attention_mask)
        at = torch.cat((torch.arange(length, device=ids.device).expand_as(ids), positions), 1)
        context = Context(self.encoder.position, mask, relative_offsets(at, length)[:, None])
        for block in self.encoder.blocks:
            both = block(both, both[:, :length], context)
        logits = self.head(both[:, length:], self.encoder.token.weight)
        return logits if targets is None else token_losses(logits, targets)


# ---- fine-tuning heads ----

class ClsPooling(nn.Module):
    """BERT's pooler: tanh(Linear(D, D)) of the final state of [CLS].  Devlin et al. 2018"""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd)
        init_weights(self.dense)

    def forward(self, encoder, ids, segments, attention_mask):
        return self.dense(encoder(ids, segments, attention_mask)[:, 0]).tanh()


class FirstPooling(nn.Module):
    """The final state of [CLS] as it is; the classifier is then one Linear.  Liu 2022, table 4."""

    def __init__(self, config):
        super().__init__()

    def forward(self, encoder, ids, segments, attention_mask):
        return encoder(ids, segments, attention_mask)[:, 0]


class LayerwisePooling(nn.Module):
    """A learned query passes through all blocks and attends to the input of each.  Tian et al. 2021, 3.4

        y_(k+1) = block_k(y_k),  queries from y_k, keys and values from X^k, the input of block k

    It uses no positions, so positional parameters of the last block get no gradient. Parameters: D.
    """

    def __init__(self, config):
        super().__init__()
        self.query_embedding = nn.Parameter(0.02 * torch.randn(config.n_embd))                    # y_0

    def forward(self, encoder, ids, segments, attention_mask):
        states = encoder.states(ids, segments, attention_mask, len(encoder.blocks) - 1)     # X^0 to X^(L-1)
        y = self.query_embedding.to(states[0].dtype).expand(len(ids), 1, -1)
        context = Context(None, key_mask(attention_mask))
        for block, source in zip(encoder.blocks, states, strict=True):
            y = block(y, source, context)
        return y[:, 0]


POOLING = {'cls': ClsPooling, 'first': FirstPooling, 'layerwise': LayerwisePooling}     # -> (B, D)


class SequenceClassifier(nn.Module):
    """One of POOLING, dropout, Linear(D, n_label).  Devlin et al. 2018, section 4.1"""

    def __init__(self, config):
        super().__init__()
        self.encoder = Encoder(config)
        self.config = self.encoder.config
        self.pooler = POOLING[config.pooling](config)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.n_embd, config.n_label)
        init_weights(self.classifier)

    def forward(self, ids, segments=None, attention_mask=None):
        """Logits (B, n_label); arguments as Encoder.forward."""
        return self.classifier(self.dropout(self.pooler(self.encoder, ids, segments, attention_mask)))


class SpanClassifier(nn.Module):
    """Start and end of an answer: Linear(D, 2) on every state.  Devlin et al. 2018, section 4.2"""

    def __init__(self, config):
        super().__init__()
        self.encoder = Encoder(config)
        self.config = self.encoder.config
        self.classifier = nn.Linear(config.n_embd, 2)
        init_weights(self.classifier)

    def forward(self, ids, segments=None, attention_mask=None):
        """Logits of start and of end, (B, T) each; arguments as Encoder.forward."""
        return self.classifier(self.encoder(ids, segments, attention_mask)).unbind(-1)


class MultipleChoice(SequenceClassifier):
    """Choose one of C texts by the single logit of each.  Devlin et al. 2018, section 4.4"""

    def __init__(self, config):
        super().__init__(replace(config, n_label=1))

    def forward(self, ids, segments=None, attention_mask=None):
        """Logits (B, C); arguments as Encoder.forward, but of shape (B, C, T)."""
        rows = [None if x is None else x.flatten(0, 1) for x in (ids, segments, attention_mask)]
        return super().forward(*rows).view(ids.shape[:2])


# ---- Hugging Face ----

BERT_CONFIG = {                     # required values of the keys that a config.json has
    'model_type': 'bert', 'hidden_act': 'gelu', 'layer_norm_eps': 1e-12, 'tie_word_embeddings': True,
    'is_decoder': False, 'position_embedding_type': 'absolute',
}
BERT_SIZES = {                      # EncoderConfig field -> BertConfig field
    'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings', 'n_layer': 'num_hidden_layers',
    'n_head': 'num_attention_heads', 'n_embd': 'hidden_size', 'n_inner': 'intermediate_size',
    'n_segment': 'type_vocab_size', 'dropout': 'hidden_dropout_prob',
    'attention_dropout': 'attention_probs_dropout_prob',
}
BERT_NAMES = {                      # module of a BERT with any head -> ours
    'bert.embeddings.word_embeddings': 'encoder.token',
    'bert.embeddings.token_type_embeddings': 'encoder.segment',
    'bert.embeddings.position_embeddings': 'encoder.position.table',
    'bert.embeddings.LayerNorm': 'encoder.norm', 'bert.pooler.dense': 'pooler.dense',
    'cls.predictions.transform.dense': 'head.transform', 'cls.predictions.transform.LayerNorm': 'head.norm',
    'cls.predictions': 'head', 'classifier': 'classifier', 'qa_outputs': 'classifier',
    'sequence_summary.summary': 'pooler.dense',         # of RoFormer
}
BERT_BLOCK = {                      # module in bert.encoder.layer.N -> in encoder.blocks.N
    'attention.self.query': 'attention.query', 'attention.self.key': 'attention.key',
    'attention.self.value': 'attention.value', 'attention.output.dense': 'attention.out',
    'attention.output.LayerNorm': 'attention_norm', 'intermediate.dense': 'expand',
    'output.dense': 'contract', 'output.LayerNorm': 'mlp_norm',
}


def hugging_face_names(n_layer):
    """{name in transformers: our name} of each module's weight and bias, even if it has only one."""
    rows = BERT_NAMES | {f'bert.encoder.layer.{i}.{theirs}': f'encoder.blocks.{i}.{ours}'
                         for i in range(n_layer) for theirs, ours in BERT_BLOCK.items()}
    return {theirs + kind: ours + kind for theirs, ours in rows.items() for kind in ('.weight', '.bias')}


# ---- export: the q, k and v of a BERT as matrices (D, D + 1), weight and bias, in float64 ----

def matrix(linear):
    bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return torch.cat((linear.weight, bias[:, None]), 1).double()


def fold_pairs(attention):
    """q S = x (Wq S) + b S in each head; as rows are outputs, S^T multiplies from the left."""
    pair = attention.pair.double()
    pair = pair if attention.pair_key is None else pair @ attention.pair_key.double().mT         # (H, K, K)
    return (pair.mT @ matrix(attention.query).unflatten(0, (len(pair), -1))).flatten(0, 1)


FOLD = {                            # attention -> matrices of q, k, v
    'original': lambda a: (matrix(a.query), matrix(a.key), matrix(a.value)),
    'symmetric': lambda a: (matrix(a.query), matrix(a.query), matrix(a.value)),
    'pairwise': lambda a: (fold_pairs(a), matrix(a.query), matrix(a.value)),
    'shared': lambda a: [matrix(a.shared) * d[:, None] for d in (a.query_diag, a.key_diag, a.value_diag)],
}
FAMILY = {'absolute': 'Bert', 'none': 'Bert', 'rope': 'RoFormer'}       # position -> transformers' classes
EXPORTS = {                         # our class -> theirs, without the family
    MaskedLM: 'ForMaskedLM', SequenceClassifier: 'ForSequenceClassification',
    MultipleChoice: 'ForMultipleChoice', SpanClassifier: 'ForQuestionAnswering',
}
EXPORTABLE = {                      # field -> (module that has it, allowed values, what transformers has)
    'attention': ('encoder', FOLD, 'softmax(q k^T / sqrt(K)) v with one matrix each for q, k and v'),
    'position': ('encoder', FAMILY, 'learned absolute or rotary positions'),
    'norm': ('encoder', ('layer',), 'LayerNorm'),
    'lm_head': ('head', ('bert',), 'a dense layer, GELU and LayerNorm before the tied matrix'),
    'pooling': ('pooler', ('cls',), 'tanh(Linear) of the final state of [CLS]'),
}


@torch.no_grad()
def to_transformers(model, **settings):
    """The equivalent model of transformers, a BERT or a RoFormer.  Raises UserError if there is none.

    Biases and positions that our model lacks are zero in it.  settings: more fields of its config
    """
    config = model.config
    for name, (part, allowed, what) in EXPORTABLE.items():
        given = getattr(config, name)
        if hasattr(model, part) and given not in allowed:
            raise UserError(f"{name}={given!r}: no equivalent in transformers' BERT and RoFormer, which have "
                            f'only {what}')
    name = FAMILY[config.position] + EXPORTS[type(model)]
    if name == 'RoFormerForSequenceClassification':
        raise UserError(f"position='rope': no equivalent in transformers' {name}, whose pooler has GELU in "
                        'place of tanh')
    sizes = {theirs: getattr(config, ours) for ours, theirs in BERT_SIZES.items()}
    if name == 'RoFormerForMultipleChoice':                     # for a pooler as BERT's
        sizes |= {'summary_type': 'first', 'summary_use_proj': True, 'summary_proj_to_labels': False,
                  'summary_activation': 'tanh'}
    if hasattr(model, 'classifier'):
        sizes['num_labels'] = model.classifier.out_features
    kind = getattr(transformers(), name)
    twin, weights = kind(kind.config_class(**sizes | settings)).eval(), model.state_dict()
    for i, block in enumerate(model.encoder.blocks):
        matrices = FOLD[config.attention](block.attention)
        for part, found in zip(('query', 'key', 'value'), matrices, strict=True):
            stem = f'encoder.blocks.{i}.attention.{part}'
            weights |= {f'{stem}.weight': found[:, :-1], f'{stem}.bias': found[:, -1]}
    names = hugging_face_names(config.n_layer)
    for name, parameter in twin.named_parameters():             # tied ones come once
        ours = names.get(name.replace('roformer.', 'bert.', 1))
        if ours in weights:
            parameter.copy_(weights[ours])
        elif name.endswith(('.bias', '.position_embeddings.weight')):
            parameter.zero_()
    return twin


def pretrained_encoder(name, parts=('encoder.',), kind='BERT'):
    """(EncoderConfig, {our name: tensor}) of a Hugging Face BERT with any head; name: hub name or folder.

    parts  prefixes of required tensors (our names): if one is missing, UserError "not a `kind`"
    """
    try:
        c = transformers().AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f'{name}: neither a checkpoint nor a BERT: {reason}') from None
    for key, wanted in BERT_CONFIG.items():
        given = getattr(c, key, wanted)
        if given != wanted:
            raise UserError(f'{name}: {key}={given}: only a BERT with {key}={wanted} can be loaded')
    bert, report = transformers().BertForPreTraining.from_pretrained(name, output_loading_info=True)
    config = EncoderConfig(**{ours: getattr(c, theirs) for ours, theirs in BERT_SIZES.items()})
    tensors, names, missing = bert.state_dict(), hugging_face_names(config.n_layer), report['missing_keys']
    for theirs, ours in names.items():
        if theirs in missing and ours.startswith(parts):
            raise UserError(f'{name}: has no {theirs}: not a {kind}')
    found = tensors.keys() - missing
    return config, {ours: tensors[theirs] for theirs, ours in names.items() if theirs in found}


def transformers():
    """The package, with its output silenced; needed only for Hugging Face weights."""
    try:
        import transformers as module
    except ImportError:
        raise UserError('Hugging Face weights need transformers: pip install transformers') from None
    module.utils.logging.disable_progress_bar()
    module.utils.logging.set_verbosity_error()
    return module


# ---- counts ----

def count_parameters(model):
    """Number of parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def training_flops(config, length, n_predicted, kind=MaskedLM, rows=1):
    """FLOPs of a training step: matrix products of forward and backward pass, without recomputation.

    A batch has `rows` sequences of `length` tokens; the head predicts n_predicted tokens of each.
    """
    with torch.device('meta'):
        model = kind(replace(config, block_size=length, recompute=False))
        ids, positions = (torch.zeros(rows, n, dtype=torch.long) for n in (length, n_predicted))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(ids, positions, positions).sum().backward()
    return counter.get_total_flops()


def model_config(settings, vocab_size):
    """EncoderConfig from vocab_size and a dict of knobs; keys that are not fields are ignored."""
    names = {field.name for field in fields(EncoderConfig)} - {'vocab_size'}
    return EncoderConfig(vocab_size, **{key: value for key, value in settings.items() if key in names})
