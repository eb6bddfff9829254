"""Stateful models from request to response, in threads: ONNX models with controls and states, failures, unloading."""

import asyncio
import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.builtin import IDENTITY
from charonia.classic_backends.isolated.isolated_runtime import ONNX
from charonia.classic_backends.model import ClassicModel
from charonia.classic_backends.sequences.sequence_scheduler import SequenceScheduler
from charonia.core.errors import CharoniaError, InvalidArgument
from charonia.core.model import ModelConfig, ModelSamples, WarmupRequest
from charonia.core.request import InferRequest
from charonia.core.runtime import Arrays
from charonia.core.tensor import Tensor
from charonia.repository.config_io import parse_config_text

from ...waiting import until
from ..asking import answers, serving, waiting
from .sequence_subjects import Carried, Rows, config, control, state

NONE = ModelSamples()
OLDEST = {"max_candidate_sequences": 4}


def step(value: int, name: int | str = 1, **flags: bool) -> InferRequest:
    parameters = {"sequence_id": name} | {f"sequence_{flag}": told for flag, told in flags.items()}
    return InferRequest(inputs={"X": Tensor.from_values("X", "INT32", [[value]])}, parameters=parameters)


async def ask(model: ClassicModel, *values: int, name: int | str = 1, end: bool = True) -> list[int]:
    """A whole sequence, one request after the other."""
    made = []
    for place, value in enumerate(values):
        last = place == len(values) - 1
        [response] = await answers(model, step(value, name, start=not place, end=last and end))
        made += [tensor.scalar for tensor in response.outputs if tensor.name == "SUM"]
    return made


@pytest.fixture
def accumulator(
    onnx_models: ModuleType, described: Callable[..., ModelConfig], version: Path
) -> Callable[..., ClassicModel]:
    """The ONNX model that adds up, with these fields of `sequence_batching` in place of its own."""

    def make(text_ids: bool = False, samples: ModelSamples = NONE, **fields: Any) -> ClassicModel:
        onnx_models.write_accumulator(version / "model.onnx", text_ids)
        text = onnx_models.ACCUMULATOR.replace("INT64", "STRING") if text_ids else onnx_models.ACCUMULATOR
        raw = parse_config_text(text)
        return ClassicModel(
            described({**raw, "sequence_batching": raw["sequence_batching"] | fields}),
            ONNX,
            version,
            samples=samples,
        )

    return make


@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}])
async def test_an_onnx_model_adds_up_what_each_of_many_sequences_sends(
    accumulator: Callable[..., ClassicModel], strategy: Mapping[str, Any]
) -> None:
    model = accumulator(samples=ModelSamples([WarmupRequest(step(1))]), **strategy)
    await model.load()
    sequences = [asyncio.create_task(ask(model, *range(1, 4 + name), name=name)) for name in range(1, 13)]
    for name, task in enumerate(sequences, 1):
        assert await task == np.cumsum(range(1, 4 + name)).tolist()
    assert model.statistics().inference_count == sum(3 + name for name in range(1, 13))
    await model.unload()


async def test_an_onnx_model_is_told_where_a_request_stands(accumulator: Callable[..., ClassicModel]) -> None:
    model = accumulator(
        text_ids=True, samples=ModelSamples(initial_states={"S": Tensor.from_values("S", "INT32", [100])})
    )
    await model.load()
    told, sums = [], []
    for flags in ({"start": True}, {}, {"end": True}):
        [response] = await answers(model, step(1, "é", **flags))
        made = {tensor.name: tensor.data.tolist() for tensor in response.outputs}
        assert made["WHO"] == [["é".encode()]]
        told += made["TOLD"]
        sums += made["SUM"]
    assert (told, sums) == ([[1, 1, 0], [0, 1, 0], [0, 1, 1]], [[101], [102], [103]])
    await model.unload()


async def test_a_start_begins_a_sequence_anew_that_had_not_ended(accumulator: Callable[..., ClassicModel]) -> None:
    model = accumulator()
    await model.load()
    assert await ask(model, 1, 2, end=False) == [1, 3]
    assert await ask(model, 5, 6) == [5, 11]
    await model.unload()


def test_a_config_is_completed_without_the_tensors_of_its_sequences(
    accumulator: Callable[..., ClassicModel], version: Path
) -> None:
    raw = accumulator().config.raw
    whole = ONNX.complete(version, {"sequence_batching": raw["sequence_batching"]}, {})
    assert [[each["name"] for each in whole[side]] for side in ("input", "output")] == [["X"], ["SUM", "TOLD", "WHO"]]
    assert whole["max_batch_size"] == 4


