"""The newcomer's door: a scheduler, a cache and an executor that counts, on one screen."""

import numpy as np

from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec


def test_three_sequences_share_steps_blocks_and_leave_nothing_behind() -> None:
    cache = KVCacheManager(blocks=32, block_size=4)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), cache)
    executor = FakeExecutor(block_size=4, threaded=False)
    executor.allocate(32)

    prompt = np.array([10, 11, 12, 13, 14], np.int32)
    for key in range(3):
        scheduler.add(SequenceSpec(key=key, prompt=prompt, max_tokens=3, hashes=cache.digest(prompt)))

    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None
        updates = scheduler.apply(executor.execute(plan).result())
        tokens = iter(updates.tokens)
        for key, count in zip(updates.keys, updates.counts, strict=True):
            said[key] += [next(tokens) for _ in range(count)]

    assert said == {0: [15, 16, 17], 1: [15, 16, 17], 2: [15, 16, 17]}
    assert cache.free_blocks == 32
