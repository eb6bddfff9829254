"""The answer to a /v1/responses body: its output items as they grow, and the events that tell of them.

Knows nothing of HTTP: the events are numbered objects, whoever sends them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import uuid4

import orjson

from ...core.errors import CharoniaError
from ...core.logprobs import TokenLogprob
from ...core.request import FinishReason, GenerateChunk, ToolCallDelta, Usage
from ..http.error_responses import printable, status_of
from .custom_tools import CustomInput
from .token_logprobs import token_entries

JsonObject: TypeAlias = dict[str, Any]

_REASONING, _MESSAGE = "reasoning", "message"

_STATUS = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.TIMEOUT: "incomplete",
    FinishReason.CACHE_THRESHOLD: "incomplete",
    FinishReason.ABORT: "failed",
    FinishReason.ERROR: "failed",
}
_ENDED = "the answer was ended before it was complete"
_INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.TIMEOUT: "timeout",
    FinishReason.CACHE_THRESHOLD: "cache_threshold",
}


def _item_event(name: str, place: JsonObject, item: JsonObject) -> JsonObject:
    return {"type": f"response.output_item.{name}", "output_index": place["output_index"], "item": item}


class TextItem:
    """An output item of one text: a message of the assistant's, or reasoning."""

    def __init__(self, kind: str, item_id: str, place: int) -> None:
        self.key: str | int = kind
        self._is_message = kind == _MESSAGE
        self._name = "response.output_text" if self._is_message else "response.reasoning_text"
        self._id = item_id
        self._at = {"item_id": item_id, "output_index": place, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[orjson.Fragment] = []

    def added(self) -> Iterator[JsonObject]:
        yield _item_event("added", self._at, self.json("in_progress") | {"content": []})
        yield {"type": "response.content_part.added", **self._at, "part": self._part()}

    def delta(self, text: str, logprobs: list[orjson.Fragment]) -> Iterator[JsonObject]:
        self.grow(text, logprobs)
        yield self.delta_event(text, logprobs)

    def grow(self, text: str, logprobs: list[orjson.Fragment]) -> None:
        """Grow by a text whose event the caller makes."""
        self._texts.append(text)
        if logprobs:
            self._logprobs += logprobs

    def delta_event(self, text: str, logprobs: Sequence[Any]) -> JsonObject:
        return {"type": f"{self._name}.delta", **self._at, "delta": text, **self._shown(logprobs)}

    def done(self, status: str) -> Iterator[JsonObject]:
        part = self._part()
        yield {"type": f"{self._name}.done", **self._at, "text": part["text"], **self._shown(self._logprobs)}
        yield {"type": "response.content_part.done", **self._at, "part": part}
        yield _item_event("done", self._at, self.json(status))

    def json(self, status: str) -> JsonObject:
        if self._is_message:
            head: JsonObject = {"type": _MESSAGE, "id": self._id, "role": "assistant", "phase": None}
        else:
            head = {"type": _REASONING, "id": self._id, "summary": [], "encrypted_content": None}
        return {**head, "status": status, "content": [self._part()]}

    def _part(self) -> JsonObject:
        text = "".join(self._texts)
        if self._is_message:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "reasoning_text", "text": text}

    def _shown(self, logprobs: Sequence[Any]) -> JsonObject:
        return {"logprobs": [*logprobs]} if self._is_message else {}


CallKind: TypeAlias = Literal["function_call", "custom_tool_call", "local_shell_call"]


class CalledTool(NamedTuple):
    """How calls of a tool are shown."""

    kind: CallKind
    name: str
    """The name that the client gave it."""
    namespace: str = ""
    """Empty of a tool outside of all."""


class CallItem:
    def __init__(self, first: ToolCallDelta, tool: CalledTool, item_id: str, place: int) -> None:
        self.key: str | int = first.index
        self._head = {"type": tool.kind, "id": item_id, "call_id": first.id, "name": tool.name}
        if tool.namespace:
            self._head["namespace"] = tool.namespace
        self._at = {"item_id": item_id, "output_index": place}
        self._arguments: list[str] = []

    def added(self) -> Iterator[JsonObject]:
        yield _item_event("added", self._at, self.json("in_progress"))

    def delta(self, arguments: str) -> Iterator[JsonObject]:
        if arguments:
            self._arguments.append(arguments)
            yield {"type": "response.function_call_arguments.delta", **self._at, "delta": arguments}

    def done(self, status: str) -> Iterator[JsonObject]:
        item = self.json(status)
        call = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **self._at, **call}
        yield _item_event("done", self._at, item)

    def json(self, status: str) -> JsonObject:
        return {**self._head, "arguments": "".join(self._arguments), "status": status}


