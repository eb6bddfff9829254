"""OpenAI's endpoints: shapes, usage, and refusals that name the field."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from charonia.api.openai.routes import system_fingerprint
from charonia.core.drafts import DraftLimit, summarize_drafts
from charonia.core.errors import ContextLengthExceeded, Internal, InvalidArgument, QueueFull
from charonia.core.request import ChatMessage, Conversation, FinishReason, GenerateChunk, GenerateRequest, Usage
from charonia.core.tensor import TensorSpec

from ..conftest import LLM

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "llm", "prompt": "hi"}
STOPPED = {"finish_reason": "stop", "stop_reason": None}


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event but the last, which must be [DONE]."""
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    llm = {"id": "llm", "object": "model", "created": 1700000000, "owned_by": "charonia"}
    llm |= {"root": "llm", "parent": None, "max_model_len": None}
    assert listed["object"] == "list"
    assert listed["data"][0] == llm
    assert (await client.get("/v1/models/llm")).json() == llm


async def test_unknown_model(client: httpx.AsyncClient) -> None:
    error = {
        "message": "Request for unknown model: 'a/b' is not found",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
    for response in (await client.get("/v1/models/a/b"), await client.post(TEXT, json=PROMPT | {"model": "a/b"})):
        assert (response.status_code, response.json()) == (404, {"error": error})


async def test_no_route(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/assistants")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "Not Found: GET /v1/assistants"
    assert (await client.get(CHAT)).status_code == 405


async def test_completion(client: httpx.AsyncClient) -> None:
    body = (await client.post(TEXT, json=PROMPT)).json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "llm",
        "system_fingerprint": body["system_fingerprint"],
        "choices": [{"text": "one two", "index": 0, "logprobs": None, **STOPPED}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_chat(client: httpx.AsyncClient) -> None:
    body = (await client.post(CHAT, json=HI)).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": "one two", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, **STOPPED}]
    assert body["usage"]["total_tokens"] == 7


async def test_chat_streams(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts = ("one", "", " two")
    response = await client.post(CHAT, json=HI | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {"content": " two"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_closes_the_stream_when_asked_for(client: httpx.AsyncClient) -> None:
    *chunks, last = events(await client.post(TEXT, json=PROMPT | {"stream": True, "stream_options": USAGE}))
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


USAGE = {"include_usage": True}
ALL_ALONG = {"stream": True, "stream_options": USAGE | {"continuous_usage_stats": True}}


@pytest.mark.parametrize(("path", "body"), [(TEXT, PROMPT), (CHAT, HI)])
async def test_usage_all_along(client: httpx.AsyncClient, path: str, body: Any) -> None:
    chunks = events(await client.post(path, json=body | ALL_ALONG))
    counted = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counted == [(5, 0)] * (path == CHAT) + [(5, 1), (5, 2), (5, 2), (5, 2)]
    alone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in events(await client.post(path, json=body | alone)))


async def test_token_ids_of_a_text(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts = ("one", "", " two")
    asked = PROMPT | {"return_token_ids": True}
    both = (await client.post(TEXT, json=asked | {"n": 2})).json()["choices"]
    assert [(each["prompt_token_ids"], each["token_ids"]) for each in both] == [([7, 8], [1, 2, 3])] * 2
    streamed = [chunk["choices"][0] for chunk in events(await client.post(TEXT, json=asked | {"stream": True}))]
    assert [each["token_ids"] for each in streamed] == [[1], [2], [3], []]
    assert [each.get("prompt_token_ids") for each in streamed] == [[7, 8], None, None, None]
    plain = (await client.post(TEXT, json=PROMPT)).json()["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & plain.keys()


async def test_token_ids_of_a_chat(client: httpx.AsyncClient) -> None:
    asked = HI | {"return_token_ids": True}
    body = (await client.post(CHAT, json=asked)).json()
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == ([7, 8], [1, 2])
    chunks = events(await client.post(CHAT, json=asked | {"stream": True}))
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[7, 8], None, None, None]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [1], [2], []]


async def test_several_prompts_are_several_choices(client: httpx.AsyncClient, gateway: Any) -> None:
    body = (await client.post(TEXT, json=PROMPT | {"prompt": ["a", "b", "c"]})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {"one two"}
    assert body["usage"]["prompt_tokens"] == 15
    chunks = events(await client.post(TEXT, json=PROMPT | {"prompt": [[1], [2]], "stream": True}))
    for index in (0, 1):
        texts = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert texts == ["one", " two", ""]
    assert gateway.open_streams == 0


async def test_one_prompt_of_several_fails(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.error = InvalidArgument("too long", field="prompt")
    response = await client.post(TEXT, json=PROMPT | {"prompt": ["a", "b"]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert gateway.open_streams == 0


async def test_what_reaches_the_gateway(client: httpx.AsyncClient, gateway: Any) -> None:
    sampling = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 11,
        "ignore_eos": True,
        "stop_token_ids": [4, 5],
        "stop": ["a", "b"],
        "include_stop_str_in_output": True,
        "allowed_token_ids": [3, 4],
        "truncate_prompt_tokens": -1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "bad_words": ["c"],
        "min_tokens": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100},
        "logprobs": 2,
    }
    others = {"cache_salt": "s", "priority": 2, "timeout": 1.5, "user": "me", "cache_hit_threshold": 0.5}
    await client.post(TEXT, json=PROMPT | sampling | others)
    request: GenerateRequest = gateway.asked[0]
    assert (request.prompt, request.priority, request.cache_salt, request.timeout) == ("hi", 2, "s", 1.5)
    assert request.cache_hit_threshold == 0.5
    got = {name: getattr(request.sampling, name) for name in sampling}
    lists = {"stop_token_ids": (4, 5), "stop": ("a", "b"), "bad_words": ("c",), "logit_bias": {7: -100.0}}
    assert got == sampling | lists | {"allowed_token_ids": (3, 4)}


@pytest.mark.parametrize(("path", "base"), [(CHAT, HI), (TEXT, PROMPT)])
@pytest.mark.parametrize(
    ("asked", "drafts"),
    [(None, None), (False, DraftLimit(0, "speculative")), ({"k": 3}, DraftLimit(3, "speculative.k"))],
)
async def test_how_many_tokens_are_drafted(
    client: httpx.AsyncClient, gateway: Any, path: str, base: dict[str, Any], asked: Any, drafts: DraftLimit | None
) -> None:
    assert (await client.post(path, json=base | {"speculative": asked})).status_code == 200
    assert gateway.asked[0].drafts == drafts


@pytest.mark.parametrize("content", ["a text", [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]])
async def test_a_predicted_answer(client: httpx.AsyncClient, gateway: Any, content: Any) -> None:
    usage = Usage(5, 1, accepted_prediction_tokens=4, rejected_prediction_tokens=2)
    gateway.chunks = (GenerateChunk(text="x", token_ids=(1,), usage=usage, finish_reason=FinishReason.STOP),)
    body = HI | {"n": 2, "prediction": {"type": "content", "content": content}}
    details = (await client.post(CHAT, json=body)).json()["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "accepted_prediction_tokens": 8, "rejected_prediction_tokens": 4}
    assert [request.prediction for request in gateway.asked] == ["a text"] * 2
    streamed = events(await client.post(CHAT, json=body | {"n": 1, "stream": True, "stream_options": USAGE}))
    assert streamed[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 4


@pytest.mark.parametrize("detailed", [False, True])
async def test_what_an_answer_tells_of_its_drafts(client: httpx.AsyncClient, gateway: Any, detailed: bool) -> None:
    drafts = summarize_drafts([(3, 3), (2, 0), (3, 1)], 3, detailed)
    end = GenerateChunk(text="x", token_ids=(1,), usage=Usage(5, 7), finish_reason=FinishReason.STOP, drafts=drafts)
    gateway.chunks = (end,)
    expected = {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 1],
        "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "3": [0, 1, 0, 1]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
    } | ({"per_step_accepted": [3, 0, 1], "per_step_drafted": [3, 2, 3]} if detailed else {})
    for path, body in ((CHAT, HI), (TEXT, PROMPT)):
        assert (await client.post(path, json=body)).json()["metrics"] == {"speculative_decoding": expected}
        several = await client.post(path, json=body | {"n": 2})
        assert several.json()["metrics"] == {"speculative_decoding": None}
        *others, last = events(await client.post(path, json=body | {"stream": True, "stream_options": USAGE}))
        assert last["metrics"] == {"speculative_decoding": expected}
        assert not any("metrics" in event for event in others)


async def test_one_stop_string_may_come_alone(client: httpx.AsyncClient, gateway: Any) -> None:
    for stop in ("x", "", [], None, [""], ["", "y", ""]):
        await client.post(CHAT, json=HI | {"stop": stop, "bad_words": stop})
    assert [request.sampling.stop for request in gateway.asked] == [("x",), (), (), (), (), ("y",)]
    assert [request.sampling.bad_words for request in gateway.asked] == [("x",), (), (), (), (), ("y",)]


async def test_a_whole_number_is_an_integer(client: httpx.AsyncClient, gateway: Any) -> None:
    body = {"max_tokens": 8.0, "n": 1.0, "stop_token_ids": [1, 2.0], "temperature": 1, "seed": 3e0}
    for prompt in ([1.0, 2], [[1, 2.0]]):
        assert (await client.post(TEXT, json=PROMPT | body | {"prompt": prompt})).status_code == 200
    for asked in gateway.asked:
        assert (asked.prompt, asked.sampling.max_tokens, asked.sampling.seed) == ((1, 2), 8, 3)
        assert [type(each) for each in (*asked.prompt, *asked.sampling.stop_token_ids)] == [int] * 4
    for wrong in ({"max_tokens": 8.5}, {"stop_token_ids": [1.5]}, {"prompt": [1.5]}):
        assert (await client.post(TEXT, json=PROMPT | wrong)).status_code == 400


@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**63) - 2**12])
async def test_a_seed_of_more_than_64_bits(client: httpx.AsyncClient, seed: int) -> None:
    for path, body in ((TEXT, PROMPT), (CHAT, HI)):
        error = (await client.post(path, json=body | {"seed": seed})).json()["error"]
        assert error["param"] == "seed"
        assert error["message"] == f"seed must be between -2**63 and 2**64 - 1, got {seed}"


async def test_what_stopped_it(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.stop_reason = "END"
    for path, body in ((TEXT, PROMPT), (CHAT, HI)):
        assert (await client.post(path, json=body)).json()["choices"][0]["stop_reason"] == "END"
        chunks = events(await client.post(path, json=body | {"stream": True}))
        assert [chunk["choices"][0].get("stop_reason") for chunk in chunks][-2:] == [None, "END"]


async def test_a_fingerprint_is_of_model_settings_and_software(gateway: Any) -> None:
    one = replace(LLM, fingerprint="a", raw={"parameters": {"dtype": {"string_value": "bfloat16"}}})
    others = [
        replace(one, fingerprint="b"),
        replace(one, raw={"parameters": {"dtype": {"string_value": "float32"}}}),
        replace(one, parameters={"max_model_len": "5"}),
    ]
    assert system_fingerprint(one, "1") == system_fingerprint(replace(one, created=7), "1")
    told = {
        system_fingerprint(one, "1"),
        system_fingerprint(one, "2"),
        *(system_fingerprint(other, "1") for other in others),
    }
    assert len(told) == 5
    assert all(each.startswith("fp_") for each in told)


async def test_several_choices_of_each_prompt(client: httpx.AsyncClient, gateway: Any) -> None:
    body = (await client.post(TEXT, json=PROMPT | {"prompt": ["a", "b"], "n": 2})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [(request.prompt, request.choice) for request in gateway.asked] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    *chunks, last = events(await client.post(CHAT, json=HI | {"n": 3, "stream": True, "stream_options": USAGE}))
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, 6)


QUESTION = {"token": "?", "logprob": -0.5, "bytes": [63]}


async def test_logprobs_of_a_chat(client: httpx.AsyncClient) -> None:
    [choice] = (await client.post(CHAT, json=HI | {"logprobs": True, "top_logprobs": 1})).json()["choices"]
    one = {"token": "one", "logprob": -1.0, "bytes": [111, 110, 101], "top_logprobs": [QUESTION]}
    assert choice["logprobs"]["content"][0] == one
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["one", " two"]
    chunks = events(await client.post(CHAT, json=HI | {"logprobs": True, "stream": True}))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert told == [None, {"content": [one | {"top_logprobs": []}], "refusal": None}, told[2], None]


async def test_logprobs_of_a_text(client: httpx.AsyncClient) -> None:
    [choice] = (await client.post(TEXT, json=PROMPT | {"logprobs": 2})).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["one", " two"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"?": -0.5, "one": -1.0}, {"?": -0.5, " two": -1.0}],
        "text_offset": [0, 3],
    }
    chunks = events(await client.post(TEXT, json=PROMPT | {"logprobs": 0, "stream": True}))
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [logprobs["text_offset"] for logprobs in told] == [[0], [3], []]
    assert chunks[1]["choices"][0]["logprobs"]["top_logprobs"] == [{" two": -1.0}]


async def test_limits_differ_between_the_doors(client: httpx.AsyncClient, gateway: Any) -> None:
    for path, body in (
        (TEXT, PROMPT),
        (CHAT, HI),
        (CHAT, HI | {"max_completion_tokens": 3}),
        (CHAT, HI | {"max_tokens": 3, "max_completion_tokens": 4}),
    ):
        await client.post(path, json=body)
    assert [request.sampling.max_tokens for request in gateway.asked] == [16, None, 3, 4]


async def test_variables_for_the_chat_template(client: httpx.AsyncClient, gateway: Any) -> None:
    variables = {"enable_thinking": False, "depth": {"of": ["thought"]}}
    await client.post(CHAT, json=HI | {"chat_template_kwargs": variables})
    assert gateway.asked[0].prompt == Conversation((ChatMessage("user", "hi"),), variables)


async def test_how_a_chat_is_rendered(client: httpx.AsyncClient, gateway: Any) -> None:
    said = (ChatMessage("user", "hi"),)
    for asked, expected in [
        ({"chat_template": "{{ messages }}"}, Conversation(said, chat_template="{{ messages }}")),
        ({"add_generation_prompt": False}, Conversation(said, add_generation_prompt=False)),
        ({"continue_final_message": True}, Conversation(said, {}, "", False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, Conversation(said, {}, "", False, True)),
        ({"continue_final_message": False, "add_generation_prompt": True}, Conversation(said)),
    ]:
        for path in (CHAT, "/tokenize"):
            assert (await client.post(path, json=HI | asked)).status_code == 200
        assert gateway.asked[-1].prompt == gateway.tokenized[-1].prompt == expected
    for wrong in ({"add_generation_prompt": True}, {"messages": [{"role": "assistant", "content": " "}]}):
        for path in (CHAT, "/tokenize"):
            answer = await client.post(path, json=HI | {"continue_final_message": True} | wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


async def test_the_only_model_need_not_be_named(
    client: httpx.AsyncClient, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = [config for config in gateway.model_configs() if config.name == "llm"]
    monkeypatch.setattr(gateway, "model_configs", lambda: only)
    for path, body in ((TEXT, {"prompt": "hi"}), (CHAT, HI | {"model": ""})):
        assert (await client.post(path, json=body)).json()["model"] == "llm"


async def test_contents_of_messages(client: httpx.AsyncClient, gateway: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief", "type": "text"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "name": "Charon"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    await client.post(CHAT, json=HI | {"messages": messages})
    told = ChatMessage("assistant", "c", "Charon"), ChatMessage("assistant", "no")
    expected = Conversation((ChatMessage("system", "be brief"), ChatMessage("user", "a\nb", breaks=(1,)), *told))
    assert gateway.asked[0].prompt == expected


async def test_parts_as_other_clients_write_them(client: httpx.AsyncClient, gateway: Any) -> None:
    texts = [{"type": "input_text", "text": "a"}, {"text": "b"}, "c", {"type": None, "text": "d"}]
    parts = [{"type": "text", "text": "deep"}, {"type": "text", "text": "er"}]
    answers = [
        [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "output_text", "text": "e"}],
        [{"type": "thinking", "thinking": parts, "closed": True}, "f", {"type": "thinking", "thinking": "!"}, "g"],
    ]
    messages = [{"role": "user", "content": texts}, *({"role": "assistant", "content": answer} for answer in answers)]
    response = await client.post(CHAT, json=HI | {"messages": messages})
    assert (response.status_code, "x-charonia-warning" in response.headers) == (200, False)
    said = ChatMessage("user", "a\nb\nc\nd", breaks=(1, 3, 5))
    told = (
        ChatMessage("assistant", "e", reasoning="hm"),
        ChatMessage("assistant", "f\ng", reasoning="deep\ner\n!", breaks=(1,)),
    )
    assert gateway.asked[0].prompt == Conversation((said, *told))


NEUTRAL = {
    "use_beam_search": False,
    "skip_special_tokens": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
    "truncate_prompt_tokens": None,
    "n": 1,
    "stop": None,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "tools": [],
    "add_special_tokens": False,
    "prompt_cache_retention": "24h",
    "response_format": {"type": "text"},
    "temperature": None,
    "stream": None,
    "stream_options": None,
}


async def test_neutral_values_are_accepted(client: httpx.AsyncClient) -> None:
    assert (await client.post(CHAT, json=HI | NEUTRAL)).status_code == 200


async def test_special_tokens_are_added_as_vllm_does_where_nobody_says(client: httpx.AsyncClient) -> None:
    completion = {"model": "llm", "prompt": "hi"}
    for path, body, usual in ((CHAT, HI, False), ("/v1/completions", completion, True)):
        assert (await client.post(path, json=body | {"add_special_tokens": usual})).status_code == 200
        refused = await client.post(path, json=body | {"add_special_tokens": not usual})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "add_special_tokens")


REFUSED = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [3, -1]}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"bad_words": ["x" * 300]}, "bad_words"),
    ({"logprobs": "yes"}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"1": 200}}, "logit_bias"),
    ({"logit_bias": {"one": 2}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"max_tokens": -1, "prompt_logprobs": 1}, "max_tokens"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
        "response_format.schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_decoding_guide_type": "json"}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_decoding_guide_type": "yaml"}, "guided_decoding_guide_type"),
    ({"guided_decoding_guide": "w.*"}, "guided_decoding_guide_type"),
    ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide"),
    ({"lora_name": 5}, "lora_name"),
    ({"speculative": True}, "speculative"),
    ({"speculative": 4}, "speculative"),
    ({"speculative": {}}, "speculative.k"),
    ({"speculative": {"k": -1}}, "speculative.k"),
    ({"speculative": {"k": 33}}, "speculative.k"),
    ({"speculative": {"k": 1, "method": "ngram"}}, "speculative.method"),
    ({"temprature": 0}, "temprature"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ({"mirostat": 2}, "mirostat"),
    ({"do_sample": False}, "do_sample"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**65}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": 3}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"priority": -1}, "priority"),
    ({"timeout": -0.5}, "timeout"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_hit_threshold": 1.5}, "cache_hit_threshold"),
    ({"model": 5}, "model"),
]


_SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
_SCHEMA_TEXT = json.dumps(_SCHEMA, separators=(",", ":"))
_NAMED = {"name": "s", "schema": _SCHEMA}
_TAGS = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}


@pytest.mark.parametrize(("path", "base"), [(CHAT, HI), (TEXT, PROMPT)])
@pytest.mark.parametrize(
    ("fields", "kind", "text", "strict"),
    [
        ({"response_format": {"type": "json_object"}}, "json", "", False),
        ({"response_format": {"type": "json_object", "schema": _SCHEMA}}, "json_schema", _SCHEMA_TEXT, False),
        ({"response_format": {"type": "json_schema", "schema": _SCHEMA}}, "json_schema", _SCHEMA_TEXT, False),
        ({"response_format": {"type": "json_schema", "strict": True, **_NAMED}}, "json_schema", _SCHEMA_TEXT, True),
        ({"response_format": {"type": "json_schema", "json_schema": _NAMED}}, "json_schema", _SCHEMA_TEXT, False),
        (
            {"response_format": {"type": "json_schema", "json_schema": _NAMED | {"strict": True}}},
            "json_schema",
            _SCHEMA_TEXT,
            True,
        ),
        (
            {"response_format": {"type": "structural_tag", **_TAGS}},
            "structural_tag",
            json.dumps({"type": "structural_tag", **_TAGS}, separators=(",", ":")),
            False,
        ),
        ({"structured_outputs": {"json": _SCHEMA}}, "json_schema", _SCHEMA_TEXT, False),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]', False),
        ({"guided_json": _SCHEMA_TEXT}, "json_schema", _SCHEMA_TEXT, False),
        ({"guided_regex": "a+", "guided_decoding_backend": "outlines"}, "regex", "a+", False),
        ({"guided_choice": ["a"]}, "choice", '["a"]', False),
        ({"guided_grammar": "root ::= [a]"}, "ebnf_grammar", "root ::= [a]", False),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}, "regex", "a", False),
    ],
)
async def test_each_field_of_a_constraint_reaches_the_model(
    client: httpx.AsyncClient,
    gateway: Any,
    path: str,
    base: dict[str, Any],
    fields: Any,
    kind: str,
    text: str,
    strict: bool,
) -> None:
    assert (await client.post(path, json=base | fields)).status_code == 200
    constraint = gateway.asked[0].guided_decoding
    assert (constraint.kind, constraint.text, constraint.strict) == (kind, text, strict)


