"""References within a JSON Schema."""

from typing import Any
from urllib.parse import unquote

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
