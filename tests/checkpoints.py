"""Tiny checkpoints that behave like real ones: random weights by transformers, a trained tokenizer beside them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from charonia.bench.checkpoint import write_random

VOCAB = 384
EOS = 0
WINDOW = 19
"""Shorter than most prompts, and no multiple of a block."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
"""Qwen's recipe for long texts; of so few pairs some are kept, some blended and some slowed."""


CORRECTED: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
"""Experts of a corrected sigmoid router, behind a dense layer."""
MAMBA = {
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": VOCAB,
    "state_size": 6,
    "time_step_rank": 5,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "dtype": "float32",
}
GEMMA4 = LLAMA | {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
    "vocab_size_per_layer_input": VOCAB,
    "tie_word_embeddings": True,
}


def longrope(pairs: int) -> dict[str, Any]:
    """Phi 3.5's rotation, trained with 64 tokens."""
    short, long = ([1 + step * pair / pairs for pair in range(pairs)] for step in (0.5, 6.0))
    return {
        "model_type": "phi3",
        "pad_token_id": None,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": short,
            "long_factor": long,
        },
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-llama3-tied": LLAMA | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "llama-linear-biased": LLAMA
    | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "qwen2": LLAMA | {"model_type": "qwen2", "num_key_value_heads": 1, "num_hidden_layers": 3},
    "qwen2-yarn": LLAMA | {"model_type": "qwen2", "rope_parameters": YARN_ROPE},
    "llama-gelu": LLAMA | {"hidden_act": "gelu"},
    "llama-quick-gelu": LLAMA | {"hidden_act": "quick_gelu"},
    "phi3.5": LLAMA | longrope(8),
    "phi4-mini": LLAMA | longrope(6) | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    "qwen2-window": LLAMA
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": WINDOW, "head_dim": 16},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32},
    "qwen3-moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": LLAMA | {"model_type": "phi3", "sliding_window": WINDOW, "pad_token_id": None},
    "gemma2": LLAMA
    | {
        "model_type": "gemma2",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3": LLAMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "gemma3n": LLAMA
    | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "head_dim": 16,
        "sliding_window": WINDOW,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    # Keys' projections that make values, of larger heads.
    "gemma4": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    # Embeddings for layers, and caches that layers share.
    "gemma4-small": GEMMA4
    | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "gemma4-moe": GEMMA4
    | {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "gpt-oss": LLAMA
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN_ROPE | {"truncate": False},
    },
    "lfm2": LLAMA
    | {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 16,
        "conv_bias": True,
    },
    "granite-hybrid": LLAMA
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "nemotron-h": LLAMA
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 24,
        "n_groups": 2,
        "pad_token_id": None,
    },
    "nemotron-3": LLAMA
    | {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
        "routed_scaling_factor": 2.5,
        "pad_token_id": None,
    },
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "dtype": "float32",
    },
    "mamba": MAMBA,
    "falcon-mamba": MAMBA | {"model_type": "falcon_mamba", "mixer_rms_eps": 1e-5, "use_bias": True},
    "zamba2": LLAMA
    | {
        "model_type": "zamba2",
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 24,
        "mamba_ngroups": 2,
        "num_mem_blocks": 2,
        "adapter_rank": 6,
        "use_mem_rope": True,
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "falcon-h1": LLAMA
    | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_d_state": 24,
        "mamba_n_groups": 2,
        "lm_head_multiplier": 0.6,
        "embedding_multiplier": 2.5,
        "mlp_multipliers": [0.8, 1.3],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 1.3, 1.3, 0.8, 1.1],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
        "pad_token_id": None,
    },
    "bamba": LLAMA
    | {
        "model_type": "bamba",
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "pad_token_id": None,
    },
    "granite-hybrid-moe": LLAMA
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "intermediate_size": 40,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
    },
    "lfm2-moe": LLAMA
    | {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
    },
    "qwen3-next": LLAMA
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3.5-moe": LLAMA
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3.5": LLAMA
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "smollm3": LLAMA
    | {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2, "pad_token_id": None},
    "ministral3": LLAMA
    | {
        "model_type": "ministral3",
        "head_dim": 16,
        "pad_token_id": None,
        "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
    },
    "glm4-moe": LLAMA | CORRECTED | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
    "dots1": LLAMA
    | CORRECTED
    | {"model_type": "dots1", "norm_topk_prob": True, "sliding_window": None, "n_group": 4, "topk_group": 2},
    "solar-open": LLAMA | CORRECTED | {"model_type": "solar_open", "head_dim": 16, "num_hidden_layers": 1},
    "minimax-m2": LLAMA
    | {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
    "olmo2": LLAMA | {"model_type": "olmo2"},
    "olmo3": LLAMA
    | {
        "model_type": "olmo3",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": {"rope_theta": 1e4}},
    },
    "exaone4": LLAMA
    | {
        "model_type": "exaone4",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "seed-oss": LLAMA | {"model_type": "seed_oss", "head_dim": 16, "attention_out_bias": True},
    "glm": LLAMA | {"model_type": "glm", "head_dim": 16, "pad_token_id": None},
    "glm4": LLAMA | {"model_type": "glm4", "head_dim": 32, "pad_token_id": None},
    "ernie": LLAMA | {"model_type": "ernie4_5", "head_dim": 16},
    "ernie-moe": LLAMA
    | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
    },
}
"""What the engine must compute exactly as transformers does, by files of its own."""


