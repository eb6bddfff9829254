"""The openai client, sync and async, drives a real server."""

from typing import Any

import httpx
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


def test_stop_strings_end_the_text_where_they_begin(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        whole = client.completions.create(model="tiny", prompt="def fib", **PLAIN).choices[0].text
        stop = whole[3:5]
        asked: dict[str, Any] = {"model": "tiny", "prompt": "def fib", "stop": [stop, "never"], **PLAIN}
        cut = client.completions.create(**asked)
        pieces = [piece.choices[0] for piece in client.completions.create(stream=True, **asked)]
    expected = whole[: whole.index(stop)]
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (expected, "stop")
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish_reason == "stop"
    assert cut.usage
    assert cut.usage.completion_tokens < 12


def test_what_an_answer_says_of_itself(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        asked: dict[str, Any] = {"model": "fake", "prompt": [10, 11], "max_tokens": 9}
        ended = client.completions.create(**asked, extra_body={"stop_token_ids": [15]})
        named = client.completions.create(**asked, extra_headers={"X-Request-Id": "q-7"})
        [*_, last] = client.completions.create(**asked, stream=True, extra_body={"stop_token_ids": [15]})
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="fake", prompt="x", seed=2**64)
    assert (ended.choices[0].finish_reason, ended.choices[0].stop_reason) == ("stop", 15)
    assert last.choices[0].stop_reason == 15
    assert (named.choices[0].finish_reason, named.choices[0].stop_reason) == ("length", None)
    assert (named.id, named._request_id) == ("cmpl-q-7", "q-7")
    assert ended.id == f"cmpl-{ended._request_id}"
    assert "between -2**63 and 2**64 - 1" in refused.value.message
    assert refused.value.request_id
    server.until(lambda: f"request_id={ended.id} " in server.said and refused.value.request_id in server.said)
    assert ended.system_fingerprint == named.system_fingerprint == last.system_fingerprint
    with openai.OpenAI(**options(server)) as client:
        other = client.completions.create(model="tiny", prompt="x", max_tokens=1).system_fingerprint
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1], "data": [1]}
    infer = httpx.post(f"{server.url}/v2/models/fake/infer", json={"inputs": [ids]}, headers={"X-Request-Id": "q-8"})
    assert (infer.status_code, infer.headers.get_list("x-request-id")) == (200, ["q-8"])
    assert str(other).startswith("fp_")
    assert other != ended.system_fingerprint


