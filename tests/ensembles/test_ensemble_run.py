"""Running an ensemble: results, order, back-pressure, failures and cancelling, over models that count their streams."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.backends import RequestTimes
from charonia.core.errors import Internal, InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.tensor import Tensor
from charonia.ensembles.ensemble_model import EnsembleRun

from .graphs import MODELS, Handle, Step, by_hand, ensemble, handles, make_run, plan, run, spec, tensor, values

NO_SEQUENCE = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}

SQUARES = ensemble(["x"], ["y"], ("square", {"IN": "x"}, {"OUT": "s"}), ("identity", {"IN": "s"}, {"OUT": "y"}))


async def test_steps_get_their_tensors_under_their_models_names() -> None:
    config = ensemble(
        ["x", "z"],
        ["sum", "back"],
        ("add_sub", {"A": "x", "B": "z"}, {"SUM": "sum", "DIFF": "d"}),
        ("identity", {"IN": "d"}, {"OUT": "back"}),
    )
    used = handles(plan(config))
    assert await run(config, used, x=5, z=3) == [{"sum": 8, "back": 2}]
    asked = used[0].requests[0]
    assert (asked.id, asked.parameters, asked.outputs) == ("id", {"priority": 3}, ("SUM", "DIFF"))


async def test_every_response_of_a_stream_runs_what_follows_in_order() -> None:
    used = {0: Handle("square"), 1: Handle("identity", delays=[9, 3, 0])}
    assert await run(SQUARES, used, x=3) == [{"y": 3}, {"y": 4}, {"y": 5}]
    assert used[1].most > 1, "passes overlap"


async def test_a_stream_without_responses_answers_nothing() -> None:
    assert await run(SQUARES, x=4) == []


async def test_streams_within_streams_answer_in_order() -> None:
    config = ensemble(
        ["x"],
        ["y"],
        ("square", {"IN": "x"}, {"OUT": "s"}),
        ("square", {"IN": "s"}, {"OUT": "t"}),
        ("identity", {"IN": "t"}, {"OUT": "y"}),
    )
    assert await run(config, x=3) == by_hand(config, {"x": 3}) == [{"y": 3}, {"y": 4}, {"y": 5}, {"y": 5}]


async def test_an_optional_input_may_be_missing_and_a_required_one_stops_the_step() -> None:
    optional = ensemble([spec("x", optional=True)], ["y"], ("default", {"IN": "x"}, {"OUT": "y"}))
    assert await run(optional) == [{"y": -1}]
    required = ensemble([spec("x", optional=True)], ["y"], ("identity", {"IN": "x"}, {"OUT": "y"}))
    with pytest.raises(Internal, match="in ensemble 'whole', unexpected deadlock, at least one output is not set"):
        await run(required)


async def test_outputs_that_no_step_has_sent_are_left_out() -> None:
    steps: list[Step] = [
        ("add_sub", {"A": "x", "B": "x"}, {"SUM": "a", "DIFF": "d"}),
        ("identity", {"IN": "d"}, {"OUT": "b"}),
    ]
    config = ensemble(["x"], ["a", "b"], *steps)
    for omitted, outputs in (("DIFF", {"a": 4}), ("SUM", {"b": 0})):
        used = {0: Handle("add_sub", omitted=frozenset({omitted})), 1: Handle("identity")}
        assert await run(config, used, x=2) == [outputs]
    alone = ensemble(["x"], ["y"], ("identity", {"IN": "x"}, {"OUT": "y"}))
    assert await run(alone, {0: Handle("identity", omitted=frozenset({"OUT"}))}, x=2) == [{}]


@pytest.mark.parametrize("final", [False, True])
async def test_the_last_response_alone_is_final_where_the_stream_says_which_that_is(final: bool) -> None:
    config = ensemble(
        ["x"],
        ["y"],
        ("square", {"IN": "x"}, {"OUT": "s"}),
        ("square", {"IN": "s"}, {"OUT": "t"}),
        ("identity", {"IN": "t"}, {"OUT": "y"}),
    )
    for delays in ([], [0, 7, 0, 3]):
        used = {0: Handle("square", final=final), 1: Handle("square", final=final), 2: Handle("identity", delays)}
        responses = [response async for response in make_run(plan(config), used, x=2).stream()]
        assert [response.final for response in responses] == [False, False, False, False, final][-len(responses) :]
        assert len(responses) == 5


async def test_a_batch_dimension_of_one_comes_and_goes_between_models_that_batch_and_that_do_not() -> None:
    steps: list[Step] = [("lone", {"IN": "x"}, {"OUT": "a"}), ("identity", {"IN": "a"}, {"OUT": "b"})]
    built = plan(ensemble(["x"], ["y"], *steps, ("lone", {"IN": "b"}, {"OUT": "y"})))
    used: dict[int, Handle] = {0: Lone("lone"), 1: Handle("identity"), 2: Lone("lone")}
    response = await make_run(built, used, x=2).answer()
    assert [used[number].requests[0].inputs["IN"].shape for number in used] == [(1, 1), (1,), (1, 1)]
    assert [output.shape for output in response.outputs] == [(1,)]


class Lone(Handle):
    """A model of batches of one: its output has a batch dimension."""

    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        self.requests.append(request)
        yield InferResponse((Tensor("OUT", "INT32", (1, 1), np.array([5], np.int32)),), final=True)


async def test_a_model_that_has_become_decoupled_loses_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ensemble(["x"], ["y"], ("identity", {"IN": "x"}, {"OUT": "y"}))
    built = plan(config)
    monkeypatch.setitem(MODELS, "identity", replace(MODELS["identity"], decoupled=True))
    with pytest.raises(Internal, match="model 'identity' has answered more than once"):
        await make_run(built, {0: Twice("identity")}, x=1).answer()


class Twice(Handle):
    async def infer(self, request: InferRequest) -> AsyncIterator[InferResponse]:
        for _ in range(2):
            async for response in super().infer(request):
                yield response


async def test_a_failure_names_the_ensemble_and_cancels_the_steps_beside_it() -> None:
    config = ensemble(["x"], ["a", "b"], ("fails", {"IN": "x"}, {"OUT": "a"}), ("identity", {"IN": "x"}, {"OUT": "b"}))
    used = {0: Handle("fails"), 1: Handle("identity", delays=[1000])}
    with pytest.raises(InvalidArgument, match=r"^in ensemble 'whole', it fails$"):
        await run(config, used, x=1)
    assert (used[1].running, used[1].made) == (0, 0)


async def test_a_failure_within_a_stream_ends_it_after_what_came_before() -> None:
    config = ensemble(["x"], ["y"], ("square", {"IN": "x"}, {"OUT": "s"}), ("fails", {"IN": "s"}, {"OUT": "y"}))
    used = handles(plan(config))
    with pytest.raises(InvalidArgument, match="in ensemble 'whole', it fails"):
        await run(config, used, x=3)
    assert not any(handle.running for handle in used.values())


async def test_two_failures_at_once_are_one(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[Step] = [("fails", {"IN": "x"}, {"OUT": "a"}), ("fails", {"IN": "x"}, {"OUT": "b"})]
    with pytest.raises(InvalidArgument, match=r"^in ensemble 'whole', it fails$"):
        await run(ensemble(["x"], ["a", "b"], *steps), x=1)
    assert not caplog.records


async def test_parameters_of_responses_belong_to_their_pass() -> None:
    config = ensemble(
        ["x"],
        ["y"],
        ("default", {"IN": "x"}, {"OUT": "w"}),
        ("square", {"IN": "w"}, {"OUT": "s"}),
        ("identity", {"IN": "s"}, {"OUT": "y"}),
    )
    told = [[{"first": 1}], [{"index": 0}, {"index": 1}, {}], [{"own": 7}, {}, {}]]
    used = {number: Handle(step.model, parameters=told[number]) for number, step in enumerate(plan(config).steps)}
    stream = make_run(plan(config), used, x=3).stream()
    assert [response.parameters async for response in stream] == [
        {**NO_SEQUENCE, "first": 1, "index": 0, "own": 7},
        {**NO_SEQUENCE, "first": 1, "index": 1},
        {**NO_SEQUENCE, "first": 1},
    ]


async def test_a_response_says_of_which_sequence_it_is() -> None:
    asked = InferRequest("id", {"x": tensor("x", 1)}, None, {"sequence_id": 7, "sequence_start": True, "priority": 2})
    built = plan(ensemble(["x"], ["y"], ("identity", {"IN": "x"}, {"OUT": "y"})))
    response = await EnsembleRun(built, asked, RequestContext("test"), handles(built), RequestTimes()).answer()
    assert response.parameters == {"sequence_id": 7, "sequence_start": True, "sequence_end": False}


CLIENTS = {"sequence_id": 7, "sequence_end": True, "priority": 2}


async def test_a_step_is_of_the_sequence_that_a_response_before_it_says() -> None:
    config = ensemble(
        ["x"],
        ["y", "d", "z"],
        ("identity", {"IN": "x"}, {"OUT": "a"}),
        ("identity", {"IN": "a"}, {"OUT": "b"}),
        ("add_sub", {"A": "x", "B": "b"}, {"SUM": "y", "DIFF": "d"}),
        ("identity", {"IN": "x"}, {"OUT": "z"}),
    )
    built = plan(config)
    used = handles(built)
    used[0].parameters = [{"sequence_id": 9, "sequence_start": True, "own": 1}]
    used[1].parameters = [{"sequence_end": True}]
    asked = InferRequest("id", {"x": tensor("x", 1)}, None, CLIENTS)
    response = await EnsembleRun(built, asked, RequestContext("test"), used, RequestTimes()).answer()
    assert [used[number].requests[0].parameters for number in range(4)] == [
        CLIENTS,
        {"sequence_id": 9, "sequence_start": True, "priority": 2},
        {"sequence_id": 9, "sequence_end": True, "priority": 2},
        CLIENTS,
    ]
    assert response.parameters == {"sequence_id": 9, "sequence_start": False, "sequence_end": True, "own": 1}


async def test_each_response_of_a_stream_may_say_its_own_sequence() -> None:
    built = plan(SQUARES)
    used = handles(built)
    used[0].parameters = [{"sequence_id": "a", "sequence_start": True}, {}, {"sequence_id": 0}]
    asked = InferRequest("id", {"x": tensor("x", 3)}, None, CLIENTS)
    stream = EnsembleRun(built, asked, RequestContext("test"), used, RequestTimes()).stream()
    told = [response.parameters["sequence_id"] async for response in stream]
    assert told == ["a", 7, 0]
    assert [each.parameters for each in used[1].requests] == [
        {"sequence_id": "a", "sequence_start": True, "priority": 2},
        CLIENTS,
        {"priority": 2},
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sequence_id", "an integer or a string"), ("sequence_start", "true or false"), ("sequence_end", "true or false")],
)
async def test_a_response_that_says_no_sequence_fails_the_request(name: str, kind: str) -> None:
    config = ensemble(["x"], ["y"], ("identity", {"IN": "x"}, {"OUT": "y"}))
    used = {0: Handle("identity", parameters=[{name: 1.5}])}
    with pytest.raises(InvalidArgument, match=f"expected parameter '{name}' of model 'identity' to be {kind}, got 1.5"):
        await run(config, used, x=1)


async def test_a_stream_of_ten_thousand_takes_no_more_memory_than_one_of_a_thousand() -> None:
    config = ensemble(["x"], ["y"], ("repeat", {"IN": "x"}, {"OUT": "s"}), ("identity", {"IN": "s"}, {"OUT": "y"}))
    used = handles(plan(config))
    taken, tasks = [], 0
    async with aclosing(make_run(plan(config), used, x=10_000).stream()) as responses:
        read = 0
        async for _ in responses:
            read += 1
            for value in used.values():
                value.requests.clear()
            if read in (1_000, 9_000):
                taken.append(sys.getallocatedblocks())
                tasks = max(tasks, len(asyncio.all_tasks()))
    assert taken[1] - taken[0] < 2_000
    assert tasks < 100


async def test_leaving_closes_every_step() -> None:
    used = {0: Handle("square"), 1: Handle("identity", delays=[0, 1000])}
    stream = make_run(plan(SQUARES), used, x=3).stream()
    assert values(await anext(stream)) == {"y": 3}
    await stream.aclose()
    assert not any(handle.running for handle in used.values())


async def test_passes_at_once_are_bounded_and_hold_up_their_source() -> None:
    config = ensemble(
        ["x"], ["y"], ("square", {"IN": "x"}, {"OUT": "s"}), ("identity", {"IN": "s"}, {"OUT": "y"}), passes=1
    )
    used = {0: Handle("square"), 1: Handle("identity", delays=[50, 50, 50])}
    assert len(await run(config, used, x=3)) == 3
    assert used[1].most == 1


async def test_an_unread_stream_holds_up_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.ensembles.composite_model._MAX_UNREAD", 1)
    config = ensemble(
        ["x"], ["y"], ("repeat", {"IN": "x"}, {"OUT": "s"}), ("identity", {"IN": "s"}, {"OUT": "y"}), passes=1
    )
    used = handles(plan(config))
    stream = make_run(plan(config), used, x=20).stream()
    assert values(await anext(stream)) == {"y": 20}
    for _ in range(200):
        await asyncio.sleep(0)
    assert used[0].made < 6
    assert len([each async for each in stream]) == 19


@st.composite
def graphs(draw: st.DrawFn) -> ModelConfig:
    """A random graph of steps; every tensor that no step takes is an output."""
    tensors, steps, origin, streams = ["x", "z"], list[Step](), {"x": 0, "z": 0}, 0
    for number in range(draw(st.integers(1, 6))):
        innermost = max(origin.values())
        mixable = [name for name in tensors if origin[name] in (0, innermost)]
        streaming = ["square", "few", "nested"] if streams < 2 else []
        name = draw(st.sampled_from(["identity", "add_sub", *streaming]))
        takes = {key: draw(st.sampled_from(mixable)) for key in (("A", "B") if name == "add_sub" else ("IN",))}
        makes = {key: f"t{number}{key}" for key in (("SUM", "DIFF") if name == "add_sub" else ("OUT",))}
        stage = max(origin[tensor] for tensor in takes.values())
        if name in streaming:
            # A stream must lie within the ones before it, and what those made must not be answered beside it.
            if stage != innermost:
                continue
            streams += 1
            stage = streams
            tensors = [tensor for tensor in tensors if origin[tensor] == 0]
        steps.append((name, takes, makes))
        tensors += makes.values()
        origin.update(dict.fromkeys(makes.values(), stage))
    taken = {tensor for _, takes, _ in steps for tensor in takes.values()}
    inputs = [name for name in ("x", "z") if name in taken]
    outputs = [name for name in tensors if name not in ("x", "z") and name not in taken]
    return ensemble(inputs, outputs, *steps)


@given(graphs(), st.integers(-9, 9), st.integers(-9, 9), st.lists(st.integers(0, 5), max_size=20), st.booleans())
async def test_any_graph_equals_its_evaluation_by_hand(
    config: ModelConfig, x: int, z: int, delays: list[int], inline: bool
) -> None:
    if not config.outputs or not config.inputs:
        return
    try:
        built = plan(config)
    except InvalidArgument:
        return  # a tensor that nothing uses, or streams that cannot be joined
    inputs = {spec.name: {"x": x, "z": z}[spec.name] for spec in config.inputs}
    used = handles(built, delays, inline)
    assert await run(config, used, **inputs) == by_hand(config, inputs)
    assert not any(handle.running for handle in used.values())
