"""What llama.cpp's converter makes of families whose tensors or metadata it changes, by the names of the public gguf
package: hybrids, mixtures beside shared experts, latents, gpt-oss."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHITECTURES = {
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    "mamba2": "mamba2",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "ernie4_5_moe": "ernie4_5-moe",
}
"""model_type in config.json -> llama.cpp's architecture."""
MAMBA = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe", "mamba2")
_KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def architecture_of(config: Any) -> str | None:
    """llama.cpp's name; None: another module writes it."""
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        return "nemotron_h_moe"
    return ARCHITECTURES.get(config.model_type)


def describe(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """The metadata."""
    layers = config.num_hidden_layers
    heads = getattr(config, "num_attention_heads", 0)
    writer.add_block_count(layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(getattr(config, "max_position_embeddings", 1 << 20))
    eps = next(getattr(config, name) for name in EPSILONS if getattr(config, name, None))
    writer.add_layer_norm_rms_eps(eps)
    writer.add_head_count(heads)
    if architecture == "mamba2":
        writer.add_feed_forward_length(0)
    elif not architecture.startswith("nemotron"):
        writer.add_feed_forward_length(config.intermediate_size)
    if heads and architecture != "deepseek2":
        attends = attending(config)
        heads_kv = config.num_key_value_heads
        writer.add_head_count_kv(heads_kv if all(attends) else [heads_kv * own for own in attends])
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    head_dim = getattr(config, "head_dim", None)
    if heads and head_dim and architecture not in ("granitehybrid", "deepseek2"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    describe_experts(writer, config, architecture)
    if architecture in MAMBA:
        describe_scan(writer, config, architecture)
    if architecture in ("qwen35moe", "qwen3next"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    if architecture == "lfm2moe":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)
    if architecture == "deepseek2":
        describe_latents(writer, config, rope)


EPSILONS = "rms_norm_eps", "norm_eps", "layer_norm_epsilon"


def attending(config: Any) -> list[bool]:
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    if config.model_type in ("granitemoehybrid", "nemotron_h", "lfm2_moe"):
        return [kind in ("attention", "full_attention") for kind in kinds]
    return [True] * config.num_hidden_layers


def describe_experts(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    names = "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"
    count = next((getattr(config, name) for name in names if getattr(config, name, None)), 0)
    if architecture == "nemotron_h":
        writer.add_feed_forward_length([config.intermediate_size] * config.num_hidden_layers)
        return
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(getattr(config, "moe_k", None) or config.num_experts_per_tok)
    if architecture == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        return
    inner = config.intermediate_size if architecture == "gpt-oss" else config.moe_intermediate_size
    writer.add_expert_feed_forward_length(inner)
    shared = getattr(config, "n_shared_experts", None) or getattr(config, "moe_num_shared_experts", None)
    if shared:
        writer.add_expert_shared_count(shared)
    for name in ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"):
        if getattr(config, name, None):
            writer.add_expert_shared_feed_forward_length(getattr(config, name))
    if architecture == "lfm2moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
    if architecture in ("nemotron_h_moe", "deepseek2"):
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if architecture == "nemotron_h_moe":
        writer.add_feed_forward_length([inner] * config.num_hidden_layers)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)


def describe_scan(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    def size(*names: str) -> int:
        return next(getattr(config, name) for name in names if getattr(config, name, None) is not None)

    heads = size("mamba_n_heads", "mamba_num_heads", "num_heads")
    writer.add_ssm_conv_kernel(size("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(size("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(size("mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * size("mamba_d_head", "mamba_head_dim", "head_dim"))
    if architecture == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def describe_latents(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def stored_tensors(
    weights: dict[str, Tensor], config: Any, architecture: str, halved: bool = True
) -> Iterator[tuple[str, Any]]:
    """The tensors by the file's names; matrices that make heads of latents are `halved`, as in newer files."""
    names = gguf.get_tensor_name_map(_KINDS[architecture], config.num_hidden_layers)
    experts = dict[str, dict[int, Tensor]]()
    for name, value in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("kv_b_proj.weight") and not halved:
            yield file_name(names, name), value.float().numpy()
            continue
        for own, changed in converted(name, value.float(), config, architecture):
            parts = own.split(".")
            if "experts" in parts and parts[parts.index("experts") + 1].isdigit():
                number = parts.pop(parts.index("experts") + 1)
                experts.setdefault(".".join(parts), {})[int(number)] = changed
                continue
            yield file_name(names, own), changed.contiguous().numpy()
    for own, matrices in experts.items():
        own = own.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        own = own.removeprefix("model.") if "feed_forward" in own else own
        yield file_name(names, own), np.stack([matrices[number].numpy() for number in range(len(matrices))])


def file_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith("blk."):
        return name
    found = names.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return str(found)


def converted(name: str, value: Tensor, config: Any, architecture: str) -> Iterator[tuple[str, Tensor]]:
    if "layers." not in name:
        outer = architecture in ("qwen35moe", "qwen3next") and name == "model.norm.weight"
        yield name, multiplied(name, value, config) if architecture == "falcon-h1" else value + outer
        return
    block = f"blk.{name.split('.')[2]}."
    module, _, part = name.rpartition(".")
    of_scan = architecture in MAMBA
    if architecture == "falcon-h1":
        value = multiplied(name, value, config)
    if part == "A_log":
        value = -tiled(name, value, config, architecture).exp()
        yield f"{block}ssm_a", value.unsqueeze(-1) if of_scan else value
    elif part == "dt_bias":
        yield f"{block}ssm_dt.bias", tiled(name, value, config, architecture)
    elif part == "D":
        yield f"{block}ssm_d", value.unsqueeze(-1)
    elif part in ("e_score_correction_bias", "expert_bias"):
        yield f"{block}exp_probs_b.bias", value
    elif part == "sinks":
        yield f"{name}.weight", value
    elif of_scan and module.endswith((".mamba.norm", ".mixer.norm")):
        groups = next(getattr(config, key) for key in ("mamba_n_groups", "n_groups") if hasattr(config, key))
        yield name, value.view(groups, -1)
    elif name.endswith("input_linear.weight"):
        yield from granite_halves(name, value, config)
    elif architecture == "granitehybrid" and name.endswith("shared_mlp.output_linear.weight"):
        yield f"{block}ffn_down{'_shexp' if config.num_local_experts else ''}.weight", value
    elif name.endswith("in_proj_qkvz.weight"):
        yield from ungrouped(block, value, config)
    elif name.endswith("kv_b_proj.weight"):
        made = config.qk_nope_head_dim + config.v_head_dim
        keys, values = value.view(-1, made, value.shape[-1]).split((config.qk_nope_head_dim, config.v_head_dim), 1)
        yield f"{block}attn_k_b.weight", keys.transpose(1, 2)
        yield f"{block}attn_v_b.weight", values
    elif architecture == "gpt-oss" and ".experts." in name:
        yield from transposed(module, part, value)
    else:
        yield name, plainly(name, value, config, architecture)


def plainly(name: str, value: Tensor, config: Any, architecture: str) -> Tensor:
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe") and ".q_proj." in name:
        return permuted(value, config.num_attention_heads)
    if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe") and ".k_proj." in name:
        return permuted(value, config.num_key_value_heads)
    if architecture in ("qwen35moe", "qwen3next"):
        if name.endswith("norm.weight") and "linear_attn" not in name:
            return value + 1
        return tiled(name, value.squeeze(1) if "conv1d" in name else value, config, architecture)
    return value.squeeze(1) if "conv" in name and value.ndim == 3 else value


def permuted(value: Tensor, heads: int) -> Tensor:
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def tiled(name: str, value: Tensor, config: Any, architecture: str) -> Tensor:
    """Value heads of Qwen 3.5's delta rule with the first of every key head first."""
    if architecture != "qwen35moe" or "linear_attn" not in name or name.endswith(".norm.weight"):
        return value
    key_heads, served = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    if "out_proj" in name:
        return value.unflatten(1, (key_heads, served, -1)).transpose(1, 2).flatten(1)
    first = 2 * key_heads * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    return torch.cat((value[:first], value[first:].unflatten(0, (key_heads, served, -1)).transpose(0, 1).flatten(0, 2)))


def ungrouped(block: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    served = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = config.linear_key_head_dim, config.linear_key_head_dim, served, served
    *mixed, gate = (part.flatten(0, 1) for part in value.unflatten(0, (-1, sum(sizes))).split(sizes, 1))
    yield f"{block}attn_qkv.weight", torch.cat(mixed)
    yield f"{block}attn_gate.weight", gate


def granite_halves(name: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    block = f"blk.{name.split('.')[2]}."
    shared = "_shexp" if config.num_local_experts else ""
    suffix = shared if "shared_mlp" in name else "_exps"
    for part, half in zip(("gate", "up"), value.chunk(2, -2), strict=True):
        yield f"{block}ffn_{part}{suffix}.weight", half


def transposed(module: str, part: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    kind = "bias" if part.endswith("_bias") else "weight"
    value = value if kind == "bias" else value.transpose(1, 2)
    if part.startswith("down_proj"):
        yield f"{module}.down_proj.{kind}", value
        return
    yield f"{module}.gate_proj.{kind}", value[:, ::2]
    yield f"{module}.up_proj.{kind}", value[:, 1::2]


def multiplied(name: str, value: Tensor, config: Any) -> Tensor:
    """Falcon-H1's numbers of config.json are in its weights."""
    entering = config.attention_in_multiplier
    factors = {
        "feed_forward.down_proj": config.mlp_multipliers[1],
        "feed_forward.gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * entering,
        "q_proj": entering,
        "v_proj": entering,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.rpartition(".")[0]
    if module.endswith("mamba.in_proj"):
        keyed = config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([config.mamba_d_ssm] * 2 + [keyed] * 2 + [config.mamba_n_heads])
        return value * config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)[:, None]
    return value * next((factor for ending, factor in factors.items() if module.endswith(ending)), 1.0)
