"""Recorded answers of all formats, read in pieces of any length, and texts that nobody would write."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from charonia.core.request import Tool, ToolCallDelta, ToolUse
from charonia.tokenization.answers.answer_formats import TOOL_FORMATS, AnswerParsers, choose_format
from charonia.tokenization.answers.answer_reader import AnswerDelta, AnswerReader
from charonia.tokenization.answers.answer_text import AnswerText

NOW = ToolUse((Tool("now"),))


def reader(parser: str, use: ToolUse, reasoning: str = "none", inside: bool = False) -> AnswerReader:
    made = choose_format("", AnswerParsers(parser, reasoning)).reader(use, inside)
    assert made is not None
    return made


def read(reader: AnswerReader, pieces: Iterable[str]) -> list[AnswerDelta]:
    return [*map(reader.push, pieces), reader.push("", last=True)]


def joined(deltas: Iterable[AnswerDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls. Nobody is asked to take anything back: deltas only add, and name a call once."""
    text, reasoning, calls = "", "", list[list[str]]()
    for delta in deltas:
        text += delta.text
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name:
                assert call.id
                assert call.index == len(calls)
                calls.append([call.name, ""])
            assert (call.index, bool(call.id)) == (len(calls) - 1, bool(call.name))
            calls[-1][1] += call.arguments
    return text, reasoning, [(name, arguments) for name, arguments in calls]


def expected(answer: Any) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.content, answer.reasoning, [tuple(call) for call in answer.calls]


def fresh(answer: Any, recorded: Any) -> AnswerReader:
    return reader(answer.parser, recorded.USE, answer.reasoning_parser, answer.inside)


def test_a_recorded_answer_is_read_at_once_and_by_characters(answer: Any, recorded: Any) -> None:
    assert joined(read(fresh(answer, recorded), [answer.text])) == expected(answer)
    assert joined(read(fresh(answer, recorded), answer.text)) == expected(answer)


@settings(max_examples=150)
@given(data=st.data())
def test_a_recorded_answer_is_read_the_same_however_it_is_split(recorded: Any, data: st.DataObject) -> None:
    answer = data.draw(st.sampled_from(recorded.ANSWERS))
    cuts = data.draw(st.lists(st.integers(0, len(answer.text)), max_size=12).map(sorted))
    pieces = [answer.text[begin:end] for begin, end in pairwise([0, *cuts, len(answer.text)])]
    assert joined(read(fresh(answer, recorded), pieces)) == expected(answer)


