"""Finds a checkpoint's directory and reads its JSON files. Knows nothing of weights."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..core.errors import InvalidArgument, NotFound

SMALL_FILES = ("*.json", "*.jinja")

_POINTER = b"version https://git-lfs.github.com/spec/"


def locate_checkpoint(model: str, files: Sequence[str] = SMALL_FILES) -> Path:
    """The directory of a checkpoint, given as such or as a hub id, owner/name or owner/name@revision: of that, the
    `files` (patterns) that are not there yet are fetched first.

    Raises `NotFound` for neither a directory nor a model of the hub, `InvalidArgument` for an adapter without a model.
    """
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if model.startswith((".", "/", "~")):
            raise NotFound(f"there is no directory '{model}'")
        directory = _fetch(model, files)
    if not (directory / "config.json").is_file():
        refuse_adapter(directory)
    return directory


def refuse_adapter(directory: Path) -> None:
    """Raises `InvalidArgument` for a directory of a PEFT adapter, which has no model of its own."""
    config = directory / "adapter_config.json"
    if config.is_file():
        base = read_json(config).get("base_model_name_or_path")
        raise InvalidArgument(
            f"{directory}: this is a PEFT adapter of {base!r} and no model; merge it into that one first "
            "(merge_and_unload, save_pretrained)"
        )


def refuse_lfs_pointer(path: Path) -> None:
    """Raises `InvalidArgument` for a file that is only a Git LFS pointer. The file exists."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise InvalidArgument(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull there")


def _fetch(hub_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = hub_id.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        raise NotFound(
            f"{hub_id!r} is neither a directory nor a model that the hub would give (if it is one, hf download {name} "
            f"where there is a network, and name its directory): {error}"
        ) from error


def checkpoint_fingerprint(directory: Path) -> str:
    """A digest of the names and sizes of a checkpoint's files, and of its revision if it is of the hub."""
    files = sorted((path.name, path.stat().st_size) for path in directory.iterdir() if path.is_file())
    revision = directory.name if directory.parent.name == "snapshots" else ""
    return sha256(json.dumps([revision, files]).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file.

    Raises `InvalidArgument` if the file does not hold one.
    """
    if not path.is_file():
        return {}
    refuse_lfs_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} holds no JSON object")
    return content
