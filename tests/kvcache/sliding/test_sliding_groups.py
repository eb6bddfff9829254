"""Layers that keep the last tokens alone: what a sequence holds, what a prefix hit needs, and what comes back."""

from random import Random

import numpy as np
import pytest

from charonia.kvcache.block_table import NO_BLOCK, BlockTable
from charonia.kvcache.layer_groups import LayerGroups
from charonia.kvcache.manager import KVCacheManager

SIZE = 4
GROUPS = LayerGroups(full=1, sliding=2, window=9)
"""The first token after two whole blocks sees all of both."""


def cache(blocks: int = 90, host_blocks: int = 0, groups: LayerGroups = GROUPS) -> KVCacheManager:
    return KVCacheManager(blocks, SIZE, host_blocks=host_blocks, groups=groups)


def run(manager: KVCacheManager, tokens: int, first: int = 0, chunk: int = SIZE) -> BlockTable:
    """A sequence that has computed so many tokens, in chunks."""
    hashes = manager.digest(range(first, first + tokens))
    table = manager.open(hashes, tokens)
    for end in range(table.cached, tokens, chunk):
        assert manager.extend(table, min(end + chunk, tokens))
        computed = min(end + chunk, tokens)
        manager.commit(table, hashes[table.committed : computed // SIZE])
        slide(manager, table, computed)
    return table


def slide(manager: KVCacheManager, table: BlockTable, computed: int) -> None:
    assert manager.sliding is not None
    manager.sliding.slide(table, computed)


def sliding_blocks(manager: KVCacheManager, table: BlockTable) -> list[int]:
    """Blocks that the table holds in each sliding group."""
    count = manager.groups.total
    held = [sum(block != NO_BLOCK for block in table.blocks[group::count]) for group in range(count)]
    assert held[: manager.groups.full] == [manager.spans_of(table)] * manager.groups.full
    return held[manager.groups.full :]


def test_a_long_sequence_holds_its_window_and_a_chunk_in_each_sliding_group() -> None:
    manager = cache()
    hashes = manager.digest(range(100))
    table = manager.open(hashes, 100)
    for start, end in ((0, 40), (40, 52), (52, 53), (53, 99)):
        assert manager.extend(table, end)
        most = -(-(GROUPS.window + end - start) // SIZE) + 1
        assert max(sliding_blocks(manager, table)) <= most
        slide(manager, table, end)
        assert max(sliding_blocks(manager, table)) <= -(-GROUPS.window // SIZE) + 1
    assert manager.blocks - manager.free_blocks == 25 + 2 * 3
    manager.check_integrity()


def test_a_prefix_hit_takes_what_the_next_token_sees() -> None:
    manager = cache()
    run(manager, 41)
    table = manager.open(manager.digest(range(41)), 41)
    assert table.cached == 40
    assert sliding_blocks(manager, table) == [2, 2]
    assert table.blocks[: 8 * 3] == [
        block for span in range(8) for block in (table.blocks[3 * span], NO_BLOCK, NO_BLOCK)
    ]
    manager.check_integrity()


def test_a_prefix_ends_where_sliding_groups_have_what_is_seen() -> None:
    """Of 40 tokens a block is gone in one group, the ninth: 32 are left to go on from, for of what else is
    cached in sliding groups only the last two blocks count."""
    manager = cache()
    table = run(manager, 41)
    manager.close(table)
    hashes = manager.digest(range(41))
    pool = manager._pool
    missing = pool._index.pop(hashes[8] + b"\2")
    pool._hashes[missing] = None
    table = manager.open(hashes, 41)
    assert table.cached == 32
    manager.close(table)
    table = manager.open(hashes[:9], 37)
    assert table.cached == 32
    manager.check_integrity()


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_a_prefix_that_is_gone_is_computed_again_or_comes_back_from_the_host(host_blocks: int) -> None:
    manager = cache(blocks=36, host_blocks=host_blocks)
    manager.close(run(manager, 41))
    manager.close(run(manager, 41, first=1000))
    table = manager.open(manager.digest(range(41)), 41)
    assert table.cached == 0
    assert manager.room_for(table, 41)
    manager.restore(table, 41)
    assert table.cached == table.restored == (40 if host_blocks else 0)
    if host_blocks:
        assert sliding_blocks(manager, table) == [2, 2]
    manager.check_integrity()


def test_admission_counts_shared_sliding_blocks_that_will_not_come_back() -> None:
    manager = cache()
    first = run(manager, 41)
    free = manager.free_blocks
    second = manager.open(manager.digest(range(41)), 41)
    assert manager.free_blocks == free
    assert manager.admissible_blocks == free - 4
    slide(manager, first, 48)
    assert manager.free_blocks == free
    assert manager.admissible_blocks == free
    manager.close(second)
    assert manager.free_blocks == free + 4
    manager.check_integrity()


def test_layers_without_exception_may_slide() -> None:
    manager = cache(blocks=8, groups=LayerGroups(0, 1, 9))
    table = run(manager, 400)
    assert manager.blocks - manager.free_blocks == 2
    assert manager.longest >= 400
    manager.close(table)
    manager.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_nobody_lacks_a_block_that_admission_promised(seed: int) -> None:
    """Sequences that were admitted with room to their end take turns, some over shared prefixes, without more tokens in
    flight than there may be."""
    random = Random(seed)
    groups = LayerGroups(random.choice((0, 1, 2)), random.choice((1, 3)), random.choice((1, 5, 17)), in_flight=24)
    manager = cache(random.choice((60, 120, 200)), groups=groups)
    running: list[tuple[BlockTable, list[bytes], int, int]] = []
    ended = 0
    while ended < 40:
        left = [manager.spans_for(end) - manager.spans_of(other) for other, _, _, end in running]
        held = [manager.spans_of(other) - other.slid for other, *_ in running]
        assert manager.sliding is not None
        spare = manager.sliding.demand.all_to_come(np.array(left, np.int32), np.array(held, np.int32))
        assert spare <= manager.admissible_blocks
        total = random.randint(1, min(120, manager.longest))
        hashes = manager.digest(range(1000 * random.randint(0, 2), 3000)[:total])
        table = manager.open(hashes, total)
        if manager.room_for(table, total, spare):
            running.append((table, hashes, table.cached, total))
        else:
            manager.close(table)
            assert running, "one alone has room"
        budget = groups.in_flight
        chunks: list[int] = []
        for table, _, computed, end in running:
            chunks.append(min(random.randint(0, budget), end - computed))
            budget -= chunks[-1]
            assert manager.extend(table, computed + chunks[-1]), "promised"
        for at, chunk in enumerate(chunks):
            table, hashes, computed, end = running[at]
            computed += chunk
            manager.commit(table, hashes[table.committed : computed // SIZE])
            slide(manager, table, computed)
            running[at] = table, hashes, computed, end
        for table, _, computed, end in [*running]:
            if computed == end:
                manager.close(table)
                ended += 1
        running = [entry for entry in running if entry[2] < entry[3]]
        manager.check_integrity()
