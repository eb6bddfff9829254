"""Writes any `GuidedDecoding` as a grammar of the library's Lark dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

Structural tags are text in which tags may begin, whose content has a form of its own. There are two notations:
`structures` and `triggers`, of vLLM's older `response_format`, and `format`, a tree of parts, of XGrammar.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from ...core.errors import InvalidArgument
from ...core.request import GuidedDecoding
from .gbnf import read_gbnf
from .lexemes import write_rules

MAX_WHITESPACE = 8
"""Consecutive white space that JSON may have between its parts: models went on with it for ever."""

_WHITESPACE = rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}"
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_ANY_TEXT = r"/(.|\n)*/"


class LarkRules:
    """A grammar in the making. `special`: added tokens by their text, which become tokens wherever a text has it.
    `strict`: see `GuidedDecoding`."""

    def __init__(self, special: Mapping[str, int], strict: bool = False) -> None:
        self._special, self._strict = special, strict
        self._specials = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._lines: list[str] = []
        self._others: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def text(self, text: str) -> str:
        """Exactly this text."""
        parts: list[str] = []
        at = 0
        for match in self._specials.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self._special[match[0]]}]>"]
            at = match.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part) or '""'

    def text_until(self, marker: str) -> str:
        """Any text up to and including the first `marker`."""
        match = self._specials.search(marker)
        if match is None:
            return self.rule(f"{_ANY_TEXT} {_quoted(marker)}", "[lazy]")
        head = marker[: match.start()]
        # Until the special token comes, its `head` may stand in the text as often as it likes.
        letters = "".join(rf"\x{{{ord(letter):x}}}" for letter in head)
        begin = self.rule(rf"/(.|\n)*{letters}/") if head else self.any_text()
        return f"{begin} {self.text(marker[match.start() :])}"

    def any_text(self) -> str:
        return self.rule(_ANY_TEXT)

    def json(self, schema: Any) -> str:
        return self.rule(f"%json {json.dumps(bounded_schema(schema, self._strict), ensure_ascii=False)}")

    def regex(self, pattern: str) -> str:
        return self.rule(f"/{_slashed(pattern)}/")

    def choice(self, texts: list[str]) -> str:
        """One of these texts. Those without special tokens are one terminal: of a rule every alternative is an item of
        each step, and those are limited."""
        alternatives = [self.text(text) for text in texts if self._specials.search(text)]
        if plain := [self.text(text) for text in texts if not self._specials.search(text)]:
            alternatives.append(f"T{len(self._lines)}")
            self._lines.append(f"{alternatives[-1]}: {' | '.join(plain)}")
        return self.rule(" | ".join(alternatives))

    def lark(self, grammar: str) -> str:
        """A whole grammar with a rule `start`."""
        self._others.append(bound_embedded(grammar, self._strict))
        return f"@g{len(self._others)}"

    def grammar(self, text: str, followed: bool = False) -> str:
        """A grammar in Lark or GBNF. `followed`: whether any text may come after it."""
        if _LARK.search(text):
            return self.lark(text)
        name, lines = write_rules(read_gbnf(text), f"g{len(self._lines)}_", followed)
        self._lines += lines
        return name

    def finish(self, start: str) -> str:
        """The library's grammar for the texts of rule `start`."""
        main = "\n".join((f"start: {start}", *self._lines))
        if not self._others:
            return main
        grammars = [("main", main), *((f"g{number}", text) for number, text in enumerate(self._others, 1))]
        return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in grammars]})


def write_grammar(constraint: GuidedDecoding, special: Mapping[str, int] = {}) -> str:
    """The library's grammar of a constraint. Raises `InvalidArgument` for a text that is not of the constraint's kind;
    `field` is its `parameter`."""
    kind, text, parameter, after, strict, opening = constraint
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
                content = rules.grammar(text)
            case "structural_tag":
                content = structural_tag(rules, _parsed(text))
    except InvalidArgument as error:
        raise InvalidArgument(f"{parameter}: {error.message}", field=parameter) from None
    except RecursionError:
        raise InvalidArgument(f"{parameter}: it is nested too deeply", field=parameter) from None
    except Exception as error:  # parts of a wrong text have any type
        raise InvalidArgument(f"{parameter}: {error}", field=parameter) from error
    before = (rules.text_until(after) if after else "", rules.text(opening) if opening else "")
    return rules.finish(" ".join(filter(None, (*before, content))))


