"""What GPUs say by the driver's calls: from a library that stands in for it, built here."""

import shutil
import subprocess
from pathlib import Path

import pytest

from charonia.telemetry.gpus import Gpus, usable_gpus

DRIVER = r"""
#include <string.h>
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int cards[2], part;
static unsigned long long energy = 5000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = &cards[index]; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) { *card = &part; return strcmp(uuid, "MIG-part") != 0; }
int nvmlDeviceGetUUID(void *card, char *uuid, unsigned size) {
    if (size < 12) return 7;
    strcpy(uuid, card == &cards[0] ? "GPU-first" : "GPU-second");
    return 0;
}
int nvmlDeviceGetName(void *card, char *name, unsigned size) {
    if (size < 12) return 7;
    strcpy(name, card == &cards[0] ? "Charon 1" : SECOND);
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *card, utilization *rates) {
    if (card != &cards[0]) return 3;
    rates->gpu = 37; rates->memory = 1;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *card, memory *info) {
    info->total = 80ull << 30; info->used = 20ull << 30;
    info->free = (card == &cards[0] ? 60ull : card == &cards[1] ? 10ull : 5ull) << 30;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *card, unsigned *milliwatts) { *milliwatts = 120500; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *card, unsigned long long *millijoules) {
    if (card != &cards[0]) return 3;
    *millijoules = energy; energy += 2500;
    return 0;
}
"""


def build(tmp_path: Path, second: str = "Charon 1") -> str:
    """The second GPU's kind is `second`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    made = tmp_path / "libnvidia-ml.so.1"
    define = f'-DSECOND="{second}"'
    subprocess.run([compiler, "-shared", "-fPIC", define, "-o", str(made), str(tmp_path / "driver.c")], check=True)
    return str(made)


@pytest.fixture
def library(tmp_path: Path) -> str:
    return build(tmp_path)


def readings(gpus: Gpus) -> dict[str, dict[str, object]]:
    return {each.labels["gpu_uuid"]: {read.family: read.value for read in each.readings} for each in gpus.measure()}


def test_each_gpu_says_what_it_can(library: str) -> None:
    memory = {"nv_gpu_memory_total_bytes": 80 << 30, "nv_gpu_memory_used_bytes": 20 << 30}
    # This driver knows no limit of power, and the second GPU neither its load nor its energy.
    assert readings(Gpus(library)) == {
        "GPU-first": {
            "nv_gpu_utilization": 0.37,
            **memory,
            "nv_gpu_power_usage": 120.5,
            "nv_energy_consumption": 2.5,
        },
        "GPU-second": {**memory, "nv_gpu_power_usage": 120.5},
    }


def test_energy_counts_from_the_start(library: str) -> None:
    gpus = Gpus(library)
    assert [readings(gpus)["GPU-first"]["nv_energy_consumption"] for _ in range(3)] == [2.5, 5.0, 7.5]


def test_without_a_driver_there_are_none(tmp_path: Path) -> None:
    assert readings(Gpus(str(tmp_path / "libnvidia-ml.so.1"))) == {}


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        (None, [60, 10, 1 << 30]),
        ("1", [10, 1 << 30]),
        ("1, 0", [10, 60]),
        ("GPU-sec,GPU-first", [10, 60]),
        ("0,-1,1", [60, 1 << 30]),
        ("MIG-part", [5]),
        ("MIG-other,7", [1 << 30, 1 << 30]),
        ("", [1 << 30]),
    ],
)
def test_what_is_free_on_each_as_cuda_numbers_them(library: str, visible: str | None, free: list[int]) -> None:
    """What nobody knows is without limit."""
    gpus = Gpus(library, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpus.free(number) >> 30 for number in range(len(free))] == free


def test_cuda_may_count_unequal_gpus_otherwise(tmp_path: Path) -> None:
    unequal = build(tmp_path, "Charon 2")

    def free(**environment: str) -> int:
        return Gpus(unequal, environment).free(0) >> 30

    assert (free(), free(CUDA_VISIBLE_DEVICES="1")) == (1 << 30, 1 << 30)
    assert (free(CUDA_DEVICE_ORDER="PCI_BUS_ID"), free(CUDA_VISIBLE_DEVICES="GPU-second")) == (60, 10)


def test_without_a_driver_nothing_limits(tmp_path: Path) -> None:
    assert Gpus(str(tmp_path / "libnvidia-ml.so.1")).free(0) == 1 << 60


@pytest.mark.parametrize(("visible", "usable"), [(None, 3), ("2,0", 2), ("1,-1,0", 1), ("", 0), ("0,1,2,3,4", 3)])
def test_which_may_be_used(tmp_path: Path, visible: str | None, usable: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert usable_gpus(environment, tmp_path) == tuple(range(usable))
