"""What the machine and its cgroup leave, read from files like the kernel's."""

from pathlib import Path

import pytest

from charonia.engine import host


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_mem_available", lambda: 10_000.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_nothing_limits_but_the_machine(cgroup: Path) -> None:
    assert host.usable_cores() == 8
    assert host.available_memory() == 10_000


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1)])
def test_cores_by_quota(cgroup: Path, quota: str, cores: int) -> None:
    write(cgroup, cpu_dot_max=quota)
    assert host.usable_cores() == cores


def test_cores_by_an_old_cgroups_quota(cgroup: Path) -> None:
    write(cgroup, **{"cpu__cpu.cfs_quota_us": "200000", "cpu__cpu.cfs_period_us": "100000"})
    assert host.usable_cores() == 2


def test_memory_by_limit(cgroup: Path) -> None:
    write(cgroup, memory_dot_max="5000\n", memory_dot_current="3000\n", memory_dot_stat="anon 1\ninactive_file 500\n")
    assert host.available_memory() == 2500


def test_an_unlimited_cgroup(cgroup: Path) -> None:
    write(cgroup, memory_dot_max="max\n", memory_dot_current="3000\n")
    assert host.available_memory() == 10_000


def test_memory_by_an_old_cgroups_limit(cgroup: Path) -> None:
    write(
        cgroup,
        **{
            "memory__memory.limit_in_bytes": "5000",
            "memory__memory.usage_in_bytes": "3000",
            "memory__memory.stat": "total_inactive_file 100",
        },
    )
    assert host.available_memory() == 2100


def test_a_cgroup_over_its_limit_leaves_nothing(cgroup: Path) -> None:
    write(cgroup, memory_dot_max="5000", memory_dot_current="9000")
    assert host.available_memory() == 0
