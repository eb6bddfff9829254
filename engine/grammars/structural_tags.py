"""Structural tags: text in which tags may begin, whose content has a form of its own. In the two customary notations.

The older one, of OpenAI's and vLLM's `response_format`: `structures` of begin, schema and end, and `triggers`. The
newer one, of XGrammar, has a `format`, a tree of parts: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

import json
from typing import Any

from ...core.errors import InvalidArgument
from .lark_rules import LarkRules

_DEPTH = 32


def structural_tag(rules: LarkRules, tag: Any) -> str:
    """What the tag, parsed, allows.

    Raises:
        InvalidArgument: it has not the form of one.
    """
    if not isinstance(tag, dict):
        raise InvalidArgument("it must be an object")
    if "format" in tag:
        return _part(rules, tag["format"], _DEPTH)
    tags = [
        {"begin": _get(each, "begin", str), "content": _schema_part(each), "end": _get(each, "end", str)}
        for each in _get(tag, "structures", list)
    ]
    return _triggered(rules, {"triggers": _get(tag, "triggers", list), "tags": tags}, _DEPTH)


def _schema_part(structure: Any) -> dict[str, Any]:
    schema = structure.get("schema", {})
    return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}


def _part(rules: LarkRules, part: Any, depth: int) -> str:
    if depth == 0:
        raise InvalidArgument("it is nested too deeply")
    match _get(part, "type", str):
        case "const_string":
            return rules.text(_get(part, "value", str))
        case "json_schema" | "qwen_xml_parameter" as kind:
            if kind != "json_schema":
                raise InvalidArgument(f"a part of type '{kind}' is not supported")
            return rules.json(part.get("json_schema", {}))
        case "any_text":
            return rules.any_text()
        case "regex":
            return rules.regex(_get(part, "pattern", str))
        case "grammar":
            return rules.lark(_to_lark(_get(part, "grammar", str)))
        case "sequence":
            return rules.rule(" ".join(_part(rules, each, depth - 1) for each in _some(part, "elements")))
        case "or":
            return rules.rule(" | ".join(_part(rules, each, depth - 1) for each in _some(part, "elements")))
        case "tag":
            return _tag(rules, part, depth)
        case "triggered_tags":
            return _triggered(rules, part, depth)
        case "tags_with_separator":
            return _separated(rules, part, depth)
        case other:
            raise InvalidArgument(f"a part of type '{other}' is not supported")


def _tag(rules: LarkRules, tag: Any, depth: int, begun: str = "") -> str:
    """A whole tag, or what follows when its beginning `begun` was written."""
    begin, end = _get(tag, "begin", str)[len(begun) :], _ending(tag)
    content = tag.get("content")
    if isinstance(content, dict) and content.get("type") == "any_text" and end:
        body = rules.text_until(end)
    else:
        body = f"{_part(rules, content, depth - 1)} {rules.text(end) if end else ''}"
    return rules.rule(f"{rules.text(begin)} {body}" if begin else body)


def _ending(tag: Any) -> str:
    end = tag.get("end", "")
    if isinstance(end, list) and len(end) == 1:
        end = end[0]
    if not isinstance(end, str):
        raise InvalidArgument("'end' must be a string")
    return end


def _triggered(rules: LarkRules, part: Any, depth: int) -> str:
    """Text and tags, each begun by the trigger that its `begin` starts with."""
    tags, triggers = _some(part, "tags"), _some(part, "triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidArgument("'triggers' must be strings, none of them empty")
    bodies: dict[str, list[str]] = {}
    for tag in tags:
        begin = _get(tag, "begin", str)
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise InvalidArgument(f"no trigger begins {begin!r}")
        bodies.setdefault(trigger, []).append(_tag(rules, tag, depth, trigger))
    found = [rules.rule(f"{rules.text_until(each)} ({' | '.join(after)})") for each, after in bodies.items()]
    one = rules.rule(" | ".join(found))
    times = "+" if part.get("at_least_one") else "*"
    if part.get("stop_after_first"):
        return one if part.get("at_least_one") else f"({one} | {rules.any_text()})"
    return f"{one}{times} {rules.any_text()}"


def _separated(rules: LarkRules, part: Any, depth: int) -> str:
    one = rules.rule(" | ".join(_tag(rules, each, depth) for each in _some(part, "tags")))
    separator = rules.text(_get(part, "separator", str))
    several = one if part.get("stop_after_first") else f"{one} ({separator} {one})*"
    return f"({several})" if part.get("at_least_one") else f"({several})?"


def _to_lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(grammar)


def _some(part: Any, name: str) -> list[Any]:
    found: list[Any] = _get(part, name, list)
    if not found:
        raise InvalidArgument(f"'{name}' must not be empty")
    return found


def _get(part: Any, name: str, kind: type) -> Any:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, kind):
        raise InvalidArgument(f"'{name}' must be {'a list' if kind is list else 'a string'}")
    return value
