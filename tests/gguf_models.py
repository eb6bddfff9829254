"""Tiny models in GGUF, written by the public gguf package from checkpoints, as llama.cpp's converter would."""

import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests import gguf_converters, gguf_gemmas

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "olmo3": "olmo2",
}
"""model_type in config.json -> llama.cpp's architecture, where that has another name."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
NORMS_BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "qwen35": QWEN35,
    **dict.fromkeys(("olmo2", "exaone4", "seed_oss", "glm4moe"), NORMS_BEHIND),
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def write_gguf(checkpoint: Path, target: Path, kind: str = "F32", extra: Mapping[str, Any] | None = None) -> Path:
    """Write the model in `checkpoint` with its matrices of that type; `extra`: more metadata, such as a tokenizer."""
    config = AutoConfig.from_pretrained(checkpoint)
    converter = next((own for own in (gguf_converters, gguf_gemmas) if own.architecture_of(config)), None)
    usual = ARCHITECTURES.get(config.model_type, config.model_type)
    architecture = usual if converter is None else converter.architecture_of(config)
    writer = gguf.GGUFWriter(target, architecture)
    (converter or sys.modules[__name__]).describe(writer, config, architecture)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "qwen35":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    extra = dict(extra or {})
    halved = not extra.pop("keep_kv_b", False)
    for key, value in extra.items():
        write_value(writer, key, value)
    files = [load_file(file) for file in checkpoint.glob("*.safetensors")]
    weights = {name: value.float() for file in files for name, value in file.items()}
    if converter is None:
        weights = {name: value.squeeze(1) if value.ndim == 3 else value for name, value in weights.items()}
        tensors = stored_tensors(weights, config, architecture)
    else:
        tensors = converter.stored_tensors(weights, config, architecture, halved)
    for name, values in tensors:
        if kind.startswith(FLOAT4):
            values, own = float4_experts(name, values, kind)
        else:
            own = stored_type(name, values, kind)
        writer.add_tensor(name, encoded(values, own), raw_dtype=own)
    for name, factors in rope_tensors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    save(writer)
    return target


def rounded_checkpoint(checkpoint: Path, target: Path, kind: str) -> Path:
    """The same checkpoint with the weights that a file of this type has."""
    shutil.copytree(checkpoint, target)
    for file in target.glob("*.safetensors"):
        weights = load_file(file)
        for name, value in weights.items():
            own = stored_type(name, value.numpy(), kind)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(encoded(value.numpy(), own), own))
        save_file(weights, file, {"format": "pt"})
    return target


PLAIN_PARTS = "_inp", "conv.conv", "conv1d", "norm", "_bias", "exp_probs"
PLAIN_ENDINGS = (
    ".mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "mixer.gate.weight",
    "feed_forward.gate.weight",
    "shared_expert_gate.weight",
    "router.layer.weight",
    "router.weight",
    "router.proj.weight",
    ".bias",
    "ssm_a",
    "ssm_d",
)
"""Of names here and there."""


FLOAT4 = "MXFP4"


def float4_experts(name: str, values: Any, kind: str) -> tuple[Any, gguf.GGMLQuantizationType]:
    """Experts' matrices as gpt-oss has them, and of kind "MXFP4 as floats" the same numbers as floats."""
    types = gguf.GGMLQuantizationType
    if not name.endswith("_exps.weight"):
        return values, types.F32
    if kind == FLOAT4:
        return values, types.MXFP4
    return gguf.quants.dequantize(gguf.quants.quantize(values, types.MXFP4), types.MXFP4), types.F32


def stored_type(name: str, values: Any, kind: str) -> gguf.GGMLQuantizationType:
    """Vectors and routers stay as they are; in Q4_K_M values and the way down are Q6_K."""
    if kind == "Q4_K_M":
        kind = "Q6_K" if any(part in name for part in ("attn_v", "v_proj", "ffn_down", "down_proj")) else "Q4_K"
    plain = values.ndim == 1 or any(part in name for part in PLAIN_PARTS) or name.endswith(PLAIN_ENDINGS)
    return gguf.GGMLQuantizationType["F32" if plain else kind]


