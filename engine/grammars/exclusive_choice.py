"""`oneOf` whose branches have nothing in common: `anyOf`, which the library knows how to enforce.

Unions with a discriminator, as pydantic and OpenAPI write them, are such; the library itself finds out less.
"""

import json
from itertools import combinations
from typing import Any, NamedTuple

from .json_pointer import follow_references

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
