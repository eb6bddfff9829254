"""The anthropic client, sync and async, drives a real server."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

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
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(**options(server)) as connected:
        yield connected


def test_a_message_and_its_stream_are_the_same(client: anthropic.Anthropic) -> None:
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
    async with anthropic.AsyncAnthropic(**options(server)) as client:
        stream = await client.messages.create(stream=True, **PLAIN)
        first, *_ = events = [event async for event in stream]
    assert first.type == "message_start"
    assert first.message.usage.input_tokens > 0
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**PLAIN).content[0]
    assert whole.type == "text"
    stop = whole.text[3:5]
    cut = client.messages.create(**PLAIN, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].type == "text"
    assert cut.content[0].text == whole.text[: whole.text.index(stop)]


def test_more_tokens_than_there_is_room_for(client: anthropic.Anthropic) -> None:
    """Claude Code asks for 32,000 whatever the model's length is."""
    answer = client.messages.create(**PLAIN | {"max_tokens": 32_000, "model": "fake"})
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens > 12


def test_errors_are_the_client_s(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error") as unknown:
        client.messages.create(**PLAIN | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type"):
        client.messages.create(**PLAIN | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**PLAIN | {"messages": [{"role": "user", "content": "word " * 9000}]})
    assert unknown.value.request_id
