"""One rule for fields that nobody knows, on every endpoint: ignored and named, or refused if they look misspelled."""

from typing import Any

import httpx
import pytest

from charonia.api.openai.known_fields import Shape, ShapeByType, known_members
from charonia.core.errors import InvalidArgument
from charonia.core.request import Conversation

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}
TURN = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "clock"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
WARNING = "x-charonia-warning"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI),
        (TEXT, {"model": "llm", "prompt": "hi"}),
        ("/v1/responses", {"model": "llm", "input": "hi"}),
        ("/v1/responses/input_tokens", {"model": "llm", "input": "hi"}),
        ("/v1/messages", HI | {"max_tokens": 5}),
        ("/v1/messages/count_tokens", HI),
        ("/tokenize", {"model": "llm", "prompt": "hi"}),
        ("/detokenize", {"model": "llm", "tokens": [1]}),
        ("/invocations", HI),
    ],
)
async def test_every_endpoint_names_what_it_ignores(client: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await client.post(path, json=body | {"trace_id": 1, "verbosity": "low"})
    assert (answer.status_code, answer.headers[WARNING]) == (200, "ignored: trace_id, verbosity")
    assert WARNING not in (await client.post(path, json=body)).headers
    if path in (CHAT, TEXT, "/v1/responses", "/v1/messages"):
        streamed = await client.post(path, json=body | {"trace_id": 1, "stream": True})
        assert streamed.headers[WARNING] == "ignored: trace_id"


@pytest.mark.parametrize(
    ("path", "body", "places"),
    [
        (CHAT, {"messages": [TURN | {"timestamp": 1}]}, "messages[0].timestamp"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}]},
            "messages[0].content[0].cache_control",
        ),
        (
            CHAT,
            {
                "messages": [
                    TURN,
                    {"role": "assistant", "tool_calls": [CALL | {"extra_content": {}}], "annotations": [1]},
                ]
            },
            "messages[1].annotations, messages[1].tool_calls[0].extra_content",
        ),
        (CHAT, {"tools": [FUNCTION | {"cache_control": {}}]}, "tools[0].cache_control"),
        (CHAT, {"stream": True, "stream_options": {"flush": 1}}, "stream_options.flush"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "version": 1}}},
            "response_format.json_schema.version",
        ),
        ("/v1/messages", {"messages": [TURN | {"id": "m"}]}, "messages[0].id"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "origin": 1}]}]},
            "messages[0].content[0].origin",
        ),
        ("/v1/messages", {"tools": [{"name": "a", "input_schema": {}, "origin": 1}]}, "tools[0].origin"),
        ("/v1/messages", {"thinking": {"type": "adaptive", "origin": 1}}, "thinking.origin"),
        ("/v1/responses", {"input": [TURN | {"created_by": "me"}]}, "input[0].created_by"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "origin": 1}]}]},
            "input[0].content[0].origin",
        ),
        ("/v1/responses", {"tools": [{"type": "function", "name": "a", "origin": 1}]}, "tools[0].origin"),
        ("/v1/responses", {"reasoning": {"effort": "low", "context": "auto"}}, "reasoning.context"),
        (CHAT, {"tools": [FUNCTION | {"origin": 1, "custom": None}], "trace_id": None}, "tools[0].origin"),
    ],
)
async def test_what_is_ignored_within_is_named_by_its_place(
    client: httpx.AsyncClient, path: str, body: Any, places: str
) -> None:
    base: dict[str, Any] = {CHAT: HI, "/v1/messages": HI | {"max_tokens": 5}}.get(path, {"model": "llm", "input": "hi"})
    answer = await client.post(path, json=base | body)
    assert (answer.status_code, answer.headers[WARNING]) == (200, f"ignored: {places}"), answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI | {"temprature": 0}),
        (CHAT, HI | {"max_new_tokens": 5}),
        (CHAT, {"model": "llm", "messages": [TURN | {"contents": "x"}]}),
        (CHAT, HI | {"tools": [FUNCTION | {"strict": True}]}),
        ("/v1/responses", {"model": "llm", "input": "hi", "ec_transfer_params": {}}),
        ("/v1/messages", HI | {"max_tokens": 5, "use_beam_search": True}),
        ("/v1/messages", HI | {"max_tokens": 5, "kv_transfer_params": {"do_remote_decode": True}}),
    ],
)
async def test_what_would_change_the_answer_is_refused(client: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert WARNING not in answer.headers


@pytest.mark.parametrize(
    ("fields", "variables", "budget", "noted"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}, None, "enable_thinking"),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}, None, "thinking"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            {"enable_thinking": True, "thinking": True},
            9,
            "thinking",
        ),
        ({"thinking_budget": 9}, {}, 9, "thinking_budget"),
        ({"thinking_budget": 0, "thinking": True}, {"enable_thinking": True, "thinking": True}, 0, "thinking_budget"),
        ({"thinking_budget_tokens": 9}, {}, 9, "thinking_budget_tokens"),
        ({"thinking_budget_tokens": -1}, {}, None, "thinking_budget_tokens"),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}, None, "thinking"),
        (
            {"reasoning": {"effort": "low", "max_tokens": 7}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
            7,
            "reasoning",
        ),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": True},
            None,
            "enable_thinking",
        ),
    ],
)
async def test_other_services_ways_to_ask_for_reasoning_are_served(
    client: httpx.AsyncClient, gateway: Any, fields: Any, variables: Any, budget: int | None, noted: str
) -> None:
    answer = await client.post(CHAT, json=HI | fields)
    assert answer.status_code == 200
    assert f"{noted}: taken for " in answer.headers[WARNING]
    [asked] = gateway.asked
    assert isinstance(asked.prompt, Conversation)
    assert (asked.prompt.variables, asked.thinking_budget) == (variables, budget)
    assert not asked.needs_thinking_limit


