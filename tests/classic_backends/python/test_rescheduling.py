"""Requests that a Python model wants to see again, together with everybody else's; and states that come along."""

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from charonia.classic_backends.model import ClassicModel
from charonia.core.errors import CharoniaError, Internal
from charonia.core.model import ModelSamples, WarmupRequest
from charonia.core.request import InferRequest
from charonia.core.request_context import RequestContext
from charonia.core.tensor import Tensor

from ...waiting import until
from ..asking import answers
from ..sequences.sequence_subjects import control
from .python_models import python_model, values

START = control("START", "START", int32_false_true=[0, 1])
ID = control("ID", "CORRID", data_type="TYPE_UINT64")
STATE = {"input_name": "S", "output_name": "S_OUT", "data_type": "TYPE_INT32", "dims": [1]}
ITERATIVE = {"iterative_sequence": True, "control_input": [START, ID], "oldest": {"max_candidate_sequences": 32}}

COUNT_DOWN = """
batches = []
left = {}

def execute(self, requests):
    self.batches.append(len(requests))
    answers = []
    for r in requests:
        key = pb_utils.get_input_tensor_by_name(r, "ID").as_numpy().item()
        assert key == r.correlation_id()
        start = pb_utils.get_input_tensor_by_name(r, "START").as_numpy().item()
        assert r.flags() == start
        if start:
            self.left[key] = int(x(r).item())
        self.left[key] -= 1
        if self.left[key] > 0:
            r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            answers.append(None)
        else:
            del self.left[key]
            answers.append(y([[x(r).item()]]) if x(r).item() < 100 else y([self.batches.index(len(requests))]))
    return answers
"""

GENERATE = """
left = {}
senders = {}

def execute(self, requests):
    for r in requests:
        key = r.correlation_id()
        if r.flags() & 1:
            self.left[key] = int(x(r).item())
            self.senders[key] = r.get_response_sender()
        self.left[key] -= 1
        last = not self.left[key]
        if not last:
            r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        self.senders[key].send(y([len(requests)]), flags=FINAL if last else 0)
"""


def ask(number: int, **parameters: Any) -> InferRequest:
    return InferRequest("id", {"X": Tensor("X", "INT32", (1, 1), np.array([[number]], np.int32))}, None, parameters)


def settings(sequences: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"max_batch_size": 8, "sequence_batching": sequences, **others}


def used_slots(model: ClassicModel) -> float:
    [found] = [reading.value for reading in model.readings() if reading.family == "charonia_sequences_open"]
    assert isinstance(found, int | float)
    return found


async def test_each_request_comes_again_until_it_is_answered_once(tmp_path: Path) -> None:
    sequences = {"iterative_sequence": True, "control_input": [START, ID]}
    async with python_model(tmp_path, COUNT_DOWN, **settings(sequences)) as model:
        several = await asyncio.gather(*(answers(model, ask(number)) for number in range(1, 21)))
        statistics = model.statistics()
        assert used_slots(model) == 0
    assert [values(response)["Y"] for [response] in several] == [[number] for number in range(1, 21)]
    assert (statistics.inference_count, statistics.inference.success.count) == (20, 20)
    assert 210 / 8 <= statistics.execution_count <= 210


async def test_a_stream_that_is_left_frees_its_slot(tmp_path: Path) -> None:
    """After warm-up requests, which come again too."""
    raw = settings(ITERATIVE | {"oldest": {"max_candidate_sequences": 1}}, decoupled=True)
    samples = ModelSamples([WarmupRequest(ask(5), times=2)])
    async with python_model(tmp_path, GENERATE, samples=samples, **raw) as model:
        for _ in range(5):
            async with aclosing(model.infer(ask(10**6), RequestContext("test"))) as responses:  # type: ignore[type-var]
                await anext(responses)
        assert len(await answers(model, ask(3))) == 3
        await until(lambda: used_slots(model) == 0)
        assert model.stats().cancelled == 5


async def test_a_process_that_dies_tells_each_request_once(tmp_path: Path) -> None:
    body = GENERATE + "\n    if os.path.exists(os.path.dirname(__file__) + '/die'): os.kill(os.getpid(), 9)\n"
    sequences = ITERATIVE | {"oldest": {"max_candidate_sequences": 16}}
    async with python_model(tmp_path, body, decoupled=True, **settings(sequences)) as model:
        tasks = [asyncio.create_task(answers(model, ask(10**6))) for _ in range(20)]
        await until(lambda: model.statistics().execution_count > 4)
        (tmp_path / "model" / "1" / "die").touch()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        texts = [str(result) for result in results]
        assert texts.count("Stub process 'model_0_0' is not healthy.") == 16
        assert sum("being restarted" in text for text in texts) == 4
        assert model.stats().failure == 20
        (tmp_path / "model" / "1" / "die").unlink()

        async with asyncio.timeout(30):
            while model.stats().success == 0:
                with suppress(CharoniaError):
                    assert len(await answers(model, ask(2))) == 2
                await asyncio.sleep(0.05)
        assert used_slots(model) == 0


