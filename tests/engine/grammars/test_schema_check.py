"""What is enforced of a JSON Schema: each keyword is tried on the library itself, with values of both kinds."""

import json
from typing import Any

import pytest

from charonia.core.request import GuidedDecoding
from charonia.engine.grammars.constraint_check import CheckedConstraint, check_constraint, checking_backend
from charonia.engine.grammars.schema_check import MAX_DEPTH, MAX_NODES, enforce_schema

_BACKEND = checking_backend({"<|im_end|>": 300})
_FIRST_BYTE = 301


def check(schema: Any, strict: bool = False) -> CheckedConstraint:
    return check_constraint(GuidedDecoding("json_schema", json.dumps(schema), strict=strict), _BACKEND)


def allows(text: str, checked: CheckedConstraint) -> bool:
    """Whether a whole text is what a checked constraint asks for."""
    matcher = _BACKEND.compile(GuidedDecoding("json_schema", checked.text)).matcher()
    return matcher.accept([_FIRST_BYTE + byte for byte in text.encode()]) and matcher.complete


def typed(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def an_object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


A_B = {"properties": {"a": {}, "b": {}}}
KINDS = {
    "one": an_object(properties={"kind": {"const": "one"}}),
    "two": an_object(properties={"kind": {"enum": ["two", "zwei"]}, "n": {"type": "integer"}}, required=["kind"]),
}
ENFORCED: list[tuple[Any, Any, Any]] = [
    (typed(enum=["a"], title="t", default="z", examples=[5], deprecated=True), "a", "b"),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, 1, True),
    ({"oneOf": [{"const": 1}, {"enum": [2, "x"]}]}, "x", 3),
    ({"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in KINDS], "$defs": KINDS}, {"kind": "zwei", "n": 1}, {"n": 1}),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "x"),
    ({"allOf": [an_object(required=["a"]), {"properties": {"a": {"type": "integer"}}}]}, {"a": 1}, {"a": "x"}),
    (an_object(patternProperties={"^x": {"type": "integer"}}), {"x": 1}, {"x": "s"}),
    (an_object(minProperties=1), {"a": 1}, {}),
    (an_object(maxProperties=1), {"a": 1}, {"a": 1, "b": 2}),
    (an_object(propertyNames={"pattern": "^[a-z]$"}), {"a": 1}, {"A": 1}),
    (
        an_object(propertyNames={"enum": ["a b", "c.d"]}, additionalProperties={"type": "integer"}),
        {"a b": 1},
        {"c-d": 1},
    ),
    (an_object(**A_B, unevaluatedProperties=False), {"a": 1}, {"c": 1}),
    (an_object(**A_B, additionalProperties=False, required=["b"]), {"b": 1}, {"b": 1, "c": 1}),
    ({"type": "integer", "multipleOf": 5, "minimum": 3, "exclusiveMaximum": 15}, 10, 15),
    ({"type": "number", "minimum": -1.5, "maximum": 2}, -1.25, 2.5),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, 0.25, 0),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, -1.25, -1),
    (typed(minLength=2, maxLength=3), "äö", "a"),
    (typed(pattern="^[a-c]+$", maxLength=2), "ab", "abc"),
    (typed(pattern=r"\d"), "a1b", "ab"),
    *(
        (typed(format=name), good, "~")
        for name, good in [
            ("date", "2026-01-31"),
            ("ipv4", "1.2.3.4"),
            ("uuid", "0" * 8 + "-0000-0000-0000-" + "0" * 12),
            ("email", "a@b.de"),
            ("date-time", "2026-01-31T10:00:00Z"),
            ("time", "10:00:00Z"),
            ("duration", "P1D"),
            ("hostname", "a.b"),
            ("ipv6", "::1"),
            ("uri", "http://a.b/c"),
        ]
    ),
    *(
        (typed(format=name), good, bad)
        for name, good, bad in [
            ("date", "2024-02-29", "2023-02-29"),
            ("date", "2000-02-29", "1900-02-29"),
            ("date", "2023-12-31", "2023-11-31"),
            ("date", "0001-01-01", "0000-01-01"),
            ("date-time", "2024-02-29T23:59:59.5+01:00", "2023-02-29T23:59:59.5+01:00"),
            ("date-time", "2016-12-31t23:59:59z", "2016-12-31T23:59:60Z"),
            ("time", "09:13:59-17:50", "09:13:60-17:50"),
            ("hostname", "a-b--c.de", "ab--c.de"),
            ("hostname", "a.xn-b", "a.xn--b"),
            ("hostname", ".".join(["a" * 62] * 4), ".".join(["a" * 63] * 4)),
            ("email", "a" * 64 + "@b.de", "a" * 65 + "@b.de"),
        ]
    ),
    (typed(format="date", pattern="^2"), "2024-02-28", "2023-02-29"),
    (typed(format="date", pattern="^2", allOf=[{"maxLength": 10}]), "2024-02-28", "1024-02-28"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [1], []),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}, [1, "a"], ["a", 1]),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 5, "exclusiveMinimum": True}, 6, 5),
    ({"$schema": "https://example.com/own", "type": "integer"}, 6, "x"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5}, 6, 4),
    ({"definitions": {"n": {"$id": "n.json", "type": "integer"}}, "$id": "https://e.x/a", "$ref": "n.json"}, 6, "s"),
    ({"components": {"n": {"type": "number", "format": "float"}}, "$ref": "#/components/n"}, 6, "s"),
    *(
        ({"definitions": {key: {"type": "integer"}}, "$ref": f"#/definitions/{name}"}, 6, "s")
        for key, name in [
            ("My Model", "My Model"),
            ("My Model", "My%20Model"),
            ("Partial<X>", "Partial<X>"),
            ("Foo[int]", "Foo[int]"),
            ("Größe", "Größe"),
            ("a/b~{c}", "a~1b~0{c}"),
            ("100%", "100%"),
        ]
    ),
    (an_object(properties={"next": {"$ref": "#"}}, additionalProperties=False), {"next": {"next": {}}}, {"next": 1}),
    ({"const": {"a": [1, None]}}, {"a": [1, None]}, {"a": [1]}),
    ({"x-guidance": {"whitespace_flexible": True}, "type": "boolean"}, True, 1),
    ({"type": ["string", "null"], "nullable": True}, None, 1),
    ({"type": "integer", "uniqueItems": False, "dependentRequired": {}, "then": {}, "minContains": 2}, 1, "x"),
    (typed(format="password"), "~", 1),
    (typed(minLength=2.0, maxLength=2e0), "ab", "abc"),
    ({"type": "array", "minItems": 1.0, "maxItems": 1.0}, [1], [1, 2]),
    ({"type": "integer", "enum": [2.0, 4]}, 2, 3),
    ({"type": "integer", "const": 2.0}, 2, 3),
    ({"type": "integer", "minimum": 2.0, "maximum": 3.0, "multipleOf": 1.0}, 3, 4),
    (an_object(minProperties=1.0), {"a": 1}, {}),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED)
