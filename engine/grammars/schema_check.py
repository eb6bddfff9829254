"""What of a JSON Schema can be enforced: annotations are taken out, what is said otherwise is put so that the library
enforces it, and what it never will is named.

Knows the keywords of drafts 4 to 2020-12 and what llguidance makes of them (`tests/engine/grammars` tries each one on
the library itself). Pure: whether a schema compiles is asked of a callback.
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
    found = root
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


def follow_references(root: Any, schema: Any) -> Any:
    """The schema that one of nothing but a reference stands for."""
    for _ in range(_MAX_HOPS):
        if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#")):
            break
        schema = resolve_pointer(root, schema["$ref"])
    return schema


_ALL_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string"))


class _Branch(NamedTuple):
    """What the values of a branch have in common: `types`, all of their `values` where these are few, and of each
    property with few values (`tags`) these."""

    types: frozenset[str]
    values: frozenset[str] | None
    tags: dict[str, frozenset[str]]


def narrow_one_of(root: Any, node: dict[str, Any]) -> None:
    """Write `oneOf` in `node` as `anyOf` if no value can match two branches, or none can that has the property which
    tells the branches apart: that is required then."""
    branches = node.get("oneOf")
    if not isinstance(branches, list) or not branches or "anyOf" in node:
        return
    described = [_describe(root, each) for each in branches]
    tag = None
    if any(not _apart(one, other) for one, other in combinations(described, 2)):
        tag = next((name for name in described[0].tags if _told_apart(described, name)), None)
        if tag is None:
            return
    del node["oneOf"]
    node["anyOf"] = branches if tag is None else [_requiring(tag, each, root) for each in branches]


def _describe(root: Any, schema: Any) -> _Branch:
    found = follow_references(root, schema)
    if not isinstance(found, dict):
        return _Branch(_ALL_TYPES, None, {})
    given = found.get("type", _ALL_TYPES)
    several = given if isinstance(given, list | frozenset) else [given]
    types = [each for each in several if isinstance(each, str)]
    properties = found.get("properties")
    tags = {name: _values(root, each) for name, each in properties.items()} if isinstance(properties, dict) else {}
    return _Branch(
        frozenset("number" if each == "integer" else each for each in types) or _ALL_TYPES,
        _values(root, found),
        {name: values for name, values in tags.items() if values is not None},
    )


def _values(root: Any, schema: Any) -> frozenset[str] | None:
    found = follow_references(root, schema)
    if not isinstance(found, dict):
        return None
    values = [found["const"]] if "const" in found else found.get("enum")
    if not isinstance(values, list):
        return None
    whole = [int(each) if isinstance(each, float) and each.is_integer() else each for each in values]
    return frozenset(json.dumps(each, sort_keys=True) for each in whole)


def _apart(one: _Branch, other: _Branch) -> bool:
    if one.values is not None and other.values is not None:
        return one.values.isdisjoint(other.values)
    return one.types.isdisjoint(other.types)


def _told_apart(branches: list[_Branch], tag: str) -> bool:
    """Whether an object with the property `tag` matches one branch at most; all others match none, or all."""
    if any("object" not in each.types or tag not in each.tags for each in branches):
        return False
    if any(len(each.types) > 1 and each.types != _ALL_TYPES for each in branches):
        return False
    return all(one.tags[tag].isdisjoint(other.tags[tag]) for one, other in combinations(branches, 2))


def _requiring(tag: str, branch: dict[str, Any], root: Any) -> dict[str, Any]:
    found = follow_references(root, branch)
    if tag not in found.get("required", ()) or found.get("type") != "object":
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
"""What holds beside formats: the library lets each month have 31 days and each minute a leap second, and has a year 0,
which few who read an answer know; names of hosts and addresses of any length; and in a part of a host's name the two
dashes behind its second character by which Punycode is known, which not every text is."""
_HINTS = frozenset(("double", "float", "password"))
"""Formats that no value can offend against. All others that are not enforced are named, and never refused: by the
specification a format only tells what is meant."""
_LONGEST_FORMAT = 40

_SILENT = ("x-guidance", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary")
"""Keywords that are left out: options of the library, and what only others refer to."""
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
"""Keywords that are never enforced, with the values that ask for nothing."""
_COMPANIONS = ("then", "else", "minContains", "maxContains")
"""Keywords that say nothing but beside others that are never enforced."""
_DOUBTFUL = ("oneOf", "minProperties", "maxProperties", "patternProperties", "pattern")
"""Keywords that are enforced in some schemas only."""
_UNSUPPORTED = re.compile(
    "not supported|only supported|not disjoint|not fully supported|not present in a registry"
    "|^Unknown format|^Unimplemented keys"
)
"""How the library says that it cannot do what is asked, and not that this is wrong. The last two it says of metaschemas
alone, which it has in it: there nothing is taken out."""

_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_APPLICATORS = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "$dynamicRef"))
_METASCHEMA = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(19-09|20-12))/schema#?")


_GAP = 1e-6
"""How far a bound is moved that must not be reached."""


class Unenforced(NamedTuple):
    """A keyword that is not enforced, and where it stands. `refusable`: a strict schema may not have it."""

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
    """The part of a parsed schema that is enforced; changes `schema`.

    Raises:
        ValueError: it is wrong, cannot be satisfied, or is too large or too deep.
    """
    if not isinstance(schema, dict):
        if schema is True:
            return EnforcedSchema({}, ())
        raise ValueError("it must be an object, or true")
    places = list(_subschemas(schema))
    left_out = [each for place in places for each in _leave_out(place)]
    for place in places:
        narrow_one_of(schema, place.node)
    left_out += _relax(schema, places, problem)
    return EnforcedSchema(schema, tuple(sorted(left_out, key=lambda each: (each.pointer, each.keyword))))


def _subschemas(root: dict[str, Any]) -> Iterator[_Place]:
    """All subschemas that take part, those too that only references lead to."""
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
            yield from ((each, f"/{key}/{number}") for number, each in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from ((each, f"/{key}/{_escaped(name)}") for name, each in node[key].items())


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _leave_out(place: _Place) -> Iterator[Unenforced]:
    """Take out of a subschema what is never enforced; those of it that asked for something."""
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
        told = node.pop("format")
        if isinstance(told, str) and told not in _HINTS:
            yield Unenforced(f"format {told[:_LONGEST_FORMAT]}", f"{pointer}/format", refusable=False)
    if (narrower := _NARROWER.get(node.get("format", ""))) and isinstance(node.setdefault("allOf", []), list):
        node["allOf"] += narrower


def _rewrite(node: dict[str, Any]) -> None:
    """Put what has another form with the same meaning in that form."""
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
        allowed = "|".join(re.escape(each) for each in names["enum"] if isinstance(each, str))
        node |= {"patternProperties": {f"^(?:{allowed})$": value}, "additionalProperties": False}
        del node["propertyNames"]


def _move_bounds(node: dict[str, Any]) -> None:
    """Move a whole number that must not be reached, if the other bound is less than one away: the library lets it be
    reached then."""
    low, high = _excluded(node, "Minimum"), _excluded(node, "Maximum")
    below, above = _numbers(node, "maximum", "exclusiveMaximum"), _numbers(node, "minimum", "exclusiveMinimum")
    if low is not None and below and low + _GAP < min(below) < low + 1:
        node["minimum"] = low + _GAP
        del node["exclusiveMinimum"]
    if high is not None and above and high - 1 < max(above) < high - _GAP:
        node["maximum"] = high - _GAP
        del node["exclusiveMaximum"]


def _excluded(node: dict[str, Any], bound: str) -> float | None:
    """The whole number that values must not reach."""
    key = bound.lower() if node.get(f"exclusive{bound}") is True else f"exclusive{bound}"  # a boolean in draft 4
    return next((value for value in _numbers(node, key) if type(value) is int or value.is_integer()), None)


def _numbers(node: dict[str, Any], *keys: str) -> list[float]:
    return [node[key] for key in keys if type(node.get(key)) in (int, float)]


class _Relaxation:
    """A keyword that may be more than the library can do, to be taken out and put back."""

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
            self._node["allOf"] = [each for each in self._node["allOf"] if each.get("anyOf") is not self._value]
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
    for each in doubtful:
        each.relax()
    if remaining := problem(schema):
        raise ValueError(remaining)
    return [each.unenforced for each in _put_back(schema, doubtful, problem)]


def _doubtful_keywords(node: dict[str, Any]) -> list[str]:
    target = node.get("$ref")
    remote = ["$ref"] if isinstance(target, str) and not target.startswith("#") else []
    return [*remote, *(key for key in _DOUBTFUL if key in node)]


def _put_back(schema: Any, relaxed: Sequence[_Relaxation], problem: Problem) -> list[_Relaxation]:
    """Put back all that the schema compiles with; those that stay out. Halves the list until one is to blame."""
    for each in relaxed:
        each.restore()
    if not problem(schema):
        return []
    for each in relaxed:
        each.relax()
    if len(relaxed) == 1:
        return list(relaxed)
    half = len(relaxed) // 2
    return [*_put_back(schema, relaxed[:half], problem), *_put_back(schema, relaxed[half:], problem)]
