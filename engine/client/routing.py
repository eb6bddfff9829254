"""Chooses the replica for a request: a rule over their work, and an index of their prefix caches.

As in NVIDIA Dynamo's KV router, a replica's cost is its work in prompt tokens: prompts to compute, and a share for
every request, less what it saves on this prompt. One process sends all requests, so counts are exact.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...kvcache.block_hashes import HashExtras

TOKENS_PER_REQUEST = 256
"""The work that a request counts for the tokens it will generate, in prompt tokens."""

MAX_EXTRA_WORK = 16 * TOKENS_PER_REQUEST
"""How many prompt tokens more work than the least busy replica one may have and still be chosen for its cache, where
that has no more of the prompt."""

_SAVED = 2
"""Tokens of work that a cached token saves: itself, and one for later requests with the same beginning (measured in
docs/performance.md)."""

_PART = 4
"""A cached part counts from one in so many tokens of a prompt on: all chats begin alike, and would all go to one
replica. SGLang's router has such a threshold."""

_STEP = 16
"""Tokens between the first prefixes of a prompt, and the fewest that an entry counts."""


class ReplicaCandidate(NamedTuple):
    """A replica that could take a request."""

    work: int
    """The work ahead of it, in prompt tokens."""
    cached_tokens: int = 0
    """Tokens of the prompt that it has cached."""
    kept_tokens: int = 0
    """Tokens of all prompts in its index."""
    has_sibling: bool = False
    """Whether it has the whole prompt, for another of the request's answers."""
    last_use: int = 0
    """When its index last saw what it has cached."""


def choose_replica(candidates: Sequence[ReplicaCandidate], prompt: int) -> int:
    """The index of the cheapest candidate for a prompt of so many tokens, and among equals the one with the emptiest
    cache. None has more work beyond the least busy than `MAX_EXTRA_WORK`, or than computing what it has cached."""

    def cost(index: int) -> tuple[int, int]:
        candidate = candidates[index]
        counts = candidate.cached_tokens * _PART >= prompt
        cached = candidate.cached_tokens
        worth = max(min(cached * _SAVED, MAX_EXTRA_WORK), cached) if counts else 0
        return candidate.work - (MAX_EXTRA_WORK if candidate.has_sibling else worth), candidate.kept_tokens

    return min(range(len(candidates)), key=cost)


class RoutedReplica(Protocol):
    """A replica, as far as choosing one needs it."""

    prefix_index: "PrefixIndex"
    """The prompts that its prefix cache likely holds."""

    @property
    def pending_work(self) -> int:
        """See `ReplicaCandidate.work`."""

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that its cache holds, and how many fit."""


_Replica = TypeVar("_Replica", bound=RoutedReplica)


class ExpectedPrefix(NamedTuple):
    """What a prompt is expected to find in the cache of the replica that it is sent to."""

    tokens: int = 0
    last_use: int = 0
    """See `PrefixIndex.correct`."""


NOT_CACHED = ExpectedPrefix()

TokenIds: TypeAlias = NDArray[np.int32] | Sequence[int]


def route_prompt(
    replicas: Sequence[_Replica], prompt: TokenIds, extras: HashExtras, choice: int = 0
) -> tuple[_Replica, ExpectedPrefix]:
    """The replica for answer number `choice` to this prompt, and what of it is likely cached there. Its index then has
    the prompt."""
    prefixes = prompt_prefixes(prompt, extras)
    candidates: list[ReplicaCandidate] = []
    for replica in replicas:
        index = replica.prefix_index
        cached, last_use = index.longest_match(prefixes)
        has_sibling = choice > 0 and cached == len(prompt)
        candidates.append(ReplicaCandidate(replica.pending_work, cached, index.tokens, has_sibling, last_use))
    at = choose_replica(candidates, len(prompt))
    replicas[at].prefix_index.insert(prefixes, replicas[at].kv_tokens[1])
    return replicas[at], ExpectedPrefix(candidates[at].cached_tokens, candidates[at].last_use)


class PromptPrefix(NamedTuple):
    """The first `tokens` of a prompt; equal prefixes under equal extras have equal digests. Python's hash is enough,
    and ten times as fast as a cryptographic one: a collision only sends a request to the wrong replica."""

    digest: int
    tokens: int


def prompt_prefixes(prompt: TokenIds, extras: HashExtras) -> list[PromptPrefix]:
    """Prefixes of a prompt, the shortest first and the whole prompt last, four to each doubling of its length. The
    longest common one is more than four fifths of what two prompts share beyond 64 tokens."""
    packed = np.asarray(prompt, np.int32).tobytes()
    digest = hash(extras)
    begin = 0
    prefixes: list[PromptPrefix] = []
    for end in _cuts(len(prompt)):
        digest = hash((digest, packed[4 * begin : 4 * end]))
        prefixes.append(PromptPrefix(digest, end))
        begin = end
    return prefixes


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
    """The prompts that a replica's prefix cache likely holds, with `tokens` tokens in all.

    This is a model of the cache: it knows no generated texts, but keeps its size and order: the least recently used
    prefix goes first, the longest of a prompt before shorter ones. What cores answer corrects it."""

    def __init__(self) -> None:
        self._spans: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """By digest the tokens that count for it, and its last use; in the order of uses."""
        self._uses = 0
        self.tokens = 0

    def longest_match(self, prefixes: Sequence[PromptPrefix]) -> tuple[int, int]:
        """Tokens of the longest prefix that is here, and its last use; zeros where none is."""
        for prefix in reversed(prefixes):
            if prefix.digest in self._spans:
                return prefix.tokens, self._spans[prefix.digest][1]
        return 0, 0

    def insert(self, prefixes: Sequence[PromptPrefix], capacity: int) -> None:
        """Add a prompt that the replica is to compute, in a cache of `capacity` tokens."""
        self._uses += 1
        for at in range(len(prefixes) - 1, -1, -1):
            digest, tokens = prefixes[at]
            if digest in self._spans:
                self._spans[digest] = self._spans[digest][0], self._uses
                self._spans.move_to_end(digest)
                continue
            span = max(_STEP, tokens - (prefixes[at - 1].tokens if at else 0))
            self._spans[digest] = span, self._uses
            self.tokens += span
        while self.tokens > capacity:
            self._forget_oldest()

    def correct(self, expected: ExpectedPrefix, cached: int) -> None:
        """The core says how many tokens of a prompt it had: where that is less than half of what was expected, what was
        used then has made room, and so has all that was used before."""
        if 2 * cached >= expected.tokens:
            return
        while self._spans and next(iter(self._spans.values()))[1] <= expected.last_use:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (tokens, _) = self._spans.popitem(last=False)
        self.tokens -= tokens

    def clear(self) -> None:
        """The replica lost its cache."""
        self._spans.clear()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._spans)
