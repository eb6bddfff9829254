"""What this machine and its cgroup give a process, and take back: cores, where they lie, memory. Knows no models.

Read from the kernel's files below `root`; what a system does not tell limits nothing.
"""

import ctypes
import logging
import math
import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_libc = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""

_LARGE = 4 << 20
"""Bytes, to fill which takes far longer than to map them."""

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 where v2 writes "max"."""


class Cores(NamedTuple):
    """`logical`: cores that the process may run on. `physical`: hyperthreads of one core counted once. `nodes`: NUMA
    nodes they lie on. `quota`: cores' worth of time that its cgroup grants, maybe infinite."""

    logical: int
    physical: int
    nodes: int
    quota: float

    @property
    def threads(self) -> int:
        """The number of threads to compute with. Hyperthreads share what computes, and a step waits for its slowest
        thread."""
        return max(1, math.ceil(min(self.physical, self.quota)))

    def __str__(self) -> str:
        parts = [_plural(self.physical, "core")]
        if self.logical != self.physical:
            parts.append(f"{self.logical} hyperthreads")
        if self.nodes > 1:
            parts.append(f"{self.nodes} NUMA nodes")
        if self.quota < self.physical:
            parts.append(f"a quota of {self.quota:g}")
        return ", ".join(parts)


def usable_cores(root: Path = _ROOT) -> Cores:
    """The cores on which this process may compute."""
    usable = _affinity()
    physical = {_siblings(root, cpu) for cpu in usable}
    nodes = [node for node in _nodes(root) if node & usable]
    return Cores(len(usable), len(physical), max(len(nodes), 1), min(_quotas(root), default=math.inf))


def resident_memory_of(pids: Iterable[int], root: Path = _ROOT) -> int:
    """Bytes of anonymous and shared memory of these processes and all that they started; 0 for one that has ended."""
    total = 0
    for process in [root / "proc" / str(pid) for pid in pids]:
        with suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
            # The kernel lists children by the thread that started them.
            children = [int(pid) for each in process.glob("task/*/children") for pid in each.read_text().split()]
            total += resident_memory_of(children, root)
    return total


def available_memory(root: Path = _ROOT) -> int:
    """Bytes this process may still take: what the kernel calls available, and what its cgroups leave."""
    return max(0, int(min(_mem_available(root), _UNLIMITED, *_memory_left(root))))


def own_anonymous_memory(root: Path = _ROOT) -> int:
    """Bytes of this process's own: what it has in memory that is no file's."""
    for line in _read(root / "proc/self/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def map_large_blocks_separately() -> None:
    """Let weights come and go as mappings of their own. glibc begins so, and at the first large block that is freed
    starts to put the next ones among the small, which then hold their pages."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def release_free_memory() -> None:
    """Return to the system what this process has freed: glibc keeps it, in an arena for each thread that ever was."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


# Cores


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The hyperthreads of this one's core."""
    text = _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return _cpu_list(text) or frozenset([cpu])


def _nodes(root: Path) -> list[frozenset[int]]:
    return [_cpu_list(_read(path)) for path in sorted(root.glob("sys/devices/system/node/node[0-9]*/cpulist"))]


def _cpu_list(text: str) -> frozenset[int]:
    """The kernel's way to write sets: 0-3,8,10-11."""
    ends = (part.partition("-") for part in text.split(",") if part)
    return frozenset(cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1))


def _quotas(root: Path) -> Iterator[float]:
    """The quotas of the process's cgroups and of all above them, in cores."""
    for group in _cgroups(root, "cpu"):
        fields = _read(group / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            yield int(fields[0]) / int(fields[1])
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            yield int(quota) / int(period)


# Memory


def _memory_left(root: Path) -> Iterator[float]:
    """Limit less use, of the process's cgroups and all above them; file pages that the kernel can drop at once do not
    count as used."""
    for group in _cgroups(root, "memory"):
        yield _limit_minus_use(group / "memory.max", group / "memory.current", "inactive_file")
        yield _limit_minus_use(group / "memory.limit_in_bytes", group / "memory.usage_in_bytes", "total_inactive_file")


def _limit_minus_use(limit: Path, used: Path, dropped: str) -> float:
    text = _read(limit)
    if not text.isdigit() or int(text) >= _UNLIMITED:
        return math.inf
    return int(text) - int(_read(used) or 0) + _stat(limit.with_name("memory.stat")).get(dropped, 0)


def _mem_available(root: Path) -> float:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


# Files


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of the process's cgroup with this controller, of either version, and of all above it. In a container
    the innermost may be what is mounted, whatever the path says."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, names, path = line.split(":", 2)
        if not names:
            yield from _with_ancestors(mounts, path)
            yield from _with_ancestors(mounts / "unified", path)
        elif controller in names.split(","):
            for mount in {names, controller}:
                yield from _with_ancestors(mounts / mount, path)


def _with_ancestors(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part]
    return (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _stat(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _read(path).splitlines())}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


log = logging.getLogger(__name__)

_WANTED = 65536
_WARN_BELOW = 1024


def raise_open_file_limit(enough: int = _WANTED) -> int:
    """Raise the process's own limit to `enough`, or as near as it may; returns what it is then.

    Logs a warning where that is little: beyond it, connections are cut without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    limit = enough if soft == resource.RLIM_INFINITY else soft
    if limit < _WARN_BELOW:
        log.warning("%d files may be open at once, connections included; ulimit -n raises that", limit)
    return limit


_CUDA = re.compile(r"^cuda\b[^=\n]*= *'", re.MULTILINE)


def torch_has_cuda() -> bool:
    """Whether `torch.version.cuda` is set, without importing torch; False where there is no torch."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and _CUDA.search(version.read_text(encoding="utf-8")) is not None