async def test_a_reader_who_is_slow_holds_up_nobody_else(tmp_path: Path) -> None:
    async with python_model(tmp_path, GENERATE, decoupled=True, **settings(ITERATIVE)) as model:
        async with aclosing(model.infer(ask(300), RequestContext("test"))) as slow:  # type: ignore[type-var]
            await anext(slow)
            assert len(await answers(model, ask(150))) == 150
            executions = model.statistics().execution_count
            assert len(await answers(model, ask(20))) == 20
            assert model.statistics().execution_count - executions <= 21  # the slow one has no part in them
            assert len([each async for each in slow]) == 299
        async with aclosing(model.infer(ask(300), RequestContext("test"))) as slow:  # type: ignore[type-var]
            await anext(slow)
            assert len(await answers(model, ask(150))) == 150
        await until(lambda: used_slots(model) == 0)


NEEDS = r"rescheduled a request, which needs sequence_batching \{ iterative_sequence: true \}"


@pytest.mark.parametrize(("decoupled", "sequences"), [(False, ITERATIVE), (True, {})])
async def test_what_cannot_come_again_does_not(tmp_path: Path, decoupled: bool, sequences: dict[str, Any]) -> None:
    body = f"""
    def execute(self, requests):
        [r] = requests
        if x(r).item() < 3:
            r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if x(r).item() and {decoupled}:
            r.get_response_sender().send(y(x(r)), flags=FINAL)
        return None if {decoupled} else [y(x(r)) if x(r).item() else None]
    """
    raw = settings(sequences) if sequences else {"max_batch_size": 8}
    async with python_model(tmp_path, body, decoupled=decoupled, **raw) as model:
        if not sequences:
            with pytest.raises(Internal, match=NEEDS):
                await answers(model, ask(0))
        if decoupled:  # it was answered before anything could be said
            assert len(await answers(model, ask(1))) == 1
        else:
            with pytest.raises(Internal, match="Expected a None object in the execute function return list for res"):
                await answers(model, ask(1))
        [response] = await answers(model, ask(7))
    assert values(response)["Y"] == [7]


async def test_a_request_that_got_its_last_response_does_not_come_again(tmp_path: Path) -> None:
    body = """
    passes = 0

    def execute(self, requests):
        for r in requests:
            self.passes += 1
            r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            r.get_response_sender().send(y([self.passes]), flags=FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True, **settings(ITERATIVE)) as model:
        seen = [[values(each)["Y"] for each in await answers(model, ask(number))] for number in range(3)]
        assert seen == [[[1]], [[2]], [[3]]]
        await until(lambda: used_slots(model) == 0)


async def test_coroutines_of_a_decoupled_model_say_later_what_comes_again(tmp_path: Path) -> None:
    body = """
    left = {}

    async def execute(self, requests):
        await asyncio.sleep(0)
        for r in requests:
            key = r.correlation_id()
            self.left[key] = self.left.get(key, int(x(r).item())) - 1
            if self.left[key]:
                r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            r.get_response_sender().send(y([self.left[key]]), flags=0 if self.left[key] else FINAL)
    """
    async with python_model(tmp_path, body, decoupled=True, **settings(ITERATIVE)) as model:
        several = await asyncio.gather(*(answers(model, ask(20)) for _ in range(8)))
        async with aclosing(model.infer(ask(10**6), RequestContext("test"))) as responses:  # type: ignore[type-var]
            await anext(responses)
        await until(lambda: used_slots(model) == 0)
    assert [[values(response)["Y"] for response in responses] for responses in several] == [
        [[number] for number in range(19, -1, -1)]
    ] * 8


ACCUMULATE = """
def execute(self, requests):
    answers = []
    for r in requests:
        total = pb_utils.get_input_tensor_by_name(r, "S").as_numpy() + x(r)
        tensors = [pb_utils.Tensor("Y", total.reshape(-1)), pb_utils.Tensor("S_OUT", total)]
        answers.append(pb_utils.InferenceResponse(tensors))
    return answers
