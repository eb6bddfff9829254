"""What GGUF files say of single architectures: the fields of config.json that are special there, by
general.architecture. What llama.cpp has as a constant of an architecture is said here."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...tokenization.gguf_file import GgufFile
from .gguf_fields import (
    DRAFTS,
    grouped_experts,
    has_tensor,
    head_dim,
    own_layers,
    plain_experts,
    sigmoid_experts,
)
from .gguf_gemmas import gemma3n, gemma4
from .gguf_hybrids import HYBRIDS
from .model_spec import CheckpointError

_WEIGHTS = "expert_weights_norm", "expert_weights_scale"
_GROUPED = "expert_group_count", "expert_shared_count", *_WEIGHTS
READ_BY: Mapping[str, tuple[str, ...]] = {
    "deepseek2": (DRAFTS, *_GROUPED),
    "ernie4_5-moe": ("expert_shared_count",),
    "glm4moe": (DRAFTS, "expert_shared_count", *_WEIGHTS),
    "granitehybrid": ("embedding_scale", "logit_scale", "residual_scale"),
    "minimax-m2": ("expert_weights_norm",),
    "nemotron_h_moe": (DRAFTS, *_GROUPED),
    "qwen35": (DRAFTS,),
    "qwen35moe": (DRAFTS,),
    "qwen3next": (DRAFTS,),
}
"""The fields that an architecture reads, of those that would change what is computed."""


def _llama(fields: GgufFile) -> dict[str, Any]:
    """Llama's, Mistral's and Mixtral's are one architecture there."""
    if fields.number("expert_count", 0):
        return {"architectures": ["MixtralForCausalLM"], **plain_experts(fields)}
    windowed = fields.number("attention.sliding_window", 0) > 0
    return {"architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"]}


def _qwen3_moe(fields: GgufFile) -> dict[str, Any]:
    layers = range(fields.number("block_count"))
    dense = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in fields.tensors]
    inner = fields.number("expert_feed_forward_length", fields.number("feed_forward_length", 1))
    sizes = {"moe_intermediate_size": inner, "mlp_only_layers": dense}
    return {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": False, **sizes, **plain_experts(fields)}


def _qwen(architecture: str) -> Callable[[GgufFile], dict[str, Any]]:
    def windowed(fields: GgufFile) -> dict[str, Any]:
        return {"architectures": [architecture], "use_sliding_window": False}

    return windowed


def _phi3(fields: GgufFile) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": fields.number(
            "rope.scaling.original_context_length", fields.number("context_length")
        ),
    }


def _gemma(architecture: str, layers_of_27b: int) -> Callable[[GgufFile], dict[str, Any]]:
    """The 27B model's scores are scaled by a head's share of the layer's width, and not by the width of the head."""

    def capped(fields: GgufFile) -> dict[str, Any]:
        share = fields.number("embedding_length") // max(fields.number("attention.head_count"), 1)
        scalar = share if fields.number("block_count") == layers_of_27b else head_dim(fields)
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        caps = {name: fields.real(name) for name in names if fields.value(name) is not None}
        return {
            "architectures": [architecture],
            "query_pre_attn_scalar": scalar,
            "rope_local_base_freq": fields.real("rope.freq_base_swa", 10000.0),
            **_sliding_layers(fields),
            **caps,
        }

    return capped


