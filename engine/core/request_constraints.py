"""The constraints of new requests: made at once, or when their grammars are compiled.

For any thread. Knows nothing of the step loop.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TypeAlias

from ...core.errors import InvalidArgument
from ...core.native_calls import CONTROL_FLOW
from ..grammars.backend import CompiledGrammar
from .constraints import SequenceConstraint, ThinkingLimit
from .grammar_pool import GrammarPool
from .messages import AddRequest

TakeConstraint: TypeAlias = Callable[[SequenceConstraint | BaseException], None]
"""Called with a constraint, or with the error that there is in its place: an `InvalidArgument` refuses the request."""


class RequestConstraints:
    """`grammars`: None: this engine knows none."""

    def __init__(self, grammars: GrammarPool | None) -> None:
        self._grammars = grammars
        self._compiling: set[int] = set()
        """Keys of requests that wait for a grammar, until they are aborted."""
        self._lock = threading.Lock()

    def make(self, message: AddRequest, take: TakeConstraint) -> None:
        """Have `take` called for a request that is constrained: now, or by the thread that compiles its grammar. If it
        is aborted before, nothing is called."""
        constraint = message.constraint
        if constraint is None:
            take(_constraint(message, None))
        elif self._grammars is None:
            parameter = constraint.parameter
            take(InvalidArgument(f"{parameter}: this engine knows no grammars", field=parameter))
        else:
            with self._lock:
                self._compiling.add(message.spec.key)
            self._grammars.compile(constraint).add_done_callback(partial(self._on_compiled, message, take))

    def forget(self, keys: Iterable[int]) -> None:
        """These requests are aborted."""
        with self._lock:
            self._compiling.difference_update(keys)

    def _on_compiled(self, message: AddRequest, take: TakeConstraint, compiled: Future[CompiledGrammar]) -> None:
        """Called by the thread that compiled, or at once."""
        if message.spec.key not in self._compiling:
            return
        outcome: SequenceConstraint | BaseException
        try:
            outcome = _constraint(message, compiled.result())
        except CancelledError:
            return  # the core is being stopped
        except CONTROL_FLOW:
            raise
        except BaseException as error:
            outcome = error
        with self._lock:  # until it is taken: who aborts it now comes behind it
            if message.spec.key in self._compiling:
                self._compiling.remove(message.spec.key)
                take(outcome)


def _constraint(message: AddRequest, grammar: CompiledGrammar | None) -> SequenceConstraint:
    parameter = "" if message.constraint is None else message.constraint.parameter
    thinking = ThinkingLimit(message.thinking or 0, message.thinking_end) if message.limits_thinking else None
    make = None if grammar is None else grammar.matcher
    return SequenceConstraint(make, thinking, parameter, jumps=message.spec.sampling.logprobs is None)
