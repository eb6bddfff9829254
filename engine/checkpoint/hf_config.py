"""Reads a parsed config.json of any supported architecture into a `ModelSpec`. Knows nothing of tensors or files."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ...core.errors import shorten
from .model_spec import (
    ACTIVATIONS,
    DTYPES,
    LAYER_TYPES,
    ROPE_TYPES,
    CheckpointError,
    ExpertsSpec,
    LayerAttention,
    ModelSpec,
    RopeSpec,
    UnsupportedVariant,
)
from .quantization_config import read_quantization


def read_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    """The spec of a parsed config.json; `where` is its path, for errors.

    Reads both the fields transformers 5 writes (`rope_parameters`, `dtype`) and the older ones (`rope_scaling`,
    `rope_theta`, `torch_dtype`).

    Raises:
        CheckpointError: a field is missing or has a value that is not supported.
        UnsupportedVariant: it asks for something that none of our own files computes.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointError(f"{where}: architectures must name one class, got {names!r}")
    architecture = str(names[0])
    defaults = _ARCHITECTURES.get(architecture, _ArchitectureDefaults())
    fields = _Fields({**defaults.absent, **config}, where, defaults)
    try:
        if config.get("use_bidirectional_attention"):
            raise fields.error("use_bidirectional_attention is not supported; only causal attention is")
        return _spec(architecture, fields)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise fields.error(f"a field has a value of the wrong kind: {error}") from error


