"""Memory of GPUs through the driver's functions, here those of a stand-in; the same on a GPU is tests/gpu."""

import asyncio
import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia.processes.cuda_memory import CudaDriver, CudaError, CudaMemory

from ..gpu_stand_in import GpuAllocation, gpu_allocation
from ..waiting import until

SIZE = 4096


@pytest.fixture
def driver(cuda_library: Path) -> CudaDriver:
    return CudaDriver(str(cuda_library))


@pytest.fixture
def lent() -> Iterator[GpuAllocation]:
    with gpu_allocation(SIZE) as made:
        yield made


def held(cuda_library: Path) -> tuple[int, int]:
    """Open allocations, and contexts."""
    library = ctypes.CDLL(str(cuda_library))
    assert library.fake_depth() == 0
    return library.fake_open(), library.fake_contexts()


async def test_bytes_come_and_go(driver: CudaDriver, cuda_library: Path, lent: GpuAllocation) -> None:
    lent.write(b"abcd", 100)
    memory = CudaMemory(lent.handle, 1, driver)
    assert (memory.size, bytes(memory.read(99, 6))) == (SIZE, b"\0abcd\0")
    memory.write(98, memoryview(b"xyz"))
    assert lent.bytes[97:105] == b"\0xyzbcd\0"
    assert bytes(memory.read(5, 0)) == b""
    memory.write(5, memoryview(b""))
    assert bytes(await asyncio.to_thread(memory.read, 98, 3)) == b"xyz"
    assert held(cuda_library) == (1, 1)
    other = CudaMemory(lent.handle, 0, driver)
    del memory
    await until(lambda: held(cuda_library) == (1, 1))
    del other
    await until(lambda: held(cuda_library) == (0, 0))


async def test_what_the_driver_refuses(driver: CudaDriver, cuda_library: Path, lent: GpuAllocation) -> None:
    for handle, device, text in (
        (b"\1" * 64, 0, "invalid argument"),
        (b"/charonia_no_such".ljust(64, b"\0"), 0, "invalid argument"),
        (lent.handle, 2, "invalid device ordinal"),
        (lent.handle, -1, "invalid device ordinal"),
    ):
        with pytest.raises(CudaError, match=text):
            CudaMemory(handle, device, driver)
    assert held(cuda_library) == (0, 0)
    for copy in (lambda memory: memory.read(SIZE - 1, 2), lambda memory: memory.write(SIZE, memoryview(b"a"))):
        with pytest.raises(CudaError, match="invalid argument"):
            copy(CudaMemory(lent.handle, 0, driver))
    await until(lambda: held(cuda_library) == (0, 0))


async def test_memory_that_cannot_be_closed(
    driver: CudaDriver, cuda_library: Path, lent: GpuAllocation, caplog: pytest.LogCaptureFixture
) -> None:
    memory = CudaMemory(lent.handle, 0, driver)
    with driver.current(memory._context):
        driver.call("cuIpcCloseMemHandle", memory._pointer)
    with caplog.at_level(logging.ERROR):
        del memory
        await until(lambda: "could not be closed: invalid argument" in caplog.text)
    await until(lambda: held(cuda_library) == (0, 0))  # the context is released all the same


def test_machines_without_a_driver(tmp_path: Path, cuda_library: Path) -> None:
    with pytest.raises(CudaError, match=r"there is no driver: .*libcuda_nowhere"):
        CudaDriver("libcuda_nowhere.so.1")
    with pytest.raises(CudaError, match=r"there is no driver: .*cuInit"):
        CudaDriver("libc.so.6")  # one that is too old lacks a function
