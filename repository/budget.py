"""The host's memory, as models share it: who holds how much, and whether one more fits.

A model states its bytes before it loads: of a classic model those of its file, which is the least it can take. What a
language model's cache was promised and has not touched yet is not in it.
"""

from collections.abc import Callable
from pathlib import Path

from ..core.errors import Unavailable
from ..core.host import available_memory
from .source import ModelSource, VersionSource

_SHOWN = 3


class Budget:
    """Bytes by model and version. `free`: how many are left on this host now, by what processes really use."""

    def __init__(self, free: Callable[[], int] = available_memory) -> None:
        self._free = free
        self._held: dict[tuple[str, str, object], int] = {}

    def take(self, name: str, version: str, size: int) -> Callable[[], None]:
        """Hold them for a model; what is returned gives them back.

        Raises:
            Unavailable: they are not there; the message names the largest holders.
        """
        free = self._free()
        if size > free:
            raise Unavailable(
                f"model '{name}' version {version} needs at least {_shown(size)} of memory and {_shown(free)} is free"
                f"{self._largest()}"
            )
        key = (name, version, object())
        self._held[key] = size
        return lambda: self._give_back(key)

    @property
    def held(self) -> int:
        return sum(self._held.values())

    def _give_back(self, key: tuple[str, str, object]) -> None:
        self._held.pop(key, None)

    def _largest(self) -> str:
        largest = sorted(self._held.items(), key=lambda item: -item[1])[:_SHOWN]
        names = ", ".join(
            f"'{name}' version {version} ({_shown(size)})" for (name, version, _), size in largest if size
        )
        return f"; most is held by {names}" if names else ""


def stated_bytes(source: ModelSource, version: VersionSource) -> int:
    """Those of the version's model, a file or a directory; 0 where its backend reads none, or sizes itself."""
    file = source.config.default_model_filename
    model = Path(version.path) / file
    if not file or not model.exists():
        return 0
    files = [model] if model.is_file() else [each for each in model.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


def _shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
