"""Structural tags of XGrammar's notation: where free text ends, and what is served of each part."""

import json
from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import GuidedDecoding
from charonia.engine.grammars.constraint_check import checking_backend

TOKENS = ["<|call|>", "<|end|>"]
BACKEND = checking_backend({text: token for token, text in enumerate(TOKENS)})

ANY = {"type": "any_text"}
NUMBER = {"type": "regex", "pattern": "[0-9]+"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(content: dict[str, Any], begin: str = "<t>", end: str = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "or", "elements": elements}


def triggered(**fields: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<n"], "tags": [tag(NUMBER, "<n>", "</n>")], **fields}


def accepts(part: dict[str, Any], text: str) -> bool:
    """Whether a text is one of the part's. A special token is written as it is spelt."""
    matcher = BACKEND.compile(GuidedDecoding("structural_tag", json.dumps({"format": part}))).matcher()
    tokens: list[int] = []
    while text:
        special = next((number for number, token in enumerate(TOKENS) if text.startswith(token)), None)
        tokens += [len(TOKENS) + byte for byte in text[0].encode()] if special is None else [special]
        text = text[1:] if special is None else text[len(TOKENS[special]) :]
    return matcher.accept(tokens) and matcher.complete


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        (tag(ANY), ["<t></t>", "<t>a<b\n</t>"], ["<t>a", "<t>a</t>b"]),
        (tag(sequence(const("a"), ANY)), ["<t>a</t>", "<t>ab c</t>"], ["<t>b</t>", "<t>ab</t>c"]),
        (tag(either(ANY, const("no"))), ["<t>no</t>", "<t>yes</t>"], ["<t>no", "<t>a</t>b"]),
        (tag(triggered()), ["<t></t>", "<t>a<n>1</n>b<n>2</n></t>"], ["<t><n>x</n></t>", "<t>a</t>b", "<t>a<n>1</n>"]),
        (tag(triggered(stop_after_first=True)), ["<t>a<n>1</n></t>", "<t>a</t>"], ["<t>a<n>1</n>b</t>"]),
        (tag(tag(ANY, "[", "]")), ["<t>[a</t>]</t>"], ["<t>[a]", "<t>[a</t>"]),
        (tag(tag(ANY, "[", "")), ["<t>[a</t>"], ["<t>[a</t>b"]),
        (tag(ANY, "<|call|>", "<|end|>"), ["<|call|>a b<|end|>"], ["<|call|>a b"]),
        (tag(sequence(const("a"), ANY), "<|call|>", ".<|end|>"), ["<|call|>a.b.<|end|>"], ["<|call|>ab<|end|>"]),
        (sequence(tag(triggered()), const("!")), ["<t>a<n>1</n></t>!"], ["<t>a</t>"]),
        (sequence(ANY, const("x"), tag(NUMBER)), ["x<t>1</t>", "a bxx<t>12</t>"], ["ab<t>1</t>", "ax<t>x</t>"]),
        (sequence(NUMBER, const("12"), const("3")), ["9123", "123123"], ["123", "912"]),
        (tag({"type": "regex", "pattern": "a.*|b/"}), ["<t>a b</t></t>", "<t>b/</t>"], ["<t>a", "<t>b</t>"]),
        (tag({"type": "regex", "pattern": "[^x]*"}, "(", ")<|end|>"), ["(a)b)<|end|>"], ["(a)b<|end|>"]),
        (tag({"type": "grammar", "grammar": "root ::= [a-z<]+"}, end="<t"), ["<t>a<t<t"], ["<t>a<t<"]),
        (triggered(), ["", "a", "a<n>1</n>b<n>2</n>c"], ["<n>x"]),
        (triggered(at_least_one=True), ["<n>1</n>", "<n>1</n> a <n>2</n>b"], ["", "a", "a<n>1</n>"]),
        (triggered(at_least_one=True, stop_after_first=True), ["<n>1</n>"], ["", "a<n>1</n>", "<n>1</n>b"]),
        (triggered(excludes=["no", "<|end|>"]), ["a<n>1</n>n o"], ["no", "ano<n>1</n>", "<n>1</n>no"]),
        (triggered(tags=[tag(ANY, "<n>", "")]), ["a<n>b"], ["a<n"]),
        ({**ANY, "excludes": ["b", 'c"']}, ["", 'ac\n"'], ["ab", 'ac"']),
        (tag({**ANY, "excludes": ["</t>", "x"], "max_tokens": None}), ["<t>a</t>"], ["<t>x</t>", "<t></t></t>"]),
        (tag({**ANY, "excludes": ["x"]}, end=".<|end|>"), ["<t>a.b.<|end|>"], ["<t>x.<|end|>", "<t>a<|end|>"]),
        (
            {"type": "json_schema", "json_schema": {"type": "integer"}, "style": "json", "any_order": False},
            ["12"],
            ["x"],
        ),
    ],
    ids=str,
)
def test_a_part_takes_its_texts_and_no_others(part: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(part, text)] == []
    assert [text for text in bad if accepts(part, text)] == []


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "'style' \"qwen_xml\" of a part of type"),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, "'any_order' true"),
        ({**ANY, "max_tokens": 5}, "'max_tokens' 5 of a part of type 'any_text' is not supported"),
        ({**ANY, "max_chars": 5}, "'max_chars'"),
        ({**NUMBER, "excludes": ["1"]}, "'excludes'"),
        (triggered(tags=[{**tag(ANY, "<n>"), "tool": 1}]), "'tool' 1 of a part of type 'tag'"),
        (sequence(ANY, {**const("a"), "other": 1}), "'other'"),
        ({**ANY, "excludes": ["", "a"]}, "'excludes' must be strings"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "'qwen_xml_parameter' is not supported"),
        (sequence(ANY, NUMBER), "free text must be the last part"),
        (tag(triggered(tags=[tag(ANY, "<n>", "")])), "free text must be the last part"),
    ],
    ids=str,
)
def test_what_would_change_the_constraint_and_is_not_served_is_refused(part: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        accepts(part, "")
