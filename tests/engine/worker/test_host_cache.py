"""Blocks that were evicted come back from the host's memory as they were, whatever attention keeps them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from charonia.bench.inline_loop import run_to_end
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceRequest

BLOCK, NEW = 16, 6
PROMPTS = [[first + token % 7 for token in range(70)] for first in (5, 100, 200)]


def texts(checkpoint: Path, attention: str, blocks: int, host_blocks: int, ahead: int) -> tuple[list[list[int]], int]:
    """What the model says to the prompts, each asked twice, and the tokens that came back."""
    config = EngineConfig(model=str(checkpoint), device="cpu", attention=attention, cache=CacheConfig(block_size=BLOCK))
    executor = InlineExecutor(config)
    executor.load(lambda phase, fraction: None)
    executor.allocate(blocks, host_blocks)
    cache = KVCacheManager(blocks, BLOCK, host_blocks=host_blocks)
    rule = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, ahead=ahead)
    scheduler, found = Scheduler(rule, cache), []
    for key, prompt in enumerate(PROMPTS * 2):
        tokens = np.array(prompt, np.int32)
        request = SequenceRequest(key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens))
        found.append(run_to_end(scheduler, executor, [request]).tokens[key])
        scheduler.check_integrity()
    executor.close()
    return found, scheduler.totals.restored


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("attention", ["auto", "cpu", "reference"])
def test_what_comes_back_is_what_was_evicted(checkpoint: Callable[[str], Path], attention: str, ahead: int) -> None:
    plenty, none = texts(checkpoint("llama"), attention, 40, 0, ahead)
    scarce, restored = texts(checkpoint("llama"), attention, 6, 12, ahead)
    assert scarce == plenty
    assert none == 0
    assert restored == 3 * 64
