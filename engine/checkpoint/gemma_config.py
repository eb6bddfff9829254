"""What config.json says of Gemma 3n and 4, whose layers differ from each other in more than a window, and what they
mean by the fields that it leaves out."""

from collections.abc import Mapping
from typing import Any

from .config_fields import MOST_PARTS, ArchitectureDefaults, ConfigFields, UnequalLayers
from .model_spec import LAYER_TYPES, AltUpSpec, GemmaSpec, KeyValueShape, LayerAttention

_SLIDING, _FULL = "sliding_attention", "full_attention"
_OWN_FIELDS = {"head_dim", "num_key_value_heads"}
"""What a layer's `per_layer_config` may say."""


def _gemma4(fields: ConfigFields) -> UnequalLayers:
    types = _layer_types(fields, every=6)
    kinds = tuple(_gemma4_attention(fields, layer, kind) for layer, kind in enumerate(types))
    full_sizes = {_head_dim(fields, kind) for kind, name in zip(kinds, types, strict=True) if name == _FULL}
    if len(full_sizes) > 1:
        raise fields.unknown(f"layers that see all tokens must have heads of one size, got {sorted(full_sizes)}")
    first_shared = _first_shared_layer(fields)
    width = fields.number("intermediate_size")
    wide = 2 * width if fields.flag("use_double_wide_mlp") else width
    return UnequalLayers(
        kinds,
        _cache_owners(fields, types, first_shared),
        tuple(width if layer < first_shared else wide for layer in fields.layers),
        full_sizes.pop(),
        GemmaSpec(
            *_per_layer_sizes(fields),
            fields.flag("attention_k_eq_v"),
            pad_token=fields.number("pad_token_id", 0, least=0),
        ),
    )


def _layer_types(fields: ConfigFields, every: int) -> list[str]:
    """The last layer sees all tokens, whatever config.json says, as transformers has it."""
    types = fields.layer_types(
        lambda layer: _SLIDING if (layer + 1) % every else _FULL,
        {layer_type: layer_type for layer_type in LAYER_TYPES},
    )
    return [*types[:-1], _FULL]


def _gemma4_attention(fields: ConfigFields, layer: int, layer_type: str) -> LayerAttention:
    head_dim = fields.number("head_dim", most=MOST_PARTS)
    usual = KeyValueShape(fields.number("num_key_value_heads"), head_dim, head_dim)
    listed = fields.config.get("per_layer_config")
    own: Mapping[str, Any] = {}
    if listed is not None:
        names = (str(layer), f"{layer:02}", f"{layer:03}")  # transformers writes all of them with as many digits
        own = next((listed[name] for name in names if name in listed), {}) or {}
    elif layer_type == _FULL:
        own = {"head_dim": fields.config.get("global_head_dim") or 512}
        if fields.flag("attention_k_eq_v"):
            own |= {"num_key_value_heads": fields.config.get("num_global_key_value_heads")}
    if not own.keys() <= _OWN_FIELDS:
        raise fields.unknown(f"per_layer_config of layer {layer} says more than {' and '.join(sorted(_OWN_FIELDS))}")
    checked = fields._replace(config=own)
    size = checked.number("head_dim", head_dim, MOST_PARTS)
    kept = KeyValueShape(checked.number("num_key_value_heads", usual.heads), size, size)
    if (heads := fields.number("num_attention_heads")) % kept.heads:
        raise fields.error(f"num_attention_heads {heads} is no multiple of {kept.heads} key/value heads")
    sliding = layer_type == _SLIDING
    window = fields.number("sliding_window") if sliding else None
    both_ways = sliding and fields.config.get("use_bidirectional_attention") == "vision"
    return LayerAttention(window, 1.0, kept=None if kept == usual else kept, both_ways=both_ways)


def _head_dim(fields: ConfigFields, kind: LayerAttention) -> int:
    return fields.number("head_dim") if kind.kept is None else kind.kept.key_size


def _first_shared_layer(fields: ConfigFields) -> int:
    """The first of the last layers, which have no keys and values of their own."""
    layers = len(fields.layers)
    shared = fields.config.get("num_kv_shared_layers") or 0
    if type(shared) is not int or not 0 <= shared < layers:
        raise fields.error(f"num_kv_shared_layers must be at least 0 and less than {layers} layers, got {shared!r}")
    return layers - shared