async def test_a_budget_by_its_own_name_is_no_wish(client: httpx.AsyncClient, gateway: Any) -> None:
    assert (await client.post(CHAT, json=HI | {"thinking_token_budget": 5})).status_code == 200
    assert gateway.asked[0].needs_thinking_limit
    wrong = await client.post(CHAT, json=HI | {"reasoning": {"effort": "huge"}})
    assert wrong.json()["error"]["param"] == "reasoning.effort"
    wrong = await client.post(CHAT, json=HI | {"thinking_budget": -2})
    assert wrong.json()["error"]["param"] == "thinking_budget"


@pytest.mark.parametrize(
    ("fields", "budget", "notes"),
    [
        (
            {"thinking_budget": 3, "thinking_token_budget": 20, "thinking_budget_tokens": None},
            20,
            "thinking_budget: ignored beside another budget",
        ),
        (
            {"thinking_budget": 3, "reasoning": {"max_tokens": 5}},
            3,
            "reasoning: taken for reasoning_effort, chat_template_kwargs.enable_thinking, thinking_token_budget and "
            "include_reasoning; thinking_budget: taken for thinking_token_budget; "
            "reasoning.max_tokens: ignored beside another budget",
        ),
    ],
)
async def test_of_two_budgets_the_ignored_one_is_named(
    client: httpx.AsyncClient, gateway: Any, fields: Any, budget: int, notes: str
) -> None:
    answer = await client.post(CHAT, json=HI | fields)
    assert (answer.status_code, gateway.asked[0].thinking_budget, answer.headers[WARNING]) == (200, budget, notes)


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"model": "llm", "input": "hi"}), ("/v1/messages", HI)])
async def test_other_endpoints_take_a_budget_by_other_names_too(
    client: httpx.AsyncClient, gateway: Any, path: str, body: Any
) -> None:
    limit = {"max_tokens": 5} if path == "/v1/messages" else {}
    answer = await client.post(path, json=body | limit | {"thinking_budget": 3})
    assert (answer.status_code, gateway.asked[0].thinking_budget) == (200, 3)
    assert answer.headers[WARNING] == "thinking_budget: taken for thinking_token_budget"


@pytest.mark.parametrize("name", ["models", "parse_tool_calls", "reasoning_format"])
async def test_names_of_other_services_are_not_taken_for_misspelled_ones(client: httpx.AsyncClient, name: str) -> None:
    for path, body in ((CHAT, HI), (TEXT, {"model": "llm", "prompt": "hi"})):
        answer = await client.post(path, json=body | {name: "x"})
        assert (answer.status_code, answer.headers[WARNING]) == (200, f"ignored: {name}")
    answer = await client.post(TEXT, json={"model": "llm", "prompt": "hi", "thinking_budget": 5})
    assert answer.headers[WARNING] == "ignored: thinking_budget"


NULLED_CALL = {
    "id": "c1",
    "function": {"name": "clock", "arguments": "{}", "output": None},
    "index": None,
    "custom": None,
}
CHOICE = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_new_tokens": None, "temprature": None, "trace_id": None},
        {"response_format": {"type": "text", "json_schema": None, "schema": None, "strict": None}},
        {"response_format": {"type": "json_object", "json_schema": None, "schema": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}, "schema": None}},
        {"tools": [FUNCTION | {"strict": False, "custom": None, "name": None}]},
        {"tools": [{"function": {"name": "clock", "parameters": None, "input_schema": None}}]},
        {"tools": [{"type": "custom", "custom": {"name": "c", "format": None}, "function": None}]},
        {"tools": [FUNCTION], "tool_choice": CHOICE | {"custom": None}},
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "clock", "arguments": None}}},
        {"tools": [FUNCTION], "tool_choice": {"function": {"name": "clock"}}},
        {"messages": [TURN | {"name": None, "audio": None, "annotations": None, "contents": None}]},
        {"messages": [TURN, {"role": "assistant", "content": None, "tool_calls": [NULLED_CALL]}]},
        {"stream": True, "stream_options": {"include_usage": True, "include_usages": None}},
    ],
)
async def test_a_null_asks_for_nothing(client: httpx.AsyncClient, fields: Any) -> None:
    answer = await client.post(CHAT, json=HI | fields)
    assert (answer.status_code, answer.headers.get(WARNING)) == (200, None), answer.text


SHAPE = Shape(frozenset(("a", "b", "temperature")), {"b": ShapeByType({"x": Shape(frozenset(("type", "c")))})})


def test_a_body_without_unknown_fields_is_the_same_object() -> None:
    body = {"a": 1, "b": [{"type": "x", "c": 2}, {"type": "y", "d": 3}, 4]}
    known, warning = known_members(body, SHAPE)
    assert (known is body, warning) == (True, "")


def test_what_is_taken_out_leaves_the_body_as_it_was() -> None:
    body = {"a": 1, "z": 0, "b": [{"type": "x", "c": 2, "d": 3}]}
    known, warning = known_members(body, SHAPE)
    assert known == {"a": 1, "b": [{"type": "x", "c": 2}]}
    assert warning == "ignored: z, b[0].d"
    assert body["b"] == [{"type": "x", "c": 2, "d": 3}]


def test_many_places_are_counted_and_many_names_refused() -> None:
    many = {"b": [{"type": "x", "d": 0}] * 30}
    assert known_members(many, SHAPE).warning.endswith("b[23].d and 6 more")
    with pytest.raises(InvalidArgument, match="more than 64 different fields"):
        known_members({f"field {number}": 0 for number in range(65)}, SHAPE)
    assert known_members({"tempreature": 1}, SHAPE) == ({"tempreature": 1}, "")
