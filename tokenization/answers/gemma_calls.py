"""Calls as Gemma writes them: objects whose keys have no quotes, and whose strings stand between markers."""

from dataclasses import dataclass

from .answer_reader import CallWriter
from .answer_text import AnswerText, MalformedCall, Reading
from .literals import Dialect, read_value
from .marked_answer import random_id
from .named_calls import read_name

_CALL = "call:"


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """`call:NAME{key:value,...}` between `start` and `end`. `quote` begins and ends a string."""

    start: str
    end: str
    quote: str

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def openings(self) -> tuple[str, ...]:
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.end, self.quote)

    def new_id(self) -> str:
        return random_id()

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
