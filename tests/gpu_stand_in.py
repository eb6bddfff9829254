"""GPUs for machines without: a driver library (fake_cuda.c) whose devices' memory is shared memory of the host."""

import base64
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import posix_ipc
import pytest

_numbers = count()


def build_driver(directory: Path) -> Path:
    """Compile the library into a directory, under the name by which the driver's is known."""
    file = directory / "libcuda.so.1"
    source = Path(__file__).parent / "fake_cuda.c"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(file), str(source), "-lpthread", "-lrt"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return file


class GpuAllocation:
    """A client's memory on a GPU. `handle`: what CUDA makes of it for other processes; `bytes`: what is in it."""

    def __init__(self, key: str, size: int) -> None:
        self.key, self.size = key, size
        self.handle = key.encode().ljust(64, b"\0")
        self._file = Path(f"/dev/shm{key}")

    @property
    def raw_handle(self) -> bytes:
        """The handle as `tritonclient.utils.cuda_shared_memory.get_raw_handle` has it."""
        return base64.b64encode(self.handle)

    @property
    def bytes(self) -> bytes:
        return self._file.read_bytes()

    def write(self, data: bytes, offset: int = 0) -> None:
        with self._file.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def is_open(self, pid: int) -> bool:
        """Whether a process has it open."""
        return self.key in Path(f"/proc/{pid}/maps").read_text()


@contextmanager
def gpu_allocation(size: int) -> Iterator[GpuAllocation]:
    key = f"/charonia_gpu_{os.getpid()}_{next(_numbers)}"
    posix_ipc.SharedMemory(key, posix_ipc.O_CREX, size=size).close_fd()
    yield GpuAllocation(key, size)
    posix_ipc.unlink_shared_memory(key)
