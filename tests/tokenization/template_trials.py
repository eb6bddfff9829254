"""Templates that ask everything that the sandbox offers for 10^7 of something, and what renders them."""

import gc
import time
from collections.abc import Iterator
from typing import Any

from charonia.processes.limited_process import Answer
from charonia.tokenization.chat_template import ENVIRONMENT_FAULTS, template_environment
from charonia.tokenization.template_sandbox import metered
from charonia.tokenization.template_work import OFFERED_METHODS, WorkMeter

MANY = 10_000_000
VALUES = ("text", "words", "number", "'x'")
ARGUMENTS = ("", "number", "text", "number, number", "number, text", "text, number", "text, text", "words")
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and")
PATHS = ("text", "number", "'0'", "'0.' * 1000 + '0'", "',' * 1000")
ELEMENT_TESTS = ("'eq', text", "'eq', 'x'", "'in', text", "'in', words", "'sameas', number", "'defined'", "'lower'")
NAMED_ARGUMENTS = (
    ("tojson", "indent=number"),
    ("tojson", "indent=text"),
    ("tojson", "separators=(text, text)"),
    ("indent", "width=number"),
    ("trim", "chars=text"),
    ("round", "method='ceil', precision=9"),
    ("batch", "linecount=number, fill_with='x'"),
    ("slice", "slices=number, fill_with='x'"),
)
METHOD_VALUES = {
    str: ("text", "'x'"),
    list: ("words",),
    tuple: ("pair",),
    dict: ("items",),
    int: ("number",),
    float: ("0.5",),
}


def trials() -> Iterator[str]:
    """The templates: every filter, test, function, method and operator with every value and arguments."""
    environment = template_environment()
    for name in sorted(environment.filters):
        if not name.startswith(" "):
            yield from (f"{{{{ {value} | {name}({given}) }}}}" for value in VALUES for given in ARGUMENTS)
            yield f"{{{{ words | map('{name}') | list }}}}"
    for name in sorted(environment.tests):
        if name.isidentifier():
            yield from (f"{{{{ {value} is {name}({given}) }}}}" for value in VALUES for given in ARGUMENTS)
    for name in sorted(environment.globals):
        yield from (f"{{{{ {name}({given}) }}}}" for given in (*ARGUMENTS, "'%c' * number", "'%9999999Y'", "a=text"))
    for kind, values in METHOD_VALUES.items():
        for name in sorted(OFFERED_METHODS[kind]):
            yield from (f"{{{{ {value}.{name}({given}) }}}}" for value in values for given in ARGUMENTS)
    for operator in OPERATORS:
        yield from (f"{{{{ {left} {operator} {right} }}}}" for left in VALUES for right in VALUES)
    yield from element_trials()
    yield from (
        f"{{{{ {value}[{part}] }}}}" for value in VALUES for part in ("::number", "number", "text", ":number:-1")
    )


def element_trials() -> Iterator[str]:
    """What filters do for each element, by arguments as long as can be, and those that are given by name."""
    for value in VALUES:
        for name in ("groupby", "map", "max", "min", "sort", "sum", "unique"):
            yield from (f"{{{{ {value} | {name}(attribute={path}) | list }}}}" for path in PATHS)
        for name in ("reject", "select"):
            yield from (f"{{{{ {value} | {name}({test}) | list }}}}" for test in ELEMENT_TESTS)
            yield from (f"{{{{ {value} | {name}attr({path}, {test}) }}}}" for path in PATHS for test in ELEMENT_TESTS)
        yield f"{{{{ {value} | map(attribute='.' * 1000, default='x') | list }}}}"
        yield from (f"{{{{ {value} | {name}('x', default=text) }}}}" for name in ("groupby", "map"))
        yield f"{{{{ {value} | join('', text) }}}}"
        yield from (f"{{{{ {value} | replace(new={new}, old={old}) }}}}" for new in VALUES for old in (*VALUES, "''"))
        yield from (f"{{{{ {value} | {name}({given}) }}}}" for name, given in NAMED_ARGUMENTS)
        yield f"{{% for i in {value} %}}{{{{ loop | reject }}}}{{% endfor %}}"
        yield f"{{% macro m() %}}{{{{ varargs | length }}}}{{% endmacro %}}{{{{ m(*{value}) }}}}"


def make_renderer() -> Answer:
    """What renders a template, and answers how that ended, and after how many seconds of the processor's time."""
    environment = template_environment()
    words = ["x" * 9] * (MANY // 10)
    variables: dict[str, Any] = {"text": "ab c\t%" * (MANY // 6), "number": MANY, "words": words}
    variables |= {"pair": ("a", words), "items": {"a": words, "b": 1}}

    def render(source: bytes) -> bytes:
        gc.collect()  # jinja's contexts are cycles: the memory that counts is one template's
        began = time.process_time()
        try:
            with metered(WorkMeter()):
                end = f"rendered: {len(environment.compiled(source.decode()).render(variables))}"
        except ENVIRONMENT_FAULTS as fault:
            end = f"refused: {type(fault).__name__}"
        return f"{end} after {time.process_time() - began:.2f}".encode()

    return render
