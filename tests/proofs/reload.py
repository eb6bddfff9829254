"""Unloading a model gives its memory back: `python -m tests.proofs.reload`.

A server loads an ONNX model of 200 MB, answers with it and unloads it, ten times. Its process may then hold at most
five percent more than after the first time, when the libraries were loaded.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from cyclopts import App
from rich.console import Console

from charonia.bench.server_process import ServerAddress, fetch, own_server

from ..onnx_models import write_mlp
from .process_stats import read_server_stats

NAME = "large"
SIZES = (512, 7168, 6656, 512)
"""54 million weights, 216 MB."""

_BAR = 0.05
_LOAD_SECONDS = 120
_UNLOAD_SECONDS = 30.0
_POLL_SECONDS = 0.05


app = App(name="python -m tests.proofs.reload", help=__doc__)


class ReloadRound(NamedTuple):
    """The bytes of the server's process with the model loaded, and after it was unloaded."""

    loaded: int
    unloaded: int


class ReloadResult(NamedTuple):
    """`before`: bytes before anything was loaded."""

    before: int
    rounds: Sequence[ReloadRound]

    @property
    def growth(self) -> float:
        """The growth of the memory without the model, from the first round to the last."""
        first, last = self.rounds[0].unloaded, self.rounds[-1].unloaded
        return last / first - 1


def reload(directory: Path, sizes: Sequence[int], rounds: int) -> ReloadResult:
    """Raises `Unavailable` if the server does not start, and `OSError` if it refuses something."""
    write_mlp(directory / NAME / "1" / "model.onnx", sizes)
    with own_server("--model-repository", str(directory), "--model-control-mode", "explicit") as place:
        before = read_server_stats(place).frontend.rss
        return ReloadResult(before, [_round(place, sizes[0]) for _ in range(rounds)])


def _round(place: ServerAddress, wide: int) -> ReloadRound:
    fetch(place, f"/v2/repository/models/{NAME}/load", {}, timeout=_LOAD_SECONDS)
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, wide], "data": [1.0] * wide}
    fetch(place, f"/v2/models/{NAME}/infer", {"inputs": [tensor]}, timeout=_LOAD_SECONDS)
    loaded = read_server_stats(place).frontend.rss
    fetch(place, f"/v2/repository/models/{NAME}/unload", {}, timeout=_LOAD_SECONDS)
    until = time.monotonic() + _UNLOAD_SECONDS
    while _is_there(place) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return ReloadRound(loaded, _settled(place))


def _settled(place: ServerAddress) -> int:
    """The memory once it shrinks no more: unloading goes on after its answer."""
    held = read_server_stats(place).frontend.rss
    for _ in range(round(_UNLOAD_SECONDS)):
        time.sleep(10 * _POLL_SECONDS)
        before, held = held, read_server_stats(place).frontend.rss
        if held > 0.99 * before:
            break
    return held


def _is_there(place: ServerAddress) -> bool:
    index = json.loads(fetch(place, "/v2/repository/index", {}))
    return any(entry.get("state") in ("READY", "UNLOADING") for entry in index)


@app.default
def run_reloads(*, rounds: int = 10) -> int:
    """Load and unload again and again; the exit code is 0 if the memory came back.

    Parameters
    ----------
    rounds
        Number of loads.
    """
    console = Console()
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        done = reload(Path(directory), SIZES, rounds)
    megabytes = [f"{each.loaded / 1e6:.0f} loaded, {each.unloaded / 1e6:.0f} after" for each in done.rounds]
    console.print(f"MB held: {done.before / 1e6:.0f} before; {'; '.join(megabytes)}", highlight=False)
    console.print(f"grown by {done.growth:.1%} since the first time; at most {_BAR:.0%} is allowed", highlight=False)
    return 0 if done.growth <= _BAR else 1


if __name__ == "__main__":
    sys.exit(app())