def with_images(model_type: str, text: str, vision: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The named configuration as the language part of a model that takes images too."""
    eye = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return {
        "model_type": model_type,
        "text_config": CONFIGS[text] | {"bos_token_id": 1},
        "vision_config": eye | layers | vision,
        "dtype": "float32",
        **others,
    }


LLAMA_KIN = (
    "ministral3",
    "glm4-moe",
    "dots1",
    "solar-open",
    "minimax-m2",
    "olmo2",
    "olmo3",
    "exaone4",
    "seed-oss",
    "glm",
    "glm4",
    "ernie",
    "ernie-moe",
)
"""Families of Llama's kind that differ from it in a few fields."""

QWEN_EYE = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
CONFIGS["qwen2.5-vl-text"] = LLAMA | {
    "model_type": "qwen2_5_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
QWEN2_EYE = {"depth": 1, "num_heads": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
CONFIGS["qwen2-vl-text"] = CONFIGS["qwen2.5-vl-text"] | {"model_type": "qwen2_vl_text"}
CONFIGS["qwen3-vl-text"] = CONFIGS["qwen2.5-vl-text"] | {"model_type": "qwen3_vl_text", "head_dim": 16}
CONFIGS["qwen3-vl-moe-text"] = CONFIGS["qwen3-vl-text"] | {
    "model_type": "qwen3_vl_moe_text",
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
CONFIGS["glm4v-text"] = LLAMA | {"model_type": "glm4v_text", "num_attention_heads": 2, "rope_parameters": _GLM_ROPE}
CONFIGS["glm4v-moe-text"] = (
    LLAMA
    | CORRECTED
    | {
        "model_type": "glm4v_moe_text",
        "head_dim": 32,
        "rope_parameters": _GLM_ROPE,
    }
)
CONFIGS["glm-ocr-text"] = CONFIGS["glm4v-text"] | {"model_type": "glm_ocr_text", "head_dim": 32}
_GLM_EYE = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
PARTS = {
    "gemma3-image": with_images(
        "gemma3", "gemma3", {"model_type": "siglip_vision_model"}, mm_tokens_per_image=4, image_token_index=380
    ),
    "gemma4-image": with_images(
        "gemma4",
        "gemma4",
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
        image_token_id=380,
        audio_config=None,
        tie_word_embeddings=True,
    ),
    "gemma4-small-image": with_images(
        "gemma4",
        "gemma4-small",
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
        image_token_id=380,
        audio_config=None,
        tie_word_embeddings=True,
    ),
    "mistral3": with_images(
        "mistral3",
        "mistral",
        {"model_type": "pixtral", "head_dim": 16},
        image_token_index=380,
        tie_word_embeddings=False,
    ),
    "ministral3-image": with_images(
        "mistral3",
        "ministral3",
        {"model_type": "pixtral", "head_dim": 16},
        image_token_index=380,
        tie_word_embeddings=False,
    ),
    "llava": with_images("llava", "llama", {"model_type": "clip_vision_model"}, image_token_index=380),
    "lfm2-vl": with_images(
        "lfm2_vl",
        "lfm2",
        {"model_type": "siglip2_vision_model", "num_patches": 16},
        image_token_id=380,
        projector_hidden_size=48,
    ),
    "glm4v": with_images("glm4v", "glm4v-text", _GLM_EYE, image_token_id=380, tie_word_embeddings=False),
    "glm4v-moe": with_images("glm4v_moe", "glm4v-moe-text", _GLM_EYE, image_token_id=380, tie_word_embeddings=False),
    "glm-ocr": with_images("glm_ocr", "glm-ocr-text", _GLM_EYE, image_token_id=380, tie_word_embeddings=False),
    "qwen2-vl": with_images("qwen2_vl", "qwen2-vl-text", QWEN2_EYE, image_token_id=380, tie_word_embeddings=False),
    "qwen2.5-vl": with_images("qwen2_5_vl", "qwen2.5-vl-text", QWEN_EYE, image_token_id=380, tie_word_embeddings=False),
    "qwen3-vl": with_images(
        "qwen3_vl",
        "qwen3-vl-text",
        QWEN_EYE | {"num_hidden_layers": 2, "deepstack_visual_indexes": [0, 1]},
        image_token_id=380,
        tie_word_embeddings=True,
    ),
    "qwen3-vl-moe": with_images(
        "qwen3_vl_moe",
        "qwen3-vl-moe-text",
        QWEN_EYE | {"num_hidden_layers": 2, "deepstack_visual_indexes": [0, 1]},
        image_token_id=380,
        tie_word_embeddings=False,
    ),
    "qwen3.5-image": with_images(
        "qwen3_5",
        "qwen3.5",
        QWEN_EYE | {"model_type": "qwen3_5_vision", "in_channels": 3, "num_position_embeddings": 16},
        image_token_id=380,
        tie_word_embeddings=False,
    ),
}
"""Models that take images too, of which the language part is served."""
PARTS["gemma4-image"]["text_config"]["use_bidirectional_attention"] = "vision"
CONFIGS |= PARTS

DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rope_parameters": YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 1.2},
}
LATENTS = {
    "deepseek-v3": DEEPSEEK,
    "deepseek-v2": DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    "deepseek-v2-lite": DEEPSEEK
    | {"model_type": "deepseek_v2", "topk_method": "greedy", "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek-v3-halves": DEEPSEEK | {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True},
    "deepseek-v3.2": DEEPSEEK
    | {"model_type": "deepseek_v32", "index_n_heads": 2, "index_head_dim": 32, "index_topk": 192},
    "glm5": DEEPSEEK
    | {"model_type": "glm_moe_dsa", "index_n_heads": 2, "index_head_dim": 32, "index_topk": 192}
    | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "shared"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "glm4-lite": DEEPSEEK
    | {
        "model_type": "glm4_moe_lite",
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""Attention over latents, and experts of sigmoid routers in groups."""
CONFIGS |= LATENTS

FOREIGN: dict[str, dict[str, Any]] = {
    "gpt-neox": LLAMA | {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "granite": LLAMA
    | {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "starcoder2": LLAMA | {"model_type": "starcoder2", "sliding_window": WINDOW},
    "opt": LLAMA | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
    "cohere2": LLAMA
    | {
        "model_type": "cohere2",
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "pad_token_id": None,
    },
}
"""The same through transformers' modules: half of a head turned, scales, windows, layers without positions, learned
positions."""

CONFIGS |= FOREIGN

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINES = (
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "The quick brown fox jumps over the lazy dog.\n",
    "Charon ferries tokens across the river, one obol each.\n",
    "Grüße aus München, naïve café, 東京, 🚣.\n",
)


def write_checkpoint(directory: Path, config: dict[str, Any] = LLAMA, *, seed: int = 0, shard: str = "5GB") -> Path:
    """A whole checkpoint in `directory`: weights, config, generation_config, tokenizer and chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    write_random(directory, config, seed=seed, shard=shard)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE of at most VOCAB tokens; id EOS ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
