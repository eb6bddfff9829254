"""Tiny checkpoints of models that see: random weights that fit the processors of `image_processors.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from charonia.bench.checkpoint import write_random
from charonia.tokenization.tokenizer_json import read_tokenizer
from tests.checkpoints import CONFIGS, LLAMA
from tests.image_processors import write_processor

VOCAB = 448
_TEXT = LLAMA | {"vocab_size": VOCAB, "max_position_embeddings": 512}
_EYE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14}
_CLIP = _EYE | {"model_type": "clip_vision_model", "image_size": 28}
_QWEN_EYE = {"depth": 3, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64, "intermediate_size": 64}


class SeeingModel(NamedTuple):
    """A checkpoint as its files have it."""

    processor: str
    """Whose, in `PROCESSORS`."""
    token: str
    """The text that the chat template has for an image."""
    config: dict[str, Any]
    soft_token: str = ""
    """The token at whose places the rows stand, where that is another."""


def _text(name: str, **others: Any) -> dict[str, Any]:
    return CONFIGS[name] | {"vocab_size": VOCAB, "max_position_embeddings": 512} | others


def _idefics(kind: str) -> dict[str, Any]:
    return {
        "model_type": kind,
        "text_config": _TEXT | {"pad_token_id": 2},
        "vision_config": _EYE | {"model_type": f"{kind}_vision", "image_size": 56},
        "scale_factor": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }


MODELS = {
    "llava": SeeingModel("llava", "<image>", {"model_type": "llava", "text_config": _TEXT, "vision_config": _CLIP}),
    "llava-next": SeeingModel(
        "llava-next",
        "<image>",
        {
            "model_type": "llava_next",
            "text_config": _TEXT,
            "vision_config": _CLIP,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
    "glm4v": SeeingModel(
        "glm4v",
        "<|image|>",
        {
            "model_type": "glm4v",
            "text_config": _text("glm4v-text"),
            "vision_config": _QWEN_EYE | {"hidden_size": 32, "image_size": 56},
            "tie_word_embeddings": False,
        },
    ),
    "glm4v-moe": SeeingModel(
        "glm4v",
        "<|image|>",
        {
            "model_type": "glm4v_moe",
            "text_config": _text("glm4v-moe-text"),
            "vision_config": _QWEN_EYE | {"hidden_size": 32, "image_size": 56},
            "tie_word_embeddings": False,
        },
    ),
    "glm-ocr": SeeingModel(
        "glm4v",
        "<|image|>",
        {
            "model_type": "glm_ocr",
            "text_config": _text("glm-ocr-text"),
            "vision_config": _QWEN_EYE | {"hidden_size": 32},
            "tie_word_embeddings": False,
        },
    ),
    "mistral3": SeeingModel(
        "pixtral",
        "[IMG]",
        {
            "model_type": "mistral3",
            "text_config": _text("mistral", sliding_window=None),
            "vision_config": _EYE | {"model_type": "pixtral", "image_size": 84, "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "idefics3": SeeingModel("idefics3", "<image>", _idefics("idefics3")),
    "smolvlm": SeeingModel("smolvlm", "<image>", _idefics("smolvlm")),
    "lfm2-vl": SeeingModel(
        "lfm2-vl",
        "<image>",
        {
            "model_type": "lfm2_vl",
            "text_config": _text("lfm2"),
            "vision_config": _EYE | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "projector_hidden_size": 48,
        },
    ),
    "llava-onevision": SeeingModel(
        "llava-onevision",
        "<image>",
        {
            "model_type": "llava_onevision",
            "text_config": _text("qwen2"),
            "vision_config": _EYE | {"model_type": "siglip_vision_model", "image_size": 28},
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]],
            "tie_word_embeddings": False,
        },
    ),
    "lighton-ocr": SeeingModel(
        "lighton-ocr",
        "<|image_pad|>",
        {
            "model_type": "lighton_ocr",
            "text_config": _text("qwen3"),
            "vision_config": _EYE | {"model_type": "pixtral", "image_size": 84, "head_dim": 16},
        },
    ),
    "video-llama-3": SeeingModel(
        "video-llama-3",
        "<|image_pad|>",
        {
            "model_type": "video_llama_3",
            "text_config": _text("qwen2"),
            "vision_config": _EYE | {"model_type": "video_llama_3_vision"},
        },
    ),
    "vipllava": SeeingModel(
        "llava",
        "<image>",
        {"model_type": "vipllava", "text_config": _TEXT, "vision_config": _CLIP, "vision_feature_layers": [-2, 0]},
    ),
    "deepseek-vl": SeeingModel(
        "deepseek-vl",
        "<image_placeholder>",
        {
            "model_type": "deepseek_vl",
            "text_config": _TEXT,
            "vision_config": _EYE | {"model_type": "siglip_vision_model", "image_size": 28},
        },
    ),
    "aria": SeeingModel(
        "aria",
        "<image>",
        {
            "model_type": "aria",
            "text_config": _text("llama", model_type="aria_text", moe_num_experts=4, moe_topk=2),
            "vision_config": _EYE | {"model_type": "idefics3_vision", "image_size": 980, "patch_size": 140},
            "projector_patch_to_query_dict": {"49": 4},
            "tie_word_embeddings": False,
        },
    ),
    "aya-vision": SeeingModel(
        "aya-vision",
        "<image>",
        {
            "model_type": "aya_vision",
            "text_config": _text("cohere2"),
            "vision_config": _EYE | {"model_type": "siglip_vision_model", "image_size": 56, "vision_use_head": False},
        },
        "<|IMG_PATCH|>",
    ),
    "cohere2-vision": SeeingModel(
        "cohere2-vision",
        "<|IMG_PATCH|>",
        {
            "model_type": "cohere2_vision",
            "text_config": _text("cohere2"),
            "vision_config": _EYE | {"model_type": "siglip_vision_model", "image_size": 56, "vision_use_head": False},
            "alignment_intermediate_size": 96,
        },
    ),
    "deepseek-ocr2": SeeingModel(
        "deepseek-ocr2",
        "<image>",
        {
            "model_type": "deepseek_ocr2",
            "text_config": _text(
                "llama",
                model_type="deepseek_ocr2_text",
                max_position_embeddings=2048,
                moe_intermediate_size=32,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                mlp_layer_types=["dense", "sparse"],
            ),
            "vision_config": {
                "sam_config": {
                    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "image_size": 1024, "window_size": 14, "global_attn_indexes": [1], "downsample_channels": [24, 32],
                },
                "encoder_config": {
                    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                },
            },
            "tie_word_embeddings": False,
        },
    ),
    "hyperclovax-vision": SeeingModel(
        "hyperclovax-vision",
        "<|image_pad|>",
        {
            "model_type": "hyperclovax_vision_v2",
            "text_config": _text(
                "llama", model_type="hyperclovax", embedding_multiplier=1.5, logits_scaling=0.5, residual_multiplier=0.7
            ),
            "vision_config": _QWEN_EYE
            | {
                "model_type": "qwen2_5_vl_vision",
                "hidden_size": 32,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "tie_word_embeddings": False,
        },
    ),
    "lfm3-vl": SeeingModel(
        "lfm3-vl",
        "<|image_pad|>",
        {
            "model_type": "lfm3_vl",
            "text_config": _text(
                "llama",
                model_type="lfm3",
                num_hidden_layers=3,
                head_dim=16,
                layer_types=["conv", "full_attention", "sliding_attention"],
                sliding_window=24,
                pad_token_id=None,
            ),
            "vision_config": _EYE
            | {"model_type": "lfm3_vl_vision", "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
            "projector_hidden_size": 48,
        },
    ),
    "mistral-large4": SeeingModel(
        "mistral-large4",
        "[IMG]",
        {
            "model_type": "mistral_large4",
            "text_config": _text(
                "llama",
                model_type="mistral_large4_text",
                num_key_value_heads=4,
                head_dim=16,
                kv_lora_rank=16,
                q_lora_rank=None,
                qk_rope_head_dim=16,
                qk_nope_head_dim=8,
                v_head_dim=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                index_topk=512,
                index_head_dim=16,
                index_n_heads=2,
            ),
            "vision_config": _EYE | {"model_type": "pixtral", "image_size": 84, "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "got-ocr2": SeeingModel(
        "got-ocr2",
        "<imgpad>",
        {
            "model_type": "got_ocr2",
            "text_config": _text("qwen2", max_position_embeddings=1024),
            "vision_config": {
                "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 256, "patch_size": 4, "window_size": 14, "global_attn_indexes": [1], "mlp_dim": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    "qianfan-ocr": SeeingModel(
        "qianfan-ocr",
        "<image>",
        {
            "model_type": "qianfan_ocr",
            "text_config": _text("qwen3"),
            "vision_config": _EYE
            | {"model_type": "qianfan_ocr_vision", "image_size": [56, 56], "patch_size": [14, 14]},
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
        "<IMG_CONTEXT>",
    ),
    "janus": SeeingModel(
        "janus",
        "<image_placeholder>",
        {
            "model_type": "janus",
            "text_config": _TEXT,
            "vision_config": _EYE
            | {"model_type": "janus_vision_model", "image_size": 28, "num_image_tokens": 4, "projection_dim": 64},
            "vq_config": {
                "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_embeddings": 32,
                "latent_channels": 16, "projection_dim": 64, "image_token_embed_dim": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    "exaone4.5": SeeingModel(
        "exaone4.5",
        "<|image_pad|>",
        {
            "model_type": "exaone4_5",
            "text_config": _text("exaone4"),
            "vision_config": _QWEN_EYE
            | {
                "hidden_size": 32,
                "num_heads": 4,
                "num_key_value_heads": 2,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "tie_word_embeddings": False,
        },
    ),
    "dots3-note": SeeingModel(
        "dots3-note",
        "<|imgpad|>",
        {
            "model_type": "dots3_note",
            "text_config": _text(
                "llama",
                model_type="dots3_note_text",
                num_hidden_layers=3,
                num_key_value_heads=4,
                head_dim=24,
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                shared_experts_intermediate_size=32,
                index_topk=512,
                index_head_dim=16,
                index_n_heads=2,
                layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
                sliding_window=24,
                swa_num_attention_heads=2,
                swa_num_key_value_heads=2,
                swa_q_lora_rank=16,
                swa_kv_lora_rank=16,
                swa_head_dim=24,
                swa_qk_nope_head_dim=16,
                swa_v_head_dim=16,
                pad_token_id=2,
            ),
            "vision_config": _EYE
            | {
                "model_type": "dots3_note_vision_encoder",
                "mlp_layer_types": ["dense", "sparse"],
                "num_local_experts": 4,
                "moe_intermediate_size": 48,
                "adapter_in_dim": 32,
                "adapter_out_dim": 64,
            },
            "audio_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                "feature_size": 16, "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    "llava-next-video": SeeingModel(
        "llava-next-video",
        "<image>",
        {
            "model_type": "llava_next_video",
            "text_config": _TEXT,
            "vision_config": _CLIP,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
    ),
    "internvl": SeeingModel(
        "internvl",
        "<IMG_CONTEXT>",
        {
            "model_type": "internvl",
            "text_config": _text("qwen2"),
            "vision_config": _EYE
            | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
            "image_seq_length": 4,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2-vl": SeeingModel(
        "qwen2-vl",
        "<|image_pad|>",
        {
            "model_type": "qwen2_vl",
            "text_config": _text("qwen2.5-vl-text", model_type="qwen2_vl_text"),
            "vision_config": {"depth": 3, "num_heads": 2, "patch_size": 14, "embed_dim": 32, "hidden_size": 64},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-vl": SeeingModel(
        "qwen2.5-vl",
        "<|image_pad|>",
        {
            "model_type": "qwen2_5_vl",
            "text_config": _text("qwen2.5-vl-text"),
            "vision_config": _QWEN_EYE | {"hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-vl": SeeingModel(
        "qwen3-vl",
        "<|image_pad|>",
        {
            "model_type": "qwen3_vl",
            "text_config": _text("qwen3-vl-text"),
            "vision_config": _QWEN_EYE
            | {"patch_size": 16, "hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-vl-moe": SeeingModel(
        "qwen3-vl",
        "<|image_pad|>",
        {
            "model_type": "qwen3_vl_moe",
            "text_config": _text("qwen3-vl-moe-text"),
            "vision_config": _QWEN_EYE
            | {"patch_size": 16, "hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5": SeeingModel(
        "qwen3-vl",
        "<|image_pad|>",
        {
            "model_type": "qwen3_5",
            "text_config": _text("qwen3.5"),
            "vision_config": _QWEN_EYE
            | {"model_type": "qwen3_5_vision", "patch_size": 16, "hidden_size": 32, "num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": SeeingModel(
        "gemma3",
        "<start_of_image>",
        {
            "model_type": "gemma3",
            "text_config": _text("gemma3"),
            "vision_config": _EYE | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 7},
            "mm_tokens_per_image": 4,
        },
        "<image_soft_token>",
    ),
    "gemma4": SeeingModel(
        "gemma4",
        "<|image|>",
        {
            "model_type": "gemma4",
            "text_config": _text("gemma4", vocab_size_per_layer_input=VOCAB),
            "vision_config": _EYE | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip

_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif part['type'] == 'audio' %}SOUND{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}"
    "{% if add_generation_prompt or not loop.last %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_chat_template(directory: Path, image: str, sound: str = "") -> None:
    """One that has these texts for images and sounds; a last message that is to be continued has no end."""
    template = _TEMPLATE.replace("IMAGE", image).replace("SOUND", sound)
    (directory / "chat_template.jinja").write_text(template)


def write_seeing(directory: Path, name: str, *, seed: int = 0, parts: Mapping[str, Mapping[str, Any]] = {}) -> Path:
    """A whole checkpoint in `directory`: weights, processor, tokenizer, chat template. `parts` of the config have these
    fields besides."""
    model = MODELS[name]
    write_processor(directory, model.processor)
    (directory / "config.json").unlink()
    tokenizer, _ = read_tokenizer(directory)
    config = {
        **model.config,
        **{part: model.config[part] | fields for part, fields in parts.items()},
        "dtype": "float32",
        "image_token_id": tokenizer.token_to_id(model.soft_token or model.token),
    }
    if model.soft_token:
        config["boi_token_index"] = tokenizer.token_to_id(model.token)
    write_random(directory, config, seed=seed)
    write_chat_template(directory, model.token)
    return directory


def picture(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """An image [height, width, 3] of blocks, one for each seed."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    return np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:height, :width]
