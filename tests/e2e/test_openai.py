"""The openai client, sync and async, drives a real server."""

from typing import Any

import openai
import pytest

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def options(server: Any) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "timeout": 60, "max_retries": 0}


def test_sync(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        assert {model.id for model in client.models.list()} == {"tiny", "fake", "slow"}
        assert client.models.retrieve("tiny").owned_by == "charonia"
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, **PLAIN)
        chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **PLAIN))
        text = client.completions.create(model="tiny", prompt="def fib", **PLAIN)
        pieces = list(client.completions.create(model="tiny", prompt="def fib", stream=True, **PLAIN))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == chat.choices[0].finish_reason == "length"
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    assert chat.usage
    assert chat.usage.completion_tokens == 12


async def test_async(server: Any) -> None:
    async with openai.AsyncOpenAI(**options(server)) as client:
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, **PLAIN)
        usage = {"include_usage": True}
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options=usage, **PLAIN
        )
        *chunks, last = [chunk async for chunk in stream]
        several = await client.completions.create(model="tiny", prompt=["def fib", "def fib", "x"], **PLAIN)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
    assert last.usage
    assert chat.usage
    assert last.usage.total_tokens == chat.usage.total_tokens
    assert several.choices[0].text == several.choices[1].text
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_the_prefix_cache_shows_in_the_usage(server: Any) -> None:
    prompt = "the quick brown fox jumps over the lazy dog, and then some more of it, again and again"
    with openai.OpenAI(**options(server)) as client:
        client.completions.create(model="tiny", prompt=prompt, **PLAIN)
        again = client.completions.create(model="tiny", prompt=prompt, **PLAIN)
    assert again.usage
    assert again.usage.prompt_tokens_details
    assert again.usage.prompt_tokens_details.cached_tokens
    assert again.usage.prompt_tokens_details.cached_tokens % 16 == 0


def test_errors_carry_the_field(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nothing", messages=MESSAGES)
    assert refused.value.param == "n"
    assert too_long.value.param == "max_tokens"
    assert unknown.value.code == "model_not_found"
