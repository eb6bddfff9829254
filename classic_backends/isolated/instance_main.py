"""The process of one isolated instance: loads its runtime, executes the batches that the server sends, one at a time.

It ends when the server closes the connection, or ends itself. Knows nothing of queues and requests.
"""

import json
import logging
import os
from collections.abc import Generator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, TypeAlias, cast

from ...core.model import ModelConfig, RawConfig
from ...processes.log_forwarding import LogForwarder
from ..runtime import Arrays, InstancePlacement, Runtime, RuntimeLoader, only_response
from .instance_messages import (
    ConfigCompleted,
    ExecuteBatch,
    FromInstance,
    InstanceLoaded,
    OutputsEnded,
    OutputsMade,
    OutputsRead,
    TensorConnection,
    ToInstance,
    failure_message,
)

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
