"""The reader of one answer: its text comes in pieces of any length, and goes as reasoning, content and calls of tools.

Knows no format: those say which markers begin a call, and read it. Nothing that was given on is ever taken back. A call
is one from the moment that its name is known to be declared and its arguments begin; what turns out to be none before
that is text like any other. One that breaks off later keeps what came of its arguments, and the rest is text.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ...core.request import Tool, ToolCallDelta, ToolUse
from .answer_text import AnswerText, MalformedCall, Reading
from .literals import argument_types


class AnswerDelta(NamedTuple):
    """What came of an answer since the last piece of its text."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerOver(Exception):
    """Nothing more of the answer is wanted."""


class CallWriter:
    """Writes the calls of one answer. `tools`: those that are declared."""

    def __init__(self, use: ToolUse | None, new_id: Callable[[], str], text: AnswerText) -> None:
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in use.tools} if use else {}
        self.longest_name = max(map(len, self.tools), default=0)
        self._types: dict[str, Mapping[str, frozenset[str]]] = {}
        self._parallel = use is None or use.parallel
        self._new_id = new_id
        self._text = text
        self.begun = 0
        """Calls so far."""
        self._written: list[ToolCallDelta] = []
        self._arguments: list[str] = []

    def declared(self, name: str) -> str:
        """The name.

        Raises:
            MalformedCall: there is no such tool.
        """
        if name not in self.tools:
            raise MalformedCall
        return name

    def types(self, name: str) -> Mapping[str, frozenset[str]]:
        """See `argument_types`, of a declared tool."""
        if name not in self._types:
            self._types[name] = argument_types(self.tools[name].parameters)
        return self._types[name]

    def begin(self, name: str) -> None:
        """A call of a declared tool: what was held is no text from here on."""
        self._flush()
        self._written.append(ToolCallDelta(self.begun, self._new_id(), self.declared(name)))
        self._text.release()
        self.begun += 1

    def write(self, arguments: str) -> None:
        """The next piece of the last call's arguments."""
        self._arguments.append(arguments)

    def end(self) -> None:
        """The last call is complete: what follows may be text again.

        Raises:
            AnswerOver: one is all that may be.
        """
        self._text.hold()
        if not self._parallel:
            raise AnswerOver

    def take(self) -> tuple[ToolCallDelta, ...]:
        """What was written since it was called last."""
        self._flush()
        written, self._written = self._written, []
        return tuple(written)

    def _flush(self) -> None:
        if not self._arguments:
            return
        delta = self._written.pop() if self._written else ToolCallDelta(self.begun - 1)
        self._written.append(replace(delta, arguments="".join(self._arguments)))
        self._arguments = []


class AnswerReader:
    """The reader of one answer. `read` is its format's part: it takes from `text` and gives to `show`, `think` and
    `calls`; `thinking` says where it is. `use`: the tools that may be called.
    """

    def __init__(
        self, read: Callable[["AnswerReader"], Reading[None]], use: ToolUse | None, new_id: Callable[[], str]
    ) -> None:
        self.text = AnswerText()
        self.calls = CallWriter(use, new_id, self.text)
        self.thinking = False
        self._shown: list[str] = []
        self._thought: list[str] = []
        self._steps = read(self)
        self.over = False
        self._step()

    def show(self, piece: str) -> None:
        """Content."""
        self._shown.append(piece)

    def think(self, piece: str) -> None:
        """Reasoning."""
        self._thought.append(piece)

    def push(self, piece: str, last: bool = False) -> AnswerDelta:
        """What the next piece of the text brings: not yet what may become part of a marker, unless it is the `last`."""
        if self.over:
            return AnswerDelta()
        self.text.feed(piece)
        if last:
            self.text.end()
        self._step()
        delta = AnswerDelta("".join(self._shown), "".join(self._thought), self.calls.take())
        self._shown, self._thought = [], []
        return delta

    def _step(self) -> None:
        try:
            next(self._steps)
        except (StopIteration, AnswerOver):
            self.over = True
