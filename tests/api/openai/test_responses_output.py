"""The items of an answer, and the events that tell how they grew."""

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from charonia.api.openai.responses_output import ResponseOutput
from charonia.core.errors import Internal, InvalidArgument, QueueFull
from charonia.core.request import FinishReason, GenerateChunk, ToolCallDelta, Usage, join_chunks
from tests.scored_tokens import scored

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ECHO: dict[str, Any] = {"model": "m", "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}

THOUGHT = [{"reasoning": "hm"}, {"reasoning": "m, ok"}]
SAID = [{"text": "\n\n"}, {"text": "I'll "}, {"text": "look"}]
CALLED = [
    {"tool_calls": (ToolCallDelta(0, "call_a", "find"),)},
    {"tool_calls": (ToolCallDelta(0, arguments='{"x":'),)},
    {"tool_calls": (ToolCallDelta(0, arguments="1}"), ToolCallDelta(1, "call_b", "sum", "{}"))},
]


def chunks(*pieces: dict[str, Any], reason: FinishReason = FinishReason.STOP) -> list[GenerateChunk]:
    made = [
        GenerateChunk(**{"text": "", "token_ids": (at,), "usage": Usage(3, at + 1, 1, 2)} | piece)
        for at, piece in enumerate(pieces)
    ]
    end = GenerateChunk(text="", token_ids=(), usage=Usage(3, len(pieces), 1, 2), finish_reason=reason)
    return [*made, end]


def told(answer: list[GenerateChunk], logprobs: bool = False) -> list[dict[str, Any]]:
    """All events of an answer."""
    output = ResponseOutput("resp_1", ECHO, logprobs)
    made = [*output.begin(), *(event for chunk in answer for event in output.add(chunk)), *output.end()]
    events: list[dict[str, Any]] = orjson.loads(orjson.dumps(made))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event)
    whole = orjson.loads(orjson.dumps(output.response()))
    Response.model_validate(whole)
    assert events[-1]["response"] == whole
    return events


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as a client puts them together from the deltas alone; whatever tells of a whole is held against it."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"] | {"text": ""})
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[-1]["id"]
            items[-1]["text"] += event["delta"]
        elif kind.endswith("_text.done"):
            assert event["text"] == items[-1]["text"]
        elif kind == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (items[-1]["text"], items[-1]["name"])
        elif kind == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            whole = event["item"]
            assert items[-1]["text"] == (whole["content"][0]["text"] if "content" in whole else whole["arguments"])
    return items


def shown(answer: list[GenerateChunk]) -> list[tuple[Any, ...]]:
    return [(each["type"], each["text"], each.get("call_id"), each["status"]) for each in rebuilt(told(answer))]


WHOLE = [
    ("reasoning", "hmm, ok", None, "completed"),
    ("message", "\n\nI'll look", None, "completed"),
    ("function_call", '{"x":1}', "call_a", "completed"),
    ("function_call", "{}", "call_b", "completed"),
]


def test_reasoning_text_and_calls_are_items_in_their_order() -> None:
    events = told(chunks(*THOUGHT, *SAID, *CALLED))
    assert shown(chunks(*THOUGHT, *SAID, *CALLED)) == WHOLE
    answer = events[-1]["response"]
    assert [each["id"].partition("_")[0] for each in answer["output"]] == ["rs", "msg", "fc", "fc"]
    assert len({each["id"] for each in answer["output"]}) == 4
    assert [each.get("name") for each in answer["output"]] == [None, None, "find", "sum"]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@given(st.sets(st.integers(1, 8)))
@settings(deadline=None, max_examples=60)
def test_chunks_that_were_merged_tell_the_same_answer(cuts: set[int]) -> None:
    *pieces, end = chunks(*THOUGHT, *SAID, *CALLED)
    edges = [0, *sorted(cuts & set(range(1, len(pieces)))), len(pieces)]
    merged = [join_chunks(pieces[begin:stop]) for begin, stop in pairwise(edges)]
    assert shown([*merged, end]) == WHOLE


def test_space_before_a_call_is_no_message_and_an_answer_is_never_empty() -> None:
    space = {"text": "\n"}
    assert [kind for kind, *_ in shown(chunks(*THOUGHT, space, *CALLED))] == ["reasoning", *["function_call"] * 2]
    assert shown(chunks(space)) == [("message", "\n", None, "completed")]
    assert shown(chunks()) == [("message", "", None, "completed")]


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        (FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason.TIMEOUT, "incomplete", {"reason": "timeout"}),
        (FinishReason.STOP, "completed", None),
    ],
)
def test_what_was_cut_says_why(reason: FinishReason, status: str, why: Any) -> None:
    answer = chunks(*THOUGHT, {"text": "I'll"}, reason=reason)
    output = ResponseOutput("resp_1", ECHO, False)
    output.begin()
    for chunk in answer:
        output.add(chunk)
    [*_, last] = output.end()
    assert last["type"] == f"response.{status}"
    assert (last["response"]["status"], last["response"]["incomplete_details"]) == (status, why)
    assert [each["status"] for each in last["response"]["output"]] == ["completed", status]


def test_logprobs_are_those_of_the_text_alone() -> None:
    def token(text: str) -> dict[str, Any]:
        return {"logprobs": (scored(1, text, -1.0),)}

    pieces = [
        THOUGHT[0] | token("hm"),
        {"text": ""} | token("\xc3"),
        {"text": "é"} | token("\xa9"),
        {"text": ""} | token("<e>"),
    ]
    events = told(chunks(*pieces), logprobs=True)
    deltas = [entry["token"] for event in events if "output_text.delta" in event["type"] for entry in event["logprobs"]]
    whole = events[-1]["response"]["output"][1]["content"][0]["logprobs"]
    assert deltas == [each["token"] for each in whole] == ["\xc3", "\xa9", "<e>"]


def test_logprobs_of_a_marker_behind_reasoning_are_not_the_texts_however_chunks_were_merged() -> None:
    names = ["hm", "</", "think>", "é", "l"]
    pieces = [
        GenerateChunk(
            text=text, token_ids=(at,), usage=Usage(3, at + 1, 1, min(at + 1, 3)), logprobs=(scored(at, name, -1.0),)
        )
        for at, (name, text) in enumerate(zip(names, ["", "", "", "é", "l"], strict=True))
    ]
    pieces[0] = replace(pieces[0], reasoning="hm")
    end = replace(pieces[-1], text="", token_ids=(), logprobs=(), finish_reason=FinishReason.STOP)
    for edges in ([0, 1, 2, 3, 4, 5], [0, 2, 4, 5], [0, 1, 5], [0, 5]):
        merged = [join_chunks(pieces[begin:stop]) for begin, stop in pairwise(edges)]
        [_, message] = told([*merged, end], logprobs=True)[-1]["response"]["output"]
        assert [each["token"] for each in message["content"][0]["logprobs"]] == ["é", "l"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Internal("no"), "server_error"),
        (QueueFull("no", retry_after=1), "rate_limit_exceeded"),
        (InvalidArgument("no\ud800", field="text.format"), "invalid_prompt"),
    ],
)
def test_errors_after_the_beginning_are_events(error: Any, code: str) -> None:
    output = ResponseOutput("resp_1", ECHO, False)
    output.begin()
    output.add(chunks(*CALLED)[0])
    *_, item, said, failed = output.fail(error)
    assert (item["item"]["type"], item["item"]["status"]) == ("function_call", "incomplete")
    assert (said["code"], failed["response"]["error"]["code"]) == (code, code)
    for event in (item, said, failed):
        EVENTS.validate_python(event)
    assert said["message"].encode()
