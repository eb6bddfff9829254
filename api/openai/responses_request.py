"""Bodies of /v1/responses become the body of a chat, which is parsed as one. Knows nothing of HTTP.

What a chat has under another name or in another form is translated here, and so are the fields that errors name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import orjson

from ...core.errors import InvalidArgument
from ...core.foreign_parameters import FOREIGN_NO_OPS
from ...core.request import GenerateRequest
from .json_body import (
    IgnoredFields,
    NoOpValues,
    body_shape,
    check_ignored,
    convert_fields,
    field_error,
    reject_unsupported,
    shortened,
)
from .known_fields import shape_of
from .request_parsing import CHAT_FIELDS, THINKING_NOTES
from .responses_input import ITEM_SHAPE, InputMessages, JsonObject, read_input
from .responses_output import CalledTool
from .responses_tools import TOOLS_SHAPE, ToolList
from .schemas import CHAT_NO_OP_VALUES, StreamOptions
from .text_constraints import RESPONSE_FORMAT_SHAPE
from .translated_chat import FieldNames, TranslatedChat, parse_translated

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
"""Names that `include` may have; answers have only the logprobs."""

_NO_STATE = "this server keeps no state: send the whole input, and no {}"
NO_OP_VALUES: NoOpValues = {
    **FOREIGN_NO_OPS,
    "background": (False,),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "n": (1,),
}


class IgnoredOfResponses(IgnoredFields, frozen=True, kw_only=True):
    """Fields that change nothing about the answer; `max_tool_calls` counts calls of OpenAI's own tools."""

    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None


IGNORED = frozenset(IgnoredOfResponses.__struct_fields__)

_CUSTOM_TOOL = re.compile(r"tools\[(\d+)\]\.custom")
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


RESPONSES_SHAPE = body_shape(
    _OWN | CHAT_FIELDS | IGNORED | CHAT_NO_OP_VALUES.keys(),
    NO_OP_VALUES,
    {
        "input": ITEM_SHAPE,
        "tools": TOOLS_SHAPE,
        "text": shape_of(TextConfig, {"format": RESPONSE_FORMAT_SHAPE}),
        "reasoning": shape_of(ReasoningConfig),
        "stream_options": shape_of(StreamOptions),
    },
    {name: note for name, note in THINKING_NOTES.items() if name != "reasoning"},
)


class ParsedResponses(TranslatedChat, frozen=True, kw_only=True):
    """A parsed body of /v1/responses."""

    echo: JsonObject
    """The members of the answer that repeat the request."""
    logprobs: bool
    """Whether the answer has the logprobs of its text."""
    called: Mapping[str, CalledTool]
    """Of `ToolList`."""


def parse_responses(body: Mapping[str, Any], request_id: str) -> ParsedResponses:
    """Parse a body of /v1/responses; the answer's id is `resp_` and `request_id`.

    Raises `InvalidArgument` for a field that is unknown, unsupported or wrong; `field` names it.
    """
    _refuse_state(body)
    reject_unsupported(body, _OWN | _OF_CHAT | IGNORED, NO_OP_VALUES, "")
    check_ignored(body, IgnoredOfResponses)
    fields = convert_fields({name: value for name, value in body.items() if name in _OWN}, ResponsesBody)
    _check(fields)
    messages = read_input(fields.input, fields.instructions)
    tools = ToolList(fields.tools or (), fields.tool_choice, fields.parallel_tool_calls)
    names = FieldNames(lambda: _field_names(messages, tools))
    kept = {name: value for name, value in body.items() if name in _OF_CHAT - _OWN}
    chat = parse_translated(kept | _chat_members(fields, messages, tools), names, request_id)
    requests = tuple(_renamed(request, f"resp_{request_id}") for request in chat.requests)
    return ParsedResponses(
        chat=msgspec.structs.replace(chat, requests=requests),
        echo=_echo(body, fields, tools),
        logprobs=_wants_logprobs(fields),
        called=tools.called,
        names=names,
        warnings=(*tools.warnings, *_without_effect(fields, messages), *_translated(chat.warnings, tools)),
    )


def _translated(warnings: Sequence[str], tools: ToolList) -> Iterator[str]:
    """Warnings of the chat in the words of the body."""
    for warning in warnings:
        place = _CUSTOM_TOOL.match(warning)
        yield warning if place is None else tools.origins[int(place[1])] + warning[place.end() :]


