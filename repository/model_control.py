"""Loading and unloading of models by requests.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_management.md.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..core.errors import CharoniaError, DiskFull, Internal, InvalidArgument, NotFound, is_disk_full
from ..processes.scratch import ScratchDirectory
from .backend_registry import PIPELINE_BACKEND, PYTHON, is_own_backend
from .catalog import RepositoryCatalog
from .config_io import parse_config_override
from .ensemble_steps import models_asked_by
from .lifecycle import LoadFailure, ModelLifecycle
from .model_registry import ModelEntry, ModelRegistry
from .model_source import ModelSource

log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 255
"""The limit of a file's name in bytes, on every file system that matters."""

_MAX_FOLDER_DEPTH = 64
"""The limit of folders around an uploaded file."""

_ENVIRONMENT = "EXECUTION_ENV_PATH"
_CODE_REFUSED = "which is not taken from requests unless the server runs with --allow-uploaded-code"
_PIPELINE_REFUSED = (
    "whose code runs in the server: whoever may reach the server may load it, so the server must run with "
    "--allow-pipelines, with API keys, or with 'model-repository' restricted"
)


class CircularEnsembles(InvalidArgument):
    """An ensemble asks another one that asks it."""


@dataclass
class StepLoads:
    """The models that one request has loaded because others ask them."""

    loaded: set[str] = field(default_factory=set)
    """Those that were not served before."""

    seen: set[str] = field(default_factory=set)
    """All that it has looked at: several may ask one."""


