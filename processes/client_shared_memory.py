"""Shared memory that clients made and lend, the host's and GPUs': tensors come from it and go into it without crossing
a socket.

Knows nothing of tensors and protocols: names in, bytes out. The regions are the clients' own; nothing is created or
removed here. Source:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md.
"""

import asyncio
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import posix_ipc

from ..core.errors import AlreadyExists, Internal, InvalidArgument, NotFound, Unsupported
from .cuda_memory import HANDLE_BYTES, CudaDriver, CudaError, CudaMemory, cuda_driver

log = logging.getLogger(__name__)

_RESERVED = "triton_python_backend_shm_region_"
_MAX_OFFSET = 2**64 - 1
_MOST_DEVICES = 2**31
"""Their numbers are an int of C."""


class SharedMemoryRegion(NamedTuple):
    """`byte_size` bytes of the shared memory object `key`, from `offset` on, that requests call `name`."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaMemoryRegion(NamedTuple):
    """`byte_size` bytes of memory on the GPU `device_id` that requests call `name`. `handle`: CUDA's, by which another
    process opens it."""

    name: str
    handle: bytes
    device_id: int
    byte_size: int


class SharedMemorySlice(NamedTuple):
    """The bytes of a region in which a tensor lies."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class CudaSlice:
    """`size` bytes of a region on a GPU, to be held no longer than the request. They are copied: not in an event loop,
    for a copy waits for what else the GPU does. Reading and writing raise `Internal` if the driver refuses."""

    region: str
    memory: CudaMemory
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size

    def read(self) -> memoryview:
        """A copy of all bytes."""
        try:
            return self.memory.read(self.offset, self.size)
        except CudaError as error:
            raise Internal(f"shared memory region '{self.region}' cannot be read: {error}", field=self.region) from None

    def write(self, data: memoryview) -> None:
        """Copy `data`, no more than there is room for, to the beginning."""
        try:
            self.memory.write(self.offset, data)
        except CudaError as error:
            message = f"shared memory region '{self.region}' cannot be written: {error}"
            raise Internal(message, field=self.region) from None


LentMemory: TypeAlias = memoryview | CudaSlice
"""The bytes of a slice: the host's, as they are, or a GPU's, to copy."""

_Region = TypeVar("_Region", SharedMemoryRegion, CudaMemoryRegion)
_Opened: TypeAlias = mmap.mmap | CudaMemory


class _LentRegion(NamedTuple):
    region: SharedMemoryRegion | CudaMemoryRegion
    memory: _Opened


