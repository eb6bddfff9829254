"""A classic model from request to response: queue, batches, threads, order, failures, cancellation, counting."""

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from charonia.classic_backends.batching import instance_pool
from charonia.classic_backends.builtin import IDENTITY
from charonia.classic_backends.model import ClassicModel
from charonia.core.errors import CharoniaError, ErrorCode, InvalidArgument
from charonia.core.model import ModelConfig, ModelSamples, WarmupRequest
from charonia.core.request import InferRequest
from charonia.core.request_context import ExecutionTimes, RequestContext
from charonia.core.runtime import Arrays, InstancePlacement, RawConfig, RuntimeTraits
from charonia.core.tensor import Tensor, TensorSpec
from charonia.repository.gateway import InProcessGateway

from ..built_models import serve_model
from ..waiting import until
from .asking import answers, serving, waiting

DELAY = 10_000_000
"""Microseconds that no test waits for."""


PLAIN = RuntimeTraits()


class Gated:
    """Doubles X into Y when `gate` opens; fails on a negative number. Remembers what it was given."""

    by_request = False

    def __init__(self, traits: RuntimeTraits = PLAIN) -> None:
        self.traits = traits
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[list[int]] = []
        self.threads: set[str] = set()
        self.places: list[InstancePlacement] = []
        self.closed = 0
        self.seen: Callable[[Arrays], None] = lambda inputs: None

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> "Gated":
        self.places.append(place)
        return self

    def complete(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> RawConfig:
        return raw

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        self.entered.set()
        assert self.gate.wait(30)
        self.seen(inputs)
        self.batches.append(inputs["X"].ravel().tolist())
        self.threads.add(threading.current_thread().name)
        if (inputs["X"] < 0).any():
            raise ValueError("negative")
        yield {"Y": inputs["X"] * 2}

    def close(self) -> None:
        self.closed += 1


def config(batching: Mapping[str, Any] | None = None, **fields: Any) -> ModelConfig:
    raw: dict[str, Any] = fields.pop("raw", {})
    if batching is not None:
        raw |= {"dynamic_batching": batching}
    settings = {"max_batch_size": 8, "raw": raw} | fields
    free = (TensorSpec("X", "INT32", (-1,)),)
    return ModelConfig("gated", "1", "test", inputs=free, outputs=(TensorSpec("Y", "INT32", (-1,)),), **settings)


def ask(*numbers: int, rows: int = 1, **fields: Any) -> InferRequest:
    data = np.array(numbers, np.int32).reshape(rows, -1)
    return InferRequest(inputs={"X": Tensor("X", "INT32", data.shape, data)}, **fields)


async def answer(model: ClassicModel, *numbers: int, **fields: Any) -> list[int]:
    [response] = await answers(model, ask(*numbers, **fields))
    [tensor] = response.outputs
    assert tensor.shape == tensor.data.shape
    values: list[int] = tensor.data.ravel().tolist()
    return values


async def begun(runtime: Gated) -> None:
    assert await asyncio.to_thread(runtime.entered.wait, 30)
    runtime.entered.clear()


async def held_up(model: ClassicModel, runtime: Gated, *requests: InferRequest) -> list["asyncio.Task[Any]"]:
    """One request that holds the only instance, and these behind it, in this order."""
    runtime.gate.clear()
    tasks = [asyncio.create_task(answers(model, ask(0)))]
    await begun(runtime)
    for number, request in enumerate(requests, 1):
        tasks.append(asyncio.create_task(answers(model, request)))
        await until(lambda number=number: waiting(model) == number)
    return tasks


async def test_requests_that_queued_up_share_a_batch_and_get_their_own_part() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        first, *others = await held_up(model, runtime, ask(1), ask(2, 3, rows=2), ask(4))
        runtime.gate.set()
        await first
        outputs = [(await task)[0].outputs[0].data.tolist() for task in others]
    assert runtime.batches == [[0], [1, 2, 3, 4]]
    assert outputs == [[[2]], [[4], [6]], [[8]]]
    assert runtime.closed == 1


async def test_without_batching_each_is_an_execution() -> None:
    runtime = Gated()
    async with serving(runtime, config()) as model:
        tasks = await held_up(model, runtime, ask(1), ask(2))
        runtime.gate.set()
        await asyncio.gather(*tasks)
        assert model.statistics().explain["model_does_not_batch"] == 3
    assert runtime.batches == [[0], [1], [2]]


async def test_shapes_that_differ_do_not_share_and_the_statistics_say_so() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        tasks = await held_up(model, runtime, ask(1), ask(2, 3), ask(4, 5))
        runtime.gate.set()
        await asyncio.gather(*tasks)
        assert runtime.batches == [[0], [1], [2, 3, 4, 5]]
        explain = model.statistics().explain
        assert (explain["shapes_differ"], explain["instance_idle"]) == (1, 1)
        assert {(r.labels["reason"], r.value) for r in model.readings() if "unbatched" in r.family} >= {
            ("shapes_differ", 1),
            ("delay_too_short", 0),
        }


async def test_a_preferred_size_ends_the_wait() -> None:
    async with serving(Gated(), config({"preferred_batch_size": [2], "max_queue_delay_microseconds": DELAY})) as model:
        assert await asyncio.gather(answer(model, 1), answer(model, 2)) == [[2], [4]]
        assert [batch.batch_size for batch in model.statistics().batches] == [2]


async def test_the_delay_ends_the_wait_too() -> None:
    async with serving(Gated(), config({"max_queue_delay_microseconds": 2000})) as model:
        assert await answer(model, 1) == [2]
        assert model.statistics().explain["delay_too_short"] == 1


async def test_statistics_count_requests_items_and_executions() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        tasks = await held_up(model, runtime, ask(1), ask(2, 3, rows=2))
        runtime.gate.set()
        await asyncio.gather(*tasks)
        told = model.statistics()
        values = {r.family: r.value for r in model.readings() if not r.labels}
        assert model.stats().success == 3
    assert (told.inference_count, told.execution_count) == (4, 2)
    assert [each.count for each in told.inference[:6]] == [3, 0, 3, 3, 3, 3]
    assert [(batch.batch_size, batch.compute_infer.count) for batch in told.batches] == [(1, 1), (3, 1)]
    # Each member of a batch adds all of the batch's time.
    assert told.inference.compute_infer.ns == sum(
        each.compute_infer.ns * requests for each, requests in zip(told.batches, (1, 2), strict=True)
    )
    assert told.last_inference > 0
    assert values["nv_inference_count"] == 4
    assert values["nv_inference_exec_count"] == 2
    assert values["nv_inference_compute_infer_duration_us"] <= told.inference.compute_infer.ns // 1000


async def test_a_model_that_fails_fails_its_batch_and_goes_on() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        tasks = await held_up(model, runtime, ask(-1), ask(2))
        runtime.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert await answer(model, 5) == [10]
        assert model.statistics().inference.fail.count == 2
        failures = {r.labels["reason"]: r.value for r in model.readings() if r.family.endswith("request_failure")}
    assert failures == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 2, "OTHER": 0}
    for error in results[1:]:
        assert isinstance(error, CharoniaError)
        assert error.code is ErrorCode.INTERNAL
        assert error.message == (
            "Failed to process the request(s) for model instance 'gated_0_0', message: ValueError: negative"
        )


