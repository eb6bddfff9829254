"""Structural tags: text in which tags may begin, whose content has a form of its own. There are two notations:
`structures` and `triggers`, of vLLM's older `response_format`, and `format`, a tree of parts, of XGrammar.

Free text ends before the first text that must come behind it, which is the end of the tag around it if nothing else
follows. So each part is written with what comes behind it.
"""

import json
from typing import Any, NamedTuple

from ...core.errors import InvalidArgument
from .lark_rules import LarkRules

_DEPTH = 32

_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "const_string": {"value": ()},
    "json_schema": {"json_schema": (), "style": ("json", None), "any_order": (False, None)},
    "any_text": {"excludes": (), "max_tokens": (None,), "max_chars": (None,)},
    "regex": {"pattern": (), "excludes": ([], None)},
    "grammar": {"grammar": ()},
    "sequence": {"elements": ()},
    "or": {"elements": ()},
    "tag": {"begin": (), "content": (), "end": ()},
    "triggered_tags": dict.fromkeys(("triggers", "tags", "at_least_one", "stop_after_first", "excludes"), ()),
    "tags_with_separator": dict.fromkeys(("tags", "separator", "at_least_one", "stop_after_first"), ()),
}
"""The fields of each type of part -> the values that are served; none listed: all."""


class _Behind(NamedTuple):
    """What comes behind a part."""

    text: str = ""
    """This, which is written with the part."""
    more: bool = False
    """More may come then."""
    needed: bool = False
    """More must come then."""


def write_structural_tag(rules: LarkRules, tag: Any) -> str:
    """The rule of a parsed structural tag. Raises `InvalidArgument` if it is none, or asks for what is not served."""
    if not isinstance(tag, dict):
        raise InvalidArgument("it must be an object")
    if "format" in tag:
        return _part(rules, tag["format"], _Behind(), _DEPTH)
    tags = [
        {"begin": _get(entry, "begin", str), "content": _schema_part(entry), "end": _get(entry, "end", str)}
        for entry in _get(tag, "structures", list)
    ]
    return _triggered(rules, {"triggers": _get(tag, "triggers", list), "tags": tags}, _Behind(), _DEPTH)


def _schema_part(structure: Any) -> dict[str, Any]:
    schema = structure.get("schema", {})
    return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}


def _part(rules: LarkRules, part: Any, behind: _Behind, depth: int) -> str:
    if depth == 0:
        raise InvalidArgument("it is nested too deeply")
    kind = _get(part, "type", str)
    _check_fields(part, kind)
    match kind:
        case "const_string":
            return rules.text(_get(part, "value", str) + behind.text)
        case "json_schema":
            return _joined(rules, rules.json(part.get("json_schema", {})), behind.text)
        case "any_text":
            return _free_text(rules, behind, _excludes(part))
        case "regex":
            return rules.regex(_get(part, "pattern", str), behind.text)
        case "grammar":
            return rules.grammar(_get(part, "grammar", str), behind.text, behind.more)
        case "sequence":
            return _sequence(rules, _some(part, "elements"), behind, depth)
        case "or":
            return rules.rule(" | ".join(_part(rules, each, behind, depth - 1) for each in _some(part, "elements")))
        case "tag":
            return _tag(rules, part, behind, depth)
        case "triggered_tags":
            return _triggered(rules, part, behind, depth)
    return _separated(rules, part, behind, depth)


def _check_fields(part: dict[str, Any], kind: str) -> None:
    """Raises unless every field of a part is one that is served."""
    if kind not in _FIELDS:
        raise InvalidArgument(f"a part of type '{kind}' is not supported")
    for name, value in part.items():
        served = _FIELDS[kind].get(name, (None,))
        if name != "type" and served and value not in served:
            raise InvalidArgument(f"'{name}' {json.dumps(value)[:60]} of a part of type '{kind}' is not supported")


def _free_text(rules: LarkRules, behind: _Behind, excludes: list[str]) -> str:
    if behind.text:
        return rules.text_until(behind.text, excludes)
    if behind.needed:
        raise InvalidArgument("free text must be the last part, or have a text behind it")
    return rules.any_text(excludes)


