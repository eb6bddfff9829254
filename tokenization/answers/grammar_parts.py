"""The parts of structural tags (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html), and how formats lay out
calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Part: TypeAlias = dict[str, Any]


def const(text: str) -> Part:
    return {"type": "const_string", "value": text}


class CallSection(NamedTuple):
    """The text before and after calls. `trigger` is the beginning of `begin` by which a section is recognised in
    text."""

    begin: str
    end: str = ""
    trigger: str = ""


class CallLayout(NamedTuple):
    sections: tuple[CallSection, ...]
    """The first one is used if there is nothing but calls."""
    separator: str = ""
    """The text between calls."""
    several: bool = False
    """One section has all calls, instead of one each."""
    single: bool = False
    """There is at most one call."""
    next: str = ""
    """The beginning of each message behind the reasoning, if all text is in messages."""
    preamble: Part = const("")
    """Messages that may come before the last one of free text, with the beginning of the next."""
    content: str = ""
    """The beginning of a message of content, if all text is in messages."""


_MOST_OPTIONAL = 64
NO_LAYOUT = CallLayout(())


def regex(pattern: str) -> Part:
    return {"type": "regex", "pattern": pattern}


def any_text(excludes: Sequence[str] = ()) -> Part:
    return {"type": "any_text", "excludes": list(excludes)} if excludes else {"type": "any_text"}


NO_MEMBERS: Mapping[str, Any] = {"type": "object", "const": {}}
"""The schema of an object without members, which can only be two braces."""


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
    """The arguments that a schema names, required ones first: name, schema, and whether it is required."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, dict):
        return []
    needed = required if isinstance(required, list) else []
    arguments = [(key, _with_definitions(argument, schema), key in needed) for key, argument in properties.items()]
    return sorted(arguments, key=lambda argument: not argument[2])


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema of an argument, with the definitions that it refers to."""
    if not isinstance(schema, dict):
        return {}
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


def argument_list(schema: Mapping[str, Any], argument: Callable[[str, Any], Part], separator: str = "") -> Part:
    """The arguments of a schema, each written by `argument`: all required ones, then any others."""
    arguments = [(argument(key, argument_schema), required) for key, argument_schema, required in properties_of(schema)]
    needed = [part for part, required in arguments if required]
    others = [part for part, required in arguments if not required]
    after = [either([sequence([const(separator), part]), const("")]) for part in others]
    if needed or not separator:
        more = [sequence([const(separator), part]) for part in needed[1:]]
        return sequence([*needed[:1], *more, *after])
    if len(others) > _MOST_OPTIONAL:
        raise ValueError(f"more than {_MOST_OPTIONAL} arguments, none of them required")
    # Whichever comes first has no separator before it.
    return either([const(""), *(sequence([part, *after[at + 1 :]]) for at, part in enumerate(others))])