async def test_a_request_that_the_model_refuses_fails_alone() -> None:
    def refuse(inputs: Arrays) -> None:
        if 3 in inputs["X"]:
            raise InvalidArgument("not 3", field="X")

    runtime = Gated()
    async with serving(runtime, config({})) as model:
        runtime.seen = refuse
        _, *others = await held_up(model, runtime, ask(1), ask(2, 3, rows=2), ask(4))
        runtime.gate.set()
        first, refused, last = await asyncio.gather(*others, return_exceptions=True)
        statistics = model.statistics().inference
        assert (statistics.success.count, statistics.fail.count) == (3, 1)
    assert [first[0].outputs[0].data.tolist(), last[0].outputs[0].data.tolist()] == [[[2]], [[8]]]
    assert (type(refused), refused.field) == (InvalidArgument, "X")
    assert runtime.batches == [[0], [1], [4]]


async def test_a_full_queue_refuses() -> None:
    runtime = Gated()
    async with serving(runtime, config({"default_queue_policy": {"max_queue_size": 1}})) as model:
        tasks = await held_up(model, runtime, ask(1))
        with pytest.raises(CharoniaError) as full:
            await answer(model, 2, id="second")
        assert full.value.code is ErrorCode.UNAVAILABLE
        assert full.value.message == "[request id: second] Exceeds maximum queue size"
        runtime.gate.set()
        await asyncio.gather(*tasks)
        assert [r.value for r in model.readings() if r.labels == {"reason": "REJECTED"}] == [1]
    assert runtime.batches == [[0], [1]]


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_refusal_is_said_to_who_asked_and_not_once_more_in_the_log(
    ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Gated()
    batching = {"default_queue_policy": {"max_queue_size": 1}, "preserve_ordering": ordered}
    async with serving(runtime, config(batching)) as model:
        tasks = await held_up(model, runtime, ask(1))
        for number in range(3):
            with pytest.raises(CharoniaError, match="Exceeds maximum queue size"):
                await answer(model, number)
        runtime.gate.set()
        await asyncio.gather(*tasks)
    gc.collect()
    assert caplog.text == ""


@pytest.mark.parametrize("ordered", [False, True])
async def test_time_runs_out_in_the_queue_while_every_instance_is_busy(ordered: bool) -> None:
    policy = {"default_timeout_microseconds": DELAY, "allow_timeout_override": True}
    runtime = Gated()
    async with serving(runtime, config({"default_queue_policy": policy, "preserve_ordering": ordered})) as model:
        [first] = await held_up(model, runtime)
        late = asyncio.create_task(answer(model, 1, parameters={"timeout": 1000}))
        await until(lambda: model.stats().failure)
        await asyncio.sleep(0.01)  # its own timer comes after the queue's
        runtime.gate.set()
        await first
        with pytest.raises(CharoniaError, match=r"^Request timeout expired$"):
            await late
        assert [r.value for r in model.readings() if r.labels == {"reason": "REJECTED"}] == [1]
    assert runtime.batches == [[0]]


@pytest.mark.parametrize("decoupled", [False, True])
async def test_time_runs_out_while_it_is_executed(decoupled: bool) -> None:
    policy = {"default_timeout_microseconds": DELAY, "allow_timeout_override": True}
    runtime = Gated()
    async with serving(runtime, config({"default_queue_policy": policy}, decoupled=decoupled)) as model:
        runtime.gate.clear()
        with pytest.raises(CharoniaError, match=r"^Request timeout expired$"):
            await answer(model, 1, parameters={"timeout": 200_000})
        assert runtime.entered.is_set()
        runtime.gate.set()
        assert await answer(model, 2, parameters={"timeout": DELAY - 1}) == [4]
        counts = [r.value for r in model.readings() if r.labels == {"reason": "REJECTED"}]
        assert (counts, model.stats().success, model.stats().failure) == ([1], 1, 1)
    assert runtime.batches == [[1], [2]]


async def test_a_model_whose_execution_does_not_end_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instance_pool, "CHECK_INTERVAL", 0.01)
    runtime, now = Gated(), [0]
    async with serving(runtime, config({}, parameters={"execution_timeout_secs": "40"})) as model:
        [only] = model._pool._instances
        only.execution_timer._clock = lambda: now[0]
        [hanging] = await held_up(model, runtime)
        now[0] += 30 * 10**9
        assert model.stats().ready
        now[0] += 10**9
        assert not model.stats().ready
        now[0] += 10**10
        await until(lambda: "(execution_timeout_secs)" in caplog.text)
        runtime.gate.set()
        await hanging
        await until(lambda: "is ready again" in caplog.text)
        assert model.stats().ready
    assert [record.getMessage() for record in caplog.records] == [
        "instance 'gated_0_0' has been executing for 41 s: it is not ready",
        "instance 'gated_0_0': the execution took longer than 40 s (execution_timeout_secs); a thread cannot be ended",
        "instance 'gated_0_0' is ready again",
    ]


