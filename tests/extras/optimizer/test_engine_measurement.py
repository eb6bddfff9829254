"""Calibration: the real step loop, over an executor that counts. No step's time is judged."""

from typing import Any

import pytest
from msgspec.structs import replace

from charonia.core.errors import InvalidArgument
from charonia.engine.config import CacheConfig, EngineConfig, FakeConfig, SpeculationConfig
from charonia.engine.worker.executor import Capacity, ProgressCallback
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.extras.optimizer.engine_measurement import EngineMeasurement, measure_engine
from charonia.scheduler.config import SchedulerConfig

FAKE = EngineConfig(
    model="",
    executor="fake",
    fake=FakeConfig(max_model_len=1024),
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
)


@pytest.fixture(scope="module")
def measured() -> EngineMeasurement:
    told: list[float] = []
    found = measure_engine(FAKE, 1.5, lambda share, text: told.append(share))
    assert told == sorted(told)
    return found


def test_every_kind_of_step_comes_about(measured: EngineMeasurement) -> None:
    loads = [sample.load for sample in measured.samples]
    decoding = [load for load in loads if not load.work.prefill_tokens]
    mixed = [load for load in loads if load.work.prefill_tokens and load.work.decode_tokens]
    prompts = [load for load in loads if not load.work.decode_tokens]
    assert min(map(len, (decoding, mixed, prompts))) > 0
    assert max(load.work.decode_tokens for load in loads) == 16
    assert max(load.rows for load in loads) <= 256
    assert {each.work.prefill_tokens for each in [*mixed, *prompts]} & set(range(1, 33)), "no small chunk"
    assert any(load.rows > 128 for load in loads), "no large one"
    assert all(each.samples == each.rows for each in decoding)
    assert all(load.chunk_reads >= load.work.prefill_tokens for load in loads)


def test_time_between_steps_is_known_where_one_follows_another(measured: EngineMeasurement) -> None:
    followed = [sample for sample in measured.samples if sample.between is not None]
    assert len(followed) > len(measured.samples) / 2
    assert all(sample.seconds > 0 for sample in measured.samples)
    assert all(0 < (each.between or 0) < 10 and each.brought <= 16 for each in followed)


def test_the_engine_is_the_one_that_a_server_would_have(measured: EngineMeasurement) -> None:
    shape = measured.shape
    assert (shape.scheduler.max_num_seqs, shape.scheduler.max_model_len) == (16, 1024)
    assert shape.blocks == 4 * 16 * 1024 // 16 + 1
    assert measured.block_bytes == 1 << 16


def test_a_gpus_graphs_are_captured_before_its_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    load, captured, name = FakeExecutor.load, list[bool](), "NVIDIA H200, compute capability 9.0"

    def on_gpu(executor: FakeExecutor, progress: ProgressCallback) -> Capacity:
        return load(executor, progress)._replace(on_gpu=True, machine=name)

    monkeypatch.setattr(FakeExecutor, "load", on_gpu)
    monkeypatch.setattr(FakeExecutor, "capture_usual_steps", lambda executor, _: captured.append(True))
    assert measure_engine(FAKE, 0.1, lambda share, text: None).gpu == name
    measure_engine(replace(FAKE, warm_up_graphs=False), 0.1, lambda share, text: None)
    assert captured == [True]


@pytest.mark.parametrize("blocks", [2, 40])
def test_a_small_cache_is_measured_with_what_fits(blocks: int) -> None:
    found = measure_engine(replace(FAKE, cache=CacheConfig(blocks=blocks)), 0.1, lambda share, text: None)
    assert found.samples


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speculation": SpeculationConfig(method="ngram")}, "verify drafts are not measured"),
        ({"data_parallel_size": 2}, "one replica is measured"),
    ],
)
def test_what_is_not_measured_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        measure_engine(replace(FAKE, **changes), 0.1, lambda share, text: None)
