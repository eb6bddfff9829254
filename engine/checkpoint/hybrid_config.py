"""What config.json says of architectures some of whose layers keep a state instead of a cache of tokens, and what they
mean by the fields that it leaves out."""

import math
from collections.abc import Mapping
from typing import Any

from ...core.errors import shorten
from .config_fields import MOST_PARTS, MOST_REAL, ArchitectureDefaults, ConfigFields, HybridLayers
from .model_spec import ACTIVATIONS, NO_ROPE
from .recurrence import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvolutionSpec


def _hybrid(attends: tuple[bool, ...], recurrence: RecurrenceSpec, gated: bool = False) -> HybridLayers:
    """Layers that do one or the other."""
    return HybridLayers(attends, tuple(not attending for attending in attends), recurrence, gated)


def _qwen3_5(fields: ConfigFields) -> HybridLayers:
    every = fields.number("full_attention_interval", 4)
    attends = fields.layer_types(
        lambda layer: "linear_attention" if (layer + 1) % every else "full_attention",
        {"full_attention": True, "linear_attention": False},
    )
    _convolves_with_silu(fields)
    key_heads, value_heads = (fields.number(f"linear_num_{side}_heads", most=MOST_PARTS) for side in ("key", "value"))
    if value_heads % key_heads:
        raise fields.error(f"linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads {key_heads}")
    key_dim, value_dim = (fields.number(f"linear_{side}_head_dim", most=MOST_PARTS) for side in ("key", "value"))
    kernel = fields.number("linear_conv_kernel_dim", most=MOST_PARTS)
    return _hybrid(attends, DeltaNetSpec(key_heads, value_heads, key_dim, value_dim, kernel), gated=True)


def _lfm2(fields: ConfigFields) -> HybridLayers:
    attending = fields.layer_numbers("full_attn_idxs")
    all_attend = fields.config.get("full_attn_idxs") is None
    attends = fields.layer_types(
        lambda layer: "full_attention" if all_attend or layer in attending else "conv",
        {"full_attention": True, "conv": False},
    )
    kernel = fields.number("conv_L_cache", 3, MOST_PARTS)
    return _hybrid(attends, ShortConvolutionSpec(fields.number("hidden_size"), kernel, fields.flag("conv_bias")))


