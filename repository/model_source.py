"""The source of a model: a directory with a config and numbered versions, or a checkpoint on its own.

Reads directories. Completes, builds and loads nothing. A version is a folder whose name is a number without leading
zeros; see https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_repository.md.
"""

import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from .config_defaults import LANGUAGE_MODEL_BACKEND, canonical_backend, detect_checkpoint_backend, fill_backend
from .config_io import CONFIG_FILE_NAMES, ConfigMessage, find_config, line_of, new_config, parse_config_file

log = logging.getLogger(__name__)

_VERSION = re.compile(r"[1-9][0-9]*")
_MISNAMED_VERSION = re.compile(r"0[0-9]*")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class VersionSource:
    """The source of one version. `path`: its directory, or a checkpoint or hub id. `mark`: equal for as long as nothing
    that the version is made from changes."""

    number: str
    path: str
    mark: Hashable = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of one model. `config`: as written, with its backend filled in. `versions`: lowest first. `directory`,
    `config_file`: the model's, where there are any."""

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
        """The beginning of a message about a field of the config: `config_position`."""
        return config_position(self.config_file, field)


def config_position(file: Path | None, field: str) -> str:
    """Returns "file:line: " of a field, as far as there is a file and the field is found in it."""
    if file is None or not file.is_file():
        return ""
    line = line_of(file.read_text(), field)
    return f"{file}:{line}: " if line else f"{file}: "


def read_model(directory: Path, override: ConfigMessage = None, config_name: str = "") -> ModelSource:
    """The source of a model directory; `override` replaces its config.

    Raises:
        InvalidArgument: the directory is no model; the message names file, line and field.
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
    """The source of one version; with `once`, its mark equals no other."""
    path = directory / str(number)
    # What the config says stands in the mark itself.
    around = [entry for entry in directory.iterdir() if entry.name == "warmup" or entry.is_file()]
    around = [entry for entry in around if entry.name not in CONFIG_FILE_NAMES]
    stamps = [stamp for entry in (path, *around) for stamp in file_stamps(entry)]
    mark = (config.SerializeToString(deterministic=True), *stamps, once)
    return VersionSource(str(number), str(path), mark)


def file_stamps(path: Path) -> list[tuple[str, int, int]]:
    """Name, time of change and size of every file at or below a path."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [(str(file), (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files]


def find_versions(model: Path) -> list[int]:
    """The numbers of a model directory's versions, lowest first."""
    if not model.is_dir():
        return []
    return sorted(int(entry.name) for entry in model.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir())


def find_misnamed_versions(model: Path) -> list[str]:
    """The folders that look like versions and are none: numbers that begin with 0."""
    if not model.is_dir():
        return []
    return sorted(entry.name for entry in model.iterdir() if _MISNAMED_VERSION.fullmatch(entry.name) and entry.is_dir())


def choose_versions(config: ConfigMessage, there: list[int], almost: Sequence[str] = ()) -> list[int]:
    """The versions that the config's policy serves, lowest first; without a policy the latest. `almost`: the misnamed
    versions, for the error.

    Raises:
        InvalidArgument: none of them is there.
    """
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            served = there
        case "specific":
            served = _specific(config.name, sorted(set(policy.specific.versions)), there)
        case "latest":
            served = there[-max(policy.latest.num_versions, 1) :]
        case _:
            served = there[-1:]
    if not served:
        message = f"at least one version must be available under the version policy of model '{config.name}'"
        hint = f"; '{almost[0]}' is none, for it begins with 0" if almost else ""
        raise InvalidArgument(message + hint, field="version_policy")
    return served


def _specific(name: str, wanted: list[int], there: list[int]) -> list[int]:
    for version in wanted:
        if version not in there:
            log.warning("version %d of model '%s' is asked for by its version policy and is not there", version, name)
    return [version for version in wanted if version in there]


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a checkpoint, or an adapter, which the engine refuses by name."""
    return any((directory / name).is_file() for name in ("config.json", "modules.json", "adapter_config.json"))


def is_repository(directory: Path) -> bool:
    """Whether some folder in a directory is a model's: it has config.pbtxt, or numbered versions with a model."""
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
    """The source of a checkpoint directory or hub id (`owner/name` or `owner/name@revision`).

    By default it is named after the last part, and served by the backend that its files call for.

    Raises:
        InvalidArgument: `model` is neither.
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