def encoded(values: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Rows in blocks. The package makes none of 256 numbers: for these any will do that are about as large."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(values, kind)
    rows = [drawn_blocks(row, kind) for row in values.reshape(-1, values.shape[-1])]
    return np.stack(rows).reshape(*values.shape[:-1], -1)


def drawn_blocks(row: Any, kind: gguf.GGMLQuantizationType) -> Any:
    """Blocks that depend on the row alone: a random number for each, around zero."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(zlib.crc32(row.tobytes())).integers(0, 256, (len(row) // numbers, size), np.uint8)
    step = row.std() / {"Q4_K": 300, "Q5_K": 600, "Q6_K": 1000}[kind.name]
    places = {208: 1.0} if kind.name == "Q6_K" else {0: 1.0, 2: 7.5 if kind.name == "Q4_K" else 15.5}
    for place, factor in places.items():
        blocks[:, place : place + 2] = np.array([step * factor], np.float16).view(np.uint8)
    return blocks.ravel()


def save(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def describe(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    drafts = int(architecture == "glm4moe")
    writer.add_block_count(config.num_hidden_layers + drafts)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    heads_kv = config.num_key_value_heads
    attends = [kind != "conv" for kind in getattr(config, "layer_types", None) or ()]
    writer.add_head_count_kv(heads_kv if all(attends) else [heads_kv * own for own in attends])
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if head_dim != config.hidden_size // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) and architecture not in ("llama", "qwen2"):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "sliding_window", None) and architecture in ("olmo2", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        factor = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(original))))
    if getattr(config, "num_experts_per_tok", None):
        counts = (getattr(config, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
        writer.add_expert_count(next(filter(None, counts)))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("glm4moe", "minimax-m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
    if architecture == "glm4moe":
        writer.add_nextn_predict_layers(drafts)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(8, np.float32))
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def rope_tensors(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": 1 / ((1 - smooth) / rope["factor"] + smooth)}


def tiled_heads(value: torch.Tensor, name: str, config: Any) -> torch.Tensor:
    """What value heads of a delta rule have, with the first of every key head first, as the converter puts it."""
    key_heads, served = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    if "out_proj" in name:
        return value.unflatten(1, (key_heads, served, -1)).transpose(1, 2).flatten(1)
    if name.endswith(".norm.weight"):
        return value
    first = 2 * key_heads * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    heads = value[first:].unflatten(0, (key_heads, served, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((value[:first], heads))


def stored_tensors(weights: dict[str, torch.Tensor], config: Any, architecture: str) -> Iterator[tuple[str, Any]]:
    names, experts = NAMES | OWN.get(architecture, {}), dict[str, dict[int, Any]]()
    for name, value in weights.items():
        module, _, kind = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".experts." in name:
            layer, number, one = (module.split(".")[at] for at in (2, -2, -1))
            experts.setdefault(f"blk.{layer}.ffn_{EXPERTS[one]}_exps.weight", {})[int(number)] = value.numpy()
            continue
        if "linear_attn." in name:
            value = tiled_heads(value, name, config)
        if kind == "e_score_correction_bias":
            yield f"blk.{module.split('.')[2]}.exp_probs_b.bias", value.contiguous().numpy()
            continue
        if kind in ("A_log", "dt_bias"):
            stored = f"blk.{module.split('.')[2]}.{'ssm_a' if kind == 'A_log' else 'ssm_dt.bias'}"
            yield stored, (-value.exp() if kind == "A_log" else value).contiguous().numpy()
            continue
        if module in names:
            stored = f"{names[module]}.{kind}"
        else:
            _, _, layer, part = module.split(".", 3)
            stored = f"blk.{layer}.{names[part]}.{kind}"
        plus_one = architecture.startswith("gemma") or architecture == "qwen35"
        if plus_one and "norm" in stored and "ssm_norm" not in stored:
            value = value + 1
        if architecture in ("llama", "smollm3") and ("attn_q." in stored or "attn_k." in stored):
            heads = config.num_attention_heads if "attn_q." in stored else config.num_key_value_heads
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        yield stored, value.contiguous().numpy()
    for stored, parts in experts.items():
        yield stored, np.stack([parts[number] for number in range(len(parts))])
