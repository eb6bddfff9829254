"""Tools and reasoning in chats: what is asked, what comes back, and refusals that name the field."""

import json
from typing import Any

import httpx
import pytest

from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.core.request import (
    ChatMessage,
    Conversation,
    FinishReason,
    GenerateChunk,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolUse,
    Usage,
)

from .test_openai import CHAT, HI, USAGE, events

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "How it is outside",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = (
    Tool(
        "get_weather", "How it is outside", json.dumps(WEATHER["function"]["parameters"], separators=(",", ":")), True
    ),  # type: ignore[index]
    Tool("clock", "", '{"type":"object","properties":{}}'),
)
ASKING = HI | {"tools": [WEATHER, CLOCK]}


def call(name: str, **members: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}} | members


def chunk(text: str = "", reasoning: str = "", end: FinishReason | None = None, **fields: Any) -> GenerateChunk:
    return GenerateChunk(
        text=text, reasoning=reasoning, token_ids=(1,), usage=Usage(5, 9, 0, 4), finish_reason=end, **fields
    )


def deltas(*pieces: tuple[int, str, str, str]) -> tuple[ToolCallDelta, ...]:
    return tuple(ToolCallDelta(*piece) for piece in pieces)


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, ToolUse(TOOLS)),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ToolUse(TOOLS)),
        ({"tool_choice": "none"}, ToolUse(TOOLS, "none")),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolUse(TOOLS, "required", parallel=False)),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, ToolUse(TOOLS, "required", "clock")),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}}},
            ToolUse(TOOLS[1:], "required"),
        ),
    ],
)
async def test_tools_and_their_choice(
    client: httpx.AsyncClient, gateway: Any, fields: dict[str, Any], use: ToolUse
) -> None:
    answer = await client.post(CHAT, json=ASKING | fields)
    assert answer.status_code == 200, answer.text
    [request] = gateway.asked
    assert request.tools == use
    assert request.reads_answer
    assert request.prompt == Conversation((ChatMessage("user", "hi"),), tools=TOOLS)


async def test_tokenize_knows_tools(client: httpx.AsyncClient, gateway: Any) -> None:
    assert (await client.post("/tokenize", json=ASKING)).status_code == 200
    assert gateway.tokenized[0].prompt == Conversation((ChatMessage("user", "hi"),), tools=TOOLS)


async def test_a_conversation_with_calls_and_results(client: httpx.AsyncClient, gateway: Any) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call("clock"), call("get_weather", id="c2", index=1)]},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12:00", "name": "clock"},
        {"role": "assistant", "content": None, "reasoning": "r", "reasoning_content": "r", "refusal": None},
        {"role": "assistant", "content": "it rains", "reasoning_content": "hm", "tool_calls": []},
    ]
    answer = await client.post(CHAT, json=HI | {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert gateway.asked[0].prompt.messages == (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "clock", "{}"), ToolCall("c2", "get_weather", "{}"))),
        ChatMessage("tool", "ra\nin", tool_call_id="c2", breaks=(2,)),
        ChatMessage("tool", "12:00", "clock", tool_call_id="c1"),
        ChatMessage("assistant", "", reasoning="r"),
        ChatMessage("assistant", "it rains", reasoning="hm"),
    )


ANSWER = (
    chunk(reasoning="let me"),
    chunk(reasoning=" see"),
    chunk(text="Look:", reasoning="."),
    chunk(tool_calls=deltas((0, "c1", "clock", "{"), (0, "", "", "}"), (1, "c2", "get_weather", ""))),
    chunk(tool_calls=deltas((1, "", "", '{"city":"x"}'))),
    chunk(end=FinishReason.STOP),
)
CALLS = [call("clock"), call("get_weather", id="c2", function={"name": "get_weather", "arguments": '{"city":"x"}'})]


