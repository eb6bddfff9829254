"""What config.json says of architectures some of whose layers keep a state instead of a cache of tokens, and what they
mean by the fields that it leaves out."""

import math
from collections.abc import Mapping
from typing import Any

from ...core.errors import shorten
from .config_fields import MOST_PARTS, ArchitectureDefaults, ConfigFields, HybridLayers
from .mamba_config import MAMBAS, MIXER_DEFAULTS, convolves_with_silu, mamba2_layers, mixer_fields
from .model_spec import NO_ROPE
from .recurrence import DeltaNetSpec, RecurrenceSpec, SharedBlocksSpec, ShortConvolutionSpec


def _hybrid(attends: tuple[bool, ...], recurrence: RecurrenceSpec, gated: bool = False) -> HybridLayers:
    """Layers that do one or the other."""
    return HybridLayers(attends, tuple(not attending for attending in attends), recurrence, gated)


def _qwen3_5(fields: ConfigFields) -> HybridLayers:
    every = fields.number("full_attention_interval", 4)
    attends = fields.layer_types(
        lambda layer: "linear_attention" if (layer + 1) % every else "full_attention",
        {"full_attention": True, "linear_attention": False},
    )
    convolves_with_silu(fields)
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


def _granite(fields: ConfigFields) -> HybridLayers:
    attends = fields.layer_types(
        lambda layer: "mamba",
        {"full_attention": True, "attention": True, "linear_attention": False, "mamba": False},
    )
    return _hybrid(attends, mamba2_layers(fields))


_NO_POSITIONS = "no positions"
"""What rope type stands for none here."""


def _granite_fields(fields: ConfigFields) -> Mapping[str, Any]:
    shared = fields.number("shared_intermediate_size")
    own: dict[str, Any] = {"intermediate_size": shared, "shared_expert_intermediate_size": shared}
    own["moe_intermediate_size"] = fields.number("intermediate_size")
    if fields.config["position_embedding_type"] != "rope":
        own["rope_parameters"] = {"rope_type": _NO_POSITIONS}
    if not fields.number("num_local_experts", 0, least=0):
        own["num_experts_per_tok"] = None
    return {**fields.config, **own}


_NEMOTRON_LAYERS = {
    "full_attention": "*",
    "attention": "*",
    "linear_attention": "M",
    "mamba": "M",
    "mlp": "-",
    "moe": "E",
    **{mark: mark for mark in "*M-E"},
}
"""A layer's type, or its mark in `hybrid_override_pattern` -> that mark."""


def _nemotron(fields: ConfigFields) -> HybridLayers:
    marks = fields.layer_types(lambda layer: "M", _NEMOTRON_LAYERS)
    attends, recurs = (tuple(own == mark for own in marks) for mark in "*M")
    return HybridLayers(attends, recurs, mamba2_layers(fields), feeds=tuple(mark in "-E" for mark in marks))


def _unbounded_steps(fields: ConfigFields) -> list[float]:
    """The limits of a time step where a file names the least alone."""
    return [fields.real("time_step_min") or 0.0, math.inf]


def _nemotron_fields(fields: ConfigFields) -> Mapping[str, Any]:
    pattern = fields.config["hybrid_override_pattern"]
    if not isinstance(pattern, str):
        raise fields.error(f"hybrid_override_pattern must be a text, got {shorten(repr(pattern))}")
    types = fields.texts("layers_block_type") or fields.texts("layer_types") or [*pattern]
    sparse = [layer for layer, kind in enumerate(types) if kind in ("moe", "E")]
    own = mixer_fields(fields) | fields.corrected_experts()
    own |= {
        "layer_types": types,
        "num_hidden_layers": len(types),
        "mamba_n_heads": fields.number("mamba_num_heads", most=MOST_PARTS),
        "mamba_d_head": fields.number("mamba_head_dim", most=MOST_PARTS),
        "mamba_d_state": fields.number("ssm_state_size", most=MOST_PARTS),
        "mamba_expand": None,
        "time_step_limit": _unbounded_steps(fields),
        "rope_parameters": {"rope_type": _NO_POSITIONS},
        "mlp_matrices": 2,
        "num_experts": fields.number("n_routed_experts", most=MOST_PARTS),
        "mlp_only_layers": [layer for layer in range(len(types)) if layer not in sparse],
        "shared_expert_intermediate_size": fields.number("moe_shared_expert_intermediate_size"),
    }
    if not sparse:
        own["num_experts_per_tok"] = None
    return {**fields.config, **own}


