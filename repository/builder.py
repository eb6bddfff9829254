"""Builds a model from its source: completes and validates its config, reserves memory, reads its files.

Loads nothing. Knows backends only through backend_registry.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from ..core.model import MemoryNeed, Model, ModelConfig, ModelSamples
from ..telemetry.gpus import usable_gpus
from .backend_registry import (
    OnProgress,
    check_backend,
    classic_model_builder,
    classic_runtime_loader,
    text_backend,
)
from .cached_model import CachedModel
from .config_defaults import enable_default_batching, fill_defaults
from .config_io import ConfigMessage, config_from_json, config_to_json
from .config_validation import validate_config, validate_written_config
from .memory_budget import MemoryBudget
from .model_config import to_model_config, with_config_defaults
from .model_files import read_model_samples, validate_warmup_requests
from .model_source import ModelSource, VersionSource, with_config_position
from .response_cache import ResponseCache
from .unsupported_fields import is_response_cache_enabled, refuse_unsupported_fields

_DEFAULT_BATCH_KEY = "default-max-batch-size"
_DEFAULT_SETTINGS = {_DEFAULT_BATCH_KEY: "4"}


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """`--backend-config`: parameters by backend name; those under the empty name are for all backends."""

    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, flags: Sequence[str]) -> "BackendSettings":
        """Read `<backend>,<key>=<value>` or `<key>=<value>`, one for each flag.

        Raises:
            InvalidArgument: a flag has another form.
        """
        settings: dict[str, dict[str, str]] = {}
        for flag in flags:
            setting, equals, value = flag.partition("=")
            backend, _, key = setting.rpartition(",")
            if not equals or not key:
                message = f"--backend-config must be <backend>,<key>=<value> or <key>=<value>, got '{flag}'"
                raise InvalidArgument(message)
            settings.setdefault(backend, {})[key] = value
        size = settings.get("", {}).get(_DEFAULT_BATCH_KEY, "1")
        if not size.isdecimal():
            raise InvalidArgument(f"--backend-config: {_DEFAULT_BATCH_KEY} must be a whole number, got '{size}'")
        return cls(settings)

    def for_backend(self, backend: str) -> dict[str, str]:
        return {**_DEFAULT_SETTINGS, **self.settings.get("", {}), **self.settings.get(backend, {})}


@dataclass(frozen=True, slots=True)
class ModelFactory:
    """The steps from a prepared source to a loaded model, and back.

    `make` builds the model; `describe` completes its config once it is loaded, when `on_loaded` is called; `release` is
    called when it is unloaded, or did not load. `examine` reads its files without loading it: `CheckpointExaminer`.
    """

    make: Callable[[OnProgress], Model]
    describe: Callable[[ModelConfig], ModelConfig]
    on_loaded: Callable[[Model], None] = lambda model: None
    release: Callable[[], None] = lambda: None
    examine: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """The settings that models are built with.

    `auto_complete`: backends complete configs from their models' files. `quantiles`: those of the summaries of
    latencies, none for no summaries. `cache`: for the responses of models whose configs ask for one.
    """

    backends: BackendSettings = field(default_factory=BackendSettings)
    auto_complete: bool = True
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    quantiles: tuple[float, ...] = ()
    cache: ResponseCache | None = None

    def prepare(self, source: ModelSource, version: VersionSource, sharers: int = 1) -> ModelFactory:
        """Read a version's files and reserve its memory; blocks for as long as that and imports take.

        `sharers`: models, this one among them, that load side by side and share the host's free memory if they take all
        that they are granted.

        Raises:
            CharoniaError: the model cannot be built; the message says where its config is wrong.
        """
        try:
            check_backend(source.name, source.backend)
            refuse_unsupported_fields(source.config)
            validate_written_config(source.config)
            return self._prepare_text_model(source, version, sharers) or self._prepare_classic_model(source, version)
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None

    def _prepare_text_model(self, source: ModelSource, version: VersionSource, sharers: int) -> ModelFactory | None:
        backend = text_backend(source.backend)
        if backend is None:
            return None
        parameters = {**self.backends.settings.get(source.backend, {}), **source.parameters}
        needed: Sequence[MemoryNeed] = ()
        granted: dict[str, int] = {}
        if backend.estimate_memory is not None:
            needed = backend.estimate_memory(version.path, parameters, usable_gpus())
            granted = self._memory_grant(needed, sharers)
        reservation = self.budget.reserve(source.name, version.number, needed)
        reservation.grant(granted.get("memory", 0))
        build = backend.build
        return ModelFactory(
            lambda on_progress: build(source.name, version.number, version.path, parameters, on_progress, **granted),
            lambda config: with_config_defaults(config, source.config),
            reservation.finish_loading,
            reservation.release,
            partial(backend.examine, version.path, parameters) if backend.examine is not None else lambda: "",
        )

    def _memory_grant(self, needed: Sequence[MemoryNeed], sharers: int) -> dict[str, int]:
        """The memory that a model needs and its share of the rest of the host's; all that is left of its GPUs'."""
        stated, left = sum(share.size for share in needed if share.gpu is None), self.budget.host.available
        granted = {"memory": stated + max(0, left - stated) // sharers}
        on_each = self.budget.available_on([share.gpu for share in needed if share.gpu is not None])
        return granted if on_each is None else {**granted, "gpu_memory": on_each}

    def _prepare_classic_model(self, source: ModelSource, version: VersionSource) -> ModelFactory:
        # Before anything reads the model, as completing its config does.
        parameters = {**self.backends.for_backend(source.backend), **source.parameters}
        placed = config_from_json(config_to_json(source.config))
        self._normalise(placed, source.backend)
        loader, directory = classic_runtime_loader(source.backend), Path(version.path)
        needed = loader.needs(directory, config_to_json(placed), parameters)
        reservation = self.budget.reserve(source.name, version.number, needed)
        try:
            whole = self.complete_config(source, version)
            config = to_model_config(whole, version.number, source.directory)
            samples = ModelSamples() if source.directory is None else read_model_samples(whole, source.directory)
            validate_warmup_requests(config, samples.warmup_requests)
            builder = classic_model_builder()
        except BaseException:
            reservation.release()
            raise

        def make(_: OnProgress) -> Model:
            backend_settings = self.backends.for_backend(source.backend)
            model = builder(config, loader, directory, backend_settings, samples, self.quantiles)
            if self.cache is None or not is_response_cache_enabled(whole):
                return model
            return CachedModel(model, self.cache, self.quantiles)

        return ModelFactory(make, lambda config: config, reservation.finish_loading, reservation.release)

    def complete_config(self, source: ModelSource, version: VersionSource) -> ConfigMessage:
        """The config of one version, completed, normalised and checked."""
        whole = config_from_json(config_to_json(source.config))
        if self.auto_complete:
            parameters = {**self.backends.for_backend(source.backend), **source.parameters}
            fields = classic_runtime_loader(source.backend).complete(
                Path(version.path), config_to_json(whole), parameters
            )
            size_given = whole.max_batch_size > 0
            whole = config_from_json(fields)
            enable_default_batching(whole, size_given)
        self._normalise(whole, source.backend)
        validate_config(whole, usable_gpus())
        return whole

    def _normalise(self, config: ConfigMessage, backend: str) -> None:
        gpus = usable_gpus()
        fill_defaults(config, gpus, bool(gpus) and classic_runtime_loader(backend).uses_gpus())
