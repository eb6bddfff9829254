"""The fields of a parsed config.json, checked while they are read, and what an architecture means by those that it
leaves out. Knows nothing of tensors or files."""

import math
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ...core.errors import shorten
from .encoder_shape import EncoderShape
from .model_spec import (
    ACTIVATIONS,
    DTYPES,
    LAYER_TYPES,
    ROPE_TYPES,
    CheckpointError,
    ExpertsSpec,
    GemmaSpec,
    LatentSpec,
    LayerAttention,
    Multipliers,
    RopeSpec,
    UnsupportedVariant,
)
from .quantization_config import read_quantization
from .recurrence import LayerState, RecurrenceSpec, SharedBlocksSpec

MOST_PARTS = 1 << 16
"""Layers, experts of a layer, and numbers of a head: beyond, a slip of the pen would take all memory."""

MOST_REAL = 1e30
"""Beyond, squares and quotients of a field are no numbers any more."""

_Kind = TypeVar("_Kind")

SlidingRule: TypeAlias = Callable[[Mapping[str, Any], int], bool]
"""(config, layer) -> whether the layer has the sliding window, if the config has one."""


class HybridLayers(NamedTuple):
    """Which layers attend and which keep the state of a `recurrence`; one may do both, or neither."""

    attends: tuple[bool, ...]
    recurs: tuple[bool, ...]
    recurrence: RecurrenceSpec
    gated: bool = False
    """Whether heads of attention have gates, as wide as their queries."""
    feeds: tuple[bool, ...] = ()
    """Whether each layer has an MLP or experts; empty: all have."""
    shared: SharedBlocksSpec | None = None
    """The blocks that those which attend share; None: each has its own."""

    @property
    def states(self) -> tuple[LayerState | None, ...]:
        return tuple(self.recurrence.state if recurs else None for recurs in self.recurs)


class UnequalLayers(NamedTuple):
    """The layers of a decoder that differ in what they keep of a token, and in the width of their MLP."""

    attention: tuple[LayerAttention, ...]
    cache_owners: tuple[int, ...]
    mlp_sizes: tuple[int, ...]
    full_head_dim: int
    """Numbers of a head of layers that see all tokens."""
    gemma: GemmaSpec


class ArchitectureDefaults(NamedTuple):
    """What the config.json of an architecture means where it says nothing, or says it in its own way."""

    slides: SlidingRule = lambda config, layer: False
    """The rule for its sliding window, unless it `reads_layer_types` and has them."""
    absent: Mapping[str, Any] = {}
    """Values of fields that are not there."""
    reads_layer_types: bool = False
    partial_rotary: bool = False
    """Whether only a part of each head may be rotated."""
    rope_types: Mapping[str, str] = {}
    """Its own names of rope types -> ours."""
    hybrid: "Callable[[ConfigFields], HybridLayers] | None" = None
    """Reads what its layers are like, where not all attend."""
    unequal: "Callable[[ConfigFields], UnequalLayers] | None" = None
    """Reads how its layers attend, where they do so in ways of their own."""
    latent: "Callable[[ConfigFields], LatentSpec] | None" = None
    """Reads its latents, where layers attend over some."""
    translate: "Callable[[ConfigFields], Mapping[str, Any]]" = lambda fields: fields.config
    """Its config.json in the fields that are read here."""
    only: Mapping[str, Any] = {}
    """Fields of which one value alone is computed."""
    encoder: "Callable[[ConfigFields], EncoderShape] | None" = None
    """Reads what its layers attend to beside their tokens, where they do."""


