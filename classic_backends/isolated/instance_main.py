"""The process of one isolated instance: loads its runtime, executes what it is told, and ends with the server.

Knows nothing of queues and requests.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from ...core.errors import Internal
from ...core.model import ConfigDocument, ModelConfig
from ...processes.child_process import die_with_parent, ignore_stop_signals, set_process_name
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeLoader
from .instance_messages import (
    AbandonOutputs,
    ConfigCompleted,
    ExecuteBatch,
    FromInstance,
    InstanceLoaded,
    InstanceLogRecord,
    OutputsEnded,
    OutputsMade,
    ToInstance,
    failure_message,
)
from .tensor_arena import TensorArena

OPENMP_SPINS = 5000
"""Rounds for which a thread of OpenMP waits before it sleeps, some 0.1 ms: with fewer, a small model alone gets slower,
with many more two models at once do."""

NICENESS = 5
"""A third of the weight of an engine core, where both want the same core."""


class LoaderRef(NamedTuple):
    """Where a backend's `RuntimeLoader` is found, by names: of its module, and in it."""

    module: str
    name: str

    def load_reference(self) -> RuntimeLoader:
        return cast(RuntimeLoader, getattr(import_module(self.module), self.name))


class InstanceTask(NamedTuple):
    """What to load, as `RuntimeLoader.load` has it."""

    loader: LoaderRef
    directory: Path
    config: ModelConfig
    placement: InstancePlacement
    parameters: dict[str, str]


class InstanceArenas(NamedTuple):
    """Memory for inputs, which the server fills, and for outputs."""

    inputs: TensorArena
    outputs: TensorArena


class MessageWriter:
    """Says things to the server, from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.Lock()

    def send(self, message: FromInstance) -> None:
        with self._lock:
            self._connection.send_bytes(self._encode(message))


class _InstanceLogHandler(logging.Handler):
    """The server keeps the log."""

    def __init__(self, voice: MessageWriter) -> None:
        super().__init__()
        self._voice = voice

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._voice.send(InstanceLogRecord(record.levelno, record.name, self.format(record)))


def instance_main(ours: Connection, regions: InstanceArenas, task: InstanceTask) -> None:
    """Load, and execute until the server says no more."""
    voice = _set_up_process(ours)
    try:
        runtime = task.loader.load_reference().load(task.directory, task.config, task.placement, task.parameters)
    except BaseException as error:
        return voice.send(failure_message(error))
    voice.send(InstanceLoaded(runtime.traits.ragged))
    with suppress(EOFError, OSError):
        _InstanceLoop(runtime, regions, ours, voice, task.config.decoupled).serve()
    return runtime.close()


def completion_main(
    ours: Connection, origin: LoaderRef, directory: Path, document: ConfigDocument, parameters: dict[str, str]
) -> None:
    """Complete a config."""
    voice = _set_up_process(ours)
    try:
        whole = origin.load_reference().complete(directory, document, parameters)
    except BaseException as error:
        return voice.send(failure_message(error))
    return voice.send(ConfigCompleted(json.dumps(whole).encode()))


class _InstanceLoop:
    """`decoupled`: its runtime makes any number of outputs for a batch."""

    def __init__(
        self, runtime: Runtime, regions: InstanceArenas, ours: Connection, voice: MessageWriter, decoupled: bool
    ) -> None:
        self._runtime = runtime
        self._regions = regions
        self._connection = ours
        self._voice = voice
        self._decoupled = decoupled
        self._decode: Callable[[bytes], ToInstance] = msgspec.msgpack.Decoder(ToInstance).decode

    def serve(self) -> None:
        """Raises `EOFError` when the server says no more."""
        while True:
            order = self._hear()
            assert isinstance(order, ExecuteBatch), order
            self._obey(order)

    def _hear(self) -> ToInstance:
        return self._decode(self._connection.recv_bytes())

    def _obey(self, order: ExecuteBatch) -> None:
        answers = self._answers(order)
        for answer in answers:
            self._voice.send(answer)
            if isinstance(answer, OutputsMade) and not answer.last and isinstance(self._hear(), AbandonOutputs):
                answers.close()
                self._voice.send(OutputsEnded())

    def _answers(self, order: ExecuteBatch) -> Generator[FromInstance, None, None]:
        try:
            inputs = self._regions.inputs.unpack(order.inputs, copy=False)
            made = self._runtime.execute(inputs, order.wanted)
            yield from self._streamed(made) if self._decoupled else [self._made(_single(list(made)), True)]
        except GeneratorExit:
            raise
        except BaseException as error:
            # Whatever a model does, even to exit, the instance is used again.
            yield failure_message(error)

    def _streamed(self, made: Iterator[Arrays]) -> Iterator[FromInstance]:
        try:
            for outputs in made:
                yield self._made(outputs, False)
            yield OutputsEnded()
        finally:
            _close_quietly(made)

    def _made(self, outputs: Arrays, last: bool) -> OutputsMade:
        return OutputsMade(self._regions.outputs.pack(outputs), last)


def _single(made: list[Arrays]) -> Arrays:
    if len(made) != 1:
        raise Internal(f"expected a single response, got {len(made)}")
    return made[0]


def _close_quietly(made: Any) -> None:
    """What is abandoned may say nothing any more."""
    if hasattr(made, "close"):
        with suppress(Exception):
            made.close()


def _yield_cores() -> None:
    """Threads of OpenMP that wait spin, by its own choice, for milliseconds: on cores that other models need, where two
    at the same time would each take several times as long as alone. And the threads of a language model stand still
    together when one of them has no core."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)
    os.nice(NICENESS)


def _set_up_process(ours: Connection) -> MessageWriter:
    """Be the server's, and nobody else's; before the model's libraries are imported."""
    _yield_cores()
    ignore_stop_signals()
    set_process_name("charonia-model")
    die_with_parent()
    voice = MessageWriter(ours)
    logging.basicConfig(level=logging.INFO, handlers=[_InstanceLogHandler(voice)], format="%(message)s")
    return voice
