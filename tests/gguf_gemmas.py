"""What llama.cpp's converter makes of Gemma 3n and 4, by the names of the public gguf package."""

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import gguf
import torch
from torch import Tensor

from tests.gguf_converters import file_name

ARCHITECTURES = {"gemma3n_text": gguf.MODEL_ARCH.GEMMA3N, "gemma4_text": gguf.MODEL_ARCH.GEMMA4}
SLIDING, FULL = "sliding_attention", "full_attention"


def architecture_of(config: Any) -> str | None:
    """llama.cpp's name; None: another module writes it."""
    kind = ARCHITECTURES.get(config.model_type)
    return None if kind is None else gguf.MODEL_ARCH_NAMES[kind]


def describe(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """The metadata."""
    layers = config.num_hidden_layers
    slides = [kind == SLIDING for kind in config.layer_types]
    writer.add_block_count(layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count(config.num_attention_heads)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(config.rope_parameters[FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters[SLIDING]["rope_theta"])
    if architecture == "gemma4":
        describe_gemma4(writer, config, slides)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    deviations = torch.distributions.Normal(0, 1).icdf(torch.tensor(config.activation_sparsity_pattern))
    assert deviations[0] == NormalDist().inv_cdf(config.activation_sparsity_pattern[0])
    writer.add_activation_sparsity_scale(deviations.tolist())


def describe_gemma4(writer: gguf.GGUFWriter, config: Any, slides: list[bool]) -> None:
    full = config.per_layer_config[slides.index(False)]
    heads = [config.per_layer_config[layer].num_key_value_heads for layer in range(len(slides))]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_rope_dimension_count(full.head_dim)
    sliding = config.per_layer_config[slides.index(True)]
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_value_length_swa(sliding.head_dim)
    writer.add_rope_dimension_count_swa(sliding.head_dim)
    width = config.intermediate_size
    first_shared = config.num_hidden_layers - config.num_kv_shared_layers
    doubled = [2 * width if layer >= first_shared else width for layer in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(doubled if config.use_double_wide_mlp else width)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def stored_tensors(
    weights: dict[str, Tensor], config: Any, architecture: str, halved: bool = True
) -> Iterator[tuple[str, Any]]:
    """The tensors by the file's names; no matrix is `halved` here."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    streams = dict[str, list[Tensor]]()
    for name, value in sorted(weights.items()):
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.startswith("model.altup_"):
            streams.setdefault(name.rsplit(".", 2)[0], []).append(value)
        elif name.endswith("router.scale"):
            yield f"{layer}.ffn_gate_inp.scale", value.numpy()
        elif name.endswith("router.per_expert_scale"):
            yield f"{layer}.ffn_down_exps.scale", value.numpy()
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            own = name if name.endswith(".weight") else f"{name}.weight"
            yield file_name(names, own), value.contiguous().numpy()
    for own, matrices in streams.items():
        yield file_name(names, f"{own}.weight"), torch.stack(matrices).numpy()
    if architecture == "gemma4":
        half = config.per_layer_config[config.layer_types.index(FULL)].head_dim // 2
        rotated = int(half * config.rope_parameters[FULL]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated)).numpy()
