"""Answers in gpt-oss's harmony, which are messages in channels (https://github.com/openai/harmony). The channel
analysis is reasoning, a message to a function is a call, anything else is content."""

import re
from collections.abc import Mapping
from typing import Any

from .answer_reader import AnswerReader, CallWriter
from .answer_text import AnswerText, MalformedCall, Markers, Reading, ShortText
from .grammar_parts import CallLayout, CallSection, Part, any_text, const, either, json_value, sequence, tag
from .literals import read_value
from .marked_answer import random_id

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_RETURN, _CONSTRAIN = "<|return|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, _RETURN, _CONSTRAIN)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
FUNCTIONS = "functions."
NEXT = f"{START}assistant"
"""The beginning of a message behind another."""

_TO = " to="
_HEADERS = Markers((START, CHANNEL))
_HEADER_ENDS = Markers((MESSAGE, END, CALL, _RETURN))
_BODY_ENDS = Markers((END, CALL, _RETURN, START))
_LONGEST_HEADER = 256
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

_PREAMBLE: Part = {
    "type": "tags_with_separator",
    "tags": [tag(f"{CHANNEL}{channel}{MESSAGE}", any_text(), f"{END}{NEXT}") for channel in ("analysis", "commentary")],
    "separator": "",
}


class HarmonyCalls:
    """Messages to functions, as a `ToolFormat`; `read_harmony` reads them."""

    starts = openings = ()
    markers = MARKERS
    layout = CallLayout(
        (
            CallSection(f"{CHANNEL}commentary{_TO}{FUNCTIONS}", CALL, CHANNEL),
            CallSection(f"{_TO}{FUNCTIONS}", CALL, _TO),
        ),
        single=True,
        next=NEXT,
        preamble=_PREAMBLE,
        content=FINAL,
    )
    new_id = staticmethod(random_id)

    def call_part(self, name: str, parameters: Mapping[str, Any]) -> Part:
        headers = (f" {_CONSTRAIN}json", f"{CHANNEL}commentary {_CONSTRAIN}json", f"{CHANNEL}commentary json")
        header = either([const(f"{call_header}{MESSAGE}") for call_header in headers])
        return sequence([const(name), header, json_value(parameters)])

    def read(self, text: AnswerText, calls: CallWriter, start: str) -> Reading[None]:
        raise MalformedCall


def read_harmony(answer: AnswerReader, inside: bool) -> Reading[None]:
    """Read an answer whose prompt has begun the first message's header. `inside`: the prompt has the whole header, of
    an analysis."""
    text = answer.text
    mark = ""
    if inside:
        mark = yield from _read_analysis(answer)
    else:
        mark = yield from text.accept(CHANNEL, _TO, START)
    while True:
        if mark not in (CHANNEL, _TO, START):
            mark = yield from text.find(_HEADERS, answer.show)
            if not mark:
                return
        text.hold(mark)
        answer.calling = True
        try:
            header = mark + (yield from _read_header(answer))
            text.release()
            mark = yield from _read_message(answer, header)
        except MalformedCall:
            answer.show(text.release())
            answer.calling = False
            mark = ""


def _read_header(answer: AnswerReader) -> Reading[str]:
    """The rest of a header.

    Raises:
        MalformedCall: it has no end nearby.
    """
    header = ShortText(_LONGEST_HEADER)
    if (yield from answer.text.find(_HEADER_ENDS, header.add)) != MESSAGE:
        raise MalformedCall
    return str(header)


def _read_message(answer: AnswerReader, header: str) -> Reading[str]:
    """Read a message up to the marker behind it, which is returned."""
    recipient = _RECIPIENT.search(header)
    name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
    if name in answer.calls.tools:
        yield from _read_call(answer, name)
    answer.calling = False
    if not recipient and _ANALYSIS.search(header):
        return (yield from _read_analysis(answer))
    return (yield from answer.text.find(_BODY_ENDS, answer.show))


def _read_analysis(answer: AnswerReader) -> Reading[str]:
    answer.thinking = True
    mark = yield from answer.text.find(_BODY_ENDS, answer.think)
    answer.thinking = False
    return mark


def _read_call(answer: AnswerReader, name: str) -> Reading[None]:
    text = answer.text
    calls = answer.calls
    yield from text.spaces()
    following = yield from text.peek()
    if following not in ("{", "<"):
        return
    calls.begin(name)
    if following == "{":
        yield from read_value(text, calls.write)
    else:
        calls.write("{}")
    calls.end()
    yield from text.spaces()
    text.release()
