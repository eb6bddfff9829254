"""Calls as Gemma writes them: objects with unquoted keys, and strings between markers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .answer_reader import CallWriter
from .answer_text import AnswerText, MalformedCall, Reading
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
from .literals import Dialect, read_value, resolve_reference, schema_types
from .marked_answer import random_id
from .named_calls import read_name

_CALL = "call:"
_DEPTH = 4
_MOST_PARTS = 1000
_ANY = frozenset(("string", "number", "boolean", "null"))
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """`call:NAME{key:value,...}` between `start` and `end`. `quote` begins and ends a string."""

    start: str
    end: str
    quote: str
    openings = ()
    new_id = staticmethod(random_id)

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end, self.quote)

    @property
    def layout(self) -> CallLayout:
        return CallLayout((CallSection(f"{self.start}{_CALL}", self.end, self.start),))

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        return sequence([const(name), _GemmaGrammar(self.quote, parameters).object_part(parameters, _DEPTH)])

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        yield from text.spaces()
        if not (yield from text.accept(_CALL)):
            raise MalformedCall
        yield from text.spaces()
        name = yield from read_name(text, calls)
        if (yield from text.peek()) != "{":
            raise MalformedCall
        calls.begin(name)
        yield from read_value(text, calls.write, Dialect((self.quote,), escapes=False, bare_keys=True))
        calls.end()
        yield from text.spaces()
        yield from text.accept(self.end)


class _GemmaGrammar:
    """Grammars of values under the schema `root`, which may refer to its own parts. Constraints of texts are ignored.
    Raises ValueError for too many parts."""

    def __init__(self, quote: str, root: Mapping[str, Any]) -> None:
        self._quote = quote
        self._root = root
        self._left = _MOST_PARTS

    def object_part(self, schema: Mapping[str, Any], depth: int) -> Part:
        def argument(key: str, value_schema: Any) -> Part:
            return sequence([const(f"{key}:"), self._value(value_schema, depth - 1)])

        return sequence([const("{"), argument_list(schema, argument, ","), const("}")])

    def _value(self, schema: Any, depth: int) -> Part:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST_PARTS} values, those that are referred to included")
        schema = resolve_reference(schema, self._root)
        if "enum" in schema:
            return either([const(self._written(value)) for value in schema["enum"]])
        types = (schema_types(schema, self._root) if depth else None) or _ANY
        return either([self._typed(kind, schema, depth) for kind in sorted(types)])

    def _typed(self, kind: str, schema: Any, depth: int) -> Part:
        if kind == "string":
            return tag(self._quote, any_text(), self._quote)
        if kind == "object":
            return self.object_part(schema, depth)
        if kind != "array":
            return json_value({key: value for key, value in schema.items() if key in _NUMBERS} | {"type": kind})
        item = self._value(schema.get("items", {}), depth - 1)
        items = {"type": "tags_with_separator", "tags": [tag("", item, "")], "separator": ",", "at_least_one": True}
        return sequence([const("["), either([const(""), items]), const("]")])

    def _written(self, value: Any) -> str:
        return f"{self._quote}{value}{self._quote}" if isinstance(value, str) else json.dumps(value)
