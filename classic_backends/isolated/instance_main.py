"""The process of one isolated instance: loads its runtime, and executes the batches that the server sends, one at a
time.

A batch is one msgpack message each way, beside tensors in shared memory. The process ends with the connection. Knows
nothing of queues and requests.
"""

import logging
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from numpy.typing import NDArray

from ...core.errors import CharoniaError, SentError
from ...core.model import ModelConfig, RawConfig
from ...core.optional_packages import missing_llm_package
from ...core.runtime import Arrays, InstancePlacement, Runtime, RuntimeLoader, only_response
from ...processes.host import NICENESS, limit_openmp_spins, lower_process_priority, release_free_memory
from ...processes.log_forwarding import LogForwarder, LogRecordMessage, MessageWriter
from ..python_stub.messages import TensorMessage
from ..python_stub.tensor_memory import V2_NAMES, BlockReader, BlockWriter

_MEMORY_BYTES = 1 << 16
"""The memory of each direction at the start."""

T = TypeVar("T")


class ExecuteBatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Execute a batch of inputs; `wanted` names the outputs that are read."""

    inputs: list[TensorMessage]
    wanted: tuple[str, ...]


class ReturnMemory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give free memory back to the system."""


class InstanceLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The instance can execute; `ragged` as in `RuntimeTraits`."""

    ragged: bool


class OutputsMade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The outputs of a batch."""

    outputs: list[TensorMessage]


class ConfigCompleted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A model's whole config."""

    config: dict[str, Any]


class InstanceFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A load, a batch or a completion failed."""

    error: SentError
    report: str = ""
    """The traceback, for the log, of the model's own code; empty for an error that is meant for clients."""


ToInstance: TypeAlias = ExecuteBatch | ReturnMemory
FromInstance: TypeAlias = InstanceLoaded | OutputsMade | ConfigCompleted | InstanceFailed | LogRecordMessage


def failure_message(error: BaseException) -> InstanceFailed:
    report = "" if isinstance(error, CharoniaError) else "".join(traceback.format_exception(error))
    return InstanceFailed(SentError.of(error), report)


class TensorConnection(Generic[T]):
    """One end of the connection between the server and an isolated instance, with shared memory for each direction's
    tensors. `descriptors`: of the memory to read and to write, which stay the caller's. `received`: the type of
    messages that come. Any thread may send; each message also returns the blocks that its sender no longer reads."""

    def __init__(self, connection: Connection, descriptors: tuple[int, int], received: Any) -> None:
        self._connection = connection
        self._reader = BlockReader(descriptors[0])
        self._writer = BlockWriter(descriptors[1], _MEMORY_BYTES)
        self.trim = self._writer.trim
        """Gives back to the system what is free of the memory for the other end; from any thread."""
        self.send = MessageWriter[Any](connection, self._encode).send
        """Raises `OSError` when nothing reads the other end."""
        self._decode = msgspec.msgpack.Decoder(tuple[received, list[int]]).decode

    def receive(self) -> T:
        """Raises `EOFError` or `OSError` when the other end is closed."""
        message: T
        message, released = self._decode(self._connection.recv_bytes())
        self._writer.release(released)
        return message

    def close(self) -> None:
        """Close the connection and the memory, which stays mapped for arrays over it."""
        self._connection.close()
        self._reader.close()
        self._writer.close()

    def write(self, arrays: Arrays) -> list[TensorMessage]:
        """Write arrays for the other end.

        Raises:
            MemoryError: they find no memory.
            TypeError: the protocol lacks an array's type, or an element of an array of objects is not `bytes`.
        """
        for name, array in arrays.items():
            if array.dtype not in V2_NAMES:
                raise TypeError(f"tensor '{name}' has the type {array.dtype}, which the protocol lacks")
        return self._writer.write_all((name, V2_NAMES[array.dtype], array) for name, array in arrays.items())

    def read(self, tensors: list[TensorMessage]) -> dict[str, NDArray[Any]]:
        """The arrays that the other end has written. Numbers are not copied: a block is free with its array."""
        return {tensor.name: self._reader.read(tensor) for tensor in tensors}

    def _encode(self, message: Any) -> bytes:
        return msgspec.msgpack.encode((message, self._reader.take_released()))


OPENMP_SPINS = 5000
"""Rounds that a thread of OpenMP spins before it sleeps, some 0.1 ms: with fewer a small model gets slower, and with
many more two models at once do."""


class InstanceTask(NamedTuple):
    """The model that an instance loads: its loader, see `resolve_loader`, and the arguments of `RuntimeLoader.load`."""

    loader: str
    directory: Path
    config: ModelConfig
    placement: InstancePlacement
    parameters: dict[str, str]
    niceness: int = NICENESS


def resolve_loader(name: str) -> RuntimeLoader:
    """A backend's own loader by its module and name, such as `package.module:LOADER`. Raises `Unsupported` if packages
    of an extra are missing."""
    try:
        return cast(RuntimeLoader, resolve_name(name))
    except ModuleNotFoundError as error:
        if (refusal := missing_llm_package(error)) is not None:
            raise refusal from None
        raise


def instance_main(connection: Connection, descriptors: tuple[int, int], task: InstanceTask) -> None:
    """Load a runtime, and execute until the server closes the connection."""
    server = _connect(connection, descriptors, task.niceness)
    try:
        loader = resolve_loader(task.loader)
        runtime = loader.load(task.directory, task.config, task.placement, task.parameters)
    except BaseException as error:
        return server.send(failure_message(error))
    server.send(InstanceLoaded(runtime.traits.ragged))
    with suppress(EOFError, OSError):
        while True:
            message = server.receive()
            if isinstance(message, ReturnMemory):
                server.trim()
                release_free_memory()
            else:
                server.send(_execute(runtime, server, message))
    return runtime.close()


def _execute(runtime: Runtime, server: TensorConnection[ToInstance], batch: ExecuteBatch) -> FromInstance:
    try:
        # No variable holds the inputs, so their blocks return with the outputs.
        return OutputsMade(server.write(only_response(runtime.execute(_read_inputs(server, batch), batch.wanted))))
    except BaseException as error:
        # Whatever a model does, even exit, the instance is used again.
        return failure_message(error)


def _read_inputs(server: TensorConnection[ToInstance], batch: ExecuteBatch) -> Arrays:
    inputs = server.read(batch.inputs)
    for array in inputs.values():
        array.flags.writeable = False
    return inputs


def completion_main(
    connection: Connection,
    descriptors: tuple[int, int],
    loader: str,
    directory: Path,
    config: RawConfig,
    parameters: dict[str, str],
) -> None:
    """Complete a model's config, send it, and end."""
    server = _connect(connection, descriptors, NICENESS)
    try:
        completed = resolve_loader(loader).complete(directory, config, parameters)
    except BaseException as error:
        return server.send(failure_message(error))
    return server.send(ConfigCompleted({**completed}))


def _connect(connection: Connection, descriptors: tuple[int, int], niceness: int) -> TensorConnection[ToInstance]:
    """Lower the priority, and forward the log to the server. Called before the model's libraries are imported."""
    # Otherwise two models at once would each take several times as long, and all threads of a language model would wait
    # for one without a core.
    limit_openmp_spins(OPENMP_SPINS)
    lower_process_priority(niceness)
    server = TensorConnection[ToInstance](connection, descriptors, ToInstance)
    LogForwarder(server.send).install(logging.INFO)
    return server
