"""Reads GBNF, llama.cpp's form of context-free grammars: rules of characters.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md. Knows nothing of lexers.
"""

import re
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from ...core.errors import InvalidArgument

LAST_CHARACTER = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_MOST_REPEATS = 1 << 16

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last code points of characters, in order, none of them adjacent."""


class Letter(NamedTuple):
    """One character out of `ranges`."""

    ranges: Ranges


class Text(NamedTuple):
    """These characters, at least one."""

    text: str


class Concatenation(NamedTuple):
    """One part after the other."""

    parts: "tuple[Expression, ...]"


class Choice(NamedTuple):
    """Any one of the parts."""

    parts: "tuple[Expression, ...]"


class Repeat(NamedTuple):
    """A part `least` to `most` times; without `most`, as often as it likes."""

    part: "Expression"
    least: int
    most: int | None


class Reference(NamedTuple):
    """Another rule."""

    name: str


Expression: TypeAlias = Letter | Text | Concatenation | Choice | Repeat | Reference

NOTHING = Concatenation(())

_PLAIN = re.compile(r'[^"\\\ud800-\udfff]+')
_SKIPPED = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_RULE = re.compile(r"([\w-]+)[ \t]*::=")
_NAME = re.compile(r"[\w-]+")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_CONTROLS = {"n": 10, "r": 13, "t": 9}
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def read_gbnf(text: str) -> Mapping[str, Expression]:
    """The rules by name. Raises `InvalidArgument` if the text is no GBNF, has no rule `root`, refers to none, or needs
    one that no text can satisfy."""
    return _GbnfReader(text).read_rules()


class _GbnfReader:
    """A text, and how far it was read."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._references: dict[str, int] = {}

    def read_rules(self) -> dict[str, Expression]:
        """See `read_gbnf`."""
        rules: dict[str, Expression] = {}
        places: dict[str, int] = {}
        self._skip()
        while self._at < len(self._text):
            head = _RULE.match(self._text, self._at)
            if head is None:
                raise self._wrong("there should be a rule, 'name ::= ..'")
            self._at = head.end()
            self._skip()
            places[head[1]] = head.start()
            rules[head[1]] = self._choice()
        for name, at in self._references.items():
            if name not in rules:
                self._at = at
                raise self._wrong(f"there is no rule '{name}'")
        if "root" not in rules:
            raise InvalidArgument("it has no rule 'root'")
        needed = needed_rules(rules, "root")
        if endless := [name for name in _EndlessRules(rules).find() if name in needed]:
            name = endless[0]
            self._at = places[name]
            raise self._wrong(f"no text can satisfy rule '{name}', which never ends")
        return rules

    def _choice(self) -> Expression:
        parts = [self._sequence()]
        while self._next("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (part := self._part()) is not None:
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _part(self) -> Expression | None:
        """The next part of a sequence, if it goes on."""
        match self._text[self._at : self._at + 1]:
            case '"':
                return self._literal()
            case "[":
                return self._letter()
            case "(":
                self._next("(")
                part = self._choice()
                if not self._next(")"):
                    raise self._wrong("')' is missing")
                return part
            case ".":
                self._next(".")
                return Letter(((0, LAST_CHARACTER),))
        name = _NAME.match(self._text, self._at)
        if name is None or _RULE.match(self._text, self._at):
            return None
        self._references.setdefault(name[0], self._at)
        self._at = name.end()
        self._skip()
        return Reference(name[0])

    def _repeated(self, part: Expression) -> Expression:
        while (sign := self._text[self._at : self._at + 1]) and sign in "*+?{":
            least, most = self._counts() if sign == "{" else _REPEATS[sign]
            if sign != "{":
                self._next(sign)
            part = Repeat(part, least, most) if most != 0 else NOTHING
        return part

    def _counts(self) -> tuple[int, int | None]:
        counts = _COUNTS.match(self._text, self._at)
        if counts is None:
            raise self._wrong("a repetition is '{m}', '{m,}' or '{m,n}'")
        least = int(counts[1])
        most = int(counts[3]) if counts[3] else (None if counts[2] else least)
        if least > _MOST_REPEATS or (most is not None and not least <= most <= _MOST_REPEATS):
            raise self._wrong(f"a repetition's numbers rise, to {_MOST_REPEATS} at most")
        self._at = counts.end()
        self._skip()
        return least, most

    def _literal(self) -> Expression:
        self._at += 1
        pieces: list[str] = []
        while True:
            plain = _PLAIN.match(self._text, self._at)
            if plain:
                pieces.append(plain[0])
                self._at = plain.end()
            code = self._code('"')
            if code is None:
                break
            pieces.append(chr(code))
        self._skip()
        text = "".join(pieces)
        return Text(text) if text else NOTHING

    def _letter(self) -> Letter:
        self._at += 1
        others = self._text.startswith("^", self._at)
        self._at += others
        ranges: list[tuple[int, int]] = []
        while (first := self._code("]")) is not None:
            last: int | None = first
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                last = self._code("]")
            if last is None or last < first:
                raise self._wrong("a range of characters goes backwards")
            ranges.append((first, last))
        joined = join_ranges(ranges)
        if others:
            joined = _complement(joined)
        if not joined:
            raise self._wrong("no character is in these brackets")
        self._skip()
        return Letter(joined)

    def _code(self, end: str) -> int | None:
        """The code point of the next character of a literal or of brackets; None for their `end`."""
        letter = self._text[self._at : self._at + 1]
        if letter == end:
            self._at += 1
            return None
        if not letter:
            raise self._wrong(f"{end} is missing")
        if letter != "\\" and ord(letter) not in _SURROGATES:
            self._at += 1
            return ord(letter)
        escape = _ESCAPE.match(self._text, self._at)
        if escape is None or (escape[4] and escape[4] not in _CONTROLS and escape[4].isalnum()):
            raise self._wrong("there is no such escape")
        code = int(escape[1] or escape[2] or escape[3] or "0", 16)
        if escape[4]:
            code = _CONTROLS.get(escape[4]) or ord(escape[4])
        if code > LAST_CHARACTER or code in _SURROGATES:
            raise self._wrong("there is no such character")
        self._at = escape.end()
        return code

    def _next(self, sign: str) -> bool:
        """Go on behind `sign` if it is next."""
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        self._skip()
        return True

    def _skip(self) -> None:
        """Go on behind white space and comments. Where a line ends matters as little as in XGrammar: a rule's name has
        ::= behind it."""
        skipped = _SKIPPED.match(self._text, self._at)
        self._at = skipped.end() if skipped else self._at

    def _wrong(self, what: str) -> InvalidArgument:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20]
        return InvalidArgument(f"line {line}, before {rest!r}: {what}" if rest else f"line {line}, at its end: {what}")