"""


def step(number: int, sequence: int | str, start: bool = False, end: bool = False) -> InferRequest:
    return ask(number, sequence_id=sequence, sequence_start=start, sequence_end=end)


async def test_states_go_from_request_to_request(tmp_path: Path) -> None:
    sequences = {"state": [STATE], "oldest": {"max_candidate_sequences": 4}}
    initial = {"S": Tensor.from_values("S", "INT32", [100])}
    async with python_model(tmp_path, ACCUMULATE, samples=ModelSamples((), initial), **settings(sequences)) as model:
        sums = []
        for number, flags in ((1, {"start": True}), (2, {}), (3, {"end": True}), (4, {"start": True})):
            [response] = await answers(model, step(number, 5, **flags))
            assert [output.name for output in response.outputs] == ["Y"]
            sums += values(response)["Y"]
        several = await asyncio.gather(
            *(answers(model, step(each, 7, start=each == 1, end=each == 9)) for each in range(1, 10))
        )
    assert sums == [101, 103, 106, 104]
    assert [values(response)["Y"] for [response] in several] == [[100 + sum(range(last + 1))] for last in range(1, 10)]


async def test_the_last_response_with_a_state_counts(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.answer, args=(r, r.get_response_sender())).start()

    def answer(self, r, sender):
        state = pb_utils.get_input_tensor_by_name(r, "S").as_numpy()
        for number in range(3):
            state = state + x(r)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("S_OUT", state)]))
            sender.send(y(state))
        sender.send(flags=FINAL)
    """
    sequences = {"state": [STATE], "oldest": {"max_candidate_sequences": 4}}
    async with python_model(tmp_path, body, decoupled=True, **settings(sequences)) as model:
        several = await asyncio.gather(*(answers(model, step(1, 5, start=not each)) for each in range(4)))
        await answers(model, msgspec.structs.replace(step(1, 5), outputs=("T",)))
        last = await answers(model, step(1, 5))
    assert [[values(response)["Y"] for response in responses] for responses in (*several, last)] == [
        [[3 * index + 1], [3 * index + 2], [3 * index + 3]] for index in (0, 1, 2, 3, 5)
    ]


async def test_states_come_along_with_a_request_that_comes_again(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        answers = []
        for r in requests:
            state = pb_utils.get_input_tensor_by_name(r, "S").as_numpy() + 1
            if state.item() < x(r).item():
                r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("S_OUT", state)]))
            else:
                answers.append(y(state))
        return answers
    """
    sequences = {"iterative_sequence": True, "state": [STATE]}
    async with python_model(tmp_path, body, **settings(sequences)) as model:
        several = await asyncio.gather(*(answers(model, ask(number)) for number in range(1, 21)))
        assert model.statistics().inference_count == 20
    assert [values(response)["Y"] for [response] in several] == [[number] for number in range(1, 21)]


async def test_rows_without_a_request_are_told_to_a_model_that_can_tell_them(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        for row, r in enumerate(requests):
            if not pb_utils.get_input_tensor_by_name(r, "READY").as_numpy().item():
                assert (x(r).item(), r.flags(), r.correlation_id()) == (0, 0, 0)
        return [y([row]) for row, r in enumerate(requests)]
    """
    controls = [control("READY", "READY", bool_false_true=[False, True])]
    sequences = {"control_input": controls, "direct": {}}
    async with python_model(tmp_path, body, **settings(sequences)) as model:
        rows = [await answers(model, step(1, name, start=True)) for name in (1, 2, 3)]
        rows += [await answers(model, step(1, name)) for name in (3, 2)]
        await answers(model, step(1, 1, end=True))
        rows += [await answers(model, step(1, name)) for name in (3, 2)]
    assert [values(response)["Y"] for [response] in rows] == [[row] for row in (0, 1, 2, 2, 1, 2, 1)]


async def test_requests_of_all_lengths_share_a_batch_where_the_config_allows_it(tmp_path: Path) -> None:
    body = """
    def execute(self, requests):
        time.sleep(0.05)
        assert all(x(r).shape == (1, x(r).size) for r in requests)
        return [y([len(requests)]) for r in requests]
    """
    batching = {"max_queue_delay_microseconds": 10**6, "preferred_batch_size": [4]}
    raw = {"input": [{"name": "X", "allow_ragged_batch": True}], "dynamic_batching": batching, "max_batch_size": 4}
    async with python_model(tmp_path, body, **raw) as model:
        tensors = [Tensor.from_values("X", "INT32", [list(range(length))]) for length in (1, 2, 3, 4)]
        several = await asyncio.gather(*(answers(model, InferRequest("", {"X": tensor})) for tensor in tensors))
    assert [values(response)["Y"] for [response] in several] == [[4]] * 4
