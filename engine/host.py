"""What this machine and its cgroup give a process: cores and memory. Knows nothing of models."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 where v2 writes "max"."""


def usable_cores() -> int:
    """Cores this process may use: its affinity, and no more than the cgroup's quota, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cpu_quota(_CGROUP))))


def available_memory() -> int:
    """Bytes this process may still take: what the kernel calls available, and what the cgroup leaves."""
    return max(0, int(min(_mem_available(), _cgroup_left(_CGROUP), _UNLIMITED)))


def _cpu_quota(root: Path) -> float:
    fields = _read(root / "cpu.max").split()
    if len(fields) == 2:
        return math.inf if fields[0] == "max" else int(fields[0]) / int(fields[1])
    quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota and period and int(quota) > 0 else math.inf


def _cgroup_left(root: Path) -> float:
    """Limit less use; file pages that the kernel can drop at once do not count as used."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        text = _read(root / limit)
        if text.isdigit() and int(text) < _UNLIMITED:
            stat = _stat(root / limit.replace("memory.max", "memory.stat").replace("limit_in_bytes", "stat"))
            return int(text) - int(_read(root / used) or 0) + stat.get(dropped, 0)
    return math.inf


def _mem_available() -> float:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return math.inf


def _stat(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _read(path).splitlines())}


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
