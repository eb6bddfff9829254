"""Calls as a name followed by JSON: newer Mistral, DeepSeek, Kimi."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .answer_reader import CallWriter
from .answer_text import AnswerText, MalformedCall, Reading
from .grammar_parts import NO_LAYOUT, CallLayout, Part, const, json_value, regex, sequence
from .json_calls import JsonCalls
from .literals import read_value
from .marked_answer import random_id

_NAME = re.compile(r"[^\s\[\]{}()<>|=,\"'`｜]*")
_ID = re.compile(r"[\w:.-]*")
_LONGEST_ID = 64
_LONGEST_NUMBER = 16
_MARKER = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")


def read_name(text: AnswerText, calls: CallWriter) -> Reading[str]:
    """The name of the declared tool that comes next.

    Raises:
        MalformedCall: none does.
    """
    name = calls.declared((yield from text.look(_NAME, calls.longest_name + 1)))
    return text.skip(len(name))


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Calls behind `start`, each a name, an optional id that is dropped, and arguments."""

    start: str
    begin: str = ""
    """Begins each call, if not empty."""
    prefix: str = ""
    """Stands before the name."""
    before_arguments: str = ""
    before_id: str = ""
    before_number: str = ""
    """Stands between the name and the call's number; the call's id is all three, with `prefix`."""
    fence: str = ""
    """Stands behind the arguments."""
    end: str = ""
    """Ends each call."""
    close: str = ""
    """Ends all calls."""
    lists: JsonCalls | None = None
    """Calls may also be JSON objects, single or in a list."""
    writes_lists: bool = False
    """Grammars lay calls out as JSON objects."""
    layout: CallLayout = NO_LAYOUT
    new_id: Callable[[], str] = field(default=random_id)
    openings = ()

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        words = self.start, self.begin, self.prefix, self.before_id, self.before_arguments, self.end, self.close
        return tuple(part for word in words for part in _MARKER.findall(word))

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        if self.lists and self.writes_lists:
            return self.lists.call_part(name, parameters)
        named = [const(f"{self.begin}{self.prefix}{name}{self.before_number}")]
        named += [regex("[0-9]{1,4}")] if self.before_number else []
        return sequence([*named, const(self.before_arguments), json_value(parameters), const(self.fence + self.end)])

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        yield from text.spaces()
        if self.lists and (yield from text.peek()) in ("[", "{"):
            yield from self.lists.read(text, calls, start)
            return
        while True:
            if self.begin and not (yield from text.accept(self.begin)):
                raise MalformedCall
            yield from self._read_call(text, calls)
            yield from text.spaces()
            if not self.begin:
                return
            if self.close and (yield from text.accept(self.close)):
                return
            if (yield from text.peek(len(self.begin))) != self.begin:
                return

    def _read_call(self, text: AnswerText, calls: CallWriter) -> Reading[None]:
        yield from text.spaces()
        if self.prefix:
            yield from text.accept(self.prefix)
        call_id = ""
        if self.before_number:
            name, call_id = yield from self._read_numbered(text, calls)
        else:
            name = yield from read_name(text, calls)
        if self.before_id and (yield from text.accept(self.before_id)):
            text.skip(len((yield from text.look(_ID, _LONGEST_ID))))
        yield from text.spaces()
        if self.before_arguments:
            yield from text.accept(self.before_arguments.strip())
            yield from text.spaces()
        if (yield from text.peek()) != "{":
            raise MalformedCall
        calls.begin(name, call_id)
        yield from read_value(text, calls.write)
        calls.end()
        for word in (self.fence, self.end):
            if word:
                yield from text.spaces()
                yield from text.accept(word.strip())

    def _read_numbered(self, text: AnswerText, calls: CallWriter) -> Reading[tuple[str, str]]:
        """A name and its number: the name, and the id that both make."""
        written = yield from text.look(_ID, calls.longest_name + _LONGEST_NUMBER)
        name, colon, number = written.rpartition(self.before_number)
        name = calls.declared(name if colon and number.isdigit() else written)
        text.skip(len(written))
        return name, f"{self.prefix}{written}" if name != written else ""