@pytest.mark.parametrize("parameters", [{"priority": -1}, {"timeout": "soon"}, {"priority": True}])
async def test_wrong_priorities_and_timeouts_are_refused(parameters: dict[str, Any]) -> None:
    async with serving(Gated(), config({})) as model:
        with pytest.raises(InvalidArgument, match="must be an integer"):
            await answer(model, 1, parameters=parameters)


async def test_priorities_overtake() -> None:
    runtime = Gated()
    batching = {"priority_levels": 2, "default_priority_level": 2, "preferred_batch_size": [1]}
    async with serving(runtime, config(batching, max_batch_size=1)) as model:
        tasks = await held_up(model, runtime, ask(1), ask(2, parameters={"priority": 1}))
        runtime.gate.set()
        await asyncio.gather(*tasks)
    assert runtime.batches == [[0], [2], [1]]


async def test_who_leaves_leaves_the_queue_at_once() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        tasks = await held_up(model, runtime, ask(1), ask(2), ask(3))
        tasks[2].cancel()
        await until(lambda: waiting(model) == 2)
        tasks[0].cancel()
        runtime.gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (model.stats().success, model.stats().cancelled) == (2, 2)
        assert await answer(model, 4) == [8]
    assert runtime.batches == [[0], [1, 3], [4]]


