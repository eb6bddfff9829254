"""/v1/responses: what becomes of its body, the answer's form, and refusals that name the field."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from charonia.api.anthropic.messages_request import parse_messages_body
from charonia.api.openai.responses_request import IgnoredOfResponses, ResponsesBody, parse_responses
from charonia.core.drafts import DraftLimit
from charonia.core.errors import ContextLengthExceeded, Internal, InvalidArgument, QueueFull
from charonia.core.request import (
    ChatMessage,
    Conversation,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    ToolCall,
    ToolCallDelta,
    Usage,
)

PATH = "/v1/responses"
HI = {"model": "llm", "input": "hi"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, each named as it is typed, numbered from 0 and valid for OpenAI's package."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENTS.validate_python(event)
        found.append(event)
    return found


def messages(gateway: Any) -> tuple[ChatMessage, ...]:
    """The messages that the model was asked with."""
    [request] = gateway.asked
    assert isinstance(request, GenerateRequest)
    assert isinstance(request.prompt, Conversation)
    return request.prompt.messages


async def test_a_text_is_answered(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await client.post(PATH, json=HI | {"metadata": {"k": "v"}, "store": True}, headers={"X-Request-Id": "q"})
    body = answer.json()
    Response.model_validate(body, strict=True)
    [item] = body["output"]
    assert item.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "one two", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "phase": None, "status": "completed", "content": [text]}
    assert (body["id"], body["object"], body["status"], body["model"]) == ("resp_q", "response", "completed", "llm")
    assert (body["store"], body["metadata"], body["incomplete_details"]) == (False, {"k": "v"}, None)
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert gateway.asked[0].id == "resp_q"
    assert "x-charonia-warning" not in answer.headers


async def test_a_stream_tells_the_answer_step_by_step(client: httpx.AsyncClient) -> None:
    told = events(await client.post(PATH, json=HI | {"stream": True, "stream_options": {"include_obfuscation": True}}))
    assert [each["type"].removeprefix("response.") for each in told] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert (told[0]["response"]["status"], told[0]["response"]["output"]) == ("in_progress", [])
    assert [each["delta"] for each in told[4:6]] == ["one", " two"]
    answer = told[-1]["response"]
    assert answer["output"] == [told[8]["item"]]
    assert answer["output"][0]["content"][0]["text"] == told[6]["text"] == "one two"
    assert answer["usage"]["total_tokens"] == 7


async def test_items_become_messages(client: httpx.AsyncClient, gateway: Any) -> None:
    given = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "h"}, {"type": "text", "text": "i"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "phase": "final_answer",
            "content": [{"type": "output_text", "text": "ho", "annotations": [], "logprobs": []}],
        },
        {"role": "system", "content": "from now on in French"},
        {"role": "user", "content": "again"},
    ]
    await client.post(PATH, json=HI | {"input": given, "instructions": "you are a poet"})
    assert messages(gateway) == (
        ChatMessage("system", "you are a poet\n\nbe brief"),
        ChatMessage("user", "h\ni"),
        ChatMessage("assistant", "ho"),
        ChatMessage("system", "from now on in French"),
        ChatMessage("user", "again"),
    )


async def test_an_answer_is_taken_back_as_input(client: httpx.AsyncClient, gateway: Any) -> None:
    first = (await client.post(PATH, json=HI)).json()
    gateway.asked.clear()
    given = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "more"}]
    await client.post(PATH, json=HI | {"input": given})
    assert [message.content for message in messages(gateway)] == ["hi", "one two", "more"]


async def test_sampling_and_limits_are_those_of_a_chat(client: httpx.AsyncClient, gateway: Any) -> None:
    asked = {"max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3, "priority": 2}
    asked |= {"speculative": {"k": 2}}
    body = (await client.post(PATH, json=HI | asked)).json()
    request = gateway.asked[0]
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.top_k) == (7, 0.5, 4)
    assert (request.sampling.seed, request.priority, request.drafts) == (3, 2, DraftLimit(2, "speculative.k"))
    assert (body["max_output_tokens"], body["temperature"], body["top_p"]) == (7, 0.5, 0.9)


@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2}]
)
async def test_logprobs_stand_beside_the_text(client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    part = (await client.post(PATH, json=HI | asked)).json()["output"][0]["content"][0]
    assert [logprob["token"] for logprob in part["logprobs"]] == ["one", " two"]
    assert [len(logprob["top_logprobs"]) for logprob in part["logprobs"]] == [2, 2]
    told = events(await client.post(PATH, json=HI | asked | {"stream": True}))
    deltas = [each["logprobs"] for each in told if each["type"] == "response.output_text.delta"]
    assert [*deltas[0], *deltas[1]] == part["logprobs"] == told[-1]["response"]["output"][0]["content"][0]["logprobs"]


async def test_a_schema_is_the_constraint_of_a_chat(client: httpx.AsyncClient, gateway: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "numbers", "schema": schema, "strict": True}
    body = (await client.post(PATH, json=HI | {"text": {"format": form}})).json()
    guided = gateway.asked[0].guided_decoding
    assert (guided.kind, json.loads(guided.text)) == ("json_schema", schema)
    assert guided.parameter == "text.format"
    assert body["text"] == {"format": form, "verbosity": "medium"}
    gateway.asked.clear()
    await client.post(PATH, json=HI | {"text": {"format": {"type": "text"}}})
    await client.post(PATH, json=HI | {"text": {"format": {"type": "json_object"}}})
    assert [each.guided_decoding and each.guided_decoding.kind for each in gateway.asked] == [None, "json"]


async def test_tools_that_nobody_can_call_are_left_out_and_named(client: httpx.AsyncClient, gateway: Any) -> None:
    tools = [{"type": "web_search"}, {"type": "shell"}, {"type": "caf\u00e9\n"}]
    answer = await client.post(PATH, json=HI | {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": True})
    assert answer.status_code == 200
    warning = answer.headers["x-charonia-warning"]
    assert all(word in warning for word in ("tools[0]", '"web_search"', "tools[1]", '"shell"', "tools[2]"))
    assert warning.isascii()
    assert answer.json()["tools"] == []
    streamed = await client.post(PATH, json=HI | {"tools": tools, "stream": True})
    assert streamed.headers["x-charonia-warning"] == warning


FIND = {
    "type": "function",
    "name": "find",
    "description": "looks it up",
    "parameters": {"type": "object"},
    "strict": True,
}
ADD = {"type": "function", "name": "add", "parameters": None, "strict": None}


@pytest.mark.parametrize(
    ("choice", "choosing", "named", "callable_ones"),
    [
        (None, "auto", "", ("find", "add")),
        ("required", "required", "", ("find", "add")),
        ({"type": "function", "name": "add"}, "required", "add", ("find", "add")),
        ({"type": "allowed_tools", "mode": "required", "tools": [FIND]}, "required", "", ("find",)),
    ],
)
async def test_functions_are_the_tools_of_a_chat(
    client: httpx.AsyncClient, gateway: Any, choice: Any, choosing: str, named: str, callable_ones: tuple[str, ...]
) -> None:
    tools = [{"type": "web_search"}, FIND, ADD]
    asked = HI | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    answer = await client.post(PATH, json=asked)
    [request] = gateway.asked
    assert [(tool.name, tool.strict) for tool in request.prompt.tools] == [("find", True), ("add", False)]
    assert (request.tools.choice, request.tools.named, request.tools.parallel) == (choosing, named, False)
    assert tuple(tool.name for tool in request.tools.tools) == callable_ones
    assert request.reads_answer
    Response.model_validate(answer.json())
    assert [tool["name"] for tool in answer.json()["tools"]] == ["find", "add"]
    assert answer.json()["tool_choice"] == (choice or "auto")


async def test_calls_and_their_results_go_round(client: httpx.AsyncClient, gateway: Any) -> None:
    usage = Usage(5, 3, 0, 1)
    calls = ToolCallDelta(0, "call_a", "find", '{"x": 1}'), ToolCallDelta(1, "call_b", "find", "{}")
    gateway.chunks = (
        GenerateChunk(text="", reasoning="hm", token_ids=(1,), usage=usage),
        GenerateChunk(text="wait", tool_calls=calls, token_ids=(2, 3), usage=usage, finish_reason=FinishReason.STOP),
    )
    first = (await client.post(PATH, json=HI | {"tools": [FIND]})).json()
    Response.model_validate(first)
    assert [each["type"] for each in first["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [each["id"] == each["call_id"] for each in first["output"][2:]] == [False, False]
    told = events(await client.post(PATH, json=HI | {"tools": [FIND], "stream": True}))
    assert [each["status"] for each in told[-1]["response"]["output"]] == ["completed"] * 4
    gateway.asked.clear()
    results = [
        {"type": "function_call_output", "call_id": "call_a", "output": "7"},
        {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "8"}]},
    ]
    given = [{"role": "user", "content": "hi"}, *first["output"], *results]
    await client.post(PATH, json=HI | {"tools": [FIND], "input": given})
    called = ToolCall("call_a", "find", '{"x": 1}'), ToolCall("call_b", "find", "{}")
    assert messages(gateway) == (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "wait", reasoning="hm", tool_calls=called),
        ChatMessage("tool", "7", tool_call_id="call_a"),
        ChatMessage("tool", "8", tool_call_id="call_b"),
    )


async def test_reasoning_effort_is_that_of_a_chat(client: httpx.AsyncClient, gateway: Any) -> None:
    asked = HI | {"reasoning": {"effort": "low", "summary": "auto"}, "input": [*ROUND]}
    body = (await client.post(PATH, json=asked)).json()
    assert gateway.asked[0].prompt.variables["reasoning_effort"] == "low"
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert [message.reasoning for message in messages(gateway)] == ["a", "b", ""]
    refused = await client.post(PATH, json=HI | {"reasoning": {"effort": "bogus"}})
    assert refused.json()["error"]["param"] == "reasoning.effort"
    assert "reasoning.effort must be one of" in refused.json()["error"]["message"]


ROUND = (
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}], "summary": []},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "go on"},
)


async def test_what_changes_nothing_is_accepted_and_said(client: httpx.AsyncClient) -> None:
    asked = {"text": {"verbosity": "low"}, "truncation": "auto", "user": "u", "service_tier": "flex", "store": False}
    asked |= {"prompt_cache_key": "k", "include": ["reasoning.encrypted_content"], "background": False, "prompt": None}
    given = [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "hi"}]
    answer = await client.post(PATH, json=HI | asked | {"input": given, "client_metadata": {"a": "b"}})
    body, warning = answer.json(), answer.headers["x-charonia-warning"]
    Response.model_validate(body)
    assert (body["truncation"], body["service_tier"], body["prompt_cache_key"]) == ("disabled", "default", "k")
    assert all(word in warning for word in ("text.verbosity", "truncation", "input[0]: encrypted"))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"instruction": 1}, "instruction"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "x"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["bogus"]}, "include[0]"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"truncation": "some"}, "truncation"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"formats": 1}}, "text.formats"),
        ({"text": {"format": {"type": "bogus"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tools": [{"type": "mcp"}, {"type": "function", "name": "?"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameter": 1}]}, "tools[0].parameter"),
        ({"tools": [{"type": "custom", "name": "?"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{"type": "custom", "name": "f", "format": "lark"}]}, "tools[0].format"),
        (
            {"tools": [{"type": "custom", "name": "f"}], "tool_choice": {"type": "custom", "name": "g"}},
            "tool_choice.name",
        ),
        (
            {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice.name",
        ),
        ({"instructions": 5}, "instructions"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input"),
        ({"input": [{"type": "compaction_trigger", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "local_shell_call_output", "id": "c", "output": "x"}]}, "input[0].id"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "contents": 1}]}, "input[0].contents"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ],
)
async def test_refusals_name_the_field(
    client: httpx.AsyncClient, gateway: Any, change: dict[str, Any], param: str
) -> None:
    response = await client.post(PATH, json=HI | change)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert not gateway.asked


@pytest.mark.parametrize(
    ("field", "items"),
    [
        ("input", [{"role": "user", "content": ""}] * 16385),
        ("tools", [{"type": "mcp"}] * 1025),
        ("tools", [{"type": "namespace", "name": "x", "tools": [{"name": f"t{number}"} for number in range(1025)]}]),
    ],
)
def test_lists_have_limits(field: str, items: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: [0-9]+ .*are more than the") as refused:
        parse_responses(HI | {field: items}, "1")
    assert refused.value.field == field


DEEP = '{"a": ' + "[" * 300 + "]" * 300 + "}"
NESTED = (
    "[" * 300 + "]" * 300,
    DEEP,
    f"[{DEEP}]",
    f'[{{"type": "function", "name": "f", "parameters": {DEEP}}}]',
    f'[{{"type": "custom", "name": "f", "format": {DEEP}}}]',
    f'[{{"type": "custom", "name": "f", "x_own": {DEEP}}}]',
    f'[{{"type": "local_shell", "x_own": {DEEP}}}]',
    f'[{{"type": "mcp", "name": "f", "format": {DEEP}}}]',
    f'{{"format": {{"type": "json_schema", "name": "x", "schema": {DEEP}}}}}',
    f'{{"type": "function", "name": "f", "function": {DEEP}}}',
    f'{{"type": "local_shell", "x_own": {DEEP}}}',
)
"""JSON that is read, and is nested too deeply to be written."""


async def test_what_is_repeated_can_be_written(client: httpx.AsyncClient) -> None:
    refused = 0
    for name in {*ResponsesBody.__struct_fields__, *IgnoredOfResponses.__struct_fields__, "temperature", "top_p"}:
        for value in NESTED:
            members = {"model": '"llm"', "input": '"hi"', name: value}
            body = ", ".join(f'"{key}": {text}' for key, text in members.items())
            answer = await client.post(PATH, content=f"{{{body}}}")
            assert answer.status_code in (200, 400), (name, value[:80], answer.text[:200])
            refused += answer.status_code == 400
    assert refused > 150


@pytest.mark.parametrize(
    ("members", "param"),
    [
        (f'"tools": [{{"type": "custom", "name": "f", "x_own": {DEEP}}}]', "tools"),
        (f'"tools": [{{"type": "local_shell", "x_own": {DEEP}}}]', "tools"),
        (
            f'"tools": [{{"type": "local_shell"}}], "tool_choice": {{"type": "local_shell", "x_own": {DEEP}}}',
            "tool_choice",
        ),
    ],
)
async def test_what_is_repeated_whole_and_is_too_deep_is_named(
    client: httpx.AsyncClient, members: str, param: str
) -> None:
    answer = await client.post(PATH, content=f'{{"model": "llm", "input": "hi", {members}}}')
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"] == f"{param} is nested too deeply for an answer that repeats it"


@pytest.mark.parametrize("levels", range(245, 255))
async def test_a_schema_is_repeated_or_refused(client: httpx.AsyncClient, levels: int) -> None:
    schema = '{"enum": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    for form in (
        f'"text": {{"format": {{"type": "json_schema", "name": "x", "schema": {schema}}}}}',
        f'"tools": [{{"type": "function", "name": "f", "parameters": {schema}}}]',
    ):
        for stream in ("true", "false"):
            body = f'{{"model": "llm", "input": "hi", "stream": {stream}, {form}}}'
            answer = await client.post(PATH, content=body)
            assert answer.status_code in (200, 400), answer.text[:200]
            assert "Recursion" not in answer.text


async def test_calls_of_tools_that_nobody_has_are_counted_as_json_counts(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json=HI | {"max_tool_calls": 8.0})).status_code == 200
    refused = await client.post(PATH, json=HI | {"max_tool_calls": 8.5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tool_calls")


def test_warnings_do_not_grow_with_what_they_tell_of() -> None:
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    given = [encrypted] * 1000 + [{"role": "user", "content": "hi"}]
    parsed = parse_responses(HI | {"input": given, "tools": [{"type": "mcp"}, {"type": "shell"}] * 500}, "1")
    assert [warning.partition(":")[0] for warning in parsed.warnings] == ["tools[0]", "tools[1]", "input[0]"]


async def test_an_empty_input_is_answered_as_openai_does(client: httpx.AsyncClient) -> None:
    for body in (
        {"model": "llm"},
        HI | {"input": ""},
        HI | {"input": []},
        {"model": "llm", "instructions": "be brief"},
    ):
        answer = await client.post(PATH, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "missing_required_parameter", "input")
        assert error["message"].startswith('One of "input" or "previous_response_id"')


def namespace(name: str, *tools: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [*tools], "description": ""} | members


LIST = {"type": "function", "name": "list", "description": "lists", "parameters": {"type": "object"}, "strict": False}


async def test_the_tools_of_a_namespace_are_called_by_both_names(client: httpx.AsyncClient, gateway: Any) -> None:
    usage = Usage(5, 3)
    calls = (
        ToolCallDelta(0, "call_a", "mcp__gh__list", '{"x": 1}'),
        ToolCallDelta(1, "call_b", "mcp__gh__patch", '{"input": "y"}'),
        ToolCallDelta(2, "call_c", "mcp__fs__list", "{}"),
        ToolCallDelta(3, "call_d", "mcp__gh__find", "{}"),
    )
    end = GenerateChunk(text="", tool_calls=calls, token_ids=(1,), usage=usage, finish_reason=FinishReason.STOP)
    gateway.chunks = (end,)
    hub = namespace("mcp__gh", LIST, {"type": "custom", "name": "patch"}, description="GitHub, read only.")
    plain = {"type": "function", "name": "mcp__gh__find"}
    asked = HI | {"tools": [hub, namespace("mcp__fs__", LIST, {"type": "web_search"}), plain]}
    answer = await client.post(PATH, json=asked)
    assert answer.headers["x-charonia-warning"].startswith('tools[1].tools[1]: tools of type "web_search"')
    body = answer.json()
    Response.model_validate(body)
    names = [(item["type"], item.get("namespace"), item["name"]) for item in body["output"]]
    assert names == [
        ("function_call", "mcp__gh", "list"),
        ("custom_tool_call", "mcp__gh", "patch"),
        ("function_call", "mcp__fs__", "list"),
        ("function_call", None, "mcp__gh__find"),
    ]
    assert body["tools"][:2] == [hub, namespace("mcp__fs__", LIST)]
    told = events(await client.post(PATH, json=asked | {"stream": True}))
    for kind in ("added", "done"):
        items = [event["item"] for event in told if event["type"] == f"response.output_item.{kind}"]
        assert [(item["type"], item.get("namespace"), item["name"]) for item in items] == names
    assert [event["name"] for event in told if event["type"].endswith("arguments.done")] == [
        "list",
        "list",
        plain["name"],
    ]
    tools = gateway.asked[0].prompt.tools
    assert [(tool.name, tool.description, tool.strict) for tool in tools] == [
        ("mcp__gh__list", "Of all tools whose names begin with mcp__gh__: GitHub, read only.\n\nlists", False),
        ("mcp__gh__patch", tools[1].description, True),
        ("mcp__fs__list", "lists", False),
        ("mcp__gh__find", "", False),
    ]
    gateway.asked.clear()
    results = [
        {"type": "function_call_output", "call_id": "call_a", "namespace": "mcp__gh", "name": "list", "output": "7"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": "8"},
    ]
    await client.post(PATH, json=asked | {"input": [{"role": "user", "content": "hi"}, *body["output"], *results]})
    assert [call.name for call in messages(gateway)[1].tool_calls] == [call.name for call in calls]


@pytest.mark.parametrize(
    ("choice", "named", "callable_ones"),
    [
        ({"type": "function", "namespace": "gh", "name": "list"}, "gh__list", 3),
        ({"type": "function", "name": "gh__list"}, "gh__list", 3),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "gh"}] * 2}, "", 2),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "namespace": "gh", "name": "patch"}, FIND],
            },
            "",
            2,
        ),
    ],
)
async def test_a_choice_names_tools_of_a_namespace(
    client: httpx.AsyncClient, gateway: Any, choice: Any, named: str, callable_ones: int
) -> None:
    tools = [FIND, namespace("gh", LIST, {"type": "custom", "name": "patch"})]
    answer = await client.post(PATH, json=HI | {"tools": tools, "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    [request] = gateway.asked
    assert (request.tools.named, len(request.tools.tools)) == (named, callable_ones)


async def test_a_tool_whose_type_is_null_is_a_function(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await client.post(
        PATH, json=HI | {"tools": [FIND | {"type": None}, namespace("gh", LIST | {"type": None})]}
    )
    assert (answer.status_code, "x-charonia-warning" in answer.headers) == (200, False), answer.text
    assert [tool.name for tool in gateway.asked[0].tools.tools] == ["find", "gh__list"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [FIND, namespace("")]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "gh"}]}, "tools[0].tools"),
        ({"tools": [namespace("gh", LIST, description=7)]}, "tools[0].description"),
        ({"tools": [namespace("g h", LIST)]}, "tools[0].tools[0].name"),
        ({"tools": [namespace("g" * 125, LIST)]}, "tools[0].tools[0].name"),
        ({"tools": [namespace("gh", LIST, LIST)]}, "tools[0].tools[1].name"),
        ({"tools": [namespace("gh", LIST), namespace("gh_", LIST)]}, "tools[1].tools[0].name"),
        ({"tools": [namespace("gh", LIST | {"parameters": {"type": "array"}})]}, "tools[0].tools[0].parameters"),
        ({"tools": [namespace("gh", LIST)], "tool_choice": {"type": "function", "name": "list"}}, "tool_choice.name"),
        (
            {
                "tools": [namespace("gh", LIST)],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "x"}]},
            },
            "tool_choice.tools[0].function.name",
        ),
        (
            {
                "tools": [namespace("gh", LIST)],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": []}]},
            },
            "tool_choice.tools[0].function.name",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "namespace": 7, "name": "f", "arguments": "{}"}]},
            "input[0].namespace",
        ),
    ],
)
async def test_what_is_wrong_in_a_namespace_is_named_by_its_place(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    refused = await client.post(PATH, json=HI | fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_items_that_openai_alone_reads_are_left_out_and_named(client: httpx.AsyncClient, gateway: Any) -> None:
    left_out = [
        {"type": "compaction", "id": "c", "encrypted_content": "x"},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "s", "output": []},
    ]
    answer = await client.post(PATH, json=HI | {"input": [*left_out, {"role": "user", "content": "hi"}]})
    assert messages(gateway) == (ChatMessage("user", "hi"),)
    warning = answer.headers["x-charonia-warning"]
    assert "input[0]: items of type compaction are encrypted, cannot be read here, and are left out" in warning
    assert "input[1]: items of type shell_call are of OpenAI's own tools" in warning


PATCH = {"type": "custom", "name": "patch", "description": "edits"}
SHELL = {"type": "local_shell"}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}


async def test_custom_tools_and_the_shell_go_round(client: httpx.AsyncClient, gateway: Any) -> None:
    usage = Usage(5, 3)
    pieces = [
        (ToolCallDelta(0, "call_a", "patch", '{"input": "a\\n'),),
        (ToolCallDelta(0, arguments="\\u00e9 \\ud83d"),),
        (ToolCallDelta(0, arguments='\\ude00\\""}'), ToolCallDelta(1, "call_b", "local_shell", '{"command": ["ls"]}')),
    ]
    end = GenerateChunk(text="", token_ids=(), usage=usage, finish_reason=FinishReason.STOP)
    gateway.chunks = (*(GenerateChunk(text="", tool_calls=piece, token_ids=(1,), usage=usage) for piece in pieces), end)
    asked = HI | {"tools": [PATCH | {"format": LARK}, SHELL]}
    answer = await client.post(PATH, json=asked)
    assert answer.headers["x-charonia-warning"].startswith("tools[0].format: not enforced: a lark grammar")
    body = answer.json()
    Response.model_validate(body)
    patch, shell = body["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", 'a\n\u00e9 \U0001f600"')
    assert (shell["type"], shell["action"]["command"]) == ("local_shell_call", ["ls"])
    assert [tool["type"] for tool in body["tools"]] == ["custom", "local_shell"]
    told = events(await client.post(PATH, json=asked | {"stream": True}))
    deltas = [each["delta"] for each in told if each["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["a\n", "\u00e9 ", '\U0001f600"']
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["custom_tool_call", "local_shell_call"]
    tools = gateway.asked[0].prompt.tools
    assert [(tool.name, tool.custom, tool.strict) for tool in tools] == [
        ("patch", True, True),
        ("local_shell", False, True),
    ]
    assert "start: /x/" in tools[0].description
    gateway.asked.clear()
    results = [
        {"type": "custom_tool_call_output", "call_id": "call_a", "output": "done"},
        {"type": "local_shell_call_output", "id": shell["id"], "output": "file"},
    ]
    await client.post(PATH, json=asked | {"input": [{"role": "user", "content": "hi"}, *body["output"], *results]})
    first, second = messages(gateway)[1].tool_calls
    assert (first.name, json.loads(first.arguments)) == ("patch", {"input": patch["input"]})
    assert (second.name, json.loads(second.arguments)) == ("local_shell", {"command": ["ls"], "env": {}})
    assert [(message.content, message.tool_call_id) for message in messages(gateway)[2:]] == [
        ("done", "call_a"),
        ("file", "call_b"),
    ]


async def test_a_pattern_of_a_custom_tool_is_enforced_and_it_can_be_forced(
    client: httpx.AsyncClient, gateway: Any
) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    for choice in (
        {"type": "custom", "name": "patch"},
        {"type": "allowed_tools", "mode": "required", "tools": [PATCH]},
    ):
        answer = await client.post(PATH, json=HI | {"tools": [PATCH | {"format": form}], "tool_choice": choice})
        assert "x-charonia-warning" not in answer.headers
    one, other = gateway.asked
    assert (one.tools.named, other.tools.choice) == ("patch", "required")
    assert json.loads(one.tools.tools[0].parameters)["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"


async def test_what_a_model_cannot_see_is_said_in_its_place(client: httpx.AsyncClient, gateway: Any) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,eA=="}
    given = [
        {"role": "user", "content": [picture, {"type": "input_text", "text": "look"}, picture]},
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [picture]},
        {"type": "web_search_call", "id": "x", "status": "completed"},
    ]
    answer = await client.post(PATH, json=HI | {"input": given})
    assert answer.status_code == 200
    user, _, result = messages(gateway)
    assert user.content.splitlines()[1] == "look"
    assert "image" in result.content
    assert answer.headers["x-charonia-warning"] == (
        "input[0].content[0]: this model takes none; the text says that there was one: image; "
        "input[3]: items of type web_search_call are of OpenAI's own tools, and left out"
    )


async def test_who_counts_on_state_is_told_what_to_send(client: httpx.AsyncClient) -> None:
    refused = (await client.post(PATH, json=HI | {"previous_response_id": "resp_1"})).json()["error"]["message"]
    assert "keeps no state: send the whole input" in refused
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = await client.request(method, f"{PATH}/resp_1{path}")
        error = answer.json()["error"]
        assert error["code"] is None
        assert (answer.status_code, error["message"]) == (
            404,
            "there is no response 'resp_1': this server keeps no state",
        )


async def test_the_input_can_be_counted(client: httpx.AsyncClient, gateway: Any) -> None:
    counted = await client.post(f"{PATH}/input_tokens", json=HI | {"instructions": "be brief"})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 3}
    assert [message.role for message in gateway.tokenized[0].prompt.messages] == ["system", "user"]


async def test_errors_of_the_model_name_the_fields_of_the_body(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts, gateway.error = (), ContextLengthExceeded("messages: too long", field="messages")
    for stream in (False, True):
        answer = await client.post(PATH, json=HI | {"stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["message"]) == (400, "input", "input: too long")
        assert error["code"] == "context_length_exceeded"


async def test_unknown_models_and_full_queues(client: httpx.AsyncClient, gateway: Any) -> None:
    unknown = await client.post(PATH, json=HI | {"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    gateway.texts, gateway.error = (), QueueFull("2 wait", retry_after=0.3)
    full = await client.post(PATH, json=HI | {"stream": True})
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")


async def test_an_error_within_a_stream_ends_it(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts, gateway.error = ("one",), Internal("the core died")
    told = events(await client.post(PATH, json=HI | {"stream": True}))
    *_, item, error, failed = told
    assert (item["type"], item["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (error["type"], error["message"], error["code"]) == ("error", "the core died", "server_error")
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["error"]["message"]) == ("failed", "the core died")
    assert failed["response"]["output"] == [item["item"]]


async def test_a_graph_answers_as_in_a_chat(client: httpx.AsyncClient, gateway: Any) -> None:
    body = (await client.post(PATH, json=HI | {"model": "answering"})).json()
    assert body["output"][0]["content"][0]["text"] == "one two"
    assert body["status"] == "completed"
    told = events(await client.post(PATH, json=HI | {"model": "answering", "stream": True}))
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "one two"
    refused = await client.post(PATH, json=HI | {"model": "answering", "temperature": 0.5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    refused = await client.post(PATH, json=HI | {"model": "completing"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    schema = {"format": {"type": "json_object"}}
    refused = await client.post(PATH, json=HI | {"model": "answering", "text": schema})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format")


@pytest.mark.parametrize("parse", [parse_responses, parse_messages_body])
def test_bodies_that_become_a_chat_bring_its_parameters_along(parse: Callable[..., Any]) -> None:
    targets = {"target_ttft_ms": 250, "target_itl_ms": 40, "speculative": {"k": 2}}
    messages = [{"role": "user", "content": "Hi"}]
    own = HI if parse is parse_responses else {"model": "llm", "max_tokens": 4, "messages": messages}
    (request,) = parse({**own, **targets}, "1").chat.requests
    assert (request.target_ttft_ms, request.target_itl_ms) == (250, 40)
    assert request.drafts.most == 2