def bounded_schema(schema: Any, strict: bool) -> Any:
    """A parsed JSON schema with the options that hold for all JSON here."""
    if schema is True:
        schema = {}
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def bound_embedded(lark: str, strict: bool) -> str:
    """A Lark grammar whose embedded JSON schemas have the same options. What is no JSON is left to the library."""
    decode = json.JSONDecoder().raw_decode
    parts: list[str] = []
    at = 0
    for match in _EMBEDDED.finditer(lark):
        if match.start() < at:
            continue  # within a schema
        try:
            schema, end = decode(lark, match.end())
        except ValueError:
            continue
        parts += [lark[at : match.end()], json.dumps(bounded_schema(schema, strict), ensure_ascii=False)]
        at = end
    return "".join((*parts, lark[at:]))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"it is not JSON: {error}") from None


def _texts(text: str) -> list[str]:
    texts = _parsed(text)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument("it must be a list of at least one string")
    return texts


def _quoted(text: str) -> str:
    """A text, if there is any, as the library reads it, which takes no delete character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _slashed(pattern: str) -> str:
    """A regular expression whose slashes have backslashes."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)


_DEPTH = 32


def structural_tag(rules: LarkRules, tag: Any) -> str:
    """The rule of a parsed structural tag. Raises `InvalidArgument` if it is none."""
    if not isinstance(tag, dict):
        raise InvalidArgument("it must be an object")
    if "format" in tag:
        return _part(rules, tag["format"], _DEPTH)
    tags = [
        {"begin": _get(entry, "begin", str), "content": _schema_part(entry), "end": _get(entry, "end", str)}
        for entry in _get(tag, "structures", list)
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
            return rules.grammar(_get(part, "grammar", str), followed=True)
        case "sequence":
            return rules.rule(" ".join(_part(rules, element, depth - 1) for element in _some(part, "elements")))
        case "or":
            return rules.rule(" | ".join(_part(rules, element, depth - 1) for element in _some(part, "elements")))
        case "tag":
            return _tag(rules, part, depth)
        case "triggered_tags":
            return _triggered(rules, part, depth)
        case "tags_with_separator":
            return _separated(rules, part, depth)
        case other:
            raise InvalidArgument(f"a part of type '{other}' is not supported")


def _tag(rules: LarkRules, tag: Any, depth: int, begun: str = "") -> str:
    """The rule of a whole tag, or of its rest after the first part `begun`."""
    begin = _get(tag, "begin", str)[len(begun) :]
    end = _ending(tag)
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
    """The rule of text with tags, each of which begins with a trigger."""
    tags = _some(part, "tags")
    triggers = _some(part, "triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidArgument("'triggers' must be strings, none of them empty")
    bodies: dict[str, list[str]] = {}
    for tag in tags:
        begin = _get(tag, "begin", str)
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidArgument(f"no trigger begins {begin!r}")
        bodies.setdefault(trigger, []).append(_tag(rules, tag, depth, trigger))
    tagged = [rules.rule(f"{rules.text_until(trigger)} ({' | '.join(after)})") for trigger, after in bodies.items()]
    any_tag = rules.rule(" | ".join(tagged))
    times = "+" if part.get("at_least_one") else "*"
    if part.get("stop_after_first"):
        return any_tag if part.get("at_least_one") else f"({any_tag} | {rules.any_text()})"
    return f"{any_tag}{times} {rules.any_text()}"


def _separated(rules: LarkRules, part: Any, depth: int) -> str:
    any_tag = rules.rule(" | ".join(_tag(rules, tag, depth) for tag in _some(part, "tags")))
    separator = rules.text(_get(part, "separator", str))
    several = any_tag if part.get("stop_after_first") else f"{any_tag} ({separator} {any_tag})*"
    return f"({several})" if part.get("at_least_one") else f"({several})?"


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
