"""The table of backends: the module that serves the models of each backend name.

No other module knows them; a module is imported when a model of its backend is built, and seen through the protocols
below alone.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from ..core.errors import InvalidArgument, Unsupported
from ..core.gateway import Gateway, ModelServices
from ..core.model import MeasuredModel, MemoryNeed, Model, ModelConfig, ModelSamples, RawConfig
from ..core.runtime import RuntimeLoader
from ..processes.rate_limiter import RateLimiter
from .native_models import BLS

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while a model loads: phase, fraction done, seconds that it took once it is done, detail."""


class TextModelBuilder(Protocol):
    """Builds a model that makes its own config, without loading it. Raises `CharoniaError` for a wrong parameter.

    `written`: the config of its directory. `granted`: bytes that the model may take, if its backend estimates memory:
    `memory` of the host's, and `gpu_memory` of each GPU's if it needs any there.
    """

    def __call__(
        self,
        written: ModelConfig,
        path: str,
        parameters: Mapping[str, str],
        on_progress: OnProgress,
        **granted: int,
    ) -> Model: ...


MemoryEstimator: TypeAlias = Callable[[str, Mapping[str, str], Sequence[int]], Sequence[MemoryNeed]]
"""The least that the model of a path and parameters takes of each memory; the numbers are those of the GPUs here.
Raises as the builder does."""

CheckpointExaminer: TypeAlias = Callable[[str, Mapping[str, str]], str]
"""Reads a model's files as its load does, and returns what only the load will find out. Raises as the load does."""


class TextBackend(NamedTuple):
    """A backend whose models make their own configs. With `estimate_memory`, its models take all the memory that they
    are granted; with `examine`, a model can be checked without loading it."""

    build: TextModelBuilder
    estimate_memory: MemoryEstimator | None = None
    examine: CheckpointExaminer | None = None


ClassicModelBuilder: TypeAlias = Callable[
    [ModelConfig, RuntimeLoader, Path, Mapping[str, str], ModelSamples, Sequence[float], RateLimiter | None],
    MeasuredModel,
]
"""`classic_backends.model.ClassicModel`."""

TEXT_BACKENDS = {
    "charonia": ("engine.build", "language_model", "memory_needed", "examine"),
    "vllm": ("engine.vllm.build", "vllm_model", "memory_needed", "examine"),
    "tensorrtllm": ("engine.trtllm_layouts.build", "tensorrt_llm_model", "memory_needed", "examine"),
    "llmapi": ("engine.trtllm_layouts.build", "tensorrt_llm_model", "memory_needed", "examine"),
}
"""Backend name -> module of ours, and the functions in it that a `TextBackend` has, in its order."""

FILLS_GRANTED_MEMORY = frozenset(backend for backend, (_, *names) in TEXT_BACKENDS.items() if len(names) > 1)
"""Backends that estimate memory: their models take as much as they are granted."""

CLASSIC_RUNTIME_LOADERS = {
    "identity": ("classic_backends.builtin", "IDENTITY"),
    "python": ("classic_backends.python.python_backend", "PYTHON"),
    "onnxruntime": ("classic_backends.isolated.isolated_runtime", "ONNX"),
    "openvino": ("classic_backends.isolated.isolated_runtime", "OPENVINO"),
    "fil": ("classic_backends.isolated.isolated_runtime", "FIL"),
    "pytorch": ("classic_backends.isolated.isolated_runtime", "PYTORCH"),
    "tensorflow": ("classic_backends.isolated.isolated_runtime", "TENSORFLOW"),
    "encoder": ("classic_backends.isolated.isolated_runtime", "ENCODER"),
    "charonia_preprocessing": ("classic_backends.tokenizer_models", "PREPROCESSING"),
    "charonia_postprocessing": ("classic_backends.tokenizer_models", "POSTPROCESSING"),
    "repeat": ("classic_backends.builtin", "REPEAT"),
    "square": ("classic_backends.builtin", "SQUARE"),
}
"""Backend name of a classic model -> module of ours, and the `RuntimeLoader` in it."""


PYTHON = "python"
CALLING_BACKENDS = frozenset({PYTHON})
"""Backends whose models ask other models: their loaders are bound to the server."""

ENSEMBLE = "ensemble"
PIPELINE = "pipeline"
COMPOSITIONS = {
    ENSEMBLE: ("ensembles.ensemble_model", "Ensemble"),
    BLS: ("ensembles.tensorrt_llm_bls", "TensorRtLlmBls"),
    PIPELINE: ("ensembles.pipeline_model", "Pipeline"),
}
"""Backend name of a model that only asks others -> module of ours, and its `Composition`."""


_ENTRY_POINTS = "charonia.backends"
"""The group of entry points with which packages bring backends: name -> `RuntimeLoader`."""

