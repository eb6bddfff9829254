"""Sequences whose prompt another server computed: they wait here, outside the queue, until its blocks have come. What
does not come is computed, or, if the configuration wants that, ends the request."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from ...core.errors import SentError, Unavailable
from ...core.metrics import TimeInState
from ...kvcache.exchange.held_prefixes import ArrivingPrefix
from ...kvcache.manager import KVCacheManager
from ...scheduler.events.block_contents import block_contents
from ...scheduler.scheduler import Scheduler
from ...scheduler.sequence import Sequence as ScheduledSequence
from ..transfer.prefix_client import NameLookups, PrefixFetch, RemotePrefix
from ..transfer.wire import TransferError
from ..transfer_config import KVTransferConfig
from ..worker.executor import CacheCopies, CachePlaces, Executor
from .inbox import Inbox, NewRequest
from .messages import RequestRejected

log = logging.getLogger(__name__)

_LEAST_PATIENCE = 0.5
"""Seconds for which a request that may be computed waits in the line in any case; otherwise as long as computing
would take."""


class Arrival:
    """A sequence whose prefix is to come. `settled`: all has come that will, and the sequence is in the queue."""

    def __init__(self, new: NewRequest, fetch: PrefixFetch, waits_until: float) -> None:
        """`waits_until`: how long it waits for others' fetches to end, and for room."""
        self.new = new
        self.fetch = fetch
        self.waits_until = waits_until
        self.prefix: ArrivingPrefix | None = None
        self.room: int | None = None
        """The blocks that there were when they were too few for it."""
        self.began = 0.0
        self.placed = 0
        """The span before which all have come."""
        self.settled = False
        self.followers: dict[int, NewRequest] = {}
        """By key, other sequences of the same prompt: they share what has come."""

    def close(self) -> None:
        if not self.settled:
            self.fetch.cancel()
        if self.prefix is not None:
            self.prefix.close()
            self.prefix = None