async def test_unloading_refuses_who_waits_and_finishes_what_runs() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        tasks = await held_up(model, runtime, ask(1))
        unloading = asyncio.create_task(model.unload())
        with pytest.raises(CharoniaError, match="Server is stopping, scheduler for model has stopped accepting"):
            await tasks[1]
        assert not runtime.closed
        runtime.gate.set()
        [response] = await tasks[0]
        assert response.outputs[0].data.tolist() == [[0]]
        await unloading
        assert runtime.closed == 1
        assert not model.stats().ready


async def test_nothing_of_a_request_is_kept() -> None:
    runtime, kept = Gated(), []
    async with serving(runtime, config({})) as model:
        runtime.seen = lambda inputs: kept.append(weakref.ref(inputs["X"]))
        tasks = await held_up(model, runtime, ask(1), ask(2))
        runtime.gate.set()
        await asyncio.gather(*tasks)
        del tasks
        gc.collect()
        await until(lambda: all(each() is None for each in kept))
        assert len(kept) == 2


async def test_instances_are_threads_of_their_own() -> None:
    groups = [{"name": "left", "kind": "KIND_CPU", "count": 2}, {"name": "right", "kind": "KIND_GPU", "gpus": [0, 1]}]
    runtime = Gated()
    async with serving(runtime, config(raw={"instance_group": groups})) as model:
        runtime.gate.clear()
        tasks = [asyncio.create_task(answer(model, number)) for number in range(4)]
        await asyncio.sleep(0)
        await until(lambda: waiting(model) == 0)
        runtime.gate.set()
        assert await asyncio.gather(*tasks) == [[0], [2], [4], [6]]
    assert {place.name for place in runtime.places} == {"left_0", "left_1", "right_0", "right_1"}
    assert sorted(place.device for place in runtime.places) == [0, 0, 0, 1]
    assert runtime.threads == {place.name for place in runtime.places}
    assert runtime.closed == 4


async def test_ordered_responses_wait_for_those_before_them() -> None:
    runtime = Gated()
    groups = [{"kind": "KIND_CPU", "count": 2}]
    batching = {"preserve_ordering": True, "preferred_batch_size": [1]}
    async with serving(runtime, config(batching, raw={"instance_group": groups}, max_batch_size=1)) as model:
        slow, done = threading.Event(), list[int]()
        runtime.seen = lambda inputs: assert_(slow.wait(30)) if inputs["X"][0, 0] == 1 else None

        async def one(number: int) -> None:
            await answer(model, number)
            done.append(number)

        tasks = [asyncio.create_task(one(number)) for number in (1, 2, 3)]
        await until(lambda: model.statistics().inference.success.count == 2)
        assert done == []
        slow.set()
        await asyncio.gather(*tasks)
        assert done == [1, 2, 3]


