"""The frame of a benchmark command: checks of its flags, lines while it runs, tables, and the ways in which it ends."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Annotated, TypeAlias

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from ..core.errors import CharoniaError

Log: TypeAlias = Callable[[str], None]
"""Told a line about what is being measured."""

Positive = Parameter(validator=Number(gt=0))
Several = Parameter(consume_multiple=True, negative=())
Count = Annotated[int, Positive]
Counts = Annotated[tuple[int, ...], Parameter(consume_multiple=True, validator=Number(gt=0))]

_FILE_WIDTH = 160
"""Of what is written to a file, in characters."""


def report_console() -> Console:
    """As wide as the terminal, and wide enough for any table where there is none."""
    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def log_to(console: Console) -> Log:
    """A `Log` that prints lines as they are."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True)


def table_of(left: Sequence[str], right: Sequence[str], title: str | None = None) -> Table:
    """A table with columns of words on the `left` and of figures on the `right`."""
    table = Table(title=title)
    for name in left:
        table.add_column(name, no_wrap=len(left) == 1)
    for name in right:
        table.add_column(name, justify="right")
    return table


def seconds_of(action: Callable[[], object]) -> float:
    """How long one call takes."""
    began = perf_counter()
    action()
    return perf_counter() - began


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command at a `CharoniaError`: its message alone on stderr, and status 1."""
    try:
        yield
    except CharoniaError as error:
        print(f"charonia: {error.message}", file=sys.stderr)
        sys.exit(1)


def run_command(app: App) -> None:
    """Run the command and exit with what it returns. At SIGTERM it leaves by the way that ends its servers too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(app())
