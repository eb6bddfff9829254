"""What the backends of libraries share: the import of a library that may not be installed, and models that several
instances use.

Knows no library.
"""

from collections.abc import Callable, Hashable
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from ..core.errors import NotFound, Unsupported
from ..core.runtime import RuntimeLoader

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


def import_library(name: str, models: str, extra: str) -> Any:
    """The module of that name, imported where it is needed first. Raises `Unsupported` where it is not installed:
    `models` need it, and the `extra` of that name brings it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        message = f"{models} need the package {name}, which is not installed: pip install '.[{extra}]'"
        raise Unsupported(message, field="backend") from None


def require_file(file: Path) -> None:
    """Raises `NotFound` unless there is that file in the directory of a model's version."""
    if not file.is_file():
        raise NotFound(f"unable to find '{file}' for model '{file.parent.parent.name}'")


class SharedModelLoader(RuntimeLoader, Generic[K, M]):
    """A loader whose instances share models: what its library makes of a file by settings, which is `load_model`. A
    model is in memory as long as an instance uses it; one that completed a config also until the load that follows, or
    the next config: a file is read once."""

    def __init__(self, load_model: Callable[[Path, K], M]) -> None:
        self._load_model = load_model
        self._models: WeakValueDictionary[Hashable, M] = WeakValueDictionary()
        self._completed: M | None = None
        self._lock = Lock()

    def open_model(self, file: Path, settings: K) -> M:
        """The model for an instance: one that is in memory, if nothing beside its file has changed, or a new one.
        Raises as its load does, and `NotFound`."""
        model = self._open(file, settings)
        self.forget()
        return model

    def open_for_config(self, file: Path, settings: K) -> M:
        """As `open_model`, for a config that is completed."""
        self.forget()
        self._completed = model = self._open(file, settings)
        return model

    def forget(self) -> None:
        self._completed = None

    def _open(self, file: Path, settings: K) -> M:
        key = (_identity(file), settings)
        with self._lock:
            model = self._models.get(key)
            if model is None:
                model = self._models[key] = self._load_model(file, settings)
            return model


def _identity(file: Path) -> tuple[object, ...]:
    """Equal as long as nothing beside the file changes either: weights may lie there. Raises `NotFound`."""
    require_file(file)
    states = [(path.name, path.stat()) for path in sorted(file.parent.iterdir()) if path.is_file()]
    return file, *((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
