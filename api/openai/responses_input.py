"""The input items of a /v1/responses body become the messages of a chat body.

https://platform.openai.com/docs/api-reference/responses/create. Knows nothing of models and templates.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from ...core.errors import InvalidArgument
from .json_body import NoOpValues, reject_unsupported, shortened

JsonObject: TypeAlias = dict[str, Any]

_OF_ALL_ITEMS = frozenset(("type", "id", "status"))
_ITEM_FIELDS = {
    "message": frozenset(("role", "content", "phase")),
    "function_call": frozenset(("call_id", "name", "arguments")),
    "function_call_output": frozenset(("call_id", "output", "name")),
    "reasoning": frozenset(("summary", "content", "encrypted_content")),
}
"""By the type of an item that is read: its fields, those of all items left out."""

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

MAX_ITEMS = 16384
"""Items that an input may have."""

_ROLES = ("user", "assistant", "system", "developer")
_KEEPS_NO_STATE = "this server keeps no state: send the item itself"


class InputMessages:
    """The messages that input items become, in order.

    `origins[i]`: the path of what message i was made of. The assistant's reasoning, text and calls that follow each
    other are one message; what the system says before anybody else is one, too, once the input has ended. `unread`: the
    path of the first reasoning that was left out, for it is encrypted.
    """

    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.origins: list[str] = []
        self.unread = ""
        self._opening: list[tuple[str, str]] = []
        self._calls: set[str] = set()

    def add_instructions(self, text: str, origin: str) -> None:
        """A text of the system's, which goes with those before it if nobody else has spoken."""
        if self.messages:
            self._add(origin, {"role": "system", "content": text})
        else:
            self._opening.append((text, origin))

    def end(self) -> None:
        """No item follows."""
        if self._opening:
            texts = "\n\n".join(text for text, _ in self._opening)
            self.messages.insert(0, {"role": "system", "content": texts})
            self.origins.insert(0, self._opening[0][1])

    def add_item(self, members: Mapping[str, Any], where: str) -> None:
        """Raises `InvalidArgument` for an item that cannot be read; `field` is its path, which begins with `where`."""
        kind = members.get("type") or ("message" if "role" in members else "item_reference")
        if kind == "item_reference":
            raise InvalidArgument(f"{where}.type: item_reference is not supported: {_KEEPS_NO_STATE}", field=where)
        if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
            message = f"{where}.type: items of type {shortened(kind)} are not supported; those are {_listed}"
            raise InvalidArgument(message, field=f"{where}.type")
        reject_unsupported(members, _ITEM_FIELDS[kind] | _OF_ALL_ITEMS, _NO_OP_VALUES, f"{where}.")
        {
            "message": self._add_message,
            "function_call": self._add_call,
            "function_call_output": self._add_output,
            "reasoning": self._add_reasoning,
        }[kind](members, where)

    def _add_message(self, members: Mapping[str, Any], where: str) -> None:
        role, text = members.get("role"), _text(members.get("content"), f"{where}.content")
        if role not in _ROLES:
            raise InvalidArgument(f"{where}.role must be one of {', '.join(_ROLES)}", field=f"{where}.role")
        if role in ("system", "developer"):
            self.add_instructions(text, where)
        elif role == "assistant":
            self._turn(where, new_after=("content", "tool_calls"))["content"] = text
        else:
            self._add(where, {"role": "user", "content": text})

    def _add_call(self, members: Mapping[str, Any], where: str) -> None:
        call_id, name, arguments = (_string(members, key, where) for key in ("call_id", "name", "arguments"))
        self._calls.add(call_id)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn(where).setdefault("tool_calls", []).append(call)

    def _add_output(self, members: Mapping[str, Any], where: str) -> None:
        call_id, text = _string(members, "call_id", where), _text(members.get("output"), f"{where}.output")
        if call_id not in self._calls:
            message = (
                f"{where}.call_id: there is no function_call {shortened(call_id)} before it, and {_KEEPS_NO_STATE}"
            )
            raise InvalidArgument(message, field=f"{where}.call_id")
        self._add(where, {"role": "tool", "tool_call_id": call_id, "content": text})

    def _add_reasoning(self, members: Mapping[str, Any], where: str) -> None:
        text = _text(members.get("content") or [], f"{where}.content")
        text = text or _text(members.get("summary") or [], f"{where}.summary")
        if text:
            self._turn(where, new_after=("reasoning", "content", "tool_calls"))["reasoning"] = text
        elif members.get("encrypted_content"):
            self.unread = self.unread or where

    def _turn(self, where: str, new_after: tuple[str, ...] = ()) -> JsonObject:
        """The assistant's message that goes on: the last one, unless it has one of the fields `new_after`."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(key) for key in new_after):
            last = {"role": "assistant", "content": ""}
            self._add(where, last)
        return last

    def _add(self, origin: str, message: JsonObject) -> None:
        self.messages.append(message)
        self.origins.append(origin)


_listed = ", ".join(_ITEM_FIELDS)


def read_input(given: str | list[JsonObject], instructions: str | None) -> InputMessages:
    """The messages of a body's `input` and `instructions`.

    Raises `InvalidArgument` for an item that cannot be read, or for none at all; `field` is its path.
    """
    read = InputMessages()
    if instructions:
        read.add_instructions(instructions, "instructions")
    if not given:
        raise InvalidArgument("input must not be empty", field="input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if len(items) > MAX_ITEMS:
        raise InvalidArgument(f"input: {len(items)} items are more than the {MAX_ITEMS} there may be", field="input")
    for index, item in enumerate(items):
        read.add_item(item, "input" if isinstance(given, str) else f"input[{index}]")
    read.end()
    if not read.messages:
        raise InvalidArgument("input has nothing that could be answered", field="input")
    return read


def _text(content: Any, where: str) -> str:
    """A text, or the texts of content parts, each from a line of its own on, as in a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(f"{where} must be a string or a list of text parts", field=where)
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    members: JsonObject = part if isinstance(part, dict) else {}
    kind = members.get("type", "text")
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        message = f"{where}.type: {shortened(kind)} is not supported: this server reads text alone"
        raise InvalidArgument(message, field=f"{where}.type")
    reject_unsupported(members, _PART_FIELDS, {}, f"{where}.")
    return _string(members, _TEXT_PARTS[kind], where)


def _string(members: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(members.get(key), str):
        raise InvalidArgument(f"{where}.{key} must be a string", field=f"{where}.{key}")
    return str(members[key])
