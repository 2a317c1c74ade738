"""BERT encoders with weight-sharing attention: each operator and position scheme is a class and a table line.

Sizes: B batch, T tokens, D n_embd, H n_head, K = D / H, L n_layer, F n_inner, V vocab_size, r pair_rank.
Rows are positions: the papers' x W is nn.Linear. All attention is bidirectional; padding keys get weight 0.

References
    Devlin et al. 2018    BERT, arXiv 1810.04805: the encoder, the masked-LM head and the initial values
    Courtois et al. 2024  Symmetric Dot-Product Attention, arXiv 2406.06366: `symmetric`, `pairwise`
    Kowsher et al. 2024   Does Self-Attention Need Separate Weights, arXiv 2412.00359: `shared`
    Tian et al. 2021      Shatter, arXiv 2108.13032: `none`
    Su et al. 2021        RoFormer, arXiv 2104.09864: `rope`
"""
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError


@dataclass
class EncoderConfig:
    """Shape and operators of an encoder; the defaults are BERT-base.  Raises UserError for the impossible."""
    vocab_size: int = 30522         # V
    block_size: int = 512           # longest row, in tokens
    n_layer: int = 12               # L
    n_head: int = 12                # H
    n_embd: int = 768               # D
    n_inner: int = 3072             # F, width of the MLP
    n_segment: int = 2
    attention: str = 'original'     # a row of ATTENTION
    position: str = 'absolute'      # a row of POSITION
    pair_rank: int = 0              # pairwise: rank of S = A B^T; 0 keeps S full
    pair_init: str = 'identity'     # pairwise: a row of PAIR_INIT
    dropout: float = 0.1            # after the embeddings and after each sublayer
    attention_dropout: float = 0.1  # of attention weights
    n_label: int = 2                # classes of a SequenceClassifier

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind and (kind, type(value)) != (float, int):
                raise UserError(f'{field.name}={value!r}: must be {kind.__name__}')
        choose('attention', self.attention, ATTENTION)
        choose('position', self.position, POSITION)
        choose('pair_init', self.pair_init, PAIR_INIT)
        for name in ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_embd', 'n_inner', 'n_segment',
                     'n_label'):
            if getattr(self, name) < 1:
                raise UserError(f'{name}={getattr(self, name)}: must be at least 1')
        for name in ('dropout', 'attention_dropout'):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f'{name}={getattr(self, name)}: must lie in [0, 1); 0.1 is usual')
        if self.n_embd % self.n_head:
            raise UserError(f'n_embd={self.n_embd}: must be a multiple of n_head={self.n_head}')
        if self.position == 'rope' and self.head_size % 2:
            raise UserError(f"position='rope': n_embd / n_head = {self.head_size} must be even")
        if self.pair_rank and self.attention != 'pairwise':
            raise UserError(f"pair_rank={self.pair_rank}: only attention='pairwise' has a rank; choose 0")
        if not 0 <= self.pair_rank <= self.head_size:
            raise UserError(f'pair_rank={self.pair_rank}: choose 0 (full) or 1 to n_embd / n_head = '
                            f'{self.head_size}')

    @property
    def head_size(self):
        return self.n_embd // self.n_head


def choose(key, name, table):
    """The row `name` of a table.  Raises UserError that lists the rows."""
    if name not in table:
        raise UserError(f'{key}={name!r}: choose one of {", ".join(table)}')
    return table[name]


# ---- shared by the operators ----

def split_heads(x, n_head):
    """(B, T, D) -> (B, H, T, K)"""
    return x.unflatten(-1, (n_head, -1)).transpose(1, 2)


def merge_heads(x):
    """(B, H, T, K) -> (B, T, D)"""
    return x.transpose(1, 2).flatten(2)


def attend(q, k, v, position, mask, dropout):
    """softmax(q k^T / sqrt(K)) v -> (B, T, D)

    q, k, v (B, H, T, K); mask None or (B, 1, 1, T) bool, False at padding; dropout of the weights
    """
    q, k = position.rotate(q, k)
    return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout))


# ---- operators: how q, k, v come from x.  forward: x (B, T, D) -> (B, T, D) ----