async def test_a_control_that_the_config_leaves_out_fails_the_load(accumulator: Callable[..., ClassicModel]) -> None:
    with pytest.raises(InvalidArgument, match="'START' is missing"):
        await accumulator(control_input=[]).load()


class Failing(Carried):
    """Fails on a negative number; what it makes of a zero is of the wrong shape."""

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        if (inputs["X"] < 0).any():
            raise ValueError("negative")
        for made in super().execute(inputs, wanted):
            yield dict(made) | ({"T": made["T"][:, :, np.newaxis]} if (inputs["X"] == 0).any() else {})


async def test_a_request_that_fails_leaves_the_state_as_it_was() -> None:
    async with serving(Failing(), config(oldest=OLDEST, state=[state([1])])) as model:
        assert await ask(model, 1, 2, end=False) == [1, 3]
        with pytest.raises(CharoniaError, match="negative"):
            await answers(model, step(-1))
        with pytest.raises(CharoniaError, match=r"state 'T' came as int32 of shape \[1, 1, 1\], not INT32 of dims"):
            await answers(model, step(0))
        [response] = await answers(model, step(4, end=True))
        assert response.outputs[0].scalar == 7


async def test_a_client_that_leaves_ends_his_sequence() -> None:
    async with serving(Rows(), config(max_batch_size=1)) as model:
        assert await ask(model, 1, end=False) == [1]
        waits = asyncio.create_task(ask(model, 5, name=2))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert (model.stats().cancelled, model.stats().failure) == (1, 0)
        [response] = await answers(model, step(1, end=True))
        assert response.outputs[0].scalar == 2
        assert await ask(model, 3, name=2) == [3]
        with pytest.raises(CharoniaError, match="sequence 1 to model 'm' must specify the START flag"):
            await answers(model, step(1))
        assert model.stats().failure == 1


@pytest.mark.parametrize("strategy", [{}, {"oldest": OLDEST}])
async def test_clients_that_leave_at_any_time_disturb_nobody(strategy: Mapping[str, Any]) -> None:
    """Far more of them than there are places."""
    chance = random.Random(1)
    settings = config(state=[state([1])], max_sequence_idle_microseconds=2_000_000, **strategy)
    async with serving(Carried(), settings) as model:
        lengths = [chance.randint(1, 6) for _ in range(300)]
        clients = [asyncio.create_task(ask(model, *range(n), name=name)) for name, n in enumerate(lengths, 1)]
        leaving = {client for client in clients if chance.random() < 0.4}
        for client in chance.sample(sorted(leaving, key=clients.index), len(leaving)):
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
            client.cancel()
        sums = await asyncio.gather(*clients, return_exceptions=True)
        for client, made, length in zip(clients, sums, lengths, strict=True):
            assert made == np.cumsum(range(length)).tolist() or client in leaving
        assert isinstance(model._dispatcher, SequenceScheduler)
        model._dispatcher._table.check_integrity()
        assert waiting(model) == 0


async def test_unloading_with_sequences_open_leaves_nothing_of_them() -> None:
    states: list[weakref.ref[Any]] = []

    class Watched(Carried):
        def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
            for made in super().execute(inputs, wanted):
                states.append(weakref.ref(made["T"]))
                yield made

    async with serving(Watched(), config(oldest=OLDEST, state=[state([1])])) as model:
        for name in (1, 2, 3):
            await ask(model, 1, name=name, end=name == 3)
        await until(lambda: states[2]() is None)
        assert states[0]() is not None
    gc.collect()
    assert [state() for state in states] == [None] * 3


async def test_triton_s_identity_takes_no_notice_of_controls() -> None:
    settings = config(control_input=[control("START", "START", int32_false_true=[0, 1])])
    async with serving(IDENTITY, settings) as model:
        assert await ask(model, 4, 5) == [4, 5]


async def test_a_decoupled_model_answers_a_sequence_as_often_as_it_likes() -> None:
    class Twice(Rows):
        def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
            for value in (inputs["X"], inputs["ID"].astype(np.int32)):
                yield {"SUM": value}

    async with serving(Twice(), config(max_batch_size=0, decoupled=True, oldest=OLDEST)) as model:
        asked = InferRequest(
            inputs={"X": Tensor.from_values("X", "INT32", [7])}, parameters={"sequence_id": 9, "sequence_start": True}
        )
        assert [each.outputs[0].scalar for each in await answers(model, asked)] == [7, 9]
