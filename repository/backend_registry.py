"""The table of model kinds: which backend name is built by what. The only place that knows them, each lazily."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from ..core.errors import InvalidArgument
from ..core.memory_needs import Share
from ..core.model import MeasuredModel, Model, ModelConfig, Samples

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while a model loads: phase, fraction done, seconds it took once done, detail."""


class Build(Protocol):
    """How a kind of model is built that makes its own config: not loaded yet, but refused at once if a parameter is
    wrong. `granted`: to kinds in `NEEDS`, all the bytes that it may take, `memory` of the host's and, if it needs any
    there, `gpu_memory` of each GPU's."""

    def __call__(
        self,
        name: str,
        version: str,
        path: str,
        parameters: Mapping[str, str],
        on_progress: OnProgress,
        **granted: int,
    ) -> Model: ...


class Needs(Protocol):
    """What a model takes at least of each memory. `gpus`: numbers of those that are here. Raises as `Build`."""

    def __call__(self, path: str, parameters: Mapping[str, str], gpus: Sequence[int]) -> Sequence[Share]: ...


class Examine(Protocol):
    """Looks at a model's files as its load does; says what only the load will find out. Raises what the load would."""

    def __call__(self, path: str, parameters: Mapping[str, str]) -> str: ...


class Loader(Protocol):
    """What this floor asks of a classic backend: `classic_backends.runtime.RuntimeLoader`."""

    def complete(
        self, directory: Path, document: Mapping[str, Any], parameters: Mapping[str, str]
    ) -> Mapping[str, Any]: ...

    def uses_gpus(self) -> bool: ...

    def needs(self, directory: Path, document: Mapping[str, Any], parameters: Mapping[str, str]) -> Sequence[Share]: ...


class BuildClassic(Protocol):
    """`classic_backends.model.ClassicModel`."""

    def __call__(
        self,
        config: ModelConfig,
        loader: Loader,
        directory: Path,
        parameters: Mapping[str, str] | None = None,
        samples: Samples = ...,
        quantiles: Sequence[float] = (),
    ) -> MeasuredModel: ...


KINDS = {
    "charonia": ("engine.build", "language_model"),
    "tensorrtllm": ("engine.trtllm.build", "tensorrt_llm"),
}
"""Backend name -> module of ours and the `Build` in it."""

NEEDS = {"charonia": ("engine.build", "memory_needed")}
"""Backend name -> module of ours and the `Needs` in it, where a model sizes itself by the memory that it is granted."""

EXAMINES = {"charonia": ("engine.build", "examine")}
"""Backend name -> module of ours and the `Examine` in it, where more can be said of a model that is not loaded."""

CLASSIC = ("classic_backends.model", "ClassicModel")

LOADERS = {
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
    if backend not in KINDS and backend not in LOADERS:
        known = ", ".join(sorted((*KINDS, *LOADERS)))
        message = f"model '{name}': unknown backend '{backend}'; known are {known}"
        raise InvalidArgument(message, field="backend")


def kind_of(backend: str) -> Build | None:
    """What builds models of that backend, if they make their own config."""
    return cast(Build, _import(KINDS[backend])) if backend in KINDS else None


def needs_of(backend: str) -> Needs | None:
    """What says how much memory models of that backend need, if they take as much more as they are granted."""
    return cast(Needs, _import(NEEDS[backend])) if backend in NEEDS else None


def sizes_itself(backend: str) -> bool:
    """Whether models of that backend take as much memory as they are granted."""
    return backend in NEEDS


def examine_of(backend: str) -> Examine | None:
    """What looks at the files of models of that backend beyond what building them does."""
    return cast(Examine, _import(EXAMINES[backend])) if backend in EXAMINES else None


def loader_of(backend: str) -> Loader:
    return cast(Loader, _import(LOADERS[backend]))


def classic() -> BuildClassic:
    return cast(BuildClassic, _import(CLASSIC))


def _import(place: tuple[str, str]) -> Any:
    module, name = place
    return getattr(import_module(f"..{module}", __package__), name)
