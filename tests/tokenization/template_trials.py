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
    yield from (
        f"{{{{ {value}[{part}] }}}}" for value in VALUES for part in ("::number", "number", "text", ":number:-1")
    )


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