def _cache_owners(fields: ConfigFields, types: list[str], first_shared: int) -> tuple[int, ...]:
    """Each of the last layers attends to the keys and values of the last layer of its type that has some."""
    if first_shared == len(types):
        return ()
    owners = {types[layer]: layer for layer in range(first_shared)}
    if missing := set(types) - owners.keys():
        message = f"no layer of type {missing.pop()} has keys and values for the last num_kv_shared_layers"
        raise fields.error(message)
    return (*range(first_shared), *(owners[name] for name in types[first_shared:]))


def _per_layer_sizes(fields: ConfigFields) -> tuple[int, int]:
    """Numbers of the embedding that a token has for each layer, and the tokens that have one; 0: none has."""
    if not fields.config.get("hidden_size_per_layer_input"):
        return 0, 0
    return fields.number("hidden_size_per_layer_input", most=MOST_PARTS), fields.number("vocab_size_per_layer_input")


def _gemma4_fields(fields: ConfigFields) -> Mapping[str, Any]:
    config = fields.config
    if not fields.flag("enable_moe_block"):
        return config
    own = {"num_experts_per_tok": config["top_k_experts"]}
    return {**config, **own, "shared_expert_intermediate_size": config["intermediate_size"]}


def _gemma3n(fields: ConfigFields) -> UnequalLayers:
    types = _layer_types(fields, every=5)
    sliding = LayerAttention(fields.number("sliding_window"), 1.0)
    full = LayerAttention(None, 1.0)
    streams = fields.number("altup_num_inputs", most=MOST_PARTS)
    active = fields.config["altup_active_idx"]
    if type(active) is not int or not 0 <= active < streams:
        raise fields.error(f"altup_active_idx must be one of {streams} streams, got {active!r}")
    if not fields.config["hidden_size_per_layer_input"]:
        raise fields.unknown("hidden_size_per_layer_input 0 is not supported: layers have embeddings of their own")
    altup = AltUpSpec(
        streams,
        active,
        fields.flag("altup_correct_scale", True),
        fields.number("laurel_rank", most=MOST_PARTS),
        _sparsity(fields),
    )
    return UnequalLayers(
        tuple(sliding if kind == _SLIDING else full for kind in types),
        _cache_owners(fields, types, _first_shared_layer(fields)),
        _mlp_sizes(fields),
        fields.number("head_dim", most=MOST_PARTS),
        GemmaSpec(*_per_layer_sizes(fields), altup=altup),
    )


def _sparsity(fields: ConfigFields) -> tuple[float, ...]:
    layers = len(fields.layers)
    pattern = fields.config.get("activation_sparsity_pattern")
    if pattern is None:  # of ten layers, in a model that has more
        pattern = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    elif not isinstance(pattern, list):
        pattern = [pattern] * layers
    if len(pattern) != layers or any(type(share) not in (int, float) or not 0 <= share < 1 for share in pattern):
        raise fields.error(f"activation_sparsity_pattern must be a share below 1 for each of {layers} layers")
    return tuple(map(float, pattern))


def _mlp_sizes(fields: ConfigFields) -> tuple[int, ...]:
    layers = len(fields.layers)
    widths = fields.config["mlp_widths"]
    widths = list(widths) if isinstance(widths, list) else [widths] * layers
    if len(widths) != layers:
        raise fields.error(f"intermediate_size must be one number, or one for each of {layers} layers")
    return tuple(fields._replace(config={"intermediate_size": width}).number("intermediate_size") for width in widths)


def _gemma3n_fields(fields: ConfigFields) -> Mapping[str, Any]:
    config = fields.config
    widths = config["intermediate_size"]
    return {**config, "mlp_widths": widths, "intermediate_size": max(widths) if isinstance(widths, list) else widths}


_GEMMA4 = ArchitectureDefaults(
    absent={
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "enable_moe_block": False,
    },
    partial_rotary=True,
    unequal=_gemma4,
    translate=_gemma4_fields,
)
_UNIFIED = {"sliding_window": 1024, "max_position_embeddings": 262_144}
GEMMAS = {
    "Gemma3nForCausalLM": ArchitectureDefaults(
        absent={
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "intermediate_size": 16_384,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
            "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "num_kv_shared_layers": 15,
            "laurel_rank": 64,
        },
        unequal=_gemma3n,
        translate=_gemma3n_fields,
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4._replace(
        absent={**_GEMMA4.absent, **_UNIFIED},
        # It has neither, whatever config.json says.
        translate=lambda fields: {**fields.config, "hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
