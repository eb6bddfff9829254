"""Reduces a JSON Schema to what the library enforces: keywords are rewritten for it where that is possible, and taken
out and named where it is not.

Knows the keywords of drafts 4 to 2020-12 and what llguidance makes of them (`tests/engine/grammars` tries each one on
the library). Whether a schema compiles is a callback's answer.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

_MAX_HOPS = 16


def resolve_pointer(root: Any, reference: str) -> Any:
    """The value at a reference such as `#/$defs/a`; None where there is none."""
    value = root
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def follow_references(root: Any, schema: Any) -> Any:
    """The schema behind references; one without a reference itself."""
    for _ in range(_MAX_HOPS):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#")):
            break
        schema = resolve_pointer(root, schema["$ref"])
    return schema


_ALL_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))


class _Branch(NamedTuple):
    """The values that match a branch of `oneOf`."""

    types: frozenset[str]
    values: frozenset[str] | None
    """All values, as JSON, of a `const` or an `enum`."""
    tags: dict[str, frozenset[str]]
    """All values of each property that has a `const` or an `enum`."""


def narrow_one_of(root: Any, node: dict[str, Any]) -> None:
    """Write `oneOf` in `node` as `anyOf` if no value can match two branches, or if no value with a certain property
    can, which is then required."""
    branches = node.get("oneOf")
    if not isinstance(branches, list) or not branches or "anyOf" in node:
        return
    described = [_describe(root, branch) for branch in branches]
    tag = None
    if any(not _are_disjoint(first, second) for first, second in combinations(described, 2)):
        tag = next((name for name in described[0].tags if _tells_apart(name, described)), None)
        if tag is None:
            return
    del node["oneOf"]
    node["anyOf"] = branches if tag is None else [_requiring(tag, branch, root) for branch in branches]


def _describe(root: Any, schema: Any) -> _Branch:
    target = follow_references(root, schema)
    if not isinstance(target, dict):
        return _Branch(_ALL_TYPES, None, {})
    declared = target.get("type", _ALL_TYPES)
    names = declared if isinstance(declared, list | frozenset) else [declared]
    types = frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
    properties = target.get("properties")
    tags = {name: _values(root, value) for name, value in properties.items()} if isinstance(properties, dict) else {}
    few = {name: values for name, values in tags.items() if values is not None}
    return _Branch(types or _ALL_TYPES, _values(root, target), few)


def _values(root: Any, schema: Any) -> frozenset[str] | None:
    target = follow_references(root, schema)
    if not isinstance(target, dict):
        return None
    values = [target["const"]] if "const" in target else target.get("enum")
    if not isinstance(values, list):
        return None
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return frozenset(json.dumps(value, sort_keys=True) for value in whole)


def _are_disjoint(first: _Branch, second: _Branch) -> bool:
    if first.values is not None and second.values is not None:
        return first.values.isdisjoint(second.values)
    return first.types.isdisjoint(second.types)


def _tells_apart(tag: str, branches: list[_Branch]) -> bool:
    """Whether an object with the property `tag` matches at most one branch, and other values match none or all."""
    if any("object" not in branch.types or tag not in branch.tags for branch in branches):
        return False
    if any(len(branch.types) > 1 and branch.types != _ALL_TYPES for branch in branches):
        return False
    return all(first.tags[tag].isdisjoint(second.tags[tag]) for first, second in combinations(branches, 2))


def _requiring(tag: str, branch: dict[str, Any], root: Any) -> dict[str, Any]:
    target = follow_references(root, branch)
    if tag not in target.get("required", ()) or target.get("type") != "object":
        own = branch.get("required", [])
        branch |= {"type": "object", "required": own if tag in own else [*own, tag]}
    return branch


Problem: TypeAlias = Callable[[Any], str]
"""Why a schema does not compile; empty where it does."""

MAX_NODES = 20_000
MAX_DEPTH = 100

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that the library enforces."""
_DATE = (
    r"^(?:\d{4}-(?:(?:0[13578]|1[02])-(?:[012]\d|3[01])|(?:0[469]|11)-(?:[012]\d|30)|02-(?:[01]\d|2[0-8]))"
    r"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-](?:-?[A-Za-z0-9][A-Za-z0-9-]*)?)?"
_NARROWER: dict[str, tuple[dict[str, Any], ...]] = {
    "date": ({"pattern": _DATE}, {"pattern": "^0*[1-9]"}),
    "date-time": ({"pattern": _DATE}, {"pattern": "^0*[1-9]"}, {"pattern": "^[^:]*:[^:]*:[0-5]"}),
    "time": ({"pattern": "^[^:]*:[^:]*:[0-5]"},),
    "hostname": ({"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$"}, {"maxLength": 253}),
    "email": ({"pattern": "^[^@]{1,64}@"}, {"maxLength": 254}),
}
"""Schemas that are added to formats. By itself the library lets every month have 31 days and every minute a leap
second, has a year 0, hosts and addresses of any length, and hosts that look like Punycode and are none."""
_HINTS = frozenset(("double", "float", "password"))
"""Formats that every value satisfies. Others that are not enforced are named and never refused, since by the
specification a format is an annotation."""
_LONGEST_FORMAT = 40
_OF_FRAGMENTS = "/~$-_.!*'()@:"
"""Characters that stand in a URI's fragment as they are (RFC 3986)."""

_SILENT = ("x-guidance", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
"""Keywords that are left out silently: options of the library, and targets of references."""
_NEVER: dict[str, tuple[Any, ...]] = {
    "not": (),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that are never enforced, with their values without effect."""
_COMPANIONS = ("then", "else", "minContains", "maxContains")
"""Keywords that only modify ones that are never enforced."""
_DOUBTFUL = ("oneOf", "minProperties", "maxProperties", "patternProperties", "pattern")
"""Keywords that are enforced in some schemas only."""
_UNSUPPORTED = re.compile(
    "not supported|only supported|not disjoint|not fully supported|not present in a registry"
    "|^Unknown format|^Unimplemented keys"
)
"""The library's messages about what it cannot do, as opposed to what is wrong. The last two concern its built-in
metaschemas alone, from which nothing is taken out."""

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "$dynamicRef"))
_METASCHEMA = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(19-09|20-12))/schema#?")


_GAP = 1e-6
"""How far an exclusive bound is moved."""


class Unenforced(NamedTuple):
    """A keyword that is not enforced, and its place. `refusable`: a strict schema must not have it."""

    keyword: str
    pointer: str
    refusable: bool = True

    def __str__(self) -> str:
        return f"{self.keyword} (#{quote(self.pointer, safe='/~$-_.')})"


class EnforcedSchema(NamedTuple):
    """A schema as it is enforced, and the keywords that were left out."""

    schema: Any
    left_out: tuple[Unenforced, ...]


class _Place(NamedTuple):
    """A subschema and the pointer to it."""

    node: dict[str, Any]
    pointer: str


def enforce_schema(schema: Any, problem: Problem) -> EnforcedSchema:
    """The part of a parsed schema that is enforced; changes `schema`. Raises `ValueError` for a schema that is wrong,
    too large or too deep, or cannot be satisfied."""
    if not isinstance(schema, dict):
        if schema is True:
            return EnforcedSchema({}, ())
        raise ValueError("it must be an object, or true")
    places = list(_subschemas(schema))
    left_out = [keyword for place in places for keyword in _leave_out(place)]
    for place in places:
        narrow_one_of(schema, place.node)
    left_out += _relax(schema, places, problem)
    return EnforcedSchema(schema, tuple(sorted(left_out, key=lambda keyword: (keyword.pointer, keyword.keyword))))


def _subschemas(root: dict[str, Any]) -> Iterator[_Place]:
    """All subschemas, those included to which only references lead."""
    waiting: list[tuple[Any, str, int]] = [(root, "", 0)]
    seen: set[int] = set()
    while waiting:
        node, pointer, depth = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        if len(seen) > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        waiting += [(child, pointer + step, depth + 1) for child, step in _children(node)]
        target = node.get("$ref")
        if isinstance(target, str) and target.startswith("#/"):
            waiting.append((resolve_pointer(root, target), target[1:], depth + 1))
        yield _Place(node, pointer)


def _children(node: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    for key in _ONE:
        if key in node:
            yield node[key], f"/{key}"
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from ((child, f"/{key}/{number}") for number, child in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from ((child, f"/{key}/{_escaped(name)}") for name, child in node[key].items())


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _leave_out(place: _Place) -> Iterator[Unenforced]:
    """Take out the keywords that are never enforced; those of them that had an effect."""
    node, pointer = place
    _rewrite(node)
    for key in _SILENT:
        node.pop(key, None)
    if "$schema" in node and not (isinstance(node["$schema"], str) and _METASCHEMA.fullmatch(node["$schema"])):
        del node["$schema"]
    conditional = "then" in node or "else" in node
    for key in _COMPANIONS:
        node.pop(key, None)
    for key, neutral in _NEVER.items():
        if key in node and node.pop(key) not in neutral and (key != "if" or conditional):
            yield Unenforced(key, f"{pointer}/{key}")
    if "format" in node and not (isinstance(node["format"], str) and node["format"] in FORMATS):
        name = node.pop("format")
        if isinstance(name, str) and name not in _HINTS:
            yield Unenforced(f"format {name[:_LONGEST_FORMAT]}", f"{pointer}/format", refusable=False)
    if (narrower := _NARROWER.get(node.get("format", ""))) and isinstance(node.setdefault("allOf", []), list):
        node["allOf"] += narrower


def _rewrite(node: dict[str, Any]) -> None:
    """Write keywords that the library lacks as others with the same meaning, where there are some. Generators write
    names into references as they are (`#/definitions/Foo[int]`); the library wants URIs."""
    target = node.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        node["$ref"] = "#" + quote(unquote(target[1:]), safe=_OF_FRAGMENTS)
    if node.get("unevaluatedProperties") is False and not _APPLICATORS & node.keys():
        node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
    _move_bounds(node)
    names = node.get("propertyNames")
    if not isinstance(names, dict) or {"properties", "patternProperties"} & node.keys():
        return
    value = node.get("additionalProperties", True)
    if names.keys() - {"type", "title", "description"} == {"pattern"}:
        node |= {"patternProperties": {names["pattern"]: value}, "additionalProperties": False}
        del node["propertyNames"]
    elif names.keys() - {"type", "title", "description"} == {"enum"} and isinstance(names["enum"], list):
        allowed = "|".join(re.escape(name) for name in names["enum"] if isinstance(name, str))
        node |= {"patternProperties": {f"^(?:{allowed})$": value}, "additionalProperties": False}
        del node["propertyNames"]


def _move_bounds(node: dict[str, Any]) -> None:
    """Move a whole exclusive bound if the other bound is less than one away: the library lets it be reached then."""
    low = _excluded(node, "Minimum")
    high = _excluded(node, "Maximum")
    below = _numbers(node, "maximum", "exclusiveMaximum")
    above = _numbers(node, "minimum", "exclusiveMinimum")
    if low is not None and below and low + _GAP < min(below) < low + 1:
        node["minimum"] = low + _GAP
        del node["exclusiveMinimum"]
    if high is not None and above and high - 1 < max(above) < high - _GAP:
        node["maximum"] = high - _GAP
        del node["exclusiveMaximum"]


def _excluded(node: dict[str, Any], bound: str) -> float | None:
    """The exclusive bound, if it is a whole number."""
    key = bound.lower() if node.get(f"exclusive{bound}") is True else f"exclusive{bound}"  # a boolean in draft 4
    return next((value for value in _numbers(node, key) if type(value) is int or value.is_integer()), None)


def _numbers(node: dict[str, Any], *keys: str) -> list[float]:
    return [node[key] for key in keys if type(node.get(key)) in (int, float)]


class _Relaxation:
    """A keyword that the library may not support in its place; it can be taken out and put back."""

    def __init__(self, place: _Place, keyword: str) -> None:
        self._node, self._keyword = place.node, keyword
        self._value = place.node[keyword]
        self._others = place.node.get("additionalProperties", True)
        self.unenforced = Unenforced(keyword, f"{place.pointer}/{keyword}")

    def relax(self) -> None:
        self._node.pop(self._keyword, None)
        if self._keyword == "oneOf":
            self._node.setdefault("allOf", []).append({"anyOf": self._value})
        elif self._keyword == "patternProperties":
            self._node["additionalProperties"] = True

    def restore(self) -> None:
        self._node[self._keyword] = self._value
        if self._keyword == "oneOf":
            self._node["allOf"] = [part for part in self._node["allOf"] if part.get("anyOf") is not self._value]
            if not self._node["allOf"]:
                del self._node["allOf"]
        elif self._keyword == "patternProperties":
            self._node["additionalProperties"] = self._others


def _relax(schema: dict[str, Any], places: Sequence[_Place], problem: Problem) -> list[Unenforced]:
    """Take out as few doubtful keywords as the schema needs to compile."""
    reason = problem(schema)
    if not reason:
        return []
    doubtful = [_Relaxation(place, key) for place in places for key in _doubtful_keywords(place.node)]
    if not doubtful or not _UNSUPPORTED.search(reason):
        raise ValueError(reason)
    for relaxation in doubtful:
        relaxation.relax()
    if remaining := problem(schema):
        raise ValueError(remaining)
    return [relaxation.unenforced for relaxation in _put_back(schema, doubtful, problem)]


def _doubtful_keywords(node: dict[str, Any]) -> list[str]:
    target = node.get("$ref")
    remote = ["$ref"] if isinstance(target, str) and not target.startswith("#") else []
    return [*remote, *(key for key in _DOUBTFUL if key in node)]


def _put_back(schema: Any, relaxed: Sequence[_Relaxation], problem: Problem) -> list[_Relaxation]:
    """Put back all keywords with which the schema compiles; those that stay out, found by bisection."""
    for relaxation in relaxed:
        relaxation.restore()
    if not problem(schema):
        return []
    for relaxation in relaxed:
        relaxation.relax()
    if len(relaxed) == 1:
        return list(relaxed)
    half = len(relaxed) // 2
    return [*_put_back(schema, relaxed[:half], problem), *_put_back(schema, relaxed[half:], problem)]
