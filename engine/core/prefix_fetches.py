"""Requests that wait for what a directory has of their prefix, before the scheduler gets them: it is looked up, and
fetched if that is faster than to compute it. Other sequences go on meanwhile.

Lives in the step loop's thread; files are touched by others.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import NamedTuple

from ...core.metrics import FetchDecision
from ...kvcache.exchange.directory_tier import DirectoryTier, WantedPrefix
from ...kvcache.exchange.image_directory import ImageDirectory
from ...kvcache.tiers.landed_images import ImagePlace
from ...processes.daemon_threads import DaemonThreads
from ...scheduler.plan import StepUpdates
from ...scheduler.sequence import SequenceSpec
from ..worker.image_files import ImageMover
from .cache_events import CacheEventRecorder
from .inbox import NewRequest

LOOKUP_SECONDS = 0.5
"""How long a request waits to know what there is for it. While a lookup takes longer, others do not wait for theirs."""
STALLED_SECONDS = 5.0
"""While a fetch takes longer, no other begins."""
_LEAST_PATIENCE = 0.05
"""Seconds for which a fetch is waited for in any case; otherwise as long as computing would have taken."""
_WORTH = 0.8
"""A fetch is to take this part at most of what computing takes."""
_LAST_WEIGHT = 0.3
_FORGETTING = 0.98
"""After each request that computed because files were slow, they are believed to be so much faster: one day it is tried
again."""


class FetchPace:
    """What an image takes to come, learnt from those that came."""

    def __init__(self) -> None:
        self._image_seconds = 0.0

    def observe(self, images: int, seconds: float) -> None:
        last = seconds / images
        self._image_seconds += (last - self._image_seconds) * (_LAST_WEIGHT if self._image_seconds else 1.0)

    def pays(self, images: int, computing: float) -> bool:
        """Whether so many images come in less than the seconds of `computing`."""
        if images * self._image_seconds <= _WORTH * computing:
            return True
        self._image_seconds *= _FORGETTING
        return False


@dataclass(slots=True)
class _WaitingRequest:
    request: NewRequest
    since: float
    """By the clock of the fetches, as the next."""
    deadline: float
    """Then it goes on as it is."""
    looked_up: bool = False
    fetches: set[int] = field(default_factory=set)
    """Numbers of those that it waits for."""


class _Fetch(NamedTuple):
    images: Sequence[ImagePlace]
    began: float
    waiting: list[int]
    """The keys of the requests that wait for it."""


class PrefixFetches:
    """A `PrefixOrigin`: requests and images on their way. `shares`: the directory's part of each rank. `post`: has the
    loop call what threads find, from any of them. `prompt_seconds`: what a prompt's tokens take to compute after so
    many. `events`: who is told what is written."""

    name = "directory"
    holds_blocks = False
    held_blocks = 0

    def __init__(
        self,
        tier: DirectoryTier,
        mover: ImageMover,
        shares: Sequence[ImageDirectory],
        post: Callable[[Callable[[], None]], None],
        prompt_seconds: Callable[[int, int], float],
        events: CacheEventRecorder | None = None,
    ) -> None:
        self._tier = tier
        self._mover = mover
        self._shares = shares
        self._post = post
        self._prompt_seconds = prompt_seconds
        self._events = events
        self._pace = FetchPace()
        self._lookups = DaemonThreads("prefix-lookup", 1)
        self._waiting: dict[int, _WaitingRequest] = {}
        self._held: dict[int, list[ImagePlace]] = {}  # by request that has not begun
        self._fetches: dict[int, _Fetch] = {}
        self._fetch_of: dict[ImagePlace, int] = {}  # images on their way
        self._numbers = count()
        self._unanswered: dict[int, float] = {}  # lookups by their request, and when they began
        self._ready: dict[int, NewRequest] = {}
        self._waited_seconds = 0.0
        self.decisions = Counter(dict.fromkeys(FetchDecision, 0))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def fetching(self) -> int:
        """Fetches whose outcome is not known."""
        return len(self._fetches)

    def take(self, new: NewRequest) -> bool:
        spec, now = new.spec, time.monotonic()
        if spec.sampling.prompt_logprobs is not None or spec.key in self._waiting:
            return False
        hashes = self._tier.lacking(tuple(spec.hashes), len(spec.prompt))
        if not hashes or any(now - began > LOOKUP_SECONDS for began in self._unanswered.values()):
            return False
        self._unanswered[spec.key] = now
        self._waiting[spec.key] = _WaitingRequest(new, now, now + LOOKUP_SECONDS)
        self._lookups.start(partial(self._look_up, spec.key, hashes))
        return True

    def _look_up(self, key: int, hashes: Sequence[bytes]) -> None:
        """In a thread of its own."""
        present = set[bytes]()
        try:
            for needed, others in self._tier.lookup_keys(hashes):
                if not all(map(self._is_there, needed)):
                    break
                present.update(needed, filter(self._is_there, others))
        finally:
            self._post(partial(self._finish_lookup, key, hashes, present))

    def _is_there(self, key: bytes) -> bool:
        return all(key in share for share in self._shares)

    def _finish_lookup(self, key: int, hashes: Sequence[bytes], present: Set[bytes]) -> None:
        """`present`: the keys of the request's prefix that the directory has for every rank, of these hashes."""
        self._unanswered.pop(key, None)
        self._tier.forget_lacking(hashes, present)
        waiting = self._waiting.get(key)
        if waiting is None or waiting.looked_up:
            return
        waiting.looked_up = True
        spec = waiting.request.spec
        wanted = self._tier.wanted(tuple(spec.hashes), len(spec.prompt), present)
        if wanted.tokens and self._is_worth(wanted):
            self._fetch(spec, waiting, wanted)
        else:
            self._let_go(key)

    def _is_worth(self, wanted: WantedPrefix) -> bool:
        now = time.monotonic()
        if any(now - fetch.began > STALLED_SECONDS for fetch in self._fetches.values()):
            self.decisions[FetchDecision.STALLED] += 1
            return False
        if not self._pace.pays(len(wanted.images), self._prompt_seconds(wanted.tokens, wanted.before)):
            self.decisions[FetchDecision.COMPUTED] += 1
            return False
        return True

    def _fetch(self, spec: SequenceSpec, waiting: _WaitingRequest, wanted: WantedPrefix) -> None:
        held, missing = self._tier.hold(wanted.images)
        self._held[spec.key] = held
        if missing:
            number = next(self._numbers)
            self._fetches[number] = _Fetch(missing, time.monotonic(), [])
            self._fetch_of |= dict.fromkeys(missing, number)
            self._mover.fetch(missing).add_done_callback(partial(self._on_fetched, number, len(missing)))
        waiting.fetches = {self._fetch_of[image] for image in held if image in self._fetch_of}
        for number in waiting.fetches:
            self._fetches[number].waiting.append(spec.key)
        patience = max(self._prompt_seconds(wanted.tokens, wanted.before), _LEAST_PATIENCE)
        waiting.deadline = time.monotonic() + min(patience, STALLED_SECONDS)
        if not waiting.fetches:
            self._let_go(spec.key)

    def _on_fetched(self, number: int, images: int, fetched: Future[list[bool]]) -> None:
        """Called by the thread that read."""
        try:
            arrived = fetched.result()
        except CancelledError:  # the ranks end
            arrived = [False] * images
        self._post(partial(self._finish_fetch, number, arrived))

    def _finish_fetch(self, number: int, arrived: Sequence[bool]) -> None:
        """`arrived`: which of its images have landed."""
        fetch = self._fetches.pop(number)
        for image in fetch.images:
            del self._fetch_of[image]
        self._tier.settle(fetch.images, arrived)
        if landed := sum(arrived):
            self._pace.observe(landed, time.monotonic() - fetch.began)
        for key in fetch.waiting:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.fetches.discard(number)
                if not waiting.fetches:
                    self.decisions[FetchDecision.FETCHED] += 1
                    self._let_go(key)

    def _let_go(self, key: int) -> None:
        waiting = self._waiting.pop(key)
        self._waited_seconds += time.monotonic() - waiting.since
        self._ready[key] = waiting.request

    def turn(self) -> list[NewRequest]:
        self._exchange()
        if self._waiting:
            now = time.monotonic()
            for key in [key for key, waiting in self._waiting.items() if waiting.deadline <= now]:
                if self._waiting[key].looked_up:
                    self.decisions[FetchDecision.LATE] += 1
                self._let_go(key)
        ready = [*self._ready.values()]
        self._ready.clear()
        return ready

    def patience(self) -> float:
        deadline = min((waiting.deadline for waiting in self._waiting.values()), default=inf)
        return max(deadline - time.monotonic(), 0.0)

    def on_updates(self, updates: StepUpdates) -> None:
        self.discard([key for key, _ in updates.started])
        self._exchange()

    def discard(self, keys: Iterable[int]) -> None:
        """These requests have begun, or ended."""
        for key in keys:
            self._waiting.pop(key, None)
            self._ready.pop(key, None)
            if held := self._held.pop(key, None):
                self._tier.release(held)

    def _exchange(self) -> None:
        """Write what became findable since the last call, which the next plan may overwrite, and drop what nobody
        wants."""
        if unwritten := self._tier.take_unwritten():
            if self._events is not None:
                for image in unwritten:
                    self._events.writing(image.key)
            self._mover.store(unwritten).add_done_callback(partial(self._on_stored, unwritten))
        dropped = self._tier.take_dropped()
        if any(dropped):
            self._mover.drop(dropped)

    def _on_stored(self, images: Sequence[ImagePlace], stored: Future[list[bool]]) -> None:
        """Called by the thread that wrote."""
        written = [False] * len(images) if stored.cancelled() else stored.result()
        self._post(partial(self._finish_store, images, written))

    def _finish_store(self, images: Sequence[ImagePlace], written: Sequence[bool]) -> None:
        """`written`: which of them lie in the directory, and were not dropped on their way."""
        self._tier.forget(image.key for image, is_there in zip(images, written, strict=True) if not is_there)
        if self._events is not None:
            for image, is_there in zip(images, written, strict=True):
                self._events.written(image.key, is_there)

    def make_room(self) -> bool:
        return False

    def totals(self) -> dict[str, float]:
        """See `EngineTotals.directory`."""
        decisions = {decision.value: number for decision, number in self.decisions.items()}
        return self._mover.totals.by_name() | decisions | {"waited_seconds": self._waited_seconds}

    def check_integrity(self) -> None:
        self._tier.check_integrity(image for held in self._held.values() for image in held)
        on_their_way = {image: number for number, fetch in self._fetches.items() for image in fetch.images}
        assert on_their_way == self._fetch_of
        waited_for = {number for waiting in self._waiting.values() for number in waiting.fetches}
        assert waited_for <= self._fetches.keys(), "a request waits for what will not come"

    def close(self) -> None:
        self._lookups.close()