def _sequence(rules: LarkRules, elements: list[Any], behind: _Behind, depth: int) -> str:
    """Parts one after the other, each with the text behind it that is always the same."""
    written: list[str] = []
    begun = ""
    at = 0
    while at < len(elements):
        element = elements[at]
        at += 1
        text = ""
        while at < len(elements) and _kind(elements[at]) == "const_string":
            _check_fields(elements[at], "const_string")
            text += _get(elements[at], "value", str)
            at += 1
        begin = ""
        if at < len(elements):
            begin = _get(elements[at], "begin", str) if _kind(elements[at]) == "tag" else ""
            after = _Behind(text + begin, more=True, needed=True)
        else:
            after = behind._replace(text=text + behind.text)
        if begun:
            written.append(_tag(rules, element, after, depth - 1, begun))
        else:
            written.append(_part(rules, element, after, depth - 1))
        begun = begin
    return rules.rule(" ".join(written))


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _tag(rules: LarkRules, tag: Any, behind: _Behind, depth: int, begun: str = "") -> str:
    """The rule of a whole tag, or of its rest after the first part `begun`."""
    _check_fields(tag, "tag")
    begin = _get(tag, "begin", str)[len(begun) :]
    end = _ending(tag)
    after = _Behind(end, more=bool(behind.text) or behind.more) if end else behind
    body = _part(rules, tag.get("content"), after, depth - 1)
    rest = rules.text(behind.text) if end and behind.text else ""
    return rules.rule(" ".join(filter(None, (rules.text(begin) if begin else "", body, rest))))


def _ending(tag: Any) -> str:
    end = tag.get("end", "")
    if isinstance(end, list) and len(end) == 1:
        end = end[0]
    if not isinstance(end, str):
        raise InvalidArgument("'end' must be a string")
    return end


def _triggered(rules: LarkRules, part: Any, behind: _Behind, depth: int) -> str:
    """The rule of text with tags, each of which begins with a trigger. Where one must come, it comes first."""
    tags = _some(part, "tags")
    triggers = _some(part, "triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidArgument("'triggers' must be strings, none of them empty")
    excludes = _excludes(part)
    once = bool(part.get("stop_after_first"))
    after = behind if once else _repeated(behind)
    bodies: dict[str, list[str]] = {}
    for tag in tags:
        begin = _get(tag, "begin", str)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidArgument(f"no trigger begins {begin!r}")
        bodies.setdefault(trigger, []).append(_tag(rules, tag, after, depth, trigger))
    rests = {trigger: rules.rule(" | ".join(body)) for trigger, body in bodies.items()}
    first = rules.rule(" | ".join(f"{rules.text(trigger)} {rest}" for trigger, rest in rests.items()))
    if once and part.get("at_least_one"):
        return first
    later = rules.rule(" | ".join(f"{rules.text_until(trigger, excludes)} {rest}" for trigger, rest in rests.items()))
    free = _free_text(rules, behind, excludes)
    if once:
        return rules.rule(f"{later} | {free}")
    return rules.rule(f"{first if part.get('at_least_one') else ''} {later}* {free}")


def _separated(rules: LarkRules, part: Any, behind: _Behind, depth: int) -> str:
    after = _repeated(behind)
    any_tag = rules.rule(" | ".join(_tag(rules, tag, after, depth) for tag in _some(part, "tags")))
    separator = rules.text(_get(part, "separator", str))
    several = any_tag if part.get("stop_after_first") else f"{any_tag} ({separator} {any_tag})*"
    tags = f"({several})" if part.get("at_least_one") else f"({several})?"
    return _joined(rules, tags, behind.text)


def _repeated(behind: _Behind) -> _Behind:
    """What comes behind a part of which more may come."""
    return _Behind(more=True, needed=bool(behind.text) or behind.needed)


def _excludes(part: Any) -> list[str]:
    excludes = part.get("excludes") or []
    if not isinstance(excludes, list) or not all(isinstance(text, str) and text for text in excludes):
        raise InvalidArgument("'excludes' must be strings, none of them empty")
    return excludes


def _joined(rules: LarkRules, content: str, text: str) -> str:
    return rules.rule(f"{content} {rules.text(text)}") if text else content


def _some(part: Any, name: str) -> list[Any]:
    elements: list[Any] = _get(part, name, list)
    if not elements:
        raise InvalidArgument(f"'{name}' must not be empty")
    return elements


def _get(part: Any, name: str, kind: type) -> Any:
    value = part.get(name) if isinstance(part, dict) else None
    if not isinstance(value, kind):
        raise InvalidArgument(f"'{name}' must be {'a list' if kind is list else 'a string'}")
    return value
