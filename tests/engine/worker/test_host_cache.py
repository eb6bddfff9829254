"""Blocks that were evicted come back from the host's memory as they were, whatever attention keeps them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.bench.inline_loop import run_to_end
from charonia.engine.attention import host_cache
from charonia.engine.attention.host_cache import HostCache
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, NEW = 16, 6
PROMPTS = [[first + token % 7 for token in range(70)] for first in (5, 100, 200)]


def texts(checkpoint: Path, attention: str, blocks: int, host_blocks: int, ahead: int) -> tuple[list[list[int]], int]:
    """What the model says to the prompts, each asked twice, and the tokens that came back. So many blocks have each
    group of layers."""
    sizes = CacheConfig(block_size=BLOCK, layer_groups=True)
    config = EngineConfig(model=str(checkpoint), device="cpu", attention=attention, cache=sizes)
    executor = InlineExecutor(config)
    groups = executor.load(lambda phase, fraction: None).groups._replace(in_flight=128)
    executor.allocate(groups.total * blocks, groups.total * host_blocks)
    cache = KVCacheManager(groups.total * blocks, BLOCK, host_blocks=groups.total * host_blocks, groups=groups)
    rule = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, ahead=ahead)
    scheduler, found = Scheduler(rule, cache), []
    for key, prompt in enumerate(PROMPTS * 2):
        tokens = np.array(prompt, np.int32)
        request = SequenceSpec(key=key, prompt=tokens, max_tokens=NEW, hashes=cache.digest(tokens))
        found.append(run_to_end(scheduler, executor, [request]).tokens[key])
        scheduler.check_integrity()
    executor.close()
    assert scheduler.totals.state_misses == 0
    return found, scheduler.totals.restored


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("attention", ["auto", "cpu", "reference"])
def test_what_comes_back_is_what_was_evicted(checkpoint: Callable[[str], Path], attention: str, ahead: int) -> None:
    plenty, none = texts(checkpoint("llama"), attention, 40, 0, ahead)
    scarce, restored = texts(checkpoint("llama"), attention, 6, 12, ahead)
    assert scarce == plenty
    assert none == 0
    assert restored == 3 * 64


@pytest.mark.parametrize("ahead", [0, 1])
def test_of_layers_with_a_window_comes_back_what_the_next_token_sees(
    checkpoint: Callable[[str], Path], ahead: int
) -> None:
    plenty, none = texts(checkpoint("gemma3"), "auto", 40, 0, ahead)
    scarce, restored = texts(checkpoint("gemma3"), "auto", 6, 12, ahead)
    assert scarce == plenty
    assert none == 0
    assert restored == 3 * 64


@pytest.mark.parametrize("most", [1 << 12, 1 << 30])
def test_memory_is_pinned_in_pieces_that_waste_none(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a power of two of each: of one piece for all, nearly twice the memory that was given."""
    monkeypatch.setattr(host_cache, "PIECE_BYTES", most)
    views = [torch.arange(70, dtype=torch.float32).view(70, 1, 1).repeat(1, 5, 3), torch.arange(70).view(70, 1)]
    cache, slots = HostCache(views, 140), [3, 66, 67, 139]
    cache.make_copies(np.array([[block, slot, 0] for block, slot in enumerate(slots)], np.int32))
    before = [view[: len(slots)].clone() for view in views]
    cache.make_copies(np.array([[69 - block, slot, 1] for block, slot in enumerate(slots)], np.int32))
    assert all(torch.equal(view[70 - len(slots) :].flip(0), kept) for view, kept in zip(views, before, strict=True))
    pieces = [piece for tensor in cache._host_tensors for piece in tensor.pieces]
    pinned = sum(1 << (piece.nbytes - 1).bit_length() for piece in pieces)
    assert sum(piece.nbytes for piece in pieces) == 140 * (60 + 8)
    assert pinned < 1.05 * 140 * (60 + 8)
