"""Calls in Python's syntax: Llama 3.2 and 4, Gemma's tool code."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .answer_reader import CallWriter
from .answer_text import AnswerText, MalformedCall, Reading
from .grammar_parts import NO_LAYOUT, CallLayout, Part, argument_list, const, either, json_value, sequence
from .literals import PYTHON, read_value, schema_types
from .marked_answer import random_id
from .named_calls import read_name

_KEYWORD = re.compile(r"\w*[ ]*=?")
_LONGEST_KEYWORD = 128
_BOOLEANS = ("True", "False", "true", "false")
"""JSON's words are read too: OLMo 3's template writes them."""


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls with keyword arguments in a list or, if `bare`, on lines of their own. They follow one of `starts` or
    `openings`; `end` may be missing."""

    starts: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    end: str = ""
    bare: bool = False
    layout: CallLayout = NO_LAYOUT
    new_id = staticmethod(random_id)

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.starts, self.end)))

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        arguments = argument_list(parameters, partial(_argument, parameters), ", ")
        return sequence([const(f"{name}("), arguments, const(")")])

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        yield from text.spaces()
        listed = start == "[" or (yield from text.accept("["))
        if not listed and not self.bare:
            raise MalformedCall
        while True:
            yield from text.spaces()
            yield from _read_call(text, calls)
            yield from text.spaces()
            if listed:
                if (yield from text.accept("]")):
                    break
                if not (yield from text.accept(",")):
                    raise MalformedCall
            elif (yield from text.peek(len(self.end))) == self.end or not (yield from text.peek()):
                break
        if self.end:
            yield from text.spaces()
            yield from text.accept(self.end)


def _argument(parameters: Mapping[str, Any], key: str, schema: Any) -> Part:
    """The grammar of an argument. JSON within lists and objects is close enough to Python."""
    boolean = schema_types(schema, parameters) == {"boolean"} and not schema.keys() & {"enum", "const"}
    return sequence([const(f"{key}="), either([*map(const, _BOOLEANS)]) if boolean else json_value(schema)])


def _read_call(text: AnswerText, calls: CallWriter) -> Reading[None]:
    name = yield from read_name(text, calls)
    if not (yield from text.accept("(")):
        raise MalformedCall
    keyword = yield from _read_keyword(text)
    calls.begin(name)
    calls.write("{")
    while keyword:
        calls.write(f"{json.dumps(keyword, ensure_ascii=False)}: ")
        yield from text.spaces()
        yield from read_value(text, calls.write, PYTHON)
        yield from text.spaces()
        if not (mark := (yield from text.accept(",", ")"))):
            raise MalformedCall
        if mark == ")":
            break
        keyword = yield from _read_keyword(text)
        calls.write(", " if keyword else "")
    calls.write("}")
    calls.end()


def _read_keyword(text: AnswerText) -> Reading[str]:
    """The name of the next argument, read with its equals sign; empty at the end of the call."""
    yield from text.spaces()
    if (yield from text.accept(")")):
        return ""
    keyword = yield from text.look(_KEYWORD, _LONGEST_KEYWORD)
    if not keyword.endswith("=") or len(keyword) == 1:
        raise MalformedCall
    return text.skip(len(keyword)).removesuffix("=").rstrip()
