"""Whether a checkpoint sees, by its files: whatever its tower is, which other rooms know. Imports no torch."""

from pathlib import Path
from typing import Any

from ...tokenization.checkpoint_files import read_json

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


_FAMILIES = frozenset(
    {
        "gemma3",
        "gemma4",
        "idefics3",
        "internvl",
        "llava",
        "llava_next",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "smolvlm",
    }
)
"""The `model_type` of models whose language part knows where images stand and what they attend to."""


def has_eyes(directory: Path) -> bool:
    """Whether a checkpoint directory has a part that sees and whose images the engine takes, and a processor of
    them."""
    if not directory.is_dir() or not any((directory / name).is_file() for name in _PROCESSORS):
        return False
    config = read_json(directory / "config.json")
    return config.get("model_type") in _FAMILIES and isinstance(config.get("vision_config"), dict)


def sees_both_ways(directory: Path) -> bool:
    """Whether the places of an image attend to one another in the language part."""
    config = read_json(directory / "config.json")
    text: Any = config.get("text_config")
    if config.get("model_type") == "gemma3":
        return True
    return isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