def join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def _complement(ranges: Ranges) -> Ranges:
    borders = [-1, *(border for first, last in ranges for border in (first, last)), LAST_CHARACTER + 1]
    gaps = zip(borders[::2], borders[1::2], strict=True)
    return tuple((before + 1, behind - 1) for before, behind in gaps if before + 1 < behind)


def references(part: Expression) -> Iterable[str]:
    """The names that a part refers to."""
    match part:
        case Reference(name):
            yield name
        case Concatenation(parts) | Choice(parts):
            for element in parts:
                yield from references(element)
        case Repeat(repeated, _, _):
            yield from references(repeated)


def needed_rules(rules: Mapping[str, Expression], first: str, known: Container[str] = ()) -> dict[str, None]:
    """The names of the rules that `first` needs, itself first, but for those that are `known`."""
    needed: dict[str, None] = {first: None}
    waiting = [first]
    while waiting:
        for name in references(rules[waiting.pop()]):
            if name not in needed and name not in known:
                needed[name] = None
                waiting.append(name)
    return needed


class _EndlessRules:
    """Finds the rules that no text can satisfy, such as `x ::= "a" x`, in as many steps as all rules have parts. A part
    is told of each part within it that some text satisfies; parts have numbers, the rules the first ones."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = {name: number for number, name in enumerate(rules)}
        self._missing = [1] * len(rules)
        """How many more of its parts each part must be told of."""
        self._users: list[list[int]] = [[] for _ in rules]
        """The parts that each is a part of."""
        self._told: list[int] = []
        """Those that are yet to be told, once for each time."""
        for number, rule in enumerate(rules.values()):
            self._add(rule, number)

    def find(self) -> list[str]:
        while self._told:
            part = self._told.pop()
            self._missing[part] -= 1
            if self._missing[part] == 0:
                self._told += self._users[part]
        return [name for name, number in self._rules.items() if self._missing[number] > 0]

    def _add(self, part: Expression, user: int) -> None:
        match part:
            case Letter(_) | Text(_) | Concatenation(()) | Repeat(_, 0, _):
                self._told.append(user)
            case Reference(name):
                self._users[self._rules[name]].append(user)
            case Repeat(repeated, _, _):
                self._add(repeated, user)
            case Concatenation(parts) | Choice(parts):
                number = len(self._missing)
                self._missing.append(len(parts) if isinstance(part, Concatenation) else 1)
                self._users.append([user])
                for element in parts:
                    self._add(element, number)
