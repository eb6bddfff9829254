"""A language model that comes back: `python -m charonia.bench.on_demand CHECKPOINT [--precision int8] [--turns 8]`.

Two models of one checkpoint take turns in a memory that holds one, with a spare engine core and without. Each turn asks
the one that is not in memory, over HTTP, and takes the time until its first token; `--pause` seconds pass between
turns, in which a spare core gets ready.
"""

import json
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from cyclopts import App
from rich.console import Console

from .command import Count, run_command
from .server_process import ServerAddress, own_server
from .server_start import write_copies

_CACHE_BYTES = 256 << 20
_LIMIT = 1_700_000_000
"""Room for one model of half a billion weights in int8, and a spare core."""

app = App(name="python -m charonia.bench.on_demand", help=__doc__)


def first_token(place: ServerAddress, model: str) -> float:
    """Seconds from a request to the first piece of its stream, which is read to its end."""
    connection = HTTPConnection(place.host, place.http_port, timeout=120)
    body = {"model": model, "prompt": "one two three", "max_tokens": 4, "stream": True, "ignore_eos": True}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    answer.readline()
    seconds = time.perf_counter() - began
    answer.read()
    connection.close()
    return seconds


def take_turns(repository: Path, flags: Sequence[str], turns: int, pause: float) -> list[float]:
    """Seconds to the first token of each turn, after one turn of each model."""
    seconds = []
    with own_server("--model-repository", str(repository), "--load-on-demand", *flags) as place:
        for turn in range(turns + 2):
            time.sleep(pause)
            seconds.append(first_token(place, f"copy-{turn % 2:02}"))
    return seconds[2:]


@app.default
def main(checkpoint: Path, precision: str = "int8", turns: Count = 8, pause: float = 4.0, limit: int = _LIMIT) -> None:
    """Print what a model takes to come back.

    Parameters
    ----------
    checkpoint
        Of both models.
    precision
        In which they compute: bf16, int8 or int4.
    turns
        How often one comes back, for each of with and without a spare core.
    pause
        Seconds between turns.
    limit
        Bytes of memory, which should hold one model alone.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    engine = {"quantization": precision} if precision != "bf16" else {"dtype": "bfloat16"}
    settings = {**engine, "kv_cache_bytes": _CACHE_BYTES}
    flags = [f"--backend-config=charonia,{key}={value}" for key, value in settings.items()]
    flags += ["--memory-limit", str(limit), "--min-resident-secs", "0", "--model-idle-secs", "0"]
    with TemporaryDirectory() as scratch:
        repository = write_copies(Path(scratch), checkpoint, 2)
        for spares in (0, 1):
            seconds = take_turns(repository, [*flags, "--spare-cores", str(spares)], turns, pause)
            console.print(
                f"{precision}, {spares} spare cores: the first token of a model that comes back after"
                f" {median(seconds):.2f} s (of {turns}: {min(seconds):.2f} to {max(seconds):.2f})"
            )


if __name__ == "__main__":
    run_command(app)
