"""The reader of one answer: text in pieces of any length becomes reasoning, content and tool calls, and is never taken
back.

A call begins with the arguments of a declared tool; text that turns out to be no call before that is content. A call
that breaks off keeps its arguments so far; of one that is cut before them there is nothing, and no content either, if a
marker said that it is one, or the choice of tools.
"""

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from ...core.request import Tool, ToolCallDelta, ToolUse
from .answer_text import AnswerText, MalformedCall, Reading
from .literals import argument_types


class AnswerDelta(msgspec.Struct, frozen=True):
    """What the last piece of text added to an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerOver(Exception):
    """Nothing more of the answer is wanted."""


class CallWriter:
    def __init__(self, use: ToolUse | None, new_id: Callable[[], str], text: AnswerText) -> None:
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in use.tools} if use else {}
        """The declared tools by name."""
        self.longest_name = max(map(len, self.tools), default=0)
        self._types: dict[str, Mapping[str, frozenset[str]]] = {}
        self._parallel = use is None or use.parallel
        self._new_id = new_id
        self._text = text
        self._ids = set[str]()
        self.begun = 0
        """The number of calls so far."""
        self._written: list[ToolCallDelta] = []
        self._arguments: list[str] = []

    def declared(self, name: str) -> str:
        """Return the name.

        Raises:
            MalformedCall: there is no such tool.
        """
        if name not in self.tools:
            raise MalformedCall
        return name

    def types(self, name: str) -> Mapping[str, frozenset[str]]:
        if name not in self._types:
            self._types[name] = argument_types(self.tools[name].parameters)
        return self._types[name]

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call of a declared tool: the held text was part of it. `call_id`: the id that the model wrote, if
        any; it is taken once."""
        self._flush()
        call_id = call_id if call_id and call_id not in self._ids else self._new_id()
        self._ids.add(call_id)
        self._written.append(ToolCallDelta(self.begun, call_id, self.declared(name)))
        self._text.release()
        self.begun += 1

    def write(self, arguments: str) -> None:
        self._arguments.append(arguments)

    def end(self) -> None:
        """Complete the last call; text may follow.

        Raises:
            AnswerOver: only one call is allowed.
        """
        self._text.hold()
        if not self._parallel:
            raise AnswerOver

    def take(self) -> tuple[ToolCallDelta, ...]:
        """The deltas since the last call of this method."""
        self._flush()
        deltas = tuple(self._written)
        self._written = []
        return deltas

    def _flush(self) -> None:
        if not self._arguments:
            return
        delta = self._written.pop() if self._written else ToolCallDelta(self.begun - 1)
        self._written.append(replace(delta, arguments="".join(self._arguments)))
        self._arguments = []


class AnswerReader:
    """The reader of one answer. `read`, its format's part, takes from `text` and gives to `show`, `think` and `calls`;
    `thinking` tells whether it is within the reasoning, `settled` whether no more of that can come, `calling` whether
    the text is that of calls, and `sure_from` from which number of calls on that is no guess."""

    def __init__(
        self, read: Callable[["AnswerReader"], Reading[None]], use: ToolUse | None, new_id: Callable[[], str]
    ) -> None:
        self.text = AnswerText()
        self.calls = CallWriter(use, new_id, self.text)
        self.thinking = False
        self.settled = False
        self.calling = False
        self.sure_from = 0
        self._calls_alone = use is not None and use.required
        self._shown: list[str] = []
        self._thought: list[str] = []
        self._steps = read(self)
        self.over = False
        self._step()

    def show(self, piece: str) -> None:
        self._shown.append(piece)

    def think(self, piece: str) -> None:
        self._thought.append(piece)

    def shows(self, piece: str) -> bool:
        """Whether the next piece would add itself to the content, and nothing else."""
        return not self.over and self.text.sink_of(piece) == self.show

    def push(self, piece: str, last: bool = False, cut: bool = False) -> AnswerDelta:
        """What the next piece of text adds, without text that may become a marker, unless it is the `last` piece.
        `cut`: the model had not ended the text with it."""
        if self.over:
            return AnswerDelta()
        sink = None if last else self.text.sink_of(piece)
        if sink == self.show:  # as most
            return AnswerDelta(piece)
        if sink == self.think:
            return AnswerDelta("", piece)
        self.text.feed(piece)
        if cut:
            self._step()
        if last and not (cut and self._breaks_off):
            self.text.end()
        self._step()
        delta = AnswerDelta("".join(self._shown), "".join(self._thought), self.calls.take())
        self._shown = []
        self._thought = []
        return delta

    @property
    def _breaks_off(self) -> bool:
        """Whether the text that is not read yet can only be the beginning of a call."""
        if self._calls_alone:
            return self.calling or not self.thinking
        return self.calling and self.calls.begun >= self.sure_from

    def _step(self) -> None:
        try:
            next(self._steps)
        except (StopIteration, AnswerOver):
            self.over = True
