"""The process of one isolated instance: loads its runtime, executes the batches that the server sends, one at a time.
Here are also the messages and the connection that carries them: one small message goes each way for a batch, as
msgpack, beside the tensors, which lie in memory that both map.

The process ends when the server closes the connection, or ends itself. Knows nothing of queues and requests.
"""

import json
import logging
import os
import traceback
from collections.abc import Generator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from numpy.typing import NDArray

from ...core.errors import CharoniaError, ErrorCode
from ...core.model import ModelConfig, RawConfig
from ...processes.log_forwarding import LogForwarder, LogRecordMessage, MessageWriter
from ..python_stub.messages import TensorMessage
from ..python_stub.tensor_memory import V2_NAMES, BlockReader, BlockWriter
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeLoader, only_response

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


ServerEnd: TypeAlias = TensorConnection[ToInstance]

OPENMP_SPINS = 5000
"""Rounds for which a thread of OpenMP waits before it sleeps, some 0.1 ms: with fewer, a small model alone gets slower,
with many more two models at once do."""

NICENESS = 5
"""A third of the weight of an engine core, where both want the same core."""


class InstanceTask(NamedTuple):
    """The model that an instance loads: its loader, see `resolve_loader`, and the arguments of `RuntimeLoader.load`."""

    loader: str
    directory: Path
    config: ModelConfig
    placement: InstancePlacement
    parameters: dict[str, str]


def resolve_loader(name: str) -> RuntimeLoader:
    """A backend's own loader by its module and its name in it, such as `package.module:LOADER`."""
    return cast(RuntimeLoader, resolve_name(name))


def instance_main(connection: Connection, descriptors: tuple[int, int], task: InstanceTask) -> None:
    """Load a runtime, and execute until the server closes the connection."""
    server = _connect(connection, descriptors)
    try:
        loader = resolve_loader(task.loader)
        runtime = cast(Runtime, loader.load(task.directory, task.config, task.placement, task.parameters))
    except BaseException as error:
        return server.send(failure_message(error))
    server.send(InstanceLoaded(runtime.traits.ragged))
    with suppress(EOFError, OSError):
        while True:
            batch = server.receive()
            assert isinstance(batch, ExecuteBatch), batch
            messages = _execute(runtime, server, batch, task.config.decoupled)
            for message in messages:
                server.send(message)
                if isinstance(message, OutputsMade) and not message.last:
                    read = server.receive()
                    assert isinstance(read, OutputsRead), read
                    if not read.more:
                        messages.close()
                        server.send(OutputsEnded())
    return runtime.close()


def completion_main(
    connection: Connection,
    descriptors: tuple[int, int],
    loader: str,
    directory: Path,
    config: RawConfig,
    parameters: dict[str, str],
) -> None:
    """Complete a model's config, send it, and end."""
    server = _connect(connection, descriptors)
    try:
        completed = resolve_loader(loader).complete(directory, config, parameters)
    except BaseException as error:
        return server.send(failure_message(error))
    return server.send(ConfigCompleted(json.dumps(completed).encode()))


def _execute(
    runtime: Runtime, server: ServerEnd, batch: ExecuteBatch, decoupled: bool
) -> Generator[FromInstance, None, None]:
    """The messages that answer a batch. A `decoupled` runtime makes any number of outputs, any other exactly one.
    Closing the generator closes the runtime's own."""
    try:
        if not decoupled:
            # No name holds the inputs: their blocks travel back with the outputs.
            made = server.write(only_response(runtime.execute(_read_inputs(server, batch), batch.wanted)))
            yield OutputsMade(made, last=True)
            return
        responses = runtime.execute(_read_inputs(server, batch), batch.wanted)
        try:
            for each in responses:
                yield OutputsMade(server.write(each), last=False)
            yield OutputsEnded()
        finally:
            if hasattr(responses, "close"):
                with suppress(Exception):  # what is abandoned has nothing more to say
                    responses.close()
    except GeneratorExit:
        raise
    except BaseException as error:
        # Whatever a model does, even to exit, the instance is used again.
        yield failure_message(error)


def _read_inputs(server: ServerEnd, batch: ExecuteBatch) -> Arrays:
    inputs = server.read(batch.inputs)
    for array in inputs.values():
        array.flags.writeable = False
    return inputs


def _connect(connection: Connection, descriptors: tuple[int, int]) -> ServerEnd:
    """Yield cores to others, and let the server keep the log. Called before the model's libraries are imported. Threads
    of OpenMP that wait spin, by its own choice, for milliseconds: on cores that other models need, where two at the
    same time would each take several times as long as alone. And the threads of a language model stand still together
    when one of them has no core."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)
    os.nice(NICENESS)
    server = ServerEnd(connection, descriptors, ToInstance)
    LogForwarder(server.send).install(logging.INFO)
    return server
