"""Calls as JSON objects: Hermes and Qwen, Llama 3, older Mistral, Phi 4, Granite."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .answer_reader import CallWriter
from .answer_text import AnswerText, MalformedCall, Reading
from .grammar_parts import NO_LAYOUT, CallLayout, Part, const, json_value, sequence
from .literals import read_short, read_value
from .marked_answer import random_id

_LONGEST_KEY = 64
_ESCAPED = 6
"""The characters of an escaped character."""
_ARGUMENTS = ("arguments", "parameters")
_BEFORE_NAME = ("name", "type", "id")
"""The keys that may come first in an object without a marker; any other makes it content at once."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as objects with a name and arguments, single or in a list, behind one of `starts` or `openings`."""

    starts: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    end: str = ""
    """The text behind the calls, which may be missing."""
    separator: str = ""
    """The text between objects that are in no list."""
    layout: CallLayout = NO_LAYOUT
    arguments: str = "arguments"
    """The key of the arguments in a grammar."""
    new_id: Callable[[], str] = field(default=random_id)

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.starts, self.end)))

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        begin = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": '
        return sequence([const(begin), json_value(parameters), const("}")])

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        if start in ("{", "["):
            opened = start
        else:
            yield from text.spaces()
            opened = yield from text.accept("{", "[")
        if opened == "[":
            yield from self._read_list(text, calls, start)
        elif opened:
            yield from self._read_objects(text, calls, start)
        else:
            raise MalformedCall
        if self.end:
            yield from text.spaces()
            yield from text.accept(self.end)

    def _read_list(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        while True:
            yield from text.spaces()
            if not (yield from text.accept("{")):
                raise MalformedCall
            yield from _read_call(text, calls, marked=start not in self.openings)
            yield from text.spaces()
            mark = yield from text.accept(",", "]")
            if mark == "]":
                return
            if not mark:
                raise MalformedCall

    def _read_objects(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        while True:
            yield from _read_call(text, calls, marked=start not in self.openings)
            if not self.separator:
                return
            yield from text.spaces()
            if not (yield from text.accept(self.separator)):
                return
            yield from text.spaces()
            if not (yield from text.accept("{")):
                raise MalformedCall


def _read_call(text: AnswerText, calls: CallWriter, marked: bool) -> Reading[None]:
    """Read the rest of an object. Arguments that come before the name wait for it."""
    name = ""
    waiting = list[str]()
    has_begun = False
    while (key := (yield from _read_key(text))) is not None:
        if not (marked or name or key in _BEFORE_NAME):
            raise MalformedCall
        if key == "name" and not name:
            name = calls.declared((yield from read_short(text, _ESCAPED * calls.longest_name)))
        elif key in _ARGUMENTS and not has_begun and not waiting:
            if (yield from text.peek()) != "{":
                yield from _read_null(text)
            elif name:
                calls.begin(name)
                has_begun = True
                yield from read_value(text, calls.write)
                calls.end()
            else:
                yield from read_value(text, waiting.append)
        else:
            yield from read_value(text, len)
        yield from text.spaces()
        if not (yield from text.accept(",")):
            if not (yield from text.accept("}")):
                raise MalformedCall
            break
    if has_begun:
        text.hold()  # the rest of the object, too, was part of the call
    else:
        calls.begin(calls.declared(name))
        calls.write("".join(waiting) or "{}")
        calls.end()


def _read_key(text: AnswerText) -> Reading[str | None]:
    """The next key, read with its colon; None at the object's end."""
    yield from text.spaces()
    if (yield from text.accept("}")):
        return None
    key = yield from read_short(text, _LONGEST_KEY)
    yield from text.spaces()
    if not (yield from text.accept(":")):
        raise MalformedCall
    yield from text.spaces()
    return key


def _read_null(text: AnswerText) -> Reading[None]:
    if not (yield from text.accept("null")):
        raise MalformedCall
