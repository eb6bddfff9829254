"""Writes rules of characters for the library, whose lexer is greedy: it reads the longest lexeme that may come next,
and never goes back. A grammar of characters has no such rule: in `[a-z ]* "done"` the last word ends the first part.
With one lexeme for each character all would be right, at ten to a hundred times the time of a mask.

So a lexeme is as much of a rule as needs no recursive rule, and is cut only where the lexer could read too far. Rules
for which it takes too long to find out where are cut into single characters.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .gbnf import (
    NOTHING,
    Choice,
    Concatenation,
    Expression,
    Letter,
    Ranges,
    Reference,
    Repeat,
    Text,
    needed_rules,
    references,
)
from .lexeme_places import LexemePlaces, ReadTooFar, TooManySteps, part_ranges


class _Size(NamedTuple):
    """Of a part with the rules it needs written out."""

    letters: int
    steps: int
    """Of a walk through it, which goes through every range of a letter: no fewer than letters."""
    levels: int
    empty: bool
    """Whether it may be empty."""


_LARGEST = _Size(1 << 14, 1 << 14, 40, True)
"""What may be a lexeme."""
_START = "the text"
"""The rule of the whole text: no other has such a name."""
_MOST_STEPS = 1 << 17
"""Through all lexemes that were tried."""


def write_rules(
    rules: Mapping[str, Expression], start: Expression, prefix: str, followed: bool
) -> tuple[str, list[str]]:
    """The name of a rule for `start`, and the lines of all rules in the library's dialect of Lark, whose names begin
    with `prefix`. `followed`: whether any text may come after `start`."""
    rules = {_START: start, **rules}
    try:
        plan = _Plan(rules)
        plan.cut_ambiguous(followed)
    except TooManySteps:
        plan = _Plan(rules, characters=True)
    return plan.write(prefix)


class _Plan:
    """The rules with lexemes in them, to which they refer by patterns in slashes: no rule has such a name.
    `characters`: each is a single character."""

    def __init__(self, rules: Mapping[str, Expression], characters: bool = False) -> None:
        self._characters = characters
        self._lexemes: dict[str, Expression] = {}
        self._steps = 0
        self._cut_before: set[Ranges] = set()
        """The characters of runs that are what is left of others."""
        self._plain: dict[str, Expression] = {}
        """The rules that may be parts of lexemes, with the rules they need written out."""
        self._sizes: dict[str, _Size] = {}
        if not characters:
            self._write_out(rules)
        self._rules = {name: self._planned(rule) for name, rule in rules.items()}

    def cut_ambiguous(self, followed: bool) -> None:
        """Cut lexemes until the lexer reads none too far. Raises `TooManySteps`."""
        steps = 0
        while True:
            self._rules = {name: self._rules[name] for name in self._needed()}
            places = LexemePlaces(self._rules, self._lexemes, steps)
            found = places.read_too_far(followed)
            if not found:
                return
            steps = places.steps
            pieces = {name: self._cut(self._lexemes[name], place) for name, place in found.items()}
            self._rules = {name: _replaced(rule, pieces) for name, rule in self._rules.items()}

    def write(self, prefix: str) -> tuple[str, list[str]]:
        """See `write_rules`."""
        names = {rule: f"{prefix}r{number}" for number, rule in enumerate(self._needed())}
        for pattern, part in self._lexemes.items():
            names[pattern] = f"{pattern}?" if self._size(part).empty else pattern
        return names[_START], [f"{names[rule]}: {_lark(self._rules[rule], names)}" for rule in self._needed()]

    def _needed(self) -> list[str]:
        """The rules that are needed, that of the whole text first."""
        return list(needed_rules(self._rules, _START, self._lexemes))

    def _write_out(self, rules: Mapping[str, Expression]) -> None:
        """Find the rules that may be parts of lexemes, those first that need no other."""
        users: dict[str, list[str]] = {name: [] for name in rules}
        missing: dict[str, int] = {}
        for name, rule in rules.items():
            needed = set(references(rule))
            missing[name] = len(needed)
            for other in needed:
                users[other].append(name)
        ready = deque(name for name, number in missing.items() if not number)
        while ready:
            name = ready.popleft()
            size = self._size(rules[name])
            if not size.letters:
                self._plain[name] = NOTHING
                self._sizes[name] = self._size(NOTHING)
            elif _fits(size):
                self._plain[name] = _replaced(rules[name], self._plain)
                self._sizes[name] = size
            for user in users[name]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)

    def _size(self, part: Expression) -> _Size:
        """Larger than the largest if it needs a rule that may be no part of a lexeme."""
        match part:
            case Letter(ranges):
                return _Size(1, len(ranges), 1, False)
            case Text(text):
                return _Size(len(text), len(text), 1, False)
            case Reference(name):
                return self._sizes.get(name, _LARGEST._replace(steps=_LARGEST.steps + 1))
            case Repeat(repeated, least, _):
                size = self._size(repeated)
                return _Size(size.letters, size.steps + 1, size.levels + 1, size.empty or not least)
        sizes = [self._size(element) for element in part.parts]
        letters = sum(size.letters for size in sizes)
        steps = 1 + sum(size.steps for size in sizes)
        levels = 1 + max((size.levels for size in sizes), default=0)
        if isinstance(part, Choice):
            return _Size(letters, steps, levels, any(size.empty for size in sizes))
        return _Size(letters, steps, levels, all(size.empty for size in sizes))

    def _planned(self, part: Expression) -> Expression:
        """A part with lexemes in it."""
        if self._characters:
            return self._characters_of(part)
        if _fits(self._size(part)):
            return self._lexeme(_replaced(part, self._plain))
        match part:
            case Letter(_):
                return self._lexeme(part)
            case Text(text):
                pieces = range(0, len(text), _LARGEST.steps)
                return Concatenation(tuple(self._lexeme(Text(text[at : at + _LARGEST.steps])) for at in pieces))
            case Concatenation(parts):
                return Concatenation(tuple(self._planned(run) for run in self._runs(parts, Concatenation)))
            case Choice(parts):
                ordered = sorted(parts, key=lambda element: _fits(self._size(element)))
                return Choice(tuple(self._planned(run) for run in self._runs(ordered, Choice)))
        return _mapped(part, self._planned)

    def _characters_of(self, part: Expression) -> Expression:
        """A part in which each character is a lexeme."""
        match part:
            case Letter(_):
                return self._lexeme(part)
            case Text(text):
                return Concatenation(tuple(self._lexeme(Text(letter)) for letter in text))
        return _mapped(part, self._characters_of)

    def _runs(self, parts: Sequence[Expression], kind: type[Concatenation | Choice]) -> Iterator[Expression]:
        """The parts, those as one that may be one lexeme."""
        run: list[Expression] = []
        whole = self._size(NOTHING)
        for part in parts:
            size = self._size(part)
            levels = max(whole.levels, size.levels + 1)
            whole = _Size(whole.letters + size.letters, whole.steps + size.steps, levels, True)
            if run and not _fits(whole):
                yield _joined(run, kind)
                run = []
                whole = _Size(size.letters, size.steps + 1, size.levels + 1, True)
            run.append(part)
        yield _joined(run, kind)

    def _lexeme(self, part: Expression) -> Expression:
        size = self._size(part)
        if not size.letters:
            return NOTHING
        self._steps += size.steps
        if self._steps > _MOST_STEPS and not self._characters:
            raise TooManySteps
        pattern = f"/{_pattern(part)}/"
        self._lexemes[pattern] = part
        return Reference(pattern)

    def _cut(self, part: Expression, place: ReadTooFar) -> Expression:
        """The part of a lexeme with smaller lexemes in it, so that both letters come to be in different ones, at once
        or after further cuts."""
        match part:
            case Text(text):
                pieces = text[: place.following], text[place.following :]
                return Concatenation(tuple(self._lexeme(Text(piece)) for piece in pieces))
            case Concatenation(parts):
                number = self._part_with(place.letter, parts)
                behind = self._part_with(place.following, parts)
                cuts = (0, number, number + 1, len(parts)) if number == behind else (0, behind, len(parts))
                runs = [parts[begin:end] for begin, end in itertools.pairwise(cuts) if begin < end]
                return Concatenation(tuple(self._lexeme(_joined(run, Concatenation)) for run in runs))
            case Choice(parts):
                number = self._part_with(place.letter, parts)
                others = (*parts[:number], *parts[number + 1 :])
                return Choice((self._lexeme(_joined(others, Choice)), self._lexeme(parts[number])))
            case Repeat(Letter(ranges), least, None) if least < 2:
                return self._cut_run(ranges, least, place.bytes)
            case Repeat(repeated, least, most):
                return Repeat(self._lexeme(repeated), least, most)
        raise AssertionError("nothing follows within a character")

    def _cut_run(self, ranges: Ranges, least: int, first: int) -> Expression:
        """Any number of characters, where those with some `first` bytes are lexemes of their own; if that is not
        enough, all of them."""
        letters, others = part_ranges(ranges, first)
        if not others or ranges in self._cut_before:
            return Repeat(self._lexeme(Letter(ranges)), least, None)
        self._cut_before.add(others)
        single = self._lexeme(Letter(letters))
        run = self._lexeme(Repeat(Letter(others), 1, None))
        rest = Repeat(Concatenation((single, Repeat(run, 0, 1))), 0, None)
        if not least:
            return Concatenation((Repeat(run, 0, 1), rest))
        return Choice((Concatenation((run, rest)), Concatenation((single, Repeat(run, 0, 1), rest))))

    def _part_with(self, letter: int, parts: Sequence[Expression]) -> int:
        """Which of these parts has the letter of this number."""
        ends = itertools.accumulate(self._size(part).letters for part in parts)
        return next(number for number, end in enumerate(ends) if letter < end)


def _fits(size: _Size) -> bool:
    return size.steps <= _LARGEST.steps and size.levels <= _LARGEST.levels


def _joined(parts: Sequence[Expression], kind: type[Concatenation | Choice]) -> Expression:
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def _mapped(part: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """A part whose own parts are changed."""
    match part:
        case Concatenation(parts):
            return Concatenation(tuple(change(element) for element in parts))
        case Choice(parts):
            return Choice(tuple(change(element) for element in parts))
        case Repeat(repeated, least, most):
            return Repeat(change(repeated), least, most)
    return part


def _replaced(part: Expression, others: Mapping[str, Expression]) -> Expression:
    """A part with other parts in place of references."""
    if isinstance(part, Reference):
        return others.get(part.name, part)
    return _mapped(part, lambda element: _replaced(element, others))


def _lark(part: Expression, names: Mapping[str, str]) -> str:
    """A part of a rule in the dialect of Lark."""
    match part:
        case Reference(name):
            return names[name]
        case Concatenation(parts):
            return " ".join(_lark(element, names) for element in parts) or '""'
        case Choice(parts):
            return f"({' | '.join(_lark(element, names) for element in parts)})"
        case Repeat(repeated, least, most):
            return f"({_lark(repeated, names)}){_times(least, most)}"
    raise AssertionError("letters are in lexemes")


def _pattern(part: Expression) -> str:
    """A lexeme as a regular expression."""
    match part:
        case Letter(ranges):
            return _letter_pattern(ranges)
        case Text(text):
            return "".join(_code_pattern(ord(letter)) for letter in text)
        case Concatenation(parts):
            return "".join(_pattern(element) for element in parts)
        case Choice(parts):
            return f"(?:{'|'.join(_pattern(element) for element in parts)})"
        case Repeat(repeated, least, most):
            return f"(?:{_pattern(repeated)}){_times(least, most)}"
    raise AssertionError("a lexeme refers to no rule")


def _letter_pattern(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code_pattern(ranges[0][0])
    return f"[{''.join(f'{_code_pattern(first)}-{_code_pattern(last)}' for first, last in ranges)}]"


def _code_pattern(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else rf"\x{{{code:x}}}"


def _times(least: int, most: int | None) -> str:
    signs = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return signs.get((least, most)) or f"{{{least},{'' if most is None else most}}}"
