"""The NVIDIA GPUs at a scrape: Triton's gauges, by the driver's own library.

Loaded by its name where a driver is installed; no package is needed. Functions and structures are those of NVIDIA's
NVML API reference. What a GPU, or its driver, does not tell has no series.
"""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from .metrics import Measurement, Reading

_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Refused(Exception):
    """NVML answered with an error: the number is its code."""


class _Gpu(NamedTuple):
    """`began`: millijoules at the start, None where they are not counted."""

    handle: ctypes.c_void_p
    uuid: str
    began: int | None


class Gpus:
    """Those of this machine; none without a driver."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._nvml: Any = None
        self._gpus: list[_Gpu] = []
        with suppress(OSError, _Refused, AttributeError):
            self._nvml = ctypes.CDLL(library)
            self._call("nvmlInit_v2")
            count = self._read("nvmlDeviceGetCount_v2", ctypes.c_uint())
            self._gpus = [self._open(index) for index in range(count.value)]

    def measure(self) -> Iterator[Measurement]:
        for gpu in self._gpus:
            yield Measurement({"gpu_uuid": gpu.uuid}, tuple(self._readings(gpu)))

    def _open(self, index: int) -> _Gpu:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        return _Gpu(handle, uuid.value.decode(), self._energy(handle))

    def _readings(self, gpu: _Gpu) -> Iterator[Reading]:
        for readings in (self._utilization, self._memory, self._power, self._limit, self._consumption):
            with suppress(_Refused, AttributeError):
                yield from readings(gpu)

    def _utilization(self, gpu: _Gpu) -> Iterator[Reading]:
        rates = self._read("nvmlDeviceGetUtilizationRates", _Utilization(), gpu.handle)
        yield Reading("nv_gpu_utilization", rates.gpu / 100)

    def _memory(self, gpu: _Gpu) -> Iterator[Reading]:
        memory = self._read("nvmlDeviceGetMemoryInfo", _Memory(), gpu.handle)
        yield Reading("nv_gpu_memory_total_bytes", memory.total)
        yield Reading("nv_gpu_memory_used_bytes", memory.used)

    def _power(self, gpu: _Gpu) -> Iterator[Reading]:
        yield Reading("nv_gpu_power_usage", self._thousandths("nvmlDeviceGetPowerUsage", gpu))

    def _limit(self, gpu: _Gpu) -> Iterator[Reading]:
        yield Reading("nv_gpu_power_limit", self._thousandths("nvmlDeviceGetEnforcedPowerLimit", gpu))

    def _consumption(self, gpu: _Gpu) -> Iterator[Reading]:
        now = self._energy(gpu.handle)
        if now is not None and gpu.began is not None:
            yield Reading("nv_energy_consumption", (now - gpu.began) / 1000)

    def _energy(self, handle: ctypes.c_void_p) -> int | None:
        with suppress(_Refused, AttributeError):
            millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong(), handle)
            return int(millijoules.value)
        return None

    def _thousandths(self, function: str, gpu: _Gpu) -> float:
        value: float = self._read(function, ctypes.c_uint(), gpu.handle).value / 1000
        return value

    def _read(self, function: str, into: Any, *arguments: Any) -> Any:
        """What NVML writes into its last argument."""
        self._call(function, *arguments, ctypes.byref(into))
        return into

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._nvml, function)(*arguments)
        if code != 0:
            raise _Refused(code)
