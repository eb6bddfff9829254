"""The sizes and parameters of a model, which `hf_config.py` reads from config.json. Knows no tensors or files."""

from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import InvalidArgument
from .encoder_shape import EncoderShape
from .recurrence import LayerState, RecurrenceSpec, SharedBlocksSpec

DTYPES = ("bfloat16", "float16", "float32")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
NO_ROPE = "none"
"""The kind of a `RopeSpec` that rotates nothing. No config.json names it."""

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""The names of layers that attend in config.json's `layer_types`."""

_TANH_GELUS = ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(_TANH_GELUS, "gelu_tanh"),
    "quick_gelu": "quick_gelu",
}
"""config.json's name of an activation function -> the function, by our name."""


class CheckpointError(InvalidArgument):
    """A checkpoint that cannot be served: the message says what, where, and what is supported."""


class UnsupportedVariant(CheckpointError):
    """config.json asks for a variant of an architecture that our own file for it does not compute."""


class RopeSpec(NamedTuple):
    """Rotary position embedding, with the fields of transformers' `rope_parameters`."""

    kind: str = "default"
    """One of ROPE_TYPES, or NO_ROPE."""
    theta: float = 10000.0
    factor: float = 1.0
    """All scaled kinds have it, and `original_max_position`."""
    low_freq_factor: float = 1.0
    """llama3 has this and the next."""
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial_rotary_factor: float = 1.0
    """The share of each head that is rotated, its first part; of proportional the first of all pairs (i, i + half)."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""
    beta_fast: float = 32.0
    """yarn has this and the next two."""
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope has this and the next."""
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()
    """How many of a head's rotated pairs go by time, by height and by width, where places of images have all three
    (arXiv 2409.12191); empty: a position is one number."""
    interleaved: bool = False
    """Whether pairs take turns: (time, height, width), again and again, while there are some of each; else those of a
    section are neighbours."""

    def rotary_dim(self, head_dim: int) -> int:
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)


class KeyValueShape(NamedTuple):
    """What a layer keeps of each token: a key and a value for each key/value head."""

    heads: int
    """Key/value heads."""
    key_size: int
    """Numbers of a key, and so of a query."""
    value_size: int
    """Numbers of a value, and so of what each query head gets."""
    values_in_keys: bool = False
    """A value is the first numbers of its key, and takes no memory (arXiv 2405.04434)."""

    @property
    def numbers(self) -> int:
        """Numbers that are kept of a token."""
        return self.heads * (self.key_size + (0 if self.values_in_keys else self.value_size))


class LayerAttention(NamedTuple):
    """The attention of one layer; the default is causal over everything before."""

    window: int | None = None
    """A token attends to so many of the last tokens, itself included."""
    scale: float | None = None
    """Multiplies scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """Caps scaled scores: softcap * tanh(score / softcap)."""
    sinks: bool = False
    """Whether each query head has a learned score more, of a token with value 0 that every token attends to."""
    kept: KeyValueShape | None = None
    """What the layer keeps of a token; None: as many heads of the model's usual size as the others."""
    both_ways: bool = False
    """Whether places of an image that see one another (`EmbeddedSpan.bidirectional`) do so here."""
    distances: int = 0
    """How many distances have learned additions to scores, the last one with all beyond; such a layer has no sinks."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts."""

    count: int
    per_token: int
    """Experts that each token goes to."""
    intermediate_size: int
    normalised: bool
    """Whether the weights of a token's experts are normalised to sum 1."""
    sparse_layers: tuple[bool, ...]
    """Whether each layer is a mixture; the others are dense."""
    sigmoid: bool = False
    """Whether the weights are sigmoids of the router's scores, and not a softmax."""
    scale: float = 1.0
    """What the weights are multiplied by."""
    biased: bool = False
    """Whether a bias is added to the weights where experts are chosen, and there alone (arXiv 2408.15664)."""
    shared_size: int = 0
    """The width of an expert that every token goes through; 0: there is none."""
    latent_size: int = 0
    """What experts read and write is projected to so many features, and back; 0: it is the hidden states."""
    float32_router: bool = False
    """Whether the router's matrix is kept in float32."""
    least_sum: float = 1e-6
    """Added to the sum by which sigmoids are divided."""
    groups: int = 1
    """Groups of neighbouring experts, of the best of which a token's are chosen (arXiv 2405.04434)."""
    chosen_groups: int = 1
    """Groups that a token's experts may be of."""
    group_judges: int = 2
    """How many of a group's best experts it is judged by, with their sum."""