class OriginalAttention(nn.Module):
    """Separate queries, keys and values.  Vaswani et al. 2017; Courtois et al. 2024, eq. 1 and 2

        q = x Wq,  k = x Wk,  v = x Wv                     (B, H, T, K) each
        y = softmax(q k^T / sqrt(K)) v

    Parameters: 3 (D^2 + D), and D^2 + D for the output.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.attention_dropout
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, position, mask):
        q = split_heads(self.query(x), self.n_head)
        k = split_heads(self.key(x), self.n_head)
        v = split_heads(self.value(x), self.n_head)
        return self.out(attend(q, k, v, position, mask, self.dropout if self.training else 0.0))


class SymmetricAttention(nn.Module):
    """Keys are the queries, so that scores are symmetric.  Courtois et al. 2024, eq. 3

        q = k = x Wq,  v = x Wv
        y = softmax(q q^T / sqrt(K)) v

    Parameters: 2 (D^2 + D), and D^2 + D for the output.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.attention_dropout
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, position, mask):
        q = split_heads(self.query(x), self.n_head)
        v = split_heads(self.value(x), self.n_head)
        return self.out(attend(q, q, v, position, mask, self.dropout if self.training else 0.0))


class PairwiseAttention(nn.Module):
    """Shared queries and keys with learned pairwise factors S.  Courtois et al. 2024, eq. 6

        q = x Wq,  v = x Wv,  S (H, K, K), or A B^T with A and B (H, K, r) when pair_rank = r > 0
        y = softmax(q S q^T / sqrt(K)) v

    S multiplies the queries before `rope` turns them, so that scores depend on i - j. The paper gives no
    initial value of S: see PAIR_INIT.
    Parameters: 2 (D^2 + D) + H K^2, or 2 (D^2 + D) + 2 H K r; and D^2 + D for the output.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.attention_dropout
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)
        start, shape = PAIR_INIT[config.pair_init], (config.n_head, config.head_size)
        self.pair = nn.Parameter(start(*shape, config.pair_rank))                       # S, or A
        self.pair_key = nn.Parameter(start(*shape, config.pair_rank)) if config.pair_rank else None     # B

    def forward(self, x, position, mask):
        k = split_heads(self.query(x), self.n_head)
        q = k @ self.pair                                       # (B, H, T, K), or (B, H, T, r)
        if self.pair_key is not None:
            q = q @ self.pair_key.mT
        v = split_heads(self.value(x), self.n_head)
        return self.out(attend(q, k, v, position, mask, self.dropout if self.training else 0.0))


class SharedAttention(nn.Module):
    """One matrix for queries, keys and values, told apart by diagonals.  Kowsher et al. 2024, section 2.3

        s = x Ws + b,  q = s * d_q,  k = s * d_k,  v = s * d_v          d (D,) each, 1 at the start
        y = softmax(q k^T / sqrt(K)) v

    Parameters: D^2 + D + 3 D, and D^2 + D for the output.
    """

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.attention_dropout
        self.shared = nn.Linear(config.n_embd, config.n_embd)
        self.query_diag = nn.Parameter(torch.ones(config.n_embd))
        self.key_diag = nn.Parameter(torch.ones(config.n_embd))
        self.value_diag = nn.Parameter(torch.ones(config.n_embd))
        self.out = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, position, mask):
        s = self.shared(x)
        q = split_heads(s * self.query_diag.to(s.dtype), self.n_head)   # autocast leaves * alone
        k = split_heads(s * self.key_diag.to(s.dtype), self.n_head)
        v = split_heads(s * self.value_diag.to(s.dtype), self.n_head)
        return self.out(attend(q, k, v, position, mask, self.dropout if self.training else 0.0))


ATTENTION = {
    'original': OriginalAttention,
    'symmetric': SymmetricAttention,
    'pairwise': PairwiseAttention,
    'shared': SharedAttention,
}


# ---- initial values of S (H, K, K); for rank r > 0, of A and of B (H, K, r), so that A B^T is like S ----

def near_identity(n_head, size, rank, std=0.02):
    """S = I + N(0, 0.02): pairwise starts as symmetric.  A, B: S is near the projector on r dimensions.

    The default: it leaves the first plateau in most of the runs of results/tiny.md.
    """
    return torch.eye(size, rank or size) + std * torch.randn(n_head, size, rank or size)


def normal(n_head, size, rank, std=0.02):
    """Entries of S with deviation 0.02, as in BERT's matrices: attention starts uniform."""
    return torch.randn(n_head, size, rank or size) * ((std / rank ** 0.5) ** 0.5 if rank else std)