def test_what_vllms_clients_say_of_tokens(server: Any) -> None:
    """Special tokens are the first of the tiny model's vocabulary."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 5, "temperature": 1.5}
    wishes = {"allowed_token_ids": [0, 1, 2], "ignore_eos": True, "truncate_prompt_tokens": 3}
    with openai.OpenAI(**options(server)) as client:
        skipped = client.completions.create(**asked, extra_body=wishes)
        shown = client.completions.create(**asked, extra_body=wishes | {"skip_special_tokens": False})
        streamed = client.completions.create(
            **asked, stream=True, extra_body=wishes | {"skip_special_tokens": False, "seed": 1}
        )
        text = "".join(chunk.choices[0].text for chunk in streamed)
    whole = {"text_input": "the quick brown fox", "max_tokens": 5, "skip_special_tokens": False, "seed": 1, **wishes}
    v2 = httpx.post(f"{server.url}/v2/models/tiny/generate", json=whole | {"temperature": 1.5}).json()
    assert v2["text_output"] == text
    assert skipped.usage
    assert skipped.usage.prompt_tokens == 3
    assert skipped.choices[0].text == ""
    assert len(shown.choices[0].text) > 5


def test_token_ids_and_usage_all_along(server: Any) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": [10, 11], "max_tokens": 4}
    told = {"extra_body": {"return_token_ids": True}}
    counting: Any = {"include_usage": True, "continuous_usage_stats": True}
    with openai.OpenAI(**options(server)) as client:
        choice: Any = client.completions.create(**asked, **told).choices[0]
        chunks: list[Any] = list(client.completions.create(**asked, **told, stream=True, stream_options=counting))
        chat: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, **told)
        tokens = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()["tokens"]
    assert (choice.prompt_token_ids, choice.token_ids) == ([10, 11], [12, 13, 14, 15])
    assert [token for chunk in chunks[:-1] for token in chunk.choices[0].token_ids] == choice.token_ids
    assert chunks[0].choices[0].prompt_token_ids == [10, 11]
    used = [chunk.usage.completion_tokens for chunk in chunks]
    assert used == sorted(used)
    assert used[-1] == 4
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {2}
    assert chat.prompt_token_ids == tokens
    assert len(chat.choices[0].token_ids) == chat.usage.completion_tokens


def test_how_a_chat_is_rendered(server: Any) -> None:
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": "so far"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    with openai.OpenAI(**options(server)) as client, httpx.Client(base_url=server.url) as http:
        tokens = [
            http.post("/tokenize", json={"model": "tiny", "messages": begun, **asked}).json()["tokens"]
            for asked in ({}, goes_on, {"chat_template": template})
        ]
        used = []
        for asked in ({}, goes_on, {"chat_template": template}):
            answer: Any = client.chat.completions.create(
                model="tiny", messages=begun, max_tokens=1, extra_body=asked | {"return_token_ids": True}
            )
            used.append(answer.prompt_token_ids)
        texts = [http.post("/detokenize", json={"model": "tiny", "tokens": token}).json()["prompt"] for token in tokens]
        with pytest.raises(openai.BadRequestError, match="can't both be true"):
            client.chat.completions.create(
                model="tiny", messages=begun, extra_body=goes_on | {"add_generation_prompt": True}
            )
    assert used == tokens
    assert texts[1].endswith("so far")
    assert texts[2] == "be brief;hi;so far;"


def test_choices_differ_and_repeat(server: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "n": 3, "seed": 5}
    with openai.OpenAI(**options(server)) as client:
        once, again = (client.chat.completions.create(**asked) for _ in range(2))
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    texts = [choice.message.content for choice in once.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        assert "".join(chunk.delta.content or "" for chunk in chunks if chunk.index == index) == text
    assert once.usage
    assert once.usage.prompt_tokens < 60


def test_logprobs_add_up(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        chat = client.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=5, **PLAIN
        ).choices[0]
        text = client.completions.create(model="tiny", prompt="def fib", logprobs=2, **PLAIN).choices[0]
    assert chat.logprobs
    assert chat.logprobs.content
    for token in chat.logprobs.content:
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert len(token.top_logprobs) == 5
    assert text.logprobs
    assert text.logprobs.tokens
    assert len(text.logprobs.tokens) == len(text.logprobs.text_offset or []) == 12


def test_scoring_a_text_says_what_writing_it_said(server: Any) -> None:
    """As evaluation harnesses ask and read: a batch of token ids, an echo, one token more."""
    asked = {
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_output_ids": True,
        "return_log_probs": True,
    }
    beginnings = [[72, 90, 71], list(range(100, 140))]
    written = [
        httpx.post(f"{server.url}/v2/models/tiny/generate", json={"input_ids": ids, **asked}).json()
        for ids in beginnings
    ]
    texts = [[*ids, *each["output_ids"]] for ids, each in zip(beginnings, written, strict=True)]
    with openai.OpenAI(**options(server)) as client:
        scored = client.completions.create(
            model="tiny", prompt=texts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
        )
    for choice, ids, each in zip(scored.choices, beginnings, written, strict=True):
        assert choice.logprobs
        own, top = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
        assert (own[0], top[0], len(own), len(top)) == (None, None, len(ids) + 13, len(ids) + 13)
        assert own[len(ids) : -1] == pytest.approx(each["output_log_probs"], abs=1e-5)
        greedy = [value == max(likeliest.values()) for value, likeliest in zip(own[1:], top[1:], strict=True)]
        assert all(greedy[len(ids) - 1 :])
        assert not all(greedy)


def test_an_echo_and_nothing_else(server: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "echo": True, "max_tokens": 0}
    with openai.OpenAI(**options(server)) as client:
        whole = client.completions.create(prompt="def fib(n):", logprobs=2, **asked)
        plain = client.completions.create(prompt=[72, 90], **asked)
        chunk, end = client.completions.create(prompt="def fib(n):", logprobs=2, stream=True, **asked)
    said = whole.choices[0]
    assert (said.text, said.finish_reason) == ("def fib(n):", "length")
    assert said.logprobs
    assert "".join(said.logprobs.tokens or []) == said.text
    assert chunk.choices[0].model_copy(update={"finish_reason": end.choices[0].finish_reason}) == said
    assert plain.choices[0].text
    assert whole.usage
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (0, len(said.logprobs.tokens or []))


def test_a_chat_has_prompt_logprobs_beside_it(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        chat: Any = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 1}
        )
    assert chat.usage
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert chat.prompt_logprobs[0] is None
    for named in chat.prompt_logprobs[1:]:
        token, *_ = named.values()
        assert token.keys() == {"logprob", "rank", "decoded_token"}
        assert len(named) == (1 if token["rank"] == 1 else 2)


def test_the_best_of_several_is_the_likeliest(server: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def fib", "max_tokens": 8, "seed": 5, "logprobs": 0}
    with openai.OpenAI(**options(server)) as client:
        every = client.completions.create(n=6, **asked)
        best = client.completions.create(n=2, best_of=6, **asked)
    ranked = sorted(every.choices, key=mean_logprob, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert every.usage
    assert best.usage
    assert best.usage.completion_tokens == every.usage.completion_tokens


def mean_logprob(choice: Any) -> float:
    values = choice.logprobs.token_logprobs
    return float(sum(values) / len(values))


def test_biases_and_bans(server: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def fib", "max_tokens": 12, "temperature": 0}
    with openai.OpenAI(**options(server)) as client:
        forced = client.completions.create(logit_bias={"72": 100}, **asked).choices[0].text
        words = {"bad_words": [forced[:1]], "min_tokens": 12}
        banned = client.completions.create(logit_bias={"72": 100}, logprobs=0, extra_body=words, **asked)
        spread = client.completions.create(presence_penalty=2, logit_bias={"72": 2}, **asked)
    assert forced == forced[:1] * 12
    assert banned.choices[0].logprobs
    assert forced[:1] not in (banned.choices[0].logprobs.tokens or [])
    assert spread.choices[0].text != forced
    assert banned.usage
    assert banned.usage.completion_tokens == 12


def test_there_and_back_again(server: Any) -> None:
    text = "def fib(n): # caf\u00e9"
    asked = {"model": "tiny", "prompt": text}
    tokens = httpx.post(f"{server.url}/tokenize", json=asked).json()
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 256)
    back = httpx.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}
    chat = httpx.post(f"{server.url}/tokenize", json={"model": "tiny", "messages": MESSAGES}).json()
    assert chat["count"] > 5


def test_errors_carry_the_field(server: Any) -> None:
    with openai.OpenAI(**options(server)) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=MESSAGES, n=200)
        with pytest.raises(openai.BadRequestError) as too_long:
            client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="nothing", messages=MESSAGES)
    assert refused.value.param == "n"
    assert too_long.value.param == "max_tokens"
    assert unknown.value.code == "model_not_found"
