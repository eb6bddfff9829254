"""Which backend serves the models of each backend name: our own by a table, everybody's by entry points.

No other module knows them; a backend's module is imported when a model of its is built, and seen through the contracts
of core alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from ..core.backends import CompositionBackend, NativeBackendFinder, TextBackend
from ..core.errors import InvalidArgument, Unsupported
from ..core.extensions import absent_extensions, installed_extensions, is_own_extension
from ..core.gateway import ModelLookup
from ..core.media_models import MediaEncoder, MediaPart, MediaServices
from ..core.model import MeasuredModel, ModelConfig, ModelSamples, RawConfig
from ..core.optional_packages import missing_llm_package
from ..core.runtime import RuntimeLoader
from ..processes.rate_limiter import RateLimiter
from ..telemetry.shared_state import ModelServices

ClassicModelBuilder: TypeAlias = Callable[
    [ModelConfig, RuntimeLoader, Path, Mapping[str, str], ModelSamples, Sequence[float], RateLimiter | None],
    MeasuredModel,
]
"""`classic_backends.model.ClassicModel`."""


class OwnBackend(NamedTuple):
    """A backend of ours: its `kind`, and the name of the one in a `module`."""

    kind: type
    module: str
    name: str


LANGUAGE_MODEL_BACKEND = "charonia"
ENCODER_BACKEND = "encoder"
PIPELINE_BACKEND = "pipeline"
PYTHON = "python"

OWN_BACKENDS = {
    LANGUAGE_MODEL_BACKEND: OwnBackend(TextBackend, "engine.build", "TEXT_BACKEND"),
    "vllm": OwnBackend(TextBackend, "engine.vllm.build", "TEXT_BACKEND"),
    "ensemble": OwnBackend(CompositionBackend, "ensembles.ensemble_model", "COMPOSITION_BACKEND"),
    PIPELINE_BACKEND: OwnBackend(CompositionBackend, "ensembles.pipeline_model", "COMPOSITION_BACKEND"),
    PYTHON: OwnBackend(RuntimeLoader, "classic_backends.python.python_backend", "PYTHON"),
    "identity": OwnBackend(RuntimeLoader, "classic_backends.builtin", "IDENTITY"),
    "repeat": OwnBackend(RuntimeLoader, "classic_backends.builtin", "REPEAT"),
    "square": OwnBackend(RuntimeLoader, "classic_backends.builtin", "SQUARE"),
    "onnxruntime": OwnBackend(RuntimeLoader, "classic_backends.isolated.isolated_runtime", "ONNX"),
    "openvino": OwnBackend(RuntimeLoader, "classic_backends.isolated.isolated_runtime", "OPENVINO"),
    "fil": OwnBackend(RuntimeLoader, "classic_backends.isolated.isolated_runtime", "FIL"),
    "pytorch": OwnBackend(RuntimeLoader, "classic_backends.isolated.isolated_runtime", "PYTORCH"),
    "tensorflow": OwnBackend(RuntimeLoader, "classic_backends.isolated.isolated_runtime", "TENSORFLOW"),
    ENCODER_BACKEND: OwnBackend(RuntimeLoader, "classic_backends.isolated.isolated_runtime", "ENCODER"),
    "charonia_preprocessing": OwnBackend(RuntimeLoader, "classic_backends.tokenizer_models", "PREPROCESSING"),
    "charonia_postprocessing": OwnBackend(RuntimeLoader, "classic_backends.tokenizer_models", "POSTPROCESSING"),
}
"""By backend name."""

_WAYS_OUT = {
    "tensorrt": "TensorRT plans are not run: serve the ONNX model that the plan was built from, by onnxruntime with "
    "execution_accelerators, or a language model by tensorrtllm",
}
"""Triton's backends that are not served, and what to do."""


def installed_backends() -> Mapping[str, EntryPoint]:
    """The backends that packages bring, those under `extras` among them. The table's names stay its own."""
    entries = installed_extensions("charonia.backends")
    return {name: entry for name, entry in entries.items() if name not in OWN_BACKENDS}


def canonical_backend(backend: str) -> str:
    """The name of a backend that may be given by an alias of a package."""
    alias = installed_extensions("charonia.backend_aliases").get(backend)
    return backend if alias is None else cast(str, _load_entry(alias, f"backend '{backend}'"))


def absent_backend(backend: str) -> str:
    """The package of ours that would bring a backend, or its alias, and is not installed; empty for another backend."""
    packages = {**absent_extensions("charonia.backend_aliases"), **absent_extensions("charonia.backends")}
    return packages.get(backend, "")


def is_own_backend(backend: str) -> bool:
    """Whether a backend is part of this package, and none written by somebody else."""
    entry = installed_backends().get(backend)
    return backend in OWN_BACKENDS or (entry is not None and is_own_extension(entry))


def is_written_in_python(backend: str) -> bool:
    """Whether a backend's models run the code of a `model.py`: each its own, or that of the backend."""
    return backend == PYTHON or not (backend in OWN_BACKENDS or backend in installed_backends())


def is_text_backend(backend: str) -> bool:
    """Whether a backend's models are language models."""
    return _kind(backend) is TextBackend


def is_composition(backend: str) -> bool:
    """Whether a backend's models only ask others."""
    return _kind(backend) is CompositionBackend


def _kind(backend: str) -> type:
    if backend in OWN_BACKENDS:
        return OWN_BACKENDS[backend].kind
    try:
        return type(_load_installed(backend)) if backend in installed_backends() else RuntimeLoader
    except InvalidArgument:  # which its models' loads tell
        return RuntimeLoader


