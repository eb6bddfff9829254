"""Writes any `GuidedDecoding` as a grammar of the library's Lark dialect, which has a form for all of them.
Structural tags are text in which tags may begin, whose content has a form of its own, in the two customary notations:
`structures` of begin, schema and end, and `triggers`, of OpenAI's and vLLM's older `response_format`; and a `format`, a
tree of parts, of XGrammar.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding

MAX_WHITESPACE = 8
"""Characters of white space in a row that JSON may have between its parts: models went on with it for ever."""

_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}"
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_ANY_TEXT = r"/(.|\n)*/"


class LarkRules:
    """A grammar in the making. `special`: tokens by their text, that are tokens wherever they occur in a text.
    `strict`: see `GuidedDecoding`."""

    def __init__(self, special: Mapping[str, int], strict: bool = False) -> None:
        self._special, self._strict = special, strict
        self._specials = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._lines: list[str] = []
        self._others: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def text(self, text: str) -> str:
        """Exactly this text."""
        parts: list[str] = []
        at = 0
        for found in self._specials.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part) or '""'

    def text_until(self, marker: str) -> str:
        """Any text up to and including the first `marker`."""
        found = self._specials.search(marker)
        head = marker if found is None else marker[: found.start()]
        begin = self.rule(f"{_ANY_TEXT} {_quoted(head)}", "[lazy]") if head else self.any_text()
        return begin if found is None else f"{begin} {self.text(marker[found.start() :])}"

    def any_text(self) -> str:
        return self.rule(_ANY_TEXT)

    def json(self, schema: Any) -> str:
        """JSON of a schema, parsed already."""
        return self.rule(f"%json {json.dumps(bounded_schema(schema, self._strict), ensure_ascii=False)}")

    def regex(self, pattern: str) -> str:
        return self.rule(f"/{_slashed(pattern)}/")

    def choice(self, texts: list[str]) -> str:
        return self.rule(" | ".join(self.text(text) for text in texts))

    def lark(self, grammar: str) -> str:
        """A whole grammar with a rule `start`."""
        self._others.append(bound_embedded(grammar, self._strict))
        return f"@g{len(self._others)}"

    def finish(self, start: str) -> str:
        """The grammar whose texts are `start`'s, as the library reads it."""
        main = "\n".join((f"start: {start}", *self._lines))
        if not self._others:
            return main
        grammars = [("main", main), *((f"g{number}", text) for number, text in enumerate(self._others, 1))]
        return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in grammars]})


def write_grammar(constraint: GuidedDecoding, special: Mapping[str, int] = {}) -> str:
    """The library's grammar of a constraint.

    Raises:
        InvalidArgument: its text is not what its kind asks for; `field` is its `parameter`.
    """

    kind, text, parameter, after, strict = constraint
    rules = LarkRules(special, strict)
    try:
        match kind:
            case "json":
                content = rules.json({})
            case "json_schema":
                content = rules.json(_parsed(text))
            case "regex":
                content = rules.regex(text)
            case "choice":
                content = rules.choice(_texts(text))
            case "lark":
                content = rules.lark(text)
            case "ebnf_grammar":
                content = rules.lark(any_to_lark(text))
            case "structural_tag":
                content = structural_tag(rules, _parsed(text))
    except InvalidArgument as error:
        raise InvalidArgument(f"{parameter}: {error.message}", field=parameter) from None
    except RecursionError:
        raise InvalidArgument(f"{parameter}: it is nested too deeply", field=parameter) from None
    except Exception as error:  # the converter of GBNF raises its own kinds, and some by accident
        raise InvalidArgument(f"{parameter}: {error}", field=parameter) from error
    return rules.finish(f"{rules.text_until(after)} {content}" if after else content)


def bounded_schema(schema: Any, strict: bool) -> Any:
    """A JSON schema, parsed, with the options that hold for all JSON here."""
    if schema is True:
        schema = {}
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def bound_embedded(lark: str, strict: bool) -> str:
    """A Lark grammar whose embedded JSON schemas have the same options; what is no JSON is left for the library."""
    decode, parts, at = json.JSONDecoder().raw_decode, list[str](), 0
    for found in _EMBEDDED.finditer(lark):
        if found.start() < at:
            continue  # within a schema
        try:
            schema, end = decode(lark, found.end())
        except ValueError:
            continue
        parts += [lark[at : found.end()], json.dumps(bounded_schema(schema, strict), ensure_ascii=False)]
        at = end
    return "".join((*parts, lark[at:]))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"it is not JSON: {error}") from None


def _texts(text: str) -> list[str]:
    texts = _parsed(text)
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise InvalidArgument("it must be a list of at least one string")
    return texts


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _slashed(pattern: str) -> str:
    """A regular expression between slashes: those in it that have no backslash get one."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)


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
