"""Which of transformers' models of images and texts are a language part with rows at their images' places, by a trial
of each class with its usual configuration: `python -m tests.proofs.image_families`. Those that are, and whose language
part is computed natively, are served without a description of their own; for others the reason is told."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

from charonia.core.errors import CharoniaError
from charonia.core.media_models import SEEING_FAMILIES, has_plain_wrapper
from charonia.engine.models.image_wrapper import check_image_wrapper
from charonia.tokenization.checkpoint_files import read_json


def write_config(directory: Path, family: str) -> str:
    """The usual configuration of a family. Returns the name of its class."""
    known: Any = transformers.CONFIG_MAPPING[family]
    config = known()
    config.architectures = [CLASSES[family]]
    config.save_pretrained(directory)
    return str(CLASSES[family])


def verdicts() -> Iterator[tuple[str, str]]:
    """Each family that is not described, and why its images are not served; empty if they are."""
    transformers.logging.set_verbosity_error()
    for family in sorted(CLASSES.keys() - SEEING_FAMILIES):
        with tempfile.TemporaryDirectory() as directory:
            try:
                architecture = write_config(Path(directory), family)
                check_image_wrapper(Path(directory), architecture)
            except CharoniaError as error:
                yield family, error.message.partition("supported: ")[2]
            except Exception as error:
                yield family, f"its usual configuration cannot be made: {type(error).__name__}"
            else:
                config = read_json(Path(directory) / "config.json")
                kind = (config.get("text_config") or {}).get("model_type")
                reason = f"a language part of the kind '{kind}' is none of those that take rows"
                yield family, "" if has_plain_wrapper(config) else reason


def main() -> None:
    for family, reason in verdicts():
        print(f"{family:24} {reason or 'served, if its processor is there for pillow'}")


if __name__ == "__main__":
    main()
