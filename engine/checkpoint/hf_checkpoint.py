"""A Hugging Face checkpoint: its directory and its config.json.

Imports no torch; `weights.py` reads the tensors, and `tokenization/` the files about text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tokenization.checkpoint_files import SMALL_FILES, locate_checkpoint, read_json
from .hf_config import read_spec
from .model_spec import CheckpointError, ModelSpec
from .text_part import text_config
from .weight_files import SAFETENSORS_FILES, TORCH_FILES


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint. `config`: its config.json, or that of its text part where the model takes images too, which
    `language_part` tells."""

    directory: Path
    config: Mapping[str, Any]
    language_part: bool = False

    @property
    def where(self) -> str:
        """The path of config.json, for errors."""
        return str(self.directory / "config.json")

    @property
    def spec(self) -> ModelSpec:
        """The model in numbers; its architecture is one of `engine/models`.

        Raises:
            CheckpointError: a field is missing or has a value that is not supported.
        """
        return read_spec(self.config, self.where)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a checkpoint directory, or a hub id (downloaded to the hub's cache when it is not there).

    Raises:
        NotFound: no such checkpoint.
        CheckpointError: there is no config.json.
        InvalidArgument: it is not JSON.
    """
    directory = locate_checkpoint(str(model), (*SMALL_FILES, SAFETENSORS_FILES))
    if not Path(model).expanduser().is_dir() and not any(directory.glob(SAFETENSORS_FILES)):
        directory = locate_checkpoint(str(model), (*SMALL_FILES, TORCH_FILES))
    config = read_json(directory / "config.json")
    if not config:
        raise CheckpointError(f"{directory / 'config.json'}: missing; a checkpoint needs it beside its weights")
    part = text_config(config)
    return Checkpoint(directory, config if part is None else part, part is not None)
