"""Constraints of an answer to calls of the declared tools, in the model's format. They are structural tags; the
engine's grammars find which of their texts are special tokens."""

import json
from collections.abc import Sequence
from typing import Any

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding, Tool, ToolUse
from .grammar_parts import NO_MEMBERS, Part, any_text, const, either, json_value, regex, sequence, tag
from .marked_answer import ToolFormat

_MOST_CHARACTERS = 1 << 18
"""The most characters of a constraint, and of the parameters in it, which the engine's grammars limit."""


def tool_constraint(form: ToolFormat, use: ToolUse, user: GuidedDecoding | None = None) -> GuidedDecoding | None:
    """The constraint of an answer with these tools, if any: calls alone if they are required, else calls or the content
    of `user`, else text whose calls of strict tools fit their parameters.

    Raises:
        InvalidArgument: the format, or the kind of the user's constraint, does not allow it.
    """
    tools = [tool for tool in use.tools if use.named in ("", tool.name)]
    parallel = use.parallel and not use.named
    strict = all(tool.strict for tool in tools)
    if use.required:
        return _constraint(form, _calls(form, tools, parallel), "tool_choice", strict)
    if use.choice == "none" or not tools:
        return user
    if user is not None:
        content = sequence([const(form.layout.content), _content(user)])
        either_way = either([_calls(form, tools, parallel), content])
        return _constraint(form, either_way, user.parameter, user.strict and strict)
    if not any(tool.strict for tool in tools):
        return None
    return _constraint(form, _text_with_calls(form, tools, parallel), "strict", True)


def _constraint(form: ToolFormat, part: Part, parameter: str, strict: bool) -> GuidedDecoding:
    if form.layout.next:
        part = sequence([const(form.layout.next), part])
    text = json.dumps({"format": part}, ensure_ascii=False, separators=(",", ":"))
    if len(text) > _MOST_CHARACTERS:
        field = "tools" if parameter in ("tool_choice", "strict") else parameter
        raise _too_long(field, f"what holds the answer to calls of tools has {len(text)}")
    return GuidedDecoding("structural_tag", text, parameter, strict=strict)


def _too_long(field: str, what: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {what} characters, more than the {_MOST_CHARACTERS} there may be", field=field)


def _calls(form: ToolFormat, tools: Sequence[Tool], parallel: bool) -> Part:
    """At least one call, and nothing else."""
    return _section(form, _call_parts(form, tools), parallel)


def _call_parts(form: ToolFormat, tools: Sequence[Tool], strict_only: bool = False) -> list[Part]:
    """The grammar of a call of each tool. With `strict_only`, the arguments of other tools are any object."""
    size = sum(len(tool.parameters) for tool in tools if tool.strict or not strict_only)
    if size > _MOST_CHARACTERS:
        raise _too_long("tools", f"the parameters that calls are to be held to have {size}")
    parts = []
    for tool in tools:
        try:
            if strict_only and not tool.strict:
                parts.append(form.call_part(tool.name, {"type": "object"}))
            else:
                parts.append(form.call_part(tool.name, closed({"type": "object", **json.loads(tool.parameters)})))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            message = f"tools: the parameters of '{tool.name}' are no schema that calls can be held to: {error}"
            raise InvalidArgument(message, field="tools") from None
    return parts


_OPENING = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties")
_COMPOSING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "$dynamicRef")
"""Keywords by which an object, or another schema, states its further members."""


def closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters in which objects have only the members that they name, unless they say otherwise. With any
    members allowed, a model may not come to an end."""
    alone = "allOf" not in json.dumps(parameters)  # whose parts would have to close each other's objects
    inside = {name: _closed_inside(member) if alone else member for name, member in parameters.items()}
    if not _may_close(parameters):
        return inside
    return inside | {"additionalProperties": False} if parameters.get("properties") else {**NO_MEMBERS}


def _may_close(node: dict[str, Any]) -> bool:
    members = node.get("properties", {})
    required = node.get("required", [])
    complete = isinstance(members, dict) and isinstance(required, list) and all(name in members for name in required)
    return complete and not node.keys() & {*_OPENING, *_COMPOSING}


def _closed_inside(value: Any) -> Any:
    """The value in which schemas of objects that name their members are closed."""
    if isinstance(value, list):
        return [_closed_inside(element) for element in value]
    if not isinstance(value, dict):
        return value
    inside = {name: member if name in _DATA else _closed_inside(member) for name, member in value.items()}
    names_members = isinstance(value.get("properties"), dict) and value.get("type") == "object"
    return inside | {"additionalProperties": False} if names_members and _may_close(value) else inside


_DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""


def _section(form: ToolFormat, calls: Sequence[Part], parallel: bool, trigger: str = "") -> Part:
    """One section with all calls, or sections with one each."""
    layout = form.layout
    section = next(candidate for candidate in layout.sections if candidate.trigger == trigger or not trigger)
    begin, end = ("", "") if layout.several else section[:2]
    part: Part = {
        "type": "tags_with_separator",
        "tags": [tag(begin, call, end) for call in calls],
        "separator": layout.separator,
        "at_least_one": True,
        "stop_after_first": layout.single or not parallel,
    }
    return tag(section.begin, part, section.end) if layout.several else part


def _text_with_calls(form: ToolFormat, tools: Sequence[Tool], parallel: bool) -> Part:
    """Text in which calls may begin; those of tools that are not strict have any arguments."""
    calls = _call_parts(form, tools, strict_only=True)
    layout = form.layout
    free = any_text()
    tags = list[Part]()
    if layout.next:
        sections = [_section(form, calls, parallel, section.trigger) for section in layout.sections]
        return sequence([layout.preamble, either([*sections, sequence([const(layout.content), free])])])
    for section in layout.sections:
        if section.trigger and layout.several:
            tags.append(_section(form, calls, parallel, section.trigger))
        elif section.trigger:
            tags += [tag(section.begin, call, section.end) for call in calls]
    if tags:
        triggers = [section.trigger for section in layout.sections if section.trigger]
        free = {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": not parallel}
    if not form.openings:
        return free
    # Text that begins as bare calls do would be read as one.
    first = "".join(f"\\{opening}" for opening in form.openings)
    return either([_section(form, calls, parallel), sequence([regex(rf"[^{first}\s]"), free]), const("")])


def _content(user: GuidedDecoding) -> Part:
    """A user's constraint as a part of one with tools."""
    match user.kind:
        case "json":
            return json_value({"type": "object"})
        case "json_schema":
            return json_value(_parsed(user))
        case "regex":
            return regex(user.text)
        case "choice":
            return either([const(text) for text in _parsed(user)])
        case "ebnf_grammar":
            return {"type": "grammar", "grammar": user.text}
        case "structural_tag" if "format" in (parsed := _parsed(user)):
            part: Part = parsed["format"]
            return part
    message = f"{user.parameter}: a constraint of kind {user.kind} can't be combined with tools that may be called"
    raise InvalidArgument(message, field=user.parameter)


def _parsed(user: GuidedDecoding) -> Any:
    try:
        return json.loads(user.text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{user.parameter}: it is not JSON: {error}", field=user.parameter) from None