class ArrivingTransfers:
    """For the step loop's thread, but the threads of its fetches, which have it called between steps."""

    def __init__(
        self,
        config: KVTransferConfig,
        fingerprint: Mapping[str, str],
        cache: KVCacheManager,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        clock: Callable[[], float],
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """`clock`: seconds. `make_room`: gives up a prefix that is held for another server, if there is one."""
        self._make_room = make_room
        self._config = config
        self._becomes = "computed" if config.kv_load_failure_policy == "recompute" else "refused"
        self._fingerprint = fingerprint
        self._names = NameLookups()
        self._cache = cache
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._arrivals: dict[int, Arrival] = {}
        self._line: deque[Arrival] = deque()
        self._fetching = Counter[str]()  # by tenant
        self._ready: dict[int, NewRequest | RequestRejected] = {}
        self.received_prefixes = self.received_bytes = self.received_tokens = 0
        self.seconds = 0.0
        """Seconds that all fetches took together."""
        self.waits = TimeInState()
        """The sequences whose prefix has yet to come."""
        self.failed = 0

    @property
    def waiting(self) -> int:
        """Sequences whose prefix has yet to come, all of it or the rest."""
        return sum(1 + len(arrival.followers) for arrival in self._arrivals.values() if not arrival.settled)

    def _count_waits(self) -> None:
        self.waits.add(self.waiting - self.waits.count)

    def add(self, new: NewRequest, remote: RemotePrefix) -> None:
        """Let the prefix of this sequence come. Raises `InvalidArgument` if it can never run."""
        new.spec.check_fits(self._scheduler.config.max_model_len, self._cache)
        for leader in self._arrivals.values():
            if leader.fetch.remote == remote and not leader.settled:
                leader.followers[new.spec.key] = new
                self._count_waits()
                return
        patience = self._config.limits.timeout_seconds
        if self._config.kv_load_failure_policy == "recompute":
            computing = self._scheduler.step_times.prompt_seconds(len(new.spec.prompt), 0)
            patience = min(max(computing, _LEAST_PATIENCE), patience)
        fetch = PrefixFetch(self._config, self._fingerprint, remote, self._names)
        arrival = self._arrivals[new.spec.key] = Arrival(new, fetch, self._clock() + patience)
        self._line.append(arrival)
        self._count_waits()

    def begin_fetches(self) -> None:
        """Begin those for which there is room, the oldest first. Who has waited for others' fetches, or for room, long
        enough leaves the line."""
        now, room = self._clock(), self._room if self._line else 0
        for arrival in [*self._line]:
            if arrival.fetch.cancelled:
                self._line.remove(arrival)
                continue
            is_late = arrival.waits_until <= now
            may_fetch = self._may_fetch(arrival.new.spec.tenant)
            prefix = self._prefix_for(arrival, room, is_late) if may_fetch else None
            if prefix is not None:
                self._line.remove(arrival)
                self._begin(arrival, prefix)
                room = self._room
            elif is_late:
                self._line.remove(arrival)
                lacks = (
                    "the cache has no room for it" if may_fetch else "others' fetches take all that may be at a time"
                )
                self._fail(arrival, TransferError("late", lacks))

    def _prefix_for(self, arrival: Arrival, room: int, is_late: bool) -> ArrivingPrefix | None:
        """Places for what is to come. None: there is no room now. For one that may be computed, and has waited long
        enough or for no other, it is empty."""
        may_wait = self._fetching.total() > 0 or self._scheduler.has_work
        computes = self._config.kv_load_failure_policy == "recompute"
        if not may_wait or arrival.room is None or room > arrival.room:
            hashes = list(arrival.new.spec.hashes)[: (len(arrival.new.spec.prompt) - 1) // self._cache.block_size]
            while True:
                prefix = ArrivingPrefix(self._cache, hashes)
                if prefix.first == len(hashes) or prefix.reserve(self._scheduler.spare_blocks):
                    return prefix
                prefix.close()
                if may_wait or not self._make_room():
                    break
            arrival.room = room
        if may_wait and is_late and computes:
            self._count_failure(TransferError("late", "the cache has no room for it"))
        if not may_wait or (is_late and computes):
            return ArrivingPrefix(self._cache, ())
        return None

    @property
    def _room(self) -> int:
        """Blocks that may be held for sequences that do not run yet."""
        return self._cache.admissible_blocks - self._scheduler.spare_blocks

    def _begin(self, arrival: Arrival, prefix: ArrivingPrefix) -> None:
        arrival.prefix = prefix
        arrival.began = self._clock()
        self._fetching[arrival.new.spec.tenant] += 1
        sink = _Sink(self, arrival, prefix)
        threading.Thread(target=self._fetch, args=(arrival, sink), name="kv-transfer-fetch", daemon=True).start()
        if prefix.first == len(prefix.hashes):
            self._leave_room(arrival)
            self._settle(arrival)  # the peer is told that it may give the prefix up, and nobody waits for that

    def _leave_room(self, arrival: Arrival) -> None:
        """Hold nothing for a sequence in the queue that running ones were promised: it stays cached as any other."""
        if self._room < 0 and arrival.prefix is not None:
            arrival.prefix.close()
            arrival.prefix = None

    def _may_fetch(self, tenant: str) -> bool:
        """Requests name the peers: no tenant takes all fetches with some that do not answer."""
        most, fetching = self._config.limits.most_fetches, self._fetching
        return fetching.total() < most and (not tenant or fetching[tenant] < (most + 1) // 2)

    def take_ready(self) -> list[NewRequest | RequestRejected]:
        """Sequences for the queue, and those that are refused."""
        ready = [*self._ready.values()]
        self._ready.clear()
        return ready

    def on_started(self, keys: Iterable[int]) -> None:
        """These sequences are admitted, and hold what has come for them."""
        self.discard(keys)

    def discard(self, keys: Iterable[int]) -> None:
        """These sequences are gone: end their fetches, and free what was reserved at once."""
        keys = [*keys]
        for key in keys:
            if (arrival := self._arrivals.pop(key, None)) is not None:
                arrival.close()
                self._ready |= arrival.followers  # they may still be wanted: they compute the prompt
                arrival.followers.clear()
            else:
                for leader in self._arrivals.values():
                    leader.followers.pop(key, None)
        for key in keys:
            self._ready.pop(key, None)
        self._count_waits()

    def make_room(self) -> bool:
        """Hold no longer what has come for sequences in the queue, where it stays cached as any other. False: nothing
        was held."""
        settled = [key for key, arrival in self._arrivals.items() if arrival.settled]
        self.discard(settled)
        return bool(settled)

    def close(self) -> None:
        """End all fetches."""
        self.discard(list(self._arrivals))
        self._names.close()

    # In a fetch's thread

    def _fetch(self, arrival: Arrival, sink: "_Sink") -> None:
        error: TransferError | None = None
        try:
            arrival.fetch.run(sink)
        except TransferError as reason:
            error = reason
        except Exception as reason:
            log.exception("kv transfer: a fetch broke")
            error = TransferError("error", str(reason))
        self._inbox.post(partial(self._end, arrival, error))

    def wait_for(self, arrival: Arrival, question: Callable[[], None]) -> None:
        """Have the step loop do it. Raises `TransferError` where the sequence is gone."""
        answer = self._inbox.call(question)
        while not arrival.fetch.cancelled:
            try:
                answer.result(1.0)
                return
            except TimeoutError:
                continue
        raise TransferError("cancelled", "the request is gone")

    # In the step loop's thread, for a fetch

    def place(self, arrival: Arrival, first: int, end: int, content: Sequence[memoryview]) -> None:
        """The content of these spans has come."""
        prefix = _prefix_of(arrival)
        self._put(CachePlaces(prefix.blocks(first, end)), content)
        arrival.placed = end
        self.received_tokens += (end - first) * self._cache.block_size
        if self._cache.begins_anywhere:
            self._publish(arrival, prefix, end)

    def place_state(self, arrival: Arrival, content: Sequence[memoryview]) -> None:
        """The content of the state after all spans has come."""
        prefix = _prefix_of(arrival)
        self._publish(arrival, prefix, len(prefix.hashes))
        prefix.place_state(lambda place: self._put(CachePlaces((), (place,)), content))

    def _put(self, places: CachePlaces, content: Sequence[memoryview]) -> None:
        """What the places had may have to be saved yet: no plan may have come since they were taken."""
        blocks, states = self._cache.take_block_copies(), self._cache.take_state_copies()
        copies = CacheCopies(*(np.array(copies, np.int32).reshape(-1, 3) for copies in (blocks, states)))
        self._executor.put_places(places, content, copies)

    def _publish(self, arrival: Arrival, prefix: ArrivingPrefix, end: int) -> None:
        spec, size = arrival.new.spec, self._cache.block_size
        if self._cache.events is not None:
            described = ScheduledSequence(spec, 0, 0, 0, list(spec.hashes))
            self._cache.events.describe(block_contents(described, prefix.table.committed, end, size))
        prefix.arrived(end)

    def _end(self, arrival: Arrival, error: TransferError | None) -> None:
        self._fetching -= Counter([arrival.new.spec.tenant])  # which forgets tenants that have none
        self.received_bytes += arrival.fetch.received
        self.seconds += self._clock() - arrival.began
        if arrival.settled or arrival.prefix is None:  # it waited for nothing, or is gone
            return
        if error is None:
            self._publish(arrival, arrival.prefix, arrival.placed)
            self.received_prefixes += 1
        arrival.prefix.end()
        self._leave_room(arrival)
        if error is None:
            self._settle(arrival)
        else:
            self._fail(arrival, error)

    def _count_failure(self, error: TransferError) -> None:
        self.failed += 1
        log.warning("kv transfer: %s; what did not come is %s: %s", error.reason, self._becomes, error)

    def _fail(self, arrival: Arrival, error: TransferError) -> None:
        self._count_failure(error)
        self._settle(arrival, error)

    def _settle(self, arrival: Arrival, error: TransferError | None = None) -> None:
        arrival.settled = True
        key = arrival.new.spec.key
        if error is None or self._config.kv_load_failure_policy == "recompute":
            self._ready |= {key: arrival.new, **arrival.followers}
            arrival.followers.clear()
            self._count_waits()
            return
        refused = [key, *arrival.followers]
        arrival.followers.clear()
        self.discard([key])
        # Why is in the log: requests name hosts, and whoever writes them need not learn what answers there.
        refusal = SentError.of(Unavailable("kv_transfer_params: the prefix did not come"))
        self._ready |= {refused_key: RequestRejected(refused_key, refusal) for refused_key in refused}


def _prefix_of(arrival: Arrival) -> ArrivingPrefix:
    if arrival.prefix is None:
        raise TransferError("cancelled", "the request is gone")
    return arrival.prefix


class _Sink:
    """A `PrefixSink`, in the thread of a fetch."""

    def __init__(self, transfers: ArrivingTransfers, arrival: Arrival, prefix: ArrivingPrefix) -> None:
        self._transfers = transfers
        self._arrival = arrival
        cache, self._layouts = transfers._cache, transfers._executor.image_layouts
        self.hashes = prefix.hashes
        self.first = prefix.first
        self.whole = not cache.begins_anywhere
        self._places = [len(prefix.blocks(at, at + 1)) for at in range(len(prefix.hashes))]
        self._states = () if cache.states is None or prefix.first == len(prefix.hashes) else (0,)

    def piece_sizes(self, first: int, end: int) -> list[int]:
        return self._sizes(CachePlaces(range(sum(self._places[first:end]))))

    def state_sizes(self) -> list[int]:
        return self._sizes(CachePlaces((), self._states)) if self._states else []

    def _sizes(self, places: CachePlaces) -> list[int]:
        return [layout.bytes_of(places) for layout in self._layouts]

    def largest_piece(self, wanted: int) -> int:
        span = max(self._places[self.first :], default=0)
        return max(wanted, sum(self._sizes(CachePlaces(range(span)))), sum(self.state_sizes()))

    def take(self, first: int, end: int, payload: memoryview) -> None:
        content = _split(payload, self.piece_sizes(first, end))
        self._transfers.wait_for(self._arrival, partial(self._transfers.place, self._arrival, first, end, content))

    def take_state(self, payload: memoryview) -> None:
        content = _split(payload, self.state_sizes())
        self._transfers.wait_for(self._arrival, partial(self._transfers.place_state, self._arrival, content))


def _split(payload: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    parts: list[memoryview] = []
    at = 0
    for size in sizes:
        parts.append(payload[at : at + size])
        at += size
    return parts
