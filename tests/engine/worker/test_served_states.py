"""Models whose layers keep states, under the scheduler: what a sequence begins with changes no text."""

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from charonia.bench.inline_loop import run_to_end
from charonia.core.metrics import EngineTotals
from charonia.engine.attention.host_cache import HostCache
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.worker import model_runner
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig, SnapshotRule
from charonia.scheduler.plan import IntArray
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

BLOCK, NEW, ROWS = 16, 24, 3
SPACING = SnapshotRule(prompt_stride=32, generated_stride=16, least_gain=16)


def prompts() -> list[IntArray]:
    """Two beginnings of 70 tokens, three ends of each, and the first of them all again."""
    random = np.random.default_rng(1)
    beginnings = random.integers(1, 384, (2, 70), dtype=np.int32)
    ends = random.integers(1, 384, (3, 21), dtype=np.int32)
    every = [np.concatenate([beginning, end]) for end in ends for beginning in beginnings]
    return [*every, every[0]]


def poison(tensor: Tensor) -> None:
    """NaN, whatever the bytes are of."""
    tensor.fill_(nan if tensor.is_floating_point() else 255)


class PoisonedHost(HostCache):
    """Slots are full of NaN before they are filled, and so is what has left the device."""

    def __init__(self, device_tensors: Sequence[Tensor], slots: int) -> None:
        super().__init__(device_tensors, slots)
        for tensor in self._host_tensors:
            for piece in tensor.pieces:
                poison(piece)

    def _take_away(self, place: Tensor, slot: Tensor) -> None:
        poison(slot)
        super()._take_away(place, slot)
        poison(place)


def serve(
    checkpoint: Path,
    *,
    blocks: int,
    snapshots: int,
    host: tuple[int, int] = (0, 0),
    ahead: int = 0,
    at_once: bool = False,
) -> tuple[list[list[int]], EngineTotals]:
    """What the model says to each prompt; one after the other unless all come `at_once`. `host`: blocks and snapshots
    in the host's memory."""
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        cache=CacheConfig(block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=ROWS),
    )
    executor = InlineExecutor(config)
    executor.load(lambda phase, fraction: None)
    executor.allocate(blocks, host[0], snapshots, host[1])
    cache = KVCacheManager(blocks, BLOCK, snapshots > 0, host[0], snapshots, host_snapshots=host[1])
    rule = SchedulerConfig(
        max_num_seqs=ROWS, max_num_batched_tokens=50, max_model_len=256, ahead=ahead, snapshots=SPACING
    )
    scheduler = Scheduler(rule, cache)
    requests = [
        SequenceSpec(key=key, prompt=prompt, max_tokens=NEW, hashes=cache.digest(prompt))
        for key, prompt in enumerate(prompts())
    ]
    texts: dict[int, list[int]] = {}
    for some in [requests] if at_once else [[request] for request in requests]:
        texts.update(run_to_end(scheduler, executor, some).tokens)
        scheduler.check_integrity()
    executor.close()
    return [texts[key] for key in sorted(texts)], scheduler.totals


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "granite-hybrid"])
def test_a_text_is_the_same_from_a_snapshot_and_after_a_preemption(checkpoint: Callable[..., Path], name: str) -> None:
    plain, none = serve(checkpoint(name), blocks=60, snapshots=0)
    assert none.prefix_hits == 0
    found, totals = serve(checkpoint(name), blocks=60, snapshots=20)
    assert found == plain
    assert totals.prefix_hits >= 4 * 64 + 64
    scarce, preempted = serve(checkpoint(name), blocks=17, snapshots=4, ahead=1, at_once=True)
    assert scarce == plain
    assert preempted.preemptions


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_text_is_the_same_from_the_hosts_memory(
    checkpoint: Callable[..., Path], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a beginning neither blocks nor states are on the device when it comes again."""
    monkeypatch.setattr(model_runner, "HostCache", PoisonedHost)
    plain, _ = serve(checkpoint("qwen3.5"), blocks=60, snapshots=0)
    found, totals = serve(checkpoint("qwen3.5"), blocks=9, snapshots=2, host=(40, 20), ahead=ahead)
    assert found == plain
    assert totals.prefix_hits >= 4 * 64 + 64
    assert totals.restored >= 3 * 64
