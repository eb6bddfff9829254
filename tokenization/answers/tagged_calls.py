"""Calls as tags with an element for each argument: Qwen 3 Coder and its kin. Values are untyped text; the tool's schema
gives their types."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .answer_reader import CallWriter
from .answer_text import AnswerText, MalformedCall, Markers, Reading, Sink
from .grammar_parts import (
    CallLayout,
    CallSection,
    Part,
    any_text,
    argument_list,
    const,
    either,
    json_value,
    sequence,
    tag,
)
from .literals import quoted, schema_types, typed_argument
from .marked_answer import random_id
from .named_calls import read_name

_KEY = re.compile(r"[^<>\n]*>?")
_LONGEST_KEY = 256
_VALUE_END = "</parameter>"
_VALUE_ENDS = Markers((_VALUE_END,))
_FUNCTION, _FUNCTION_END, _PARAMETER = "<function=", "</function>", "<parameter="


@dataclass(frozen=True, slots=True)
class TaggedCalls:
    """`<function=NAME>`, `<parameter=KEY>`, the value on lines of its own, `</parameter>`, `</function>`, between
    `start` and `end`, which models may leave out."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    openings = ()
    new_id = staticmethod(random_id)

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start, _FUNCTION)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end)

    @property
    def layout(self) -> CallLayout:
        whole = CallSection(f"{self.start}\n{_FUNCTION}", f"{_FUNCTION_END}\n{self.end}", self.start)
        return CallLayout((whole, CallSection(_FUNCTION, _FUNCTION_END, _FUNCTION)), "\n")

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        return sequence([const(f"{name}>\n"), argument_list(parameters, partial(_argument, parameters))])

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        yield from text.spaces()
        if start != _FUNCTION and not (yield from text.accept(_FUNCTION)):
            raise MalformedCall
        while True:
            yield from self._read_function(text, calls)
            yield from text.spaces()
            if not (yield from text.accept(_FUNCTION)):
                break
        yield from text.accept(self.end)

    def _read_function(self, text: AnswerText, calls: CallWriter) -> Reading[None]:
        name = yield from read_name(text, calls)
        if not (yield from text.accept(">")):
            raise MalformedCall
        yield from text.spaces()
        mark = yield from text.accept(_PARAMETER, _FUNCTION_END)
        if not mark:
            raise MalformedCall
        calls.begin(name)
        calls.write("{")
        types = calls.types(name)
        while mark == _PARAMETER:
            yield from _read_parameter(text, calls.write, types)
            yield from text.spaces()
            mark = yield from text.accept(_PARAMETER, _FUNCTION_END)
            if mark == _PARAMETER:
                calls.write(", ")
            elif not mark and (yield from text.peek(len(self.end))) != self.end:
                raise MalformedCall
        calls.write("}")
        calls.end()


def _argument(parameters: Mapping[str, Any], key: str, schema: Any) -> Part:
    """The grammar of an argument: JSON unless it is text, which is free unless the schema lists its values."""
    types = schema_types(schema, parameters)
    values = schema.get("enum")
    if types == {"string"} and isinstance(values, list):
        value = either([const(str(listed)) for listed in values])
    elif types and "string" not in types:
        value = json_value(schema)
    else:
        value = any_text()
    return tag(f"{_PARAMETER}{key}>\n", value, f"\n{_VALUE_END}\n")


def _read_parameter(text: AnswerText, sink: Sink, types: Mapping[str, frozenset[str]]) -> Reading[None]:
    key = yield from text.look(_KEY, _LONGEST_KEY)
    if not key.endswith(">"):
        raise MalformedCall
    key = text.skip(len(key)).removesuffix(">")
    sink(f"{json.dumps(key, ensure_ascii=False)}: ")
    yield from text.accept("\n")
    kinds = types.get(key, frozenset())
    if kinds == {"string"}:
        yield from _read_string(text, sink)
        return
    pieces: list[str] = []
    if not (yield from text.find(_VALUE_ENDS, pieces.append)):
        raise MalformedCall
    sink(typed_argument("".join(pieces).removesuffix("\n"), kinds))


def _read_string(text: AnswerText, sink: Sink) -> Reading[None]:
    """Read a text up to its end tag, without the line break before it."""
    waiting = ""

    def write(piece: str) -> None:
        nonlocal waiting
        piece = waiting + piece
        waiting = "\n" if piece.endswith("\n") else ""
        sink(quoted(piece.removesuffix("\n")))

    sink('"')
    if not (yield from text.find(_VALUE_ENDS, write)):
        raise MalformedCall
    sink('"')
