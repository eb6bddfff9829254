"""The table of model kinds: which backend name is built by what. The only place that knows them, each lazily."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from ..core.errors import InvalidArgument
from ..core.memory_needs import MemoryNeed
from ..core.model import MeasuredModel, Model, ModelConfig, ModelSamples

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while a model loads: phase, fraction done, seconds it took once done, detail."""


class TextModelBuilder(Protocol):
    """How a kind of model is built that makes its own config: not loaded yet, but refused at once if a parameter is
    wrong. `granted`: to kinds in `MEMORY_ESTIMATORS`, all the bytes that it may take, `memory` of the host's and, if
    it needs any there, `gpu_memory` of each GPU's."""

    def __call__(
        self,
        name: str,
        version: str,
        path: str,
        parameters: Mapping[str, str],
        on_progress: OnProgress,
        **granted: int,
    ) -> Model: ...


class MemoryEstimator(Protocol):
    """What a model takes at least of each memory. `gpus`: numbers of those that are here. Raises as
    `TextModelBuilder`."""

    def __call__(self, path: str, parameters: Mapping[str, str], gpus: Sequence[int]) -> Sequence[MemoryNeed]: ...


class CheckpointExaminer(Protocol):
    """Looks at a model's files as its load does; says what only the load will find out. Raises what the load would."""

    def __call__(self, path: str, parameters: Mapping[str, str]) -> str: ...


class ClassicRuntimeLoader(Protocol):
    """What this floor asks of a classic backend: `classic_backends.runtime.RuntimeLoader`."""

    def complete(
        self, directory: Path, document: Mapping[str, Any], parameters: Mapping[str, str]
    ) -> Mapping[str, Any]: ...

    def uses_gpus(self) -> bool: ...

    def needs(
        self, directory: Path, document: Mapping[str, Any], parameters: Mapping[str, str]
    ) -> Sequence[MemoryNeed]: ...


class ClassicModelBuilder(Protocol):
    """`classic_backends.model.ClassicModel`."""

    def __call__(
        self,
        config: ModelConfig,
        loader: ClassicRuntimeLoader,
        directory: Path,
        parameters: Mapping[str, str] | None = None,
        samples: ModelSamples = ...,
        quantiles: Sequence[float] = (),
    ) -> MeasuredModel: ...


TEXT_MODEL_BUILDERS = {
    "charonia": ("engine.build", "language_model"),
    "tensorrtllm": ("engine.trtllm.build", "tensorrt_llm"),
}
"""Backend name -> module of ours and the `TextModelBuilder` in it."""

MEMORY_ESTIMATORS = {"charonia": ("engine.build", "memory_needed")}
"""Backend name -> module of ours and the `MemoryEstimator` in it, where a model sizes itself by the memory that it is
granted."""

CHECKPOINT_EXAMINERS = {"charonia": ("engine.build", "examine")}
"""Backend name -> module of ours and the `CheckpointExaminer` in it, where more can be said of a model that is not
loaded."""

CLASSIC_MODEL_BUILDER = ("classic_backends.model", "ClassicModel")

CLASSIC_RUNTIME_LOADERS = {
    "identity": ("classic_backends.builtin", "IDENTITY"),
    "onnxruntime": ("classic_backends.isolated.isolated_runtime", "ONNX"),
    "pytorch": ("classic_backends.isolated.isolated_runtime", "PYTORCH"),
    "encoder": ("classic_backends.isolated.isolated_runtime", "ENCODER"),
    "repeat": ("classic_backends.builtin", "REPEAT"),
    "square": ("classic_backends.builtin", "SQUARE"),
}
"""Backend name of a classic model -> module of ours and the `RuntimeLoader` in it."""


def check_backend(name: str, backend: str) -> None:
    """Raises `InvalidArgument` for a backend that nobody here is."""
    if backend not in TEXT_MODEL_BUILDERS and backend not in CLASSIC_RUNTIME_LOADERS:
        known = ", ".join(sorted((*TEXT_MODEL_BUILDERS, *CLASSIC_RUNTIME_LOADERS)))
        message = f"model '{name}': unknown backend '{backend}'; known are {known}"
        raise InvalidArgument(message, field="backend")


def text_model_builder(backend: str) -> TextModelBuilder | None:
    """What builds models of that backend, if they make their own config."""
    return cast(TextModelBuilder, _import(TEXT_MODEL_BUILDERS[backend])) if backend in TEXT_MODEL_BUILDERS else None


def memory_estimator(backend: str) -> MemoryEstimator | None:
    """What says how much memory models of that backend need, if they take as much more as they are granted."""
    return cast(MemoryEstimator, _import(MEMORY_ESTIMATORS[backend])) if backend in MEMORY_ESTIMATORS else None


def fills_granted_memory(backend: str) -> bool:
    """Whether models of that backend take as much memory as they are granted."""
    return backend in MEMORY_ESTIMATORS


def checkpoint_examiner(backend: str) -> CheckpointExaminer | None:
    """What looks at the files of models of that backend beyond what building them does."""
    return cast(CheckpointExaminer, _import(CHECKPOINT_EXAMINERS[backend])) if backend in CHECKPOINT_EXAMINERS else None


def classic_runtime_loader(backend: str) -> ClassicRuntimeLoader:
    return cast(ClassicRuntimeLoader, _import(CLASSIC_RUNTIME_LOADERS[backend]))


def classic_model_builder() -> ClassicModelBuilder:
    return cast(ClassicModelBuilder, _import(CLASSIC_MODEL_BUILDER))


def _import(place: tuple[str, str]) -> Any:
    module, name = place
    return getattr(import_module(f"..{module}", __package__), name)
