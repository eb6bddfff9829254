"""The v2 face of a language model: what parameters ask for and how chunks become tensors."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import FinishReason, GenerateChunk, InferRequest, Usage
from charonia.core.tensor import Tensor
from charonia.engine.client.infer import OWN_LAYOUT, StreamedResponses, complete_response, parse_infer_request
from tests.scored_tokens import scored

LENGTH = FinishReason.LENGTH


def asked(stream: bool = False, **parameters: Any) -> InferRequest:
    inputs = {
        "text_input": Tensor.from_values("text_input", "BYTES", [b"hi"]),
        "stream": Tensor.from_values("stream", "BOOL", [stream]),
    }
    return InferRequest(inputs=inputs, parameters=parameters)


def chunk(token: int, logprob: float, reason: FinishReason | None = None, text: str = "x") -> GenerateChunk:
    said = (scored(token, text, logprob),)
    return GenerateChunk(text=text, token_ids=(token,), usage=Usage(3, 1), finish_reason=reason, logprobs=said)


class Streams:
    """Generators of chunks that know how many of them are open; one fails with `error` at its end."""

    def __init__(self, *streams: Sequence[GenerateChunk], error: Exception | None = None) -> None:
        self.open = 0
        self.all = [self._stream(chunks, error if place == 0 else None) for place, chunks in enumerate(streams)]

    async def _stream(
        self, chunks: Sequence[GenerateChunk], error: Exception | None
    ) -> AsyncGenerator[GenerateChunk, None]:
        self.open += 1
        try:
            for chunk in chunks:
                await asyncio.sleep(0)
                yield chunk
            if error is not None:
                raise error
        finally:
            self.open -= 1


async def respond(request: InferRequest, streams: Streams) -> list[dict[str, Any]]:
    question = parse_infer_request(request, OWN_LAYOUT)
    if question.options.stream:
        spoken = StreamedResponses(question.outputs)
        said = [spoken.build_response(chunk) async for chunk in streams.all[0]]
        responses = [response for response in said if response is not None]
    else:
        responses = [await complete_response(question, streams.all)]
    assert not streams.open
    return [{tensor.name: tensor.data.tolist() for tensor in response.outputs} for response in responses]


async def test_log_probs_stand_beside_the_tokens() -> None:
    request = asked(return_log_probs=True, return_output_ids=True)
    assert parse_infer_request(request, OWN_LAYOUT).requests[0].sampling.logprobs == 0
    [answer] = await respond(request, Streams([chunk(4, -0.5), chunk(5, -1.0, LENGTH)]))
    expected = {"text_output": [b"xx"], "output_ids": [4, 5], "cum_log_probs": [-1.5], "output_log_probs": [[-0.5, -1]]}
    assert answer == expected


async def test_streamed_log_probs_accumulate_and_none_is_left_out() -> None:
    request = asked(stream=True, return_log_probs=True, return_cumulative_logprob=True)
    streams = Streams([chunk(4, -0.5, text=""), chunk(5, -1.0), chunk(6, -0.25, LENGTH)])
    responses = await respond(request, streams)
    assert [answer["output_log_probs"] for answer in responses] == [[[-0.5]], [[-1.0]], [[-0.25]]]
    assert [answer["cum_log_probs"] for answer in responses] == [[-0.5], [-1.5], [-1.75]]
    assert responses[-1]["cumulative_logprob"] == [-1.75]


async def test_streamed_counts_add_up_while_a_character_is_incomplete() -> None:
    request = asked(stream=True, return_num_output_tokens=True)
    responses = await respond(request, Streams([chunk(4, -0.5, text=""), chunk(5, -0.5), chunk(6, -1.0, LENGTH)]))
    assert sum(response["num_output_tokens"][0] for response in responses) == 3


async def test_several_answers_are_rows() -> None:
    request = asked(n=2, return_log_probs=True, return_num_output_tokens=True, return_output_ids=True)
    first, second = parse_infer_request(request, OWN_LAYOUT).requests
    assert (first.choice, second.choice) == (0, 1)
    [answer] = await respond(request, Streams([chunk(4, -0.5), chunk(5, -1.0, LENGTH)], [chunk(6, -2.0, LENGTH)]))
    assert answer == {
        "text_output": [b"xx", b"x"],
        "num_output_tokens": [2, 1],
        "output_ids": [4, 5, 6],
        "cum_log_probs": [-1.5, -2.0],
        "output_log_probs": [[-0.5, -1.0], [-2.0, 0.0]],
    }


async def test_one_of_several_that_fails_ends_all_of_them() -> None:
    long = [chunk(4, -1.0) for _ in range(100)]
    with pytest.raises(InvalidArgument, match="no"):
        await respond(asked(n=2), streams := Streams([chunk(4, -1.0)], long, error=InvalidArgument("no")))
    assert not streams.open


def test_no_new_tokens_are_for_those_who_want_the_prompt() -> None:
    with pytest.raises(InvalidArgument, match="max_tokens must be at least 1") as refused:
        parse_infer_request(asked(max_tokens=0), OWN_LAYOUT)
    assert refused.value.field == "max_tokens"
    [request] = parse_infer_request(asked(max_tokens=0, exclude_input_in_output=False), OWN_LAYOUT).requests
    assert (request.echo, request.prompt_only) == (True, True)


def test_nobody_pays_for_log_probs_unasked() -> None:
    assert parse_infer_request(asked(), OWN_LAYOUT).requests[0].sampling.logprobs is None
    by_name = asked()
    named = InferRequest(inputs=by_name.inputs, outputs=("text_output", "cumulative_logprob"))
    assert parse_infer_request(named, OWN_LAYOUT).requests[0].sampling.logprobs == 0
