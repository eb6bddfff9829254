"""Text that is free until a marker has been written; the grammar holds from there on.

For markers that end in a token of their own, as those of models that reason: before it, nothing is asked of a grammar.
"""

from collections.abc import Sequence

import numpy as np

from .backend import GrammarMatcher, TokenMask


def free_text_mask(tokens: Sequence[bytes], ends: Sequence[int]) -> TokenMask:
    """All tokens that are something, but no end."""
    allowed = np.array([bool(token) for token in tokens])
    allowed[list(ends)] = False
    bits = np.packbits(allowed, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view("<i4").astype(np.int32)


class FreeTextMatcher:
    """A `GrammarMatcher` that gives `inner` the tokens after `marker`. `tokens`: the bytes of each; `mask`: those that
    may come before."""

    def __init__(self, inner: GrammarMatcher, marker: bytes, tokens: Sequence[bytes], mask: TokenMask) -> None:
        self._inner, self._marker, self._tokens, self._mask = inner, marker, tokens, mask
        self._free: list[int] = []
        self._begun = False
        self._followed = 0

    @property
    def error(self) -> str:
        return self._inner.error

    @property
    def complete(self) -> bool:
        return self._begun and self._inner.complete

    @property
    def finished(self) -> bool:
        return self._begun and self._inner.finished

    def fill_mask(self, mask: TokenMask) -> None:
        if self._begun:
            self._inner.fill_mask(mask)
        else:
            mask[:] = self._mask

    def accept(self, tokens: Sequence[int]) -> bool:
        for at, token in enumerate(tokens):
            if self._begun:
                self._followed += len(tokens) - at
                return self._inner.accept(tokens[at:])
            self._free.append(token)
            self._begun = self._ends_in_marker()
        return True

    def acceptable(self, tokens: Sequence[int]) -> int:
        free = 0
        while not self._begun and free < len(tokens):
            self.accept(tokens[free : free + 1])
            free += 1
        following = self._inner.acceptable(tokens[free:])
        self.rollback(free)
        return free + following

    def forced_tokens(self) -> list[int]:
        return self._inner.forced_tokens() if self._begun else []

    def rollback(self, tokens: int) -> None:
        within = min(tokens, self._followed)
        if within:
            self._inner.rollback(within)
            self._followed -= within
        if tokens > within:
            del self._free[len(self._free) - (tokens - within) :]
            self._begun = False

    def _ends_in_marker(self) -> bool:
        end, at = b"", len(self._free)
        while at and len(end) < len(self._marker):
            at -= 1
            end = self._tokens[self._free[at]] + end
        return end.endswith(self._marker)
