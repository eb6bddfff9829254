"""The messages of a chat, checked. Knows nothing of templates."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import ChatMessage, Conversation
from .json_body import NoOpValues, convert_fields, reject_unsupported, shortened

MESSAGE_NO_OP_VALUES: NoOpValues = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "reasoning_content": (),
}
"""Fields of a message that are not supported."""

MAX_MESSAGES = 8192
"""Of one conversation."""

_FIELDS = frozenset({"role", "content", "name"})
_ROLES = ("system", "developer", "user", "assistant")


class _TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


class TemplateFields(Protocol):
    """A body with messages: these, and how they are rendered."""

    @property
    def chat_template(self) -> str | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def parse_messages(messages: list[dict[str, Any]], fields: TemplateFields) -> Conversation:
    """Where `fields` do not say, the assistant's turn is opened, unless the last message goes on.

    Raises:
        InvalidArgument: `field` names the culprit.
    """
    if not messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    if len(messages) > MAX_MESSAGES:
        message = f"messages: {len(messages)} are more than the {MAX_MESSAGES} there may be"
        raise InvalidArgument(message, field="messages")
    turns = (_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    goes_on, opens = bool(fields.continue_final_message), fields.add_generation_prompt
    opens = not goes_on if opens is None else opens
    return Conversation(tuple(turns), fields.chat_template_kwargs or {}, fields.chat_template or "", opens, goes_on)


def _message(where: str, members: Mapping[str, Any]) -> ChatMessage:
    reject_unsupported(members, _FIELDS, MESSAGE_NO_OP_VALUES, f"{where}.")
    role = members.get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    name = members.get("name")
    if not isinstance(name, str | None):
        raise InvalidArgument(f"{where}.name must be a string", field=f"{where}.name")
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if role == "developer" else role
    return ChatMessage(role, _content(f"{where}.content", members.get("content")), name or "")


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{where} must be a string or a list of text parts", field=where)
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        raise InvalidArgument(f"{where}.type must be 'text', got {shortened(part['type'])}", field=f"{where}.type")
    return convert_fields(part, _TextPart, where).text
