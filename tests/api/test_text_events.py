"""The event of a text alone is the same, to the byte, as that of a chunk with this text, whatever came before."""

import itertools
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
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
from tests.scored_tokens import scored

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


def responses(logprobs: bool = False) -> ResponseEvents:
    return ResponseEvents(ResponseOutput("resp_1", {"model": "m"}, logprobs))


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
        whole = chunk(text=text)
        assert encode_text(text, whole.usage.completion_tokens, None) == other.encode_item(whole)
    assert encode_text("", 99, None) in (b"", None)
    end = chunk(finish_reason=FinishReason.LENGTH)
    assert one.encode_item(end) == other.encode_item(end)
    assert one.encode_end() == other.encode_end()


SCORING: dict[str, Callable[[], EventEncoder[GenerateChunk]]] = {
    "completions": lambda: completion(CompletionFormat(), logprobs=1),
    "completions by id": lambda: completion(CompletionFormat(), logprobs=1, tokens_as_ids=True),
    "completions without": lambda: completion(CompletionFormat()),
    "chat": lambda: completion(ChatFormat(), logprobs=1),
    "chat by id": lambda: completion(ChatFormat(), logprobs=1, tokens_as_ids=True),
    "responses": lambda: responses(logprobs=True),
    "responses without": responses,
    "completions with usage": lambda: completion(CompletionFormat(), logprobs=1, continuous_usage=True),
    "chat with usage": lambda: completion(ChatFormat(), logprobs=1, continuous_usage=True),
    "completions with usage alone": lambda: completion(CompletionFormat(), model="100%d", continuous_usage=True),
    "chat with usage alone": lambda: completion(ChatFormat(), continuous_usage=True),
}


@pytest.mark.parametrize("door", SCORING)
def test_events_of_scored_texts_are_the_same_by_either_way(door: str) -> None:
    one, other = SCORING[door](), SCORING[door]()
    begin = GenerateChunk(text="x", token_ids=(1,), usage=Usage(3, 1, 2, 1), logprobs=(SCORED,))
    assert one.encode_item(begin) == other.encode_item(begin)
    encode_text = one.encode_text
    assert encode_text is not None
    for at, text in enumerate(TEXTS):
        token = scored(at, text, -0.25 * at, (at, text, -0.25 * at), (7, "%b", -2.0), width=len(text))
        shown = (token,) if "alone" not in door else ()
        chunk = GenerateChunk(text=text, token_ids=(at,), usage=Usage(3, 2 + at, 2, 1), logprobs=shown)
        assert encode_text(text, 2 + at, shown[0] if shown else None) == other.encode_item(chunk)
        held = msgspec.structs.replace(chunk, text="")  # a token that ends within a character
        event = encode_text("", 2 + at, shown[0] if shown else None)
        assert (one.encode_item(held) if event is None else event) == other.encode_item(held)
    end = GenerateChunk(text="", token_ids=(), usage=Usage(3, 9), finish_reason=FinishReason.LENGTH)
    assert one.encode_item(end) + one.encode_end() == other.encode_item(end) + other.encode_end()


def test_who_shows_more_of_each_chunk_sees_each_chunk() -> None:
    assert completion(CompletionFormat(), return_token_ids=True).encode_text is None


SCORED = scored(5, " 100%", -0.5, (7, "b", -2.0), rank=2, width=5)


def read(event: bytes) -> Any:
    return orjson.loads(event.removeprefix(b"data: "))


@pytest.mark.parametrize("text", TEXTS)
def test_what_goes_with_tokens_stands_in_their_event(text: str) -> None:
    """Names may have signs of a format."""
    fields = {"model": "m%(text)b%", "logprobs": 1, "return_token_ids": True, "continuous_usage": True}
    for api_format in (CompletionFormat(), ChatFormat()):
        events = completion(api_format, **fields)
        events.encode_item(GenerateChunk(text="x", token_ids=(1,), usage=Usage(3, 1)))
        for count in (2, 3):
            usage = Usage(3, count, 1, 1)
            chunk = GenerateChunk(text=text, token_ids=(5, 6), usage=usage, logprobs=(SCORED,))
            event = read(events.encode_item(chunk))
            [choice] = event["choices"]
            assert (event["model"], choice["token_ids"], choice["finish_reason"]) == ("m%(text)b%", [5, 6], None)
            assert (event["usage"]["completion_tokens"], event["usage"]["total_tokens"]) == (count, 3 + count)
            assert event["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
            if isinstance(api_format, ChatFormat):
                assert choice["delta"] == {"content": text}
                entry = {"token": "b", "logprob": -2.0, "bytes": [98]}
                own = {"token": " 100%", "logprob": -0.5, "bytes": [*b" 100%"], "top_logprobs": [entry]}
                assert choice["logprobs"]["content"] == [own]
            else:
                assert choice["text"] == text
                assert choice["logprobs"]["top_logprobs"] == [{"b": -2.0, " 100%": -0.5}]
                assert choice["logprobs"]["text_offset"] == [5 * (count - 2)]
        silent = read(events.encode_item(GenerateChunk(text="", token_ids=(8,), usage=Usage(3, 4))))["choices"][0]
        assert (silent["token_ids"], silent["logprobs"]) == ([8], None)
        assert silent.get("delta", {}) == {}


def test_reasoning_stands_under_both_names_or_not_at_all() -> None:
    chunk = GenerateChunk(text="", token_ids=(1,), usage=Usage(3, 1), reasoning='"hm" 5%')
    for shown, wanted in ((True, {"reasoning": '"hm" 5%', "reasoning_content": '"hm" 5%'}), (False, None)):
        events = completion(ChatFormat(), reasoning=shown)
        events.encode_item(chunk)
        event = events.encode_item(chunk)
        assert (read(event)["choices"][0]["delta"] if event else None) == wanted
