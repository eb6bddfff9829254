"""Tensors in messages between processes: small ones inline, large numbers in memory that both have mapped."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.tensor import NUMPY_TYPES, Tensor
from ..processes import gc_tuning
from ..processes.shared_arena import SharedArena, SharedArenaView

_DTYPES = {name: np.dtype(dtype) for name, dtype in NUMPY_TYPES.items() if name != "BYTES"}
_BYTES = np.dtype(np.uint8)

PLACED_BYTES = 1 << 16
"""Bytes from which on a tensor is copied into shared memory: through the socket it would be copied four times."""

ARENA_BYTES = 64 << 20
"""Shared memory of each direction of a link; what finds no room goes through the socket."""


class SentTensor(msgspec.Struct, array_like=True, frozen=True):
    """A `Tensor`: its elements as `data`, those of BYTES as `strings`, or as the bytes at `place`, an offset and a size
    in the sender's arena."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | None
    strings: list[bytes] = []
    place: tuple[int, int] | None = None

    @classmethod
    def of(cls, tensor: Tensor, arena: SharedArena | None = None) -> "SentTensor":
        """`arena`: where a large one may be placed."""
        data = tensor.data
        if tensor.datatype == "BYTES" and data.dtype.hasobject:
            return cls(tensor.name, tensor.datatype, tensor.shape, None, data.ravel().tolist())
        if not data.flags.c_contiguous:
            data = np.ascontiguousarray(data)
        if arena is not None and data.nbytes >= PLACED_BYTES:
            offset = arena.place(data.reshape(-1).view(np.uint8).data)
            if offset is not None:
                return cls(tensor.name, tensor.datatype, tensor.shape, None, [], (offset, data.nbytes))
        return cls(tensor.name, tensor.datatype, tensor.shape, data.data)

    def tensor(self) -> Tensor:
        """The tensor of a message that is not placed; numbers are a view of the message."""
        if self.data is None:
            strings: NDArray[Any] = np.empty(len(self.strings), np.object_)
            strings[:] = self.strings
            return Tensor(self.name, self.datatype, self.shape, strings)
        # The data of an unknown datatype stay bytes: no model has such a tensor.
        numbers = np.frombuffer(self.data, _DTYPES.get(self.datatype, _BYTES))
        if numbers.flags.writeable:
            numbers.flags.writeable = False
        return Tensor(self.name, self.datatype, self.shape, numbers)


class TensorExchange:
    """The shared memory of one end of a link: tensors are placed in `mine` and read from `theirs`, which are files.

    A block that came is let go of when the last array over it is gone, in whatever thread. `on_unread` is called then,
    to have `released` sent before long.
    """

    def __init__(self, mine: int, theirs: int, on_unread: Callable[[], None]) -> None:
        self.arena = SharedArena(mine)
        gc_tuning.memory_releases.add(self.arena.trim)
        self._view = SharedArenaView(theirs)
        self._unread: deque[int] = deque()
        self._on_unread = on_unread

    def message(self, tensor: Tensor) -> SentTensor:
        if tensor.data.nbytes > gc_tuning.LARGE_REQUEST_BYTES:
            gc_tuning.release_memory_soon()
        return SentTensor.of(tensor, self.arena)

    def tensor(self, message: SentTensor) -> Tensor:
        if message.place is None:
            return message.tensor()
        data = self._view.read(*message.place)
        tensor = SentTensor(message.name, message.datatype, message.shape, data).tensor()
        # All views of it have this array as their base.
        weakref.finalize(tensor.data, self._let_go, message.place[0]).atexit = False
        return tensor

    def discard(self, messages: Iterable[SentTensor]) -> None:
        """Let go of tensors that nobody reads."""
        for message in messages:
            if message.place is not None:
                self._let_go(message.place[0])

    def take_back(self, messages: Iterable[SentTensor]) -> None:
        """Free what was placed for messages that were not sent."""
        for message in messages:
            if message.place is not None:
                self.arena.release(message.place[0])

    def released(self) -> list[int]:
        """The blocks that were let go of since the last call; the other end may use them again."""
        offsets = []
        while self._unread:
            offsets.append(self._unread.popleft())
        return offsets

    def on_released(self, offsets: Iterable[int]) -> None:
        """Free these blocks: the other end let go of them."""
        for offset in offsets:
            self.arena.release(offset)

    def close(self) -> None:
        """Give the memory back that nobody reads: the other end is gone."""
        gc_tuning.memory_releases.discard(self.arena.trim)
        self.arena.close()
        self._view.close()

    def _let_go(self, offset: int) -> None:
        self._unread.append(offset)
        self._on_unread()
