"""Answers whose reasoning and calls stand between markers, in a text that is content for the rest."""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from .answer_reader import AnswerReader, CallWriter
from .answer_text import AnswerText, MalformedCall, Markers, Reading
from .grammar_parts import CallLayout, Part

_MOST_SPACES = 8
"""White space that may stand before what begins an answer."""


class ReasoningFormat(NamedTuple):
    """How a model writes its reasoning: between two texts. `optional`: unless it is asked to, the model does not.
    `content`: what the content begins with, if `end` alone does not begin it; reasoning can't be left out then."""

    start: str
    end: str
    optional: bool = False
    content: str = ""

    @property
    def opening(self) -> str:
        """What begins the reasoning where the prompt does."""
        return self.start if self.content else f"{self.start}\n"


class ToolFormat(Protocol):
    """How a model writes calls of tools. `starts`: the texts that begin them, wherever they are; `openings`: those that
    do so only at the beginning of the content. `markers`: all texts of the format that may be special tokens."""

    @property
    def starts(self) -> tuple[str, ...]: ...

    @property
    def openings(self) -> tuple[str, ...]: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def layout(self) -> CallLayout: ...

    def new_id(self) -> str:
        """The id of a new call."""

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        """The grammar of one call, its section apart, with arguments of the schema `parameters`."""

    def read(self, text: AnswerText, calls: "CallWriter", start: str) -> Reading[None]:
        """Read calls, `start` of which was read already.

        Raises:
            MalformedCall: they are none; what was not written into `calls` is text.
        """


def random_id() -> str:
    """The id of a call as OpenAI has them."""
    return f"call_{secrets.token_hex(12)}"


def read_marked(
    answer: AnswerReader, reasoning: ReasoningFormat | None, tools: ToolFormat | None, inside: bool
) -> Reading[None]:
    """Read an answer. `inside`: it begins within the reasoning."""
    if reasoning is not None and (inside or (yield from _begins(answer, (reasoning.start,)))):
        yield from _read_reasoning(answer, reasoning, tools)
    if tools is not None and (opening := (yield from _begins(answer, tools.openings))):
        yield from _read_calls(answer, tools, opening)
    markers = Markers(tools.starts if tools else ())
    while marker := (yield from answer.text.find(markers, answer.show)):
        yield from _read_calls(answer, tools, marker)


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
    """Which of the markers comes next, behind white space; that is content if none does."""
    if not markers:
        return ""
    answer.text.hold()
    for _ in range(_MOST_SPACES):
        if not (yield from answer.text.accept(" ", "\n", "\r", "\t")):
            break
    marker = yield from answer.text.accept(*markers)
    held = answer.text.release()
    if not marker:
        answer.show(held)
    return marker


def _read_calls(answer: AnswerReader, tools: ToolFormat | None, start: str) -> Reading[bool]:
    """Whether there were calls; if not, what was read of them is reasoning or content as what came before."""
    assert tools is not None
    answer.text.hold(start)
    begun = answer.calls.begun
    try:
        yield from tools.read(answer.text, answer.calls, start)
        yield from answer.text.spaces()
    except MalformedCall:
        held = answer.text.release()
        answer.think(held) if answer.thinking and answer.calls.begun == begun else answer.show(held)
    answer.text.release()
    return answer.calls.begun > begun
