"""From a source to a model: completes and checks its config, reads what belongs to it, and builds it.

Loads nothing. Knows backends only as the table of kinds has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..core.errors import CharoniaError, InvalidArgument
from ..core.memory_needs import Share
from ..core.model import MeasuredModel, Model, ModelConfig, Samples
from ..telemetry.gpus import usable_gpus
from .backend_registry import OnProgress, check_backend, classic, examine_of, kind_of, loader_of, needs_of
from .cached_model import CachedModel
from .config_defaults import invite_batching, normalise
from .config_io import Config, from_fields, to_fields
from .config_validation import check_config, check_written
from .initial_states import read_initial_states
from .memory_budget import Budget, Hold
from .model_config import described, model_config
from .model_source import ModelSource, VersionSource, located
from .response_cache import ResponseCache
from .unsupported_fields import caches, refuse_unserved
from .warmup import check_samples, read_warmup

_BATCH = "default-max-batch-size"
_PRESET = {_BATCH: "4"}


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
        size = settings.get("", {}).get(_BATCH, "1")
        if not size.isdecimal():
            raise InvalidArgument(f"--backend-config: {_BATCH} must be a whole number, got '{size}'")
        return cls(settings)

    def of(self, backend: str) -> dict[str, str]:
        return {**_PRESET, **self.settings.get("", {}), **self.settings.get(backend, {})}


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that is needed to make a model. `describe`: its config, once it is loaded; `loaded` is called then. `release`
    is called when it has gone, or could not load. `examine` looks at its files without loading it: see `kinds`."""

    make: Callable[[OnProgress], Model]
    describe: Callable[[ModelConfig], ModelConfig]
    loaded: Callable[[Model], None] = lambda model: None
    release: Callable[[], None] = lambda: None
    examine: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class Builder:
    """`complete`: let backends complete configs from their models' files. `budget`: what models may hold.
    `quantiles`: of the summaries of their latencies, none for no summaries. `cache`: of the answers of models that want
    one, None for none."""

    backends: BackendSettings = field(default_factory=BackendSettings)
    complete: bool = True
    budget: Budget = field(default_factory=Budget)
    quantiles: tuple[float, ...] = ()
    cache: ResponseCache | None = None

    def recipe(self, source: ModelSource, version: VersionSource, sharers: int = 1) -> Recipe:
        """Reads files and imports what it needs, which may take a while. `sharers`: models that load side by side and
        divide what is left of the host's memory, this one among them, if it sizes itself by that.

        Raises:
            CharoniaError: the model cannot be; the message says where its config is wrong.
        """
        try:
            check_backend(source.name, source.backend)
            refuse_unserved(source.config)
            check_written(source.config)
            return self._language(source, version, sharers) or self._classic(source, version)
        except CharoniaError as error:
            raise located(error, source.file) from None

    def _language(self, source: ModelSource, version: VersionSource, sharers: int) -> Recipe | None:
        build, needs, look = kind_of(source.backend), needs_of(source.backend), examine_of(source.backend)
        if build is None:
            return None
        parameters = {**self.backends.settings.get(source.backend, {}), **source.parameters}
        needed = () if needs is None else needs(version.path, parameters, usable_gpus())
        granted = {} if needs is None else self._granted(needed, sharers)
        hold = self.budget.take(source.name, version.number, needed)
        hold.grant(granted.get("memory", 0))
        return Recipe(
            lambda on_progress: build(source.name, version.number, version.path, parameters, on_progress, **granted),
            lambda config: described(config, source.config),
            hold.loaded,
            hold.release,
            lambda: "" if look is None else look(version.path, parameters),
        )

    def _granted(self, needed: Sequence[Share], sharers: int) -> dict[str, int]:
        """What it needs and a share of what is left of the host's memory then; all that is left of GPUs."""
        stated, left = sum(share.size for share in needed if share.gpu is None), self.budget.host.left
        granted = {"memory": stated + max(0, left - stated) // sharers}
        on_each = self.budget.left([share.gpu for share in needed if share.gpu is not None])
        return granted if on_each is None else {**granted, "gpu_memory": on_each}

    def _classic(self, source: ModelSource, version: VersionSource) -> Recipe:
        # Before anything reads the model, as completing its config does.
        parameters = {**self.backends.of(source.backend), **source.parameters}
        placed = from_fields(to_fields(source.config))
        self._normalise(placed, source.backend)
        needed = loader_of(source.backend).needs(Path(version.path), to_fields(placed), parameters)
        hold = self.budget.take(source.name, version.number, needed)
        try:
            return self._classic_within(source, version, hold)
        except BaseException:
            hold.release()
            raise

    def _classic_within(self, source: ModelSource, version: VersionSource, hold: Hold) -> Recipe:
        build, loader, directory = classic(), loader_of(source.backend), Path(version.path)
        whole = self.whole_config(source, version)
        config = model_config(whole, version.number, source.directory)
        samples = _samples(whole, source.directory)
        check_samples(config, samples.warm_up)
        make = partial(build, config, loader, directory, self.backends.of(source.backend), samples, self.quantiles)
        return Recipe(lambda _: self._cached(whole, make()), lambda config: config, hold.loaded, hold.release)

    def _cached(self, config: Config, model: MeasuredModel) -> Model:
        if self.cache is None or not caches(config):
            return model
        return CachedModel(model, self.cache, self.quantiles)

    def whole_config(self, source: ModelSource, version: VersionSource) -> Config:
        """The config of one version, completed, normalised and checked."""
        whole = from_fields(to_fields(source.config))
        if self.complete:
            parameters = {**self.backends.of(source.backend), **source.parameters}
            fields = loader_of(source.backend).complete(Path(version.path), to_fields(whole), parameters)
            size_given = whole.max_batch_size > 0
            whole = from_fields(fields)
            invite_batching(whole, size_given)
        self._normalise(whole, source.backend)
        check_config(whole, usable_gpus())
        return whole

    def _normalise(self, config: Config, backend: str) -> None:
        gpus = usable_gpus()
        normalise(config, gpus, bool(gpus) and loader_of(backend).uses_gpus())


def _samples(config: Config, directory: Path | None) -> Samples:
    if directory is None:
        return Samples()
    return Samples(read_warmup(config, directory), read_initial_states(config, directory))
