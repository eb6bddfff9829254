"""Which part of a checkpoint is its tower, or its encoder of sounds: the families that are served, the names and the
bytes of its weights. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ...core.errors import InvalidArgument, Unsupported
from ...core.media import FEATURE_MASK, FEATURES, MediaKind
from ...core.media_models import HEARING_FAMILIES, SEEING_FAMILIES, WRITING_FAMILIES
from ...core.native_calls import NativeCall
from ...tokenization.checkpoint_files import read_json
from ...tokenization.weight_files import read_weight_index, refuse_long_header

INPUTS = {
    "pixel_values": "FP32",
    "image_sizes": "INT64",
    "image_grid_thw": "INT64",
    "image_position_ids": "INT64",
    "pixel_attention_mask": "INT64",
    FEATURES: "FP32",
    FEATURE_MASK: "INT64",
}
"""What processors make of media for towers, each family some of it; their datatypes here."""

_OTHER_PARTS = re.compile(
    r"(model\.)?(language_model|text_model|lm_head|layers|embed_tokens|norm|mtp|decoder|proj_out)\."
)
"""Beginnings of the names of tensors that belong to no tower, in newer and older checkpoints."""

_PARTS_OF_KINDS: Mapping[MediaKind, re.Pattern[str]] = {
    "image": re.compile(r"(model\.)?(vision_tower|embed_vision)\."),
    "audio": re.compile(r"(model\.)?(audio_tower|embed_audio)\."),
}
"""Beginnings of the names of those that one kind of media alone needs, in families that may have several."""

_SINGLE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16", "I64")
"""The dtypes of stored tensors, as safetensors names them; old checkpoints have the numbers of places among them."""

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class StoredWeight(NamedTuple):
    """A tensor of a tower by its header."""

    name: str
    file: Path
    numbers: int


class VisionFiles(NamedTuple):
    """The tower of one checkpoint."""

    directory: Path
    family: str
    dtype: str
    """torch's name of what its rows are in; a GPU computes in it, too."""
    weights: tuple[StoredWeight, ...]
    kinds: tuple[MediaKind, ...] = ("image",)
    """What it is asked for."""

    def bytes(self, gpu: bool) -> int:
        """The memory of its weights, at most: the host may compute in single precision."""
        return sum(weight.numbers for weight in self.weights) * (_WIDTHS[self.dtype] if gpu else 4)


def read_vision_files(directory: Path, dtype: str, kinds: tuple[MediaKind, ...] = ("image",)) -> VisionFiles:
    """Read the headers of a checkpoint. `dtype`: to compute in; "auto" is the checkpoint's. `kinds`: of the media whose
    parts are wanted.

    Raises:
        Unsupported: its family's images are not served, or its weights are no safetensors.
        InvalidArgument: it has no tower's weights, or files that cannot be read.
    """
    config = read_json(directory / "config.json")
    family = str(config.get("model_type", ""))
    if family not in SEEING_FAMILIES | HEARING_FAMILIES | WRITING_FAMILIES:
        known = ", ".join(sorted(SEEING_FAMILIES))
        raise Unsupported(f"{directory}: images of the family '{family}' are not served; those of {known} are")
    stored = str(_stored_dtype(config)) if dtype == "auto" else dtype
    unasked = [part for kind, part in _PARTS_OF_KINDS.items() if kind not in kinds]
    weights = tuple(
        weight for weight in _tower_weights(directory) if not any(part.match(weight.name) for part in unasked)
    )
    if not weights:
        raise InvalidArgument(f"{directory} has no weights of a tower, only those of the language part")
    return VisionFiles(directory, family, stored if stored in _WIDTHS else "float32", weights, kinds)


def _stored_dtype(config: Mapping[str, Any]) -> Any:
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    named = (part.get("dtype") or part.get("torch_dtype") for part in parts)
    return next(filter(None, named), "float32")


def _tower_weights(directory: Path) -> Iterator[StoredWeight]:
    index = directory / f"{_SINGLE}.index.json"
    files = [directory / _SINGLE]
    if index.exists():
        by_tensor = read_weight_index(index)
        files = sorted({file for name, file in by_tensor.items() if not _OTHER_PARTS.match(name)})
    elif not files[0].exists():
        raise Unsupported(f"{directory}: a tower's weights are read from safetensors alone, and there are none")
    for file in files:
        refuse_long_header(file)
        try:
            with NativeCall(f"{file}: the library failed"), safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if _OTHER_PARTS.match(name):
                        continue
                    tensor = opened.get_slice(name)
                    if tensor.get_dtype() not in _DTYPES:
                        message = f"{file}: '{name}' is {tensor.get_dtype()}: quantised towers are not served"
                        raise Unsupported(message)
                    yield StoredWeight(name, file, prod(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"{file} cannot be read: {error}") from error
