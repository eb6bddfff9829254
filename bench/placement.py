"""Engine threads and the frontend's priority, on cores that both share.

    python -m charonia.bench.placement CHECKPOINT [--streams 32] [--new 64] [--threads 1 2] [--nice 0 5]

A server for each combination, in turns: tokens a second, gaps between tokens, and the cores that frontend and engine
took. With `--busy`, clients keep the frontend's tokenizer at work beside the streams.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import App, Parameter
from rich.table import Table

from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..planning.requests import uniform_jobs
from .command import report_console
from .load.service_trials import TrialSizes, TrialTarget, speed, steady_gaps
from .server_process import CpuMeter, CpuSeconds, ServerAddress, fetch, first_model, own_server

_TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n" * 64

app = App(name="python -m charonia.bench.placement", help=__doc__)


class PlacementResult(NamedTuple):
    """The result of one combination: output tokens a second, median and 99th percentile of the inter-token latency in
    seconds, cores taken."""

    tokens: float
    itl: float
    slow: float
    cores: CpuSeconds | None


def measure_placement(
    checkpoint: Path, threads: int, nice: int, streams: int, busy: int, sizes: TrialSizes
) -> PlacementResult:
    """One server with so many engine threads, its frontend `nice`, under so many streams and `busy` other clients."""
    with own_server(str(checkpoint), "--threads", str(threads)) as at:
        yield_to_engine(at.pid, nice)
        asked = TrialTarget(at, first_model(at), open_checkpoint(checkpoint).spec.vocab_size)
        jobs = uniform_jobs([0.0] * streams, sizes.prompt, sizes.new)
        asked.put(jobs[:1])
        meter = CpuMeter(at.pid)
        with tokenizing(at, asked.model, busy):
            meter.start()
            outcome = asked.put(jobs, concurrency=streams)
            cores = meter.cores()
    itl, slow = np.percentile(steady_gaps(outcome.records), (50, 99))
    return PlacementResult(speed(outcome), float(itl), float(slow), cores)


def yield_to_engine(frontend: int | None, nice: int) -> None:
    """Every thread of the frontend becomes nicer; the engine, which is a process already, stays as it is."""
    if nice and frontend is not None:
        for task in Path(f"/proc/{frontend}/task").iterdir():
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


@contextmanager
def tokenizing(at: ServerAddress, model: str, clients: int) -> Iterator[None]:
    """So many clients that have a long text tokenized again and again."""
    enough = threading.Event()
    body = json.dumps({"model": model, "prompt": _TEXT}).encode()

    def ask() -> None:
        while not enough.is_set():
            fetch(at, "/tokenize", body)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join(30)


@app.default
def main(
    checkpoint: Path,
    *,
    streams: int = 32,
    new: int = 64,
    threads: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 2),
    nice: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (0, 5),
    busy: int = 0,
    repeats: int = 3,
) -> None:
    """Print a line for each combination and turn."""
    table = Table("threads", "nice", "tokens/s", "ITL ms", "p99 ms", "frontend cores", "engine cores")
    for _ in range(repeats):
        for count in threads:
            for level in nice:
                found = measure_placement(checkpoint, count, level, streams, busy, TrialSizes(new=new))
                taken = ("", "") if found.cores is None else tuple(f"{cores:.2f}" for cores in found.cores)
                figures = f"{found.tokens:.1f}", f"{found.itl * 1e3:.1f}", f"{found.slow * 1e3:.1f}"
                table.add_row(str(count), str(level), *figures, *taken)
    report_console().print(table)


if __name__ == "__main__":
    app()
