"""/tokenize and /detokenize, in vLLM's shapes."""

from typing import Any

import httpx
import pytest

from charonia.core.request import ChatMessage, Conversation, TokenizeRequest

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
HI = [{"role": "user", "content": "hi"}]


async def test_tokenize(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await client.post(TOKENIZE, json={"model": "llm", "prompt": "hi"})
    assert answer.json() == {"count": 3, "max_model_len": None, "tokens": [1, 2, 3], "token_strs": None}
    await client.post(TOKENIZE, json={"model": "llm", "prompt": "", "add_special_tokens": False})
    await client.post(TOKENIZE, json={"model": "llm", "messages": HI, "add_generation_prompt": False})
    silent = {"enable_thinking": False}
    await client.post(TOKENIZE, json={"model": "llm", "messages": HI, "chat_template_kwargs": silent})
    chat = Conversation((ChatMessage("user", "hi"),))
    assert gateway.tokenized == [
        TokenizeRequest(prompt="hi"),
        TokenizeRequest(prompt="", add_special_tokens=False),
        TokenizeRequest(prompt=Conversation(chat.messages, add_generation_prompt=False)),
        TokenizeRequest(prompt=Conversation(chat.messages, silent)),
    ]


async def test_tokens_as_the_vocabulary_spells_them(client: httpx.AsyncClient) -> None:
    answer = await client.post(TOKENIZE, json={"model": "llm", "prompt": "hi", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["t1", "t2", "t3"]


async def test_detokenize(client: httpx.AsyncClient) -> None:
    assert (await client.post(DETOKENIZE, json={"model": "llm", "tokens": [7, 8]})).json() == {"prompt": "7 8"}


async def test_no_model_yet(client: httpx.AsyncClient, gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "model_configs", list)
    assert (await client.post(TOKENIZE, json={"prompt": "hi"})).status_code == 400
    gateway.is_ready = False
    answer = await client.post(TOKENIZE, json={"prompt": "hi"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("path", [TOKENIZE, DETOKENIZE])
async def test_a_wrong_method_is_refused_in_openai_s_shape(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == f"Method Not Allowed: GET {path}"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {"prompt": "hi"}, "model"),
        (TOKENIZE, {"model": "llm"}, "prompt"),
        (TOKENIZE, {"model": "llm", "prompt": "x", "messages": HI}, "prompt"),
        (TOKENIZE, {"model": "llm", "messages": []}, "messages"),
        (TOKENIZE, {"model": "llm", "messages": HI, "chat_template_kwargs": 5}, "chat_template_kwargs"),
        (TOKENIZE, {"model": "llm", "prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        (TOKENIZE, {"model": "llm", "prompt": "x", "chat_template": "x"}, "chat_template"),
        (TOKENIZE, {"model": "llm", "messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        (TOKENIZE, {"model": "llm", "prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        (TOKENIZE, {"model": "llm", "prompt": "x", "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        (TOKENIZE, {"model": "llm", "prompt": 5}, "prompt"),
        (DETOKENIZE, {"model": "llm"}, "tokens"),
        (DETOKENIZE, {"model": "llm", "tokens": ["x"]}, "tokens[0]"),
        (DETOKENIZE, {"model": "llm", "tokens": [], "token": 1}, "token"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
