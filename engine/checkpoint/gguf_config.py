"""Reads a GGUF file's metadata as the config.json of the same model, as llama.cpp's converter wrote it from one.

What the converter leaves out because llama.cpp has it as a constant of the architecture, is said here.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.regular_files import open_regular
from ...tokenization.gguf_file import GgufFile
from .model_spec import CheckpointError

_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"
_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
ROPE_TENSORS = (_ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
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

_READ_BY: Mapping[str, tuple[str, ...]] = {
    "glm4moe": ("nextn_predict_layers", "expert_shared_count", "expert_weights_norm", "expert_weights_scale"),
    "minimax-m2": ("expert_weights_norm",),
}
"""The fields of these that an architecture reads."""

_LARGEST_ROPE = 1 << 12
"""Numbers that such a tensor may have."""


def read_gguf_config(file: GgufFile) -> dict[str, Any]:
    """The fields of config.json, with one of our architectures.

    Raises:
        CheckpointError: the architecture is not supported, or computes something that no config.json of it would say.
        InvalidArgument: a field is missing, or of another kind.
    """
    name = file.text("general.architecture")
    variant = _VARIANTS.get(name)
    if variant is None:
        supported = ", ".join(_VARIANTS)
        raise CheckpointError(f"{file.path}: architecture {name!r} is not supported; supported: {supported}")
    if _EMBEDDINGS not in file.tensors or len(file.tensors[_EMBEDDINGS].shape) != 2:
        raise CheckpointError(f"{file.path}: it has no matrix {_EMBEDDINGS}")
    fields = replace(file, prefix=f"{name}.")
    for key, usual in _ONLY_VALUES.items():
        if key in _READ_BY.get(name, ()):
            continue
        value = fields.value(key, usual[0])
        if value not in usual:
            raise CheckpointError(f"{file.path}: {name}.{key} {value} is not supported; only {usual[0]} is")
    head_dim = _head_dim(fields)
    if fields.number("attention.value_length", head_dim) != head_dim:
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
        "num_key_value_heads": max(_kv_heads(fields), default=heads),
        "head_dim": head_dim,
        "intermediate_size": fields.number("feed_forward_length", fields.number("expert_feed_forward_length", 1)),
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


def _kv_heads(fields: GgufFile) -> list[int]:
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


def _head_dim(fields: GgufFile) -> int:
    shared = fields.number("embedding_length") // max(fields.number("attention.head_count"), 1)
    size = fields.number("attention.key_length", shared)
    if size < 1:
        raise fields.error(f"{fields.prefix}attention.key_length must be at least 1, got {size}")
    return size


def _dtype(file: GgufFile) -> str:
    """The dtype to compute in: of most of the numbers, if they are stored as such; else bfloat16."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.bytes
    return {"F32": "float32", "F16": "float16"}.get(max(sizes, key=lambda name: sizes[name]), "bfloat16")


def _partial_rotary(fields: GgufFile) -> dict[str, Any]:
    head_dim = _head_dim(fields)
    rotated = fields.number("rope.dimension_count", head_dim)
    return {} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}


def _rope_scaling(fields: GgufFile) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json. Llama 3's kind is stored as the divisors that it comes to, so it becomes the
    kind that has divisors, the same ones for texts of any length."""
    length = fields.number("context_length")
    original = fields.number("rope.scaling.original_context_length", length)
    if _ROPE_FACTORS in fields.tensors:
        factors = _numbers(fields, _ROPE_FACTORS)
        return _longrope(factors, factors, length, 1.0)
    if _LONG_FACTORS in fields.tensors:
        long = _numbers(fields, _LONG_FACTORS)
        short = _numbers(fields, _SHORT_FACTORS)
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
    return scaling | {ours: fields.real(theirs) for theirs, ours in named.items() if fields.value(theirs) is not None}


def _longrope(short: list[float], long: list[float], original: int, attention: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": 1.0,
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _numbers(file: GgufFile, name: str) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.bytes > 4 * _LARGEST_ROPE:
        raise CheckpointError(f"{file.path}: {name} must be there, with at most {_LARGEST_ROPE} numbers in F32")
    with open_regular(tensor.file) as opened:
        opened.seek(tensor.offset)
        numbers = np.frombuffer(opened.read(tensor.bytes), "<f4")
    if not (numbers > 0).all():
        raise CheckpointError(f"{file.path}: the numbers of {name} must be positive")
    return [float(number) for number in numbers]


def _llama(fields: GgufFile) -> dict[str, Any]:
    """Llama's, Mistral's and Mixtral's are one architecture there."""
    if fields.number("expert_count", 0):
        return {"architectures": ["MixtralForCausalLM"], **_experts(fields)}
    windowed = fields.number("attention.sliding_window", 0) > 0
    return {"architectures": ["MistralForCausalLM" if windowed else "LlamaForCausalLM"]}