class CustomCallItem(CallItem):
    """An output item that is a call of a custom tool, whose input is a text."""

    def __init__(self, first: ToolCallDelta, tool: CalledTool, item_id: str, place: int) -> None:
        super().__init__(first, tool, item_id, place)
        self._reader = CustomInput()

    def delta(self, arguments: str) -> Iterator[JsonObject]:
        yield from self._told(self._reader.push(arguments))

    def done(self, status: str) -> Iterator[JsonObject]:
        yield from self._told(self._reader.finish())
        item = self.json(status)
        yield {"type": "response.custom_tool_call_input.done", **self._at, "input": item["input"]}
        yield _item_event("done", self._at, item)

    def json(self, status: str) -> JsonObject:
        return {**self._head, "input": "".join(self._arguments), "status": status}

    def _told(self, text: str) -> Iterator[JsonObject]:
        if text:
            self._arguments.append(text)
            yield {"type": "response.custom_tool_call_input.delta", **self._at, "delta": text}


class ShellCallItem(CallItem):
    """An output item that is a call of OpenAI's local shell."""

    def __init__(self, first: ToolCallDelta, tool: CalledTool, item_id: str, place: int) -> None:
        super().__init__(first, tool, item_id, place)
        del self._head["name"]

    def delta(self, arguments: str) -> Iterator[JsonObject]:
        self._arguments.append(arguments)
        yield from ()

    def done(self, status: str) -> Iterator[JsonObject]:
        yield _item_event("done", self._at, self.json(status))

    def json(self, status: str) -> JsonObject:
        """The item; a command that a limit cut off is empty."""
        action: JsonObject = {"type": "exec", "command": [], "env": {}}
        with suppress(TypeError, ValueError):
            action |= orjson.loads("".join(self._arguments))
        return {**self._head, "action": action, "status": status}


_CALL_ITEMS: dict[CallKind, tuple[type[CallItem], str]] = {
    "function_call": (CallItem, "fc"),
    "custom_tool_call": (CustomCallItem, "ctc"),
    "local_shell_call": (ShellCallItem, "lsh"),
}
"""By the type of a call: its item, and what the item's id begins with."""

_FUNCTIONS_ALONE: Mapping[str, CalledTool] = MappingProxyType({})


