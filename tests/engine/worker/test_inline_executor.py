"""The executor that computes in this process: loading, order, failure."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from charonia.core.errors import InvalidArgument
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.cpu import library
from charonia.engine.worker.executor import CacheCopies, CachePlaces
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.scheduler.plan import MaskArray, NewSequence, StepPlan

NOBODY = np.zeros(0, dtype=np.int32)
NOTHING = np.zeros((0, 2), dtype=np.int32)
Make = Callable[..., InlineExecutor]


@pytest.fixture
def make(checkpoint: Callable[..., Path]) -> Iterator[Make]:
    made: list[InlineExecutor] = []

    def build(**changes: object) -> InlineExecutor:
        config = EngineConfig(model=str(checkpoint("llama")), device="cpu", cache=CacheConfig(block_size=8))
        made.append(InlineExecutor(msgspec.structs.replace(config, **changes)))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def plan(step: int, start: int, count: int, *, new: bool = False, row: int = 0) -> StepPlan:
    """`count` tokens of row 0, a sequence of 8 known ones in block 1, sampled at their end."""
    known = np.arange(8, dtype=np.int32)
    return StepPlan(
        step,
        np.array([row], np.int32),
        np.array([start], np.int32),
        np.array([count], np.int32),
        np.array([start + count >= 8]),
        np.array([start + count >= 8], np.int32),
        np.array([[row, 1], [row, 0]], np.int32) if new else NOTHING,
        (NewSequence(row, known, 0, ResolvedSampling()),) if new else (),
        NOBODY,
    )


def test_capacity_says_what_was_found(make: Make) -> None:
    capacity = make().load(lambda phase, fraction: None)
    assert capacity.vocab_size == 384
    assert capacity.max_model_len == 256
    assert capacity.block_bytes == 2 * 2 * 8 * 2 * 16 * 4
    assert capacity.free_bytes > 0


def test_a_shorter_model_length_is_taken(make: Make) -> None:
    assert make(max_model_len=100).load(lambda *_: None).max_model_len == 100


def test_progress_comes_on_the_callers_thread(make: Make) -> None:
    seen: list[tuple[str, float, int]] = []
    make().load(lambda phase, fraction: seen.append((phase, fraction, threading.get_ident())))
    assert seen[-1] == ("weights", 1.0, threading.get_ident())
    assert {phase for phase, _, _ in seen} == {"weights"}


def test_results_name_row_position_and_token(make: Make) -> None:
    executor = make()
    executor.load(lambda *_: None)
    executor.allocate(4)
    silent = executor.execute(plan(0, 0, 5, new=True))
    first, second = executor.execute(plan(1, 5, 3)), executor.execute(plan(2, 8, 1))
    assert len(silent.result().tokens) == 0
    assert first.result().step == 1
    assert (first.result().offsets.tolist(), second.result().offsets.tolist()) == ([8], [9])
    assert first.result().counts.tolist() == [1]
    assert {array.dtype for array in first.result()[1:5]} == {np.dtype(np.int32)}


def running_threads() -> list[str]:
    """The states of this process's other threads that are not asleep."""
    states: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            with suppress(OSError):  # it has ended
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return [state for state in states if state != "S"]


@pytest.mark.skipif(
    library.level() is None or not Path("/proc/self/task").exists(), reason="no C extension, or no /proc"
)
def test_threads_that_wait_for_masks_sleep(make: Make) -> None:
    """In steps of two programs, before the masks of each."""

    def masks(token: int) -> MaskArray:
        deadline = time.monotonic() + 10
        while running_threads():
            assert time.monotonic() < deadline, "a thread that waits for masks runs"
            time.sleep(0.001)
        mask = np.zeros((1, 384 // 32), np.int32)
        mask[0, token // 32] = 1 << token % 32
        return mask

    engines = [make(cache=CacheConfig(block_size=16), threads=2) for _ in range(2)]
    for engine in engines:
        engine.load(lambda *_: None)
        engine.allocate(4)
    asked = plan(0, 0, 8, new=True)._replace(masked=np.array([0], np.int32))
    steps = [engine.execute(asked, partial(masks, token)) for engine, token in zip(engines, (7, 300), strict=True)]
    assert [step.result().tokens.tolist() for step in steps] == [[7], [300]]


@pytest.mark.parametrize("block_size", [8, 16], ids=["by torch", "by our kernels"])
def test_a_step_that_fails_fails_its_future_alone(make: Make, block_size: int) -> None:
    executor = make(cache=CacheConfig(block_size=block_size))
    executor.load(lambda *_: None)
    executor.allocate(4)
    executor.execute(plan(0, 0, 8, new=True)).result()
    with pytest.raises(IndexError):
        executor.execute(plan(1, 8, 1, row=77)).result()
    assert executor.execute(plan(2, 8, 1)).result().offsets.tolist() == [9]


def test_compute_has_its_own_settings(make: Make) -> None:
    before = torch.get_num_threads()
    executor = make(threads=before + 1)
    executor.load(lambda *_: None)
    assert torch.get_num_threads() == before + 1
    executor.close()
    assert torch.get_num_threads() == before


def test_settings_are_given_back_where_loading_fails(make: Make) -> None:
    before = torch.get_num_threads()
    executor = make(threads=before + 1, max_model_len=10_000)
    with pytest.raises(InvalidArgument):
        executor.load(lambda *_: None)
    executor.close()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:7"}, "device"),
        ({"dtype": "int4"}, "dtype"),
        ({"attention": "flash"}, "attention"),
        ({"max_model_len": 10_000}, "max_model_len"),
        ({"cache": CacheConfig(block_size=5000)}, "block_size"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(make: Make, changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        make(**changes).load(lambda *_: None)
    assert refusal.value.field == field


def test_closing_without_loading_is_fine(make: Make) -> None:
    make().close()


def test_what_comes_overwrites_a_place_behind_all_steps_and_copies(make: Make) -> None:
    """Steps that wait for those before have copies of their own, and compute what is copied."""
    executors = make(), make()
    for executor in executors:
        executor.load(lambda *_: None)
        executor.allocate(4, host_blocks=1)
        executor.execute(plan(0, 0, 5, new=True))
        later = [executor.execute(plan(1, 5, 3)), executor.execute(plan(2, 8, 1))]
    executor, alone = executors
    nothing = [memoryview(bytes(executor.image_layouts[0].block_bytes))]
    saved, back = (CacheCopies(np.array([copy], np.int32)) for copy in ((1, 0, False), (2, 0, True)))
    executor.put_places(CachePlaces([1]), nothing, saved)
    executor.put_places(CachePlaces([3]), nothing, back)
    [computed] = alone.take_places(CachePlaces([1]))()
    assert any(computed)
    assert executor.take_places(CachePlaces([2, 1, 3]))() == [computed + 2 * bytes(nothing[0])]
    assert [step.result().step for step in later] == [1, 2]
