"""What a prompt lacks and a directory has: which images have to come, for whom they stay, and which are written."""

import numpy as np
import pytest

from charonia.kvcache.exchange.directory_tier import DirectoryTier
from charonia.kvcache.layer_groups import LayerGroups
from charonia.kvcache.manager import KVCacheManager
from charonia.kvcache.tiers.landed_images import ImagePlace

BLOCK = 4
TOKENS = np.arange(18, dtype=np.int32)


def filled(cache: KVCacheManager, tokens: np.ndarray = TOKENS) -> list[bytes]:
    """Compute a prompt, and let it go; its hashes."""
    hashes = cache.digest(tokens)
    table = cache.open(hashes, len(tokens))
    assert cache.extend(table, len(tokens))
    cache.commit(table, hashes[table.committed :])
    cache.close(table)
    return hashes


def fetch(tier: DirectoryTier, cache: KVCacheManager, hashes: list[bytes], present: set[bytes]) -> list[ImagePlace]:
    held, missing = tier.hold(tier.wanted(hashes, len(TOKENS), present).images)
    tier.settle(missing, [True] * len(missing))
    tier.check_integrity(held)
    return held


def test_what_is_computed_is_to_be_written_once() -> None:
    cache = KVCacheManager(8, BLOCK, landing=8)
    tier = DirectoryTier(cache)
    hashes = filled(cache)
    assert [image.key for image in tier.take_unwritten()] == hashes
    assert tier.take_unwritten() == []
    filled(cache, np.arange(100, 132, dtype=np.int32))  # evicts them
    tier.take_unwritten()
    filled(cache)
    assert tier.take_unwritten() == []


def test_a_prompt_wants_what_follows_the_cached_part() -> None:
    cache = KVCacheManager(8, BLOCK, landing=8)
    tier = DirectoryTier(cache)
    hashes = filled(cache, TOKENS[:9])
    whole = cache.digest(TOKENS)
    assert tier.lacking(whole, len(TOKENS)) == whole[2:]
    wanted = tier.wanted(whole, len(TOKENS), {whole[2]})
    assert [image.key for image in wanted.images] == [whole[2]]
    assert (wanted.before, wanted.tokens) == (8, 4)
    assert hashes == whole[:2]
    assert tier.wanted(whole, len(TOKENS), {whole[3]}).tokens == 0
    assert tier.wanted(whole, 12, {whole[2]}).tokens == 0  # the last known token has to run


def test_what_has_landed_is_what_a_sequence_begins_with() -> None:
    cache = KVCacheManager(8, BLOCK, landing=8)
    tier = DirectoryTier(cache)
    hashes = cache.digest(TOKENS)
    held = fetch(tier, cache, hashes, {*hashes[:3]})
    assert cache.found_tokens(hashes, len(TOKENS)) == 12
    table = cache.open(hashes, len(TOKENS))
    cache.restore(table, len(TOKENS))
    assert (table.cached, table.landed, table.restored) == (12, 12, 0)
    copies = cache.take_block_copies()
    assert [(copy.place, -1 - copy.slot, copy.back) for copy in copies] == [
        (block, image.number, True) for block, image in zip(table.blocks, held, strict=True)
    ]
    tier.release(held)
    tier.check_integrity(())
    assert tier.take_dropped() == ([], [])
    cache.close(table)
    cache.check_integrity()


def test_images_stay_as_long_as_somebody_waits_for_them() -> None:
    cache = KVCacheManager(8, BLOCK, landing=8)
    tier = DirectoryTier(cache)
    hashes = cache.digest(TOKENS)
    wanted = tier.wanted(hashes, len(TOKENS), {*hashes}).images
    first, missing = tier.hold(wanted)
    second, none = tier.hold(wanted)
    assert (first, none) == (second, [])
    tier.release(first)
    tier.settle(missing, [True, True, False, True])
    assert cache.found_tokens(hashes, len(TOKENS)) == 8
    assert tier.take_dropped().blocks == [missing[2].number]
    tier.release(second)
    assert tier.take_dropped().blocks == [missing[number].number for number in (0, 1, 3)]
    tier.check_integrity(())


