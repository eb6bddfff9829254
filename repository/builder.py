"""From a source to a model: completes and checks its config, reads what belongs to it, and builds it.

Loads nothing. Knows backends only as the table of kinds has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from ..core.memory_needs import MemoryNeed
from ..core.model import MeasuredModel, Model, ModelConfig, ModelSamples
from ..telemetry.gpus import usable_gpus
from .backend_registry import (
    OnProgress,
    check_backend,
    checkpoint_examiner,
    classic_model_builder,
    classic_runtime_loader,
    memory_estimator,
    text_model_builder,
)
from .cached_model import CachedModel
from .config_defaults import enable_default_batching, fill_defaults
from .config_io import ConfigMessage, config_from_json, config_to_json
from .config_validation import validate_config, validate_written_config
from .initial_states import read_initial_states
from .memory_budget import MemoryBudget, MemoryReservation
from .model_config import to_model_config, with_config_defaults
from .model_source import ModelSource, VersionSource, with_config_position
from .response_cache import ResponseCache
from .unsupported_fields import is_response_cache_enabled, refuse_unsupported_fields
from .warmup import read_warmup_requests, validate_warmup_requests

_DEFAULT_BATCH_KEY = "default-max-batch-size"
_DEFAULT_SETTINGS = {_DEFAULT_BATCH_KEY: "4"}


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """`--backend-config`: parameters of one backend by its name, and of all under the empty name."""

    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, flags: Sequence[str]) -> "BackendSettings":
        """Of `<backend>,<key>=<value>` or `<key>=<value>`.

        Raises:
            InvalidArgument: one has another form.
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
    """All that is needed to make a model. `describe`: its config, once it is loaded; `loaded` is called then. `release`
    is called when it has gone, or could not load. `examine` looks at its files without loading it: see `kinds`."""

    make: Callable[[OnProgress], Model]
    describe: Callable[[ModelConfig], ModelConfig]
    on_loaded: Callable[[Model], None] = lambda model: None
    release: Callable[[], None] = lambda: None
    examine: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """`complete`: let backends complete configs from their models' files. `budget`: what models may hold.
    `quantiles`: of the summaries of their latencies, none for no summaries. `cache`: of the answers of models that want
    one, None for none."""

    backends: BackendSettings = field(default_factory=BackendSettings)
    auto_complete: bool = True
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    quantiles: tuple[float, ...] = ()
    cache: ResponseCache | None = None

    def prepare(self, source: ModelSource, version: VersionSource, sharers: int = 1) -> ModelFactory:
        """Reads files and imports what it needs, which may take a while. `sharers`: models that load side by side and
        divide what is left of the host's memory, this one among them, if it sizes itself by that.

        Raises:
            CharoniaError: the model cannot be; the message says where its config is wrong.
        """
        try:
            check_backend(source.name, source.backend)
            refuse_unsupported_fields(source.config)
            validate_written_config(source.config)
            return self._prepare_text_model(source, version, sharers) or self._prepare_classic_model(source, version)
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None

    def _prepare_text_model(self, source: ModelSource, version: VersionSource, sharers: int) -> ModelFactory | None:
        build, needs, look = (
            text_model_builder(source.backend),
            memory_estimator(source.backend),
            checkpoint_examiner(source.backend),
        )
        if build is None:
            return None
        parameters = {**self.backends.settings.get(source.backend, {}), **source.parameters}
        needed = () if needs is None else needs(version.path, parameters, usable_gpus())
        granted = {} if needs is None else self._memory_grant(needed, sharers)
        hold = self.budget.reserve(source.name, version.number, needed)
        hold.grant(granted.get("memory", 0))
        return ModelFactory(
            lambda on_progress: build(source.name, version.number, version.path, parameters, on_progress, **granted),
            lambda config: with_config_defaults(config, source.config),
            hold.finish_loading,
            hold.release,
            lambda: "" if look is None else look(version.path, parameters),
        )

    def _memory_grant(self, needed: Sequence[MemoryNeed], sharers: int) -> dict[str, int]:
        """What it needs and a share of what is left of the host's memory then; all that is left of GPUs."""
        stated, left = sum(share.size for share in needed if share.gpu is None), self.budget.host.available
        granted = {"memory": stated + max(0, left - stated) // sharers}
        on_each = self.budget.available_on([share.gpu for share in needed if share.gpu is not None])
        return granted if on_each is None else {**granted, "gpu_memory": on_each}

    def _prepare_classic_model(self, source: ModelSource, version: VersionSource) -> ModelFactory:
        # Before anything reads the model, as completing its config does.
        parameters = {**self.backends.for_backend(source.backend), **source.parameters}
        placed = config_from_json(config_to_json(source.config))
        self._normalise(placed, source.backend)
        needed = classic_runtime_loader(source.backend).needs(Path(version.path), config_to_json(placed), parameters)
        hold = self.budget.reserve(source.name, version.number, needed)
        try:
            return self._prepare_classic_within(source, version, hold)
        except BaseException:
            hold.release()
            raise

    def _prepare_classic_within(
        self, source: ModelSource, version: VersionSource, hold: MemoryReservation
    ) -> ModelFactory:
        build, loader, directory = classic_model_builder(), classic_runtime_loader(source.backend), Path(version.path)
        whole = self.complete_config(source, version)
        config = to_model_config(whole, version.number, source.directory)
        samples = _samples(whole, source.directory)
        validate_warmup_requests(config, samples.warmup_requests)
        make = partial(
            build, config, loader, directory, self.backends.for_backend(source.backend), samples, self.quantiles
        )
        return ModelFactory(
            lambda _: self._cached(whole, make()), lambda config: config, hold.finish_loading, hold.release
        )

    def _cached(self, config: ConfigMessage, model: MeasuredModel) -> Model:
        if self.cache is None or not is_response_cache_enabled(config):
            return model
        return CachedModel(model, self.cache, self.quantiles)

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


def _samples(config: ConfigMessage, directory: Path | None) -> ModelSamples:
    if directory is None:
        return ModelSamples()
    return ModelSamples(read_warmup_requests(config, directory), read_initial_states(config, directory))