async def test_an_answer_that_waits_for_its_turn_counts_once_though_its_reader_leaves() -> None:
    runtime = Gated()
    groups = [{"kind": "KIND_CPU", "count": 2}]
    batching = {"preserve_ordering": True, "preferred_batch_size": [1]}
    async with serving(runtime, config(batching, raw={"instance_group": groups}, max_batch_size=1)) as model:
        slow = threading.Event()
        runtime.seen = lambda inputs: assert_(slow.wait(30)) if inputs["X"][0, 0] == 1 else None
        first, second = [asyncio.create_task(answer(model, number)) for number in (1, 2)]
        await until(lambda: model.statistics().inference.success.count == 1)
        second.cancel()
        await asyncio.wait({second})
        slow.set()
        assert await first == [2]
        assert (model.stats().success, model.stats().cancelled) == (2, 0)


def assert_(holds: bool) -> None:
    assert holds


async def test_one_who_leaves_holds_nobody_up_in_order() -> None:
    runtime = Gated()
    async with serving(runtime, config({"preserve_ordering": True})) as model:
        tasks = await held_up(model, runtime, ask(1), ask(2))
        tasks[1].cancel()
        runtime.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [list, asyncio.CancelledError, list]


async def test_one_who_is_refused_holds_nobody_up_in_order() -> None:
    async with serving(Gated(), config({"preserve_ordering": True})) as model:
        with pytest.raises(InvalidArgument):
            await answer(model, 1, parameters={"priority": -1})
        assert await answer(model, 2) == [4]


async def test_an_answer_that_came_before_its_reader_left_counts_as_given() -> None:
    runtime = Gated()
    async with serving(runtime, config({})) as model:
        [first, failing] = await held_up(model, runtime, ask(-1))
        first.add_done_callback(lambda _: failing.cancel())
        runtime.gate.set()
        await asyncio.gather(first, failing, return_exceptions=True)
        assert model.stats().success + model.stats().failure + model.stats().cancelled == 2


async def test_a_stream_whose_reader_leaves_after_the_unload_holds_nothing_up() -> None:
    class Endless(Gated):
        def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
            while True:
                yield {"Y": inputs["X"]}

    runtime = Endless()
    async with serving(runtime, config(decoupled=True)) as model:
        stream = model.infer(ask(1), RequestContext("test"))
        await anext(stream)
        unloading = asyncio.create_task(model.unload())
        await asyncio.sleep(0.01)
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            await unloading
    assert runtime.closed == 1


async def test_a_runtime_that_makes_the_wrong_thing_is_told() -> None:
    class Wrong(Gated):
        def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
            if inputs["X"][0, 0] == 1:
                yield {"Y": inputs["X"].astype(np.float32)}
            elif inputs["X"][0, 0] == 2:
                yield {"Y": inputs["X"][:1]}
            elif inputs["X"][0, 0] == 3:
                yield from ()

    runtime = Wrong()
    async with serving(runtime, config({"preferred_batch_size": [2], "max_queue_delay_microseconds": 1000})) as model:
        with pytest.raises(CharoniaError, match="made output 'Y' of type float32, not INT32"):
            await answer(model, 1)
        both = await asyncio.gather(answer(model, 2), answer(model, 2), return_exceptions=True)
        assert [str(error) for error in both] == ["output 'Y' has shape [1, 1] for a batch of 2"] * 2
        with pytest.raises(CharoniaError, match="expected a single response, got 0"):
            await answer(model, 3)


async def test_a_load_that_fails_leaves_nothing() -> None:
    class Second(Gated):
        def load(self, *arguments: Any) -> Gated:
            super().load(*arguments)
            if len(self.places) == 2:
                raise InvalidArgument("no second one")
            return self

    runtime = Second()
    with pytest.raises(InvalidArgument, match="no second one"):
        async with serving(runtime, config(raw={"instance_group": [{"count": 2}]})):
            pass
    assert runtime.closed == 1
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("gated_")])


