"""Regions that clients lend, over real shared memory."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from charonia.core.errors import AlreadyExists, CharoniaError, Internal, InvalidArgument, NotFound, Unsupported
from charonia.processes.client_shared_memory import SharedMemoryRegion, SharedMemoryRegistry, SharedMemorySlice

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
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'a'"):
        regions.view(SharedMemorySlice("a", 0, 8))
    gc.disable()  # the reference counts alone do it
    del array
    assert (mapped(key), regions.status()) == (0, [])
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
        (("b", "/", 0, 10), InvalidArgument, "shared memory region 'b' has a key without a name: '/'"),
        (("b", "", 0, 10), InvalidArgument, "shared memory region 'b' has a key without a name: ''"),
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


def test_nobody_lends_memory_unless_allowed(key: str) -> None:
    regions = SharedMemoryRegistry()
    for call in (
        lambda: regions.register("a", key, 0, SIZE),
        regions.unregister,
        lambda: regions.register_cuda("a"),
        regions.unregister_cuda,
    ):
        with pytest.raises(Unsupported, match="Client shared memory is disabled"):
            call()
    assert regions.status() == []
    regions.status_cuda()


def test_memory_of_gpus_is_not_served(regions: SharedMemoryRegistry) -> None:
    with pytest.raises(InvalidArgument, match="failed to register CUDA shared memory region: 'g', GPUs not supported"):
        regions.register_cuda("g")
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'g'"):
        regions.status_cuda("g")
    regions.unregister_cuda()
