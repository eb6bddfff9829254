"""The machine at a scrape: Triton's CPU and pinned-memory gauges, read from the kernel's files below `root`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..core.metrics import Measurement, Reading

_ROOT = Path("/proc")
_IDLE = slice(3, 5)
"""The fields of /proc/stat's first line that count idle time, and idle time in which a disk was waited for."""

_GUESTS = 8
"""From here on time of guests, which the fields before have already."""


class _CpuTicks(NamedTuple):
    busy: int
    whole: int


class HostMetrics:
    """Asked at each scrape: utilisation is that since the last one. What a system does not tell has no series."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._seen = self._ticks()

    def measure(self) -> Iterator[Measurement]:
        yield Measurement({}, (*self._cpu(), *self._memory(), *_PINNED_MEMORY))

    def _cpu(self) -> Iterator[Reading]:
        now, before = self._ticks(), self._seen
        if now is None or before is None or now.whole == before.whole:
            return
        self._seen = now
        yield Reading("nv_cpu_utilization", (now.busy - before.busy) / (now.whole - before.whole))

    def _memory(self) -> Iterator[Reading]:
        lines = (line.split() for line in _read(self._root / "meminfo"))
        sizes = {fields[0]: int(fields[1]) * 1024 for fields in lines if len(fields) > 1}
        if "MemTotal:" in sizes and "MemAvailable:" in sizes:
            yield Reading("nv_cpu_memory_total_bytes", sizes["MemTotal:"])
            yield Reading("nv_cpu_memory_used_bytes", sizes["MemTotal:"] - sizes["MemAvailable:"])

    def _ticks(self) -> _CpuTicks | None:
        lines = _read(self._root / "stat")
        if not lines:
            return None
        fields = [int(field) for field in lines[0].split()[1:]][:_GUESTS]
        return _CpuTicks(sum(fields) - sum(fields[_IDLE]), sum(fields))


_PINNED_MEMORY = (Reading("nv_pinned_memory_pool_total_bytes", 0), Reading("nv_pinned_memory_pool_used_bytes", 0))
"""Tensors are not staged in pinned memory: there is no pool."""


def _read(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
