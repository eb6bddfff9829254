"""Loading and unloading of models by requests.

See https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_management.md.
"""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath

from ..core.errors import CharoniaError, DiskFull, Internal, InvalidArgument, NotFound, is_disk_full
from ..processes.scratch import ScratchDirectory
from .backend_registry import PIPELINE_BACKEND, PYTHON, is_own_backend
from .catalog import RepositoryCatalog
from .config_io import parse_config_override
from .lifecycle import LoadFailure, ModelLifecycle
from .model_registry import ModelRegistry
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
        # Models that were loaded because ensembles ask them, with the ensembles.
        self._loaded_for: dict[str, set[str]] = {}

    async def loadable_models(self) -> list[str]:
        """Names of models that a request could load."""
        return await self._lifecycle.run_blocking(self._catalog.model_names)

    async def load(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model, and before it those that it asks, if it is an ensemble."""
        await self._lifecycle.refresh(self._catalog)
        self._loaded_for.pop(name, None)
        await self._load(name, config, files)

    async def _load(
        self, name: str, config: str | None, files: Mapping[str, bytes], asked_by: tuple[str, ...] = ()
    ) -> None:
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
            await self._load_with_steps(source, release, asked_by)
        except LoadFailure as failure:
            log.error("model '%s' failed to load for a request: version %s: %s", name, failure.version, failure)
            message = f"load failed for model '{name}': version {failure.version} is at UNAVAILABLE state: {failure};\n"
            raise (DiskFull if is_disk_full(failure) else InvalidArgument)(message) from None
        self._overridden.pop(name, None)
        if not from_disk:  # which nothing but this request has
            self._registry.entries[name].pinned = True
        if config is not None and not files:
            self._overridden[name] = stamps

    async def _load_with_steps(
        self, source: ModelSource, release: Callable[[], None], asked_by: tuple[str, ...]
    ) -> None:
        """Load a model, and before it those that it asks. What was loaded for it alone goes if it is not served then,
        or does not ask it any more."""
        try:
            try:
                if source.backend == PIPELINE_BACKEND and not self._allow_pipelines:
                    message = f"model '{source.name}' is a pipeline, {_PIPELINE_REFUSED}"
                    raise InvalidArgument(message, field="backend")
                await self._load_steps(source, asked_by)
            except BaseException:
                release()
                raise
            await self._lifecycle.load(source, release=release)
        except Exception:
            entry = self._registry.entries.get(source.name)
            if entry is None or not entry.served_versions:
                await self._unload_unasked(source.name, frozenset())
            raise
        await self._unload_unasked(source.name, source.steps)

    async def _unload_unasked(self, name: str, needed: Collection[str]) -> None:
        """Unload what was loaded only because the ensemble `name` asked it; it now asks these."""
        for step, ensembles in self._loaded_for.items():
            if step not in needed:
                ensembles.discard(name)
        for step in [step for step, ensembles in self._loaded_for.items() if not ensembles]:
            await self.unload(step)

    async def _load_steps(self, source: ModelSource, asked_by: tuple[str, ...]) -> None:
        """Load the models that an ensemble asks and that are not loaded; its own load tells which are missing.
        `asked_by`: the ensembles that ask for this one, the outermost first."""
        if source.name in asked_by:
            circle = " -> ".join((*asked_by, source.name))
            raise CircularEnsembles(f"circular dependency between ensembles: {circle}", field="ensemble_scheduling")
        for step in sorted(await self._lifecycle.run_blocking(self._catalog.steps_there, source)):
            entry = self._registry.entries.get(step)
            loaded = entry is not None and bool(entry.served_versions)
            if loaded and step not in self._loaded_for:
                continue
            self._loaded_for.setdefault(step, set()).add(source.name)
            if loaded:
                continue
            try:
                await self._load(step, None, {}, (*asked_by, source.name))
            except CircularEnsembles:
                raise
            except CharoniaError as error:
                log.warning("ensemble '%s': %s", source.name, error.message)

    async def unload(self, name: str, dependents: bool = False) -> None:
        """Unload a model, and what was loaded only because it asks it; with `dependents` all that it asks."""
        _check_name(name)
        left, unloaded = [name], set[str]()
        while left:
            model = left.pop()
            if model in unloaded:  # ensembles may ask each other
                continue
            unloaded.add(model)
            if dependents:
                with suppress(CharoniaError):
                    left += sorted((await self._lifecycle.run_blocking(self._catalog.read, model)).steps)
            await self._lifecycle.unload(model)
            self._overridden.pop(model, None)  # not before: a load that had to end first has set it
            self._loaded_for.pop(model, None)
            for step, ensembles in self._loaded_for.items():
                ensembles.discard(model)
                if not ensembles:
                    left.append(step)

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
