"""The host's gauges, from files as the kernel writes them."""

from pathlib import Path

import pytest

from charonia.telemetry.host_metrics import HostMetrics


def readings(machine: HostMetrics) -> dict[str, object]:
    return {reading.family: reading.value for measurement in machine.measure() for reading in measurement.readings}


def write(root: Path, stat: str) -> None:
    (root / "stat").write_text(f"cpu  {stat}\ncpu0 1 2 3\n")


def test_what_the_kernel_tells(tmp_path: Path) -> None:
    write(tmp_path, "100 0 50 800 50 0 0 0 7 0")
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 300 kB\nHugePages_Total: 0\n")
    machine = HostMetrics(tmp_path)
    assert "nv_cpu_utilization" not in readings(machine)
    write(tmp_path, "130 0 60 850 60 0 0 0 9 0")
    assert readings(machine) == {
        "nv_cpu_utilization": pytest.approx(0.4),
        "nv_cpu_memory_total_bytes": 1000 * 1024,
        "nv_cpu_memory_used_bytes": 700 * 1024,
        "nv_pinned_memory_pool_total_bytes": 0,
        "nv_pinned_memory_pool_used_bytes": 0,
    }


def test_what_a_system_does_not_tell_has_no_series(tmp_path: Path) -> None:
    assert set(readings(HostMetrics(tmp_path))) == {
        "nv_pinned_memory_pool_total_bytes",
        "nv_pinned_memory_pool_used_bytes",
    }


def test_this_machine() -> None:
    values = readings(HostMetrics())
    assert 0 < float(values["nv_cpu_memory_used_bytes"]) < float(values["nv_cpu_memory_total_bytes"])  # type: ignore[arg-type]
