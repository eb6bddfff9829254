"""Messages to clients for msgspec's validation errors. Knows nothing of the types that are converted."""

import re
from typing import NamedTuple

import msgspec

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?P<limits>.*?)(, got `(?P<got>[^`]+)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<name>[^`]*)`")


class ValidationMismatch(NamedTuple):
    """`path`: where, as in `messages[0].content`; empty for the whole. `reason`: what must be there ("must be a number
    <= 1"), or what else is wrong. `got`: what is there instead ("a string"), empty where msgspec does not tell.
    """

    path: str
    reason: str
    got: str = ""

    def __str__(self) -> str:
        return f"{self.reason}, got {self.got}" if self.got else self.reason


def describe_validation_error(error: msgspec.ValidationError) -> ValidationMismatch:
    text, _, where = str(error).partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")  # of a key: in which object
    if named := _NAMED.fullmatch(text):
        path = f"{path}.{named['name']}".lstrip(".")
        return ValidationMismatch(path, "is missing" if named["problem"].startswith("missing") else "is unknown")
    if expected := _EXPECTED.fullmatch(text):
        kinds = [_kind(name) for name in expected["kinds"].split(" | ") if name != "null"]
        return ValidationMismatch(
            path, f"must be {' or '.join(kinds)}{expected['limits']}", _kind(expected["got"] or "")
        )
    return ValidationMismatch(path, f"is wrong: {text}")


def _kind(name: str) -> str:
    return _KINDS.get(name, name)
