"""Decode steps that are recorded once and replayed, with a recorder that replays the launches over the same buffers.

Whatever they read on the host is as wrong here as in a graph, because a recorded step's host numbers are only bounds.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from charonia.engine.attention import selector
from charonia.engine.attention.backend import AttentionBackend
from charonia.engine.attention.torch_attention import TorchStepAttention
from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.drafters.ngram import NgramDrafter
from charonia.engine.gpu.graphs import DecodeGraphs, GraphBuckets, Launches
from charonia.engine.step_batch import StepBatch
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.kvcache.manager import KVCacheManager
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.scheduler import Scheduler
from charonia.scheduler.sequence import SequenceRequest
from charonia.scheduler.speculation import Speculation

BLOCK, BLOCKS, LONGEST, NEW = 8, 13, 128, 14
CPU = torch.device("cpu")


class DeviceAttention(AttentionBackend):
    """Reads rows on the device alone, as kernels do; padded places go to a block that belongs to nobody."""

    recordable = True

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        size = (spec.layers, 2, (blocks + 1) * spec.block_size, spec.kv_heads, spec.head_dim)
        self._cache = torch.full(size, torch.nan)

    @property
    def device_blocks(self) -> list[Tensor]:
        return []

    def begin_step(self, batch: StepBatch) -> TorchStepAttention:
        there, size = batch.on_device, self._spec.block_size
        places, ends = torch.arange(there.size), there.first_places + there.counts
        slots = torch.where(places < ends[-1], batch.slots(), self._cache.shape[2] - 1)
        blocks = there.block_ids[there.rows[batch.owners]]
        known = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
        seen = torch.arange(known.shape[1]) <= batch.positions.unsqueeze(-1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            keys, values = self._cache[layer]
            keys[slots], values[slots] = k, v
            group = q.shape[1] // k.shape[1]
            mine = (each[known].repeat_interleave(group, 2) for each in (keys, values))
            own_keys, own_values = (torch.where(seen[..., None, None], each, 0) for each in mine)
            scores = torch.einsum("nhd,nthd->nht", q, own_keys) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
            return torch.einsum("nht,nthd->nhd", weights, own_values).flatten(1)

        return TorchStepAttention(attend, self._spec)


class Recorder:
    """In place of `CudaRecorder`: counts captures and replays."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, launches: Launches) -> Launches:
        self.captures += 1
        launches()

        def replay() -> None:
            self.replays += 1
            launches()

        return replay


class Setting:
    """A tiny model whose decode steps are recorded, prompts, and how transformers goes on with them."""

    def __init__(self, checkpoint: Path) -> None:
        self.recorder, self.preemptions = Recorder(), 0
        cache = CacheConfig(block_size=BLOCK)
        config = EngineConfig(model=str(checkpoint), device="cpu", attention="device", cache=cache)
        self.executor = InlineExecutor(config)
        self.executor.load(lambda phase, fraction: None)
        self.set_pace(1.0)
        generator = torch.Generator().manual_seed(5)
        lengths = (1, 7, 16, 25, 33, 60)
        self.prompts = [torch.randint(1, 384, (length,), generator=generator).tolist() for length in lengths]
        self.prompts[3] = [*self.prompts[3][:8] * 3]  # which an n-gram drafter looks up, and guesses wrong
        self.right = self.transformers_tokens(checkpoint)

    def set_pace(self, seconds: float) -> None:
        """Begin anew, with so many seconds from one step to the next."""
        runner, clock = self.executor.rank.runner, (at * seconds for at in range(10**6))
        buckets = GraphBuckets((1, 2, 4), (32, LONGEST))
        self.graphs = DecodeGraphs(runner.compute_static, buckets, CPU, self.recorder, clock.__next__)
        runner.graphs = self.graphs

    @torch.inference_mode()
    def transformers_tokens(self, checkpoint: Path) -> list[list[int]]:
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        found = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            found.append(out[0, len(prompt) :].tolist())
        return found

    def scheduler(self, ahead: int, drafts: bool = False) -> tuple[Scheduler, KVCacheManager]:
        self.executor.allocate(BLOCKS)
        cache = KVCacheManager(BLOCKS, BLOCK)
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=LONGEST, ahead=ahead)
        speculation = Speculation({"ngram": NgramDrafter(2, 4)}, 3, 384) if drafts else None
        return Scheduler(config, cache, speculation=speculation), cache

    def request(self, key: int, cache: KVCacheManager) -> SequenceRequest:
        prompt = np.array(self.prompts[key % len(self.prompts)], np.int32)
        return SequenceRequest(key=key, prompt=prompt, max_tokens=NEW, hashes=cache.digest(prompt))


@pytest.fixture(scope="module")
def setting(checkpoint: Callable[..., Path]) -> Iterator[Setting]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selector.BACKENDS, "device", DeviceAttention)
        made = Setting(checkpoint("llama"))
        yield made
        made.executor.close()