class ModelControl:
    """Loads and unloads models as requests ask for, in mode explicit. `allow_code`: requests may bring Python code;
    `allow_pipelines`: they may load pipelines, which run in the server's own process."""

    def __init__(
        self,
        catalog: RepositoryCatalog,
        registry: ModelRegistry,
        lifecycle: ModelLifecycle,
        allow_code: bool = False,
        allow_pipelines: bool = False,
    ) -> None:
        self._allow_code, self._allow_pipelines = allow_code, allow_pipelines
        self._catalog = catalog
        self._registry = registry
        self._lifecycle = lifecycle
        # The stamps of models that serve with a request's config, of the time when it was given.
        self._overridden: dict[str, Hashable] = {}
        # Models that serve with a request's files.
        self._uploaded: set[str] = set()
        # What the models ask that are being loaded.
        self._asked: list[frozenset[str]] = []

    async def loadable_models(self) -> list[str]:
        """Names of models that a request could load."""
        return await self._lifecycle.run_blocking(self._catalog.model_names)

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model, and before it those that it asks, if it is an ensemble: what of them is loaded and has changed
        is loaded anew. What was loaded for a model that fails is unloaded again."""
        await self._lifecycle.refresh(self._catalog)
        self._registry.implicit.discard(name)
        steps = StepLoads()
        try:
            await self._load(name, config, files, steps)
        finally:
            await self._unload_unused(steps.loaded)

    async def _load(
        self,
        name: str,
        config: str | None,
        files: Mapping[str, bytes],
        steps: StepLoads,
        asked_by: tuple[str, ...] = (),
    ) -> None:
        """`asked_by`: the ensembles that ask for it, the outermost first."""
        _check_name(name)
        if name in self._registry.route_names:
            raise InvalidArgument(
                f"a route is called '{name}': no model of that name can be loaded", field="model_name"
            )
        for path in files:
            _check_path(path)
            if not self._allow_code and path.endswith(".py"):
                raise InvalidArgument(f"file '{path}' of model '{name}' is code, {_CODE_REFUSED}", field=path)
        stamps = await self._lifecycle.run_blocking(self._catalog.stamps, name)
        from_disk = config is None and not files
        if from_disk and stamps is not None and self._overridden.get(name) == stamps:
            return
        try:
            source, release = await self._read(name, config, files)
        except CharoniaError as error:
            log.error("model '%s' cannot be read: %s", name, error.message)
            if from_disk and not isinstance(error, NotFound):
                self._registry.get_or_add(name).record_load_failure(error.message)
            message = f"failed to load '{name}', failed to poll from model repository: {error.message}"
            kind = DiskFull if isinstance(error, DiskFull) else Internal
            raise kind(message, field=error.field) from None
        try:
            await self._load_with_steps(source, release, steps, asked_by)
        except LoadFailure as failure:
            log.error("model '%s' failed to load for a request: version %s: %s", name, failure.version, failure)
            message = f"load failed for model '{name}': version {failure.version} is at UNAVAILABLE state: {failure};\n"
            raise (DiskFull if is_disk_full(failure) else InvalidArgument)(message) from None
        self._overridden.pop(name, None)
        (self._uploaded.add if files else self._uploaded.discard)(name)
        if not from_disk:  # which nothing but this request has
            self._registry.entries[name].pinned = True
        if config is not None and not files:
            self._overridden[name] = stamps

    async def _load_with_steps(
        self, source: ModelSource, release: Callable[[], None], steps: StepLoads, asked_by: tuple[str, ...]
    ) -> None:
        """Load a model, and before it those that it asks."""
        entry = self._registry.entries.get(source.name)
        self._asked.append(source.steps)
        try:
            try:
                if source.backend == PIPELINE_BACKEND and not self._allow_pipelines and not _is_loaded(entry, source):
                    message = f"model '{source.name}' is a pipeline, {_PIPELINE_REFUSED}"
                    raise InvalidArgument(message, field="backend")
                await self._load_steps(source, steps, asked_by)
            except BaseException:
                release()
                raise
            if asked_by and entry is not None and entry.served_versions and not entry.loaded_versions:
                await self._lifecycle.describe(source, release)  # its requests load it
            else:
                await self._lifecycle.load(source, release=release)
        finally:
            self._asked.remove(source.steps)

    async def _load_steps(self, source: ModelSource, steps: StepLoads, asked_by: tuple[str, ...]) -> None:
        """Load the models that an ensemble asks, as far as they are not loaded or have changed; its own load tells
        which are missing."""
        asked_by = (*asked_by, source.name)
        for step in sorted(await self._lifecycle.run_blocking(self._catalog.steps_there, source)):
            if step in asked_by:
                circle = " -> ".join((*asked_by, step))
                raise CircularEnsembles(f"circular dependency between ensembles: {circle}", field="ensemble_scheduling")
            known = self._registry.find(step)
            if step in self._registry.route_names or (known is not None and known.name != step):
                continue  # it is a route, another name of a model, or an adapter
            if step in steps.seen:
                continue
            steps.seen.add(step)
            if known is None or not known.served_versions:
                self._registry.implicit.add(step)
                steps.loaded.add(step)
            elif step in self._uploaded or any(loaded.source_mark is None for loaded in known.loaded_versions.values()):
                continue  # its files are a request's, or it is a checkpoint on its own, which is not followed
            try:
                await self._load(step, None, {}, steps, asked_by)
            except CircularEnsembles:
                raise
            except CharoniaError as error:
                log.warning("ensemble '%s': %s", source.name, error.message)

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload a model; with `dependents` also what it asks, as far as that was loaded for models that ask it, and
        none of these is left."""
        _check_name(name)
        asked, left = set[str](), [name] if dependents else []
        while left:
            entry = self._registry.entries.get(left.pop())
            new = frozenset() if entry is None else models_asked_by(entry) - asked
            asked |= new
            left += new
        await self._unload(name)
        await self._unload_unused(asked)

    async def _unload(self, name: str) -> None:
        await self._lifecycle.unload(name)
        self._overridden.pop(name, None)  # not before: a load that had to end first has set it
        self._uploaded.discard(name)
        self._registry.implicit.discard(name)

    async def _unload_unused(self, names: set[str]) -> None:
        """Unload those of these models that were loaded because others asked them, and that none asks any more."""
        left = set(names)
        while name := next(filter(self._is_unused, sorted(left)), None):
            left.discard(name)
            await self._unload(name)

    def _is_unused(self, name: str) -> bool:
        entries = self._registry.entries
        if name not in entries or not entries[name].served_versions or name not in self._registry.implicit:
            return False
        asked = (models_asked_by(entry) for entry in entries.values())
        return not any(name in models for models in (self._registry.routed_models, *self._asked, *asked))

    async def _read(
        self, name: str, config: str | None, files: Mapping[str, bytes]
    ) -> tuple[ModelSource, Callable[[], None]]:
        if files and config is None:
            raise InvalidArgument("Load parameter 'config' must be specified for model file override")
        override = None
        if config is not None:  # which protobuf may take a tenth of a second for
            override = await self._lifecycle.run_blocking(parse_config_override, config)
        if not files:
            source, release = await self._lifecycle.read(self._catalog, name, override)
            try:
                if override is not None and not self._allow_code:
                    _check_runs_no_code(source, uploaded=False)
            except BaseException:
                release()
                raise
            return source, release
        scratch, directory = await self._lifecycle.run_blocking(_write_uploaded_files, name, files)
        try:
            source = await self._lifecycle.run_blocking(self._catalog.read, name, override, directory)
            if not self._allow_code:
                _check_runs_no_code(source, uploaded=True)
        except BaseException:
            scratch.close()
            raise
        return source, scratch.close


