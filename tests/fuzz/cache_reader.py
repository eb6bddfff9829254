"""A reader of cache events over real sockets, which loses some of them, and what it should know in the end.

Decodes by vLLM's published definitions, stated here anew. Checks of every event that its tokens are those that its
hashes stand for.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
import zmq

from charonia.kvcache.block_hashes import chain_hashes
from charonia.kvcache.events.cache_events import split_key
from charonia.kvcache.manager import KVCacheManager

_SECONDS = 10_000
"""Milliseconds after which a batch is not to be expected any more."""


class _BlockStored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, forbid_unknown_fields=True):
    pass


class _MapBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[_BlockStored | _BlockRemoved | _AllBlocksCleared]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class FindableBlock(NamedTuple):
    digest: int
    """The hash as events have it."""
    group: int
    medium: str


class CacheReader:
    """Reads `endpoint`, and asks at `replay` for what is missing. One in `1 / losses` of the batches gets lost on its
    way."""

    def __init__(self, endpoint: str, replay: str, topic: str, random: Random, losses: float, arrays: bool) -> None:
        self.blocks: set[FindableBlock] = set()
        self.asked = 0
        """How often it asked for missing batches."""
        self.unavailable = 0
        """Batches that were missing there, too."""
        self._decode = msgspec.msgpack.Decoder(_ArrayBatch if arrays else _MapBatch).decode
        self._topic, self._random, self._losses = topic.encode(), random, losses
        self._next = 0
        self._context = zmq.Context()
        self._subscriber, self._dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for socket in (self._subscriber, self._dealer):
            socket.set_hwm(0)
        self._subscriber.subscribe(self._topic)
        self._subscriber.connect(endpoint)
        self._dealer.connect(replay)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read_up_to(self, number: int) -> None:
        """Take in all batches before this one; what has not come by then is asked for."""
        while self._next < number:
            if not self._subscriber.poll(20 if self._losses else 100):
                self._ask()
                self.unavailable += max(number - self._next, 0)
                self._next = max(self._next, number)
                return
            topic, sequence, payload = self._subscriber.recv_multipart()
            assert topic == self._topic
            if self._random.random() >= self._losses:
                self._take(int.from_bytes(sequence, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if number > self._next:
            self._ask()
        if number >= self._next:
            self.unavailable += number - self._next
            self._next = number + 1
            self._apply(payload)

    def _ask(self) -> None:
        self.asked += 1
        self._dealer.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._dealer.poll(_SECONDS), "nobody replays"
            empty, topic, sequence, payload = self._dealer.recv_multipart()
            assert (empty, topic) == (b"", self._topic)
            if sequence == b"\xff" * 8:
                assert payload == b""
                return
            number = int.from_bytes(sequence, "big")
            if number >= self._next:
                self.unavailable += number - self._next
                self._next = number + 1
                self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        for event in self._decode(payload).events:
            match event:
                case _BlockStored() | _StoredArray():
                    self._store(event)
                case _BlockRemoved(hashes, medium, group) | _RemovedArray(hashes, medium, group):
                    leaving = {FindableBlock(digest, group or 0, medium or "GPU") for digest in hashes}
                    assert len(leaving) == len(hashes)
                    assert self.unavailable or leaving <= self.blocks, "what was not there is removed"
                    self.blocks -= leaving
                case _:
                    self.blocks.clear()

    def _store(self, event: _BlockStored | _StoredArray) -> None:
        size, hashes = event.block_size, event.block_hashes
        assert len(event.token_ids) == size * len(hashes)
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(hashes)
        coming = {FindableBlock(digest, event.group_idx or 0, event.medium or "GPU") for digest in hashes}
        assert len(coming) == len(hashes)
        assert self.unavailable or not coming & self.blocks, "what is there is stored again"
        self.blocks |= coming
        if event.parent_block_hash is None:
            keys = [key for key in event.extra_keys[0] or () if key != event.lora_name]
            [tenant] = [key.partition(":")[2] for key in keys]
            extras = event.lora_name or "", tenant, ""
            assert [*map(short_hash, chain_hashes(event.token_ids, size, extras, None))] == hashes


def short_hash(digest: bytes) -> int:
    return int.from_bytes(digest[24:32], "big")


def findable_blocks(cache: KVCacheManager) -> set[FindableBlock]:
    """All that the cache can find, read from the pools themselves."""

    def blocks(keys: Sequence[bytes], medium: str) -> set[FindableBlock]:
        return {FindableBlock(short_hash(digest), group, medium) for digest, group in map(split_key, keys)}

    def states(keys: Sequence[bytes], medium: str) -> set[FindableBlock]:
        return {FindableBlock(short_hash(digest), cache.groups.total, medium) for digest in keys}

    found = blocks([*cache._pool._index], "GPU")
    if cache.tiers is not None:
        found |= blocks([*cache.tiers.host._slots], "CPU")
    pool = cache.states
    if pool is not None:
        found |= states([*pool._recent, *pool._proven], "GPU") | states([*pool.host._slots], "CPU")
    return found
