"""Threads for calls that may hang, and that may fail."""

import logging
import threading

import pytest

from charonia.processes.daemon_threads import DaemonThreads


def test_a_call_that_fails_leaves_the_thread_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    threads = DaemonThreads("reader", 1)
    is_made = threading.Event()
    with caplog.at_level(logging.ERROR):
        threads.start({}.popitem)
        threads.start(is_made.set)
        assert is_made.wait(10)
    assert caplog.messages == ["a call in reader failed"]
    threads.close(10)


def test_who_closes_does_not_wait_for_a_call_that_hangs() -> None:
    threads = DaemonThreads("hanging-reader", 1)
    [thread] = (thread for thread in threading.enumerate() if thread.name == "hanging-reader")
    may_go_on, is_made = threading.Event(), threading.Event()
    threads.start(may_go_on.wait)
    threads.start(is_made.set)
    threads.close()
    may_go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not is_made.is_set(), "a call was made that waited when the threads were closed"
