"""The costs of a chat template's steps, counted before each step.

Turns are those of loops, and calls of macros and methods. Work is characters that are made or searched, and the like
for elements of lists and expressions. Filters and methods that cost more than they make are not offered.
"""

import re
from collections.abc import Iterator, Mapping, MappingView, Sequence, Set
from itertools import chain
from string import Formatter
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MAX_TURNS = 1_000_000
MAX_WORK = 1 << 26
"""The work of one rendering, in characters: those of the largest body by default. A conversation adds to it."""

MAX_BITS = 1 << 12
"""The most bits of a number, since arithmetic takes the square of them."""
_MAX_DEPTH = 100
"""The deepest nesting of lists that are compared, shown or searched."""
ELEMENT_WORK = 64
"""The work of looking at an element of a list."""
HASHED_PER_WORK = 16
"""Pairs of elements with one hash that a set compares for one unit of work."""
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
"""Filters that split a text: each piece costs sixteen characters and more."""
_FREE_NUMBERS = frozenset({"default", "d", "int", "float", "sum"})
"""Filters whose number arguments do not lengthen their result."""
_ITEMWISE = frozenset({"groupby", "join", "map", "max", "min", "reject", "rejectattr", "select", "selectattr"}) | {
    *("sort", "sum", "unique")
}
"""Filters that run a test, a filter or the path of an attribute for each element."""
_REVERSE_SEARCHES = ("rfind", "rindex", "rpartition", "rsplit")
"""Methods of texts that may compare all of their argument at each place: CPython's reverse searches are not linear."""
_REMAINDER_TESTS = frozenset({"divisibleby", "even", "odd"})
"""Tests that take a remainder, which is formatting if their value is a text."""
METERED_TESTS = _REMAINDER_TESTS | {
    *("==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge"),
    *("in", "sameas", "lower", "upper", "filter", "test"),
}
"""Tests that search their values, hash or format them."""

TIME_FUNCTION = "strftime_now"
_LONGEST_TIME_FORMAT = 1024


class TemplateLimitExceeded(TemplateError):
    """A template did more work than it may."""


class WorkMeter:
    """Counts down the work that a template may still do in one rendering. Its methods raise `TemplateLimitExceeded` if
    too little is left, or a value is not allowed."""

    def __init__(self, work: int = MAX_WORK, turns: int = MAX_TURNS) -> None:
        self.work, self.turns = work, turns
        self._limits = work, turns
        self.deepest = 0
        """The nesting of the value that was weighed last."""

    def spend(self, work: int) -> None:
        self.work -= work
        if self.work < 0:
            raise TemplateLimitExceeded(f"it makes, or looks through, more than {self._limits[0]} characters")

    def turn(self) -> None:
        self.turns -= 1
        if self.turns < 0:
            raise TemplateLimitExceeded(f"its loops and macros take more than {self._limits[1]} turns")

    def weigh(self, value: Any) -> int:
        """The size of a value in characters, with all that it contains as often as it does. Looking at it is counted as
        work, too."""
        if isinstance(value, str):
            self.spend(len(value) // 8)
            return len(value)
        weight = 0
        levels: list[Iterator[Any]] = [iter((value,))]
        self.deepest = 1
        while levels:
            element = next(levels[-1], _NO_MORE)
            if element is _NO_MORE:
                levels.pop()
                continue
            size = ELEMENT_WORK + len(element) if isinstance(element, str) else ELEMENT_WORK
            self.spend(size)
            weight += size
            elements = _elements(element)
            if elements is not None:
                levels.append(elements)
                self.deepest = max(self.deepest, len(levels))
                if self.deepest > _MAX_DEPTH:
                    raise TemplateLimitExceeded(f"it nests lists more than {_MAX_DEPTH} deep")
        return weight

    def check_number(self, value: Any) -> Any:
        """The value, unless it is a number too long to compute with."""
        if type(value) is int and value.bit_length() > MAX_BITS:
            raise TemplateLimitExceeded(f"it computes with numbers of more than {MAX_BITS} bits")
        return value


_NO_MORE = object()


_LOOP_AS_LIST = "it uses a loop as a list"


def _elements(value: Any) -> Iterator[Any] | None:
    if isinstance(value, str):
        return None
    if isinstance(value, list | tuple):  # most are, and asking the classes of `collections.abc` takes long
        return iter(value)
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Namespace):
        return iter(list(vars(value).values()))
    if isinstance(value, LoopContext):  # asking for its elements would take them from the loop
        raise TemplateLimitExceeded(_LOOP_AS_LIST)
    several = isinstance(value, Sequence | Set | MappingView) and not isinstance(value, bytes | range)
    return iter(value) if several else None


