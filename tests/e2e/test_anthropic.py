"""The anthropic client, sync and async, drives a real server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .models import HERMES

PLAIN: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "system": "be brief",
    "messages": [{"role": "user", "content": "hi"}],
    "extra_body": {"temperature": 0, "ignore_eos": True},
}


def options(server: Any) -> dict[str, Any]:
    return {"base_url": server.url, "api_key": "none", "timeout": 60, "max_retries": 0}


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    import anthropic  # takes two seconds, which are not for every worker that reads this file

    with anthropic.Anthropic(**options(server)) as connected:
        yield connected


def test_a_message_and_its_stream_are_the_same(client: Any) -> None:
    whole = client.messages.create(**PLAIN)
    with client.messages.stream(**PLAIN) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text"]
    assert final.content[0].type == whole.content[0].type == "text"
    assert final.content[0].text == whole.content[0].text
    assert (whole.stop_reason, final.stop_reason) == ("max_tokens", "max_tokens")
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert whole.usage.output_tokens == final.usage.output_tokens == 12
    counted = client.messages.count_tokens(**{key: PLAIN[key] for key in ("model", "system", "messages")})
    for usage in (whole.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert whole._request_id
    assert whole.id == f"msg_{whole._request_id}"


async def test_async(server: Any) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(**options(server)) as client:
        stream = await client.messages.create(stream=True, **PLAIN)
        first, *_ = events = [event async for event in stream]
    assert first.type == "message_start"
    assert first.message.usage.input_tokens > 0
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client: Any) -> None:
    whole = client.messages.create(**PLAIN).content[0]
    assert whole.type == "text"
    stop = whole.text[3:5]
    cut = client.messages.create(**PLAIN, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].type == "text"
    assert cut.content[0].text == whole.text[: whole.text.index(stop)]


def test_more_tokens_than_there_is_room_for(client: Any) -> None:
    """Claude Code asks for 32,000 whatever the model's length is."""
    answer = client.messages.create(**PLAIN | {"max_tokens": 32_000, "model": "fake"})
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens > 12


def test_errors_are_the_client_s(client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="not_found_error") as unknown:
        client.messages.create(**PLAIN | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source"):
        client.messages.create(**PLAIN | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**PLAIN | {"messages": [{"role": "user", "content": "word " * 9000}]})
    assert unknown.value.request_id


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CLOSED: Any = CITY | {"additionalProperties": False}


def test_a_schema_of_the_answer_holds(client: Any) -> None:
    wanted: Any = {"format": {"type": "json_schema", "schema": CLOSED}}
    asked = PLAIN | {"max_tokens": 60, "extra_body": {}, "output_config": wanted}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
    assert json.loads(text)["city"] in ("Oslo", "Rome")


WEATHER: Any = {"name": "get_weather", "description": "The weather", "input_schema": CLOSED}


def test_a_loop_of_tools(client: Any) -> None:
    extra = {"temperature": 0, "chat_template": HERMES}
    asked = PLAIN | {"max_tokens": 120, "extra_body": extra, "tools": [WEATHER]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**asked, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    answer = client.messages.create(**asked, tool_choice=choice)
    for each in (answer, streamed):
        assert (each.stop_reason, [block.type for block in each.content]) == ("tool_use", ["tool_use"])
    [call] = answer.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert call.input["city"] in ("Oslo", "Rome")
    assert streamed.content[0].type == "tool_use"
    assert streamed.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [
        *PLAIN["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**asked | {"messages": turns, "max_tokens": 8}, tool_choice={"type": "none"})
    assert last.stop_reason == "max_tokens"
    assert last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0) > answer.usage.input_tokens
