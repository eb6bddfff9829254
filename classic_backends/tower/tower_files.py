"""Which part of a checkpoint is its tower, or its encoder of sounds: the families that are served, the names and the
bytes of its weights. Imports no torch."""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from ...core.errors import InvalidArgument, Unsupported
from ...core.media import (
    ALIGNED_ROWS,
    ALIGNED_SPANS,
    ALIGNED_TOKENS,
    FEATURE_MASK,
    FEATURES,
    SOURCE,
    MediaKind,
    plural_nouns,
)
from ...core.media_models import HEARING_FAMILIES, SEEING_FAMILIES, WRITING_FAMILIES, has_wrapper
from ...core.native_calls import NativeCall
from ...core.published_form import flat_config
from ...tokenization.checkpoint_files import read_json
from ...tokenization.weight_files import read_weight_index, refuse_long_header

INPUTS = {
    "pixel_values": "FP32",
    "image_sizes": "INT64",
    "image_grid_thw": "INT64",
    "image_position_ids": "INT64",
    "pixel_attention_mask": "INT64",
    "spatial_shapes": "INT64",
    "batch_num_images": "INT64",
    "image_merge_sizes": "INT64",
    "num_patches": "INT64",
    "pixel_mask": "INT64",
    "pixel_values_local": "FP32",
    "num_local_patches": "INT64",
    FEATURES: "FP32",
    FEATURE_MASK: "INT64",
    SOURCE: "INT64",
    ALIGNED_TOKENS: "INT64",
    ALIGNED_SPANS: "INT64",
    ALIGNED_ROWS: "UINT8",
}
"""What processors make of media for towers, each family some of it; their datatypes here."""

_OTHER_PARTS = re.compile(
    r"(thinker\.)?(model\.)?(language_model|text_model|lm_head|layers|embed_tokens|norm|mtp|decoder|proj_out"
    r"|tok_embeddings|output|lerope)\."
)
"""Beginnings of the names of tensors that belong to no tower, in newer and older checkpoints."""

_DECODER = re.compile(r"(model\.)?(decoder|lm_head|final_logits_bias)(\.|$)")
"""Beginnings of those that belong to no encoder of texts."""

_FAMILIES: Mapping[MediaKind, frozenset[str]] = {
    "image": SEEING_FAMILIES,
    "audio": HEARING_FAMILIES | WRITING_FAMILIES,
}
"""The families that have a tower of a kind."""

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


class TowerFiles(NamedTuple):
    """The tower of one checkpoint."""

    directory: Path
    family: str
    dtype: str
    """torch's name of what its rows are in; a GPU computes in it, too."""
    weights: tuple[StoredWeight, ...]
    kinds: tuple[MediaKind, ...] = ("image",)
    """What it is asked for; none of an encoder of texts."""

    def bytes(self, gpu: bool) -> int:
        """The memory of its weights, at most: the host may compute in single precision."""
        return sum(weight.numbers for weight in self.weights) * (_WIDTHS[self.dtype] if gpu else 4)


def read_tower_files(directory: Path, dtype: str, kinds: tuple[MediaKind, ...] = ("image",)) -> TowerFiles:
    """Read the headers of a checkpoint, and count the parts for these `kinds` of media; without any it is an encoder of
    texts. `dtype` is computed in; "auto" is the checkpoint's.

    Raises:
        Unsupported: its family's media are not served, or its weights are no safetensors.
        InvalidArgument: it has no tower's weights, or files that cannot be read.
    """
    config = flat_config(read_json(directory / "config.json"))
    family = str(config.get("model_type", ""))
    stored = str(_stored_dtype(config)) if dtype == "auto" else dtype
    stored = stored if stored in _WIDTHS else "float32"
    if not kinds:
        return TowerFiles(directory, family, stored, tuple(_text_encoder_weights(directory)), kinds)
    if not (any(family in families for families in _FAMILIES.values()) or has_wrapper(config)):
        known = ", ".join(sorted({name for kind in kinds for name in _FAMILIES[kind]}))
        nouns = plural_nouns(kinds)
        raise Unsupported(f"{directory}: {nouns} of the family '{family}' are not served; those of {known} are")
    unasked = [part for kind, part in _PARTS_OF_KINDS.items() if kind not in kinds]
    weights = tuple(
        weight for weight in _tower_weights(directory) if not any(part.match(weight.name) for part in unasked)
    )
    if not weights:
        raise InvalidArgument(f"{directory} has no weights of a tower, only those of the language part")
    return TowerFiles(directory, family, stored, weights, kinds)


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
    yield from _read_headers(files, _OTHER_PARTS)


def _text_encoder_weights(directory: Path) -> Iterator[StoredWeight]:
    """Those of an encoder of texts, by headers; of pickled files all there is, as if it were in 32 bits."""
    files = sorted(directory.glob("*.safetensors"))
    if files:
        yield from _read_headers(files, _DECODER)
    else:
        yield from (StoredWeight(file.name, file, file.stat().st_size // 4) for file in directory.glob("*.bin"))


def _read_headers(files: Iterable[Path], left_out: re.Pattern[str]) -> Iterator[StoredWeight]:
    """The tensors of files of safetensors, but for those whose names match."""
    for file in files:
        refuse_long_header(file)
        try:
            with NativeCall(f"{file}: the library failed"), safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if left_out.match(name):
                        continue
                    tensor = opened.get_slice(name)
                    if tensor.get_dtype() not in _DTYPES:
                        message = f"{file}: '{name}' is {tensor.get_dtype()}: quantised towers are not served"
                        raise Unsupported(message)
                    yield StoredWeight(name, file, prod(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"{file} cannot be read: {error}") from error
