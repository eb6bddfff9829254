"""Builds a model from its source: completes and validates its config, reserves memory, reads its files.

Loads nothing. Knows backends only through backend_registry.py.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.backends import OnProgress, TextBackend
from ..core.errors import CharoniaError, InvalidArgument, Unsupported, did_you_mean
from ..core.media_models import MediaRefusal, MediaServices
from ..core.model import MeasuredModel, MemoryNeed, Model, ModelConfig, ModelSamples, RawConfig
from ..core.regular_files import refuse_special_files
from ..core.runtime import RuntimeLoader
from ..core.tensor import TensorSpec
from ..processes.rate_limiter import RateLimiter
from ..telemetry.host_metrics import usable_gpus
from ..telemetry.shared_state import ModelServices
from .backend_registry import (
    PYTHON,
    canonical_backend,
    check_backend,
    classic_model_builder,
    classic_runtime_loader,
    composite_model,
    is_composition,
    is_written_in_python,
    known_backends,
    media_services,
    text_backend,
)
from .config_defaults import enable_default_batching, fill_defaults
from .config_io import complete_fields, v2_datatype
from .config_validation import (
    ignored_field_message,
    ignored_fields,
    is_decoupled,
    is_response_cache_enabled,
    refuse_unsupported_fields,
    validate_config,
    validate_written_config,
)
from .memory_budget import MemoryBudget, MemoryReservation
from .model_files import read_initial_states, read_label_files, read_warmup_requests, validate_warmup_requests
from .model_source import (
    ModelSource,
    VersionSource,
    config_position,
    find_misnamed_versions,
    parameters_of,
    with_config_position,
    with_parameters,
)
from .response_cache import CachedModel, ResponseCache

log = logging.getLogger(__name__)

_DEFAULT_BATCH_KEY = "default-max-batch-size"


def parse_backend_config(flags: Sequence[str], directory: Path | None = None) -> dict[str, dict[str, str]]:
    """Parameters by backend name, from flags `<backend>,<key>=<value>`; those of `<key>=<value>`, under the empty name,
    are for all backends. Warns of those of a backend that is none, of ours, of a package or of `directory`.
    Raises `InvalidArgument` if a flag has another form."""
    settings: dict[str, dict[str, str]] = {}
    for flag in flags:
        setting, equals, value = flag.partition("=")
        backend, _, key = setting.rpartition(",")
        if not equals or not key:
            message = f"--backend-config must be <backend>,<key>=<value> or <key>=<value>, got '{flag}'"
            raise InvalidArgument(message)
        settings.setdefault(canonical_backend(backend), {})[key] = value
    size = settings.get("", {}).get(_DEFAULT_BATCH_KEY, "1")
    if not size.isdecimal():
        raise InvalidArgument(f"--backend-config: {_DEFAULT_BATCH_KEY} must be a whole number, got '{size}'")
    known = known_backends(directory)
    for backend in sorted(settings.keys() - known - {""}):
        log.warning(
            "--backend-config is for '%s', a backend that there is not%s", backend, did_you_mean(backend, known)
        )
    return settings


@dataclass(frozen=True, slots=True)
class ModelFactory:
    """Builds the model of one prepared version, whose memory is reserved. `examine` reads the version's files without
    loading them: `CheckpointExaminer`."""

    build: Callable[[OnProgress], Model]
    reservation: MemoryReservation
    examine: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """The settings that models are built with.

    `backends`: see `parse_backend_config`. `auto_complete`: backends complete configs from their models' files.
    `quantiles`: those of the summaries of latencies, none for no summaries. `cache`: for the responses of models whose
    configs ask for one. `backend_directory`: of backends written in Python. `limiter`: of resources that instances take
    turns at.
    """

    backends: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    auto_complete: bool = True
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    quantiles: tuple[float, ...] = ()
    cache: ResponseCache | None = None
    backend_directory: Path | None = None
    limiter: RateLimiter | None = None

    def prepare(
        self, source: ModelSource, version: VersionSource, services: ModelServices, sharers: int = 1
    ) -> ModelFactory:
        """Read a version's files and reserve its memory. It blocks for as long as that and imports take.

        `services`: of the server that will serve it. `sharers`: models that load side by side, this one among them, and
        divide the host's free memory. Raises `CharoniaError` if the model cannot be built; the message says where its
        config is wrong.
        """
        try:
            backend = self._find_backend(source, version)
            if is_composition(source.backend):
                return self._prepare_composite_model(source, version, services)
            if backend is None:
                return self._prepare_classic_model(source, version, services)
            return self._prepare_text_model(backend, source, version, sharers)
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None

    def describe(self, source: ModelSource, version: VersionSource, services: ModelServices) -> ModelConfig:
        """The config that a version will have when it is loaded, from its files; blocks for as long as reading them
        takes. Raises as `prepare`, but for want of memory."""
        try:
            backend = self._find_backend(source, version)
            if backend is not None:
                written = _to_model_config(source.config, version.number, {})
                parameters = {**self.backends.get(source.backend, {}), **source.parameters}
                own = backend.build(written, version.path, parameters, lambda *_: None).config
                return replace(with_config_defaults(own, source.config), aliases=source.aliases)
            completed = self.complete_config(source, version, services)
            if not is_composition(source.backend):
                self._runtime_loader(source.backend).forget()
            return self._model_config(completed, source, version)
        except CharoniaError as error:
            raise with_config_position(error, source.config_file) from None

    def _find_backend(self, source: ModelSource, version: VersionSource) -> TextBackend | None:
        if not (is_composition(source.backend) or is_written_in_python(source.backend)):  # code opens what it likes
            refuse_special_files(Path(version.path))
        check_backend(source.name, source.backend, self.backend_directory)
        refuse_unsupported_fields(source.config)
        validate_written_config(source.config)
        return text_backend(source.backend)

    def _prepare_text_model(
        self, backend: TextBackend, source: ModelSource, version: VersionSource, sharers: int
    ) -> ModelFactory:
        parameters = {**self.backends.get(source.backend, {}), **source.parameters}
        media = self._media_services(backend, source, version, parameters)
        seen: Sequence[MemoryNeed] = media.encoder.needs if isinstance(media, MediaServices) else ()
        needs: Sequence[MemoryNeed] = seen
        granted: dict[str, int] = {}
        held = 0
        if backend.estimate_memory is not None:
            needs = (*backend.estimate_memory(version.path, parameters, usable_gpus()), *seen)
            granted = self.budget.grant(needs, sharers)
            held = granted["memory"]
            for memory, bytes_seen in _by_memory(seen).items():  # the engine's part is what remains
                if memory in granted:
                    granted[memory] -= bytes_seen
        reservation = self.budget.reserve(source.name, version.number, needs, held)

        def build(on_progress: OnProgress) -> Model:
            written = _to_model_config(source.config, version.number, {})
            given: dict[str, Any] = granted if media is None else {**granted, "media": media}
            return backend.build(written, version.path, parameters, on_progress, **given)

        def examine() -> str:
            return "" if backend.examine is None else backend.examine(version.path, parameters)

        return ModelFactory(build, reservation, examine)

    def _media_services(
        self, backend: TextBackend, source: ModelSource, version: VersionSource, parameters: Mapping[str, str]
    ) -> MediaServices | MediaRefusal | None:
        """What a model that sees has beside its engine. A model whose tower is not served gets texts alone, and the log
        says so."""
        part = backend.find_media_part and backend.find_media_part(version.path, parameters, usable_gpus())
        if not part:
            return None
        try:
            return media_services(part, source.name, version.number)
        except (InvalidArgument, Unsupported) as error:
            log.warning("model '%s' takes no images: %s", source.name, error.message)
            return MediaRefusal(error.message)

    def _prepare_composite_model(
        self, source: ModelSource, version: VersionSource, services: ModelServices
    ) -> ModelFactory:
        config = self._model_config(self.complete_config(source, version), source, version)
        model = composite_model(source.backend, config, Path(version.path), services.gateway, self.quantiles)
        reservation = self.budget.reserve(source.name, version.number, ())
        return ModelFactory(lambda _: self._with_cache(model, source.config), reservation)

    def _prepare_classic_model(
        self, source: ModelSource, version: VersionSource, services: ModelServices
    ) -> ModelFactory:
        settings, directory = self._classic_settings(source.backend), Path(version.path)
        loader = self._runtime_loader(source.backend, services)
        builder = classic_model_builder()
        # Memory is reserved before anything reads the model, as completing its config does.
        needs = loader.needs(directory, self._fill_defaults(source.config), {**settings, **source.parameters})
        reservation = self.budget.reserve(source.name, version.number, needs)
        try:
            completed = self.complete_config(source, version, services)
            root = source.directory or directory
            config = self._model_config(completed, source, version)
            samples = ModelSamples(read_warmup_requests(completed, root), read_initial_states(completed, root))
            validate_warmup_requests(config, samples.warmup_requests)
        except BaseException:
            reservation.release()
            raise

        parts = config, loader, directory, settings, samples

        def build(_: OnProgress) -> Model:
            return self._with_cache(builder(*parts, self.quantiles, self.limiter), completed)

        return ModelFactory(build, reservation)

    def _model_config(self, config: RawConfig, source: ModelSource, version: VersionSource) -> ModelConfig:
        return _to_model_config(
            config, version.number, read_label_files(config, source.directory or Path(version.path))
        )

    def _with_cache(self, model: MeasuredModel, config: RawConfig) -> MeasuredModel:
        if self.cache is None or not is_response_cache_enabled(config):
            return model
        return CachedModel(model, self.cache, self.quantiles)

    def complete_config(
        self, source: ModelSource, version: VersionSource, services: ModelServices | None = None
    ) -> RawConfig:
        """The config of one version of any model but a language model: completed, with its defaults, and validated."""
        completed = source.config
        if not is_composition(source.backend):
            parameters = {**self._classic_settings(source.backend), **source.parameters}
            loader = self._runtime_loader(source.backend, services)
            completed = with_parameters(completed, loader.file_parameters(Path(version.path), parameters))
        if self.auto_complete and not is_composition(source.backend):
            own = deepcopy(completed)  # which a package's loader may change in place
            completed = complete_fields(loader.complete(Path(version.path), own, parameters))
            if not is_written_in_python(source.backend):  # which says so itself, by set_dynamic_batching
                completed = enable_default_batching(completed, size_given=source.config["max_batch_size"] > 0)
        completed = self._fill_defaults(completed)
        validate_config(completed, usable_gpus())
        return completed

    def log_ignored_fields(self, source: ModelSource, made: Sequence[RawConfig]) -> None:
        """Warn of what a source has and nothing looks at; `made`: the configs of its versions. Blocks as `prepare`."""
        for folder in () if source.directory is None else find_misnamed_versions(source.directory):
            log.warning("model '%s': folder '%s' is no version, for it begins with 0", source.name, folder)
        for path in ignored_fields(source.config, self.cache is not None, made, self.limiter is not None):
            position = config_position(source.config_file, path)
            log.warning("%smodel '%s': %s", position, source.name, ignored_field_message(path))

    def _runtime_loader(self, backend: str, services: ModelServices | None = None) -> RuntimeLoader:
        return classic_runtime_loader(backend, self.backend_directory, services)

    def _classic_settings(self, backend: str) -> dict[str, str]:
        names = ("", PYTHON, backend) if is_written_in_python(backend) else ("", backend)
        settings = {_DEFAULT_BATCH_KEY: "4"}
        for name in names:
            settings |= self.backends.get(name, {})
        return settings

    def _fill_defaults(self, config: RawConfig) -> RawConfig:
        gpus, backend = usable_gpus(), config["backend"]
        has_runtime = bool(backend) and not is_composition(backend)
        return fill_defaults(config, gpus, bool(gpus) and has_runtime and self._runtime_loader(backend).uses_gpus())


def _by_memory(needs: Sequence[MemoryNeed]) -> dict[str, int]:
    """The bytes of the host's memory and of GPUs', by the names of grants."""
    return {
        "memory": sum(need.size for need in needs if need.gpu is None),
        "gpu_memory": sum(need.size for need in needs if need.gpu is not None),
    }


def _to_model_config(config: RawConfig, version: str, labels: Mapping[str, tuple[str, ...]]) -> ModelConfig:
    def read_tensor(tensor: RawConfig) -> TensorSpec:
        optional = tensor.get("optional", False)
        return TensorSpec(tensor["name"], v2_datatype(tensor), tuple(tensor["dims"]), optional)

    return ModelConfig(
        config["name"],
        version,
        config["backend"] or config["platform"],
        platform=config["platform"],
        max_batch_size=config["max_batch_size"],
        decoupled=is_decoupled(config),
        inputs=tuple(map(read_tensor, config["input"])),
        outputs=tuple(map(read_tensor, config["output"])),
        parameters=parameters_of(config),
        created=int(time.time()),
        raw=config,
        labels=labels,
    )


def with_config_defaults(model: ModelConfig, config: RawConfig) -> ModelConfig:
    """The config of a loaded model. One that it made itself is completed by the config as written, and its own wins."""
    if model.raw:
        return model
    own = {
        "name": model.name,
        "backend": model.backend,
        "max_batch_size": model.max_batch_size,
        "model_transaction_policy": {"decoupled": model.decoupled},
        "input": [_to_field(spec) for spec in model.inputs],
        "output": [_to_field(spec) for spec in model.outputs],
    }
    return replace(model, raw=fill_defaults({**config, **own}, ()))


def _to_field(spec: TensorSpec) -> RawConfig:
    data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    field = {"name": spec.name, "data_type": data_type, "dims": list(spec.dims)}
    return {**field, "optional": True} if spec.optional else field
