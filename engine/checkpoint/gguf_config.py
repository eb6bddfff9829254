"""Reads a GGUF file's metadata as the config.json of the same model, as llama.cpp's converter wrote it from one.

What the converter leaves out because llama.cpp has it as a constant of the architecture, is said here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...tokenization.gguf_file import GgufFile
from .gguf_fields import ROPE_FACTORS, head_dim, kv_heads, largest, read_numbers
from .gguf_names import EMBEDDING_TABLES
from .gguf_variants import LATENT, READ_BY, UNEQUAL, UNROUNDED, VARIANTS
from .model_spec import CheckpointError

_EMBEDDINGS, _HEAD = EMBEDDING_TABLES[0], "output.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
"""Tensors that are part of the config."""

_ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "embedding_scale": (1.0,),
    "expert_group_count": (1, 0),
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0, 0.0),
    "logit_scale": (1.0,),
    "nextn_predict_layers": (0,),
    "residual_scale": (1.0,),
    "use_parallel_residual": (False,),
}
"""Fields that would change what is computed, with the values that do not."""


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """The fields of config.json, with one of our architectures.

    Raises:
        CheckpointError: the architecture is not supported, or computes something that no config.json of it would say.
        InvalidArgument: a field is missing, or of another kind.
    """
    name = file.text("general.architecture")
    variant = VARIANTS.get(name)
    if variant is None:
        supported = ", ".join(VARIANTS)
        raise CheckpointError(f"{file.path}: architecture {name!r} is not supported; supported: {supported}")
    if _EMBEDDINGS not in file.tensors or len(file.tensors[_EMBEDDINGS].shape) != 2:
        raise CheckpointError(f"{file.path}: it has no matrix {_EMBEDDINGS}")
    fields = replace(file, prefix=f"{name}.")
    for key, usual in _ONLY_VALUES.items():
        if key in READ_BY.get(name, ()):
            continue
        value = fields.value(key, usual[0])
        if value not in usual:
            raise CheckpointError(f"{file.path}: {name}.{key} {value} is not supported; only {usual[0]} is")
    size = head_dim(fields)
    if name not in LATENT and fields.number("attention.value_length", size) != size:
        raise CheckpointError(f"{file.path}: heads whose keys and values have different lengths are not supported")
    heads = fields.number("attention.head_count")
    layers = fields.number("block_count")
    if layers > len(file.tensors):
        raise CheckpointError(f"{file.path}: {name}.block_count is {layers}, but it has {len(file.tensors)} tensors")
    config = {
        "vocab_size": file.tensors[_EMBEDDINGS].shape[0],
        "hidden_size": fields.number("embedding_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if name in UNEQUAL else max(kv_heads(fields), default=heads),
        "head_dim": size,
        "intermediate_size": largest(fields, "feed_forward_length", fields.number("expert_feed_forward_length", 1)),
        "max_position_embeddings": fields.number("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": fields.number("attention.sliding_window", 0) or None,
        "dtype": _dtype(file),
        "rope_scaling": _rope_scaling(fields),
    }
    return config | _partial_rotary(fields) | variant(fields)


def _dtype(file: GgufFile) -> str:
    """The dtype to compute in: of most of the numbers, if they are stored as such; else bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.bytes
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _partial_rotary(fields: GgufFile) -> dict[str, Any]:
    size = head_dim(fields)
    rotated = fields.number("rope.dimension_count", size)
    return {} if rotated == size else {"partial_rotary_factor": rotated / size}


def _rope_scaling(fields: GgufFile) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json. Llama 3's kind is stored as the divisors that it comes to, so it becomes the
    kind that has divisors, the same ones for texts of any length."""
    length = fields.number("context_length")
    original = fields.number("rope.scaling.original_context_length", length)
    if ROPE_FACTORS in fields.tensors:
        factors = read_numbers(fields, ROPE_FACTORS)
        return _longrope(factors, factors, length, 1.0)
    if _LONG_FACTORS in fields.tensors:
        long = read_numbers(fields, _LONG_FACTORS)
        short = read_numbers(fields, _SHORT_FACTORS)
        return _longrope(short, long, original, fields.real("rope.scaling.attn_factor", 1.0))
    # Older files have the factor of linear scaling alone.
    kind = fields.text("rope.scaling.type", "none" if fields.value("rope.scale_linear") is None else "linear")
    factor = fields.real("rope.scaling.factor", fields.real("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind not in ("linear", "yarn"):
        message = f"rope scaling {kind!r} is not supported without factors; linear and yarn are"
        raise CheckpointError(f"{fields.path}: {message}")
    scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    named = {"rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow"}
    scaling |= {ours: fields.real(theirs) for theirs, ours in named.items() if fields.value(theirs) is not None}
    architecture = fields.prefix.removesuffix(".")
    if architecture in LATENT and (grown := fields.real("rope.scaling.yarn_log_multiplier", 0.0)):
        # A tenth of it; config.json has it for scores and for what is rotated, the same in what is published.
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * grown)
    return scaling | ({"truncate": False} if architecture in UNROUNDED else {})


def _longrope(short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": 1.0,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }
