"""The source of a model: a directory with a config and numbered versions, or a checkpoint on its own.

Reads directories. Completes, builds and loads nothing. A version is a folder whose name is a number without leading
zeros; see https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_repository.md.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from ..core.gguf_files import GGUF_SUFFIX, gguf_model_name
from ..core.model import DeclaredModels, RawConfig
from ..core.regular_files import read_text
from .backend_registry import LANGUAGE_MODEL_BACKEND, PIPELINE_BACKEND, canonical_backend
from .config_defaults import detect_checkpoint_backend, fill_backend, has_gguf
from .config_io import CONFIG_FILE_NAMES, CONFIGS_FOLDER, complete_fields, find_config, line_of, parse_config_file
from .file_marks import EntryMarks, SourceMark, entry_marks, files_mark

log = logging.getLogger(__name__)

VERSION_NAME = re.compile(r"[1-9][0-9]*")
_IN_A_VERSION = re.compile(r".+\.(onnx|pt2?|py|xml|gguf|safetensors|savedmodel|bin|plan)")
"""Names of files that stand in versions."""
_MISNAMED_VERSION = re.compile(r"0[0-9]*")
_PIN = "keep_in_memory"
"""The parameter of a config that says `ModelSource.pinned`; no backend sees it."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class VersionSource:
    """The source of one version. `path`: its directory, or a checkpoint or hub id. `mark`: equal as long as nothing
    that the version is made from changes, and it is where it was; a path is another after each download."""

    number: str
    path: str = field(compare=False)
    mark: SourceMark | None = None


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str
    config: RawConfig
    """As it is written, with its backend filled in."""
    versions: tuple[VersionSource, ...]
    """The lowest first."""
    directory: Path | None = None
    """None for a checkpoint on its own, as `config_file`."""
    config_file: Path | None = None
    aliases: tuple[str, ...] = ()
    """Other names of the model, which a checkpoint on its own may have."""
    pinned: bool = False
    """Whether the config keeps it in memory where others come and go on demand."""
    routed: frozenset[str] = frozenset()
    """The versions that are there because routes name them, and not by the version policy."""

    @property
    def backend(self) -> str:
        return str(self.config["backend"] or self.config["platform"])

    @property
    def steps(self) -> frozenset[str]:
        """See `asked_models`."""
        return asked_models(self.backend, self.config)

    @property
    def optional_steps(self) -> frozenset[str]:
        """The steps that may be missing."""
        is_pipeline = self.backend == PIPELINE_BACKEND
        return DeclaredModels.of(self.parameters).optional if is_pipeline else frozenset()

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters that are for the backend."""
        return {key: text for key, text in parameters_of(self.config).items() if key != _PIN}


def asked_models(backend: str, config: RawConfig) -> frozenset[str]:
    """The models that an ensemble or a pipeline asks; none for another model."""
    if backend == PIPELINE_BACKEND:
        return DeclaredModels.of(parameters_of(config)).names
    return frozenset(step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", ()))


def parameters_of(config: RawConfig) -> dict[str, str]:
    """The texts of a config's parameters by their names."""
    return {key: value["string_value"] for key, value in config["parameters"].items()}


def with_parameters(config: RawConfig, found: Mapping[str, str]) -> RawConfig:
    """The config with the parameters that were found; those that it has itself win."""
    entries = {key: {"string_value": text} for key, text in found.items()}
    return {**config, "parameters": entries | config["parameters"]} if found else config


def config_position(file: Path | None, field: str) -> str:
    """The prefix "file:line: " of a message about a field, as far as there is a file and the field is found in it."""
    if file is None or not file.is_file():
        return ""
    line = line_of(read_text(file), field)
    return f"{file}:{line}: " if line else f"{file}: "


def with_config_position(error: CharoniaError, file: Path | None) -> CharoniaError:
    """The same error, saying where in the config its field is."""
    if not error.field or str(file) in error.message:
        return error
    return type(error)(config_position(file, error.field) + error.message, field=error.field)


