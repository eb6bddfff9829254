"""Regions that clients lend, over real shared memory; those of GPUs over the stand-in."""

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from charonia.core.errors import AlreadyExists, CharoniaError, Internal, InvalidArgument, NotFound, Unsupported
from charonia.processes.client_shared_memory import (
    CudaMemoryRegion,
    CudaSlice,
    SharedMemoryRegion,
    SharedMemoryRegistry,
    SharedMemorySlice,
)
from charonia.processes.cuda_memory import CudaDriver

from ..gpu_stand_in import GpuAllocation, gpu_allocation
from ..waiting import until

SIZE = 4096


@pytest.fixture
def key() -> Iterator[str]:
    """A shared memory object of one page, as a client makes it."""
    name = f"/charonia_test_{os.getpid()}"
    made = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=SIZE)
    made.close_fd()
    yield name
    posix_ipc.unlink_shared_memory(name)


@pytest.fixture
def regions() -> SharedMemoryRegistry:
    return SharedMemoryRegistry(allowed=True)


def mapped(key: str) -> int:
    """How often this process has the object mapped."""
    return Path("/proc/self/maps").read_text().count(f"/dev/shm{key}")


def test_what_one_writes_the_other_reads(regions: SharedMemoryRegistry, key: str) -> None:
    regions.register("in", key, 0, SIZE)
    regions.register("out", key, 1000, 100)
    regions.view(SharedMemorySlice("in", 1010, 4))[:] = b"abcd"
    assert bytes(regions.view(SharedMemorySlice("out", 10, 4))) == b"abcd"
    assert len(regions.view(SharedMemorySlice("out", 99, 0))) == 0
    assert regions.status() == [SharedMemoryRegion("in", key, 0, SIZE), SharedMemoryRegion("out", key, 1000, 100)]
    assert regions.status("out") == [SharedMemoryRegion("out", key, 1000, 100)]


def test_the_clients_object_outlives_its_regions(regions: SharedMemoryRegistry, key: str) -> None:
    regions.register("a", key, 0, SIZE)
    regions.unregister("a")
    regions.unregister("never was")
    assert (regions.status(), mapped(key)) == ([], 0)
    regions.register("a", key.lstrip("/"), 0, SIZE)
    regions.register("b", key, 0, SIZE)
    regions.unregister()
    assert (regions.status(), mapped(key)) == ([], 0)
    assert Path(f"/dev/shm{key}").exists()


def test_what_is_in_use_goes_with_its_last_view(regions: SharedMemoryRegistry, key: str) -> None:
    regions.register("a", key, 0, SIZE)
    array = np.frombuffer(regions.view(SharedMemorySlice("a", 0, 8)), np.int64)
    regions.unregister("a")
    assert (array[0], mapped(key)) == (0, 1)
    assert regions.status() == regions.status("a") == [SharedMemoryRegion("a", key, 0, SIZE)]
    # The next request may use it, too, as long as its status says that it is there.
    later = np.frombuffer(regions.view(SharedMemorySlice("a", 8, 8)), np.int64)
    gc.disable()  # the reference counts alone do it
    del array
    assert (later[0], mapped(key), regions.status()) == (0, 1, [SharedMemoryRegion("a", key, 0, SIZE)])
    regions.register("a", key, 0, 100)
    with pytest.raises(InvalidArgument, match="Invalid offset"):
        regions.view(SharedMemorySlice("a", 100, 8))
    regions.unregister("a")
    del later
    assert (mapped(key), regions.status()) == (0, [])
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'a'"):
        regions.view(SharedMemorySlice("a", 0, 8))
    gc.enable()