class SharedMemoryRegistry:
    """Every registered region. Without `allowed` none can be registered; the status always works. A region that is
    taken back stays open, in the status and for further views while a view of it is held, and no longer: what opened it
    is the view's base, and goes with the last of them. `driver`: of this machine's GPUs; raises `CudaError` where there
    are none."""

    def __init__(self, allowed: bool = False, driver: Callable[[], CudaDriver] = cuda_driver) -> None:
        self._allowed = allowed
        self._driver = driver
        self._open: dict[str, _LentRegion] = {}
        self._opening: set[str] = set()
        self._leaving: list[tuple[SharedMemoryRegion | CudaMemoryRegion, weakref.ref[_Opened]]] = []

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a client's region. Raises `Unsupported` if the server was not started for that, `AlreadyExists` if the
        name is taken, `InvalidArgument` if the object has no such bytes, or the key is reserved, and `Internal` if
        there is no such object, or it may not be opened."""
        self._check_free(name)
        if key.lstrip("/").startswith(_RESERVED):
            message = f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved"
            raise InvalidArgument(f"{message} prefix '{_RESERVED}'", field="key")
        region = SharedMemoryRegion(name, key, offset, byte_size)
        self._open[name] = _LentRegion(region, _map_region(region))

    async def register_cuda(self, region: CudaMemoryRegion) -> None:
        """Open a client's region on a GPU, in another thread. Raises `Unsupported` and `AlreadyExists` as `register`,
        and `InvalidArgument` where there are no GPUs, or the handle, the GPU or the size is none."""
        self._check_free(region.name)
        self._opening.add(region.name)
        try:
            memory = await asyncio.to_thread(_open_cuda, region, self._driver)
        finally:
            self._opening.remove(region.name)
        self._open[region.name] = _LentRegion(region, memory)

    def unregister(self, name: str = "") -> None:
        """Take back one region of the host's memory, or all; a name that is not registered is no error."""
        self._take_back(SharedMemoryRegion, name)

    def unregister_cuda(self, name: str = "") -> None:
        """The same for GPUs."""
        self._take_back(CudaMemoryRegion, name)

    def status(self, name: str = "") -> list[SharedMemoryRegion]:
        """All regions of the host's memory, or one. Raises `NotFound` if there is none of this name."""
        return self._status(SharedMemoryRegion, name)

    def status_cuda(self, name: str = "") -> list[CudaMemoryRegion]:
        """The same for GPUs."""
        return self._status(CudaMemoryRegion, name)

    def registered(self) -> list[SharedMemoryRegion]:
        """Those of the host's memory that were not taken back."""
        return [region for region, _ in self._open.values() if isinstance(region, SharedMemoryRegion)]

    def registered_cuda(self) -> list[CudaMemoryRegion]:
        """The same for GPUs."""
        return [region for region, _ in self._open.values() if isinstance(region, CudaMemoryRegion)]

    def view(self, span: SharedMemorySlice) -> LentMemory:
        """The slice's bytes, to read and to write; to be held no longer than the request. Raises `NotFound` if there is
        no such region, and `InvalidArgument` if it has no such bytes, or its object was made shorter since."""
        lent = self._open.get(span.region) or self._leaving_region(span.region)
        if lent is None:
            raise NotFound(f"Unable to find shared memory region: '{span.region}'", field=span.region)
        region, memory = lent
        if not 0 <= span.offset < region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{region.name}'", field=region.name)
        end = span.offset + span.byte_size
        if end > _MAX_OFFSET:
            said = f"byte_size ({span.byte_size}) + offset ({span.offset}) exceeds maximum value ({_MAX_OFFSET})"
            raise InvalidArgument(f"Integer overflow detected: {said} for region '{region.name}'", field=region.name)
        begin = region.offset if isinstance(region, SharedMemoryRegion) else 0
        # Beyond the end of an object that shrank there is no memory: to touch it would kill the process.
        there = memory.size if isinstance(memory, CudaMemory) else memory.size()
        if span.byte_size < 0 or end > region.byte_size or begin + end > there:
            message = f"Invalid offset + byte size for shared memory region: '{region.name}'"
            raise InvalidArgument(message, field=region.name)
        if isinstance(memory, CudaMemory):
            return CudaSlice(region.name, memory, span.offset, span.byte_size)
        return memoryview(memory)[begin + span.offset : begin + end]

    def _take_back(self, kind: type[_Region], name: str) -> None:
        self._check_allowed()
        self._leaving = self._in_use()
        for each, (region, memory) in list(self._open.items()):
            if isinstance(region, kind) and name in ("", each):
                del self._open[each]
                self._leaving.append((region, weakref.ref(memory)))

    def _status(self, kind: type[_Region], name: str) -> list[_Region]:
        regions = [region for region, _ in (*self._in_use(), *self._open.values())]
        known = {region.name: region for region in regions if isinstance(region, kind)}
        if not name or name in known:
            return [known[name]] if name else list(known.values())
        asked, other = ("system", "CUDA") if kind is SharedMemoryRegion else ("CUDA", "system")
        message = f"Unable to find {asked.lower()} shared memory region: '{name}'"
        if any(region.name == name for region in regions):
            message = f"The region named '{name}' is registered as {other} shared memory, not {asked} shared memory"
        raise NotFound(message, field="name")

    def _in_use(self) -> list[tuple[SharedMemoryRegion | CudaMemoryRegion, weakref.ref[_Opened]]]:
        """The regions that were taken back and of which a view is still held."""
        return [(region, memory) for region, memory in self._leaving if memory() is not None]

    def _leaving_region(self, name: str) -> _LentRegion | None:
        """A region that was taken back and is in use."""
        for region, reference in reversed(self._leaving):
            memory = reference()
            if region.name == name and memory is not None:
                return _LentRegion(region, memory)
        return None

    def _check_allowed(self) -> None:
        if not self._allowed:
            message = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            raise Unsupported(message)

    def _check_free(self, name: str) -> None:
        self._check_allowed()
        if name in self._open or name in self._opening:
            raise AlreadyExists(f"shared memory region '{name}' already in manager", field="name")


def is_lent(array: object) -> bool:
    """Whether an array, or a view of one, has its memory from a client's region."""
    while (base := getattr(array, "base", None)) is not None:
        array = base
    return isinstance(array, memoryview) and isinstance(array.obj, mmap.mmap)


def _map_region(region: SharedMemoryRegion) -> mmap.mmap:
    try:
        # The library takes the process down with it when a name cannot be encoded, or has a null character.
        key = "" if "\0" in region.key else os.fsencode(region.key).decode()
        descriptor: int = posix_ipc.SharedMemory(key).fd
        try:
            end = region.offset + region.byte_size
            if region.offset < 0 or region.byte_size <= 0 or end > os.fstat(descriptor).st_size:
                message = f"failed to register shared memory region '{region.name}': invalid args"
                raise InvalidArgument(message, field=region.name)
            return mmap.mmap(descriptor, end)
        finally:
            os.close(descriptor)
    except (posix_ipc.Error, ValueError, OSError):
        raise Internal(f"Unable to open shared memory region: '{region.key}'", field="key") from None


def _open_cuda(region: CudaMemoryRegion, driver: Callable[[], CudaDriver]) -> CudaMemory:
    try:
        found = driver()
    except CudaError as error:
        log.warning("memory of GPUs cannot be lent: %s", error)
        message = f"failed to register CUDA shared memory region: '{region.name}', GPUs not supported"
        raise InvalidArgument(message, field="name") from None
    refused = f"failed to register shared memory region '{region.name}': invalid args"
    if len(region.handle) != HANDLE_BYTES:
        message = f"{refused}: 'raw_handle' must be a cudaIpcMemHandle_t of {HANDLE_BYTES} bytes"
        raise InvalidArgument(f"{message}, got {len(region.handle)}", field="raw_handle")
    if not 0 <= region.device_id < _MOST_DEVICES:
        raise InvalidArgument(f"{refused}: there is no GPU {region.device_id}", field="device_id")
    try:
        memory = CudaMemory(region.handle, region.device_id, found)
    except CudaError as error:
        raise InvalidArgument(f"{refused}: GPU {region.device_id}: {error}", field="raw_handle") from None
    if not 0 < region.byte_size <= memory.size:
        message = f"{refused}: byte_size is {region.byte_size}, and there are {memory.size} bytes"
        raise InvalidArgument(message, field="byte_size")
    return memory
