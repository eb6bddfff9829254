"""GPUs by NVML, from a module that stands in for its bindings."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from charonia.telemetry.host_metrics import Gpus, usable_gpus


class NVMLError(Exception):
    pass


class Driver(ModuleType):
    """Stands in for pynvml: two GPUs; the driver knows no limit of power, and the second one no load and no energy."""

    NVMLError = NVMLError

    def __init__(self, second: str = "Charon 1") -> None:
        super().__init__("pynvml")
        self._names = {"GPU-first": "Charon 1", "GPU-second": second}
        self._energy = 5000

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return list(self._names)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "MIG-part":
            raise NVMLError
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self._names[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle != "GPU-first":
            raise NVMLError
        return SimpleNamespace(gpu=37, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        free = {"GPU-first": 60, "GPU-second": 10, "MIG-part": 5}[handle]
        return SimpleNamespace(total=80 << 30, used=20 << 30, free=free << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (8, 0) if handle == "GPU-first" else (8, 9)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 120500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        raise NVMLError

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if handle != "GPU-first":
            raise NVMLError
        self._energy += 2500
        return self._energy - 2500


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    return driver


def readings(gpus: Gpus) -> dict[str, dict[str, object]]:
    return {each.labels["gpu_uuid"]: {read.family: read.value for read in each.readings} for each in gpus.measure()}


def test_each_gpu_says_what_it_can() -> None:
    memory = {"nv_gpu_memory_total_bytes": 80 << 30, "nv_gpu_memory_used_bytes": 20 << 30}
    # This driver knows no limit of power, and the second GPU neither its load nor its energy.
    assert readings(Gpus()) == {
        "GPU-first": {
            "nv_gpu_utilization": 0.37,
            **memory,
            "nv_gpu_power_usage": 120.5,
            "nv_energy_consumption": 2.5,
        },
        "GPU-second": {**memory, "nv_gpu_power_usage": 120.5},
    }


def test_energy_counts_from_the_start() -> None:
    gpus = Gpus()
    assert [readings(gpus)["GPU-first"]["nv_energy_consumption"] for _ in range(3)] == [2.5, 5.0, 7.5]


def test_without_a_driver_there_are_none_and_nothing_limits(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(driver, "nvmlInit", missing)
    assert (readings(Gpus()), Gpus().free(0)) == ({}, 1 << 60)


def test_without_the_bindings_there_are_none_and_nothing_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert (readings(Gpus()), Gpus().free(0)) == ({}, 1 << 60)


@pytest.mark.skipif(find_spec("pynvml") is None, reason="no nvidia-ml-py")
def test_the_bindings_have_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pynvml = import_module("pynvml")
    for name in (name for name in vars(Driver) if name.startswith(("nvml", "NVML"))):
        assert callable(getattr(pynvml, name))


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
def test_what_is_free_on_each_as_cuda_numbers_them(visible: str | None, free: list[int]) -> None:
    """What nobody knows is without limit."""
    gpus = Gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpus.free(number) >> 30 for number in range(len(free))] == free


def test_what_each_can_as_cuda_numbers_them(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus({"CUDA_VISIBLE_DEVICES": "1,0"})
    assert [gpus.capability(number) for number in range(3)] == [89, 80, 0]
    monkeypatch.setattr(driver, "nvmlDeviceGetCount", lambda: 0)
    assert Gpus({}).capability(0) == 0


def test_cuda_may_count_unequal_gpus_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver("Charon 2"))

    def free(**environment: str) -> int:
        return Gpus(environment).free(0) >> 30

    assert (free(), free(CUDA_VISIBLE_DEVICES="1")) == (1 << 30, 1 << 30)
    assert (free(CUDA_DEVICE_ORDER="PCI_BUS_ID"), free(CUDA_VISIBLE_DEVICES="GPU-second")) == (60, 10)


@pytest.mark.parametrize(("visible", "usable"), [(None, 3), ("2,0", 2), ("1,-1,0", 1), ("", 0), ("0,1,2,3,4", 3)])
def test_which_may_be_used(tmp_path: Path, visible: str | None, usable: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert usable_gpus(environment, tmp_path) == tuple(range(usable))