def test_nothing_leaks(regions: SharedMemoryRegistry, key: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        regions.register("a", key, 0, SIZE)
        regions.unregister("a")
        with pytest.raises(InvalidArgument):
            regions.register("a", key, 0, SIZE + 1)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("a", "KEY", 0, 10), AlreadyExists, "shared memory region 'a' already in manager"),
        (("b", "/no such", 0, 10), Internal, "Unable to open shared memory region: '/no such'"),
        (("b", "a/b", 0, 10), Internal, "Unable to open shared memory region: 'a/b'"),
        (("b", "x" * 1000, 0, 10), Internal, f"Unable to open shared memory region: '{'x' * 1000}'"),
        (("b", "nu\0ll", 0, 10), Internal, "Unable to open shared memory region: 'nu\0ll'"),
        (("b", "\ud800", 0, 10), Internal, "Unable to open shared memory region: '\ud800'"),
        (("b", "/", 0, 10), Internal, "Unable to open shared memory region: '/'"),
        (("b", "", 0, 10), Internal, "Unable to open shared memory region: ''"),
        *[
            (("b", "KEY", *outside), InvalidArgument, "failed to register shared memory region 'b': invalid args")
            for outside in ((SIZE + 1, 1), (SIZE, 1), (-1, 1), (1, SIZE), (0, 2**64 - 1), (0, 0))
        ],
        (
            ("b", "/triton_python_backend_shm_region_1", 0, 1),
            InvalidArgument,
            "cannot register shared memory region 'b' with key '/triton_python_backend_shm_region_1' as the key "
            "contains the reserved prefix 'triton_python_backend_shm_region_'",
        ),
    ],
)
def test_what_cannot_be_registered(
    regions: SharedMemoryRegistry, key: str, given: tuple[str, str, int, int], error: type[CharoniaError], text: str
) -> None:
    regions.register("a", key, 0, SIZE)
    with pytest.raises(error) as caught:
        regions.register(given[0], key if given[1] == "KEY" else given[1], *given[2:])
    assert caught.value.message == text
    assert [region.name for region in regions.status()] == ["a"]


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (SharedMemorySlice("a", 100, 0), "Invalid offset for shared memory region: 'a'"),
        (SharedMemorySlice("a", 100, 8), "Invalid offset for shared memory region: 'a'"),
        (SharedMemorySlice("a", -1, 5), "Invalid offset for shared memory region: 'a'"),
        (SharedMemorySlice("a", 50, 51), "Invalid offset + byte size for shared memory region: 'a'"),
        (
            SharedMemorySlice("a", 32, 2**64 - 32),
            "Integer overflow detected: byte_size (18446744073709551584) + offset (32) exceeds maximum value "
            "(18446744073709551615) for region 'a'",
        ),
        (SharedMemorySlice("a", 50, -1), "Invalid offset + byte size for shared memory region: 'a'"),
    ],
)
def test_views_stay_inside_their_region(
    regions: SharedMemoryRegistry, key: str, span: SharedMemorySlice, text: str
) -> None:
    regions.register("a", key, 20, 100)
    with pytest.raises(InvalidArgument) as caught:
        regions.view(span)
    assert caught.value.message == text


def test_an_object_that_shrank_is_refused(regions: SharedMemoryRegistry, key: str) -> None:
    regions.register("a", key, 0, SIZE)
    os.truncate(f"/dev/shm{key}", 100)
    assert len(regions.view(SharedMemorySlice("a", 0, 100))) == 100
    with pytest.raises(InvalidArgument, match=r"Invalid offset \+ byte size"):
        regions.view(SharedMemorySlice("a", 0, 101))


# On GPUs


@pytest.fixture
def on_gpu() -> Iterator[GpuAllocation]:
    with gpu_allocation(SIZE) as made:
        yield made


@pytest.fixture
def with_gpus(cuda_library: Path) -> SharedMemoryRegistry:
    return SharedMemoryRegistry(True, partial(CudaDriver, str(cuda_library)))


async def test_memory_of_gpus(with_gpus: SharedMemoryRegistry, on_gpu: GpuAllocation, key: str) -> None:
    region = CudaMemoryRegion("g", on_gpu.handle, 1, SIZE - 1)
    await with_gpus.register_cuda(region)
    with_gpus.register("host", key, 0, SIZE)
    place = with_gpus.view(SharedMemorySlice("g", 100, 4))
    assert isinstance(place, CudaSlice)
    place.write(memoryview(b"ab"))
    assert (len(place), bytes(place.read()), on_gpu.bytes[99:103]) == (4, b"ab\0\0", b"\0ab\0")
    assert with_gpus.status_cuda() == with_gpus.status_cuda("g") == with_gpus.registered_cuda() == [region]
    assert [each.name for each in with_gpus.status()] == [each.name for each in with_gpus.registered()] == ["host"]
    with pytest.raises(NotFound, match="'g' is registered as CUDA shared memory, not system shared memory"):
        with_gpus.status("g")
    with pytest.raises(NotFound, match="'host' is registered as system shared memory, not CUDA shared memory"):
        with_gpus.status_cuda("host")
    for wrong in (SharedMemorySlice("g", SIZE - 1, 0), SharedMemorySlice("g", -1, 1)):
        with pytest.raises(InvalidArgument, match="Invalid offset for shared memory region: 'g'"):
            with_gpus.view(wrong)
    with pytest.raises(InvalidArgument, match=r"Invalid offset \+ byte size for shared memory region: 'g'"):
        with_gpus.view(SharedMemorySlice("g", SIZE - 2, 2))
    with_gpus.unregister()
    with_gpus.unregister_cuda("host")
    assert (with_gpus.status(), with_gpus.registered_cuda()) == ([], [region])
    with_gpus.unregister_cuda()
    # A request that has a view goes on, others may come, and the region goes with the last of them.
    later = with_gpus.view(SharedMemorySlice("g", 100, 4))
    assert isinstance(later, CudaSlice)
    assert (bytes(place.read()), bytes(later.read())) == (b"ab\0\0", b"ab\0\0")
    assert with_gpus.status_cuda("g") == [region]
    assert on_gpu.is_open(os.getpid())
    del place, later
    await until(lambda: not on_gpu.is_open(os.getpid()))
    assert with_gpus.status_cuda() == []
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'g'"):
        with_gpus.view(SharedMemorySlice("g", 0, 1))


