"""Snapshots of recurrent states: which numbered slot has the state after which tokens.

A snapshot belongs to an exact number of tokens, a multiple of the block size: its identity is the chain hash of the
block that ends there. Says where a state is to be copied; copies none itself. Knows no tensors, rows or plans.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from ..events.cache_events import CacheEvents
from ..tiers.host_tier import HostTier
from ..tiers.landed_images import ImagePlace, LandedImages


class StatePool:
    """Numbered snapshots 0 to `size` - 1; of those that made room, the host's memory keeps the latest `host_size`.

    ==============  =====================  =====================================================
    snapshot is     findable by its hash   becomes
    ==============  =====================  =====================================================
    unused          no                     reserved
    reserved        no: a plan in flight   recent when that plan is applied, or unused if it did
                    writes it              not come so far
    recent          yes                    proven when it is restored a second time
    proven          yes                    recent again, where there are too many proven ones
    retained        yes                    recent again when no scope retains it
    ==============  =====================  =====================================================

    The recent one that was used longest ago makes room, and a retained one where there is none. So a beginning that
    many share outlives any number of prompts that come once: Karedla et al., "Caching Strategies to Improve Disk System
    Performance" (1994), segmented LRU.
    """

    def __init__(
        self,
        size: int,
        host_size: int = 0,
        events: CacheEvents | None = None,
        most_retained: int = 0,
        landing: int = 0,
    ) -> None:
        self.size = size
        self._most_retained = most_retained
        self.host = HostTier(host_size, events)
        self.landed = LandedImages(landing)
        self._events = events
        self.evicted = 0
        """Snapshots that made room for others so far."""
        self.restored = 0
        """How often a sequence began with one so far."""
        self.brought_back = 0
        """How often one came back from the host's memory so far."""
        self.committed: list[ImagePlace] | None = None
        """Snapshots that became findable by being computed, for who takes them away; None: nobody does."""
        self._most_proven = 3 * size // 4
        self._unused = list(range(size - 1, -1, -1))
        self._reserved = set[int]()
        # In the order of eviction.
        self._recent: OrderedDict[bytes, int] = OrderedDict()
        self._proven: OrderedDict[bytes, int] = OrderedDict()
        self._retained: OrderedDict[bytes, int] = OrderedDict()
        self.retainers: Counter[bytes] = Counter()
        """How many scopes retain it, by hash."""
        self._restored_once = set[bytes]()
        self._demoted = set[bytes]()  # the host's memory is not for them
        self._being_restored = set[bytes]()
        self._promises: Counter[bytes] = Counter()
        self._pinned: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Snapshots that can be found on the device."""
        return len(self._recent) + len(self._proven) + len(self._retained)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._recent or digest in self._proven or digest in self._retained

    def is_kept(self, digest: bytes) -> bool:
        """Whether the state of this hash can be found on the device, in the host's memory, or has landed."""
        return digest in self or digest in self.host or digest in self.landed

    def ends(self, hashes: Iterable[bytes]) -> list[int]:
        """After how many of these blocks there is a state on the device, ascending."""
        return [number for number, digest in enumerate(hashes, 1) if digest in self]

    def shareable(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks a sequence may share, now or soon: up to the last state that is kept or promised."""
        number = len(hashes)
        while number and not self.is_kept(hashes[number - 1]) and not self.is_promised(hashes[number - 1]):
            number -= 1
        return number

    def awaited(self, hashes: Iterable[bytes], is_findable: Callable[[bytes], bool]) -> bytes | None:
        """The last of these blocks whose state is promised, unless that of a later one is kept: then it is that one, if
        the block itself is not findable yet."""
        awaited = None
        for digest in hashes:
            if self.is_kept(digest):
                awaited = None if is_findable(digest) else digest
            elif self.is_promised(digest):
                awaited = digest
        return awaited

    def restore(self, digest: bytes, before: bytes | None = None) -> int:
        """The snapshot of this hash, which is on the device, and which the next plan reads: it is not reserved until
        `plan_is_made`. `before`: one that this one continues, and that counts as used too: the next prompt may part a
        little sooner."""
        if before is not None:
            self._use(before)
        self._use(digest)
        self.restored += 1
        self._being_restored.add(digest)
        return self.place_of(digest)

    def _part_of(self, digest: bytes) -> OrderedDict[bytes, int]:
        """Where this one is, which is on the device."""
        parts = self._retained, self._proven, self._recent
        return next(part for part in parts if digest in part)

    def retain(self, digest: bytes) -> bool:
        """A scope wants this one, if it is on the device, to stay beyond others. False: it is not, or too many are."""
        if digest not in self or (digest not in self._retained and len(self._retained) >= self._most_retained):
            return False
        if digest not in self._retained:
            self._retained[digest] = self._part_of(digest).pop(digest)
            self._demoted.discard(digest)
        self.retainers[digest] += 1
        return True

    def let_go(self, digest: bytes, wanted: bool) -> None:
        """A scope gives up one that it retained; unless it is `wanted`, that is the next to make room."""
        _uncount(self.retainers, digest)
        if digest in self._retained and digest not in self.retainers:
            self._recent[digest] = self._retained.pop(digest)
            if not wanted:
                self._recent.move_to_end(digest, last=False)

    def bring_back(self, digest: bytes, but: Sequence[bytes] = ()) -> bool:
        """Let the state of this hash, which is kept, be on the device. False: it has no room there, beside those `but`
        it."""
        if digest in self:
            return True
        self.host.use(digest)
        snapshot = self.reserve(but)
        if snapshot is None:
            return False
        if digest in self.landed:
            self.host.restore_landed(self.landed.restore(digest), snapshot)
        elif digest in self.host:
            self.host.restore(digest, snapshot)
            self.host.use(digest)  # later than what made room for it
            self.brought_back += 1
        else:  # it made room for what was on the device
            self.give_back(snapshot)
            return False
        self.publish(snapshot, digest, computed=False)
        return True

    def _use(self, digest: bytes) -> None:
        if digest not in self:
            self.host.use(digest)
            return
        self._demoted.discard(digest)
        if digest in self._recent and digest in self._restored_once and self._most_proven:
            self._proven[digest] = self._recent.pop(digest)
            if len(self._proven) > self._most_proven:
                oldest, snapshot = self._proven.popitem(last=False)
                self._recent[oldest] = snapshot
        self._restored_once.add(digest)
        self._part_of(digest).move_to_end(digest)

    def plan_is_made(self) -> None:
        """What the plan restores it reads before a later one writes it."""
        self._being_restored.clear()

    def reserve(self, but: Sequence[bytes] = ()) -> int | None:
        """A snapshot for a plan to write: an unused one, or the recent one that was used longest ago, `but` for these.
        None where the others are proven, written by plans in flight, or read by the plan in the making."""
        if self._unused:
            snapshot = self._unused.pop()
        else:
            stay = self._being_restored.union(but, self._pinned) if but or self._pinned else self._being_restored
            oldest = next((digest for digest in chain(self._recent, self._retained) if digest not in stay), None)
            if oldest is None:
                return None
            snapshot = self._part_of(oldest).pop(oldest)
            self._restored_once.discard(oldest)
            self.evicted += 1
            if self._events is not None:
                self._events.removed(oldest, on_host=False)
            if oldest in self._demoted:
                self._demoted.remove(oldest)
            elif self.host.size:
                self.host.save(oldest, snapshot)
        self._reserved.add(snapshot)
        return snapshot

    def publish(self, snapshot: int, digest: bytes, computed: bool = True) -> None:
        """A reserved snapshot has the state of this hash now, as it was `computed`, or will have it when copies are
        made. Of two that are equal the first stays."""
        if digest in self:
            self.give_back(snapshot)
            return
        self._reserved.remove(snapshot)
        self._recent[digest] = snapshot
        if computed and self.committed is not None:
            self.committed.append(ImagePlace(digest, snapshot, of_state=True))
        if self._events is not None:
            self._events.stored(digest, on_host=False)

    def give_back(self, snapshot: int) -> None:
        """A reserved snapshot was not written, or is not wanted."""
        self._reserved.remove(snapshot)
        self._unused.append(snapshot)

    def demote(self, digest: bytes) -> None:
        """Let the snapshot of this hash, if there is one, be the next to make room, and not for the host's memory: what
        it continues is gone, or a later one is of more use."""
        for part in (self._proven, self._retained):
            if digest in part:
                self._recent[digest] = part.pop(digest)
        if digest in self._recent:
            self._recent.move_to_end(digest, last=False)
            self._demoted.add(digest)
        self.host.demote(digest)

    @property
    def pinned(self) -> int:
        """Snapshots that make no room."""
        return len(self._pinned)

    def is_pinned(self, digest: bytes) -> bool:
        return digest in self._pinned

    def pin(self, digest: bytes) -> None:
        """Let the snapshot of this hash make no room until `unpin`: a peer may want it."""
        self._pinned[digest] += 1

    def unpin(self, digest: bytes) -> None:
        _uncount(self._pinned, digest)

    def place_of(self, digest: bytes) -> int:
        """The snapshot of this hash, which is on the device."""
        return self._part_of(digest)[digest]

    def promise(self, digest: bytes) -> None:
        """A running sequence is going to have the state of this hash, and to keep it."""
        self._promises[digest] += 1

    def settle(self, digest: bytes) -> None:
        """Take one promise of this hash back: it is kept, or will not be."""
        _uncount(self._promises, digest)

    def is_promised(self, digest: bytes) -> bool:
        return digest in self._promises

    def check_integrity(self, reserved: Iterable[int], promises: Iterable[bytes]) -> None:
        """Recompute everything from what plans in flight write and running sequences promise. Raises `AssertionError`
        where a snapshot is lost or in two places."""
        assert sorted(reserved) == sorted(self._reserved), "a reservation leaked"
        assert Counter(promises) == self._promises, "a promise of a snapshot leaked"
        findable = [*self._recent.values(), *self._proven.values(), *self._retained.values()]
        assert sorted([*self._unused, *self._reserved, *findable]) == list(range(self.size)), "a snapshot is lost"
        assert len(self) == len(self._recent | self._proven | self._retained), "one hash in two snapshots"
        assert self._retained.keys() <= self.retainers.keys()
        assert len(self._retained) <= self._most_retained
        assert len(self._proven) <= self._most_proven
        assert self._restored_once <= self._recent.keys() | self._proven.keys() | self._retained.keys()
        assert self._demoted <= self._recent.keys()
        self.host.check_integrity()
        assert not self._being_restored, "a plan is being made"


def _uncount(counts: Counter[bytes], digest: bytes) -> None:
    counts[digest] -= 1
    if not counts[digest]:
        del counts[digest]
