"""The block tables of sequences: what is found of a prefix, shared, taken and given back.

Knows no tensors, no rows, no steps and no requests.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import chain, islice, takewhile

import numpy as np
from numpy.typing import NDArray

from .block_hashes import HashExtras, chain_hashes, group_key, group_keys
from .block_pool import BlockPool
from .block_table import NO_BLOCK, BlockTable
from .events.cache_events import CacheEvents, GroupEvents
from .layer_groups import ONE_GROUP, LayerGroups, last_end
from .retention.session_retention import NO_RETENTION, RetentionBudget, SessionRetention
from .sliding.sliding_groups import SlidingGroups
from .states.draft_states import DraftStates
from .states.state_pool import StatePool
from .tiers.block_tiers import BlockTiers
from .tiers.host_tier import HostTier, TierCopy
from .tiers.landed_images import ImagePlace, LandedImages

_ANY_LENGTH = 1 << 30


class KVCacheManager:
    """The cache's blocks, shared by whole blocks of equal prefixes, and what sequences keep beside them: snapshots of
    states, and copies of both in the host's memory. Lives in the step loop's thread; only `digest` may be called from
    elsewhere."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        snapshots: int = 0,
        draft_states: int | None = None,
        groups: LayerGroups = ONE_GROUP,
        host_snapshots: int = 0,
        events: CacheEvents | None = None,
        retention: RetentionBudget = NO_RETENTION,
        landing: int = 0,
        landing_states: int = 0,
    ) -> None:
        """`blocks` of `block_size` tokens each; the host's memory has room for the latest `host_blocks` and
        `host_snapshots` that were evicted, and for `landing` blocks and `landing_states` on their way from elsewhere.
        A model with recurrent states has `snapshots`, at whose ends alone a prefix is shared, and `draft_states`, the
        slots for states before drafts; for others that is None."""
        if blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks and tokens in them, got {blocks} blocks of {block_size}")
        self.blocks = blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.groups = groups
        self.span_blocks = groups.total
        """Blocks of the same tokens, one of each group."""
        self.window = groups.window_spans(block_size)
        """Spans that the token after them sees in a sliding group."""
        self.events = events
        self._pool = BlockPool(blocks, events, retention.lists, retention.blocks)
        self.sliding = SlidingGroups(groups, block_size, self._pool) if groups.sliding else None
        """None: all layers keep every token."""
        of_states = None if events is None else GroupEvents(events, groups.total)
        self.states = None
        if snapshots and prefix_caching:
            self.states = StatePool(snapshots, host_snapshots, of_states, retention.states, landing_states)
        self.tiers = None
        """None: there are blocks and snapshots on the device alone."""
        if host_blocks or host_snapshots or landing or landing_states:
            host, landed = HostTier(host_blocks, events), LandedImages(landing)
            self.tiers = BlockTiers(self._pool, host, landed, self.states, self._take)
        self.retention = None
        """None: scopes retain nothing."""
        if self._pool.retained is not None:
            self.retention = SessionRetention(self._pool.retained, self.states, block_size, groups.total)
        self.begins_anywhere = groups.total == groups.full == 1 and self.states is None
        """Whether a sequence can go on after any block that is cached with all before it."""
        self.draft_states = DraftStates(snapshots, draft_states or 0) if snapshots or draft_states is not None else None
        self.is_findable = self._pool.is_cached if self.tiers is None else self.tiers.is_findable
        """Whether the block of a key, see `group_key`, need not be computed."""
        self.committed: list[ImagePlace] | None = None
        """Blocks that became findable by being computed, for who takes them away; None: nobody does."""
        self._tables: set[BlockTable] = set()
        self.held_tables = 0  # of prefixes that no sequence has
        self._computing: Counter[bytes] = Counter()

    @property
    def free_blocks(self) -> int:
        """Blocks that no table holds, cached ones included."""
        return self._pool.free

    @property
    def admissible_blocks(self) -> int:
        """Free blocks, but those that sequences will take in place of blocks that they share and that slide."""
        return self._pool.free if self.sliding is None else self._pool.free - self.sliding.shared

    @property
    def open_tables(self) -> int:
        return len(self._tables) - self.held_tables

    def spans_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take in a group that keeps them."""
        return -(-tokens // self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """The most blocks that a sequence holds until it has `tokens` tokens."""
        spans = self.spans_for(tokens)
        return spans * self.span_blocks if self.sliding is None else self.sliding.demand.blocks(spans)

    def spans_of(self, table: BlockTable) -> int:
        """Spans that the table has, those included that slid."""
        return len(table.blocks) // self.span_blocks

    def held_blocks(self, table: BlockTable) -> int:
        """Blocks that the table holds."""
        return len(table.blocks) - self.groups.sliding * table.slid

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there is room for; of one that fits however long it is, a large
        number."""
        spans = self.blocks // self.span_blocks if self.sliding is None else self.sliding.demand.longest(self.blocks)
        return _ANY_LENGTH if spans is None else spans * self.block_size

    def missing_blocks(self, table: BlockTable, tokens: int) -> int:
        """Blocks that `extend` takes, negative where the table has more."""
        return self.spans_for(tokens) * self.span_blocks - len(table.blocks)

    def digest(
        self, tokens: NDArray[np.int32] | Iterable[int], extras: HashExtras = (), parent: bytes | None = None
    ) -> list[bytes]:
        """See `chain_hashes`. Empty without prefix caching.

        Costs about 0.1 microseconds a token: call it when a request arrives, never while a step is scheduled.
        """
        return chain_hashes(tokens, self.block_size, extras, parent) if self.prefix_caching else []

    def open(self, hashes: Sequence[bytes], known: int) -> BlockTable:
        """A table for a sequence of `known` tokens that shares the longest cached prefix; takes nothing more. The
        prefix ends before the newest known token: that one has to run, or nothing is sampled."""
        shared = hashes[: (known - 1) // self.block_size]
        table = BlockTable(tuple(hashes))
        forked = 0
        resumable = None
        if self.states is not None:
            forked = self._forked(shared)
            resumable = self.states.ends(shared[:forked])
        if not self.begins_anywhere:
            shared = shared[: self._prefix_end(shared, 0, self._pool.is_cached, resumable)]
        self._hold_spans(table, shared, restore=False)
        table.cached = table.committed * self.block_size
        table.forked = max(table.cached, forked * self.block_size)
        table.states = [hashes[number - 1] for number in (resumable or ())[-2:]]
        self._tables.add(table)
        self._computing.update(table.promised[table.committed :])
        return table

    def found(self, hashes: Sequence[bytes], more: Container[bytes] = ()) -> int:
        """The blocks that a sequence could begin with without computing them, if these `more` keys were in the cache
        too: of blocks, and, as of a group behind all others, of states."""
        ends = None
        if self.states is not None:
            kept, group = self.states.is_kept, self.groups.total
            ends = [end for end, key in enumerate(hashes, 1) if kept(key) or group_key(key, group) in more]
        return self._prefix_end(hashes, 0, lambda key: self.is_findable(key) or key in more, ends)

    def found_tokens(self, hashes: Collection[bytes], known: int) -> int:
        """Of a prompt of `known` tokens those that a sequence could begin with without computing them."""
        return self.found([*islice(hashes, (known - 1) // self.block_size)]) * self.block_size

    def _prefix_end(
        self, hashes: Sequence[bytes], first: int, is_cached: Callable[[bytes], bool], resumable: list[int] | None
    ) -> int:
        """How many spans of these hashes a sequence that has the `first` can begin with, going by which blocks are
        cached: of full groups all of them, of sliding ones those that the next token sees. `resumable`: the only ends
        that there may be, ascending, if sequences have states; those beyond the end are taken out."""
        groups, following = self.groups, hashes[first:]
        spans: Iterable[bool] = map(is_cached, following)
        if groups.full != 1:
            full = range(groups.full)
            spans = (all(is_cached(group_key(block_hash, group)) for group in full) for block_hash in following)
        end = last_end(first + sum(takewhile(bool, spans)), resumable)
        return end if self.sliding is None else self.sliding.prefix_end(hashes, end, is_cached, resumable)

    def _hold_spans(self, table: BlockTable, hashes: Sequence[bytes], restore: bool) -> bool:
        """Let the table have the spans of `hashes` after those that it has, but of sliding groups only what the next
        token sees. `restore`: also what is elsewhere. False: one is missing; then the table has no more spans than
        before, or, where it can begin anywhere, those before the missing one."""
        groups, first = self.groups, table.committed
        slid = 0 if self.sliding is None else max(len(hashes) - self.window, 0)
        columns: list[list[int]] = []
        for group in range(self.span_blocks):
            begin = first if group < groups.full else max(first, slid)
            keys = group_keys(hashes[begin:], group)
            columns.append([NO_BLOCK] * (begin - first) + self._share(keys, restore))
            if len(columns[-1]) < len(hashes) - first and not self.begins_anywhere:
                self._drop_all([*chain(*columns)])
                return False
        table.blocks += chain.from_iterable(zip(*columns, strict=True))
        table.committed = first + len(columns[0])
        if self.sliding is not None:
            self.sliding.share(table, first, slid)
        return table.committed == len(hashes)

    def _share(self, keys: Sequence[bytes], restore: bool) -> list[int]:
        """Hold each of these blocks once more, up to the first that is not there; with `restore`, in the tiers too."""
        blocks: list[int] = []
        for key in keys:
            block = self._pool.share(key)
            if block is None and restore and self.tiers is not None:
                block = self.tiers.restore(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def shareable(self, hashes: Sequence[bytes], known: int) -> int:
        """Tokens of the prefix that are cached, or that an open table computes right now. Where sequences have states,
        those of them up to the last snapshot that there is, or that is promised."""
        blocks = hashes[: (known - 1) // self.block_size]
        shared = self._forked(blocks)
        if self.states is not None:
            shared = self.states.shareable(blocks[:shared])
        return shared * self.block_size

    def forked(self, hashes: Sequence[bytes], known: int) -> int:
        """Tokens of the prefix that are cached, or that an open table computes right now, whatever states there are."""
        return self._forked(hashes[: (known - 1) // self.block_size]) * self.block_size

    def _forked(self, blocks: Sequence[bytes]) -> int:
        """How many of the first `blocks` are cached, or computed right now."""
        is_findable, computing = self.is_findable, self._computing
        return sum(takewhile(bool, (is_findable(key) or key in computing for key in blocks)))

    def awaits(self, hashes: Sequence[bytes], known: int) -> bytes | None:
        """The last block of the prefix that an open table computes right now and this sequence could share. None when
        no table computes its next uncached block: nothing is won by waiting. Where sequences have states: the last
        block whose state is promised, unless that of a later one is kept."""
        awaited = None
        blocks = hashes[: (known - 1) // self.block_size]
        if self.states is not None:
            return self.states.awaited(blocks[: self._forked(blocks)], self.is_findable)
        for block_hash in blocks:
            if not self.is_findable(block_hash):
                if not self.being_computed(block_hash):
                    break
                awaited = block_hash
        return awaited

    def restore(
        self, table: BlockTable, known: int, describe: Callable[[int, int], None] = lambda first, end: None
    ) -> None:
        """Let a table that `open` just made for `known` tokens also have the blocks that follow in the tiers, and set
        the snapshot that it begins with. There must be room for all that it is to hold. `describe`: tells `events` what
        the blocks from the first up to but not including the end stand for: of what has landed they know nothing."""
        if self.tiers is not None and not self.tiers.is_empty:
            self._restore_from(self.tiers, table, table.promised[: (known - 1) // self.block_size], describe)
        if self.states is not None and table.states:
            table.snapshot = self.states.restore(*reversed(table.states))

    def _restore_from(
        self, tiers: BlockTiers, table: BlockTable, hashes: Sequence[bytes], describe: Callable[[int, int], None]
    ) -> None:
        first = table.committed
        states = self.states
        resumable = None
        if states is not None:
            most = table.forked // self.block_size
            resumable = [number for number in range(first + 1, most + 1) if states.is_kept(hashes[number - 1])]
        end = self._prefix_end(hashes, first, self.is_findable, resumable)
        taken = self.groups.full * (end - first) + self.groups.sliding * min(self.window, end - first)
        if end <= first or taken > self._pool.free:
            return
        if tiers.has_landed:
            describe(first, end)
        tiers.use(hashes[first:end], self.span_blocks)  # what makes room for them is to take the place of others
        if states is not None and not states.bring_back(hashes[end - 1], table.states[-1:]):
            return
        table.landed = sum(block_hash in tiers.landed for block_hash in hashes[first:end]) * self.block_size
        if self._hold_spans(table, hashes[:end], restore=True):
            table.states = [*table.states, *(hashes[number - 1] for number in resumable or ())][-2:]
        self._settle(hashes[first : table.committed])
        came = (table.committed - first) * self.block_size
        table.landed = min(table.landed, came)
        table.restored = came - table.landed
        table.cached += came
        table.forked = max(table.forked, table.cached)

    def take_block_copies(self) -> list[TierCopy]:
        """The copies between the device and its tiers since the last call, to be made before the next plan's step."""
        return [] if self.tiers is None else self.tiers.host.take_copies()

    def take_state_copies(self) -> list[TierCopy]:
        """The copies of snapshots, in the same way: they come before those that the plan writes."""
        return [] if self.states is None else self.states.host.take_copies()

    def room_for(self, table: BlockTable, tokens: int, spare: int = 0) -> bool:
        """Whether the table may grow to `tokens` tokens, sliding as they are computed, and leave `spare` blocks. Where
        nothing slides, `extend(table, tokens)` would succeed."""
        spans = self.spans_of(table)
        more = max(self.spans_for(tokens) - spans, 0)
        needed = more * self.span_blocks
        if self.sliding is not None:
            needed = self.sliding.demand.to_come(more, spans - table.slid)
        return needed + spare <= self.admissible_blocks

    def extend(self, table: BlockTable, tokens: int) -> bool:
        """Let the table hold `tokens` tokens in all; all or nothing. False: too few blocks are free."""
        missing = self.missing_blocks(table, tokens)
        if missing > self._pool.free:
            return False
        table.blocks.extend([self._take() for _ in range(missing)])
        return True

    def _take(self) -> int:
        """A block for new content. One must be free."""
        block, evicted = self._pool.take()
        if evicted is not None and self.tiers is not None:
            evicted = self.tiers.save(evicted, block)
        if evicted is not None and self.states is not None:
            self.states.demote(evicted)
        return block

    def commit(self, table: BlockTable, hashes: Sequence[bytes]) -> None:
        """The next blocks of the table are full and final, with these hashes: from now on they can be found."""
        first, total = table.committed, self.span_blocks
        for group in range(total):
            blocks = table.blocks[first * total + group :: total]
            for block, key in zip(blocks, group_keys(hashes, group), strict=False):
                if block == NO_BLOCK:
                    continue
                self._pool.publish(block, key)
                if self.committed is not None:
                    self.committed.append(ImagePlace(key, block))
        table.committed += len(hashes)
        self._settle(table.promised[first : table.committed])

    def close(self, table: BlockTable) -> None:
        """Give all blocks back, newest first: a prefix outlives what was built on it."""
        self._tables.remove(table)
        self._settle(table.promised[table.committed :])
        if self.sliding is not None:
            self.sliding.close(table)
        self._drop_all(table.blocks)
        table.blocks.clear()

    def _drop_all(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            if block != NO_BLOCK:
                self._pool.drop(block)

    def being_computed(self, block_hash: bytes) -> bool:
        """Whether an open table will commit this block."""
        return block_hash in self._computing

    def _settle(self, hashes: Iterable[bytes]) -> None:
        """A table has computed these blocks, or gives them up."""
        for block_hash in hashes:
            self._computing[block_hash] -= 1
            if not self._computing[block_hash]:
                del self._computing[block_hash]

    def check_integrity(self) -> None:
        """Recompute free + cached + used == total, holders and promises from the tables. Raises `AssertionError` where
        something leaked."""
        held = [block for table in self._tables for block in table.blocks if block != NO_BLOCK]
        self._pool.check_integrity(held)
        if self.tiers is not None:
            self.tiers.host.check_integrity()
        if self.sliding is not None:
            self.sliding.check_integrity(self._tables)
        if self.retention is not None:
            self.retention.check_integrity()
        computing: Counter[bytes] = Counter()
        for table in self._tables:
            assert len(table.blocks) % self.span_blocks == 0, "a span lacks a block"
            blocks = [block for block in table.blocks if block != NO_BLOCK]
            assert len(set(blocks)) == len(blocks), "a block twice in one table"
            assert table.committed <= self.spans_of(table)
            computing.update(table.promised[table.committed :])
        assert computing == self._computing, "a promise leaked"
