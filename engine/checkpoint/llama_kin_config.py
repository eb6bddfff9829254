"""What config.json says of architectures that differ from Llama in a few fields, and what they mean by the fields that
it leaves out."""

from collections.abc import Mapping
from typing import Any

from .config_fields import ArchitectureDefaults, ConfigFields


def _smollm3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    rotates = fields.flags("no_rope_layers")  # it marks those that do rotate
    if not rotates:
        every = fields.number("no_rope_layer_interval")
        rotates = tuple((layer + 1) % every != 0 for layer in fields.layers)
    return {**fields.config, "rotates": [*rotates]}


def _smollm3_slides(config: Mapping[str, Any], layer: int) -> bool:
    return bool(config.get("use_sliding_window")) and not config["rotates"][layer]


def _ministral3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    rope = fields.config.get("rope_parameters") or fields.config.get("rope_scaling") or {}
    return {**fields.config, "query_growth": rope.get("llama_4_scaling_beta")}


LLAMA_KIN: dict[str, ArchitectureDefaults] = {
    "Ministral3ForCausalLM": ArchitectureDefaults(
        lambda config, layer: True,
        {
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        translate=_ministral3_fields,
    ),
    "SmolLM3ForCausalLM": ArchitectureDefaults(
        _smollm3_slides,
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        reads_layer_types=True,
        translate=_smollm3_fields,
    ),
}
"""Architecture -> what its config.json means by what it leaves out."""
