"""The messages of a chat body become a `Conversation`. Knows nothing of chat templates."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import ChatMessage, Conversation, Tool, ToolCall
from .json_body import NoOpValues, convert_fields, reject_unsupported, shortened
from .schemas import ChatBody, TokenizeBody

MESSAGE_NO_OP_VALUES: NoOpValues = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
}
"""By the name of an unsupported field of a message: its values that ask for nothing."""

MAX_MESSAGES = 8192
"""Messages that a conversation may have."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ONE_ROLE_ALONE = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}
"""The role whose messages may have a field."""


class _TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


class _CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call as answers have it; the `index` is that of streamed ones."""

    id: str
    function: _CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


_FIELDS = frozenset(_Message.__struct_fields__)


def parse_messages(
    messages: list[dict[str, Any]], fields: ChatBody | TokenizeBody, tools: tuple[Tool, ...] = ()
) -> Conversation:
    """Check the messages of a body, and how its `fields` want them rendered.

    The prompt ends with the opening of the assistant's turn, unless they say otherwise or let the last message go on.
    Raises `InvalidArgument` for a message that is none, or has what is not supported; `field` is its path.
    """
    if not messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    if len(messages) > MAX_MESSAGES:
        message = f"messages: {len(messages)} are more than the {MAX_MESSAGES} there may be"
        raise InvalidArgument(message, field="messages")
    parsed = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    check_results(parsed, "messages[{}].tool_call_id")
    continues, opens = bool(fields.continue_final_message), fields.add_generation_prompt
    opens = not continues if opens is None else opens
    variables = fields.template_variables
    return Conversation(parsed, variables, fields.chat_template or "", opens, continues, tools)


def check_results(messages: tuple[ChatMessage, ...], field: str) -> None:
    """Raises `InvalidArgument` for a result of no call that was made before it; `field` has a place for the index of
    its message."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            where = field.format(index)
            text = f"{where}: no message of the assistant before it has a call {shortened(message.tool_call_id)}"
            raise InvalidArgument(text, field=where)


def _message(where: str, members: Mapping[str, Any]) -> ChatMessage:
    reject_unsupported(members, _FIELDS, MESSAGE_NO_OP_VALUES, f"{where}.")
    role = members.get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    for name, owner in _ONE_ROLE_ALONE.items():
        if members.get(name) and role != owner:
            message = f"{where}.{name}: only messages of the role {owner} have one"
            raise InvalidArgument(message, field=f"{where}.{name}")
    given = convert_fields(members, _Message, where)
    if role == "tool" and not given.tool_call_id:
        message = f"{where}.tool_call_id must be the id of the call that this is the result of"
        raise InvalidArgument(message, field=f"{where}.tool_call_id")
    calls, reasoning = _calls(where, given.tool_calls or ()), _reasoning(where, given)
    content = "" if given.content is None and (calls or reasoning) else content_text(where, given.content)
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if role == "developer" else role
    return ChatMessage(role, content, given.name or "", reasoning, calls, given.tool_call_id or "")


def content_text(where: str, content: Any) -> str:
    """The text of the `content` of what is at `where`. Raises `InvalidArgument` if it is none, nor parts of one."""
    if isinstance(content, list):
        return "".join(_part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        message = f"{where}.content must be a string or a list of text parts"
        raise InvalidArgument(message, field=f"{where}.content")
    return content


def _calls(where: str, calls: list[_Call] | tuple[()]) -> tuple[ToolCall, ...]:
    for index, call in enumerate(calls):
        if not call.id:
            field = f"{where}.tool_calls[{index}].id"
            raise InvalidArgument(f"{field} must not be empty", field=field)
    return tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in calls)


def _reasoning(where: str, given: _Message) -> str:
    """The reasoning, which vLLM and others call differently; answers have it under both names."""
    one, other = given.reasoning or "", given.reasoning_content or ""
    if one and other and one != other:
        field = f"{where}.reasoning_content"
        raise InvalidArgument(f"{field} is another text than reasoning: give one", field=field)
    return one or other


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        raise InvalidArgument(f"{where}.type must be 'text', got {shortened(part['type'])}", field=f"{where}.type")
    return convert_fields(part, _TextPart, where).text
