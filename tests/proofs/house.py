"""Figures of the code itself: `python -m tests.proofs.house [--root CHECKOUT] [--requests] [--verbose]`.

Counts the Python that a wheel ships without bench: lines, files, functions, words of docstrings, class names that stand
for two classes, methods that only forward, protocols that a single class fulfils, and what there is to read of the step
loop. With `--requests`, also the files whose functions one streamed chat and one binary ONNX infer call, in all
processes of a server, and the lines of those files: what is glued together is no less to read. Another checkout, with
an environment of its own, is measured by the same rules: a change of structure is judged by both.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.table import Table

from ..house_figures import MOST_WORDS, House, read_house
from .request_files import REQUESTS, files_of_request

app = App(name="python -m tests.proofs.house", help=__doc__)


def show(console: Console, house: House, verbose: bool) -> None:
    """Print the figures; with `verbose` also every folder, and the places of what is only counted otherwise."""
    table = Table("", "code", "total", "files", "words", "words a line", box=None)
    sums = [("shipped, without bench", house.size), ("to read of the step loop", house.step_loop)]
    for name, size in [*(house.folders.items() if verbose else ()), *sums]:
        numbers = (size.code, size.total, size.files, size.words)
        table.add_row(name, *map(str, numbers), f"{size.words / max(size.code, 1):.2f}")
    console.print(table)
    lengths = sorted(house.functions)
    ninth = lengths[int(len(lengths) * 0.9)]
    console.print(
        f"{len(lengths)} functions: median {statistics.median(lengths):g}, p90 {ninth}, longest {lengths[-1]}"
    )
    homonyms = [f"{name}: {', '.join(places)}" for name, places in house.homonyms.items()]
    for title, lines in {
        "class names used twice": homonyms,
        f"methods that only forward, {len(house.asked_forwarders)} of them as protocols ask": house.forwarders,
        "protocols with one class and no fake": house.lone_protocols,
        f"docstrings of more than {MOST_WORDS} words": house.long_docstrings,
    }.items():
        console.print(f"{len(lines)} {title}")
        if verbose:
            _list(console, lines)


def _list(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(f"  {line}", highlight=False, soft_wrap=True)


@app.default
def main(*, root: Path | None = None, requests: bool = False, verbose: bool = False) -> int:
    """Print the figures.

    Parameters
    ----------
    root
        The checkout, with its environment in .venv if `requests` are wanted; this one by default.
    requests
        Also start a server and count the files that requests pass.
    verbose
        Also name what was counted.
    """
    console = Console()
    here = Path(__file__).parents[2]
    python = Path(sys.executable) if root is None else root.absolute() / ".venv/bin/python"
    show(console, read_house(root or here), verbose)
    if requests:
        for name, traced in REQUESTS.items():
            files = files_of_request(python, (root or here).absolute(), traced)
            lines = sum((root or here).joinpath(file).read_text().count("\n") for file in files)
            console.print(f"{name} passes {len(files)} files of {lines} lines")
            if verbose:
                _list(console, files)
    return 0


if __name__ == "__main__":
    sys.exit(app())
