"""Fields and tensors of a GGUF file that several architectures read."""

from dataclasses import replace
from typing import Any

import numpy as np

from ...core.regular_files import open_regular
from ...tokenization.gguf_file import GgufFile
from .model_spec import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with divisors of rotations."""

_LARGEST_ROPE = 1 << 12
"""Numbers that such a tensor may have."""

DRAFTS = "nextn_predict_layers"
"""The field that counts blocks behind the last layer, which draft."""


def kv_heads(fields: GgufFile) -> list[int]:
    """Key/value heads as the file has them: of all layers alike, of each one, or none."""
    key = "attention.head_count_kv"
    value = fields.value(key)
    if value is None:
        return []
    if not isinstance(value, np.ndarray):
        return [fields.number(key)]
    counts: list[int] = value.tolist()
    if len(counts) != fields.number("block_count") or len({count for count in counts if count}) != 1:
        message = f"{fields.prefix}{key} must be one number for each layer, the same in all that attend"
        raise CheckpointError(f"{fields.path}: {message}")
    return counts


def largest(fields: GgufFile, key: str, default: int) -> int:
    """A number that a file has of all layers alike, or of each one."""
    value = fields.value(key)
    return int(value.max(initial=0)) if isinstance(value, np.ndarray) else fields.number(key, default)


def own_layers(fields: GgufFile) -> int:
    """Without those behind the last one, which draft."""
    return fields.number("block_count") - fields.number(DRAFTS, 0)


def drafting_blocks(file: GgufFile) -> range:
    """The blocks behind the last layer, for multi-token prediction."""
    fields = replace(file, prefix=f"{file.text('general.architecture')}.")
    return range(own_layers(fields), fields.number("block_count"))


def has_tensor(fields: GgufFile, ending: str) -> bool:
    """Whether some layer has a tensor with this name."""
    return any(name.endswith(ending) for name in fields.tensors)


def head_dim(fields: GgufFile) -> int:
    shared = fields.number("embedding_length") // max(fields.number("attention.head_count"), 1)
    size = fields.number("attention.key_length", shared)
    if size < 1:
        raise fields.error(f"{fields.prefix}attention.key_length must be at least 1, got {size}")
    return size


def plain_experts(fields: GgufFile) -> dict[str, Any]:
    return {
        "num_local_experts": fields.number("expert_count"),
        "num_experts_per_tok": fields.number("expert_used_count"),
        "norm_topk_prob": True,
    }


def sigmoid_experts(fields: GgufFile) -> dict[str, Any]:
    """Experts that are chosen by sigmoids with a correction, and weighed without it."""
    if (gating := fields.number("expert_gating_func", 2)) != 2:
        raise CheckpointError(f"{fields.path}: {fields.prefix}expert_gating_func {gating} is not supported; only 2 is")
    return {
        **plain_experts(fields),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "norm_topk_prob": bool(fields.value("expert_weights_norm", True)),
    }


def grouped_experts(fields: GgufFile) -> dict[str, Any]:
    """DeepSeek V3's, in groups or not."""
    return {
        "n_routed_experts": fields.number("expert_count"),
        "num_experts_per_tok": fields.number("expert_used_count"),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "n_shared_experts": fields.number("expert_shared_count", 0),
        "routed_scaling_factor": fields.real("expert_weights_scale", 1.0) or 1.0,
        "n_group": fields.number("expert_group_count", 1) or 1,
        "topk_group": fields.number("expert_group_used_count", 1) or 1,
    }


def read_numbers(file: GgufFile, name: str) -> list[float]:
    """The positive numbers of a tensor that is part of the config."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.bytes > 4 * _LARGEST_ROPE:
        raise CheckpointError(f"{file.path}: {name} must be there, with at most {_LARGEST_ROPE} numbers in F32")
    with open_regular(tensor.file) as opened:
        opened.seek(tensor.offset)
        numbers = np.frombuffer(opened.read(tensor.bytes), "<f4")
    if not (numbers > 0).all():
        raise CheckpointError(f"{file.path}: the numbers of {name} must be positive")
    return [float(number) for number in numbers]
