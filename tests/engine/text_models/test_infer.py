"""The v2 face of every text model, whichever engine is behind it: tensors in, tensors out; see conftest.py."""

from contextlib import aclosing

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import InferRequest, InferResponse
from charonia.core.request_context import RequestContext
from charonia.core.tensor import Tensor
from charonia.engine.client.llm import LlmModel

from .conftest import Load, counted


def question(parameters: dict[str, object] | None = None, **inputs: object) -> InferRequest:
    datatypes = {"text_input": "BYTES", "input_ids": "INT32", "stream": "BOOL", "sampling_parameters": "BYTES"}
    tensors = {name: Tensor.from_values(name, datatypes[name], value) for name, value in inputs.items()}
    return InferRequest(id="1", inputs=tensors, parameters=parameters or {})


async def infer(
    model: LlmModel, request: InferRequest, context: RequestContext | None = None
) -> list[dict[str, object]]:
    async with aclosing(model.infer(request, context or RequestContext("test"))) as responses:
        return [plain(response) async for response in responses]


def plain(response: InferResponse) -> dict[str, object]:
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


async def test_several_answers_to_one_question(load: Load) -> None:
    model = await load()
    wanted = {"n": 2, "max_tokens": 2, "return_finish_reason": True, "exclude_input_in_output": False}
    [answer] = await infer(model, question(wanted, text_input=[b"w1"]))
    assert answer == {"text_output": [b"w1 w2 w3"] * 2, "finish_reason": [b"length"] * 2}
    streamed = question(wanted | {"exclude_input_in_output": True}, text_input=[b"w1"], stream=[True])
    parts = [response["text_output"] for response in await infer(model, streamed)]
    assert [b"".join(pieces) for pieces in zip(*parts, strict=True)] == [b" w2 w3"] * 2
    with pytest.raises(InvalidArgument, match="vocabulary"):
        await infer(model, question({"n": 3}, input_ids=[500]))


async def test_several_answers_are_one_request(load: Load) -> None:
    model = await load()
    with counted(model) as context:
        await infer(model, question({"n": 3, "max_tokens": 2}, text_input=[b"w1 w2"]), context)
    summary = context.summary
    assert (summary.choices, summary.prompt, summary.generated) == (3, 2, 6)
    assert model.stats().success == 1


async def test_a_unary_question_has_one_answer(load: Load) -> None:
    model = await load()
    assert await infer(model, question({"max_tokens": 3}, text_input=[b"w1"])) == [{"text_output": [b" w2 w3 w4"]}]
    wanted = {"max_tokens": 2, "return_finish_reason": True, "return_num_input_tokens": True, "return_output_ids": True}
    [answer] = await infer(model, question({**wanted, "return_num_output_tokens": True}, input_ids=[7, 8]))
    assert answer == {
        "text_output": [b" w9 w10"],
        "finish_reason": [b"length"],
        "num_input_tokens": [2],
        "num_output_tokens": [2],
        "output_ids": [9, 10],
    }


async def test_the_prompt_is_echoed_when_asked_for(load: Load) -> None:
    model = await load()
    echo = {"max_tokens": 2, "exclude_input_in_output": False}
    assert await infer(model, question(echo, text_input=[b"w1"])) == [{"text_output": [b"w1 w2 w3"]}]
    assert await infer(model, question(echo, input_ids=[1])) == [{"text_output": [b"w1 w2 w3"]}]
    with pytest.raises(InvalidArgument, match="exclude_input_in_output"):
        await infer(model, question(echo, text_input=[b"w1"], stream=[True]))


async def test_a_streamed_question_has_an_answer_per_step(load: Load) -> None:
    model = await load()
    request = question({"max_tokens": 4, "return_finish_reason": True}, text_input=[b"w1"], stream=[True])
    answers = await infer(model, request)
    assert b"".join(answer["text_output"][0] for answer in answers) == b" w2 w3 w4 w5"
    assert [answer["finish_reason"] for answer in answers] == [[b""]] * (len(answers) - 1) + [[b"length"]]


async def test_wanted_outputs_may_be_named(load: Load) -> None:
    model = await load()
    request = InferRequest(
        inputs={"text_input": Tensor.from_values("text_input", "BYTES", [b"w1"])},
        outputs=("num_output_tokens", "text_output"),
        parameters={"max_tokens": 1},
    )
    assert list((await infer(model, request))[0].items()) == [("num_output_tokens", [1]), ("text_output", [b" w2"])]
