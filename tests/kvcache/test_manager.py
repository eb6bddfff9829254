"""The cache's verbs, one by one."""

import numpy as np
import pytest

from charonia.kvcache.block_table import BlockTable
from charonia.kvcache.manager import KVCacheManager

TOKENS = np.arange(100, dtype=np.int32)


def filled(cache: KVCacheManager, tokens: int) -> BlockTable:
    """A sequence that computed the first `tokens` of TOKENS and committed its full blocks."""
    hashes = cache.digest(TOKENS[:tokens])
    table = cache.open(hashes, tokens)
    assert cache.extend(table, tokens)
    cache.commit(table, hashes[table.committed :])
    return table


def test_only_full_blocks_have_a_hash() -> None:
    cache = KVCacheManager(8, 4)
    assert [len(cache.digest(TOKENS[:n])) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_stands_for_everything_before_it() -> None:
    cache = KVCacheManager(8, 4)
    one, other = cache.digest(TOKENS[:12]), cache.digest([99, *TOKENS[1:12]])
    assert not set(one) & set(other)


def test_a_chain_is_continued_from_its_last_block() -> None:
    cache = KVCacheManager(8, 4)
    whole = cache.digest(TOKENS[:12], ("adapter",))
    head = cache.digest(TOKENS[:4], ("adapter",))
    assert head + cache.digest(TOKENS[4:12].tolist(), ("adapter",), head[-1]) == whole


def test_extras_set_equal_tokens_apart() -> None:
    cache = KVCacheManager(8, 4)
    chains = [cache.digest(TOKENS[:8], extras) for extras in ((), ("a",), ("b",), ("a", "b"), ("ab",), ("", "ab"))]
    assert len({chain[-1] for chain in chains}) == len(chains)


def test_open_shares_the_longest_cached_prefix() -> None:
    cache = KVCacheManager(8, 4)
    first = filled(cache, 10)
    second = cache.open(cache.digest(TOKENS[:30]), 30)
    assert (second.cached, second.blocks) == (8, first.blocks[:2])
    assert cache.free_blocks == 8 - 3, "shared blocks are held, not taken anew"


def test_the_newest_token_is_never_cached() -> None:
    cache = KVCacheManager(8, 4)
    filled(cache, 8)
    assert cache.open(cache.digest(TOKENS[:8]), 8).cached == 4
    assert cache.open(cache.digest(TOKENS[:9]), 9).cached == 8


def test_closed_blocks_are_still_found() -> None:
    cache = KVCacheManager(8, 4)
    cache.close(filled(cache, 8))
    assert cache.free_blocks == 8
    assert cache.open(cache.digest(TOKENS[:9]), 9).cached == 8
    assert cache.free_blocks == 6


def test_the_end_of_a_prefix_is_given_up_before_its_beginning() -> None:
    cache = KVCacheManager(4, 4)
    cache.close(filled(cache, 12))
    other = cache.open([], 8)
    assert cache.extend(other, 8), "one block was never used, one has to be given up"
    assert cache.open(cache.digest(TOKENS[:13]), 13).cached == 8


def test_blocks_nobody_can_find_are_taken_first() -> None:
    cache = KVCacheManager(4, 4)
    cache.close(filled(cache, 8))
    lone = cache.open([], 6)
    assert cache.extend(lone, 6)
    cache.close(lone)
    again = cache.open([], 6)
    assert cache.extend(again, 6)
    assert cache.open(cache.digest(TOKENS[:9]), 9).cached == 8


def test_the_longest_unused_prefix_is_given_up_first() -> None:
    cache = KVCacheManager(4, 4)
    old, new = filled(cache, 4), cache.open([], 4)
    assert cache.extend(new, 4)
    cache.commit(new, [b"new"])
    cache.close(old)
    cache.close(new)
    third = cache.open([], 12)
    assert cache.extend(third, 12)
    assert cache.open([b"new"], 5).cached == 4
    assert cache.open(cache.digest(TOKENS[:4]), 5).cached == 0


def test_extend_is_all_or_nothing() -> None:
    cache = KVCacheManager(4, 4)
    table = cache.open([], 40)
    assert cache.room_for(table, 16)
    assert not cache.room_for(table, 17)
    assert not cache.room_for(table, 16, spare=1)
    assert not cache.extend(table, 17)
    assert (table.blocks, cache.free_blocks) == ([], 4)
    assert cache.extend(table, 5)
    assert cache.extend(table, 8), "the second block has room for these"
    assert cache.free_blocks == 2


def test_blocks_are_being_computed_from_open_to_commit_or_close() -> None:
    cache = KVCacheManager(8, 4)
    one, two, three = cache.digest(TOKENS[:12])
    table = cache.open([one, two, three], 12)
    assert cache.extend(table, 12)
    cache.commit(table, [one])
    assert [cache.being_computed(block) for block in (one, two, three)] == [False, True, True]
    assert cache.awaits([one, two, b"else"], 40) == two
    assert cache.awaits([one, b"else"], 40) is None, "the next one is nobody's work"
    assert cache.awaits([one, two], 8) is None, "the second block would not be shared: it holds the newest token"
    cache.close(table)
    assert not cache.being_computed(two)


def test_of_equal_blocks_the_first_stays_the_one_that_is_found() -> None:
    cache = KVCacheManager(8, 4)
    first = filled(cache, 8)
    second = cache.open(cache.digest(TOKENS[:8]), 8)
    assert cache.extend(second, 8)
    cache.commit(second, cache.digest(TOKENS[:8])[1:])
    assert second.blocks[1] != first.blocks[1], "tables are append-only: nothing is merged"
    assert cache.open(cache.digest(TOKENS[:9]), 9).blocks == first.blocks
    cache.check_integrity()


def test_without_prefix_caching_nothing_is_shared() -> None:
    cache = KVCacheManager(8, 4, prefix_caching=False)
    assert cache.digest(TOKENS) == []
    table = cache.open([], 8)
    assert cache.extend(table, 8)
    cache.close(table)
    assert cache.free_blocks == 8


def test_a_leak_does_not_pass_the_integrity_check() -> None:
    cache = KVCacheManager(8, 4)
    filled(cache, 8).blocks.pop()
    with pytest.raises(AssertionError):
        cache.check_integrity()


@pytest.mark.parametrize(("blocks", "block_size"), [(0, 16), (4, 0)])
def test_an_empty_cache_is_refused(blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="a cache needs"):
        KVCacheManager(blocks, block_size)