def spend_operator(meter: WorkMeter, operator: str, left: Any, right: Any) -> None:
    if operator == "+" and isinstance(left, COPIED) and isinstance(right, COPIED):
        meter.spend(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _spend_printf(meter, left, right)
    elif operator == "*" and isinstance(left, COPIED):
        meter.spend(_repeated_size(left, right))
    elif operator == "*" and isinstance(right, COPIED):
        meter.spend(_repeated_size(right, left))
    elif operator == "-" and isinstance(left, Set):
        for operand in (left, right):
            meter.weigh(operand)
            spend_hashing(meter, operand)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        meter.check_number(1 << min(abs(left).bit_length() * abs(meter.check_number(right)), 2 * MAX_BITS))


def _repeated_size(value: Any, times: Any) -> int:
    """The size of a repeated value in characters; an element counts eight."""
    element_size = 1 if isinstance(value, str) else 8
    return len(value) * max(times, 0) * element_size if isinstance(times, int) else 0


def spend_filter(
    meter: WorkMeter, name: str, value: Any, arguments: Sequence[Any], named_arguments: Mapping[str, Any]
) -> None:
    if isinstance(value, LoopContext):
        raise TemplateLimitExceeded(_LOOP_AS_LIST)
    every_argument = [*arguments, *named_arguments.values()]
    size = len(value) if isinstance(value, _SIZED) else 1
    texts, numbers = sum(map(meter.weigh, every_argument)), _numbers(every_argument)
    if name in ("length", "count", "first", "last", "default", "d", "attr"):
        meter.spend(texts // 8 + 1)
    elif name in _ITEMWISE:
        meter.spend(size * (ELEMENT_WORK * (1 + _path_separators(every_argument)) + texts))
    elif isinstance(value, str):
        meter.spend((size + texts) // 8)
    else:
        meter.spend(size * (1 + texts // 8))
    match name:
        case "batch" | "slice":
            meter.spend(8 * numbers)
        case "format":
            _spend_printf(meter, value if isinstance(value, str) else "%" * meter.weigh(value), every_argument)
        case "indent":
            lines = len(value.splitlines()) + 1 if isinstance(value, str) else 1
            meter.spend(lines * (numbers + texts))
        case "join":
            meter.weigh(value)
        case "replace":
            text = value if isinstance(value, str) else "?" * meter.weigh(value)
            old, new = (
                arguments[place] if place < len(arguments) else named_arguments.get(parameter, "")
                for place, parameter in enumerate(("old", "new"))
            )
            _spend_replacing(meter, text, str(old), str(new))
        case "round":
            if not isinstance(value, int | float):
                raise TemplateLimitExceeded("it rounds what is no number")
            meter.spend(numbers * numbers)
        case "tojson":
            weight, depth = meter.weigh(value), meter.deepest
            meter.spend(weight * (1 + numbers * depth + texts * depth // ELEMENT_WORK))
        case "trim":
            meter.spend((size if isinstance(value, str) else meter.weigh(value)) * texts // 64)
        case "sum" if not all(isinstance(argument, int | float | str) for argument in every_argument):
            raise TemplateLimitExceeded("it adds up what is no number")
        case _ if name in _SORTING:
            meter.spend(20 * meter.weigh(value))
        case _ if name not in _FREE_NUMBERS | _ITEMWISE:
            meter.spend(numbers)
    if name == "unique":
        spend_hashing(meter, value)
    if name in _LISTING:
        meter.spend(16 * (size if isinstance(value, str) or name == "list" else meter.weigh(value)))
    elif name in _WRITING and not isinstance(value, str):
        meter.weigh(value)


def _path_separators(arguments: Sequence[Any]) -> int:
    """The separators in the arguments, each of which may begin another part of an attribute's path."""
    return sum(text.count(".") + text.count(",") for text in arguments if isinstance(text, str))


def spend_hashing(meter: WorkMeter, values: Any) -> None:
    """Count the work of putting values into a set or a dictionary. Multiples of 2**61 - 1 have one hash, so each may be
    compared with all before it; hashes of texts are secret."""
    if isinstance(values, str):
        meter.spend(len(values))
    elif isinstance(values, _SIZED):
        meter.spend(len(values) ** 2 // HASHED_PER_WORK)


def spend_test(meter: WorkMeter, name: str, arguments: Sequence[Any]) -> None:
    """Count the work of a test, whose value is the first argument."""
    if name in _REMAINDER_TESTS:
        spend_operator(meter, "%", arguments[0], arguments[1:] or (2,))
        return
    for argument in arguments:
        meter.weigh(argument)


def spend_function(meter: WorkMeter, function: object, arguments: Sequence[Any]) -> None:
    """Count the work of a function of the environment, which may put its arguments into a dictionary. The system's
    `strftime` makes up to 256 characters of each in its format, as wide as the number there, and holds the GIL."""
    for argument in arguments:
        meter.weigh(argument)
        spend_hashing(meter, argument)
    if getattr(function, "__name__", "") == TIME_FUNCTION:
        size = max((len(argument) for argument in arguments if isinstance(argument, str)), default=0)
        if size > _LONGEST_TIME_FORMAT:
            raise TemplateLimitExceeded(f"it has a format for the time of more than {_LONGEST_TIME_FORMAT} characters")
        meter.spend(256 * size)


def spend_key(meter: WorkMeter, container: Any, key: Any) -> None:
    """Count the work of looking up a key or an attribute: an absent name is copied into the error, and a number may
    have the hash of all others."""
    if isinstance(key, str):
        if len(key) > ELEMENT_WORK:
            meter.spend(len(key) // 8)
    elif isinstance(container, dict):
        meter.spend(len(container))


def spend_method(meter: WorkMeter, owner: Any, name: str, arguments: Sequence[Any]) -> None:
    """Count the work of a method of the value `owner`. Raises `TemplateLimitExceeded` for a method that is not
    offered."""
    allowed = next((names for kind, names in OFFERED_METHODS.items() if isinstance(owner, kind)), frozenset[str]())
    if name not in allowed:
        raise TemplateLimitExceeded(f"the method '{name}' of {type(owner).__name__} is not offered to templates")
    weight = meter.weigh(arguments)
    if isinstance(owner, list | tuple):
        meter.weigh(owner)
    if name == "get":
        spend_key(meter, owner, arguments[0] if arguments else None)
    if not isinstance(owner, str):
        return
    meter.spend(len(owner) // 8)
    texts = [argument for argument in arguments if isinstance(argument, str)]
    if name in _REVERSE_SEARCHES:
        meter.spend(len(owner) * max(map(len, texts), default=0) // 64)
    if name in ("center", "ljust", "rjust", "zfill"):
        meter.spend(_numbers(arguments))
    elif name in ("split", "rsplit", "splitlines"):
        meter.spend(64 * sum(map(owner.count, texts or _BLANKS)))
    elif name == "expandtabs":
        meter.spend((_numbers(arguments) or 8) * owner.count("\t"))
    elif name in ("strip", "lstrip", "rstrip"):
        meter.spend(len(owner) * weight // 64)
    elif name == "join":
        if texts:
            meter.spend(ELEMENT_WORK * len(texts[0]))
        meter.spend(weight * (1 + len(owner)))
    elif name == "replace":
        if len(arguments) >= 2:
            _spend_replacing(meter, owner, str(arguments[0]), str(arguments[1]))
    elif name in ("format", "format_map"):
        meter.spend(8 * len(owner))
        if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(owner)):
            raise TemplateLimitExceeded("it computes the width of a field")
        meter.spend(len(owner) + _numbers_in(owner) + (owner.count("{") + 1) * weight)


def _spend_replacing(meter: WorkMeter, text: str, old: str, new: str) -> None:
    meter.spend(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _spend_printf(meter: WorkMeter, form: str, values: Any) -> None:
    """Count the work of `form % values`: a field is as wide as the number in it."""
    meter.spend(8 * len(form))
    if re.search(r"%[-+ #0-9.]*\*", form):
        raise TemplateLimitExceeded("it computes the width of a field")
    meter.spend(len(form) + _numbers_in(form) + (form.count("%") + 1) * meter.weigh(values))


def _numbers_in(text: str) -> int:
    return sum(int(number) if len(number) < 10 else MAX_WORK for number in re.findall("[0-9]+", text))


def _numbers(values: Sequence[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))
