"""The core's end of its sockets: any thread may speak, and nobody who speaks too late is hurt."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from charonia.engine.core.messages import FromCore
from charonia.engine.core.sockets import CoreEndpoints, CoreSockets
from charonia.processes.log_forwarding import LogForwarder


@pytest.fixture
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CoreEndpoints, zmq.Socket[bytes]]]:
    """A client's address, and where it hears the core."""
    address = CoreEndpoints.in_directory(Path(tmp_path_factory.mktemp("s")))
    with zmq.Context() as context, context.socket(zmq.PULL) as ears, context.socket(zmq.PUSH) as mouth:
        ears.set(zmq.RCVTIMEO, 60_000)
        ears.bind(address.from_core)
        mouth.bind(address.to_core)
        yield address, ears


def test_what_any_thread_logs_reaches_the_frontend(heard: tuple[CoreEndpoints, zmq.Socket[bytes]]) -> None:
    address, ears = heard
    wire, logger = CoreSockets(address), logging.Logger("charonia.x")
    logger.addHandler(LogForwarder(wire.send, zmq.ZMQError))
    numbers = range(200)
    threads = [threading.Thread(target=lambda: [logger.warning("%d", number) for number in numbers]) for _ in range(4)]
    for thread in threads:
        thread.start()
    decode = msgspec.msgpack.Decoder[FromCore](FromCore).decode
    said = [decode(ears.recv()) for _ in range(4 * len(numbers))]
    assert {(each.logger, each.level) for each in said} == {("charonia.x", logging.WARNING)}
    assert sorted(int(each.text) for each in said) == sorted([*numbers] * 4)
    for thread in threads:
        thread.join()
    wire.close()
    logger.warning("too late")
