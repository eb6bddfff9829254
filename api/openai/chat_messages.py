"""The messages of a chat body become a `Conversation`. Knows nothing of chat templates."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ...core.errors import InvalidArgument
from ...core.request import ChatMessage, Conversation
from .json_body import NoOpValues, convert_fields, reject_unsupported, shortened
from .schemas import ChatBody, TokenizeBody

MESSAGE_NO_OP_VALUES: NoOpValues = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "reasoning_content": (),
}
"""By the name of an unsupported field of a message: its values that ask for nothing."""

MAX_MESSAGES = 8192
"""Messages that a conversation may have."""

_FIELDS = frozenset({"role", "content", "name"})
_ROLES = ("system", "developer", "user", "assistant")


class _TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


def parse_messages(messages: list[dict[str, Any]], fields: ChatBody | TokenizeBody) -> Conversation:
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
    continues, opens = bool(fields.continue_final_message), fields.add_generation_prompt
    opens = not continues if opens is None else opens
    return Conversation(parsed, fields.chat_template_kwargs or {}, fields.chat_template or "", opens, continues)


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
    content = members.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        message = f"{where}.content must be a string or a list of text parts"
        raise InvalidArgument(message, field=f"{where}.content")
    return ChatMessage(role, content, name or "")


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        raise InvalidArgument(f"{where}.type must be 'text', got {shortened(part['type'])}", field=f"{where}.type")
    return convert_fields(part, _TextPart, where).text
