"""What becomes of every family of transformers' models of images and texts, by its usual configuration: `python -m
tests.proofs.image_families`. Those of a language part with rows at its images' places are served, described or not; for
others the reason is told, which is that of the load or of the log."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

from charonia.core.errors import CharoniaError, InvalidArgument
from charonia.core.media_models import SEEING_FAMILIES
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.media_support import media_kinds
from charonia.engine.models.registry import NativeBuilder, checkpoint_builder
from charonia.media.processor import OWN_PROCESSORS, _processor_class

NATIVE, FOREIGN, TEXTS, REFUSED = "native", "transformers", "texts alone", "refused"
FITTING: dict[str, dict[str, dict[str, Any]]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
}
"""Fields of usual configurations that contradict others of them."""


class Verdict(NamedTuple):
    """What becomes of a family's checkpoints."""

    family: str
    path: str
    """Of the language part, where images are served; else `TEXTS` or `REFUSED`."""
    reason: str = ""
    """Why images are not served."""


def write_config(directory: Path, family: str) -> str:
    """The usual configuration of a family, with a processor that is read for its name. Returns the name of its
    class."""
    known: Any = transformers.CONFIG_MAPPING[family]
    config = known()
    for part, fields in FITTING.get(family, {}).items():
        getattr(config, part).update(fields)
    config.architectures = [CLASSES[family]]
    config.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text("{}")
    return str(CLASSES[family])


def verdict(family: str) -> Verdict:
    """Of a family that is described its usual configuration says nothing: the suite compares it with transformers."""
    if family in SEEING_FAMILIES:
        return Verdict(family, NATIVE)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        try:
            write_config(directory, family)
        except (ValueError, TypeError, AttributeError, ImportError) as error:
            return Verdict(family, REFUSED, f"its usual configuration cannot be made: {type(error).__name__}")
        try:
            builder = checkpoint_builder(open_checkpoint(directory))
        except CharoniaError as error:
            return Verdict(family, REFUSED, error.message.rpartition("is not supported: ")[2].partition("\n")[0])
        if "image" not in media_kinds(directory):
            return Verdict(family, TEXTS, "no description of its tower")
        if reason := _processor_reason(directory, family):
            return Verdict(family, TEXTS, reason)
        return Verdict(family, NATIVE if isinstance(builder, NativeBuilder) else FOREIGN)


def _processor_reason(directory: Path, family: str) -> str:
    """Why the processor of a family does not serve; empty if it does."""
    try:
        known = _processor_class(directory)
    except InvalidArgument as error:
        return error.message.partition(": ")[2]
    if "pil" not in IMAGE_PROCESSOR_MAPPING_NAMES.get(family, {}) and known.__name__ not in OWN_PROCESSORS:
        return "its processor is there for torchvision alone"
    if "replace_image_token" not in vars(known):
        return f"{known.__name__} does not tell which text stands for an image"
    return ""


def verdicts() -> Iterator[Verdict]:
    transformers.logging.set_verbosity_error()
    for family in sorted(CLASSES):
        yield verdict(family)


def main() -> None:
    for found in verdicts():
        print(f"{found.family:24} {found.path:14} {found.reason}")


if __name__ == "__main__":
    main()
