"""Bodies of /v1/responses become the body of a chat, which is parsed as one. Knows nothing of HTTP.

What a chat has under another name or in another form is translated here, and so are the fields that errors name.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from ...core.errors import CharoniaError, InvalidArgument
from ...core.request import GenerateRequest
from .json_body import IGNORED_FIELDS, NoOpValues, body_shape, convert_fields, reject_unsupported, shortened
from .known_fields import Shape, ShapeByType, shape_of
from .request_parsing import CHAT_FIELDS, THINKING_NOTES, ParsedCompletion, parse_chat
from .responses_input import ITEM_SHAPE, LOCAL_SHELL, InputMessages, JsonObject, read_input
from .responses_output import CallKind
from .schemas import CHAT_NO_OP_VALUES, RESPONSE_FORMAT_SHAPE, StreamOptions
from .translated_chat import FieldNames

LOGPROBS = "message.output_text.logprobs"

_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may name; but for logprobs, answers have nothing of it."""

_NO_STATE = "this server keeps no state: send the whole input, and no {}"
NO_OP_VALUES: NoOpValues = {
    "background": (False,),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
}
IGNORED = IGNORED_FIELDS | {"prompt_cache_options", "client_metadata", "max_tool_calls"}
"""Fields that change nothing about the answer; `max_tool_calls` counts calls of OpenAI's own tools."""

_MAX_LISTED_TOOLS = 1024
"""Tools of all types; of functions there may be fewer."""

_UNREAD_OF_TOOLS = ("allowed_callers", "defer_loading", "output_schema", "async")
"""Members of tools that change nothing, where the client alone calls them and all are in the prompt."""

_LOCAL_SHELL_TOOL: JsonObject = {
    "name": LOCAL_SHELL,
    "description": "Runs a command on the user's machine, and returns what it writes.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": True,
}

_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512


class TextConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a chat has not, or differently."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None


_OWN = frozenset(ResponsesBody.__struct_fields__)
_OF_CHAT = CHAT_FIELDS - {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "response_format",
    "reasoning_effort",
    "logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "n",
    "include_reasoning",
    "echo",
}
"""Fields that are a chat's as they are, vLLM's extra parameters among them."""


_FUNCTION_SHAPE = Shape(
    frozenset(("type", "name", "description", "parameters", "strict", *_UNREAD_OF_TOOLS)),
)
RESPONSES_SHAPE = body_shape(
    _OWN | CHAT_FIELDS | IGNORED | CHAT_NO_OP_VALUES.keys(),
    NO_OP_VALUES,
    {
        "input": ITEM_SHAPE,
        "tools": ShapeByType({"function": _FUNCTION_SHAPE}, default="function"),
        "text": shape_of(TextConfig, {"format": RESPONSE_FORMAT_SHAPE}),
        "reasoning": shape_of(ReasoningConfig),
        "stream_options": shape_of(StreamOptions),
    },
    {name: THINKING_NOTES[name] for name in ("enable_thinking", "thinking")},
)


