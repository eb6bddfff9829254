"""Which media a checkpoint takes, and how they are attended to, by its files. Knows no tower. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.media import MediaKind, plural_nouns
from ...core.media_models import HEARING_FAMILIES, SEEING_FAMILIES, WRITING_FAMILIES, has_wrapper
from ...core.published_form import flat_config
from ...tokenization.checkpoint_files import read_json
from .hf_checkpoint import serves_text_alone
from .seq2seq_config import SEQ2SEQ

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_PARTS: tuple[tuple[MediaKind, frozenset[str], str], ...] = (
    ("image", SEEING_FAMILIES, "vision_config"),
    ("audio", HEARING_FAMILIES, "audio_config"),
)
"""For each kind the families that take it, and the part of config.json of those checkpoints that do."""


_REASONS: Mapping[tuple[str, MediaKind], str] = {
    ("gemma3n", "image"): "transformers' tower of them is one of timm's; Gemma 3's and Gemma 4's are served",
    ("gemma4_unified", "image"): "they have no tower; those of Gemma 4's E2B, E4B and larger models are served",
    ("kimi_k25", "image"): "transformers has their processor over torchvision alone",
}
"""Why media of a family whose texts are served are not."""


def media_kinds(directory: Path) -> tuple[MediaKind, ...]:
    """The kinds of media that the engine takes for a checkpoint directory: those that it has a part and a processor
    for, or sounds, if it does nothing else than write them down."""
    if not directory.is_dir():
        return ()
    if writes_sounds_down(directory):
        return ("audio",)
    if not _has_processor(directory):
        return ()
    config = flat_config(read_json(directory / "config.json"))
    family = str(config.get("model_type"))
    if has_wrapper(config) and not serves_text_alone(config):
        return ("image",)
    return tuple(kind for kind, known, part in _PARTS if family in known and isinstance(config.get(part), dict))


def refused_media(directory: Path, allowed: Mapping[MediaKind, int]) -> dict[MediaKind, str]:
    """Why kinds of media are not taken for a checkpoint that has something for them; `allowed`: how many of a kind a
    prompt may have."""
    config = flat_config(read_json(directory / "config.json")) if directory.is_dir() else {}
    family = str(config.get("model_type"))
    taken = media_kinds(directory)
    reasons: dict[MediaKind, str] = {}
    for kind, _, part in _PARTS:
        nouns = plural_nouns((kind,))
        if kind in taken:
            reasons |= {} if allowed.get(kind) else {kind: "--limit-mm-per-prompt allows none"}
        elif (family, kind) in _REASONS:
            reasons[kind] = f"{nouns} of the family '{family}' are not served: {_REASONS[family, kind]}"
        elif isinstance(config.get(part), dict):
            reason = f"{nouns} of the family '{family}' are not served"
            lacking = f"the checkpoint has no processor of {nouns} ({' or '.join(_PROCESSORS)})"
            reasons[kind] = reason if _has_processor(directory) else lacking
    return reasons


def _has_processor(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _PROCESSORS)


def writes_sounds_down(directory: Path) -> bool:
    """Whether that is all that a checkpoint does."""
    return str(read_json(directory / "config.json").get("model_type")) in WRITING_FAMILIES


def attends_to_encoder(directory: Path) -> bool:
    """Whether a checkpoint's decoder attends to what an encoder made of a sound or a text."""
    names = read_json(directory / "config.json").get("architectures") if directory.is_dir() else None
    return isinstance(names, list) and len(names) == 1 and names[0] in SEQ2SEQ


def sees_both_ways(directory: Path) -> bool:
    """Whether the places of an image attend to one another in the language part."""
    config = read_json(directory / "config.json")
    text: Any = config.get("text_config")
    if config.get("model_type") == "gemma3":
        return True
    return isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