def fan_in(n_head, size, rank):
    """Entries of S with variance 1 / K, N(0, 1/K): q S is as long as q."""
    return normal(n_head, size, rank, std=size ** -0.5)


PAIR_INIT = {'identity': near_identity, 'fan_in': fan_in, 'normal': normal}


# ---- order: how positions enter.  embed: x (B, T, D) before the first norm; rotate: q, k (B, H, T, K) ----

class NoPosition(nn.Module):
    """No order: the encoder sees a set of tokens.  Tian et al. 2021, "No_Position".  Parameters: 0."""

    def __init__(self, config):
        super().__init__()

    def embed(self, x):
        return x

    def rotate(self, q, k):
        return q, k


class AbsolutePosition(NoPosition):
    """Learned vectors added to the embeddings.  Devlin et al. 2018.  Parameters: block_size D."""

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.block_size, config.n_embd)

    def embed(self, x):
        return x + self.table.weight[:x.size(1)]


class RotaryPosition(NoPosition):
    """Queries and keys rotated by angles that grow with position.  Su et al. 2021, eq. 34

        (q_2i, q_2i+1) at position m turns by m 10000^(-2i/K), so that q_m k_n depends on m - n alone

    Parameters: 0.
    """

    def __init__(self, config):
        super().__init__(config)
        rate = 10000.0 ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
        angle = torch.arange(config.block_size, dtype=torch.float64).outer(rate)         # (block_size, K / 2)
        self.register_buffer('cos', angle.cos().float(), persistent=False)
        self.register_buffer('sin', angle.sin().float(), persistent=False)

    def rotate(self, q, k):
        return self.turn(q), self.turn(k)

    def turn(self, x):
        cos, sin = self.cos[:x.size(-2)], self.sin[:x.size(-2)]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)


POSITION = {
    'absolute': AbsolutePosition,
    'none': NoPosition,
    'rope': RotaryPosition,
}


# ---- the encoder ----

class Block(nn.Module):
    """Post-LN block.  Devlin et al. 2018: x = LayerNorm(x + dropout(f(x))), f attention, then the MLP."""

    def __init__(self, config):
        super().__init__()
        self.attention = ATTENTION[config.attention](config)
        self.attention_norm = nn.LayerNorm(config.n_embd, eps=1e-12)
        self.expand = nn.Linear(config.n_embd, config.n_inner)
        self.contract = nn.Linear(config.n_inner, config.n_embd)
        self.mlp_norm = nn.LayerNorm(config.n_embd, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, position, mask):
        x = self.attention_norm(x + self.dropout(self.attention(x, position, mask)))
        return self.mlp_norm(x + self.dropout(self.contract(F.gelu(self.expand(x)))))


class Encoder(nn.Module):
    """Token, segment and position embeddings, then L blocks.  Devlin et al. 2018, post-LN."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.segment = nn.Embedding(config.n_segment, config.n_embd)
        self.position = POSITION[config.position](config)
        self.norm = nn.LayerNorm(config.n_embd, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.apply(init_weights)

    def forward(self, ids, segments=None, keep=None):
        """Hidden states (B, T, D).

        ids       (B, T) int64, T at most block_size
        segments  (B, T) int64 below n_segment; None: all 0
        keep      (B, T) bool or 0 and 1, true at real tokens; None: no padding
        """
        if ids.size(1) > self.config.block_size:
            raise ValueError(f'{ids.size(1)} tokens in a row, but block_size={self.config.block_size}')
        x = self.token(ids) + (self.segment.weight[0] if segments is None else self.segment(segments))
        x = self.dropout(self.norm(self.position.embed(x)))
        mask = None if keep is None else keep.bool()[:, None, None, :]      # (B, 1, 1, T)
        for block in self.blocks:
            x = block(x, self.position, mask)
        return x


def init_weights(module):
    """N(0, 0.02) for Linear and Embedding weights, biases 0; LayerNorm keeps 1 and 0.  Devlin et al. 2018."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# ---- heads ----

