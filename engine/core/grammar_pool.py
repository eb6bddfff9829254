"""Compiles grammars beside the step loop, each once, in threads of low priority."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import CharoniaError, InvalidArgument
from ...core.request import GuidedDecoding
from ...processes.host import lower_thread_priority
from ..grammars.backend import CompiledGrammar, GrammarBackend

_THREADS = 2


class GrammarCacheLimits(NamedTuple):
    """The most grammars that are kept, and about how many bytes they may take."""

    entries: int = 512
    bytes: int = 256 << 20


CACHE_LIMITS = GrammarCacheLimits()


@dataclass(slots=True)
class GrammarTotals:
    """Counts of compiling."""

    compiled: int = 0
    seconds: float = 0.0
    hits: int = 0
    """Requests whose grammar was compiled already, or being compiled."""


NO_GRAMMARS = GrammarTotals()


class GrammarPool:
    """The compiled grammars of one model, for any thread. `make_backend` is called once, which may take seconds."""

    def __init__(self, make_backend: Callable[[], GrammarBackend], limits: GrammarCacheLimits = CACHE_LIMITS) -> None:
        self._make_backend, self._limits = make_backend, limits
        self._threads = ThreadPoolExecutor(_THREADS, "grammars", initializer=lower_thread_priority)
        self._backend: Future[GrammarBackend] | None = None
        self._known: OrderedDict[GuidedDecoding, Future[CompiledGrammar]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.totals = GrammarTotals()

    def prepare(self) -> None:
        """Make the backend before the first grammar is wanted."""
        with self._lock:
            self._prepared()

    def _prepared(self) -> Future[GrammarBackend]:
        if self._backend is None:
            self._backend = self._threads.submit(self._make_backend)
        return self._backend

    def compile(self, constraint: GuidedDecoding) -> Future[CompiledGrammar]:
        """The future of a grammar, or of the `InvalidArgument` that refuses it, with the constraint's parameter as
        `field`. Refusals are kept, too."""
        with self._lock:
            known = self._known.get(constraint)
            if known is not None:
                self._known.move_to_end(constraint)
                self.totals.hits += 1
                return known
            made = self._known[constraint] = self._threads.submit(self._compile, self._prepared(), constraint)
        made.add_done_callback(self._trim)
        return made

    def close(self) -> None:
        """Compile nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, backend: Future[GrammarBackend], constraint: GuidedDecoding) -> CompiledGrammar:
        try:
            compiles = backend.result()
        except CharoniaError as error:
            message = f"{constraint.parameter}: this model's tokenizer cannot be read: {error.message}"
            raise InvalidArgument(message, field=constraint.parameter) from error
        began = time.perf_counter()
        try:
            return compiles.compile(constraint)
        finally:
            self.totals.compiled += 1
            self.totals.seconds += time.perf_counter() - began

    def _trim(self, made: Future[CompiledGrammar]) -> None:
        """Forget the least recently wanted grammars; sequences under them keep theirs."""
        with self._lock:
            self._bytes += _size(made)
            finished = [
                constraint for constraint, future in self._known.items() if future.done() and future is not made
            ]
            for constraint in finished:
                if len(self._known) <= self._limits.entries and self._bytes <= self._limits.bytes:
                    return
                self._bytes -= _size(self._known.pop(constraint))


def _size(made: Future[CompiledGrammar]) -> int:
    return 0 if made.cancelled() or made.exception() is not None else made.result().size
