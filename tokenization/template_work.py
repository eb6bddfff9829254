"""The costs of a chat template's steps, and the meter that counts them down.

- turns: of loops, and calls of macros and methods;
- work: characters that are made or looked through, elements of lists likewise, and what a loop's body or a macro has in
  it each time it is passed through, so that what is between two turns is counted, too.

What a step will make is counted before it is made. What costs more than it makes, and no chat template needs, is left
out: some filters, most methods of Python's values.
"""

import re
from collections.abc import Iterator, Mapping, MappingView, Sequence, Set
from itertools import chain
from string import Formatter
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_TURNS = 1_000_000
MAX_WORK = 1 << 26
"""The work of one rendering, in characters: those of the largest body by default; a longer conversation adds to it."""

MAX_BITS = 1 << 12
"""Bits of a number: arithmetic takes the square of its length."""
_MAX_DEPTH = 100
"""Levels of lists in lists that are compared, shown or searched."""
ELEMENT_WORK = 64
"""The work of looking at an element of a list."""
COPIED = (str, list, tuple)
"""The types that operators concatenate or repeat."""
DROPPED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")

OFFERED_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"encode", "maketrans", "translate"},
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}
_BLANKS = tuple(character for character in map(chr, range(0x10000)) if character.isspace())
_SIZED = (str, list, tuple, dict, range, Sequence, Set, Mapping, MappingView)
_SORTING = ("sort", "min", "max", "unique", "dictsort", "groupby")
_WRITING = frozenset({"capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "safe"}) | {
    *("string", "title", "trim", "truncate", "upper", "urlencode", "wordcount")
}
"""Filters that convert their value to text."""
_LISTING = ("list", "title", "wordcount")
"""Filters that split a text: each of its pieces costs as much as sixteen characters and more."""
_FREE_NUMBERS = ("default", "d", "int", "float", "sum")
"""Filters whose number arguments do not make their result longer."""


TIME_FUNCTION = "strftime_now"
_LONGEST_TIME_FORMAT = 1024


class TemplateLimitExceeded(TemplateError):
    """A template did more work than it may."""


class WorkMeter:
    """Counts down the work that a template may still do in one rendering.

    Its methods raise `TemplateLimitExceeded` if less is left, or a value is one that templates may not have.
    """

    def __init__(self, work: int = MAX_WORK, turns: int = MAX_TURNS) -> None:
        self.work, self.turns = work, turns
        self._limits = work, turns
        self.deepest = 0
        """Levels of lists in lists of the value that was weighed last."""

    def spend(self, work: int) -> None:
        self.work -= work
        if self.work < 0:
            raise TemplateLimitExceeded(f"it makes, or looks through, more than {self._limits[0]} characters")

    def turn(self) -> None:
        self.turns -= 1
        if self.turns < 0:
            raise TemplateLimitExceeded(f"its loops and macros take more than {self._limits[1]} turns")

    def weigh(self, value: Any) -> int:
        """The size of a value in characters, with everything in it as often as it is in it. It is spent, too, since all
        of it is looked at."""
        if isinstance(value, str):
            self.spend(len(value) // 8)
            return len(value)
        weight, levels, self.deepest = 0, [iter((value,))], 1
        while levels:
            each = next(levels[-1], _NO_MORE)
            if each is _NO_MORE:
                levels.pop()
                continue
            size = ELEMENT_WORK + len(each) if isinstance(each, str) else ELEMENT_WORK
            self.spend(size)
            weight += size
            inside = _inside(each)
            if inside is not None:
                levels.append(inside)
                self.deepest = max(self.deepest, len(levels))
                if self.deepest > _MAX_DEPTH:
                    raise TemplateLimitExceeded(f"it nests lists more than {_MAX_DEPTH} deep")
        return weight

    def check_number(self, value: Any) -> Any:
        """`value`, unless it is a number too long to compute with."""
        if type(value) is int and value.bit_length() > MAX_BITS:
            raise TemplateLimitExceeded(f"it computes with numbers of more than {MAX_BITS} bits")
        return value


_NO_MORE = object()


def _inside(value: Any) -> Iterator[Any] | None:
    if isinstance(value, str):
        return None
    if isinstance(value, list | tuple):  # most are, and asking the classes of `collections.abc` takes long
        return iter(value)
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Namespace):
        return iter(list(vars(value).values()))
    several = isinstance(value, Sequence | Set | MappingView) and not isinstance(value, bytes | range)
    return iter(value) if several else None


def spend_operator(meter: WorkMeter, operator: str, left: Any, right: Any) -> None:
    """Spend the work of a binary operator."""
    if operator == "+" and isinstance(left, COPIED) and isinstance(right, COPIED):
        meter.spend(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _spend_printf(meter, left, right)
    elif operator == "*" and isinstance(left, COPIED):
        meter.spend(_repeated_size(left, right))
    elif operator == "*" and isinstance(right, COPIED):
        meter.spend(_repeated_size(right, left))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        meter.check_number(1 << min(abs(left).bit_length() * abs(meter.check_number(right)), 2 * MAX_BITS))


def _repeated_size(value: Any, times: Any) -> int:
    """The size of `times` repetitions of a value, in characters: an element counts eight."""
    each = 1 if isinstance(value, str) else 8
    return len(value) * max(times, 0) * each if isinstance(times, int) else 0


def spend_filter(meter: WorkMeter, name: str, value: Any, given: Sequence[Any]) -> None:
    """Spend the work of a filter on `value`, with the arguments `given`."""
    size = len(value) if isinstance(value, _SIZED) else 1
    texts, numbers = sum(map(meter.weigh, given)), _numbers(given)
    if name in ("length", "count", "first", "last", "default", "d", "attr"):
        meter.spend(texts // 8 + 1)
    elif isinstance(value, str):
        meter.spend((size + texts) // 8)
    else:
        meter.spend(size * (1 + texts // 8))
    match name:
        case "batch" | "slice":
            meter.spend(8 * numbers)
        case "format":
            _spend_printf(meter, value if isinstance(value, str) else "%" * meter.weigh(value), given)
        case "indent":
            lines = len(value.splitlines()) + 1 if isinstance(value, str) else 1
            meter.spend(lines * (numbers + texts))
        case "join":
            if isinstance(value, str):  # a call of C's for each character, and no other thread runs
                meter.spend(ELEMENT_WORK * size)
            meter.spend(meter.weigh(value) + size * texts)
        case "replace":
            _spend_replacing(meter, value if isinstance(value, str) else "?" * meter.weigh(value), given)
        case "round":
            meter.spend(numbers * numbers)
        case "tojson":
            weight, depth = meter.weigh(value), meter.deepest
            meter.spend(weight * (1 + numbers * depth + texts // ELEMENT_WORK))
        case "trim":
            meter.spend(size * texts // 64)
        case "sum" if not all(isinstance(each, int | float | str) for each in given):
            raise TemplateLimitExceeded("it adds up what is no number")
        case _ if name in _SORTING:
            meter.spend(20 * meter.weigh(value))
        case _ if name not in _FREE_NUMBERS:
            meter.spend(numbers)
    if name in _LISTING and isinstance(value, str):
        meter.spend(16 * size)
    elif name in _WRITING and not isinstance(value, str):
        meter.weigh(value)


def spend_function(meter: WorkMeter, function: object, given: Sequence[Any]) -> None:
    """Spend the work of a function that the environment offers: the system's `strftime` makes up to 256 characters of
    each, by fields as wide as the number in them, and no other thread runs meanwhile."""
    if getattr(function, "__name__", "") == TIME_FUNCTION:
        size = max((len(each) for each in given if isinstance(each, str)), default=0)
        if size > _LONGEST_TIME_FORMAT:
            raise TemplateLimitExceeded(f"it has a format for the time of more than {_LONGEST_TIME_FORMAT} characters")
        meter.spend(256 * size)


def spend_method(meter: WorkMeter, of: Any, name: str, given: Sequence[Any]) -> None:
    """Spend the work of a method of the value `of`; raises `TemplateLimitExceeded` for one that is not offered."""
    allowed = next((names for kind, names in OFFERED_METHODS.items() if isinstance(of, kind)), frozenset[str]())
    if name not in allowed:
        raise TemplateLimitExceeded(f"the method '{name}' of {type(of).__name__} is not offered to templates")
    weight = meter.weigh(given)
    if isinstance(of, list | tuple):
        meter.weigh(of)
    if not isinstance(of, str):
        return
    meter.spend(len(of) // 8)
    if name in ("center", "ljust", "rjust", "zfill"):
        meter.spend(_numbers(given))
    elif name in ("split", "rsplit", "splitlines"):
        meter.spend(64 * sum(map(of.count, given[:1] if given and isinstance(given[0], str) else _BLANKS)))
    elif name == "expandtabs":
        meter.spend((_numbers(given) or 8) * of.count("\t"))
    elif name in ("strip", "lstrip", "rstrip"):
        meter.spend(len(of) * weight // 64)
    elif name == "join":
        if given and isinstance(given[0], str):
            meter.spend(ELEMENT_WORK * len(given[0]))
        meter.spend(weight * (1 + len(of)))
    elif name == "replace":
        _spend_replacing(meter, of, given)
    elif name in ("format", "format_map"):
        meter.spend(8 * len(of))
        if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(of)):
            raise TemplateLimitExceeded("it computes the width of a field")
        meter.spend(len(of) + _numbers_in(of) + (of.count("{") + 1) * weight)


def _spend_replacing(meter: WorkMeter, text: str, given: Sequence[Any]) -> None:
    old, new = (str(each) for each in given[:2]) if len(given) >= 2 else ("x", "")
    meter.spend(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _spend_printf(meter: WorkMeter, form: str, values: Any) -> None:
    """Spend the work of `form % values`: a field is as wide as the number in it."""
    meter.spend(8 * len(form))
    if re.search(r"%[-+ #0-9.]*\*", form):
        raise TemplateLimitExceeded("it computes the width of a field")
    meter.spend(len(form) + _numbers_in(form) + (form.count("%") + 1) * meter.weigh(values))


def _numbers_in(text: str) -> int:
    return sum(int(number) if len(number) < 10 else MAX_WORK for number in re.findall("[0-9]+", text))


def _numbers(values: Sequence[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))