class ConfigFields(NamedTuple):
    """The fields of config.json, checked while they are read."""

    config: Mapping[str, Any]
    where: str
    defaults: ArchitectureDefaults

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def unknown(self, message: str) -> UnsupportedVariant:
        return UnsupportedVariant(f"{self.where}: {message}")

    def number(self, name: str, default: int | None = None, most: int = (1 << 31) - 1, least: int = 1) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < least:
            kind = "positive whole number" if least else "whole number, 0 or more"
            raise self.error(f"{name} must be a {kind}, got {shorten(repr(value))}")
        if value > most:
            raise self.error(f"{name} {shorten(repr(value))} is more than {most}, and no model's")
        return value

    @property
    def layers(self) -> range:
        return range(self.number("num_hidden_layers", most=MOST_PARTS))

    def real(self, name: str) -> float | None:
        """A positive number, or None where the field is absent or null."""
        value = self.config.get(name)
        if value is None:
            return None
        return self.positive(name, value)

    def positive(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < MOST_REAL:
            raise self.error(f"{name} must be a positive number, got {shorten(repr(value))}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name, default)
        if value not in (True, False, None):
            raise self.error(f"{name} must be true or false, got {shorten(repr(value))}")
        return bool(value)

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty where the field is absent or null."""
        values = self.config.get(name)
        values = [] if values is None else values
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(f"{name} must be a list of texts, got {shorten(repr(values))}")
        return values

    def flags(self, name: str) -> tuple[bool, ...]:
        """Whether something is so in each layer, as a list of booleans or of 0 and 1, which may be longer; empty where
        the field is absent or null."""
        values = self.config.get(name)
        if values is None:
            return ()
        if (
            not isinstance(values, list)
            or len(values) < len(self.layers)
            or any(value not in (0, 1) for value in values)
        ):
            quoted = shorten(repr(values))
            raise self.error(f"{name} must have 0 or 1 for each of {len(self.layers)} layers, got {quoted}")
        return tuple(bool(values[layer]) for layer in self.layers)

    def layer_numbers(self, name: str) -> frozenset[int]:
        """The layers that a list has, counted from 0; none where the field is absent or null."""
        values = self.config.get(name)
        values = [] if values is None else values
        if not isinstance(values, list) or not all(type(value) is int and 0 <= value < MOST_PARTS for value in values):
            raise self.error(f"{name} must be a list of numbers of layers, got {shorten(repr(values))}")
        return frozenset(values)

    def dtype(self) -> str:
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32").removeprefix("torch.")
        if name not in DTYPES:
            raise self.error(f"dtype {name} is not supported; supported: {', '.join(DTYPES)}")
        # What surrounds quantised matrices is made what kernels compute in.
        return name if read_quantization(self.config, self.where) is None else "bfloat16"

    def activation(self) -> str:
        name = str(self.config.get("hidden_activation") or self.config.get("hidden_act") or "silu")
        if name == "relu" and self.defaults.encoder is not None:  # the only ones with an MLP that has no gate
            return name
        if name not in ACTIVATIONS:
            raise self.unknown(f"hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def layer_types(self, usual: Callable[[int], str], names: Mapping[str, _Kind]) -> tuple[_Kind, ...]:
        """What each layer is, by the `names` of types that there may be; `usual`: a layer's type where config.json has
        none."""
        layers = self.layers
        types = self.texts("layer_types") or self.texts("layers_block_type") or [*map(usual, layers)]
        self._check_layer_types(types, names.keys())
        return tuple(names[name] for name in types)

    def _check_layer_types(self, types: list[str], names: Set[str]) -> None:
        layers, quoted = len(self.layers), shorten(repr(types))
        if len(types) != layers:
            raise self.error(f"layer_types must have one for each of {layers} layers, got {quoted}")
        if not names >= set(types):
            raise self.unknown(f"layer_types must say of every layer {' or '.join(sorted(names))}, got {quoted}")

    def attention(self, hybrid: HybridLayers | None, head_dim: int) -> tuple[LayerAttention | None, ...]:
        scalar = self.real("query_pre_attn_scalar")
        scale = self.real("attention_multiplier") if scalar is None else scalar**-0.5
        if (keys := self.real("key_multiplier")) is not None:  # and what keys and queries are made of, twice
            scale = head_dim**-0.5 * keys * (self.real("attention_in_multiplier") or 1.0) ** 2
        full = LayerAttention(None, scale, self.real("attn_logit_softcapping"), self.flag("attention_sinks"))
        distances = self.number("score_distances", 0, least=0)
        full = full._replace(both_ways=self.flag("attends_both_ways"), distances=distances)
        if hybrid is not None:
            return tuple(full if attends else None for attends in hybrid.attends)
        layers, types = self.layers, self.texts("layer_types")
        if types:
            self._check_layer_types(types, LAYER_TYPES)
        if self.config.get("sliding_window") is None:
            return (full,) * len(layers)
        sliding = full._replace(window=self.number("sliding_window"))
        if types and self.defaults.reads_layer_types:
            return tuple(sliding if kind == "sliding_attention" else full for kind in types)
        return tuple(sliding if self.defaults.slides(self.config, layer) else full for layer in layers)

    def rope(self, layer_type: str, head_dim: int) -> RopeSpec:
        """The rotary embedding of layers of this type, where types differ."""
        values = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(values, Mapping):
            raise self.error(f"rope_parameters must be an object, got {shorten(repr(values))}")
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
        if kind not in ROPE_TYPES and kind not in self.defaults.rope_types.values():
            raise self.unknown(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        part = values.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        part = 1.0 if part is None else self.positive("partial_rotary_factor", part)
        rotated = int(head_dim * part)
        if part != 1.0 and not (self.defaults.partial_rotary and 0 < rotated <= head_dim and rotated % 2 == 0):
            raise self.unknown(f"partial_rotary_factor {part} of heads of {head_dim} is not supported here")
        longest = self.number("max_position_embeddings", 0, least=0)
        original = self.config.get("original_max_position_embeddings")
        original = original or values.get("original_max_position_embeddings") or longest or 8192
        original = int(self.positive("original_max_position_embeddings", original))
        scaled_by_length = kind in ("yarn", "longrope")
        usual = int(longest or original) / original if scaled_by_length else 1.0
        factor = self.positive("factor", usual if values.get("factor") is None else values["factor"])
        for name in _ATTENTION_FACTORS:
            if values.get(name):
                self.positive(name, values[name])
        given: dict[str, Any] = {name: self.positive(name, values[name]) for name in _ROPE_NUMBERS if values.get(name)}
        for name in _ROPE_LISTS:
            if values.get(name):
                given[name] = tuple(self.positive(name, value) for value in values[name][:MOST_PARTS])
        return RopeSpec(
            kind,
            theta,
            factor,
            sections=self._sections(rotated // 2),
            interleaved=self.flag("mrope_interleaved"),
            original_max_position=original,
            partial_rotary_factor=part,
            attention_factor=_attention_factor(kind, values, factor, original),
            truncate=bool(values.get("truncate", True)),
            **given,
        )

    def _sections(self, pairs: int) -> tuple[int, ...]:
        """`RopeSpec.sections` of a part of a model that takes images, which names the usual ones."""
        usual = self.config.get("mrope_section")
        if usual is None:
            return ()
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        sections = rope.get("mrope_section") or usual
        if not isinstance(sections, list) or [type(section) for section in sections] != [int] * 3 or min(sections) < 0:
            raise self.error(f"mrope_section must be three whole numbers, got {shorten(repr(sections))}")
        if sum(sections) != pairs and not self.flag("mrope_interleaved"):
            raise self.error(f"mrope_section must have {pairs} pairs of numbers in all, got {sections}")
        return tuple(sections)

    def corrected_experts(self) -> dict[str, Any]:
        """The fields of DeepSeek V3's router (arXiv 2412.19437), and of those that are like it: sigmoids with a
        correction, behind some dense layers, beside experts that every token goes through."""
        return {
            "sigmoid_router": True,
            "use_expert_bias": True,
            "float32_router": True,
            "least_weight_sum": 1e-20,
            "mlp_only_layers": [*range(self.number("first_k_dense_replace", 0, MOST_PARTS, 0))],
            "shared_expert_intermediate_size": self.number("n_shared_experts", 0, MOST_PARTS, 0)
            * self.number("moe_intermediate_size"),
        }

    def multipliers(self) -> Multipliers:
        names = "embedding_multiplier", "residual_multiplier", "logits_scaling", "lm_head_multiplier"
        embedding, residual, divisor, head = (self.real(name) or 1.0 for name in names)
        gate, mlp = self.reals("mlp_multipliers", 2)
        attention, entering, mamba = (
            self.real(f"{name}_multiplier") or 1.0 for name in ("attention_out", "attention_in", "ssm_out")
        )
        return Multipliers(
            embedding,
            residual * attention * entering,
            residual * mamba,
            gate,
            residual * mlp,
            divisor / head,
        )

    def reals(self, name: str, count: int) -> tuple[float, ...]:
        """So many positive numbers; ones where the field is absent or null."""
        values = self.config.get(name)
        values = [1.0] * count if values is None else values
        if not isinstance(values, list) or len(values) != count:
            raise self.error(f"{name} must be {count} positive numbers, got {shorten(repr(values))}")
        return tuple(self.positive(name, value) for value in values)

    def experts(self) -> ExpertsSpec | None:
        if self.config.get("num_experts_per_tok") is None:
            return None
        names = [name for name in ("num_experts", "n_routed_experts") if name in self.config]
        count = self.number(names[0] if names else "num_local_experts", most=MOST_PARTS)
        groups, chosen_groups = (self.number(name, 1) for name in ("n_group", "topk_group"))
        if count % groups or chosen_groups > groups:
            raise self.error(f"topk_group {chosen_groups} of n_group {groups} can't be chosen of {count} experts")
        chosen = self.number("num_experts_per_tok")
        every = self.number("decoder_sparse_step", 1)
        choosable = count // groups * chosen_groups
        if chosen > choosable:
            within = f" in {chosen_groups} of {groups} groups" if groups > 1 else ""
            raise self.error(f"num_experts_per_tok is {chosen}, but there are {choosable} experts{within}")
        dense = self.layer_numbers("mlp_only_layers")
        return ExpertsSpec(
            count,
            chosen,
            self.number("moe_intermediate_size", self.number("intermediate_size")),
            self.flag("norm_topk_prob", True),
            tuple(layer not in dense and (layer + 1) % every == 0 for layer in self.layers),
            self.flag("sigmoid_router"),
            self.real("routed_scaling_factor") or 1.0,
            self.flag("use_expert_bias"),
            self.number("shared_expert_intermediate_size", 0, least=0),
            self.number("moe_latent_size") if self.config.get("moe_latent_size") is not None else 0,
            self.flag("float32_router"),
            self.real("least_weight_sum") or 1e-6,
            groups,
            chosen_groups,
            self.number("group_judges", 2),
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


_ATTENTION_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_ROPE_LISTS = ("short_factor", "long_factor")
