"""Messages between the server and an isolated instance, and the connection that carries them: one small message goes
each way for a batch, as msgpack, beside the tensors, which lie in memory that both map.
"""

import traceback
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from numpy.typing import NDArray

from ...core.errors import CharoniaError, ErrorCode
from ...processes.log_forwarding import LogRecordMessage, MessageWriter
from ..python_stub.messages import TensorMessage
from ..python_stub.tensor_memory import V2_NAMES, BlockReader, BlockWriter
from ..runtime import Arrays

_MEMORY_BYTES = 1 << 16
"""The memory of each direction at the start."""

T = TypeVar("T")


class ExecuteBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Execute a batch of inputs; `wanted` names the outputs that are read."""

    inputs: list[TensorMessage]
    wanted: tuple[str, ...]


class OutputsRead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs are read: make the next ones or, without `more`, end the batch."""

    more: bool


class InstanceLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The instance can execute; `ragged` as in `RuntimeTraits`."""

    ragged: bool


class OutputsMade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Outputs of a batch; unless they are the `last` ones, the instance waits for an `OutputsRead`."""

    outputs: list[TensorMessage]
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


class TensorConnection(Generic[T]):
    """One end of the connection between the server and an isolated instance, and of the memory for the tensors of each
    direction, whose `descriptors` stay the caller's: that to read from, that to write to. Receives messages of type
    `received`; any thread may send. With each message travel the blocks that the sender has done with."""

    def __init__(self, connection: Connection, descriptors: tuple[int, int], received: Any) -> None:
        self._connection = connection
        self._reader, self._writer = BlockReader(descriptors[0]), BlockWriter(descriptors[1], _MEMORY_BYTES)
        self._messages = MessageWriter[Any](connection, self._encode)
        self._decode = msgspec.msgpack.Decoder(tuple[received, list[int]]).decode

    def send(self, message: Any) -> None:
        """Raises `OSError` when nothing reads the other end."""
        self._messages.send(message)

    def receive(self) -> T:
        """Raises `EOFError` or `OSError` when the other end is closed."""
        message: T
        message, released = self._decode(self._connection.recv_bytes())
        self._writer.release(released)
        return message

    def close(self) -> None:
        """Let go of the connection, and of the memory, which stays for the arrays over it."""
        self._connection.close()
        self._reader.close()
        self._writer.close()

    def write(self, arrays: Arrays) -> list[TensorMessage]:
        """Write arrays for the other end.

        Raises:
            MemoryError: there is no memory for them.
            TypeError: the protocol lacks an array's type, or an element of an array of objects is not `bytes`.
        """
        for name, array in arrays.items():
            if array.dtype not in V2_NAMES:
                raise TypeError(f"tensor '{name}' has the type {array.dtype}, which the protocol lacks")
        return self._writer.write_all((name, V2_NAMES[array.dtype], array) for name, array in arrays.items())

    def read(self, tensors: list[TensorMessage]) -> dict[str, NDArray[Any]]:
        """The arrays that the other end has written. Numbers are not copied: a block is free when its array is gone."""
        return {each.name: self._reader.read(each) for each in tensors}

    def _encode(self, message: Any) -> bytes:
        return msgspec.msgpack.encode((message, self._reader.take_released()))
