"""The time of sequences by what they have or lack, where a step takes a second."""

import numpy as np
import pytest

from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec


def seconds_of(config: SchedulerConfig, blocks: int, *requests: tuple[int, int]) -> dict[str, float]:
    """Of requests with so many prompt tokens and new ones, which are there at once and share nothing."""
    cache = KVCacheManager(blocks=blocks, block_size=4)
    scheduler = Scheduler(config, cache)
    executor = FakeExecutor(block_size=4, threaded=False)
    executor.allocate(blocks)
    for key, (prompt, new) in enumerate(requests):
        tokens = np.arange(100 * key, 100 * key + prompt, dtype=np.int32)
        scheduler.add(SequenceSpec(key=key, prompt=tokens, max_tokens=new, hashes=cache.digest(tokens)))
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.apply(executor.execute(plan).result(), seconds=1.0)
        scheduler.check_integrity()
    return {state: seconds for state, seconds in scheduler.totals.sequence_seconds.items() if seconds}


@pytest.mark.parametrize(
    ("config", "blocks", "requests", "spent"),
    [
        (SchedulerConfig(max_num_seqs=2), 32, [(4, 3), (4, 3)], {"running": 6}),
        (SchedulerConfig(max_num_seqs=1), 32, [(4, 3), (4, 2)], {"running": 5, "no_row": 3}),
        (SchedulerConfig(admission="no_evict"), 4, [(8, 5), (8, 2)], {"running": 7, "no_blocks": 5}),
        (SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8), 32, [(8, 1)] * 2, {"running": 2, "no_tokens": 1}),
    ],
)
def test_each_second_of_a_sequence_is_of_what_it_waits_for(
    config: SchedulerConfig, blocks: int, requests: list[tuple[int, int]], spent: dict[str, float]
) -> None:
    assert seconds_of(config, blocks, *requests) == spent


def test_one_that_was_preempted_waits_to_go_on() -> None:
    spent = seconds_of(SchedulerConfig(), 5, (4, 12), (4, 12))
    assert spent.keys() == {"running", "preempted"}
    assert spent["preempted"] > 0


def test_one_that_waits_for_the_prefix_of_another_is_parked() -> None:
    cache = KVCacheManager(blocks=32, block_size=4)
    scheduler = Scheduler(SchedulerConfig(), cache)
    executor = FakeExecutor(block_size=4, threaded=False)
    executor.allocate(32)
    prompt = np.arange(17, dtype=np.int32)
    for key in range(2):
        scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=1, hashes=cache.digest(prompt)))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(executor.execute(plan).result(), seconds=1.0)
    spent = scheduler.totals.sequence_seconds
    assert {state: seconds for state, seconds in spent.items() if seconds} == {"running": 1, "parked": 1}
