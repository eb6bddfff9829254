"""The block tables of sequences, and the identity of their blocks: a chain of hashes.

Knows no tensors, no rows, no steps and no requests.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from .draft_states import DraftStates
from .host_tier import BlockCopy, HostTier
from .state_pool import StatePool

HashExtras = tuple[str, ...]
"""Adapter, tenant and salt, which set equal tokens apart: they enter at the root and so mark the whole chain."""


class BlockPool:
    """Numbered blocks 0 to `size` - 1, each held by `references[block]` tables.

    Blocks without a holder form an intrusive doubly linked list in eviction order; one that has a hash can still be
    found there. So free and cached blocks are the same list, and caching costs no memory:

    ======================  =======  ==========  =====================
    block is                holders  in the list  findable by its hash
    ======================  =======  ==========  =====================
    being filled            1        no          no
    full, committed         1 or more no         yes
    cached                  0        yes, tail   yes, until taken
    worthless               0        yes, head   no
    ======================  =======  ==========  =====================
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self.references = array("i", [0]) * size
        self._end = size  # the sentinel that closes the ring: its next is the head, its previous the tail
        self._next = array("i", [*range(1, size + 1), 0])
        self._previous = array("i", [size, *range(size)])
        self._hashes: list[bytes | None] = [None] * size
        self._index: dict[bytes, int] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def take(self) -> tuple[int, bytes | None]:
        """Hold the block at the head of the list; the hash of what it cached is forgotten, and returned. One must be
        free."""
        block: int = self._next[self._end]
        assert block != self._end, "no block is free"
        self._unlink(block)
        digest, self._hashes[block] = self._hashes[block], None
        if digest is not None:
            del self._index[digest]
        self.references[block] = 1
        return block, digest

    def share(self, digest: bytes) -> int | None:
        """Hold the block of this hash once more, or None where no block has it."""
        block = self._index.get(digest)
        if block is None:
            return None
        if self.references[block] == 0:
            self._unlink(block)
        self.references[block] += 1
        return block

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full block findable. Of two blocks with equal content the first stays the one that is found."""
        if digest not in self._index:
            self._index[digest] = block
            self._hashes[block] = digest

    def drop(self, block: int) -> None:
        """Give up one hold. A block that can be found again goes to the tail; one without a hash is taken first."""
        self.references[block] -= 1
        if self.references[block]:
            return
        after = self._next[self._end] if self._hashes[block] is None else self._end
        before = self._previous[after]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.free -= 1

    def check_integrity(self, held: Iterable[int]) -> None:
        """Recompute everything from `held`: every block of every table, repeated where shared."""
        references = [0] * self.size
        for block in held:
            references[block] += 1
        assert references == self.references.tolist(), "a reference count is not the number of holders"
        listed, block = [], self._next[self._end]
        while block != self._end:
            assert self._next[self._previous[block]] == block == self._previous[self._next[block]]
            listed.append(block)
            assert len(listed) <= self.size, "the free list runs in a circle"
            block = self._next[block]
        assert sorted(listed) == [block for block in range(self.size) if references[block] == 0]
        assert self.free == len(listed)
        hashed = {digest: block for block, digest in enumerate(self._hashes) if digest is not None}
        assert hashed == self._index, "index and blocks disagree"


class BlockTable:
    """The blocks of one sequence in order of position; filled and freed by the manager alone, append-only. `cached`:
    tokens that `open` and `restore` found, `restored` of them the latter. `committed`: leading blocks that are
    findable, or equal to one that is. `promised`: the hashes known at `open`; those from `committed` on are what this
    sequence is computing.

    Where sequences have states: `snapshot` is the one that this one's state begins as, -1 for as nothing, and `forked`
    are the tokens, `cached` or more, of which others had the blocks at `open`, or were computing them. `states`: the
    hashes of the last two snapshots of the prefix, the last of which ends it.
    """

    __slots__ = ("blocks", "cached", "committed", "forked", "promised", "restored", "snapshot", "states")

    def __init__(self, blocks: list[int], cached: int, promised: Sequence[bytes]) -> None:
        self.blocks = blocks
        self.cached = cached
        self.committed = len(blocks)
        self.promised = promised
        self.restored = 0
        self.snapshot = -1
        self.states: list[bytes] = []
        self.forked = self.cached


class KVCacheManager:
    """A pool of `blocks` blocks of `block_size` tokens, shared by whole blocks of equal prefixes. Of those that were
    evicted from it, the latest `host_blocks` are kept in the host's memory. `snapshots`: of the states of sequences,
    if they have any: then a prefix is shared up to a block's end whose state is among them. `draft_states`: slots for
    the states before drafts; None: sequences have no states.

    Lives in the step loop's thread; only `digest` may be called from elsewhere.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        snapshots: int = 0,
        draft_states: int | None = None,
    ) -> None:
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks and tokens in them, got {blocks} blocks of {block_size}")
        if host_blocks and snapshots:
            raise ValueError("blocks in the host's memory have no snapshots of states beside them")
        self.blocks = blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._pool = BlockPool(blocks)
        self._host = HostTier(host_blocks) if host_blocks else None
        self.states = StatePool(snapshots) if snapshots and prefix_caching else None
        self.draft_states = None if draft_states is None else DraftStates(snapshots, draft_states)
        self._tables: set[BlockTable] = set()
        self._computing: Counter[bytes] = Counter()

    @property
    def free_blocks(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return self._pool.free

    @property
    def open_tables(self) -> int:
        return len(self._tables)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def digest(
        self, tokens: NDArray[np.int32] | Iterable[int], extras: HashExtras = (), parent: bytes | None = None
    ) -> list[bytes]:
        """SHA-256 hashes of the full blocks of `tokens`, which follow the block hashed `parent` or begin the sequence:
        each over its parent's hash and its own tokens. Empty without prefix caching.

        Costs about 0.1 microseconds a token: call it when a request arrives, never while a step is scheduled.
        """
        if not self.prefix_caching:
            return []
        parent = parent or sha256(repr(extras).encode()).digest()  # repr keeps ("a", "b") apart from ("ab",)
        packed = tokens.astype(np.int32).tobytes() if isinstance(tokens, np.ndarray) else array("i", tokens).tobytes()
        width = 4 * self.block_size
        hashes: list[bytes] = []
        for start in range(0, len(packed) - width + 1, width):
            parent = sha256(parent + packed[start : start + width]).digest()
            hashes.append(parent)
        return hashes

    def open(self, hashes: Sequence[bytes], known: int) -> BlockTable:
        """A table for a sequence of `known` tokens that shares the longest cached prefix; takes nothing more. The
        prefix ends before the newest known token: that one has to run, or nothing is sampled."""
        blocks: list[int] = []
        shared = hashes[: (known - 1) // self.block_size]
        forked = 0
        resumable: list[int] = []
        if self.states is not None:
            forked = self._forked(shared)
            resumable = self._resumable(shared[:forked], self.states)
            shared = shared[: max(resumable, default=0)]
        for block_hash in shared:
            block = self._pool.share(block_hash)
            if block is None:
                break
            blocks.append(block)
        table = BlockTable(blocks, len(blocks) * self.block_size, tuple(hashes))
        table.forked = max(table.cached, forked * self.block_size)
        table.states = [hashes[number - 1] for number in resumable[-2:]]
        self._tables.add(table)
        self._computing.update(table.promised[table.committed :])
        return table

    def shareable(self, hashes: Sequence[bytes], known: int) -> int:
        """Tokens of the prefix that are cached, or that an open table computes right now. Where sequences have states,
        those of them up to the last snapshot that there is, or that is promised."""
        blocks = hashes[: (known - 1) // self.block_size]
        shared, states = self._forked(blocks), self.states
        if states is not None:
            while shared and blocks[shared - 1] not in states and not states.is_promised(blocks[shared - 1]):
                shared -= 1
        return shared * self.block_size

    def forked(self, hashes: Sequence[bytes], known: int) -> int:
        """Tokens of the prefix that are cached, or that an open table computes right now, whatever states there are."""
        return self._forked(hashes[: (known - 1) // self.block_size]) * self.block_size

    def _forked(self, blocks: Sequence[bytes]) -> int:
        """How many of the first `blocks` are cached, or computed right now."""
        held = (self._is_findable(block_hash) or self.being_computed(block_hash) for block_hash in blocks)
        return sum(takewhile(bool, held))

    def _resumable(self, blocks: Sequence[bytes], states: StatePool) -> list[int]:
        """After how many of the first `blocks` a sequence can begin: they are cached, and the last one's state is kept.
        Ascending."""
        cached = takewhile(lambda numbered: numbered[1] in self._pool, enumerate(blocks, 1))
        return [number for number, block_hash in cached if block_hash in states]

    def awaits(self, hashes: Sequence[bytes], known: int) -> bytes | None:
        """The last block of the prefix that an open table computes right now and this sequence could share. None when
        no table computes its next uncached block: nothing is won by waiting. Where sequences have states: the last
        block whose state is promised, unless that of a later one is kept."""
        awaited = None
        blocks = hashes[: (known - 1) // self.block_size]
        if self.states is not None:
            for block_hash in blocks[: self._forked(blocks)]:
                if block_hash in self.states:
                    awaited = None if block_hash in self._pool else block_hash
                elif self.states.is_promised(block_hash):
                    awaited = block_hash
            return awaited
        for block_hash in blocks:
            if not self._is_findable(block_hash):
                if not self.being_computed(block_hash):
                    break
                awaited = block_hash
        return awaited

    def _is_findable(self, block_hash: bytes) -> bool:
        return block_hash in self._pool or (self._host is not None and block_hash in self._host)

    def restore(self, table: BlockTable, known: int) -> None:
        """Let a table that `open` just made for `known` tokens have the blocks too that follow in the host's memory:
        `take_block_copies` tells what is to be copied. There must be room for all that it is to hold. Where sequences
        have states, `table.snapshot` is the one to begin with from now on."""
        if self.states is not None and table.states:
            table.snapshot = self.states.restore(*reversed(table.states))
        if self._host is None:
            return
        first, size = len(table.blocks), self.block_size
        for block_hash in table.promised[first : (known - 1) // size]:
            block = self._pool.share(block_hash)
            if block is None:
                if block_hash not in self._host:
                    break
                block = self._take()
                if block_hash not in self._host:  # it made room for what was evicted from the block
                    self._pool.drop(block)
                    break
                self._host.restore(block_hash, block)
                self._pool.publish(block, block_hash)
            table.blocks.append(block)
            table.committed += 1
            self._settle(block_hash)
        table.restored = (len(table.blocks) - first) * size
        table.cached += table.restored

    def take_block_copies(self) -> list[BlockCopy]:
        """See `HostTier.take_block_copies`."""
        return [] if self._host is None else self._host.take_block_copies()

    def room_for(self, table: BlockTable, tokens: int, spare: int = 0) -> bool:
        """Whether `extend(table, tokens)` would succeed and leave `spare` blocks free."""
        return self.blocks_for(tokens) - len(table.blocks) + spare <= self._pool.free

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Let the table hold `tokens` tokens in all; all or nothing. False: too few blocks are free."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing > self._pool.free:
            return False
        table.blocks.extend([self._take() for _ in range(missing)])
        return True

    def _take(self) -> int:
        block, evicted = self._pool.take()
        if evicted is not None and self._host is not None:
            self._host.save(evicted, block)
        if evicted is not None and self.states is not None:
            self.states.demote(evicted)
        return block

    def commit(self, table: BlockTable, hashes: Iterable[bytes]) -> None:
        """The next blocks of the table are full and final, with these hashes: from now on they can be found."""
        for block_hash in hashes:
            self._pool.publish(table.blocks[table.committed], block_hash)
            if table.committed < len(table.promised):
                self._settle(table.promised[table.committed])
            table.committed += 1

    def close(self, table: BlockTable) -> None:
        """Give all blocks back, newest first: a prefix outlives what was built on it."""
        self._tables.remove(table)
        for block_hash in table.promised[table.committed :]:
            self._settle(block_hash)
        for block in reversed(table.blocks):
            self._pool.drop(block)
        table.blocks.clear()

    def being_computed(self, block_hash: bytes) -> bool:
        """Whether an open table will commit this block."""
        return block_hash in self._computing

    def _settle(self, block_hash: bytes) -> None:
        self._computing[block_hash] -= 1
        if not self._computing[block_hash]:
            del self._computing[block_hash]

    def check_integrity(self) -> None:
        """Recompute free + cached + used == total, holders and promises from the tables. Raises `AssertionError` where
        something leaked."""
        self._pool.check_integrity(block for table in self._tables for block in table.blocks)
        if self._host is not None:
            self._host.check_integrity()
        computing: Counter[bytes] = Counter()
        for table in self._tables:
            assert len(set(table.blocks)) == len(table.blocks), "a block twice in one table"
            assert table.committed <= len(table.blocks)
            computing.update(table.promised[table.committed :])
        assert computing == self._computing, "a promise leaked"
