"""The sandbox of chat templates, which come from the internet or with a request: it limits their access and their work.

Jinja's own keeps a template from the server's objects, not from its time and memory: `'x' * 10 ** 10` is one operator.
Here a `WorkMeter` counts while a template is rendered, and what a step will make is counted before it is made:

- turns: of loops, and calls of macros and methods;
- work: characters that are made or looked through, elements of lists likewise, and what a loop's body or a macro has in
  it each time it is passed through, so that what is between two turns is counted, too.

Nothing is computed while a template is compiled. What costs more than it makes, and no chat template needs, is left
out: some filters, most methods of Python's values. Iterators become lists, and keys of dictionaries are text or
numbers, as a long chain of the former, or a deep nest of tuples as the latter, would overflow CPython's own stack and
end the process.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import chain
from math import inf
from string import Formatter
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 16
"""Characters of a template: compiling takes up to 30 microseconds for each."""
MAX_PYTHON = 1 << 16
"""Characters of Python source that a request's template may become, about four for each of its own: no other thread
runs while Python compiles it, for some 50 ms at most."""
MAX_TURNS = 1_000_000
MAX_WORK = 1 << 26
"""The work of one rendering, in characters: those of the largest body by default; a longer conversation adds to it."""

_MAX_BITS = 1 << 12
"""Bits of a number: arithmetic takes the square of its length."""
_MAX_DEPTH = 100
"""Levels of lists in lists that are compared, shown or searched."""
_NODE = 2
"""The work of any expression, in characters that take as long to copy, or more."""
_ELEMENT = 64
"""The work of looking at an element of a list."""
_DROPPED = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")

_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"encode", "maketrans", "translate"},
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}
_BLANKS = tuple(character for character in map(chr, range(0x10000)) if character.isspace())
_PADDING = ("center", "ljust", "rjust", "zfill")
_STRIPPING = ("strip", "lstrip", "rstrip")
_COPIED = (str, list, tuple)
"""The types that operators concatenate or repeat."""
_SIZED = (str, list, tuple, dict, range, Sequence, Set, Mapping, MappingView)
_COMPARING = frozenset({"==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le"}) | frozenset(
    {">", "gt", "greaterthan", ">=", "ge", "in", "sameas", "lower", "upper"}
)
_SORTING = ("sort", "min", "max", "unique", "dictsort", "groupby")
_WRITING = frozenset({"capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "safe"}) | {
    *("string", "title", "trim", "truncate", "upper", "urlencode", "wordcount")
}
"""Filters that convert their value to text."""
_LISTING = ("list", "title", "wordcount")
"""Filters that split a text: each of its pieces costs as much as eight characters and more."""
_FREE_NUMBERS = ("default", "d", "int", "float", "sum")
"""Filters whose number arguments do not make their result longer."""

T = TypeVar("T")


class TemplateLimitExceeded(TemplateError):
    """A template did more work than it may."""


class WorkMeter:
    """Counts down the work that a template may still do in one rendering."""

    def __init__(self, work: int = MAX_WORK, turns: int = MAX_TURNS) -> None:
        self.work, self.turns = work, turns
        self._limits = work, turns
        self.deepest = 0
        """Levels of lists in lists of the value that was weighed last."""

    def spend(self, work: int) -> None:
        """Raises `TemplateLimitExceeded` if less is left."""
        self.work -= work
        if self.work < 0:
            raise TemplateLimitExceeded(f"it makes, or looks through, more than {self._limits[0]} characters")

    def turn(self) -> None:
        self.turns -= 1
        if self.turns < 0:
            raise TemplateLimitExceeded(f"its loops and macros take more than {self._limits[1]} turns")

    def weigh(self, value: Any) -> int:
        """The size of a value in characters, with everything in it as often as it is in it. It is spent, too, since all
        of it is looked at. A value that is nested too deeply raises `TemplateLimitExceeded`."""
        if isinstance(value, str):
            self.spend(len(value) // 8)
            return len(value)
        weight, levels, self.deepest = 0, [iter((value,))], 1
        while levels:
            each = next(levels[-1], _NO_MORE)
            if each is _NO_MORE:
                levels.pop()
                continue
            size, inside = _ELEMENT, None
            if isinstance(each, str):
                size += len(each)
            else:
                inside = _inside(each)
            self.spend(size)
            weight += size
            if inside is not None:
                levels.append(inside)
                self.deepest = max(self.deepest, len(levels))
                if self.deepest > _MAX_DEPTH:
                    raise TemplateLimitExceeded(f"it nests lists more than {_MAX_DEPTH} deep")
        return weight

    def number(self, value: Any) -> Any:
        """`value`, unless it is a number too long to compute with, which raises `TemplateLimitExceeded`."""
        if type(value) is int and value.bit_length() > _MAX_BITS:
            raise TemplateLimitExceeded(f"it computes with numbers of more than {_MAX_BITS} bits")
        return value


_NO_MORE = object()
_meter: ContextVar[WorkMeter] = ContextVar("meter")


@contextmanager
def metered(meter: WorkMeter) -> Iterator[None]:
    """Count the work of the templates that are rendered in the block, in this thread."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


