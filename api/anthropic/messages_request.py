"""Bodies of /v1/messages become the body of a chat, which is parsed as one. Knows nothing of HTTP.

What a chat has under another name or in another form is translated here, and so are the fields that errors name.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...core.errors import InvalidArgument
from ...core.foreign_parameters import FOREIGN_NO_OPS
from ...core.request import Conversation
from ..openai.json_body import (
    NoOpValues,
    body_shape,
    check_ignored,
    convert_fields,
    field_error,
    reject_unsupported,
    shortened,
)
from ..openai.known_fields import ShapeByType, shape_of
from ..openai.request_parsing import CHAT_FIELDS, THINKING_NOTES
from ..openai.schemas import CHAT_NO_OP_VALUES, thinking_variables
from ..openai.translated_chat import FieldNames, TranslatedChat, parse_translated
from .message_turns import BLOCK_SHAPE, TURN_SHAPE, ChatTurns, JsonObject

NO_OP_VALUES: NoOpValues = {
    **FOREIGN_NO_OPS,
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "fallbacks": ([],),
    "thread": (),
    "kv_transfer_params": (),
}


class IgnoredOfMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that change nothing about the answer, whatever they say."""

    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    diagnostics: dict[str, Any] | None = None
    billing_policy: dict[str, Any] | None = None
    fallback_credit_token: str | dict[str, Any] | None = None
    anthropic_version: str | None = None
    anthropic_beta: str | list[str] | None = None


IGNORED = frozenset(IgnoredOfMessages.__struct_fields__)


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class MessageToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function. Where nothing but the model calls tools, and all of them are in the prompt, the last five change
    nothing."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that a chat has not, or differently."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None


