"""System shared memory that clients made and lend: tensors come from it and go into it without crossing a socket.

Knows nothing of tensors and protocols: names in, bytes out. The regions are the clients' own; nothing is created or
removed here. Source:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md.
"""

import mmap
import os
import weakref
from typing import NamedTuple

import posix_ipc

from ..core.errors import AlreadyExists, Internal, InvalidArgument, NotFound, Unsupported

_RESERVED = "triton_python_backend_shm_region_"
_MAX_OFFSET = 2**64 - 1


class SharedMemoryRegion(NamedTuple):
    """`byte_size` bytes of the shared memory object `key`, from `offset` on, that requests call `name`."""

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemorySlice(NamedTuple):
    """The bytes of a region in which a tensor lies."""

    region: str
    offset: int
    byte_size: int


class SharedMemoryRegistry:
    """Every registered region. Without `allowed` none can be registered; `status` always works. A region that is taken
    back stays mapped, and in the status, while a view of it is held, and no longer: the mapping is the view's base, and
    goes with the last of them."""

    def __init__(self, allowed: bool = False) -> None:
        self._allowed = allowed
        self._mapped: dict[str, tuple[SharedMemoryRegion, mmap.mmap]] = {}
        self._leaving: list[tuple[SharedMemoryRegion, weakref.ref[mmap.mmap]]] = []

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a client's region. Raises `Unsupported` if the server was not started for that, `AlreadyExists` if the
        name is taken, `InvalidArgument` if the object has no such bytes, or the key is reserved or names nothing, and
        `Internal` if there is no such object, or it may not be opened."""
        self._check_allowed()
        if name in self._mapped:
            raise AlreadyExists(f"shared memory region '{name}' already in manager", field="name")
        if key.lstrip("/").startswith(_RESERVED):
            message = f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved"
            raise InvalidArgument(f"{message} prefix '{_RESERVED}'", field="key")
        if not key.strip("/"):
            raise InvalidArgument(f"shared memory region '{name}' has a key without a name: '{key}'", field="key")
        region = SharedMemoryRegion(name, key, offset, byte_size)
        self._mapped[name] = region, _map_region(region)

    def unregister(self, name: str = "") -> None:
        """Take back one region, or all; a name that is not registered is no error."""
        self._check_allowed()
        taken = [self._mapped.pop(each) for each in ([name] if name else list(self._mapped)) if each in self._mapped]
        self._leaving = [*self._in_use(), *((region, weakref.ref(memory)) for region, memory in taken)]

    def status(self, name: str = "") -> list[SharedMemoryRegion]:
        """All regions, or one. Raises `NotFound` if there is none of this name."""
        known = {region.name: region for region, _ in (*self._in_use(), *self._mapped.values())}
        if name and name not in known:
            raise NotFound(f"Unable to find system shared memory region: '{name}'", field="name")
        return [known[name]] if name else list(known.values())

    def registered(self) -> list[SharedMemoryRegion]:
        """Those that were not taken back."""
        return [region for region, _ in self._mapped.values()]

    def view(self, span: SharedMemorySlice) -> memoryview:
        """The slice's bytes, to read and to write; to be held no longer than the request. Raises `NotFound` if there is
        no such region, and `InvalidArgument` if it has no such bytes, or its object was made shorter since."""
        if span.region not in self._mapped:
            raise NotFound(f"Unable to find shared memory region: '{span.region}'", field=span.region)
        region, memory = self._mapped[span.region]
        if not 0 <= span.offset < region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{region.name}'", field=region.name)
        end = span.offset + span.byte_size
        if end > _MAX_OFFSET:
            said = f"byte_size ({span.byte_size}) + offset ({span.offset}) exceeds maximum value ({_MAX_OFFSET})"
            raise InvalidArgument(f"Integer overflow detected: {said} for region '{region.name}'", field=region.name)
        # Beyond the end of an object that shrank there is no memory: to touch it would kill the process.
        if span.byte_size < 0 or end > region.byte_size or region.offset + end > memory.size():
            message = f"Invalid offset + byte size for shared memory region: '{region.name}'"
            raise InvalidArgument(message, field=region.name)
        return memoryview(memory)[region.offset + span.offset : region.offset + end]

    # Memory of GPUs cannot be lent; v2 has its calls all the same.

    def register_cuda(self, name: str) -> None:
        """Raises `Unsupported` or `InvalidArgument`: it is not served."""
        self._check_allowed()
        message = f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
        raise InvalidArgument(message, field="name")

    def unregister_cuda(self) -> None:
        """Raises `Unsupported` where no region can be registered; there is none to take back."""
        self._check_allowed()

    def status_cuda(self, name: str = "") -> None:
        """Raises `NotFound` for any name: there is none."""
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'", field="name")

    def _in_use(self) -> list[tuple[SharedMemoryRegion, weakref.ref[mmap.mmap]]]:
        """The regions that were taken back and of which a view is still held."""
        return [(region, memory) for region, memory in self._leaving if memory() is not None]

    def _check_allowed(self) -> None:
        if not self._allowed:
            message = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            raise Unsupported(message)


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
