"""/v1/messages and /v1/messages/count_tokens: what is asked, content blocks, typed events, errors in their shape."""

import json
from hashlib import sha256
from typing import Any

import httpx
import pytest

from charonia.core.errors import ContextLengthExceeded, Internal, InvalidArgument, NotReady, QueueFull
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

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = {"model": "llm", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
SILENT = {"enable_thinking": False, "thinking": False}
THINKS = {"enable_thinking": True, "thinking": True}


def events(response: httpx.Response) -> list[Any]:
    """The JSON of every event, whose type is the event's name."""
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    read = [part.removeprefix("event: ").split("\ndata: ") for part in parts]
    assert all(json.loads(data)["type"] == name for name, data in read)
    return [json.loads(data) for _, data in read]


def chunk(text: str = "", reasoning: str = "", end: FinishReason | None = None, **fields: Any) -> GenerateChunk:
    fields = {"usage": Usage(9, 4, 3, 2)} | fields
    return GenerateChunk(text=text, reasoning=reasoning, token_ids=(1,), finish_reason=end, **fields)


USAGE = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 3,
    "output_tokens": 4,
    "output_tokens_details": {"thinking_tokens": 2},
}
ANSWER = (
    chunk(reasoning="let "),
    chunk(text="It ", reasoning="me"),
    chunk(text="is"),
    chunk(tool_calls=(ToolCallDelta(0, "c1", "clock", ""), ToolCallDelta(0, arguments='{"a"'))),
    chunk(tool_calls=(ToolCallDelta(0, arguments=":1}"), ToolCallDelta(1, "c2", "clock", "{}"))),
    chunk(end=FinishReason.STOP),
)
CONTENT = [
    {"type": "thinking", "thinking": "let me", "signature": sha256(b"let me").hexdigest()},
    {"type": "text", "text": "It is", "citations": None},
    {"type": "tool_use", "id": "c1", "name": "clock", "input": {"a": 1}},
    {"type": "tool_use", "id": "c2", "name": "clock", "input": {}},
]


