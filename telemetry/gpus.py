"""The NVIDIA GPUs by the driver's own library: which there are, what is free on them, Triton's gauges at a scrape.

Loaded by its name where a driver is installed; no package is needed. Functions and structures are those of NVIDIA's
NVML API reference. What a GPU, or its driver, does not tell has no series and limits nothing.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ..core.metrics import Measurement, Reading

_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96
_UNLIMITED = 1 << 60


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Refused(Exception):
    """NVML answered with an error: the number is its code."""


class _Gpu(NamedTuple):
    """`product`: its name, of which there may be several. `began`: millijoules at the start, None where they are not
    counted."""

    handle: ctypes.c_void_p
    uuid: str
    product: str
    began: int | None


def usable_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Numbers of the GPUs here, as this process may use them."""
    there = len(list(devices.glob("nvidia[0-9]*")))
    visible = _visible_devices(environment)
    return tuple(range(there if visible is None else min(there, len(visible))))


def _visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA may see, by the driver's numbers or names, None for everything; an invalid one hides all behind it."""
    told = environment.get("CUDA_VISIBLE_DEVICES")
    names = None if told is None else (name.strip() for name in told.split(","))
    return None if names is None else list(takewhile(lambda name: name not in ("", "-1"), names))


class Gpus:
    """Those of this machine; none without a driver."""

    def __init__(self, library: str = _LIBRARY, environment: Mapping[str, str] = os.environ) -> None:
        self._visible = _visible_devices(environment)
        self._in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        self._nvml: Any = None
        self._gpus: list[_Gpu] = []
        with suppress(OSError, _Refused, AttributeError):
            self._nvml = ctypes.CDLL(library)
            self._call("nvmlInit_v2")
            count = self._read("nvmlDeviceGetCount_v2", ctypes.c_uint())
            self._gpus = [self._open(index) for index in range(count.value)]
            # Of several kinds CUDA counts the fastest first, and the driver as they are plugged in.
            self._in_order = self._in_order or len({gpu.product for gpu in self._gpus}) == 1

    def measure(self) -> Iterator[Measurement]:
        for gpu in self._gpus:
            yield Measurement({"gpu_uuid": gpu.uuid}, tuple(self._readings(gpu)))

    def free(self, number: int) -> int:
        """Bytes that are free on the GPU that has this number for CUDA in this process."""
        with suppress(OSError, _Refused, AttributeError, LookupError):
            return int(self._read("nvmlDeviceGetMemoryInfo", _Memory(), self._handle(number)).free)
        return _UNLIMITED

    def _handle(self, number: int) -> ctypes.c_void_p:
        """Raises `LookupError` where that is nobody, or anybody."""
        name = str(number) if self._visible is None else self._visible[number]
        if name.isdecimal() and not self._in_order:
            raise LookupError("CUDA has an order of its own")
        if name.isdecimal():
            return self._gpus[int(name)].handle
        named = [gpu.handle for gpu in self._gpus if gpu.uuid.startswith(name)]
        return named[0] if named else self._find("nvmlDeviceGetHandleByUUID", name.encode())

    def _open(self, index: int) -> _Gpu:
        handle = self._find("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index))
        uuid, product = self._name("nvmlDeviceGetUUID", handle), self._name("nvmlDeviceGetName", handle)
        return _Gpu(handle, uuid, product, self._energy(handle))

    def _name(self, function: str, handle: ctypes.c_void_p) -> str:
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call(function, handle, name, ctypes.c_uint(_NAME_BYTES))
        return name.value.decode()

    def _find(self, function: str, by: Any) -> ctypes.c_void_p:
        """The handle of a GPU, or of a part of one that has a name of its own."""
        handle = ctypes.c_void_p()
        self._call(function, by, ctypes.byref(handle))
        return handle

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