def _spec(architecture: str, fields: "_Fields") -> ModelSpec:
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    head_dim = fields.number("head_dim", hidden // heads, _MOST_PARTS)
    kv_heads = fields.number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    rope, longest = fields.rope("full_attention", head_dim), fields.number("max_position_embeddings", 2048)
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        attention=fields.attention(),
        norm_eps=fields.real("rms_norm_eps") or 1e-6,
        rope=rope,
        local_rope=fields.rope("sliding_attention", head_dim),
        # Yarn's recipes often leave max_position_embeddings at the length before scaling.
        max_position=max(longest, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else longest,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        activation=fields.activation(),
        logit_softcap=fields.real("final_logit_softcapping"),
        experts=fields.experts(),
        dtype=fields.dtype(),
    )


_MOST_PARTS = 1 << 16
"""Layers, experts of a layer, and numbers of a head: beyond, a slip of the pen would take all memory."""

_MOST_REAL = 1e30
"""Beyond, squares and quotients of a field are no numbers any more."""

SlidingRule: TypeAlias = Callable[[Mapping[str, Any], int], bool]
"""(config, layer) -> whether the layer has the sliding window, if the config has one."""


class _ArchitectureDefaults(NamedTuple):
    """The meaning of whatever an architecture's config.json leaves out. `slides`: the rule for its sliding window,
    unless it `reads_layer_types` and has them. `absent`: values of fields that are not there.
    `partial_rotary`: only a part of each head may be rotated. `rope_types`: its own names of rope types -> ours."""

    slides: SlidingRule = lambda config, layer: False
    absent: Mapping[str, Any] = {}
    reads_layer_types: bool = False
    partial_rotary: bool = False
    rope_types: Mapping[str, str] = {}


class _Fields(NamedTuple):
    """The fields of config.json, checked while they are read."""

    config: Mapping[str, Any]
    where: str
    defaults: _ArchitectureDefaults

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def unknown(self, message: str) -> UnsupportedVariant:
        return UnsupportedVariant(f"{self.where}: {message}")

    def number(self, name: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.error(f"{name} must be a positive whole number, got {shorten(repr(value))}")
        if value > most:
            raise self.error(f"{name} {shorten(repr(value))} is more than {most}, and no model's")
        return value

    @property
    def layers(self) -> range:
        return range(self.number("num_hidden_layers", most=_MOST_PARTS))

    def real(self, name: str) -> float | None:
        """A positive number, or None where the field is absent or null."""
        value = self.config.get(name)
        if value is None:
            return None
        return self.positive(name, value)

    def positive(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < _MOST_REAL:
            raise self.error(f"{name} must be a positive number, got {shorten(repr(value))}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name, default)
        if value not in (True, False, None):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return bool(value)

    def dtype(self) -> str:
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise self.error(f"dtype {name} is not supported; supported: {', '.join(DTYPES)}")
        # What surrounds quantised matrices is made what kernels compute in.
        return name if read_quantization(self.config, self.where) is None else "bfloat16"

    def activation(self) -> str:
        name = str(self.config.get("hidden_activation") or self.config.get("hidden_act") or "silu")
        if name not in ACTIVATIONS:
            raise self.unknown(f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def attention(self) -> tuple[LayerAttention, ...]:
        scalar = self.real("query_pre_attn_scalar")
        full = LayerAttention(None, scalar and scalar**-0.5, self.real("attn_logit_softcapping"))
        layers, types = self.layers, self.config.get("layer_types")
        if types and len(types) != len(layers):
            raise self.error(f"layer_types must have one for each of {len(layers)} layers, got {types}")
        if types and not LAYER_TYPES.issuperset(types):
            raise self.unknown(f"layer_types must say of every layer {' or '.join(sorted(LAYER_TYPES))}, got {types}")
        if self.config.get("sliding_window") is None:
            return (full,) * len(layers)
        sliding = full._replace(window=self.number("sliding_window"))
        if types and self.defaults.reads_layer_types:
            return tuple(sliding if each == "sliding_attention" else full for each in types)
        return tuple(sliding if self.defaults.slides(self.config, layer) else full for layer in layers)

    def rope(self, layer_type: str, head_dim: int) -> RopeSpec:
        """The rotary embedding of layers of this type, where types differ."""
        values = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        theta = self.config.get("rope_theta")
        if "full_attention" in values:
            values = values.get(layer_type) or {}
        elif layer_type == "sliding_attention" and "rope_local_base_freq" in self.config:
            values, theta = {}, self.config["rope_local_base_freq"]
        theta = theta if values.get("rope_theta") is None else values["rope_theta"]
        rope = self._rope(values, 10000.0 if theta is None else self.positive("rope_theta", theta), head_dim)
        self.positive("attention_factor", rope.attention_factor)
        pairs, odd = divmod(rope.rotary_dim(head_dim), 2)
        if odd:
            raise self.error(f"heads of {head_dim} numbers, of which {2 * pairs + 1} are to be turned in pairs")
        for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            if rope.kind == "longrope" and len(factors) != pairs:
                raise self.error(f"{name} of rope type longrope must have {pairs} numbers, got {len(factors)}")
        return rope

    def _rope(self, values: Mapping[str, Any], theta: float, head_dim: int) -> RopeSpec:
        kind = str(values.get("rope_type") or values.get("type") or "default")
        kind = self.defaults.rope_types.get(kind, kind)
        if kind not in ROPE_TYPES:
            raise self.unknown(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        part = values.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        part = 1.0 if part is None else self.positive("partial_rotary_factor", part)
        rotated = int(head_dim * part)
        if part != 1.0 and not (self.defaults.partial_rotary and 0 < rotated <= head_dim and rotated % 2 == 0):
            raise self.unknown(f"partial_rotary_factor {part} of heads of {head_dim} is not supported here")
        longest = self.config.get("max_position_embeddings")
        original = self.config.get("original_max_position_embeddings")
        original = original or values.get("original_max_position_embeddings") or longest or 8192
        original = int(self.positive("original_max_position_embeddings", original))
        scaled_by_length = kind in ("yarn", "longrope")
        usual = int(longest or original) / original if scaled_by_length else 1.0
        factor = self.positive("factor", usual if values.get("factor") is None else values["factor"])
        given: dict[str, Any] = {name: self.positive(name, values[name]) for name in _ROPE_NUMBERS if values.get(name)}
        for name in _ROPE_LISTS:
            if values.get(name):
                given[name] = tuple(self.positive(name, value) for value in values[name][:_MOST_PARTS])
        return RopeSpec(
            kind,
            theta,
            factor,
            original_max_position=original,
            partial_rotary_factor=part,
            attention_factor=_attention_factor(kind, values, factor, original),
            truncate=bool(values.get("truncate", True)),
            **given,
        )

    def experts(self) -> ExpertsSpec | None:
        if "num_experts_per_tok" not in self.config:
            return None
        name = "num_experts" if "num_experts" in self.config else "num_local_experts"
        count = self.number(name, most=_MOST_PARTS)
        chosen, every = self.number("num_experts_per_tok"), self.number("decoder_sparse_step", 1)
        if chosen > count:
            raise self.error(f"num_experts_per_tok is {chosen}, but there are {count} experts")
        dense = self.config.get("mlp_only_layers") or []
        return ExpertsSpec(
            count,
            chosen,
            self.number("moe_intermediate_size", self.number("intermediate_size")),
            self.flag("norm_topk_prob", True),
            tuple(layer not in dense and (layer + 1) % every == 0 for layer in self.layers),
        )


def _attention_factor(kind: str, values: Mapping[str, Any], factor: float, original: int) -> float:
    """The factor of cosines and sines, by the papers (arXiv 2309.00071, 2402.13753) where config.json leaves it out."""
    given, mscale, all_dim = (values.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if kind not in ("yarn", "longrope") or (given is None and factor <= 1):
        return 1.0
    if given is not None:
        return float(given)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    above, below = (float(mscale), float(all_dim)) if mscale and all_dim else (1.0, 0.0)
    return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)


_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_ROPE_LISTS = ("short_factor", "long_factor")


def _always(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _if_used(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config.get("use_sliding_window"))


def _qwen(config: Mapping[str, Any], layer: int) -> bool:
    return _if_used(config, layer) and layer >= int(config.get("max_window_layers", 28))


def _gemma2(config: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _gemma3(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN2 = _ArchitectureDefaults(
    _qwen,
    {"sliding_window": 4096},
    reads_layer_types=True,
    # The three positions that mrope gives a token are one and the same where there are no images.
    rope_types={"mrope": "default"},
)
_ARCHITECTURES: dict[str, _ArchitectureDefaults] = {
    "MistralForCausalLM": _ArchitectureDefaults(_always, {"sliding_window": 4096}),
    "MiMoForCausalLM": _QWEN2,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN2._replace(absent={"sliding_window": 4096, "head_dim": 128}),
    "Qwen3MoeForCausalLM": _ArchitectureDefaults(_if_used, {"sliding_window": 4096, "norm_topk_prob": False}),
    "MixtralForCausalLM": _ArchitectureDefaults(_always, {"rms_norm_eps": 1e-5}),
    "Phi3ForCausalLM": _ArchitectureDefaults(
        _always,
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        partial_rotary=True,
        rope_types={"su": "longrope", "yarn": "longrope"},
    ),
    "Gemma2ForCausalLM": _ArchitectureDefaults(
        _gemma2,
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads_layer_types=True,
    ),
    "Gemma3ForCausalLM": _ArchitectureDefaults(
        _gemma3,
        _GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072},
        reads_layer_types=True,
    ),
}
"""Any other architecture has Llama's defaults: no layer has a window."""
