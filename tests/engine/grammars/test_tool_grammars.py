"""The constraints that hold calls to the declared tools, on the real library: each in its model's own format."""

import json
import re
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import msgspec
import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import GuidedDecoding, Tool, ToolUse
from charonia.engine.grammars.backend import CompiledGrammar
from charonia.engine.grammars.constraint_check import check_constraint, checking_backend
from charonia.tokenization.answers.answer_formats import MISTRAL_LISTS, TOOL_FORMATS
from charonia.tokenization.answers.marked_answer import ToolFormat
from charonia.tokenization.answers.tool_grammars import tool_constraint

MARKERS = sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers if re.match(r"[<\[｜]", marker)})
SPECIAL = {text: token for token, text in enumerate(MARKERS)}
BACKEND = checking_backend(SPECIAL)
_PARTS = re.compile("(" + "|".join(map(re.escape, sorted(MARKERS, key=len, reverse=True))) + ")")

HERMES = TOOL_FORMATS["hermes"]
NUMBER = GuidedDecoding("json_schema", '{"type": "integer"}', "response_format")


def accepts(constraint: GuidedDecoding | None, text: str) -> bool:
    """Whether a text is one that the constraint lets end, its markers special tokens."""
    assert constraint is not None
    matcher = compiled(constraint).matcher()
    tokens = [
        token
        for part in _PARTS.split(text)
        for token in ([SPECIAL[part]] if part in SPECIAL else [len(SPECIAL) + byte for byte in part.encode()])
    ]
    return matcher.accept(tokens) and matcher.complete


@cache
def compiled(constraint: GuidedDecoding) -> CompiledGrammar:
    checked = check_constraint(constraint, BACKEND)
    assert checked.error == ""
    return BACKEND.compile(constraint._replace(text=checked.text))


@pytest.fixture(scope="module")
def recorded(sibling: Callable[[str], ModuleType]) -> Any:
    return sibling("tokenization/answers/recorded.py")


def content(form: ToolFormat, text: str) -> str:
    """A text as the content of an answer, behind what the format needs for that."""
    return f"<|start|>assistant{form.layout.content}{text}" if form.layout.content else text


def wrong_type(text: str) -> str:
    text = text.replace(": 2", ': "x"').replace("\n2\n", "\nx\n").replace("days=2", "days='x'")
    text = text.replace(">2<", ">x<")
    return text.replace("days:2", "days:<").replace("at:[1,2]", "at:[true]")


def test_required_calls_are_calls_of_declared_tools_with_arguments_of_their_schemas(recorded: Any) -> None:
    for answer in recorded.WELL_FORMED:
        form, text = TOOL_FORMATS[answer.parser], answer.text
        constraint = tool_constraint(form, ToolUse(recorded.USE.tools, "required"))
        assert accepts(constraint, text), text
        assert not accepts(constraint, content(form, "Hello")), text
        assert not accepts(constraint, ""), text
        assert not accepts(constraint, text.replace("get_weather", "get_whether").replace("now", "knew")), text
        if wrong_type(text) != text:
            assert not accepts(constraint, wrong_type(text)), text


def test_tools_that_are_not_strict_count_little_beside_those_that_are() -> None:
    parameters = json.dumps({"type": "object", "description": "x" * 1000, "properties": {"x": {"type": "integer"}}})
    tools = tuple(Tool(f"t{number}", "", parameters, strict=number == 0) for number in range(300))
    constraint = tool_constraint(HERMES, ToolUse(tools))
    assert constraint is not None
    assert len(constraint.text) < 100_000
    for use in (
        ToolUse(tools, "required"),
        ToolUse(tuple(msgspec.structs.replace(tool, strict=True) for tool in tools)),
    ):
        with pytest.raises(
            InvalidArgument, match=r"tools: the parameters .* have \d+ characters, more than the 262144"
        ):
            tool_constraint(HERMES, use)
    short = tuple(Tool(f"{number:0100}", "", "{}", strict=True) for number in range(1024))
    with pytest.raises(InvalidArgument, match="tools: what holds the answer to calls of tools has") as refused:
        tool_constraint(HERMES, ToolUse(short))
    assert refused.value.field == "tools"


