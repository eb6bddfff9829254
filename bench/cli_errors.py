"""The exit of a benchmark command that cannot run: one line on stderr, and status 1."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import CharoniaError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command at a `CharoniaError`, with its message alone."""
    try:
        yield
    except CharoniaError as error:
        print(f"charonia: {error.message}", file=sys.stderr)
        sys.exit(1)