def _bamba(fields: ConfigFields) -> HybridLayers:
    attending = fields.layer_numbers("attn_layer_indices")
    return _hybrid(tuple(layer in attending for layer in fields.layers), mamba2_layers(fields))


def _falcon_h1(fields: ConfigFields) -> HybridLayers:
    everywhere = (True,) * len(fields.layers)
    return HybridLayers(everywhere, everywhere, mamba2_layers(fields))


_ZAMBA_LAYERS = {"linear_attention": False, "mamba": False, "hybrid": True}
"""A layer's type -> whether it uses a block that attends."""


def _zamba2(fields: ConfigFields) -> HybridLayers:
    uses = fields.layer_types(lambda layer: "mamba", _ZAMBA_LAYERS)
    blocks = fields.number("num_mem_blocks", most=MOST_PARTS)
    if not 0 < blocks <= sum(uses):
        raise fields.error(f"num_mem_blocks must be between 1 and {sum(uses)}, the layers that use one, got {blocks}")
    with_silu = fields._replace(config={**fields.config, "hidden_act": "silu"})  # the other is of the blocks' MLPs
    shared = SharedBlocksSpec(blocks, fields.number("adapter_rank", most=MOST_PARTS))
    return HybridLayers(uses, (True,) * len(uses), mamba2_layers(with_silu), feeds=uses, shared=shared)


def _zamba2_fields(fields: ConfigFields) -> Mapping[str, Any]:
    config, hidden, heads = fields.config, fields.number("hidden_size"), fields.number("num_attention_heads")
    head_dim = fields.number("attention_head_dim", 2 * hidden // heads, MOST_PARTS)
    types = fields.texts("layers_block_type") or fields.texts("layer_types")
    if not types:
        raise fields.error("layers_block_type must say of every layer whether it is hybrid")
    own = {
        "layer_types": types,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim / 2,
        "intermediate_size": fields.number("intermediate_size", 4 * hidden),
        "mamba_n_heads": fields.number("n_mamba_heads", most=MOST_PARTS),
        "mamba_n_groups": fields.number("mamba_ngroups", most=MOST_PARTS),
        "mamba_proj_bias": fields.flag("add_bias_linear"),
        "mamba_conv_bias": True,
        "mlp_bias": fields.flag("add_bias_linear"),
        "time_step_limit": _unbounded_steps(fields),
    }
    if not fields.flag("use_mem_rope"):
        own["rope_parameters"] = {"rope_type": _NO_POSITIONS}
    return {**config, **own}


_MAMBA2 = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "time_step_limit": None,
}
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
    **MAMBAS,
    "BambaForCausalLM": ArchitectureDefaults(
        absent={
            **_MAMBA2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262_144,
            "partial_rotary_factor": 0.5,
        },
        partial_rotary=True,
        hybrid=_bamba,
    ),
    "FalconH1ForCausalLM": ArchitectureDefaults(
        absent={
            **_MAMBA2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
            "projectors_bias": False,
            "key_multiplier": 1.0,
        },
        hybrid=_falcon_h1,
        only={"attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False},
    ),
    "Zamba2ForCausalLM": ArchitectureDefaults(
        absent={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "mamba_d_head": "auto",
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "time_step_min": 0.001,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
            "tie_word_embeddings": True,
        },
        rope_types={_NO_POSITIONS: NO_ROPE},
        hybrid=_zamba2,
        translate=_zamba2_fields,
        only={
            "use_shared_attention_adapter": False,
            "use_long_context": False,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,  # with it transformers unties blocks
        },
    ),
    "GraniteMoeHybridForCausalLM": ArchitectureDefaults(
        absent={
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "position_embedding_type": None,
            **_MAMBA2,
        },
        rope_types={_NO_POSITIONS: NO_ROPE},
        hybrid=_granite,
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
    "NemotronHForCausalLM": ArchitectureDefaults(
        absent={
            **MIXER_DEFAULTS,
            "hybrid_override_pattern": "ME*-",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
        },
        rope_types={_NO_POSITIONS: NO_ROPE},
        hybrid=_nemotron,
        translate=_nemotron_fields,
        only={"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
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
