"""The sandbox of chat templates, which come from the internet or with a request.

Jinja's own does not limit time and memory: `'x' * 10 ** 10` is one operator. Here a `WorkMeter` counts the steps of a
rendering by the costs in `template_work.py`. Long chains of iterators and deep keys, which would overflow CPython's
stack, are not allowed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from math import inf
from typing import Any, TypeVar

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .template_work import (
    COPIED,
    DROPPED_FILTERS,
    ELEMENT_WORK,
    HASHED_PER_WORK,
    METERED_TESTS,
    TemplateLimitExceeded,
    WorkMeter,
    spend_filter,
    spend_function,
    spend_key,
    spend_method,
    spend_operator,
    spend_test,
)

MAX_SOURCE = 1 << 16
"""The most characters of a template: compiling takes up to 30 us for each."""
MAX_PYTHON = 1 << 16
"""The most characters of a request's template as Python source, about four for each of its own. Compiling them holds
the GIL for up to 50 ms."""

_NODE = 2
"""The work of any expression, in copied characters."""

T = TypeVar("T")

_meter: ContextVar[WorkMeter] = ContextVar("meter")


@contextmanager
def metered(meter: WorkMeter) -> Iterator[None]:
    """Count the work of the templates that are rendered in the block, in this thread."""
    token = _meter.set(meter)
    try:
        yield
    finally:
        _meter.reset(token)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A jinja2 sandbox whose templates count their work. Render what it has `compiled` in a `metered` block."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_shown, **options)
        del self.globals["lipsum"]
        for name in DROPPED_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded_filter(name, filter_) for name, filter_ in self.filters.items()}
        for method in (self.pass_through, self.compared, self.joined, self.sliced, self.key, self.spread):
            self.filters[f" {method.__name__}"] = method
        tests: Mapping[str, Any] = self.tests
        self.tests = {**tests, **{name: _bounded_test(name, tests[name]) for name in METERED_TESTS}}

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        """Offer one more filter, or replace one."""
        self.filters[name] = _bounded_filter(name, work)

    def compiled(self, source: str, most: float = inf) -> Template:
        """A template that counts its work, of at most `most` characters in Python. Raises whatever jinja and Python
        raise for a wrong source."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitExceeded(f"it has {len(source)} characters, and may have {MAX_SOURCE} at most")
        template = _MeteringTransformer(self).visit(self.parse(source))
        python: str = self.compile(template, raw=True)
        if len(python) > most:
            raise TemplateLimitExceeded(
                f"it is too long: in Python it has {len(python)} characters, and may have {most} at most"
            )
        return Template.from_code(self, compile(python, "<template>", "exec"), self.make_globals(None))

    # What compiled templates call

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter.get()
        spend_operator(meter, operator, left, right)
        result = super().call_binop(context, operator, meter.check_number(left), meter.check_number(right))
        return meter.check_number(result)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.turn()
        if isinstance(__obj, Macro | BlockReference | LoopContext):
            return super().call(__context, __obj, *args, **kwargs)
        arguments = [*args, *(value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars"))]
        method = getattr(__obj, "__wrapped__", __obj)  # of a string's format, in whose place jinja has put its own
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict | int | float):
            spend_method(meter, owner, method.__name__, arguments)
        else:
            spend_function(meter, __obj, arguments)
        return _counted_result(meter, super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        spend_key(_meter.get(), obj, self.key(argument))
        return super().getitem(obj, argument)

    def pass_through(self, work: int) -> bool:
        """Count a turn of a loop's body, or a call of a macro's."""
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

    def spread(self, values: T) -> T:
        """Count values that are spread over the arguments of a call."""
        meter = _meter.get()
        meter.spend(ELEMENT_WORK * len(values) if isinstance(values, str | range) else meter.weigh(values))
        return values


class _MeteringTransformer(NodeTransformer):
    """Puts calls of the environment's methods around what is to be counted."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> Any:
        if node.test is not None:
            test = self._passing([node.test], node.lineno).node
            node.test = nodes.And(test, node.test, lineno=node.lineno, environment=self._environment)
        return self._count_body(node)

    def _count_body(self, node: Any) -> Any:
        passing = self._passing(node.body, node.lineno)
        self.generic_visit(node)
        node.body.insert(0, passing)
        return node

    visit_Template = visit_Macro = visit_CallBlock = visit_Block = _count_body

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._call("compared", [node.expr])
        for operand in node.ops:
            operand.expr = self._call("compared", [operand.expr])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call("sliced", [node]) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._call("key", [node.key])
        return node

    def _spread_arguments(self, node: Any) -> Any:
        self.generic_visit(node)
        for field in ("dyn_args", "dyn_kwargs"):
            if getattr(node, field) is not None:
                setattr(node, field, self._call("spread", [getattr(node, field)]))
        return node

    visit_Call = visit_Filter = visit_Test = _spread_arguments

    def _call(self, method: str, arguments: Sequence[nodes.Expr]) -> nodes.Filter:
        """A call of the environment's method, as a filter, which jinja calls directly, with a name that no template can
        write."""
        first, *others = arguments
        line = first.lineno
        return nodes.Filter(first, f" {method}", others, [], None, None, lineno=line, environment=self._environment)

    def _passing(self, body: Sequence[nodes.Node], line: int) -> nodes.ExprStmt:
        """Counts the expressions in a body, except in bodies within it, which count themselves."""
        work = nodes.Const(sum(map(_work, body)) + _NODE, lineno=line, environment=self._environment)
        return nodes.ExprStmt(self._call("pass_through", [work]), lineno=line, environment=self._environment)


def _work(node: nodes.Node) -> int:
    own = len(node.data) if isinstance(node, nodes.TemplateData) else _NODE
    if isinstance(node, nodes.Dict):
        own += len(node.items) ** 2 // HASHED_PER_WORK
    if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
        return own + sum(map(_work, node.iter_child_nodes(exclude=("body",))))
    return own + sum(map(_work, node.iter_child_nodes()))


@pass_context
def _shown(context: Context, value: T) -> T:
    """Counts a value that goes into the text. It takes the context so that jinja does not call it while compiling."""
    meter = _meter.get()
    meter.spend(len(value) if isinstance(value, str) else meter.weigh(value))
    return value


def _bounded_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    first = _first_argument(test)

    @wraps(test)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        spend_test(_meter.get(), name, [*args[first:], *kwargs.values()])
        return test(*args, **kwargs)

    return bounded


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    first = _first_argument(filter_)

    @wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        spend_filter(meter, name, args[first], args[first + 1 :], kwargs)
        return _counted_result(meter, filter_(*args, **kwargs))

    return bounded


def _first_argument(function: Callable[..., Any]) -> int:
    """The index of the value that a filter or test is applied to, behind the object that jinja passes."""
    return int(hasattr(function, "jinja_pass_arg"))


def _counted_result(meter: WorkMeter, result: Any) -> Any:
    """The result of a filter or a method, with an iterator as a list."""
    if isinstance(result, COPIED):
        meter.spend(len(result))
    elif isinstance(result, Iterator):
        elements = []
        for element in result:
            meter.spend(ELEMENT_WORK)
            elements.append(element)
        return elements
    return meter.check_number(result)
