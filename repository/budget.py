"""The host's memory, as models share it: who holds how much, and whether one more fits.

A model states its bytes before it loads. What it was promised and has not touched yet, as a language model its cache,
counts as taken: the kernel would call it free.
"""

from collections.abc import Callable

from ..core.errors import Unavailable
from ..core.holding import Holder
from ..core.host import available_memory

_SHOWN = 3


class Hold:
    """The bytes of one version of a model: those that it stated, or what it says of itself once it has loaded."""

    def __init__(self, name: str, version: str, size: int, release: Callable[["Hold"], None]) -> None:
        self.name = name
        self.version = version
        self._stated = size
        self._release = release
        self._holder: Holder | None = None

    @property
    def size(self) -> int:
        return self._stated if self._holder is None else max(self._stated, self._holder.holding().promised)

    @property
    def to_come(self) -> int:
        """Promised, and not taken yet. What states its bytes takes them all while it loads."""
        return 0 if self._holder is None else self._holder.holding().to_come

    def loaded(self, model: object) -> None:
        """From now on it speaks for itself, if it can."""
        if isinstance(model, Holder):
            self._holder = model

    def release(self) -> None:
        """It has gone. May be called again."""
        self._release(self)

    def __str__(self) -> str:
        return f"'{self.name}' version {self.version} ({shown(self.size)})"


class Budget:
    """`free`: bytes that are left on this host now, by what processes really use. `limit`: all that models may hold
    together, None for what there is."""

    def __init__(self, free: Callable[[], int] = available_memory, limit: int | None = None) -> None:
        self._free = free
        self._limit = limit
        self._holds: list[Hold] = []

    @property
    def held(self) -> int:
        return sum(hold.size for hold in self._holds)

    @property
    def left(self) -> int:
        """Bytes for those to come; at least 0."""
        there = self._free() - sum(hold.to_come for hold in self._holds)
        allowed = there if self._limit is None else min(there, self._limit - self.held)
        return max(0, allowed)

    def take(self, name: str, version: str, size: int) -> Hold:
        """Hold them for a model.

        Raises:
            Unavailable: they are not there; the message names the largest holders.
        """
        left = self.left
        if size > left:
            limit = "" if self._limit is None else f" of {shown(self._limit)}"
            raise Unavailable(
                f"model '{name}' version {version} needs at least {shown(size)} of memory and {shown(left)}{limit} "
                f"is free{self._largest()}"
            )
        hold = Hold(name, version, size, self._give_back)
        self._holds.append(hold)
        return hold

    def _give_back(self, hold: Hold) -> None:
        if hold in self._holds:
            self._holds.remove(hold)

    def _largest(self) -> str:
        largest = sorted(self._holds, key=lambda hold: -hold.size)[:_SHOWN]
        names = ", ".join(str(hold) for hold in largest if hold.size)
        return f"; most is held by {names}" if names else ""


def shown(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
