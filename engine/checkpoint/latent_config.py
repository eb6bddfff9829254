"""What config.json says of architectures that attend over latents, DeepSeek V2 to V3.2 and their kin, and what they
mean by the fields that it leaves out."""

import math
from collections.abc import Mapping
from typing import Any

from .config_fields import MOST_PARTS, ArchitectureDefaults, ConfigFields
from .model_spec import LatentSpec, LayerAttention


def latent_attention(fields: ConfigFields, latent: LatentSpec) -> tuple[LayerAttention, ...]:
    """The attention of each layer. Where yarn says so, scores are multiplied by the square of its factor (arXiv
    2405.04434)."""
    values = fields.config.get("rope_parameters") or fields.config.get("rope_scaling") or {}
    all_dim, factor = (values.get(name) or 0.0 for name in ("mscale_all_dim", "factor"))
    stretch = 1.0
    if all_dim and factor and values.get("rope_type", values.get("type", "default")) != "default":
        numbers = fields.positive("mscale_all_dim", all_dim), fields.positive("factor", factor)
        stretch += 0.1 * numbers[0] * math.log(max(numbers[1], 1.0))
    scale = (latent.plain_size + latent.rotated_size) ** -0.5 * stretch**2
    return (LayerAttention(None, scale, kept=latent.kept),) * len(fields.layers)


def _latent(fields: ConfigFields) -> LatentSpec:
    def size(name: str) -> int:
        return fields.number(name, most=MOST_PARTS)

    return LatentSpec(
        size("kv_lora_rank"),
        0 if fields.config.get("q_lora_rank") is None else size("q_lora_rank"),
        size("qk_nope_head_dim"),
        size("qk_rope_head_dim"),
        size("v_head_dim"),
        fields.flag("rope_interleave", True),
    )


def _shared_key(fields: ConfigFields) -> dict[str, Any]:
    """All heads have one key, of which a part is rotated: for rotation that is the head."""
    return {"head_dim": fields.number("qk_rope_head_dim", most=MOST_PARTS), "num_key_value_heads": 1}


def _deepseek_v3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    return {**fields.config, **_shared_key(fields), **fields.corrected_experts()}


def _deepseek_v2_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Its router takes a softmax, and judges a group by its best expert. Its pairs are adjacent, whatever config.json
    says."""
    method = fields.config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unknown(f"topk_method {method!r} is not supported; greedy and group_limited_greedy are")
    own: dict[str, Any] = {
        "sigmoid_router": False,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "group_judges": 1,
        "rope_interleave": True,
    }
    if method == "greedy":
        own |= {"n_group": 1, "topk_group": 1}
    return {**_deepseek_v3_fields(fields), **own}


def _glm4_lite_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Its dense layers are named by `mlp_layer_types`; without them the first one is dense."""
    dense = _dense_layers(fields)
    return {**_deepseek_v3_fields(fields), "mlp_only_layers": [0] if dense is None else dense}


def _indexed_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """DeepSeek V3.2's and GLM-5's: `mlp_layer_types` go before `first_k_dense_replace`, and pairs are adjacent,
    whatever config.json says."""
    config = {**_deepseek_v3_fields(fields), "rope_interleave": True, "most_dense_tokens": fields.number("index_topk")}
    dense = _dense_layers(fields)
    return config if dense is None else config | {"mlp_only_layers": dense}


def _dense_layers(fields: ConfigFields) -> list[int] | None:
    """The dense layers of `mlp_layer_types`; None where it is left out."""
    kinds = fields.texts("mlp_layer_types")
    return [layer for layer, kind in enumerate(kinds) if kind == "dense"] if kinds else None


_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_EXPERTS = {"n_shared_experts": 1, "norm_topk_prob": True}
_INDEXED = {
    **_LATENT,
    **_EXPERTS,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
}
LATENTS = {
    "DeepseekV2ForCausalLM": ArchitectureDefaults(
        absent={
            **_LATENT,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "topk_method": "greedy",
        },
        latent=_latent,
        translate=_deepseek_v2_fields,
    ),
    "DeepseekV3ForCausalLM": ArchitectureDefaults(
        absent={
            **_LATENT,
            **_EXPERTS,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
        },
        latent=_latent,
        translate=_deepseek_v3_fields,
    ),
    "DeepseekV32ForCausalLM": ArchitectureDefaults(
        absent={**_INDEXED, "n_group": 8, "topk_group": 4, "max_position_embeddings": 163840},
        latent=_latent,
        translate=_indexed_fields,
    ),
    "GlmMoeDsaForCausalLM": ArchitectureDefaults(
        absent={
            **_INDEXED,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
        },
        latent=_latent,
        translate=_indexed_fields,
    ),
    "Glm4MoeLiteForCausalLM": ArchitectureDefaults(
        absent={
            **_LATENT,
            **_EXPERTS,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
        },
        latent=_latent,
        translate=_glm4_lite_fields,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
