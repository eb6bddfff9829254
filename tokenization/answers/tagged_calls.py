"""Calls as tags with an element for each argument: Qwen 3 Coder, Seed-OSS, GLM, MiniMax, DeepSeek V3.2. Values are
untyped text; the tool's schema gives their types, or the tag does."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
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
from .literals import quoted, read_value, schema_types, typed_argument
from .marked_answer import random_id
from .named_calls import read_name

_KEY = re.compile(r'[^<>\n"]*')
_LONGEST_KEY = 256
_TAG = re.compile(r"</?[^<>=\s｜]+>|｜\w+｜")


@dataclass(frozen=True)
class TaggedCalls:
    """Calls between `start` and `end`, each a name and its arguments. By default they are Qwen's: `<function=NAME>`,
    `<parameter=KEY>`, the value on lines of its own, `</parameter>`, `</function>`."""

    start: str = "<tool_call>"
    end: str = "</tool_call>"
    """The text behind all calls, which may be missing."""
    call_begin: str = "<function="
    """The text before the name; empty if `start` is."""
    name_end: str = ">"
    call_end: str = "</function>"
    key_begin: str = "<parameter="
    key_end: str = ">"
    json_key_end: str = ""
    """In place of `key_end` if the value is JSON, which then is no longer found by the schema; empty if it is."""
    value_begin: str = ""
    value_end: str = "</parameter>"
    lines: bool = True
    """Whether a value stands on lines of its own."""
    space: str = "\n"
    """What a model writes between tags."""
    alone: bool = True
    """Whether models leave out `start`, so that `call_begin` begins calls, too."""
    several: bool = False
    """Whether one section has all calls."""
    openings = ()
    new_id = staticmethod(random_id)

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start, self.call_begin) if self.alone else (self.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        words = [self.start, self.end, self.call_begin, self.call_end, self.key_begin, self.key_end]
        words += [self.value_begin, self.value_end]
        return tuple(dict.fromkeys(part for word in words for part in _TAG.findall(word)))

    @property
    def layout(self) -> CallLayout:
        section = CallSection(f"{self.start}{self.space}", f"{self.space}{self.end}", self.start)
        if self.several:
            return CallLayout((section._replace(end=self.end),), several=True)
        if not self.call_begin:
            return CallLayout((CallSection(self.start, self.call_end, self.start),), self.space)
        whole = CallSection(f"{section.begin}{self.call_begin}", f"{self.call_end}{section.end}", self.start)
        return CallLayout((whole, CallSection(self.call_begin, self.call_end, self.call_begin)), self.space)

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        arguments = argument_list(parameters, partial(self._argument, parameters))
        begin, end = (self.call_begin, self.call_end + self.space) if self.several else ("", "")
        return sequence([const(f"{begin}{name}{self.name_end}{self.space}"), arguments, *([const(end)] if end else [])])

    def _argument(self, parameters: Mapping[str, Any], key: str, schema: Any) -> Part:
        """The grammar of an argument: JSON unless it is text, which is free unless the schema lists its values."""
        types = schema_types(schema, parameters)
        values = schema.get("enum")
        key_end = self.key_end
        if types == {"string"} and isinstance(values, list):
            value = either([const(str(listed)) for listed in values])
        elif types and "string" not in types:
            value = json_value(schema)
            key_end = self.json_key_end or key_end
        else:
            value = any_text(self._next_tags)
        line = "\n" if self.lines else ""
        begin = f"{self.key_begin}{key}{key_end}{self.value_begin and self.space}{self.value_begin}{line}"
        return tag(begin, value, f"{line}{self.value_end}{self.space}")

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        yield from text.spaces()
        if start != self.call_begin and self.call_begin and not (yield from text.accept(self.call_begin)):
            raise MalformedCall
        while True:
            yield from self._read_call(text, calls)
            yield from text.spaces()
            if not self.call_begin or not (yield from text.accept(self.call_begin)):
                break
        if self.end:
            yield from text.accept(self.end)

    def _read_call(self, text: AnswerText, calls: CallWriter) -> Reading[None]:
        name = yield from read_name(text, calls)
        if self.name_end and not (yield from text.accept(self.name_end)):
            raise MalformedCall
        yield from text.spaces()
        if self.json_key_end and (yield from text.peek()) == "{":
            calls.begin(name)
            yield from read_value(text, calls.write)
            yield from text.spaces()
            yield from text.accept(self.call_end)
            calls.end()
            return
        mark = yield from text.accept(self.key_begin, self.call_end)
        if not mark:
            raise MalformedCall
        calls.begin(name)
        calls.write("{")
        types = calls.types(name)
        while mark == self.key_begin:
            yield from self._read_argument(text, calls.write, types)
            yield from text.spaces()
            mark = yield from text.accept(self.key_begin, self.call_end)
            if mark == self.key_begin:
                calls.write(", ")
            elif not mark:
                rest = yield from text.peek(max(len(self.end), 1))
                if rest and rest != self.end:
                    raise MalformedCall
        calls.write("}")
        calls.end()

    def _read_argument(self, text: AnswerText, sink: Sink, types: Mapping[str, frozenset[str]]) -> Reading[None]:
        text.hold(self.key_begin)
        key = text.skip(len((yield from text.look(_KEY, _LONGEST_KEY))))
        mark = yield from text.accept(*filter(None, (self.key_end, self.json_key_end)))
        if not mark:
            raise MalformedCall
        if self.value_begin:
            yield from text.spaces()
            yield from text.accept(self.value_begin)  # which models leave out
        text.release()
        sink(f"{json.dumps(key, ensure_ascii=False)}: ")
        if self.lines and (next_tag := (yield from text.accept(*self._next_tags, "\n"))) != "\n":
            text.unread(next_tag)
        kinds = types.get(key, frozenset())
        if self.json_key_end:
            kinds = frozenset(("string",)) if mark == self.key_end else frozenset()
        if kinds == {"string"}:
            sink('"')
            yield from self._read_value(text, lambda piece: sink(quoted(piece)))
            sink('"')
            return
        pieces: list[str] = []
        yield from self._read_value(text, pieces.append)
        sink(typed_argument("".join(pieces), kinds))

    def _read_value(self, text: AnswerText, sink: Sink) -> Reading[None]:
        """Give `sink` a value, and skip its end tag, or stop before the next tag if the model left that out. The value
        ends with the text, too."""
        end = yield from text.find(self._value_ends, sink)
        if end in self._next_tags:
            text.unread(end)

    @cached_property
    def _next_tags(self) -> tuple[str, ...]:
        """What ends a value without its end tag. Only at the beginning of a line, for a value may tell of tags."""
        return tuple(f"\n{tag}" for tag in (self.key_begin, self.call_end, self.end) if tag)

    @cached_property
    def _value_ends(self) -> Markers:
        closing = (f"\n{self.value_end}", self.value_end) if self.lines else (self.value_end,)
        return Markers((*closing, *self._next_tags))
