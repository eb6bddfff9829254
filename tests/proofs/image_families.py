"""What becomes of every family of transformers' models of images and texts, by its usual configuration: `python -m
tests.proofs.image_families` writes the table of docs/architectures.md anew. Those of a language part with rows at its
images' places are served, described or not; for others the reason is told, which is that of the load or of the log."""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

from charonia.core.errors import CharoniaError, InvalidArgument
from charonia.core.media_models import HEARING_FAMILIES, SEEING_FAMILIES
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.media_support import refused_media
from charonia.engine.models.registry import NativeBuilder, checkpoint_builder
from charonia.media.processor import OWN_PROCESSORS, _processor_class

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- made by tests.proofs.image_families -->", "<!-- the end of what it makes -->"
NATIVE, FOREIGN, TEXTS, REFUSED = "native", "transformers", "texts alone", "refused"
_LONGEST_REASON = 120
FITTING: dict[str, dict[str, dict[str, Any]]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "glmga": {"text_config": {"partial_rotary_factor": 0.5}},
}
"""Fields of usual configurations that contradict others of them."""


class Verdict(NamedTuple):
    """What becomes of a family's checkpoints."""

    family: str
    path: str
    """Of the language part, where images are served; else `TEXTS` or `REFUSED`."""
    reason: str = ""
    """Why images are not served."""

    def __str__(self) -> str:
        """Its line of the table."""
        images = "yes" if self.path in (NATIVE, FOREIGN) else "no"
        sound = "yes" if self.family in HEARING_FAMILIES else "no"
        return f"| `{self.family}` | {images} | {sound} | {self.path} | {self.reason.replace('|', '')} |"


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
            return Verdict(family, REFUSED, _shown(error.message.rpartition("is not supported: ")[2]))
        if reason := refused_media(directory, {"image": 1}).get("image", ""):
            return Verdict(family, TEXTS, _shown(reason))
        if reason := _processor_reason(directory, family):
            return Verdict(family, TEXTS, reason)
        return Verdict(family, NATIVE if isinstance(builder, NativeBuilder) else FOREIGN)


def _shown(reason: str) -> str:
    """As much of a reason as a table has room for."""
    line = reason.partition("\n")[0]
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."


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


def main() -> None:
    transformers.logging.set_verbosity_error()
    rows = []
    for family in sorted(CLASSES):
        rows.append(verdict(family))
        print(rows[-1], flush=True)
    served = sum(row.path in (NATIVE, FOREIGN) for row in rows)
    head = f"transformers {version('transformers')}: images of {served} of {len(rows)} families are served."
    table = ["| family | images | sound | path | why not |", "|---|---|---|---|---|", *map(str, rows)]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join((before + BEGIN, "", head, "", *table, "", END + rest.partition(END)[2])))


if __name__ == "__main__":
    main()
