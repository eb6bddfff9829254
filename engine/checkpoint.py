"""A Hugging Face checkpoint directory: its config, its generation defaults, where its files lie.

Imports no torch, so that a frontend can read it too; `weights.py` reads the tensors.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .spec import CheckpointError, ModelSpec, read_spec

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


class GenerationDefaults(NamedTuple):
    """What generation_config.json says; None where it says nothing. `eos_token_ids` fall back to config.json."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint; tokenizer.json and the chat template lie in `directory` if there are any."""

    directory: Path
    spec: ModelSpec
    generation: GenerationDefaults


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a checkpoint directory, or a hub id (downloaded to the hub's cache when it is not there).

    Raises:
        CheckpointError: no such checkpoint, or a config that is broken or not supported.
    """
    directory = _locate(model)
    config = _read_json(directory / "config.json")
    spec = read_spec(config, str(directory / "config.json"))
    return Checkpoint(directory, spec, _generation(directory, config))


def _locate(model: str | Path) -> Path:
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or str(model).count("/") != 1:
        raise CheckpointError(f"{model}: no such directory, and not a hub id (owner/name)")
    return _download(str(model))


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{model}: no such directory, and the hub did not give it: {error}") from error


def _generation(directory: Path, config: dict[str, Any]) -> GenerationDefaults:
    path = directory / "generation_config.json"
    defaults = _read_json(path) if path.exists() else {}
    eos = defaults.get("eos_token_id")
    return GenerationDefaults(
        _ids(config.get("eos_token_id") if eos is None else eos),
        defaults.get("temperature"),
        defaults.get("top_k"),
        defaults.get("top_p"),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; a checkpoint needs config.json beside its safetensors") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value
