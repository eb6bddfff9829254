"""A user's own drafter, a class `Drafter` in a file, and the guard of all drafters: none may end the server, or take
longer than it can save."""

import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from operator import index
from pathlib import Path
from threading import current_thread, main_thread
from time import perf_counter
from typing import Any

from ...core.errors import InvalidArgument
from ...scheduler.drafts.speculation import Drafter, DraftRequest, LearningDrafter

_CLASS, _MODULE = "Drafter", "charonia_custom_drafter"

LONGEST_CALL = 2.0
"""Seconds after which a call, for which the step waits, is interrupted."""


class CustomDrafter:
    """An instance of the class in the file at `path`, made with `keys`. Its drafts must be integers.

    Raises:
        InvalidArgument: the file or the class is missing, or raised; the message names the line.
    """

    def __init__(self, path: Path, keys: Mapping[str, Any]) -> None:
        if not path.is_file():
            raise _refused(f"there is no file {path}")
        spec = spec_from_file_location(_MODULE, path)
        if spec is None or spec.loader is None:
            raise _refused(f"{path} is not named *.py")
        module = sys.modules[_MODULE] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            made = getattr(module, _CLASS, None)
            self._drafter: Drafter | None = None if made is None else made(**keys)
        except Exception as error:  # the user's code may raise anything
            raise _refused(f"{_line_of(error, path)}: {type(error).__name__}: {error}") from error
        if not callable(getattr(self._drafter, "propose", None)):
            raise _refused(f"{path} has no class {_CLASS} with a method propose(requests)")

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See `Drafter.propose`. Raises `TimeoutError` after LONGEST_CALL seconds."""
        assert self._drafter is not None
        with _interrupted_after(LONGEST_CALL):
            return [[*map(index, tokens)] for tokens in self._drafter.propose(requests)]

    def finished(self, request: DraftRequest) -> None:
        """See `LearningDrafter`. Raises `TimeoutError` after LONGEST_CALL seconds."""
        if isinstance(self._drafter, LearningDrafter):
            with _interrupted_after(LONGEST_CALL):
                self._drafter.finished(request)


class _Interruption(BaseException):
    """Raised by the signal; no `Exception`, so that the drafter does not catch it."""


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise `TimeoutError` out of a block that takes longer, in the main thread alone. A signal ends Python code and
    waits, but no C extension that ignores signals."""
    if current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Interruption:
        raise TimeoutError(f"a call took longer than {seconds:g} s") from None


def _interrupt(number: int, frame: object) -> None:
    raise _Interruption


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"speculative_config: {reason}", field="speculative_config")


def _line_of(error: Exception, path: Path) -> str:
    """The file, and the last of its lines that was reached, if any was."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


CALLS = 16
"""Calls after which a drafter's time is judged."""

_logger = logging.getLogger(__name__)


class GuardedDrafter:
    """A drafter, `name` in the log, that is turned off when it raises, or when CALLS calls took longer than right
    drafts could have saved. Then it drafts nothing."""

    def __init__(self, drafter: Drafter, name: str) -> None:
        self._drafter = drafter
        self._name = name
        self.off = False
        self.on_off: Callable[[], None] = lambda: None
        """Called when it is turned off."""
        self.step_seconds: Callable[[int], float | None] = lambda tokens: None
        """How long a step with so many tokens takes; None where that is unknown."""
        self._calls = 0
        self._taken = 0.0
        self._savable = 0.0

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        if self.off:
            return [()] * len(requests)
        began = perf_counter()
        try:
            proposed = self._drafter.propose(requests)
            if len(proposed) != len(requests):
                raise ValueError(f"{len(proposed)} drafts for {len(requests)} requests")
        except Exception as error:  # the user's code, which must end nothing else
            self._turn_off(f"{type(error).__name__}: {error}")
            return [()] * len(requests)
        self._judge(perf_counter() - began, requests)
        return proposed

    def finished(self, request: DraftRequest) -> None:
        if not self.off and isinstance(self._drafter, LearningDrafter):
            try:
                self._drafter.finished(request)
            except Exception as error:  # likewise
                self._turn_off(f"{type(error).__name__}: {error}")

    def _judge(self, seconds: float, requests: Sequence[DraftRequest]) -> None:
        step = self.step_seconds(len(requests))
        if step is None:
            return
        self._calls += 1
        self._taken += seconds
        self._savable += step * max(request.k for request in requests)
        if self._calls < CALLS:
            return
        if self._taken > self._savable:
            taken, savable = 1000 * self._taken / CALLS, 1000 * self._savable / CALLS
            self._turn_off(f"it takes {taken:.1f} ms a call, and right drafts would save {savable:.1f} at most")
        self._calls = 0
        self._taken = 0.0
        self._savable = 0.0

    def _turn_off(self, reason: str) -> None:
        self.off = True
        self.on_off()
        _logger.error("the drafter %s is turned off, the server serves on: %s", self._name, reason)