def test_what_nobody_waits_for_any_more_is_dropped_when_it_comes() -> None:
    cache = KVCacheManager(8, BLOCK, landing=4)
    tier = DirectoryTier(cache)
    hashes = cache.digest(TOKENS)
    held, missing = tier.hold(tier.wanted(hashes, len(TOKENS), {*hashes}).images)
    tier.release(held)
    assert cache.tiers is not None
    assert cache.tiers.landed.room == 0
    assert tier.take_dropped().blocks == []
    tier.settle(missing, [True] * 4)
    assert tier.take_dropped().blocks == [image.number for image in missing]
    assert cache.tiers.landed.room == 4


@pytest.mark.parametrize(("room", "tokens"), [(0, 0), (1, 4), (3, 12), (9, 16)])
def test_a_prefix_is_no_longer_than_there_is_room_for(room: int, tokens: int) -> None:
    cache = KVCacheManager(8, BLOCK, landing=room)
    tier = DirectoryTier(cache)
    hashes = cache.digest(TOKENS)
    wanted = tier.wanted(hashes, len(TOKENS), {*hashes})
    assert wanted.tokens == tokens
    assert len(wanted.images) == tokens // BLOCK


def test_of_sliding_groups_comes_what_the_next_token_sees() -> None:
    cache = KVCacheManager(24, BLOCK, groups=LayerGroups(1, 1, window=5, in_flight=16), landing=24)
    tier = DirectoryTier(cache)
    hashes = cache.digest(TOKENS)
    present = {key for full, others in tier.lookup_keys(hashes) for key in (*full, *others)}
    held = fetch(tier, cache, hashes, present)
    assert len(held) == 4 + 1
    table = cache.open(hashes, len(TOKENS))
    cache.restore(table, len(TOKENS))
    assert (table.cached, table.slid) == (16, 3)
    tier.release(held)
    tier.check_integrity(())
    cache.close(table)
    cache.check_integrity()


def test_a_sequence_with_a_state_begins_where_there_is_one() -> None:
    cache = KVCacheManager(8, BLOCK, snapshots=2, draft_states=0, landing=8, landing_states=2)
    tier = DirectoryTier(cache)
    hashes = cache.digest(TOKENS)
    present = {*hashes, tier.state_key(hashes[2])}
    wanted = tier.wanted(hashes, len(TOKENS), present)
    assert wanted.tokens == 12
    assert [image.of_state for image in wanted.images] == [False] * 3 + [True]
    assert tier.wanted(hashes, len(TOKENS), {*hashes}).tokens == 0
    held = fetch(tier, cache, hashes, present)
    table = cache.open(hashes, len(TOKENS))
    cache.restore(table, len(TOKENS))
    assert table.cached == 12
    assert table.snapshot >= 0
    ((snapshot, slot, back),) = cache.take_state_copies()
    assert (snapshot, -1 - slot, back) == (table.snapshot, held[-1].number, True)
    tier.release(held)
    tier.check_integrity(())
    assert tier.take_unwritten() == []  # what came is no news
    cache.close(table)
    cache.check_integrity()


def test_a_state_that_made_room_is_not_written_with_what_came_into_its_place() -> None:
    cache = KVCacheManager(8, BLOCK, snapshots=1, draft_states=0)
    tier = DirectoryTier(cache)
    assert cache.states is not None
    ours, theirs = cache.digest(TOKENS)[:2]
    for block_hash in (ours, theirs):
        place = cache.states.reserve()
        assert place == 0
        cache.states.publish(place, block_hash)
    assert tier.take_unwritten() == [ImagePlace(tier.state_key(theirs), 0, of_state=True)]
    assert ours not in cache.states
