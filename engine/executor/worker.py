"""A thread that does one thing after the other, each begun and awaited at the least cost.

What `concurrent.futures` has for crowds (callbacks, threads that come and go, waiting for any of several) is not here:
a step pays for it again every time, and between steps nothing of it is in a cache.
"""

import weakref
from _thread import allocate_lock
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """Something to be done once, in whatever thread calls `run`."""

    __slots__ = ("_action", "_arguments", "_done", "_error", "_result")

    _result: T

    def __init__(self, action: Callable[..., T], *arguments: Any) -> None:
        self._action, self._arguments = action, arguments
        self._error: BaseException | None = None
        self._done = allocate_lock()
        self._done.acquire()

    def run(self) -> None:
        """Do it; what it raises, `result` will."""
        try:
            self._result = self._action(*self._arguments)
        except BaseException as error:
            self._error = error
        self._done.release()

    def cancel(self) -> None:
        """It will not be run."""
        self._error = CancelledError()
        self._done.release()

    def result(self, timeout: float | None = None) -> T:
        """Wait for it; from any thread, any number of times. `timeout`: seconds at most.

        Raises:
            BaseException: what it raised; CancelledError if it was not begun when the worker closed.
            TimeoutError: it takes longer.
        """
        if not self._done.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        self._done.release()
        if self._error is not None:
            raise self._error
        return self._result


class Worker:
    """One thread, from the beginning until `close` or the interpreter's end."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        thread = Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._stop = weakref.finalize(self, _stop, self._jobs, thread)
        thread.start()

    def submit(self, action: Callable[..., T], *arguments: Any) -> Job[T]:
        """Have it done after everything that was submitted before.

        Raises:
            RuntimeError: the worker is closed.
        """
        if not self._stop.alive:
            raise RuntimeError("the worker is closed")
        job = Job(action, *arguments)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Cancel what is not begun, and wait for what is. May be called again."""
        self._stop()


def _work(jobs: SimpleQueue[Job[Any] | None]) -> None:
    while job := jobs.get():
        job.run()
        del job  # while the next one is waited for, nobody needs its result


def _stop(jobs: SimpleQueue[Job[Any] | None], thread: Thread) -> None:
    try:
        while job := jobs.get_nowait():
            job.cancel()
    except Empty:
        pass
    jobs.put(None)
    thread.join()
