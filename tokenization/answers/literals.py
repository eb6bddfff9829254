"""Reads the values of arguments as models write them, and passes them on as JSON, character by character. Only bare
control characters and needless backslashes in strings are changed. Nesting is unlimited, since nothing here recurs."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from .answer_text import AnswerText, MalformedCall, Markers, Reading, ShortText, Sink

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[-+.\w]*")
_BARE_KEY = re.compile(r"[^\s:{}\[\],\"\\<|]*")
_LONGEST_WORD = 128
"""The most characters of a number, a word such as `true`, or an unquoted key, which wait until they are complete."""
_JSON_ESCAPES = frozenset('"\\/bfnrt')
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_PYTHON_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {
    "v": "\v",
    "\n": "",
}


class Dialect(NamedTuple):
    quotes: tuple[str, ...] = ('"',)
    """What begins and ends a string."""
    words: Mapping[str, str] = {"true": "true", "false": "false", "null": "null"}
    """The words in place of JSON's."""
    escapes: bool = True
    """Whether a backslash escapes in strings."""
    python: bool = False
    """Whether escapes are Python's."""
    bare_keys: bool = False
    """Whether an object's keys are unquoted."""


JSON = Dialect()
PYTHON = Dialect(('"', "'"), {**JSON.words, "True": "true", "False": "false", "None": "null"}, python=True)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def read_value(text: AnswerText, sink: Sink, dialect: Dialect = JSON) -> Reading[None]:
    """Pass on the next value.

    Raises:
        MalformedCall: there is none, or it breaks off; its valid part is passed on.
    """
    open_ends: list[str] = []
    while True:
        yield from text.spaces(sink)
        if begin := (yield from text.accept("{", "[")):
            sink(begin)
            open_ends.append("}" if begin == "{" else "]")
            yield from text.spaces(sink)
            if not (yield from text.accept(open_ends[-1])):
                if begin == "{":
                    yield from _read_key(text, sink, dialect)
                continue
            sink(open_ends.pop())
        elif quote := (yield from text.accept(*dialect.quotes)):
            sink('"')
            yield from read_string(text, sink, dialect, quote)
            sink('"')
        else:
            sink((yield from _read_word(text, dialect)))
        if not (yield from _read_end(text, sink, dialect, open_ends)):
            return


def _read_end(text: AnswerText, sink: Sink, dialect: Dialect, open_ends: list[str]) -> Reading[bool]:
    """Read what follows a value in open lists and objects; whether another value comes."""
    while open_ends:
        yield from text.spaces(sink)
        if not (mark := (yield from text.accept(",", open_ends[-1]))):
            raise MalformedCall
        sink(mark)
        if mark == ",":
            if open_ends[-1] == "}":
                yield from text.spaces(sink)
                yield from _read_key(text, sink, dialect)
            return True
        open_ends.pop()
    return False


def _read_key(text: AnswerText, sink: Sink, dialect: Dialect) -> Reading[None]:
    if quote := (yield from text.accept(*dialect.quotes)):
        sink('"')
        yield from read_string(text, sink, dialect, quote)
        sink('"')
    elif dialect.bare_keys and (key := (yield from text.look(_BARE_KEY, _LONGEST_WORD))):
        sink(f'"{quoted(text.skip(len(key)))}"')
    else:
        raise MalformedCall
    yield from text.spaces(sink)
    if not (yield from text.accept(":")):
        raise MalformedCall
    sink(":")


def read_string(text: AnswerText, sink: Sink, dialect: Dialect = JSON, quote: str = '"') -> Reading[None]:
    """Pass on the rest of a string in JSON's form, and skip the closing `quote`."""
    markers = _string_markers(quote, dialect.escapes)
    while True:
        marker = yield from text.find(markers, lambda piece: sink(quoted(piece)))
        if marker == quote:
            return
        if not marker:
            raise MalformedCall
        sink((yield from _read_python_escape(text) if dialect.python else _read_json_escape(text)))


def read_short(text: AnswerText, most: int) -> Reading[str]:
    """Read a JSON string of at most `most` characters.

    Raises:
        MalformedCall: there is none, or it is longer.
    """
    if not (yield from text.accept('"')):
        raise MalformedCall
    string = ShortText(most)
    yield from read_string(text, string.add)
    return str(json.loads(f'"{string}"'))


@cache
def _string_markers(quote: str, escapes: bool) -> Markers:
    return Markers((quote, "\\") if escapes else (quote,))


def _read_json_escape(text: AnswerText) -> Reading[str]:
    letter = yield from text.peek()
    if letter in _JSON_ESCAPES:
        return "\\" + text.skip(len(letter))
    if letter == "u" and _is_hex(code := (yield from text.peek(5))[1:], 4):
        text.skip(5)
        return f"\\u{code}"
    return "\\\\"


def _read_python_escape(text: AnswerText) -> Reading[str]:
    letter = yield from text.peek()
    if letter in _PYTHON_ESCAPES:
        text.skip(1)
        return quoted(_PYTHON_ESCAPES[letter])
    size = _HEX_ESCAPES.get(letter, 0)
    if size and _is_hex(code := (yield from text.peek(1 + size))[1:], size) and int(code, 16) < 0x110000:
        text.skip(1 + size)
        return json.dumps(chr(int(code, 16)))[1:-1]
    return "\\\\"


def _is_hex(code: str, size: int) -> bool:
    return len(code) == size and set(code) <= set("0123456789abcdefABCDEF")


def _read_word(text: AnswerText, dialect: Dialect) -> Reading[str]:
    """A whole number or word."""
    word = yield from text.look(_WORD, _LONGEST_WORD)
    if word not in dialect.words and not _NUMBER.fullmatch(word):
        raise MalformedCall
    text.skip(len(word))
    return dialect.words.get(word, word)


_MOST_PARTS = 256
"""The most schemas that are searched for one argument, references and alternatives included."""
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"} | {
    type(None): "null"
}


def argument_types(parameters: str) -> Mapping[str, frozenset[str]]:
    """The JSON types that each argument may have, by a schema as JSON text; none if the schema does not say."""
    try:
        schema = json.loads(parameters)
        return {key: schema_types(value, schema) for key, value in schema["properties"].items()}
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return {}


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a schema allows; `root` has what it refers to. Raises LookupError and TypeError for
    nonsense."""
    return frozenset(_types(schema, root))


def resolve_reference(schema: Any, root: Any) -> Any:
    """The schema that another refers to within `root`, or itself. Raises LookupError and TypeError for nonsense."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    for step in reference[2:].split("/"):
        root = root[step.replace("~1", "/").replace("~0", "~")]
    return root


def _types(schema: Any, root: Any) -> Iterator[str]:
    waiting = [schema]
    for _ in range(_MOST_PARTS):
        if not waiting:
            return
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        if types := part.get("type"):
            yield from [types] if isinstance(types, str) else types
        elif "enum" in part or "const" in part:
            yield from (_NAMES[type(value)] for value in part.get("enum", [part.get("const")]))
        elif (target := resolve_reference(part, root)) is not part:
            waiting.append(target)
        for several in ("anyOf", "oneOf", "allOf"):
            waiting += part.get(several, ())


def typed_argument(text: str, types: frozenset[str]) -> str:
    """The JSON of a value. It is a string if it fits none of the types or, without types, is not JSON."""
    bare = text.strip()
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        word = {"true": "true", "false": "false", "none": "null"}.get(bare.lower())
        if word is not None and ("null" if word == "null" else "boolean") in types:
            return word
        return json.dumps(text, ensure_ascii=False)
    kind = _NAMES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return bare if fits and kind != "string" else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