def read_model(
    directory: Path,
    override: RawConfig | None = None,
    config_name: str = "",
    place: str = "",
    routed: Collection[int] = (),
) -> ModelSource:
    """The source of a model directory; `override` replaces its config. `place`: where it was downloaded from; `routed`:
    the versions that routes name. Raises `InvalidArgument` if the directory is no model; the message names file, line
    and field."""
    try:
        config, file = _read_config(directory, override, config_name)
    except InvalidArgument as error:  # of a checkpoint's config.json, perhaps
        raise InvalidArgument(error.message + _misplacement(directory)) from None
    try:
        if config["name"] not in ("", directory.name):
            message = f"unexpected directory name '{directory.name}' for model '{config['name']}', "
            raise InvalidArgument(f"{message}directory name must equal model name", field="name")
        config = {**config, "name": directory.name}
        present = find_versions(directory)
        chosen = _choose_versions(config, present, _misplacement(directory))
        served = _with_routed(chosen, present, routed)
        config = fill_backend(config, directory / str(served[0]))
        pinned = _read_pin(config)
    except InvalidArgument as error:
        raise with_config_position(error, file) from None
    # The config itself is in the mark, and not its file's stamp; a mark with `unique` equals no other.
    text, unique = json.dumps(config), None if override is None else object()
    beside = marks_beside(directory, present)
    versions = []
    for path in [directory / str(number) for number in served]:
        mark = SourceMark(place or str(directory), text, files_mark(path), beside, unique)
        versions.append(VersionSource(path.name, str(path), mark))
    only_routed = frozenset(str(number) for number in served if number not in chosen)
    return ModelSource(directory.name, config, tuple(versions), directory, file, pinned=pinned, routed=only_routed)


def marks_beside(directory: Path, versions: Collection[int]) -> EntryMarks:
    """The marks of what lies beside the versions of a model. Raises `OSError` if its directory cannot be read."""
    return entry_marks(directory, {*CONFIG_FILE_NAMES, CONFIGS_FOLDER, *map(str, versions)})


def _read_pin(config: RawConfig) -> bool:
    pin = parameters_of(config).get(_PIN, "false")
    if pin not in ("true", "false"):
        raise InvalidArgument(f"parameter '{_PIN}' must be true or false, got '{pin}'", field=_PIN)
    return pin == "true"


def _read_config(directory: Path, override: RawConfig | None, config_name: str) -> tuple[RawConfig, Path | None]:
    """The config as written, and its file if it is one's."""
    if override is not None:
        return override, None
    file = find_config(directory, config_name)
    return (complete_fields({}) if file is None else parse_config_file(file)), file


def read_served_versions(
    directory: Path, override: RawConfig | None, config_name: str, present: Sequence[int], routed: Collection[int] = ()
) -> list[int]:
    """The versions that are served of these, lowest first; `directory` has the model's config. Raises as `read_model`
    does."""
    config, file = _read_config(directory, override, config_name)
    try:
        return _with_routed(_choose_versions(config, present), present, routed)
    except InvalidArgument as error:
        raise with_config_position(error, file) from None


def _choose_versions(config: RawConfig, present: Sequence[int], hint: str = "") -> list[int]:
    """The versions that the config's policy serves, lowest first; without a policy the latest. Raises `InvalidArgument`
    if none of them is there, with a `hint` of what may be wrong with the folder."""
    policy, name = config.get("version_policy", {}), config["name"]
    if "all" in policy:
        served = [*present]
    elif "specific" in policy:
        wanted = sorted(set(policy["specific"]["versions"]))
        served = [version for version in wanted if version in present]
        for version in wanted:
            if version not in present:
                message = "version %d of model '%s' is asked for by its version policy and is not there"
                log.warning(message, version, name)
    else:
        count = policy["latest"]["num_versions"] if "latest" in policy else 1
        served = [*present[-max(count, 1) :]]
    if not served:
        message = f"at least one version must be available under the version policy of model '{name}'"
        raise InvalidArgument(message + hint, field="version_policy")
    return served


def _with_routed(chosen: Collection[int], present: Collection[int], routed: Collection[int]) -> list[int]:
    return sorted({*chosen, *(number for number in routed if number in present)})


def find_versions(model: Path) -> list[int]:
    """The numbers of a model directory's versions, lowest first."""
    return sorted(map(int, _folders(model, VERSION_NAME)))


