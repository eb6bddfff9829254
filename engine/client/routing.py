"""Which of several replicas a request goes to: a pure rule, and what they hold: an index of their prefix caches, which
is likely right, and their adapters, by digest.

The cost of a replica is the work that it has to do before and for the request, in prompt tokens, as in the KV router of
NVIDIA Dynamo: prompts that it has not computed yet, and a share for every request it has, less what it saves on this
prompt. One process sends all requests and so counts exactly: no draw between two is needed against old news.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.adapter import Adapter
from ...core.errors import CharoniaError, NotReady, Unavailable
from ...kvcache.manager import HashExtras
from ..core.messages import AdapterLoaded, AdapterReply, LoadAdapter, ToCore, UnloadAdapter

TOKENS_PER_REQUEST = 256
"""The prompt tokens that a request counts for the tokens it will generate."""

MAX_EXTRA_WORK = 16 * TOKENS_PER_REQUEST
"""How much busier than the least busy a replica may be, in prompt tokens, and still be chosen for its cache."""

_SAVED = 2
"""The tokens that a cached one of the prompt saves: itself, and as much for later requests with the same beginning.
docs/performance.md tells what that does to hits and latency."""

_PART = 4
"""A cached part below one in so many tokens of a prompt does not count: every chat begins with the same few, and all
would go to one replica while the caches of the others stay empty (SGLang's router has such a threshold)."""

_STEP = 16
"""Tokens between the first cuts, and the least that an entry counts."""


class ReplicaCandidate(NamedTuple):
    """A replica that could take a request, in tokens: the `work` ahead of it, how many of the prompt are cached there,
    and how many its index keeps of all prompts. `has_sibling`: it has the whole prompt, for another of its answers."""

    work: int
    cached_tokens: int = 0
    kept_tokens: int = 0
    has_sibling: bool = False


def choose_replica(candidates: Sequence[ReplicaCandidate], prompt: int) -> int:
    """The index of the cheapest for a prompt of so many tokens; between equals, of the emptiest cache. Never one that
    has more than `MAX_EXTRA_WORK` of work beyond the least busy; without anything cached, one of the least busy."""

    def cost(index: int) -> tuple[int, int]:
        candidate = candidates[index]
        counts = candidate.cached_tokens * _PART >= prompt
        worth = min(candidate.cached_tokens * _SAVED, MAX_EXTRA_WORK) if counts else 0
        return candidate.work - (MAX_EXTRA_WORK if candidate.has_sibling else worth), candidate.kept_tokens

    return min(range(len(candidates)), key=cost)


class RoutedReplica(Protocol):
    """A replica as far as choosing one goes: `pending_work` is that of `ReplicaCandidate`, `kv_tokens` how many its
    cache holds, and how many fit."""

    prefix_index: "PrefixIndex"

    @property
    def pending_work(self) -> int: ...
    @property
    def kv_tokens(self) -> tuple[int, int]: ...


_Replica = TypeVar("_Replica", bound=RoutedReplica)

TokenIds: TypeAlias = NDArray[np.int32] | Sequence[int]


def route_prompt(
    replicas: Sequence[_Replica], prompt: TokenIds, extras: HashExtras, affinity: bool, choice: int = 0
) -> tuple[_Replica, int]:
    """The one of `replicas` that takes this prompt, for answer number `choice` to it, and how many of its tokens it
    likely has cached; without `affinity` the least busy. Its prefix index then has the prompt."""
    if not affinity:
        return min(replicas, key=lambda replica: replica.pending_work), 0
    prefixes = prompt_prefixes(prompt, extras)
    candidates: list[ReplicaCandidate] = []
    for replica in replicas:
        index, cached = replica.prefix_index, replica.prefix_index.longest_match(prefixes)
        has_sibling = choice > 0 and cached == len(prompt)
        candidates.append(ReplicaCandidate(replica.pending_work, cached, index.tokens, has_sibling))
    at = choose_replica(candidates, len(prompt))
    replicas[at].prefix_index.insert(prefixes, replicas[at].kv_tokens[1])
    return replicas[at], candidates[at].cached_tokens


class PromptPrefix(NamedTuple):
    """The first `tokens` of a prompt; equal ones, under equal extras, have equal digests. Python's own hash is enough,
    and ten times as fast as a cryptographic one: the worst that two equal ones do is a request in the wrong place."""

    digest: int
    tokens: int


def prompt_prefixes(prompt: TokenIds, extras: HashExtras) -> list[PromptPrefix]:
    """Beginnings of a prompt of int32 token ids, the shortest first and the whole of it last, a few to each doubling
    of length: two prompts have those up to the last cut in common that they share, which is more than four fifths of
    what they share beyond 64 tokens."""
    packed, digest, begin, found = np.asarray(prompt, np.int32).tobytes(), hash(extras), 0, []
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
    """An index of the prompts that a replica's prefix cache likely holds, as far as the requests sent to it tell; of
    `tokens` tokens in all.

    A model of the cache: it knows prompts, not the texts generated after them, and hears of no eviction, but keeps to
    the cache's size and order. The least recently used prefix goes first, of one prompt the longest before the shorter,
    as blocks are evicted. Looking up and inserting cost no more than the number of cuts."""

    def __init__(self) -> None:
        self._spans: OrderedDict[int, int] = OrderedDict()
        self.tokens = 0

    def longest_match(self, beginnings: Sequence[PromptPrefix]) -> int:
        """The tokens of the longest prefix that is held."""
        return next((each.tokens for each in reversed(beginnings) if each.digest in self._spans), 0)

    def insert(self, beginnings: Sequence[PromptPrefix], capacity: int) -> None:
        """The replica computes this prompt and then holds it, in a cache of `capacity` tokens."""
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


log = logging.getLogger(__name__)


class ResidentAdapters:
    """`send` takes messages to the core. The core counts: each load that it answers is one to be unloaded."""

    def __init__(self, send: Callable[[ToCore], None]) -> None:
        self._send = send
        self._wanted: dict[str, Adapter] = {}
        self._resident = set[str]()
        self._lost: dict[str, str] = {}
        """Why a core that was started again could not get them, by digest."""
        self._loads: dict[int, asyncio.Future[Adapter]] = {}
        self._last_load = 0
        self._restoring = set[asyncio.Task[None]]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._resident)

    def __contains__(self, digest: str) -> bool:
        """Whether the core computes with the adapter; "" is the model itself."""
        return not digest or digest in self._resident

    def absence(self, digest: str) -> CharoniaError:
        """What a request is told whose adapter the core does not have, though it serves."""
        adapter = self._wanted.get(digest)
        if digest in self._lost and adapter is not None:
            message = f"adapter {adapter.path} was lost with the engine core that had it: {self._lost[digest]}"
            return Unavailable(f"{message}; load it again, with load_inplace")
        return NotReady("the engine core was started again, and reads its adapters first")

    async def load(self, path: str) -> Adapter:
        """Return when the core has the adapter; its `name` is empty.

        Raises:
            CharoniaError: what is wrong with it, or that the core is gone.
        """
        self._last_load += 1
        loading: asyncio.Future[Adapter] = asyncio.get_running_loop().create_future()
        self._loads[self._last_load] = loading
        self._send(LoadAdapter(self._last_load, path))
        adapter = await loading
        if adapter.digest in self._resident:
            self._send(UnloadAdapter(adapter.digest))
        self._wanted[adapter.digest] = adapter
        self._lost.pop(adapter.digest, None)
        self._resident.add(adapter.digest)
        return adapter

    def unload(self, digest: str) -> None:
        """Send no more requests with it; unknown ones are ignored."""
        self._wanted.pop(digest, None)
        self._lost.pop(digest, None)
        if digest in self._resident:
            self._resident.remove(digest)
            self._send(UnloadAdapter(digest))

    def on_reply(self, reply: AdapterReply) -> None:
        loading = self._loads.pop(reply.number)
        if isinstance(reply, AdapterLoaded):
            if loading.done():  # its caller was cancelled
                self._send(UnloadAdapter(reply.adapter.digest))
            else:
                loading.set_result(reply.adapter)
        elif not loading.done():
            loading.set_exception(reply.error.error())

    def on_serving(self) -> None:
        """A core serves, which has none yet."""
        for adapter in self._wanted.values():
            restoring = asyncio.create_task(self._restore(adapter))
            self._restoring.add(restoring)
            restoring.add_done_callback(self._restoring.discard)

    def on_loss(self, error: CharoniaError) -> None:
        """The core is gone with all it had."""
        self._resident.clear()
        loads, self._loads = self._loads, {}
        for loading in loads.values():
            if not loading.done():
                loading.set_exception(error)

    async def _restore(self, adapter: Adapter) -> None:
        """Load what the core before had: the same, or nothing."""
        try:
            found = await self.load(adapter.path)
        except NotReady:
            return  # the next core gets it
        except CharoniaError as error:
            self._lose(adapter, error.message)
            return
        if found.digest != adapter.digest:
            self._lose(adapter, "its files are not those that were loaded")
            self.unload(found.digest)

    def _lose(self, adapter: Adapter, why: str) -> None:
        self._lost[adapter.digest] = why
        log.error("adapter %s is lost with the engine core that had it: %s", adapter.path, why)
