"""Random requests, cancels and preemptions on the device, with the scheduler's and the cache's books checked each step.

On the CPU the same for some steps, so that the machines that have no GPU keep this file honest.
"""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, BLOCKS, LONGEST = 16, 24, 256
SECONDS = 60.0


def drive(checkpoint: Path, device: str, enough: Callable[[int], bool]) -> int:
    """Steps until `enough` of them; returns how many sequences got all of their tokens."""
    random, cache, config = Random(7), KVCacheManager(BLOCKS, BLOCK), CacheConfig(block_size=BLOCK)
    limits = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=48, max_model_len=LONGEST, ahead=1)
    executor = InlineExecutor(EngineConfig(model=str(checkpoint), device=device, cache=config, scheduler=limits))
    executor.load(lambda phase, fraction: None)
    executor.allocate(BLOCKS)
    scheduler, flying, live, key, finished = Scheduler(limits, cache), deque[Any](), set[int](), 0, 0
    step = 0
    while not enough(step) or scheduler.has_work:
        if not enough(step) and len(live) < 20 and random.random() < 0.4:
            prompt = np.array([random.randrange(1, 384) for _ in range(random.choice((1, 5, 16, 40, 90)))], np.int32)
            sampling = ResolvedSampling(random.choice((0.0, 0.0, 0.8)), 20, 0.9, random.randrange(100))
            new = random.randrange(1, 60)
            asked = SequenceSpec(key=key, prompt=prompt, max_tokens=new, hashes=cache.digest(prompt), sampling=sampling)
            scheduler.add(asked)
            live.add(key)
            key += 1
        if live and random.random() < 0.05:
            gone = random.choice(sorted(live))
            scheduler.abort([gone])
            live.discard(gone)
        while plan := scheduler.schedule():
            flying.append(executor.execute(plan))
        if flying:
            updates = scheduler.apply(flying.popleft().result())
            assert all(0 <= token < 384 for token in updates.tokens)
            ended = {each for each, _ in updates.finished}
            finished += len(ended)
            live -= ended
        scheduler.check_integrity()
        if random.random() < 0.01:
            executor.use_idle_time()
        step += 1
    executor.close()
    assert cache.free_blocks == BLOCKS
    return finished


def test_some_random_steps_on_the_host(checkpoint: Callable[[str], Path]) -> None:
    assert drive(checkpoint("llama"), "cpu", lambda step: step > 60) > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_minute_of_random_steps(checkpoint: Callable[[str], Path]) -> None:
    ends = time.monotonic() + SECONDS
    assert drive(checkpoint("llama"), "cuda", lambda step: time.monotonic() > ends) > 100
