"""The input items of a /v1/responses body become the messages of a chat body.

https://platform.openai.com/docs/api-reference/responses/create. Knows nothing of models and templates.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ...core.errors import InvalidArgument
from ...core.structured_outputs import json_text
from ..http.error_responses import ApiError
from .json_body import NoOpValues, field_error, reject_unsupported, shortened
from .known_fields import Shape, ShapeByType
from .media_parts import UNSEEN, UNSEEN_WARNING, UNSERVED_FILE_WARNING, part_complaint

JsonObject: TypeAlias = dict[str, Any]

_OF_ALL_ITEMS = frozenset(("type", "id", "status"))
_ITEM_FIELDS = {
    "message": frozenset(("role", "content", "phase")),
    "function_call": frozenset(("call_id", "namespace", "name", "arguments")),
    "function_call_output": frozenset(("call_id", "output", "namespace", "name")),
    "custom_tool_call": frozenset(("call_id", "namespace", "name", "input")),
    "custom_tool_call_output": frozenset(("call_id", "output", "namespace", "name")),
    "local_shell_call": frozenset(("call_id", "action")),
    "local_shell_call_output": frozenset(("call_id", "output")),
    "reasoning": frozenset(("summary", "content", "encrypted_content")),
}
"""By the type of an item that is read: its fields, those of all items left out."""

_HOSTED = frozenset(
    (
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "computer_call",
        "computer_call_output",
        "program",
        "program_output",
    )
)
"""Items that tell of what OpenAI's own tools did: they are left out."""

_COMPACTIONS = frozenset(("compaction", "compaction_summary", "context_compaction"))
"""Items that stand for a conversation as OpenAI's servers have shortened it, and alone can read: they are left out."""

LOCAL_SHELL = "local_shell"
"""The name of the function that OpenAI's tool of this type is to a model."""

_NO_OP_VALUES: NoOpValues = {"namespace": (), "caller": ({"type": "direct"},), "async": (False,)}
_PART_FIELDS = frozenset(("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint"))
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
"""By the type of a content part that is text: the field that has it."""
_UNSEEN_PARTS = {"input_image": "image", "image_url": "image", "input_file": "file", "input_audio": "audio"}
"""Parts that a model is told of where it cannot see or hear them: an error would end the session of an agent."""

_MEDIA_PARTS = {"input_image": ("image_url", "detail"), "input_audio": ("input_audio",)}
"""By the type of a content part that is a medium: its fields in a chat, the first of which has it, unless it is a file
of OpenAI's."""
_MEDIA_FIELDS = {
    "input_image": frozenset(("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint")),
    "input_audio": frozenset(("type", "input_audio", "prompt_cache_breakpoint")),
}
_PARTS = ShapeByType(
    dict.fromkeys(_TEXT_PARTS, Shape(_PART_FIELDS)) | {kind: Shape(names) for kind, names in _MEDIA_FIELDS.items()},
    default="text",
)
ITEM_SHAPE = ShapeByType(
    {
        kind: Shape(
            frozenset((*fields, *_OF_ALL_ITEMS, *_NO_OP_VALUES)),
            dict.fromkeys(("content", "output", "summary"), _PARTS),
        )
        for kind, fields in _ITEM_FIELDS.items()
    },
    default="message",
)

INSTRUCTIONS = "instructions"
"""The field of a body whose text goes before its input."""

MAX_ITEMS = 16384
"""Items that an input may have."""

_ROLES = ("user", "assistant", "system", "developer")
_KEEPS_NO_STATE = "this server keeps no state: send the item itself"