async def test_a_type_that_is_null_is_that_of_a_function(client: httpx.AsyncClient, gateway: Any) -> None:
    untyped = CLOCK | {"type": None}
    choice = {"type": None, "function": {"name": "clock"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    asked = said({"role": "assistant", "tool_calls": [call("clock", type=None)]}, result)
    answer = await client.post(CHAT, json=HI | asked | {"tools": [untyped], "tool_choice": choice})
    assert (answer.status_code, "x-charonia-warning" in answer.headers) == (200, False), answer.text
    [request] = gateway.asked
    assert (request.tools.named, request.prompt.messages[1].tool_calls[0].name) == ("clock", "clock")


async def test_calls_and_reasoning_of_an_answer(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = ANSWER
    body = (await client.post(CHAT, json=ASKING)).json()
    [choice] = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Look:",
        "refusal": None,
        "reasoning": "let me see.",
        "reasoning_content": "let me see.",
        "tool_calls": CALLS,
    }
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


async def test_calls_alone_have_no_content(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = (chunk(tool_calls=deltas((0, "c1", "clock", "{}")), end=FinishReason.LENGTH),)
    [choice] = (await client.post(CHAT, json=ASKING)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call("clock")]}
    assert choice["finish_reason"] == "length"


async def test_deltas_add_up_to_the_answer(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = ANSWER
    *chunks, last = events(await client.post(CHAT, json=ASKING | {"stream": True, "stream_options": USAGE}))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning": "let me", "reasoning_content": "let me"},
        {"reasoning": " see", "reasoning_content": " see"},
        {"reasoning": ".", "reasoning_content": ".", "content": "Look:"},
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{"}},
                {"index": 0, "function": {"arguments": "}"}},
                {"index": 1, "id": "c2", "type": "function", "function": {"name": "get_weather", "arguments": ""}},
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"city":"x"}'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["tool_calls"]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_can_be_left_out(client: httpx.AsyncClient, gateway: Any, stream: bool) -> None:
    gateway.chunks = ANSWER
    response = await client.post(CHAT, json=ASKING | {"include_reasoning": False, "stream": stream})
    assert 'reasoning"' not in response.text
    assert "let me" not in response.text
    assert "Look:" in response.text


async def test_each_choice_has_its_own_end(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = ANSWER
    chunks = events(await client.post(CHAT, json=ASKING | {"stream": True, "n": 2}))
    ends = {(chunk["choices"][0]["index"], chunk["choices"][0]["finish_reason"]) for chunk in chunks}
    assert ends == {(0, None), (1, None), (0, "tool_calls"), (1, "tool_calls")}


THINKS = {"enable_thinking": True, "thinking": True}
SILENT = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "variables", "budget"),
    [
        ({"reasoning_effort": "max"}, THINKS | {"reasoning_effort": "max"}, None),
        ({"reasoning_effort": "none"}, SILENT | {"reasoning_effort": "none"}, None),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            THINKS | {"reasoning_effort": "low", "thinking": False},
            None,
        ),
        ({"thinking_token_budget": 7}, {}, 7),
        ({"thinking_token_budget": 0}, {}, 0),
        ({"thinking_token_budget": -1}, {}, None),
    ],
)
async def test_reasoning_is_asked_for(
    client: httpx.AsyncClient, gateway: Any, fields: dict[str, Any], variables: dict[str, Any], budget: int | None
) -> None:
    assert (await client.post(CHAT, json=HI | fields)).status_code == 200
    assert gateway.asked[0].prompt.variables == variables
    assert gateway.asked[0].thinking_budget == budget


async def test_reasoning_stays_in_the_text(client: httpx.AsyncClient, gateway: Any) -> None:
    assert (await client.post(CHAT, json=HI | {"separate_reasoning": False})).status_code == 200
    assert not gateway.asked[0].reads_answer


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [CLOCK, {"type": "function", "function": {"name": "t"} | function}]}


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def said(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, *messages]}


