"""Ranks that have a GPU each and meet over NCCL say what one rank says there."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from charonia.bench.inline_loop import run_to_end
from charonia.core.eager_reason import EagerReason
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig
from charonia.engine.core.process import scheduler_config
from charonia.engine.parallel.ranks_executor import RanksExecutor
from charonia.engine.worker.executor import Executor
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

DEVICE = "cuda"
BLOCKS, BLOCK, NEW = 96, 8, 16
LENGTHS = (1, 7, 16, 33, 60, 90)


def tokens_of(executor: Executor, config: EngineConfig) -> dict[int, list[int]]:
    """Prompts in chunks, every stage busy."""
    random, cache = np.random.default_rng(5), KVCacheManager(BLOCKS, BLOCK)
    prompts = [random.integers(1, 384, length).astype(np.int32) for length in LENGTHS]
    with closing(executor):
        executor.load(lambda phase, fraction: None)
        executor.allocate(BLOCKS)
        executor.capture_usual_steps(lambda phase, fraction: None)
        requests = [
            SequenceSpec(key=key, prompt=prompt, max_tokens=NEW, hashes=cache.digest(prompt))
            for key, prompt in enumerate(prompts)
        ]
        return run_to_end(Scheduler(scheduler_config(config, 256), cache), executor, requests).tokens


@pytest.mark.gpu
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_say_what_one_says(checkpoint: Callable[[str], Path], tensor: int, pipeline: int) -> None:
    if torch.cuda.device_count() < tensor * pipeline:
        pytest.skip(f"fewer than {tensor * pipeline} CUDA devices")
    config = EngineConfig(
        model=str(checkpoint("llama")),
        device=DEVICE,
        attention="reference",
        cache=CacheConfig(block_size=BLOCK),
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40),
    )
    split = tokens_of(RanksExecutor(config), config)
    alone = EngineConfig(
        model=config.model, device=DEVICE, attention="reference", cache=config.cache, scheduler=config.scheduler
    )
    assert split == tokens_of(InlineExecutor(alone), alone)


@pytest.mark.gpu
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_recorded_steps_of_ranks_say_what_one_says(
    checkpoint: Callable[[str], Path], tensor: int, pipeline: int
) -> None:
    """By kernels, in graphs that hold what ranks exchange."""
    if torch.cuda.device_count() < tensor * pipeline:
        pytest.skip(f"fewer than {tensor * pipeline} CUDA devices")
    alone = EngineConfig(
        model=str(checkpoint("llama")),
        device=DEVICE,
        dtype="float32",
        cache=CacheConfig(block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40),
    )
    config = msgspec.structs.replace(alone, parallel=ParallelConfig(tensor=tensor, pipeline=pipeline))
    ranks = RanksExecutor(config)
    assert tokens_of(ranks, config) == tokens_of(InlineExecutor(alone), alone)
    assert ranks.failed_captures == 0
    assert ranks.eager_steps.keys() <= {EagerReason.TOO_LARGE, EagerReason.PROMPT}


@pytest.mark.gpu
def test_a_second_gpu_says_what_the_first_does(checkpoint: Callable[[str], Path]) -> None:
    """By kernels and recorded steps, whose streams and events are the current GPU's of the thread."""
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 CUDA devices")
    found = []
    for number in (1, 0):
        config = EngineConfig(
            model=str(checkpoint("llama")),
            device=f"{DEVICE}:{number}",
            dtype="bfloat16",
            cache=CacheConfig(block_size=BLOCK),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40, ahead=1),
        )
        found.append(tokens_of(InlineExecutor(config), config))
    assert found[0] == found[1]
