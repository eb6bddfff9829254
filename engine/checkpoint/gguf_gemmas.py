"""What GGUF files say of Gemma 3n and 4, whose layers differ from each other in more than a window: the fields of
config.json that are special there."""

from collections.abc import Mapping
from itertools import compress
from statistics import NormalDist
from typing import Any

import numpy as np

from ...tokenization.gguf_file import GgufFile
from .gguf_fields import ROPE_FACTORS, plain_experts, read_numbers
from .gguf_names import EMBEDDING_TABLES
from .model_spec import CheckpointError

_SLIDING, _FULL = "sliding_attention", "full_attention"


def gemma4(fields: GgufFile) -> dict[str, Any]:
    """The divisors of rotations are those of layers that see all tokens, and huge where heads are not rotated."""
    rotated = np.array(read_numbers(fields, ROPE_FACTORS)) < _UNROTATED
    types = _layer_types(fields)
    kv_heads = _of_each_layer(fields, "attention.head_count_kv")
    sizes = {_FULL: fields.number("attention.key_length"), _SLIDING: fields.number("attention.key_length_swa")}
    full = [
        {"head_dim": sizes[_FULL], "num_key_value_heads": heads} if kind == _FULL else None
        for kind, heads in zip(types, kv_heads, strict=True)
    ]
    first_shared = len(types) - fields.number("attention.shared_kv_layers", 0)
    if any(fields.number(f"rope.dimension_count{ending}", sizes[kind]) != sizes[kind] for kind, ending in _ROTATED):
        raise CheckpointError(f"{fields.path}: heads that are rotated in part by {fields.prefix}rope.dimension_count")
    return {
        "architectures": ["Gemma4ForCausalLM"],
        **_gemma_fields(fields, types),
        "head_dim": sizes[_SLIDING],
        "num_key_value_heads": next(compress(kv_heads, [kind == _SLIDING for kind in types]), kv_heads[0]),
        "per_layer_config": {str(layer): own for layer, own in enumerate(full) if own is not None},
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in fields.tensors for layer in range(first_shared) if full[layer]
        ),
        **_widths(fields, first_shared),
        "rope_scaling": None,
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": fields.real("rope.freq_base_swa", 1e4)},
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": float(rotated.mean()),
                "rope_theta": fields.real("rope.freq_base"),
            },
        },
        **_experts(fields),
    }


_ROTATED = (_FULL, ""), (_SLIDING, "_swa")
_UNROTATED = 1e20
"""A divisor of at least so much stands for no rotation."""


def gemma3n(fields: GgufFile) -> dict[str, Any]:
    """Which streams there are, the file says; a layer's sparsity is the deviations above which it keeps a number."""
    left = fields.tensors.get("blk.0.laurel_l.weight")
    if left is None:
        raise CheckpointError(f"{fields.path}: it has no matrix blk.0.laurel_l.weight")
    deviations = fields.numbers("activation_sparsity_scale").tolist()
    return {
        "architectures": ["Gemma3nForCausalLM"],
        **_gemma_fields(fields, _layer_types(fields)),
        "intermediate_size": _of_each_layer(fields, "feed_forward_length"),
        "rope_local_base_freq": fields.real("rope.freq_base_swa", 1e4),
        "altup_num_inputs": fields.number("altup.num_inputs"),
        "altup_active_idx": fields.number("altup.active_idx"),
        "laurel_rank": left.shape[0],
        "activation_sparsity_pattern": [round(NormalDist().cdf(deviation), 6) for deviation in deviations],
    }


def _layer_types(fields: GgufFile) -> list[str]:
    slides = fields.numbers("attention.sliding_window_pattern").tolist()
    if len(slides) != fields.number("block_count"):
        message = f"{fields.prefix}attention.sliding_window_pattern must have an entry for each layer"
        raise CheckpointError(f"{fields.path}: {message}")
    return [_SLIDING if slid else _FULL for slid in slides]


def _of_each_layer(fields: GgufFile, key: str) -> list[int]:
    """A number that a file has for all layers alike, or for each of them."""
    value = fields.value(key)
    layers = fields.number("block_count")
    if not isinstance(value, np.ndarray):
        return [fields.number(key)] * layers
    numbers: list[int] = value.tolist()
    if len(numbers) != layers:
        raise CheckpointError(f"{fields.path}: {fields.prefix}{key} must have an entry for each layer")
    return numbers


def _gemma_fields(fields: GgufFile, types: list[str]) -> Mapping[str, Any]:
    """The fields that both have."""
    size = fields.number("embedding_length_per_layer_input", 0)
    embeddings = fields.tensors.get(EMBEDDING_TABLES[1])
    cap = fields.value("final_logit_softcapping")
    return {
        "layer_types": types,
        "num_kv_shared_layers": fields.number("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": embeddings.shape[0] if embeddings is not None else 0,
        "final_logit_softcapping": None if cap is None else fields.real("final_logit_softcapping"),
    }


def _widths(fields: GgufFile, first_shared: int) -> Mapping[str, Any]:
    """Layers that share a cache may have an MLP of twice the width."""
    key = "feed_forward_length"
    widths = _of_each_layer(fields, key)
    width = min(widths)
    double = max(widths) == 2 * width
    if widths != [width] * first_shared + [2 * width if double else width] * (len(widths) - first_shared):
        raise CheckpointError(f"{fields.path}: {fields.prefix}{key} {widths} is not supported")
    return {"intermediate_size": width, "use_double_wide_mlp": double}


def _experts(fields: GgufFile) -> Mapping[str, Any]:
    if not fields.number("expert_count", 0):
        return {}
    chosen = plain_experts(fields)
    return {
        "enable_moe_block": True,
        "num_experts": chosen["num_local_experts"],
        "top_k_experts": chosen["num_experts_per_tok"],
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
    }