def run(setting: Setting, ahead: int, cancelled: dict[int, list[int]], drafts: bool = False) -> dict[int, list[int]]:
    """Twelve requests, two at each step; `cancelled`: keys by step. The tokens of the others."""
    scheduler, cache = setting.scheduler(ahead, drafts)
    waiting, flying = deque(range(12)), deque[Any]()
    found: dict[int, list[int]] = {key: [] for key in waiting}
    step = 0
    while waiting or scheduler.has_work:
        for _ in range(min(2, len(waiting))):
            scheduler.add(setting.request(waiting.popleft(), cache))
        scheduler.abort(cancelled.get(step, ()))
        while plan := scheduler.schedule():
            flying.append(setting.executor.execute(plan))
        if flying:
            updates = scheduler.apply(flying.popleft().result())
            stream = iter(updates.tokens)
            for key, count in zip(updates.keys, updates.counts, strict=True):
                found[key] += (next(stream) for _ in range(count))
        scheduler.check_integrity()
        step += 1
    while flying:
        scheduler.apply(flying.popleft().result())
    setting.preemptions += scheduler.totals.preemptions
    gone = {key for keys in cancelled.values() for key in keys}
    return {key: tokens for key, tokens in found.items() if key not in gone}


def expected(setting: Setting, found: dict[int, list[int]]) -> dict[int, list[int]]:
    return {key: setting.right[key % len(setting.right)] for key in found}


@pytest.mark.parametrize("ahead", [0, 1])
def test_replayed_steps_are_transformers(setting: Setting, ahead: int) -> None:
    """Through chunks, prefix hits and preemptions, while graphs come one after the other."""
    setting.set_pace(0.1)
    replays = setting.recorder.replays
    found = run(setting, ahead, {})
    assert len(found) == 12
    assert found == expected(setting, found)
    assert setting.graphs.eager_steps > 5
    assert setting.recorder.replays > replays + 5
    assert setting.preemptions


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 11), max_size=3), max_size=6),
    st.sampled_from((0, 1)),
    st.booleans(),
)
def test_cancels_and_rejected_drafts_leave_the_others_as_they_are(
    setting: Setting, cancelled: dict[int, list[int]], ahead: int, drafts: bool
) -> None:
    """All of the decode steps are replayed."""
    setting.set_pace(1.0)
    replays = setting.recorder.replays
    found = run(setting, ahead, cancelled, drafts)
    assert found == expected(setting, found)
    assert not setting.graphs.eager_steps
    assert not found or setting.recorder.replays > replays


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # padded places hold whatever was there
def test_tokens_are_the_same_with_kernels(checkpoint: Callable[..., Path], setting: Setting, interpreted: None) -> None:
    """The layers and the attention of a GPU, interpreted, in a step that is replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selector.BACKENDS, "device", TritonAttention)
        made = Setting(checkpoint("llama"))
        made.prompts, made.right = made.prompts[:2], made.right[:2]
        scheduler, cache = made.scheduler(1)
        scheduler.add(made.request(1, cache))
        found: list[int] = []
        while plan := scheduler.schedule():
            found += scheduler.apply(made.executor.execute(plan).result()).tokens
        made.executor.close()
    assert found == made.right[1]
    assert made.recorder.replays > NEW - 3


def table(compute: Callable[[Tensor, int], Tensor], clock: Callable[[], float]) -> tuple[DecodeGraphs, Recorder]:
    recorder = Recorder()
    return DecodeGraphs(compute, GraphBuckets((1, 2, 4), (16, 64)), CPU, recorder, clock), recorder


def columns(rows: int, start: int) -> list[np.ndarray]:
    ones = np.ones(rows, np.int32)
    return [np.arange(rows, dtype=np.int32), start * ones, ones, np.arange(rows, dtype=np.int32)]


def sums(numbers: Tensor, context: int) -> Tensor:
    return (numbers.sum(0, keepdim=True).T + context).float().repeat(1, 3)


def test_a_bucket_is_captured_at_most_once_a_second() -> None:
    now = [0.0]
    graphs, recorder = table(sums, lambda: now[0])
    first = graphs.replay(columns(3, 5))
    assert first is not None
    assert first.tolist() == [[float(2 * row + 6 + 16)] * 3 for row in range(3)]
    assert graphs.replay(columns(1, 5)) is None
    now[0] = 1.0
    assert graphs.replay(columns(1, 5)) is not None
    assert (recorder.captures, graphs.eager_steps) == (2, 1)
    assert graphs.replay(columns(5, 5)) is None  # larger than the largest bucket
    assert graphs.replay(columns(1, 64)) is None


def test_an_idle_engine_captures_the_rest_short_contexts_first() -> None:
    asked: list[tuple[int, int]] = []

    def compute(numbers: Tensor, context: int) -> Tensor:
        assert not numbers.any()  # nothing but padded rows while a step is captured
        asked.append((numbers.shape[1], context))
        return sums(numbers, context)

    graphs, recorder = table(compute, lambda: 0.0)
    for _ in range(9):
        graphs.capture_one()
    assert asked[::2] == [(rows, context) for context in (16, 64) for rows in (1, 2, 4)]
    assert recorder.captures == 6
    graphs.forget()
    assert not graphs._replays


def test_a_step_that_cannot_be_recorded_is_computed_without(caplog: pytest.LogCaptureFixture) -> None:
    def compute(numbers: Tensor, context: int) -> Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, _ = table(compute, lambda: 0.0)
    assert graphs.replay(columns(1, 5)) is None
    graphs.capture_one()
    assert [record.message for record in caplog.records] == [
        "decode steps are computed without CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert graphs.eager_steps == 1


def test_buckets_reach_the_limits() -> None:
    buckets = GraphBuckets.of_limits(20, 100_000)
    assert buckets.rows == (1, 2, 4, 8, 16, 20)
    assert buckets.contexts == (8192, 32768, 100_000)
    assert GraphBuckets.of_limits(5000, 4096) == GraphBuckets.of_limits(1024, 4096)
    assert GraphBuckets.of_limits(5000, 4096).contexts == (4096,)