def _inside(value: Any) -> Iterator[Any] | None:
    if isinstance(value, list | tuple):  # most are, and asking the classes of `collections.abc` takes long
        return iter(value)
    if isinstance(value, Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Namespace):
        return iter(list(vars(value).values()))
    several = isinstance(value, Sequence | Set | MappingView) and not isinstance(value, str | bytes | range)
    return iter(value) if several else None


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A jinja2 sandbox whose templates count their work: render what is `compiled` here in a `metered` block."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_shown, **options)
        del self.globals["lipsum"]
        for name in _DROPPED:
            del self.filters[name]
        self.filters = {name: _bounded_filter(name, filter_) for name, filter_ in self.filters.items()}
        for method in (self.pass_through, self.compared, self.joined, self.sliced, self.key):
            self.filters[f" {method.__name__}"] = method
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: _bounded_test(test) if name in _COMPARING else test for name, test in tests.items()}

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Offer one more, or another one of that name."""
        self.filters[name] = _bounded_filter(name, work)

    def compiled(self, source: str, most: float = inf) -> Template:
        """The template, which counts what it does, as Python of at most so many characters. Raises whatever jinja and
        Python raise for a source that is none."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitExceeded(f"it has {len(source)} characters, and may have {MAX_SOURCE} at most")
        template = self.parse(source)
        passing = _passing(self, template.body, template.lineno)
        _MeteringTransformer(self).generic_visit(template)
        template.body.insert(0, passing)
        python: str = self.compile(template, raw=True)
        if len(python) > most:
            raise TemplateLimitExceeded(
                f"it is too long: in Python it has {len(python)} characters, and may have {most} at most"
            )
        return Template.from_code(self, compile(python, "<template>", "exec"), self.make_globals(None))

    # What compiled templates call

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        if operator == "+" and isinstance(left, _COPIED) and isinstance(right, _COPIED):
            meter.spend(len(left) + len(right))
            return super().call_binop(context, operator, left, right)
        if operator == "%" and isinstance(left, str):
            _spend_printf(meter, left, right)
        elif operator == "*" and isinstance(left, _COPIED):
            meter.spend(_times(left, right))
        elif operator == "*" and isinstance(right, _COPIED):
            meter.spend(_times(right, left))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.number(1 << min(abs(left).bit_length() * abs(meter.number(right)), 2 * _MAX_BITS))
        made = super().call_binop(context, operator, meter.number(left), meter.number(right))
        return meter.number(made)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.turn()
        if isinstance(__obj, Macro | BlockReference | LoopContext):
            return super().call(__context, __obj, *args, **kwargs)
        given = [*args, *(value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars"))]
        method = getattr(__obj, "__wrapped__", __obj)  # of a string's format, in whose place jinja has put its own
        of = getattr(method, "__self__", None)
        if isinstance(of, str | bytes | list | tuple | dict | int | float):
            _spend_method(meter, of, method.__name__, given)
        else:
            meter.weigh(given)
        return _kept(meter, super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.key(argument))

    def pass_through(self, work: int) -> bool:
        """A loop's body, or a macro's, is begun once more."""
        meter = _meter.get()
        meter.turn()
        meter.spend(work)
        return True

    def compared(self, value: T) -> T:
        if value.__class__ not in (str, bool, int, float) and value is not None:
            _meter.get().weigh(value)
        elif isinstance(value, str) and len(value) > 64:
            _meter.get().spend(len(value) // 64)
        return value

    def joined(self, *values: Any) -> str:
        meter = _meter.get()
        for value in values:
            meter.spend(len(value) if isinstance(value, str) else meter.weigh(value))
        return "".join(map(str, values))

    def sliced(self, value: T) -> T:
        _meter.get().spend(len(value) if isinstance(value, str | list | tuple) else 1)
        return value

    def key(self, value: T) -> T:
        if isinstance(value, tuple):
            raise TemplateLimitExceeded("it has a list for a key")
        return value


class _MeteringTransformer(NodeTransformer):
    """Puts calls of the environment's methods around what is to be counted."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            test = _passing(self._environment, [node.test], node.lineno).node
            node.test = nodes.And(test, node.test, lineno=node.lineno, environment=self._environment)
        return self._counted_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._counted_body(node)

    def _counted_body(self, node: Any) -> nodes.Node:
        passing = _passing(self._environment, node.body, node.lineno)
        self.generic_visit(node)
        node.body.insert(0, passing)
        return node  # type: ignore[no-any-return]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call(self._environment, "compared", [node.expr])
        for operand in node.ops:
            operand.expr = _call(self._environment, "compared", [operand.expr])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(self._environment, "joined", node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call(self._environment, "sliced", [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call(self._environment, "key", [node.key])
        return node


def _call(environment: TemplateSandbox, method: str, given: Sequence[nodes.Expr]) -> nodes.Filter:
    """A call of an environment's method, as a filter whose name no template can write: jinja calls filters directly."""
    first, *others = given
    line = first.lineno
    return nodes.Filter(first, f" {method}", others, [], None, None, lineno=line, environment=environment)


def _passing(environment: TemplateSandbox, body: Sequence[nodes.Node], line: int) -> nodes.ExprStmt:
    """Counts what is in a body, but for the bodies in it, which count themselves."""
    work = nodes.Const(sum(map(_work, body)) + _NODE, lineno=line, environment=environment)
    return nodes.ExprStmt(_call(environment, "pass_through", [work]), lineno=line, environment=environment)


def _work(node: nodes.Node) -> int:
    own = len(node.data) if isinstance(node, nodes.TemplateData) else _NODE
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
        return own + sum(map(_work, node.iter_child_nodes(exclude=("body",))))
    return own + sum(map(_work, node.iter_child_nodes()))


@pass_context
def _shown(context: Context, value: T) -> T:
    """Counts what goes into the text. It asks for the context so that nothing is put into the text ahead of time."""
    meter = _meter.get()
    meter.spend(len(value) if isinstance(value, str) else meter.weigh(value))
    return value


def _bounded_test(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def bounded(*args: Any) -> Any:
        meter = _meter.get()
        for value in args:
            if not isinstance(value, TemplateSandbox):
                meter.weigh(value)
        return test(*args)

    return bounded


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(filter_, "jinja_pass_arg"))  # before the value comes what jinja passes of itself

    @wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        _spend_filter(meter, name, args[first], args[first + 1 :], kwargs)
        return _kept(meter, filter_(*args, **kwargs))

    return bounded


def _spend_filter(meter: WorkMeter, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *kwargs.values()]
    size = len(value) if isinstance(value, _SIZED) else 1
    texts, numbers = sum(map(meter.weigh, given)), _numbers(given)
    if name in ("length", "count", "first", "last", "default", "d", "attr"):
        meter.spend(texts // 8 + 1)
    elif isinstance(value, str):
        meter.spend((size + texts) // 8)
    else:
        meter.spend(size * (1 + texts // 8))
    match name:
        case "format":
            _spend_printf(meter, value if isinstance(value, str) else "%" * meter.weigh(value), given)
        case "indent":
            lines = len(value.splitlines()) + 1 if isinstance(value, str) else 1
            meter.spend(lines * (numbers + texts))
        case "join":
            meter.spend(meter.weigh(value) + size * texts)
        case "replace":
            _spend_replacing(meter, value if isinstance(value, str) else "?" * meter.weigh(value), given)
        case "round":
            meter.spend(numbers * numbers)
        case "tojson":
            weight, depth = meter.weigh(value), meter.deepest
            meter.spend(weight * (1 + numbers * depth + texts // _ELEMENT))
        case "trim":
            meter.spend(size * texts // 64)
        case "sum" if not all(isinstance(each, int | float | str) for each in given):
            raise TemplateLimitExceeded("it adds up what is no number")
        case _ if name in _SORTING:
            meter.spend(20 * meter.weigh(value))
        case _ if name not in _FREE_NUMBERS:
            meter.spend(numbers)
    if name in _LISTING and isinstance(value, str):
        meter.spend(8 * size)
    elif name in _WRITING and not isinstance(value, str):
        meter.weigh(value)


def _spend_method(meter: WorkMeter, of: Any, name: str, given: Sequence[Any]) -> None:
    allowed = next((names for kind, names in _METHODS.items() if isinstance(of, kind)), frozenset[str]())
    if name not in allowed:
        raise TemplateLimitExceeded(f"the method '{name}' of {type(of).__name__} is not offered to templates")
    weight = meter.weigh(given)
    if isinstance(of, list | tuple):
        meter.weigh(of)
    if not isinstance(of, str):
        return
    meter.spend(len(of) // 8)
    if name in _PADDING:
        meter.spend(_numbers(given))
    elif name in ("split", "rsplit", "splitlines"):
        meter.spend(64 * sum(map(of.count, given[:1] if given and isinstance(given[0], str) else _BLANKS)))
    elif name == "expandtabs":
        meter.spend((_numbers(given) or 8) * of.count("\t"))
    elif name in _STRIPPING:
        meter.spend(len(of) * weight // 64)
    elif name == "join":
        meter.spend(weight * (1 + len(of)))
    elif name == "replace":
        _spend_replacing(meter, of, given)
    elif name in ("format", "format_map"):
        _spend_format(meter, of, weight)


def _spend_replacing(meter: WorkMeter, text: str, given: Sequence[Any]) -> None:
    old, new = (str(each) for each in given[:2]) if len(given) >= 2 else ("x", "")
    meter.spend(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _spend_printf(meter: WorkMeter, form: str, values: Any) -> None:
    """Spend the work of `form % values`: a field is as wide as the number in it."""
    if re.search(r"%[-+ #0-9.]*\*", form):
        raise TemplateLimitExceeded("it computes the width of a field")
    meter.spend(len(form) + _numbers_in(form) + (form.count("%") + 1) * meter.weigh(values))


def _spend_format(meter: WorkMeter, form: str, weight: int) -> None:
    if any("{" in (spec or "") for _, _, spec, _ in Formatter().parse(form)):
        raise TemplateLimitExceeded("it computes the width of a field")
    meter.spend(len(form) + _numbers_in(form) + (form.count("{") + 1) * weight)


def _numbers_in(text: str) -> int:
    return sum(int(number) if len(number) < 10 else MAX_WORK for number in re.findall("[0-9]+", text))


def _numbers(values: Iterable[Any]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


def _times(value: Any, times: Any) -> int:
    """The size of `times` repetitions of a value, in characters: an element counts eight."""
    each = 1 if isinstance(value, str) else 8
    return len(value) * max(times, 0) * each if isinstance(times, int) else 0


def _kept(meter: WorkMeter, made: Any) -> Any:
    """The result of a filter or a method, an iterator as a list."""
    if isinstance(made, _COPIED):
        meter.spend(len(made))
    elif isinstance(made, Iterator):
        return list(_counted(meter, made))
    return meter.number(made)


def _counted(meter: WorkMeter, made: Iterable[T]) -> Iterator[T]:
    for each in made:
        meter.spend(_ELEMENT)
        yield each
