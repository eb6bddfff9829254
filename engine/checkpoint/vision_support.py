"""Whether a checkpoint takes images, and how they attend, by its files. Knows no tower. Imports no torch."""

from pathlib import Path
from typing import Any

from ...core.media_models import SEEING_FAMILIES
from ...tokenization.checkpoint_files import read_json

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def takes_images(directory: Path) -> bool:
    """Whether a checkpoint directory has a part that sees and whose images the engine takes, and a processor of
    them."""
    if not directory.is_dir() or not any((directory / name).is_file() for name in _PROCESSORS):
        return False
    config = read_json(directory / "config.json")
    return config.get("model_type") in SEEING_FAMILIES and isinstance(config.get("vision_config"), dict)


def sees_both_ways(directory: Path) -> bool:
    """Whether the places of an image attend to one another in the language part."""
    config = read_json(directory / "config.json")
    text: Any = config.get("text_config")
    if config.get("model_type") == "gemma3":
        return True
    return isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
