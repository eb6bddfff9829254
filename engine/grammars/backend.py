"""The protocols between the engine core and the library of grammars: a constraint is compiled for a vocabulary, and
each sequence under it has a matcher, which says what tokens may come next. Knows nothing of requests, rows or steps.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.request import GuidedDecoding

TokenMask: TypeAlias = NDArray[np.int32]
"""A bit for each token, [ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set where token t may come next."""


class GrammarLimits(NamedTuple):
    """How much a grammar may cost, in the library's units: beyond, it is refused, or its sequence ends."""

    text_bytes: int = 1 << 18
    """The bytes of the constraint as it was sent."""
    symbols: int = 200_000
    compile_fuel: int = 1_000_000
    step_fuel: int = 60_000
    """The fuel for one mask, as `step_items`."""
    step_items: int = 20_000
    states: int = 60_000
    """Kept between masks."""


LIMITS = GrammarLimits()


class GrammarMatcher(Protocol):
    """A sequence under a grammar, with the tokens that it has so far. For one thread at a time. A grammar that costs
    too much raises nothing: `error` says so, and then nothing else is valid."""

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; empty while it can."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""

    @property
    def finished(self) -> bool:
        """Whether only an end token can follow."""

    def fill_mask(self, mask: TokenMask) -> None:
        """Write which tokens may come next; end tokens may where the text may end."""

    def accept(self, tokens: Sequence[int]) -> bool:
        """Accept `tokens`; False, and an `error`, if the grammar forbids them."""

    def acceptable(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` could be accepted in order."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as the tokenizer writes their text; none where there is a choice."""

    def rollback(self, tokens: int) -> None:
        """Take back the last accepted tokens, so many of them."""


class CompiledGrammar(Protocol):
    """A constraint compiled for a vocabulary. `warnings`: descriptions of what is not enforced."""

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int:
        """About how many bytes it takes."""

    def matcher(self) -> GrammarMatcher:
        """The matcher of one more sequence, before its first token. For any thread."""


class GrammarBackend(Protocol):
    """Compiles constraints for one vocabulary. For any thread."""

    def compile(self, constraint: GuidedDecoding) -> CompiledGrammar:
        """Compile a constraint; one that costs too much is given up after a second or so. Raises `InvalidArgument` with
        the library's message, and the constraint's `parameter` as its `field`."""
