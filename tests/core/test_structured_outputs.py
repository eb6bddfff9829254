"""The fields that constrain an answer, whatever protocol they came by."""

from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.request import GuidedDecoding
from charonia.core.structured_outputs import make_constraint, only_constraint, parse_structured_outputs


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": {"type": "string"}}, "json_schema", '{"type":"string"}'),
        ({"json": '{"type": "string"}'}, "json_schema", '{"type": "string"}'),
        ({"json": {}}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", 'b"']}, "choice", '["a","b\\""]'),
        ({"grammar": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
        ({"structural_tag": {"format": {}}}, "structural_tag", '{"format":{}}'),
        ({"json_object": True}, "json", ""),
        ('{"regex": "b"}', "regex", "b"),
        ({"regex": "a", "json_object": False, "backend": "xgrammar", "disable_fallback": True}, "regex", "a"),
        ({"regex": "a", "_backend": "xgrammar", "_backend_was_auto": True}, "regex", "a"),
        ({"regex": "a", "_backend": None, "_backend_was_auto": None}, "regex", "a"),
    ],
)
def test_each_kind_becomes_a_constraint(given: Any, kind: str, text: str) -> None:
    [constraint] = parse_structured_outputs(given, "structured_outputs")
    assert (constraint.kind, constraint.text) == (kind, text)
    assert constraint.parameter.startswith("structured_outputs.")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("{", "structured_outputs"),
        ("[]", "structured_outputs"),
        ({"yaml": 1}, "structured_outputs.yaml"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice[0]"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json": {}, "disable_additional_properties": True}, "structured_outputs.disable_additional_properties"),
    ],
)
def test_what_is_wrong_is_named(given: Any, field: str) -> None:
    with pytest.raises(InvalidArgument, match="structured_outputs") as refusal:
        parse_structured_outputs(given, "structured_outputs")
    assert refusal.value.field == field


def test_of_two_constraints_both_are_named() -> None:
    two = parse_structured_outputs({"regex": "a", "json": {}}, "x")
    with pytest.raises(InvalidArgument, match=r"x\.json and x\.regex both constrain"):
        only_constraint(two)
    assert only_constraint([]) is None
    assert only_constraint(two[:1]) == GuidedDecoding("json_schema", "{}", "x.json")


def test_a_schema_that_is_too_deep_to_be_written_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        make_constraint("json_schema", deep, "response_format")
