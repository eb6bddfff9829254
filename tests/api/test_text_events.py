"""The event of a text alone is the same, to the byte, as that of a chunk with this text, whatever came before."""

import itertools
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from charonia.api.anthropic.message_writer import AnthropicMessageWriter
from charonia.api.http.connection import EventEncoder
from charonia.api.openai import responses_output
from charonia.api.openai.request_parsing import ResponseSpec
from charonia.api.openai.response_writer import ApiFormat, ChatFormat, CompletionFormat, OpenAIResponseWriter
from charonia.api.openai.responses_output import ResponseOutput
from charonia.api.openai.responses_routes import ResponseEvents
from charonia.api.openai.routes import CompletionEvents
from charonia.core.request import FinishReason, GenerateChunk, ToolCallDelta, Usage

TEXTS = ["a", ' say "b"\n\\', "\0text\0", "é€\U0001f600", " ", "0}\n\n"]
CALL = {"tool_calls": (ToolCallDelta(0, "call_1", "find", "{}"),)}
THOUGHT = {"reasoning": "hm"}


def completion(api_format: ApiFormat, **fields: Any) -> CompletionEvents:
    plain: dict[str, Any] = {
        "id": "cmpl-1",
        "model": "m",
        "best_of": 1,
        "n": 1,
        "echo": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "return_token_ids": False,
        "include_usage": True,
        "continuous_usage": False,
        "reasoning": True,
    }
    return CompletionEvents(OpenAIResponseWriter(api_format, ResponseSpec(**plain | fields), "fp"))


def messages() -> AnthropicMessageWriter:
    request = SimpleNamespace(id="msg_1")
    parsed: Any = SimpleNamespace(chat=SimpleNamespace(requests=(request,)), shows_thinking=True, max_tokens=9)
    return AnthropicMessageWriter(parsed, "m")


def responses() -> ResponseEvents:
    return ResponseEvents(ResponseOutput("resp_1", {"model": "m"}, False))


ENCODERS: dict[str, Callable[[], EventEncoder[GenerateChunk]]] = {
    "completions": lambda: completion(CompletionFormat()),
    "chat": lambda: completion(ChatFormat()),
    "messages": messages,
    "responses": responses,
}


@pytest.fixture(autouse=True)
def same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1700000000.0)
    monkeypatch.setattr(responses_output, "uuid4", lambda: uuid.UUID(int=1))


@pytest.mark.parametrize("door", ENCODERS)
@pytest.mark.parametrize("first", [{"text": "one"}, {"text": ""}, {"text": "\n"}, THOUGHT, CALL])
@pytest.mark.parametrize("middle", [None, THOUGHT, CALL])
def test_events_are_the_same_by_either_way(door: str, first: dict[str, Any], middle: dict[str, Any] | None) -> None:
    one, other = ENCODERS[door](), ENCODERS[door]()
    numbers = itertools.count(1)

    def chunk(**fields: Any) -> GenerateChunk:
        return GenerateChunk(**{"text": "", "token_ids": (1,), "usage": Usage(3, next(numbers))} | fields)

    begin = chunk(**first)
    assert one.encode_item(begin) == other.encode_item(begin)
    encode_text = one.encode_text
    assert encode_text is not None
    for at, text in enumerate([*TEXTS, *TEXTS]):
        if at == len(TEXTS) and middle is not None:
            between = chunk(**middle)
            assert one.encode_item(between) == other.encode_item(between)
        assert encode_text(text) == other.encode_item(chunk(text=text))
    end = chunk(finish_reason=FinishReason.LENGTH)
    assert one.encode_item(end) == other.encode_item(end)
    assert one.encode_end() == other.encode_end()


def test_who_shows_more_of_each_chunk_sees_each_chunk() -> None:
    for fields in ({"continuous_usage": True}, {"return_token_ids": True}):
        assert completion(CompletionFormat(), **fields).encode_text is None
