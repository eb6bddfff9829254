"""The parts of structural tags, and what formats make of them.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Part: TypeAlias = dict[str, Any]


class CallSection(NamedTuple):
    """What stands before and after calls. `trigger`: the beginning of `begin` by which a section is known in text."""

    begin: str
    end: str = ""
    trigger: str = ""


class CallLayout(NamedTuple):
    """How calls are written where a grammar says so. `sections`: the first one wherever there is nothing but calls.
    `several`: a section has all calls, not each a section of its own. `single`: there is never more than one.

    Of a format in which all text stands in messages: `preamble` comes before the last one, `content` begins one that is
    content."""

    sections: tuple[CallSection, ...]
    separator: str = ""
    several: bool = False
    single: bool = False
    preamble: Part | None = None
    content: str = ""


_MOST_OPTIONAL = 64
NO_LAYOUT = CallLayout(())


def const(text: str) -> Part:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Part:
    return {"type": "regex", "pattern": pattern}


def any_text() -> Part:
    return {"type": "any_text"}


NO_MEMBERS: Mapping[str, Any] = {"type": "object", "const": {}}
"""The schema of an object without members, of which there is no more to write than two braces."""


def json_value(schema: Any) -> Part:
    if schema == NO_MEMBERS:
        return const("{}")
    return {"type": "json_schema", "json_schema": schema}


def sequence(parts: Sequence[Part]) -> Part:
    return {"type": "sequence", "elements": list(parts)} if parts else const("")


def either(parts: Sequence[Part]) -> Part:
    return {"type": "or", "elements": list(parts)}


def tag(begin: str, content: Part, end: str) -> Part:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """The arguments that a schema names: name, schema, and whether it is required; the required ones first."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return []
    needed = required if isinstance(required, list) else []
    found = [(key, _with_definitions(each, schema), key in needed) for key, each in properties.items()]
    return sorted(found, key=lambda each: not each[2])


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema of an argument, that finds what it refers to."""
    if not isinstance(schema, dict):
        return {}
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def argument_list(schema: Mapping[str, Any], argument: Callable[[str, Any], Part], separator: str = "") -> Part:
    """The arguments of a schema, each written by `argument`: the required ones, then others, or not."""
    arguments = [(argument(key, each), required) for key, each, required in properties_of(schema)]
    needed = [part for part, required in arguments if required]
    others = [part for part, required in arguments if not required]
    after = [either([sequence([const(separator), part]), const("")]) for part in others]
    if needed or not separator:
        first, more = needed[:1], needed[1:]
        return sequence([*first, *(sequence([const(separator), part]) for part in more), *after])
    if len(others) > _MOST_OPTIONAL:
        raise ValueError(f"more than {_MOST_OPTIONAL} arguments, none of them required")
    # Whichever comes first has no separator before it.
    return either([const(""), *(sequence([part, *after[at + 1 :]]) for at, part in enumerate(others))])