async def test_every_instance_is_warmed_up_and_warm_up_that_fails_fails_the_load(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "charonia.classic_backends.model")
    runtime = Gated()
    async with serving(
        runtime,
        config(raw={"instance_group": [{"count": 2}]}),
        samples=ModelSamples([WarmupRequest(msgspec.structs.replace(ask(7), id="small"), times=2)]),
    ) as model:
        assert runtime.batches == [[7]] * 4
        assert model.statistics().execution_count == 0
    running = "model 'gated' instance gated_0_{} is running warmup sample 'small' for iteration {}"
    assert caplog.messages == [running.format(instance, turn) for instance in (0, 1) for turn in (1, 2)]
    bad = ModelSamples([WarmupRequest(msgspec.structs.replace(ask(-1), id="bad"))])
    with pytest.raises(InvalidArgument, match=r"failed to run warmup sample 'bad' on 'gated_0_0': .*negative"):
        async with serving(runtime, config(), samples=bad):
            pass
    assert runtime.closed == 3


async def test_reshape_is_between_the_client_and_the_model() -> None:
    shapes: list[tuple[int, ...]] = []
    raw = {
        "input": [{"name": "X", "reshape": {"shape": [-1, 1]}}],
        "output": [{"name": "Y", "reshape": {"shape": [-1, 1]}}],
    }
    runtime = Gated()
    runtime.seen = lambda inputs: shapes.append(inputs["X"].shape)
    async with serving(runtime, config({}, raw=raw)) as model:
        [response] = await answers(model, ask(1, 2, 3))
    assert shapes == [(1, 3, 1)]
    assert response.outputs[0].shape == response.outputs[0].data.shape == (1, 3)


async def test_ragged_requests_share_a_batch() -> None:
    seen: list[dict[str, Any]] = []
    raw = {
        "input": [{"name": "X", "allow_ragged_batch": True}],
        "batch_input": [
            {"kind": kind, "target_name": [kind], "data_type": "TYPE_INT32", "source_input": ["X"]}
            for kind in (
                "BATCH_ELEMENT_COUNT",
                "BATCH_ACCUMULATED_ELEMENT_COUNT",
                "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
                "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
                "BATCH_ITEM_SHAPE",
                "BATCH_ITEM_SHAPE_FLATTEN",
            )
        ],
        "batch_output": [{"target_name": ["Y"], "source_input": ["X"]}],
    }
    runtime = Gated(RuntimeTraits(ragged=True))
    runtime.seen = lambda inputs: seen.append({name: array.tolist() for name, array in inputs.items()})
    async with serving(runtime, config({}, raw=raw)) as model:
        first, *others = await held_up(model, runtime, ask(1, 2, 3), ask(4, 5))
        runtime.gate.set()
        await first
        outputs = [(await task)[0].outputs[0].data.tolist() for task in others]
    assert outputs == [[[2, 4, 6]], [[8, 10]]]
    assert seen[1] == {
        "X": [1, 2, 3, 4, 5],
        "BATCH_ELEMENT_COUNT": [3, 2],
        "BATCH_ACCUMULATED_ELEMENT_COUNT": [3, 5],
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 3, 5],
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0],
        "BATCH_ITEM_SHAPE": [[3], [2]],
        "BATCH_ITEM_SHAPE_FLATTEN": [3, 2],
    }


async def test_ragged_inputs_are_refused_where_the_backend_cannot() -> None:
    raw = {"input": [{"name": "X", "allow_ragged_batch": True}]}
    runtime = Gated()
    with pytest.raises(InvalidArgument, match="input 'X' of model 'gated' allows ragged batches, which 'test' cannot"):
        async with serving(runtime, config({}, raw=raw)):
            pass
    assert runtime.closed == 1


