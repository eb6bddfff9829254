"""Writes the rules of a grammar in the library's Lark dialect:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .gbnf import Concatenation, Reference, Text, read_gbnf
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

    def text_until(self, marker: str, excludes: Sequence[str] = ()) -> str:
        """Any text up to and including the first `marker`, none of `excludes` before it."""
        head, rest = self._before_special(marker)
        if not rest:
            return self.rule(f"{self._free_text(excludes)} {_quoted(marker)}", "[lazy]")
        # Until the special token comes, its `head` may stand in the text as often as it likes.
        begin = self._terminal(f"{self._free_text(excludes)} {_quoted(head)}") if head else self._free_text(excludes)
        return f"{self.rule(begin)} {self.text(rest)}"

    def any_text(self, excludes: Sequence[str] = ()) -> str:
        return self.rule(self._free_text(excludes))

    def _free_text(self, excludes: Sequence[str]) -> str:
        """The terminal of any text without `excludes`. No text has special tokens."""
        excluded = [text for text in excludes if not self._specials.search(text)]
        if not excluded:
            return _ANY_TEXT
        return self._terminal(" & ".join((_ANY_TEXT, *(rf"~/(.|\n)*{_literal(text)}(.|\n)*/" for text in excluded))))

    def _before_special(self, text: str) -> tuple[str, str]:
        """A text, parted before its first special token."""
        match = self._specials.search(text)
        return (text[: match.start()], text[match.start() :]) if match else (text, "")

    def _terminal(self, body: str) -> str:
        """Add a terminal, and return its name."""
        self._lines.append(f"T{len(self._lines)}: {body}")
        return f"T{len(self._lines) - 1}"

    def json(self, schema: Any) -> str:
        return self.rule(f"%json {json.dumps(bounded_schema(schema, self._strict), ensure_ascii=False)}")

    def regex(self, pattern: str, behind: str = "") -> str:
        """A regular expression, with a text `behind` it: as one, for the lexer reads as far as it can."""
        if not behind:
            return self.rule(f"/{_slashed(pattern)}/")
        head, rest = self._before_special(behind)
        return f"{self.rule(f'/(?:{_slashed(pattern)}){_literal(head)}/')} {self.text(rest) if rest else ''}"

    def choice(self, texts: list[str]) -> str:
        """One of these texts. Those without special tokens are one terminal: of a rule every alternative is an item of
        each step, and those are limited."""
        alternatives = [self.text(text) for text in texts if self._specials.search(text)]
        if plain := [self.text(text) for text in texts if not self._specials.search(text)]:
            alternatives.append(self._terminal(" | ".join(plain)))
        return self.rule(" | ".join(alternatives))

    def lark(self, grammar: str) -> str:
        """A whole grammar with a rule `start`."""
        self._others.append(bound_embedded(grammar, self._strict))
        return f"@g{len(self._others)}"

    def grammar(self, text: str, behind: str = "", followed: bool = False) -> str:
        """A grammar in Lark or GBNF, with a text `behind` it. `followed`: whether any text may come then."""
        if _LARK.search(text):
            return f"{self.lark(text)} {self.text(behind) if behind else ''}"
        head, rest = self._before_special(behind)
        start = Concatenation((Reference("root"), *([Text(head)] if head else ())))
        name, lines = write_rules(read_gbnf(text), start, f"g{len(self._lines)}_", followed and not rest)
        self._lines += lines
        return f"{name} {self.text(rest) if rest else ''}"

    def finish(self, start: str) -> str:
        """The library's grammar for the texts of rule `start`."""
        main = "\n".join((f"start: {start}", *self._lines))
        if not self._others:
            return main
        grammars = [("main", main), *((f"g{number}", text) for number, text in enumerate(self._others, 1))]
        return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in grammars]})


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


def _quoted(text: str) -> str:
    """A text, if there is any, as the library reads it, which takes no delete character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") if text else ""


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(rf"\x{{{ord(letter):x}}}" for letter in text)


def _slashed(pattern: str) -> str:
    """A regular expression whose slashes have backslashes."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
