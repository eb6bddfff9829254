"""Tools in chats of the openai client, over a real server: even a checkpoint that knows of none writes valid calls."""

import json
from typing import Any

import openai

from .models import HERMES

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY | {"additionalProperties": False}},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 120,
    "temperature": 0,
    "tools": [WEATHER, CLOCK],
    "parallel_tool_calls": False,
    "extra_body": {"chat_template": HERMES},
}


def connected(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0)


def test_a_named_tool_is_called_and_its_result_taken(server: Any) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    with connected(server) as client:
        [choice] = client.chat.completions.create(**ASKED, tool_choice=named).choices
        assert choice.message.tool_calls
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "get_weather")
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        turns = [*ASKED["messages"], choice.message, result]
        last = client.chat.completions.create(**ASKED | {"messages": turns, "max_tokens": 4}, tool_choice="none")
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].message.tool_calls is None


def test_streamed_calls_are_those_of_the_whole_answer(server: Any) -> None:
    with connected(server) as client:
        whole = client.chat.completions.create(**ASKED, tool_choice="required", n=2)
        chunks = list(client.chat.completions.create(**ASKED, tool_choice="required", n=2, stream=True))
    for choice in whole.choices:
        assert choice.message.tool_calls
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        calls = [call for delta in deltas for call in delta.delta.tool_calls or ()]
        names = [call.function.name for call in calls if call.function and call.function.name]
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        [told] = choice.message.tool_calls
        assert told.type == "function"
        assert (names, arguments) == ([told.function.name], told.function.arguments)
        assert {call.index for call in calls} == {0}
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["tool_calls"]


def test_required_calls_that_are_cut_leave_no_markup(server: Any) -> None:
    several = ASKED | {"tool_choice": "required", "parallel_tool_calls": True}
    with connected(server) as client:
        for most in (3, 9, 14, 27, 44, 61):
            [whole] = client.chat.completions.create(**several | {"max_tokens": most}).choices
            chunks = list(client.chat.completions.create(**several | {"max_tokens": most}, stream=True))
            deltas = [chunk.choices[0] for chunk in chunks]
            assert (whole.finish_reason, whole.message.content or "") == ("length", "")
            assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
            assert "".join(delta.delta.content or "" for delta in deltas) == ""
            calls = [call for delta in deltas for call in delta.delta.tool_calls or ()]
            assert len({call.index for call in calls}) == len(whole.message.tool_calls or ())
            for call in (whole.message.tool_calls or ())[:-1]:
                assert call.type == "function"
                assert isinstance(json.loads(call.function.arguments), dict)