OWN_FIELDS = frozenset(MessagesBody.__struct_fields__)
_OF_CHAT = (
    CHAT_FIELDS
    - OWN_FIELDS
    - {
        "kv_transfer_params",
        "max_completion_tokens",
        "stop",
        "stream_options",
        "n",
        "parallel_tool_calls",
        "reasoning_effort",
        "thinking_token_budget",
        "include_reasoning",
        "separate_reasoning",
        "reasoning",
        "response_format",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "echo",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Fields that are a chat's as they are, vLLM's extra parameters among them."""


_FORMAT_SHAPE = shape_of(JsonOutputFormat)
MESSAGES_SHAPE = body_shape(
    OWN_FIELDS | CHAT_FIELDS | IGNORED | CHAT_NO_OP_VALUES.keys(),
    NO_OP_VALUES,
    {
        "messages": TURN_SHAPE,
        "system": BLOCK_SHAPE,
        "tools": ShapeByType({"custom": shape_of(MessageTool)}, default="custom"),
        "tool_choice": shape_of(MessageToolChoice),
        "thinking": shape_of(ThinkingConfig),
        "output_config": shape_of(OutputConfig, {"format": _FORMAT_SHAPE}),
        "output_format": _FORMAT_SHAPE,
    },
    {"enable_thinking": THINKING_NOTES["enable_thinking"]},
)


class ParsedMessages(TranslatedChat, frozen=True, kw_only=True):
    """A parsed body of /v1/messages."""

    max_tokens: int
    """As the client gave it."""
    shows_thinking: bool
    """Whether the answer has the text of the reasoning."""


def parse_messages_body(body: Mapping[str, Any], request_id: str, counts: bool = False) -> ParsedMessages:
    """Parse a body of /v1/messages, or one that only `counts` its tokens; the answer's id is `msg_` and `request_id`.

    Raises `InvalidArgument` for a field that is unknown, unsupported or wrong; `field` names it.
    """
    reject_unsupported(body, OWN_FIELDS | _OF_CHAT | IGNORED, NO_OP_VALUES, "")
    check_ignored(body, IgnoredOfMessages)
    fields = convert_fields({name: value for name, value in body.items() if name in OWN_FIELDS}, MessagesBody)
    _check(fields, counts)
    turns = read_turns(fields)
    tools = MessageTools(fields)
    names = FieldNames(lambda: _field_names(fields, turns, tools))
    kept = {name: value for name, value in body.items() if name in _OF_CHAT}
    members = kept | _chat_members(fields, turns, tools, body.get("chat_template_kwargs"))
    chat = parse_translated(members, names, request_id)
    [request] = chat.requests
    assert isinstance(request.prompt, Conversation)
    # Who does not ask for thinking gets none: models that think unless told otherwise are told.
    variables = {**_template_variables(fields), **request.prompt.variables}
    prompt = msgspec.structs.replace(request.prompt, variables=variables)
    request = msgspec.structs.replace(request, id=f"msg_{request_id}", prompt=prompt, lenient_limits=True)
    return ParsedMessages(
        chat=msgspec.structs.replace(chat, requests=(request,)),
        max_tokens=fields.max_tokens or 0,
        shows_thinking=fields.thinking is None or fields.thinking.display != "omitted",
        names=names,
        warnings=(*turns.warnings, *tools.warnings, *chat.warnings),
    )


def _check(fields: MessagesBody, counts: bool) -> None:
    """Raises `InvalidArgument` for what a chat would take, and this body must not have."""
    if fields.max_tokens is None and not counts:
        raise field_error("max_tokens", "is missing")
    if fields.max_tokens is not None and fields.max_tokens < 1:
        raise field_error("max_tokens", f"must be at least 1, got {fields.max_tokens}")
    thinking = fields.thinking or ThinkingConfig(type="disabled")
    budget = thinking.budget_tokens
    if budget is None:
        return
    field = "thinking.budget_tokens"
    if thinking.type != "enabled":
        raise field_error(field, "needs thinking.type to be enabled")
    if budget < 1 or (fields.max_tokens is not None and budget >= fields.max_tokens):
        raise field_error(field, f"must be at least 1 and less than max_tokens, got {budget}")


def read_turns(fields: MessagesBody) -> ChatTurns:
    """The messages of a body's `system` and `messages`. Raises `InvalidArgument` as `ChatTurns` does, or if there are
    none."""
    turns = ChatTurns()
    turns.add_system(fields.system or "")
    for index, members in enumerate(fields.messages):
        turns.add_turn(members, f"messages[{index}]")
    if not turns.answerable:
        raise field_error("messages", "has nothing that could be answered")
    return turns


class MessageTools:
    """The tools of a body in the form of a chat. Raises `InvalidArgument` for one that cannot be read."""

    def __init__(self, fields: MessagesBody) -> None:
        self.tools: list[JsonObject] = []
        self.positions: list[int] = []
        """By the place of a tool in `tools`, its place in the body."""
        self.warnings: list[str] = []
        """The tools that are left out: Anthropic's own servers run them, or its models alone know them."""
        for index, members in enumerate(fields.tools or ()):
            self._add(members, f"tools[{index}]", index)
        self.choice, self.parallel_calls = _read_choice(fields.tool_choice)

    def _add(self, members: JsonObject, where: str, index: int) -> None:
        kind = members.get("type")
        if kind not in (None, "custom"):
            self.warnings.append(f"{where}: tools of type {shortened(kind)} are not served, and it is left out")
            return
        tool = convert_fields(members, MessageTool, where)
        if tool.input_examples:
            self.warnings.append(f"{where}.input_examples changes nothing here")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        self.tools.append({"type": "function", "function": function | {"strict": tool.strict}})
        self.positions.append(index)


def _read_choice(choice: MessageToolChoice | None) -> tuple[str | JsonObject | None, bool | None]:
    """A chat's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    if (choice.type == "tool") != (choice.name is not None):
        goes = "is missing" if choice.type == "tool" else f"does not go with the type '{choice.type}'"
        raise field_error("tool_choice.name", goes)
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}, parallel
    return "required" if choice.type == "any" else choice.type, parallel


def _chat_members(fields: MessagesBody, turns: ChatTurns, tools: MessageTools, variables: Any) -> JsonObject:
    """What a chat body has in another form; None stands for nothing. `variables`: the body's own for its template."""
    output = fields.output_config or OutputConfig()
    if (output.effort is not None or _thinks(fields)) and isinstance(variables, dict | None):
        variables = _template_variables(fields) | (variables or {})
    if output.format is not None and fields.output_format is not None:
        problem = "output_config.format and output_format are the same field: give one"
        raise InvalidArgument(problem, field="output_format")
    return {
        "model": fields.model,
        "messages": turns.messages(),
        "max_tokens": fields.max_tokens,
        "stop": fields.stop_sequences,
        "tools": tools.tools or None,
        "tool_choice": tools.choice,
        "parallel_tool_calls": tools.parallel_calls,
        "thinking_token_budget": fields.thinking.budget_tokens if fields.thinking else None,
        "response_format": _response_format(output.format or fields.output_format),
        "chat_template_kwargs": variables,
        "continue_final_message": turns.continues() or None,
    }


def _response_format(output: JsonOutputFormat | None) -> JsonObject | None:
    if output is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": output.schema, "strict": True}}


def _thinks(fields: MessagesBody) -> bool:
    return fields.thinking is not None and fields.thinking.type != "disabled"


def _template_variables(fields: MessagesBody) -> JsonObject:
    """The variables of chat templates for thinking and effort."""
    effort = fields.output_config.effort if fields.output_config else None
    return thinking_variables(_thinks(fields)) | ({} if effort is None else {"reasoning_effort": effort})


def _field_names(fields: MessagesBody, turns: ChatTurns, tools: MessageTools) -> dict[str, str]:
    """The fields of the chat that are called otherwise in the body."""
    output_format = "output_config.format" if fields.output_format is None else "output_format"
    names = {
        **turns.origins,
        "continue_final_message": f"messages[{len(fields.messages) - 1}].content",
        "tool_choice.function": "tool_choice",
        "thinking_token_budget": "thinking.budget_tokens",
        "response_format.json_schema": output_format,
        "response_format": output_format,
        "stop": "stop_sequences",
    }
    for index, position in enumerate(tools.positions):
        names[f"tools[{index}].function.parameters"] = f"tools[{position}].input_schema"
        names[f"tools[{index}].function"] = f"tools[{position}]"
    return names