@pytest.mark.parametrize(("path", "base"), [(CHAT, HI), (TEXT, PROMPT)])
@pytest.mark.parametrize(("change", "param"), REFUSED)
async def test_refused_by_name(
    client: httpx.AsyncClient, gateway: Any, path: str, base: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    response = await client.post(path, content=json.dumps(base | change).encode())
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param.split("[")[0] in error["message"]
    assert not gateway.asked


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, b"", None),
        (TEXT, b"{", None),
        (TEXT, b"[]", None),
        (TEXT, b"\xff", None),
        (TEXT, b'{"a\\ud800": 1}', None),
        (TEXT, {"prompt": "x"}, "model"),
        (TEXT, PROMPT | {"continue_final_message": True}, "continue_final_message"),
        (TEXT, PROMPT | {"chat_template": "x"}, "chat_template"),
        (TEXT, PROMPT | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (TEXT, {"model": "llm"}, "prompt"),
        (TEXT, {"model": "llm", "prompt": []}, "prompt"),
        (TEXT, {"model": "llm", "prompt": 5}, "prompt"),
        (TEXT, {"model": "llm", "prompt": ["a", 1]}, "prompt"),
        (TEXT, {"model": "llm", "prompt": [-1]}, "prompt"),
        (TEXT, {"model": "llm", "prompt": [2**40]}, "prompt"),
        (TEXT, {"model": "llm", "prompt": [True]}, "prompt"),
        (TEXT, PROMPT | {"max_completion_tokens": 3}, "max_completion_tokens"),
        (TEXT, {"model": "llm", "prompt": ["a"] * 9, "n": 128}, "prompt"),
        (TEXT, PROMPT | {"echo": "yes"}, "echo"),
        (CHAT, HI | {"echo": "yes"}, "echo"),
        (TEXT, b'{"model": "llm", "prompt": "x", "tools": ' + b"[" * 300 + b"]" * 300 + b"}", "tools"),
        (TEXT, PROMPT | {"logprobs": 21}, "logprobs"),
        (CHAT, HI | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (TEXT, PROMPT | {"echo": True, "logprobs": 21}, "logprobs"),
        (TEXT, PROMPT | {"best_of": 2, "n": 3}, "best_of"),
        (TEXT, PROMPT | {"best_of": 0}, "best_of"),
        (TEXT, PROMPT | {"best_of": 129}, "best_of"),
        (TEXT, PROMPT | {"best_of": 2, "stream": True}, "best_of"),
        (TEXT, PROMPT | {"prompt": ["x"] * 9, "best_of": 128}, "prompt"),
        (CHAT, HI | {"best_of": 2}, "best_of"),
        (TEXT, PROMPT | {"suffix": "x"}, "suffix"),
        (CHAT, {"model": "llm"}, "messages"),
        (CHAT, {"model": "llm", "messages": []}, "messages"),
        (CHAT, {"model": "llm", "messages": "hi"}, "messages"),
        (CHAT, {"model": "llm", "messages": ["hi"]}, "messages[0]"),
        (CHAT, HI | {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, HI | {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (CHAT, HI | {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        (CHAT, HI | {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, HI | {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, HI | {"messages": [{"role": "user", "content": "x", "contents": 1}]}, "messages[0].contents"),
        (CHAT, HI | {"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        (CHAT, HI | {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        (
            CHAT,
            HI | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            CHAT,
            HI | {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            CHAT,
            HI | {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": [5]}]}]},
            "messages[0].content[0].thinking[0]",
        ),
        (
            CHAT,
            HI
            | {
                "messages": [
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}], "reasoning": "y"}
                ]
            },
            "messages[0].content",
        ),
        (
            CHAT,
            HI | {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (TEXT, PROMPT | {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHAT, HI | {"prediction": "x"}, "prediction"),
        (CHAT, HI | {"prediction": {"type": "content"}}, "prediction.content"),
        (CHAT, HI | {"prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        (CHAT, HI | {"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        (CHAT, HI | {"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0].type"),
        (CHAT, HI | {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, HI | {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, HI | {"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_malformed_bodies(
    client: httpx.AsyncClient, gateway: Any, path: str, body: Any, param: str | None
) -> None:
    response = await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert param is None or param in error["message"]
    assert not gateway.asked


async def test_clients_know_too_long_a_prompt_by_its_code(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts, gateway.error = (), ContextLengthExceeded("too long", field="messages")
    response = await client.post(CHAT, json=HI)
    error = {"message": "too long", "type": "invalid_request_error", "param": "messages"}
    assert (response.status_code, response.json()["error"]) == (400, {**error, "code": "context_length_exceeded"})


@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue(client: httpx.AsyncClient, gateway: Any, stream: bool) -> None:
    gateway.texts, gateway.error = (), QueueFull("2 requests are waiting already", retry_after=0.3)
    response = await client.post(CHAT, json=HI | {"stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"] == {
        "message": "2 requests are waiting already",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }


async def test_error_within_a_stream(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts, gateway.error = ("one",), Internal("the core died")
    chunks = events(await client.post(TEXT, json=PROMPT | {"stream": True}))
    assert chunks[0]["choices"][0]["text"] == "one"
    assert chunks[-1]["error"]["message"] == "the core died"
    assert chunks[-1]["error"]["type"] == "server_error"


async def test_an_unexpected_error(client: httpx.AsyncClient, gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    gateway.texts, gateway.error = (), RuntimeError("a secret")
    response = await client.post(CHAT, json=HI)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "Internal Server Error"
    assert "RuntimeError: a secret" in caplog.text


async def test_tokens_as_their_ids(client: httpx.AsyncClient) -> None:
    asked = {"logprobs": 1, "return_tokens_as_token_ids": True}
    told = (await client.post(TEXT, json=PROMPT | asked)).json()["choices"][0]["logprobs"]
    assert (told["tokens"], told["top_logprobs"][0]) == (
        ["token_id:1", "token_id:2"],
        {"token_id:0": -0.5, "token_id:1": -1},
    )
    assert told["text_offset"] == [0, 3]
    chat = (await client.post(CHAT, json=HI | asked | {"logprobs": True, "top_logprobs": 1})).json()
    first = chat["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == (
        "token_id:1",
        [111, 110, 101],
        "token_id:0",
    )


async def test_an_echoed_chat_begins_with_what_is_continued(client: httpx.AsyncClient) -> None:
    begun = HI | {"messages": [*HI["messages"], {"role": "assistant", "content": "zero "}], "echo": True}  # type: ignore[misc]
    begun |= {"continue_final_message": True, "add_generation_prompt": False}
    for echo, text in ((True, "zero one two"), (False, "one two")):
        whole = (await client.post(CHAT, json=begun | {"echo": echo, "n": 2})).json()["choices"]
        assert [each["message"]["content"] for each in whole] == [text] * 2
        chunks = events(await client.post(CHAT, json=begun | {"echo": echo, "stream": True}))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    asked = (await client.post(CHAT, json=HI | {"echo": True})).json()  # the user's words are not the answer's
    assert asked["choices"][0]["message"]["content"] == "one two"


async def test_a_finish_reason_has_a_chunk_of_its_own(client: httpx.AsyncClient) -> None:
    for path, body, empty in ((TEXT, PROMPT, {"text": ""}), (CHAT, HI, {"delta": {}})):
        *_, text, end = (chunk["choices"][0] for chunk in events(await client.post(path, json=body | {"stream": True})))
        assert text["finish_reason"] is None
        assert end == {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None, **empty}


async def test_paths_that_are_not_there_have_an_error_object(client: httpx.AsyncClient) -> None:
    for path in ("/nothing", "/v1/nothing", "/api/tags"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"Not Found: GET {path}"
    assert (await client.get("/v2/nothing")).json() == {"error": "Not Found"}


async def test_what_vllm_tells_of_the_server(client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    told = (await client.get("/tokenizer_info?model=llm")).json()
    assert told == {"tokenizer_class": "Fast", "model": "llm"}
    several = await client.get("/tokenizer_info")
    assert (several.status_code, several.json()["error"]["param"]) == (400, "model")
    unknown = await client.get("/tokenizer_info?model=x")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_what_sglang_tells_of_the_server(
    client: httpx.AsyncClient, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/server_info", "/model_info"):
        several = await client.get(path)
        assert (several.status_code, several.json()["error"]["param"]) == (400, "model")
    only, generates = gateway.model_configs()[0], []
    for outputs in ((), (TensorSpec("text_output", "BYTES", (-1,)),)):
        config = replace(only, outputs=outputs)
        monkeypatch.setattr(gateway, "model_configs", lambda config=config: [config])
        assert (await client.get("/server_info")).json() == {"served_model_name": "llm"}
        told = (await client.get("/model_info")).json()
        generates.append(told.pop("is_generation"))
        assert told == {"model_path": "llm", "tokenizer_path": "llm", "weight_version": only.version}
    assert generates == [False, True]


async def test_an_invocation_is_for_the_endpoint_that_its_body_is_of(client: httpx.AsyncClient, gateway: Any) -> None:
    for body, kind in ((HI, "chat.completion"), (PROMPT, "text_completion")):
        assert (await client.post("/invocations", json=body)).json()["object"] == kind
    assert [context.endpoint for context in gateway.contexts] == ["chat", "completions"]
    wrong = await client.post("/invocations", json={"model": "llm"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
