"""Figures of the code itself: `python -m tests.proofs.house [--root CHECKOUT] [--requests] [--verbose]`.

Counts the Python that a wheel ships without bench/: lines, files, functions, class names that stand for two classes,
methods that only forward, and what there is to read of the step loop. With `--requests`, also the files whose functions
one streamed chat and one binary ONNX infer call, in all processes of a server. Another checkout, with an environment of
its own, is measured by the same rules: a change of structure is judged by both.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.table import Table

from ..house_figures import House, read_house
from .request_files import REQUESTS, files_of_request

app = App(name="python -m tests.proofs.house", help=__doc__)


def show(console: Console, house: House, verbose: bool) -> None:
    """Print the figures; with `verbose` also every folder, and the places of what is only counted otherwise."""
    table = Table("", "code", "total", "files", box=None)
    for name, size in [*(house.folders.items() if verbose else ()), ("shipped, without bench", house.size)]:
        table.add_row(name, str(size.code), str(size.total), str(size.files))
    step_loop = house.step_loop
    table.add_row("to read of the step loop", str(step_loop.code), str(step_loop.total), str(step_loop.files))
    console.print(table)
    lengths = sorted(house.functions)
    ninth = lengths[int(len(lengths) * 0.9)]
    console.print(
        f"{len(lengths)} functions: median {statistics.median(lengths):g}, p90 {ninth}, longest {lengths[-1]}"
    )
    console.print(f"{len(house.homonyms)} class names used twice, {len(house.forwarders)} methods that only forward")
    if verbose:
        _list(console, [f"{name}: {', '.join(places)}" for name, places in house.homonyms.items()])
        _list(console, house.forwarders)


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
            console.print(f"{name} passes {len(files)} files")
            if verbose:
                _list(console, files)
    return 0


if __name__ == "__main__":
    sys.exit(app())
