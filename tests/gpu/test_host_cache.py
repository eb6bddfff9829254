"""Blocks that were evicted from the device come back from the host's memory as they were, while steps go on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.bench.inline_loop import run_to_end
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.gpu import runtime
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, NEW = 16, 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kept", ["auto", "int8", "fp8"])
def test_what_comes_back_is_what_was_evicted(checkpoint: Callable[[str], Path], kept: str) -> None:
    if kept == "fp8" and not runtime.serves_fp8(torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("this device does not convert fp8")
    sizes = CacheConfig(block_size=BLOCK, dtype=kept)
    config = EngineConfig(model=str(checkpoint("llama")), device="cuda", cache=sizes)
    executor = InlineExecutor(config)
    executor.load(lambda phase, fraction: None)
    said = []
    for blocks, host_blocks in ((400, 0), (24, 200)):
        executor.allocate(blocks, host_blocks)
        cache = KVCacheManager(blocks, BLOCK, host_blocks=host_blocks)
        rule = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, ahead=1)
        scheduler, found = Scheduler(rule, cache), list[dict[int, list[int]]]()
        for turn in range(4):
            prompts = [np.arange(first, first + 70, dtype=np.int32) for first in range(2, 300, 30)]
            asked = [
                SequenceSpec(key=100 * turn + key, prompt=each, max_tokens=NEW, hashes=cache.digest(each))
                for key, each in enumerate(prompts)
            ]
            found.append(run_to_end(scheduler, executor, asked).tokens)
            scheduler.check_integrity()
        said.append(found)
        assert bool(scheduler.totals.restored) == bool(host_blocks)
    executor.close()
    assert said[0] == said[1]