class InputMessages:
    """The messages that input items become, in order.

    Reasoning, text and calls of the assistant that follow each other are one message. What the system says before
    anybody else is one, too, once the input has ended.
    """

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.origins: list[str] = []
        """By the place of a message in `messages`, the path of what it was made of."""
        self.content_fields: list[str] = []
        """By the place of a message in `messages`, the field of what it was made of that has its content."""
        self.part_origins: list[str] = []
        """By the place of a part in the first message, the path of what it was made of, if the system said that in
        parts."""
        self._opening: list[tuple[str | list[JsonObject], str]] = []
        """What the system says before anybody else, and the path of each."""
        self._calls: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._warnings: dict[str, str] = {}

    @property
    def warnings(self) -> list[str]:
        """What was left out, or could not be seen, each kind once."""
        return [f"{where}: {text}" for text, where in self._warnings.items()]

    def add_instructions(self, content: str | list[JsonObject], origin: str) -> None:
        """A text of the system's, or its parts, which go with those before it if nobody else has spoken."""
        if self.messages:
            self._add(origin, {"role": "system", "content": content})
        else:
            self._opening.append((content, origin))

    def end(self) -> None:
        """Put what the system says in front; no item may follow."""
        if not self._opening:
            return
        texts = [content for content, _ in self._opening if isinstance(content, str)]
        together = "\n\n".join(texts) if len(texts) == len(self._opening) else self._opening_parts()
        self.messages.insert(0, {"role": "system", "content": together})
        self.origins.insert(0, self._opening[0][1])
        self.content_fields.insert(0, "content")

    def _opening_parts(self) -> list[JsonObject]:
        """What the system says first as the parts of one message: templates may allow one alone. An empty line parts
        what was said apart."""
        parts: list[JsonObject] = []
        for content, origin in self._opening:
            place = origin if origin == INSTRUCTIONS else f"{origin}.content"
            if isinstance(content, str):
                said: list[JsonObject] = [{"type": "text", "text": content}]
                self.part_origins.append(place)
            else:
                said = [*content]
                self.part_origins += [f"{place}[{index}]" for index in range(len(content))]
            if parts and "text" in parts[-1]:
                parts[-1] = parts[-1] | {"text": f"{parts[-1]['text']}\n"}
            elif parts and "text" in said[0]:
                said[0] = said[0] | {"text": f"\n{said[0]['text']}"}
            parts += said
        return parts

    def add_item(self, members: Mapping[str, Any], where: str) -> None:
        """Raises `InvalidArgument` for an item that cannot be read; `field` is its path, which begins with `where`."""
        kind = members.get("type") or ("message" if "role" in members else "item_reference")
        if kind == "item_reference":
            raise InvalidArgument(f"{where}.type: item_reference is not supported: {_KEEPS_NO_STATE}", field=where)
        if isinstance(kind, str) and kind in _HOSTED:
            self._warnings.setdefault(f"items of type {kind} are of OpenAI's own tools, and left out", where)
            return
        if isinstance(kind, str) and kind in _COMPACTIONS:
            self._warnings.setdefault(
                f"items of type {kind} are encrypted, cannot be read here, and are left out", where
            )
            return
        if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
            raise field_error(
                f"{where}.type", f": items of type {shortened(kind)} are not supported; those are {_listed}"
            )
        reject_unsupported(members, _ITEM_FIELDS[kind] | _OF_ALL_ITEMS, _NO_OP_VALUES, f"{where}.")
        {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "custom_tool_call": self._add_custom_call,
            "custom_tool_call_output": self._add_output,
            "local_shell_call": self._add_shell_call,
            "local_shell_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }[kind](members, where)

    def _add_message(self, members: Mapping[str, Any], where: str) -> None:
        role = members.get("role")
        if role not in _ROLES:
            raise field_error(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        content = self._content(members.get("content"), f"{where}.content")
        if role == "assistant":
            self._turn(where, new_after=("content", "tool_calls"))["content"] = content
            if not isinstance(content, str):  # a medium that is refused is named by its place
                self.origins[-1] = where
        elif role == "user":
            self._add(where, {"role": "user", "content": content})
        else:
            self.add_instructions(content, where)

    def _add_call(self, members: Mapping[str, Any], where: str) -> None:
        call_id, arguments = (_string(members, key, where) for key in ("call_id", "arguments"))
        self._add_function(call_id, _called_name(members, where), arguments, where)

    def _add_custom_call(self, members: Mapping[str, Any], where: str) -> None:
        call_id, text = (_string(members, key, where) for key in ("call_id", "input"))
        self._calls.add(call_id)
        custom = {"name": _called_name(members, where), "input": text}
        call = {"id": call_id, "type": "custom", "custom": custom}
        self._turn(where).setdefault("tool_calls", []).append(call)

    def _add_shell_call(self, members: Mapping[str, Any], where: str) -> None:
        call_id, action = _string(members, "call_id", where), members.get("action")
        if not isinstance(action, dict):
            raise field_error(f"{where}.action", "must be an object")
        arguments = {name: value for name, value in action.items() if name != "type" and value is not None}
        self._add_function(call_id, LOCAL_SHELL, json_text(arguments, f"{where}.action"), where)
        if isinstance(members.get("id"), str):  # OpenAI's types name the call so in its output
            self._aliases[members["id"]] = call_id

    def _add_function(self, call_id: str, name: str, arguments: str, where: str) -> None:
        self._calls.add(call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn(where).setdefault("tool_calls", []).append(call)

    def _add_output(self, members: Mapping[str, Any], where: str) -> None:
        named = "call_id" if "call_id" in members or members.get("type") != "local_shell_call_output" else "id"
        call_id = _string(members, named, where)
        content = self._content(members.get("output"), f"{where}.output")
        call_id = self._aliases.get(call_id, call_id)
        if call_id not in self._calls:
            raise field_error(
                f"{where}.{named}", f": there is no call {shortened(call_id)} before it, and {_KEEPS_NO_STATE}"
            )
        self._add(where, {"role": "tool", "tool_call_id": call_id, "content": content}, "output")

    def _add_reasoning(self, members: Mapping[str, Any], where: str) -> None:
        text = self._text(members.get("content") or [], f"{where}.content")
        text = text or self._text(members.get("summary") or [], f"{where}.summary")
        if text:
            self._turn(where, new_after=("reasoning", "content", "tool_calls"))["reasoning"] = text
        elif members.get("encrypted_content"):
            self._warnings.setdefault("encrypted reasoning cannot be read here, and is left out", where)

    def _content(self, content: Any, where: str) -> str | list[JsonObject]:
        """A text or, if there are media in it, the parts of a chat's message, one for each of the content's."""
        parts = content if isinstance(content, list) else []
        if not any(map(_is_medium, parts)):
            return self._text(content, where)
        return [self._chat_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]

    def _chat_part(self, part: Any, where: str) -> JsonObject:
        if not _is_medium(part):
            return {"type": "text", "text": self._part_text(part, where)}
        kind = part["type"]
        reject_unsupported(part, _MEDIA_FIELDS[kind], {}, f"{where}.")
        return {"type": kind} | {name: part[name] for name in _MEDIA_PARTS[kind] if name in part}

    def _text(self, content: Any, where: str) -> str:
        """A text, or the texts of content parts, each from a line of its own on, as in a chat."""
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise field_error(where, "must be a string or a list of text parts")
        return "\n".join(self._part_text(part, f"{where}[{index}]") for index, part in enumerate(content))

    def _part_text(self, part: Any, where: str) -> str:
        if not isinstance(part, dict):
            raise field_error(where, "must be an object")
        members: JsonObject = part
        kind = members.get("type", "text")
        if isinstance(kind, str) and kind in _UNSEEN_PARTS:
            what = _UNSEEN_PARTS[kind]
            if what == "image" and not any(members.get(name) for name in ("image_url", "file_id")):
                raise field_error(f"{where}.image_url", "must be a URL")
            warning = UNSERVED_FILE_WARNING if members.get("file_id") else UNSEEN_WARNING
            self._warnings.setdefault(warning.format(what), where)
            return UNSEEN.format(what)
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise field_error(f"{where}.type", part_complaint(kind, (*_TEXT_PARTS, *_UNSEEN_PARTS)))
        reject_unsupported(members, _PART_FIELDS, {}, f"{where}.")
        return _string(members, _TEXT_PARTS[kind], where)

    def _turn(self, where: str, new_after: tuple[str, ...] = ()) -> JsonObject:
        """The assistant's message that goes on: the last one, unless it has one of the fields `new_after`."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(key) for key in new_after):
            last = {"role": "assistant", "content": ""}
            self._add(where, last)
        return last

    def _add(self, origin: str, message: JsonObject, content_field: str = "content") -> None:
        self.messages.append(message)
        self.origins.append(origin)
        self.content_fields.append(content_field)


def _is_medium(part: Any) -> bool:
    """Whether a part is a medium that is there, and no file of OpenAI's."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _MEDIA_PARTS and part.get(_MEDIA_PARTS[kind][0]) is not None


_listed = ", ".join(_ITEM_FIELDS)


_NO_INPUT = """One of "input" or "previous_response_id" or 'prompt' or 'conversation_id' must be provided."""
"""OpenAI's words."""


def read_input(content: str | list[JsonObject] | None, instructions: str | None) -> InputMessages:
    """The messages of a body's `input` and `instructions`.

    Raises:
        ApiError: there is no input.
        InvalidArgument: an item cannot be read, or none says anything; `field` is its path.
    """
    read = InputMessages()
    if instructions:
        read.add_instructions(instructions, INSTRUCTIONS)
    if not content:
        raise ApiError(_NO_INPUT, 400, "missing_required_parameter", field="input")
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if len(items) > MAX_ITEMS:
        raise field_error("input", f": {len(items)} items are more than the {MAX_ITEMS} there may be")
    for index, item in enumerate(items):
        read.add_item(item, "input" if isinstance(content, str) else f"input[{index}]")
    read.end()
    if not read.messages:
        raise field_error("input", "has nothing that could be answered")
    return read


def model_name(namespace: str, name: str) -> str:
    """The name that a model knows a tool of a namespace by; nothing tells where it is to be parted again."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def _called_name(members: Mapping[str, Any], where: str) -> str:
    """The name of the called tool as the model knows it."""
    namespace = "" if members.get("namespace") is None else _string(members, "namespace", where)
    return model_name(namespace, _string(members, "name", where))


def _string(members: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(members.get(key), str):
        raise field_error(f"{where}.{key}", "must be a string")
    return str(members[key])