def _renamed(request: GenerateRequest, request_id: str) -> GenerateRequest:
    """The request under the id of its answer, which the log has too, and its constraint under its name here."""
    constraint = request.guided_decoding
    if constraint is not None and constraint.parameter == "response_format":
        constraint = constraint._replace(parameter="text.format")
    return msgspec.structs.replace(request, id=request_id, guided_decoding=constraint)


def _refuse_state(body: Mapping[str, Any]) -> None:
    for field in ("previous_response_id", "conversation"):
        if body.get(field) is not None:
            raise field_error(field, f"is not supported: {_NO_STATE.format(field)}")


def _check(fields: ResponsesBody) -> None:
    for index, name in enumerate(fields.include or ()):
        if name not in _INCLUDABLE:
            raise field_error(f"include[{index}]", f"must be one of {', '.join(_INCLUDABLE)}, got {shortened(name)}")
    metadata = fields.metadata or {}
    sizes = all(len(key) <= _MAX_METADATA_KEY and len(text) <= _MAX_METADATA_VALUE for key, text in metadata.items())
    if len(metadata) > _MAX_METADATA or not sizes:
        message = (
            f"metadata may have {_MAX_METADATA} keys of {_MAX_METADATA_KEY} characters, with values of at most "
            f"{_MAX_METADATA_VALUE}"
        )
        raise InvalidArgument(message, field="metadata")
    if fields.stream_options is not None and not fields.stream:
        raise field_error("stream_options", "needs stream to be true")


def _chat_members(fields: ResponsesBody, messages: InputMessages, tools: ToolList) -> JsonObject:
    """What a chat body has in another form; None stands for nothing."""
    shown = _wants_logprobs(fields)
    return {
        "model": fields.model,
        "messages": messages.messages,
        "stream": fields.stream,
        "max_completion_tokens": fields.max_output_tokens,
        "logprobs": shown or None,
        "top_logprobs": fields.top_logprobs if shown else None,
        "response_format": _response_format(fields.text.format if fields.text else None),
        "reasoning_effort": fields.reasoning.effort if fields.reasoning else None,
        "tools": tools.tools or None,
        "tool_choice": tools.choice,
        "parallel_tool_calls": tools.parallel_calls,
    }


def _wants_logprobs(fields: ResponsesBody) -> bool:
    return LOGPROBS in (fields.include or ()) or bool(fields.top_logprobs)


def _response_format(text_format: JsonObject | None) -> JsonObject | None:
    """A chat's `response_format`: there, the schema stands in a member of its own."""
    if text_format is None or text_format == {"type": "text"}:
        return None
    kind = text_format.get("type")
    if kind != "json_schema" or kind in text_format:
        return text_format
    return {"type": kind, kind: {name: value for name, value in text_format.items() if name != "type"}}


def _field_names(messages: InputMessages, tools: ToolList) -> dict[str, str]:
    """The fields of the chat that are called otherwise in the body."""
    return {
        "messages": "input",
        **{f"messages[{index}]": origin for index, origin in enumerate(messages.origins)},
        **{
            f"messages[{index}].content": f"{origin}.{field}"
            for index, (origin, field) in enumerate(zip(messages.origins, messages.content_fields, strict=True))
        },
        **{f"messages[0].content[{index}]": origin for index, origin in enumerate(messages.part_origins)},
        **tools.field_names,
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
    }


def _without_effect(fields: ResponsesBody, messages: InputMessages) -> Sequence[str]:
    """Warnings of what is accepted and changes nothing."""
    warnings = messages.warnings
    if fields.text and fields.text.verbosity not in (None, "medium"):
        warnings.append("text.verbosity changes nothing here")
    if fields.truncation == "auto":
        warnings.append("truncation: an input that is too long is refused, not cut")
    return warnings


def _echo(body: Mapping[str, Any], fields: ResponsesBody, tools: ToolList) -> JsonObject:
    """The members of the answer that repeat the request, or say what holds where it says nothing. Raises
    `InvalidArgument` for one that cannot be written; `field` names it."""
    text = fields.text or TextConfig()
    reasoning = fields.reasoning or ReasoningConfig()
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
    if not _can_be_written(echo):
        field = next(name for name, value in echo.items() if not _can_be_written({name: value}))
        raise field_error(field, "is nested too deeply for an answer that repeats it")
    return echo


def _can_be_written(echo: JsonObject) -> bool:
    """Whether an answer's members can be JSON in an event: orjson reads deeper nesting than it writes."""
    try:
        orjson.dumps({"response": echo})
    except orjson.JSONEncodeError:
        return False
    return True
