"""A stand-in for torch.cuda on machines without: it wants every device with its index, as torch does of some calls, and
a capture that fails leaves behind what it does on a GPU."""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakSet

import pytest
import torch

DEVICE_CALLS = (
    "current_stream",
    "get_device_capability",
    "get_device_name",
    "max_memory_reserved",
    "mem_get_info",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)
"""What is called with a device."""


class _Stream:
    """In place of torch.cuda.Stream."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index


class _Graph:
    """In place of torch.cuda.CUDAGraph: a replay only sees whether it would be refused."""

    def __init__(self, cuda: "StandInCuda") -> None:
        self._cuda, self._pool, self._is_captured = cuda, 0, False
        cuda.live_graphs.add(self)

    def capture_begin(self, pool: int | None = None, capture_error_mode: str = "global") -> None:
        cuda = self._cuda
        if cuda.stream is cuda.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        cuda.generator_waits = True
        self._pool = cuda.new_pool() if pool is None else pool
        if cuda.users.get(self._pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        cuda.users[self._pool] += 1
        cuda.taken_from.append(self._pool)
        cuda.is_capturing = True

    def capture_end(self) -> None:
        cuda, self._cuda.is_capturing = self._cuda, False
        if cuda.is_invalidated:
            cuda.is_invalidated = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        cuda.taken_from.remove(self._pool)
        cuda.generator_waits = False
        self._is_captured = True

    def replay(self) -> None:
        assert self._is_captured
        self._cuda.draw()  # the generator is told of every replay

    def __del__(self) -> None:
        if self._is_captured:
            self._cuda.users[self._pool] -= 1


class StandInCuda:
    """`devices` GPUs. `calls`: with a device, by name and index. `users`: how many graphs each pool has; `taken_from`:
    pools that memory is taken from. `live_graphs`: captured or not. `generator_waits`: for the end of a capture.
    `pinned`: the sizes of the host's memory that is, by address."""

    def __init__(self, devices: int = 2) -> None:
        self.devices, self.calls = devices, list[tuple[str, int]]()
        self.users, self.taken_from = Counter[int](), list[int]()
        self.live_graphs = WeakSet[_Graph]()
        self.pinned, self.pins_nothing = dict[int, int](), False
        self.is_capturing = self.is_invalidated = self.generator_waits = False
        self.stream = self.default_stream = _Stream(0)
        self._pools = count(1)

    def invalidate(self) -> None:
        """What an operation does that no capture can have."""
        self.is_invalidated = True
        raise RuntimeError("operation not permitted when stream is capturing")

    def draw(self) -> None:
        """A random number."""
        if self.generator_waits and not self.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def new_pool(self) -> int:
        return next(self._pools)

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Of torch.cuda's functions, all that are called anywhere."""
        for name, function in self.functions().items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocation, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", self._release, raising=False)

    def functions(self) -> dict[str, Any]:
        return {name: self._called(name) for name in DEVICE_CALLS} | {
            "CUDAGraph": lambda: _Graph(self),
            "Event": lambda: None,
            "Stream": lambda device=0: _Stream(_index(device)),
            "check_error": _check_error,
            "cudart": lambda: self,
            "device_count": lambda: self.devices,
            "empty_cache": self._empty_cache,
            "graph": self._graph,
            "graph_pool_handle": self.new_pool,
            "is_available": lambda: True,
            "set_stream": self._set_stream,
            "stream": self._on_stream,
        }

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.pins_nothing:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.string_at(address, self.pinned.pop(address))  # which is mapped still
        return 0

    def _called(self, name: str) -> Any:
        answers = {"get_device_capability": (9, 0), "get_device_name": "a stand-in", "mem_get_info": (5000, 8000)}

        def call(device: Any = 0) -> Any:
            self.calls.append((name, _index(device)))
            return self.stream if name == "current_stream" else answers.get(name, 0)

        return call

    def _set_stream(self, stream: _Stream) -> None:
        self.stream = stream

    @contextmanager
    def _on_stream(self, stream: _Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def _graph(self, graph: _Graph, pool: int, capture_error_mode: str) -> Iterator[None]:
        """Where something fails, the stream stays the current one."""
        self._empty_cache()
        before, self.stream = self.stream, _Stream(0)
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()
            self.stream = before

    def _empty_cache(self) -> None:
        if self.taken_from:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def _end_allocation(self, device: int, pool: int) -> None:
        if pool not in self.taken_from:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.taken_from.remove(pool)

    def _release(self, device: int, pool: int) -> None:
        self.users[pool] -= 1
        assert self.users[pool] >= 0


def _check_error(result: int) -> None:
    if result:
        raise RuntimeError("out of memory (2)")


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    if index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    return index
