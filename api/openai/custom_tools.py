"""Custom tools of OpenAI's API, whose input is a free text: to a model they are functions with that text as the one
argument. Knows no endpoint."""

import re
from typing import Any

import orjson

from .json_body import field_error

_INPUT = "input"
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PIECE = re.compile(r'(?:[^"\\]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])*')
"""The part of a JSON string that can be read by itself: half a character is left for the next piece."""


def custom_description(description: str, syntax: str, definition: str) -> str:
    """The description of a tool, with the grammar of its input, if it has one."""
    grammar = f"The input has to match this grammar ({syntax}):\n{definition}" if definition else ""
    return "\n".join(text for text in (description, grammar) if text)


def custom_parameters(syntax: str, definition: str) -> dict[str, Any]:
    """The schema of the arguments: a text, and what can be enforced of its grammar."""
    text: dict[str, Any] = {"type": "string"}
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}


def custom_arguments(text: str, field: str) -> str:
    """The arguments of a call with this input. Raises `InvalidArgument` if it is no Unicode."""
    try:
        return orjson.dumps({_INPUT: text}).decode()
    except orjson.JSONEncodeError:
        raise field_error(field, "is not valid Unicode") from None


class CustomInput:
    """Reads the input of a call out of its arguments, which come in pieces. What is no such JSON is given on as it is,
    when the call has ended."""

    def __init__(self) -> None:
        self._rest = ""
        self._begun = False

    def push(self, arguments: str) -> str:
        """The text of the input that these arguments complete."""
        self._rest += arguments
        if not self._begun:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._begun, self._rest = True, self._rest[begin.end() :]
        piece = _PIECE.match(self._rest)
        assert piece is not None
        self._rest = self._rest[piece.end() :]
        try:
            text: str = orjson.loads(f'"{piece[0]}"')
        except orjson.JSONDecodeError:
            return piece[0]
        return text

    def finish(self) -> str:
        """The rest of the input, when the call has ended."""
        rest, self._rest = self._rest, ""
        return "" if self._begun else rest.removesuffix("{}")


def whole_input(arguments: str) -> str:
    """The input in the whole arguments of a call."""
    reader = CustomInput()
    return reader.push(arguments) + reader.finish()
