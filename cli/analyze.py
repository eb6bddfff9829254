"""`charonia analyze`: what to analyze or to measure, and an end at signals that ends its servers too."""

from ..analyzer.analysis import analyze_models, measure_url
from ..analyzer.options import LevelOptions, SearchOptions
from ..bench.server_process import exit_on_signals
from ..core.errors import InvalidArgument
from .tables import table_console


def print_analysis(model: str | None, search_for: SearchOptions, load: LevelOptions) -> int:
    """Print what the analyzer finds; the exit status.

    Raises:
        CharoniaError: there is nothing to analyze, or the options mean nothing.
    """
    if (model is None) == (not search_for.url):
        what = "nothing" if model is None else "two things"
        raise InvalidArgument(f"{what} to analyze: name a repository or a checkpoint, or a server by --url")
    if model is not None and (search_for.api_key or search_for.allow_remote):
        raise InvalidArgument("--api-key and --allow-remote are for a server: name it by --url")
    with exit_on_signals():
        console = table_console()
        if model is None:
            return measure_url(search_for, load, console)
        return analyze_models(model, search_for, load, console)
