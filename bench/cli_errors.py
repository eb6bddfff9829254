"""How a command of this folder ends where something is wrong."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import CharoniaError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """An error that is meant for people ends the command with its message, and with nothing more."""
    try:
        yield
    except CharoniaError as error:
        print(f"charonia: {error.message}", file=sys.stderr)
        sys.exit(1)