def test_calls_of_strict_tools_are_held_to_their_schemas_wherever_they_come_in_text(recorded: Any) -> None:
    tools = tuple(msgspec.structs.replace(tool, strict=True) for tool in recorded.USE.tools)
    for answer in recorded.WELL_FORMED:
        form, text = TOOL_FORMATS[answer.parser], answer.text
        constraint = tool_constraint(form, ToolUse(tools))
        assert accepts(constraint, text), text
        assert accepts(constraint, content(form, "Hello")), text
        if not form.openings and not form.layout.content:
            assert accepts(constraint, f"Hello {text}"), text
        if wrong_type(text) != text:
            assert not accepts(constraint, wrong_type(text)), text


def test_tools_that_are_not_strict_are_held_to_json_alone_and_only_beside_a_strict_one(recorded: Any) -> None:
    use = recorded.USE
    assert tool_constraint(HERMES, use) is None
    mixed = tool_constraint(HERMES, ToolUse((use.tools[0], msgspec.structs.replace(use.tools[1], strict=True))))
    assert accepts(mixed, '<tool_call>\n{"name": "get_weather", "arguments": {"days": "x"}}\n</tool_call>')
    assert not accepts(mixed, "<tool_call>\nnow</tool_call>")


def test_a_named_tool_is_called_once_and_no_other(recorded: Any) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    constraint = tool_constraint(HERMES, ToolUse(recorded.USE.tools, named="now"))
    assert accepts(constraint, call)
    assert not accepts(constraint, f"{call}\n{call}")
    assert not accepts(constraint, recorded.WELL_FORMED[0].text)


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_one_call_at_most_where_calls_may_not_be_parallel(choice: Any) -> None:
    several = ToolUse((Tool("now", strict=True),), choice)
    deepseek = TOOL_FORMATS["deepseek_v31"]
    begin, end, _ = deepseek.layout.sections[0]
    hermes_call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    deepseek_call = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    for form, one, two in (
        (HERMES, hermes_call, f"{hermes_call}\n{hermes_call}"),
        (deepseek, f"{begin}{deepseek_call}{end}", f"{begin}{deepseek_call}{deepseek_call}{end}"),
    ):
        constraint = tool_constraint(form, msgspec.structs.replace(several, parallel=False))
        assert accepts(constraint, one)
        assert not accepts(constraint, two)
        assert accepts(tool_constraint(form, several), two)


def test_content_of_a_schema_or_calls(recorded: Any) -> None:
    for answer in recorded.WELL_FORMED:
        form = TOOL_FORMATS[answer.parser]
        constraint = tool_constraint(form, recorded.USE, NUMBER)
        assert constraint is not None
        assert constraint.parameter == "response_format"
        assert accepts(constraint, answer.text)
        assert accepts(constraint, content(form, "12"))
        assert not accepts(constraint, content(form, "Hello"))


@pytest.mark.parametrize(
    ("kind", "text", "good"),
    [
        ("json", "", '{"a": 1}'),
        ("regex", "[ab]+", "abba"),
        ("choice", '["yes", "no"]', "no"),
        ("ebnf_grammar", 'root ::= "yes" | "no"', "no"),
        ("structural_tag", '{"format": {"type": "const_string", "value": "no"}}', "no"),
    ],
)
def test_content_of_any_kind_or_calls(recorded: Any, kind: Any, text: str, good: str) -> None:
    constraint = tool_constraint(HERMES, recorded.USE, GuidedDecoding(kind, text, "structured_outputs"))
    assert accepts(constraint, good)
    assert accepts(constraint, recorded.WELL_FORMED[0].text)
    assert not accepts(constraint, "Hello")


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("a </function> b", True), ("a\n</function>", False), ("a\n<parameter=b>", False), ("a\n</p", True)],
)
def test_a_value_has_no_text_that_would_end_it(value: str, allowed: bool) -> None:
    tool = Tool("now", parameters='{"properties": {"a": {"type": "string"}}, "required": ["a"]}')
    constraint = tool_constraint(TOOL_FORMATS["qwen3_coder"], ToolUse((tool,), "required"))
    assert constraint is not None
    matcher = checking_backend({}).compile(constraint).matcher()
    text = f"<tool_call>\n<function=now>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert (matcher.accept([*text.encode()]) and matcher.complete) is allowed


