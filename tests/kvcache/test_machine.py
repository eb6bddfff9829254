"""The cache against a model that is a dictionary, in any order of calls."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from charonia.kvcache.block_table import BlockTable
from charonia.kvcache.manager import KVCacheManager


class CacheMachine(RuleBasedStateMachine):
    """Sequences are prefixes of three streams; what a block was committed with is noted by its id."""

    tables = Bundle("tables")

    @initialize(blocks=st.integers(1, 64), block_size=st.integers(1, 4), host_blocks=st.sampled_from((0, 1, 3, 30)))
    def begin(self, blocks: int, block_size: int, host_blocks: int) -> None:
        self.cache = KVCacheManager(blocks, block_size, host_blocks=host_blocks)
        self.slots: dict[int, bytes] = {}
        self.total = blocks
        self.streams: dict[BlockTable, int] = {}
        self.contents: dict[int, bytes] = {}

    def hashes(self, stream: int, tokens: int) -> list[bytes]:
        return self.cache.digest(range(1000 * stream, 1000 * stream + tokens))

    @rule(target=tables, stream=st.integers(0, 2), known=st.integers(1, 80))
    def open(self, stream: int, known: int) -> BlockTable:
        hashes = self.hashes(stream, known)
        table = self.cache.open(hashes, known)
        assert table.cached < known
        assert [self.contents[block] for block in table.blocks] == hashes[: len(table.blocks)]
        self.streams[table] = stream
        if not self.cache.room_for(table, known):
            return table
        self.cache.restore(table, known)
        self.move()
        assert table.cached == len(table.blocks) * self.cache.block_size < known
        assert [self.contents[block] for block in table.blocks] == hashes[: len(table.blocks)]
        return table

    def move(self) -> None:
        """As an executor does: what is moved must be there, and what leaves the device is not there any more."""
        for block, slot, back in self.cache.take_block_copies():
            if back:
                self.contents[block] = self.slots[slot]
            else:
                self.slots[slot] = self.contents.pop(block)

    @rule(table=tables, tokens=st.integers(0, 80))
    def extend(self, table: BlockTable, tokens: int) -> None:
        before, free = list(table.blocks), self.cache.free_blocks
        missing = max(self.cache.blocks_for(tokens) - len(before), 0)
        possible = self.cache.room_for(table, tokens)
        assert self.cache.extend(table, tokens) == possible == (missing <= free)
        assert table.blocks[: len(before)] == before, "append-only"
        self.move()
        taken = table.blocks[len(before) :]
        assert len(taken) == (missing if possible else 0)
        for block in taken:
            self.contents.pop(block, None)

    @rule(table=tables, blocks=st.integers(1, 4))
    def commit(self, table: BlockTable, blocks: int) -> None:
        end = min(table.committed + blocks, len(table.blocks))
        hashes = self.hashes(self.streams[table], end * self.cache.block_size)
        for block in range(table.committed, end):
            self.contents[table.blocks[block]] = hashes[block]
        self.cache.commit(table, hashes[table.committed :])
        assert table.committed == end
        assert not [block for block in hashes if block not in self.contents.values()]

    @rule(table=consumes(tables))
    def close(self, table: BlockTable) -> None:
        self.cache.close(table)
        del self.streams[table]

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            held = {block for table in self.streams for block in table.blocks}
            assert self.cache.free_blocks == self.total - len(held)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
