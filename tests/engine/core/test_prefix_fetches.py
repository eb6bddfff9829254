"""Requests that wait for files: whether that pays, for how long, and what they leave behind."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from charonia.core.metrics import ImageTotals
from charonia.engine.core import prefix_fetches
from charonia.engine.core.cache_events import CacheChange, CacheEventRecorder, ChangesPublisher
from charonia.engine.core.inbox import NewRequest
from charonia.engine.core.prefix_fetches import FetchPace, PrefixFetches
from charonia.kvcache.events.cache_events import BlockContent
from charonia.kvcache.exchange.directory_tier import DirectoryTier, DroppedImages
from charonia.kvcache.exchange.image_directory import ImageDirectory, share_name
from charonia.kvcache.manager import KVCacheManager
from charonia.kvcache.tiers.landed_images import ImagePlace
from charonia.scheduler.sequence import SequenceSpec

from ...proofs.directory import BUDGET, Shape, run
from ...waiting import until

BLOCK = 4
PROMPT = np.arange(18, dtype=np.int32)


class SlowMover:
    """Images come when a test says so."""

    totals = ImageTotals()

    def __init__(self) -> None:
        self.fetches: list[tuple[Sequence[ImagePlace], Future[list[bool]]]] = []
        self.stores: list[tuple[Sequence[ImagePlace], Future[list[bool]]]] = []
        self.dropped: list[int] = []

    def fetch(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        future: Future[list[bool]] = Future()
        self.fetches.append((images, future))
        return future

    def store(self, images: Sequence[ImagePlace]) -> Future[list[bool]]:
        future: Future[list[bool]] = Future()
        self.stores.append((images, future))
        return future

    def drop(self, dropped: DroppedImages) -> None:
        self.dropped += dropped.blocks


class Bench:
    """A cache, and a directory that has all of a prompt."""

    def __init__(
        self,
        root: Path,
        monkeypatch: pytest.MonkeyPatch,
        computing: float = 100.0,
        events: CacheEventRecorder | None = None,
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(prefix_fetches, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.cache = KVCacheManager(16, BLOCK, landing=8, events=events)
        self.hashes = self.cache.digest(PROMPT)
        self.share = share = ImageDirectory(root, share_name(bytes(32)), 1 << 20)
        for digest in self.hashes:
            share.write(digest, memoryview(b""))
        self.mover = SlowMover()
        self.replies: list[Callable[[], None]] = []
        self.computing = computing
        tier = DirectoryTier(self.cache)
        self.fetches = PrefixFetches(
            tier, self.mover, [share], self.replies.append, lambda tokens, context: self.computing, events
        )

    def compute(self) -> None:
        """Let the cache have the prompt, and evict it again."""
        for tokens in (PROMPT, np.arange(100, 100 + 16 * BLOCK, dtype=np.int32)):
            hashes = self.cache.digest(tokens)
            table = self.cache.open(hashes, len(tokens) + 1)
            assert self.cache.extend(table, len(hashes) * BLOCK)
            if self.cache.events is not None:
                self.cache.events.describe([BlockContent(digest, None, (1, 2, 3, 4)) for digest in hashes])
            self.cache.commit(table, hashes[table.committed :])
            self.cache.close(table)
            if tokens is PROMPT:
                self.ready()

    def lose(self, block: int) -> None:
        """Let the directory lack a block of the prompt."""
        Path(self.share._path(self.hashes[block])).unlink()

    def written(self) -> list[bytes]:
        """The images of the prompt that are to be written since the last call."""
        keys = [image.key for images, _ in self.mover.stores for image in images if image.key in self.hashes]
        self.mover.stores.clear()
        return keys

    def ask(self, key: int) -> bool:
        spec = SequenceSpec(key=key, prompt=PROMPT, max_tokens=1, hashes=self.hashes)
        return self.fetches.take(NewRequest(spec, None, 0.0))

    async def finish_lookups(self, count: int = 1) -> None:
        await until(lambda: len(self.replies) >= count)
        self.finish()

    def finish(self) -> None:
        for reply in self.replies:
            reply()
        self.replies.clear()

    def ready(self) -> list[int]:
        self.fetches.check_integrity()
        return [request.spec.key for request in self.fetches.turn()]


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    return lambda **changes: Bench(tmp_path, monkeypatch, **changes)


def test_what_was_not_written_is_written_the_next_time(make_bench: MakeBench) -> None:
    """Because the writer was behind, or the disk full."""
    bench = make_bench()
    bench.compute()
    images, stored = bench.mover.stores[0]
    stored.set_result([image.key != bench.hashes[1] for image in images])
    bench.finish()
    bench.written()
    bench.compute()
    assert bench.written() == [bench.hashes[1]]


async def test_what_a_lookup_misses_is_written_again_with_all_behind_it(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.compute()
    assert bench.written() == bench.hashes
    bench.compute()
    assert bench.written() == []
    bench.lose(1)
    bench.ask(1)
    await bench.finish_lookups()
    bench.fetches.discard([1])
    bench.compute()
    assert bench.written() == bench.hashes[1:]


def test_routers_are_told_of_what_was_written_when_it_was(make_bench: MakeBench) -> None:
    """And of nothing else, though it may have left the cache by then."""
    told: list[CacheChange] = []
    publisher = SimpleNamespace(has_room=True, publish=lambda changes: told.extend(filter(None, changes)) or True)
    events = CacheEventRecorder(cast(ChangesPublisher, publisher))
    bench = make_bench(events=events)
    bench.compute()
    events.flush()
    assert not any(change.is_shared for change in told)
    images, stored = bench.mover.stores[0]
    stored.set_result([image.key != bench.hashes[1] for image in images])
    bench.finish()
    events.flush()
    there = [change.content.digest for change in told if change.is_shared]
    assert there == [bench.hashes[0], *bench.hashes[2:]]
    assert not {*bench.hashes} & events._known.keys(), "a content stays that nothing has"


async def test_two_requests_wait_for_one_fetch(make_bench: MakeBench) -> None:
    bench = make_bench()
    assert bench.ask(1)
    assert bench.ask(2)
    await bench.finish_lookups(2)
    ((images, future),) = bench.mover.fetches
    assert [image.key for image in images] == bench.hashes
    assert (bench.ready(), bench.fetches.waiting) == ([], 2)
    future.set_result([True] * 4)
    bench.finish()
    assert bench.ready() == [1, 2]
    assert bench.cache.found_tokens(bench.hashes, len(PROMPT)) == 16
    assert not bench.ask(3)  # there is nothing that it lacks
    bench.fetches.discard([1])
    bench.ready()
    assert bench.mover.dropped == []
    bench.fetches.discard([2])
    bench.ready()
    assert bench.mover.dropped == [image.number for image in images]
    assert bench.ready() == []


async def test_patience_is_as_long_as_computing_takes(make_bench: MakeBench) -> None:
    bench = make_bench(computing=3.0)
    bench.ask(1)
    await bench.finish_lookups()
    bench.now = 2.9
    assert bench.ready() == []
    assert bench.fetches.patience() == pytest.approx(0.1)
    bench.now = 3.0
    assert bench.ready() == [1]
    bench.fetches.discard([1])  # it begins as it is
    bench.mover.fetches[0][1].set_result([True, True, False, False])
    bench.finish()
    bench.ready()
    assert len(bench.mover.dropped) == 4
    assert bench.fetches.totals()["late"] == 1
    assert bench.cache.tiers.landed.room == 8


async def test_a_request_that_ends_while_it_waits_leaves_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.ask(1)
    bench.ask(2)
    bench.fetches.discard([1])
    await bench.finish_lookups(2)
    bench.fetches.discard([2])
    bench.mover.fetches[0][1].cancel()
    bench.finish()
    assert (bench.ready(), bench.fetches.waiting, bench.fetches.fetching) == ([], 0, 0)
    bench.ready()
    assert len(bench.mover.dropped) == 4


async def test_a_request_that_ends_when_its_wait_is_over_does_not_begin(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.ask(1)
    await bench.finish_lookups()
    bench.mover.fetches[0][1].set_result([True] * 4)
    bench.finish()
    bench.fetches.discard([1])  # in the same turn
    assert bench.ready() == []
    bench.ready()
    assert len(bench.mover.dropped) == 4


async def test_a_hung_directory_holds_up_few(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.ask(1)
    await bench.finish_lookups()
    bench.now = prefix_fetches.STALLED_SECONDS + 0.1
    assert bench.ready() == [1]
    bench.ask(2)
    await bench.finish_lookups()
    assert bench.ready() == [2]
    assert bench.fetches.totals()["stalled"] == 1
    bench.ask(3)  # its lookup is answered, and lies unread
    bench.now += prefix_fetches.LOOKUP_SECONDS + 0.1
    assert bench.ready() == [3]
    assert not bench.ask(4)


def test_waiting_pays_by_what_images_took() -> None:
    pace = FetchPace()
    assert pace.pays(100, 0.001)  # nothing is known: it is tried
    pace.observe(10, 1.0)
    assert pace.pays(10, 1.3)
    assert not pace.pays(10, 1.2)
    refused = 0
    while not pace.pays(10, 0.5):
        refused += 1
    assert 20 < refused < 60  # one day it is tried again


@pytest.mark.parametrize("shape", [Shape(), Shape(sliding=True), Shape(states=True)], ids=str)
def test_two_servers_answer_right_whatever_happens_to_files(tmp_path: Path, shape: Shape) -> None:
    """The short form of `python -m tests.proofs.directory`."""
    outcome = run(tmp_path, 500, 3, shape)
    assert outcome.answered > 50
    assert outcome.totals.read > 5
    assert outcome.bytes < 2 * BUDGET