class ResponseOutput:
    """The answer to one request, from its first chunk to its end, of at least one item.

    `begin` is called first, `add` for each chunk, then `end` or `fail`: each returns the events of what it did. `echo`:
    the members that repeat the request. `called`: by the model's names of tools whose calls are shown otherwise than as
    functions of these names, how they are.
    """

    def __init__(
        self, response_id: str, echo: JsonObject, logprobs: bool, called: Mapping[str, CalledTool] = _FUNCTIONS_ALONE
    ) -> None:
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())} | echo
        self._shows_logprobs = logprobs
        self._called = called
        self._ids = uuid4().hex
        self._done: list[JsonObject] = []
        self._open: TextItem | CallItem | None = None
        self._held = ""
        self._held_logprobs: list[orjson.Fragment] = []
        self._usage: Usage | None = None
        self._transfer: Mapping[str, Any] | None = None
        self._reason: FinishReason | None = None
        self._number = 0
        self._ended_at = 0

    def begin(self) -> list[JsonObject]:
        response = self._response("in_progress")
        return self._numbered({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def add(self, chunk: GenerateChunk) -> list[JsonObject]:
        reasoned = chunk.usage.reasoning_tokens - (0 if self._usage is None else self._usage.reasoning_tokens)
        self._usage, self._reason, self._transfer = chunk.usage, chunk.finish_reason, chunk.kv_transfer_params
        return self._numbered(self._grow(chunk, reasoned))

    def add_text(self, text: str, logprob: TokenLogprob | None) -> list[JsonObject]:
        """As `add`, for a chunk that is nothing but text, scored or not, and not the first."""
        if logprob is not None:
            self._hold_logprobs((logprob,))
        return self._numbered(self._add_text(_MESSAGE, text))

    @property
    def growing_message(self) -> TextItem | None:
        """The message that is open."""
        item = self._open
        return item if isinstance(item, TextItem) and item.key == _MESSAGE else None

    def grow_message(
        self, message: TextItem, text: str, logprob: TokenLogprob | None
    ) -> tuple[list[orjson.Fragment], int]:
        """Have the open `message` grow by a text as in `add_text`; the logprobs and the number of the event that the
        caller makes."""
        if logprob is not None:
            self._hold_logprobs((logprob,))
        logprobs = self._take_logprobs(_MESSAGE) if self._held_logprobs else []
        message.grow(text, logprobs)
        self._number += 1
        return logprobs, self._number - 1

    def _hold_logprobs(self, tokens: Sequence[TokenLogprob]) -> None:
        if self._shows_logprobs:
            self._held_logprobs += token_entries(tokens)

    def end(self) -> list[JsonObject]:
        self._ended_at = int(time.time())
        status = _STATUS[self._reason or FinishReason.STOP]
        events: list[JsonObject] = []
        if self._open is None and not self._done:
            events += self._open_text(_MESSAGE, self._held)
        events += self._close("completed" if status == "completed" else "incomplete")
        return self._numbered([*events, {"type": f"response.{status}", "response": self.response()}])

    def fail(self, error: CharoniaError) -> list[JsonObject]:
        """The events of an error after the answer has begun."""
        code, message = _error_code(error), printable(error.message)
        event = {"type": "error", "code": code, "message": message, "param": error.field}
        closing = list(self._close("incomplete"))
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        return self._numbered([*closing, event, {"type": "response.failed", "response": response}])

    def response(self) -> JsonObject:
        """The whole answer, once it has ended."""
        return self._response(_STATUS[self._reason or FinishReason.STOP])

    def _grow(self, chunk: GenerateChunk, reasoned: int) -> Iterator[JsonObject]:
        """`reasoned`: how many of the chunk's tokens are reasoning's, the markers around it included."""
        pieces: list[tuple[str | int, str | ToolCallDelta]] = [(delta.index, delta) for delta in chunk.tool_calls]
        if chunk.text:
            pieces.insert(0, (_MESSAGE, chunk.text))
        if chunk.reasoning:
            pieces.insert(0, (_REASONING, chunk.reasoning))
        if chunk.reasoning and self.growing_message is None:
            self._held_logprobs = []  # of a marker before it
        # A token of the text may bring none of it yet; those of reasoning, which come first, and calls are not its own.
        if chunk.text or not (chunk.reasoning or chunk.tool_calls):
            self._hold_logprobs(chunk.logprobs[min(reasoned, len(chunk.logprobs) - bool(chunk.text)) :])
        # Of chunks that were merged nobody knows the order: what is open goes on first.
        opened = None if self._open is None else self._open.key
        for key, piece in sorted(pieces, key=lambda keyed: keyed[0] != opened):
            if isinstance(piece, ToolCallDelta):
                yield from self._add_call(piece)
            else:
                yield from self._add_text(str(key), piece)

    def _add_text(self, kind: str, text: str) -> Iterator[JsonObject]:
        if isinstance(self._open, TextItem) and self._open.key == kind:
            yield from self._open.delta(text, self._take_logprobs(kind))
            return
        # Space between reasoning and calls is no message, unless one follows.
        self._held += text if kind == _MESSAGE else ""
        if kind == _REASONING:
            yield from self._open_text(kind, text)
        elif self._held.strip():
            yield from self._open_text(kind, self._held)

    def _open_text(self, kind: str, text: str) -> Iterator[JsonObject]:
        yield from self._close("completed")
        item = self._open = TextItem(kind, *self._next_item("msg" if kind == _MESSAGE else "rs"))
        yield from item.added()
        if kind == _MESSAGE:
            self._held = ""
        if text:
            yield from item.delta(text, self._take_logprobs(kind))

    def _add_call(self, delta: ToolCallDelta) -> Iterator[JsonObject]:
        item = self._open
        if not isinstance(item, CallItem) or item.key != delta.index:
            yield from self._close("completed")
            tool = self._called.get(delta.name) or CalledTool("function_call", delta.name)
            item_type, prefix = _CALL_ITEMS[tool.kind]
            item = self._open = item_type(delta, tool, *self._next_item(prefix))
            yield from item.added()
        yield from item.delta(delta.arguments)

    def _close(self, status: str) -> Iterator[JsonObject]:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, TextItem) and item.key == _MESSAGE and self._held_logprobs:
            yield from item.delta("", self._take_logprobs(_MESSAGE))
        yield from item.done(status)
        self._done.append(item.json(status))

    def _next_item(self, prefix: str) -> tuple[str, int]:
        """The id and the place of the item that is opened next."""
        place = len(self._done)
        return f"{prefix}_{self._ids}{place:04x}", place

    def _take_logprobs(self, kind: str) -> list[orjson.Fragment]:
        if kind != _MESSAGE:
            return []
        held, self._held_logprobs = self._held_logprobs, []
        return held

    def _response(self, status: str) -> JsonObject:
        reason = _INCOMPLETE.get(self._reason) if self._reason is not None and status == "incomplete" else None
        ended = status != "in_progress"
        return self._head | {
            "status": status,
            "completed_at": self._ended_at if status == "completed" else None,
            "error": {"code": "server_error", "message": _ENDED} if status == "failed" else None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [*self._done],
            "usage": _usage(self._usage) if ended and self._usage is not None else None,
            **({} if self._transfer is None else {"kv_transfer_params": self._transfer}),
        }

    def _numbered(self, events: Iterator[JsonObject] | list[JsonObject]) -> list[JsonObject]:
        numbered = []
        for event in events:
            numbered.append(event | {"sequence_number": self._number})
            self._number += 1
        return numbered


def _usage(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error_code(error: CharoniaError) -> str:
    status = status_of(error)
    if status == 429:
        return "rate_limit_exceeded"
    return "server_error" if status >= 500 else "invalid_prompt"
