"""What a model is made from: its directory with config and versions, or a checkpoint on its own.

Reads directories. Completes, builds and loads nothing.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from .config_defaults import LANGUAGE_MODEL_BACKEND, canonical_backend, detect_checkpoint_backend, fill_backend
from .config_io import CONFIG_FILE_NAMES, ConfigMessage, find_config, line_of, new_config, parse_config_file
from .versions import choose_versions, find_misnamed_versions, find_versions

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class VersionSource:
    """One version to be served. `path`: its directory, or a checkpoint or hub id. `mark` differs whenever something
    that the version is made from does."""

    number: str
    path: str
    mark: Hashable = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What one model is made from. `config`: as it was written, with its backend. `versions`: lowest first.
    `directory`: the model's, and `file` its config, where there are any."""

    name: str
    config: ConfigMessage
    versions: tuple[VersionSource, ...]
    directory: Path | None = None
    config_file: Path | None = None

    @property
    def backend(self) -> str:
        return str(self.config.backend or self.config.platform)

    @property
    def parameters(self) -> dict[str, str]:
        return {key: value.string_value for key, value in self.config.parameters.items()}

    def config_position(self, field: str) -> str:
        """ "file:line: " of a field of the config, as far as there is one."""
        return config_position(self.config_file, field)


def config_position(file: Path | None, field: str) -> str:
    """ "file:line: " of a field, as far as it is there."""
    if file is None or not file.is_file():
        return ""
    line = line_of(file.read_text(), field)
    return f"{file}:{line}: " if line else f"{file}: "


def read_model(directory: Path, override: ConfigMessage = None, config_name: str = "") -> ModelSource:
    """One model directory; `override` stands in for its config.

    Raises:
        InvalidArgument: it cannot be a model; the message names file, line and field.
    """
    file = None if override is not None else find_config(directory, config_name)
    config = override if override is not None else new_config() if file is None else parse_config_file(file)
    try:
        _set_name(config, directory)
        served = choose_versions(config, find_versions(directory), find_misnamed_versions(directory))
        fill_backend(config, directory / str(served[0]))
    except InvalidArgument as error:
        raise with_config_position(error, file) from None
    once = object() if override is not None else None
    versions = tuple(_version_source(directory, config, number, once) for number in served)
    return ModelSource(directory.name, config, versions, directory, file)


def with_config_position(error: CharoniaError, file: Path | None) -> CharoniaError:
    """The same error, saying where in the config its field is."""
    if not error.field or str(file) in error.message:
        return error
    return type(error)(config_position(file, error.field) + error.message, field=error.field)


def _set_name(config: ConfigMessage, directory: Path) -> None:
    if config.name and config.name != directory.name:
        raise InvalidArgument(
            f"unexpected directory name '{directory.name}' for model '{config.name}', "
            "directory name must equal model name",
            field="name",
        )
    config.name = directory.name


def _version_source(directory: Path, config: ConfigMessage, number: int, once: object) -> VersionSource:
    """With `once`, it is like no other."""
    path = directory / str(number)
    # What the config says stands in the mark itself.
    around = [entry for entry in directory.iterdir() if entry.name == "warmup" or entry.is_file()]
    around = [entry for entry in around if entry.name not in CONFIG_FILE_NAMES]
    stamps = [stamp for entry in (path, *around) for stamp in file_stamps(entry)]
    mark = (config.SerializeToString(deterministic=True), *stamps, once)
    return VersionSource(str(number), str(path), mark)


def file_stamps(path: Path) -> list[tuple[str, int, int]]:
    """Of every file at or below it: name, time of change, size."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [(str(file), (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files]


def is_checkpoint(directory: Path) -> bool:
    """Or an adapter of one, of which the engine says what it is."""
    return any((directory / name).is_file() for name in ("config.json", "modules.json", "adapter_config.json"))


def is_repository(directory: Path) -> bool:
    """Some folder in it has a config and is no checkpoint, or a numbered version."""
    return any(_is_model_folder(folder) for folder in directory.iterdir() if folder.is_dir())


def _is_model_folder(folder: Path) -> bool:
    if (folder / "config.pbtxt").is_file():
        return True
    return bool(find_versions(folder)) and (
        any(is_checkpoint(folder / str(version)) for version in find_versions(folder))
        or find_config(folder) is not None
    )


def checkpoint_source(
    model: str, name: str = "", parameters: Mapping[str, str] | None = None, backend: str = ""
) -> ModelSource:
    """A checkpoint directory or hub id (`owner/name` or `owner/name@revision`) as a model of its own, named after its
    last part; `backend` serves it, or what its files say.

    Raises:
        InvalidArgument: it is neither.
    """
    path = Path(model)
    if not is_checkpoint(path) and path.is_dir() and _is_model_folder(path):
        raise InvalidArgument(f"'{model}' is a model of a repository: give --model-repository {path.resolve().parent}")
    if model.startswith((".", "/", "~")) and not path.exists():  # the shell has put ~ in already, where it is a path
        raise InvalidArgument(f"there is no directory '{model}'")
    if not is_checkpoint(path) and (path.exists() or not _HUB_ID.fullmatch(model)):
        raise InvalidArgument(
            f"'{model}' is neither a checkpoint (a directory with config.json), nor a model repository "
            "(folders with config.pbtxt or numbered versions), nor a hub id (owner/name)"
        )
    config = new_config()
    config.name = name or (path if path.exists() else Path(model.partition("@")[0])).resolve().name
    config.backend = canonical_backend(backend) or (
        detect_checkpoint_backend(path) if path.exists() else LANGUAGE_MODEL_BACKEND
    )
    for key, value in (parameters or {}).items():
        config.parameters[key].string_value = value
    checkpoint = str(path.resolve()) if path.exists() else model
    return ModelSource(config.name, config, (VersionSource("1", checkpoint),))
