"""Finds the files that hold a checkpoint's weights, by their names and an index. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ...tokenization.checkpoint_files import read_json, refuse_adapter
from .model_spec import CheckpointError

SAFETENSORS_FILES = "*.safetensors"
TORCH_FILES = "pytorch_model*.bin"

_FORMS = ("model.safetensors", "pytorch_model.bin")
"""Names of a whole model in one file: the first one found. An index of shards has such a name with .index.json."""


class WeightFiles(NamedTuple):
    """All files, each once. `by_tensor`: the file that holds a tensor, by an index; None where there is one file."""

    files: tuple[Path, ...]
    by_tensor: Mapping[str, Path] | None = None


def find_weights(directory: Path) -> WeightFiles:
    """The files of a checkpoint's weights, whether they are there or not.

    Raises:
        CheckpointError: the directory has neither such a file nor an index.
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
