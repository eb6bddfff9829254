"""The step path of a GPU: copies that nothing else is waited for with, and recorded steps beside launched ones."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from charonia.bench.inline_loop import run_to_end
from charonia.core.eager_reason import EagerReason
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig, LoraConfig, SpeculationConfig
from charonia.engine.core.drafters import ProposedDrafts
from charonia.engine.drafters.laboratory import Record, SyntheticDrafter
from charonia.engine.gpu.graphs import CudaRecorder
from charonia.engine.step_batch import HostCopy, StepBatch, to_device
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.drafts.speculation import Drafter, Speculation
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceSpec

from ..adapters import layers_of, write_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BLOCK, BLOCKS, ROWS, DRAFTS = 16, 64, 5, 4
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


def test_a_capture_that_fails_leaves_the_device_as_it_was() -> None:
    """And a pool whose graphs are gone is followed by another."""
    device = torch.device("cuda", 0)
    number, record, stream = torch.zeros(4, device=device), CudaRecorder(device), torch.cuda.current_stream()

    def waits() -> None:
        number.add_(1)
        number.sum().item()

    add, double = partial(number.add_, 1), partial(number.mul_, 2)
    replay = record(add)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            record(waits)
        assert torch.cuda.current_stream() == stream
        assert torch.rand(3, device=device).max() < 1
        torch.cuda.empty_cache()
        replay()
    record(double)()
    assert number.tolist() == [4.0] * 4
    del replay
    for _ in range(3):
        record(double)()  # and forgotten
    assert number.tolist() == [32.0] * 4


class EveryDraft(Speculation):
    """Verifies all drafts, whatever steps cost."""

    def is_due(self, step: int) -> bool:
        return True

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.costs.observe_step = lambda *times, **more: None  # type: ignore[method-assign]


def load(checkpoint: Path, enforce_eager: bool, **changes: Any) -> InlineExecutor:
    config = EngineConfig(
        model=str(checkpoint),
        device="cuda",
        cache=CacheConfig(block_size=BLOCK),
        scheduler=LIMITS,
        enforce_eager=enforce_eager,
        **changes,
    )
    executor = InlineExecutor(config)
    capacity = executor.load(lambda phase, fraction: None)
    assert capacity.free_bytes > BLOCKS * capacity.block_bytes
    assert capacity.ahead == 1
    executor.allocate(BLOCKS)
    return executor


def prompts() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(5)
    lengths = 1, 7, 16, 33, 60, 90, 120
    return [torch.randint(1, 384, (length,), generator=generator, dtype=torch.int32).numpy() for length in lengths]


def generate(
    executor: InlineExecutor, drafter: Drafter | None = None, adapters: Sequence[str] = ("",), greedy: bool = False
) -> dict[int, list[int]]:
    """The answer to each prompt; sequences have the `adapters`, digests, in turn."""
    cache, requests = KVCacheManager(BLOCKS, BLOCK), []
    for key, prompt in enumerate(prompts()):
        sampling = ResolvedSampling(1.0 if key % 2 and not greedy else 0.0, 50, 0.9, key)
        adapter = adapters[key % len(adapters)]
        hashes = cache.digest(prompt, (adapter, "", ""))
        request = SequenceSpec(key=key, prompt=prompt, max_tokens=40, hashes=hashes, sampling=sampling, adapter=adapter)
        requests.append(request)
    proposed = isinstance(drafter, ProposedDrafts)
    speculation = None if drafter is None else EveryDraft({"drafter": drafter}, DRAFTS, 384, draft_model=proposed)
    return run_to_end(Scheduler(LIMITS, cache, speculation=speculation), executor, requests).tokens


def captured(checkpoint: Path, **changes: Any) -> InlineExecutor:
    """One all of whose graphs are captured already."""
    executor = load(checkpoint, enforce_eager=False, **changes)
    if not executor.rank.runner.computer.attention.recordable_places:
        pytest.skip("steps with the device's attention cannot be recorded")
    missing = sum(len(graph.buckets.keys) for graph in executor.rank.runner.all_graphs)
    for _ in range(missing):
        executor.use_idle_time()
    assert all(graph.capture_one() is False for graph in executor.rank.runner.all_graphs)
    return executor


def test_replayed_steps_choose_what_launched_ones_do(checkpoint: Callable[[str], Path]) -> None:
    eager = load(checkpoint("llama"), enforce_eager=True)
    expected = generate(eager)
    assert eager.rank.runner.computer.graphs is None
    eager.close()
    executor = captured(checkpoint("llama"))
    assert generate(executor) == expected
    assert not executor.eager_steps
    executor.close()


def generate_eagerly(checkpoint: Path) -> dict[int, list[int]]:
    eager = load(checkpoint, enforce_eager=True)
    found = generate(eager, greedy=True)
    eager.close()
    return found


def test_replayed_steps_verify_drafts(checkpoint: Callable[[str], Path]) -> None:
    """What is said with drafts, of which three of four are right, is what is said without."""
    expected = generate_eagerly(checkpoint("llama"))
    executor = captured(
        checkpoint("llama"), speculation=SpeculationConfig(method="ngram", num_speculative_tokens=DRAFTS)
    )
    records = [Record(prompt.tolist(), expected[key]) for key, prompt in enumerate(prompts())]
    assert generate(executor, SyntheticDrafter(records, (0.9, 0.8, 0.7, 0.6), 1), greedy=True) == expected
    assert not executor.eager_steps
    executor.close()


def test_a_draft_models_passes_are_replayed(checkpoint: Callable[[str], Path]) -> None:
    """The model drafts for itself: its proposals are right, whatever of the passes is recorded."""
    itself = SpeculationConfig(method="draft_model", model=str(checkpoint("llama")), num_speculative_tokens=DRAFTS)
    executor = captured(checkpoint("llama"), speculation=itself)
    found = generate(executor, ProposedDrafts(), greedy=True)
    assert not executor.eager_steps
    executor.close()
    assert generate_eagerly(checkpoint("llama")) == found


def test_replayed_steps_have_adapters(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Of different ranks and layers, beside rows without; one comes after the graphs were captured."""
    layers = layers_of(checkpoint("llama"), ("proj",))
    some = {path: shape for path, shape in layers.items() if path.endswith(("q_proj", "v_proj", "down_proj"))}
    paths = [write_adapter(tmp_path / "all", layers, 1), write_adapter(tmp_path / "some", some, 2, r=3)]
    config = LoraConfig(max_rank=16, max_bytes=1 << 24)
    said = []
    for make in (partial(load, enforce_eager=True), captured):
        executor = make(checkpoint("llama"), lora=config)
        digests = ["", *(executor.load_adapter(str(path)).result().digest for path in paths)]
        said.append(generate(executor, adapters=digests, greedy=True))
        assert executor.eager_steps.keys() <= {EagerReason.NOT_RECORDED}
        executor.close()
    assert said[0] == said[1]
    assert said[0] != generate_eagerly(checkpoint("llama"))
