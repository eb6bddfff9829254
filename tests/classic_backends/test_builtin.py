"""The built-in backends: what they answer, and which configs they refuse."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.builtin import IDENTITY, REPEAT, SQUARE
from charonia.core.errors import CharoniaError, InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.request import InferRequest
from charonia.core.request_context import RequestContext
from charonia.core.runtime import Arrays, InstancePlacement, RuntimeLoader
from charonia.core.tensor import NUMPY_TYPES, Tensor, TensorSpec

from ..waiting import until
from .asking import answers, serving

NOWHERE = Path(".")


def described(loader: RuntimeLoader, name: str, **fields: Any) -> ModelConfig:
    """The config of a model of which its own says nothing."""
    raw = loader.complete(NOWHERE, fields.pop("raw", {}), {})
    inputs, outputs = (
        tuple(TensorSpec(each["name"], each["data_type"].removeprefix("TYPE_"), tuple(each["dims"])) for each in side)
        for side in (raw["input"], raw["output"])
    )
    decoupled = raw["model_transaction_policy"]["decoupled"]
    settings = {"inputs": inputs, "outputs": outputs, "decoupled": decoupled, "raw": raw} | fields
    return ModelConfig(name, "1", name, **settings)


def ask(config: ModelConfig, **values: Any) -> InferRequest:
    specs = {spec.name: spec for spec in config.inputs}
    return InferRequest(
        inputs={name: Tensor.from_values(name, specs[name].datatype, value) for name, value in values.items()}
    )


def pairs(*datatypes: str, **fields: Any) -> ModelConfig:
    """An identity model of as many pairs, `A0` -> `B0` and so on."""
    inputs, outputs = (
        tuple(TensorSpec(f"{side}{at}", datatype, (-1,)) for at, datatype in enumerate(datatypes)) for side in "AB"
    )
    return ModelConfig("same", "1", "identity", **{"inputs": inputs, "outputs": outputs} | fields)


async def test_identity_gives_every_datatype_back_bit_for_bit() -> None:
    config = pairs(*NUMPY_TYPES)
    random = np.random.default_rng(0)
    given = {}
    for spec in config.inputs:
        if spec.datatype == "BYTES":
            data = np.array([b"", b"\xff\x00", "é".encode()], object)
        else:
            kind = np.dtype(NUMPY_TYPES[spec.datatype])
            data = np.frombuffer(random.bytes(3 * kind.itemsize), np.uint8).view(kind)
            data = (data.view(np.uint8) & 1).view(kind) if spec.datatype == "BOOL" else data
        given[spec.name] = Tensor(spec.name, spec.datatype, (3,), data)
    async with serving(IDENTITY, config) as model:
        [response] = await answers(model, InferRequest(inputs=given))
    for tensor, source in zip(response.outputs, given.values(), strict=True):
        assert tensor.name == source.name.replace("A", "B")
        assert (tensor.datatype, tensor.shape, tensor.data.dtype) == (source.datatype, (3,), source.data.dtype)
        assert tensor.data.tolist() == source.data.tolist() or tensor.data.tobytes() == source.data.tobytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (pairs("INT32", outputs=()), "must have equal input/output pairs"),
        (pairs("INT32", outputs=(TensorSpec("B", "FP32", (-1,)),)), "output 'B' must have the datatype of input 'A0'"),
        (pairs("INT32", parameters={"execute_delay_ms": "soon"}), "'execute_delay_ms' must be a whole number"),
        (
            pairs("INT32", max_batch_size=4, raw={"input": [{"name": "A0", "allow_ragged_batch": True}]}),
            "output 'B0' needs a batch_output",
        ),
    ],
)
async def test_identity_refuses_what_it_cannot_be(config: ModelConfig, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        async with serving(IDENTITY, config):
            pass


def test_identity_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    parameters = {"execute_delay_ms": "100", "instance_wise_delay_multiplier": "4", "creation_delay_sec": "3"}
    for index in (0, 2):
        runtime = IDENTITY.load(NOWHERE, pairs("INT32"), InstancePlacement(number=index), parameters)
        assert not runtime.traits.inline
        next(iter(runtime.execute({"A0": np.zeros(1, np.int32)}, ["B0"])))
    assert slept == pytest.approx([3, 0.1, 3, 0.8])


async def test_ragged_identity_gives_each_request_its_own() -> None:
    raw = {
        "input": [{"name": "A0", "allow_ragged_batch": True}],
        "batch_output": [{"target_name": ["B0"], "source_input": ["A0"]}],
        "dynamic_batching": {"preferred_batch_size": [2], "max_queue_delay_microseconds": 10_000_000},
    }
    config = pairs("INT32", max_batch_size=2, raw=raw)
    async with serving(IDENTITY, config) as model:
        both = await asyncio.gather(answers(model, ask(config, A0=[[1, 2]])), answers(model, ask(config, A0=[[3]])))
        assert model.statistics().execution_count == 1
    assert [responses[0].outputs[0].data.tolist() for responses in both] == [[[1, 2]], [[3]]]


async def test_repeat_answers_once_for_each_element() -> None:
    config = described(REPEAT, "repeat")
    async with serving(REPEAT, config) as model:
        responses = await answers(model, ask(config, IN=[4, 2, 7], DELAY=[0, 1, 0], WAIT=[0]))
        assert await answers(model, ask(config, IN=[], DELAY=[], WAIT=[0])) == []
        told = model.statistics()
    assert [[tensor.data.tolist() for tensor in response.outputs] for response in responses] == [
        [[4], [0]],
        [[2], [1]],
        [[7], [2]],
    ]
    assert (told.inference.success.count, told.execution_count) == (2, 2)
    # Each request ends with one response more, which is empty.
    assert [(value.success.count, value.empty_response.count) for value in told.responses.values()] == [
        (1, 1),
        (1, 0),
        (1, 0),
        (0, 1),
    ]


async def test_an_error_of_a_stream_is_its_end() -> None:
    config = described(REPEAT, "repeat")
    async with serving(REPEAT, config) as model:
        with pytest.raises(CharoniaError, match=r"^expected IN and DELAY shape to match, got \[2\] and \[1\]$"):
            await answers(model, ask(config, IN=[1, 2], DELAY=[0], WAIT=[0]))
        assert (model.stats().success, model.stats().failure) == (0, 1)


async def test_square_answers_as_often_as_it_is_told() -> None:
    config = described(SQUARE, "square")
    async with serving(SQUARE, config) as model:
        responses = await answers(model, ask(config, IN=[2000]))
        assert await answers(model, ask(config, IN=[0])) == []
        booked = model.statistics().responses
    assert len(responses) == 2000
    # Beyond a thousand places nothing grows.
    assert len(booked) == 1024
    assert booked["1023"].success.count == 2000 - 1023
    assert {int(response.outputs[0].data.item()) for response in responses} == {2000}


async def test_a_reader_who_leaves_ends_what_never_would() -> None:
    config = described(SQUARE, "square")
    async with serving(SQUARE, config) as model:
        stream = model.infer(ask(config, IN=[2**31 - 1]), RequestContext("test"))
        await anext(stream)
        await stream.aclose()
        assert len(await answers(model, ask(config, IN=[2]))) == 2
        assert (model.stats().success, model.stats().cancelled) == (1, 1)


async def test_a_reader_who_is_slow_holds_the_instance_and_no_memory() -> None:
    made = 0

    class Counting:
        traits = SQUARE.load(NOWHERE, described(SQUARE, "square"), InstancePlacement(), {}).traits

        def execute(self, inputs: Arrays, wanted: Any) -> Any:
            nonlocal made
            for made in range(1, 10_001):  # noqa: B007
                yield {"OUT": inputs["IN"]}

        def close(self) -> None:
            pass

    class Loader:
        by_request = False

        def load(self, *arguments: Any) -> Counting:
            return Counting()

    config = described(SQUARE, "square")
    async with serving(Loader(), config) as model:
        stream = model.infer(ask(config, IN=[1]), RequestContext("test"))
        await anext(stream)
        await until(lambda: made > 250)
        await asyncio.sleep(0.05)
        assert made < 300
        assert len([response async for response in stream]) == 9_999


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoupled": False}, "must be decoupled and have max_batch_size 0"),
        ({"max_batch_size": 2}, "must be decoupled and have max_batch_size 0"),
        ({"inputs": ()}, r"lacks inputs \['IN'\]"),
        ({"inputs": (TensorSpec("IN", "FP32", (1,)),)}, "expected IN to be INT32 with one dimension"),
        ({"outputs": (TensorSpec("X", "INT32", (1,)),)}, r"expected output names of \['OUT'\], got 'X'"),
    ],
)
async def test_square_refuses_what_it_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        async with serving(SQUARE, described(SQUARE, "square", **fields)):
            pass
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("square_")])
