"""A second place for blocks that were cached on a device: the host's memory, from where they come back sooner than they
are computed.

Says which blocks are to be copied; copies none itself. Knows no tensors, and nothing of who held a block.
"""

from collections import OrderedDict
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """The content of a `block` of the device goes to a `slot` of the host's memory; with `back` it comes from there."""

    block: int
    slot: int
    back: bool


class HostTier:
    """`size` slots, each with the content of the block of one hash; the one used longest ago is overwritten first.

    What comes back stays here too: evicted again, it need not be copied.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[BlockCopy] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def save(self, digest: bytes, block: int) -> None:
        """The device forgets a block of this hash, and may overwrite it after the copy."""
        slot = self._slots.pop(digest, None)
        if slot is None:
            slot = len(self._slots) if len(self._slots) < self.size else self._slots.popitem(last=False)[1]
            self._copies.append(BlockCopy(block, slot, back=False))
        self._slots[digest] = slot

    def restore(self, digest: bytes, block: int) -> None:
        """The content of this hash comes back into a block that nothing else uses."""
        self._slots.move_to_end(digest)
        self._copies.append(BlockCopy(block, self._slots[digest], back=True))

    def take_block_copies(self) -> list[BlockCopy]:
        """The copies since the last call. They are to be made in this order, after the steps that were planned before
        and before the next one."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self) -> None:
        """Raises `AssertionError` where a slot has two contents, or one that there is not."""
        slots = sorted(self._slots.values())
        assert slots == list(range(len(slots))), "a slot is lost, or has two contents"
        assert len(slots) <= self.size
        assert all(0 <= copy.slot < self.size for copy in self._copies)
