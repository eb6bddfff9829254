"""Whether a checkpoint takes images or sounds, and how they attend, by its files. Knows no tower. Imports no torch."""

from pathlib import Path
from typing import Any

from ...core.media import MediaKind
from ...core.media_models import HEARING_FAMILIES, SEEING_FAMILIES
from ...tokenization.checkpoint_files import read_json

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def media_kind(directory: Path) -> MediaKind | None:
    """The kind of media that the engine takes for a checkpoint directory: images, if it has a part that sees and a
    processor of them; sounds, if it does nothing else than write them down."""
    if not directory.is_dir():
        return None
    config = read_json(directory / "config.json")
    if config.get("model_type") in HEARING_FAMILIES:
        return "audio"
    sees = config.get("model_type") in SEEING_FAMILIES and isinstance(config.get("vision_config"), dict)
    return "image" if sees and any((directory / name).is_file() for name in _PROCESSORS) else None


def sees_both_ways(directory: Path) -> bool:
    """Whether the places of an image attend to one another in the language part."""
    config = read_json(directory / "config.json")
    text: Any = config.get("text_config")
    if config.get("model_type") == "gemma3":
        return True
    return isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
