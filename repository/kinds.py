"""The table of model kinds: which backend name is built by what. The only place that knows them, each lazily."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Protocol, TypeAlias, cast

from ..core.errors import InvalidArgument
from ..core.model import Model
from .source import ModelSource

OnProgress: TypeAlias = Callable[[str, float, float, str], None]
"""Called while a model loads: phase, fraction done, seconds it took once done, detail."""


class Build(Protocol):
    """How a kind of model is built: not loaded yet, but refused at once if a parameter is wrong."""

    def __call__(
        self, name: str, version: str, path: str, parameters: Mapping[str, str], on_progress: OnProgress
    ) -> Model: ...


KINDS = {"charonia": ("engine.build", "language_model")}
"""Backend name -> module of ours and the `Build` in it."""


def build(source: ModelSource, on_progress: OnProgress) -> Model:
    """The model that `source` describes, not yet loaded.

    Raises:
        InvalidArgument: an unknown backend, or a parameter that is wrong.
    """
    if source.backend not in KINDS:
        known = ", ".join(sorted(KINDS))
        message = f"model '{source.name}': unknown backend '{source.backend}'; known are {known}"
        raise InvalidArgument(message, field="backend")
    module, function = KINDS[source.backend]
    kind = cast(Build, getattr(import_module(f"..{module}", __package__), function))
    return kind(source.name, source.version, source.path, source.parameters, on_progress)