_WAYS_OUT = {
    "tensorrt": "TensorRT plans are not run: serve the ONNX model that the plan was built from, by onnxruntime with "
    "execution_accelerators, or a language model by tensorrtllm",
}
"""Triton's backends that are not served, and what to do."""


@cache
def installed_backends() -> Mapping[str, EntryPoint]:
    """The backends that other packages bring. Names of ours stay ours."""
    found = {each.name: each for each in entry_points(group=_ENTRY_POINTS)}
    return {name: each for name, each in found.items() if not is_own_backend(name)}


def is_own_backend(backend: str) -> bool:
    """Whether a backend is part of the package, and none written in Python by somebody else."""
    return backend in TEXT_BACKENDS or backend in CLASSIC_RUNTIME_LOADERS or backend in COMPOSITIONS


def is_written_in_python(backend: str) -> bool:
    """Whether a backend's models run the code of a `model.py`: each its own, or that of the backend."""
    return backend == PYTHON or not (is_own_backend(backend) or backend in installed_backends())


def _backends_in(directory: Path | None) -> list[str]:
    """The backends written in Python of a directory: its folders with a `model.py`."""
    return [] if directory is None else [file.parent.name for file in directory.glob("*/model.py")]


def check_backend(name: str, backend: str, directory: Path | None) -> None:
    """Raises `InvalidArgument` for a backend that is not served. `directory`: of the backends written in Python."""
    others = (*_backends_in(directory), *installed_backends())
    if is_own_backend(backend) or backend in others:
        return
    if backend in _WAYS_OUT:
        raise Unsupported(f"model '{name}': {_WAYS_OUT[backend]}", field="backend")
    known = ", ".join(sorted({*TEXT_BACKENDS, *CLASSIC_RUNTIME_LOADERS, *COMPOSITIONS, *others}))
    absent = directory is not None and not directory.is_dir()
    hint = f"; there is no directory '{directory}' (--backend-directory)" if absent else ""
    message = f"model '{name}': unknown backend '{backend}'; known are {known}{hint}"
    raise InvalidArgument(message, field="backend")


def text_backend(backend: str) -> TextBackend | None:
    """The backend of that name, if its models make their own configs."""
    if backend not in TEXT_BACKENDS:
        return None
    module, *names = TEXT_BACKENDS[backend]
    return TextBackend(*(_import(module, name) for name in names))


def classic_runtime_loader(
    backend: str, directory: Path | None, services: ModelServices | None = None
) -> RuntimeLoader:
    """The loader of a backend; `directory` of the backends written in Python; `services` of the server whose models it
    loads, where their configs alone are read None. Raises `InvalidArgument` if a package's backend is none."""
    if backend in installed_backends():
        return _load_installed(backend)
    written_in_python = not is_own_backend(backend)
    loader = _import(*CLASSIC_RUNTIME_LOADERS[PYTHON if written_in_python else backend])
    if written_in_python and directory is not None:
        loader = loader.with_code(directory / backend)
    if services is not None and (backend in CALLING_BACKENDS or written_in_python):
        loader = loader.bound_to(services)
    return cast(RuntimeLoader, loader)


def _load_installed(backend: str) -> RuntimeLoader:
    found = installed_backends()[backend]
    try:
        loader = found.load()
    except Exception as error:
        message = f"backend '{backend}' of {found.value} cannot be imported: {type(error).__name__}: {error}"
        raise InvalidArgument(message, field="backend") from error
    for name in ("load", "needs", "complete", "uses_gpus"):
        if not callable(getattr(loader, name, None)):
            message = f"backend '{backend}': {found.value} is no RuntimeLoader: it has no {name}()"
            raise InvalidArgument(message, field="backend")
    return cast(RuntimeLoader, loader)


def composite_model(
    backend: str, config: ModelConfig, directory: Path, gateway: Gateway, quantiles: Sequence[float]
) -> MeasuredModel:
    """A model of a backend in `COMPOSITIONS`. `directory`: of its version, where a pipeline has its code."""
    composition = _import(*COMPOSITIONS[backend])
    own_code = (directory,) if backend == PIPELINE else ()
    model: MeasuredModel = _import("ensembles.composite_model", "CompositeModel")(
        config, gateway, composition(config, gateway, *own_code), quantiles
    )
    return model


def classic_model_builder() -> ClassicModelBuilder:
    return cast(ClassicModelBuilder, _import("classic_backends.model", "ClassicModel"))


def torch_config_guesser() -> Callable[[RawConfig, Path], RawConfig]:
    """`classic_backends.torch.model_files.guess_config`."""
    return cast(Callable[[RawConfig, Path], RawConfig], _import("classic_backends.torch.model_files", "guess_config"))


def _import(module: str, name: str) -> Any:
    return getattr(import_module(f"..{module}", __package__), name)
