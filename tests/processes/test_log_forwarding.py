"""A child's log, on its way to its parent."""

import logging
from multiprocessing import Pipe

import msgspec
import pytest

from charonia.processes.log_forwarding import LogForwarder, LogRecordMessage, MessageWriter


def test_a_record_is_logged_again_under_its_own_name(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Pipe()
    logger = logging.Logger("charonia.child")
    logger.addHandler(LogForwarder(MessageWriter[LogRecordMessage](theirs).send))
    logger.warning("%d %% of it", 5)
    message = msgspec.msgpack.decode(ours.recv_bytes(), type=LogRecordMessage)
    message.log_here()
    message.log_here("rank 1")
    assert caplog.record_tuples == [
        ("charonia.child", logging.WARNING, "5 % of it"),
        ("charonia.child", logging.WARNING, "rank 1: 5 % of it"),
    ]
    ours.close()
    logger.warning("too late")
    theirs.close()