def _lfm2_fields(fields: ConfigFields) -> Mapping[str, Any]:
    width = fields.number("intermediate_size" if fields.config.get("block_ff_dim") is None else "block_ff_dim")
    if fields.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if (factor := fields.real("block_ffn_dim_multiplier")) is not None:
            multiple = fields.number("block_multiple_of")
            width = -(-int(factor * width) // multiple) * multiple
    return {**_lfm2_shared_fields(fields), "intermediate_size": width}


def _lfm2_moe_fields(fields: ConfigFields) -> Mapping[str, Any]:
    dense = range(min(fields.number("num_dense_layers", most=MOST_PARTS, least=0), len(fields.layers)))
    return {**_lfm2_shared_fields(fields), "mlp_only_layers": [*dense], "sigmoid_router": True}


def _lfm2_shared_fields(fields: ConfigFields) -> Mapping[str, Any]:
    tied = fields.flag("tie_embedding" if "tie_embedding" in fields.config else "tie_word_embeddings")
    return {**fields.config, "rms_norm_eps": fields.real("norm_eps"), "tie_word_embeddings": tied}


def _convolves_with_silu(fields: ConfigFields) -> None:
    if fields.activation() != ACTIVATIONS["silu"]:
        raise fields.unknown(f"hidden_act {fields.config['hidden_act']!r} is not supported beside states, silu is")


_INFINITY = {"__float__": "Infinity"}
"""What transformers writes into config.json for it."""


def _step_limits(fields: ConfigFields) -> tuple[float, float]:
    limits = fields.config["time_step_limit"]
    if limits is None:
        return 0.0, math.inf
    ends = [math.inf if end == _INFINITY else end for end in limits] if isinstance(limits, list) else []
    numbers = len(ends) == 2 and all(type(end) in (int, float) for end in ends)
    if not numbers or not 0 <= ends[0] <= ends[1] or ends[0] > MOST_REAL or MOST_REAL < ends[1] < math.inf:
        message = "time_step_limit must be two numbers, 0 <= least <= most, of which the second may be infinite"
        raise fields.error(f"{message}, got {shorten(repr(limits))}")
    return float(ends[0]), float(ends[1])


def _mamba2(fields: ConfigFields) -> HybridLayers:
    _convolves_with_silu(fields)
    attends = fields.layer_types(
        lambda layer: "mamba",
        {"full_attention": True, "attention": True, "linear_attention": False, "mamba": False},
    )
    heads, groups = (fields.number(f"mamba_n_{part}", most=MOST_PARTS) for part in ("heads", "groups"))
    inner = fields.number("mamba_expand", most=MOST_PARTS) * fields.number("hidden_size")
    if inner % heads or heads % groups:
        raise fields.error(f"mamba_n_heads {heads} must divide {inner} features, and be a multiple of {groups} groups")
    if fields.config["mamba_d_head"] != "auto" and (head_dim := fields.number("mamba_d_head")) != inner // heads:
        raise fields.error(f"mamba_d_head {head_dim} times {heads} heads is not {inner}")
    if inner // heads > MOST_PARTS:
        raise fields.error(f"mamba_expand makes {heads} heads of {inner // heads} features, more than {MOST_PARTS}")
    spec = Mamba2Spec(
        heads,
        inner // heads,
        fields.number("mamba_d_state", most=MOST_PARTS),
        groups,
        fields.number("mamba_d_conv", most=MOST_PARTS),
        fields.flag("mamba_proj_bias"),
        fields.flag("mamba_conv_bias"),
        _step_limits(fields),
    )
    return _hybrid(attends, spec)


_NO_POSITIONS = "no positions"
"""What rope type stands for none here."""


def _granite_fields(fields: ConfigFields) -> Mapping[str, Any]:
    config = fields.config
    shared = fields.number("shared_intermediate_size")
    own: dict[str, Any] = {"intermediate_size": shared, "shared_expert_intermediate_size": shared}
    own["moe_intermediate_size"] = fields.number("intermediate_size")
    if config["position_embedding_type"] != "rope":
        own["rope_parameters"] = {"rope_type": _NO_POSITIONS}
    if not fields.number("num_local_experts", 0, least=0):
        config = {name: value for name, value in config.items() if name != "num_experts_per_tok"}
    return {**config, **own}


_LFM2 = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_QWEN3_5 = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
HYBRIDS = {
    "GraniteMoeHybridForCausalLM": ArchitectureDefaults(
        absent={
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "time_step_limit": None,
        },
        rope_types={_NO_POSITIONS: NO_ROPE},
        hybrid=_mamba2,
        translate=_granite_fields,
    ),
    "Lfm2ForCausalLM": ArchitectureDefaults(
        absent={
            **_LFM2,
            "intermediate_size": 12288,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        hybrid=_lfm2,
        translate=_lfm2_fields,
    ),
    "Lfm2MoeForCausalLM": ArchitectureDefaults(
        absent={**_LFM2, "num_dense_layers": 2, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        hybrid=_lfm2,
        translate=_lfm2_moe_fields,
    ),
    "Qwen3NextForCausalLM": ArchitectureDefaults(
        absent={
            **_QWEN3_5,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        partial_rotary=True,
        hybrid=_qwen3_5,
    ),
    "Qwen3_5ForCausalLM": ArchitectureDefaults(
        absent=_QWEN3_5, partial_rotary=True, rope_types={"mrope": "default"}, hybrid=_qwen3_5
    ),
    "Qwen3_5MoeForCausalLM": ArchitectureDefaults(
        absent={
            **_QWEN3_5,
            "num_key_value_heads": 2,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "intermediate_size": 512,
        },
        partial_rotary=True,
        rope_types={"mrope": "default"},
        hybrid=_qwen3_5,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
