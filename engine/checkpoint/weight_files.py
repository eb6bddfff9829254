"""Which files of a checkpoint hold its weights, or why none does. Knows names and an index; imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...tokenization.checkpoint_files import read_json, refuse_adapter
from .model_spec import CheckpointError

SAFETENSORS_FILES = "*.safetensors"
TORCH_FILES = "pytorch_model*.bin"

_FORMS = ("model.safetensors", "pytorch_model.bin")
"""A whole model in one file, the first one found; each has an index of shards under its name with .index.json."""


class WeightFiles(NamedTuple):
    """All files, each once; `by_tensor`: which of them an index says holds a tensor, None where there is one file."""

    files: tuple[Path, ...]
    by_tensor: Mapping[str, Path] | None = None


def find_weights(directory: Path) -> WeightFiles:
    """What a checkpoint's weights are read from, whether it is there or not.

    Raises:
        CheckpointError: nothing in the directory says.
        InvalidArgument: it is an adapter's.
    """
    for name in _FORMS:
        single, index = directory / name, directory / f"{name}.index.json"
        if index.exists():
            by_tensor = {tensor: directory / file for tensor, file in _weight_map(index).items()}
            return WeightFiles(tuple(sorted(set(by_tensor.values()))), by_tensor)
        if single.exists() or single.is_symlink():
            return WeightFiles((single,))
    refuse_adapter(directory)
    missing = f"{directory}: no {' and no '.join(_FORMS)}, nor an index of either; only these are supported"
    raise CheckpointError(missing)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: not an index of weights: it has no weight_map of file names")
    return weight_map
