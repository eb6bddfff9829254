"""Where commands print tables to."""

import sys

from rich.console import Console

_WIDTH = 160
"""Of what is written to a file, in characters."""


def table_console() -> Console:
    """As wide as the terminal, and wide enough for any table where there is none. Text is printed as it is: names of
    models and tenants may look like markup."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, markup=False, highlight=False)