def cut_calls(answer: Any, recorded: Any, choice: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Content and calls of an answer that is cut behind each of its characters, at once and by characters."""
    use = replace(recorded.USE, choice=choice)
    results = []
    for end in range(len(answer.text)):
        text = answer.text[:end]
        both = []
        for pieces in ([text], text):
            reading = reader(answer.parser, use, answer.reasoning_parser, answer.inside)
            deltas = [*map(reading.push, pieces), reading.push("", last=True, cut=True)]
            content, _, calls = joined(deltas)
            both.append((content, calls))
        assert both[0] == both[1]
        results.append(both[0])
    return results


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_is_cut_is_no_content(calling_answer: Any, recorded: Any, choice: str) -> None:
    answer = calling_answer
    whole = [tuple(call) for call in answer.calls]
    form = TOOL_FORMATS[answer.parser]
    marks = *form.starts, *form.markers
    for content, calls in cut_calls(answer, recorded, choice):
        begun = content.removeprefix(answer.content[: len(content)])
        open_ended = not calls and begun.lstrip().startswith(form.openings)
        assert not begun or (choice == "auto" and (open_ended or any(mark.startswith(begun.strip()) for mark in marks)))
        assert [name for name, _ in calls] == [name for name, _ in whole[: len(calls)]]
        for (_, arguments), (_, complete) in zip(calls, whole, strict=False):
            assert complete.startswith(arguments)
        assert calls[:-1] == whole[: max(len(calls) - 1, 0)]


def test_a_text_that_is_cut_keeps_what_is_no_call() -> None:
    use = replace(NOW, choice="required")
    texts = {"a <tool_ca": "a <tool_ca", "a <tool_call>{": "a ", "if a <": "if a <", '<tool_call>{"name": "x", ': None}
    for text, content in texts.items():
        assert reader("hermes", NOW).push(text, last=True, cut=True).text == (text if content is None else content)
    assert reader("hermes", NOW).push("a <tool_call>{", last=True).text == "a <tool_call>{"
    assert reader("hermes", use).push("<tool_ca", last=True, cut=True) == AnswerDelta()
    assert reader("hermes", use, "qwen3", True).push("hm</thi", last=True, cut=True) == AnswerDelta("", "hm</thi")
    assert reader("openai", NOW, "openai_gptoss").push("<|channel|>fin", last=True, cut=True) == AnswerDelta()


GUESSED = {
    "llama3_json": ('{"id": [1,2,3,4,5', '{"name": "Ada', '{"type": "long', "{", '{"name": "now", "param'),
    "pythonic": ("[1, 2", "[now"),
    "llama4_pythonic": ("[1, 2", "[now"),
}


@pytest.mark.parametrize(("parser", "text"), [(name, text) for name, texts in GUESSED.items() for text in texts])
def test_what_no_marker_says_to_be_a_call_stays_content_when_it_is_cut(parser: str, text: str) -> None:
    assert reader(parser, NOW).push(text, last=True, cut=True) == AnswerDelta(text)
    reading = reader(parser, NOW)
    assert joined([*map(reading.push, text), reading.push("", last=True, cut=True)]) == (text, "", [])
    if parser == "llama3_json":
        required = replace(NOW, choice="required")
        assert reader(parser, required).push(text, last=True, cut=True) == AnswerDelta()


def test_a_marker_or_a_call_before_says_that_it_is_one() -> None:
    for text in ('<|python_tag|>{"name": "no', '<|python_tag|>{"id": [1'):
        assert reader("llama3_json", NOW).push(text, last=True, cut=True) == AnswerDelta()
    text = '{"name": "now", "parameters": {}}; {"na'
    assert joined([reader("llama3_json", NOW).push(text, last=True, cut=True)]) == ("", "", [("now", "{}")])
    text = '{"name": "now", "parameters": {}}\n{"na'
    assert joined([reader("llama3_json", NOW).push(text, last=True, cut=True)]) == ('{"na', "", [("now", "{}")])


def test_a_line_of_text_is_no_call_of_strict_tools() -> None:
    text = 'So:\n{"name": "now", "parameters": {}}'
    strict = ToolUse((Tool("now", strict=True),))
    assert joined(read(reader("llama3_json", strict), [text])) == (text, "", [])
    call = '{"name": "now", "parameters": {}}'
    assert joined(read(reader("llama3_json", strict), [f"<|python_tag|>{call}{call}"])) == (call, "", [("now", "{}")])


def test_a_brace_on_a_line_holds_no_more_back_than_its_first_key() -> None:
    reading = reader("llama3_json", NOW)
    assert reading.push("int main()\n") == AnswerDelta("int main()")
    assert reading.push("{") == AnswerDelta("\n")
    assert reading.push("\n  return") == AnswerDelta("{\n  return")
    assert reading.push(' 1;\n\n{"title') == AnswerDelta(" 1;\n\n")
    assert reading.push('": 1') == AnswerDelta('{"title": 1')


def test_arguments_of_well_formed_answers_are_json_of_the_schema_s_types(recorded: Any) -> None:
    for answer in recorded.WELL_FORMED:
        for call in answer.calls:
            assert isinstance(json.loads(call.arguments), dict)


def test_every_format_has_recorded_answers(recorded: Any) -> None:
    assert {answer.parser for answer in recorded.ANSWERS} | {"llama4_json"} == {*TOOL_FORMATS, "none"}


ALPHABET = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "now", "arguments": ', '"name"', "now", "[", "]"),
    *("{", "}", '"', ":", ",", "\\", "u00e9", " ", "\n", "1", "true", "a", "é", "<function=now>", "</function>", "<"),
    *("<parameter=a>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "call:now{", "<escape>", "now(", "a=", "'", ")"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '<invoke name="',
        '">',
        "</invoke>",
        '<parameter name="',
    ),
    *(
        "<minimax:tool_call>",
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="',
        '<｜DSML｜parameter name="',
        "functions.",
    ),
    *(
        '" string="true">',
        '" string="false">',
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        ":0",
        "<function_calls>",
    ),
    *("<|channel|>", "analysis", "<|message|>", "<|end|>", " to=functions.now", "<|call|>", "<|tool_call|>", "<tool_"),
]


@settings(max_examples=200)
@given(
    parser=st.sampled_from(sorted(TOOL_FORMATS)), parts=st.lists(st.sampled_from(ALPHABET), max_size=25), data=st.data()
)
def test_any_text_is_read_without_an_error_and_the_same_in_any_pieces(
    parser: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    reasoning = "openai_gptoss" if parser == "openai" else "qwen3"
    whole = joined(read(reader(parser, NOW, reasoning), [text]))
    assert joined(read(reader(parser, NOW, reasoning), text)) == whole
    assert joined(read(reader(parser, NOW, reasoning), [text[:cut], text[cut:]])) == whole


def test_what_can_be_shown_is_shown_at_once() -> None:
    reading = reader("hermes", NOW)
    assert reading.push("a <b> <tool") == AnswerDelta("a <b> ")
    assert reading.push("s>") == AnswerDelta("<tools>")
    assert reading.push('<tool_call>{"name": "now", "arguments": ') == AnswerDelta()
    [begun] = reading.push('{"a": "x').tool_calls
    assert (begun.index, begun.name, begun.arguments) == (0, "now", '{"a": "x')
    assert reading.push("yz").tool_calls == (ToolCallDelta(0, arguments="yz"),)


def test_calls_have_ids_of_their_own_as_their_format_has_them() -> None:
    [first, second] = read(reader("mistral", NOW), ["[TOOL_CALLS]now{}[TOOL_CALLS]now{}"])[0].tool_calls
    assert all(re.fullmatch("[0-9a-z]{9}", call.id) for call in (first, second))
    assert first.id != second.id
    kimi = "<|tool_calls_section_begin|>" + "<|tool_call_begin|>functions.now:3{}<|tool_call_end|>" * 2
    [first, second] = read(reader("kimi_k2", NOW), [kimi])[0].tool_calls
    assert first.id == "functions.now:3"
    assert re.fullmatch("call_[0-9a-f]{24}", second.id)
    [call] = read(reader("jamba", NOW), ['<tool_calls>[{"name":"now"}]'])[0].tool_calls
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)


def test_an_answer_of_one_call_is_over_with_it() -> None:
    one = ToolUse(NOW.tools, parallel=False)
    for parser, text in (("hermes", '<tool_call>{"name":"now"}</tool_call>x'), ("pythonic", "[now(), now()]")):
        reading = reader(parser, one)
        assert joined(read(reading, text)) == ("", "", [("now", "{}")])
        assert reading.over


HOSTILE = {
    "half markers": ("hermes", "<tool_cal"),
    "calls of nobody": ("hermes", '<tool_call>{"name": "nobody"'),
    "brackets": ("hermes", "<tool_call>[["),
    "spaces": ("hermes", "<tool_call> \n"),
    "escapes": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\\\\\u12'),
    "nested": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [[[['),
    "long number": ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1111'),
    "values": ("qwen3_coder", "<function=now><parameter=a>\n</param"),
    "values without end tags": ("qwen3_coder", "<function=now><parameter=a>\n</functio"),
    "keys": ("glm45", "<tool_call>now<arg_key>" + "x" * 20),
    "ids": ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>" + "x" * 20),
    "names": ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>" + "x" * 20),
    "headers": ("openai", "<|channel|>commentary to=functions."),
    "python": ("pythonic", "[now(a=[[[("),
    "lines": ("llama3_json", 'so\n{"id": 1}'),
    "gemma": ("gemma4", "<|tool_call>call:now{a:{a:{"),
}


@pytest.mark.parametrize(("parser", "part"), HOSTILE.values(), ids=list(HOSTILE))
@pytest.mark.parametrize("size", [1, 1 << 30])
def test_a_character_costs_the_same_in_long_answers(
    parser: str, part: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(length: int) -> float:
        first, text = part, (part[-12:] * (length // 12))[:length]
        counted.clear()
        whole = first + text
        read(reader(parser, NOW), (whole[at : at + size] for at in range(0, len(whole), size)))
        return sum(counted) / len(whole)

    counted: list[int] = []
    count_characters(monkeypatch, counted)
    short, long = cost(1_000), cost(8_000)
    assert long < 1.2 * short + 1
    assert long < 200


def count_characters(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    """Note how many characters each step looks at or copies."""
    feed, search, match = AnswerText.feed, AnswerText._search, AnswerText._match

    def counting_feed(self: AnswerText, piece: str) -> None:
        feed(self, piece)
        counted.append(len(self._text))

    def counting_search(self: AnswerText, pattern: re.Pattern[str]) -> Any:
        found = search(self, pattern)
        counted.append((found.end() if found else len(self._text)) - self._at)
        return found

    def counting_match(self: AnswerText, *given: Any) -> int:
        end = match(self, *given)
        counted.append(end - self._at + 1)
        return end

    for name, counting in (("feed", counting_feed), ("_search", counting_search), ("_match", counting_match)):
        monkeypatch.setattr(AnswerText, name, counting)
