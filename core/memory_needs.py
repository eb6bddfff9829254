"""Memory that models need and hold, of the host and of GPUs."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

_PROC = Path("/proc")


class MemoryNeed(NamedTuple):
    """Bytes that a model needs of one memory: of GPU `gpu`, as this process numbers them; None: of the host's."""

    size: int
    gpu: int | None = None


class ReservedMemory(NamedTuple):
    """Bytes. `promised`: all it will ever hold; `resident`: what of it is in memory now."""

    promised: int = 0
    resident: int = 0

    @property
    def outstanding(self) -> int:
        return max(0, self.promised - self.resident)


@runtime_checkable
class MemoryHolder(Protocol):
    """A model that takes the host's memory bit by bit, and knows how much that will be."""

    def reserved_memory(self) -> ReservedMemory: ...


def resident_memory_of(pids: Iterable[int], root: Path = _PROC) -> int:
    """Bytes of these processes' own, and of all that they started: what they have in memory that is no file's. One that
    has gone has none."""
    return sum(_own(root / str(pid)) + resident_memory_of(_children(root / str(pid)), root) for pid in pids)


def _own(process: Path) -> int:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _children(process: Path) -> list[int]:
    """The kernel lists them by the thread that started them."""
    try:
        return [int(pid) for each in process.glob("task/*/children") for pid in each.read_text().split()]
    except OSError:
        return []
