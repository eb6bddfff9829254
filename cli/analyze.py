"""`charonia analyze`: what to analyze or to measure, and an end at SIGTERM that ends its servers too."""

import signal
import sys

from rich.console import Console

from ..analyzer.analysis import analyze_models, measure_url
from ..analyzer.options import LevelOptions, SearchOptions
from ..core.errors import InvalidArgument

_WIDTH = 160
"""Of what is written to a file, in characters."""


def print_analysis(model: str | None, search_for: SearchOptions, load: LevelOptions) -> int:
    """Print what the analyzer finds; the exit status.

    Raises:
        CharoniaError: there is nothing to analyze, or the options mean nothing.
    """
    if (model is None) == (not search_for.url):
        raise InvalidArgument("nothing to analyze: name a repository or a checkpoint, or a server by --url")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        if model is None:
            return measure_url(search_for, load, console)
        return analyze_models(model, search_for, load, console)
    finally:
        signal.signal(signal.SIGTERM, before)
