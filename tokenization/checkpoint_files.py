"""Finds a checkpoint's directory or GGUF file, and reads JSON files."""

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..core.errors import InvalidArgument, NotFound
from ..core.gguf_files import GGUF_SUFFIX, shard_paths
from ..core.regular_files import MAX_TEXT_BYTES, count_bytes, open_regular, read_regular, refuse_special_files

_MOST_MEMBERS = 100_000
_MOST_ELEMENTS = 400_000
"""The limits of a JSON file that describes a model, since reading holds the GIL. The largest published
tokenizer_config.json has 51,000 members."""

SMALL_FILES = ("*.json", "*.jinja", "merges.txt")

_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.index.json")
_MISTRALS_WEIGHTS = "consolidated*.safetensors"
"""The weights once more, in Mistral's own form, beside transformers'."""
_NO_MODEL = re.compile(r"mmproj|imatrix", re.I)
"""GGUF files beside a model: projectors of images, and matrices that guided quantisation."""

_POINTER = b"version https://git-lfs.github.com/spec/"


def locate_checkpoint(model: str, files: Sequence[str] = SMALL_FILES) -> Path:
    """The directory of a checkpoint, or its first GGUF file. `model` is a path or a hub id, NAME, NAME@REVISION or
    NAME:Q4_K_M (a GGUF file's quantisation), whose missing `files` are fetched first.

    Raises:
        NotFound: neither a directory, a file, nor a model of the hub.
        InvalidArgument: an adapter, a special file in it, or several GGUF models.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise InvalidArgument(f"'{model}' is a file; of those, models in GGUF (*{GGUF_SUFFIX}) are served")
        return path
    if not path.is_dir():
        if model.startswith((".", "/", "~")):
            raise NotFound(f"there is no directory '{model}'")
        hub_id, _, quantization = model.partition(":")
        if quantization:
            return _fetch_gguf(hub_id, quantization)
        path = _fetch(model, files)
        if (path / "config.json").is_file():
            return path  # its weights may be still to come
    refuse_special_files(path)
    if not (path / "config.json").is_file():
        refuse_adapter(path)
    return find_gguf(path) or path


def find_gguf(directory: Path) -> Path | None:
    """The first file of the only GGUF model in a directory without other weights, or None. Raises `InvalidArgument` if
    there are several."""
    if any(True for pattern in _OTHER_WEIGHTS for _ in directory.glob(pattern)):
        return None
    return _only_model(directory, directory.glob(f"*{GGUF_SUFFIX}"))


def _only_model(directory: Path, files: Iterable[Path]) -> Path | None:
    first = [file for file in files if shard_paths(file)[0] == file and not _NO_MODEL.search(file.name)]
    if len(first) > 1:
        names = ", ".join(sorted(file.name for file in first)[:8])
        raise InvalidArgument(f"{directory}: it has {len(first)} models in GGUF; name one of them: {names}")
    return first[0] if first else None


def locate_adapter(adapter: str) -> Path:
    """The directory of an adapter, given as a path or as a hub id, whose files are fetched first. Raises `NotFound`."""
    directory = Path(adapter).expanduser()
    if directory.is_dir():
        return directory
    if adapter.startswith((".", "/", "~")):
        raise NotFound(f"there is no directory '{adapter}'")
    return _fetch(adapter, ("adapter_config.json", "adapter_model.safetensors"))


def refuse_adapter(directory: Path) -> None:
    """Raises `InvalidArgument` for the directory of a PEFT adapter, which is no model."""
    config = directory / "adapter_config.json"
    if config.is_file():
        base = read_json(config).get("base_model_name_or_path")
        raise InvalidArgument(
            f"{directory}: this is a PEFT adapter of {base!r} and no model; serve that one with --enable-lora and "
            "--lora-modules NAME=DIRECTORY, or merge it (merge_and_unload, save_pretrained)"
        )


def refuse_lfs_pointer(path: Path) -> None:
    """Raises `InvalidArgument` for an existing file that is only a Git LFS pointer."""
    with open_regular(path) as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise InvalidArgument(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull there")


def _fetch(hub_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = hub_id.partition("@")
    try:
        wanted, left_out = list(files), [_MISTRALS_WEIGHTS]
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted, ignore_patterns=left_out))
    except (OSError, ValueError) as error:
        raise NotFound(
            f"{hub_id!r} is neither a directory nor a model that the hub would give (if it is one, hf download {name} "
            f"where there is a network, and name its directory): {error}"
        ) from error


def _fetch_gguf(hub_id: str, quantization: str) -> Path:
    if not re.fullmatch(r"[\w.-]+", quantization):
        raise InvalidArgument(f"{quantization!r} is no name of a quantisation, such as Q4_K_M")
    spellings = dict.fromkeys((quantization, quantization.upper(), quantization.lower()))
    # It ends a name, with shards behind it, or is a directory's.
    endings = (f"{GGUF_SUFFIX}", f"-?????-of-?????{GGUF_SUFFIX}", f"/*{GGUF_SUFFIX}")
    patterns = [f"{start}{spelling}{end}" for spelling in spellings for start in ("*[-._/]", "") for end in endings]
    directory = _fetch(hub_id, patterns)
    within = re.compile(rf"(^|[-._/]){re.escape(quantization)}(-\d{{5}}-of-\d{{5}})?({re.escape(GGUF_SUFFIX)}|/)", re.I)
    matches = (file for file in directory.rglob(f"*{GGUF_SUFFIX}") if within.search(str(file.relative_to(directory))))
    if (model := _only_model(directory, matches)) is None:
        raise NotFound(f"{hub_id} has no file in GGUF with {quantization} in its name")
    return model


def checkpoint_fingerprint(directory: Path) -> str:
    """A digest of the names and sizes of a checkpoint's files. For a model of the hub it is of the revision, which is
    known before all files are there."""
    if directory.match("models--*/snapshots/*"):
        return sha256(directory.name.encode()).hexdigest()
    paths = directory.iterdir() if directory.is_dir() else [directory]
    files = sorted((path.name, path.stat().st_size) for path in paths if path.is_file())
    return sha256(json.dumps(files).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file. Raises `InvalidArgument` if the file holds none or is too
    large."""
    if not path.is_file():
        return {}
    refuse_lfs_pointer(path)
    try:
        text = read_regular(path, MAX_TEXT_BYTES)
        for mark, most, things in ((b":", _MOST_MEMBERS, "members"), (b",", _MOST_ELEMENTS, "elements")):
            if count_bytes(text, mark) > most:
                raise InvalidArgument(f"{path} has more than {most} {things}")
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} holds no JSON object")
    return content
