"""Requests and responses by the tensors of Triton's vLLM backend."""

import json
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import FinishReason, GenerateChunk, InferRequest, Usage
from charonia.core.sampling import SamplingParams
from charonia.core.tensor import Tensor
from charonia.engine.client.infer import ParsedInferRequest, StreamedResponses, parse_infer_request
from charonia.engine.vllm.build import VLLM_LAYOUT
from tests.scored_tokens import scored

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
DATATYPES = {spec.name: spec.datatype for spec in VLLM_LAYOUT.inputs}


def parse(parameters: dict[str, Any] | None = None, **tensors: Any) -> ParsedInferRequest:
    values = {"text_input": b"hi", **tensors}
    inputs = {
        name: Tensor.from_values(name, DATATYPES[name], value if isinstance(value, list) else [value])
        for name, value in values.items()
    }
    return parse_infer_request(InferRequest(inputs=inputs, parameters=parameters or {}), VLLM_LAYOUT)


def sampling(asked: ParsedInferRequest) -> SamplingParams:
    return asked.requests[0].sampling


def test_what_is_left_out_has_vllms_defaults() -> None:
    assert sampling(parse()) == SamplingParams(max_tokens=16, **DEFAULTS)
    assert sampling(parse({"temperature": 0, "top_p": "0.5"})) == SamplingParams(
        **{**DEFAULTS, "temperature": 0, "top_p": 0.5}
    )


def test_sampling_parameters_replace_the_requests() -> None:
    given = json.dumps({"max_tokens": "4", "stop": ["a"], "logit_bias": {"3": 1}, "min_p": 0.1, "bad_words": ["b"]})
    found = sampling(parse({"temperature": 0}, sampling_parameters=given.encode()))
    words = {"stop": ("a",), "bad_words": ("b",), "logit_bias": {3: 1.0}}
    assert found == SamplingParams(max_tokens=4, **{**DEFAULTS, "min_p": 0.1}, **words)


def test_the_prompt_begins_whole_answers_unless_it_is_excluded() -> None:
    assert parse().requests[0].echo
    assert not parse(exclude_input_in_output=True).requests[0].echo
    assert not parse(stream=True).requests[0].echo
    with pytest.raises(InvalidArgument, match=r"^When streaming, `exclude_input_in_output` = False is not allowed.$"):
        parse(stream=True, exclude_input_in_output=False)


def test_tensors_win_over_everything() -> None:
    asked = parse(
        {"return_finish_reason": False},
        stream=False,
        return_finish_reason=True,
        sampling_parameters=b'{"stream": true}',
    )
    assert not asked.options.stream
    assert [output.spec.name for output in asked.outputs] == ["text_output", "finish_reason"]


@pytest.mark.parametrize(
    ("tensors", "field"),
    [
        ({"embedding_request": b"{}"}, "embedding_request"),
        ({"sampling_parameters": b'{"guided_decoding": {"regexp": "a"}}'}, "guided_decoding.regexp"),
        ({"sampling_parameters": b'{"structured_outputs": "{"}'}, "structured_outputs"),
        ({"sampling_parameters": b'{"prompt_logprobs": 1}'}, "prompt_logprobs"),
        ({"sampling_parameters": b'{"detokenize": false}'}, "detokenize"),
        ({"sampling_parameters": b'{"return_output_ids": true}'}, "return_output_ids"),
        ({"sampling_parameters": b'{"temperatur": 1}'}, "temperatur"),
        ({"sampling_parameters": b'{"logprobs": 21}'}, "logprobs"),
        ({"sampling_parameters": b"[1]"}, "sampling_parameters"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tensors: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field) as refusal:
        parse(**tensors)
    assert refusal.value.field == field


def test_constraints_come_as_objects_or_as_their_text() -> None:
    for text in (b'{"structured_outputs": {"regex": "a+"}}', b'{"guided_decoding": "{\\"regex\\": \\"a+\\"}"}'):
        [request] = parse(sampling_parameters=text).requests
        assert request.guided_decoding is not None
        assert request.guided_decoding[:2] == ("regex", "a+")


def test_an_adapter_is_refused_in_the_backends_words() -> None:
    with pytest.raises(InvalidArgument, match=r"^LoRA feature is not enabled.$"):
        parse({"lora_name": "alpaca"})
    assert parse({"lora_name": ""}, image=[]).requests


def test_responses_have_the_backends_outputs() -> None:
    asked = parse(
        {"logprobs": 1},
        stream=True,
        **{
            f"return_{name}": True
            for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
        },
    )
    responses = StreamedResponses(asked.outputs)
    likeliest = 7, "b", -0.5
    first = GenerateChunk(
        text="a", token_ids=(5,), usage=Usage(3, 1), logprobs=(scored(5, "a", -1.5, likeliest, rank=4),)
    )
    last = GenerateChunk(
        text="b",
        token_ids=(7,),
        usage=Usage(3, 2),
        finish_reason=FinishReason.LENGTH,
        logprobs=(scored(7, "b", -0.5, likeliest),),
    )
    said = []
    for chunk in (first, last):
        response = responses.build_response(chunk)
        assert response
        said.append({tensor.name: (tensor.datatype, tensor.data.tolist()) for tensor in response.outputs})
    assert said[0]["finish_reason"] == ("BYTES", [b"None"])
    assert said[1]["finish_reason"] == ("BYTES", [b"length"])
    assert [answer["cumulative_logprob"] for answer in said] == [("FP32", [-1.5]), ("FP32", [-2.0])]
    assert said[1]["num_input_tokens"] == ("UINT32", [3])
    assert said[1]["num_output_tokens"] == ("UINT32", [1])
    [tokens] = said[0]["logprobs"][1]
    assert json.loads(tokens) == [
        {
            "5": {"logprob": -1.5, "rank": 4, "decoded_token": "a"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        }
    ]
    [tokens] = said[1]["logprobs"][1]
    assert json.loads(tokens) == [{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


def test_logprobs_nobody_asked_for_are_null() -> None:
    responses = StreamedResponses(parse(stream=True, return_logprobs=True).outputs)
    response = responses.build_response(GenerateChunk(text="a", token_ids=(5,), usage=Usage(3, 1)))
    assert response
    assert response.outputs[1].data.tolist() == [b"null"]


def test_answers_without_news_are_empty_in_a_stream_of_several() -> None:
    asked = parse({"n": 2}, stream=True, return_finish_reason=True, return_num_output_tokens=True)
    responses = StreamedResponses(asked.outputs, len(asked.requests))
    usage = Usage(3, 1)
    ended = GenerateChunk(text="a", token_ids=(5,), usage=usage, finish_reason=FinishReason.STOP)
    said = []
    for number, chunk in ((1, ended), (0, GenerateChunk(text="b", token_ids=(7,), usage=usage)), (0, ended)):
        response = responses.build_response(chunk, number)
        assert response
        said.append((*(tensor.data.tolist() for tensor in response.outputs), response.final))
    assert said == [
        ([b"", b"a"], [b"None", b"stop"], [0, 1], False),
        ([b"b", b""], [b"None", b"stop"], [1, 0], False),
        ([b"a", b""], [b"stop", b"stop"], [1, 0], True),
    ]
