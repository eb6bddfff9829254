"""Models of tensors on OpenAI's endpoints: fields become inputs, `text_output` the text, and nothing is dropped."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.core.errors import Internal
from charonia.core.request import FinishReason, InferResponse
from charonia.core.request_context import RequestEnd
from charonia.core.sampling import SamplingParams
from charonia.core.tensor import Tensor

from .test_openai import CHAT, TEXT, events

TURNS = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "one", "name": "ann"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": [{"type": "text", "text": "two"}]},
]

CLOCK = {"type": "function", "function": {"name": "clock"}}


@dataclass
class Generated:
    """What a language model that a step asked has generated."""

    choice: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    opened: float = 1.0
    submitted: float | None = None
    begun: float | None = None
    first: float | None = None
    last: float | None = None
    prompt: int | None = 7
    cached: int | None = 2
    generated: int = 3
    finish_reason: FinishReason | None = FinishReason.STOP
    end: RequestEnd | None = None


def asked(gateway: Any) -> dict[str, Any]:
    """The inputs of the only request that the model got."""
    [request] = gateway.asked
    return {name: (tensor.datatype, tensor.shape, tensor.data.tolist()) for name, tensor in request.inputs.items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_is_not_utf_8_is_never_replaced(client: httpx.AsyncClient, gateway: Any, stream: bool) -> None:
    gateway.responses = (InferResponse((Tensor.from_values("text_output", "BYTES", [b"a\xffb"]),)),)
    answer = await client.post(CHAT, json={"model": "answering", "messages": TURNS, "stream": stream})
    said = "model 'answering' has answered with an output 'text_output' that is not UTF-8: invalid start byte"
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, said)


async def test_a_text_has_a_bound(gateway: Any) -> None:
    app = build_app(gateway, ServerInfo(max_response_size=400))
    half = InferResponse((Tensor.from_values("text_output", "BYTES", [b"x" * 46]),))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as client:
        for count, status in ((2, 200), (3, 400)):
            gateway.responses = (half,) * count
            chat = {"messages": TURNS[-1:]}
            for path, body in (
                (CHAT, chat),
                ("/v1/messages", chat | {"max_tokens": 9}),
                ("/v1/responses", {"input": "x"}),
            ):
                answer = await client.post(path, json={"model": "chatting", **body})
                assert answer.status_code == status, (path, answer.text)
                assert ("Response with output 'text_output'" in answer.text) is (status == 400)


async def test_messages_and_fields_become_inputs(client: httpx.AsyncClient, gateway: Any) -> None:
    fields = {"temperature": 1, "max_completion_tokens": 9, "seed": 2**63, "stop": "x", "logit_bias": {"1": 2}}
    common = {"user": "me", "n": 1, "top_p": 1.0, "presence_penalty": 0, "timeout": 1.5, "priority": 3}
    common |= {"mm_processor_kwargs": {}}
    answer = await client.post(CHAT, json={"model": "chatting", "messages": TURNS, **fields, **common})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "one two"
    got = asked(gateway)
    assert json.loads(got.pop("messages")[2][0][0]) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "two"},
    ]
    assert got == {
        "temperature": ("FP32", (1, 1), [[1.0]]),
        "max_tokens": ("INT32", (1, 1), [[9]]),
        "seed": ("UINT64", (1, 1), [[2**63]]),
        "stop": ("BYTES", (1, 1), [[b"x"]]),
        "stream": ("BOOL", (1, 1), [[False]]),
        "logit_bias": ("BYTES", (1, 1), [[b'{"1":2}']]),
    }
    assert gateway.asked[0].parameters == {"priority": 3, "timeout": 1_500_000}
    assert gateway.asked[0].outputs == ("text_output",)


async def test_tools_and_their_calls_are_the_model_s(client: httpx.AsyncClient, gateway: Any) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [called]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
    ]
    body = {"model": "chatting", "messages": turns, "tools": [CLOCK], "tool_choice": "auto"}
    assert (await client.post(CHAT, json=body)).status_code == 200
    got = asked(gateway)
    assert json.loads(got["messages"][2][0][0]) == turns
    assert json.loads(got["tools"][2][0][0]) == [CLOCK]


async def test_without_messages_the_last_user_text_is_asked(client: httpx.AsyncClient, gateway: Any) -> None:
    assert (await client.post(CHAT, json={"model": "answering", "messages": TURNS})).status_code == 200
    assert asked(gateway) == {"text_input": ("BYTES", (1,), [b"two"])}
    refused = await client.post(CHAT, json={"model": "answering", "messages": TURNS[:1]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_sampling_without_inputs_travels_in_sampling_parameters(client: httpx.AsyncClient, gateway: Any) -> None:
    body = {"model": "completing", "prompt": ["hi"], "max_tokens": 3, "stop": ["a", "b"], "seed": 0}
    answer = (await client.post(TEXT, json=body)).json()
    assert answer["choices"][0]["text"] == "one two"
    got = asked(gateway)
    assert got["text_input"][2] == [b"hi"]
    assert json.loads(got["sampling_parameters"][2][0]) == {"max_tokens": 3, "stop": ["a", "b"], "seed": 0}


@pytest.mark.parametrize(
    ("path", "body", "field", "says"),
    [
        (CHAT, {"model": "answering", "temperature": 0}, "temperature", "temperature: model 'answering' has no input"),
        (CHAT, {"model": "answering", "max_tokens": 5}, "max_tokens", "got 5"),
        (CHAT, {"model": "answering", "seed": 0}, "seed", "got 0"),
        (CHAT, {"model": "answering", "n": 2}, "n", "n: model 'answering' has no input of that name, got 2"),
        (CHAT, {"model": "answering", "tools": [CLOCK]}, "tools", "tools: model 'answering' has no input of that name"),
        (CHAT, {"model": "answering", "reasoning_effort": "low"}, "reasoning_effort", 'got "low"'),
        (CHAT, {"model": "answering", "thinking_token_budget": 0}, "thinking_token_budget", "got 0"),
        (CHAT, {"model": "answering", "logprobs": True}, "logprobs", "logprobs: model"),
        (CHAT, {"model": "answering", "response_format": {"type": "json_object"}}, "response_format", "no input"),
        (CHAT, {"model": "chatting", "logit_bias": {"x": 1}}, "logit_bias", "must name tokens by their ids"),
        (CHAT, {"model": "chatting", "temperature": -1}, "temperature", "must be a finite number"),
        (CHAT, {"model": "chatting", "stop": ["a", "b"], "seed": -1}, "seed", "non-unsigned-integer"),
        (CHAT, {"model": "completing"}, "model", "model 'completing' serves completions, not chat"),
        (TEXT, {"model": "answering"}, "model", "model 'answering' serves chat, not completions"),
        (TEXT, {"model": "completing", "prompt": ["a", "b"]}, "prompt", "takes one prompt at a time"),
        (TEXT, {"model": "completing", "prompt": ["a", "a"]}, "prompt", "takes one prompt at a time"),
        (TEXT, {"model": "completing", "prompt": [1, 2]}, "prompt", "must be text for this model"),
        (TEXT, {"model": "completing", "echo": True}, "echo", "has no input"),
    ],
)
async def test_what_a_model_has_no_input_for_is_refused(
    client: httpx.AsyncClient, gateway: Any, path: str, body: dict[str, Any], field: str, says: str
) -> None:
    whole = ({"messages": TURNS} if path == CHAT else {"prompt": "hi"}) | body
    refused = await client.post(path, json=whole)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == field
    assert says in refused.json()["error"]["message"]
    assert not gateway.asked


def texts(*parts: bytes) -> tuple[InferResponse, ...]:
    return tuple(InferResponse((Tensor.from_values("text_output", "BYTES", [part]),)) for part in parts)


async def test_a_stream_keeps_characters_whole_and_ends_as_its_language_model(
    client: httpx.AsyncClient, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.responses = (
        *texts("\u00e9".encode()[:1], "\u00e9".encode()[1:], b"!", b"\xc3"),
        InferResponse((), final=True),
    )
    opened = gateway.open_request

    def with_sequences(*arguments: Any) -> Any:
        context = opened(*arguments)
        child = context.child("ensemble")
        child.add_sequence(Generated())
        child.child("ensemble").add_sequence(Generated(finish_reason=FinishReason.LENGTH))
        return context

    monkeypatch.setattr(gateway, "open_request", with_sequences)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(CHAT, json={"model": "answering", "messages": TURNS, **usage})
    *chunks, last = events(answer)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta.get("content") for delta in deltas[1:]] == ["\u00e9", "!", "\ufffd", None]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (14, 6)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_without_a_language_model_nothing_was_used(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json={"model": "answering", "messages": TURNS})).json()
    assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (0, "stop")


async def test_errors_before_and_within_a_stream(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.error = Internal("a step broke")
    body = {"model": "answering", "messages": TURNS, "stream": True}
    *_, broken = events(await client.post(CHAT, json=body))
    assert broken["error"]["message"] == "a step broke"
    gateway.texts = ()
    assert (await client.post(CHAT, json=body)).status_code == 500
    gateway.error, gateway.responses = None, (InferResponse((Tensor.from_values("other", "INT32", [1]),)),)
    answer = await client.post(CHAT, json=body)
    assert "has answered without its output 'text_output'" in answer.json()["error"]["message"]
