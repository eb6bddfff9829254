"""Facts about this machine and this process's cgroup: cores, memory, open files, CUDA. They are read from the kernel's
files below `root`; an absent file limits nothing."""

import ctypes
import logging
import math
import os
import platform
import re
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""From glibc's malloc.h."""

NICENESS, PATIENT_NICENESS, LAST_NICENESS = 5, 15, 20
"""Of processes beside an engine that takes all cores: the first has a quarter of one, the second a thirtieth. The third
is no niceness: it has what nobody else wants, and what steps leave it, see `patient_work.py`."""
_THREAD_NICENESS = 10
"""The niceness of threads that give way."""

_LARGE = 4 << 20
"""Bytes that take far longer to fill than to map."""

_KEPT = 1 << 30
"""Free bytes at the end of a heap that is not to shrink by itself."""

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 where v2 writes "max"."""

_WANTED_FILES = 65536
_WARN_BELOW_FILES = 1024
_CUDA = re.compile(r"^cuda\b[^=\n]*= *'", re.MULTILINE)


class Cores(NamedTuple):
    logical: int
    """Including hyperthreads."""
    physical: int
    nodes: int
    """The number of NUMA nodes that they lie on."""
    quota: float
    """The cores' worth of time that its cgroup grants, maybe infinite."""

    @property
    def threads(self) -> int:
        """The number of threads to compute with, one for each physical core: a step waits for its slowest thread."""
        return max(1, math.ceil(min(self.physical, self.quota)))

    def __str__(self) -> str:
        parts = [f"{self.physical} core" if self.physical == 1 else f"{self.physical} cores"]
        if self.logical != self.physical:
            parts.append(f"{self.logical} hyperthreads")
        if self.nodes > 1:
            parts.append(f"{self.nodes} NUMA nodes")
        if self.quota < self.physical:
            parts.append(f"a quota of {self.quota:g}")
        return ", ".join(parts)


def usable_cores(root: Path = _ROOT) -> Cores:
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    physical = {_read(root / topology.format(cpu)) or str(cpu) for cpu in cpus}
    nodes = [_cpu_list(_read(path)) for path in root.glob("sys/devices/system/node/node[0-9]*/cpulist")]
    count = max(1, sum(not node.isdisjoint(cpus) for node in nodes))
    return Cores(len(cpus), len(physical), count, min(_quotas(root), default=math.inf))


def processor_name(root: Path = _ROOT) -> str:
    """The kernel's name for the processor, or its architecture."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def resident_memory_of(pids: Iterable[int], root: Path = _ROOT) -> int:
    """Bytes of anonymous and shared memory of these processes and all their descendants; 0 for one that has ended."""
    total = 0
    for process in [root / "proc" / str(pid) for pid in pids]:
        with suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
            # The kernel lists children by the thread that started them.
            children = [int(pid) for file in process.glob("task/*/children") for pid in file.read_text().split()]
            total += resident_memory_of(children, root)
    return total


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process may still take, by the kernel and by its cgroups."""
    return max(0, min([_bytes_in(root / "proc/meminfo", "MemAvailable:", _UNLIMITED), *_memory_left(root)]))


def own_anonymous_memory(root: Path = _ROOT) -> int:
    """Bytes of this process's memory that belong to no file."""
    return _bytes_in(root / "proc/self/status", "RssAnon:", 0)


def map_large_blocks_separately() -> None:
    """Give each large block a mapping of its own, which returns to the system when freed. By default glibc soon puts
    large blocks among small ones, and keeps up to 64 MiB for each thread."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        _libc.mallopt(_M_TRIM_THRESHOLD, _LARGE)


def keep_large_blocks() -> None:
    """Keep freed blocks of all sizes until `release_free_memory`: for a process that takes the same ones many times a
    second, for which the kernel would fill megabytes with zeros each time."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_MAX, 0)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def release_free_memory() -> None:
    """Return freed memory to the system, which glibc keeps in an arena for each thread."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def raise_open_file_limit(enough: int = _WANTED_FILES) -> int:
    """Raise the limit of open files to `enough`, or as near as allowed; return the new limit. Warns of a low one:
    beyond it connections are cut silently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    limit = enough if soft == resource.RLIM_INFINITY else soft
    if limit < _WARN_BELOW_FILES:
        log.warning("%d files may be open at once, connections included; ulimit -n raises that", limit)
    return limit


def torch_has_cuda() -> bool:
    """Whether torch is a CUDA build, without importing it; False without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and _CUDA.search(version.read_text(encoding="utf-8")) is not None


def _cpu_list(text: str) -> set[int]:
    """Parse the kernel's lists of cores, such as 0-3,8,10-11."""
    ends = (part.partition("-") for part in text.split(",") if part)
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def _quotas(root: Path) -> Iterator[float]:
    """The quotas, in cores, of the process's cgroups and of all above them."""
    for group in _cgroups(root, "cpu"):
        fields = _read(group / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            yield int(fields[0]) / int(fields[1])
        quota = _read(group / "cpu.cfs_quota_us")
        period = _read(group / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            yield int(quota) / int(period)


def _memory_left(root: Path) -> Iterator[int]:
    """What is left of the memory limits of the process's cgroups and all above them. File pages that the kernel can
    drop do not count as used."""
    for group in _cgroups(root, "memory"):
        for limit, used, dropped in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            text = _read(group / limit)
            if text.isdigit() and int(text) < _UNLIMITED:
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                yield int(text) - int(_read(group / used) or 0) + int(stat.get(dropped, 0))


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of the process's cgroup with this controller, of v1 and v2, and of all above it. In a container
    only the innermost may be mounted."""
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        parts = [part for part in path.split("/") if part]
        for mount in (names, controller) if names else ("", "unified"):
            for depth in range(len(parts), -1, -1):
                yield root.joinpath("sys/fs/cgroup", mount, *parts[:depth])


def _bytes_in(file: Path, field: str, default: int) -> int:
    """A number of KiB in a file of /proc, as bytes."""
    for line in _read(file).splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return default


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def computing_seconds(pid: int) -> float | None:
    """Seconds for which a process has had a processor, by POSIX' clock of it; None where it has ended, or there is no
    such clock."""
    if not hasattr(_libc, "clock_getcpuclockid"):
        return None
    clock = ctypes.c_int()
    if _libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
        return None
    with suppress(OSError):
        return time.clock_gettime(clock.value)
    return None


def limit_openmp_spins(spins: int) -> None:
    """Let waiting threads of OpenMP sleep after so many turns; by default they spin for milliseconds, on cores that
    others want. Called before libraries that have it are imported; without an effect where the user has said how they
    wait."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(spins)


def lower_process_priority(niceness: int, pid: int = 0) -> None:
    """Let this process, or one that this one has just started, give way, with the threads that it will start.
    LAST_NICENESS is Linux' class of idle processes, which all others take a processor from at once; elsewhere it is the
    highest niceness."""
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + niceness)
    if niceness == LAST_NICENESS and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def lower_thread_priority(niceness: int = _THREAD_NICENESS) -> None:
    """Let the calling thread give way to the threads that compute steps (on Linux)."""
    if hasattr(os, "setpriority"):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
