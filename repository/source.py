"""Which models there are: repositories, model directories and their config.pbtxt, checkpoints.

Reads directories and says what each model is made from. Builds nothing and loads nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import CharoniaError, InvalidArgument

CONFIG_FILE = "config.pbtxt"
_VERSION = re.compile(r"[1-9][0-9]*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What one model is made from. `path`: the version's directory, or a checkpoint or hub id. `file`: its config."""

    name: str
    backend: str
    path: str
    version: str = "1"
    parameters: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None

    def where(self, word: str) -> str:
        """ "file:line: " of the first line of the config that holds `word`, as far as there is one."""
        if self.file is None or not self.file.is_file():
            return ""
        lines = self.file.read_text().splitlines()
        numbers = (f"{number}:" for number, line in enumerate(lines, 1) if word in line)
        return f"{self.file}:{next(numbers, '')} "


@dataclass(frozen=True, slots=True)
class BrokenSource:
    """A model that is known and cannot be read."""

    name: str
    error: CharoniaError


def read_repository(directory: Path) -> Iterator[ModelSource | BrokenSource]:
    """Every model of a repository, in the order of their names; what is wrong with one is that one's trouble.

    Raises:
        InvalidArgument: `directory` is not a directory.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"model repository '{directory}' is not a directory")
    for model in sorted(directory.iterdir()):
        if model.is_dir() and not model.name.startswith("."):
            yield _read(model)


def _read(directory: Path) -> ModelSource | BrokenSource:
    try:
        return read_model(directory)
    except CharoniaError as error:
        return BrokenSource(directory.name, error)
    except OSError as error:
        return BrokenSource(directory.name, InvalidArgument(str(error)))


def read_model(directory: Path) -> ModelSource:
    """One model directory, latest version.

    Raises:
        InvalidArgument: it cannot be a model; the message names file, line and field.
    """
    config = _parse(directory / CONFIG_FILE)
    if config.name and config.name != directory.name:
        raise InvalidArgument(
            f"{directory / CONFIG_FILE}: unexpected directory name '{directory.name}' for model '{config.name}', "
            "directory name must equal model name",
            field="name",
        )
    version = _latest_version(directory)
    backend = config.backend or config.platform or _guess_backend(directory, version)
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    return ModelSource(directory.name, backend, str(directory / version), version, parameters, directory / CONFIG_FILE)


def _parse(file: Path) -> Any:
    from google.protobuf import text_format  # type: ignore[import-untyped]
    from tritonclient.grpc import model_config_pb2

    config = model_config_pb2.ModelConfig()
    if not file.exists():
        return config
    try:
        return text_format.Parse(file.read_text(), config)
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"failed to read text proto from {file}:{error}") from None


def _latest_version(directory: Path) -> str:
    versions = _versions(directory)
    if not versions:
        name = directory.name
        raise InvalidArgument(f"at least one version must be available under the version policy of model '{name}'")
    return versions[0].name


def _guess_backend(directory: Path, version: str) -> str:
    if is_checkpoint(directory / version):
        return "charonia"
    raise InvalidArgument(
        f"Invalid model name: Could not determine backend for model '{directory.name}' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'.",
        field="backend",
    )


def is_checkpoint(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def is_repository(directory: Path) -> bool:
    """Some folder in it has a config.pbtxt, or a numbered version that holds a checkpoint."""
    return any(
        (folder / CONFIG_FILE).is_file() or any(is_checkpoint(version) for version in _versions(folder))
        for folder in directory.iterdir()
    )


def _versions(model: Path) -> list[Path]:
    """The numbered folders, newest first; anything else in a model's folder is not a version."""
    if not model.is_dir():
        return []
    found = [entry for entry in model.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=lambda entry: int(entry.name), reverse=True)


def checkpoint_source(model: str, name: str = "") -> ModelSource:
    """A checkpoint directory or hub id as a model of its own, named after its last part.

    Raises:
        InvalidArgument: it is neither.
    """
    path = Path(model)
    if not is_checkpoint(path) and (path.exists() or not _HUB_ID.fullmatch(model)):
        raise InvalidArgument(
            f"'{model}' is neither a checkpoint (a directory with config.json), nor a model repository "
            "(folders with config.pbtxt or numbered versions), nor a hub id (owner/name)"
        )
    return ModelSource(name or path.resolve().name, "charonia", str(path.resolve()) if path.exists() else model)
