"""Answers whose reasoning and calls stand between markers; everything else is content."""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from .answer_reader import AnswerReader, CallWriter
from .answer_text import AnswerText, MalformedCall, Markers, Reading
from .grammar_parts import CallLayout, Part

_MOST_SPACES = 8
"""The most white space before what begins an answer."""


class ReasoningFormat(NamedTuple):
    """How a model writes its reasoning, between two texts."""

    start: str
    end: str
    optional: bool = False
    """The model reasons only if asked to."""
    content: str = ""
    """The text between `end` and the content, if `end` alone does not begin it; reasoning can't be left out then."""

    around_content: tuple[str, ...] = ()
    """Texts before and behind the content that are no part of it."""

    @property
    def opening(self) -> str:
        """The text that opens the reasoning in a prompt."""
        return self.start if self.content else f"{self.start}\n"


class ToolFormat(Protocol):
    """How a model writes tool calls."""

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that begin calls anywhere."""

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts that begin calls only at the beginning of the content or of a line, and behind other calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""

    @property
    def layout(self) -> CallLayout: ...

    def new_id(self) -> str:
        """The id of a new call."""

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        """The grammar of one call, without its section; `parameters` is the schema of its arguments."""

    def read(self, text: AnswerText, calls: "CallWriter", start: str) -> Reading[None]:
        """Read calls behind `start`, which was read already.

        Raises:
            MalformedCall: there are none; what was not written into `calls` is text.
        """


def random_id() -> str:
    """The id of a call in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def read_marked(
    answer: AnswerReader, reasoning: ReasoningFormat | None, tools: ToolFormat | None, inside: bool
) -> Reading[None]:
    """Read an answer. `inside`: it begins within the reasoning."""
    if reasoning is not None and (inside or (yield from _begins(answer, (reasoning.start,)))):
        yield from _read_reasoning(answer, reasoning, tools)
    answer.settled = True
    yield from _read_bare_calls(answer, tools)
    around = reasoning.around_content if reasoning else ()
    on_lines = _line_openings(answer, tools)
    markers = Markers((*around, *(tools.starts if tools else ()), *on_lines))
    while marker := (yield from answer.text.find(markers, answer.show)):
        if marker in around:
            yield from answer.text.spaces()
            continue
        start = marker
        if marker in on_lines:
            answer.show("\n")
            start = marker.removeprefix("\n")
        if (yield from _read_calls(answer, tools, start)) and on_lines:
            yield from _read_bare_calls(answer, tools)


def _line_openings(answer: AnswerReader, tools: ToolFormat | None) -> tuple[str, ...]:
    """The texts by which calls begin on a line behind text; none with strict tools, whose grammar leaves such lines to
    the text."""
    if tools is None or any(tool.strict for tool in answer.calls.tools.values()):
        return ()
    return tuple(f"\n{opening}" for opening in tools.openings)


def _read_bare_calls(answer: AnswerReader, tools: ToolFormat | None) -> Reading[None]:
    """Read the calls that come next without a marker."""
    while tools is not None and (opening := (yield from _begins(answer, tools.openings))):
        if not (yield from _read_calls(answer, tools, opening)):
            return


def _read_reasoning(answer: AnswerReader, reasoning: ReasoningFormat, tools: ToolFormat | None) -> Reading[None]:
    answer.thinking = True
    yield from answer.text.spaces()
    if (yield from answer.text.accept(reasoning.start)):  # though the prompt has it
        yield from answer.text.spaces()
    markers = Markers((reasoning.end, *(tools.starts if tools else ())))
    while marker := (yield from answer.text.find(markers, answer.think)):
        if marker == reasoning.end or (yield from _read_calls(answer, tools, marker)):
            break
    answer.thinking = False
    yield from answer.text.spaces()


def _begins(answer: AnswerReader, markers: tuple[str, ...]) -> Reading[str]:
    """The marker that comes next behind white space, which is content if there is none."""
    if not markers:
        return ""
    answer.text.hold()
    for _ in range(_MOST_SPACES):
        if not (yield from answer.text.accept(" ", "\n", "\r", "\t")):
            break
    marker = yield from answer.text.accept(*markers)
    spaces = answer.text.release()
    if not marker:
        answer.show(spaces)
    return marker


def _read_calls(answer: AnswerReader, tools: ToolFormat | None, start: str) -> Reading[bool]:
    """Read calls; whether there were any. If not, the text is reasoning or content like the text before."""
    assert tools is not None
    answer.text.hold(start)
    answer.calling = True
    calls_before = answer.calls.begun
    answer.sure_from = calls_before + (start not in tools.starts)  # any text may begin as an opening does
    try:
        yield from tools.read(answer.text, answer.calls, start)
        yield from answer.text.spaces()
    except MalformedCall:
        unread = answer.text.release()
        answer.think(unread) if answer.thinking and answer.calls.begun == calls_before else answer.show(unread)
    answer.text.release()
    answer.calling = False
    return answer.calls.begun > calls_before