def _experts(fields: GgufFile) -> dict[str, Any]:
    return {
        "num_local_experts": fields.number("expert_count"),
        "num_experts_per_tok": fields.number("expert_used_count"),
        "norm_topk_prob": True,
    }


def _qwen3_moe(fields: GgufFile) -> dict[str, Any]:
    layers = range(fields.number("block_count"))
    dense = [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" not in fields.tensors]
    inner = fields.number("expert_feed_forward_length", fields.number("feed_forward_length", 1))
    sizes = {"moe_intermediate_size": inner, "mlp_only_layers": dense}
    return {"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": False, **sizes, **_experts(fields)}


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
        scalar = share if fields.number("block_count") == layers_of_27b else _head_dim(fields)
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


def _sliding_layers(fields: GgufFile) -> dict[str, Any]:
    """Which layers have a window, where the file says it; else the architecture's rule holds."""
    key = "attention.sliding_window_pattern"
    pattern = fields.value(key)
    if pattern is None:
        return {}
    if isinstance(pattern, np.ndarray):
        return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern.tolist()]}
    return {"sliding_window_pattern": fields.number(key)}


def _lfm2(fields: GgufFile) -> dict[str, Any]:
    """Layers without key/value heads convolve."""
    if fields.number("attention.sliding_window", 0):
        raise CheckpointError(f"{fields.path}: {fields.prefix}attention.sliding_window is not supported beside states")
    counts = _kv_heads(fields)
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if heads else "conv" for heads in counts] or None,
        "conv_L_cache": fields.number("shortconv.l_cache"),
        "norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _qwen3_5(fields: GgufFile) -> dict[str, Any]:
    """Layers with decays keep states."""
    layers = range(fields.number("block_count"))
    recurs = [f"blk.{layer}.ssm_a" in fields.tensors for layer in layers]
    value_heads = fields.number("ssm.time_step_rank")
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention" if state else "full_attention" for state in recurs],
        "linear_num_key_heads": fields.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields.number("ssm.state_size"),
        "linear_value_head_dim": fields.number("ssm.inner_size") // max(value_heads, 1),
        "linear_conv_kernel_dim": fields.number("ssm.conv_kernel"),
    }


def _kin(architecture: str) -> Callable[[GgufFile], dict[str, Any]]:
    """A family of Llama's kind without layers that have a window: those of OLMo 3 and the larger EXAONE 4 also rotate
    differently by layer, which their files say in ways that were never at hand."""

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


def _sigmoid_experts(fields: GgufFile) -> dict[str, Any]:
    """Experts that are chosen by sigmoids with a correction, and weighed without it."""
    if (gating := fields.number("expert_gating_func", 2)) != 2:
        raise CheckpointError(f"{fields.path}: {fields.prefix}expert_gating_func {gating} is not supported; only 2 is")
    return {
        **_experts(fields),
        "moe_intermediate_size": fields.number("expert_feed_forward_length"),
        "norm_topk_prob": bool(fields.value("expert_weights_norm", True)),
    }


def _glm4_moe(fields: GgufFile) -> dict[str, Any]:
    """Blocks behind the last layer, which draft, are left out."""
    return {
        "num_hidden_layers": fields.number("block_count") - fields.number("nextn_predict_layers", 0),
        "architectures": ["Glm4MoeForCausalLM"],
        **_sigmoid_experts(fields),
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
    return {"architectures": ["MiniMaxM2ForCausalLM"], **_sigmoid_experts(fields), "intermediate_size": inner}


_VARIANTS: Mapping[str, Callable[[GgufFile], dict[str, Any]]] = {
    "llama": _llama,
    "lfm2": _lfm2,
    "qwen2": _qwen("Qwen2ForCausalLM"),
    "qwen3": _qwen("Qwen3ForCausalLM"),
    "qwen35": _qwen3_5,
    "qwen3moe": _qwen3_moe,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _kin("Olmo2ForCausalLM"),
    "exaone4": _kin("Exaone4ForCausalLM"),
    "ernie4_5": _kin("Ernie4_5ForCausalLM"),
    "seed_oss": _seed_oss,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "gemma2": _gemma("Gemma2ForCausalLM", 46),
    "gemma3": _gemma("Gemma3ForCausalLM", 62),
}
"""general.architecture -> what is special in its config.json."""
