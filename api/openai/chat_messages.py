"""The messages of a chat body become a `Conversation`. Knows nothing of chat templates."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from ...core.media import MediaSource
from ...core.request import ChatMessage, Conversation, Tool, ToolCall
from .custom_tools import custom_arguments
from .json_body import NoOpValues, convert_fields, field_error, reject_unsupported, shortened
from .known_fields import Shape, ShapeByType, shape_of
from .media_parts import MEDIA_SHAPES, part_complaint, processor_options, read_medium, with_options
from .schemas import ChatBody, TokenizeBody

MESSAGE_NO_OP_VALUES: NoOpValues = {
    "type": ("text", "message"),
    "audio": (),
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
    "refusal": "assistant",
    "tool_call_id": "tool",
}
"""The role whose messages may have a field."""


class _TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    text: str
    type: str | None = None


class _RefusalPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: str
    refusal: str


class _ThinkingPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reasoning as a text or, as Mistral's clients write it, text parts. `signature` and `closed` change nothing."""

    type: str
    thinking: str | list[Any]
    signature: str | None = None
    closed: bool | None = None


class _CalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class _CustomInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    input: str


class _Call(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call as answers have it, of a function or of a custom tool; the `index` is that of streamed ones."""

    id: str
    function: _CalledFunction | None = None
    custom: _CustomInput | None = None
    type: Literal["function", "custom"] | None = None
    """None is that of a function."""
    index: int | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


_FIELDS = frozenset(_Message.__struct_fields__)
_TEXT_SHAPES = {
    **dict.fromkeys(("text", "input_text", "output_text"), shape_of(_TextPart)),
    "refusal": shape_of(_RefusalPart),
}
_THINKING = "thinking"
_PARTS = ShapeByType(
    {**_TEXT_SHAPES, _THINKING: shape_of(_ThinkingPart), **MEDIA_SHAPES},
    default="text",
    implied=("image_url", "image_embeds", "input_audio", "audio_url", "video_url", "refusal", _THINKING),
)
MESSAGE_SHAPE = Shape(
    frozenset((*_FIELDS, *MESSAGE_NO_OP_VALUES)),
    {
        "content": _PARTS,
        "tool_calls": shape_of(_Call, {"function": shape_of(_CalledFunction), "custom": shape_of(_CustomInput)}),
    },
)


def parse_messages(
    messages: list[dict[str, Any]], fields: ChatBody | TokenizeBody, tools: tuple[Tool, ...] = ()
) -> Conversation:
    """Check the messages of a body, and how its `fields` want them rendered.

    The prompt ends with the opening of the assistant's turn, unless `fields` say otherwise or let the last message go
    on. Raises `InvalidArgument` for a message that is none, or is not supported.
    """
    if not messages:
        raise field_error("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise field_error("messages", f": {len(messages)} are more than the {MAX_MESSAGES} there may be")
    parsed = tuple(_message(f"messages[{index}]", message) for index, message in enumerate(messages))
    parsed = with_options(parsed, processor_options(fields.mm_processor_kwargs))
    _check_results(parsed)
    continues = bool(fields.continue_final_message)
    opens = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    return Conversation(parsed, fields.template_variables, fields.chat_template or "", opens, continues, tools)


def _check_results(messages: tuple[ChatMessage, ...]) -> None:
    """Raises `InvalidArgument` for the result of a call that no message before it made."""
    called: set[str] = set()
    for index, message in enumerate(messages):
        called.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in called:
            call_id = shortened(message.tool_call_id)
            problem = f": no message of the assistant before it has a call {call_id}"
            raise field_error(f"messages[{index}].tool_call_id", problem)


def _message(where: str, members: Mapping[str, Any]) -> ChatMessage:
    reject_unsupported(members, _FIELDS, MESSAGE_NO_OP_VALUES, f"{where}.")
    role = members.get("role")
    if role not in _ROLES:
        raise field_error(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for name, owner in _ONE_ROLE_ALONE.items():
        if members.get(name) and role != owner:
            raise field_error(f"{where}.{name}", f": only messages of the role {owner} have one")
    message = convert_fields(members, _Message, where)
    if role == "tool" and not message.tool_call_id:
        raise field_error(f"{where}.tool_call_id", "must be the id of the call that this is the result of")
    listed = enumerate(message.tool_calls or ())
    calls = tuple(_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in listed)
    reasoning = _reasoning(where, message)
    content = message.refusal if message.content is None else message.content
    if isinstance(content, list):
        parts = _read_parts(where, content, role)
        reasoning = _only_reasoning(f"{where}.content", reasoning, parts.thoughts)
    elif content is None and (calls or reasoning):
        parts = _Parts("")
    else:
        parts = _Parts(content_text(where, content))
    # Templates know "system"; "developer" is OpenAI's newer word for it.
    role = "system" if role == "developer" else role
    call_id = message.tool_call_id or ""
    return ChatMessage(role, parts.text, message.name or "", reasoning, calls, call_id, parts.media, parts.breaks)


class _Parts(NamedTuple):
    """The content parts of a message: their text, the media in it, and the reasoning apart from it."""

    text: str
    media: tuple[MediaSource, ...] = ()
    breaks: tuple[int, ...] = ()
    thoughts: str = ""


def _is_medium(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in MEDIA_SHAPES


def _read_parts(where: str, parts: list[Any], role: str) -> _Parts:
    """The content of a message of parts; a text that follows another is a line of its own."""
    text = ""
    media: list[MediaSource] = []
    breaks: list[int] = []
    thoughts: list[str] = []
    after_text = False
    for index, part in enumerate(parts):
        place = f"{where}.content[{index}]"
        if isinstance(part, dict):
            part = {**part, "type": _PARTS.type_of(part)}
        if _is_medium(part):
            media.append(read_medium(place, part, len(text)))
            after_text = False
        elif role == "assistant" and isinstance(part, dict) and part.get("type") == _THINKING:
            thought = convert_fields(part, _ThinkingPart, place).thinking
            thoughts.append(content_text(place, thought, field=_THINKING))
        else:
            if after_text:
                breaks.append(len(text))
                text += "\n"
            text += _part_text(place, part)
            after_text = True
    return _Parts(text, tuple(media), tuple(breaks), "\n".join(thoughts))


def content_text(where: str, content: Any, between: str = "\n", field: str = "content") -> str:
    """The text of the `field` of the object at `where`, its parts joined by `between`: vLLM makes lines of them.

    Raises `InvalidArgument` for content that is neither a text nor parts of one.
    """
    if isinstance(content, list):
        return between.join(_part_text(f"{where}.{field}[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise field_error(f"{where}.{field}", "must be a string or a list of text parts")
    return content


def _tool_call(call: _Call, where: str) -> ToolCall:
    if not call.id:
        raise field_error(f"{where}.id", "must not be empty")
    kind, function, custom = call.type or "function", call.function, call.custom
    if kind == "function" and function is not None and custom is None:
        return ToolCall(call.id, function.name, function.arguments)
    if kind == "custom" and custom is not None and function is None:
        return ToolCall(call.id, custom.name, custom_arguments(custom.input, f"{where}.custom.input"))
    raise field_error(f"{where}.{kind}", "is missing, or there is the member of another type")


def _reasoning(where: str, message: _Message) -> str:
    """The reasoning, for which vLLM and others have two names; answers have it under both."""
    other = message.reasoning_content or ""
    return _only_reasoning(f"{where}.reasoning_content", message.reasoning or "", other)


def _only_reasoning(field: str, reasoning: str, other: str) -> str:
    """The reasoning, of which another place may have the same text. Raises `InvalidArgument` if it has another."""
    if reasoning and other and reasoning != other:
        raise field_error(field, "has another text than reasoning: give one")
    return reasoning or other


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        return convert_fields(part, _RefusalPart, where).refusal
    if kind is not None and (not isinstance(kind, str) or kind not in _TEXT_SHAPES):
        # A medium comes here where there may be none, as in a prediction.
        kinds = _TEXT_SHAPES if _is_medium(part) else (*_TEXT_SHAPES, *MEDIA_SHAPES)
        raise field_error(f"{where}.type", part_complaint(kind, kinds))
    return convert_fields(part, _TextPart, where).text
