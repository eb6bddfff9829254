"""Shared memory that clients own and lend, on the host and on GPUs, so that tensors cross no socket. Regions are opened
here, never created or removed.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md.
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
"""Device numbers are C ints."""


class SharedMemoryRegion(NamedTuple):
    """A client's region: `byte_size` bytes of the shared memory object `key`, from `offset` on."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaMemoryRegion(NamedTuple):
    """A client's region on a GPU. `handle` is CUDA's, by which another process opens it."""

    name: str
    handle: bytes
    device_id: int
    byte_size: int


class SharedMemorySlice(NamedTuple):
    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class CudaSlice:
    """Bytes of a region on a GPU, held no longer than the request. Copying blocks while the GPU is busy, so not in an
    event loop; it raises `Internal` if the driver refuses."""

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
        """Copy `data`, which must fit, to the beginning."""
        try:
            self.memory.write(self.offset, data)
        except CudaError as error:
            message = f"shared memory region '{self.region}' cannot be written: {error}"
            raise Internal(message, field=self.region) from None


LentMemory: TypeAlias = memoryview | CudaSlice
"""The bytes of a slice: a view of the host's memory, or a GPU's to copy."""

_Region = TypeVar("_Region", SharedMemoryRegion, CudaMemoryRegion)
_Opened: TypeAlias = mmap.mmap | CudaMemory


class _LentRegion(NamedTuple):
    region: SharedMemoryRegion | CudaMemoryRegion
    memory: _Opened


class SharedMemoryRegistry:
    """The registered regions. Unless `allowed`, none can be registered. A region that was unregistered stays open, and
    in the status, while a view of it is held. `driver` raises `CudaError` on a machine without GPUs."""

    def __init__(self, allowed: bool = False, driver: Callable[[], CudaDriver] = cuda_driver) -> None:
        self._allowed = allowed
        self._driver = driver
        self._open: dict[str, _LentRegion] = {}
        self._opening: set[str] = set()
        self._leaving: list[tuple[SharedMemoryRegion | CudaMemoryRegion, weakref.ref[_Opened]]] = []

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a client's region.

        Raises:
            Unsupported: the server does not allow it.
            AlreadyExists: the name is taken.
            InvalidArgument: the object has no such bytes, or the key is reserved.
            Internal: there is no such object, or it may not be opened.
        """
        self._check_free(name)
        if key.lstrip("/").startswith(_RESERVED):
            message = f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved"
            raise InvalidArgument(f"{message} prefix '{_RESERVED}'", field="key")
        region = SharedMemoryRegion(name, key, offset, byte_size)
        self._open[name] = _LentRegion(region, _map_region(region))

    async def register_cuda(self, region: CudaMemoryRegion) -> None:
        """Open a client's region on a GPU, in another thread. Raises `Unsupported` and `AlreadyExists` as `register`,
        and `InvalidArgument` without GPUs or for a wrong handle, GPU or size."""
        self._check_free(region.name)
        self._opening.add(region.name)
        try:
            memory = await asyncio.to_thread(_open_cuda, region, self._driver)
        finally:
            self._opening.remove(region.name)
        self._open[region.name] = _LentRegion(region, memory)

    def unregister(self, name: str = "") -> None:
        """Unregister one region of the host's memory, or all; an unknown name is no error."""
        self._take_back(SharedMemoryRegion, name)

    def unregister_cuda(self, name: str = "") -> None:
        self._take_back(CudaMemoryRegion, name)

    def status(self, name: str = "") -> list[SharedMemoryRegion]:
        """One region of the host's memory, or all. Raises `NotFound`."""
        return self._status(SharedMemoryRegion, name)

    def status_cuda(self, name: str = "") -> list[CudaMemoryRegion]:
        """One region on a GPU, or all. Raises `NotFound`."""
        return self._status(CudaMemoryRegion, name)

    def registered(self) -> list[SharedMemoryRegion]:
        """The regions of the host's memory that were not unregistered."""
        return [region for region, _ in self._open.values() if isinstance(region, SharedMemoryRegion)]

    def registered_cuda(self) -> list[CudaMemoryRegion]:
        return [region for region, _ in self._open.values() if isinstance(region, CudaMemoryRegion)]

    def view(self, span: SharedMemorySlice) -> LentMemory:
        """The slice's bytes, held no longer than the request. Raises `NotFound` for an unknown region, and
        `InvalidArgument` if it has no such bytes or its object has shrunk."""
        lent = self._open.get(span.region) or self._leaving_region(span.region)
        if lent is None:
            raise NotFound(f"Unable to find shared memory region: '{span.region}'", field=span.region)
        region, memory = lent
        if not 0 <= span.offset < region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{region.name}'", field=region.name)
        end = span.offset + span.byte_size
        if end > _MAX_OFFSET:
            overflow = f"byte_size ({span.byte_size}) + offset ({span.offset}) exceeds maximum value ({_MAX_OFFSET})"
            raise InvalidArgument(
                f"Integer overflow detected: {overflow} for region '{region.name}'", field=region.name
            )
        begin = region.offset if isinstance(region, SharedMemoryRegion) else 0
        # Beyond the end of an object that shrank there is no memory: to touch it would kill the process.
        mapped_size = memory.size if isinstance(memory, CudaMemory) else memory.size()
        if span.byte_size < 0 or end > region.byte_size or begin + end > mapped_size:
            message = f"Invalid offset + byte size for shared memory region: '{region.name}'"
            raise InvalidArgument(message, field=region.name)
        if isinstance(memory, CudaMemory):
            return CudaSlice(region.name, memory, span.offset, span.byte_size)
        return memoryview(memory)[begin + span.offset : begin + end]

    def _take_back(self, kind: type[_Region], name: str) -> None:
        self._check_allowed()
        self._leaving = self._in_use()
        for open_name, (region, memory) in list(self._open.items()):
            if isinstance(region, kind) and name in ("", open_name):
                del self._open[open_name]
                self._leaving.append((region, weakref.ref(memory)))

    def _status(self, kind: type[_Region], name: str) -> list[_Region]:
        regions = [region for region, _ in (*self._in_use(), *self._open.values())]
        regions_by_name = {region.name: region for region in regions if isinstance(region, kind)}
        if not name or name in regions_by_name:
            return [regions_by_name[name]] if name else list(regions_by_name.values())
        kind_name, other_kind = ("system", "CUDA") if kind is SharedMemoryRegion else ("CUDA", "system")
        message = f"Unable to find {kind_name.lower()} shared memory region: '{name}'"
        if any(region.name == name for region in regions):
            message = (
                f"The region named '{name}' is registered as {other_kind} shared memory, not {kind_name} shared memory"
            )
        raise NotFound(message, field="name")

    def _in_use(self) -> list[tuple[SharedMemoryRegion | CudaMemoryRegion, weakref.ref[_Opened]]]:
        """The unregistered regions of which a view is still held."""
        return [(region, memory) for region, memory in self._leaving if memory() is not None]

    def _leaving_region(self, name: str) -> _LentRegion | None:
        """An unregistered region that is in use."""
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
    """Whether an array has its memory from a client's region."""
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
        cuda = driver()
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
        memory = CudaMemory(region.handle, region.device_id, cuda)
    except CudaError as error:
        raise InvalidArgument(f"{refused}: GPU {region.device_id}: {error}", field="raw_handle") from None
    if not 0 < region.byte_size <= memory.size:
        message = f"{refused}: byte_size is {region.byte_size}, and there are {memory.size} bytes"
        raise InvalidArgument(message, field="byte_size")
    return memory