def test_a_keyword_that_counts_as_enforced_is(schema: Any, good: Any, bad: Any) -> None:
    checked = check(schema, strict=True)
    assert not checked.error
    assert not checked.left_out
    assert allows(json.dumps(good, ensure_ascii=False), checked)
    assert not allows(json.dumps(bad, ensure_ascii=False), checked)


LEFT_OUT: list[tuple[Any, str, Any]] = [
    (typed(**{"not": {"const": "a"}}), "not (#/not)", "a"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems (#/uniqueItems)", [1, 1]),
    ({"type": "array", "contains": {"type": "integer"}, "minContains": 2}, "contains (#/contains)", ["a"]),
    (an_object(**A_B, dependentRequired={"a": ["b"]}), "dependentRequired (#/dependentRequired)", {"a": 1}),
    (an_object(**A_B, dependentSchemas={"a": {"required": ["b"]}}), "dependentSchemas (#/dependentSchemas)", {"a": 1}),
    (an_object(**A_B, dependencies={"a": ["b"]}), "dependencies (#/dependencies)", {"a": 1}),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if (#/if)", "a"),
    (an_object(propertyNames={"minLength": 2}), "propertyNames (#/propertyNames)", {"a": 1}),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems (#/unevaluatedItems)", [1]),
    (an_object(allOf=[{}], unevaluatedProperties=False), "unevaluatedProperties (#/unevaluatedProperties)", {"a": 1}),
    (an_object(**A_B, minProperties=1), "minProperties (#/minProperties)", {}),
    (an_object(**A_B, minProperties=2, additionalProperties=False), "minProperties (#/minProperties)", {"a": 1}),
    (an_object(**A_B, maxProperties=1), "maxProperties (#/maxProperties)", {"a": 1, "b": 1}),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf (#/oneOf)", 1),
    (typed(pattern="^(?=a)"), "pattern (#/pattern)", "b"),
    (typed(pattern=r"^(a)\1"), "pattern (#/pattern)", "b"),
    (
        an_object(patternProperties={"^x": {"type": "integer"}, "y$": {"type": "string"}}),
        "patternProperties (#/patternProperties)",
        {"xy": None},
    ),
    ({"$ref": "https://example.com/schema"}, "$ref (#/$ref)", 1),
    ({"$ref": "http://json-schema.org/draft-07/schema#"}, "$ref (#/$ref)", 1),
    ({"$ref": "http://json-schema.org/draft-04/schema"}, "$ref (#/$ref)", 1),
    ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "$ref (#/$ref)", 1),
    ({"$dynamicRef": "#node", "$dynamicAnchor": "node"}, "$dynamicRef (#/$dynamicRef)", 1),
    ({"$recursiveRef": "#", "$recursiveAnchor": True}, "$recursiveRef (#/$recursiveRef)", 1),
]


@pytest.mark.parametrize(("schema", "name", "allowed"), LEFT_OUT)
def test_a_keyword_that_counts_as_unenforced_is_named_and_refused_where_strict(
    schema: Any, name: str, allowed: Any
) -> None:
    checked = check({"anyOf": [schema]})
    assert not checked.error
    assert checked.left_out == (name.replace("#/", "#/anyOf/0/"),)
    assert allows(json.dumps(allowed), checked)
    refused = check(schema, strict=True)
    assert refused.error == f"strict is true, and these cannot be enforced: {name}"


@pytest.mark.parametrize("name", ["iri", "relative-json-pointer", "json-pointer", "int32", "phone"])
def test_a_format_that_is_not_enforced_is_named_but_never_refused(name: str) -> None:
    for strict in (False, True):
        checked = check(an_object(properties={"a/b é": {"format": name}}), strict)
        assert (checked.error, checked.left_out) == ("", (f"format {name} (#/properties/a~1b%20%C3%A9/format)",))


def test_only_what_is_to_blame_is_left_out() -> None:
    properties = {f"p{number}": typed(pattern=f"^x{number}$") for number in range(9)}
    checked = check(an_object(properties=properties | {"p4": typed(pattern="(?!a)")}, required=[*properties]))
    assert checked.left_out == ("pattern (#/properties/p4/pattern)",)
    values = {name: f"x{number}" for number, name in enumerate(properties)}
    assert allows(json.dumps(values | {"p4": "anything"}), checked)
    assert not allows(json.dumps(values | {"p4": "anything", "p8": "y"}), checked)


def test_what_only_references_lead_to_is_checked_too() -> None:
    checked = check({"x-parts": {"n": {"not": {"const": 1}, "type": "integer"}}, "$ref": "#/x-parts/n"})
    assert checked.left_out == ("not (#/x-parts/n/not)",)


def test_annotations_are_not_read_as_schemas() -> None:
    data = {"not": 1, "format": "iri", "oneOf": [], "uniqueItems": True}
    checked = check({"const": data, "default": data, "examples": [data]}, strict=True)
    assert (checked.error, checked.left_out) == ("", ())
    assert allows(json.dumps(data), checked)


def test_unions_with_one_branch_alike_are_not_taken_apart() -> None:
    same = {"oneOf": [KINDS["one"], an_object(properties={"kind": {"const": "one"}, "x": {}})]}
    assert check(same).left_out == ("oneOf (#/oneOf)",)
    open_kind = {"oneOf": [KINDS["one"], an_object(properties={"kind": {"type": "string"}})]}
    assert check(open_kind).left_out == ("oneOf (#/oneOf)",)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strng"}, "Invalid type: strng"),
        ({"$ref": "#/$defs/none"}, "Pointer '/$defs/none' does not exist"),
        (typed(maxLength=-1), "got -1"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        (typed(pattern="[a"), "unclosed character class"),
        ({"$ref": "#"}, "no text can satisfy it"),
        ({"type": 5, "oneOf": [{"type": 7}, {"type": {}}]}, "type"),
        ({"properties": [], "oneOf": [5], "$ref": 3}, ""),
        ({"exclusiveMinimum": 10**400, "maximum": 1.5}, "not understood"),
        ({"exclusiveMinimum": float("inf"), "maximum": 1.5}, "Infinity is no JSON"),
        ({"enum": 5, "propertyNames": {"pattern": []}, "required": 7, "format": []}, ""),
        (5, "it must be an object"),
        (False, "it must be an object"),
    ],
)
def test_a_wrong_schema_is_refused_in_the_librarys_words(schema: Any, words: str) -> None:
    error = check(schema).error
    assert error
    assert words in error
    assert "start:" not in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ('{"const": NaN}', "NaN is no JSON"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
        ('{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        (json.dumps({"anyOf": [{}] * (MAX_NODES + 1)}), f"more than {MAX_NODES} subschemas"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_compiled(text: str, words: str) -> None:
    assert words in check_constraint(GuidedDecoding("json_schema", text), _BACKEND).error


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a|b)+"),
        ("choice", '["a", "b\\""]'),
        ("ebnf_grammar", 'root ::= "a" root?'),
        ("lark", 'start: "a"+ <|im_end|>'),
        ("lark", "start: <[300]>"),
    ],
)
def test_other_kinds_are_compiled_as_they_are(kind: Any, text: str) -> None:
    assert check_constraint(GuidedDecoding(kind, text), _BACKEND) == CheckedConstraint(text)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "(?=a)", "look-around"),
        ("regex", "(", "unclosed group"),
        ("choice", "[]", "at least one string"),
        ("ebnf_grammar", "root ::= nothing", "nothing"),
        ("lark", "start: <|other|>", "unknown special token"),
        ("structural_tag", "[]", "must be an object"),
    ],
)
def test_other_kinds_are_refused_in_the_librarys_words(kind: Any, text: str, words: str) -> None:
    assert words in check_constraint(GuidedDecoding(kind, text), _BACKEND).error


def test_schemas_in_structural_tags_are_checked_too() -> None:
    tag = {"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": "</a>"}], "triggers": ["<a"]}
    checked = check_constraint(GuidedDecoding("structural_tag", json.dumps(tag)), _BACKEND)
    assert (checked.error, checked.left_out) == ("", ("/structures/0/schema: not (#/not)",))
    assert "not" not in json.loads(checked.text)["structures"][0]["schema"]


def test_true_is_any_json() -> None:
    assert enforce_schema(True, lambda _: "").schema == {}
