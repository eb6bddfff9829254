"""What stands behind the blocks of the device: the host's memory, for blocks that made room, and landed images.

The one object that the manager has of them, where there are any. Knows no tables.
"""

from collections.abc import Callable, Sequence

from ..block_hashes import group_key
from ..block_pool import BlockPool
from ..states.state_pool import StatePool
from .host_tier import HostTier
from .landed_images import LandedImages


class BlockTiers:
    """Blocks by their keys, see `group_key`. `states`: what lies there of snapshots is asked for with the blocks.
    `take`: gives a block of the device for new content."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostTier,
        landed: LandedImages,
        states: StatePool | None,
        take: Callable[[], int],
    ) -> None:
        self._pool = pool
        self.host = host
        self.landed = landed
        """Images of blocks; those of states are in `states`."""
        self._states = states
        self._take = take

    @property
    def is_empty(self) -> bool:
        """Whether nothing can come from here now."""
        states = self._states
        return not (self.host.size or self.has_landed or (states is not None and states.host.size))

    @property
    def has_landed(self) -> bool:
        """Whether images of blocks or states are on their way, or have landed."""
        return bool(self.landed) or (self._states is not None and bool(self._states.landed))

    def is_findable(self, key: bytes) -> bool:
        """Whether a block can be had without computing it, on the device or from here."""
        return key in self._pool or key in self.host or key in self.landed

    def save(self, key: bytes, block: int) -> bytes | None:
        """The content of this key has made room in a block of the device. Returns the key of what is lost for it."""
        lost = self.host.save(key, block) if self.host.size else key
        return None if lost is None or lost in self._pool else lost

    def use(self, hashes: Sequence[bytes], groups: int) -> None:
        """Let the blocks of these spans be the last to be overwritten, the first of them latest."""
        for block_hash in reversed(hashes):
            for group in range(groups):
                self.host.use(group_key(block_hash, group))

    def restore(self, key: bytes) -> int | None:
        """A block of the device that gets the content of this key; None: it is not here, or no longer."""
        if key not in self.host and key not in self.landed:
            return None
        block = self._take()
        if key in self.landed:
            self.host.restore_landed(self.landed.restore(key), block)
        elif key in self.host:
            self.host.restore(key, block)
        else:  # it made room for what was evicted from the block
            self._pool.drop(block)
            return None
        self._pool.publish(block, key)
        return block