class MaskedLM(nn.Module):
    """Encoder and BERT's masked-LM head: Linear(D, D), GELU, LayerNorm, tied decoder, bias (V,)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.transform = nn.Linear(config.n_embd, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        init_weights(self.transform)

    def forward(self, ids, positions=None, targets=None, segments=None, keep=None):
        """Logits (B, T, V), or (B, k, V) at `positions`; with `targets` the losses (B, k), float32, nats.

        positions, targets  (B, k) int64; other arguments as Encoder.forward
        The head runs on the gathered positions alone: the loss of full logits at k / T of the cost.
        """
        x = self.encoder(ids, segments, keep)
        if positions is not None:
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.size(-1)))      # (B, k, D)
        x = self.norm(F.gelu(self.transform(x)))
        logits = F.linear(x, self.encoder.token.weight, self.bias)
        if targets is None:
            return logits
        return token_losses(logits, targets)

    @classmethod
    def from_pretrained(cls, name):
        """A Hugging Face BERT (hub name or local folder) as `original` + `absolute`, in eval mode."""
        c = transformers().AutoConfig.from_pretrained(name)
        for key, wanted in BERT_CONFIG.items():
            given = c.to_dict().get(key, wanted)
            if given != wanted:
                raise UserError(f'{name}: {key}={given}: only a BERT with {key}={wanted} can be loaded')
        source, report = transformers().BertForMaskedLM.from_pretrained(name, output_loading_info=True)
        model = cls(EncoderConfig(
            vocab_size=c.vocab_size, block_size=c.max_position_embeddings, n_layer=c.num_hidden_layers,
            n_head=c.num_attention_heads, n_embd=c.hidden_size, n_inner=c.intermediate_size,
            n_segment=c.type_vocab_size, dropout=c.hidden_dropout_prob,
            attention_dropout=c.attention_probs_dropout_prob))
        names, weights = hugging_face_names(model), source.state_dict()
        missing = set(report['missing_keys']).intersection(names.values())
        if missing:
            raise UserError(f'{name}: has no {min(missing)}: not a masked-LM model')
        model.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()})
        return model.eval()

    def save_pretrained(self, folder):
        """Write a folder that transformers.BertForMaskedLM loads.  Raises UserError where BERT differs."""
        c = self.config
        if (c.attention, c.position) != ('original', 'absolute'):
            raise UserError(f"attention='{c.attention}', position='{c.position}': transformers' BERT has no "
                            "such layer; only attention='original' with position='absolute' can be written")
        bert = transformers().BertConfig(
            vocab_size=c.vocab_size, max_position_embeddings=c.block_size, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, hidden_size=c.n_embd, intermediate_size=c.n_inner,
            type_vocab_size=c.n_segment, hidden_dropout_prob=c.dropout,
            attention_probs_dropout_prob=c.attention_dropout, layer_norm_eps=1e-12, hidden_act='gelu')
        target = transformers().BertForMaskedLM(bert)
        weights = self.state_dict()
        copied = {theirs: weights[ours] for ours, theirs in hugging_face_names(self).items()}
        tied = {'cls.predictions.decoder.weight': weights['encoder.token.weight'],
                'cls.predictions.decoder.bias': weights['bias']}
        target.load_state_dict({**copied, **tied})
        target.save_pretrained(folder)


def token_losses(logits, targets):
    """Cross-entropy of each target in float32.  logits (B, k, V), targets (B, k) int64 -> (B, k)"""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction='none')
    return losses.view_as(targets)


def pool(hidden, pooler):
    """BERT's pooler: tanh of a Linear of the state of [CLS].  hidden (B, T, D) -> (B, D)"""
    return pooler(hidden[:, 0]).tanh()


class SequenceClassifier(nn.Module):
    """[CLS] state, Linear(D, D), tanh, dropout, Linear(D, n_label).  Devlin et al. 2018, section 4.1"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.pooler = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.n_embd, config.n_label)
        init_weights(self.pooler)
        init_weights(self.classifier)

    def forward(self, ids, segments=None, keep=None):
        """Logits (B, n_label); arguments as Encoder.forward."""
        return self.classifier(self.dropout(pool(self.encoder(ids, segments, keep), self.pooler)))


class SpanClassifier(nn.Module):
    """Start and end of an answer: Linear(D, 2) on every state.  Devlin et al. 2018, section 4.2"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.classifier = nn.Linear(config.n_embd, 2)
        init_weights(self.classifier)

    def forward(self, ids, segments=None, keep=None):
        """Logits of start and of end, (B, T) each; arguments as Encoder.forward."""
        return self.classifier(self.encoder(ids, segments, keep)).unbind(-1)


