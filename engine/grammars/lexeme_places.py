"""Finds where the library's greedy lexer would read too far: places in lexemes behind which it goes on, where by the
grammar another lexeme may begin with the same character.

A place is a letter of a lexeme, by its number. Characters are told apart by their first bytes: a set of them is an
integer with a bit for each. A part that repeats does so without end. Both only find more places than there are.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .gbnf import Choice, Concatenation, Expression, Letter, Ranges, Reference, Repeat, Text, join_ranges, references

MOST_STEPS = 1 << 17
"""Of all calls for one grammar, a fifth of a second or so."""
_ANY_BYTE = (1 << 256) - 1


class TooManySteps(Exception):
    """It takes too long to find out."""


class _Ends(NamedTuple):
    """The places where a part may begin and end, and whether it may be empty."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    empty: bool


class ReadTooFar(NamedTuple):
    """Two letters of a lexeme, by their numbers in it: behind `letter` the lexer goes on with `following`, if that has
    one of these first bytes."""

    letter: int
    following: int
    bytes: int


class LexemePlaces:
    """The lexemes of some rules, the first of which is the whole text's; they refer to them as to rules. A set of
    lexemes is an integer with a bit for each. `steps`: those of earlier calls for the grammar."""

    def __init__(self, rules: Mapping[str, Expression], lexemes: Mapping[str, Expression], steps: int) -> None:
        self._start = next(iter(rules))
        self.steps = steps
        self._rules = rules
        self._bytes: list[int] = []
        self._lexeme: list[str] = []
        self._next: list[list[tuple[int, ...]]] = []
        self._begin: dict[str, int] = {}
        self._ends: dict[str, _Ends] = {}
        for rule in rules.values():
            for name in references(rule):
                if name in lexemes and name not in self._ends:
                    self._begin[name] = len(self._bytes)
                    self._ends[name] = self._number(lexemes[name], name)
        self._last = {place for ends in self._ends.values() for place in ends.last}
        self._names = list(self._ends)
        self._first = dict.fromkeys(rules, 0) | {name: 1 << number for number, name in enumerate(self._names)}
        self._empty = dict.fromkeys(rules, False) | {name: ends.empty for name, ends in self._ends.items()}
        self._after = dict.fromkeys(self._first, 0)

    def read_too_far(self, followed: bool) -> dict[str, ReadTooFar]:
        """The lexemes that may be read too far, each with a place. `followed`: whether any text may come after
        the first rule."""
        self._find_first()
        self._after[self._start] = 1 << len(self._names) if followed else 0
        self._find_after()
        found: dict[str, ReadTooFar] = {}
        if not any(self._after[name] for name in self._ends):
            return found
        inside = (1 << len(self._names)) - 1
        starts = [self._first[self._start]]
        known = set(starts)
        first_bytes_of = {0: 0}
        seen: set[frozenset[int]] = set()
        while starts:
            waiting = self._read_together([self._ends[name].first for name in self._members(starts.pop() & inside)])
            while waiting:
                self._step(1)
                places = waiting.pop()
                if places in seen:
                    continue
                seen.add(places)
                lexemes = {self._lexeme[place] for place in self._last.intersection(places)}
                after = 0
                for name in lexemes:
                    after |= self._after[name]
                if after and after not in known:
                    known.add(after)
                    starts.append(after)
                if after not in first_bytes_of:
                    first_bytes_of[after] = self._first_bytes_of(after)
                self._find_places(places, first_bytes_of[after], found)
                further = {id(follow): follow for place in places for follow in self._next[place]}
                waiting += self._read_together(further.values())
        return found

    def _find_places(self, places: Iterable[int], after: int, found: dict[str, ReadTooFar]) -> None:
        """Find those of `places` behind which a lexeme goes on with a byte of `after`."""
        for place in places if after else ():
            name = self._lexeme[place]
            begin = self._begin[name]
            for follower in itertools.chain.from_iterable(self._next[place]):
                self._step(1)
                if common := self._bytes[follower] & after:
                    cut = found.setdefault(name, ReadTooFar(place - begin, follower - begin, 0))
                    if cut[:2] == (place - begin, follower - begin):
                        found[name] = cut._replace(bytes=cut.bytes | common)

    def _members(self, lexemes: int) -> Iterator[str]:
        while lexemes:
            number = lexemes.bit_length() - 1
            lexemes ^= 1 << number
            yield self._names[number]

    def _first_bytes_of(self, lexemes: int) -> int:
        """The first bytes of lexemes, and any byte if text that is not the grammar's may come."""
        if lexemes >> len(self._names):
            return _ANY_BYTE
        found = 0
        for name in self._members(lexemes):
            for place in self._ends[name].first:
                found |= self._bytes[place]
        return found

    def _read_together(self, choices: Iterable[tuple[int, ...]]) -> list[frozenset[int]]:
        """The places that may be next after the same text, parted by the character that is read."""
        alike: dict[int, set[int]] = defaultdict(set)
        for place in itertools.chain.from_iterable(choices):
            self._step(1)
            alike[self._bytes[place]].add(place)
        parted: list[tuple[int, set[int]]] = []
        for letters, places in alike.items():
            self._step(len(parted))
            smaller: list[tuple[int, set[int]]] = []
            rest = letters
            for others, together in parted:
                if common := others & rest:
                    smaller.append((common, together | places))
                if others & ~rest:
                    smaller.append((others & ~rest, together))
                rest &= ~others
            parted = [*smaller, (rest, places)] if rest else smaller
        return [frozenset(places) for _, places in parted]

    def _number(self, part: Expression, lexeme: str) -> _Ends:
        """Number the letters of a part, and note which follow which."""
        self._step(1)
        match part:
            case Letter(ranges):
                return self._add(first_bytes(ranges), lexeme)
            case Text(text):
                letters = [self._add(1 << _first_byte(ord(letter)), lexeme) for letter in text]
                for before, behind in itertools.pairwise(letters):
                    self._link(before.last, behind.first)
                return _Ends(letters[0].first, letters[-1].last, False)
            case Concatenation(parts):
                whole = _Ends((), (), True)
                for element in parts:
                    ends = self._number(element, lexeme)
                    self._link(whole.last, ends.first)
                    first = whole.first + ends.first if whole.empty else whole.first
                    last = whole.last + ends.last if ends.empty else ends.last
                    whole = _Ends(first, last, whole.empty and ends.empty)
                return whole
            case Choice(parts):
                every = [self._number(element, lexeme) for element in parts]
                first = tuple(place for ends in every for place in ends.first)
                last = tuple(place for ends in every for place in ends.last)
                return _Ends(first, last, any(ends.empty for ends in every))
            case Repeat(repeated, least, most):
                ends = self._number(repeated, lexeme)
                if most != 1:
                    self._link(ends.last, ends.first)
                return ends._replace(empty=ends.empty or not least)
        raise AssertionError("a lexeme refers to no rule")

    def _add(self, first: int, lexeme: str) -> _Ends:
        """Number a letter."""
        self._bytes.append(first)
        self._lexeme.append(lexeme)
        self._next.append([])
        place = (len(self._bytes) - 1,)
        return _Ends(place, place, False)

    def _link(self, last: Iterable[int], first: tuple[int, ...]) -> None:
        for place in last:
            self._step(1)
            self._next[place].append(first)

    def _find_first(self) -> None:
        """The lexemes that every rule may begin with, and which may be empty."""
        changed = True
        while changed:
            changed = False
            for name, rule in reversed([*self._rules.items()]):
                first, empty = self._begins(rule)
                if (first, empty) != (self._first[name], self._empty[name]):
                    self._first[name], self._empty[name] = first, empty
                    changed = True

    def _begins(self, part: Expression) -> tuple[int, bool]:
        self._step(1)
        match part:
            case Reference(name):
                return self._first[name], self._empty[name]
            case Concatenation(parts):
                first = 0
                for element in parts:
                    more, empty = self._begins(element)
                    first |= more
                    if not empty:
                        return first, False
                return first, True
            case Choice(parts):
                every = [self._begins(element) for element in parts]
                first = 0
                for more, _ in every:
                    first |= more
                return first, any(empty for _, empty in every)
            case Repeat(repeated, least, _):
                first, empty = self._begins(repeated)
                return first, empty or not least
        raise AssertionError("letters are in lexemes")

    def _find_after(self) -> None:
        """The lexemes that may come after every rule and lexeme."""
        before: dict[str, int] = {}
        while before != self._after:
            before = dict(self._after)
            for name, rule in self._rules.items():
                self._spread(rule, self._after[name])

    def _spread(self, part: Expression, after: int) -> None:
        self._step(1)
        match part:
            case Reference(name):
                self._after[name] |= after
            case Concatenation(parts):
                for element in reversed(parts):
                    self._spread(element, after)
                    first, empty = self._begins(element)
                    after = first | after if empty else first
            case Choice(parts):
                for element in parts:
                    self._spread(element, after)
            case Repeat(repeated, _, most):
                self._spread(repeated, after if most == 1 else after | self._begins(repeated)[0])

    def _step(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise TooManySteps


def first_bytes(ranges: Ranges) -> int:
    """The first bytes of characters in UTF-8."""
    found = 0
    for first, last in ranges:
        low, high = _first_byte(first), _first_byte(last)
        found |= (1 << high + 1) - (1 << low)
    return found


def _first_byte(code: int) -> int:
    if code < 0x80:
        return code
    if code < 0x800:
        return 0xC0 | code >> 6
    return 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18


def part_ranges(ranges: Ranges, first: int) -> tuple[Ranges, Ranges]:
    """The characters whose first byte is one of `first`, and the others."""
    these: list[tuple[int, int]] = []
    those: list[tuple[int, int]] = []
    for begin, end in ranges:
        while begin <= end:
            byte = _first_byte(begin)
            last = min(end, _last_with(byte))
            (these if first >> byte & 1 else those).append((begin, last))
            begin = last + 1
    return join_ranges(these), join_ranges(those)


def _last_with(first: int) -> int:
    """The last character that begins with a byte."""
    if first < 0x80:
        return first
    if first < 0xE0:
        return (first & 0x1F) << 6 | 0x3F
    return (first & 0xF) << 12 | 0xFFF if first < 0xF0 else (first & 7) << 18 | 0x3FFFF
