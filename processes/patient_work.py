"""Work of child processes with `LAST_NICENESS`, as of towers: while some waits, who takes all cores leaves time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock


class PatientWork:
    """Counts who waits for such processes, from any thread, and tells its listeners when somebody does, and when nobody
    does any more."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting = 0
        self._listeners: dict[Callable[[bool], None], asyncio.AbstractEventLoop] = {}

    @property
    def waits(self) -> bool:
        return self._waiting > 0

    def add_listener(self, listener: Callable[[bool], None]) -> None:
        """Call `listener`, in the loop that runs now, with every change of `waits`."""
        self._listeners[listener] = asyncio.get_running_loop()

    def remove_listener(self, listener: Callable[[bool], None]) -> None:
        self._listeners.pop(listener, None)

    @contextmanager
    def pending(self, patient: bool = True) -> Iterator[None]:
        """Somebody waits within the block, if it is for such a `patient` process."""
        self._count(int(patient))
        try:
            yield
        finally:
            self._count(-int(patient))

    def _count(self, change: int) -> None:
        with self._lock:
            before = self.waits
            self._waiting += change
            if self.waits == before:
                return
            for listener, loop in list(self._listeners.items()):
                with suppress(RuntimeError):  # its loop is closed
                    loop.call_soon_threadsafe(partial(listener, self.waits))


patient_work = PatientWork()
"""This process's."""
