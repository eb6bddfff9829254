"""What config.json says of architectures that differ from Llama in a few fields, and what they mean by the fields that
it leaves out."""

from collections.abc import Mapping
from typing import Any

from .config_fields import MOST_PARTS, ArchitectureDefaults, ConfigFields


def _smollm3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    rotates = fields.flags("no_rope_layers")  # it marks those that do rotate
    if not rotates:
        every = fields.number("no_rope_layer_interval")
        rotates = tuple((layer + 1) % every != 0 for layer in fields.layers)
    return {**fields.config, "rotates": [*rotates]}


def _smollm3_slides(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config.get("use_sliding_window")) and not config["rotates"][layer]


def _ministral3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    rope = fields.config.get("rope_parameters") or fields.config.get("rope_scaling") or {}
    return {**fields.config, "query_growth": rope.get("llama_4_scaling_beta")}


def _olmo3_slides(config: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _olmo3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """The scaling of older files is of layers without a window alone."""
    config = fields.config
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope or "sliding_attention" in rope:
        return config
    plain = {"rope_theta": rope.get("rope_theta") or config["rope_theta"]}
    scaled = {**plain, **rope, **(config.get("rope_scaling") or {})}
    return {**config, "rope_parameters": {"full_attention": scaled, "sliding_attention": plain}}


def _exaone4_slides(config: Mapping[str, Any], layer: int) -> bool:
    pattern = config["sliding_window_pattern"]
    if isinstance(pattern, str):
        return pattern[layer % len(pattern)] == "L" and layer != config["num_hidden_layers"] - 1
    return bool((layer + 1) % int(pattern) != 0)


def _exaone4_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Layers without a window do not rotate, where others have one."""
    config = fields.config
    if config["sliding_window"] is None:
        return config
    types = fields.texts("layer_types")
    slides = [kind == "sliding_attention" for kind in types] or [
        _exaone4_slides(config, layer) for layer in fields.layers
    ]
    return {**config, "rotates": slides}


def _dots1_slides(config: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= config["max_window_layers"])


def _corrected_fields(fields: ConfigFields) -> Mapping[str, Any]:
    return {**fields.config, **fields.corrected_experts()}


def _solar_open_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """No layer is dense."""
    own: dict[str, Any] = {"mlp_only_layers": [], "use_qk_norm": False}
    return {**_corrected_fields(fields), **own, "intermediate_size": fields.number("moe_intermediate_size")}


def _minimax_m2_fields(fields: ConfigFields) -> Mapping[str, Any]:
    own: dict[str, Any] = {"sigmoid_router": True, "use_expert_bias": True, "least_weight_sum": 1e-20}
    if fields.config.get("rotary_dim") is not None and fields.config.get("partial_rotary_factor") is None:
        own["partial_rotary_factor"] = fields.number("rotary_dim") / fields.number("head_dim")
    return {**fields.config, **own}


def _ernie_moe_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """The layers of an interval, of which every so many are mixtures."""
    layers = fields.layers
    last = fields.config["moe_layer_end_index"]
    sparse = range(fields.number("moe_layer_start_index", least=0), len(layers) if last == -1 else last + 1)
    every = fields.number("moe_layer_interval")
    own: dict[str, Any] = {
        "num_experts": fields.number("moe_num_experts", most=MOST_PARTS),
        "num_experts_per_tok": fields.number("moe_k"),
        "mlp_only_layers": [layer for layer in layers if layer not in sparse or (layer + 1) % every],
        "shared_expert_intermediate_size": fields.number("moe_num_shared_experts", least=0)
        * fields.number("moe_intermediate_size"),
        "use_expert_bias": True,
        "float32_router": True,
    }
    return {**fields.config, **own}


_ERNIE = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
_GLM = {
    "rms_norm_eps": 1.5625e-7,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_GLM4_MOE = {
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
}
LLAMA_KIN: dict[str, ArchitectureDefaults] = {
    "Dots1ForCausalLM": ArchitectureDefaults(
        _dots1_slides,
        {"sliding_window": 4096, "max_window_layers": 62, "norm_topk_prob": False, "moe_intermediate_size": 1408},
        reads_layer_types=True,
        translate=_corrected_fields,
    ),
    "Ernie4_5ForCausalLM": ArchitectureDefaults(
        absent=_ERNIE | {"head_dim": 128, "num_key_value_heads": 2}, only={"use_bias": False}
    ),
    "Ernie4_5_MoeForCausalLM": ArchitectureDefaults(
        absent={
            **_ERNIE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        translate=_ernie_moe_fields,
        only={"use_bias": False},
    ),
    "Exaone4ForCausalLM": ArchitectureDefaults(
        _exaone4_slides,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32},
        reads_layer_types=True,
        translate=_exaone4_fields,
    ),
    "Glm4MoeForCausalLM": ArchitectureDefaults(
        absent=_GLM4_MOE | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
        partial_rotary=True,
        translate=_corrected_fields,
    ),
    "GlmForCausalLM": ArchitectureDefaults(absent=_GLM, partial_rotary=True),
    "Glm4ForCausalLM": ArchitectureDefaults(absent=_GLM, partial_rotary=True),
    "MiniMaxM2ForCausalLM": ArchitectureDefaults(
        absent={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        partial_rotary=True,
        translate=_minimax_m2_fields,
        only={"scoring_func": "sigmoid", "qk_norm_type": "per_layer"},
    ),
    "Ministral3ForCausalLM": ArchitectureDefaults(
        lambda config, layer: True,
        {
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        translate=_ministral3_fields,
    ),
    "Olmo2ForCausalLM": ArchitectureDefaults(absent={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": ArchitectureDefaults(
        _olmo3_slides,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
        reads_layer_types=True,
        translate=_olmo3_fields,
    ),
    "SeedOssForCausalLM": ArchitectureDefaults(
        absent={
            "attention_bias": True,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
        }
    ),
    "SmolLM3ForCausalLM": ArchitectureDefaults(
        _smollm3_slides,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        reads_layer_types=True,
        translate=_smollm3_fields,
    ),
    "SolarOpenForCausalLM": ArchitectureDefaults(
        absent=_GLM4_MOE | {"head_dim": 128, "moe_intermediate_size": 1280, "rope_theta": 1e6},
        translate=_solar_open_fields,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
