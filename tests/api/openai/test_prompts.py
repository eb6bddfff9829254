"""OpenAI's endpoints: what it says of prompts (echo, their logprobs), and the best of several answers."""

import json
from typing import Any

import httpx
import pytest

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"model": "llm", "prompt": "hi"}
HI = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}

SECOND = {
    "8": {"logprob": -1.0, "rank": 2, "decoded_token": "i"},
    "0": {"logprob": -0.5, "rank": 1, "decoded_token": "?"},
}
"""What vLLM's format makes of the prompt's second token, and of the likeliest one in its place."""


async def answer(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_an_echo_comes_first(client: httpx.AsyncClient, gateway: Any) -> None:
    [choice] = (await answer(client, TEXT, PROMPT | {"echo": True}))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("hione two", None)
    assert gateway.asked[0].sampling.prompt_logprobs is None, "nothing to score"
    chunks = events(await client.post(TEXT, json=PROMPT | {"echo": True, "stream": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hione", " two", ""]


async def test_an_echo_has_logprobs_as_the_rest_has(client: httpx.AsyncClient) -> None:
    [choice] = (await answer(client, TEXT, PROMPT | {"echo": True, "logprobs": 1}))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "i", "one", " two"],
        "token_logprobs": [None, -1.0, -1.0, -1.0],
        "top_logprobs": [None, {"?": -0.5, "i": -1.0}, {"?": -0.5, "one": -1.0}, {"?": -0.5, " two": -1.0}],
        "text_offset": [0, 1, 2, 5],
    }
    assert "prompt_logprobs" not in choice


async def test_a_streamed_echo_has_its_logprobs_in_the_first_chunk(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post(TEXT, json=PROMPT | {"echo": True, "logprobs": 0, "stream": True}))
    *told, end = (chunk["choices"][0]["logprobs"] for chunk in chunks)
    assert end == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert [each["tokens"] for each in told] == [["h", "i", "one"], [" two"]]
    assert [each["text_offset"] for each in told] == [[0, 1, 2], [5]]
    assert told[0]["token_logprobs"] == [None, -1.0, -1.0]


async def test_a_prompt_alone(client: httpx.AsyncClient, gateway: Any) -> None:
    await answer(client, TEXT, PROMPT | {"echo": True, "max_tokens": 0, "logprobs": 1})
    await answer(client, TEXT, PROMPT | {"max_tokens": 0, "prompt_logprobs": 1})
    await answer(client, CHAT, HI | {"max_tokens": 0, "prompt_logprobs": 1})
    assert [(each.sampling.max_tokens, each.echo) for each in gateway.asked] == [(0, True), (0, False), (0, False)]


async def test_prompt_logprobs_of_a_text(client: httpx.AsyncClient) -> None:
    body = await answer(client, TEXT, PROMPT | {"prompt_logprobs": 1, "n": 2})
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [[None, SECOND]] * 2
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["choices"][0]["text"] == "one two"


async def test_prompt_logprobs_of_a_chat(client: httpx.AsyncClient) -> None:
    body = await answer(client, CHAT, HI | {"prompt_logprobs": 0, "n": 2})
    assert body["prompt_logprobs"] == [None, {"8": SECOND["8"]}]
    assert "prompt_logprobs" not in (await answer(client, CHAT, HI))


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(0, 2), (2, 0)])
async def test_each_list_is_as_long_as_it_was_asked_for(
    client: httpx.AsyncClient, gateway: Any, logprobs: int, prompt_logprobs: int
) -> None:
    asked = {"echo": True, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    [choice] = (await answer(client, TEXT, PROMPT | asked))["choices"]
    assert gateway.asked[0].sampling.prompt_logprobs == 2
    assert len(choice["prompt_logprobs"][1]) == 1 + bool(prompt_logprobs)
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + bool(logprobs)


async def test_the_best_of_several(client: httpx.AsyncClient, gateway: Any) -> None:
    """Each prompt's own; the likeliest first, and of equals the earlier."""
    gateway.chosen = {0: -3.0, 1: -1.0, 2: -2.0, 3: -1.0}
    asked = PROMPT | {"prompt": ["a", "b"], "best_of": 4, "n": 3, "logprobs": 0}
    body = await answer(client, TEXT, asked)
    assert [(request.prompt, request.choice, request.choice_count) for request in gateway.asked] == [
        (prompt, choice, 4) for prompt in "ab" for choice in range(4)
    ]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    likeliest = [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]]
    assert likeliest == [-1.0, -1.0, -2.0] * 2
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (10, 16), "all that was generated"


async def test_logprobs_that_find_the_best_are_not_told(client: httpx.AsyncClient, gateway: Any) -> None:
    [choice] = (await answer(client, TEXT, PROMPT | {"best_of": 3}))["choices"]
    assert [request.sampling.logprobs for request in gateway.asked] == [0, 0, 0]
    assert choice["logprobs"] is None


async def test_nothing_is_chosen_where_all_are_kept(client: httpx.AsyncClient, gateway: Any) -> None:
    chunks = events(await client.post(TEXT, json=PROMPT | {"best_of": 2, "n": 2, "stream": True}))
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
    assert [request.sampling.logprobs for request in gateway.asked] == [None, None]


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_a_prompt_is_scored_once_however_many_answers_it_gets(
    client: httpx.AsyncClient, gateway: Any, max_tokens: int
) -> None:
    """And each answer shows it, the best one too, which need not be the first."""
    gateway.chosen = {0: -3.0, 1: -1.0}
    asked = {"prompt": ["a", "b"], "best_of": 2, "n": 1, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    body = await answer(client, TEXT, PROMPT | asked | {"prompt_logprobs": 1})
    assert [each.sampling.prompt_logprobs for each in gateway.asked] == [1, None, 1, None]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [[None, SECOND]] * 2
    assert [choice["logprobs"]["token_logprobs"] for choice in body["choices"]] == [[None, -1.0, -1.0, -1.0]] * 2


async def test_in_a_stream_no_answer_waits_for_another_ones_prompt(client: httpx.AsyncClient, gateway: Any) -> None:
    asked = {"n": 2, "echo": True, "logprobs": 0, "stream": True}
    chunks = events(await client.post(TEXT, json=PROMPT | asked))
    firsts = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in reversed(chunks)}
    assert [firsts[index]["logprobs"]["tokens"] for index in (0, 1)] == [["h", "i", "one"]] * 2
