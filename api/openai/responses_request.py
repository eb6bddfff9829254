"""Bodies of /v1/responses become the body of a chat, which is parsed as one. Knows nothing of HTTP.

What a chat has under another name or in another form is translated here, and so are the fields that errors name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from ...core.errors import CharoniaError, InvalidArgument
from ...core.request import GenerateRequest
from .json_body import IGNORED_FIELDS, NoOpValues, convert_fields, reject_unsupported, shortened
from .request_parsing import CHAT_FIELDS, ParsedCompletion, parse_chat
from .responses_input import InputMessages, JsonObject, read_input
from .schemas import StreamOptions
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
    input: str | list[dict[str, Any]]
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
    "n",
    "include_reasoning",
}
"""Fields that are a chat's as they are, vLLM's extra parameters among them."""


class ParsedResponses(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed body. `echo`: what the answer repeats of it; `logprobs`: the text's are shown; `names`: of fields, for
    errors of the chat; `warnings`: what was left out."""

    chat: ParsedCompletion
    echo: JsonObject
    logprobs: bool
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
        names=names,
        warnings=(*tools.warnings, *_without_effect(fields, read)),
    )


def _named(request: GenerateRequest, request_id: str) -> GenerateRequest:
    """The request under the id of its answer, which the log has too, and its constraint under its name here."""
    guide = request.guided_decoding
    if guide is not None and guide.parameter == "response_format":
        guide = guide._replace(parameter="text.format")
    return msgspec.structs.replace(request, id=request_id, guided_decoding=guide)


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
    the answer repeats them; `skipped`: the types that were left out, for only functions are called, with the first
    place of each."""

    def __init__(self, fields: ResponsesBody) -> None:
        self.tools: list[JsonObject] = []
        self.echo: list[JsonObject] = []
        self.positions: list[int] = []
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
        if kind != "function":
            self.skipped.setdefault(shortened(kind), index)
            return
        unread = ("type", "allowed_callers", "defer_loading", "output_schema", "async")
        function = {name: value for name, value in tool.items() if name not in unread and value is not None}
        self.tools.append({"type": "function", "function": function})
        self.echo.append({"type": "function", "parameters": None, "strict": False, "description": None} | function)
        self.positions.append(index)

    def _read_choice(self, choice: str | JsonObject | None) -> str | JsonObject | None:
        if isinstance(choice, str) or choice is None:
            return choice if self.tools or choice not in ("auto", "none") else None
        kind = choice.get("type")
        if kind == "function":
            return {"type": kind, "function": {name: text for name, text in choice.items() if name != "type"}}
        if kind == "allowed_tools":
            listed = choice.get("tools")
            functions = [
                {"type": "function", "function": {"name": each.get("name")}}
                for each in (listed if isinstance(listed, list) else [])
                if isinstance(each, dict) and each.get("type") == "function"
            ]
            return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": functions}}
        message = f"tool_choice.type must be function or allowed_tools, got {shortened(kind)}"
        raise InvalidArgument(message, field="tool_choice.type")


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
    if kind == "json_schema":
        return {"type": kind, kind: {name: value for name, value in asked.items() if name != "type"}}
    return None if asked == {"type": "text"} else asked


def _names(read: InputMessages, tools: ToolList) -> dict[str, str]:
    """The fields of the chat that are called otherwise in the body."""
    return {
        "messages": "input",
        **{f"messages[{index}]": origin for index, origin in enumerate(read.origins)},
        **{f"tools[{index}].function": f"tools[{at}]" for index, at in enumerate(tools.positions)},
        **{f"tools[{index}]": f"tools[{at}]" for index, at in enumerate(tools.positions)},
        "tool_choice.function": "tool_choice",
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
    warnings = [f"{read.unread}: encrypted reasoning cannot be read here, and is left out"] if read.unread else []
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