async def test_inline_models_answer_without_a_thread() -> None:
    runtime = Gated(RuntimeTraits(inline=True))
    async with serving(runtime, config({}, raw={"instance_group": [{"count": 3}]})) as model:
        assert await answer(model, 1, 2) == [2, 4]
        with pytest.raises(CharoniaError, match="negative"):
            await answer(model, -1)
        assert (model.stats().success, model.stats().failure) == (1, 1)
        assert model.statistics().explain["instance_idle"] == 1
    assert runtime.threads == {threading.current_thread().name}
    assert (len(runtime.places), runtime.closed) == (1, 1)


async def test_inline_models_count_requests_without_a_context() -> None:
    model = ClassicModel(config({}), Gated(RuntimeTraits(inline=True)), Path())
    gateway = InProcessGateway()
    await serve_model(gateway, model, "1")
    with gateway.open_request("test") as context:
        handle = await gateway.acquire(context, "gated")
        answer = handle.answer_now(ask(1))
        assert answer is not None
        assert answer[0].outputs[0].data.tolist() == [[2]]
        with pytest.raises(CharoniaError, match="negative"):
            handle.answer_now(ask(-1))
        ended = {
            reading.labels["outcome"]: reading.value for reading in model.readings() if "outcome" in reading.labels
        }
    assert (ended["done"], ended["error"]) == (1, 1)
    assert (model.stats().success, model.stats().failure) == (1, 1)
    await gateway.lifecycle.close()
    assert model.answer_now(ask(1)) is None
    async with serving(Gated(), config({})) as model:
        assert model.answer_now(ask(1)) is None


async def test_identity_gives_back_what_it_gets() -> None:
    inputs = (TensorSpec("A", "BYTES", (-1,)), TensorSpec("B", "BF16", (2,), optional=True))
    outputs = (TensorSpec("C", "BYTES", (-1,)), TensorSpec("D", "BF16", (2,)))
    settings = ModelConfig("same", "1", "identity", inputs=inputs, outputs=outputs)
    given = {
        "A": Tensor("A", "BYTES", (2,), np.array([b"x", b"\x00y"], object)),
        "B": Tensor("B", "BF16", (2,), np.array([1, 2], np.uint16)),
    }
    async with serving(IDENTITY, settings) as model:
        [both] = await answers(model, InferRequest(inputs=given))
        assert [(tensor.name, tensor.data.tolist()) for tensor in both.outputs] == [
            ("C", [b"x", b"\x00y"]),
            ("D", [1, 2]),
        ]
        [one] = await answers(model, InferRequest(inputs=given, outputs=("D",)))
        assert [tensor.name for tensor in one.outputs] == ["D"]
        [without] = await answers(model, InferRequest(inputs={"A": given["A"]}))
        assert [tensor.name for tensor in without.outputs] == ["C"]


async def times(model: ClassicModel, request: InferRequest) -> ExecutionTimes:
    """What a trace would say of one request."""
    context, before = RequestContext("infer"), time.monotonic_ns()
    await answers(model, request, context)
    made = context.execution
    assert made is not None
    assert before <= made.queued <= made.begun
    assert made.begun + sum(made.spent) <= time.monotonic_ns()
    return made


async def test_traces_are_told_when_what_happened_to_a_request() -> None:
    async with serving(Gated(), config({})) as model:
        made = await times(model, ask(1))
        assert made.begun > made.queued
        assert all(made.spent)
    inline = ModelConfig("i", "1", "identity", inputs=FLOATS, outputs=FLOATS)
    numbers = Tensor("X", "FP32", (1,), np.ones(1, np.float32))
    async with serving(IDENTITY, inline) as model:
        made = await times(model, InferRequest(inputs={"X": numbers}))
        assert made.begun == made.queued


@pytest.mark.parametrize("inline", [False, True])
async def test_traces_are_told_of_a_request_that_failed(inline: bool) -> None:
    async with serving(Gated(RuntimeTraits(inline=inline)), config({})) as model:
        context = RequestContext("infer")
        with pytest.raises(CharoniaError):
            await answers(model, ask(-1), context)
        assert context.execution is not None


FLOATS = (TensorSpec("X", "FP32", (-1,)),)