def _deepseek2(fields: GgufFile) -> dict[str, Any]:
    """DeepSeek V2, or V3, whose router has a correction, and what has its layers. Newer files say of heads what latents
    are, and of what they are made what heads are."""
    rank = fields.number("attention.kv_lora_rank")
    rotated = fields.number("rope.dimension_count")
    key = fields.number("attention.key_length_mla", fields.number("attention.key_length"))
    corrected = has_tensor(fields, ".exp_probs_b.bias")
    grouped = fields.number("expert_group_count", 1) > 1
    config = {
        "architectures": ["DeepseekV3ForCausalLM" if corrected else "DeepseekV2ForCausalLM"],
        "num_hidden_layers": own_layers(fields),
        "kv_lora_rank": rank,
        "q_lora_rank": fields.number("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": fields.number("attention.value_length_mla", fields.number("attention.value_length")),
        "partial_rotary_factor": None,
        "first_k_dense_replace": fields.number("leading_dense_block_count", 0),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        **grouped_experts(fields),
        "norm_topk_prob": bool(fields.value("expert_weights_norm", False)),
    }
    if (gating := fields.number("expert_gating_func", 2 if corrected else 1)) != (2 if corrected else 1):
        raise CheckpointError(f"{fields.path}: {fields.prefix}expert_gating_func {gating} is not supported here")
    return config


def _gpt_oss(fields: GgufFile) -> dict[str, Any]:
    """Every second layer has the window, and yarn's bounds are not rounded: constants there."""
    return {
        "architectures": ["GptOssForCausalLM"],
        **plain_experts(fields),
        "intermediate_size": fields.number("expert_feed_forward_length"),
    }


def _ernie_moe(fields: GgufFile) -> dict[str, Any]:
    inner = fields.number("expert_feed_forward_length")
    return {
        **_kin("Ernie4_5_MoeForCausalLM")(fields),
        "moe_num_experts": fields.number("expert_count"),
        "moe_k": fields.number("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": fields.number("expert_shared_count", 0),
        "moe_layer_start_index": fields.number("leading_dense_block_count", 0),
        "moe_layer_interval": fields.number("interleave_moe_layer_step", 1),
    }


def _windowed(architecture: str, with_windows: str) -> Callable[[GgufFile], dict[str, Any]]:
    """A family of which some models have layers with windows, which rotate in another way than the others."""

    def windowed(fields: GgufFile) -> dict[str, Any]:
        slides = fields.number("attention.sliding_window", 0) > 0
        return {"architectures": [with_windows if slides else architecture], **_sliding_layers(fields)}

    return windowed


def _sliding_layers(fields: GgufFile) -> dict[str, Any]:
    """Which layers have a window, where the file says it; else the architecture's rule holds."""
    key = "attention.sliding_window_pattern"
    pattern = fields.value(key)
    if pattern is None:
        return {}
    if isinstance(pattern, np.ndarray):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]}
    return {"sliding_window_pattern": fields.number(key)}


def _kin(architecture: str) -> Callable[[GgufFile], dict[str, Any]]:
    """A family of Llama's kind, of which no layer has a window."""

    def kin(fields: GgufFile) -> dict[str, Any]:
        if fields.number("attention.sliding_window", 0):
            raise CheckpointError(f"{fields.path}: {fields.prefix}attention.sliding_window is not supported")
        return {"architectures": [architecture]}

    return kin


def _smollm3(fields: GgufFile) -> dict[str, Any]:
    """Fields of SmolLM3: that every fourth layer does not rotate is a constant there."""
    return {**_kin("SmolLM3ForCausalLM")(fields), "no_rope_layer_interval": 4}


def _seed_oss(fields: GgufFile) -> dict[str, Any]:
    biased = "blk.0.attn_output.bias" in fields.tensors
    return {**_kin("SeedOssForCausalLM")(fields), "attention_out_bias": biased}


def _glm4_moe(fields: GgufFile) -> dict[str, Any]:
    """Blocks behind the last layer, which draft, are left out."""
    return {
        "num_hidden_layers": own_layers(fields),
        "architectures": ["Glm4MoeForCausalLM"],
        **sigmoid_experts(fields),
        "n_routed_experts": fields.number("expert_count"),
        "n_shared_experts": fields.number("expert_shared_count", 0),
        "first_k_dense_replace": fields.number("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.real("expert_weights_scale", 1.0),
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.tensors,
    }


def _minimax_m2(fields: GgufFile) -> dict[str, Any]:
    inner = fields.number("expert_feed_forward_length")
    return {"architectures": ["MiniMaxM2ForCausalLM"], **sigmoid_experts(fields), "intermediate_size": inner}


VARIANTS: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "qwen3moe": _qwen3_moe,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _windowed("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    "exaone4": _windowed("Exaone4ForCausalLM", "Exaone4ForCausalLM"),
    "ernie4_5": _kin("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": _ernie_moe,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
    **HYBRIDS,
    "seed_oss": _seed_oss,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "gemma2": _gemma("Gemma2ForCausalLM", 46),
    "gemma3": _gemma("Gemma3ForCausalLM", 62),
    "gemma3n": gemma3n,
    "gemma4": gemma4,
}
"""general.architecture -> what is special in its config.json."""

LATENT = frozenset({"deepseek2"})
"""Architectures whose heads are made of latents, so that their keys and values have lengths of their own."""

UNEQUAL = frozenset({"gemma4"})
"""Architectures whose layers have key/value heads of their own, which are read there."""

UNROUNDED = frozenset({"gpt-oss"})
"""Architectures whose yarn's bounds are not rounded."""
