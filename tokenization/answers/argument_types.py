"""The types of a tool's arguments, and the JSON of values that were written without one."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_MOST_PARTS = 256
"""Schemas that are looked into for one argument, those of references and alternatives included."""
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"} | {
    type(None): "null"
}


def argument_types(parameters: str) -> Mapping[str, frozenset[str]]:
    """JSON's types that each argument may have, by a schema as JSON text; none for one that says nothing of it."""
    try:
        schema = json.loads(parameters)
        return {key: schema_types(value, schema) for key, value in schema["properties"].items()}
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return {}


def schema_types(schema: Any, root: Any) -> frozenset[str]:
    """JSON's types that a schema allows. `root`: what it refers to. Raises LookupError and TypeError for nonsense."""
    return frozenset(_types(schema, root))


def resolve_reference(schema: Any, root: Any) -> Any:
    """What a schema refers to within `root`, or itself. Raises LookupError and TypeError for nonsense."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    for step in reference[2:].split("/"):
        root = root[step.replace("~1", "/").replace("~0", "~")]
    return root


def _types(schema: Any, root: Any) -> Iterator[str]:
    waiting = [schema]
    for _ in range(_MOST_PARTS):
        if not waiting:
            return
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        if named := part.get("type"):
            yield from [named] if isinstance(named, str) else named
        elif "enum" in part or "const" in part:
            yield from (_NAMES[type(value)] for value in part.get("enum", [part.get("const")]))
        elif (target := resolve_reference(part, root)) is not part:
            waiting.append(target)
        for several in ("anyOf", "oneOf", "allOf"):
            waiting += part.get(several, ())


def typed_argument(text: str, types: frozenset[str]) -> str:
    """The JSON of a value. What does not fit any of the types is a string; without types, so is what is no JSON."""
    bare = text.strip()
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        word = {"true": "true", "false": "false", "none": "null"}.get(bare.lower())
        if word is not None and ("null" if word == "null" else "boolean") in types:
            return word
        return json.dumps(text, ensure_ascii=False)
    kind = _NAMES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return bare if fits and kind != "string" else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
