"""The seam between the engine core and the library that knows grammars.

Knows nothing of requests, rows or steps: a constraint is compiled for a vocabulary, and each sequence under it is
followed by a matcher of its own, which says what tokens may come next.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...core.request import GuidedDecoding

TokenMask: TypeAlias = NDArray[np.int32]
"""A bit for each token, [ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set where token t may come next."""


class GrammarLimits(NamedTuple):
    """How much a grammar may cost; beyond, it is refused, or ends the sequence that it is too much for.

    `text_bytes`: of the constraint as it was sent. The others are the library's units: `symbols` of the grammar,
    `compile_fuel` to build it, `step_fuel` and `step_items` for one mask, `states` that are kept.
    """

    text_bytes: int = 1 << 18
    symbols: int = 200_000
    compile_fuel: int = 1_000_000
    step_fuel: int = 60_000
    step_items: int = 20_000
    states: int = 60_000


LIMITS = GrammarLimits()


class GrammarMatcher(Protocol):
    """A sequence under a grammar, by the tokens that it has so far. For one thread at a time.

    Nothing here raises for a grammar that costs too much: `error` then says so, and from there on nothing else is true.
    """

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; empty while it can."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""

    @property
    def finished(self) -> bool:
        """Whether nothing can follow but an end token."""

    def fill_mask(self, mask: TokenMask) -> None:
        """Write which tokens may come next, end tokens where the text may end."""

    def accept(self, tokens: Sequence[int]) -> bool:
        """Go on by `tokens`; False where the grammar does not allow them, whereupon there is an `error`."""

    def acceptable(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` could be accepted, one after the other."""

    def forced_tokens(self) -> list[int]:
        """The tokens that have to come next, as the tokenizer writes their text; none where there is a choice."""

    def rollback(self, tokens: int) -> None:
        """Go back by so many of the accepted tokens."""


class CompiledGrammar(Protocol):
    """A constraint that was compiled for a vocabulary. `warnings`: what of it is not enforced."""

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int:
        """About how many bytes it takes."""

    def matcher(self) -> GrammarMatcher:
        """One more sequence, before its first token. For any thread."""


class GrammarBackend(Protocol):
    """Compiles constraints for one vocabulary. For any thread."""

    def compile(self, constraint: GuidedDecoding) -> CompiledGrammar:
        """Compile; what costs too much is given up, but that may take a second.

        Raises:
            InvalidArgument: it is wrong or costs too much; `field` is its `parameter`, the message the library's.
        """