class ParsedResponses(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body. `echo`: what the answer repeats of it; `logprobs`: the text's are shown; `calls`: by the names of
    tools that are no functions, the types of their calls; `names`: of fields, for errors of the chat; `warnings`: what
    was left out."""

    chat: ParsedCompletion
    echo: JsonObject
    logprobs: bool
    calls: Mapping[str, CallKind]
    names: FieldNames
    warnings: tuple[str, ...]


def parse_responses(body: Mapping[str, Any], request_id: str) -> ParsedResponses:
    """Parse a body of /v1/responses; the answer's id is `resp_` and `request_id`.

    Raises `InvalidArgument` for a field that is unknown, unsupported or wrong; `field` names it.
    """
    _refuse_state(body)
    reject_unsupported(body, _OWN | _OF_CHAT | IGNORED, NO_OP_VALUES, "")
    fields = convert_fields({name: value for name, value in body.items() if name in _OWN}, ResponsesBody)
    _check(fields)
    read = read_input(fields.input, fields.instructions)
    tools = ToolList(fields)
    names = FieldNames(lambda: _names(read, tools))
    chat = {name: value for name, value in body.items() if name in _OF_CHAT - _OWN} | _chat_members(fields, read, tools)
    try:
        parsed = parse_chat({name: value for name, value in chat.items() if value is not None}, request_id)
    except CharoniaError as error:
        names.rename(error)
        raise
    named = tuple(_named(each, f"resp_{request_id}") for each in parsed.requests)
    return ParsedResponses(
        chat=msgspec.structs.replace(parsed, requests=named),
        echo=_echo(body, fields, tools),
        logprobs=_wants_logprobs(fields),
        calls=tools.calls,
        names=names,
        warnings=(*tools.warnings, *_without_effect(fields, read), *_renamed(parsed.warnings, tools)),
    )


def _renamed(warnings: Sequence[str], tools: "ToolList") -> Iterator[str]:
    """Warnings of the chat in the words of the body."""
    for warning in warnings:
        for index, position in enumerate(tools.positions):
            if warning.startswith(f"tools[{index}].custom"):
                warning = warning.replace(f"tools[{index}].custom", f"tools[{position}]", 1)
                break
        yield warning


def _named(request: GenerateRequest, request_id: str) -> GenerateRequest:
    """The request under the id of its answer, which the log has too, and its constraint under its name here."""
    constraint = request.guided_decoding
    if constraint is not None and constraint.parameter == "response_format":
        constraint = constraint._replace(parameter="text.format")
    return msgspec.structs.replace(request, id=request_id, guided_decoding=constraint)


def _refuse_state(body: Mapping[str, Any]) -> None:
    for field in ("previous_response_id", "conversation"):
        if body.get(field) is not None:
            raise InvalidArgument(f"{field} is not supported: {_NO_STATE.format(field)}", field=field)


def _check(fields: ResponsesBody) -> None:
    for index, each in enumerate(fields.include or ()):
        if each not in _INCLUDABLE:
            message = f"include[{index}] must be one of {', '.join(_INCLUDABLE)}, got {shortened(each)}"
            raise InvalidArgument(message, field=f"include[{index}]")
    metadata = fields.metadata or {}
    sizes = all(len(key) <= _MAX_METADATA_KEY and len(text) <= _MAX_METADATA_VALUE for key, text in metadata.items())
    if len(metadata) > _MAX_METADATA or not sizes:
        message = (
            f"metadata may have {_MAX_METADATA} keys of {_MAX_METADATA_KEY} characters, with values of at most "
            f"{_MAX_METADATA_VALUE}"
        )
        raise InvalidArgument(message, field="metadata")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidArgument("stream_options needs stream to be true", field="stream_options")


class ToolList:
    """The tools of a body in the form of a chat. `positions[i]`: the place in the body of tool i; `echo`: the tools as
    the answer repeats them; `calls`: by the names of those that are no functions, the types of their calls; `skipped`:
    the types that were left out, for the client does not run them, with the first place of each."""

    def __init__(self, fields: ResponsesBody) -> None:
        self.tools: list[JsonObject] = []
        self.echo: list[JsonObject] = []
        self.positions: list[int] = []
        self.calls: dict[str, CallKind] = {}
        self.skipped: dict[str, int] = {}
        given = fields.tools or ()
        if len(given) > _MAX_LISTED_TOOLS:
            raise InvalidArgument(
                f"tools: {len(given)} are more than the {_MAX_LISTED_TOOLS} there may be", field="tools"
            )
        for index, tool in enumerate(given):
            self._add(tool, index)
        self.choice = self._read_choice(fields.tool_choice)
        self.parallel = fields.parallel_tool_calls if self.tools else None

    @property
    def warnings(self) -> list[str]:
        return [f"tools[{at}]: tools of type {kind} are not served, and left out" for kind, at in self.skipped.items()]

    def _add(self, tool: JsonObject, index: int) -> None:
        kind = tool.get("type", "function")
        match kind:
            case "function":
                read = {name: value for name, value in tool.items() if name != "type" and value is not None}
                function = {name: value for name, value in read.items() if name not in _UNREAD_OF_TOOLS}
                self.tools.append({"type": "function", "function": function})
                self.echo.append(
                    {"type": "function", "parameters": None, "strict": False, "description": None} | function
                )
            case "custom":
                self.tools.append({"type": "custom", "custom": _custom_tool(tool, f"tools[{index}]")})
                self.echo.append(tool)
                if isinstance(tool.get("name"), str):
                    self.calls[tool["name"]] = "custom_tool_call"
            case "local_shell":
                self.tools.append({"type": "function", "function": _LOCAL_SHELL_TOOL})
                self.echo.append(tool)
                self.calls[LOCAL_SHELL] = "local_shell_call"
            case _:
                self.skipped.setdefault(shortened(kind), index)
                return
        self.positions.append(index)

    def _read_choice(self, choice: str | JsonObject | None) -> str | JsonObject | None:
        if isinstance(choice, str) or choice is None:
            return choice if self.tools or choice not in ("auto", "none") else None
        kind = choice.get("type")
        if kind == "allowed_tools":
            listed = choice.get("tools")
            functions = [
                _tool_name({"type": each["type"], "name": each.get("name")})
                for each in (listed if isinstance(listed, list) else [])
                if isinstance(each, dict) and each.get("type") in _CALLED_TYPES
            ]
            return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": functions}}
        if kind in _CALLED_TYPES:
            return _tool_name(choice)
        message = f"tool_choice.type must be {', '.join(_CALLED_TYPES)} or allowed_tools, got {shortened(kind)}"
        raise InvalidArgument(message, field="tool_choice.type")


_CALLED_TYPES = ("function", "custom", "local_shell")
"""Types of tools that a client runs."""


def _tool_name(named: JsonObject) -> JsonObject:
    """A chat's way to name a tool."""
    if named["type"] == "local_shell":
        return {"type": "function", "function": {"name": LOCAL_SHELL}}
    return {"type": named["type"], named["type"]: {name: text for name, text in named.items() if name != "type"}}


def _custom_tool(tool: JsonObject, where: str) -> JsonObject:
    """A custom tool as a chat has it: there, what belongs to the grammar stands in a member of its own."""
    custom = {name: tool[name] for name in ("name", "description", "format") if tool.get(name) is not None}
    form = custom.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        custom["format"] = {"type": "grammar", "grammar": {key: text for key, text in form.items() if key != "type"}}
    elif form is not None and not isinstance(form, dict):
        raise InvalidArgument(f"{where}.format must be an object", field=f"{where}.format")
    return custom


def _chat_members(fields: ResponsesBody, read: InputMessages, tools: ToolList) -> JsonObject:
    """What a chat body has in another form; None stands for nothing."""
    text, reasoning = fields.text or TextConfig(), fields.reasoning or ReasoningConfig()
    shown = _wants_logprobs(fields)
    return {
        "model": fields.model,
        "messages": read.messages,
        "stream": fields.stream,
        "max_completion_tokens": fields.max_output_tokens,
        "logprobs": shown or None,
        "top_logprobs": fields.top_logprobs if shown else None,
        "response_format": None if text.format is None else _response_format(text.format),
        "reasoning_effort": reasoning.effort,
        "tools": tools.tools or None,
        "tool_choice": tools.choice,
        "parallel_tool_calls": tools.parallel,
    }


def _wants_logprobs(fields: ResponsesBody) -> bool:
    return LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)


