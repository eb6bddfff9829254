"""The process of one isolated instance: loads its runtime, executes the batches that the server sends, one at a time.

It ends when the server closes the connection, or ends itself. Knows nothing of queues and requests.
"""

import json
import logging
import os
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, cast

import msgspec

from ...core.errors import Internal
from ...core.model import ModelConfig, RawConfig
from ...processes.log_forwarding import LogForwarder, MessageWriter
from ..runtime import InstancePlacement, Runtime, RuntimeLoader
from .instance_messages import (
    AbandonOutputs,
    ConfigCompleted,
    ExecuteBatch,
    FromInstance,
    InstanceLoaded,
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
    """A backend's `RuntimeLoader` by the name of its module and its name in it, so that a child can import it."""

    module: str
    name: str

    def load_reference(self) -> RuntimeLoader:
        return cast(RuntimeLoader, getattr(import_module(self.module), self.name))


class InstanceTask(NamedTuple):
    """The model that an instance loads: the loader, and the arguments of `RuntimeLoader.load`."""

    loader: LoaderRef
    directory: Path
    config: ModelConfig
    placement: InstancePlacement
    parameters: dict[str, str]


class InstanceArenas(NamedTuple):
    """Shared memory of one instance: the server writes `inputs`, the instance `outputs`."""

    inputs: TensorArena
    outputs: TensorArena


def instance_main(connection: Connection, arenas: InstanceArenas, task: InstanceTask) -> None:
    """Load a runtime, and execute until the server closes the connection."""
    writer = _set_up_process(connection)
    try:
        runtime = task.loader.load_reference().load(task.directory, task.config, task.placement, task.parameters)
    except BaseException as error:
        return writer.send(failure_message(error))
    writer.send(InstanceLoaded(runtime.traits.ragged))
    decode = msgspec.msgpack.Decoder[ToInstance](ToInstance).decode
    with suppress(EOFError, OSError):
        while True:
            batch = decode(connection.recv_bytes())
            assert isinstance(batch, ExecuteBatch), batch
            messages = _execute(runtime, arenas, batch, task.config.decoupled)
            for message in messages:
                writer.send(message)
                more = isinstance(message, OutputsMade) and not message.last
                if more and isinstance(decode(connection.recv_bytes()), AbandonOutputs):
                    messages.close()
                    writer.send(OutputsEnded())
    return runtime.close()


def completion_main(
    connection: Connection, loader: LoaderRef, directory: Path, config: RawConfig, parameters: dict[str, str]
) -> None:
    """Complete a model's config, send it, and end."""
    writer = _set_up_process(connection)
    try:
        completed = loader.load_reference().complete(directory, config, parameters)
    except BaseException as error:
        return writer.send(failure_message(error))
    return writer.send(ConfigCompleted(json.dumps(completed).encode()))


def _execute(
    runtime: Runtime, arenas: InstanceArenas, batch: ExecuteBatch, decoupled: bool
) -> Generator[FromInstance, None, None]:
    """The messages that answer a batch. A `decoupled` runtime makes any number of outputs, any other exactly one.
    Closing the generator closes the runtime's own."""
    try:
        outputs = runtime.execute(arenas.inputs.unpack(batch.inputs, copy=False), batch.wanted)
        if not decoupled:
            responses = list(outputs)
            if len(responses) != 1:
                raise Internal(f"expected a single response, got {len(responses)}")
            yield OutputsMade(arenas.outputs.pack(responses[0]), last=True)
            return
        try:
            for each in outputs:
                yield OutputsMade(arenas.outputs.pack(each), last=False)
            yield OutputsEnded()
        finally:
            if hasattr(outputs, "close"):
                with suppress(Exception):  # what is abandoned has nothing more to say
                    outputs.close()
    except GeneratorExit:
        raise
    except BaseException as error:
        # Whatever a model does, even to exit, the instance is used again.
        yield failure_message(error)


def _set_up_process(connection: Connection) -> MessageWriter[FromInstance]:
    """Yield cores to others, and let the server keep the log. Called before the model's libraries are imported.

    Threads of OpenMP that wait spin, by its own choice, for milliseconds: on cores that other models need, where two at
    the same time would each take several times as long as alone. And the threads of a language model stand still
    together when one of them has no core.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(OPENMP_SPINS)
    os.nice(NICENESS)
    writer = MessageWriter[FromInstance](connection)
    LogForwarder(writer.send).install(logging.INFO)
    return writer