def test_a_users_grammar_stands_alone_where_no_tool_may_be_called(recorded: Any) -> None:
    assert tool_constraint(HERMES, ToolUse(recorded.USE.tools, "none"), NUMBER) is NUMBER
    with pytest.raises(InvalidArgument, match="kind lark can't be combined"):
        tool_constraint(HERMES, recorded.USE, GuidedDecoding("lark", 'start: "a"', "structured_outputs"))


def test_older_mistral_writes_a_list_of_calls(recorded: Any) -> None:
    constraint = tool_constraint(MISTRAL_LISTS, ToolUse(recorded.USE.tools, "required"))
    assert accepts(constraint, '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]')


HOSTILE = {
    "no JSON": "{",
    "no object": "[1]",
    "nowhere": '{"properties": {"a": {"$ref": "#/$defs/b"}}}',
    "circles": json.dumps({"properties": {name: {"$ref": "#"} for name in "abcdefgh"}}),
    "numbers": '{"properties": {"a": 1, "b": {"type": 7}, "c": {"enum": 3}, "d": {"anyOf": {"a": 1}}}}',
    "many": json.dumps({"properties": {f"a{number}": {} for number in range(500)}}),
    "long": json.dumps({"title": "x" * (1 << 18)}),
    "deep": '{"a":' * 2000 + "1" + "}" * 2000,
}


@pytest.mark.parametrize("parameters", HOSTILE.values(), ids=list(HOSTILE))
def test_parameters_that_are_no_schema_are_refused_by_name_or_left_to_the_library(parameters: str) -> None:
    for form in TOOL_FORMATS.values():
        assert len(constraint_text(form, parameters)) < 1 << 20


def constraint_text(form: ToolFormat, parameters: str) -> str:
    """The constraint's text, or the message that refuses the parameters."""
    try:
        constraint = tool_constraint(form, ToolUse((Tool("now", parameters=parameters),), "required"))
    except InvalidArgument as error:
        return error.message
    return "" if constraint is None else constraint.text


INNER = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"properties": {}}, "{}", '{"a": 1}'),
        ({"type": "object"}, "{}", "{ }"),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"properties": {"a": INNER}}, '{"a": {"b": 1}}', '{"a": {"b": 1, "c": 2}}'),
        ({"properties": {"a": {"type": "object"}}}, '{"a": {"c": 2}}', '{"c": 2}'),
        ({"properties": {}, "additionalProperties": True}, '{"a": 1}', "1"),
        ({"patternProperties": {"^a": {}}}, '{"a": 1}', "1"),
        ({"required": ["a"]}, '{"a": 1}', "{}"),
        ({"properties": {}, "default": {"type": "object", "properties": {}}}, "{}", '{"a": 1}'),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "properties": {"c": INNER}},
            '{"c": {"d": 1}}',
            "1",
        ),
    ],
)
def test_a_tools_objects_have_what_they_name(parameters: dict[str, Any], good: str, bad: str) -> None:
    for strict in (False, True):
        use = ToolUse((Tool("now", "", json.dumps({"type": "object", **parameters}), strict),), "required", "now")
        constraint = tool_constraint(HERMES, use)
        begin, end = '<tool_call>\n{"name": "now", "arguments": ', "}\n</tool_call>"
        assert accepts(constraint, f"{begin}{good}{end}")
        assert not accepts(constraint, f"{begin}{bad}{end}")