def _response_format(asked: JsonObject) -> JsonObject | None:
    kind = asked.get("type")
    if kind == "json_schema" and kind not in asked:
        return {"type": kind, kind: {name: value for name, value in asked.items() if name != "type"}}
    return None if asked == {"type": "text"} else asked


def _names(read: InputMessages, tools: ToolList) -> dict[str, str]:
    """The fields of the chat that are called otherwise in the body."""
    return {
        "messages": "input",
        **{f"messages[{index}]": origin for index, origin in enumerate(read.origins)},
        **{f"tools[{index}].function": f"tools[{at}]" for index, at in enumerate(tools.positions)},
        **{f"tools[{index}].custom.format.grammar": f"tools[{at}].format" for index, at in enumerate(tools.positions)},
        **{f"tools[{index}].custom": f"tools[{at}]" for index, at in enumerate(tools.positions)},
        **{f"tools[{index}]": f"tools[{at}]" for index, at in enumerate(tools.positions)},
        "tool_choice.function": "tool_choice",
        "tool_choice.custom": "tool_choice",
        "tool_choice.allowed_tools": "tool_choice",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
    }


def _without_effect(fields: ResponsesBody, read: InputMessages) -> Sequence[str]:
    """Warnings of what is accepted and changes nothing."""
    text = fields.text or TextConfig()
    warnings = read.warnings
    if text.verbosity not in (None, "medium"):
        warnings.append("text.verbosity changes nothing here")
    if fields.truncation == "auto":
        warnings.append("truncation: an input that is too long is refused, not cut")
    return warnings


def _echo(body: Mapping[str, Any], fields: ResponsesBody, tools: ToolList) -> JsonObject:
    """The members of the answer that repeat the request, with what holds where it says nothing. Raises
    `InvalidArgument` for what cannot be written."""
    text, reasoning = fields.text or TextConfig(), fields.reasoning or ReasoningConfig()
    echo = {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": body.get("temperature"),
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity or "medium"},
        "tool_choice": fields.tool_choice or "auto",
        "tools": tools.echo,
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
    try:
        orjson.dumps({"response": echo})
    except orjson.JSONEncodeError:  # orjson reads deeper nesting than it writes
        raise InvalidArgument("the body is nested too deeply for an answer that repeats it") from None
    return echo
