"""The machine at a scrape, in Triton's gauges: processors, memory, and NVIDIA GPUs by NVML.

nvidia-ml-py calls NVML, and is imported only for GPUs. A value that the system or driver does not report has no series.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..core.metrics import Measurement, Reading

_IDLE = slice(3, 5)
"""The fields of /proc/stat's first line that count idle time, with and without waiting for a disk."""

_GUESTS = 8
"""The first field of guests' time, which earlier fields include."""

_PINNED_MEMORY = (Reading("nv_pinned_memory_pool_total_bytes", 0), Reading("nv_pinned_memory_pool_used_bytes", 0))
"""There is no pool: tensors are not staged in pinned memory."""

_UNLIMITED = 1 << 60


class _CpuTicks(NamedTuple):
    busy: int
    whole: int


class HostMetrics:
    """The host's gauges; utilisation is since the last scrape. `root` is the directory of the kernel's files."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._seen = self._ticks()

    def measure(self) -> Iterator[Measurement]:
        yield Measurement({}, (*self._cpu(), *self._memory(), *_PINNED_MEMORY))

    def _cpu(self) -> Iterator[Reading]:
        ticks, before = self._ticks(), self._seen
        if ticks is None or before is None or ticks.whole == before.whole:
            return
        self._seen = ticks
        yield Reading("nv_cpu_utilization", (ticks.busy - before.busy) / (ticks.whole - before.whole))

    def _memory(self) -> Iterator[Reading]:
        lines = (line.split() for line in self._lines("meminfo"))
        sizes = {fields[0]: int(fields[1]) * 1024 for fields in lines if len(fields) > 1}
        if "MemTotal:" in sizes and "MemAvailable:" in sizes:
            yield Reading("nv_cpu_memory_total_bytes", sizes["MemTotal:"])
            yield Reading("nv_cpu_memory_used_bytes", sizes["MemTotal:"] - sizes["MemAvailable:"])

    def _ticks(self) -> _CpuTicks | None:
        lines = self._lines("stat")
        if not lines:
            return None
        fields = [int(field) for field in lines[0].split()[1:]][:_GUESTS]
        return _CpuTicks(sum(fields) - sum(fields[_IDLE]), sum(fields))

    def _lines(self, file: str) -> list[str]:
        try:
            return (self._root / file).read_text().splitlines()
        except OSError:
            return []


def usable_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[int, ...]:
    """The numbers that CUDA gives this machine's GPUs in this process."""
    installed = len(list(devices.glob("nvidia[0-9]*")))
    visible = _visible_devices(environment)
    return tuple(range(installed if visible is None else min(installed, len(visible))))


def _visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA may use, by the driver's numbers or names; None for all. An invalid one hides all behind
    it."""
    value = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if value is None else (name.strip() for name in value.split(","))
    return None if names is None else list(takewhile(lambda name: name not in ("", "-1"), names))


class _Gpu(NamedTuple):
    """A GPU. Several may have one `product` name. `began`: its energy in millijoules at the start, if counted."""

    handle: Any
    uuid: str
    product: str
    began: int | None


class Gpus:
    """The GPUs of this machine; none without a driver."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._visible = _visible_devices(environment)
        self._in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        self._gpus: list[_Gpu] = []
        with suppress(ImportError):
            self._nvml: Any = import_module("pynvml")
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlInit()
                self._gpus = [self._open(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        # Of several products CUDA counts the fastest first, and the driver in the order of their slots.
        self._in_order = self._in_order or len({gpu.product for gpu in self._gpus}) == 1

    def _open(self, index: int) -> _Gpu:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        product = self._nvml.nvmlDeviceGetName(handle)
        return _Gpu(handle, uuid, product, self._energy(handle))

    def free(self, number: int) -> int:
        """The free bytes of the GPU with CUDA's number; 2**60 if unknown."""
        if not self._gpus:
            return _UNLIMITED
        with suppress(self._nvml.NVMLError, LookupError):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle(number)).free)
        return _UNLIMITED

    def capability(self, number: int) -> int:
        """Ten times the compute capability of the GPU with CUDA's number; 0 if unknown."""
        if not self._gpus:
            return 0
        with suppress(self._nvml.NVMLError, LookupError):
            major, minor = self._nvml.nvmlDeviceGetCudaComputeCapability(self._handle(number))
            return 10 * int(major) + int(minor)
        return 0

    def _handle(self, number: int) -> Any:
        """NVML's handle of the GPU with CUDA's number, or of a part of one, which has its own name.

        Raises:
            LookupError: there is none, or it is unknown which.
        """
        name = str(number) if self._visible is None else self._visible[number]
        if name.isdecimal() and not self._in_order:
            raise LookupError("CUDA has an order of its own")
        if name.isdecimal():
            return self._gpus[int(name)].handle
        handles = [gpu.handle for gpu in self._gpus if gpu.uuid.startswith(name)]
        return handles[0] if handles else self._nvml.nvmlDeviceGetHandleByUUID(name)

    def measure(self) -> Iterator[Measurement]:
        """Triton's gauges of each GPU."""
        for gpu in self._gpus:
            yield Measurement({"gpu_uuid": gpu.uuid}, tuple(self._readings(gpu)))

    def _readings(self, gpu: _Gpu) -> Iterator[Reading]:
        nvml, handle = self._nvml, gpu.handle
        with suppress(nvml.NVMLError):
            yield Reading("nv_gpu_utilization", nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield Reading("nv_gpu_memory_total_bytes", memory.total)
            yield Reading("nv_gpu_memory_used_bytes", memory.used)
        with suppress(nvml.NVMLError):
            yield Reading("nv_gpu_power_usage", nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        with suppress(nvml.NVMLError):
            yield Reading("nv_gpu_power_limit", nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)
        energy = self._energy(handle)
        if energy is not None and gpu.began is not None:
            yield Reading("nv_energy_consumption", (energy - gpu.began) / 1000)

    def _energy(self, handle: Any) -> int | None:
        """Millijoules since the driver was loaded."""
        with suppress(self._nvml.NVMLError):
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return None