class MultipleChoice(nn.Module):
    """One of C texts: BERT's pooler, dropout and Linear(D, 1) on each.  Devlin et al. 2018, section 4.4"""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.pooler = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.n_embd, 1)
        init_weights(self.pooler)
        init_weights(self.classifier)

    def forward(self, ids, segments=None, keep=None):
        """Logits (B, C); ids, segments, keep (B, C, T), else as Encoder.forward."""
        rows = [None if x is None else x.flatten(0, 1) for x in (ids, segments, keep)]
        pooled = self.dropout(pool(self.encoder(*rows), self.pooler))
        return self.classifier(pooled).view(ids.shape[:2])


# ---- Hugging Face ----

BERT_CONFIG = {                     # what a config.json must hold where it holds the key
    'model_type': 'bert', 'hidden_act': 'gelu', 'layer_norm_eps': 1e-12, 'tie_word_embeddings': True,
    'is_decoder': False, 'position_embedding_type': 'absolute',
}
BERT_LAYER = {                      # module of a Block -> module of transformers' BertLayer
    'attention.query': 'attention.self.query',
    'attention.key': 'attention.self.key',
    'attention.value': 'attention.self.value',
    'attention.out': 'attention.output.dense',
    'attention_norm': 'attention.output.LayerNorm',
    'expand': 'intermediate.dense',
    'contract': 'output.dense',
    'mlp_norm': 'output.LayerNorm',
}
BERT_MODEL = {                      # tensors outside the blocks
    'encoder.token.weight': 'bert.embeddings.word_embeddings.weight',
    'encoder.segment.weight': 'bert.embeddings.token_type_embeddings.weight',
    'encoder.position.table.weight': 'bert.embeddings.position_embeddings.weight',
    'encoder.norm.weight': 'bert.embeddings.LayerNorm.weight',
    'encoder.norm.bias': 'bert.embeddings.LayerNorm.bias',
    'transform.weight': 'cls.predictions.transform.dense.weight',
    'transform.bias': 'cls.predictions.transform.dense.bias',
    'norm.weight': 'cls.predictions.transform.LayerNorm.weight',
    'norm.bias': 'cls.predictions.transform.LayerNorm.bias',
    'bias': 'cls.predictions.bias',
}


def hugging_face_names(model):
    """{name in our state_dict: name in transformers' BertForMaskedLM}, for `original` + `absolute`."""
    names = dict(BERT_MODEL)
    for layer in range(model.config.n_layer):
        for ours, theirs in BERT_LAYER.items():
            for kind in ('weight', 'bias'):
                names[f'encoder.blocks.{layer}.{ours}.{kind}'] = f'bert.encoder.layer.{layer}.{theirs}.{kind}'
    return names


def transformers():
    """The package, silent; only Hugging Face's weights need it."""
    try:
        import transformers as module
    except ImportError:
        raise UserError('Hugging Face weights need transformers: pip install transformers') from None
    module.utils.logging.disable_progress_bar()
    return module


# ---- counts ----

def count_parameters(model):
    """Number of parameters; a tied matrix counts once."""
    return sum(p.numel() for p in model.parameters())


def training_flops(config, length, n_predicted):
    """Floating-point operations of a training step on one row: 6 a matrix weight and token, both passes.

    length       tokens in the row
    n_predicted  positions that reach the head
    Attention adds 12 L T^2 D (q k^T and the product with v); embeddings, norms and biases are left out.
    """
    with torch.device('meta'):
        block = Block(config)
    matrices = config.n_layer * sum(p.numel() for p in block.parameters() if p.dim() > 1)
    head = config.n_embd * (config.n_embd + config.vocab_size)
    return 6 * matrices * length + 12 * config.n_layer * length ** 2 * config.n_embd + 6 * head * n_predicted


def model_config(settings, vocab_size):
    """EncoderConfig from a dict of knobs (others are ignored) and the tokenizer's vocabulary."""
    names = {field.name for field in fields(EncoderConfig)} - {'vocab_size'}
    return EncoderConfig(vocab_size, **{key: value for key, value in settings.items() if key in names})
