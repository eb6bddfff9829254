"""A reader of cache events knows what the cache holds, in 100,000 random calls: `python -m tests.proofs.cache_events`.

Over real sockets, which lose batches that the reader then asks for; some worlds also drop batches for good, after which
the events begin anew. A failure prints the seed that repeats it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from cyclopts import App
from rich.progress import Progress

from charonia.engine.config import KVEventsConfig
from charonia.engine.core.cache_events import CacheEventEncoder, CacheEventRecorder, group_kinds
from charonia.engine.core.event_publisher import EventPublisher

from ..fuzz.cache_reader import CacheReader, findable_blocks
from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld
from .scheduler import drive_randomly

PER_WORLD = 400
BETWEEN_LOOKS = 100
"""Calls after which reader and cache are compared."""

LOSSES = 0.0, 0.3, 0.03
"""Parts of the batches that get lost, by the worlds' turns."""

app = App(name="python -m tests.proofs.cache_events", help=__doc__)


class EventsResult(NamedTuple):
    operations: int = 0
    batches: int = 0
    most_blocks: int = 0
    """That reader and cache agreed on at once."""
    asked: int = 0
    """How often the reader asked for what it missed."""
    dropped: int = 0
    """Batches that were never published."""

    def plus(self, other: "EventsResult") -> "EventsResult":
        most = max(self.most_blocks, other.most_blocks)
        sums = (mine + theirs for mine, theirs in zip(self, other, strict=True))
        return EventsResult(*sums)._replace(most_blocks=most)


def follow_world(world: SchedulerWorld, seed: int, operations: int, losses: float, queue: int) -> EventsResult:
    """Random calls in a world whose cache is followed by a reader that loses this part of the batches; at most `queue`
    of them wait to be sent.

    Raises:
        AssertionError: it believes something else than is so.
    """
    random, topic = Random(seed), "kv@pod@model"
    arrays = random.random() < 0.5
    with TemporaryDirectory() as folder:
        addresses = [f"ipc://{Path(folder)}/{name}" for name in ("events", "replay")]
        config = KVEventsConfig(
            endpoint=addresses[0], replay_endpoint=addresses[1], topic=topic, max_queue_size=queue, hwm=0
        )
        kinds = group_kinds(world.groups, latent=False, keeps_tokens=True)
        publisher = EventPublisher(config, CacheEventEncoder(world.block_size, kinds, 0, arrays))
        recorder = CacheEventRecorder(publisher)
        trial = SchedulerTrial(world, seed, recorder)
        reader = CacheReader(*addresses, topic, random, losses, arrays)
        most = 0
        try:
            while trial.operations < operations:
                drive_randomly(trial, random, trial.operations + BETWEEN_LOOKS)
                while recorder.behind:
                    recorder.flush()
                reader.read_up_to(publisher.next_number)
                expected = findable_blocks(trial.cache)
                assert reader.blocks == expected, f"{len(reader.blocks ^ expected)} of {len(expected)} differ"
                most = max(most, len(expected))
            return EventsResult(trial.operations, publisher.next_number, most, reader.asked, publisher.dropped)
        finally:
            reader.close()
            publisher.close()


def caching_world(random: Random) -> SchedulerWorld:
    """One whose cache holds something, and gives it up again."""
    world = SchedulerWorld.drawn(random)
    scheduler = msgspec.structs.replace(world.scheduler, max_model_len=96)
    return replace(world, prefix_caching=True, snapshots=world.snapshots or None, tenants=4, scheduler=scheduler)


def follow_seed(seed: int, operations: int, tell: Callable[[int], None] = lambda operations: None) -> EventsResult:
    """At least so many calls, in worlds drawn from the seed; each second one drops batches for good, too.

    Raises:
        RuntimeError: a check failed; names the seed and the world.
    """
    random, total, number = Random(seed), EventsResult(), 0
    while total.operations < operations:
        world = caching_world(random)
        number += 1
        losses, queue = LOSSES[number % len(LOSSES)], 100_000 if number % 2 else 1
        try:
            total = total.plus(follow_world(world, seed, min(PER_WORLD, operations), losses, queue))
        except Exception as broken:
            raise RuntimeError(f"seed {seed}, world {number}, {world}: {broken!r}") from broken
        tell(total.operations)
    return total


@app.default
def main(operations: int = 100_000, seed: int = 0) -> None:
    """Stops at the first failure."""
    with Progress() as progress:
        task = progress.add_task("calls", total=operations)
        total = follow_seed(seed, operations, lambda done: progress.update(task, completed=done))
    told = f"{total.operations:,} calls, {total.batches:,} batches, {total.asked:,} times some were asked for again"
    print(f"{told}, {total.dropped:,} dropped for good; at most {total.most_blocks} blocks, always the same")


if __name__ == "__main__":
    app()