async def test_what_of_gpus_cannot_be_registered(with_gpus: SharedMemoryRegistry, on_gpu: GpuAllocation) -> None:
    handle = on_gpu.handle
    for given, text in (
        ((handle[:-1], 0, 8), "'raw_handle' must be a cudaIpcMemHandle_t of 64 bytes, got 63"),
        ((b"\1" * 64, 0, 8), "GPU 0: invalid argument"),
        ((handle, 2, 8), "GPU 2: invalid device ordinal"),
        ((handle, -1, 8), "there is no GPU -1"),
        ((handle, 2**40, 8), f"there is no GPU {2**40}"),
        ((handle, 0, SIZE + 1), f"byte_size is {SIZE + 1}, and there are {SIZE} bytes"),
        ((handle, 0, 0), f"byte_size is 0, and there are {SIZE} bytes"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await with_gpus.register_cuda(CudaMemoryRegion("g", *given))
        assert caught.value.message == f"failed to register shared memory region 'g': invalid args: {text}"
        del caught  # whose frames have what was opened
    assert with_gpus.status_cuda() == []
    await until(lambda: not on_gpu.is_open(os.getpid()))


async def test_a_name_is_taken_while_its_region_is_opened(cuda_library: Path, on_gpu: GpuAllocation, key: str) -> None:
    may_go = threading.Event()

    def slow_driver() -> CudaDriver:
        assert may_go.wait(10)
        return CudaDriver(str(cuda_library))

    regions, region = SharedMemoryRegistry(True, slow_driver), CudaMemoryRegion("g", on_gpu.handle, 0, SIZE)
    opening = asyncio.create_task(regions.register_cuda(region))
    await asyncio.sleep(0)
    assert regions.status_cuda() == []
    for again in (regions.register_cuda(region), asyncio.to_thread(regions.register, "g", key, 0, SIZE)):
        with pytest.raises(AlreadyExists, match="shared memory region 'g' already in manager"):
            await again
    may_go.set()
    await opening
    assert regions.status_cuda() == [region]
    # One that nobody waits for any more is not there.
    left = asyncio.create_task(regions.register_cuda(region._replace(name="h")))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert regions.status_cuda() == [region]
    regions.unregister_cuda()
    await until(lambda: not on_gpu.is_open(os.getpid()))


async def test_copies_that_the_driver_refuses(with_gpus: SharedMemoryRegistry, on_gpu: GpuAllocation) -> None:
    await with_gpus.register_cuda(CudaMemoryRegion("g", on_gpu.handle, 0, SIZE))
    place = with_gpus.view(SharedMemorySlice("g", 0, 8))
    assert isinstance(place, CudaSlice)
    beyond = replace(place, offset=SIZE)
    with pytest.raises(Internal, match="shared memory region 'g' cannot be read: invalid argument"):
        beyond.read()
    with pytest.raises(Internal, match="shared memory region 'g' cannot be written: invalid argument"):
        beyond.write(memoryview(b"a"))


async def test_nobody_lends_memory_unless_allowed(key: str) -> None:
    regions = SharedMemoryRegistry()
    for call in (lambda: regions.register("a", key, 0, SIZE), regions.unregister, regions.unregister_cuda):
        with pytest.raises(Unsupported, match="Client shared memory is disabled"):
            call()
    with pytest.raises(Unsupported, match="Client shared memory is disabled"):
        await regions.register_cuda(CudaMemoryRegion("g", b"", 0, 8))
    assert (regions.status(), regions.status_cuda()) == ([], [])


async def test_machines_without_gpus(caplog: pytest.LogCaptureFixture) -> None:
    regions = SharedMemoryRegistry(True, partial(CudaDriver, "libcuda_nowhere.so.1"))
    with pytest.raises(InvalidArgument) as caught:
        await regions.register_cuda(CudaMemoryRegion("g", b"", 0, 8))
    assert caught.value.message == "failed to register CUDA shared memory region: 'g', GPUs not supported"
    assert "there is no driver: libcuda_nowhere" in caplog.text
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'g'"):
        regions.status_cuda("g")
    regions.unregister_cuda("g")