def checkpoint_backends() -> Iterator[str]:
    """The backends that may serve a checkpoint on its own."""
    yield LANGUAGE_MODEL_BACKEND
    for name in installed_backends():
        if is_text_backend(name) and _text_backend(name).serves_checkpoints:
            yield name
    yield ENCODER_BACKEND


def _backends_in(directory: Path | None) -> list[str]:
    """The backends written in Python of a directory: its folders with a `model.py`."""
    return [] if directory is None else [file.parent.name for file in directory.glob("*/model.py")]


def known_backends(directory: Path | None) -> set[str]:
    """The names of all backends. `directory`: of those written in Python."""
    return {*OWN_BACKENDS, *installed_backends(), *_backends_in(directory)}


def check_backend(name: str, backend: str, directory: Path | None) -> None:
    """Raises `InvalidArgument` for a backend that is not served. `directory`: of the backends written in Python."""
    known = known_backends(directory)
    if backend in known:
        return
    if backend in _WAYS_OUT:
        raise Unsupported(f"model '{name}': {_WAYS_OUT[backend]}", field="backend")
    if package := absent_backend(backend):
        message = f"model '{name}': backend '{backend}' is one of {package}, which this installation lacks"
        raise Unsupported(message, field="backend")
    absent = directory is not None and not directory.is_dir()
    hint = f"; there is no directory '{directory}' (--backend-directory)" if absent else ""
    message = f"model '{name}': unknown backend '{backend}'; known are {', '.join(sorted(known))}{hint}"
    raise InvalidArgument(message, field="backend")


def text_backend(backend: str) -> TextBackend | None:
    """The backend of that name, if its models are language models."""
    return _text_backend(backend) if is_text_backend(backend) else None


def _text_backend(backend: str) -> TextBackend:
    return cast(TextBackend, _load(backend))


def classic_runtime_loader(
    backend: str, directory: Path | None, services: ModelServices | None = None
) -> RuntimeLoader:
    """The loader of a backend; `directory` of the backends written in Python; `services` of the server whose models it
    loads, where their configs alone are read None. Raises `InvalidArgument` if a package's backend is none."""
    if not is_written_in_python(backend):
        return cast(RuntimeLoader, _load(backend))
    loader = _load(PYTHON)
    if backend != PYTHON and directory is not None:
        loader = loader.with_code(directory / backend)
    return cast(RuntimeLoader, loader if services is None else loader.bound_to(services))


def media_services(part: MediaPart, name: str, version: str) -> MediaServices:
    """What serves the part for media of a language model. Raises `Unsupported` or `InvalidArgument` for one that is not
    served."""
    tower = cast(MediaEncoder, _import("classic_backends.tower.media_tower", "MediaTower")(name, version, part.tower))
    limits = _import("media.limits", "MediaLimits")(part.config)
    kinds = part.tower.kinds
    preparer = _import("media.reader", "MediaReader")(part.tower.checkpoint, limits, kinds=kinds) if kinds else None
    return MediaServices(preparer, tower, kinds, attended=bool(part.tower.own_encoder))


def composite_model(
    backend: str, config: ModelConfig, directory: Path, lookup: ModelLookup, quantiles: Sequence[float]
) -> MeasuredModel:
    """A model that only asks others. `directory`: of its version, where a pipeline has its code."""
    composition = cast(CompositionBackend, _load(backend)).compose(config, lookup, directory)
    model: MeasuredModel = _import("ensembles.composite_model", "CompositeModel")(
        config, lookup, composition, quantiles
    )
    return model


def find_native_backend(raw: RawConfig, directory: Path) -> str | None:
    """The backend that serves a model in the place of its Python code, if a package brings one. `directory`: of the
    version. Raises `InvalidArgument` if a package cannot be imported."""
    finders = installed_extensions("charonia.native_models").values()
    backends = (cast(NativeBackendFinder, _load_entry(finder, "native models"))(raw, directory) for finder in finders)
    return next(filter(None, backends), None)


def classic_model_builder() -> ClassicModelBuilder:
    return cast(ClassicModelBuilder, _import("classic_backends.model", "ClassicModel"))


def torch_config_guesser() -> Callable[[RawConfig, Path], RawConfig]:
    """`classic_backends.torch.model_files.guess_config`."""
    return cast(Callable[[RawConfig, Path], RawConfig], _import("classic_backends.torch.model_files", "guess_config"))


def _load(backend: str) -> Any:
    if backend in OWN_BACKENDS:
        return _import(OWN_BACKENDS[backend].module, OWN_BACKENDS[backend].name)
    return _load_installed(backend)


def _load_installed(backend: str) -> Any:
    entry = installed_backends()[backend]
    loaded = _load_entry(entry, f"backend '{backend}'")
    if isinstance(loaded, TextBackend | CompositionBackend):
        return loaded
    for name in ("load", "needs", "complete", "uses_gpus"):
        if not callable(getattr(loaded, name, None)):
            message = f"backend '{backend}': {entry.value} is no RuntimeLoader: it has no {name}()"
            raise InvalidArgument(message, field="backend")
    return loaded


def _load_entry(entry: EntryPoint, what: str) -> Any:
    try:
        return entry.load()
    except Exception as error:
        message = f"{what} of {entry.value} cannot be imported: {type(error).__name__}: {error}"
        raise InvalidArgument(message, field="backend") from error


def _import(module: str, name: str) -> Any:
    """What our module of that name has. Raises `Unsupported` where an extra brings what it imports."""
    try:
        return getattr(import_module(f"..{module}", __package__), name)
    except ModuleNotFoundError as error:
        if (refusal := missing_llm_package(error)) is not None:
            raise refusal from None
        raise
