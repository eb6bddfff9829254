"""The package in a model's process: memory, DLPack, and that it needs neither this server nor a new Python."""

import ast
import gc
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray
from torch.utils import dlpack as torch_dlpack

import charonia.classic_backends.python_stub as package
from charonia.classic_backends.python_stub import dlpack
from charonia.classic_backends.python_stub import tensor as api
from charonia.classic_backends.python_stub.connection import TritonModelException
from charonia.classic_backends.python_stub.messages import FrameReader, TensorMessage, frame
from charonia.classic_backends.python_stub.tensor_memory import NUMPY_TYPES, BlockReader, BlockWriter
from charonia.processes.child_process import anonymous_file
from charonia.processes.cuda_memory import CudaDriver, CudaMemory

from ...gpu_stand_in import gpu_allocation

FILES = sorted(Path(package.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_module_is_python_3_8_on_the_standard_library_and_numpy(file: Path) -> None:
    tree = ast.parse(file.read_text(), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    # Only a tensor of a GPU needs torch: then it is what the tensor came from, or stays a capsule.
    assert imported - {"numpy"} - ({"torch"} if file.stem == "dlpack" else set()) <= sys.stdlib_module_names
    climbs = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert max(climbs, default=0) <= 1
    # An annotation may be written as a newer Python has it, where none looks at it.
    assert file.stem == "__init__" or "from __future__ import annotations" in file.read_text()


def test_it_is_imported_without_the_server(tmp_path: Path) -> None:
    (tmp_path / "charonia_stub").symlink_to(FILES[0].parent)
    program = (
        "import sys, charonia_stub.main; print([m for m in sys.modules if m.split('.')[0] in ('charonia', 'msgspec')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Memory


@pytest.fixture
def memory() -> Iterator[tuple[BlockWriter, BlockReader]]:
    file = anonymous_file("test")
    yield BlockWriter(file, 1 << 12, 1 << 12), BlockReader(file)
    os.close(file)


NUMBERS = [name for name in NUMPY_TYPES if name not in ("BYTES", "BF16")]


def tensors() -> st.SearchStrategy[tuple[str, NDArray[Any]]]:
    shapes = arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4)
    of_numbers = st.sampled_from(NUMBERS).flatmap(
        lambda name: st.tuples(st.just(name), arrays_of.arrays(NUMPY_TYPES[name], shapes))
    )
    of_bytes = shapes.flatmap(
        lambda shape: arrays_of.arrays(object, shape, elements=st.binary(max_size=9), fill=st.nothing())
    )
    return of_numbers | st.tuples(st.just("BYTES"), of_bytes)


@given(st.lists(tensors(), min_size=1, max_size=6))
def test_tensors_arrive_as_they_were_written(written: list[tuple[str, NDArray[Any]]]) -> None:
    file = anonymous_file("test")
    writer, reader = BlockWriter(file, 64, 64), BlockReader(file)
    sent = [writer.write(str(number), *each) for number, each in enumerate(written)]
    for message, (_, array) in zip(sent, written, strict=True):
        read = reader.read(message)
        assert read.dtype == array.dtype
        assert read.shape == array.shape
        np.testing.assert_array_equal(read, array)
    writer.check_integrity()
    del read
    gc.collect()
    writer.release(reader.take_released())
    assert writer.used_bytes == 0
    writer.check_integrity()
    os.close(file)


class _TakenMeanwhile(deque[int]):
    """Seems to have an element, which another thread takes before one can."""

    def __bool__(self) -> bool:
        return True


def test_blocks_may_be_taken_by_several_threads(memory: tuple[BlockWriter, BlockReader]) -> None:
    _, reader = memory
    reader._released = _TakenMeanwhile([3])
    assert reader.take_released() == [3]
    assert reader.take_released() == []


def test_a_block_is_released_with_the_last_array_over_it(memory: tuple[BlockWriter, BlockReader]) -> None:
    writer, reader = memory
    array = reader.read(writer.write("x", "FP32", np.arange(8, dtype=np.float32)))
    part = array[2:][::2]
    del array
    gc.collect()
    assert reader.take_released() == []
    assert part.tolist() == [2, 4, 6]
    del part
    gc.collect()
    assert reader.take_released() == [0]


def test_arrays_over_memory_that_has_grown_stay(memory: tuple[BlockWriter, BlockReader]) -> None:
    writer, reader = memory
    small = reader.read(writer.write("x", "INT64", np.arange(4)))
    large = reader.read(writer.write("y", "UINT8", np.full(1 << 16, 7, np.uint8)))
    assert (small.tolist(), int(large.sum())) == ([0, 1, 2, 3], 7 << 16)


def test_memory_that_was_closed_is_left_alone(memory: tuple[BlockWriter, BlockReader]) -> None:
    writer, reader = memory
    array = reader.read(writer.write("x", "UINT8", np.full(1 << 16, 7, np.uint8)))
    writer.release([0])
    writer.close()
    writer.trim()  # its descriptor may be another file's
    assert int(array.sum()) == 7 << 16


def test_memory_that_cannot_grow_is_told_as_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = anonymous_file("test")
    with pytest.raises(MemoryError, match="Failed to increase the shared memory pool size to 64 bytes: No space left"):
        BlockWriter(file, 64, 64)
    os.close(file)


def test_bytes_tensors_hold_nothing_else(memory: tuple[BlockWriter, BlockReader]) -> None:
    with pytest.raises(TypeError, match="tensor 'x' must hold bytes, not str"):
        memory[0].write("x", "BYTES", np.array(["a"], object))


class Blocks(RuleBasedStateMachine):
    """Blocks that come and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.file = anonymous_file("test")
        self.writer = BlockWriter(self.file, 256, 256)
        self.reader = BlockReader(self.file)
        self.held: list[tuple[TensorMessage, int]] = []

    @rule(size=st.integers(0, 600))
    def write(self, size: int) -> None:
        mark = len(self.held) % 251
        self.held.append((self.writer.write("x", "UINT8", np.full(size, mark, np.uint8)), mark))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            message, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.writer.release([message.offset])

    @rule()
    def trim(self) -> None:
        self.writer.trim()
        end = max((message.offset + message.size for message, _ in self.held), default=0)
        assert os.fstat(self.file).st_size == self.writer.size < max(end, 1) + 256 + 64

    @invariant()
    def intact(self) -> None:
        self.writer.check_integrity()
        for reader in (self.reader, BlockReader(self.file)):  # what one has mapped may be longer, or shorter, by now
            assert all((reader.read(message) == mark).all() for message, mark in self.held)

    def teardown(self) -> None:
        os.close(self.file)


TestBlocks = Blocks.TestCase


# Messages


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_frames_are_cut_wherever_the_stream_was(payloads: list[bytes], sizes: list[int]) -> None:
    stream, reader, cut = b"".join(map(frame, payloads)), FrameReader(), list[bytes]()
    position = 0
    while position < len(stream):
        size = sizes[position % len(sizes)]
        cut += reader.feed(stream[position : position + size])
        position += size
    assert cut == payloads


# DLPack


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.uint8, torch.float16, torch.bfloat16])
def test_a_torch_tensor_comes_and_goes_without_a_copy(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype).t()
    imported = dlpack.from_dlpack(tensor)
    array = imported.as_array()
    assert (imported.bfloat16, array.shape, imported.on_gpu) == (dtype is torch.bfloat16, (3, 2), False)
    back = torch_dlpack.from_dlpack(dlpack.to_capsule(array, imported.bfloat16))
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
    assert back.data_ptr() == tensor.data_ptr()


def test_memory_lasts_as_long_as_anybody_reads_it() -> None:
    array = dlpack.from_dlpack(torch.arange(1000)).as_array()
    gc.collect()
    assert array.sum() == 499500
    tensor = torch_dlpack.from_dlpack(dlpack.to_capsule(np.arange(1000), False))
    gc.collect()
    assert int(tensor.sum()) == 499500
    del tensor, array
    gc.collect()
    assert not dlpack._exported
    dlpack.to_capsule(np.arange(3), False)  # which nobody takes
    gc.collect()
    assert not dlpack._exported


def test_a_capsule_is_used_once_and_other_things_are_refused() -> None:
    capsule = torch_dlpack.to_dlpack(torch.ones(2))
    dlpack.from_dlpack(capsule)
    for wrong in (capsule, object()):
        with pytest.raises(ValueError, match="a DLPack capsule that was not used before"):
            dlpack.from_dlpack(wrong)
    with pytest.raises(ValueError, match="numpy has no type"):
        dlpack.from_dlpack(torch.ones(2, dtype=torch.complex64))


# Tensors of GPUs, of the stand-in's


class GpuArray:
    """A tensor of a library that makes nothing but capsules. Steps are in elements; `offset` in bytes."""

    def __init__(self, memory: CudaMemory, dtype: Any, shape: tuple[int, ...], steps: Any, offset: int = 0) -> None:
        self._memory, self._code, self._shape, self._steps, self._offset = memory, dtype, shape, steps, offset

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)

    def __dlpack__(self) -> Any:
        tensor = dlpack._Tensor()
        tensor.data, tensor.byte_offset = self._memory._pointer.value, self._offset
        tensor.device, tensor.dtype = dlpack._Device(2, 1), dlpack._DataType(*self._code, 1)
        return dlpack._export(tensor, self._shape, self._steps, self)


FLOAT, BFLOAT = (2, 32), (4, 16)
FILLED = np.arange(24, dtype=np.float32)


@pytest.fixture
def gpu_memory(cuda_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaMemory]:
    """On the second GPU, with `FILLED` in it. The library is one of its own: a model's process keeps its context."""
    library = str(shutil.copy(cuda_library, tmp_path))
    monkeypatch.setattr(dlpack, "_CUDA_LIBRARY", library)
    for cached in (dlpack._cuda, dlpack._primary_context):
        cached.cache_clear()
    with gpu_allocation(FILLED.nbytes) as allocation:
        allocation.write(FILLED.tobytes())
        yield CudaMemory(allocation.handle, 1, CudaDriver(library))
    for cached in (dlpack._cuda, dlpack._primary_context):
        cached.cache_clear()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the server reads of a tensor that a model sends."""
    file = anonymous_file("sent")
    writer, reader = BlockWriter(file), BlockReader(file)
    connection = SimpleNamespace(writer=writer, require_own_process=lambda: None)
    monkeypatch.setattr(api, "server", lambda: connection)
    yield lambda tensor: reader.read(api.write_tensors([tensor])[0])
    os.close(file)


@pytest.mark.parametrize(
    ("code", "shape", "steps", "offset", "expected"),
    [
        (FLOAT, (4, 6), (6, 1), 0, FILLED.reshape(4, 6)),
        (FLOAT, (2, 3), (1, 2), 8, FILLED[2:8].reshape(3, 2).T),
        (FLOAT, (4, 2), (6, 3), 4, FILLED.reshape(4, 6)[:, 1:5:3]),
        (FLOAT, (), (), 92, FILLED[23]),
        (FLOAT, (3, 0), (1, 1), 0, np.empty((3, 0))),
        (BFLOAT, (2,), (1,), 4, FILLED[1:2].view(np.uint16)),
    ],
)
def test_a_tensor_of_a_gpu_stays_there_until_it_is_sent(
    gpu_memory: CudaMemory, sent: Any, code: Any, shape: Any, steps: Any, offset: int, expected: Any
) -> None:
    array = GpuArray(gpu_memory, code, shape, steps, offset)
    tensor = api.Tensor.from_dlpack("T", array)
    assert (tensor.is_cpu(), tensor.shape(), tensor.__dlpack_device__()) == (False, list(shape), (2, 1))
    with pytest.raises(TritonModelException, match="Tensor is stored in GPU and cannot be converted to NumPy"):
        tensor.as_numpy()
    again = api.Tensor.from_dlpack("T", tensor.to_dlpack())
    for each in (tensor, again, api.Tensor.from_dlpack("T", array.__dlpack__()), api.Tensor.from_dlpack("T", again)):
        read = sent(each)
        assert read.dtype == expected.dtype or 0 in shape
        np.testing.assert_array_equal(read, expected)


def test_a_tensor_of_a_gpu_may_be_written_to_until_it_is_sent(gpu_memory: CudaMemory, sent: Any) -> None:
    tensor = api.Tensor.from_dlpack("T", GpuArray(gpu_memory, FLOAT, (2,), (1,)))
    gpu_memory.write(0, memoryview(np.array([7, 8], np.float32).tobytes()))
    assert sent(tensor).tolist() == [7, 8]
    del tensor
    gc.collect()
    assert not dlpack._exported


def test_a_tensor_of_a_gpu_that_cannot_be_copied(
    gpu_memory: CudaMemory, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = api.Tensor.from_dlpack("T", GpuArray(gpu_memory, FLOAT, (25,), (1,)))
    with pytest.raises(TritonModelException, match="a tensor of a GPU cannot be copied: CUDA's error 1"):
        sent(beyond)
    monkeypatch.setattr(dlpack, "_CUDA_LIBRARY", "libcuda_nowhere.so.1")
    dlpack._cuda.cache_clear()
    dlpack._primary_context.cache_clear()
    with pytest.raises(TritonModelException, match="a tensor of a GPU cannot be copied: libcuda_nowhere"):
        sent(beyond)
