"""The text part of a checkpoint that takes images too: a config.json of its own, and the names of its tensors.

Only architectures are here whose text part, given text alone, is exactly one of ours: attention is causal, and images
would have added nothing.
"""

from collections.abc import Mapping
from typing import Any

_INNER: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208, "max_position_embeddings": 131_072},
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32000,
        },
    ),
    "mistral": (
        "MistralForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {}),
}
"""The `model_type` of a text_config -> our architecture, and the usual values that such a config leaves out."""

_OUTER = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
}
"""Architecture -> the `model_type` of a text_config that leaves it out."""

_SHARED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields that stand outside of text_config, for all parts."""

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Beginnings of tensor names in newer and older checkpoints -> in a checkpoint of the text part alone."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the text part of the model that `config` describes; None where there is none that we serve."""
    names = config.get("architectures")
    outer = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    text = config.get("text_config", config)  # Qwen's older ones have its fields among the others
    if outer not in _OUTER or not isinstance(text, dict):
        return None
    kind = _OUTER[outer] if text is config else str(text.get("model_type") or _OUTER[outer])
    if kind not in _INNER:
        return None
    architecture, absent = _INNER[kind]
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    return {**absent, **text, **shared, "architectures": [architecture]}


def text_tensor_name(stored: str) -> str:
    """The name of a tensor of the text part in a checkpoint of that part alone; other tensors keep their names."""
    for prefix, own in _PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored
