"""A second place for what was cached on a device, blocks or snapshots of states: the host's memory, from where it comes
back sooner than it is computed.

Says what is to be copied; copies nothing itself. Knows no tensors, and nothing of who held a block.
"""

from collections import OrderedDict
from typing import NamedTuple

from ..events.cache_events import CacheEvents


class TierCopy(NamedTuple):
    """What the device has in `place`, a block or a snapshot, goes to a `slot` of the host's memory; with `back` it
    comes from there."""

    place: int
    slot: int
    """Below 0, and only with `back`: that of a landed image, see `landed_slot`."""
    back: bool


def landed_slot(number: int) -> int:
    """The slot that stands for the landed image of this number; what it has comes back once, and is gone then."""
    return -1 - number


def landed_number(slot: int) -> int:
    """The number of the landed image that a slot below 0 stands for."""
    return -1 - slot


class HostTier:
    """`size` slots, each with the content of one hash; the one used longest ago is overwritten first.

    What comes back stays here too: evicted again, it need not be copied.
    """

    def __init__(self, size: int, events: CacheEvents | None = None) -> None:
        self.size = size
        self._events = events
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self.copies: list[TierCopy] = []
        """The copies since the last `take_copies`."""

    def __len__(self) -> int:
        """Hashes whose content is here."""
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def save(self, digest: bytes, place: int) -> bytes | None:
        """The device forgets the content of this hash, and may overwrite it after the copy. Returns the hash whose
        content is lost here for it, if any."""
        lost = None
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = len(self._slots)
            if slot == self.size:
                lost, slot = self._slots.popitem(last=False)
            self.copies.append(TierCopy(place, slot, back=False))
            if self._events is not None:
                if lost is not None:
                    self._events.removed(lost, on_host=True)
                self._events.stored(digest, on_host=True)
        self._slots[digest] = slot
        return lost

    def restore(self, digest: bytes, place: int) -> None:
        """The content of this hash comes back to a place that nothing else uses. It keeps its turn to be overwritten:
        of a prefix that was used as a whole the beginning stays longest."""
        self.copies.append(TierCopy(place, self._slots[digest], back=True))

    def restore_landed(self, number: int, place: int) -> None:
        """A landed image goes to a place that nothing else uses, in the order of the other copies."""
        self.copies.append(TierCopy(place, landed_slot(number), back=True))

    def use(self, digest: bytes) -> None:
        """Let the content of this hash, if it is here, be the last to be overwritten."""
        if digest in self._slots:
            self._slots.move_to_end(digest)

    def demote(self, digest: bytes) -> None:
        """Let the content of this hash, if it is here, be the next to be overwritten."""
        if digest in self._slots:
            self._slots.move_to_end(digest, last=False)

    def take_copies(self) -> list[TierCopy]:
        """The copies since the last call; they are to be made in this order, after the steps that were planned before
        and before the next one."""
        copies, self.copies = self.copies, []
        return copies

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a slot has two contents, or one that there is not."""
        slots = sorted(self._slots.values())
        assert slots == list(range(len(slots))), "a slot is lost, or has two contents"
        assert len(slots) <= self.size
        assert all(copy.slot < self.size and (copy.slot >= 0 or copy.back) for copy in self.copies)