def _is_loaded(entry: ModelEntry | None, source: ModelSource) -> bool:
    """Whether a model is loaded from just this source."""
    loaded = {} if entry is None else entry.loaded_versions
    marks = {version.number: version.mark for version in source.versions}
    return marks == {number: version.source_mark for number, version in loaded.items()}


def _check_runs_no_code(source: ModelSource, uploaded: bool) -> None:
    """Raises `InvalidArgument` if a model that came with a request runs what did, or a program of its choice."""
    runs_code = source.backend in (PYTHON, PIPELINE_BACKEND) or not is_own_backend(source.backend)
    if uploaded and runs_code:
        message = f"the files of model '{source.name}' would be run as code, {_CODE_REFUSED}"
        raise InvalidArgument(message, field="backend")
    if _ENVIRONMENT in source.parameters:
        message = f"{_ENVIRONMENT} of model '{source.name}' names a program to run, {_CODE_REFUSED}"
        raise InvalidArgument(message, field=_ENVIRONMENT)


def _check_name(name: str) -> None:
    if not name:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if name in (".", "..") or any(part in name for part in ("/", "\\", "..", "\0")):
        raise InvalidArgument(f"invalid model name '{name}', model name must not contain path traversal characters")
    if len(name.encode(errors="surrogatepass")) > _MAX_NAME_BYTES:
        message = f"invalid model name '{name[:32]}...', a folder's name has at most {_MAX_NAME_BYTES} bytes"
        raise InvalidArgument(message)


def _write_uploaded_files(name: str, files: Mapping[str, bytes]) -> tuple[ScratchDirectory, Path]:
    """Write these files to a scratch directory; returns it and the model's directory in it."""
    with ExitStack() as unless_written:
        try:
            scratch = ScratchDirectory()
            unless_written.push(scratch)
            for path, content in files.items():
                file = scratch.path / name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        except (OSError, UnicodeEncodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            kind = DiskFull if is_disk_full(error) else InvalidArgument
            raise kind(f"cannot write the files of model '{name}': {reason}") from None
        unless_written.pop_all()
    return scratch, scratch.path / name


def _check_path(path: str) -> None:
    if "\0" in path:
        raise InvalidArgument(f"Invalid file parameter {path!r}: no path has a NUL in it")
    parts: list[str] = []
    for part in PurePosixPath(path).parts:
        parts = parts[:-1] if part == ".." and parts and parts[-1] != ".." else [*parts, part]
    if len(parts) > _MAX_FOLDER_DEPTH:
        raise InvalidArgument(
            f"Invalid file parameter '{path[:64]}...': it is in more than {_MAX_FOLDER_DEPTH} folders"
        )
    if not parts or parts[0] in ("..", "/"):
        normalised = "/".join(parts)
        raise InvalidArgument(
            f"Invalid file parameter '{path}' with normalized path '{normalised}' must stay within model directory."
        )