async def test_a_message(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await client.post(MESSAGES, json=HI, headers={"x-request-id": "q7", "anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "q7"
    assert answer.json() == {
        "id": "msg_q7",
        "type": "message",
        "role": "assistant",
        "model": "llm",
        "content": [{"type": "text", "text": "one two", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE
        | {"input_tokens": 3, "cache_read_input_tokens": 2, "output_tokens": 2}
        | {"output_tokens_details": {"thinking_tokens": 0}},
    }
    [request] = gateway.asked
    assert (request.id, request.sampling.max_tokens, request.lenient_limits) == ("msg_q7", 20, True)
    assert request.reads_answer
    assert request.prompt == Conversation((ChatMessage("user", "hi"),), SILENT)
    assert gateway.contexts[0].endpoint == "messages"


async def test_blocks_of_an_answer(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = ANSWER
    answer = (await client.post(MESSAGES, json=HI)).json()
    assert answer["content"] == CONTENT
    assert (answer["stop_reason"], answer["usage"]) == ("tool_use", USAGE)


async def test_events_add_up_to_the_answer(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = ANSWER
    response = await client.post(MESSAGES, json=HI | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    start, *middle, end, stop = events(response)
    message = start["message"]
    begun = USAGE | {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
    assert (message["content"], message["stop_reason"], message["usage"]) == ([], None, begun)
    assert end == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": USAGE,
    }
    assert stop == {"type": "message_stop"}
    kinds = [(each["type"].removeprefix("content_block_"), each["index"]) for each in middle]
    assert kinds == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)],
        *[("start", 3), ("delta", 3), ("stop", 3)],
    ]
    assert [built(middle, index) for index in range(4)] == CONTENT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        (  # the token that breaks a call off brings the last of its arguments, and is text itself
            (
                chunk(tool_calls=(ToolCallDelta(0, "c1", "clock", "{}"),)),
                chunk("'", tool_calls=(ToolCallDelta(0, arguments=" "),)),
            ),
            [("tool_use", "c1", {}), ("text", "'")],
        ),
        (
            (
                chunk("So", tool_calls=(ToolCallDelta(0, "c1", "clock", "{"),)),
                chunk("then", tool_calls=(ToolCallDelta(0, arguments="}"), ToolCallDelta(1, "c2", "clock", "{"))),
                chunk(tool_calls=(ToolCallDelta(1, arguments="}"),)),
            ),
            [("text", "So"), ("tool_use", "c1", {}), ("text", "then"), ("tool_use", "c2", {})],
        ),
        (
            (chunk("So"), chunk(" it is", reasoning="hm"), chunk("!")),
            [("text", "So it is"), ("thinking", "hm"), ("text", "!")],
        ),
    ],
)
async def test_what_is_open_goes_on_first_in_a_chunk_of_several_kinds(
    client: httpx.AsyncClient, gateway: Any, chunks: Any, told: Any, stream: bool
) -> None:
    gateway.chunks = (*chunks, chunk(end=FinishReason.STOP))
    response = await client.post(MESSAGES, json=HI | {"stream": stream})
    if stream:
        middle = events(response)[1:-2]
        content = [built(middle, index) for index in range(middle[-1]["index"] + 1)]
    else:
        content = response.json()["content"]
    members = {"tool_use": ("id", "input"), "text": ("text",), "thinking": ("thinking",)}
    assert [(block["type"], *(block[name] for name in members[block["type"]])) for block in content] == told


def built(middle: list[Any], index: int) -> dict[str, Any]:
    """A content block, put together of its events as a client does."""
    [block] = [each["content_block"] for each in middle if each["type"].endswith("start") and each["index"] == index]
    text = ""
    for event in middle:
        if event["index"] == index and event["type"] == "content_block_delta":
            delta = event["delta"]
            text += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
            block |= {"signature": delta["signature"]} if delta["type"] == "signature_delta" else {}
    if block["type"] == "tool_use":
        return block | {"input": json.loads(text)}
    return block | {block["type"]: text} | ({"citations": None} if block["type"] == "text" else {})


@pytest.mark.parametrize(
    ("end", "stopped", "tokens", "told"),
    [
        (FinishReason.STOP, None, 4, ("end_turn", None)),
        (FinishReason.STOP, 17, 4, ("end_turn", None)),
        (FinishReason.STOP, "ab", 4, ("stop_sequence", "ab")),
        (FinishReason.LENGTH, None, 20, ("max_tokens", None)),
        (FinishReason.LENGTH, None, 19, ("model_context_window_exceeded", None)),
        (FinishReason.TIMEOUT, None, 4, ("pause_turn", None)),
        (FinishReason.CACHE_THRESHOLD, None, 4, ("pause_turn", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(
    client: httpx.AsyncClient,
    gateway: Any,
    end: FinishReason,
    stopped: Any,
    tokens: int,
    told: tuple[str, str | None],
    stream: bool,
) -> None:
    gateway.chunks = (chunk(text="x", end=end, stop_reason=stopped, usage=Usage(9, tokens)),)
    response = await client.post(MESSAGES, json=HI | {"stream": stream})
    end_of = events(response)[-2]["delta"] if stream else response.json()
    assert (end_of["stop_reason"], end_of["stop_sequence"]) == told


async def test_thinking_that_is_omitted(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = ANSWER
    asked = HI | {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = (await client.post(MESSAGES, json=asked)).json()
    streamed = events(await client.post(MESSAGES, json=asked | {"stream": True}))
    assert answer["content"] == [CONTENT[0] | {"thinking": ""}, *CONTENT[1:]]
    assert built(streamed[1:-2], 0) == answer["content"][0]


async def test_a_call_that_was_cut_is_no_error(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.chunks = (chunk(tool_calls=(ToolCallDelta(0, "c1", "clock", '{"a": '),), end=FinishReason.LENGTH),)
    answer = (await client.post(MESSAGES, json=HI)).json()
    assert answer["content"][0]["input"] == {"INVALID_JSON": '{"a": '}


TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "when", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "text", "text": "is it?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "c1", "name": "clock", "input": {"zone": "x"}},
            {"type": "tool_use", "id": "c2", "name": "clock", "input": {}, "caller": {"type": "direct"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "12"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "c1"},
            {"type": "text", "text": "Well?"},
        ],
    },
]
SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc=1; cch=2f"},
    {"type": "text", "text": "Be brief."},
    {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
]
CONVERSATION = (
    ChatMessage("system", "Be brief.\nBe kind."),
    ChatMessage("user", "when\nis it?"),
    ChatMessage(
        "assistant",
        "Let me look.",
        reasoning="hm",
        tool_calls=(ToolCall("c1", "clock", '{"zone":"x"}'), ToolCall("c2", "clock", "{}")),
    ),
    ChatMessage("tool", "Error: 12", tool_call_id="c2"),
    ChatMessage("tool", "", tool_call_id="c1"),
    ChatMessage("user", "Well?"),
)
STRICT = {"name": "date.now", "description": "d", "input_schema": {"properties": {}}, "type": "custom", "strict": True}
TOOLS = (
    Tool("clock", "", '{"type":"object","properties":{}}'),
    Tool("date.now", "d", '{"type":"object","properties":{}}', True),
)


async def test_turns_become_messages(client: httpx.AsyncClient, gateway: Any) -> None:
    asked = HI | {"system": SYSTEM, "messages": TURNS, "tools": [CLOCK, STRICT]}
    for path in (MESSAGES, COUNT):
        answer = await client.post(path, json=asked)
        assert answer.status_code == 200, answer.text
    expected = Conversation(CONVERSATION, SILENT, tools=TOOLS)
    assert gateway.asked[0].prompt == gateway.tokenized[0].prompt == expected
    assert answer.json() == {"input_tokens": 3}


async def test_count_needs_no_max_tokens(client: httpx.AsyncClient, gateway: Any) -> None:
    counted = {name: value for name, value in HI.items() if name != "max_tokens"}
    assert (await client.post(COUNT, json=counted)).json() == {"input_tokens": 3}
    assert gateway.contexts[0].endpoint == "tokenize"
    refused = await client.post(MESSAGES, json=counted)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "max_tokens is missing")


async def test_an_answer_goes_on_with_the_last_message(client: httpx.AsyncClient, gateway: Any) -> None:
    begun = [*HI["messages"], {"role": "assistant", "content": "The answer is ("}]  # type: ignore[misc]
    assert (await client.post(MESSAGES, json=HI | {"messages": begun})).status_code == 200
    prompt = gateway.asked[0].prompt
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    gateway.texts, gateway.error = (), InvalidArgument("continue_final_message: no", field="continue_final_message")
    refused = await client.post(MESSAGES, json=HI | {"messages": begun})
    assert refused.json()["error"]["message"] == "messages[1].content: no"


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        ({"type": "auto"}, ToolUse(TOOLS)),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolUse(TOOLS, "required", parallel=False)),
        ({"type": "tool", "name": "clock"}, ToolUse(TOOLS, "required", "clock")),
        ({"type": "none"}, ToolUse(TOOLS, "none")),
    ],
)
async def test_the_choice_of_a_tool(client: httpx.AsyncClient, gateway: Any, choice: Any, use: ToolUse) -> None:
    assert (await client.post(MESSAGES, json=HI | {"tools": [CLOCK, STRICT], "tool_choice": choice})).status_code == 200
    assert gateway.asked[0].tools == use


async def test_what_is_left_out_is_named(client: httpx.AsyncClient, gateway: Any) -> None:
    searching = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    hidden = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}],
    }
    turns = [*HI["messages"], hidden, *HI["messages"]]  # type: ignore[misc]
    for stream in (False, True):
        asked = HI | {"tools": [searching, CLOCK], "messages": turns, "stream": stream}
        answer = await client.post(MESSAGES, json=asked)
        assert answer.headers["x-charonia-warning"] == (
            "messages[1].content[0]: redacted thinking cannot be read here, and is left out; "
            'tools[0]: tools of type "web_search_20250305" are not served, and it is left out'
        )
    assert gateway.asked[0].tools == ToolUse(TOOLS[:1])


@pytest.mark.parametrize(
    ("fields", "variables", "budget"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 19}}, THINKS, 19),
        ({"thinking": {"type": "adaptive"}}, THINKS, None),
        ({"thinking": {"type": "disabled"}}, SILENT, None),
        ({"output_config": {"effort": "max"}}, SILENT | {"reasoning_effort": "max"}, None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, SILENT | {"enable_thinking": True}, None),
    ],
)
async def test_thinking(client: httpx.AsyncClient, gateway: Any, fields: Any, variables: Any, budget: Any) -> None:
    assert (await client.post(MESSAGES, json=HI | fields)).status_code == 200
    assert (gateway.asked[0].prompt.variables, gateway.asked[0].thinking_budget) == (variables, budget)


