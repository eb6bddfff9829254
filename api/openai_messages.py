"""The messages of a chat, checked. Knows nothing of templates."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..core.errors import InvalidArgument
from ..core.request import Conversation, Message
from .openai_fields import Neutral, convert, refuse_others, short

NEUTRAL: Neutral = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "reasoning_content": (),
}
"""Fields of a message that are not supported."""

_FIELDS = frozenset({"role", "content", "name"})
_ROLES = ("system", "developer", "user", "assistant")


class _Text(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str


def read_messages(messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> Conversation:
    """`variables`: what the body gives the chat template besides.

    Raises:
        InvalidArgument: `field` names the culprit.
    """
    if not messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    turns = (_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    return Conversation(tuple(turns), variables or {})


def _message(where: str, members: Mapping[str, Any]) -> Message:
    refuse_others(members, _FIELDS, NEUTRAL, f"{where}.")
    role = members.get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
    name = members.get("name")
    if not isinstance(name, str | None):
        raise InvalidArgument(f"{where}.name must be a string", field=f"{where}.name")
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if role == "developer" else role
    return Message(role, _content(f"{where}.content", members.get("content")), name or "")


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{where} must be a string or a list of text parts", field=where)
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") not in (None, "text"):
        raise InvalidArgument(f"{where}.type must be 'text', got {short(part['type'])}", field=f"{where}.type")
    return convert(part, _Text, where).text
