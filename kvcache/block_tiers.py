"""The blocks of the device with what stands behind them: those that made room, in the host's memory, and images that
have landed. Knows no tables."""

from collections.abc import Sequence

from .block_pool import BlockPool
from .host_tier import HostTier
from .landed_images import LandedImages
from .states.state_pool import StatePool


class BlockTiers:
    """Blocks by their keys, see `group_key`, wherever they are. `states`: whose snapshots lose their worth with
    blocks."""

    def __init__(self, pool: BlockPool, host: HostTier, landed: LandedImages, states: StatePool | None) -> None:
        self.pool = pool
        self.host = host
        self.landed = landed
        self._states = states

    def is_findable(self, key: bytes) -> bool:
        return key in self.pool or key in self.host or key in self.landed

    def is_elsewhere(self, key: bytes) -> bool:
        """Whether a block that is not on the device can be had without computing it."""
        return key in self.host or key in self.landed

    def take(self) -> int:
        """A block for new content; what it had goes to the host's memory. One must be free."""
        block, evicted = self.pool.take()
        if evicted is not None:
            if self.host.size:
                evicted = self.host.save(evicted, block)
            if evicted is not None and self._states is not None and evicted not in self.pool:
                self._states.demote(evicted)
        return block

    def share(self, keys: Sequence[bytes], restore: bool) -> list[int]:
        """Hold each of these blocks once more, up to the first that is not on the device, or cannot be brought back
        where they are to be `restore`d; their numbers."""
        blocks: list[int] = []
        for key in keys:
            block = self.pool.share(key)
            if block is None and restore:
                block = self._restore(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _restore(self, key: bytes) -> int | None:
        """A block that gets what is elsewhere; None: it is not, or no longer."""
        if not self.is_elsewhere(key):
            return None
        block = self.take()
        if key in self.landed:
            self.host.restore_landed(self.landed.restore(key), block)
        elif key in self.host:
            self.host.restore(key, block)
        else:  # it made room for what was evicted from the block
            self.pool.drop(block)
            return None
        self.pool.publish(block, key)
        return block
