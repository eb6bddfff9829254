"""The step path of a GPU: copies that nothing else is waited for with, and recorded steps beside launched ones."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from charonia.bench.inline_loop import run_to_end
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.step_batch import HostCopy, StepBatch, to_device
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import SamplerParams
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceRequest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BLOCK, BLOCKS, ROWS = 16, 64, 5
LIMITS = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=40, max_model_len=256, ahead=1)


def test_a_copy_waits_for_what_computes_it_and_for_nothing_later() -> None:
    device = torch.device("cuda")
    later = torch.randn(8192, 8192, device=device)
    copy = HostCopy(to_device(np.arange(5), device) * 2)
    for _ in range(50):
        later = later @ later
    event = torch.cuda.Event()
    event.record()
    assert copy.read().tolist() == [0, 2, 4, 6, 8]
    assert not event.query()


def test_the_device_derives_what_the_host_does() -> None:
    tables = torch.arange(60, dtype=torch.int32).view(3, 20), torch.arange(15).view(3, 5)
    rows = [2, 0, 1], [0, 7, 3], [5, 1, 2]
    host = StepBatch(*rows, *tables, 4)
    device = StepBatch(*rows, *(table.cuda() for table in tables), 4)
    for name in ("tokens", "positions", "owners"):
        assert getattr(device, name).tolist() == getattr(host, name).tolist()
    assert device.slots().tolist() == host.slots().tolist()
    assert [each.tolist() for each in device.on_device[:4]] == [each.tolist() for each in host.on_device[:4]]


def load(checkpoint: Path, enforce_eager: bool) -> InlineExecutor:
    config = EngineConfig(
        model=str(checkpoint),
        device="cuda",
        cache=CacheConfig(block_size=BLOCK),
        scheduler=LIMITS,
        enforce_eager=enforce_eager,
    )
    executor = InlineExecutor(config)
    capacity = executor.load(lambda phase, fraction: None)
    assert capacity.free_bytes > BLOCKS * capacity.block_bytes
    assert capacity.ahead == 1
    executor.allocate(BLOCKS)
    return executor


def generate(executor: InlineExecutor) -> dict[int, list[int]]:
    cache, generator = KVCacheManager(BLOCKS, BLOCK), torch.Generator().manual_seed(5)
    requests = []
    for key, length in enumerate((1, 7, 16, 33, 60, 90, 120)):
        prompt = torch.randint(1, 384, (length,), generator=generator, dtype=torch.int32).numpy()
        sampling = SamplerParams(1.0 if key % 2 else 0.0, 50, 0.9, key)
        requests.append(
            SequenceRequest(key=key, prompt=prompt, max_tokens=40, hashes=cache.digest(prompt), sampling=sampling)
        )
    return run_to_end(Scheduler(LIMITS, cache), executor, requests).tokens


def test_replayed_steps_choose_what_launched_ones_do(checkpoint: Callable[[str], Path]) -> None:
    eager = load(checkpoint("llama"), enforce_eager=True)
    expected = generate(eager)
    assert eager.rank.runner.graphs is None
    eager.close()
    executor = load(checkpoint("llama"), enforce_eager=False)
    if not executor.rank.attention.recordable:
        pytest.skip("the device's attention is not recordable")
    for _ in range(50):
        executor.use_idle_time()
    assert generate(executor) == expected
    assert executor.eager_steps == 0
    executor.close()
