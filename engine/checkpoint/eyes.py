"""Whether a checkpoint sees, by its files: whatever its tower is, which other rooms know. Imports no torch."""

from pathlib import Path
from typing import Any

from ...tokenization.checkpoint_files import read_json

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def has_eyes(directory: Path) -> bool:
    """Whether a checkpoint directory has a part that sees, and a processor of images. One of the hub that is yet to be
    downloaded has none."""
    if not directory.is_dir() or not any((directory / name).is_file() for name in _PROCESSORS):
        return False
    return isinstance(read_json(directory / "config.json").get("vision_config"), dict)


def sees_both_ways(directory: Path) -> bool:
    """Whether the places of an image attend to one another in the language part."""
    config = read_json(directory / "config.json")
    text: Any = config.get("text_config")
    if config.get("model_type") == "gemma3":
        return True
    return isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