CHOSEN = {"type": "function", "function": {"name": "x"}}
CALLING = {"role": "assistant", "tool_calls": [call("clock")]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["clock"]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "mcp": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [CLOCK | {"strict": True}]}, "tools[0].strict"),
        (tool(name="has space"), "tools[1].function.name"),
        (tool(name=""), "tools[1].function.name"),
        (tool(name="x" * 129), "tools[1].function.name"),
        (tool(name="clock\n"), "tools[1].function.name"),
        (tool(name="clock"), "tools[1].function.name"),
        (tool(description=5), "tools[1].function.description"),
        (tool(strict="yes"), "tools[1].function.strict"),
        (tool(input_schema={}), "tools[1].function.input_schema"),
        (tool(parameters=[]), "tools[1].function.parameters"),
        (tool(parameters={"type": "array"}), "tools[1].function.parameters"),
        (tool(parameters=deep(64)), "tools[1].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": CHOSEN}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [CLOCK], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": CHOSEN}, "tool_choice.function.name"),
        ({"tools": [CLOCK], "tool_choice": CHOSEN | {"name": "clock"}}, "tool_choice.name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHOSEN]}},
            },
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": {"name": "x"}}, "function_call"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"tools": [CLOCK], "separate_reasoning": False}, "separate_reasoning"),
        (said({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
        (said({"role": "tool", "content": "x", "tool_call_id": "c1"}), "messages[1].tool_call_id"),
        (said(CALLING, {"role": "tool", "content": "x", "tool_call_id": "c2"}), "messages[2].tool_call_id"),
        (said({"role": "tool", "content": "x", "tool_call_id": "c1"}, CALLING), "messages[1].tool_call_id"),
        (said(CALLING, {"role": "tool", "tool_call_id": "c1"}), "messages[2].content"),
        (said({"role": "assistant"}), "messages[1].content"),
        (said({"role": "user", "content": "x", "tool_calls": [call("clock")]}), "messages[1].tool_calls"),
        (said({"role": "user", "content": "x", "reasoning": "x"}), "messages[1].reasoning"),
        (said({"role": "assistant", "content": "x", "tool_call_id": "c1"}), "messages[1].tool_call_id"),
        (said({"role": "assistant", "tool_calls": [call("x", id="")]}), "messages[1].tool_calls[0].id"),
        (said({"role": "assistant", "tool_calls": [call("x", type="custom")]}), "messages[1].tool_calls[0].custom"),
        (said({"role": "assistant", "tool_calls": [call("x", type="mcp")]}), "messages[1].tool_calls[0].type"),
        (said({"role": "assistant", "tool_calls": [{"id": "c1"}]}), "messages[1].tool_calls[0].function"),
        (
            said({"role": "assistant", "tool_calls": [call("x", function={"name": "x", "arguments": {}})]}),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            said({"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}),
            "messages[1].reasoning_content",
        ),
    ],
)
async def test_refusals_name_the_field(
    client: httpx.AsyncClient, gateway: Any, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(CHAT, json=HI | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not gateway.asked


def named(count: int) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": f"t{number}"}} for number in range(count)]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (tool(parameters=deep(62)), None),
        (tool(parameters={"enum": ["x" * 65_000]}), None),
        (tool(parameters={"enum": ["x" * 65_600]}), "tools[1].function.parameters"),
        (named(1024), None),
        (named(1025), "tools"),
    ],
)
async def test_many_and_long_tools(gateway: Any, fields: dict[str, Any], param: str | None) -> None:
    transport = httpx.ASGITransport(build_app(gateway, ServerInfo("triton", "9.9", max_input_size=100_000)))
    async with httpx.AsyncClient(transport=transport, base_url="http://charonia") as client:
        answer = await client.post(CHAT, json=HI | fields)
    assert (answer.status_code, answer.json().get("error", {}).get("param")) == (400 if param else 200, param)


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "edits"}}


async def test_custom_tools_take_a_text(client: httpx.AsyncClient, gateway: Any) -> None:
    pieces = [
        deltas((0, "c1", "patch", '{"input": "a')),
        deltas((0, "", "", '\\n b"}')),
        deltas((1, "c2", "clock", "{}")),
    ]
    gateway.chunks = (*(chunk(tool_calls=piece) for piece in pieces), chunk(end=FinishReason.STOP))
    asked = HI | {"tools": [PATCH, CLOCK]}
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "a\n b"}}
    message = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]
    assert message["tool_calls"] == [custom, call("clock", id="c2")]
    streamed = events(await client.post(CHAT, json=asked | {"stream": True}))
    told = [each for event in streamed for each in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [each["custom"]["input"] for each in told if "custom" in each] == ["a", "\n b"]
    assert told[0]["type"] == "custom"
    gateway.asked.clear()
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    await client.post(CHAT, json=asked | {"messages": [*HI["messages"], message, result]})  # type: ignore[misc]
    assert gateway.asked[0].prompt.messages[1].tool_calls[0] == ToolCall("c1", "patch", '{"input":"a\\n b"}')


async def test_a_custom_tool_is_forced_and_its_grammar_named(client: httpx.AsyncClient, gateway: Any) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x/"}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
    choice = {"type": "custom", "custom": {"name": "patch"}}
    answer = await client.post(CHAT, json=HI | {"tools": [tool], "tool_choice": choice})
    assert answer.headers["x-charonia-warning"].startswith("tools[0].custom.format: not enforced: a lark grammar")
    [use] = [each.tools for each in gateway.asked]
    assert (use.named, use.tools[0].custom, use.tools[0].strict) == ("patch", True, True)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format.grammar",
        ),
        ({"tools": [PATCH], "tool_choice": {"type": "custom", "custom": {"name": "b"}}}, "tool_choice.custom.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
    ],
)
async def test_wrong_custom_tools_are_named(client: httpx.AsyncClient, change: Any, param: str) -> None:
    answer = await client.post(CHAT, json=HI | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
