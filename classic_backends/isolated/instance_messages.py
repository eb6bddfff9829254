"""Messages between the server and an isolated instance, and the memory that both map for the tensors of a batch.

One small message goes each way, as msgpack; it says where in a `TensorArena` its tensors lie. One side packs, the other
unpacks, in turns: what was unpacked lasts until the other side packs again. The memory grows to the largest batch, and
stays.
"""

import traceback
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import CharoniaError, ErrorCode
from ...processes.log_forwarding import LogRecordMessage
from ...processes.shared_arena import SharedArena
from ..runtime import Arrays

_ALIGNMENT = 64
_LENGTH = np.dtype("<u4")


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """The place of one array: `size` bytes from `offset` on. `dtype` is numpy's name. An array of objects, which are
    `bytes`, lies there as all lengths, little-endian uint32, and then all contents."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class ExecuteBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Execute a batch of inputs; `wanted` names the outputs that are read."""

    inputs: tuple[PackedTensor, ...]
    wanted: tuple[str, ...]


class OutputsRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs are read: make the next ones or, without `more`, end the batch."""

    more: bool


class InstanceLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The instance can execute; `ragged` as in `RuntimeTraits`."""

    ragged: bool


class OutputsMade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs of a batch; unless they are the `last` ones, the instance waits for an `OutputsRead`."""

    outputs: tuple[PackedTensor, ...]
    last: bool


class OutputsEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The batch has no more outputs."""


class ConfigCompleted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A model's whole config, as JSON."""

    config: bytes


class InstanceFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A load, a batch or a completion failed. `report`: the traceback, for the log, where the model's own code failed;
    empty for an error that is meant for clients."""

    message: str
    code: str
    field: str | None = None
    report: str = ""


ToInstance: TypeAlias = ExecuteBatch | OutputsRead
FromInstance: TypeAlias = (
    InstanceLoaded | OutputsMade | OutputsEnded | ConfigCompleted | InstanceFailed | LogRecordMessage
)


def failure_message(error: BaseException) -> InstanceFailed:
    if isinstance(error, CharoniaError):
        return InstanceFailed(error.message, error.code.value, error.field)
    message, report = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return InstanceFailed(message, ErrorCode.UNKNOWN.value, None, report)


class TensorArena(SharedArena):
    """Tensors on their way between the server and an isolated instance, in one direction."""

    def pack(self, arrays: Arrays) -> tuple[PackedTensor, ...]:
        """Write the arrays over the former ones. Raises `OSError` if there is no memory for them, and `TypeError` if an
        element of an array of objects is not `bytes`."""
        packed, sources, end = [], [], 0
        for name, array in arrays.items():
            source = _as_bytes(name, array) if array.dtype.hasobject else array
            packed.append(PackedTensor(name, array.dtype.str, array.shape, end, source.nbytes))
            sources.append(source)
            end += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.require(end)
        for each, source in zip(packed, sources, strict=True):
            np.ndarray(source.shape, source.dtype, self.memory, each.offset)[...] = source
        return tuple(packed)

    def unpack(self, packed: Sequence[PackedTensor], copy: bool) -> dict[str, NDArray[Any]]:
        """The arrays that the other side packed; without `copy` numbers are read-only views."""
        self.follow(max((each.offset + each.size for each in packed), default=0))
        return {each.name: self._unpack_one(each, copy) for each in packed}

    def _unpack_one(self, packed: PackedTensor, copy: bool) -> NDArray[Any]:
        dtype = np.dtype(packed.dtype)
        if not dtype.hasobject:
            view: NDArray[Any] = np.ndarray(packed.shape, dtype, self.memory, packed.offset)
            view.flags.writeable = False
            return view.copy() if copy else view
        whole = self.memory[packed.offset : packed.offset + packed.size]
        objects = np.empty(packed.shape, object)
        start = objects.size * _LENGTH.itemsize
        ends = (start + np.cumsum(np.frombuffer(whole, _LENGTH, objects.size), dtype=np.int64)).tolist()
        objects.ravel()[:] = [whole[begin:end] for begin, end in zip([start, *ends], ends, strict=False)]
        return objects


def _as_bytes(name: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    """An array of `bytes` as it is packed: the lengths, then the contents."""
    items = array.ravel().tolist()
    if not all(isinstance(item, bytes) for item in items):
        raise TypeError(f"tensor '{name}' must hold bytes, and nothing else")
    return np.frombuffer(np.array([len(item) for item in items], _LENGTH).tobytes() + b"".join(items), np.uint8)