@pytest.mark.parametrize("name", ["output_format", "output_config"])
async def test_a_schema_of_the_answer(client: httpx.AsyncClient, gateway: Any, name: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    asked = {name: wanted if name == "output_format" else {"format": wanted}}
    assert (await client.post(MESSAGES, json=HI | asked)).status_code == 200
    constraint = gateway.asked[0].guided_decoding
    assert (constraint.kind, json.loads(constraint.text), constraint.strict) == (
        "json_schema",
        {"type": "object"},
        True,
    )


async def test_sampling_and_what_changes_nothing(client: httpx.AsyncClient, gateway: Any) -> None:
    common = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "container": None,
        "mirostat": 0,
    }
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop_sequences": ["a", "b"], "seed": 3, "timeout": 2.0}
    assert (await client.post(MESSAGES, json=HI | asked | common)).status_code == 200
    [request] = gateway.asked
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 3)
    assert (sampling.stop, request.timeout) == (("a", "b"), 2.0)


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": list(blocks)}]}


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
TEXT = {"type": "text", "text": "x"}
CALL = {"type": "tool_use", "id": "c1", "name": "clock", "input": {}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences"),
        ({"n": 1}, "n"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"messages": []}, "messages"),
        ({"system": "x", "messages": []}, "messages"),
        ({"system": [PICTURE]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "messages[0].contents"),
        (said("assistant", PICTURE), "messages[1].content[0].type"),
        (said("user", "x"), "messages[1].content[0]"),
        (said("user", CALL), "messages[1].content[0].type"),
        (said("user", {"type": "text"}), "messages[1].content[0].text"),
        (said("user", {"type": "text", "text": "x", "texts": 1}), "messages[1].content[0].texts"),
        (said("user", {"type": "tool_result", "tool_use_id": "c1"}), "messages[1].content[0].tool_use_id"),
        (said("assistant", CALL), "messages[1]"),
        (said("assistant", CALL | {"input": "{}"}), "messages[1].content[0].input"),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [TEXT, CALL | {"id": ""}]},
                    {"role": "user", "content": "x"},
                ]
            },
            "messages[0].content[1].id",
        ),
        (said("assistant", {"type": "text", "text": " "}), "messages[1].content"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [CLOCK | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124"}, CLOCK | {"input_schema": {"type": "array"}}]}, "tools[1].input_schema"),
        ({"tools": [{"type": "bash_20250124"}, CLOCK, CLOCK]}, "tools[2].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [CLOCK], "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, gateway: Any, fields: Any, field: str) -> None:
    answer = await client.post(MESSAGES, json=HI | fields)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert field in error["error"]["message"]
    assert "function" not in error["error"]["message"]
    assert not gateway.asked


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidArgument("bad"), 400, "invalid_request_error"),
        (QueueFull("full", retry_after=2), 429, "rate_limit_error"),
        (NotReady("not yet"), 503, "api_error"),
        (Internal("oh"), 500, "api_error"),
        (ContextLengthExceeded("9 tokens"), 400, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_a_model(
    client: httpx.AsyncClient, gateway: Any, error: Any, status: int, kind: str, stream: bool
) -> None:
    gateway.texts, gateway.error = (), error
    answer = await client.post(MESSAGES, json=HI | {"stream": stream})
    message = "prompt is too long: 9 tokens" if isinstance(error, ContextLengthExceeded) else error.message
    told = {"type": "error", "error": {"type": kind, "message": message}}
    assert (answer.status_code, answer.json()) == (status, told)


async def test_an_error_in_the_middle_is_an_event(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.error = Internal("oh")
    *before, last = events(await client.post(MESSAGES, json=HI | {"stream": True}))
    assert [each["type"] for each in before] == ["message_start", "content_block_start"] + ["content_block_delta"] * 2
    assert last == {"type": "error", "error": {"type": "api_error", "message": "oh"}}


async def test_errors_before_the_handler(client: httpx.AsyncClient) -> None:
    unknown = await client.post(MESSAGES, json=HI | {"model": "claude"})
    long = await client.post(MESSAGES, json=HI | {"system": "x" * 2000})
    wrong, missing = await client.get(MESSAGES), await client.post(f"{MESSAGES}/batches", json=HI)
    answers = (unknown, long, wrong, missing, await client.post(COUNT, content=b"{"))
    assert [(answer.status_code, answer.json()["error"]["type"]) for answer in answers] == [
        (404, "not_found_error"),
        (413, "request_too_large"),
        (405, "invalid_request_error"),
        (404, "not_found_error"),
        (400, "invalid_request_error"),
    ]
    assert {answer.json()["type"] for answer in answers} == {"error"}


async def test_a_model_of_tensors_answers(client: httpx.AsyncClient, gateway: Any) -> None:
    answer = await client.post(MESSAGES, json=HI | {"model": "chatting", "tools": [CLOCK], "stop_sequences": ["x"]})
    assert answer.json()["content"][0]["text"] == "one two"
    inputs = gateway.asked[0].inputs
    assert (inputs["max_tokens"].data.tolist(), inputs["stop"].data.tolist()) == ([[20]], [[b"x"]])
    refused = await client.post(MESSAGES, json=HI | {"model": "answering"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    named = await client.post(
        MESSAGES, json=HI | {"model": "chatting", "thinking": {"type": "enabled", "budget_tokens": 5}}
    )
    assert "thinking.budget_tokens" in named.json()["error"]["message"]


DOCUMENT = {
    "type": "document",
    "title": "notes",
    "source": {"type": "text", "media_type": "text/plain", "data": "a\nb"},
}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}}
PLAIN = {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "aGk="}}
FOUND = {"type": "search_result", "title": "t", "source": "https://x", "content": [{"type": "text", "text": "y"}]}
REFERENCE = {"type": "tool_reference", "tool_name": "clock"}


@pytest.mark.parametrize(
    "source", [{}, {"type": "base64"}, {"type": "base64", "data": "x"}, {"type": "url", "url": 5}, {"type": "magic"}]
)
async def test_an_image_without_a_source_is_refused(client: httpx.AsyncClient, source: dict[str, Any]) -> None:
    """It was taken for one that the model cannot read, and the client was told nothing."""
    image = {"type": "image", "source": source}
    answer = await client.post("/v1/messages", json={"model": "llm", "max_tokens": 5, **said("user", image)})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[1].content[0].source must be {type: base64, ")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (DOCUMENT, "notes\na\nb"),
        (PLAIN, "hi"),
        ({"type": "document", "source": {"type": "content", "content": [TEXT]}}, "x"),
        ({"type": "document", "source": {"type": "content", "content": "z"}}, "z"),
        (FOUND, "t\nhttps://x\ny"),
        (REFERENCE, "[tool: clock]"),
        (PICTURE, "[image, image/png: it is here, but this model cannot read it]"),
        (PDF, "[document, application/pdf: it is here, but this model cannot read it]"),
        (
            PLAIN | {"source": {"type": "url", "url": "https://x"}},
            "[document: it is here, but this model cannot read it",
        ),
    ],
)
async def test_what_a_tool_has_found_is_read_or_said_to_be_there(
    client: httpx.AsyncClient, gateway: Any, block: Any, text: str
) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [TEXT, block]}
    turns = [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result, TEXT]}]
    answer = await client.post(MESSAGES, json=HI | {"messages": turns})
    assert answer.status_code == 200
    [_, told, _] = gateway.asked[0].prompt.messages
    assert told.content.startswith(f"x\n{text}")
    unseen = "cannot read" in text
    assert ("takes none" in answer.headers.get("x-charonia-warning", "")) == unseen
    if block is not REFERENCE:
        await client.post(MESSAGES, json=HI | said("user", block))
        assert gateway.asked[1].prompt.messages[0].content.startswith(f"hi\n{text}")


async def test_blocks_of_anthropics_own_tools_are_left_out(client: httpx.AsyncClient, gateway: Any) -> None:
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    hits = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [searched, hits, TEXT]}]
    answer = await client.post(MESSAGES, json=HI | {"messages": [*turns, {"role": "user", "content": "so?"}]})
    assert [message.content for message in gateway.asked[0].prompt.messages] == ["hi", "x", "so?"]
    assert answer.headers["x-charonia-warning"] == (
        "messages[1].content[0]: server_tool_use is of Anthropic's own tools, and is left out; "
        "messages[1].content[1]: web_search_tool_result is of Anthropic's own tools, and is left out"
    )


async def test_a_message_begins_without_tokens_of_output(client: httpx.AsyncClient) -> None:
    begin, *_, end, _ = events(await client.post(MESSAGES, json=HI | {"stream": True}))
    assert (begin["message"]["usage"]["output_tokens"], begin["message"]["usage"]["input_tokens"]) == (0, 3)
    assert end["usage"]["output_tokens"] == 2
