"""What a replica's prefix cache likely holds, as far as the requests sent to it tell.

A model of the cache, not its index: it knows prompts, not the texts generated after them, and hears of no eviction but
keeps to the cache's size and order. Knows nothing of loads.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...kvcache.manager import HashExtras

_STEP = 16
"""Tokens between the first cuts, and the least that something remembered counts."""


class PromptPrefix(NamedTuple):
    """The first `tokens` of a prompt; equal ones, under equal extras, have equal digests. Python's own hash is enough,
    and ten times as fast as a cryptographic one: the worst that two equal ones do is a request in the wrong place."""

    digest: int
    tokens: int


def prompt_prefixes(prompt: Sequence[int], extras: HashExtras) -> list[PromptPrefix]:
    """Beginnings of a prompt of int32 token ids, the shortest first and the whole of it last, a few to each doubling
    of length: two prompts have those up to the last cut in common that they share, which is more than four fifths of
    what they share beyond 64 tokens."""
    packed, digest, begin, found = array("i", prompt).tobytes(), hash(extras), 0, []
    for end in _cuts(len(prompt)):
        digest = hash((digest, packed[4 * begin : 4 * end]))
        found.append(PromptPrefix(digest, end))
        begin = end
    return found


def _cuts(length: int) -> Iterator[int]:
    """16, 32, ... 128, 160, ... 256, 320, ...: four to an octave from 64 on."""
    cut, step = _STEP, _STEP
    while cut < length:
        yield cut
        if cut == 8 * step:
            step *= 2
        cut += step
    if length:
        yield length


class PrefixIndex:
    """What is held: the least recently used goes first, of one prompt the longest beginnings before the shorter, as
    blocks are evicted. Looking up and learning cost no more than the number of cuts."""

    def __init__(self) -> None:
        self._spans: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0
        """How many it holds."""

    def longest_match(self, beginnings: Sequence[PromptPrefix]) -> int:
        """Tokens of the longest of them that is held."""
        return next((each.tokens for each in reversed(beginnings) if each.digest in self._spans), 0)

    def insert(self, beginnings: Sequence[PromptPrefix], capacity: int) -> None:
        """The replica computes this prompt, and holds it then, in a cache of `capacity` tokens."""
        for at in range(len(beginnings) - 1, -1, -1):
            digest, tokens = beginnings[at]
            if digest in self._spans:
                self._spans.move_to_end(digest)
                continue
            span = max(_STEP, tokens - (beginnings[at - 1].tokens if at else 0))
            self._spans[digest] = span
            self.tokens += span
        while self.tokens > capacity:
            self.tokens -= self._spans.popitem(last=False)[1]

    def clear(self) -> None:
        """The replica lost its cache."""
        self._spans.clear()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._spans)
