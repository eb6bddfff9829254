"""What the machine and its cgroups leave, read from files like the kernel's."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from charonia.processes import host
from charonia.processes.host import Cores


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight cores, 10,000 KiB of memory, and no cgroup."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    write(tmp_path, {"proc/meminfo": "MemTotal: 20000 kB\nMemAvailable:    10000 kB\n"})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_nothing_limits_but_the_machine(root: Path) -> None:
    assert host.usable_cores(root) == Cores(8, 8, 1, math.inf)
    assert host.usable_cores(root).threads == 8
    assert host.available_memory(root) == 10_000 * 1024


def test_this_machine_has_cores_and_memory() -> None:
    found = host.usable_cores()
    assert 1 <= found.threads <= found.physical <= found.logical
    assert host.available_memory() > 1 << 20
    assert 1 << 20 < host.own_anonymous_memory() < 1 << 40


def test_what_a_process_has_that_is_no_files(root: Path) -> None:
    assert host.own_anonymous_memory(root) == 0
    write(root, {"proc/self/status": "VmRSS:\t  900 kB\nRssAnon:\t     300 kB\nRssFile:\t  600 kB"})
    assert host.own_anonymous_memory(root) == 300 * 1024


# Cores


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1)])
def test_threads_by_quota(root: Path, quota: str, threads: int) -> None:
    write(root, {"sys/fs/cgroup/cpu.max": quota})
    assert host.usable_cores(root).threads == threads


def test_the_tightest_quota_of_a_cgroup_and_those_above_it_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/kubepods/pod7/box",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/kubepods/pod7/cpu.max": "200000 100000",
            "sys/fs/cgroup/kubepods/pod7/box/cpu.max": "400000 100000",
            "sys/fs/cgroup/kubepods/pod8/cpu.max": "1000 100000",
        },
    )
    assert host.usable_cores(root).quota == 2


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_an_old_cgroups_quota(root: Path, mount: str) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "5:memory:/other\n4:cpu,cpuacct:/box",
            f"sys/fs/cgroup/{mount}/box/cpu.cfs_quota_us": "150000",
            f"sys/fs/cgroup/{mount}/box/cpu.cfs_period_us": "100000",
        },
    )
    assert host.usable_cores(root).quota == 1.5


def test_an_old_cgroup_without_a_quota(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "4:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert host.usable_cores(root).quota == math.inf


def test_a_container_that_sees_its_own_cgroup_as_the_root(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/docker/0123", "sys/fs/cgroup/cpu.max": "300000 100000"})
    assert host.usable_cores(root).quota == 3


def test_hyperthreads_are_one_core(root: Path) -> None:
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
    }
    write(root, siblings)
    assert host.usable_cores(root) == Cores(8, 4, 1, math.inf)
    assert str(host.usable_cores(root)) == "4 cores, 8 hyperthreads"


def test_what_affinity_leaves(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 4, 5}, raising=False)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
    }
    nodes = {"sys/devices/system/node/node0/cpulist": "0-1,4-5", "sys/devices/system/node/node1/cpulist": "2-3,6-7"}
    write(root, siblings | nodes)
    assert host.usable_cores(root) == Cores(3, 2, 1, math.inf), "cores 0 and 1, of the first node"


def test_numa_nodes(root: Path) -> None:
    nodes = {
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node1/cpulist": "4-7",
        "sys/devices/system/node/node2/cpulist": "",  # memory alone
    }
    write(root, nodes)
    assert host.usable_cores(root).nodes == 2
    assert str(host.usable_cores(root)) == "8 cores, 2 NUMA nodes"


def test_what_is_said_of_a_quota(root: Path) -> None:
    write(root, {"sys/fs/cgroup/cpu.max": "250000 100000"})
    assert str(host.usable_cores(root)) == "8 cores, a quota of 2.5"


# Memory


def memory(root: Path, group: str, limit: str) -> None:
    below = f"sys/fs/cgroup/{group}".rstrip("/")
    stat = "anon 1\ninactive_file 500"
    write(root, {f"{below}/memory.max": limit, f"{below}/memory.current": "3000", f"{below}/memory.stat": stat})


def test_memory_by_limit(root: Path) -> None:
    memory(root, "", "5000")
    assert host.available_memory(root) == 2500


def test_memory_by_the_limit_of_a_cgroup_above(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/slice/box"})
    memory(root, "slice", "4000")
    memory(root, "slice/box", "5000")
    assert host.available_memory(root) == 1500


def test_an_unlimited_cgroup(root: Path) -> None:
    memory(root, "", "max")
    assert host.available_memory(root) == 10_000 * 1024


def test_memory_by_an_old_cgroups_limit(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/box\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "5000",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "3000",
            "sys/fs/cgroup/memory/box/memory.stat": "total_inactive_file 100",
        },
    )
    assert host.available_memory(root) == 2100


def test_a_cgroup_over_its_limit_leaves_nothing(root: Path) -> None:
    memory(root, "", "5000")
    write(root, {"sys/fs/cgroup/memory.current": "9000"})
    assert host.available_memory(root) == 0


KEPT = """
import resource
from charonia.processes.host import keep_large_blocks, release_free_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        bytes(bytearray(64 << 20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_large_blocks()
first, again = faults(), faults()
release_free_memory()
print(first, again, faults())
"""


@pytest.mark.skipif(not hasattr(host._libc, "mallopt"), reason="another C library")
def test_large_blocks_are_kept_until_they_are_given_back() -> None:
    made = subprocess.run([sys.executable, "-c", KEPT], check=True, timeout=60, capture_output=True, text=True)
    first, again, released = map(int, made.stdout.split())
    assert again < first / 10
    assert released > first / 2


@pytest.mark.parametrize("told", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_of_openmp_spin_as_long_as_the_user_says(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(variable, "7")
        if variable != told:
            monkeypatch.delenv(variable)
    host.limit_openmp_spins(25)
    assert os.environ.get("GOMP_SPINCOUNT") == {None: "25", "OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": "7"}[told]
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