class LatentSpec(NamedTuple):
    """Attention over latents (MLA, arXiv 2405.04434): a token keeps the latent that its heads' keys and values are made
    of, and the one rotated part that their keys share."""

    rank: int
    """Numbers of a latent."""
    query_rank: int
    """Numbers of what queries are made of; 0: they are made of the hidden states."""
    plain_size: int
    """Numbers of a head's query and key that are not rotated."""
    rotated_size: int
    """Numbers of them that are."""
    value_size: int
    """Numbers of a head's value."""
    adjacent_pairs: bool
    """Whether numbers that are rotated against each other stand side by side, and not half of all apart."""

    @property
    def kept(self) -> KeyValueShape:
        """A key is a latent with the rotated part behind it, a value the latent; all heads have the same."""
        return KeyValueShape(1, self.rank + self.rotated_size, self.rank, values_in_keys=True)

    def weights(self, hidden: int, heads: int) -> int:
        """Numbers in the matrices of one layer."""
        queries = heads * (self.plain_size + self.rotated_size)
        into = hidden * queries if not self.query_rank else self.query_rank * (hidden + queries)
        expanding = self.rank * heads * (self.plain_size + self.value_size)
        return into + hidden * (self.rank + self.rotated_size) + expanding + hidden * heads * self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder's outer sizes, all that an executor needs to know."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    attention: tuple[LayerAttention | None, ...]
    """The attention of each layer; None: it has none, and keeps no keys and values."""
    states: tuple[LayerState | None, ...] = ()
    """What each layer keeps of a sequence beside them, if anything; empty: no layer keeps a state."""
    cache_owners: tuple[int, ...] = ()
    """The layer whose keys and values each layer attends to: itself or an earlier one like it, and then it has none of
    its own. Empty: every layer has its own."""
    attends_itself: bool = False
    """Whether the decoder attends by itself, and has our cache of keys and values as a store alone."""
    encoder: EncoderShape | None = None
    """What every layer attends to beside its tokens; None: to nothing."""

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def shifts_positions(self) -> bool:
        """Whether places of images have positions in three dimensions, and what follows goes on behind the largest."""
        return False

    @property
    def image_token(self) -> int | None:
        """The token whose embeddings for layers places of images have; None: a token has no such embeddings."""
        return None

    def cache_owner(self, layer: int) -> int:
        return self.cache_owners[layer] if self.cache_owners else layer

    def owns_cache(self, layer: int) -> bool:
        return self.attention[layer] is not None and self.cache_owner(layer) == layer

    @property
    def cached_attention(self) -> tuple[LayerAttention, ...]:
        """The attention of the layers that have keys and values of their own: the cache counts these alone."""
        attending = ((layer, kind) for layer, kind in enumerate(self.attention) if kind is not None)
        return tuple(kind for layer, kind in attending if self.owns_cache(layer))

    def cache_index(self, layer: int, first: int) -> int:
        """The number of the cache that the layer attends to, on a rank whose layers begin with `first`."""
        return sum(self.owns_cache(earlier) for earlier in range(first, self.cache_owner(layer)))

    def kept(self, kind: LayerAttention) -> KeyValueShape:
        """What such a layer keeps of a token."""
        return kind.kept or KeyValueShape(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def token_numbers(self) -> int:
        """Numbers of keys and values that all layers keep of a token."""
        return sum(self.kept(kind).numbers for kind in self.cached_attention)

    @property
    def attended_numbers(self) -> int:
        """Multiplications of a query with one key and its value, in all layers and heads."""
        shapes = [self.kept(kind) for kind in self.attention if kind is not None]
        return self.heads * sum(shape.key_size + shape.value_size for shape in shapes)

    def state_index(self, layer: int, first: int) -> int:
        """The number of the layer's state, on a rank whose layers begin with `first`."""
        return sum(state is not None for state in self.states[first:layer])

    def has_window(self, layer: int) -> bool:
        """Whether the layer attends to the last tokens alone."""
        kind = self.attention[layer]
        return kind is not None and kind.window is not None


class Multipliers(NamedTuple):
    """Numbers by which Granite and Falcon-H1 (arXiv 2507.22448) multiply embeddings and what parts of a layer add to
    the residual stream, and divide logits."""

    embedding: float = 1.0
    attention: float = 1.0
    mamba: float = 1.0
    mlp_gate: float = 1.0
    """Multiplies the gates of an MLP before their activation."""
    mlp: float = 1.0
    logits_divisor: float = 1.0


NO_MULTIPLIERS = Multipliers()


class AltUpSpec(NamedTuple):
    """The streams of hidden states that Gemma 3n's layers have, and what else they have of their own."""

    streams: int
    active: int
    """The number of the stream that layers compute with."""
    scaled: bool
    """Whether that stream is scaled before inputs of a layer's own are gated by it."""
    laurel_rank: int
    """Numbers between the two matrices beside attention."""
    sparsity: tuple[float, ...]
    """The share of an MLP's gates that each layer takes for nothing."""


class GemmaSpec(NamedTuple):
    """What Gemma 3n and 4 have beside the parts that other decoders have, too."""

    per_layer_size: int
    """Numbers of the embedding that a token has for each layer; 0: it has none."""
    per_layer_vocab: int
    """Tokens that have such embeddings."""
    keys_as_values: bool = False
    """Whether layers that see all tokens make values of the projection of their keys."""
    altup: AltUpSpec | None = None
    pad_token: int = 0
    """Its embeddings for layers are those at places of images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(DecoderShape):
    """All numbers of a decoder. `dtype`: that of the stored weights, one of DTYPES. `local_rope`: of the layers with a
    window, which may have a base of their own. `activation`: a value of ACTIVATIONS. `logit_softcap` caps the logits as
    `LayerAttention.softcap` the scores. `recurrence`: what the layers are like that keep a state, if some do."""

    architecture: str
    norm_eps: float
    rope: RopeSpec
    local_rope: RopeSpec
    max_position: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str
    logit_softcap: float | None
    experts: ExpertsSpec | None
    dtype: str
    recurrence: RecurrenceSpec | None = None
    gated_attention: bool = False
    """Whether heads of attention have gates, as wide as their queries."""
    multipliers: Multipliers = NO_MULTIPLIERS
    mlp_sizes: tuple[int, ...] = ()
    """The width of each layer's MLP; empty: `intermediate_size`, as wide as all are."""
    gemma: GemmaSpec | None = None
    feeds: tuple[bool, ...] = ()
    """Whether each layer has an MLP or experts; empty: all have."""
    mlp_matrices: int = 3
    """The matrices of an MLP and of an expert; two where they have no gate."""
    attention_out_bias: bool = False
    """Whether the matrix behind attention has a bias, where it need not be as those before it (`attention_bias`)."""
    normed_heads: bool = False
    """Whether queries and keys are normalised, where an architecture leaves it open."""
    rotates: tuple[bool, ...] = ()
    """Whether each layer rotates queries and keys; empty: all do."""
    query_growth: float = 0.0
    """Queries are multiplied by 1 + this * ln(1 + floor(position / the rope's original_max_position))."""
    latent: LatentSpec | None = None
    """What attention over latents is like, where layers have it."""
    most_dense_tokens: int = 0
    """Up to so many tokens an indexer chooses all of them; longer sequences are not computed here. 0: no indexer."""
    shared_blocks: SharedBlocksSpec | None = None
    """The blocks that layers which attend share; None: each has its own."""
    deepstack: int = 0
    """How many of the first layers add rows of their own at the places of images (arXiv 2406.04334)."""
    distance_buckets: int = 0
    """Of the distances of `LayerAttention.distances`: those of one bucket share an addition."""

    @property
    def shifts_positions(self) -> bool:
        return bool(self.rope.sections)

    @property
    def image_token(self) -> int | None:
        return self.gemma.pad_token if self.gemma is not None and self.gemma.per_layer_size else None

    def layer_rope(self, layer: int) -> RopeSpec:
        """The rotary embedding of a layer."""
        if self.rotates and not self.rotates[layer]:
            return RopeSpec(NO_ROPE)
        return self.local_rope if self.has_window(layer) else self.rope

    def mlp_size(self, layer: int) -> int:
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    @property
    def feed_forward_weights(self) -> int:
        """Numbers in the matrices of MLPs, and of what layers make of embeddings of their own, that a token goes
        through: of a mixture, those of the experts it is routed to."""
        of_size = self.mlp_matrices * self.hidden_size
        weights = [of_size * self.mlp_size(layer) for layer in range(self.layers)]
        if self.experts is not None:
            mixed = zip(weights, self.experts.sparse_layers, strict=True)
            weights = [self._expert_weights(self.experts) if sparse else dense for dense, sparse in mixed]
        if self.feeds:
            weights = [own * feeds for own, feeds in zip(weights, self.feeds, strict=True)]
        inputs, altup = (0, None) if self.gemma is None else (self.gemma.per_layer_size, self.gemma.altup)
        total = sum(weights) + 3 * self.hidden_size * self.layers * inputs
        if altup is not None:
            low_rank = self.layers * 2 * altup.laurel_rank
            total += self.hidden_size * (low_rank + 2 * (altup.streams - 1) * self.hidden_size)
        return total

    def _expert_weights(self, experts: ExpertsSpec) -> int:
        chosen = (experts.latent_size or self.hidden_size) * experts.intermediate_size * experts.per_token
        own = self.mlp_matrices * (chosen + self.hidden_size * experts.shared_size)
        return own + 2 * self.hidden_size * experts.latent_size

    @property
    def mixer_weights(self) -> int:
        """Numbers in the matrices of attention and recurrences, of all layers."""
        if self.latent is not None:
            return self.layers * self.latent.weights(self.hidden_size, self.heads)
        weights = 0
        for layer, kind in enumerate(self.attention):
            if kind is not None:
                shape = self.kept(kind)
                numbers = self.heads * (shape.key_size * (1 + self.gated_attention) + shape.value_size)
                if self.owns_cache(layer):
                    numbers += shape.heads * (shape.key_size + shape.value_size)
                weights += self.hidden_size * numbers
        if self.shared_blocks is not None:
            packed = (self.heads + 2 * self.kv_heads) * self.head_dim
            own = self.shared_blocks.weights_of_use(self.hidden_size, packed, self.intermediate_size)
            weights += own * len(self.cached_attention)
        if self.recurrence is not None:
            recurrent = sum(state is not None for state in self.states)
            weights += recurrent * self.recurrence.weights(self.hidden_size)
        return weights