def find_misnamed_versions(model: Path) -> list[str]:
    """The folders that look like versions and are none: numbers that begin with 0."""
    return sorted(_folders(model, _MISNAMED_VERSION))


def _folders(model: Path, name: re.Pattern[str]) -> list[str]:
    entries = model.iterdir() if model.is_dir() else ()
    return [entry.name for entry in entries if name.fullmatch(entry.name) and entry.is_dir()]


def _misplacement(model: Path) -> str:
    """The end of a message about a model's folder without versions: a file or a folder that should be in one, or be
    one."""
    if find_versions(model):
        return ""
    if misnamed := find_misnamed_versions(model):
        return f"; '{misnamed[0]}' is none, for it begins with 0"
    loose = sorted(entry.name for entry in model.iterdir() if _IN_A_VERSION.fullmatch(entry.name))
    return f"; '{loose[0]}' belongs into the folder of a version: {model.name}/1/{loose[0]}" if loose else ""


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a checkpoint, or an adapter, which the engine refuses by name; or it is a file in GGUF,
    or holds one."""
    if directory.is_file():
        return directory.suffix == GGUF_SUFFIX
    known = ("config.json", "modules.json", "adapter_config.json")
    return any((directory / name).is_file() for name in known) or has_gguf(directory)


def is_repository(directory: Path) -> bool:
    """Whether some folder in a directory is a model's: it has config.pbtxt, or numbered versions with a model."""
    return any(_is_model_folder(folder) for folder in directory.iterdir() if folder.is_dir())


def _is_model_folder(folder: Path) -> bool:
    versions = [folder / str(version) for version in find_versions(folder)]
    if (folder / "config.pbtxt").is_file() or any(map(is_checkpoint, versions)):
        return True
    return bool(versions) and find_config(folder) is not None


def checkpoint_source(
    model: str, names: Sequence[str] = (), parameters: Mapping[str, str] | None = None, backend: str = ""
) -> ModelSource:
    """The source of a checkpoint directory, a file in GGUF, or a hub id: `owner/name` or `owner/name@revision`, with
    `:Q4_K_M` or the like behind it for a GGUF file.

    The first of `names` is the model's, by default its last part; the others are aliases. Without `backend` its files
    say what serves it. Raises `InvalidArgument` if `model` is none of these.
    """
    path = Path(model)
    if not is_checkpoint(path) and path.is_dir() and _is_model_folder(path):
        raise InvalidArgument(f"'{model}' is a model of a repository: give --model-repository {path.resolve().parent}")
    if model.startswith((".", "/", "~")) and not path.exists():  # the shell has replaced the ~ of a path
        raise InvalidArgument(f"there is no directory '{model}'")
    if not is_checkpoint(path) and (path.exists() or not _HUB_ID.fullmatch(model)):
        raise InvalidArgument(
            f"'{model}' is neither a checkpoint (a directory with config.json, or a file in GGUF), nor a model "
            "repository (folders with config.pbtxt or numbered versions), nor a hub id (owner/name)"
        )
    name = names[0] if names else _own_name(path if path.exists() else Path(re.split("[@:]", model)[0]))
    backend = canonical_backend(backend) or (
        detect_checkpoint_backend(path) if path.exists() else LANGUAGE_MODEL_BACKEND
    )
    texts = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    config = complete_fields({"name": name, "backend": backend, "parameters": texts})
    checkpoint = str(path.resolve()) if path.exists() else model
    return ModelSource(name, config, (VersionSource("1", checkpoint),), aliases=tuple(names[1:]))


def _own_name(path: Path) -> str:
    path = path.resolve()
    return gguf_model_name(path) if path.suffix == GGUF_SUFFIX else path.name


def in_order_of_need(sources: Iterable[ModelSource]) -> list[ModelSource]:
    """The sources so that each comes after those whose models it asks; ensembles that ask each other come last."""
    left, ordered = list(sources), list[ModelSource]()
    while left:
        waiting = {source.name for source in left}
        free = [source for source in left if not source.steps & waiting] or left
        ordered += free
        left = [source for source in left if source not in free]
    return ordered
